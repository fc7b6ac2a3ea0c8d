"""set_precision: the same function in another floating-point type, also where ONNX lags behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.errors import TypeRuleError
from distsim.importer import import_from_onnx
from distsim.ir import BFloat16, Float16, Float32, Function, FunctionMaker, Tensor, all_ops, verify
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
