"""Files, sizes, nodes and functions that make no sense: an error that names the thing."""

import inspect
import os

import numpy as np
import onnx
import pytest
from adversarial_models import (
    FLOAT,
    INT64,
    constant,
    function,
    info,
    model_of,
    node,
    refused,
)
from onnx import TensorProto, helper

from distsim.errors import ImportModelError
from distsim.importer import import_from_onnx, load_model, parse_tensor_from_file, symbolic_dimensions

RELU = helper.make_node("Relu", ["x"], ["y"], "act")


# Files


def test_files_that_are_not_models(put, tmp_path):
    refused(tmp_path / "none.onnx", "none.onnx", "No such file")
    refused(tmp_path, "not a regular file")
    refused(put(b""), "empty")
    refused(put(b"\x08\x0a"), "graph")
    refused(put(b"hello, this is not protobuf at all"), "not an ONNX model")
    refused("a\0b", "cannot read")
    whole = model_of([RELU]).SerializeToString()
    refused(put(whole[:-5]), "m.onnx")
    refused(put(whole), "max_bytes=10", max_bytes=10)
    with pytest.raises(ImportModelError, match="empty"):
        symbolic_dimensions(put(b""))


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    refused(tmp_path / "pipe.onnx", "not a regular file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        TensorProto(dims=[3], data_type=FLOAT, raw_data=b"12").SerializeToString(),
        TensorProto(dims=[-1], data_type=FLOAT).SerializeToString(),
        TensorProto(dims=[1], data_type=99, raw_data=b"1234").SerializeToString(),
        TensorProto(dims=[2**40, 2**40], data_type=FLOAT).SerializeToString(),
        helper.make_tensor("s", TensorProto.STRING, [1], [b"text"]).SerializeToString(),
        TensorProto(dims=[1], data_type=FLOAT, data_location=TensorProto.EXTERNAL).SerializeToString(),
    ],
)
def test_files_that_are_not_tensors(tmp_path, content):
    (tmp_path / "t.pb").write_bytes(content)
    with pytest.raises(ImportModelError, match=r"t\.pb"):
        parse_tensor_from_file(tmp_path / "t.pb")


# Dimensions


def test_bindings(put):
    dynamic = put(model_of([RELU], [info("x", ["batch", "seq", 4])]))
    refused(dynamic, "batch, seq", "batch=..., seq=...", "x [batch, seq, 4]")
    refused(dynamic, "seq=...", batch=2)
    refused(dynamic, "no symbolic dimension heads", "batch, seq", batch=1, seq=1, heads=2)
    for wrong in (0, -1, 2**31, 1.5, "3", True, None):
        refused(dynamic, f"batch={wrong!r}", "integer", batch=wrong, seq=1)
    assert import_from_onnx(dynamic, batch=np.int64(2), seq=1).outputs[0].type.shape == (2, 1, 4)
    refused(dynamic, "2^46", batch=2**31 - 1, seq=2**31 - 1)


def test_dimensions_named_like_arguments(put):
    names = ["path", "parameters", "load_values", "name", "max_bytes", "bindings"]
    assert set(names) | {"sizes"} == set(inspect.signature(import_from_onnx).parameters)
    path = put(model_of([RELU], [info("x", [*names, "sizes", "a b"])]))
    sizes = {name: size for size, name in enumerate([*names, "a b"], 2)}
    refused(path, "sizes=..., bindings={'path': ..., 'parameters': ..., ", "'a b': ...}")
    assert import_from_onnx(path, bindings=sizes, sizes=9).inputs[0].type.shape == (2, 3, 4, 5, 6, 7, 9, 8)
    bound = ",".join(f"{name}={size}" for name, size in sizes.items())
    assert load_model(str(path), bindings=f"{bound},sizes=9").inputs[0].type.shape[0] == 2
    refused(path, "sizes is bound twice, 1 and 2", bindings={"sizes": 1}, sizes=2)
    refused(path, "bindings=4 must map", bindings=4)


def test_a_static_export_is_not_given_another_batch(put):
    path = put(model_of([RELU], [info("x", [1, 128])]))
    refused(path, "no symbolic dimension batch", "all dimensions are fixed", "x [1, 128]", batch=8)


