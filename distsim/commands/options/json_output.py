"""The option ``--json`` of commands: what they found as JSON, on standard output or in a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distsim.console.terminal import complain, say
from distsim.report.output import check_target, finite, replacing

PRINTED = Path("-")
"""What ``--json`` without a file stands for."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--json",
        type=_target,
        nargs="?",
        const=PRINTED,
        metavar="FILE.json",
        help="write what was found as JSON; without a file print it instead of tables",
    )


def _target(text: str) -> Path:
    if text == str(PRINTED) or text.endswith(".json"):
        return Path(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no .json file; to print, give --json last, or --json -")


def check_json(target: Path | None) -> None:
    """Raise :class:`SimulationError` for a file that cannot be written."""
    if target is not None and target != PRINTED:
        check_target(target)


def write_json(target: Path, record: Any) -> None:
    """Print a record, or write it into a file and say so."""
    text = json.dumps(finite(record), indent=1, allow_nan=False)
    if target == PRINTED:
        say(text)
        return
    with replacing(target) as file:
        file.write(f"{text}\n".encode())
    say(f"results: {target}")


def teller(target: Path | None) -> Callable[[str], None]:
    """Return what says things to people: on standard error where standard output has JSON."""
    return complain if target == PRINTED else say
