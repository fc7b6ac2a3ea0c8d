"""A plan, or sets of values to search, as a mapping of fields: what Python has where text has commas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeGuard

from distsim.errors import PlanError, shortened

PlanFields = Mapping[str, str | int]
"""A value for each of some fields of a plan."""

PlanSets = Mapping[str, str | int | Collection[str | int]]
"""A value, or several, for each of some fields of a plan."""


def plan_text(fields: PlanFields) -> str:
    """Return the text of a mapping of fields.

    Raises :class:`PlanError` for a field that has several values, or one that is more than a value.

    >>> plan_text({"dp": 2, "sp": "on"})
    'dp=2,sp=on'
    """
    for name, value in fields.items():
        if several(value):
            raise PlanError(
                f"{str(name)[:20]}={shortened(value)}: a plan has one value a field, a search several"
            )
    return sets_text(fields)


def sets_text(sets: PlanSets) -> str:
    """Return the text of sets of values for fields; a value alone is a set of one. Raises so too.

    >>> sets_text({"tp": [1, 2], "remat": "*"})
    'tp=1|2,remat=*'
    """
    return ",".join(f"{_word(name, name)}={_values(name, given)}" for name, given in sets.items())


def several(value: object) -> TypeGuard[Collection[object]]:
    """Whether a value is a list of values: a text is none."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def _values(name: object, given: object) -> str:
    return "|".join(_word(name, each) for each in given) if several(given) else _word(name, given)


def _word(name: object, value: object) -> str:
    text = str(value)
    if any(letter in text for letter in ",="):
        raise PlanError(f"{shortened(name, 20)}: {shortened(value)} is no field, or value of one, of a plan")
    return text
