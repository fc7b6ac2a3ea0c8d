"""Sound small ONNX models for the fuzz of damaged files: one of each operator, and whole networks.

In a model of one operator a weight comes before it, so that its gradient is asked for, and what ONNX
takes as a tensor of numbers (axes, shapes, pads) is an initializer, so that it can be damaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
SMALL_LIGHT = ("bvlc_alexnet", "zfnet512", "vgg19", "squeezenet")
"""The models of the onnx package with fewer than a hundred nodes."""

Operand = tuple[int, ...] | np.ndarray[Any, Any] | None
"""The shape of a floating-point input, a stored array, or nothing: an optional operand left out."""


def weight(*shape: int) -> np.ndarray[Any, Any]:
    """Return stored numbers between -1 and 1."""
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def ints(*numbers: int) -> np.ndarray[Any, Any]:
    """Return a stored vector of integers."""
    return np.array(numbers, np.int64)


def scalar(number: float, kind: Any = np.int64) -> np.ndarray[Any, Any]:
    """Return a stored number."""
    return np.array(number, kind)


W = weight
PLANE = (2, 4, 6, 6)
CASES: tuple[tuple[str, Sequence[Operand], dict[str, Any]], ...] = (
    *(
        (name, [(4, 6)], {})
        for name in ["Relu", "Exp", "Sqrt", "Tanh", "Erf", "Sigmoid", "Softplus", "Floor", "Sign"]
    ),
    *(
        (name, [(4, 6), W(6)], {})
        for name in ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "PRelu", "Greater"]
    ),
    *((name, [(4, 6)], {"axis": 1}) for name in ["Softmax", "LogSoftmax", "Hardmax"]),
    *((name, [(4, 6), ints(1)], {"keepdims": 0}) for name in ["ReduceSum", "ReduceMean", "ReduceMax"]),
    *((name, [(4, 6)], {"axis": 1, "keepdims": 0}) for name in ["ArgMax", "ArgMin"]),
    ("LeakyRelu", [(4, 6)], {"alpha": 0.1}),
    ("Gelu", [(4, 6)], {"approximate": "tanh"}),
    ("Clip", [(4, 6), scalar(-1, np.float32), scalar(1, np.float32)], {}),
    ("Cast", [(4, 6)], {"to": TensorProto.FLOAT16}),
    ("Dropout", [(4, 6), scalar(0.5, np.float32)], {"seed": 1}),
    ("MatMul", [(2, 4, 6), W(6, 3)], {}),
    ("Gemm", [(4, 8), W(8, 6), W(6)], {"alpha": 0.5, "beta": 2.0}),
    ("Gemm", [(8, 4), W(6, 8), W(4, 6)], {"transA": 1, "transB": 1}),
    ("Einsum", [(2, 4, 6), W(2, 6, 3)], {"equation": "bij,bjk->bik"}),
    ("Einsum", [(2, 4, 6), W(6, 3)], {"equation": "...i,ij"}),
    ("Conv", [PLANE, W(8, 4, 3, 3), W(8)], {"pads": [1, 1, 1, 1], "strides": [2, 2], "dilations": [1, 1]}),
    ("Conv", [PLANE, W(4, 1, 3, 3)], {"group": 4, "auto_pad": "SAME_UPPER", "kernel_shape": [3, 3]}),
    ("Conv", [(2, 4, 9), W(2, 4, 3)], {"dilations": [2]}),
    ("ConvTranspose", [PLANE, W(4, 2, 3, 3)], {"strides": [2, 2], "output_padding": [1, 1], "pads": [1] * 4}),
    ("ConvTranspose", [PLANE, W(4, 2, 3, 3)], {"output_shape": [13, 13], "strides": [2, 2]}),
    ("MaxPool", [PLANE], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 1}),
    ("AveragePool", [PLANE], {"kernel_shape": [2, 2], "strides": [2, 2], "count_include_pad": 1}),
    ("LpPool", [PLANE], {"kernel_shape": [2, 2], "p": 2}),
    ("GlobalAveragePool", [PLANE], {}),
    ("GlobalMaxPool", [PLANE], {}),
    ("LRN", [PLANE], {"size": 3, "alpha": 0.001}),
    ("BatchNormalization", [PLANE, W(4), W(4), W(4), np.ones(4, np.float32)], {"epsilon": 1e-5}),
    ("InstanceNormalization", [PLANE, W(4), W(4)], {}),
    ("GroupNormalization", [PLANE, W(4), W(4)], {"num_groups": 2, "opset": 21}),
    ("LayerNormalization", [(4, 6), W(6), W(6)], {"axis": -1, "epsilon": 1e-5}),
    ("Flatten", [PLANE], {"axis": 1}),
    ("Reshape", [(4, 6), ints(2, -1, 3)], {"allowzero": 0}),
    ("Transpose", [(2, 4, 6)], {"perm": [2, 0, 1]}),
    ("Squeeze", [(4, 1, 6), ints(1)], {}),
    ("Unsqueeze", [(4, 6), ints(0, -1)], {}),
    ("Expand", [(4, 1), ints(3, 4, 6)], {}),
    ("Tile", [(4, 6), ints(2, 3)], {}),
    ("Concat", [(4, 6), W(4, 2), (4, 3)], {"axis": 1}),
    ("Split", [(4, 6)], {"axis": 1, "num_outputs": 3, "outputs": 3}),
    ("Split", [(4, 6), ints(2, 4)], {"axis": 1, "outputs": 2}),
    ("Slice", [(4, 6), ints(1), ints(-1), ints(1), ints(2)], {}),
    ("Pad", [(4, 6), ints(1, 0, 2, 1), scalar(0.5, np.float32)], {"mode": "constant"}),
    ("Pad", [(4, 6), ints(1, 2), None, ints(1)], {"mode": "reflect"}),
    ("Gather", [(4, 6), ints(0, 2)], {"axis": 1}),
    ("GatherElements", [(4, 6), ints(0, 2).reshape(1, 2)], {"axis": 1}),
    ("GatherND", [(4, 6), ints(0, 2).reshape(1, 2)], {"batch_dims": 0}),
    ("ScatterND", [(4, 6), ints(0, 2).reshape(2, 1), W(2, 6)], {"reduction": "add"}),
    ("ScatterElements", [(4, 6), ints(0, 2).reshape(1, 2), W(1, 2)], {"axis": 1}),
    ("OneHot", [ints(0, 2, 1), scalar(5), W(2)], {"axis": -1}),
    ("TopK", [(4, 6), ints(3)], {"axis": 1, "largest": 1, "outputs": 2}),
    ("CumSum", [(4, 6), scalar(1)], {"reverse": 1}),
    ("Trilu", [(4, 6), scalar(1)], {"upper": 0}),
    ("EyeLike", [(4, 6)], {"k": 1, "dtype": 1}),
    ("DepthToSpace", [PLANE], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [PLANE], {"blocksize": 2}),
    ("Resize", [PLANE, None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
    ("Resize", [PLANE, None, None, ints(9, 9)], {"axes": [2, 3], "mode": "nearest"}),
    ("Upsample", [PLANE, np.array([1, 1, 2, 2], np.float32)], {"mode": "nearest", "opset": 9}),
    ("Where", [np.ones((4, 6), np.bool_), (4, 6), W(6)], {}),
    ("CenterCropPad", [(4, 6), ints(3, 8)], {"axes": [0, 1]}),
    ("Col2Im", [(1, 5, 5), ints(5, 5), ints(1, 5)], {}),
    ("AffineGrid", [(2, 2, 3), ints(2, 3, 5, 6)], {"align_corners": 1}),
    ("GridSample", [(2, 1, 4, 4), W(2, 3, 3, 2)], {"mode": "linear"}),
    ("HannWindow", [scalar(8)], {"periodic": 1}),
    ("RandomNormal", [], {"shape": [4, 6], "seed": 1.0}),
    ("SoftmaxCrossEntropyLoss", [(4, 6), ints(0, 1, 2, 3)], {"reduction": "mean", "ignore_index": 2}),
    ("LSTM", [(3, 2, 4), W(1, 12, 4), W(1, 12, 3)], {"hidden_size": 3, "outputs": 2}),
    ("Attention", [(1, 2, 4, 8), W(1, 2, 6, 8), W(1, 2, 6, 8)], {"scale": 0.3, "opset": 23}),
    ("RMSNormalization", [(4, 6), W(6)], {"axis": -1, "opset": 23}),
    ("QuantizeLinear", [(4, 6), scalar(0.1, np.float32), scalar(0, np.uint8)], {}),
)


def single(op_type: str, operands: Sequence[Operand], options: dict[str, Any]) -> ModelProto:
    """Return the model of one operator; ``options``: its attributes, ``outputs`` and ``opset``."""
    attributes = dict(options)
    outputs = [f"y{i}" for i in range(attributes.pop("outputs", 1))]
    opset = attributes.pop("opset", 20)
    nodes: list[NodeProto] = []
    inputs: list[Any] = []
    stored: dict[str, Any] = {}
    names: list[str] = []
    for index, operand in enumerate(operands):
        name = "" if operand is None else f"x{index}"
        names.append(name)
        if isinstance(operand, tuple):
            inputs.append(helper.make_tensor_value_info(f"in{index}", TensorProto.FLOAT, operand))
            stored[f"w{index}"] = weight(operand[-1])
            nodes.append(helper.make_node("Mul", [f"in{index}", f"w{index}"], [name], f"scale{index}"))
        elif operand is not None:
            stored[name] = operand
    nodes.append(helper.make_node(op_type, names, outputs, "the_op", **attributes))
    return model(nodes, inputs, outputs, stored, opset)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Any],
    outputs: Sequence[str],
    stored: dict[str, Any],
    opset: int = 20,
    functions: Sequence[FunctionProto] = (),
) -> ModelProto:
    """Return a model whose outputs have the types that ONNX infers."""
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    infos = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "fuzz", inputs, infos, tensors)
    opsets = [helper.make_opsetid("", opset), *[helper.make_opsetid("loc", 1) for _ in functions[:1]]]
    made = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    return onnx.shape_inference.infer_shapes(made)


def perceptron() -> ModelProto:
    """Six equal layers, so that a block is found, with a symbolic batch."""
    nodes: list[NodeProto] = []
    for i in range(6):
        nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"p{i}"], f"product{i}"))
        nodes.append(helper.make_node("Relu", [f"p{i}"], [f"h{i + 1}"], f"relu{i}"))
    inputs = [helper.make_tensor_value_info("h0", TensorProto.FLOAT, ["batch", 4])]
    return model(nodes, inputs, ["h6"], {f"w{i}": weight(4, 4) for i in range(6)})


def attention() -> ModelProto:
    """An embedding and self-attention, with the shape arithmetic that exporters write."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("Shape", ["e"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Gather", ["s", "one"], ["l"]),
        node("Concat", ["n", "l", "heads"], ["split"], axis=0),
        node("Concat", ["n", "l", "minus"], ["join"], axis=0),
        node("MatMul", ["e", "wqkv"], ["qkv"]),
        node("Split", ["qkv"], ["q", "k", "v"], axis=-1, num_outputs=3),
    ]
    for name in "qkv":
        nodes.append(node("Reshape", [name, "split"], [f"{name}r"]))
        nodes.append(
            node("Transpose", [f"{name}r"], [f"{name}h"], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])
        )
    nodes += [
        node("MatMul", ["qh", "kh"], ["scores"]),
        node("ConstantOfShape", ["square"], ["ones"], value=numpy_helper.from_array(np.ones(1, np.float32))),
        node("Trilu", ["ones"], ["mask"], upper=0),
        node("Add", ["scores", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["p"], axis=-1),
        node("MatMul", ["p", "vh"], ["o"]),
        node("Transpose", ["o"], ["t"], perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "join"], ["y"]),
    ]
    stored = {"table": weight(16, 8), "wqkv": weight(8, 24), "zero": ints(0), "one": ints(1)}
    stored |= {"heads": ints(2, 4), "minus": ints(-1), "square": ints(4, 4)}
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 4])]
    return model(nodes, inputs, ["y"], stored)


