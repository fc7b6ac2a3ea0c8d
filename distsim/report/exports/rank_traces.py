"""A folder of traces, one a rank, as Holistic Trace Analysis takes it (HolisticTraceAnalysis 0.5).

Kernels, collectives and copies have the names by which it tells computation, communication and memory
apart; launches have the correlation of what they launch. https://github.com/facebookresearch/HolisticTraceAnalysis
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from distsim.report.exports.folders import chosen_devices, made_folder
from distsim.report.trace import write_trace
from distsim.simulation import Simulation


def write_rank_traces(
    simulation: Simulation, folder: str | os.PathLike[str], ranks: Iterable[int] | None = None
) -> list[Path]:
    """Write ``rank-N.json.gz`` for each of these ranks (default: all) into a new or empty folder.

    Returns the files. Raises :class:`SimulationError` for a folder that holds something, and for a rank that
    does not occur.
    """
    devices = chosen_devices(simulation, ranks)
    place = made_folder(folder)
    width = len(str(max(device.id for device in devices)))
    files = [place / f"rank-{device.id:0{width}}.json.gz" for device in devices]
    for device, file in zip(devices, files, strict=True):
        write_trace(simulation, file, [device], marked=True)
    return files
