"""The table of a cluster's file: its fields, and how what a file or an option gives changes another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec

from distsim.errors import TopologyError, wrong_type
from distsim.hardware.units import BYTES, FLOPS, FREQUENCY, NUMBER, POWER, PRICE, RATE, SECONDS, SHARE, Units
from distsim.ir.kernel_rates import ATTENTION_KERNELS, KINDS_OF_UNCERTAINTY, KINDS_OF_WORK, WAYS_TO_LAUNCH
from distsim.suggestions import choices_for

MAX_DEVICES = 1 << 20

# A peak for any other name would be read and never used.
DTYPES = (
    *("float64", "float32", "tfloat32", "float16", "bfloat16"),
    *("float8e4m3fn", "float8e5m2", "int8"),
)

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=MAX_DEVICES)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: a field that is not known is an error."""


class FigureTable(_Strict, frozen=True):
    """A figure with its unit, and where it is from."""

    value: Annotated[float, msgspec.Meta(ge=0)]
    unit: str
    source: _Text = "not said"


Amount = FigureTable | str | float
"""A figure as a table, as text with a unit, or as a bare number where it has none."""


class LinkTable(_Strict, frozen=True):
    """A link: bytes/s one way, seconds, and the share of the bandwidth that large messages reach."""

    bandwidth: Amount
    latency: Amount
    efficiency: Amount


class DeviceTable(_Strict, frozen=True):
    """What one device can do."""

    throughput: Amount
    memory: Amount
    dram_bandwidth: Amount
    kernel_launch_overhead: Amount
    flops_efficiency: Amount
    bytes_efficiency: Amount
    model: _Text = "device"
    context: Amount | None = None
    fragmentation: Amount | None = None
    block: Amount | None = None
    segment: Amount | None = None
    processors: Amount | None = None
    query_block: Amount | None = None
    clock: Amount | None = None
    spread: Amount | None = None
    slowdown: Amount | None = None
    variation: Amount | None = None
    power: Amount | None = None
    power_limit: Amount | None = None
    host_power: Amount | None = None
    price: Amount | None = None
    peaks: dict[str, Amount] = {}
    kernels: dict[str, Amount] = {}
    launches: dict[str, Amount] = {}
    attention: dict[str, Amount] = {}
    uncertainty: dict[str, Amount] = {}
    host_link: LinkTable | None = None
    kind: _Text = "gpu"


class LevelTable(LinkTable, frozen=True, kw_only=True):
    """A level of the hierarchy, :class:`distsim.ir.topology.Level`."""

    name: _Text
    group_size: _Count | None = None
    devices_per_port: Amount | None = None
    oversubscription: Amount | None = None
    start: Amount | None = None
    segment_time: Amount | None = None


class NodesTable(_Strict, frozen=True):
    """So many nodes in a row whose devices are another preset's, or differ in some figures."""

    count: _Count
    base: _Text | None = None
    device: dict[str, Any] = {}


class SlowTable(_Strict, frozen=True):
    """Nodes or devices, by number from 0, on which all computation takes ``factor`` times as long."""

    factor: Annotated[float, msgspec.Meta(ge=1, le=1e6)]
    nodes: tuple[_Place, ...] = ()
    devices: tuple[_Place, ...] = ()


class ClusterTable(_Strict, frozen=True):
    """A cluster: nodes of equally many devices, alike but for ``nodes`` and ``slow``, joined by levels."""

    devices_per_node: _Count
    device: DeviceTable
    levels: Annotated[tuple[LevelTable, ...], msgspec.Meta(min_length=1)]
    name: _Text = "cluster"
    description: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    nodes: tuple[NodesTable, ...] = ()
    slow: tuple[SlowTable, ...] = ()


DEVICE_UNITS: dict[str, Units] = {
    "throughput": FLOPS,
    "flops_efficiency": SHARE,
    "memory": BYTES,
    "context": BYTES,
    "fragmentation": SHARE,
    "block": BYTES,
    "segment": BYTES,
    "dram_bandwidth": RATE,
    "bytes_efficiency": SHARE,
    "kernel_launch_overhead": SECONDS,
    "processors": NUMBER,
    "query_block": NUMBER,
    "clock": FREQUENCY,
    "spread": NUMBER,
    "slowdown": NUMBER,
    "variation": NUMBER,
    "power": POWER,
    "power_limit": POWER,
    "host_power": POWER,
    "price": PRICE,
}
"""The figures of a device, in the order in which they are shown, and their units."""

