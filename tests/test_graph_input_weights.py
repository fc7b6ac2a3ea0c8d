"""Exports whose weights are graph inputs: forward only, and with a backward pass of their own."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save
from test_parallel_equivalence import assert_plan, case_of
from training_models import F64, Maker

from distsim.cli import main
from distsim.errors import PlanError
from distsim.importer import import_from_onnx
from distsim.ir.dead import brings_backward
from distsim.plan import Plan
from distsim.transforms import SGD, add_loss, differentiate, outline, set_precision

FLOATS = TensorProto.FLOAT
WEIGHTS = {"m.up": [8, 16], "m.scale": [], "m.down": [16, 8]}
FORWARD = [
    ("MatMul", ["x", "m.up"], "a"),
    ("Mul", ["a", "m.scale"], "scaled"),
    ("Relu", ["scaled"], "r"),
    ("MatMul", ["r", "m.down"], "y"),
]
BACKWARD = [
    ("Sub", ["y", "t"], "d"),
    ("Mul", ["d", "d"], "squares"),
    ("ReduceMean", ["squares"], "loss"),
    ("Mul", ["d", "two"], "dy"),
    ("Transpose", ["r"], "r'"),
    ("MatMul", ["r'", "dy"], "ddown"),
    ("Transpose", ["m.down"], "down'"),
    ("MatMul", ["dy", "down'"], "dr"),
    ("Greater", ["scaled", "zero"], "on"),
    ("Where", ["on", "dr", "zero"], "dscaled"),
    ("Mul", ["dscaled", "m.scale"], "da"),
    ("Transpose", ["x"], "x'"),
    ("MatMul", ["x'", "da"], "dup"),
]
PLANS = [Plan(2, 1, 1, 1), Plan(1, 2, 1, 1), Plan(1, 1, 2, 2), Plan(2, 2, 2, 2)]


def written(folder, joint: bool) -> str:
    nodes = [
        helper.make_node(kind, inputs, [output], **({"keepdims": 0} if kind == "ReduceMean" else {}))
        for kind, inputs, output in (FORWARD + BACKWARD if joint else FORWARD)
    ]
    data = {"x": [8, 8], "t": [8, 8]} if joint else {"x": [8, 8]}
    ends = {"loss": [], "dup": [8, 16], "ddown": [16, 8]} if joint else {"y": [8, 8]}
    stored = [numpy_helper.from_array(np.array(v, np.float32), n) for n, v in (("two", 2 / 64), ("zero", 0))]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, FLOATS, shape) for name, shape in values.items()]
        for values in (WEIGHTS | data, ends)
    )
    graph = helper.make_graph(nodes, "model", inputs, outputs, stored if joint else [])
    path = str(folder / "model.onnx")
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
def test_every_plan_computes_the_same_step(joint, tmp_path):
    function = set_precision(import_from_onnx(written(tmp_path, joint), parameters=["m.*"]), F64)
    assert brings_backward(function) is joint
    known = case_of(function if joint else differentiate(add_loss(function), SGD(lr=0.1)))
    for plan in PLANS:
        assert_plan(known, plan)


def test_an_export_without_a_backward_pass_gets_one(tmp_path, capsys):
    """Its weights being graph inputs does not make it a training step."""
    path = written(tmp_path, joint=False)
    assert main(["show", path, "--parameters", "m.*", "--training", "--loss", "mse"]) == 0
    out = capsys.readouterr().out
    assert "m.up: f32[8, 16],  # parameter" in out and "AdamOptimizer" in out


def test_an_export_with_its_own_backward_pass_is_taken_as_it_is(tmp_path, capsys):
    path = written(tmp_path, joint=True)
    assert main(["show", path, "--parameters", "m.*", "--training"]) == 0
    captured = capsys.readouterr()
    assert "m.up: f32[8, 16],  # parameter" in captured.out
    assert "differentiating" not in captured.err
    for option, value in (("--loss", "mse"), ("--optimizer", "sgd"), ("--keep", "dup")):
        assert main(["show", path, "--parameters", "m.*", "--training", option, value]) == 2
        assert f"brings its own backward pass, which decides that: no {option}\n" in capsys.readouterr().err


def test_an_output_like_a_weight_is_no_backward_pass():
    """Predictions of a weight's shape, and running statistics, which are like the scale."""
    make = Maker("forward")
    x, target, w = make.data("x", 8, 8), make.data("target", 8, 8), make.parameter("w", 8, 8)
    vectors = [make.parameter(name, 8) for name in ("scale", "bias", "mean", "var")]
    options = {"training_mode": 1, "outputs": 3}
    y, *running = make.add("BatchNormalization", [make("MatMul", x, w), *vectors], options)
    hidden = make("Relu", y)
    prediction = make("MatMul", hidden, w)
    loss = make("Loss", prediction, target, N=8)
    make.set_outputs([loss, prediction, make("Tanh", hidden), *running])
    forward = make.finalize()
    assert not brings_backward(forward) and not brings_backward(outline(forward))
    for optimizer in (None, SGD()):
        joint = differentiate(forward, optimizer)
        assert brings_backward(joint) and brings_backward(outline(joint))


def test_where_no_input_is_a_parameter_the_error_says_how_to_name_them(tmp_path):
    function = import_from_onnx(written(tmp_path, joint=False))
    with pytest.raises(PlanError, match=r"--parameters PATTERN.*inputs are m\.up, m\.scale, m\.down, x"):
        differentiate(add_loss(function), SGD())
    with pytest.raises(PlanError, match=r"no loss to tell.*--parameters PATTERN.*m\.up, m\.scale"):
        assert_plan(case_of(function), Plan(1, 2, 1, 1))
