"""A training step of few of its layers: what one of equal layers does, it does in a step of two of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from distsim.ir import Function, Op, Role, Value, rewire_op

Link = tuple[int, int]
"""By which input a call of a callee follows which output of the call before."""


def shortened(function: Function, layers: Sequence[Collection[Value]], kept: int) -> Function | None:
    """Return the step of the first ``kept`` of equal layers, of each of which the parameters are given.

    What the last of these makes is read in the place of what the last of all made, forward, and likewise
    backward; what follows from other layers alone, as their updates, is gone, and a sum over layers has fewer
    terms. None where layers are no chain, or something else reads of all of them.

    >>> from distsim.models import gpt
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(gpt(layers=6, hidden=8, heads=2, seq=4, batch=2, vocab=16), SGD())
    >>> layers = [[v for v in op.inputs if v.role is Role.PARAMETER] for op in step.ops if op.is_call][:6]
    >>> sum(op.is_call for op in step.ops), sum(op.is_call for op in shortened(step, layers, 2).ops)
    (18, 6)
    """
    links = _links(function)
    if links is None or not 0 < kept < len(layers):
        return None
    left_out = _parameters_left_out(function, layers, kept)
    gone, stands, ops = set(left_out), dict[Value, Value](), list[Op]()
    for op in function.ops:
        if gone.isdisjoint(op.inputs):
            ops.append(rewire_op(op, stands))
            continue
        left = [value for value in op.inputs if value not in gone]
        of_layer = not left_out.isdisjoint(op.inputs)
        stays = left and not of_layer if op.is_call else any(v.role is Role.PARAMETER for v in left)
        passes = _passing(op, left, links, of_layer)
        if stays or (passes is not None and passes[0].type != passes[1].type):
            return None
        gone.update(op.outputs)
        if passes is not None:
            value, made = passes
            stands[made] = stands.get(value, value)
            gone.remove(made)
    outputs = [stands.get(value, value) for value in function.outputs if value not in gone]
    read = {value for op in ops for value in op.inputs}.union(outputs)
    unread = {value for op in function.ops for value in op.inputs} - read
    inputs = [value for value in function.inputs if value not in unread]
    return replace(function, inputs=tuple(inputs), ops=tuple(ops), outputs=tuple(outputs))


def _passing(
    op: Op, left: Sequence[Value], links: Mapping[Function, Link], of_layer: bool
) -> tuple[Value, Value] | None:
    """Return what an op that is gone was given of what is ``left``, and what it made of that alone."""
    if op.op_type == "Add" and left:
        return left[0], op.outputs[0]
    if not of_layer or not op.is_call or op.callee not in links:
        return None
    place, made = links[op.callee]
    return (op.inputs[place], op.outputs[made]) if op.inputs[place] in left else None


def _parameters_left_out(
    function: Function, layers: Sequence[Collection[Value]], kept: int
) -> frozenset[Value]:
    """Return the parameters of all but the first layers, in the order in which these are called."""
    of_layer = {value: number for number, layer in enumerate(layers) for value in layer}
    called = (value for op in function.ops if op.is_call for value in op.inputs)
    order = list(dict.fromkeys(of_layer[value] for value in called if value in of_layer))
    return frozenset([value for number in order[kept:] for value in layers[number]])


def _links(function: Function) -> Mapping[Function, Link] | None:
    """Return the links of all callees whose calls are chains; None where calls are linked in other ways."""
    calls: dict[Function, list[Op]] = {}
    for op in function.ops:
        if op.is_call:
            calls.setdefault(op.callee, []).append(op)
    found: dict[Function, Link] = {}
    for callee, own in calls.items():
        links = {_link(one, two) for one, two in pairwise(own)}
        if len(links) > 1 or any(len(each) > 1 for each in links):
            return None
        for each in links - {()}:
            found[callee] = each[0]
    return found


def _link(one: Op, two: Op) -> tuple[Link, ...]:
    """Return by which inputs a call follows which outputs of another."""
    made = {value: place for place, value in enumerate(one.outputs)}
    return tuple([(place, made[value]) for place, value in enumerate(two.inputs) if value in made])
