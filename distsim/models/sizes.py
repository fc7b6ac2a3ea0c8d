"""Checking the sizes that builders are given."""

from __future__ import annotations

from distsim.errors import PlanError


def check_sizes(**sizes: int) -> None:
    """Raise :class:`PlanError` naming the first size that is not a whole number of at least 1."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise PlanError(f"{name}={size!r} must be a whole number of at least 1")