def test_a_batch_that_the_model_does_not_keep(put):
    # The exporter wrote the batch into a Reshape: it fits only the batch it was exported with.
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"])]
    stored = [constant("to", np.array([1, -1]))]
    outputs = [info("y", ["batch", 6])]
    path = put(model_of(nodes, [info("x", ["batch", 2, 3])], outputs, stored))
    assert import_from_onnx(path, batch=1).outputs[0].type.shape == (1, 6)
    refused(path, "output 'y'", "batch=4", "[1, 24]", batch=4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (info("x", [None, 3]), ("'x'", "dimension 0", "neither a size nor a name")),
        (info("x", [-1, 3]), ("'x'", "dimension 0", "-1")),
        (info("x", None), ("'x'", "no shape")),
        (info("x", [2**40, 2**40]), ("'x'", "2^46")),
        (info("x", [2], TensorProto.STRING), ("'x'", "string")),
        (info("x", [2], TensorProto.FLOAT8E4M3FN), ("'x'", "float8")),
        (helper.make_tensor_sequence_value_info("x", FLOAT, [2]), ("'x'", "sequence_type")),
        (onnx.ValueInfoProto(name="x"), ("'x'", "without a type")),
    ],
)
def test_inputs_without_a_usable_type(put, value, words):
    refused(put(model_of([RELU], [value])), *words)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"]), RELU], ("'bad' (Add)", "'b'", "cycle")),
        ([node("Relu", ["nothing"], ["y"])], ("'bad' (Relu)", "'nothing'", "nothing makes")),
        ([RELU, node("Neg", ["x"], ["y"])], ("'bad' (Neg)", "'y'", "already")),
        ([node("Neg", ["x"], ["x"]), RELU], ("'bad' (Neg)", "'x'", "already")),
        ([node("Neg", ["x"], ["z"])], ("output 'y'", "no node")),
        ([node("Flux", ["x"], ["y"])], ("Flux", "'bad'", "neither")),
        ([node("Fused", ["x"], ["y"], domain="com.microsoft")], ("com.microsoft.Fused", "1 times")),
        ([node("SGDOptimizer", ["x", "x"], ["y"])], ("SGDOptimizer",)),
        ([node("Call", ["x"], ["y"])], ("Call", "neither")),
        ([node("MatMul", ["x", "x"], ["y"])], ("'bad' (MatMul)",)),
        ([node("And", ["x", "x"], ["y"])], ("'bad' (And)",)),
        ([node("Add", ["x"], ["y"])], ("'bad' (Add)",)),
        ([node("Add", ["x", "x", "x"], ["y"])], ("'bad' (Add)",)),
        ([node("Relu", ["x"], ["y", "z"])], ("'bad' (Relu)",)),
        ([node("Relu", ["x"], ["y"], slope=1.0)], ("'bad' (Relu)", "slope")),
        ([node("Softmax", ["x"], ["y"], axis="one")], ("'bad' (Softmax)", "axis")),
        ([node("Softmax", ["x"], ["y"], axis=7)], ("'bad' (Softmax)",)),
        ([node("Cast", ["x"], ["y"])], ("'bad' (Cast)", "to")),
        ([node("Cast", ["x"], ["y"], to=99)], ("'bad' (Cast)",)),
        ([node("Cast", ["x"], ["y"], to=TensorProto.STRING)], ("'bad' (Cast)",)),
        ([node("Transpose", ["x"], ["y"], perm=[0, 0])], ("'bad' (Transpose)",)),
        ([node("Concat", ["x", ""], ["y"], axis=0)], ("'bad' (Concat)",)),
        ([node("NonZero", ["x"], ["y"])], ("'bad' (NonZero)", "depends on data")),
        ([node("SequenceConstruct", ["x"], ["y"])], ("'bad' (SequenceConstruct)",)),
        ([node("Constant", [], ["y"], value_string="text")], ("'bad' (Constant)",)),
        ([node("Constant", [], ["y"])], ("'bad' (Constant)",)),
        ([node("Gather", ["x", "big"], ["y"], axis=0)], ("'bad' (Gather)", "indices 5 to 5")),
        ([node("Gather", ["x", "big"], ["y"], axis=9)], ("'bad' (Gather)", "axis 9")),
        ([node("Reshape", ["x", "big"], ["y"])], ("'bad' (Reshape)",)),
        ([node("Div", ["big", "zero"], ["d"], "div"), node("Reshape", ["x", "d"], ["y"])], ("(",)),
    ],
    ids=lambda value: value[-1].op_type + str(len(value)) if isinstance(value, list) else "",
)
def test_nodes_that_make_no_sense(put, nodes, words):
    refused(put(model_of(nodes, stored=[constant("big", [5]), constant("zero", [0])])), *words)


def test_control_flow_that_data_decide(put):
    branch = helper.make_graph([helper.make_node("Neg", ["x"], ["o"])], "b", [], [info("o", [2, 3])])
    conditional = node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    inputs = [info("x", [2, 3]), info("c", [], TensorProto.BOOL)]
    refused(put(model_of([conditional], inputs)), "'bad' (If)", "by data")
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Neg", ["v"], ["w"])],
        "body",
        [info("i", [], INT64), info("c", [], TensorProto.BOOL), info("v", [2, 3])],
        [info("d", [], TensorProto.BOOL), info("w", [2, 3])],
    )
    loop = node("Loop", ["n", "", "x"], ["y"], body=body)
    refused(put(model_of([loop], stored=[constant("n", 3)])), "'bad' (Loop)", "graph of its own")


