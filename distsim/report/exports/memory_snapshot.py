"""Memory as PyTorch's tools show it: the pickle of ``torch.cuda.memory._snapshot``.

Made for https://pytorch.org/memory_viz and ``python -m torch.cuda._memory_viz`` (torch 2.14), whose viewer
reads dicts, lists, texts and numbers of pickle protocol 2 to 4.
"""

from __future__ import annotations

import bisect
import os
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from distsim.errors import SimulationError
from distsim.report.exports.folders import chosen_devices
from distsim.report.output import replacing
from distsim.simulation import Simulation
from distsim.simulation.memory.timeline import Allocation, allocations
from distsim.simulation.memory.walk import KINDS

MOST_EVENTS = 4_000_000
"""Beyond it the viewer, and a pickle in memory, are too slow to be of use."""

BASE = 1 << 32
"""The first address: below 2^53 JavaScript keeps every digit."""

_UNIT = 512
"""Bytes to which torch's allocator rounds (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""

_CATEGORIES = {
    "parameters": "parameter",
    "state": "optimizer_state",
    "constants": "unknown",
    "inputs": "input",
    "gradients": "gradient",
    "activations": "activation",
    "workspace": "temporary",
    "communication": "temporary",
}
"""What torch.profiler calls kinds of memory (torch/profiler/_memory_profiler.py, Category)."""

Entry = dict[str, Any]


def write_memory_snapshot(
    simulation: Simulation, path: str | os.PathLike[str], ranks: Iterable[int] | None = None
) -> None:
    """Write the memory of these ranks as a snapshot, replacing ``path`` when it is complete.

    Without ``ranks`` one for all that do the same. Each is a device of the snapshot, in order. Memory is
    taken and given back as in :func:`distsim.simulation.memory.timeline.memory_timeline`; addresses are those
    of a first fit in one segment. Raises :class:`SimulationError` for a path that cannot be written to, a
    rank that does not occur, and for more than ``MOST_EVENTS`` events.
    """
    groups = simulation.classes.members
    devices = chosen_devices(simulation, ranks) if ranks is not None else [each[0] for each in groups]
    of = simulation.classes.of
    pieces = allocations(simulation)
    count = 2 * sum(len(pieces[of[device]]) for device in devices)
    if count > MOST_EVENTS:
        raise SimulationError(
            f"the memory of {len(devices)} ranks changes {count} times, more than {MOST_EVENTS}; choose "
            "ranks, or simulate fewer microbatches"
        )
    segments: list[Entry] = []
    traces: list[list[Entry]] = []
    for number, device in enumerate(devices):
        segment, trace = _device(number, pieces[of[device]])
        segments.append(segment)
        traces.append(trace)
    with replacing(path) as file:
        pickle.dump({"segments": segments, "device_traces": traces}, file, protocol=4)


def _device(number: int, pieces: Sequence[Allocation]) -> tuple[Entry, list[Entry]]:
    """Return the segment of a device as it is at the end, and what happened to it."""
    changes = [(piece.since, 1, place) for place, piece in enumerate(pieces)]
    changes += [(piece.until, 0, place) for place, piece in enumerate(pieces) if piece.until < float("inf")]
    space = _Space()
    live: dict[int, int] = {}
    trace: list[Entry] = []
    for when, takes, place in sorted(changes):
        piece = pieces[place]
        size = -(-piece.nbytes // _UNIT) * _UNIT
        entry: Entry = {"size": size, "stream": 0, "time_us": round(when * 1e6), "frames": _frames(piece)}
        entry["category"] = _CATEGORIES[KINDS[piece.kind]]
        if takes:
            live[place] = space.take(size)
            trace.append({"action": "alloc", "addr": BASE + live[place], **entry})
        else:
            address = live.pop(place)
            space.give(address, size)
            trace.append({"action": "free_requested", "addr": BASE + address, **entry})
            trace.append({"action": "free_completed", "addr": BASE + address, **entry})
    whole: Entry = {"addr": BASE, "size": space.end, "stream": 0, "time_us": 0, "frames": []}
    trace.insert(0, {"action": "segment_alloc", **whole, "category": "unknown"})
    blocks = _blocks(pieces, live, space.end)
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment: Entry = {
        **{"device": number, "address": BASE, "total_size": space.end, "stream": 0, "segment_type": "large"},
        **{"allocated_size": active, "active_size": active, "requested_size": active, "frames": []},
        **{"segment_pool_id": (0, 0), "is_expandable": False, "blocks": blocks},
    }
    return segment, trace


def _frames(piece: Allocation) -> list[Entry]:
    return [{"name": piece.name, "filename": piece.where or "step", "line": 0}]


def _blocks(pieces: Sequence[Allocation], live: dict[int, int], end: int) -> list[Entry]:
    """Return the blocks of a segment, which leave no gap."""
    blocks: list[Entry] = []
    at = 0

    def gap(until: int) -> None:
        if until > at:
            blocks.append(_block(at, until - at, 0, "inactive", []))

    for place, address in sorted(live.items(), key=lambda item: item[1]):
        gap(address)
        size = -(-pieces[place].nbytes // _UNIT) * _UNIT
        blocks.append(_block(address, size, pieces[place].nbytes, "active_allocated", _frames(pieces[place])))
        at = address + size
    gap(end)
    return blocks


def _block(address: int, size: int, requested: int, state: str, frames: list[Entry]) -> Entry:
    return {
        **{"address": BASE + address, "size": size, "requested_size": requested, "state": state},
        "frames": frames,
    }


class _Space:
    """Addresses from 0: each piece where it fits first. ``end`` is the highest that was ever in use."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (address, bytes), apart, in order

    def take(self, size: int) -> int:
        """Return the address of a new piece."""
        for place, (address, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[place]
                else:
                    self._free[place] = (address + size, room - size)
                return address
        address = self.end
        if self._free and sum(self._free[-1]) == self.end:
            address, _ = self._free.pop()
        self.end = address + size
        return address

    def give(self, address: int, size: int) -> None:
        """Let a piece be taken again, together with those beside it."""
        place = bisect.bisect(self._free, (address, 0))
        if place < len(self._free) and self._free[place][0] == address + size:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == address:
            place -= 1
            before, room = self._free.pop(place)
            address, size = before, room + size
        self._free.insert(place, (address, size))
