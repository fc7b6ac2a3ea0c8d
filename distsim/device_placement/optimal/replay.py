"""When ops run that are issued in a given order: a device does one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from distsim.device_placement.problem import Problem


def order_by_time(problem: Problem, ends: Sequence[float]) -> tuple[int, ...]:
    """Return the ops in an order in which they can be issued so that they end at these times.

    It is that of the middles of their runs: rounding, which may let two runs on a device overlap, does not
    change it, and one that takes no time stays before what the device goes on with.
    """
    items = problem.items
    middle = [end - item.latency / 2 for item, end in zip(items, ends, strict=True)]
    missing = [sum(items[read].is_op for read in item.inputs) for item in items]
    ready = [(middle[op], op) for op in problem.ops if not missing[op]]
    heapify(ready)
    found: list[int] = []
    while ready:
        op = heappop(ready)[1]
        found.append(op)
        for reader in problem.readers[op]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, (middle[reader], reader))
    return tuple(found)


def replay(
    problem: Problem, where: Sequence[int], sequence: Sequence[int], transfers: Sequence[float]
) -> tuple[float, ...]:
    """Return when each item ends (outside inputs: 0) if the ops are issued in ``sequence``.

    ``where`` is the device of each item that is an op. An op starts when its device has done the one before
    and what it reads is there: ``transfers[i]`` after the end of item i if that is on another device.
    """
    free = [0.0] * (max((where[op] for op in problem.ops), default=0) + 1)
    ends = [0.0] * len(problem.items)
    for op in sequence:
        begin = free[where[op]]
        for read in problem.items[op].inputs:
            if problem.items[read].is_op:
                begin = max(begin, ends[read] + (transfers[read] if where[read] != where[op] else 0.0))
        ends[op] = free[where[op]] = begin + problem.items[op].latency
    return tuple(ends)
