"""Types, literals and attributes: equal by content, hashed, and of the sizes that they say."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from distsim.errors import TypeRuleError
from distsim.ir import (
    Attributes,
    BFloat16,
    Device,
    Float,
    Float16,
    Float32,
    Float64,
    Int64,
    Literal,
    Mesh,
    Tensor,
    TupleType,
)
from distsim.ir.type import DTYPES, dtype_named, from_numpy

F23 = Tensor(Float(), (2, 3))


def devices(count: int) -> list[Device]:
    return [Device(i, "gpu") for i in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_an_element_type_is_found_by_both_names_and_by_numpy(dtype):
    assert dtype_named(dtype.name) == dtype_named(dtype.short) == dtype == from_numpy(dtype.np)
    assert hash(dtype_named(dtype.name)) == hash(dtype)
    assert dtype.itemsize == dtype.np.itemsize
    assert [other for other in DTYPES if other == dtype] == [dtype]


def test_element_types():
    assert Float() == Float32() != Float64()
    assert (Float16().itemsize, BFloat16().itemsize, Float32().itemsize, Float64().itemsize) == (2, 2, 4, 8)
    wide = ["float16", "bfloat16", "float32", "float64"]
    assert [d.name for d in DTYPES if d.is_floating] == ["float8e4m3fn", "float8e5m2", *wide]
    for wrong in (lambda: dtype_named("float33"), lambda: from_numpy(np.complex64)):
        with pytest.raises(TypeRuleError, match=r"is not one of bool, .*float64"):
            wrong()


def test_tensors_are_compared_and_hashed_by_content():
    mesh = Mesh(devices(2), dp=2)
    same = [Tensor(Float(), (2, 3), mesh), Tensor(Float32(), (np.int64(2), 3), Mesh(devices(2), dp=2))]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    others = [
        Tensor(Float64(), (2, 3), mesh),
        Tensor(Float(), (3, 2), mesh),
        Tensor(Float(), (2, 3)),
        Tensor(Float(), (2, 3), mesh.devices[0]),
        Tensor(Float(), (2, 3), Mesh(devices(2), tp=2)),
    ]
    assert all(same[0] != other for other in others)
    assert len({*same, *others}) == 6
    assert same[0] != "f32[2, 3]"


def test_tensors_survive_pickling_with_their_hash():
    type_ = Tensor(Float(), (2, 3), Mesh(devices(4), dp=2, tp=2))
    again = pickle.loads(pickle.dumps(type_))
    assert again == type_ and hash(again) == hash(type_) and {type_: 1}[again] == 1


def test_sizes():
    assert (Tensor(Float(), (2, 3)).nbytes, Tensor(Float(), (2, 3)).size, Tensor(Float(), ()).nbytes) == (
        24,
        6,
        4,
    )
    assert TupleType((F23, Tensor(Int64(), (2,)))).nbytes == 24 + 16
    assert str(TupleType((F23, Tensor(Int64(), (2,))))) == "(f32[2, 3], i64[2])"
    assert F23.on(None) is F23 and F23.on(devices(1)[0]).on(None) == F23
    for wrong in ((-1,), (2.5,), ("n",)):
        with pytest.raises(TypeRuleError, match="must be non-negative integers"):
            Tensor(Float(), wrong)


def test_literals_are_compared_by_shape_element_type_and_content():
    ones = Literal(np.ones((2, 2), np.float32))
    assert ones == Literal(np.ones((2, 2), np.float32)) and hash(ones) == hash(Literal(ones.array.copy()))
    for other in (np.ones((2, 2)), np.ones(4, np.float32), np.zeros((2, 2), np.float32)):
        assert ones != Literal(other)
    assert (repr(Literal([1, 2])), repr(Literal(np.zeros((3, 3))))) == ("[1, 2]", "<float64[3, 3]>")


def test_a_literal_does_not_change_with_its_source_nor_in_place():
    source = np.ones(3)
    literal = Literal(source)
    source[0] = 5
    assert literal.array.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        literal.array[0] = 5


def test_attributes_are_hashed_whatever_the_order_and_kind_of_what_was_given():
    first = Attributes({"perm": [1, 0], "value": np.arange(3), "axis": np.int64(1)})
    second = Attributes({"axis": 1, "value": Literal(np.arange(3)), "perm": (1, 0)})
    assert first == second and hash(first) == hash(second) and list(first) == ["axis", "perm", "value"]
    assert first != Attributes({**second, "axis": 2}) and {**second}["perm"] == (1, 0)
    with pytest.raises(TypeError):
        first["axis"] = 2  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False)])
def test_attributes_that_print_differently_differ(one, other):
    """Rules are cached by attributes: equal must mean the same to every rule."""
    assert Attributes({"a": one}) != Attributes({"a": other})
    assert Attributes({"a": (one,)}) != Attributes({"a": (other,)})


def test_pickled_elsewhere_is_equal_here():
    """Hashes of strings, and of None, differ between processes: workers of a search have their own."""
    made = "Tensor(Float(), (2, 3)), Attributes({'axis': 'dp', 'perm': (1, 0)})"
    code = (
        "import pickle, sys; from distsim.ir import Float, Tensor; from distsim.ir.value import Attributes; "
        f"sys.stdout.buffer.write(pickle.dumps(({made})))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env)
    here = (Tensor(Float(), (2, 3)), Attributes({"axis": "dp", "perm": (1, 0)}))
    there = pickle.loads(run.stdout)
    assert there == here and hash(there) == hash(here)
