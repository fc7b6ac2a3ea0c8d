"""A picture of an explanation: the critical path over the stages, and what each what-if would gain."""

from __future__ import annotations

import os
from typing import Any

from distsim.report.output import check_format, replacing
from distsim.simulation import CriticalPath, Explanation
from distsim.simulation.explain.text import seconds_text

_COLOURS = ("#4878a8", "#d1793b")
_FINEST = 1 / 4000
"""Segments that end within this share of the step on one stage are drawn as one: a page has fewer dots."""


def plot_explanation(explanation: Explanation, path: str | os.PathLike[str]) -> None:
    """Draw the critical path over time and stages, and the what-ifs, into a PNG, SVG or PDF file.

    Raises :class:`SimulationError` for another suffix, or a path that cannot be written to.
    """
    from matplotlib.figure import Figure

    suffix = check_format(path, "an explanation")
    stages, gains = max(len(explanation.stages), 1), max(len(explanation.what_ifs), 1)
    heights = (1 + 0.25 * stages, 0.6 + 0.3 * gains)
    figure: Any = Figure(figsize=(12, sum(heights) + 1), layout="constrained")
    chain, what_ifs = figure.subplots(2, 1, gridspec_kw={"height_ratios": heights})
    _draw_path(chain, explanation.critical_path, stages)
    chain.set_title(
        f"{explanation.name}: the critical path of {seconds_text(explanation.step_time)}", fontsize=10
    )
    _draw_what_ifs(what_ifs, explanation)
    with replacing(path) as file:
        figure.savefig(file, format=suffix, dpi=120)


def _draw_path(axes: Any, path: CriticalPath, stages: int) -> None:
    total = path.step_time or 1.0
    bars: list[tuple[int, float, float]] = []
    for segment in path.segments:
        if bars and bars[-1][0] == segment.stage and segment.end - bars[-1][2] < total * _FINEST:
            bars[-1] = (segment.stage, bars[-1][1], segment.end)
        else:
            bars.append((segment.stage, segment.start, segment.end))
    for stage in range(stages):
        own = [(start / total, (end - start) / total) for at, start, end in bars if at == stage]
        axes.broken_barh(own, (stage - 0.4, 0.8), facecolors=_COLOURS[0], edgecolors="white", linewidth=0.2)
    axes.set_xlim(0, 1)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages))
    axes.set_ylabel("stage")
    axes.set_xlabel("share of the step")


def _draw_what_ifs(axes: Any, explanation: Explanation) -> None:
    names = [what.change for what in explanation.what_ifs]
    shares = [what.gain / (explanation.step_time or 1.0) for what in explanation.what_ifs]
    axes.barh(range(len(names)), shares, color=_COLOURS[1])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("gain, share of the step (each simulated)")
