"""What a command prints: standard output and error that may be closed, or whose reader has gone."""

from __future__ import annotations

import contextlib
import os
import sys


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
