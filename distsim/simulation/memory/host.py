"""Memory of the hosts: what ``Offload`` takes of it and ``Fetch`` gives back, in the order of the calls."""

from __future__ import annotations

from typing import NamedTuple

from distsim.ir import Device, Function, Op, Tensor, Value, place_of
from distsim.ir.device import devices_of
from distsim.program.program import Program
from distsim.simulation.tasks.rank_classes import placement_classes


class HostUse(NamedTuple):
    """Bytes of its host's memory that a device takes: the net change, and the most relative to the start."""

    net: int = 0
    peak: int = 0

    def then(self, other: HostUse) -> HostUse:
        """Return what both take, one after the other."""
        return HostUse(self.net + other.net, max(self.peak, self.net + other.peak))


def host_memory(function: Function) -> dict[Device, int]:
    """Return the most bytes of its host's memory that each device takes at a time."""
    found: dict[Device, int] = {}
    for group in placement_classes(function).members:
        use = _HostWalk(group[0]).use(function)
        found.update(dict.fromkeys(group, use.peak))
    return dict(sorted(found.items(), key=lambda item: item[0].id))


def program_host_memory(program: Program) -> dict[Device, int]:
    """Return the same of a program, as of the step written out."""
    table, walk = program.table(), _HostWalk(None)
    uses = [HostUse() if block.function is None else walk.use(block.function) for block in table.blocks]
    ranks = [HostUse()] * table.num_ranks
    if any(use.peak for use in uses):
        for number, _, _ in table.rows():
            rank = table.blocks[number].rank
            ranks[rank] = ranks[rank].then(uses[number])
    pairs = zip(program.mesh.slices("pp"), ranks, strict=True)
    found = {device: use.peak for mesh, use in pairs for device in mesh.devices}
    return dict(sorted(found.items(), key=lambda item: item[0].id))


class _HostWalk:
    """Walks functions, each once, for what is on one device; None: on all alike."""

    def __init__(self, device: Device | None) -> None:
        self.device = device
        self.known: dict[Function, HostUse] = {}

    def use(self, function: Function) -> HostUse:
        found = self.known.get(function)
        if found is None:
            found = HostUse()
            for op in function.ops:
                found = found.then(self._op(op))
            self.known[function] = found
        return found

    def _op(self, op: Op) -> HostUse:
        if op.is_call:
            return self.use(op.callee)
        if op.op_type == "Offload":
            made = sum(map(self._nbytes, op.outputs))
            return HostUse(made, made)
        return HostUse(-sum(map(self._nbytes, op.inputs))) if op.op_type == "Fetch" else HostUse()

    def _nbytes(self, value: Value) -> int:
        there = self.device is None or self.device in devices_of(place_of(value))
        return value.type.host_nbytes if there and isinstance(value.type, Tensor) else 0
