"""add_loss: append a loss to a function that ends in predictions.

What a training function computes and of what: the loss, outputs that the user keeps, parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from distsim.errors import PlanError
from distsim.ir import Function, FunctionMaker, Int64, Op, Role, Tensor, Value, count_ops, needed_ops, trim
from distsim.suggestions import choices_for

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
    of token ids or images (an integer input, or one of rank 4), and mean squared error otherwise, which a
    note says.

    Outputs: the loss, then those of ``function`` that ``keep`` names, in their order. What none of these
    needs is left out, ops and stored inputs, and a note of the function says what.

    Raises :class:`PlanError` for an unknown kind or name, and where there is nothing to take the loss of.
    """
    check_loss(kind)
    typed = [(value, value.type) for value in function.outputs if isinstance(value.type, Tensor)]
    output, type_ = next(((v, tensor) for v, tensor in typed if tensor.dtype.is_floating), (None, None))
    if output is None or type_ is None:
        raise PlanError(f"{function.name} has no floating-point output to take a loss of")
    if kind == "auto" and type_.shape == ():
        return _needed(function, output, kept_outputs(function, keep, output))
    said: list[str] = []
    if kind == "auto":
        kind = "cross_entropy" if _classifies(function) and type_.rank >= 2 else "mse"
        said.append(f"its loss is {kind} of {output.name}, as the model has none and no other is asked for")
    if type_.rank == 0 or (kind == "cross_entropy" and type_.rank < 2):
        raise PlanError(f"{function.name}: a {kind} loss needs predictions with a batch, not {type_}")
    kept = kept_outputs(function, keep)
    function = _needed(function, output, kept)
    maker = FunctionMaker(function.name, (*function.notes, *said))
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
    loss = maker.add(op_type, [output, target], {"N": max(count, 1)}, output_names=["loss"])
    maker.set_outputs([*loss, *kept])
    return maker.finalize()


def _needed(function: Function, prediction: Value, kept: Sequence[Value]) -> Function:
    data = frozenset(function.inputs_with(Role.INPUT))
    return only_needed(function, (prediction, *kept), "the loss does not need it", data)


def _classifies(function: Function) -> bool:
    data = [v.type for v in function.inputs_with(Role.INPUT) if isinstance(v.type, Tensor)]
    return any(not tensor.dtype.is_floating or tensor.rank == 4 for tensor in data)


MOST_NAMES = 4
"""How many names of a kind a note gives."""


def kept_outputs(function: Function, names: Sequence[str], loss: Value | None = None) -> tuple[Value, ...]:
    """Return the outputs of these names, in the order of ``function``, but for the loss, an output anyway.

    Raises :class:`PlanError` for a name that no output has.
    """
    if isinstance(names, str):
        raise PlanError(f"keep={names!r}: give a list of names of outputs, [{names!r}]")
    known = dict.fromkeys([value.name for value in function.outputs])
    for name in names:
        if name not in known:
            raise PlanError(
                f"keep: {function.name} has no output {name!r}; it has {', '.join(known) or 'none'}"
            )
    return tuple(dict.fromkeys([v for v in function.outputs if v.name in names and v is not loss]))


def only_needed(
    function: Function, outputs: Sequence[Value], reason: str, stay: Container[Value] | None = None
) -> Function:
    """Return ``function`` with these outputs and what they need; a note says what is left out.

    ``reason`` is what the note gives as one; ``stay`` holds the inputs that stay unread, by default all.
    """
    trimmed = trim(function, outputs, stay)
    made = trimmed.function
    if made is function:
        return function
    computed = {*made.inputs, *(value for op in made.ops for value in op.outputs)}
    lost = [value.name for value in function.outputs if value not in computed]
    found = [_named(len(lost), "output", lost)] if lost else []
    ops = count_ops(function) - count_ops(made)
    if ops:
        found.append(_named(ops, "op", [] if lost else _ends(trimmed.dead)))
    gone = (_read(function) - _read(made)) | (set(function.inputs) - set(made.inputs))
    for role in Role:
        names = [value.name for value in function.inputs if value in gone and value.role is role]
        found += [_named(len(names), role.value, names)] if names else []
    if not found:
        return made
    way = "; keep (--keep NAME) an output to have it computed" if lost else ""
    note = f"left out, as {reason}: {', '.join(found)}{way}"
    return replace(made, notes=(*made.notes, note))


def mark_forward(function: Function) -> Function:
    """Return ``function``, whose first output is the loss, with each other output marked as one of forward.

    What the loss does not need stands as early as it can: right after the last op that it reads, so that a
    pipeline computes it on that stage and sends nothing for it.
    """
    loss, *kept = function.outputs
    if not kept:
        return function
    needed = set(needed_ops(function.ops, [loss]))
    marks = {value: Op("ForwardOutput", (value,), (Value(value.name, value.type),)) for value in kept}
    place: dict[Value, int] = {}  # of the last op of the loss that a value follows from
    after: dict[int, list[Op]] = {}

    def add(op: Op, at: int) -> None:
        after.setdefault(at, []).append(op)
        for value in op.outputs:
            place[value] = at
            if value in marks:
                after[at].append(marks[value])

    for value in function.inputs:
        if value in marks:
            after.setdefault(-1, []).append(marks[value])
    for number, op in enumerate(function.ops):
        add(op, number if op in needed else max([place.get(value, -1) for value in op.inputs], default=-1))
    ops = [op for number in range(-1, len(function.ops)) for op in after.get(number, ())]
    outputs = (loss, *[marks[value].outputs[0] for value in kept])
    return replace(function, ops=tuple(ops), outputs=outputs)


def how_to_mark(function: Function) -> str:
    """Return how the inputs of a function are said to be parameters, naming a few of them."""
    names = [v.name for v in function.inputs if isinstance(v.type, Tensor) and v.type.dtype.is_floating]
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return (
        "graph inputs of an export are marked with --parameters PATTERN, or "
        f"import_from_onnx(path, parameters=[PATTERN]). Its floating-point inputs are {listed or 'none'}"
    )


def _read(function: Function) -> set[Value]:
    return {*function.outputs, *(value for op in function.ops for value in op.inputs)}


def _ends(dead: Sequence[Op]) -> list[str]:
    """Return the names of what the last of the dead ops make."""
    read = {value for op in dead for value in op.inputs}
    ends = [op for op in dead if read.isdisjoint(op.outputs)]
    return [op.outputs[0].name for op in reversed(ends)]


def _named(count: int, what: str, names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    listed = f" ({', '.join([*names[:MOST_NAMES], *more])})" if names else ""
    return f"{count} {what}{'s' if count != 1 else ''}{listed}"
