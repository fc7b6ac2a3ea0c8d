"""A plan: how a training step is laid out on the devices, as one line of text."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from distsim.errors import PlanError
from distsim.schedule import SCHEDULES

MAX_DEGREE = 2**20
"""Largest degree and microbatch count: about ten times the largest clusters, so more is a slip."""


@dataclass(frozen=True)
class Plan:
    """Degrees of parallelism, microbatches per step and the pipeline schedule.

    `dp` data parallel, `tp` tensor parallel and `pp` pipeline parallel ranks; `microbatches` per
    data-parallel replica and step; `schedule` is a name in `distsim.schedule.SCHEDULES`. A plan is
    verified when made, and its text parses back to it.

    Raises:
        PlanError: a count is not an integer in 1..MAX_DEGREE, or the schedule is unknown.

    >>> plan = Plan.parse("dp=2,tp=4,pp=2,microbatches=8")
    >>> print(plan, plan.devices)
    dp=2,tp=4,pp=2,microbatches=8,schedule=1f1b 16
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        # A list of the names, not the mapping: whatever was given may not be hashable.
        if self.schedule not in list(SCHEDULES):
            raise PlanError(
                f"schedule={_short(self.schedule)} is unknown; choose one of {', '.join(SCHEDULES)}"
            )

    @property
    def devices(self) -> int:
        """Number of devices that the plan occupies: dp * tp * pp."""
        return math.prod((self.dp, self.tp, self.pp))

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan from `key=value` items between commas; a key left out has its default.

        Raises:
            PlanError: an item is not `key=value`, a key is unknown or repeated, or a value does
                not fit its field; the message names the field, the value and the choices.
        """
        given: dict[str, Any] = {}
        for item in text.split(","):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                raise PlanError(
                    f"plan {_short(text)}: {_short(item)} is not key=value; write for example {cls()}"
                )
            if key not in _FIELDS:
                raise PlanError(f"unknown field {_short(key)} in a plan; choose from {', '.join(_FIELDS)}")
            if key in given:
                raise PlanError(
                    f"{key} is given twice ({given[key]} and {_short(value)}); give each field once"
                )
            given[key] = _parse_count(key, value) if key in _COUNTS else value
        return cls(**given)


_FIELDS = tuple(field.name for field in fields(Plan))
_COUNTS = tuple(name for name in _FIELDS if name != "schedule")


def _parse_count(name: str, text: str) -> int:
    # int() also reads "1_0", "+1" and other scripts' digits, and refuses over 4300 digits with its own error.
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        raise PlanError(f"{name}={_short(text)} is not an integer; choose one of 1..{MAX_DEGREE}")
    if len(text) > 20:
        raise PlanError(f"{name}={_short(text)} is out of range; choose one of 1..{MAX_DEGREE}")
    return int(text)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{name}={_short(value)} is not an integer; choose one of 1..{MAX_DEGREE}")
    if not 1 <= value <= MAX_DEGREE:
        shown = value if abs(value) < 10**20 else "an integer of more than 20 digits"
        raise PlanError(f"{name}={shown} is out of range; choose one of 1..{MAX_DEGREE}")


def _short(value: object, limit: int = 40) -> str:
    """The repr of a value from outside, cut so that an error stays one readable line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
