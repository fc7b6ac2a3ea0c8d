"""Text for a terminal: as wide as it is, and in colours; anywhere else it stays as it is.

What a command prints: standard output and error that may be closed, or whose reader has gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap

_STYLES = {"bold": "1", "red": "31;1", "green": "32", "yellow": "33"}
_MARKS = (
    (re.compile(r"OUT OF MEMORY|FAILED"), "red"),
    (re.compile(r"(?<=^memory        )fits|(?<=, )fits$", re.MULTILINE), "green"),
    (re.compile(r"^note:", re.MULTILINE), "yellow"),
    (re.compile(r"^(step time|throughput|MFU) ", re.MULTILINE), "bold"),
)
"""What stands out in a report."""

_LABEL = re.compile(r"(note: |[A-Za-z][A-Za-z ]{0,12}? {2,})(?=\S)")
_CELLS = re.compile(r"\S {2,}(?=\S)")
_LAST_CELL = re.compile(r"(.*\S) {2,}(\S+(?: \S+)*)$")
_LONG_CELL = 20
"""Characters from which on the last cell of a row that is too wide stands below it, as plans do anyway."""

_CUT, _INDENT = "\u2026", "      "


def is_coloured() -> bool:
    """Whether standard output is a terminal that takes colours: https://no-color.org asks for none."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def for_terminal(text: str) -> str:
    """Return a report as wide as the terminal, in colours if it has them; as it is where there is none.

    Rows of tables that are wider are cut, and a line says so; sentences, and the last cell of a row where
    that is a long one, go on below.
    """
    if not sys.stdout.isatty():
        return text
    fitted = fit(text, shutil.get_terminal_size().columns)
    return coloured(fitted) if is_coloured() else fitted


def fit(text: str, width: int) -> str:
    """Return a text of which no line is wider than ``width`` columns, 40 at least.

    >>> print(fit("devices         busy  exposed  bubble  peak memory     usable", 40))
    devices         busy  exposed  bubble  \u2026
    rows are cut to 40 columns: a wider terminal, or | less -S, has all of them
    """
    width, cut = max(width, 40), False
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
        elif len(_CELLS.findall(line)) > 1:  # a row: columns are two spaces or more apart
            last = _LAST_CELL.match(line)
            row, below = line, ""
            if last and (len(last[2]) >= _LONG_CELL or "=" in last[2]):
                row, below = last.groups()
            lines.append(row if len(row) <= width else f"{row[: width - 1]}{_CUT}")
            cut |= len(row) > width
            lines += _below(below, width)
        else:
            label = _LABEL.match(line)
            lines += textwrap.wrap(
                line, width, subsequent_indent=" " * (label.end() if label else 2), break_on_hyphens=False
            )
    if cut:
        lines.append(f"rows are cut to {width} columns: a wider terminal, or | less -S, has all of them")
    return "\n".join(lines)


def _below(cell: str, width: int) -> list[str]:
    """Return a cell as lines below its row, between whose commas it may be broken."""
    lines: list[str] = []
    for part in re.findall(r"[^,]+,? ?", cell):
        if lines and len(lines[-1]) + len(part.rstrip()) <= width:
            lines[-1] += part
        else:
            lines.append(f"{_INDENT}{part}")
    return [line.rstrip() for line in lines]


def coloured(text: str) -> str:
    """Return a report with what stands out in colours.

    >>> coloured("note: x")
    '\\x1b[33mnote:\\x1b[0m x'
    """
    for pattern, name in _MARKS:
        text = pattern.sub(lambda found, style=_STYLES[name]: f"\x1b[{style}m{found[0]}\x1b[0m", text)
    return text


def open_missing() -> None:
    """Open what the process was started without, as nothing, so that no file is written in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It takes the lowest number that is free: that of the stream.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def say(text: object) -> None:
    """Print a line at once, so that it is out whatever fails later. A reader that has gone wants no more."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()


def complain(text: str) -> None:
    """Print a line to standard error, if it can be written."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def close_output() -> None:
    """Write out what is left, so that Python does not fail at it in its own way when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    """Send what standard output still holds, and all that follows, nowhere."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
