"""add_loss: append a loss to a function that ends in predictions."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.errors import PlanError
from distsim.ir import Function, FunctionMaker, Int64, Role, Tensor, Value
from distsim.suggestions import choices_for
from distsim.transforms.autodiff.outputs import kept_outputs, only_needed

LOSSES = ("auto", "cross_entropy", "mse")


def check_loss(kind: str) -> None:
    """Raise :class:`PlanError` for a kind of loss that there is not."""
    if kind not in LOSSES:
        raise PlanError(f"loss {kind!r} is not one of {choices_for(kind, LOSSES)}")


def add_loss(function: Function, kind: str = "auto", keep: Sequence[str] = ()) -> Function:
    """Return ``function`` with a scalar loss of its first floating-point output in place of its outputs.

    ``"mse"`` adds a target of the output's type and takes the mean over the batch of the squared
    error; ``"cross_entropy"`` adds integer labels and takes the mean over positions of the cross
    entropy over the last dimension. ``"auto"`` takes a scalar for the loss as it is, cross entropy for models
    of token ids or images (an integer input, or one of rank 4), and mean squared error otherwise.

    Outputs: the loss, then those of ``function`` that ``keep`` names, in their order. What none of these
    needs is left out, ops and stored inputs, and a note of the function says what.

    Raises :class:`PlanError` for an unknown kind or name, and where there is nothing to take the loss of.
    """
    check_loss(kind)
    output = _prediction(function)
    if output is None:
        raise PlanError(f"{function.name} has no floating-point output to take a loss of")
    type_ = output.type
    if kind == "auto" and type_.shape == ():
        return _needed(function, output.value, kept_outputs(function, keep, output.value))
    if kind == "auto":
        kind = "cross_entropy" if _classifies(function) and type_.rank >= 2 else "mse"
    if type_.rank == 0 or (kind == "cross_entropy" and type_.rank < 2):
        raise PlanError(f"{function.name}: a {kind} loss needs predictions with a batch, not {type_}")
    kept = kept_outputs(function, keep)
    function = _needed(function, output.value, kept)
    maker = FunctionMaker(function.name, function.notes)
    maker.adopt_inputs(function.inputs)
    if kind == "cross_entropy":
        labels = Tensor(Int64(), type_.shape[:-1], type_.device)
        target = maker.add_input_value("labels", labels, Role.INPUT)
        op_type, count = "CrossEntropyLoss", labels.size
    else:
        target = maker.add_input_value("target", type_, Role.INPUT)
        op_type, count = "Loss", type_.shape[0]
    for op in function.ops:
        maker.adopt(op)
    loss = maker.add(op_type, [output.value, target], {"N": max(count, 1)}, output_names=["loss"])
    maker.set_outputs([*loss, *kept])
    return maker.finalize()


def _needed(function: Function, prediction: Value, kept: Sequence[Value]) -> Function:
    data = frozenset(function.inputs_with(Role.INPUT))
    return only_needed(function, (prediction, *kept), "the loss does not need it", data)


class _Prediction:
    def __init__(self, value: Value, type_: Tensor) -> None:
        self.value, self.type = value, type_


def _prediction(function: Function) -> _Prediction | None:
    for value in function.outputs:
        if isinstance(value.type, Tensor) and value.type.dtype.is_floating:
            return _Prediction(value, value.type)
    return None


def _classifies(function: Function) -> bool:
    data = [v.type for v in function.inputs_with(Role.INPUT) if isinstance(v.type, Tensor)]
    return any(not tensor.dtype.is_floating or tensor.rank == 4 for tensor in data)
