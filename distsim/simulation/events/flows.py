"""Flows under way: what each moves at which rate, as others start and end.

A channel is *full* when the flows on it, each at full speed, ask for more than its capacity. Only full
channels hold anything back. So a change concerns the flows that full channels join to those that started
or ended, no others; their rates are computed anew, once for all that happens at one instant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from simpy import Environment
from simpy.events import Timeout

_FULL = 1 + 1e-9
"""Demands that pass a capacity by rounding fit."""


@dataclass(frozen=True, eq=False, slots=True)
class Flow:
    """What a communication task moves: after ``latency`` seconds, ``seconds`` of transfer at full speed.

    ``demands`` are (channel, bytes/s) at full speed. ``limit`` is the bytes/s on the channel that bounds
    the flow when it is alone: what is shared fairly.
    """

    latency: float
    seconds: float
    limit: float
    demands: tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class _Active:
    """A flow under way: ``left`` seconds at full speed, going at ``speed`` of it since ``since``."""

    task: int
    flow: Flow
    left: float
    since: float
    speed: float = 0.0
    version: int = 0


class Traffic:
    """The flows that are under way in an environment, over channels of these capacities in bytes/s.

    ``done`` is called with the number of a task when its flow has ended.
    """

    def __init__(
        self, environment: Environment, capacity: Sequence[float], done: Callable[[int], None]
    ) -> None:
        self._environment = environment
        self._capacity = capacity
        self._done = done
        self._on: list[dict[_Active, float]] = [{} for _ in capacity]
        self._demand = [0.0] * len(capacity)
        self._changed: dict[_Active, None] = {}

    def enter(self, task: int, flow: Flow) -> None:
        """Start the transfer of a task; its latency is over."""
        active = _Active(task, flow, flow.seconds, self._environment.now)
        full = False
        for channel, demand in flow.demands:
            self._on[channel][active] = demand
            self._demand[channel] += demand
            full = self._full(channel) or full
        if full:
            self._change([active])
        else:
            self._go(active, 1.0)

    def _leave(self, event: Any) -> None:
        active: _Active
        active, version = event.value
        if version != active.version:
            return  # its speed has changed since
        changed: dict[_Active, None] = {}
        for channel, demand in active.flow.demands:
            on = self._on[channel]
            full = self._full(channel)
            del on[active]
            self._demand[channel] = self._demand[channel] - demand if on else 0.0
            if full:
                changed.update(dict.fromkeys(on))
        self._changed.pop(active, None)
        if changed:
            self._change(changed)
        self._done(active.task)

    def _full(self, channel: int) -> bool:
        return self._demand[channel] > self._capacity[channel] * _FULL

    def _change(self, flows: Sequence[_Active] | dict[_Active, None]) -> None:
        """Note flows whose rates change; they are settled after what happens at this instant."""
        if not self._changed:
            Timeout(self._environment, 0.0).callbacks.append(self._settle)  # pyright: ignore
        self._changed.update(dict.fromkeys(flows))

    def _settle(self, _: Any) -> None:
        flows = self._joined(self._changed)
        self._changed = {}
        full = {channel for active in flows for channel, _ in active.flow.demands if self._full(channel)}
        shares = [
            (a.flow.limit, {c: demand / a.flow.limit for c, demand in a.flow.demands if c in full})
            for a in flows
        ]
        rates = fair_rates(shares, {channel: self._capacity[channel] for channel in full})
        for active, rate in zip(flows, rates, strict=True):
            speed = rate / active.flow.limit
            if speed != active.speed:
                self._go(active, speed)

    def _joined(self, seeds: dict[_Active, None]) -> list[_Active]:
        """Return these flows and all that full channels join to them."""
        found = dict(seeds)
        seen: set[int] = set()
        queue = list(seeds)
        for active in queue:
            for channel, _ in active.flow.demands:
                if channel not in seen and self._full(channel):
                    seen.add(channel)
                    fresh = [other for other in self._on[channel] if other not in found]
                    found.update(dict.fromkeys(fresh))
                    queue.extend(fresh)
        return list(found)

    def _go(self, active: _Active, speed: float) -> None:
        now = self._environment.now
        active.left = max(active.left - (now - active.since) * active.speed, 0.0)
        active.since, active.speed = now, speed
        active.version += 1
        wait = active.left / speed
        Timeout(self._environment, wait, (active, active.version)).callbacks.append(self._leave)  # pyright: ignore


# --- max-min fair rates ------------------------------------------------------------------------------

Key = TypeVar("Key")

_SAME = 1 + 1e-12
"""Levels that differ by rounding are one: all that binds there binds at once."""


def fair_rates(
    flows: Sequence[tuple[float, Mapping[Key, float]]], capacity: Mapping[Key, float]
) -> list[float]:
    """Return the max-min fair rate of each flow: none can gain but at the cost of one that has no more.

    A flow is ``(limit, weights)``: its rate is at most ``limit``, and a rate of r takes ``weights[c] * r``
    of the capacity of each channel c that it names. All rates grow together from zero; a flow stops when
    it is at its limit or a channel that it passes is full (progressive filling: Bertsekas and Gallager,
    "Data Networks", 1992, 6.5.2).

    >>> fair_rates([(10, {"a": 1}), (10, {"a": 1, "b": 1}), (10, {"b": 1})], {"a": 10, "b": 4})
    [8.0, 2.0, 2.0]
    """
    rates = [0.0] * len(flows)
    left: dict[Key, float] = {}
    users: dict[Key, dict[int, float]] = {}
    for number, (_, weights) in enumerate(flows):
        for channel, weight in weights.items():
            left.setdefault(channel, float(capacity[channel]))
            users.setdefault(channel, {})[number] = weight
    waiting = sorted(range(len(flows)), key=lambda number: -flows[number][0])  # least limit last
    growing = dict.fromkeys(range(len(flows)))
    level = 0.0
    while growing:
        full_at = {channel: left[channel] / math.fsum(on.values()) for channel, on in users.items()}
        while waiting[-1] not in growing:
            waiting.pop()
        # What is left is a difference: rounding must not lower the level.
        level = max(level, min(flows[waiting[-1]][0], min(full_at.values(), default=math.inf)))
        stopped = {
            number for channel, at in full_at.items() if at <= level * _SAME for number in users[channel]
        }
        stopped.update(number for number in growing if flows[number][0] <= level)
        for number in sorted(stopped):
            limit, weights = flows[number]
            rates[number] = min(level, float(limit))
            del growing[number]
            for channel, weight in weights.items():
                left[channel] = max(left[channel] - weight * rates[number], 0.0)
                del users[channel][number]
                if not users[channel]:
                    del users[channel]
    return rates
