"""Fields of a file of which is known which were read, so that the others can be listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from distsim.errors import ImportModelError
from distsim.importer.decoders.config_fields import ConfigFields


class TrackedFields(ConfigFields):
    """The fields of a table, and of the tables in it, that remember by which names they were asked for."""

    def __init__(self, origin: str, table: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        super().__init__(origin, table, defaults)
        self._parts: dict[str, TrackedFields] = {}

    def given(self, name: str) -> bool:
        """Whether the file has a field."""
        self._seen.add(name)
        return name in self.table

    def on(self, name: str) -> bool:
        """Whether a switch is on; any value but false and null is."""
        return self.value(name) not in (None, False)

    def refusal(self, name: str, usable: str) -> ImportModelError:
        """Return the error that a field is not usable, and what would be."""
        if self.table.get(name) is True and " number" in usable:
            return ImportModelError(
                f"{self.origin}: {name} has no value, as of a variable that the file does not set; it must "
                f"be {usable}"
            )
        return super().refusal(name, usable)

    def part(self, name: str) -> TrackedFields:
        """Return the fields of a table in the table, which has none where the field is missing or null."""
        if name not in self._parts:
            found = super().part(name)
            self._parts[name] = TrackedFields(found.origin, found.table, {})
        self._seen.add(name)
        return self._parts[name]

    def text(self, name: str, default: str = "") -> str:
        """Return a field as text; ``default`` where it is missing or null."""
        value = self.value(name)
        if value is None or value is True:  # a word that a variable held
            return default
        if isinstance(value, bool | dict | list):
            raise self.refusal(name, "a word")
        return str(value)[:200]

    def words(self, name: str) -> list[str]:
        """Return a list of words, also of one that is alone."""
        value = self.value(name)
        items = cast(list[object], value) if isinstance(value, list) else [] if value is None else [value]
        return [str(item)[:200] for item in items[:1000]]

    def unread(self, without_effect: str) -> list[str]:
        """Return the fields of the table that nobody asked for, but for those that a pattern matches whole.

        Those of tables in it are named as in ``table.field``.
        """
        left = self.unasked()
        for name, part in self._parts.items():
            left += [f"{name}.{inner}" for inner in part.unread("")]
        return [name for name in left if not re.fullmatch(without_effect, name)]
