"""A cluster's table as the text of a TOML file, which :func:`distsim.hardware.load_cluster` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from distsim.hardware.cluster_table import Raw
from distsim.hardware.presets import table_and_figures


def cluster_text(table: Raw) -> str:
    """Return the text of a raw table: its fields, then its tables, then the lists of tables.

    >>> print(cluster_text({"name": "ours", "device": {"memory": {"value": 80, "unit": "GiB"}}}))
    name = "ours"
    <BLANKLINE>
    [device]
    memory = { value = 80, unit = "GiB" }
    <BLANKLINE>
    """
    return "\n".join(_lines(table, ""))


def cluster_toml(name: str, settings: Sequence[str] = ()) -> str:
    """Return the file of a cluster with all that is in its base, to copy and to change.

    It loads back to the same topology. Raises as :func:`load_cluster`.

    >>> print(cluster_toml("dgx-a100", ["device.memory=40GiB"]).splitlines()[0])
    # dgx-a100: use it as --cluster FILE.toml, FILE.toml:4 for four nodes
    """
    text = cluster_text(complete_table(name, settings))
    several = "" if "[[nodes]]" in text else ", FILE.toml:4 for four nodes"
    return f"# {name}: use it as --cluster FILE.toml{several}\n{text}".rstrip()


def complete_table(name: str, settings: Sequence[str] = ()) -> Raw:
    """Return the table of a preset or of a ``.toml`` file with all that is in its base.

    Each figure is a table of value, unit and source.
    """
    table, figures = table_and_figures(name, settings)
    raw = cast(Raw, _given(msgspec.to_builtins(table)))
    levels: dict[str, Raw] = {level["name"]: level for level in raw["levels"]}
    for figure in figures:
        path, _, field = figure.name.rpartition(".")
        place = raw
        if path.startswith("levels."):
            place = levels[path.removeprefix("levels.")]
        else:
            for part in path.split("."):
                place = cast(Raw, place[part])
        place[field] = {"value": figure.value, "unit": figure.unit, "source": figure.source}
    return raw


def _given(value: object) -> Any:
    """Return a value without the fields in it that are not given."""
    if isinstance(value, dict):
        made = {key: _given(each) for key, each in cast(Raw, value).items()}
        return {key: each for key, each in made.items() if each not in (None, {}, [])}
    if isinstance(value, list | tuple):
        return [_given(each) for each in cast(list[Any], value)]
    return value


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    tables = {key: value for key, value in table.items() if _has_lines(value)}
    for key, value in table.items():
        if key not in tables:
            yield f"{key} = {_value(value)}"
    yield ""
    for key, value in tables.items():
        inner = f"{name}.{key}" if name else key
        for each in cast(list[Raw], value) if isinstance(value, list) else [cast(Raw, value)]:
            yield f"[[{inner}]]" if isinstance(value, list) else f"[{inner}]"
            yield from _lines(each, inner)


def _has_lines(value: object) -> bool:
    """Whether a value has lines of its own: a table that is no figure, or a list of tables."""
    if isinstance(value, list):
        return any(isinstance(each, dict) for each in cast(list[Any], value))
    return isinstance(value, dict) and "value" not in value


def _value(value: object) -> str:
    if isinstance(value, dict):
        parts = [f"{key} = {_value(each)}" for key, each in cast(Raw, value).items()]
        return f"{{ {', '.join(parts)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, cast(list[Any], value)))}]"
    if isinstance(value, str):  # TOML's basic strings escape as JSON's do, and DEL besides
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and math.isfinite(value) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)
