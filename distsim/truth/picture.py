"""The picture of accuracy: predicted against measured seconds, with intervals."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from distsim.errors import SimulationError
from distsim.report.output import check_format, replacing
from distsim.truth.accuracy import Comparison
from distsim.truth.score import source_of

_MARKS = "osD^vP*X<>hp"
_NEAR = 0.2
"""The share of the measured seconds by which the dotted lines are off."""


def plot_accuracy(comparisons: Sequence[Comparison], path: str | os.PathLike[str]) -> None:
    """Draw predicted against measured seconds into a PNG, SVG or PDF file, as the suffix of ``path`` says.

    Raises :class:`SimulationError` for another suffix, a path that cannot be written to, and no comparison.
    """
    suffix = check_format(path, "predicted against measured")
    figure = accuracy_figure(comparisons)
    with replacing(path) as file:
        figure.savefig(file, format=suffix, dpi=130)


def accuracy_figure(comparisons: Sequence[Comparison]) -> Any:
    """Return the picture as a matplotlib Figure: both axes logarithmic, a colour and a sign a source."""
    from matplotlib.figure import Figure

    if not comparisons:
        raise SimulationError("no row was predicted and measured, so there is nothing to draw")
    figure: Any = Figure(figsize=(7.5, 6.5), layout="constrained")
    axes: Any = figure.add_subplot()
    sources: dict[str, list[Comparison]] = {}
    for each in comparisons:
        sources.setdefault(source_of(each.row), []).append(each)
    for place, (source, group) in enumerate(sources.items()):
        axes.errorbar(
            [each.measured for each in group],
            [each.outcome.seconds for each in group],
            yerr=[[_below(each) for each in group], [_above(each) for each in group]],
            fmt=_MARKS[place % len(_MARKS)],
            color=f"C{place % 10}",
            markersize=4.5,
            elinewidth=0.7,
            alpha=0.75,
            label=f"{source[:44]}, {len(group)} rows",
        )
    seconds = [each.measured for each in comparisons] + [each.outcome.seconds for each in comparisons]
    ends = [min(seconds) / 1.5, max(seconds) * 1.5]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for share in (1 - _NEAR, 1 + _NEAR):
        axes.plot(ends, [share * end for end in ends], color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured seconds a step (logarithmic)")
    axes.set_ylabel(f"predicted seconds a step (logarithmic; bars: 90 % intervals; dotted: {_NEAR:.0%} off)")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left")
    return figure


def _below(each: Comparison) -> float:
    return each.outcome.seconds - each.outcome.low if each.has_interval else 0.0


def _above(each: Comparison) -> float:
    return each.outcome.high - each.outcome.seconds if each.has_interval else 0.0
