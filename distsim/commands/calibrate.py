"""The command ``distsim calibrate``: timings of a machine -> a cluster's file with its figures."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

from distsim.calibration import calibrate, read_timings
from distsim.commands.options.cluster import add_settings
from distsim.console.terminal import complain, say
from distsim.errors import TimingsError
from distsim.report.output import check_target, replacing


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "timings",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a table of timings (.csv), a trace of torch's profiler (.json, .json.gz), or what nccl-tests "
        "printed (any other name)",
    )
    parser.add_argument(
        "--base", required=True, help="the preset or .toml file that says what was not measured"
    )
    add_settings(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="TOML", help="the cluster's file to write")
    parser.add_argument("--name", help="what the cluster is called (by default the name of the file)")
    parser.add_argument("--date", help="when it was measured, as 2026-01-31 (by default today)")


def run(options: argparse.Namespace) -> int:
    """Fit, print each figure with its residual, and write the file."""
    out: Path = options.out
    if out.suffix != ".toml":
        raise TimingsError(f"--out {out}: a cluster's file is called .toml, as in --out my-cluster.toml")
    measured = options.date or date.today().isoformat()
    if not _is_date(measured):
        raise TimingsError(f"--date {measured!r:.40}: write year, month and day, as in --date 2026-01-31")
    check_target(out)
    timings, notes = read_timings(options.timings)
    for note in notes:
        complain(f"passed over: {note}")
    made = calibrate(
        timings,
        options.base,
        options.set,
        name=options.name or out.stem,
        date=measured,
    )
    say(str(made))
    if not made.figures:
        raise TimingsError("no figure is supported by these timings, so nothing is written")
    with replacing(out) as file:
        file.write(made.text.encode())
    say(f"written: {out}; use it as --cluster {out}")
    return 0


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
