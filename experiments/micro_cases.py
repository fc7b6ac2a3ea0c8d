"""Shape rules and alpha-beta against kernels and collectives alone, on halves that nothing is fitted to.

``python experiments/micro_cases.py DIR`` reads ``micro_gemm.csv``, ``micro_attention.csv`` and
``micro_collectives.csv`` of the folder. Of each group (a machine, a kind of kernel or a collective over so
many ranks) the rows with an even place fit one share of the peak, or a bandwidth and a latency, over groups
of several sizes in one node also a start; the others are predicted. It prints mean and worst errors by group,
collectives from 1 MiB and below apart, and writes ``results/micro_cases.csv``. Products are those of at least
8.6e9 multiplications; the exponents of the rules (:mod:`distsim.cost.efficiency`) were fitted to all of A100.
Those that add to sums in float32 are a group of their own, predicted by the share that those which do not add
have on the same machine, and what adding takes; so are those of experts, of which nothing is fitted: of two
figures of one of them that adds to sums the slower one is taken to be of float32. ``--timings`` does the same
for the kernels of tables of timings.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common import RESULTS, write_csv
from scipy.optimize import least_squares

from distsim.calibration import read_timings
from distsim.calibration.timings import KernelCall
from distsim.cost import CostModel
from distsim.cost.efficiency import exposed_bytes
from distsim.hardware import collective_time, load_cluster
from distsim.ir import Attributes, BFloat16, Device, Float32, Int64, Link, Tensor, Topology
from distsim.ir.kernel_rates import KernelRates
from distsim.ir.topology import Level
from distsim.ops import Signature, types, work

FEWEST_MULTIPLICATIONS = 8.6e9
FEWEST_ROWS = 8
MIB = 2**20
PEAK = 1e15
CLUSTERS = {"A100-PCIe": "a100-pcie", "A100": "dgx-a100", "B200": "dgx-b200", "H100": "dgx-h100"}
"""Presets of the GPUs that tables name: of several that a name has, the first."""
OWN_CLUSTER = "dgx-h200"
Row = dict[str, str]
Halves = dict[str, tuple[list[float], list[float]]]
"""By group: predicted and measured figures of the rows that nothing was fitted to."""


def main() -> int:
    """Print and write the errors; the exit status is 2 where a table cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--timings", type=Path, nargs="+", default=[], metavar="CSV", help="of measure_machine.py, on H200"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    try:
        tables = [read(given.folder / f"micro_{name}.csv") for name in ("gemm", "attention", "collectives")]
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    lines: list[dict[str, object]] = []
    for what, halves in zip(
        ("products", "attention", "collectives", "own"),
        (products(tables[0]), attention(tables[1]), collectives(tables[2]), own_kernels(given.timings)),
        strict=True,
    ):
        for group, (predicted, measured) in halves.items():
            errors = [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]
            mean, worst = statistics.fmean(errors), max(errors)
            print(f"{what:12} {group:58.58} {len(errors):4} rows  {mean:6.1%} mean  {worst:6.1%} worst")
            lines.append({"what": what, "group": group, "rows": len(errors), "mean": mean, "worst": worst})
    given.out.mkdir(parents=True, exist_ok=True)
    write_csv(given.out / "micro_cases.csv", lines)
    return 0


