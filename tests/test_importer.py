"""ONNX files become functions that compute the same; real exports import whole and static."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from importer_models import (
    assert_same,
    f32,
    info,
    save,
)
from onnx import TensorProto, helper, numpy_helper

from distsim.errors import ImportModelError
from distsim.importer import import_from_onnx, symbolic_dimensions
from distsim.ir import Role, verify

DATA = Path(__file__).parent / "data"


GPT2 = Path(__file__).parents[1] / "distsim" / "models" / "data" / "gpt2.onnx"
LIGHT = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx"))
REFERENCE = Path(os.environ.get("DISTSIM_REFERENCE", "/nonexistent")) / "onnx"
SHAPE_OPS = {"Shape", "Size", "Range", "ConstantOfShape", "GatherND", "CumSum", "NonZero", "Slice", "Concat"}


def kinds(function):
    return Counter(op.op_type for op in function.ops)


# Real models


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_light_models_of_the_onnx_package(path):
    function = import_from_onnx(path)
    verify(function)
    assert len(function.inputs_with(Role.INPUT)) == 1
    assert not {"ConstantOfShape", "Constant"} & set(kinds(function))
    model = onnx.load(path)
    fills = sum(node.op_type == "ConstantOfShape" for node in model.graph.node)
    assert len(function.parameters) >= fills
    assert function.outputs[0].name == model.graph.output[0].name


def test_alexnet_has_its_published_number_of_parameters():
    # Krizhevsky et al. 2012 with grouped convolutions, as in Caffe's bvlc_alexnet: 60,965,224.
    path = next(path for path in LIGHT if "alexnet" in path.stem)
    assert sum(value.type.size for value in import_from_onnx(path).parameters) == 60_965_224


def test_left_out_weights_take_no_memory():
    path = next(path for path in LIGHT if "vgg19" in path.stem)
    function, values = import_from_onnx(path, load_values=True)
    assert set(values) == {value.name for value in function.parameters}
    largest = max(values.values(), key=lambda array: array.size)
    assert largest.nbytes > 4e8 and largest.strides == (0,) * largest.ndim
    assert float(largest.flat[0]) == pytest.approx(0.02)


def test_mlp_export_without_its_weights():
    function = import_from_onnx(DATA / "mlp.onnx")
    assert kinds(function) == {"Gemm": 8, "Relu": 8}
    assert len(function.parameters) == 16
    assert [op.name for op in function.ops[:2]] == ["0/node_linear", "1/node_relu"]
    with pytest.raises(ImportModelError, match="load_values"):
        import_from_onnx(DATA / "mlp.onnx", load_values=True)


def test_gpt2_is_static_and_has_no_shape_arithmetic():
    assert symbolic_dimensions(GPT2) == ("batch", "seq")
    function = import_from_onnx(GPT2, batch=3, seq=16)
    assert not SHAPE_OPS & set(kinds(function))
    assert kinds(function)["Gather"] == 2  # the two embeddings
    assert function.outputs[0].type.shape == (3, 16, 50257)
    assert sum(value.type.size for value in function.parameters) == 124_439_808  # Hugging Face's gpt2
    assert function.name == "gpt2"
    assert "model.transformer.h.3.mlp.c_proj" in {op.name.split("/")[0] for op in function.ops}


def test_gpt2_ops_and_constants_do_not_depend_on_the_batch():
    small, large = import_from_onnx(GPT2, batch=1, seq=64), import_from_onnx(GPT2, batch=64, seq=64)
    assert kinds(small) == kinds(large)
    masks = [[op.outputs[0].type for op in f.ops if op.op_type == "Constant"] for f in (small, large)]
    assert masks[0] == masks[1]
    assert any(type_.shape == (1, 1, 64, 64) for type_ in masks[0])


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ImportModelError, match=r"indices 0 to 1024 .* 1024 entries"):
        import_from_onnx(GPT2, batch=1, seq=1025)


REFERENCE_FILES = [
    ("bert-base", {}, 440),
    ("gpt2-dynamic", {"batch": 2, "seq": 128}, 526),
    ("gpt2-forward-backward", {"parameters": ["p_*"]}, 1842),
    ("llama-56m", {}, 524),
    ("mlp", {}, 16),
    ("resnet50", {}, 122),
]


@pytest.mark.parametrize(("name", "arguments", "ops"), REFERENCE_FILES)
def test_reference_exports(name, arguments, ops):
    path = REFERENCE / f"{name}.onnx"
    if not path.exists():
        pytest.skip("set DISTSIM_REFERENCE to the folder of reference exports")
    function = import_from_onnx(path, **arguments)
    verify(function)
    assert len(function.ops) == ops
    assert not {"Shape", "Size", "Range"} & set(kinds(function))


# Models that compute the same as in onnx.reference


@pytest.mark.parametrize("opset", [7, 9, 13, 20])
def test_mlp(tmp_path, opset):
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], "fc1", transB=1),
        helper.make_node("Relu", ["h"], ["a"], "act"),
        helper.make_node("MatMul", ["a", "w2"], ["m"], "fc2"),
        helper.make_node("Mul", ["half", "m"], ["s"], "scale"),
        helper.make_node("Softmax", ["s"], ["y"], "soft", axis=-1 if opset > 11 else 1),
    ]
    stored = {"w1": f32(5, 4), "b1": f32(5), "w2": f32(5, 3), "half": np.float32(0.5).reshape(())}
    path = save(tmp_path / "m.onnx", nodes, [info("x", [2, 4])], [info("y", [2, 3])], stored, opset)
    function = assert_same(path, {"x": f32(2, 4)})
    assert [op.name for op in function.ops] == ["fc1", "act", "fc2", "scale", "soft"]
    assert [value.name for value in function.parameters] == ["w1", "b1", "w2"]
    assert float(function.ops[3].attributes["A"].array) == 0.5  # a static operand, not an input


@pytest.mark.parametrize("opset", [9, 13, 20])
def test_cnn(tmp_path, opset):
    axes = {"axes": [2, 3]} if opset < 18 else {}
    # onnx.reference takes BatchNormalization before opset 14 for training, whatever its outputs.
    norm = opset >= 14
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        *([helper.make_node("BatchNormalization", ["c", "g", "b", "mean", "var"], ["n"])] if norm else []),
        helper.make_node("Relu", ["n" if norm else "c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("ReduceMean", ["p"] if axes else ["p", "axes"], ["a"], keepdims=0, **axes),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n0"]),
        helper.make_node("Unsqueeze", ["n0"], ["n1"], axes=[0])
        if opset < 13
        else helper.make_node("Unsqueeze", ["n0", "zeros"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["a", "to"], ["y"]),
    ]
    stored = {
        "w": f32(6, 3, 3, 3),
        "g": f32(6),
        "b": f32(6),
        "mean": f32(6),
        "var": np.abs(f32(6)) + 1,
        "axes": np.array([2, 3]),
        "zero": np.array(0),
        "zeros": np.array([0]),
        "rest": np.array([-1]),
    }
    x, y = info("x", ["n", 3, 8, 8]), info("y", ["n", 6])
    path = save(tmp_path / "m.onnx", nodes, [x], [y], stored, opset)
    function = assert_same(path, {"x": f32(2, 3, 8, 8)}, n=2)
    between = ["BatchNormalization"] if norm else []
    assert list(kinds(function)) == ["Conv", *between, "Relu", "MaxPool", "ReduceMean", "Reshape"]
    assert len(function.parameters) == (5 if norm else 1)


def attention_function():
    """softmax(q k^T * scale) v as a local function with an attribute and a nested function."""
    scaled = helper.make_function(
        "local",
        "Scaled",
        ["t", "by"],
        ["s"],
        [helper.make_node("Mul", ["t", "by"], ["s"], "mul")],
        [helper.make_opsetid("", 20)],
    )
    axis = helper.make_node("Softmax", ["s"], ["p"], "soft")
    axis.attribute.append(
        onnx.AttributeProto(name="axis", ref_attr_name="axis", type=onnx.AttributeProto.INT)
    )
    attention = helper.make_function(
        "local",
        "Attention",
        ["q", "k", "v", "by"],
        ["out"],
        [
            helper.make_node("Transpose", ["k"], ["kt"], "turn", perm=[0, 2, 1]),
            helper.make_node("MatMul", ["q", "kt"], ["scores"], "scores"),
            helper.make_node("Scaled", ["scores", "by"], ["s"], "scaled", domain="local"),
            axis,
            helper.make_node("MatMul", ["p", "v"], ["out"], "mix"),
        ],
        [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)],
        attributes=["axis"],
    )
    return [scaled, attention]


def test_attention_as_a_local_function_with_dynamic_sizes(tmp_path):
    nodes = [
        *[helper.make_node("MatMul", ["x", f"w{n}"], [n], f"to_{n}") for n in "qkv"],
        helper.make_node("Attention", ["q", "k", "v", "by"], ["y"], "attn", domain="local", axis=-1),
    ]
    stored = {f"w{n}": f32(8, 8) for n in "qkv"} | {"by": np.array(8**-0.5, np.float32)}
    shape = ["batch", "seq", 8]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [info("x", shape)],
        [info("y", shape)],
        stored,
        functions=attention_function(),
        extra_opsets=[helper.make_opsetid("local", 1)],
    )
    assert symbolic_dimensions(path) == ("batch", "seq")
    function = assert_same(path, {"x": f32(2, 5, 8)}, batch=2, seq=5)
    names = [op.name for op in function.ops[3:]]
    assert names == ["attn/turn", "attn/scores", "attn/scaled/mul", "attn/soft", "attn/mix"]


def test_an_operator_that_onnx_defines_by_others(tmp_path):
    nodes = [helper.make_node("MeanVarianceNormalization", ["x"], ["y"], "norm", axes=[0, 2])]
    x = info("x", [2, 4, 3])
    path = save(tmp_path / "m.onnx", nodes, [x], [info("y", [2, 4, 3])], {}, 21)
    function = assert_same(path, {"x": f32(2, 4, 3)})
    assert len(function.ops) > 1 and all(op.name.startswith("norm") for op in function.ops)


def test_a_known_condition_is_decided(tmp_path):
    def branch(name, op_type):
        node = helper.make_node(op_type, ["x", "one"], [f"{name}_out"], name)
        return helper.make_graph([node], name, [], [info(f"{name}_out", None)])

    nodes = [
        helper.make_node("Size", ["x"], ["size"]),
        helper.make_node("Greater", ["size", "four"], ["big"]),
        helper.make_node(
            "If", ["big"], ["y"], "if", then_branch=branch("t", "Add"), else_branch=branch("e", "Sub")
        ),
    ]
    stored = {"one": np.float32(1).reshape(()), "four": np.array(4)}
    path = save(tmp_path / "m.onnx", nodes, [info("x", ["n"])], [info("y", ["n"])], stored)
    assert kinds(assert_same(path, {"x": f32(3)}, n=3)) == {"Sub": 1}
    assert kinds(assert_same(path, {"x": f32(5)}, n=5)) == {"Add": 1}


def test_optional_operands_and_outputs(tmp_path):
    nodes = [
        helper.make_node("Clip", ["x", "", "top"], ["c"]),
        helper.make_node("Resize", ["c", "", "scales"], ["r"], mode="nearest"),
        helper.make_node("Dropout", ["r"], ["d", "unused_mask"]),
        helper.make_node("TopK", ["d", "k"], ["unused", "index"], axis=1),
        helper.make_node("Split", ["d"], ["s0", "s1"], axis=1, num_outputs=2),
        helper.make_node("Neg", ["s1"], ["y"]),
        helper.make_node("Exp", ["x"], ["dead"]),
    ]
    stored = {
        "top": np.float32(0.5).reshape(()),
        "scales": np.array([1, 2], np.float32),
        "k": np.array([2]),
        "dead_weight": f32(3, 3),
    }
    outputs = [info("y", [2, 4]), info("index", [2, 2], TensorProto.INT64)]
    path = save(tmp_path / "m.onnx", nodes, [info("x", [2, 4])], outputs, stored)
    function = assert_same(path, {"x": f32(2, 4)})
    assert [value.name for value in function.inputs] == ["x"]
    assert "Exp" not in kinds(function)
    assert len(next(op for op in function.ops if op.op_type == "Dropout").outputs) == 1


def test_an_empty_place_before_the_last_value(tmp_path):
    nodes = [helper.make_node("Clip", ["x", "", "top"], ["y"])]
    inputs = [info("x", [3]), info("top", [])]
    path = save(tmp_path / "m.onnx", nodes, inputs, [info("y", [3])])
    function = assert_same(path, {"x": f32(3), "top": np.float32(0).reshape(())})
    assert function.ops[0].attributes["absent"] == ("min",)


def test_outputs_that_are_constants_inputs_or_aliases(tmp_path):
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Relu", ["x"], ["r"]),
    ]
    outputs = [
        info("shape", [2], TensorProto.INT64),
        info("same", [2, 3]),
        info("x", [2, 3]),
        info("r", [2, 3]),
    ]
    path = save(tmp_path / "m.onnx", nodes, [info("x", [2, 3])], outputs)
    assert kinds(assert_same(path, {"x": f32(2, 3)})) == {"Constant": 1, "Identity": 1, "Relu": 1}


def test_a_mask_keeps_no_batch_and_a_constant_is_made_once(tmp_path):
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Expand", ["row", "shape"], ["mask"]),
        helper.make_node("Add", ["x", "mask"], ["a"]),
        helper.make_node("Mul", ["mask", "a"], ["y"]),
        helper.make_node("MatMul", ["y", "mask"], ["z"]),  # not element-wise: needs all of it
    ]
    x = info("x", ["n", 3, 3])
    path = save(
        tmp_path / "m.onnx", nodes, [x], [info("z", ["n", 3, 3])], {"row": np.arange(3.0).astype("f")}
    )
    weights = assert_same(path, {"x": f32(2, 3, 3)}, n=2)
    assert [value.name for value in weights.parameters] == ["row"]
    constant = helper.make_node(
        "Constant", [], ["row"], value=numpy_helper.from_array(np.arange(3.0).astype("f"))
    )
    path = save(tmp_path / "m.onnx", [constant, *nodes], [x], [info("z", ["n", 3, 3])])
    function = assert_same(path, {"x": f32(2, 3, 3)}, n=2)
    shapes = [op.outputs[0].type.shape for op in function.ops if op.op_type == "Constant"]
    assert shapes == [(1, 1, 3), (2, 3, 3)]


def test_what_is_large_is_computed_when_the_model_runs(tmp_path):
    constant = helper.make_node("Constant", [], ["row"], value=numpy_helper.from_array(f32(1, 3)))
    nodes = [
        constant,
        helper.make_node("Expand", ["row", "wide"], ["big"]),
        helper.make_node("MatMul", ["big", "x"], ["y"]),
    ]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [info("x", [3, 1])],
        [info("y", [2**20, 1])],
        {"wide": np.array([2**20, 3])},
    )
    function = assert_same(path, {"x": f32(3, 1)})
    assert list(kinds(function)) == ["Constant", "Expand", "MatMul"]
    assert function.ops[0].outputs[0].type.shape == (1, 3)
