"""Max-min fair rates by progressive filling (Bertsekas and Gallager, "Data Networks", 1992, 6.5.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")

_SAME = 1 + 1e-12
"""Levels that differ by rounding are one: all that binds there binds at once."""


def fair_rates(
    flows: Sequence[tuple[float, Mapping[Key, float]]], capacity: Mapping[Key, float]
) -> list[float]:
    """Return the max-min fair rate of each flow: none can gain but at the cost of one that has no more.

    A flow is ``(limit, weights)``: its rate is at most ``limit``, and a rate of r takes ``weights[c] * r``
    of the capacity of each channel c that it names. All rates grow together from zero; a flow stops when
    it is at its limit or a channel that it passes is full.

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
