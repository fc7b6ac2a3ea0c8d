"""build_program: what a joint function becomes on a mesh, each piece of it made once."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from distsim.executor.program import Program
from distsim.ir import Device, Function, Mesh, Role
from distsim.ir.device import logical_mesh
from distsim.schedule import Schedule
from distsim.transforms.balance import coarse
from distsim.transforms.inline import inline
from distsim.transforms.numbered import Numbered
from distsim.transforms.outline import outline
from distsim.transforms.pipeline import Cut, cut_stages
from distsim.transforms.roles import roles
from distsim.transforms.shard import shard


def build_program(function: Function, mesh: Mesh, schedule: Schedule) -> Program:
    """Shard a joint function over ``mesh`` (axes pp, dp, tp) and cut it into the stages of ``schedule``.

    The composition behind :func:`parallel_transform_3d` and :func:`distsim.parallelize.parallelize`.
    Blocks that a flat function repeats become Calls first, and Calls that are too large to make
    balanced stages are written out. What was made of the function before, for other degrees or another
    order, is used again: a known division costs a look-up.
    """
    memory = _MEMORIES.get(function)
    if memory is None:
        memory = _MEMORIES[function] = _Memory(function)
    pp, dp, tp = (mesh.axis_size(axis) for axis in ("pp", "dp", "tp"))
    figures = logical_mesh(mesh.devices[0], 1, 1).devices[0]  # which of equal devices it is does not matter
    key = (pp, dp, tp, schedule.num_microbatches, figures)
    found = memory.cuts.get(key)
    if found is None:
        found = memory.cut(function, *key)
    return found.program(mesh, schedule)


MOST_CUTS = 8192
"""How many divisions of one function are remembered; then all are forgotten. One of a GPT of 96 layers
under Adam takes 1 MB, which plans that differ only in their replicas share."""


class _Memory:
    """What was made of one function, which it does not refer to: it is forgotten with the function."""

    def __init__(self, function: Function) -> None:
        calls = any(op.op_type == "Call" for op in function.ops)
        outlined = function if calls else outline(_updates_last(function))
        self.outlined = None if outlined is function else outlined
        self.numbered = [Numbered(outlined)]
        self.written: list[Function] = []  # with one level of Calls written out, with two, ...
        self.cuts: dict[tuple[int, int, int, int, Device], Cut] = {}

    def cut(self, function: Function, pp: int, dp: int, tp: int, microbatches: int, figures: Device) -> Cut:
        """Return ``function`` divided and cut for devices with these figures."""
        function = self._balanced(function, pp, figures)
        local = shard(function, logical_mesh(figures, min(dp, 2), tp), microbatches, dp)
        found = cut_stages(local, pp, figures)
        if len(self.cuts) >= MOST_CUTS:
            self.cuts.clear()
        self.cuts[pp, dp, tp, microbatches, figures] = found
        return found

    def _balanced(self, function: Function, pp: int, figures: Device) -> Function:
        """Write out Calls until they make ``pp`` balanced stages."""
        current = function if self.outlined is None else self.outlined
        level = 0
        while coarse(self.numbered[level], pp, figures):
            if level == len(self.written):
                self.written.append(inline(current))
                self.numbered.append(Numbered(self.written[level]))
            current = self.written[level]
            level += 1
        return current


def _updates_last(function: Function) -> Function:
    """Move what reads a parameter and makes what no op reads, as an update does, behind all other ops.

    An update waits for the whole batch: between the ops of the backward pass it would become part of a
    block that is run for each microbatch.
    """
    known = roles(function)
    read = {value for op in function.ops for value in op.inputs}
    late = [
        any(known.get(value) is Role.PARAMETER for value in op.inputs) and read.isdisjoint(op.outputs)
        for op in function.ops
    ]
    if late == sorted(late):
        return function
    order = sorted(range(len(late)), key=late.__getitem__)
    return replace(function, ops=tuple([function.ops[i] for i in order]))


_MEMORIES: WeakKeyDictionary[Function, _Memory] = WeakKeyDictionary()
