"""Stored data, external paths, bombs and damage: nothing is opened, allocated or written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from adversarial_models import (
    FLOAT,
    constant,
    function,
    info,
    model_of,
    node,
    refused,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from distsim.errors import DistsimError
from distsim.importer import import_from_onnx, symbolic_dimensions


def external(**entries):
    tensor = TensorProto(name="w", dims=[2, 3], data_type=FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return model_of([node("Add", ["x", "w"], ["y"])], stored=[tensor])


def test_external_data_outside_the_folder_is_not_opened(put, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "up").symlink_to(tmp_path)
    (folder / "loop.bin").symlink_to(folder / "loop.bin")
    os.mkfifo(folder / "pipe.bin")
    path = folder / "m.onnx"
    for location in (
        "../secret.bin",
        "a/../../secret.bin",
        str(tmp_path / "secret.bin"),
        "..\\secret.bin",
        "C:\\secret.bin",
        "\\\\host\\share",
        "link.bin",
        "up/secret.bin",
        "loop.bin",
        "pipe.bin",
        "missing.bin",
        ".",
        "",
        "a\0b",
    ):
        path.write_bytes(external(location=location).SerializeToString())
        assert len(import_from_onnx(path).parameters) == 1  # nothing is opened for the types
        refused(path, "'w'", load_values=True)


def test_external_data_that_do_not_fit(put, tmp_path):
    (tmp_path / "w.bin").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    function, values = import_from_onnx(put(external(location="w.bin", offset=8)), load_values=True)
    assert values["w"].tolist() == [[2, 3, 4], [5, 6, 7]]
    assert function.parameters[0].name == "w"
    for entries in ({"offset": 16}, {"length": 4}, {"offset": -1}, {"offset": "1e3"}, {"length": "9" * 30}):
        refused(put(external(location="w.bin", **entries)), "'w'", load_values=True)


def test_attributes_do_not_open_files(put):
    tensor = TensorProto(dims=[1], data_type=FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    refused(put(model_of([node("Constant", [], ["y"], value=tensor)])), "'bad' (Constant)", "another file")


# Bombs: small files that would take gigabytes, or hours


def bomb(kind):
    """Nodes that make a huge constant `h`, which then is used as a shape."""
    big = 2**44
    stored = [
        constant("n", [big]),
        constant("s", np.int64(big)),
        constant("0", np.int64(0)),
        constant("1", [1]),
    ]
    stored += [constant("one", np.int64(1)), constant("pads", [0, big])]
    operands = {
        "ConstantOfShape": ["n"],
        "Expand": ["1", "n"],
        "Tile": ["1", "n"],
        "Range": ["0", "s", "one"],
        "Pad": ["1", "pads"],
        "OneHot": ["1", "s", "pads"],
    }
    value = {"value": constant("v", np.array([1]))} if kind == "ConstantOfShape" else {}
    return helper.make_node(kind, operands[kind], ["h"], "bomb", **value), stored


BOMBS = ["ConstantOfShape", "Expand", "Tile", "Range", "Pad", "OneHot"]
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from distsim.errors import DistsimError
from distsim.importer import import_from_onnx
for path in sys.argv[1:]:
    try:
        function = import_from_onnx(path)
        print(path, "ok", [op.op_type for op in function.ops])
    except DistsimError as error:
        print(path, type(error).__name__, error)
"""


def test_bombs_take_no_memory(tmp_path):
    paths = [tmp_path / "split.onnx"]  # 110 bytes
    split = [helper.make_node("Split", ["x"], ["y", "z"], axis=0, num_outputs=2**31 - 1)]
    paths[0].write_bytes(model_of(split).SerializeToString())
    for kind in BOMBS:
        big, stored = bomb(kind)
        users = {
            "shape": [node("Reshape", ["x", "h"], ["y"])],
            "gather": [node("Gather", ["x", "h"], ["y"])],
            "sum": [node("ReduceSum", ["h"], ["t"]), node("Expand", ["x", "t"], ["y"])],
            "chain": [
                node("Add", ["h", "h"], ["t"]),
                node("Mul", ["t", "h"], ["u"]),
                node("Neg", ["u"], ["y"]),
            ],
            "output": [node("Identity", ["h"], ["y"])],
        }
        for use, nodes in users.items():
            paths.append(tmp_path / f"{kind}_{use}.onnx")
            paths[-1].write_bytes(model_of([big, *nodes], stored=stored).SerializeToString())
    doubled = [helper.make_node("Concat", [f"d{i}", f"d{i}"], [f"d{i + 1}"], axis=0) for i in range(60)]
    stored = [constant("d0", np.ones(1000, np.int64))]
    paths.append(tmp_path / "doubled.onnx")
    paths[-1].write_bytes(
        model_of([*doubled, node("Reshape", ["x", "d60"], ["y"])], stored=stored).SerializeToString()
    )
    many = [helper.make_node("Add", ["d0", f"e{i}"], [f"e{i + 1}"]) for i in range(3000)]
    stored = [constant("d0", np.ones(60_000, np.int64)), constant("e0", np.ones(60_000, np.int64))]
    paths.append(tmp_path / "many.onnx")
    paths[-1].write_bytes(model_of([*many, node("Neg", ["e3000"], ["y"])], stored=stored).SerializeToString())
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, paths)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stderr == "" and result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) == len(paths)
    assert not [line for line in lines if "too little memory" in line or "MemoryError" in line]
    assert "num_outputs=2147483647" in lines[0]


def test_importing_writes_nothing(put, tmp_path):
    path = put(external(location="w.bin"))
    before = sorted(tmp_path.rglob("*"))
    import_from_onnx(path)
    refused(path, "'w'", load_values=True)
    assert sorted(tmp_path.rglob("*")) == before


# Random damage

WHOLE = model_of(
    [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["to"], axis=0),
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("F", ["c"], ["r"], domain="loc"),
        helper.make_node("Reshape", ["r", "to"], ["f"]),
        helper.make_node("Slice", ["f", "zero", "two"], ["l"]),
        helper.make_node("Gemm", ["l", "v"], ["g"], alpha=0.5),
        helper.make_node("Split", ["g"], ["y", "z"], axis=1, num_outputs=2),
    ],
    [info("x", ["n", 2, 4, 4])],
    [info("y", ["k", 4]), info("z", None)],
    [
        constant("zero", [0]),
        constant("two", [2]),
        constant("rest", [-1]),
        constant("w", np.ones((2, 2, 3, 3), np.float32)),
        constant("v", np.ones((32, 8), np.float32)),
    ],
    functions=[function("F", [helper.make_node("Relu", ["a"], ["b"])])],
    domains=["loc"],
).SerializeToString()


def attempt(path, content):
    path.write_bytes(content)
    try:
        names = symbolic_dimensions(path)
        function, _ = import_from_onnx(path, load_values=True, **dict.fromkeys(names, 2))
    except DistsimError:
        return None
    return function


def test_the_undamaged_model(tmp_path):
    function = attempt(tmp_path / "m.onnx", WHOLE)
    assert [op.op_type for op in function.ops] == ["Conv", "Relu", "Reshape", "Slice", "Gemm", "Split"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, len(WHOLE) - 1))
def test_truncation(tmp_path, cut):
    attempt(tmp_path / "m.onnx", WHOLE[:cut])


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    moved=st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 40)),
)
def test_damaged_bytes(tmp_path, flips, moved):
    content = bytearray(WHOLE)
    for place, value in flips:
        content[place] = value
    start, length = moved
    attempt(tmp_path / "m.onnx", bytes(content[:start] + content[start + length :]))
    attempt(tmp_path / "m.onnx", bytes(content))
