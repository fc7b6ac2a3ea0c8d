"""The result of a simulation; every figure is computed when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.errors import SimulationError
from distsim.executor.classes import communicates
from distsim.executor.memory import MemoryUse, peak_memory
from distsim.executor.tasks import Floats, Stream, Tasks
from distsim.ir import Device, Function, Op
from distsim.ops import signature_of, work


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one stream of a rank class, from ``start`` to ``end`` seconds.

    ``path`` is where the op stands: the names of the calls that lead to it, joined by ``/``.
    """

    task: int
    op: Op
    path: str
    stream: Stream
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Shares:
    """How a device spends the step, in seconds that sum to the step time.

    ``busy``: compute runs. ``exposed_communication``: communication runs and no compute. ``bubble``: neither.
    """

    busy: float
    exposed_communication: float
    bubble: float


class Simulation:
    """When every task of a function starts and ends, and what follows from it. Times in seconds."""

    def __init__(self, tasks: Tasks, start: Floats, end: Floats) -> None:
        self.tasks = tasks
        self.start = start
        self.end = end

    @property
    def function(self) -> Function:
        """The function that was simulated, with its types."""
        return self.tasks.function

    @cached_property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def timestamps(self) -> Mapping[Device, float]:
        """When each device of the function ends its last task; 0.0 if it has none."""
        last = np.zeros(len(self.tasks.classes.members))
        np.maximum.at(last, self._classes_of_slots, self.end[self._tasks_of_slots])
        of = self.tasks.classes.of
        return {device: float(last[of[device]]) for device in sorted(of, key=lambda d: d.id)}

    def throughput(self, samples: float) -> float:
        """Samples per second, for a step over this many samples."""
        if not self.step_time > 0:
            raise SimulationError(f"{self.function.name} takes {self.step_time} s; it has no throughput")
        return samples / self.step_time

    def spans(self) -> Iterator[Span]:
        """Yield the spans of every rank class in the order of the function; a Send is one on each end."""
        tasks = self.tasks
        paths = _paths(tasks)
        starts: list[float] = self.start.tolist()
        ends: list[float] = self.end.tolist()
        ops: list[int] = tasks.op.tolist()
        calls: list[int] = tasks.call.tolist()
        streams: list[int] = tasks.streams.tolist()
        slots: list[int] = self._tasks_of_slots.tolist()
        for slot, task in enumerate(slots):
            op = tasks.op_table[ops[task]]
            stream = tasks.stream_table[streams[slot]]
            yield Span(task, op, paths[calls[task]], stream, starts[task], ends[task])

    @cached_property
    def trace(self) -> list[dict[str, Any]]:
        """One event per op and device, a Send one on each end.

        Each has the keys name (of the operator), ts and dur (seconds), device, stream, path and op.
        """
        members = self.tasks.classes.members
        return [
            {
                "name": span.op.op_type,
                "ts": span.start,
                "dur": span.end - span.start,
                "device": device,
                "stream": span.stream.name,
                "path": span.path,
                "op": span.op,
            }
            for span in self.spans()
            for device in members[span.stream.rank_class]
        ]

    def shares(self, device: Device) -> Shares:
        """Return how a device spends the step."""
        rank_class = self._class_of(device)
        slots = self._classes_of_slots == rank_class
        numbers = self._tasks_of_slots[slots]
        moves = self._moves[numbers]
        busy = _measure(self.start[numbers[~moves]], self.end[numbers[~moves]])
        active = _measure(self.start[numbers], self.end[numbers])
        # The sums behind `active` may pass the step by rounding; a share of time is not negative.
        return Shares(busy, max(active - busy, 0.0), max(self.step_time - active, 0.0))

    @cached_property
    def memory(self) -> Mapping[Device, MemoryUse]:
        """The peak of the memory in use on each device, and what it consists of."""
        return peak_memory(self.function)

    @property
    def peak_memory(self) -> dict[Device, int]:
        """Bytes in use on each device at its peak."""
        return {device: use.peak for device, use in self.memory.items()}

    @cached_property
    def flops(self) -> float:
        """FLOPs executed in the step on all devices, with what is recomputed or replicated.

        Over time and peak it gives the hardware utilisation (HFU); MFU wants the model's own FLOPs.
        """
        per_op = np.array([self._op_flops(op) for op in self.tasks.op_table])
        members = np.array([len(group) for group in self.tasks.classes.members])
        slots = ~self._moves[self._tasks_of_slots]
        ops = self.tasks.op[self._tasks_of_slots[slots]]
        return float((per_op[ops] * members[self._classes_of_slots[slots]]).sum()) if len(ops) else 0.0

    def _op_flops(self, op: Op) -> float:
        demand = None if communicates(op) else work(signature_of(op))
        return 0.0 if demand is None else demand.flops

    def _class_of(self, device: Device) -> int:
        found = self.tasks.classes.of.get(device)
        if found is None:
            raise SimulationError(f"{device} does not occur in {self.function.name}")
        return found

    @cached_property
    def _moves(self) -> npt.NDArray[np.bool_]:
        """Whether each task is communication."""
        table = np.array([communicates(op) for op in self.tasks.op_table], np.bool_)
        return table[self.tasks.op] if len(table) else np.empty(0, np.bool_)

    # A slot is one task on one stream.

    @cached_property
    def _tasks_of_slots(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(len(self.tasks)), np.diff(self.tasks.stream_start))

    @cached_property
    def _classes_of_slots(self) -> npt.NDArray[np.int64]:
        table = np.array([stream.rank_class for stream in self.tasks.stream_table], np.int64)
        return table[self.tasks.streams]


def _measure(start: Floats, end: Floats) -> float:
    """Seconds covered by at least one of these intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([start[:1], end[:-1]]))
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())


def _paths(tasks: Tasks) -> list[str]:
    paths = [""]
    for op, parent in zip(tasks.call_op[1:], tasks.call_parent[1:].tolist(), strict=True):
        own = "" if op is None else op.name or op.callee.name
        paths.append(f"{paths[parent]}/{own}" if paths[parent] else own)
    return paths
