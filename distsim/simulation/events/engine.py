"""The event engine: SimPy runs the tasks, one event each.

No process per op: a task counts what it still waits for, and whoever brings the count to zero starts
it. The order in which equal times are handled is SimPy's own, hence deterministic. With a network,
communication tasks are flows that share its links (:mod:`distsim.simulation.events.flows`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from simpy import Environment
from simpy.events import Timeout

from distsim.errors import SimulationError
from distsim.simulation.events.deadlock import deadlock_error, waits
from distsim.simulation.events.disturbances import Disturbances, disturbed_durations
from distsim.simulation.events.flows import Traffic
from distsim.simulation.events.network import Network, find_flows
from distsim.simulation.tasks.task_table import Floats, Tasks


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
