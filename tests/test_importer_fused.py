"""ONNX's kernels of attention, operator set 23 and later: imported, computed, differentiated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from op_samples import normal

from distsim.errors import ImportModelError
from distsim.importer import import_from_onnx
from distsim.interpret import SequentialExecutor
from distsim.transforms import add_loss, differentiate

Arrays = dict[str, np.ndarray]


def model_of(op_type: str, arrays: Arrays, outputs: list[str], opset: int = 23, **attributes: Any) -> Any:
    """One node that reads these arrays; a name that is empty is an operand left out."""
    types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(bool): TensorProto.BOOL}
    types[np.dtype(np.int64)] = TensorProto.INT64
    inputs = [
        helper.make_tensor_value_info(name, types[a.dtype], a.shape) for name, a in arrays.items() if a.size
    ]
    names = [name if a.size else "" for name, a in arrays.items()]
    node = helper.make_node(op_type, names, outputs, name="node", **attributes)
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs if name]
    graph = helper.make_graph([node], "g", inputs, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def assert_imports(
    folder: Path, op_type: str, arrays: Arrays, outputs: tuple[str, ...] = ("Y",), **attributes: Any
) -> list[str]:
    """What is imported computes what ONNX says; return the types of its ops."""
    model = model_of(op_type, arrays, list(outputs), **attributes)
    path = folder / "one.onnx"
    onnx.save(model, path)
    real = {name: a for name, a in arrays.items() if a.size}
    theirs = ReferenceEvaluator(model).run(None, real)
    function = import_from_onnx(path)
    ours = SequentialExecutor().compute(function, real.values())
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    return [op.op_type for op in function.ops]


def narrow(*shape: int, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed).astype(np.float32)


def qkv(*shapes: tuple[int, ...]) -> Arrays:
    return {name: narrow(*shape, seed=i) for i, (name, shape) in enumerate(zip("QKV", shapes, strict=True))}


FOUR = ((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 3))
FLAT = ((2, 6, 32), (2, 5, 16), (2, 5, 6))
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
NOTHING = np.zeros(0, np.float32)


@pytest.mark.parametrize("attributes", [{}, {"is_causal": 1, "scale": 0.2}, {"softcap": 2.0}], ids=str)
def test_attention_is_one_op(tmp_path: Path, attributes: dict[str, Any]) -> None:
    assert assert_imports(tmp_path, "Attention", qkv(*FOUR), **attributes) == ["Attention"]
    flat = assert_imports(
        tmp_path,
        "Attention",
        qkv(*FLAT),
        q_num_heads=4,
        kv_num_heads=2,
        qk_matmul_output_mode=0,
        **attributes,
    )
    assert flat == [*["Reshape"] * 3, *["Transpose"] * 3, "Attention", "Transpose", "Reshape"]


@pytest.mark.parametrize("shape", [(6, 5), (4, 1, 5), (2, 1, 6, 5)], ids=str)
def test_masks_of_attention(tmp_path: Path, shape: tuple[int, ...]) -> None:
    mask = narrow(*shape, seed=9)
    for each in (mask, mask > -0.8):
        assert assert_imports(tmp_path, "Attention", {**qkv(*FOUR), "mask": each}) == ["Attention"]


def test_windows_of_operator_set_25(tmp_path: Path) -> None:
    same = qkv((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 3))
    for window in ({"left_window_size": 2, "is_causal": 1}, {"left_window_size": 1, "right_window_size": 0}):
        assert assert_imports(tmp_path, "Attention", same, opset=25, **window) == ["Attention"]


def test_keys_and_values_are_handed_on(tmp_path: Path) -> None:
    made = ("Y", "present_key", "present_value")
    assert "Attention" in assert_imports(tmp_path, "Attention", qkv(*FLAT), made, **HEADS)


def test_a_cache_and_scores_are_written_out(tmp_path: Path) -> None:
    cache = {"past_key": narrow(2, 2, 3, 8, seed=7), "past_value": narrow(2, 2, 3, 3, seed=8)}
    arrays = {**qkv(*FOUR), "": NOTHING, **cache}
    ops = assert_imports(tmp_path, "Attention", arrays, ("Y", "k", "v"), is_causal=1)
    assert "Attention" not in ops and ops.count("MatMul") == 2


def test_scores_that_somebody_reads_are_computed_beside_the_kernel(tmp_path: Path) -> None:
    for outputs in (("Y", "", "", "scores"), ("Y", "k", "v", "scores")):
        ops = assert_imports(tmp_path, "Attention", qkv(*FOUR), outputs, is_causal=1)
        assert ops.count("Attention") == 1 and ops.count("MatMul") == 1
    (tmp_path / "one.onnx").unlink()
    model = model_of("Attention", qkv(*FOUR), ["Y", "", "", "scores"])
    onnx.save(model, tmp_path / "one.onnx")
    ready = add_loss(import_from_onnx(tmp_path / "one.onnx", parameters=("K", "V")), "mse")
    assert [op.op_type for op in ready.ops] == ["Attention", "Loss"]


def test_a_wider_softmax_than_that_of_the_kernel_is_written_out(tmp_path: Path) -> None:
    for number, kernel in ((TensorProto.FLOAT, True), (TensorProto.DOUBLE, False)):
        ops = assert_imports(tmp_path, "Attention", qkv(*FOUR), softmax_precision=number)
        assert ("Attention" in ops) == kernel


@pytest.mark.parametrize("attributes", [{}, {"interleaved": 1}, {"rotary_embedding_dim": 4}], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_rotary_embedding(tmp_path: Path, attributes: dict[str, Any], flat: bool) -> None:
    half = attributes.get("rotary_embedding_dim", 8) // 2
    x = narrow(2, 6, 32) if flat else narrow(2, 4, 6, 8)
    heads = {"num_heads": 4} if flat else {}
    around = ["Reshape"] * flat
    tables = {"cos": narrow(2, 6, half, seed=1), "sin": narrow(2, 6, half, seed=2)}
    ops = assert_imports(tmp_path, "RotaryEmbedding", {"x": x, **tables}, **attributes, **heads)
    assert ops == [*around, "RotaryEmbedding", *around]
    rows = {"cos": narrow(9, half, seed=1), "sin": narrow(9, half, seed=2)}
    picked = {**rows, "ids": np.array([[5, 0, 1, 8, 2, 3]] * 2)}
    ops = assert_imports(tmp_path, "RotaryEmbedding", {"x": x, **picked}, **attributes, **heads)
    assert ops == [*around, "RotaryEmbedding", *around]


def test_rms_normalization(tmp_path: Path) -> None:
    arrays = {"x": narrow(2, 6, 8), "scale": narrow(8, seed=1)}
    assert assert_imports(tmp_path, "RMSNormalization", arrays, axis=-1) == ["RMSNormalization"]


def test_heads_that_are_not_counted_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    onnx.save(model_of("Attention", qkv(*FLAT), ["Y"], q_num_heads=4), path)
    with pytest.raises(ImportModelError, match="kv_num_heads=0, which does not divide K: "):
        import_from_onnx(path)
    onnx.save(model_of("Attention", qkv(*FLAT), ["Y"], q_num_heads=5, kv_num_heads=1), path)
    with pytest.raises(ImportModelError, match="q_num_heads=5, which does not divide Q: "):
        import_from_onnx(path)


def test_a_model_of_operator_set_23_trains(tmp_path: Path) -> None:
    """Norm, projections, rotation and attention, each one op, and each with a gradient."""
    hidden, batch, seq = 8, 2, 6
    names = ("wq", "wk", "wv")
    values = {name: narrow(hidden, hidden, seed=i) for i, name in enumerate(names)}
    values |= {"scale": narrow(hidden), "cos": narrow(1, seq, 2, seed=5), "sin": narrow(1, seq, 2, seed=6)}
    nodes = [helper.make_node("RMSNormalization", ["x", "scale"], ["n"])]
    nodes += [helper.make_node("MatMul", ["n", name], [f"{name}.out"]) for name in names]
    nodes += [
        helper.make_node("RotaryEmbedding", [f"{n}.out", "cos", "sin"], [f"{n}.turned"], num_heads=2)
        for n in ("wq", "wk")
    ]
    read = ["wq.turned", "wk.turned", "wv.out"]
    nodes.append(helper.make_node("Attention", read, ["y"], is_causal=1, q_num_heads=2, kv_num_heads=2))
    shape = [batch, seq, hidden]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    joint = differentiate(add_loss(import_from_onnx(tmp_path / "m.onnx")))
    assert {v.name for v in joint.outputs[1:]} == {"wq.new", "wk.new", "wv.new", "scale.new"}
    types = [op.op_type for op in joint.ops]
    for name in ("Attention", "RotaryEmbedding", "RMSNormalization"):
        assert types.count(name) == types.count(f"{name}Grad") == (2 if name == "RotaryEmbedding" else 1)
