"""Scheduling problems, and the shortest schedule of a small one by trying all."""

from __future__ import annotations

import math
import random

from distsim.device_placement import Item, PartitionDevice, Problem


def make_problem(seconds, sent, edges, own=None):
    """Ops with these seconds, bytes handed on and (from, to) edges; at rate 1 a byte takes a second."""
    own = sent if own is None else own
    return Problem(
        tuple(
            Item(f"op{v}", tuple(sorted(u for u, w in edges if w == v)), sent[v], own[v], s, s / 2)
            for v, s in enumerate(seconds)
        )
    )


def make_devices(count, memory=10**9):
    return tuple(PartitionDevice(f"dev_{i}", memory, i) for i in range(count))


def random_problem(seed, count=7, density=0.35, whole=False):
    source = random.Random(seed)
    number = (lambda low, high: source.randint(low, high)) if whole else source.uniform
    seconds = [float(number(0 if whole else 1, 10)) for _ in range(count)]
    sent = [source.randint(0, 8) for _ in range(count)]
    edges = [(u, v) for v in range(count) for u in range(v) if source.random() < density]
    return make_problem(seconds, sent, edges, [size + source.randint(1, 10) for size in sent])


def layered_problem(seed, layers, width, delay, whole=True):
    """Each op reads one or two of the layer before; 1 to 10 seconds, delays up to twice ``delay`` means."""
    source = random.Random(seed)
    count = layers * width
    seconds = [float(source.randint(1, 10)) if whole else source.uniform(1, 10) for _ in range(count)]
    sent = [source.randint(0, round(11 * delay)) for _ in range(count)]
    edges = {
        ((layer - 1) * width + source.randrange(width), layer * width + place)
        for layer in range(1, layers)
        for place in range(width)
        for _ in range(source.randint(1, 2))
    }
    return make_problem(seconds, sent, sorted(edges))


def shortest(problem, devices, rate=1.0):
    """The least makespan over all devices and all orders: ops are appended in every way."""
    items = problem.items
    best = [math.inf]

    def fits(where):
        return all(
            problem.bytes_of(problem.close([op for op in where if where[op] == d])) <= devices[d].memory
            for d in set(where.values())
        )

    def extend(ends, where, free):
        if len(ends) == len(problem.ops):
            if fits(where):
                best[0] = min(best[0], max(ends.values()))
            return
        for op in problem.ops:
            if op in ends or any(items[u].is_op and u not in ends for u in items[op].inputs):
                continue
            for d in range(len(devices)):
                if (
                    any(free[e] == 0 and devices[e].memory == devices[d].memory for e in range(d))
                    and free[d] == 0
                ):
                    continue
                begin = free[d]
                for u in items[op].inputs:
                    if items[u].is_op:
                        begin = max(begin, ends[u] + (items[u].output_bytes / rate if where[u] != d else 0))
                end = begin + items[op].latency
                if end < best[0]:
                    extend(ends | {op: end}, where | {op: d}, (*free[:d], end, *free[d + 1 :]))

    extend({}, {}, (0.0,) * len(devices))
    return best[0]
