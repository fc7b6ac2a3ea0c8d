"""Steps side by side, and what makes the difference: what each consists of, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from distsim.errors import SimulationError
from distsim.report.figures import DEVICE, StepFigures
from distsim.schedule.refusals import count
from distsim.simulation.explain.text import rate_text, seconds_text, table
from distsim.simulation.quantities import bytes_label

NEXT_STEP = "overlap with the next step"
"""By how much steps follow each other faster than one that is run alone takes: the next one begins in it."""

_MOST_PARTS = 6
_SHOWN = 0.002
"""The least share of a step by which parts differ for it to be said."""

_ROUNDED = 1e-9
_LONGEST_NAME = 40


def parts_title(by: str) -> str:
    """Return what is said of parts ``by`` the mean device or a part of the critical path.

    >>> parts_title("kind")
    'critical path, by kind'
    """
    return "on the mean device" if by == DEVICE else f"critical path, by {by}"


@dataclass(frozen=True)
class PartDifference:
    """Seconds that a part takes of a first and of a second step."""

    part: str
    first: float
    second: float

    @property
    def seconds(self) -> float:
        """How much longer it takes of the second."""
        return self.second - self.first


def differences(
    first: tuple[float, Mapping[str, float]], second: tuple[float, Mapping[str, float]]
) -> tuple[PartDifference, ...]:
    """Return in which parts two steps differ, the largest difference first.

    Each is given by its seconds and those of its parts. The differences sum to that of the steps; exactly,
    where times lie on a grid, as those of fixed durations do.
    """
    one, other = _whole(*first), _whole(*second)
    found = [PartDifference(part, one.get(part, 0.0), other.get(part, 0.0)) for part in {**one, **other}]
    return tuple(sorted([own for own in found if own.seconds], key=lambda own: (-abs(own.seconds), own.part)))


def _whole(seconds: float, parts: Mapping[str, float]) -> Mapping[str, float]:
    """Return parts that sum to the seconds of a step."""
    rest = seconds - sum(parts.values())
    return parts if abs(rest) <= _ROUNDED * seconds else {**parts, NEXT_STEP: rest}


def difference_table(found: tuple[PartDifference, ...], seconds: float, of: str) -> list[str]:
    """Return a table of differences of a step of so many seconds: the largest, the others, their sum.

    ``of``: what the parts are taken from. Nothing if each of them is little beside the step.
    """
    shown = [own for own in found[:_MOST_PARTS] if abs(own.seconds) >= _SHOWN * seconds]
    if not shown:
        return []
    rows = [_row(own.part, own.first, own.second) for own in shown]
    rest = found[len(shown) :]
    if rest:
        total = sum(own.first for own in rest), sum(own.second for own in rest)
        rows.append(_row(f"{count(len(rest), 'other')}, each less", *total))
    total = sum(own.first for own in found), sum(own.second for own in found)
    rows.append(("in all", "", "", _signed(total[1] - total[0])))
    return table((of, "first", "second", "difference"), rows)


def _row(name: str, first: float, second: float) -> tuple[str, ...]:
    taken = (_signed(own).lstrip("+") if own else "-" for own in (first, second))
    return (name, *taken, _signed(second - first))


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{seconds_text(abs(seconds))}"


def faster_or_slower(first: float, second: float) -> str:
    """Say how a step of so many seconds compares with a second one.

    >>> faster_or_slower(1.0, 1.5)
    '500 ms faster than'
    """
    gap = second - first
    way = "faster" if gap > 0 else "slower"
    return f"{seconds_text(abs(gap))} {way} than" if gap else "as fast as"


@dataclass(frozen=True)
class StepComparison:
    """Two or more steps, and what their parts are ``of``; ``print`` it.

    Raises :class:`SimulationError` for fewer steps.
    """

    steps: tuple[StepFigures, ...]
    of: str

    def __post_init__(self) -> None:
        if len(self.steps) < 2:
            raise SimulationError(f"{len(self.steps)} steps: a comparison is of two or more")

    def differences(self, number: int) -> tuple[PartDifference, ...]:
        """Return in which parts a step differs from the first, the largest difference first."""
        first, other = self.steps[0], self.steps[number]
        return differences((first.seconds, first.parts), (other.seconds, other.parts))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as what JSON has."""
        others = range(1, len(self.steps))
        return {
            "steps": [step.to_dict() for step in self.steps],
            "differences": [
                {
                    "first": self.steps[0].name,
                    "second": self.steps[number].name,
                    "difference_s": self.steps[number].seconds - self.steps[0].seconds,
                    "parts": [_record(own) for own in self.differences(number)],
                }
                for number in others
            ],
        }

    def __str__(self) -> str:
        names = self._names()
        lines = self._table(names)
        lines += [f"{name}: {step.name}" for name, step in names.items() if name != step.name]
        first = self.steps[0]
        for number, (name, step) in enumerate(names.items()):
            if number:
                said = f"{name} is {faster_or_slower(step.seconds, first.seconds)} {next(iter(names))}"
                rows = difference_table(self.differences(number), first.seconds, self.of)
                lines += ["", f"{said}:" if rows else f"{said}; no part makes much of a difference", *rows]
        return "\n".join(lines) + "\n"

    def _repr_html_(self) -> str:
        """Return the table for a notebook, in letters of one width."""
        return f"<pre>{escape(str(self))}</pre>"

    def _names(self) -> Mapping[str, StepFigures]:
        """Return the steps by what they are called in tables: by letters, where names are long."""
        if max(len(step.name) for step in self.steps) <= _LONGEST_NAME:
            return {step.name: step for step in self.steps}
        return {f"({number})": step for number, step in enumerate(self.steps, 1)}

    def _table(self, names: Mapping[str, StepFigures]) -> list[str]:
        unit = self.steps[0].unit
        header = (
            *("", "step", "90 %, s", f"{unit}/s/device", "MFU"),
            *("peak memory", "fits", "busy", "exposed", "bubble"),
        )
        rows = [
            (
                name,
                seconds_text(step.seconds),
                f"{step.low:.3g} to {step.high:.3g}" if step.high else "-",
                rate_text(step.rate),
                f"{step.mfu:.1%}",
                bytes_label(step.peak),
                "yes" if step.fits else f"{bytes_label(step.peak - step.usable)} too much",
                *(_share(own, step) for own in (step.busy, step.exposed, step.bubble)),
            )
            for name, step in names.items()
        ]
        return table(header, rows)


def _share(seconds: float, step: StepFigures) -> str:
    """Return seconds with their share of a single step."""
    whole = step.busy + step.exposed + step.bubble
    return f"{seconds_text(seconds)} ({seconds / whole:.1%})" if whole else seconds_text(seconds)


def _record(own: PartDifference) -> dict[str, Any]:
    return {
        "part": own.part,
        "first_s": own.first,
        "second_s": own.second,
        "difference_s": own.seconds,
    }
