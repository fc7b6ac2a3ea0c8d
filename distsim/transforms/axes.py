"""What may be divided along each axis of ranks: the batch over dp and time, features over tp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distsim.errors import PlanError
from distsim.ir import Device, Function, Mesh, Op, Role, Tensor, Value, callees
from distsim.ir.type import as_tensor
from distsim.transforms.decide import Axis, Decision, can_divide, decide, pieces_of
from distsim.transforms.placement import REPLICATED, State, sharded
from distsim.transforms.roles import Mark, Marks, marked, propagate
from distsim.transforms.strategies import Allowed


def batch_axis(function: Function, data: tuple[Value, ...], marks: Marks, parts: int, device: Device) -> Axis:
    """Return the choice over the batch: data inputs are divided, everything else starts out whole."""
    given = dict.fromkeys(function.inputs, REPLICATED) | dict.fromkeys(data, sharded(0))

    def allowed(op: Op) -> Allowed:
        return marked(op, marks)

    return Axis(parts, device, allowed, given, over_time=True)


def tensor_decision(
    function: Function,
    known: Mapping[Value, Role],
    batch: Marks,
    mesh: Mesh,
    dp: int,
    microbatches: int,
    decided: Decision,
) -> Decision:
    """Tensor parallelism divides what derives from parameters and does not carry the batch."""
    tp = mesh.axis_size("tp")
    parts = dp * microbatches
    if tp == 1:
        return Decision({}, {}, 0.0, True)
    pieces = pieces_of((*callees(function), function))

    def dims(value: Value, count: int) -> frozenset[Mark]:
        sizes = as_tensor(value.type, value.name).shape[:count]
        return frozenset((i, p) for i, n in enumerate(sizes) if n > 1 for p in (None, *pieces.get(n, ())))

    trained = [v for v in function.inputs if known[v] in (Role.PARAMETER, Role.STATE)]
    given = [v for v in function.inputs if known[v] is Role.INPUT]
    marks = propagate(function, {v: dims(v, as_tensor(v.type, v.name).rank) for v in trained})
    kept = propagate(function, {v: dims(v, _kept_whole(as_tensor(v.type, v.name))) for v in given})

    def allowed(op: Op) -> Allowed:
        of_parameter, of_data, of_batch = marked(op, marks), marked(op, kept), marked(op, batch)

        def test(factor: str, part: tuple[int, ...] | None) -> bool:
            # In a dimension that merges the batch with another, behind the batch: heads of attention.
            behind = not of_batch(factor, None) or (part is not None and len(part) % parts == 0)
            return of_parameter(factor, part) and not of_data(factor, part) and behind

        return test

    data = {v: REPLICATED for v in function.inputs if known[v] in (Role.INPUT, Role.CONSTANT)}
    axis = Axis(tp, mesh.devices[0], allowed, data, repeats=_repeats(function, decided, dp, microbatches))
    found = decide(function, axis)
    if found.divided == 0:
        usable = [n for n in range(2, MOST_SUGGESTED + 1) if can_divide(function, replace(axis, ranks=n))]
        raise PlanError(
            f"tp={tp} divides no matrix product of {function.name}: every rank would do all of the work; "
            f"degrees that divide some: {', '.join(map(str, usable)) or 'none, use tp=1'}"
        )
    return found


MOST_SUGGESTED = 64


def _kept_whole(data: Tensor) -> int:
    """Return how many leading dimensions of a data input tp does not divide: all that are not features.

    Dividing the sequence is another kind of parallelism; a table of positions has that dimension too.
    """
    return data.rank if not data.dtype.is_floating else max(data.rank - 1, 1)


def _repeats(function: Function, batch: Decision, dp: int, microbatches: int) -> dict[Value, float]:
    """Return how often the whole of each value is moved in a step, over all dp ranks.

    What is divided over the batch is moved once, a part at a time; a gradient once per rank, after it is
    summed over microbatches; a weight once per rank and microbatch.
    """
    found: dict[Value, float] = {}
    for current in (*callees(function), function):
        raw: dict[Value, State] = {value: batch.state(value) for value in current.inputs}
        for op in current.ops:
            states = batch.strategies[op].outputs if op in batch.strategies else ()
            raw.update(zip(op.outputs, states or map(batch.state, op.outputs), strict=True))
        for value, state in raw.items():
            once = 1.0 if state.sharded else float(dp)
            found[value] = once * microbatches if state is REPLICATED else once
    return found
