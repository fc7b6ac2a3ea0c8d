"""How true predictions are, as text: errors by group, memory, intervals and choices, beside two baselines.

The baselines are 40 % MFU for every step, and the preset without its tables (``PredictedStep.best_shape``).
They have neither memory nor intervals of their own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from distsim.schedule.refusals import count
from distsim.simulation.explain.interval import clash
from distsim.simulation.explain.text import table
from distsim.truth.evaluation import Outcome
from distsim.truth.row import Row
from distsim.truth.score import (
    BASELINE_MFU,
    after_own_runs,
    by_count,
    coverage,
    detection,
    measured,
    ran_out,
    regret,
    scores,
    source_of,
)

_CHOICE = ("model", "hw_gpu", "n_gpus", "seq", "global_batch", "n_layers", "hidden", "precision")
"""Columns that rows share, beside their source, of which a user would choose one."""

_LAYOUT_COLUMNS = (
    *("dp", "tp", "sp", "pp", "vpp", "cp", "ep", "zero", "fsdp", "schedule", "recompute", "micro_batch"),
    *("framework", "attention", "overlap"),
)

OWN_RUNS = (1, 3, 5)
"""How many measured steps of one's own are tried."""

MOST_RATIOS = 20
"""How many ratios of a source and its GPU are printed one by one."""

_LAYOUTS = ("dp only", "tp", "pp", "tp+pp", "zero", "cp", "ep")
_LONGEST_NAME = 58


@dataclass(frozen=True)
class Comparison:
    """A row that was predicted, and whose seconds were measured."""

    row: Row
    outcome: Outcome
    measured: float

    @property
    def choice(self) -> tuple[str, ...]:
        """What the rows have in common that differ in their layouts alone."""
        return (source_of(self.row), *[self.row.get(name, "") for name in _CHOICE])

    @property
    def has_interval(self) -> bool:
        """Whether it is known how far to trust the prediction."""
        return self.outcome.high < math.inf


PREDICTORS: dict[str, Callable[[Outcome], float]] = {
    "distsim": lambda outcome: outcome.seconds,
    f"{BASELINE_MFU:.0%} MFU": lambda outcome: outcome.mfu_seconds,
    "no tables": lambda outcome: outcome.best_shape,
}
"""What predicts the seconds of a step: distsim, and the baselines."""


