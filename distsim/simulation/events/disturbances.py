"""What goes wrong in a real cluster: jitter, slow devices, slow and failed links; all repeatable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from distsim.errors import CostError, SimulationError
from distsim.ir import Device
from distsim.ops import operator
from distsim.simulation.tasks.task_table import Floats, Tasks

LinkName = tuple[Device, Device] | tuple[str, Device] | str
"""The link between two devices; the port of a device at a level of the topology; all ports of a level."""


MOST_JITTER = 10.0
"""Largest coefficient of variation: ten times the mean is more than any machine varies."""


@dataclass(frozen=True)
class Disturbances:
    """What disturbs a run; the default is nothing.

    Every op, of computation or communication, takes its time multiplied by a lognormal factor of mean 1
    and coefficient of variation ``jitter``, drawn op by op from a generator of this ``seed``. Compute on
    one of ``slow_devices`` takes its factor times as long. Each direction of one of ``slow_links``
    carries 1/factor of what it did; an op that would use one of ``failed_links`` is an error. Links are
    named by two devices, by ``(level, device)`` for a port, or by a level for all its ports.

    Raises :class:`SimulationError` for a jitter outside of 0 to 10, a seed below 0, and a
    factor that is not finite or less than 1.

    >>> import distsim
    >>> gpt = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
    >>> calm, rough = (distsim.simulate(gpt, "dgx-a100", "dp=2", 4, jitter=jitter) for jitter in (0.0, 0.5))
    >>> calm.step_time != rough.step_time
    True
    """

    jitter: float = 0.0
    seed: int = 0
    slow_devices: Mapping[Device, float] = field(default_factory=dict[Device, float])
    slow_links: Mapping[LinkName, float] = field(default_factory=dict[LinkName, float])
    failed_links: tuple[LinkName, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise SimulationError(f"jitter={self.jitter} must lie in 0..{MOST_JITTER:g}")
        if self.seed < 0:
            raise SimulationError(f"seed={self.seed} must be 0 or more")
        for name, factor in (*self.slow_devices.items(), *self.slow_links.items()):
            if not (math.isfinite(factor) and factor >= 1):
                raise SimulationError(f"{name} slowed by {factor}: the factor must be finite and at least 1")


def disturbed_durations(tasks: Tasks, disturbances: Disturbances | None) -> Floats:
    """Return the seconds of each task under these disturbances, but for links.

    Raises :class:`CostError` naming the op whose time is negative, infinite or not a number, and
    :class:`SimulationError` when a rank class stands for several devices that are no longer alike.
    """
    durations = tasks.durations
    if disturbances is not None and disturbances.slow_devices:
        durations = durations * _slowness(tasks, disturbances.slow_devices)
    if disturbances is not None and disturbances.jitter > 0:
        for number in range(len(tasks.classes.members)):
            _check_alone(tasks, number, "jitter")
        variance = math.log1p(disturbances.jitter**2)
        generator = np.random.default_rng(disturbances.seed)
        durations = durations * generator.lognormal(-variance / 2, math.sqrt(variance), len(tasks))
    wrong = np.flatnonzero(~(np.isfinite(durations) & (durations >= 0)))
    if len(wrong):
        task = int(wrong[0])
        raise CostError(
            f"{tasks.describe(task)} takes {durations[task]} s; a cost must be finite and not negative"
        )
    return durations


def _slowness(tasks: Tasks, slow: Mapping[Device, float]) -> Floats:
    of_class = np.ones(len(tasks.classes.members))
    for device, factor in slow.items():
        number = tasks.classes.of.get(device)
        if number is None:
            raise SimulationError(f"slow device {device} does not occur in {tasks.function.name}")
        _check_alone(tasks, number, f"a slow {device}")
        of_class[number] = factor
    table = np.array([stream.rank_class for stream in tasks.stream_table], np.int64)
    classes = table[tasks.streams[tasks.stream_start[:-1]]]
    computes = np.array([operator(op.op_type).computes for op in tasks.op_table], np.bool_)[tasks.op]
    return np.where(computes, of_class[classes], 1.0)


def _check_alone(tasks: Tasks, number: int, what: str) -> None:
    members = tasks.classes.members[number]
    if len(members) > 1:
        raise SimulationError(
            f"{what} sets devices apart, but {members[0]} stands for {len(members)} devices of "
            f"{tasks.function.name}; simulate each on its own: lower(..., lockstep=False)"
        )
