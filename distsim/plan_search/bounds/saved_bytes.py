"""What layers save of a microbatch under any division: it is known before one is built.

Of what a forward pass makes and its backward pass reads, kernels make again at most what is element by
element, where all that reads it may run with it (:mod:`distsim.transforms.recompute.interiors`). All else is
held from the one to the other: what products, normalizations and attention make, what these read in the
backward pass, and what a layer takes in. How a plan divides a microbatch only adds to it: copies, and what
collectives return. What a policy of recomputation leaves of it does not depend on the division either, but
for those that count layers of a stage or weigh seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from distsim.errors import PlanError
from distsim.ir import Function, Op, Tensor, Value
from distsim.ops import operator
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
        if pair.key not in known:
            known[pair.key] = _layer_saves(pair, kernels, again)
        saves = known[pair.key]
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
    readers: dict[Value, list[Op]] = {}
    for op in joint.function.ops:
        if joint.behind(op):
            for value in op.inputs:
                readers.setdefault(value, []).append(op)
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