@dataclass(frozen=True)
class Accuracy:
    """What became of the rows of tables, and how far that is from what was measured; ``str`` says it all."""

    rows: Sequence[Row]
    outcomes: Sequence[Outcome]

    @property
    def comparisons(self) -> list[Comparison]:
        """The rows that were predicted and measured."""
        return [
            Comparison(row, outcome, seconds)
            for row, outcome in zip(self.rows, self.outcomes, strict=True)
            if outcome.predicted and (seconds := measured(row, "iter_time_s"))
        ]

    @property
    def choices(self) -> list[list[Comparison]]:
        """The comparisons of which a user would choose one: those of each group of more than one."""
        groups: dict[tuple[str, ...], list[Comparison]] = {}
        for each in self.comparisons:
            groups.setdefault(each.choice, []).append(each)
        return [group for group in groups.values() if len(group) > 1]

    def __str__(self) -> str:
        parts = [self._errors(), self._regret(), self._intervals(), self._own_runs()]
        parts += [self._memory(), self._rest()]
        return "\n\n".join(["\n".join(lines) for lines in parts if lines])

    def _errors(self) -> list[str]:
        """Return the errors of seconds by source, hardware and layout, and by table if there are several."""
        found = self.comparisons
        if not found:
            return []
        names = list(PREDICTORS)[1:]
        header = ["error of seconds a step", "rows", "mean", "median", "bias", "worst"]
        header += [f"{name}: {what}" for name in names for what in ("mean", "bias")]
        lines = [_error_cells("all rows", found)]
        groupings: list[tuple[str, Callable[[Comparison], Sequence[str]], Sequence[str]]] = [
            ("source", lambda each: (source_of(each.row),), ()),
            ("hardware", lambda each: (each.row.get("hw_gpu", ""),), ()),
            ("layout (zero, cp and ep with any)", lambda each: each.outcome.layouts, _LAYOUTS),
        ]
        if len({each.row.get("table") for each in found}) > 1:
            groupings.append(("table", lambda each: (each.row.get("table", ""),), ()))
        for what, groups_of, order in groupings:
            lines.append([f"by {what}:", *[""] * (len(header) - 1)])
            groups: dict[str, list[Comparison]] = {name: [] for name in order}
            for each in found:
                for name in groups_of(each):
                    groups.setdefault(name, []).append(each)
            lines += [_error_cells(f"  {name}", group) for name, group in groups.items() if group]
        return table(header, lines)

    def _regret(self) -> list[str]:
        groups = self.choices
        if not groups:
            return []
        lines: list[str] = []
        for name, predictor in PREDICTORS.items():
            found = [regret([(predictor(each.outcome), each.measured) for each in group]) for group in groups]
            worst = groups[found.index(max(found))][0].row
            where = f"{source_of(worst)}, {worst.get('model', '')}" if max(found) > 0 else ""
            lines.append(
                f"  {name:10} {statistics.fmean(found):6.1%} mean, {max(found):6.1%} worst {where}".rstrip()
            )
        what = f"{count(len(groups), 'group')} of one model, cluster and batch"
        return [f"regret of taking the layout that is predicted to be fastest, {what}:", *lines]

    def recommendations(self) -> str:
        """Return the layout that is taken of each group of which a user would choose one, and its regret."""
        if not self.choices:
            return "no two rows are of one model, cluster and batch, so there is nothing to choose"
        header = ["group", "rows", "regret", "taken", "measured", "fastest", "measured", "layout taken"]
        rows: list[list[str]] = []
        for group in self.choices:
            taken = min(group, key=lambda each: each.outcome.seconds)
            fastest = min(group, key=lambda each: each.measured)
            lost = regret([(each.outcome.seconds, each.measured) for each in group])
            cells = [_group_name(taken), str(len(group)), f"{lost:.1%}"]
            for each in (taken, fastest):
                cells += [each.row["id"], f"{each.measured:.4g} s"]
            rows.append([*cells, _layout_in(taken, group)])
        return "\n".join(table(header, rows, texts=1))

    def ratios(self) -> str:
        """Return measured over predicted seconds of each source and GPU, as ``--own-runs`` of other steps on
        the same machine takes them; of more than :data:`MOST_RATIOS` the median."""
        groups: dict[str, list[float]] = {}
        for each in self.comparisons:
            name = f"{source_of(each.row)}, {each.row.get('hw_gpu', '')}"
            groups.setdefault(name, []).append(each.measured / each.outcome.seconds)
        lines = ["measured over predicted seconds, which correct other steps on the same machine:"]
        for name, found in groups.items():
            shown = " ".join(f"{ratio:.3f}" for ratio in found)
            if len(found) > MOST_RATIOS:
                shown = f"{statistics.median(found):.3f} (the median of {len(found)})"
            far = "  (far from 1: is iter_time_s in seconds, and the row what ran?)" if clash(found) else ""
            lines.append(f"  {name[:_LONGEST_NAME]}: --own-runs {shown}{far}")
        return "\n".join(lines)

    def _intervals(self) -> list[str]:
        known = [each for each in self.comparisons if each.has_interval]
        found = coverage(
            [(each.outcome.low, each.outcome.seconds, each.outcome.high, each.measured) for each in known]
        )
        return [] if found is None else [f"90 % intervals: {found}"]

    def _own_runs(self) -> list[str]:
        """Return the errors where some measured steps of the same source and machine are known."""
        groups: dict[tuple[str, str], list[float]] = {}
        for each in self.comparisons:
            groups.setdefault((source_of(each.row), each.row.get("hw_gpu", "")), []).append(
                each.measured / each.outcome.seconds
            )
        known = [ratios for ratios in groups.values() if len(ratios) > max(OWN_RUNS)]
        if not known:
            return []
        errors = [
            f"{runs}: {statistics.fmean([_after(ratios, runs) for ratios in known]):.1%}"
            for runs in (0, *OWN_RUNS)
        ]
        what = f"{count(len(known), 'group')} of a source and its GPUs, {sum(map(len, known))} rows"
        return [
            f"mean error where so many measured steps of a group correct the others, {what}:",
            f"  {', '.join(errors)}",
        ]

    def _memory(self) -> list[str]:
        done = [pair for pair in zip(self.rows, self.outcomes, strict=True) if pair[1].predicted]
        peaks = [("", outcome.peak, peak) for row, outcome in done if (peak := measured(row, "peak_mem_gb"))]
        lines = [f"peak of memory: {count(len(peaks), 'row')}, {score}" for score in scores(peaks).values()]
        told = [
            (not outcome.fits, happened) for row, outcome in done if (happened := ran_out(row)) is not None
        ]
        if told:
            found = detection(told)
            lines.append(
                f"out of memory: precision {_share(found.precision)} ({found.right} of the {found.said} that "
                f"are said not to fit), recall {_share(found.recall)} (of {found.happened} that did not), "
                f"{count(len(told), 'row')}"
            )
        return lines

    def _rest(self) -> list[str]:
        """Return what could not be predicted, and what predictions leave out and assume."""
        lines: list[str] = []
        for texts, verb in (
            ([outcome.missing for outcome in self.outcomes if outcome.missing], "cannot be expressed"),
            ([outcome.failed for outcome in self.outcomes if outcome.failed], "FAILED"),
        ):
            lines.append(f"{len(texts)} of {len(self.rows)} rows {verb}{':' if texts else ''}")
            lines += _counted(texts)
        left_out = [text for outcome in self.outcomes for text in outcome.left_out]
        assumed = [text for outcome in self.outcomes for text in outcome.assumed]
        if left_out:
            lines += ["said by columns, and left out, as no plan says it:", *_counted(left_out)]
        if assumed:
            lines += ["said by no column, and assumed:", *_counted(assumed)]
        return lines


