"""A memory budget: ever more recomputation, then a knapsack, until what is saved fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves.default import save_collectives, save_for_backward
from distsim.transforms.recompute.saves.graph import JointGraph, JointNode, NodeKind, Saves, Tag, Trait
from distsim.transforms.recompute.saves.mincut import MinCutOptions, cut_values, prepared
from distsim.transforms.recompute.saves.split import FAR, needs, split


def save_within_budget(graph: JointGraph, budget: float, options: MinCutOptions | None = None) -> Saves:
    """Save what a share ``budget`` of the activation memory allows, 0 <= ``budget`` <= 1.

    1 is what min-cut saves; 0 is the inputs of the forward pass and what is never recomputed unless tagged
    so (random values, collectives, MUST_SAVE), or what follows from these where that is smaller. In between
    three cuts are tried, each with fewer rules against recomputation; when none fits, a knapsack chooses
    which of the values that are dear to recompute are saved: the most ``seconds`` that fit. The choice is
    PyTorch's wherever it keeps the budget, which its rounding of sizes does not always
    (:attr:`Budget.room` says what keeping it means).

    Raises :class:`~distsim.errors.RematerializationError` for a budget outside [0, 1].
    """
    if not 0 <= budget <= 1:
        raise RematerializationError(f"a memory budget is a share from 0 to 1, not {budget}")
    chosen = Budget(graph, options or MinCutOptions(), budget)
    if not chosen.need.backward:
        return save_for_backward(chosen.need.graph)
    return split(chosen.need.graph, chosen.choose())


class Budget:
    """One joint graph under a memory budget."""

    def __init__(self, graph: JointGraph, options: MinCutOptions, budget: float) -> None:
        self.need, self.options, self.budget = needs(prepared(graph)), options, budget
        self.given = save_collectives(graph)

    @cached_property
    def most(self) -> tuple[int, ...]:
        """What min-cut saves."""
        return cut_values(self.need, self.options).saved

    @cached_property
    def room(self) -> int:
        """The bytes that may be saved: ``inputs + budget * (min-cut - inputs)``, at least the least."""
        inputs, most = self.size(self.need.inputs), self.size(self.most)
        room = inputs + Fraction(self.budget) * max(most - inputs, 0)
        return max(math.floor(room), self.size(self._read(self.smallest)))

    def size(self, values: Iterable[int]) -> int:
        """Return the bytes of the values."""
        return sum(self.need.graph.sizes[each] for each in values)

    def choose(self) -> Sequence[int]:
        """Return the values to save."""
        if self.budget == 0:
            return self.smallest
        inputs = self.size(self.need.inputs)
        span = self.size(self.most) - inputs
        if self.budget == 1 or span <= 0:
            return self.most
        aggressive = self.options.aggressive()
        for options in (self.options.more_aggressive(), aggressive):
            cut = cut_values(self.need, options)
            if self.size(cut.saved) - inputs < self.budget * span:
                return cut.saved
        items = self._recomputable(cut.banned)
        if not items:
            kept = [each for each in cut.banned if self.need.graph.nodes[each].tag is Tag.MUST_SAVE]
            saved = self._read(sorted([*self.least, *kept]))
            return saved if self.size(saved) <= self.room else self.smallest
        sizes = [self.need.graph.sizes[each] for each in items]
        seconds = [self.need.graph.nodes[each].seconds for each in items]
        kept = rounded_knapsack([size / span for size in sizes], seconds, self.budget)
        capacity = self.room - inputs
        while True:
            allowed = frozenset(items) - {items[i] for i in kept}
            saved = self._read(cut_values(self.need, aggressive, allowed).saved)
            excess = self.size(saved) - self.room
            if excess <= 0:
                return saved
            if capacity < 0:
                return self.smallest
            kept = exact_knapsack(sizes, seconds, capacity)
            capacity = min(capacity, sum(sizes[i] for i in kept)) - excess

    def _recomputable(self, banned: Iterable[int]) -> list[int]:
        """Return the banned values that may be recomputed after all, largest first.

        Views of inputs are saved with them; a random value would come out another.
        """
        graph = self.need.graph
        inputs = {graph.storages[each] for each in self.need.inputs}
        found = [
            each
            for each in banned
            if self.need.distance[each] < FAR
            and graph.storages[each] not in inputs
            and not _fixed(graph.nodes[each])
        ]
        return sorted(found, key=lambda each: -graph.sizes[each])

    @cached_property
    def smallest(self) -> Sequence[int]:
        """The fewest bytes: the least, or where less comes of what is never recomputed, that."""
        if set(self.least) <= set(self.need.inputs):
            return self.least
        aggressive = self.options.aggressive()
        again = frozenset(self._recomputable(cut_values(self.need, aggressive).banned))
        cut = cut_values(self.need, aggressive, again).saved
        return min(self.least, cut, key=lambda saved: self.size(self._read(saved)))

    def _read(self, saved: Sequence[int]) -> tuple[int, ...]:
        """Return those of the values that backward reads."""
        return split(self.need.graph, saved).saved

    @cached_property
    def least(self) -> tuple[int, ...]:
        """The inputs and the values that are never recomputed, items for tuples."""
        graph, found = self.given, set(self.need.inputs)
        for position in self.need.forward:
            if _fixed(graph.nodes[position]) and self.need.distance[position] < FAR:
                if graph.nodes[position].kind is NodeKind.TUPLE:
                    found.update(user for user in graph.users[position] if graph.nodes[user].item is not None)
                else:
                    found.add(position)
        return tuple(sorted(found))


def _fixed(node: JointNode) -> bool:
    """Tell whether the value is never recomputed."""
    return not node.wants_recompute and (node.tag is Tag.MUST_SAVE or node.has(Trait.RANDOM))


STEPS = 10_000
"""Sizes are rounded to this share of the budget's range."""


