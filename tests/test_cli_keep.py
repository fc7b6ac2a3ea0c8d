"""What the command line says of outputs that the loss does not need, and keeps of them."""

import numpy as np
import pytest
from cli_cases import run
from onnx import TensorProto, helper, numpy_helper, save

from distsim.cli import main


@pytest.fixture
def model(tmp_path):
    """Six products one after the other as an ONNX file, with a second output off the first."""
    shapes = {f"w{index}": (16, 16) for index in range(6)} | {"p": (16, 16)}
    stored = [numpy_helper.from_array(np.ones(s, np.float32), name) for name, s in shapes.items()]
    nodes, x = [], "x"
    for index in range(6):
        nodes.append(helper.make_node("MatMul", [x, f"w{index}"], [f"a{index}"]))
        nodes.append(helper.make_node("Relu", [f"a{index}"], [x := f"h{index}"]))
    nodes.append(helper.make_node("MatMul", ["h0", "p"], ["pooled"]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 16]) for n in ("x", "h5", "pooled")]
    graph = helper.make_graph(nodes, "two", ends[:1], ends[1:], stored)
    path = tmp_path / "two.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_the_command_line_says_what_is_left_out_and_keeps_what_is_asked_for(model, capsys):
    plan = "pp=4,dp=2,zero=3,reshard=never"
    given = ("simulate", model, "--batch", 8, "--cluster", "dgx-a100", "--plan", plan)
    out, _ = run(capsys, *given)
    assert "\nnote: left out, as the loss does not need it: 1 output (pooled), 1 op, 1 parameter (p)" in out
    kept, _ = run(capsys, *given, "--keep", "pooled", "--keep", "h5")
    assert "left out" not in kept
    rows = [line.split() for text in (out, kept) for line in text.splitlines()]
    assert [row[2] for row in rows if row[:1] == ["MatMul"]] == ["12", "14"]  # of two ranks
    shown, _ = run(capsys, "show", model, "--batch", 8, "--training")
    assert shown.startswith("# left out, as the loss does not need it: 1 output (pooled)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--plan", "pp=2", "--keep", "pool"), "has no output 'pool'; it has h5, pooled"),
        (("--partition", "single", "--keep", "pooled"), "--keep is for training"),
    ],
)
def test_what_cannot_be_kept_is_refused(model, capsys, options, said):
    assert main(["simulate", str(model), "--batch", "8", "--cluster", "dgx-a100", *options]) == 2
    assert said in capsys.readouterr().err


def test_keep_without_training_is_refused(model, capsys):
    assert main(["show", str(model), "--batch", "8", "--keep", "pooled"]) == 2
    assert "--keep has no effect" in capsys.readouterr().err