def _group_name(each: Comparison) -> str:
    names = [each.row.get(name, "") for name in ("model", "n_gpus", "hw_gpu", "global_batch", "seq")]
    model, gpus, device, batch, tokens = names
    return f"{model}, {gpus} {device}, batch {batch} of {tokens}"


def _layout_in(taken: Comparison, group: Sequence[Comparison]) -> str:
    """Return in what the layout of a row differs from others of its group."""
    return ",".join(
        f"{name}={taken.row.get(name, '')}"
        for name in _LAYOUT_COLUMNS
        if len({each.row.get(name, "") for each in group}) > 1
    )


def _error_cells(name: str, group: Sequence[Comparison]) -> list[str]:
    """Return a line of the table of errors."""
    own, *others = (
        scores([("", predictor(each.outcome), each.measured) for each in group])[""]
        for predictor in PREDICTORS.values()
    )
    cells = [f"{own.mean:.1%}", f"{own.median:.1%}", f"{own.bias:+.1%}", f"{own.worst:+.1%}"]
    cells += [text for other in others for text in (f"{other.mean:.1%}", f"{other.bias:+.1%}")]
    return [name[:_LONGEST_NAME], str(len(group)), *cells]


def _after(ratios: Sequence[float], runs: int) -> float:
    """Return the mean error of the other steps of a group after so many of them."""
    return statistics.fmean(map(abs, after_own_runs(ratios, runs)))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _counted(texts: Iterable[str]) -> list[str]:
    return [f"{times:4}  {text}" for text, times in by_count(list(texts))]
