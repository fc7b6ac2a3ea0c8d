"""The cluster of a row: a preset for its GPUs, with the figures that its columns give in place of others."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distsim.cache import cached
from distsim.errors import TopologyError
from distsim.hardware import figures, load_cluster
from distsim.ir import Topology
from distsim.truth.row import MissingFeatureError, Row, cell, decimal, number, plain

GPUS = (
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"\bb200", "dgx-b200"),
    (r"gh200", None),
    (r"h200", "dgx-h200"),
    (r"h100[- ]?nvl", "h100-nvl"),
    (r"h100[- ]?pcie", "h100-pcie"),
    (r"h100.*\b96 ?g", "hgx-h100-96gb"),
    (r"h100|h800", "dgx-h100"),
    (r"a100[- ]?pcie", "a100-pcie"),
    (r"a100.*\b40 ?g", "dgx-a100-40gb"),
    (r"a100|a800", "dgx-a100"),
    (r"v100.*(p3dn|cube|dgx-1\b|sxm2)", "dgx-1"),
    (r"v100", "dgx-2"),
    (r"a6000", "rtx-a6000"),
    (r"3090", "rtx-3090"),
    (r"4090", "rtx-4090"),
    (r"l40s", "l40s"),
    (r"\ba10g?\b", "a10"),
    (r"mi250x?\b", "mi250x"),
    (r"mi300x\b", "mi300x"),
)
"""The preset for a GPU whose column has the pattern, the first that fits; none where there is none."""

KNOWN_GPUS = (
    r"(?<![a-z0-9])(rtx)?(gb[23]00|[bh]200|[ah]800|[avh]100|a6000|[34]090|l40s|a10g?|mi250x?|mi300x)"
    r"(?![a-z0-9])"
)
"""GPUs of which the presets are: another name with one of these in it may be of another GPU."""

ADAPTERS = r"\b(efa(v[0-9])?|aws|p4de?|p5(en)?)\b"
"""Links of AWS between nodes; what they start and carry is as in the presets of its machines."""

CUT_NVLINK = r"\b[ah]800\b"
"""GPUs whose NVLink carries 400 GB/s both ways, where the presets' carries more."""

HOPPER = ("dgx-h100", "dgx-h200", "hgx-h100-96gb", "h100-nvl", "h100-pcie")
OLD_TORCH = r"\b(py)?torch[ =-]*(1\.[0-9]+|2\.[0-4])(?![0-9])|\bnanotron\b"
OLD_LIBRARIES = 0.834
"""How fast products are on Hopper, of what they are since, by cuBLAS of CUDA 12.1 and before: the figure
``libraries.2023`` of experiments/calibrate.py. Torch up to 2.4 has that (its wheels pin cuBLAS 12.1.3), and
nanotron's README installs one of it (042dfeaa)."""

OLD_KINDS = ("linear", "linear_float8", "batched")

ALMOST = 0.15
"""How far the GB that are printed of a GPU may be from what it has: 80 stands for 79.6 GiB."""


@dataclass(frozen=True)
class Cluster:
    """A cluster: the name of a preset with the number of nodes, and settings as in ``--set``.

    ``old_libraries``: products are of before they were tuned for its devices, as the settings say.
    """

    name: str
    settings: tuple[str, ...]
    old_libraries: bool = False

    def __str__(self) -> str:
        return " ".join([self.name, *self.settings])

    def topology(self) -> Topology:
        """Return its devices and links."""
        return _topology(self.name, self.settings)


@cached("clusters of rows, by name and settings", 64)
def _topology(name: str, settings: tuple[str, ...]) -> Topology:
    return load_cluster(name, settings)


def cluster_of(row: Row, devices: int, assumed: list[str]) -> Cluster:
    """Return a cluster of the GPUs of a row that is large enough for so many devices.

    What the columns of memory, nodes and links give goes before the preset's figures. Appends to ``assumed``
    what no column says. Raises :class:`MissingFeatureError` for a GPU that no preset has.
    """
    gpu = f"{plain(row, 'hw_gpu')} {plain(row, 'intra_link')}"
    preset = next((preset for pattern, preset in GPUS if re.search(pattern, gpu)), None)
    memory = decimal(row, "gpu_mem_gb")
    if preset == "dgx-a100" and memory is not None and memory < 60:
        preset = "dgx-a100-40gb"
    if preset == "dgx-2" and number(row, "gpus_per_node", 16) == 8 and "switch" not in gpu:
        preset = "dgx-1"  # no other machine has eight V100
    if preset is None:
        raise MissingFeatureError(f"a preset for {cell(row, 'hw_gpu') or 'a row without hw_gpu'!r:.60}")
    if not re.search(KNOWN_GPUS, plain(row, "hw_gpu")):
        assumed.append(f"{cell(row, 'hw_gpu') or plain(row, 'intra_link')!s:.40} is a GPU as in {preset}")
    if preset == "dgx-a100" and memory is None and "80" not in gpu:
        assumed.append("80 GB of memory")
    try:
        if re.search(r"assumed|not stated", plain(row, "inter_link")):
            assumed.append("the link between nodes")
        found = _with_columns(row, preset, gpu, memory, devices)
        found.topology()
        return found
    except TopologyError as error:
        raise MissingFeatureError(f"a cluster that can be: {error}") from None


