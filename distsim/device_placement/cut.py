"""Cutting a function into Calls, one per part."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.ir import Function, FunctionMaker, Op, Value, copy_function


def cut(function: Function, groups: Sequence[Sequence[int]], order: Sequence[int]) -> Function:
    """Return ``function`` as Calls of ``part_k`` with the ops number ``groups[k]``, called in ``order``.

    A callee takes what its ops read from outside, in the order in which they read it, and returns what
    other parts read or the function returns (of a part of which nothing is read, all that it makes last).
    It computes what ``function`` computes. Raises ``IRError`` when a part reads one that comes later.
    """
    users: dict[Value, list[int]] = {}
    part_of = {number: index for index, group in enumerate(groups) for number in group}
    for number, op in enumerate(function.ops):
        for value in op.inputs:
            users.setdefault(value, []).append(part_of[number])
    returned = set(function.outputs)
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    copies: dict[Value, Value] = {value: value for value in function.inputs}
    for index in order:
        ops = [function.ops[number] for number in sorted(groups[index])]
        made = [value for op in ops for value in op.outputs]
        wanted = [v for v in made if v in returned or any(part != index for part in users.get(v, ()))]
        wanted = wanted or [value for value in made if value not in users]
        callee, reads = _callee(f"part_{index}", ops, wanted)
        inputs = [copies[value] for value in reads]
        names = [value.name for value in wanted]
        outputs = maker.add("Call", inputs, None, (callee,), names, None, callee.name)
        copies.update(zip(wanted, outputs, strict=True))
    maker.set_outputs([copies[value] for value in function.outputs])
    return maker.finalize()


def _callee(name: str, ops: Sequence[Op], wanted: Sequence[Value]) -> tuple[Function, list[Value]]:
    """Return a function of these ops, and the values of the caller that it takes."""
    made = {value for op in ops for value in op.outputs}
    reads = list(dict.fromkeys(value for op in ops for value in op.inputs if value not in made))
    return copy_function(Function(name, tuple(reads), tuple(ops), tuple(wanted))), reads
