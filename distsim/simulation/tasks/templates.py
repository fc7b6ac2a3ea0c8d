"""Templates: what a call of a function adds, put together from the templates of its callees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from distsim.ir import Op

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FROM_START = -1
"""Reference to something that is there from the start; ``-2 - p`` refers to port p of the template."""

Where = dict[int, int] | int
"""Who makes a value: rank class -> task of this template; or the number of the input that it is."""


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """The tasks of one function: references count from its first task, or name a port.

    Dependencies and streams come as (task, what) pairs, by increasing task. ``call`` is 0 for the ops of
    the function itself. ``ports`` lists (input, rank class): a task of the call waits for who made that
    input there. ``outputs`` tells who makes each output.
    """

    durations: Floats
    dep_task: Ints
    dep_source: Ints
    stream_task: Ints
    stream: Ints
    op: Ints
    call: Ints
    call_parent: Ints
    call_op: list[Op | None]
    ports: list[tuple[int, int]]
    outputs: list[Where]

    def __len__(self) -> int:
        return len(self.durations)


@dataclass(slots=True)
class Calls:
    """The calls of one callee: where its tasks and its calls begin, and who made what its ports name."""

    bases: list[int] = field(default_factory=list[int])
    base_calls: list[int] = field(default_factory=list[int])
    sources: list[list[int]] = field(default_factory=list[list[int]])


class TemplateColumns:
    """Columns of a template, filled in callee by callee."""

    def __init__(self, tasks: int, calls: int) -> None:
        self.durations = np.empty(tasks)
        self.op = np.empty(tasks, np.int64)
        self.call = np.zeros(tasks, np.int64)
        self.call_parent = np.full(calls, -1, np.int64)
        self.is_own = np.ones(tasks, np.bool_)
        self.deps: list[tuple[Ints, Ints]] = []
        self.streams: list[tuple[Ints, Ints]] = []

    def add(self, callee: Template, calls: Calls) -> None:
        """Add all calls of one callee at once."""
        bases = np.array(calls.bases, np.int64)[:, None]
        base_calls = np.array(calls.base_calls, np.int64)[:, None]
        tasks = bases + np.arange(len(callee))
        self.durations[tasks] = callee.durations
        self.op[tasks] = callee.op
        self.call[tasks] = callee.call + base_calls
        self.is_own[tasks] = False
        inner = base_calls + np.arange(len(callee.call_parent))
        self.call_parent[inner] = callee.call_parent + base_calls
        self.call_parent[base_calls] = 0
        self.streams.append(
            (bases + callee.stream_task, np.broadcast_to(callee.stream, (len(bases), len(callee.stream))))
        )
        outside = callee.dep_source < 0
        inside = ~outside
        self.deps.append((bases + callee.dep_task[inside], bases + callee.dep_source[inside]))
        task = bases + callee.dep_task[outside]
        source = np.array(calls.sources, np.int64)[:, -1 - callee.dep_source[outside]]
        there = source != FROM_START
        self.deps.append((task[there], source[there]))

    def own(
        self, runs: tuple[Floats, Ints, Ints], op: Sequence[int], dep_task: Sequence[int], dep: Sequence[int]
    ) -> None:
        """Add the function's own tasks, those of no call: durations, (task, stream), ops, (task, source)."""
        durations, task, stream = runs
        own = np.flatnonzero(self.is_own)
        self.durations[own] = durations
        self.op[own] = op
        self.streams.append((own[task], stream))
        self.deps.append((np.array(dep_task, np.int64), np.array(dep, np.int64)))

    def sorted_streams(self) -> tuple[Ints, Ints]:
        """Return the (task, stream) pairs by increasing task."""
        return _sorted(self.streams)

    def sorted_deps(self) -> tuple[Ints, Ints]:
        """Return the (task, source) pairs by increasing task."""
        return _sorted(self.deps)


def _sorted(pairs: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    if not pairs:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = np.concatenate([key.reshape(-1) for key, _ in pairs])
    values = np.concatenate([value.reshape(-1) for _, value in pairs])
    if len(pairs) == 1:
        return keys, values
    order = np.argsort(keys, kind="stable")
    return keys[order], values[order]


def tasks_of_uses(stream_start: Ints) -> Ints:
    """Return the task of each use of a stream, by where those of each task begin, and the last ones end."""
    return np.repeat(np.arange(len(stream_start) - 1), np.diff(stream_start))


def starts(task: Ints, count: int) -> Ints:
    """Return where the entries of each task begin in arrays that are sorted by task, and the end."""
    return np.concatenate([[0], np.cumsum(np.bincount(task, minlength=count))]).astype(np.int64)
