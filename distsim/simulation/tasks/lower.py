"""Lowering of ops to tasks: how each runs, for how long, on which streams, and what the host does for it."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.cost.demand import takes_turn
from distsim.hardware.routes import among
from distsim.ir import Function, Op
from distsim.ops import Signature, operator, signature_of
from distsim.ops.marks import HOST, LAUNCH, SLOWDOWN
from distsim.simulation.tasks.grid import task_seconds
from distsim.simulation.tasks.rank_classes import (
    Classes,
    ClassExchange,
    Group,
    communicates,
    place_of_compute,
)
from distsim.simulation.tasks.streams import Ranks, Stream
from distsim.simulation.tasks.templates import (
    Floats,
    Ints,
    Template,
)

_TYPE = attrgetter("type")

IssuedKind = tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]
Kind = IssuedKind | None
"""(rank class, run, runs of the host that issues it, runs of no time on a stream that it follows) of a
compute op on each of its classes; None: it communicates."""

LAUNCHED, SLOWED = 0, 1
"""The numbers of ``LAUNCH`` and ``SLOWDOWN`` among the ops of a lowering."""


class IssuedExchange(NamedTuple):
    """How one exchange of a communication op runs.

    ``issues`` are the runs of the hosts that issue it, ``slows`` those that computation loses to it.
    """

    sources: Classes
    targets: Classes
    run: int
    issues: tuple[int, ...]
    slows: tuple[int, ...]


class Lowering:
    """Everything that all templates of one lowering share: the tables of streams and of ops."""

    def __init__(
        self, classes: Ranks, cost_model: CostModel, overlap: bool, contention: bool = False
    ) -> None:
        self.contention = contention
        self.classes = classes
        self.cost_model = cost_model
        self.overlap = overlap
        self.streams: dict[Stream, int] = {}
        self.class_of: list[int] = []
        self.runs: dict[tuple[float, tuple[int, ...]], int] = {}
        self.ops: list[Op] = [LAUNCH, SLOWDOWN]
        self.issues = bool(cost_model.kernels)
        self.graphs = cost_model.graphs
        self._exchanges: dict[tuple[object, ...], tuple[IssuedExchange, ...]] = {}
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._known: dict[tuple[object, ...], Kind] = {}
        self.templates: dict[tuple[Function, bool], Template] = {}

    def stream(self, rank_class: int, name: str) -> int:
        """Return the number of a stream."""
        key = Stream(rank_class, name if self.overlap or name == HOST else "all")
        found = self.streams.get(key)
        if found is None:
            found = self.streams[key] = len(self.streams)
            self.class_of.append(rank_class)
        return found

    def run(self, seconds: float, streams: tuple[int, ...]) -> int:
        """Return the number of a way to run: how long, and on which streams."""
        return self.runs.setdefault((seconds, streams), len(self.runs))

    def columns(self, runs: list[int]) -> tuple[Floats, Ints, Ints]:
        """Return durations, and the (task, stream) pairs, of tasks that run so."""
        ways, which = list(self.runs), np.array(runs, np.int64)
        counts = np.array([len(streams) for _, streams in ways], np.int64)
        begins = np.concatenate([[0], np.cumsum(counts)])
        every = np.array([stream for _, streams in ways for stream in streams], np.int64)
        task = np.repeat(np.arange(len(which)), counts[which])
        ahead = np.arange(len(task)) - np.repeat(np.cumsum(counts[which]) - counts[which], counts[which])
        stream = every[begins[which][task] + ahead]
        return np.array([seconds for seconds, _ in ways])[which], task, stream

    def exchanges(self, op: Op) -> tuple[IssuedExchange, ...]:
        """Return how a communication op runs, for each of its exchanges."""
        key = (op.op_type, op.attributes, *map(_TYPE, op.inputs + op.outputs))
        found = self._exchanges.get(key)
        if found is None:
            signature = signature_of(op)
            parts = [(part, self._ends(op, part)) for part in self.classes.exchanges(op)]
            of = self.cost_model.communication_seconds
            asked = [of(signature, self._group(part)) for part, _ in parts]
            seconds = [task_seconds(op, cost) for cost in asked]
            found = self._exchanges[key] = tuple(
                [
                    IssuedExchange(
                        part.sources,
                        part.targets,
                        self.run(s, ends),
                        self._issues(signature, part),
                        self._slows(signature, part),
                    )
                    for (part, ends), s in zip(parts, seconds, strict=True)
                ]
            )
        return found

    def _group(self, part: ClassExchange) -> Group:
        """Return the group of an exchange, with all that divide what it shares, unless the engine does."""
        return part.group if self.contention else among(part.group, part.family, self.cost_model.topology)

    def _issues(self, signature: Signature, part: ClassExchange) -> tuple[int, ...]:
        """Return the runs of the hosts that issue an exchange."""
        classes = dict.fromkeys((*part.sources, *part.targets))
        return tuple([run for c in classes for run in self.issue(signature, c)])

    def _slows(self, signature: Signature, part: ClassExchange) -> tuple[int, ...]:
        """Return the runs that computation loses on each class of an exchange."""
        found: list[int] = []
        for c in dict.fromkeys((*part.sources, *part.targets)) if self.overlap else ():
            device = self.classes.members[c][0]
            seconds = self.cost_model.slowdown_seconds(signature, self._group(part), device)
            if seconds:
                found.append(self.run(task_seconds(signature, seconds), (self.stream(c, "compute"),)))
        return tuple(found)

    def _ends(self, op: Op, part: ClassExchange) -> tuple[int, ...]:
        """Return the streams that an exchange occupies."""
        if op.op_type == "Send":
            (source,), (target,) = part.sources, part.targets
            channel = op.attributes.get("channel", 0)
            lane = f".{channel}" if channel else ""
            names = ((source, f"send {target}{lane}"), (target, f"receive {source}{lane}"))
        else:
            axis = op.attributes.get("axis")
            name = "transfer" if axis is None else f"collective {axis}"
            names = tuple((c, name) for c in dict.fromkeys((*part.sources, *part.targets)))
        return tuple(dict.fromkeys(self.stream(*pair) for pair in names))

    def issue(self, signature: Signature, rank_class: int) -> tuple[int, ...]:
        """Return the run of the host that issues an op on a rank class, if that takes time."""
        seconds = self.cost_model.launch_seconds(signature, self.classes.members[rank_class][0])
        if not seconds:
            return ()
        return (self.run(task_seconds(signature, seconds), (self.stream(rank_class, HOST),)),)

    def _follows(self, op: Op, rank_class: int) -> tuple[int, ...]:
        """Return the run on a stream that a compute op comes after on a rank class, whatever it reads."""
        follows = operator(op.op_type).follows
        return (self.run(0.0, (self.stream(rank_class, follows),)),) if follows else ()

    def kind(self, function: Function, op: Op) -> Kind:
        """Return how a compute op runs on each of its classes.

        Nothing for an op that takes no turn. A communication op has none: it is None.
        """
        # The objects' ids first: attributes and types are mostly shared, and they outlive the lowering.
        key = (op.op_type, id(op.attributes), op.version, len(op.inputs))
        key += tuple(map(id, map(_TYPE, op.inputs + op.outputs)))
        try:
            return self._known[key]
        except KeyError:
            known = (op.op_type, op.attributes, op.version, len(op.inputs))
            found = self._known[key] = self._kind(
                function, op, known + tuple(map(_TYPE, op.inputs + op.outputs))
            )
            return found

    def _kind(self, function: Function, op: Op, key: tuple[object, ...]) -> Kind:
        if key not in self._kinds:
            found: Kind = ()
            if communicates(op):
                found = None
            elif takes_turn(op.op_type):
                signature = signature_of(op)
                at = self.classes.at(place_of_compute(function, op))
                first = [self.classes.members[c][:1] for c in at]
                asked = [self.cost_model.seconds(signature, where) for where in first]
                seconds = [task_seconds(op, cost) for cost in asked]
                name = operator(op.op_type).host_stream or "compute"
                runs = [self.run(s, (self.stream(c, name),)) for c, s in zip(at, seconds, strict=True)]
                issues = [self.issue(signature, c) for c in at]
                found = tuple(zip(at, runs, issues, [self._follows(op, c) for c in at], strict=True))
            self._kinds[key] = found
        return self._kinds[key]
