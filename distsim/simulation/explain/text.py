"""Figures and tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 0) -> list[str]:
    """Lay out columns: the first and the last ``texts`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    numbers = range(1, len(widths) - texts)
    lines: list[str] = []
    for row in (header, *rows):
        columns = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(width) if n in numbers else cell.ljust(width) for n, (cell, width) in columns]
        lines.append("  ".join(cells).rstrip())
    return lines


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a notebook, its texts escaped; without a header if that says nothing.

    >>> html_table(("", ""), [("plan", "a<b")])
    '<table><tr><td>plan</td><td>a&lt;b</td></tr></table>'
    """
    lines = [("th", header)] if any(header) else []
    return "<table>{}</table>".format(
        "".join(
            f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
            for tag, cells in (*lines, *(("td", row) for row in rows))
        )
    )


def rate_text(number: float) -> str:
    """Return how many a second: whole from a thousand on, else of four digits.

    >>> rate_text(96263.3), rate_text(13.36112)
    ('96,263', '13.36')
    """
    return f"{number:,.0f}" if number >= 1e3 else f"{number:.4g}"


def seconds_text(seconds: float) -> str:
    """Return seconds in the unit that suits them.

    >>> seconds_text(0.0123)
    '12.3 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