NAMED_FIGURES: dict[str, tuple[tuple[str, ...], Units]] = {
    "peaks": (DTYPES, FLOPS),
    "kernels": (KINDS_OF_WORK, SHARE),
    "launches": ((*WAYS_TO_LAUNCH, "tensor"), SECONDS),
    "attention": (ATTENTION_KERNELS, NUMBER),
    "uncertainty": (KINDS_OF_UNCERTAINTY, NUMBER),
}
"""The tables of a device in which a figure is given by name: the names that they may have, and the units."""

MEASURED_TABLES = tuple([name for name in NAMED_FIGURES if name != "peaks"])
"""Those that say what was measured of kernels and hosts."""

LINK_UNITS: dict[str, Units] = {"bandwidth": RATE, "efficiency": SHARE, "latency": SECONDS}
LEVEL_UNITS: dict[str, Units] = {
    **LINK_UNITS,
    "devices_per_port": NUMBER,
    "oversubscription": NUMBER,
    "start": SECONDS,
    "segment_time": SECONDS,
}
_COUNTS = ("devices_per_node", "group_size")

Raw = dict[str, Any]
"""A table as TOML gives it."""


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> Raw:
    """Return a raw table with what another gives in place of its own.

    Tables are merged field by field, levels by their names, figures replaced whole. Where a level is given
    that the base lacks, those given are all levels, in their order. Where ``devices_per_node`` changes,
    groups that were a node stay one, and those within it are no larger, but for those that are given.
    """
    made = dict(base)
    for key, value in given.items():
        old = made.get(key)
        if key == "levels" and _is_list(value) and _is_list(old):
            made[key] = _merged_levels(cast(list[Any], old), cast(list[Any], value))
        elif _is_table(value) and _is_table(old) and "value" not in value:
            made[key] = merged(cast(Raw, old), cast(Raw, value))
        else:
            made[key] = value
    node, was = made.get("devices_per_node"), base.get("devices_per_node")
    if node != was and was is not None and _is_list(made.get("levels")):
        given_levels = cast(list[Any], given["levels"] if _is_list(given.get("levels")) else [])
        own = [level_name(level) for level in given_levels if _is_table(level) and "group_size" in level]
        made["levels"] = [
            {**level, "group_size": node}
            if _is_table(level)
            and level_name(level) not in own
            and _becomes(level.get("group_size"), was, node)
            else level
            for level in made["levels"]
        ]
    return made


def _becomes(size: object, was: object, node: object) -> bool:
    """Whether a group is a node of another size: it was one, or lies within one and is larger."""
    if isinstance(size, int) and isinstance(was, int) and isinstance(node, int):
        return size == was or node < size <= was
    return size == was


def _merged_levels(base: list[Any], given: list[Any]) -> list[Any]:
    """Return levels changed by others of the same names; where one is new, those given are all there are."""
    old = {name: level for level in base if (name := level_name(level)) is not None}
    names = [level_name(level) for level in given]
    new = [
        merged(old[name], level) if name in old else level for name, level in zip(names, given, strict=True)
    ]
    if any(name not in old for name in names) or names == [*old]:
        return new
    changed = dict(zip(names, new, strict=True))
    return [changed.get(level_name(level), level) for level in base]


