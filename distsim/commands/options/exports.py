"""Files for other programs that a simulation is written to: the options, and writing what they ask for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from distsim.commands.options.json_output import teller
from distsim.errors import SimulationError
from distsim.report.exports import write_chakra, write_memory_snapshot, write_rank_traces
from distsim.report.exports.folders import check_folder
from distsim.report.output import check_target
from distsim.report.progress import Progress
from distsim.simulation import Simulation


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="write a trace for each rank, as Holistic Trace Analysis takes them, into a new folder",
    )
    parser.add_argument(
        "--memory-snapshot",
        type=Path,
        metavar="PICKLE",
        help="write the memory of each rank for pytorch.org/memory_viz and torch.cuda._memory_viz",
    )
    parser.add_argument(
        "--chakra",
        type=Path,
        metavar="DIR",
        help="write Chakra execution traces, as ASTRA-sim reads them, into a new folder",
    )
    parser.add_argument(
        "--trace-ranks",
        metavar="N,N,...",
        help="with --trace, --trace-dir, --memory-snapshot or --chakra: only these ranks, as 0,8 or 0-3",
    )


def check_exports(options: argparse.Namespace) -> None:
    """Refuse paths that cannot be written to, and ranks of nothing, before any work."""
    if options.memory_snapshot:
        check_target(options.memory_snapshot)
    folders = [folder for folder in (options.trace_dir, options.chakra) if folder]
    for folder in folders:
        check_folder(folder)
    if len(folders) == 2 and folders[0].absolute() == folders[1].absolute():
        raise SimulationError(f"--trace-dir and --chakra are both {folders[0]}; name two folders")
    if options.trace_ranks is not None:
        ranks_of(options)
        if not (options.trace or options.memory_snapshot or folders):
            raise SimulationError(
                "--trace-ranks is about files: add --trace, --trace-dir, --memory-snapshot or --chakra"
            )


def ranks_of(options: argparse.Namespace) -> list[int] | None:
    """Return the ranks that are asked for, None for all."""
    text: str | None = options.trace_ranks
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SimulationError(f"--trace-ranks {text[:60]!r} is not ranks between commas, as 0,8 or 0-3")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def exports(
    options: argparse.Namespace, simulation: Simulation, progress: Progress
) -> Iterator[Callable[[], int]]:
    """Yield what writes each of the files that are asked for, and says so."""
    ranks, tell = ranks_of(options), teller(options.json)

    def traces() -> int:
        files = progress.run(
            f"writing {options.trace_dir}", lambda: write_rank_traces(simulation, options.trace_dir, ranks)
        )
        tell(f"traces: {len(files)} in {options.trace_dir} (for Holistic Trace Analysis)")
        return 0

    def snapshot() -> int:
        path = options.memory_snapshot
        progress.run(f"writing {path}", lambda: write_memory_snapshot(simulation, path, ranks))
        tell(f"memory: {path} (open it at pytorch.org/memory_viz)")
        return 0

    def chakra() -> int:
        files = progress.run(
            f"writing {options.chakra}", lambda: write_chakra(simulation, options.chakra, ranks)
        )
        tell(f"Chakra: {len(files) - 1} ranks and their groups in {options.chakra}")
        return 0

    if options.trace_dir:
        yield traces
    if options.memory_snapshot:
        yield snapshot
    if options.chakra:
        yield chakra
