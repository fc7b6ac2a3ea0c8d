"""Reading a cluster's file, which is not trusted: its size, its fields, errors in the words of the file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from distsim.cache import cached
from distsim.errors import TopologyError
from distsim.hardware.cluster_table import (
    ClusterTable,
    DeviceTable,
    LevelTable,
    LinkTable,
    NodesTable,
    Raw,
    SlowTable,
    level_name,
)
from distsim.suggestions import did_you_mean

MAX_FILE_BYTES = 1 << 20

_WORDS = {
    **{"`float`": "a number", "`int`": "a whole number", "`str`": "text", "`object`": "a table"},
    **{"`array`": "a list", "`bool`": "true or false", "`null`": "nothing"},
}
"""What msgspec calls the kinds of values, and what people call them."""

_TABLES: dict[str, type[msgspec.Struct]] = {
    **{"": ClusterTable, "device": DeviceTable, "levels": LevelTable, "host_link": LinkTable},
    **{"nodes": NodesTable, "slow": SlowTable},
}
"""The tables of a file by the last part of their names."""


def bytes_of(path: Path) -> bytes:
    """Return what is in a file of at most ``MAX_FILE_BYTES``; raises :class:`TopologyError`."""
    try:
        if not path.is_file():
            raise TopologyError(f"{path} is not a file; give the path of a cluster's .toml file")
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TopologyError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise TopologyError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes; a cluster's file is a page of text"
        )
    return data


def raw_table(origin: str, data: bytes) -> Raw:
    """Return the table of a file; raises :class:`TopologyError` where it is no TOML."""
    try:
        return tomllib.loads(data.decode())
    except RecursionError as error:
        raise TopologyError(f"{origin}: nested too deeply to be a cluster's file") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise TopologyError(f"{origin} is not a TOML file: {error}") from error


def cluster_table(origin: str, raw: Raw, text: str) -> ClusterTable:
    """Return a raw table as that of a cluster; ``text`` is that of the file, for the lines of errors.

    Raises :class:`TopologyError` that names the file, the line if the file has one for it, and the key.
    """
    try:
        return msgspec.convert(raw, ClusterTable)
    except RecursionError as error:
        raise TopologyError(f"{origin}: nested too deeply to be a cluster's file") from error
    except msgspec.ValidationError as error:
        raise TopologyError(_in_words(origin, str(error), text, raw)) from error


def _in_words(origin: str, message: str, text: str, raw: Raw) -> str:
    said, _, place = message.partition(" - at `")
    path = re.sub(r"^key in ", "", place.rstrip("`")).removeprefix("$").lstrip(".")
    fields = _fields_at(path)
    lacking = _lacking(path, raw)
    path = _by_name(path, raw)
    unknown = re.search(r"Object contains unknown field `(.*)`", said)
    missing = re.search(r"Object missing required field `(.*)`", said)
    if unknown:
        choices = f"; choose from {', '.join(fields)}" if fields else ""
        hint = did_you_mean(unknown[1], fields) or choices
        path, said = _joined(path, unknown[1]), f"there is no field {unknown[1]!r:.60}{hint}"
    elif missing:
        if len(lacking) > 1:
            said = f"{', '.join(lacking[:-1])} and {lacking[-1]} are missing"
        else:
            path, said = _joined(path, missing[1]), "is missing"
    for word, plain in _WORDS.items():
        said = said.replace(word, plain)
    said = said.replace("Expected", "expected").replace(" | null", "").replace(" | nothing", "")
    return f"{located(origin, text, path)}: {said}"


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _fields_at(path: str) -> list[str]:
    """Return the fields of the table at a path."""
    last = re.sub(r"\[[^]]*\]", "", path).rpartition(".")[2]
    return list(_TABLES[last].__struct_fields__) if last in _TABLES else []


def _lacking(path: str, raw: Raw) -> list[str]:
    """Return the fields that the table at a path must have and has not, which msgspec names one at a time."""
    last = re.sub(r"\[[^]]*\]", "", path).rpartition(".")[2]
    table: Any = raw
    for name, number in re.findall(r"([^.\[\]]+)|\[([0-9]+)\]", path):
        try:
            table = table[name or int(number)]
        except (KeyError, IndexError, TypeError):
            return []
    if last not in _TABLES or not isinstance(table, dict):
        return []
    needed = [own.name for own in msgspec.structs.fields(_TABLES[last]) if own.required]
    return [name for name in needed if name not in table]


def _by_name(path: str, raw: Raw) -> str:
    """Return a path with the name of a level in place of its number, which merging changes."""
    match = re.match(r"levels\[([0-9]+)\](.*)", path)
    levels = raw.get("levels")
    if match is None or not isinstance(levels, list):
        return path
    name = level_name(cast(list[Any], levels)[int(match[1])])
    return path if name is None else f"levels.{name}{match[2]}"


def located(origin: str, text: str, path: str) -> str:
    """Return the name of a file, the line of a key in it, and the key.

    >>> located("mine.toml", "[device]\\nmemory = 3", "device.memory")
    'mine.toml, line 2: device.memory'
    """
    line = line_of(text, path)
    where = f"{origin}, line {line}" if line else origin
    return f"{where}: {path}" if path else where


def line_of(text: str, path: str) -> int | None:
    """Return the line in which a key of a TOML text is given, or else its table begins; None if neither is.

    ``path``: ``device.memory``; ``slow[1].factor`` of the second such table, or ``levels.nvlink.latency`` of
    that which has the name.
    """
    best, found = 0, None
    for number, names in _keys(text):
        for name in names:
            if (path == name or path.startswith((f"{name}.", f"{name}["))) and len(name) > best:
                best, found = len(name), number
    return found


@cached("lines of clusters' files, by text", 32)
def _keys(text: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return the line of each table and key of a TOML text, with its names; each figure asks for its own."""
    return tuple(_found_keys(text))


def _found_keys(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the line of each table and key of a TOML text, with its names: by number, and by name."""
    tables: tuple[str, ...] = ("",)
    counts: dict[str, int] = {}
    begins = 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([A-Za-z0-9_.\" -]+?)\s*\]", line)
        key = re.match(r"\s*([A-Za-z0-9_.\"-]+)\s*=\s*(.*)", line)
        if header:
            table, begins = header[2].replace('"', ""), number
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}[{counts[table]}]"
            tables = (table,)
            yield number, tables
        elif key:
            field = key[1].replace('"', "")
            named = re.match(r"""["']([^"']*)["']""", key[2])
            if field == "name" and named and tables[0].endswith("]"):
                tables = (tables[0], f"{tables[0].partition('[')[0]}.{named[1]}")
                yield begins, tables
            yield number, tuple([_joined(table, field) for table in tables])
