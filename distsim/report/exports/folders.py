"""Folders of files, one a rank, that programs read whole: they must hold nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from distsim.errors import SimulationError
from distsim.ir import Device
from distsim.report.output import check_writable
from distsim.simulation import Simulation

MOST_RANKS = 1024
"""Files that are written without being asked for each: beyond, ranks are chosen."""


def check_folder(path: str | os.PathLike[str]) -> Path:
    """Return a folder that is not there yet or empty; raise :class:`SimulationError` for any other path, and
    where it takes no files.

    What reads such a folder reads all that is in it, and nothing that is there is written over.
    """
    folder = Path(path)
    if folder.is_dir():
        there = next(folder.iterdir(), None)
        if there is not None:
            raise SimulationError(
                f"{folder} is not empty, it holds {there.name}; name a folder that is new or empty"
            )
        check_writable(folder, folder)
        return folder
    if folder.exists() or folder.is_symlink():
        raise SimulationError(f"{folder} is not a folder; name one that is new or empty")
    if not folder.parent.is_dir():
        raise SimulationError(f"{folder}: there is no folder {folder.parent}; make it first")
    check_writable(folder.parent, folder)
    return folder


def made_folder(path: str | os.PathLike[str]) -> Path:
    """Return an empty folder, made if it is not there."""
    folder = check_folder(path)
    folder.mkdir(exist_ok=True)
    return folder


def chosen_devices(simulation: Simulation, ranks: Iterable[int] | None) -> list[Device]:
    """Return the devices of ranks by their numbers, which are those of devices; of None all.

    Raises :class:`SimulationError` for a rank that does not occur, and for None with more than
    ``MOST_RANKS``.
    """
    by_number = {device.id: device for device in simulation.timestamps}
    if ranks is None:
        if len(by_number) > MOST_RANKS:
            raise SimulationError(
                f"{simulation.name} has {len(by_number)} ranks, more than {MOST_RANKS}: choose some"
            )
        return list(by_number.values())
    chosen = list(dict.fromkeys(ranks))
    missing = [rank for rank in chosen if rank not in by_number]
    if missing or not chosen:
        known = f"{min(by_number)} to {max(by_number)}" if by_number else "none"
        raise SimulationError(f"rank {missing[0] if missing else ''} does not occur; there are {known}")
    return [by_number[rank] for rank in chosen]