def read(path: Path) -> list[Row]:
    """Return the rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def grouped(rows: Sequence[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Return the groups that are large enough to be halved."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(name(row), []).append(row)
    return {group: own for group, own in found.items() if len(own) >= FEWEST_ROWS}


# --- products and attention -------------------------------------------------------------------------------


def device_of(row: Row) -> Device:
    """Return the device that a row is of."""
    return load_cluster(next(preset for name, preset in CLUSTERS.items() if name in row["hw"])).devices[0]


def speed(which: Signature, on: Device, kind: str, dtype: str = "bfloat16") -> float:
    """Return the FLOP/s of a kernel on a device of a peak of 1e15, of which it reaches what shape leaves."""
    processors, query_block = on.rates.processors, on.rates.query_block
    rates = KernelRates(((kind, 1.0),), processors=processors, query_block=query_block)
    peaks = ((dtype, PEAK),)
    device = Device(0, "gpu", PEAK, 1e18, 0.0, peaks=peaks, rates=rates)
    return work(which).flops / CostModel(Topology.hierarchical(device, 1, [])).seconds(which, (device,))


def signature(op_type: str, *shapes: tuple[int, ...], **attributes: object) -> Signature:
    """Return an op on tensors in 16 bits."""
    given, options = tuple([Tensor(BFloat16(), shape) for shape in shapes]), Attributes(attributes)
    return Signature(op_type, options, given, tuple(types(op_type, options, given, None)))


def shared(rows: Sequence[Row], rule: Callable[[Row], float]) -> tuple[list[float], list[float]]:
    """Return TFLOP/s of the second half, by one share of the rule that fits the first, and as measured."""
    ratios = [float(row["tflops"]) / rule(row) for row in rows[::2]]
    share = math.exp(statistics.median(map(math.log, ratios)))
    return [share * rule(row) for row in rows[1::2]], [float(row["tflops"]) for row in rows[1::2]]


def products(rows: Sequence[Row]) -> Halves:
    """Return the halves of products with a weight."""

    def sizes(row: Row) -> tuple[int, int, int]:
        return int(row["m"]), int(row["n"]), int(row["k"])

    def rule(row: Row) -> float:
        m, n, k = sizes(row)
        return speed(signature("MatMul", (m, k), (k, n)), device_of(row), "linear") / 1e12

    chosen = [
        row
        for row in rows
        if row["op"] == "matmul"
        and row["accumulate"] == "False"
        and math.prod(sizes(row)) >= FEWEST_MULTIPLICATIONS
    ]
    adding = [row for row in rows if row["op"] == "matmul" and row["out_dtype"] == "fp32"]
    plain = grouped(chosen, lambda row: row["hw"])
    found = {group: shared(own, rule) for group, own in plain.items()}
    shares = {
        group: math.exp(statistics.median([math.log(float(row["tflops"]) / rule(row)) for row in own]))
        for group, own in plain.items()
    }
    of_experts = [row for row in rows if row["op"].startswith("group_matmul")]
    for group, own in grouped(of_experts, lambda row: row["hw"]).items():
        found[f"{group}, of experts"] = experts(own, shares[group])
    for group, own in grouped(adding, lambda row: row["hw"]).items():
        share = shares[group]
        large = [row for row in own if math.prod(sizes(row)) >= FEWEST_MULTIPLICATIONS]
        device = device_of(large[0])
        predicted: list[float] = []
        for row in large:
            m, n, k = sizes(row)
            flops, total = 2.0 * m * n * k / 1e12, Tensor(Float32(), (m, n))
            adds = Signature("Kernel", Attributes({"added": 2.0 * total.nbytes}), (total,), (total,))
            added = exposed_bytes(adds) / device.dram_bandwidth
            predicted.append(flops / (flops / (share * rule(row)) + added))
        found[f"{group}, added to sums"] = predicted, [float(row["tflops"]) for row in large]
    return found


def experts(rows: Sequence[Row], share: float) -> tuple[list[float], list[float]]:
    """Return TFLOP/s of products of experts, by the share of those of one weight, and as measured."""
    device, slowest = device_of(rows[0]), dict[tuple[str, ...], list[float]]()
    for row in rows:
        slowest.setdefault(sizes_of(row), []).append(float(row["tflops"]))
    predicted: list[float] = []
    for row in rows:
        groups, way, m, n, k = sizes_of(row)
        x, y, w, counts = (
            *[Tensor(BFloat16(), (int(groups) * int(m), int(columns))) for columns in (k, n)],
            *(Tensor(BFloat16(), (int(groups), int(k), int(n))), Tensor(Int64(), (int(groups),))),
        )
        name, given, made = {
            "fwd": ("", (x, w, counts), y),
            "bwd_grad_act": ("GradA", (w, counts, y), x),
            "bwd_grad_w": ("GradB", (x, counts, y), w),
        }[way]
        which = Signature(f"GroupedMatMul{name}", Attributes(), given, (made,))
        own = slowest[sizes_of(row)]
        single = name == "GradB" and len(own) > 1 and float(row["tflops"]) == min(own)
        moved = (8.0 * w.size if single else exposed_bytes(which)) / device.dram_bandwidth
        flops = work(which).flops / 1e12
        predicted.append(flops / (flops / (share * speed(which, device, "grouped") / 1e12) + moved))
    return predicted, [float(row["tflops"]) for row in rows]


def sizes_of(row: Row) -> tuple[str, ...]:
    """Return the groups and the pass of products of experts, the rows of one, its outputs and its inputs."""
    _, groups, way = row["op"].split()
    return groups.removeprefix("ng="), way, row["m"], row["n"], row["k"]


def attention(rows: Sequence[Row]) -> Halves:
    """Return the halves of attention, forward, backward, or both together, by head size and mask."""

    def rule(row: Row) -> float:
        seq, heads, size = int(row["seq"]), int(row["heads"]), int(row["head_dim"])
        causal = int(row["causal"].lower().startswith(("true", "causal")))
        which = signature("Attention", *[(int(row["batch"]), heads, seq, size)] * 3, is_causal=causal)
        if not row["kernel"].endswith("_bwd"):
            return speed(which, device_of(row), "attention") / 1e12
        saved = (*which.inputs, *which.outputs, which.outputs[0])
        backward = Signature("AttentionGrad", which.attributes, saved, which.inputs)
        return speed(backward, device_of(row), "attention_grad") / 1e12

    groups = grouped(rows, lambda row: f"{row['hw']} {row['kernel']}, {row['causal'][:6]}, {row['head_dim']}")
    groups |= grouped(
        [row for row in rows if "FlashAttention-2" in row["source"]],
        lambda row: f"{row['hw']} {row['kernel']}, all",
    )
    return {group: shared(own, rule) for group, own in groups.items()}


def own_kernels(paths: Sequence[Path]) -> Halves:
    """Return the halves of kernels of tables of timings; print what share of the peak all of a group show."""
    found: Halves = {}
    own_device = load_cluster(OWN_CLUSTER).devices[0]
    for path in paths:
        groups: dict[str, list[Row]] = {}
        for timing in read_timings([path]).timings:
            if not isinstance(timing.call, KernelCall) or timing.call.kind == "memory":
                continue
            dtype = timing.call.signature.inputs[0].dtype.name
            reached = timing.call.demand.flops / timing.seconds
            ruled = speed(timing.call.signature, own_device, timing.call.kind, dtype)
            row = {"tflops": f"{reached / 1e12}", "rule": f"{ruled / 1e12}"}
            groups.setdefault(f"{path.stem}, {timing.call.kind}, {dtype}", []).append(row)
        for group, own in groups.items():
            share = statistics.median([float(row["tflops"]) / float(row["rule"]) for row in own])
            print(f"{group}: {share * PEAK / 1e12:.0f} TFLOP/s over the shape rule, median of {len(own)}")
            found[group] = shared(own, lambda row: float(row["rule"]))
    return found


# --- collectives ------------------------------------------------------------------------------------------


BEGIN = {"bandwidth": 1e11, "latency": 1e-5, "segment_time": 1e-6, "start": 2e-5}
"""Where the fit of a link begins: bytes/s, seconds."""
ALONE = ("bandwidth", "latency", "segment_time")
"""What is fitted of ranks of one number; below 1 MiB, which are one segment, the first two."""


def cluster(
    row: Row, bandwidth: float, latency: float, segment_time: float = 0.0, start: float = 0.0
) -> Topology:
    """Return a row's ranks; of several nodes the figures are of what joins them.

    NVLink is that of the B200 that a row names, else that of an A100.
    """
    ranks, nodes = int(row["n_gpus"]), int(row["nodes"] or 1)
    if nodes == 1:
        level = Level("link", Link(bandwidth, latency), start=start, segment_time=segment_time)
        return Topology.hierarchical(Device(0, "gpu"), ranks, [level])
    known = load_cluster("dgx-b200" if "B200" in row["hw"] else "dgx-a100")
    nvlink = replace(known.levels[0], group_size=ranks // nodes)
    between = Level("between", Link(bandwidth, latency), segment_time=segment_time)
    return Topology.hierarchical(Device(0, "gpu"), ranks, [nvlink, between])


def collectives(rows: Sequence[Row]) -> Halves:
    """Return the halves of collectives: microseconds, from 1 MiB on and below."""
    found: Halves = {}
    timed = [row for row in rows if row["time_us"] and row["size_bytes"]]
    groups = grouped(timed, lambda row: f"{row['hw'][:36]}, {row['op']}, {row['n_gpus']} ranks")
    inside = [row for row in timed if int(row["nodes"] or 1) == 1]
    for group, own in grouped(inside, lambda row: f"{row['hw'][:36]}, {row['op']}, all ranks").items():
        if len({row["n_gpus"] for row in own}) > 1:
            groups[group] = own

    def seconds(row: Row, figures: Mapping[str, float]) -> float:
        topology = cluster(row, **figures)
        return collective_time(row["op"], float(row["size_bytes"]), tuple(topology.devices), topology)

    for group, own in groups.items():
        start = ("start",) * group.endswith("all ranks")
        for name, part, figures in (
            ("from 1 MiB", [row for row in own if int(row["size_bytes"]) >= MIB], (*ALONE, *start)),
            ("below", [row for row in own if int(row["size_bytes"]) < MIB], (*ALONE[:2], *start)),
        ):
            half = part[::2]
            if len(part) < 4:
                continue

            def named(logs: Sequence[float], figures: tuple[str, ...] = figures) -> dict[str, float]:
                return {figure: math.exp(log) for figure, log in zip(figures, logs, strict=True)}

            fitted = least_squares(
                lambda logs, half=half, named=named: [
                    math.log(seconds(row, named(logs)) * 1e6 / float(row["time_us"])) for row in half
                ],
                [math.log(BEGIN[figure]) for figure in figures],
                loss="soft_l1",
                f_scale=0.15,
            ).x
            found[f"{group}, {name}"] = (
                [seconds(row, named(fitted)) * 1e6 for row in part[1::2]],
                [float(row["time_us"]) for row in part[1::2]],
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