def rounded_knapsack(sizes: Sequence[float], seconds: Sequence[float], room: float) -> tuple[int, ...]:
    """Return the items to keep, most seconds within ``room``, with sizes rounded to 1/10,000.

    The dynamic program over rounded sizes that PyTorch runs, in its single precision and with its choice
    among equals. What rounds to nothing is free, so many small items may exceed the room together: check.

    >>> rounded_knapsack([0.5, 0.4, 0.3], [2.0, 3.0, 2.0], 0.7)
    (1, 2)
    """
    sizes_in_steps = [round(size * STEPS) for size in sizes]
    capacity = round(room * STEPS)
    best: npt.NDArray[np.float32] = np.zeros(capacity + 1, dtype=np.float32)
    taken: npt.NDArray[np.bool_] = np.zeros((len(sizes), capacity + 1), dtype=np.bool_)
    for i, (size, gain) in enumerate(zip(sizes_in_steps, np.array(seconds, dtype=np.float32), strict=True)):
        with_item = best.copy()
        if size == 0:
            with_item += gain
        elif size <= capacity:
            np.maximum(best[size:], best[:-size] + gain, out=with_item[size:])
        taken[i] = with_item != best
        best = with_item
    kept: list[int] = []
    for i in reversed(range(len(sizes))):
        if taken[i, capacity]:
            kept.append(i)
            capacity -= sizes_in_steps[i]
    return tuple(reversed(kept))


def exact_knapsack(sizes: Sequence[int], seconds: Sequence[float], room: int) -> tuple[int, ...]:
    """Return the items to keep: never more than ``room`` bytes, most seconds (HiGHS, gap 0).

    >>> exact_knapsack([5, 4, 3], [2.0, 3.0, 2.0], 7)
    (1, 2)
    """
    optimize: Any = import_module("scipy.optimize")  # slow to import, and without type hints
    fits = [i for i, size in enumerate(sizes) if size <= room]
    free = [i for i in fits if sizes[i] == 0]
    fits = [i for i in fits if sizes[i] > 0]
    if not fits or room < 0:
        return tuple(free)
    unit = math.gcd(*(sizes[i] for i in fits))
    weights = np.array([sizes[i] // unit for i in fits], dtype=np.float64)
    gains = np.array([seconds[i] for i in fits], dtype=np.float64)
    limit = room // unit
    while True:
        # Whole numbers come back as nearly whole ones: the exact sum decides.
        result: Any = optimize.milp(
            c=-gains / max(gains.max(), 1e-300),
            constraints=optimize.LinearConstraint(weights[None, :], ub=limit),
            integrality=np.ones(len(fits)),
            bounds=optimize.Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
        kept = [i for i, value in zip(fits, result.x, strict=True) if value > 0.5]
        excess = sum(sizes[i] for i in kept) - room
        if excess <= 0:
            return tuple(sorted(free + kept))
        limit -= max(1, excess // unit)
