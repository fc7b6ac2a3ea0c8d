"""Clusters as TOML files, in which every figure has a unit and says where it comes from.

``load_cluster("dgx-a100")`` is one node, ``"dgx-h100:4"`` four of them; a path that ends in ``.toml`` is
a file of the reader's own, with the same fields (``distsim/hardware/presets/dgx-a100.toml`` is a model).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec

from distsim.errors import TopologyError
from distsim.ir.device import Device
from distsim.ir.link import Link
from distsim.ir.topology import Level, Topology

MAX_FILE_BYTES = 1 << 20
MAX_DEVICES = 1 << 20

_FLOPS = {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_RATE = {"B/s": 1.0, "GB/s": 1e9, "TB/s": 1e12, "Gbit/s": 1e9 / 8}
_BYTES = {"B": 1.0, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SHARE = {"1": 1.0, "%": 0.01}
_NUMBER = {"1": 1.0}

# A peak for any other name would be read and never used.
_DTYPES = (
    *("float64", "float32", "tfloat32", "float16", "bfloat16"),
    *("float8e4m3fn", "float8e5m2", "int8"),
)

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: a field that is not known is an error."""


class _FigureTable(_Strict, frozen=True):
    value: Annotated[float, msgspec.Meta(ge=0)]
    unit: str
    source: _Text


class _LinkTable(_Strict, frozen=True):
    bandwidth: _FigureTable
    latency: _FigureTable
    efficiency: _FigureTable


class _DeviceTable(_Strict, frozen=True):
    model: _Text
    throughput: _FigureTable
    memory: _FigureTable
    dram_bandwidth: _FigureTable
    kernel_launch_overhead: _FigureTable
    flops_efficiency: _FigureTable
    bytes_efficiency: _FigureTable
    context: _FigureTable | None = None
    fragmentation: _FigureTable | None = None
    block: _FigureTable | None = None
    segment: _FigureTable | None = None
    peaks: dict[str, _FigureTable] = {}
    host_link: _LinkTable | None = None
    kind: _Text = "gpu"


class _LevelTable(_LinkTable, frozen=True, kw_only=True):
    name: _Text
    group_size: _Count | None = None
    devices_per_port: _FigureTable | None = None
    oversubscription: _FigureTable | None = None