def convolutions() -> ModelProto:
    """Convolution, normalization and pooling, a residual and a head."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["c0"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c0", "g", "h", "m", "v"], ["n0"]),
        node("Relu", ["n0"], ["r0"]),
        node("Conv", ["r0", "w1"], ["c1"], pads=[1, 1, 1, 1], group=2),
        node("Add", ["c1", "r0"], ["a"]),
        node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "w2", "b2"], ["y"], transB=1),
    ]
    stored = {"w0": weight(4, 3, 3, 3), "b0": weight(4), "w1": weight(4, 2, 3, 3), "w2": weight(5, 64)}
    stored |= {"b2": weight(5), "g": weight(4), "h": weight(4), "m": weight(4), "v": np.ones(4, np.float32)}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 8, 8])]
    return model(nodes, inputs, ["y"], stored)


def nested() -> ModelProto:
    """Local functions that call each other with attributes, and a branch known at import."""
    node = helper.make_node
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("loc", 1)]
    scale = node("LeakyRelu", ["a"], ["b"])
    reference = scale.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    assert reference.ref_attr_name
    inner = helper.make_function("loc", "Inner", ["a"], ["b"], [scale], opsets, ["slope"])
    calls = [node("Inner", ["a"], ["t"], domain="loc", slope=0.2), node("MatMul", ["t", "w"], ["b"])]
    outer = helper.make_function("loc", "Outer", ["a", "w"], ["b"], calls, opsets)
    branches = {
        name: helper.make_graph(
            [node(op_type, ["h"], ["z"])], name, [], [helper.make_empty_tensor_value_info("z")]
        )
        for name, op_type in (("then_branch", "Relu"), ("else_branch", "Tanh"))
    }
    nodes = [
        node("Outer", ["x", "w"], ["h"], "call", domain="loc"),
        node("If", ["yes"], ["i"], "branch", **branches),
        node("Outer", ["i", "w"], ["y"], "again", domain="loc"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])]
    stored = {"w": weight(4, 4), "yes": np.array(True)}
    return model(nodes, inputs, ["y"], stored, functions=[inner, outer])


def own_models() -> list[ModelProto]:
    """Return one model of each operator and the networks."""
    made = [single(*case) for case in CASES]
    return [*made, *(build() for build in (perceptron, attention, convolutions, nested))]


def light_models() -> list[ModelProto]:
    """Return the small models of the onnx package, whose weights are left out."""
    return [onnx.load(LIGHT / f"light_{name}.onnx") for name in SMALL_LIGHT]


def node_models() -> Iterator[ModelProto]:
    """Yield the models of onnx's own tests of operators, all but the first input stored.

    So what is about axes and shapes is known, and there are parameters to take gradients of.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    for case in cases:
        made = ModelProto()
        made.CopyFrom(case.model)
        values = case.data_sets[0][0] if case.data_sets else []
        for place, (info, value) in enumerate(zip(list(made.graph.input), values, strict=False)):
            if not isinstance(value, np.ndarray) or value.size > 500:
                continue
            if value.dtype.kind in "iub" or (value.dtype.kind == "f" and place):
                made.graph.initializer.append(numpy_helper.from_array(value, info.name))
                made.graph.input.remove(info)
        if made.ByteSize() < 20_000:
            yield made
