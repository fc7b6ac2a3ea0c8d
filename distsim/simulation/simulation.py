"""The result of a simulation; every figure is computed when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.errors import PartitionError, SimulationError
from distsim.ir import Device, Function, Op
from distsim.ops import op_label, operator, signature_of, work
from distsim.ops.launch import HOST
from distsim.program.program import Program
from distsim.simulation.explain.breakdown import breakdown
from distsim.simulation.explain.critical_path import CriticalPath
from distsim.simulation.explain.explain import explain
from distsim.simulation.explain.explanation import Explanation
from distsim.simulation.explain.interval import Interval, interval_of
from distsim.simulation.explain.walk import critical_path
from distsim.simulation.memory.host import host_memory, program_host_memory
from distsim.simulation.memory.peak import MemoryUse, peak_memory, saved_by_module
from distsim.simulation.memory.program_memory import program_memory, program_saved_by_module
from distsim.simulation.steady_state import full_program, microbatch_time, short_step_note
from distsim.simulation.tasks.rank_classes import RankClasses, communicates, placement_classes
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.templates import Floats, Ints
from distsim.simulation.tasks.timeline import FlatTimeline, Piece, Timeline

_MOST_TASKS = 4096
"""Tasks of a piece whose spans are made at a time."""


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one stream of a rank class, from ``start`` to ``end`` seconds.

    ``path`` is where the op stands: the names of the calls that lead to it, joined by ``/``. The op is on
    ``streams`` streams at once, of which this is number ``place``: a Send is first on its sender's.
    """

    task: int
    op: Op
    path: str
    stream: Stream
    start: float
    end: float
    place: int = 0
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Shares:
    """How a device spends the step, in seconds that sum to the step time.

    ``busy``: compute runs. ``exposed_communication``: communication, or a copy to or from the host, runs and
    no compute. ``bubble``: neither.
    """

    busy: float
    exposed_communication: float
    bubble: float


