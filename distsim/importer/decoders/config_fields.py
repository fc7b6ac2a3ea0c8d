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
        raise ImportModelError(f"{path}: nested too deeply to be a configuration") from error
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits, a field given twice
        raise ImportModelError(f"{path} is not a configuration in JSON: {error}") from error
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
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class ConfigFields:
    """The fields of a configuration by name; ``origin`` begins each error.

    A field that is missing is as in ``defaults``, where it may be null (None); one that is in neither must be
    given. Null, in the file or there, is none of what the field says, or false, or a rate of 0; where none
    makes no sense it is refused.
    """

    def __init__(self, origin: str, table: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self.origin, self.table, self.defaults = origin, table, defaults
        self._seen: set[str] = set()

    def value(self, name: str) -> object:
        """Return what a field holds, in the file or else by default; None also where it is in neither."""
        self._seen.add(name)
        return self.table[name] if name in self.table else self.defaults.get(name)

    def unasked(self) -> list[str]:
        """Return the fields of the table whose value nobody asked for."""
        return [name for name in self.table if name not in self._seen]

    def refusal(self, name: str, usable: str) -> ImportModelError:
        """Return the error that a field is not usable, and what would be."""
        if name in self.table:
            said = f"{name}={_shown(self.table[name])}"
        elif name in self.defaults:
            said = f"{name} is missing, which makes it {_shown(self.defaults[name])}; it"
        else:
            said = f"{name} is missing; it"
        return ImportModelError(f"{self.origin}: {said} must be {usable}")

    def count(self, name: str, least: int = 1, most: int = MAX_COUNT) -> int:
        """Return a whole number."""
        value = self.value(name)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(name, f"a whole number from {least} to {most}")
        return value

    def maybe_count(self, name: str, least: int = 1, most: int = MAX_COUNT) -> int | None:
        """Return a whole number, or None for null."""
        return None if self._is_null(name) else self.count(name, least, most)

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = self.value(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e30:
            raise self.refusal(name, "a positive number")
        return float(value)

    def cap(self, name: str) -> float:
        """Return a positive number, or 0 for null: no cap."""
        return 0.0 if self._is_null(name) else self.number(name)

    def rate(self, name: str) -> float:
        """Return a rate of dropout."""
        value = self.value(name)
        if self._is_null(name):
            return 0.0
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise self.refusal(name, "a number from 0 to below 1")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.value(name)
        if self._is_null(name):
            return False
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def choice(self, name: str, meanings: Mapping[str, str]) -> str:
        """Return the meaning of a word."""
        value = self.value(name)
        if not isinstance(value, str) or value not in meanings:
            raise self.refusal(name, f"one of {', '.join(meanings)}")
        return meanings[value]

    def items(self, name: str, most: int) -> list[object]:
        """Return a list of at most ``most`` items, empty where the field is null."""
        value = self.value(name)
        if self._is_null(name):
            return []
        if not isinstance(value, list) or len(cast(list[object], value)) > most:
            raise self.refusal(name, f"a list of at most {most} items")
        return cast(list[object], value)

    def part(self, name: str) -> ConfigFields:
        """Return the fields of a table in the table, which has none where the field is missing or null."""
        value = self.table.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refusal(name, "a table of fields")
        return ConfigFields(f"{self.origin}: {name}", cast(dict[str, object], value), {})

    def refuse_unless(self, name: str, *usable: object) -> None:
        """Raise unless a field is missing, null or one of what is usable: something that is not modelled."""
        value = self.table.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in usable):
            shown = " or ".join(_shown(each) for each in usable) or "null"
            raise self.refusal(name, f"{shown}: the rest is not modelled")

    def finite(self) -> None:
        """Raise for a number that is none: tables made in Python may hold such."""
        for name, value in self.table.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise self.refusal(name, "a finite number")

    def _is_null(self, name: str) -> bool:
        """Whether a field is null, in the file or by default; not one that must be given and is not."""
        return self.value(name) is None and (name in self.table or name in self.defaults)
