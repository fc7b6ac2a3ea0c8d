"""The event engine: SimPy runs the tasks, one event each.

No process per op: a task counts what it still waits for, and whoever brings the count to zero starts
it. The order in which equal times are handled is SimPy's own, hence deterministic. With a network,
communication tasks are flows that share its links (:mod:`distsim.simulation.events.flows`).

Explaining a deadlock: the cycle of tasks that wait for each other, and why each waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from simpy import Environment
from simpy.events import Timeout

from distsim.errors import SimulationError
from distsim.program.links import shortened
from distsim.simulation.events.disturbances import Disturbances, disturbed_durations
from distsim.simulation.events.flows import Traffic
from distsim.simulation.events.network import Network, find_flows
from distsim.simulation.tasks.task_table import Floats, Ints, Tasks
from distsim.simulation.tasks.templates import tasks_of_uses


def run(
    tasks: Tasks, network: Network | None = None, disturbances: Disturbances | None = None
) -> tuple[Floats, Floats]:
    """Return the start and the end of every task, in seconds.

    A task starts when the task before it on each of its streams has ended and so have those that it
    depends on. With a ``network`` concurrent transfers share its links, at max-min fair rates; that and
    most ``disturbances`` want ``lower(..., lockstep=False)``.

    Raises :class:`SimulationError` naming the cycle of ops that wait for each other,
    :class:`CostError` naming an op with an unusable time, and what :func:`find_flows` raises.
    """
    if (
        network is None
        and disturbances is not None
        and (disturbances.slow_links or disturbances.failed_links)
    ):
        raise SimulationError("slow and failed links need a network: run(tasks, network=Network(topology))")
    count = len(tasks)
    seconds = disturbed_durations(tasks, disturbances)
    flows = None if network is None else find_flows(tasks, seconds, network, disturbances)
    durations: list[float] = seconds.tolist()
    task, source = waits(tasks)
    missing: list[int] = np.bincount(task, minlength=count).tolist()
    order = np.argsort(source, kind="stable")
    followers: list[int] = task[order].tolist()
    first: list[int] = np.searchsorted(source[order], np.arange(count + 1)).tolist()
    start, end = [0.0] * count, [-1.0] * count
    environment = Environment()

    def launch_alone(number: int) -> None:
        start[number] = environment.now
        Timeout(environment, durations[number], number).callbacks.append(finish)  # pyright: ignore

    def finish(event: Any) -> None:
        done(event.value)

    def done(number: int) -> None:
        end[number] = environment.now
        for follower in followers[first[number] : first[number + 1]]:
            missing[follower] -= 1
            if not missing[follower]:
                launch(follower)

    launch = launch_alone
    if flows is not None:
        of_task, traffic = flows.of_task, Traffic(environment, flows.capacity, done)

        def enter(event: Any) -> None:
            traffic.enter(event.value, of_task[event.value])

        def launch_flow(number: int) -> None:
            flow = of_task.get(number)
            if flow is None:
                launch_alone(number)
                return
            start[number] = environment.now
            if flow.latency > 0:
                Timeout(environment, flow.latency, number).callbacks.append(enter)  # pyright: ignore
            else:
                traffic.enter(number, flow)

        launch = launch_flow
    for number in [i for i, left in enumerate(missing) if not left]:
        launch(number)
    environment.run()
    if any(left > 0 for left in missing):
        raise deadlock_error(tasks, [number for number, left in enumerate(missing) if left > 0])
    return np.array(start), np.array(end)


def waits(tasks: Tasks) -> tuple[Ints, Ints]:
    """Return (task, source), one entry per wait: what a task needs, and the task before on each stream."""
    dependent = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
    on_stream = tasks_of_uses(tasks.stream_start)
    order = np.argsort(tasks.streams, kind="stable")
    ordered, streams = on_stream[order], tasks.streams[order]
    same = streams[1:] == streams[:-1]
    task = np.concatenate([dependent, ordered[1:][same]])
    return task, np.concatenate([tasks.deps, ordered[:-1][same]])


def deadlock_error(tasks: Tasks, stuck: Sequence[int]) -> SimulationError:
    """Return the error that names a cycle among tasks that can never start."""
    cycle = find_cycle(tasks, stuck)
    lines = [
        f"{tasks.describe(task)} waits for {tasks.describe(source)} ({_reason(tasks, task, source)})"
        for task, source in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    return SimulationError(
        f"{tasks.function.name} deadlocks: {len(stuck)} of {len(tasks)} tasks wait for each other in a "
        f"cycle: {shortened(lines)}; make the order on the streams agree with the dependencies"
    )


def find_cycle(tasks: Tasks, stuck: Sequence[int]) -> list[int]:
    """Return tasks each of which waits for the next, and the last for the first.

    ``stuck`` are the tasks that never start: each of them waits for another one.
    """
    among = set(stuck)
    waited: dict[int, int] = {}
    task, source = waits(tasks)
    for waiting, other in zip(task.tolist(), source.tolist(), strict=True):
        if waiting in among and other in among:
            waited.setdefault(waiting, other)
    place: dict[int, int] = {}
    current = stuck[0]
    while current not in place:
        place[current] = len(place)
        current = waited[current]
    return [number for number, position in place.items() if position >= place[current]]


def _reason(tasks: Tasks, task: int, source: int) -> str:
    if source in tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]]:
        made = tasks.op_of(source).outputs
        read = [value for value in made if value in tasks.op_of(task).inputs] or made
        return "for its " + ", ".join(value.name for value in read)
    streams = tasks.streams_of(source)
    shared = next(stream for stream in tasks.streams_of(task) if stream in streams)
    device = tasks.classes.members[shared.rank_class][0]
    return f"before it on stream {shared.name!r} of {device}"