class Simulation:
    """When every task starts and ends, and what follows from it. Times in seconds.

    The step time and the devices' last ends are there at once; ``trace``, ``spans`` and ``shares`` are
    expanded from the timeline when they are asked for.
    """

    def __init__(
        self,
        timeline: Timeline,
        simulated: Function | Program,
        cost_model: CostModel,
        again: Callable[[CostModel], Simulation],
        flat: Callable[[], FlatTimeline],
        longer: Callable[[int], Simulation] | None = None,
    ) -> None:
        self.timeline = timeline
        self.simulated = simulated
        self.cost_model = cost_model
        self.again = again
        """Simulate the same with other costs: for what-ifs."""
        self.flat = flat
        """Return the timeline of the tasks one by one; a program is written out for it."""
        self.longer = longer
        """Simulate a program over another number of microbatches; None for a function."""

    @property
    def name(self) -> str:
        """The name of the function or program that was simulated."""
        return self.timeline.name

    @cached_property
    def function(self) -> Function:
        """The function that was simulated, with its types; a program written out."""
        simulated = self.simulated
        return simulated.to_function(steady=True) if isinstance(simulated, Program) else simulated

    @cached_property
    def classes(self) -> RankClasses:
        """The rank classes that were simulated, and their devices."""
        return self.timeline.classes

    @cached_property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return self.timeline.step_time

    @cached_property
    def microbatch_time(self) -> float | None:
        """Seconds of each further microbatch once the pipeline is full; None for a step that ends in a flush.

        Without a flush the next step follows at once, and filling and draining the pipeline is not a part of
        it: see :func:`distsim.simulation.steady_state.microbatch_time`, a mean, for how it is found and how
        far off it may be. Raises :class:`ScheduleError` for a table that is not of the catalogue.
        """
        program, run = self.simulated, self.longer
        if not isinstance(program, Program) or run is None:
            return None
        return microbatch_time(program.schedule, lambda count: run(count).step_time)

    @cached_property
    def step_period(self) -> float:
        """Seconds from a step to the next: the step time, or without a flush that of all its microbatches."""
        each = self.microbatch_time
        if each is None or not isinstance(self.simulated, Program):
            return self.step_time
        return each * self.simulated.schedule.num_microbatches

    @cached_property
    def timestamps(self) -> Mapping[Device, float]:
        """When each device ends its last task; 0.0 if it has none."""
        ends: list[float] = self.timeline.ends.tolist()
        of = self.classes.of
        return {device: ends[of[device]] for device in sorted(of, key=lambda d: d.id)}

    def throughput(self, samples: float) -> float:
        """Samples per second, for a step over this many samples, by :attr:`step_period`."""
        if not samples > 0:
            raise SimulationError(f"samples={samples}: a step processes at least one")
        if not self.step_period > 0:
            raise SimulationError(f"{self.name} takes {self.step_period} s; it has no throughput")
        return samples / self.step_period

    def spans(self) -> Iterator[Span]:
        """Yield the spans of every rank class in the order of issue; a Send is one on each end."""
        for piece in self.timeline.pieces():
            paths = piece.paths()
            for first in range(0, len(piece), _MOST_TASKS):
                yield from _spans(piece, paths, slice(first, first + _MOST_TASKS))

    @cached_property
    def trace(self) -> list[dict[str, Any]]:
        """One event per op and device, a Send one on each end.

        Each has the keys name (of the operator, or of those that a kernel runs), ts and dur (seconds),
        device, stream, path and op.
        """
        members = self.classes.members
        return [
            {
                "name": op_label(span.op),
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
        rank_class = self.class_of(device)
        moving: dict[Op, bool] = {}
        found = [(np.empty(0),) * 3]  # it may do nothing
        found += [_intervals(piece, rank_class, moving) for piece in self.timeline.pieces(rank_class)]
        start, end, moves = (np.concatenate(parts) for parts in zip(*found, strict=True))
        compute = moves == 0
        busy = _measure(start[compute], end[compute])
        active = _measure(start, end)
        # The sums behind `active` may pass the step by rounding; a share of time is not negative.
        return Shares(busy, max(active - busy, 0.0), max(self.step_time - active, 0.0))

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of tasks that takes the whole step."""
        return critical_path(self.timeline, self.simulated)

    def breakdown(self, by: str = "kind") -> Mapping[str, float]:
        """Return what the seconds of the step consist of, most first, along its critical path.

        ``by`` is ``kind`` (of work), ``operator``, ``module``, ``phase`` or ``axis``: see
        :func:`distsim.simulation.explain.breakdown.breakdown`.
        """
        return breakdown(self.timeline, self.simulated, by)

    def interval(self, level: float = 0.9, own: Sequence[float] = ()) -> Interval | None:
        """Return between which seconds a measured :attr:`step_period` lies with a probability of ``level``.

        ``own``: measured over predicted seconds of other steps on the same machine, which correct and narrow
        it (:func:`distsim.simulation.explain.interval.correction`). None where it is not known how far steps
        on such devices are from predicted ones, or where the host's time is not among the costs: a bound
        then, not a prediction.
        """
        devices = list(self.timestamps)
        if not self.cost_model.kernels or not devices or not all(d.rates.spread for d in devices):
            return None
        spread = max(device.rates.spread for device in devices)
        return interval_of(self.step_period, spread, self.breakdown("kind"), level, own)

    def explain(self) -> Explanation:
        """Return what bounds the step and what would gain how much; ``print`` it.

        Takes about as long as simulating a dozen times.
        """
        return explain(self)

    @cached_property
    def memory(self) -> Mapping[Device, MemoryUse]:
        """The peak of the memory in use on each device, and what it consists of.

        Without a flush it is that of the steady state, as the throughput is: a step that is too short to fill
        the pipeline is looked at with more microbatches, their data included. Raises :class:`ScheduleError`
        for such a step of a table that is not of the catalogue.
        """
        if isinstance(self.simulated, Program):
            return program_memory(full_program(self.simulated)).devices
        return peak_memory(self.simulated)

    def saved_by_module(self, device: Device) -> Mapping[str, int]:
        """Return what the activations of :attr:`memory` on a device consist of: bytes by module.

        The modules are those in the names of ops, as ``h.attention``, numbers left out; ``other`` is what ops
        without such a name compute, gradients on their way among it.
        """
        if isinstance(self.simulated, Program):
            return program_saved_by_module(full_program(self.simulated), device)
        classes = placement_classes(self.simulated)
        found = saved_by_module(self.simulated, classes)
        return next(own for own, members in zip(found, classes.members, strict=True) if device in members)

    @property
    def peak_memory(self) -> dict[Device, int]:
        """Bytes in use on each device at its peak: see :attr:`memory`."""
        if isinstance(self.simulated, Program):
            return program_memory(full_program(self.simulated)).peak_of_devices()
        return {device: use.peak for device, use in self.memory.items()}

    @cached_property
    def host_memory(self) -> Mapping[Device, int]:
        """Bytes of its host's memory that each device takes at its peak, for what is offloaded.

        Of the same step as :attr:`memory`. What a host has is not known here: ``fits`` is of devices.
        """
        if isinstance(self.simulated, Program):
            return program_host_memory(full_program(self.simulated))
        return host_memory(self.simulated)

    @property
    def fits(self) -> bool:
        """Whether no device needs more memory than is usable of it (:attr:`Device.usable`)."""
        return all(use.fits(device) for device, use in self.memory.items())

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the program, and of its memory."""
        simulated = self.simulated
        if not isinstance(simulated, Program):
            return ()
        short = short_step_note(simulated.schedule)
        return (*simulated.notes, *_dearer(simulated), *([f"{short}, as memory is given"] if short else []))

    @cached_property
    def flops(self) -> float:
        """FLOPs executed in the step on all devices, with what is recomputed or replicated.

        Over time and peak it gives the hardware utilisation (HFU); MFU wants the model's own FLOPs.
        """
        members = [len(group) for group in self.classes.members]
        return float(sum(_op_flops(op) * members[c] * times for op, c, times in self.timeline.op_counts))

    def class_of(self, device: Device) -> int:
        """Return the rank class of a device; raise :class:`SimulationError` if it does not occur."""
        found = self.classes.of.get(device)
        if found is None:
            raise SimulationError(f"{device} does not occur in {self.name}")
        return found


def _dearer(program: Program) -> list[str]:
    """Say so if the fullest device has more in use than if nothing were recomputed."""
    if program.saving_all is None:
        return []
    try:
        plain = program.saving_all()
    except PartitionError:  # no split of that one fits in memory
        return []
    own, other = (max(program_memory(full_program(each)).peaks) for each in (program, plain))
    if own <= other:
        return []
    return [
        f"recomputation saves no memory here: the fullest device has {own:,} bytes in use, with remat=none "
        f"{other:,}"
    ]


def _spans(piece: Piece, paths: Sequence[str], part: slice) -> Iterator[Span]:
    """Yield the spans of some tasks of a piece."""
    starts: list[float] = piece.start[part].tolist()
    ends: list[float] = piece.end[part].tolist()
    ops: list[int] = piece.op[part].tolist()
    calls: list[int] = piece.call[part].tolist()
    first: list[int] = piece.stream_start[part.start : part.stop + 1].tolist()
    streams: list[int] = piece.streams[first[0] : first[-1]].tolist()
    for task, start in enumerate(starts):
        uses = first[task + 1] - first[task]
        for place in range(uses):
            yield Span(
                piece.first + part.start + task,
                piece.op_table[ops[task]],
                paths[calls[task]],
                piece.stream_table[streams[first[task] - first[0] + place]],
                start,
                ends[task],
                place,
                uses,
            )


def _op_flops(op: Op) -> float:
    demand = None if communicates(op) else work(signature_of(op))
    return 0.0 if demand is None else demand.flops


def _tasks_of_uses(piece: Piece) -> Ints:
    """Return the task of each use of a stream."""
    return np.repeat(np.arange(len(piece)), np.diff(piece.stream_start))


def _intervals(piece: Piece, rank_class: int, moving: dict[Op, bool]) -> tuple[Floats, Floats, Floats]:
    """Return start and end of what a class does in a piece, and 1.0 where it moves something.

    What its host does is not among it.

    ``moving`` keeps which ops do, between devices or to and from the host.
    """
    own = [stream.rank_class == rank_class and stream.name != HOST for stream in piece.stream_table]
    table = np.array(own, np.bool_)
    tasks = _tasks_of_uses(piece)[table[piece.streams]] if len(piece) else np.empty(0, np.int64)
    for op in piece.op_table:
        if op not in moving:
            moving[op] = not operator(op.op_type).computes
    moves = np.array([moving[op] for op in piece.op_table], np.float64)
    return piece.start[tasks], piece.end[tasks], moves[piece.op[tasks]]


def _measure(start: Floats, end: Floats) -> float:
    """Seconds covered by at least one of these intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([start[:1], end[:-1]]))
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())
