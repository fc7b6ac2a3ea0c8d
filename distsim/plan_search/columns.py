"""What is said of a plan that was tried: one table of columns, of which records, texts and pages are made.

A new figure is a line of :func:`plan_columns`; what it is read off is a field of
:class:`distsim.plan_search.trial.PlanTrial`, which journals then have by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distsim.plan_search.trial import PlanTrial
from distsim.simulation.explain.text import rate_text, seconds_text
from distsim.simulation.quantities import bytes_label, time_scale
from distsim.simulation.trained_step import SearchedStep


@dataclass(frozen=True)
class PageCell:
    """How a page's table shows a column: its ``label``, at what ``place`` from the left, and its ``form``.

    ``form`` is one of ``FORMS`` of ``report/page/assets/plans.js``, which makes a cell of the value of the
    column, or of those of the columns ``of``.
    """

    place: int
    label: str
    form: str
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanColumn:
    """A figure of a plan: what a search says of it where.

    ``value`` is what it is, None where it is not known: ``record`` its key in records, ``name`` that in rows
    of a page, each "" where it is not there. ``text`` is the value for people, ``label`` the head of their
    table, where ``words`` stand to the left and last, and ``html`` that of notebooks; "" where it has none.
    """

    value: Callable[[PlanTrial], Any]
    record: str = ""
    name: str = ""
    text: Callable[[PlanTrial], str] = str
    label: str = ""
    html: str = ""
    words: bool = False
    page: PageCell | None = None


def plan_columns(step: SearchedStep) -> tuple[PlanColumn, ...]:
    """Return the columns of the plans of a step, in the order of records and tables.

    >>> from distsim.ir import Topology
    >>> step = SearchedStep("gpt2", 8, 1024, 1e12, peak=1e12, topology=Topology())
    >>> record_of(step, PlanTrial("dp=1", refused="no such plan"))["status"]
    'refused'
    """
    return (*_what_became(), *_speed(step), *_memory(), *_reasons())


def record_of(step: SearchedStep, trial: PlanTrial) -> dict[str, Any]:
    """Return what is known of a plan as a record, by the names of the columns."""
    return {column.record: column.value(trial) for column in plan_columns(step) if column.record}


def page_row(columns: Sequence[PlanColumn], trial: PlanTrial) -> list[Any]:
    """Return the values that a page has of a plan, in the order of the columns that have a name there."""
    return [column.value(trial) for column in columns if column.name]


def page_cells(columns: Sequence[PlanColumn]) -> list[list[str]]:
    """Return what a page's table shows: labels, forms, and the names of the values that these take."""
    shown = [(column.page, column.name) for column in columns if column.page is not None]
    ordered = sorted(shown, key=lambda item: item[0].place)
    return [[cell.label, cell.form, *(cell.of or (name,))] for cell, name in ordered]


def _what_became() -> tuple[PlanColumn, ...]:
    return (
        PlanColumn(lambda trial: trial.text, record="plan", text=lambda trial: trial.text, html="plan"),
        PlanColumn(lambda trial: trial.short, name="plan", page=PageCell(0, "plan", "plan")),
        PlanColumn(lambda trial: trial.status, record="status"),
        PlanColumn(_fate, name="status", page=PageCell(6, "status", "word")),
        PlanColumn(
            lambda trial: trial.fits if not trial.discarded and not trial.refused else None, record="fits"
        ),
    )


def _speed(step: SearchedStep) -> tuple[PlanColumn, ...]:
    rate = f"{step.unit}/s/device"
    return (
        _figure(
            lambda trial: trial.seconds if trial.simulated else None,
            ("step_s", "step"),
            lambda trial: seconds_text(trial.seconds),
            PageCell(1, "step", "seconds"),
        ),
        PlanColumn(lambda trial: trial.low or None, record="low_s", name="low"),
        PlanColumn(
            lambda trial: trial.high or None,
            record="high_s",
            name="high",
            text=_interval,
            label="90 %",
            page=PageCell(5, "90 %", "interval", ("low", "high")),
        ),
        PlanColumn(
            lambda trial: step.rate(trial.seconds) if trial.simulated else None,
            record=f"{step.unit}_per_s_per_device",
            name="rate",
            text=lambda trial: rate_text(step.rate(trial.seconds)),
            label=rate,
            html=f"{step.unit}/s a device",
            page=PageCell(4, rate, "figure"),
        ),
        _figure(
            lambda trial: step.mfu(trial.seconds, trial.plan) if trial.simulated else None,
            ("mfu", "mfu"),
            lambda trial: f"{step.mfu(trial.seconds, trial.plan):.1%}",
            PageCell(3, "MFU", "share"),
        ),
    )


def _memory() -> tuple[PlanColumn, ...]:
    return (
        _figure(
            lambda trial: trial.peak or None,
            ("peak_bytes", "memory"),
            lambda trial: bytes_label(trial.peak),
            PageCell(2, "memory", "bytes"),
        ),
        PlanColumn(
            lambda trial: trial.missing if trial.peak else None, record="missing_bytes", name="missing"
        ),
        PlanColumn(_usable, record="usable_bytes", text=_left, label="left", html="left"),
    )


def _reasons() -> tuple[PlanColumn, ...]:
    return (
        PlanColumn(
            lambda trial: trial.bound_by() or None,
            record="bound_by",
            text=lambda trial: trial.bound_by(),
            label="bound by",
            html="bound by",
            words=True,
        ),
        PlanColumn(lambda trial: trial.refused or None, record="refused"),
        PlanColumn(
            lambda trial: trial.bound_by() or trial.refused or None,
            name="note",
            page=PageCell(7, "bound by, or why not", "words"),
        ),
    )


def _figure(
    value: Callable[[PlanTrial], Any],
    names: tuple[str, str],
    text: Callable[[PlanTrial], str],
    page: PageCell,
) -> PlanColumn:
    """Return a column that is under one label everywhere; ``names`` are its key in records and on pages."""
    record, name = names
    return PlanColumn(value, record, name, text, page.label, page.label, page=page)


def _interval(trial: PlanTrial) -> str:
    """Return between which times a step is to be expected, in the unit of its own."""
    if not trial.high:
        return "-"
    scale, unit = time_scale(trial.seconds)
    low, high = (
        f"{own / scale:.3g}" if own < 999 * scale else f"{own / scale:,.0f}"
        for own in (trial.low, trial.high)
    )
    return f"{low} to {high} {unit}"


def _usable(trial: PlanTrial) -> float | None:
    return trial.usable if trial.peak and math.isfinite(trial.usable) else None


def _left(trial: PlanTrial) -> str:
    """Return which share of what is usable is left on the fullest device; "-" if it has more than others."""
    usable = _usable(trial)
    return "-" if not usable or trial.peak > usable else f"{1 - trial.peak / usable:.0%}"


def _fate(trial: PlanTrial) -> str:
    if not trial.simulated:
        return trial.status
    return "fits" if trial.fits else "nearly fits"