def _with_columns(row: Row, preset: str, gpu: str, memory: float | None, devices: int) -> Cluster:
    """Return enough nodes of a preset, with the figures that columns give."""
    plainly = _topology(preset, ())
    settings = [*_node(row, plainly), *_memory(memory, plainly)]
    inner = plainly.levels[0].name
    inside = decimal(row, "intra_bw_gbps_unidir")
    if len(plainly.levels) == 2 and inside is not None:
        settings += _changed(f"{inner}.bandwidth", inside * 1e9, plainly.levels[0].link.bandwidth)
    elif re.search(CUT_NVLINK, gpu):
        settings.append(f"{inner}.bandwidth=200GB/s")
    if limit := re.search(r"\b([0-9]{2,4}) ?w\b[ -]*(cap|limit|power)", gpu):
        settings.append(f"device.power_limit={limit[1]}W")
    sized = _topology(preset, tuple(settings))
    per_node = len(sized.devices)
    settings += _between(row, sized, per_node)
    if re.search(ADAPTERS, plain(row, "inter_link")):
        adapter = {figure.name: figure for figure in figures("aws-p5")}
        for name in ("efficiency", "latency"):
            figure = adapter[f"levels.efa.{name}"]
            settings.append(f"{sized.levels[-1].name}.{name}={figure.value:g}{figure.unit}")
    old = preset in HOPPER and bool(re.search(OLD_TORCH, plain(row, "framework")))
    if old:
        shares = dict(plainly.devices[0].rates.shares)
        settings += [f"device.kernels.{kind}={shares[kind] * OLD_LIBRARIES:.3g}" for kind in OLD_KINDS]
    return Cluster(f"{preset}:{-(-devices // per_node)}", tuple(settings), old)


def _node(row: Row, plainly: Topology) -> list[str]:
    """Return the setting of the devices of a node, where a column gives another number."""
    count = number(row, "gpus_per_node", 0)
    if not count or count == len(plainly.devices):
        return []
    ports, inner = plainly.levels[-1].devices_per_port, plainly.levels[0]
    changed = [f"devices_per_node={count}"]
    if inner.name == "nvlink" and (inner.group_size or 0) > 16:  # a domain of NVLink that is more than a node
        changed.append(f"nvlink.group_size={inner.group_size}")
    shared = f"{plainly.levels[-1].name}.devices_per_port"
    if ports == len(plainly.devices):  # one port a node stays one a node
        return [*changed, f"{shared}={count}"]
    return [*changed, f"{shared}=1"] if count % ports else changed


def _memory(memory: float | None, plainly: Topology) -> list[str]:
    """Return the setting of the memory of a GPU, where a column gives another size."""
    has = plainly.devices[0].memory / 2**30
    return [] if memory is None or abs(memory / has - 1) < ALMOST else [f"device.memory={memory:g}GiB"]


def _between(row: Row, plainly: Topology, per_node: int) -> list[str]:
    """Return the settings of the ports between nodes: how many a node has, and what each carries.

    The column of the link may say both, as in 4x200Gb/s; that of the bandwidth says what all carry together.
    """
    level = plainly.levels[-1]
    name, ports = level.name, max(per_node // level.devices_per_port, 1)
    total = decimal(row, "inter_bw_gbps_per_node")
    said = re.search(r"\b([0-9]{1,2}) ?x ?([0-9]{2,4}) ?g(b|bit|bps)", plain(row, "inter_link"))
    if said and int(said[1]) and per_node % int(said[1]) == 0:
        ports, each = int(said[1]), float(said[2])
        total = ports * each if total is None else total
    if total is None:
        return []
    shared = per_node // ports
    changed = [] if shared == level.devices_per_port else [f"{name}.devices_per_port={shared}"]
    return [*changed, *_changed(f"{name}.bandwidth", total / ports * 1e9 / 8, level.link.bandwidth)]


def _changed(key: str, value: float, old: float) -> list[str]:
    return [] if abs(value / old - 1) < 1e-3 else [f"{key}={value:.0f}B/s"]
