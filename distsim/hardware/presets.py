"""Clusters as TOML files, in which every figure has a unit and says where it comes from.

``load_cluster("dgx-a100")`` is one node, ``"dgx-h100:4"`` four of them; a path that ends in ``.toml`` is
a file of the reader's own, with the same fields (``distsim/hardware/presets/dgx-a100.toml`` is a model), in
which a number with its unit is enough, ``base`` names a preset that it changes, ``[[nodes]]`` are kinds of
nodes and ``[[slow]]`` those that are slow. ``settings`` change single figures: ``device.memory=40GiB``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import msgspec

from distsim.cache import cached
from distsim.errors import TopologyError, wrong_type
from distsim.hardware.cluster_file import bytes_of, cluster_table, located, raw_table
from distsim.hardware.cluster_parts import device_of, level_of
from distsim.hardware.cluster_table import (
    DEVICE_UNITS,
    LEVEL_UNITS,
    LINK_UNITS,
    MAX_DEVICES,
    MEASURED_TABLES,
    NAMED_FIGURES,
    Amount,
    ClusterTable,
    DeviceTable,
    FigureTable,
    LevelTable,
    NodesTable,
    Raw,
    Settings,
    adds_level,
    left_out,
    merged,
    settings_of,
    with_setting,
)
from distsim.hardware.units import HOUR, SECONDS, Units, parse_quantity, unit_named
from distsim.hardware.variation import slowed
from distsim.ir.device import Device
from distsim.ir.topology import Level, Topology
from distsim.suggestions import choices_for, did_you_mean

Name = str | os.PathLike[str]
"""A preset, maybe with ``:nodes``, or the path of a file."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a preset as its file gives it, and its value in SI units."""

    name: str
    value: float
    unit: str
    si_value: float
    source: str


