"""Sums and products of eager mode read operands of narrower types as they are."""

import pytest

from distsim.ir import Float, FunctionMaker, Tensor
from distsim.ir.type import dtype_named
from distsim.ops import op_label
from distsim.ops.onnx_bridge import type_number
from distsim.transforms.kernels import KERNELS, fuse


def launched(maker: FunctionMaker) -> list[str]:
    return [op_label(op) for op in fuse(maker.finalize(), KERNELS["eager"]).function.ops]


@pytest.mark.parametrize(
    ("op", "read", "cast", "one"),
    [
        ("Add", "bfloat16", "float32", True),
        ("Mul", "bfloat16", "float32", True),
        ("Add", "float32", "bfloat16", False),
        ("Sigmoid", "bfloat16", "float32", False),
    ],
)
def test_eager_mode_reads_operands_of_narrower_types_as_they_are(op, read, cast, one):
    maker = FunctionMaker("mixed")
    x = maker.add_input_value("x", Tensor(dtype_named(read), (4, 8)))
    y = maker.add_input_value("y", Tensor(dtype_named(cast), (4, 8)))
    (wide,) = maker.add("Cast", [x], {"to": type_number(dtype_named(cast))})
    maker.set_outputs(maker.add(op, [y, wide] if op != "Sigmoid" else [wide]))
    assert launched(maker) == ([f"Cast+{op}"] if one else ["Cast", op])


def test_eager_mode_casts_what_several_ops_read():
    maker = FunctionMaker("shared")
    x = maker.add_input_value("x", Tensor(dtype_named("bfloat16"), (4, 8)))
    y = maker.add_input_value("y", Tensor(Float(), (4, 8)))
    (wide,) = maker.add("Cast", [x], {"to": type_number(Float())})
    maker.set_outputs([*maker.add("Add", [y, wide]), *maker.add("Mul", [wide, y])])
    assert launched(maker) == ["Cast", "Add", "Mul"]


def test_eager_mode_casts_what_is_added_to_itself():
    maker = FunctionMaker("twice")
    x = maker.add_input_value("x", Tensor(dtype_named("bfloat16"), (4, 8)))
    (wide,) = maker.add("Cast", [x], {"to": type_number(Float())})
    maker.set_outputs(maker.add("Add", [wide, wide]))
    assert launched(maker) == ["Cast", "Add"]
