"""Counts, axes, shapes, names and depths of a file are compared with something before they size anything."""

import time

import numpy as np
import onnx
import pytest
from adversarial_models import constant, function, info, model_of, node, refused
from onnx import TensorProto, helper

from distsim.errors import ModelLimitError, TypeRuleError
from distsim.importer import import_from_onnx
from distsim.ir import Float, FunctionMaker, Tensor
from distsim.ops.onnx_bridge import schema_of
from distsim.ops.operator import operator, registered, sharding_rule, signature_of
from distsim.transforms import SGD, add_loss, differentiate

ONES = np.ones
PLANE = (2, 4, 6, 6)
NEWEST = onnx.defs.onnx_opset_version()
FAR = 2**31 - 1


def one(op_type, shape, operands, outputs=1, opset=20, **attributes):
    """A model of one op: input x, stored operands (None: left out)."""
    names = ["" if each is None else f"c{i}" for i, each in enumerate(operands)]
    stored = [constant(n, np.asarray(each)) for n, each in zip(names, operands, strict=True) if n]
    made = [f"y{i}" for i in range(outputs)]
    nodes = [node(op_type, ["x", *names], made, **attributes)]
    return model_of(nodes, [info("x", shape)], [info("y0", None)], stored, opset)


REFUSED = {
    "C of a Gemm": (one("Gemm", (4, 8), [ONES((8, 6), "f"), ONES(5, "f")]), "C [5]", "[4, 6]"),
    "outputs of a Split": (one("Split", (4, 8), [], 2, num_outputs=FAR), f"num_outputs={FAR}", "2 outputs"),
    "an axis beyond 32 bits": (
        one("Split", (4, 6), [], 2, axis=2**32, num_outputs=2),
        "4294967296",
        "-2 to 1",
    ),
    "an axis below": (one("Flatten", (4, 6), [], axis=-(2**63)), "axis=-9223372036854775808", "-2 to 2"),
    "axis of a gather": (one("GatherElements", (4, 6), [[[0]]], axis=7), "axis", "7", "[4, 6]"),
    "axis of a norm": (one("LayerNormalization", (4, 6), [ONES(6, "f")], axis=5), "axis=5", "-2 to 1"),
    "scale of a norm": (one("LayerNormalization", (4, 6), [ONES(9, "f")]), "Scale [9]", "[4, 6]"),
    "slope": (one("PRelu", (4, 6), [ONES((7, 7), "f")]), "slope [7, 7]", "[4, 6]"),
    "no groups": (one("Conv", PLANE, [ONES((4, 4, 3, 3), "f")], group=0), "group=0", "at least 1"),
    "channels": (one("Conv", PLANE, [ONES((4, 3, 3, 3), "f")]), "4 channels", "[4, 3, 3, 3]"),
    "bias": (one("Conv", PLANE, [ONES((4, 4, 3, 3), "f"), ONES(9, "f")]), "B [9]", "[4]"),
    "kernel": (
        one("Conv", PLANE, [ONES((4, 4, 3, 3), "f")], kernel_shape=[2**32, 3]),
        "kernel_shape=[4294967296, 3]",
    ),
    "output shape": (
        one("ConvTranspose", PLANE, [ONES((4, 4, 3, 3), "f")], output_shape=[5]),
        "output_shape=[5]",
        "2 numbers from 1 to",
    ),
    "groups of a norm": (
        one("GroupNormalization", PLANE, [ONES(4, "f"), ONES(4, "f")], opset=21, num_groups=0),
        "num_groups=0",
    ),
    "size of LRN": (one("LRN", PLANE, [], size=0), "size=0"),
    "batch of a gather": (one("GatherND", (4, 6), [[[0, 1]]], batch_dims=-4), "batch_dims=-4"),
    "depth of a gather": (one("GatherND", (4, 6), [[[0, 1, 2]]]), "indices [1, 3]", "[4, 6]"),
    "updates": (one("ScatterND", (4, 6), [[[0], [1]], ONES((3, 6), "f")]), "updates [3, 6]", "[2, 6]"),
    "elements": (one("ScatterElements", (4, 6), [[[0, 1]], ONES((2, 2), "f")]), "updates [2, 2]", "[1, 2]"),
    "blocks": (one("DepthToSpace", PLANE, [], blocksize=3), "blocksize=3", "[2, 4, 6, 6]"),
    "pads": (one("Pad", (4, 6), [[1, 1, 1]]), "Pad"),
    "axes of a pad": (one("Pad", (4, 6), [[1, 1, 1, 1], None, [1, 1]]), "axes [1, 1]"),
    "mode of a pad": (one("Pad", (4, 6), [[1, 1, 1, 1]], mode="around"), "'around'", "reflect"),
    "letters": (one("Einsum", (4, 6), [ONES((7, 3), "f")], equation="ab,bc->ac"), "'b' is 6", "7"),
    "more dimensions than letters": (
        one("Einsum", (1,) * 52 + (2, 4), [ONES((4, 6), "f")], equation="...ij,jk"),
        "52 dimensions behind",
        "49 of the 52 letters",
    ),
    "a letter of no operand": (one("Einsum", (4, 6), [], equation="ab->az"), "Einsum"),
    "scale of a quantization": (one("QuantizeLinear", (4, 6), [ONES(9, "f")]), "y_scale [9]", "[4, 6]"),
    "axis of blocks": (
        one("QuantizeLinear", (4, 6), [ONES((4, 2), "f")], opset=21, axis=2, block_size=3),
        "axis 2",
        "[4, 6]",
    ),
    "hidden size": (
        one("LSTM", (3, 2, 4), [ONES((1, 12, 4), "f"), ONES((1, 12, 3), "f")], hidden_size=FAR),
        f"hidden_size={FAR}",
    ),
    "heads": (
        one("Attention", (1, 4, 8), [ONES((1, 4, 8), "f")] * 2, opset=23, q_num_heads=0, kv_num_heads=2),
        "q_num_heads=0",
    ),
    "steps of Col2Im": (one("Col2Im", (1, 5, 5), [[5, 5], [1, 5]], strides=[0, 1]), "strides=0"),
    "steps of ConvTranspose": (
        one("ConvTranspose", PLANE, [ONES((4, 2, 3, 3), "f")], strides=[FAR, 2], output_shape=[13, 13]),
        f"strides=[{FAR}, 2]",
        "from 1 to 65536",
    ),
    "size of a block": (one("SpaceToDepth", PLANE, [], opset=NEWEST, blocksize=2**62), f"{2**62}"),
    "too many dimensions": (one("Unsqueeze", (2, 3), [np.arange(63)]), "65 dimensions", "64"),
    "too many elements": (one("Expand", (2, 3), [[2**45, 2, 3]]), "2^46"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_its_numbers(put, case):
    model, *words = REFUSED[case]
    refused(put(model), f"'bad' ({model.graph.node[0].op_type})", *words)


def test_the_checks_name_operands_as_onnx_does():
    checks = {name: bounds for name in registered() if (bounds := operator(name).bounds) is not None}
    # And Attention, whose sizes are checked as it takes the form of the house ("heads" above).
    assert len({*checks, "Attention"}) >= 50
    for op_type, bounds in checks.items():
        schema = schema_of(op_type, NEWEST)
        names = [formal.name for formal in schema.inputs][: len(bounds.formals)]
        assert list(bounds.formals) == names or op_type in ("Scatter",), op_type


def test_a_function_is_checked_like_a_file():
    maker = FunctionMaker()
    x = maker.add_input_value("x", Tensor(Float(), (4, 8)))
    for attributes in ({"num_outputs": 2**40}, {"num_outputs": 0}):
        with pytest.raises(TypeRuleError, match=r"num_outputs=\d+ of axis 0, which has 4"):
            maker.add("Split", [x], attributes)
    with pytest.raises(TypeRuleError, match="number of elements"):
        maker.add("Reshape", [x], {"shape": (5, 5)})


def test_dimensions_of_stored_tensors_and_inputs(put):
    deep = TensorProto(name="w", dims=[1] * 65, data_type=TensorProto.FLOAT, raw_data=bytes(4))
    refused(put(model_of([node("Add", ["x", "w"], ["y"])], stored=[deep])), "'w'", "65 dimensions", "64")
    flat = model_of([node("Neg", ["x"], ["y"])], [info("x", [1] * 65)])
    with pytest.raises(ModelLimitError, match="'x' has 65 dimensions"):
        import_from_onnx(put(flat))
    assert import_from_onnx(put(model_of([node("Neg", ["x"], ["y"])], [info("x", [1] * 64)])))


def test_names_that_are_not_text(put):
    whole = model_of([node("Neg", ["x"], ["y"], name="NAME")]).SerializeToString()
    refused(put(whole.replace(b"NAME", b"\xff\xfe\xfd\xfc")), "a node has a name that is not text", r"\xff")


def test_operator_sets_of_local_functions(put):
    for version, domain in ((2**31, ""), (2**40, "loc"), (0, "loc")):
        wrong = function("F", [helper.make_node("Relu", ["a"], ["b"])])
        del wrong.opset_import[:]
        wrong.opset_import.append(helper.make_opsetid(domain, version))
        call = node("F", ["x"], ["y"], domain="loc")
        model = model_of([call], functions=[wrong], domains=["loc"])
        refused(put(model), "local function loc.F", str(version))


def test_names_that_grow_from_call_to_call(put):
    long = "n" * 20_000
    functions = [
        function(
            f"F{i}",
            [helper.make_node(f"F{i + 1}", ["a"], [f"b{k}"], long, domain="loc") for k in range(3)],
            outputs=("b0",),
        )
        for i in range(9)
    ]
    functions.append(function("F9", [helper.make_node("Relu", ["a"], ["b"])]))
    model = model_of([node("F0", ["x"], ["y"], domain="loc")], functions=functions, domains=["loc"])
    with pytest.raises(ModelLimitError, match="268435456 characters"):
        import_from_onnx(put(model))


def test_constants_are_looked_at_once_however_many_ops_read_them(put):
    size = 2**22  # 4 ms to look at
    nodes = [node("Range", ["zero", "size", "one"], ["c"]), node("Reshape", ["c", "shape"], ["m"])]
    nodes += [helper.make_node("Add", [f"x{i}" if i else "x", "m"], [f"x{i + 1}"]) for i in range(400)]
    stored = [constant("zero", np.int64(0)), constant("size", np.int64(size)), constant("one", np.int64(1))]
    stored.append(constant("shape", np.array([2, size // 2])))
    inputs = [info("x", [2, size // 2], TensorProto.INT64)]
    path = put(model_of(nodes, inputs, [info("x400", None, TensorProto.INT64)], stored))
    start = time.process_time()
    assert len(import_from_onnx(path).ops) == 401
    assert time.process_time() - start < 2.0


def test_what_python_computes_element_by_element_is_left_to_the_model(put):
    size = 2**20  # 2 s in onnx.reference
    nodes = [node("Range", ["zero", "size", "one"], ["c"]), node("Unsqueeze", ["c", "one1"], ["i"])]
    nodes += [node("ScatterND", ["c", "i", "c"], ["d"]), node("Add", ["x", "d"], ["y"])]
    stored = [constant("zero", np.int64(0)), constant("size", np.int64(size)), constant("one", np.int64(1))]
    path = put(
        model_of(
            nodes,
            [info("x", [size], TensorProto.INT64)],
            [info("y", None, TensorProto.INT64)],
            [*stored, constant("one1", np.array([1]))],
        )
    )
    start = time.process_time()
    assert [op.op_type for op in import_from_onnx(path).ops][-2:] == ["ScatterND", "Add"]
    assert time.process_time() - start < 1.0


def test_an_empty_attribute_is_one_left_out(put):
    w, r = np.ones((1, 12, 4), np.float32), np.ones((1, 12, 3), np.float32)
    model = one("LSTM", (3, 2, 4), [w, r], hidden_size=3)
    model.graph.node[0].attribute.add(name="activation_beta", type=onnx.AttributeProto.FLOATS)
    assert import_from_onnx(put(model)).outputs[0].type.shape == (3, 1, 2, 3)


def test_one_scale_for_the_whole_tensor_has_no_axis(put):
    model = one("DequantizeLinear", (8,), [np.float32(0.1), np.int8(0)], axis=1)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT8
    assert import_from_onnx(put(model)).outputs[0].type.shape == (8,)


@pytest.mark.parametrize("op_type", ["CastLike", "CumSum", "LayerNormalization", "PRelu", "Trilu"])
def test_a_known_first_operand_that_another_is_applied_to(put, op_type):
    """One number, known, to which something that is not known is applied."""
    kinds = {"CumSum": TensorProto.INT64, "Trilu": TensorProto.INT64}
    shapes = {"CastLike": [4], "LayerNormalization": [1], "PRelu": [1], "CumSum": [], "Trilu": []}
    first = np.ones((1, 1), np.float32)
    nodes = [helper.make_node("Identity", ["x"], ["i"]), node(op_type, ["one", "i"], ["z"])]
    nodes.append(helper.make_node("Mul", ["z", "w"], ["y"]))
    stored = [constant("one", first), constant("w", np.ones(6, np.float32))]
    inputs = [info("x", shapes[op_type], kinds.get(op_type, TensorProto.FLOAT))]
    function = import_from_onnx(put(model_of(nodes, inputs, [info("y", None)], stored)))
    assert [op.op_type for op in function.ops] == ["Constant", op_type, "Mul"]
    for op in function.ops:
        rule = sharding_rule(signature_of(op))
        assert rule is not None
        assert [len(dims) for dims in rule.inputs] == [value.type.rank for value in op.inputs]
    assert len(differentiate(add_loss(function, "mse"), SGD(0.1)).outputs) == 2
