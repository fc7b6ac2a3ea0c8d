"""A picture of a step: a row for each stream of each rank class, time to the right."""

from __future__ import annotations

import os
from typing import Any

from distsim.errors import SimulationError
from distsim.report.labels import ranks_label, stream_label
from distsim.report.output import check_format, replacing
from distsim.simulate import Simulation
from distsim.simulate.quantities import time_scale
from distsim.simulate.tasks.rank_classes import communicates

_COLOURS = {"compute": "#4878a8", "collective": "#d1793b", "send and receive": "#5a9e6f"}
_MOST_ROWS = 64
_FINEST = 1 / 4000
"""Gaps and bars narrower than this share of the step are not told apart: a page has fewer dots."""


def plot_timeline(simulation: Simulation, path: str | os.PathLike[str], rows: int = _MOST_ROWS) -> None:
    """Draw the timeline into a PNG, SVG or PDF file, as the suffix of ``path`` says.

    Ranks in lock step share their rows. At most ``rows`` rows are drawn; a note says how many are left
    out. Raises :class:`SimulationError` for another suffix, or a path that cannot be written to.
    """
    from matplotlib.figure import Figure

    suffix = check_format(path, "a timeline")
    if rows < 1:
        raise SimulationError(f"rows={rows}: draw at least one row")
    bars = _bars(simulation)
    streams = sorted(bars, key=lambda key: (key[0], key[1] != "compute", key[1]))
    shown = streams[:rows]
    figure: Any = Figure(figsize=(12, 1.6 + 0.28 * max(len(shown), 1)), layout="constrained")
    axes: Any = figure.add_subplot()
    scale, unit = time_scale(simulation.step_time)
    for row, key in enumerate(shown):
        for kind, pieces in bars[key].items():
            widths = [(start / scale, (end - start) / scale) for start, end in pieces]
            axes.broken_barh(widths, (row - 0.4, 0.8), facecolors=_COLOURS[kind])
    axes.set_yticks(range(len(shown)), [_label(simulation, *key) for key in shown], fontsize=8)
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    axes.set_xlim(0, simulation.step_time / scale or 1)
    axes.set_xlabel(f"time ({unit})")
    left_out = len(streams) - len(shown)
    note = f"; {left_out} more rows not shown" if left_out else ""
    axes.set_title(f"{simulation.name}: {simulation.step_time / scale:.4g} {unit}{note}", fontsize=10)
    _legend(figure)
    with replacing(path) as file:
        figure.savefig(file, format=suffix, dpi=120)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches: list[Any] = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)


Intervals = list[tuple[float, float]]


def _bars(simulation: Simulation) -> dict[tuple[int, str], dict[str, Intervals]]:
    """Return per (rank class, stream) and kind what to draw, in seconds; near neighbours are merged."""
    finest = simulation.step_time * _FINEST
    bars: dict[tuple[int, str], dict[str, Intervals]] = {}
    for span in simulation.spans():
        kind = "compute"
        if communicates(span.op):
            kind = "send and receive" if span.op.op_type == "Send" else "collective"
        pieces = bars.setdefault((span.stream.rank_class, span.stream.name), {}).setdefault(kind, [])
        if pieces and span.start - pieces[-1][1] < finest and span.end - span.start < finest:
            pieces[-1] = (pieces[-1][0], span.end)
        else:
            pieces.append((span.start, span.end))
    return bars


def _label(simulation: Simulation, rank_class: int, stream: str) -> str:
    devices = simulation.classes.members[rank_class]
    return f"{ranks_label(devices)}  {stream_label(simulation, stream)}"
