"""set_precision: the same function in another floating-point type, also where ONNX lags behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distsim.errors import TypeRuleError
from distsim.executor import SequentialExecutor
from distsim.importer import import_from_onnx
from distsim.ir import (
    BFloat16,
    Float8E4M3FN,
    Float8E5M2,
    Float16,
    Float32,
    Function,
    FunctionMaker,
    Literal,
    Tensor,
    all_ops,
    verify,
)
from distsim.ir.type import UInt8
from distsim.models import gpt
from distsim.transforms import add_loss, differentiate, set_precision

DATA = Path(__file__).parent / "data"


def dtypes(function: Function) -> set:
    values = [*function.inputs, *(v for op in all_ops(function) for v in op.outputs)]
    return {value.type.dtype for value in values if value.type.dtype.is_floating}


@pytest.mark.parametrize("dtype", [Float16(), BFloat16()], ids=str)
def test_every_float_of_a_function_and_its_callees_changes(dtype):
    function = gpt(layers=2, hidden=8, heads=2, seq=4, batch=2, vocab=16)
    assert dtypes(function) == {Float32()}
    made = set_precision(function, dtype)
    verify(made)
    wide = {Float32()}  # the log-sum-exp of the loss, which backward reads
    assert dtypes(made) == {dtype} and dtypes(differentiate(made)) == {dtype} | wide
    assert [op.op_type for op in all_ops(made)] == [op.op_type for op in all_ops(function)]


def test_an_export_changes_with_its_constants_and_back():
    function = add_loss(import_from_onnx(DATA / "mlp.onnx"))
    there = set_precision(function, BFloat16())
    assert dtypes(there) == {BFloat16()}
    back = set_precision(there, Float32(), source=BFloat16())
    assert [v.type for v in back.inputs] == [v.type for v in function.inputs]


def test_operators_that_onnx_has_not_extended_take_bfloat16_as_float16():
    """Conv takes bfloat16 from opset 22 on; models are trained with it all the same."""
    maker = FunctionMaker("conv")
    x = maker.add_input_value("x", Tensor(BFloat16(), (2, 3, 8, 8)))
    w = maker.add_input_value("w", Tensor(BFloat16(), (4, 3, 3, 3)))
    y = maker.add_op("Conv", inputs=[x, w])
    assert y.type == Tensor(BFloat16(), (2, 4, 6, 6))
    half = maker.add_input_value("half", Tensor(Float16(), (4, 3, 3, 3)))
    with pytest.raises(TypeRuleError, match="Conv cannot take bfloat16 and float16 together"):
        maker.add_op("Conv", inputs=[x, half])


@pytest.mark.parametrize("dtype", [Float8E4M3FN(), Float8E5M2()], ids=str)
def test_operators_that_only_move_their_elements_take_those_of_8_bits(dtype):
    """Gather takes them in no opset, Transpose from 21 on; what computes does not take them."""
    maker = FunctionMaker("moves")
    x = maker.add_input_value("x", Tensor(dtype, (2, 3)))
    indices = Literal(np.array([2, 0], np.int64))
    taken = maker.add_op("Gather", inputs=[x], attributes={"axis": 1, "indices": indices})
    turned = maker.add_op("Transpose", inputs=[taken], attributes={"perm": (1, 0)})
    maker.set_outputs([turned])
    assert turned.type == Tensor(dtype, (2, 2))
    array = np.arange(6).reshape(2, 3).astype(dtype.np)
    (made,) = SequentialExecutor().compute(maker.finalize(), [array])
    np.testing.assert_array_equal(made, array[:, [2, 0]].T)
    for other in (Float8E5M2() if dtype == Float8E4M3FN() else Float8E4M3FN(), UInt8()):
        y = maker.add_input_value(f"of_{other.name}", Tensor(other, (2, 3)))
        with pytest.raises(TypeRuleError, match="cannot take float8.* and .* together; cast one"):
            maker.add_op("Concat", inputs=[x, y], attributes={"axis": 0})
    with pytest.raises(TypeRuleError, match="operand A cannot be"):
        maker.add_op("Add", inputs=[x, x])
