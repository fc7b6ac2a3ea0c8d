"""The sizes that builders are given: a record of them, taken in order or by name, and checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from distsim.errors import PlanError
from distsim.ir import Function

MAX_LAYERS = 10_000
"""Far more than any published model has: each is a Call with its parameters in the function."""

MAX_ELEMENTS = 2**46
"""Of one weight: more than any machine's memory holds, hence a mistake."""

Builder = Callable[..., Function]


def builder(record: Callable[..., object]) -> Callable[[Builder], Builder]:
    """Let a builder, whose first parameter is a record of sizes, be called with these in order or by name.

    >>> from distsim.models.llama import LlamaSizes
    >>> small = builder(LlamaSizes)(lambda sizes: sizes)
    >>> small(2, 16, heads=4, kv_heads=2).heads
    4
    """

    def decorate(build: Builder) -> Builder:
        names = inspect.signature(record).parameters
        _, *options = inspect.signature(build).parameters.values()

        @wraps(build)
        def called(*sizes: Any, **named: Any) -> Function:
            given = {name: named.pop(name) for name in names if name in named}
            return build(record(*sizes, **given), **named)

        keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
        called.__signature__ = inspect.Signature([*names.values(), *keyword_only])  # pyright: ignore[reportAttributeAccessIssue]
        return called

    return decorate


def check_sizes(**sizes: int) -> None:
    """Raise :class:`PlanError` naming the first size that is not a whole number of at least 1."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise PlanError(f"{name}={size!r} must be a whole number of at least 1")


def check_layers(layers: int) -> None:
    """Raise :class:`PlanError` for more layers than are built."""
    if layers > MAX_LAYERS:
        raise PlanError(f"layers={layers} is more than {MAX_LAYERS}, the most that are built")


def check_elements(weights: Iterable[tuple[str, int]]) -> None:
    """Raise :class:`PlanError` naming the first weight, given with its elements, that has too many."""
    for name, elements in weights:
        if elements > MAX_ELEMENTS:
            raise PlanError(f"{name} would have {elements} elements, more than 2^46; make it smaller")


def check_counts(**counts: int) -> None:
    """Raise :class:`PlanError` naming the first count that is not a whole number of at least 0."""
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise PlanError(f"{name}={count!r} must be a whole number of at least 0")


def check_rates(**rates: float) -> None:
    """Raise :class:`PlanError` naming the first rate that is not a number from 0 to below 1."""
    for name, rate in rates.items():
        if isinstance(rate, bool) or not 0 <= rate < 1:
            raise PlanError(f"{name}={rate!r} must be a number from 0 to below 1")


def check_caps(**caps: float) -> None:
    """Raise :class:`PlanError` naming the first figure that is neither 0, for none, nor positive."""
    for name, cap in caps.items():
        if isinstance(cap, bool) or not (math.isfinite(cap) and cap >= 0):
            raise PlanError(f"{name}={cap!r} must be a positive number, or 0 for none")
