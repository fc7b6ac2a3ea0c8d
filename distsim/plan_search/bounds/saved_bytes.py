"""What layers save of a microbatch under any division that recomputes none: it is known before one is built.

Of what a forward pass makes and its backward pass reads, kernels make again at most what is element by
element, where all that reads it may run with it (:mod:`distsim.transforms.recompute.interiors`). All else is
held from the one to the other: what products, normalizations and attention make, and what these read in the
backward pass. How a plan divides a microbatch only adds to it: copies, and what collectives return.
"""

from __future__ import annotations

from collections.abc import Iterable

from distsim.ir import Function, Op, Tensor, Value
from distsim.ops import operator
from distsim.transforms.kernels.policies import Kernels
from distsim.transforms.recompute.interiors import run_with, runs_again
from distsim.transforms.recompute.joint import Joint, find_pairs, joint_of


def layers_saved_bytes(function: Function, kernels: Kernels) -> int:
    """Return the bytes that the layers of a joint function save at least, divided by nothing.

    Layers are Calls whose results a Call of the backward pass reads; 0 where there are none.
    """
    known: dict[tuple[object, ...], int] = {}
    total = 0
    for pair in find_pairs(Joint.of(function)):
        if pair.key not in known:
            known[pair.key] = _saved_bytes(joint_of(pair), kernels)
        total += known[pair.key]
    return total


def _saved_bytes(joint: Joint, kernels: Kernels) -> int:
    """Return those of a layer: views count as what they show, values of weights alone as nothing."""
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
    kept = [v for v in made if v in readers and not _is_made_again(made[v], readers[v], kernels)]
    bases = dict.fromkeys([base for value in kept if (base := _base(value, made)) in made])
    return sum(v.type.nbytes for v in bases if v not in fixed and isinstance(v.type, Tensor))


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