@dataclass(frozen=True)
class _ClusterFile:
    """A cluster's file: the table with all that changes it, the text, the nodes and figures asked for."""

    origin: str
    text: str
    table: ClusterTable
    nodes: int | None
    settings: tuple[str, ...]

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The figures of the device and the levels, by name."""
        return {figure.name: figure for figure in _figures(self, self.table.device, self.table.levels)}


@cache
def presets() -> tuple[str, ...]:
    """The names that :func:`load_cluster` knows.

    >>> presets()[:4]
    ('a10', 'a100-pcie', 'aws-p4d', 'aws-p4de')
    """
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_cluster(name: Name, settings: Settings = ()) -> Topology:
    """The topology of a preset or of a ``.toml`` file, as one node or, with ``:count``, as several.

    ``settings``: figures that replace those of the file, as ``KEY=VALUE`` or a mapping of keys to values;
    where they say other ``devices_per_node``, levels whose groups are a node follow, and there is none of
    nodes of one. ``nodes=2`` are the first two of a file's ``[[nodes]]``.

    Raises :class:`TopologyError` for an unknown name, for a file that cannot be read (1 MiB at most) or
    has an unknown field, a missing one or a wrong unit, for a setting that is none, and for more than
    1,048,576 devices.

    >>> load_cluster("dgx-a100:2")
    Topology(16 devices; nvlink of 8, infiniband of all)
    >>> load_cluster("dgx-a100", ["device.memory=40GiB"]).devices[0].memory / 2**30
    40.0
    """
    read = _read(name, settings)
    table = read.table
    nodes = read.nodes or 1
    if table.nodes:
        if read.nodes is not None:
            raise TopologyError(
                f"{name}: the [[nodes]] of {read.origin} say how many there are; give no :count, "
                f"or --set nodes={read.nodes} for the first of them"
            )
        nodes = sum(kind.count for kind in table.nodes)
    count = table.devices_per_node * nodes
    if count > MAX_DEVICES:
        raise TopologyError(f"{name}: {nodes} nodes are {count} devices; at most {MAX_DEVICES} are supported")
    node = table.devices_per_node
    for level in table.levels:
        size = level.group_size
        if size is not None and size % node and node % size:
            raise TopologyError(
                f"{read.origin}: groups of {size} devices at level {level.name!r} would straddle nodes of "
                f"{node}; one of the two must be a multiple of the other"
            )
    si = {name: figure.si_value for name, figure in read.figures.items()}
    # Of levels whose groups are a node that was made small the outer ones join nothing.
    sizes = [None, *[level.group_size for level in table.levels]]
    joining = [
        each
        for each, inner in zip(table.levels, sizes, strict=False)
        if not each.group_size == node == inner and (each.group_size != 1 or node > 1)
    ]
    try:
        first, levels = device_of(table.device, si, count), [level_of(level, si) for level in joining]
        kinds = [(_device_of_kind(read, kind, first, count), kind.count) for kind in table.nodes]
        devices = [each for each, own in kinds for _ in range(own)]
        if not devices and not table.slow:
            return Topology.hierarchical(first, count, levels)
        each_node = devices or [first] * nodes
        every = [device for device in each_node for _ in range(node)]
        made = Topology.of_devices(slowed(every, table.slow, node), levels)
        start = 0
        for kind in table.nodes:
            if kind.base is not None:
                made.set_levels_of(start, kind.count * node, _levels_inside(read, kind.base, levels))
            start += kind.count * node
        return made
    except TopologyError as error:
        said = str(error)
        raise TopologyError(said if said.startswith(read.origin) else f"{read.origin}: {said}") from error


def figures(name: Name, settings: Settings = ()) -> tuple[Figure, ...]:
    """Every figure of a preset or of a ``.toml`` file, with its unit and source."""
    return tuple(_read(name, settings).figures.values())


def table_and_figures(name: Name, settings: Settings = ()) -> tuple[ClusterTable, tuple[Figure, ...]]:
    """The table of a preset or of a ``.toml`` file with all that is in its base, and its figures."""
    read = _read(name, settings)
    return read.table, tuple(read.figures.values())


def figures_by_kind(name: Name, settings: Settings = ()) -> tuple[tuple[int, tuple[Figure, ...]], ...]:
    """How many nodes there are of each of the ``[[nodes]]`` of a file, with the figures of its device; empty
    without any."""
    read = _read(name, settings)
    return tuple([(kind.count, _kind(read, kind)[1]) for kind in read.table.nodes])


def describe(name: Name, settings: Settings = ()) -> str:
    """A preset as text: one line per figure, with where it comes from."""
    read = _read(name, settings)
    table, rows = read.table, list(read.figures.values())
    nodes = read.nodes or sum(kind.count for kind in table.nodes) or 1
    shape = f"{nodes} x {table.devices_per_node} {table.device.model}"
    width = max(len(row.name) for row in rows)
    lines = [f"{row.name:{width}}  {f'{row.value:g} {row.unit}':>14}  {row.source}" for row in rows]
    kinds = [f"nodes: {kind.count} of {kind.base or 'this device'}{_changes(kind)}" for kind in table.nodes]
    slow = [f"slow by {each.factor:g}: nodes {each.nodes}, devices {each.devices}" for each in table.slow]
    return "\n".join([f"{table.name}: {table.description} ({shape})", *lines, *kinds, *slow])


def _changes(kind: NodesTable) -> str:
    return f", with other {', '.join(kind.device)}" if kind.device else ""


# --- devices and levels ------------------------------------------------------------------------------------


def _device_of_kind(read: _ClusterFile, kind: NodesTable, first: Device, count: int) -> Device:
    """Return the device of a kind of nodes: that of the file, or of its ``base``, with what it changes."""
    table, figures = _kind(read, kind)
    device = device_of(table, {figure.name: figure.si_value for figure in figures}, count)
    if (device.block, device.segment) != (first.block, first.segment):
        raise TopologyError("device.block and device.segment must be the same on all nodes")
    return device


def _kind(read: _ClusterFile, kind: NodesTable) -> tuple[DeviceTable, tuple[Figure, ...]]:
    """Return the table and the figures of the device of a kind of nodes."""
    if kind.base is not None and kind.base not in presets():
        raise TopologyError(
            f"nodes: no preset is named {kind.base!r:.60}; choose one of {choices_for(kind.base, presets())}"
        )
    whole = read.table if kind.base is None else _read(kind.base, ()).table
    base = cast(Raw, msgspec.to_builtins(whole.device))
    raw = {
        "device": merged(base, kind.device),
        "devices_per_node": 1,
        "levels": [{"name": "none", **_NO_LINK}],
    }
    own = replace(read, origin=f"{read.origin}: nodes", text="", settings=())
    table = cluster_table(own.origin, raw, "").device
    return table, tuple(_figures(own, table, ()))


def _levels_inside(read: _ClusterFile, base: str, levels: Sequence[Level]) -> list[Level]:
    """Return what joins the devices in a node of a preset, by the names of the levels of the cluster. Larger
    nodes are taken in part where the file, or a setting, makes those of its own base smaller."""
    whole, node = _read(base, ()), read.table.devices_per_node
    has = whole.table.devices_per_node
    given = raw_table(read.origin, read.text.encode())
    in_part = "devices_per_node" in read.settings or {"base", "devices_per_node"} <= given.keys()
    if has < node or (has > node and not in_part):
        raise TopologyError(
            f"nodes: a node of {base} has {has} devices, and those of this cluster {node}: nodes are of one "
            f"size; give a base with {node}, or beside a base of the file devices_per_node = {min(has, node)}"
        )
    table = cluster_table(base, merged(_raw(base, ())[1], {"devices_per_node": node}), "")
    si = {figure.name: figure.si_value for figure in _figures(whole, table.device, table.levels)}
    own = [level_of(level, si) for level in table.levels if 1 < (level.group_size or 0) <= node]
    here = [level for level in levels if (level.group_size or node + 1) <= node]
    if [level.group_size for level in own] != [level.group_size for level in here]:
        raise TopologyError(
            f"nodes: in a node of {base} GPUs are joined by {_groups(own)}, in this cluster by "
            f"{_groups(here)}; take a base that joins groups of these sizes, or begin from base = {base!r}"
        )
    return [replace(each, name=level.name) for each, level in zip(own, here, strict=True)]


def _groups(levels: Sequence[Level]) -> str:
    return " and ".join(f"{level.name} of {level.group_size}" for level in levels) or "nothing"


_NO_LINK: Raw = {"bandwidth": "1 GB/s", "latency": "1 us", "efficiency": 1.0}


# --- reading -----------------------------------------------------------------------------------------------


def _folder() -> Traversable:
    return files("distsim.hardware") / "presets"


def _read(given: Name, settings: Settings) -> _ClusterFile:
    if not isinstance(given, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong_type("cluster", given, "a preset's name as dgx-a100:2, or the path of a .toml file")
    name, settings = os.fspath(given), settings_of(settings)
    match = re.fullmatch(r"(.+?)(?::([0-9]{1,9}))?", name, re.DOTALL)
    if match is None:
        raise TopologyError(f"no cluster is named {name!r}; choose one of {', '.join(presets())}")
    base, nodes = match[1], None if match[2] is None else int(match[2])
    first, _, count = name.partition(":")
    if base != first and first in presets():
        raise TopologyError(f"{name!r:.60}: {count!r:.20} is no number of nodes; write {first}:4")
    if nodes == 0:
        raise TopologyError(f"{name}: a cluster has at least one node")
    return (_preset if base in presets() else _made)(base, nodes, settings)


def _made(base: str, nodes: int | None, settings: tuple[str, ...]) -> _ClusterFile:
    """Return a preset or a file, so many nodes of it, with what settings change."""
    text, raw = _raw(base, ())
    for setting in settings:
        raw = with_setting(raw, setting)
    keys = tuple([setting.partition("=")[0].strip().removeprefix("levels.") for setting in settings])
    return _ClusterFile(base, text, cluster_table(base, raw, text), nodes, keys)


_preset = cached("presets, by name, nodes and settings", 64)(_made)
"""Files of the package stay as they are; what others have in theirs is read each time."""


def _raw(name: str, above: tuple[str, ...]) -> tuple[str, Raw]:
    """Return the text of a file and its table, over that of the preset that it names as ``base``, if any."""
    if name.endswith(".toml") and not above:
        data = bytes_of(Path(name))
    elif name in presets():
        data = (_folder() / f"{name}.toml").read_bytes()
    else:
        way = "" if above else ", with :count for several nodes, or give the path of a .toml file"
        where, known = f"{above[-1]}: base: " if above else "", ", ".join(presets())
        hint = did_you_mean(name, presets())
        raise TopologyError(f"{where}no cluster is named {name!r}; choose one of {known}{way}{hint}")
    raw = raw_table(name, data)
    text = data.decode()
    if "base" not in raw:
        return text, raw
    base = raw.pop("base")
    if not isinstance(base, str) or base == name or len(above) > 2:
        raise TopologyError(f'{located(name, text, "base")} must name a preset, as in base = "dgx-a100"')
    under = _taken_over(_raw(base, (*above, name))[1], base)
    if names := left_out(under, raw):
        tables = " and ".join(f'[[levels]] name = "{each}"' for each in names)
        raise TopologyError(
            f"{located(name, text, 'levels')}: where one is new to {base}, those given are all there are, "
            f"and its {' and '.join(names)} would be left out; add {tables} for what to keep, from the "
            f"inside out, or change the whole file that `distsim clusters {base} --toml` prints"
        )
    made = merged(under, raw)
    if adds_level(under, raw) and "description" not in raw:
        made["description"] = f"as {base}, but for its levels"
    return text, made


def _taken_over(raw: Raw, base: str) -> Raw:
    """Return the table of a base in which measured figures of its kernels and hosts say whose they are."""
    device = dict(raw.get("device", {}))
    for table in MEASURED_TABLES:
        device[table] = {
            name: {**figure, "source": f"of {base}: {figure['source']}"} if "source" in figure else figure
            for name, figure in device.get(table, {}).items()
        }
    if "source" in (host := device.get("host_power", {})):
        device["host_power"] = {**host, "source": f"of {base}: {host['source']}"}
    return {**raw, "device": device}


def _figures(read: _ClusterFile, device: DeviceTable, levels: Sequence[LevelTable]) -> Iterator[Figure]:
    """Yield the figures of a device and of levels, in SI units too."""
    for table, (names, _) in NAMED_FIGURES.items():
        for name in getattr(device, table):
            if name not in names:
                where = located(read.origin, read.text, f"device.{table}.{name}")
                raise TopologyError(f"{where}: {name!r:.40} is not one of {', '.join(names)}")
    for name, amount, units in _amounts(device, levels):
        yield _figure(read, name, amount, units)


def _amounts(device: DeviceTable, levels: Sequence[LevelTable]) -> Iterator[tuple[str, Any, Units]]:
    """Yield the name of each figure that is given, what is given, and its units."""
    for field, units in DEVICE_UNITS.items():
        amount = getattr(device, field)
        if amount is not None and not _is_zero(amount, field):
            yield f"device.{field}", amount, units
        if field == "throughput":
            yield from _named(device, "peaks")
    for table in MEASURED_TABLES:
        yield from _named(device, table)
    links = [("device.host_link", device.host_link, LINK_UNITS)] if device.host_link is not None else []
    for name, table, kinds in [*links, *((f"levels.{level.name}", level, LEVEL_UNITS) for level in levels)]:
        for field, units in kinds.items():
            amount = getattr(table, field)
            if amount is not None:
                yield f"{name}.{field}", amount, units


def _named(device: DeviceTable, table: str) -> Iterator[tuple[str, Amount, Units]]:
    """Yield the figures of a table in which they are given by name."""
    given: dict[str, Amount] = getattr(device, table)
    yield from ((f"device.{table}.{name}", amount, NAMED_FIGURES[table][1]) for name, amount in given.items())


def _is_zero(amount: Amount, field: str) -> bool:
    """Whether a figure that may be left out says none."""
    return field in ("context", "fragmentation") and amount == 0


def _figure(read: _ClusterFile, name: str, amount: Amount, units: Units) -> Figure:
    by_option = name.removeprefix("levels.") in read.settings
    what = f"--set {name}" if by_option else located(read.origin, read.text, name)
    if isinstance(amount, FigureTable):
        value, source = amount.value, amount.source
        unit = unit_named(amount.unit, units, what, f"{value:g}")
    else:
        source = "given by --set" if by_option else f"given in {read.origin}"
        value, unit = parse_quantity(amount if isinstance(amount, str) else repr(amount), units, what)
    if math.isfinite(value) and not math.isfinite(value * units[unit]):
        raise TopologyError(f"{what}: {value:g} {unit} is more than a number can be")
    if units is SECONDS and value * units[unit] > HOUR:
        raise TopologyError(f"{what}: {value:g} {unit} is more than an hour; write it as 5 us")
    return Figure(name, value, unit, value * units[unit], source)