class _Cluster(_Strict, frozen=True):
    name: _Text
    description: _Text
    devices_per_node: _Count
    device: _DeviceTable
    levels: Annotated[tuple[_LevelTable, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a preset as its file gives it, and its value in SI units."""

    name: str
    value: float
    unit: str
    si_value: float
    source: str


def presets() -> tuple[str, ...]:
    """The names that :func:`load_cluster` knows.

    >>> presets()
    ('dgx-2', 'dgx-a100', 'dgx-b200', 'dgx-h100', 'dgx-h200', 'rtx-3090')
    """
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_cluster(name: str) -> Topology:
    """The topology of a preset or of a ``.toml`` file, as one node or, with ``:count``, as several.

    Raises :class:`TopologyError` for an unknown name, for a file that cannot be read (1 MiB at most) or
    has an unknown field, a missing one or a wrong unit, and for more than 1,048,576 devices.

    >>> load_cluster("dgx-a100:2")
    Topology(16 devices; nvlink of 8, infiniband of all)
    """
    origin, cluster, nodes = _read(name)
    count = cluster.devices_per_node * nodes
    if count > MAX_DEVICES:
        raise TopologyError(f"{name}: {nodes} nodes are {count} devices; at most {MAX_DEVICES} are supported")
    for level in cluster.levels:
        size, node = level.group_size, cluster.devices_per_node
        if size is not None and size % node and node % size:
            raise TopologyError(
                f"{origin}: groups of {size} devices at level {level.name!r} would straddle nodes of {node}; "
                "one of the two must be a multiple of the other"
            )
    si = {figure.name: figure.si_value for figure in _figures(origin, cluster)}
    try:
        device = Device(
            0,
            cluster.device.kind,
            si["device.throughput"],
            si["device.dram_bandwidth"],
            si["device.kernel_launch_overhead"],
            si["device.memory"],
            tuple((dtype, si[f"device.peaks.{dtype}"]) for dtype in cluster.device.peaks),
            si["device.flops_efficiency"],
            si["device.bytes_efficiency"],
            si.get("device.context", 0.0),
            si.get("device.fragmentation", 0.0),
            _whole_bytes("block", si),
            _whole_bytes("segment", si),
            _link(si, "device.host_link") if cluster.device.host_link else None,
        )
        levels = tuple(
            Level(
                level.name,
                _link(si, f"levels.{level.name}"),
                level.group_size,
                _whole(level, si.get(f"levels.{level.name}.devices_per_port", 1.0)),
                si.get(f"levels.{level.name}.oversubscription", 1.0),
            )
            for level in cluster.levels
        )
        return Topology.hierarchical(device, count, levels)
    except TopologyError as error:
        raise TopologyError(f"{origin}: {error}") from error


def figures(name: str) -> tuple[Figure, ...]:
    """Every figure of a preset or of a ``.toml`` file, with its unit and source."""
    origin, cluster, _ = _read(name)
    return tuple(_figures(origin, cluster))


def describe(name: str) -> str:
    """A preset as text: one line per figure, with where it comes from."""
    origin, cluster, nodes = _read(name)
    shape = f"{nodes} x {cluster.devices_per_node} {cluster.device.model}"
    rows = list(_figures(origin, cluster))
    width = max(len(row.name) for row in rows)
    lines = [f"{row.name:{width}}  {f'{row.value:g} {row.unit}':>14}  {row.source}" for row in rows]
    return "\n".join([f"{cluster.name}: {cluster.description} ({shape})", *lines])


def _link(si: dict[str, float], name: str) -> Link:
    return Link(*(si[f"{name}.{part}"] for part in ("bandwidth", "latency", "efficiency")))


def _whole(level: _LevelTable, value: float) -> int:
    if not (value.is_integer() and 1 <= value <= MAX_DEVICES):
        raise TopologyError(f"levels.{level.name}.devices_per_port={value} is no count of devices")
    return int(value)


def _whole_bytes(name: str, si: Mapping[str, float]) -> int:
    value = si.get(f"device.{name}", 1.0)
    if not (value.is_integer() and 1 <= value <= si["device.memory"]):
        raise TopologyError(f"device.{name}={value} must be whole bytes, of those that memory has")
    return int(value)


def _folder() -> Traversable:
    return files("distsim.hardware") / "presets"


def _read(name: str) -> tuple[str, _Cluster, int]:
    match = re.fullmatch(r"(.+?)(?::([0-9]{1,9}))?", name, re.DOTALL)
    if match is None:
        raise TopologyError(f"no cluster is named {name!r}; choose one of {', '.join(presets())}")
    base, nodes = match[1], 1 if match[2] is None else int(match[2])
    if nodes < 1:
        raise TopologyError(f"{name}: a cluster has at least one node")
    if base.endswith(".toml"):
        data = _bytes_of(Path(base))
    elif base in presets():
        data = (_folder() / f"{base}.toml").read_bytes()
    else:
        raise TopologyError(
            f"no cluster is named {base!r}; choose one of {', '.join(presets())}, "
            "with :count for several nodes, or give the path of a .toml file"
        )
    return base, _parse(base, data), nodes


def _bytes_of(path: Path) -> bytes:
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


def _parse(origin: str, data: bytes) -> _Cluster:
    try:
        table = tomllib.loads(data.decode())
        return msgspec.convert(table, _Cluster)
    except RecursionError as error:
        raise TopologyError(f"{origin}: nested too deeply to be a cluster's file") from error
    except msgspec.ValidationError as error:
        raise TopologyError(f"{origin}: {error}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise TopologyError(f"{origin} is not a TOML file: {error}") from error


def _link_fields(name: str, link: _LinkTable) -> list[tuple[str, _FigureTable, dict[str, float]]]:
    return [
        (f"{name}.bandwidth", link.bandwidth, _RATE),
        (f"{name}.efficiency", link.efficiency, _SHARE),
        (f"{name}.latency", link.latency, _SECONDS),
    ]


def _figures(origin: str, cluster: _Cluster) -> Iterator[Figure]:
    device = cluster.device
    for dtype in device.peaks:
        if dtype not in _DTYPES:
            raise TopologyError(f"{origin}: device.peaks: {dtype!r} is not one of {', '.join(_DTYPES)}")
    fields: list[tuple[str, _FigureTable, dict[str, float]]] = [
        ("device.throughput", device.throughput, _FLOPS),
        *((f"device.peaks.{dtype}", peak, _FLOPS) for dtype, peak in device.peaks.items()),
        ("device.flops_efficiency", device.flops_efficiency, _SHARE),
        ("device.memory", device.memory, _BYTES),
        *([("device.context", device.context, _BYTES)] if device.context else []),
        *([("device.fragmentation", device.fragmentation, _SHARE)] if device.fragmentation else []),
        *([("device.block", device.block, _BYTES)] if device.block else []),
        *([("device.segment", device.segment, _BYTES)] if device.segment else []),
        ("device.dram_bandwidth", device.dram_bandwidth, _RATE),
        ("device.bytes_efficiency", device.bytes_efficiency, _SHARE),
        ("device.kernel_launch_overhead", device.kernel_launch_overhead, _SECONDS),
    ]
    if device.host_link is not None:
        fields += _link_fields("device.host_link", device.host_link)
    for level in cluster.levels:
        fields += _link_fields(f"levels.{level.name}", level)
        for part in ("devices_per_port", "oversubscription"):
            figure: _FigureTable | None = getattr(level, part)
            if figure is not None:
                fields.append((f"levels.{level.name}.{part}", figure, _NUMBER))
    for name, figure, units in fields:
        if figure.unit not in units:
            raise TopologyError(f"{origin}: {name}: unit {figure.unit!r} is not one of {', '.join(units)}")
        yield Figure(name, figure.value, figure.unit, figure.value * units[figure.unit], figure.source)
