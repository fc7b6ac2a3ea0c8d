"""What layers save of a microbatch under any division: it is known before one is built.

Of what a forward pass makes and its backward pass reads, kernels make again at most what is element by
element, where all that reads it may run with it (:mod:`distsim.transforms.recompute.interiors`). All else is
held from the one to the other: what products, normalizations and attention make, what these read in the
backward pass, and what a layer takes in. How a plan divides a microbatch only adds to it: copies, and what
collectives return. What a policy of recomputation leaves of it does not depend on the division either, but
for those that count layers of a stage or weigh seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distsim.errors import PlanError
from distsim.ir import Function, Op, Tensor, Value
from distsim.ir.function import readers_of
from distsim.ops import operator
from distsim.program.block import Block
from distsim.transforms.kernels.policies import Kernels
from distsim.transforms.recompute.interiors import run_with, runs_again
from distsim.transforms.recompute.joint import Joint, Pair, find_pairs, joint_of
from distsim.transforms.recompute.transform import rematerialize

_KNOWN = ("none", "attention", "full")
"""The policies of which it is known what every layer saves, whatever the plan."""


def layers_saved_bytes(function: Function, kernels: Kernels, remat: str = "none") -> int:
    """Return the bytes that the layers of a joint function save at least, divided by nothing.

    Layers are Calls whose results a Call of the backward pass reads; 0 where there are none, and for a
    policy of which it is not known.
    """
    if remat not in _KNOWN:
        return 0
    again = remat == "full"  # from all that a layer takes in
    try:
        joint = Joint.of(function if again else rematerialize(function, remat))
    except PlanError:  # there is nothing to recompute
        return 0
    known: dict[tuple[object, ...], _LayerSaves] = {}
    total, handed, taken = 0, set[Value](), dict[Value, None]()
    for pair in find_pairs(joint):
        key = pair.forward.callee, *pair.key
        if key not in known:
            known[key] = _layer_saves(pair, kernels, again)
        saves = known[key]
        total += saves.nbytes
        handed.update([pair.forward.outputs[place] for place in saves.handed_on])
        read = pair.forward.inputs if again else set(pair.forward.inputs) & set(pair.backward.inputs)
        taken.update(dict.fromkeys(read))
    return total + sum(v.type.nbytes for v in taken if v in handed and isinstance(v.type, Tensor))


class _LayerSaves(NamedTuple):
    """The bytes that a layer saves of what it makes, and which of its results are none of them, nor show what
    it takes in: what another layer saves of these counts there."""

    nbytes: int
    handed_on: tuple[int, ...]


def _layer_saves(pair: Pair, kernels: Kernels, again: bool) -> _LayerSaves:
    """Return what a layer saves: views count as what they show, values of weights alone as nothing, and all
    that it makes if that is made ``again``."""
    joint = joint_of(pair)
    readers = readers_of(filter(joint.behind, joint.function.ops))
    made = joint.made
    fixed = set(joint.free)
    for op in joint.function.ops:
        if op in joint.forward and fixed.issuperset(op.inputs):
            fixed.update(op.outputs)
    readers = {} if again else readers
    kept = [v for v in made if v in readers and not _is_made_again(made[v], readers[v], kernels)]
    bases = dict.fromkeys([base for value in kept if (base := _base(value, made)) in made])
    saved = sum(v.type.nbytes for v in bases if v not in fixed and isinstance(v.type, Tensor))
    shown = {_base(value, made) for value in made if value in readers}
    given = [*zip(pair.required, joint.function.outputs, strict=False)]
    handed = [place for place, v in given if v in made and _base(v, made) is v and v not in shown]
    return _LayerSaves(saved, tuple(handed))


def _is_made_again(maker: Op, readers: Iterable[Op], kernels: Kernels) -> bool:
    """Whether kernels of the backward pass may make again what an op makes."""
    if not kernels.interiors or kernels.joins is None:
        return False
    return runs_again(maker) and run_with(maker, readers, kernels.joins)


def _base(value: Value, made: dict[Value, Op]) -> Value:
    """Return the value in whose memory one lies."""
    while value in made and operator(made[value].op_type).view:
        value = made[value].inputs[0]
    return value


def saved_bytes(forward: Block, backward: Block, once: set[Value]) -> tuple[int, int]:
    """Return the bytes of what the calls of a forward block read and make that backward reads, each as much
    as the one of its callee that has least, and of all that the block makes for it.

    Of the first, what one call alone reads counts with it, and what it makes for backward alone: so every
    layer has as much, wherever stages begin. Views count as what they show.
    """
    function, kept = forward.function, set(backward.inputs) - once
    given = zip(function.inputs, forward.inputs, strict=True)
    handed = zip(function.outputs, forward.outputs, strict=True)
    shown, readers, made = _homes(function), dict[Value, list[Op]](), dict[Value, Op]()
    for op in function.ops:
        if operator(op.op_type).view:
            continue
        for value in op.inputs:
            readers.setdefault(shown.get(value, value), []).append(op)
        if op.is_call:
            made.update(dict.fromkeys((shown.get(value, value) for value in op.outputs), op))
    ends = [shown.get(value, value) for value, key in handed if key in kept]
    saved = dict.fromkeys([*(shown.get(value, value) for value, key in given if key in kept), *ends])
    alone = {
        value: readers.get(value) or [made[value]] for value in saved if value in readers or value in made
    }
    own = dict.fromkeys(ends).keys() - {*function.inputs}
    return _least_of_calls(function, alone), sum(_nbytes(value) for value in own)


def _least_of_calls(function: Function, readers: Mapping[Value, Sequence[Op]]) -> int:
    """Return the bytes of values that one call alone reads, as many calls as each callee has taken to have
    as much as the one that has least."""
    amounts = {op: 0 for op in function.ops if op.is_call}
    for value, ops in readers.items():
        if len(ops) == 1 and ops[0] in amounts:
            amounts[ops[0]] += _nbytes(value)
    each: dict[Function, list[int]] = {}
    for op, amount in amounts.items():
        each.setdefault(op.callee, []).append(amount)
    return sum(len(own) * min(own) for own in each.values())


def _shown(call: Op) -> Iterator[tuple[Value, Value]]:
    """Yield the outputs of a call in whose memory another one lies, or an input, with that."""
    makers = {value: op for op in call.callee.ops for value in op.outputs}
    given = dict(zip(call.callee.inputs, call.inputs, strict=True))
    first: dict[Value, Value] = {}
    for outer, value in zip(call.outputs, call.callee.outputs, strict=True):
        while value in makers and operator(makers[value].op_type).view:
            value = makers[value].inputs[0]
        yield outer, given.get(value) or first.setdefault(value, outer)


def _nbytes(value: Value) -> int:
    return value.type.nbytes if isinstance(value.type, Tensor) and not value.type.on_host else 0


def pending_bytes(forward: Block, halves: tuple[Block, Block], once: set[Value]) -> int:
    """Return the bytes of what the calls of the second half of a backward pass read of a microbatch, each as
    much as the one that has least: forward pass and first half keep it until then. Views count as what they
    show, and what several calls read does not."""
    homes: dict[Value, Value] = {}
    for block in (forward, halves[0]):
        shown, given = _homes(block.function), dict(zip(block.function.inputs, block.inputs, strict=True))
        for value, key in zip(block.function.outputs, block.outputs, strict=True):
            home = shown.get(value, value)
            home = given.get(home, home)
            homes[key] = homes.get(home, home)
    second = halves[1]
    given = dict(zip(second.function.inputs, second.inputs, strict=True))
    readers: dict[Value, list[Op]] = {}
    for op in second.function.ops:
        for key in dict.fromkeys(given[value] for value in op.inputs if value in given):
            if key not in once:
                readers.setdefault(homes.get(key, key), []).append(op)
    return _least_of_calls(second.function, readers)


def _homes(function: Function) -> dict[Value, Value]:
    """Return what is shown by views of a function, and by what its calls make."""
    shown: dict[Value, Value] = {}
    for op in function.ops:
        if operator(op.op_type).view:
            shown[op.outputs[0]] = shown.get(op.inputs[0], op.inputs[0])
        elif op.is_call:
            shown.update((value, shown.get(home, home)) for value, home in _shown(op))
    return shown
