"""The fields of a configuration file that anyone may have written: each is checked before it is used."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import cast

from distsim.errors import ImportModelError
from distsim.importer.tensors import read_bytes

MAX_CONFIG_BYTES = 2**20
"""A configuration is a page of text."""

MAX_COUNT = 2**31 - 1
"""The largest size of anything."""


def read_config(path: str | os.PathLike[str]) -> dict[str, object]:
    """Return the table in a JSON file; raise :class:`ImportModelError` when there is none."""
    content = read_bytes(path, MAX_CONFIG_BYTES)
    try:
        table: object = json.loads(content, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError as error:
        raise ImportModelError(f"{path}: nested too deeply to be a model's configuration") from error
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits, a field given twice
        raise ImportModelError(f"{path} is not a model's configuration in JSON: {error}") from error
    if not isinstance(table, dict):
        raise ImportModelError(f"{path} holds {_shown(table)}; a configuration is a table of fields")
    return cast(dict[str, object], table)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{_shown(twice)} is given twice")
    return table


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number")


def _shown(value: object) -> str:
    """Return a value as text of bounded length."""
    if isinstance(value, dict | list):  # of a stranger: as deep as it likes
        kind = "table" if isinstance(value, dict) else "list"
        return f"a {kind} of {len(cast(Sequence[object], value))}"
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class ConfigFields:
    """The fields of a configuration by name; ``origin`` begins each error.

    A field that is null is one that is missing: that is how defaults are written. A field without a default
    must be there.
    """

    def __init__(self, origin: str, table: Mapping[str, object]) -> None:
        self.origin, self.table = origin, table

    def refusal(self, name: str, usable: str) -> ImportModelError:
        """Return the error that a field is not usable, and what would be."""
        if self.table.get(name) is None:
            return ImportModelError(f"{self.origin}: {name} is missing; it must be {usable}")
        return ImportModelError(f"{self.origin}: {name}={_shown(self.table[name])} must be {usable}")

    def has(self, name: str) -> bool:
        """Whether a field is there."""
        return self.table.get(name) is not None

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT) -> int:
        """Return a whole number."""
        value = self.table.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(name, f"a whole number from {least} to {most}")
        return value

    def maybe_count(self, name: str) -> int | None:
        """Return a whole number of at least 1, or None where the field is missing."""
        return self.count(name) if self.has(name) else None

    def number(self, name: str, default: float) -> float:
        """Return a positive number."""
        value = self.table.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e30:
            raise self.refusal(name, "a positive number")
        return float(value)

    def rate(self, name: str) -> float:
        """Return a rate of dropout, by default 0."""
        value = self.table.get(name, 0.0)
        if value is None:
            return 0.0
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise self.refusal(name, "a number from 0 to below 1")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.table.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def choice(self, name: str, meanings: Mapping[str, str], default: str) -> str:
        """Return the meaning of a word."""
        value = self.table.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in meanings:
            raise self.refusal(name, f"one of {', '.join(meanings)}")
        return meanings[value]

    def items(self, name: str, most: int) -> list[object]:
        """Return a list of at most ``most`` items, empty where the field is missing."""
        value = self.table.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(cast(list[object], value)) > most:
            raise self.refusal(name, f"a list of at most {most} items")
        return cast(list[object], value)

    def part(self, name: str) -> ConfigFields:
        """Return the fields of a table in the table, which has none where the field is missing."""
        value = self.table.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refusal(name, "a table of fields")
        return ConfigFields(f"{self.origin}: {name}", cast(dict[str, object], value))

    def refuse_unless(self, name: str, *usable: object) -> None:
        """Raise unless a field is missing or one of what is usable: something that is not modelled."""
        value = self.table.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in usable):
            raise self.refusal(
                name, " or ".join(_shown(each) for each in usable) + ": the rest is not modelled"
            )

    def finite(self) -> None:
        """Raise for a number that is none: tables made in Python may hold such."""
        for name, value in self.table.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise self.refusal(name, "a finite number")
