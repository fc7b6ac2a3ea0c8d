"""Stored values and roles of imported inputs, and cases of the onnx package."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from importer_models import (
    assert_same,
    f32,
    info,
    rng,
    run,
    save,
)
from onnx import TensorProto, helper, numpy_helper

from distsim.errors import ImportModelError
from distsim.importer import import_from_onnx, parse_tensor_from_file
from distsim.ir import Role

# Roles, values, names


def test_roles_of_stored_values(tmp_path):
    stored = {
        "weight": f32(2, 2),
        "scalar": f32(),
        "one": f32(1),
        "table": rng().integers(0, 2, (300, 300)),
        "index": np.array([1, 0]),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["a"]),
        helper.make_node("Add", ["a", "scalar"], ["b"]),
        helper.make_node("Add", ["b", "one"], ["c"]),
        helper.make_node("Gather", ["c", "table"], ["y"], axis=0),
        helper.make_node("Gather", ["c", "index"], ["z"], axis=0),
    ]
    outputs = [info("y", [300, 300, 2]), info("z", [2, 2])]
    path = save(tmp_path / "m.onnx", nodes, [info("x", [2, 2])], outputs, stored)
    function = assert_same(path, {"x": f32(2, 2)})
    assert [(v.name, v.role) for v in function.inputs] == [
        ("x", Role.INPUT),
        ("weight", Role.PARAMETER),
        ("table", Role.CONSTANT),
    ]
    assert function.ops[-1].attributes["indices"].array.tolist() == [1, 0]


def test_initializers_that_are_graph_inputs_too(tmp_path):
    inputs = [info("x", [2, 2]), info("w", [2, 2])]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, inputs, [info("y", [2, 2])], {"w": f32(2, 2)}, 9)
    function = import_from_onnx(path)
    assert [(v.name, v.role) for v in function.inputs] == [("x", Role.INPUT), ("w", Role.PARAMETER)]


def test_graph_inputs_marked_as_parameters(tmp_path):
    inputs = [info("x", [2, 2]), info("p_w", [2, 2]), info("ids", [2], TensorProto.INT64)]
    nodes = [helper.make_node("MatMul", ["x", "p_w"], ["a"]), helper.make_node("Gather", ["a", "ids"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, inputs, [info("y", [2, 2])])
    assert [v.name for v in import_from_onnx(path, parameters=["p_*"], name="net").parameters] == ["p_w"]
    assert import_from_onnx(path, name="net").name == "net"
    with pytest.raises(ImportModelError, match="pattern 'q_"):
        import_from_onnx(path, parameters=["q_*"])
    with pytest.raises(ImportModelError, match="'ids' is i64"):
        import_from_onnx(path, parameters=["ids"])
    with pytest.raises(ImportModelError, match="list of patterns"):
        import_from_onnx(path, parameters="p_*")


def test_external_values_are_read_when_asked_for(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Reshape", ["a", "to"], ["y"])]
    stored = {"w": f32(64, 64), "b": f32(64, 64), "to": np.array([64, 1, 64])}
    path = save(tmp_path / "m.onnx", nodes, [info("x", [64, 64])], [info("y", [64, 1, 64])], stored)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(ImportModelError, match=r"operand shape \(to\).*load_values=True"):
        import_from_onnx(path)
    function = assert_same(path, {"x": f32(64, 64)})
    assert [value.name for value in function.inputs] == ["x", "w"]
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ImportModelError, match=r"'to'.*weights\.bin"):
        import_from_onnx(path, load_values=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "uint8"])
def test_a_tensor_file(tmp_path, dtype):
    array = (f32(2, 3) * 3).astype(dtype)
    (tmp_path / "t.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
    found = parse_tensor_from_file(tmp_path / "t.pb")
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


BACKEND = Path(onnx.__file__).parent / "backend" / "test" / "data"
BACKEND_CASES = sorted(
    str(path.parent.relative_to(BACKEND)) for path in BACKEND.glob("pytorch-*/*/model.onnx")
)


@pytest.mark.parametrize("case", sorted(BACKEND_CASES))
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # nan is what they ask for
def test_cases_of_the_onnx_package(case):
    path = BACKEND / case / "model.onnx"
    function, values = import_from_onnx(path, load_values=True)
    folder = path.parent / "test_data_set_0"
    free = [value.name for value in function.inputs if value.name not in values]
    feeds = {name: parse_tensor_from_file(folder / f"input_{i}.pb") for i, name in enumerate(free)}
    for index, found in enumerate(run(function, values | feeds)):
        expected = parse_tensor_from_file(folder / f"output_{index}.pb")
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", [True, False])
def test_slopes_before_operator_set_7_are_those_of_channels(tmp_path, stored):
    """Also where they would fit the last dimension; ``onnx.reference`` has today's meaning only."""
    x, slope = f32(2, 3, 4, 3), np.array([0.1, 0.2, 0.3], np.float32)
    nodes = [helper.make_node("PRelu", ["x", "slope"], ["y"])]
    given = [info("x", [2, 3, 4, 3]), *([] if stored else [info("slope", [3])])]
    weights = {"slope": slope} if stored else {}
    path = save(tmp_path / "m.onnx", nodes, given, [info("y", [2, 3, 4, 3])], weights, 6)
    function, values = import_from_onnx(path, load_values=True)
    found = run(function, values | {"x": x} | ({} if stored else {"slope": slope}))[0]
    np.testing.assert_allclose(found, np.where(x < 0, slope[:, None, None] * x, x), rtol=1e-6)