def test_nested_conditions(put):
    def nested(depth):
        inner = helper.make_node("Neg", ["x"], [f"o{depth}"])
        for level in range(depth):
            graph = helper.make_graph([inner], "g", [], [info(inner.output[0], None)])
            inner = helper.make_node("If", ["c"], [f"i{level}"], then_branch=graph, else_branch=graph)
        inner.output[0] = "y"
        return put(model_of([inner], stored=[constant("c", True)]))

    assert [op.op_type for op in import_from_onnx(nested(5)).ops] == ["Neg"]

    # Thousands: written as bytes, since building them doubles the size at each level.
    def field(number, content):
        size, length = len(content), b""
        while size >= 128:
            length, size = length + bytes([size % 128 + 128]), size // 128
        return bytes([number * 8 + 2]) + length + bytes([size]) + content

    graph = b""
    for _ in range(3000):
        attribute = field(1, b"then_branch") + field(6, graph) + b"\xa0\x01\x05"
        graph = field(1, field(1, b"c") + field(2, b"y") + field(4, b"If") + field(5, attribute))
    refused(put(field(7, graph + field(12, field(1, b"y")))), "not an ONNX model")


def test_operator_sets(put):
    refused(put(model_of([RELU], opset=99)), "operator set 99", "1 to")
    refused(put(model_of([RELU], opset=0)), "operator set 0")
    twice = model_of([RELU])
    twice.opset_import.append(helper.make_opsetid("", 13))
    refused(put(twice), "20", "13")
    none = model_of([RELU])
    del none.opset_import[:]
    refused(put(none), "Relu")
    add = node("Add", ["x", "column"], ["y"], broadcast=1, axis=0)
    legacy = model_of([add], [info("x", [2, 3]), info("column", [2])], opset=6)
    refused(put(legacy), "'bad' (Add)", "axis 0", "version_converter")


def call(name, inputs, outputs):
    return helper.make_node(name, inputs, outputs, f"call_{name}", domain="loc")


def test_functions_that_do_not_end(put):
    loop = [function("F", [call("G", ["a"], ["b"])]), function("G", [call("F", ["a"], ["b"])])]
    path = put(model_of([call("F", ["x"], ["y"])], functions=loop, domains=["loc"]))
    refused(path, "loc.F", "calls itself", "loc.F -> loc.G -> loc.F")
    chain = [function(f"F{i}", [call(f"F{i + 1}", ["a"], ["b"])]) for i in range(500)]
    path = put(model_of([call("F0", ["x"], ["y"])], functions=chain, domains=["loc"]))
    refused(path, "64 deep")
    wide = [
        function(f"F{i}", [call(f"F{i + 1}", ["a"], [f"b{j}"]) for j in range(10)], outputs=["b0"])
        for i in range(30)
    ]
    wide.append(function("F30", [helper.make_node("Neg", ["a"], ["b"])]))
    refused(put(model_of([call("F0", ["x"], ["y"])], functions=wide, domains=["loc"])), "nodes", "limit")


def test_functions_that_make_no_sense(put):
    one = function("F", [helper.make_node("Neg", ["a"], ["b"], "neg")])
    for nodes, functions, words in [
        ([call("F", ["x"], ["y"])], [one, one], ("loc.F", "twice")),
        ([call("F", ["x", "x"], ["y"])], [one], ("'call_F'", "2 operands")),
        ([call("F", ["x"], ["y", "z"])], [one], ("'call_F'", "2 outputs")),
        ([call("F", [], ["y"])], [one], ("'call_F/neg'", "'a'")),
        ([call("F", ["x"], ["y"])], [function("F", [])], ("'call_F'", "'b'")),
        ([call("F", ["x"], ["y"])], [function("F", [call("G", ["a"], ["b"])])], ("loc.G",)),
        ([call("F", ["x"], ["y"])], [function("F", one.node, inputs=["a", "a"])], ("loc.F", "same name")),
    ]:
        refused(put(model_of(nodes, functions=functions, domains=["loc"])), *words)


# Stored values


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            TensorProto(name="w", dims=[4], data_type=FLOAT, raw_data=b"12345678"),
            ("'w'", "16 bytes", "holds 8"),
        ),
        (TensorProto(name="w", dims=[4], data_type=FLOAT, float_data=[1.0]), ("'w'", "4 values", "holds 1")),
        (TensorProto(name="w", dims=[2, 3], data_type=INT64), ("'w'", "6 values", "holds 0")),
        (TensorProto(name="w", dims=[-4], data_type=FLOAT), ("'w'", "-4")),
        (TensorProto(name="w", dims=[2**60], data_type=FLOAT), ("'w'", "2^46")),
        (TensorProto(name="w", dims=[1], data_type=77, raw_data=b"1"), ("'w'", "77")),
        (TensorProto(name="w", dims=[1], raw_data=b"1"), ("'w'", "number 0")),
        (helper.make_tensor("w", TensorProto.STRING, [1], [b"s"]), ("'w'", "string")),
        (constant("x", np.zeros((2, 2), np.float32)), ("node 'act'",)),
    ],
)
def test_initializers_that_make_no_sense(put, tensor, words):
    stored = [tensor] if tensor.name != "x" else [tensor, tensor]
    refused(
        put(model_of([RELU], [info("z", [2])], stored=stored)), *(words if tensor.name != "x" else ("'x'",))
    )