def left_out(base: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the levels of a base that fewer levels, of which one is new, would silently leave out.

    As many as the base has stand in their places, whatever they are called.

    >>> nvlink, ports, ours = {"name": "nvlink"}, {"name": "infiniband"}, {"name": "ethernet"}
    >>> left_out({"levels": [nvlink, ports]}, {"levels": [ours]})
    ['nvlink', 'infiniband']
    >>> left_out({"levels": [nvlink, ports]}, {"levels": [nvlink, ours]})
    []
    """
    old, new = _level_names(base), _level_names(given)
    fewer = adds_level(base, given) and len(new) < len(old)
    return [name for name in old if fewer and name not in new]


def adds_level(base: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether a level is given that a base lacks."""
    return not {*_level_names(given)} <= {*_level_names(base)}


def _level_names(table: Mapping[str, Any]) -> list[str]:
    levels = cast(list[Any], table["levels"] if _is_list(table.get("levels")) else [])
    return [name for level in levels if (name := level_name(level)) is not None]


def level_name(level: object) -> str | None:
    """Return the name of a raw level, if it is one and has one."""
    name = cast(Raw, level).get("name") if isinstance(level, dict) else None
    return name if isinstance(name, str) else None


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


Settings = str | Sequence[str] | Mapping[str, str | float]
"""Figures that replace others: ``KEY=VALUE``, one or several, or a mapping of keys to values."""


def settings_of(given: Settings) -> tuple[str, ...]:
    """Return settings as texts.

    Raises :class:`OptionError` for what is none.

    >>> settings_of({"device.memory": "40GiB", "devices_per_node": 4}), settings_of("device.memory=40GiB")
    (('device.memory=40GiB', 'devices_per_node=4'), ('device.memory=40GiB',))
    """
    may_be = "a mapping as {'device.memory': '40GiB'}, or text as device.memory=40GiB, one or a list of them"
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Mapping):
        return tuple([f"{key}={value}" for key, value in given.items()])
    if not isinstance(given, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong_type("set", given, may_be)
    for each in given:
        if not isinstance(each, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("set", each, may_be)
    return tuple(given)


def with_setting(table: Raw, setting: str) -> Raw:
    """Return a raw table with the figure that ``KEY=VALUE`` gives, a key as in :func:`setting_keys`.

    Raises :class:`TopologyError` for an unknown key, with those that are near it, and for no value.
    """
    key, equals, value = (part.strip() for part in setting.partition("="))
    if not equals or not value:
        raise TopologyError(f"--set {setting!r:.80} is not KEY=VALUE; write for example device.memory=40GiB")
    keys = setting_keys(table)
    key = key.removeprefix("levels.")
    if key not in keys:
        name = key.rpartition(".")[2]
        alike = [each for each in keys if each.rpartition(".")[2] == name]
        known = ", ".join(alike) if len(alike) > 1 else choices_for(key, keys)
        raise TopologyError(f"--set {key!r:.60}: no figure has this name; choose from {known}")
    if key == "nodes":
        return _first_nodes(table, _whole(key, value))
    first, *rest = key.split(".")
    given: Any = _whole(key, value) if key.split(".")[-1] in _COUNTS else value
    for part in reversed(rest):
        given = {part: given}
    if first in ("device", "devices_per_node"):
        return merged(table, {first: given})
    return merged(table, {"levels": [{"name": first, **given}]})


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise TopologyError(f"--set {key}={value!r:.40}: write a whole number, as in {key}=8")
    return int(value)


def _first_nodes(raw: Raw, wanted: int) -> Raw:
    """Return a raw table with the first so many of its ``nodes``, and what of ``slow`` is of these."""
    try:
        table = msgspec.convert(raw, ClusterTable)
    except (msgspec.ValidationError, RecursionError):
        return raw  # who reads it says why
    there = sum(kind.count for kind in table.nodes)
    if not 0 < wanted <= there:
        raise TopologyError(f"--set nodes={wanted}: the file's [[nodes]] are {there}; take 1 to {there}")
    kinds: list[Raw] = []
    left = wanted
    for kind in table.nodes:
        if left > 0:
            kinds.append({**msgspec.to_builtins(kind), "count": min(kind.count, left)})
        left -= kind.count
    size = table.devices_per_node
    slow: list[Raw] = []
    for each in table.slow:  # a place that the whole cluster lacks stays, to be refused
        nodes = [node for node in each.nodes if not wanted <= node < there]
        devices = [place for place in each.devices if not wanted * size <= place < there * size]
        if nodes or devices or not (each.nodes or each.devices):
            slow.append({"factor": each.factor, "nodes": nodes, "devices": devices})
    return {**raw, "nodes": kinds, "slow": slow}


def setting_keys(table: Raw) -> list[str]:
    """Return the keys of ``--set`` for a raw table: figures of its device, and of its levels by name;
    ``nodes`` where it lists them."""
    levels = _level_names(table)
    return [
        "devices_per_node",
        *(["nodes"] if table.get("nodes") else []),
        *(f"device.{name}" for name in DEVICE_UNITS),
        *(f"device.{table}.{name}" for table, (names, _) in NAMED_FIGURES.items() for name in names),
        *(f"device.host_link.{part}" for part in LINK_UNITS),
        *(f"{level}.{part}" for level in levels for part in (*LEVEL_UNITS, "group_size")),
    ]
