"""Figures and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines: list[str] = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def count(number: int, noun: str) -> str:
    """Return ``1 device``, ``2 devices``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds_text(seconds: float) -> str:
    """Return seconds in the unit that suits them.

    >>> seconds_text(0.0123)
    '12.3 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
