"""Memory in use over simulated time: when each op starts and ends says when its results come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from distsim.cost.demand import takes_turn
from distsim.ir import Device, Function, Op, Role, Value
from distsim.ops.marks import LAUNCH, SLOWDOWN
from distsim.program.program import Program
from distsim.simulation.memory.origins import OTHER, origins
from distsim.simulation.memory.peak import MemoryUse, whole
from distsim.simulation.memory.plan import first_places
from distsim.simulation.memory.program_memory import ProgramMemory
from distsim.simulation.memory.walk import (
    ACTIVATIONS,
    GRADIENTS,
    KIND_OF_ROLE,
    KINDS,
    WORKSPACE,
    Argument,
    Frame,
    plan_for,
)
from distsim.simulation.tasks.rank_classes import place_of
from distsim.simulation.tasks.templates import Floats, Ints
from distsim.simulation.tasks.timeline import FlatTimeline, Timeline

BUFFERS = "gradient buffers"
"""What the memory is called that holds gradients all step."""


class TimedStep(Protocol):
    """What is asked of a simulation (:class:`distsim.simulation.Simulation`)."""

    @property
    def simulated(self) -> Function | Program:
        """What was simulated."""
        ...

    @property
    def timeline(self) -> Timeline:
        """When its tasks start and end, on which rank classes."""
        ...

    @property
    def flat(self) -> Callable[[], FlatTimeline]:
        """Returns the timeline of its tasks one by one."""
        ...


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """Bytes in use on each of ``devices``: ``by_kind[i]`` (columns :data:`KINDS`) from ``times[i]`` seconds.

    ``times`` increase from 0.0; the last row holds to the end of the step.
    """

    devices: tuple[Device, ...]
    times: Floats
    by_kind: Ints

    @cached_property
    def in_use(self) -> Ints:
        """Bytes in use from each time on."""
        return self.by_kind.sum(axis=1)

    @property
    def peak(self) -> int:
        """The most bytes in use at any time."""
        return int(self.in_use.max())


class Allocation(NamedTuple):
    """A piece of memory: what it is called, in which call it is made, its kind (a place in :data:`KINDS`),
    its bytes, and since when and until when it is in use (inf: to the end), in seconds.
    """

    name: str
    where: str
    kind: int
    nbytes: int
    since: float
    until: float


def allocations(simulation: TimedStep) -> tuple[list[Allocation], ...]:
    """Return what :func:`memory_timeline` adds up, piece by piece, for each rank class."""
    teller = _Teller(simulation)
    return tuple(map(teller.allocations, simulation.timeline.classes.members))


def memory_timeline(simulation: TimedStep) -> tuple[MemoryTimeline, ...]:
    """Return the memory in use over time of each rank class of a simulation.

    Memory is taken when the op that needs it starts and is free when the last op that reads it ends;
    where both happen at one time, it is free first. What no kernel makes is taken by its first reader.
    Inputs, results, kinds and buffers of gradients are as in :func:`peak_memory`, whose peak is that of the
    order of the function: an allocator serves ops as they are issued. Where communication overlaps compute,
    what is in use at one time may be more than that, and where ranks wait it may be less.
    """
    teller = _Teller(simulation)
    return tuple(map(teller.timeline, simulation.timeline.classes.members))


def larger_over_time(memory: ProgramMemory, simulation: TimedStep) -> ProgramMemory:
    """Return the memory of a program that was simulated, over time where that is more than in its order.

    For programs that copy beside computation: what an ``Offload`` reads is there until it has ended, however
    much is issued meanwhile (torch's ``record_stream``: an allocator gives no memory away that a stream was
    said to use before that has come so far). Of the devices of a pipeline rank it is that with the most.
    """
    teller = _Teller(simulation)
    peaks, modules = list(memory.peaks), dict(memory.modules)
    moments: dict[int, _Moment] = {}
    for rank, mesh in enumerate(memory.program.mesh.slices("pp")):
        for rank_class in dict.fromkeys([teller.classes.of[device] for device in mesh.devices]):
            moment = teller.fullest(rank_class)
            if moment.peak > peaks[rank]:
                peaks[rank], moments[rank] = moment.peak, moment
                modules[rank] = teller.modules(rank_class, moment.time)

    def uses() -> tuple[MemoryUse, ...]:
        return tuple(
            [
                MemoryUse(moments[rank].peak, moments[rank].by_kind, moments[rank].at, use.end)
                if rank in moments
                else use
                for rank, use in enumerate(memory.ranks)
            ]
        )

    return replace(memory, peaks=tuple(peaks), uses=uses, modules=modules) if moments else memory


class _Moment(NamedTuple):
    """When the most is in use on a rank class, how much, of what kinds, and by which op, after its calls."""

    time: float
    peak: int
    by_kind: dict[str, int]
    at: tuple[Op, ...]


class _Held:
    """One piece of memory: since when and until when it is in use on each rank class, by what name.

    ``at``: the op that makes it, after the calls that lead to it.
    """

    __slots__ = ("at", "kind", "name", "nbytes", "since", "until", "where")

    def __init__(
        self, name: str, where: str, kind: int, nbytes: int, since: dict[int, float | None], until: float
    ) -> None:
        self.name, self.where = name, where
        self.kind = kind
        self.nbytes = nbytes
        self.since = since
        self.until = dict.fromkeys(since, until)
        self.at: tuple[Op, ...] = ()


Times = dict[int, tuple[float, float]]
"""Rank class -> when an op starts and ends there."""


class _Teller:
    """Goes through a function in its order, and through the tasks of the simulation at the same pace.

    ``pieces`` is what was held when, ``results`` those that ops of the function itself make, by value;
    ``held`` the bytes of buffers that hold gradients all step, by byte of parameters (``Parts.held``).
    """

    def __init__(self, simulation: TimedStep) -> None:
        flat = simulation.flat()
        tasks = flat.tasks
        self.held = simulation.simulated.parts.held if isinstance(simulation.simulated, Program) else 0.0
        self.classes = tasks.classes
        # Launches, and what collectives cost computation, are tasks of no op of the function.
        named = np.array([op not in (LAUNCH, SLOWDOWN) for op in tasks.op_table], np.bool_)
        own = np.flatnonzero(named[tasks.op])
        self.ops: list[int] = tasks.op[own].tolist()
        self.calls: list[int] = tasks.call[own].tolist()
        self.start: list[float] = flat.start[own].tolist()
        self.end: list[float] = flat.end[own].tolist()
        on = np.array([stream.rank_class for stream in tasks.stream_table], np.int64)[tasks.streams].tolist()
        slots: list[int] = tasks.stream_start.tolist()
        self.on: list[list[int]] = [on[slots[task] : slots[task + 1]] for task in own.tolist()]
        self.task = 0
        self.where = ""
        self.path: tuple[Op, ...] = ()
        self.pieces: list[_Held] = []
        self.function: Function = tasks.function
        self.results = self._tell(tasks.function)

    def _tell(self, function: Function) -> dict[Value, _Held]:
        """Note what is held when, from the first op to the last; return it by value."""
        held: dict[Value, _Held] = {}
        frame = whole(function)
        for value in function.inputs:
            forever = np.inf if value in frame.kept else 0.0
            held[value] = self._hold(value, KIND_OF_ROLE[value.role], 0.0, forever)
        if self.held:
            self._hold_buffers()
        self._visit(function, frame, held)
        for value in function.outputs:
            piece = held[frame.plan.home[value]]
            piece.until = dict.fromkeys(piece.since, np.inf)
        return held

    def fullest(self, rank_class: int) -> _Moment:
        """Return the first moment at which the most is in use on a rank class."""
        line = self.timeline(self.classes.members[rank_class])
        place = int(line.in_use.argmax())
        time, amounts = float(line.times[place]), line.by_kind[place]
        by_kind = {kind: int(nbytes) for kind, nbytes in zip(KINDS, amounts, strict=True)}
        made = [piece.at for piece in self.pieces if time > 0 and piece.since.get(rank_class) == time]
        return _Moment(time, line.peak, by_kind, made[-1] if made else ())

    def modules(self, rank_class: int, time: float) -> dict[str, int]:
        """Return what the activations in use on a rank class at a time are: bytes by module."""
        found: dict[str, int] = {}
        named = {piece: value for value, piece in self.results.items()}
        made = origins(self.function)
        for piece in self.pieces:
            since = piece.since.get(rank_class)
            if piece.kind == ACTIVATIONS and since is not None and since <= time < piece.until[rank_class]:
                module = made.get(named[piece], OTHER) if piece in named else OTHER
                found[module] = found.get(module, 0) + piece.nbytes
        return found

    def allocations(self, devices: Sequence[Device]) -> list[Allocation]:
        """Return the pieces of memory that are in use on devices of one rank class for some time."""
        rank_class = self.classes.of[devices[0]]
        found: list[Allocation] = []
        for piece in self.pieces:
            since, until = piece.since.get(rank_class), piece.until.get(rank_class, 0.0)
            if since is not None and since < until:
                found.append(Allocation(piece.name, piece.where, piece.kind, piece.nbytes, since, until))
        return found

    def timeline(self, devices: Sequence[Device]) -> MemoryTimeline:
        """Return what is in use on devices of one rank class, which may have another number written out."""
        rank_class = self.classes.of[devices[0]]
        kinds: list[int] = []
        times: list[float] = [0.0]
        amounts: list[int] = []
        for piece in self.pieces:
            since, until = piece.since.get(rank_class), piece.until.get(rank_class, 0.0)
            if since is None or (since >= until and since > 0):
                continue
            times += [since, until]
            kinds += [piece.kind] * 2
            amounts += [piece.nbytes, -piece.nbytes]
        when, place = np.unique(np.array(times), return_inverse=True)
        changes = np.zeros((len(when), len(KINDS)), np.int64)
        np.add.at(changes, (place[1:], np.array(kinds, np.int64)), np.array(amounts, np.int64))
        kept = np.isfinite(when)
        return MemoryTimeline(tuple(devices), when[kept], changes.cumsum(axis=0)[kept])

    def _hold(self, value: Value, kind: int, since: float | None, until: float = 0.0) -> _Held:
        place = place_of(value)
        classes = () if place is None else self.classes.at(place)
        buffered = self.held > 0 and kind == GRADIENTS
        nbytes = 0 if place is None or buffered else value.type.allocated
        piece = _Held(value.name, self.where, kind, nbytes, dict.fromkeys(classes, since), until)
        piece.at = self.path
        if piece.nbytes:
            self.pieces.append(piece)
        return piece

    def _hold_buffers(self) -> None:
        """Note the buffers of gradients of each rank class, there from the start to the end."""
        parameters: dict[int, int] = {}
        for piece in self.pieces:
            if piece.kind == KIND_OF_ROLE[Role.PARAMETER]:
                for rank_class in piece.since:
                    parameters[rank_class] = parameters.get(rank_class, 0) + piece.nbytes
        for rank_class, nbytes in parameters.items():
            size = round(self.held * nbytes)
            self.pieces.append(_Held(BUFFERS, "", GRADIENTS, size, {rank_class: 0.0}, np.inf))

    def _visit(self, function: Function, frame: Frame, held: dict[Value, _Held]) -> None:
        home = frame.plan.home
        for op in function.ops:
            if op.is_call:
                self._call(op, frame, held)
                continue
            times, outside = self._next(op), self.path
            self.path = (*outside, op)
            for value in op.inputs:
                _read(held[home[value]], times)
            for value in op.outputs:
                if home[value] is value:
                    held[value] = self._hold(value, frame.made(op, value), None)
                _read(held[home[value]], times)
            self.path = outside

    def _next(self, op: Op) -> Times:
        """Return when the op that comes next runs on each rank class; nothing for what takes no turn."""
        times: Times = {}
        if not takes_turn(op.op_type):
            return times
        first = self.task
        while self.task < len(self.ops) and (self.ops[self.task], self.calls[self.task]) == (
            self.ops[first],
            self.calls[first],
        ):
            for rank_class in self.on[self.task]:
                start, end = times.get(rank_class, (self.start[self.task], self.end[self.task]))
                times[rank_class] = min(start, self.start[self.task]), max(end, self.end[self.task])
            self.task += 1
        return times

    def _call(self, op: Op, frame: Frame, held: dict[Value, _Held]) -> None:
        home = frame.plan.home
        homes = [home[value] for value in op.inputs]
        kept = frame.plan.held.get(op, ())
        arguments = [
            Argument(frame.kinds[h], True, first, place in kept)
            for place, (h, first) in enumerate(zip(homes, first_places(homes), strict=True))
        ]
        inner_home = plan_for(op.callee, arguments).home
        inner_homes = [inner_home[value] for value in op.callee.outputs]
        made = [frame.made(op, value) if home[value] is value else -1 for value in op.outputs]
        known = dict(reversed(list(zip(inner_homes, made, strict=True))))
        inner = {v: held[h] for v, h in zip(op.callee.inputs, homes, strict=True)}
        outside = self.where, self.path
        self.where = f"{self.where}/{op.name or op.callee.name}".lstrip("/")
        self.path = (*self.path, op)
        self._visit(op.callee, Frame(op.callee, arguments, known, WORKSPACE, self.held > 0), inner)
        self.where, self.path = outside
        for value, inside in zip(op.outputs, inner_homes, strict=True):
            if home[value] is value:
                held[value] = inner[inside]


def _read(piece: _Held, times: Times) -> None:
    """Let an op that runs at these times use a piece of memory."""
    for rank_class, since in piece.since.items():
        if rank_class in times:
            start, end = times[rank_class]
            if since is None:
                piece.since[rank_class] = start
            piece.until[rank_class] = max(piece.until[rank_class], end)
