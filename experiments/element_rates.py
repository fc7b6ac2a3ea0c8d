"""How many cycles multiprocessors take for an element, in kernels of torch that memory alone does not bound.

``python experiments/element_rates.py TABLE`` reads a table of kernels of torch, each alone
(``op,dtype,rows,columns,seconds``, op as in :data:`distsim.cost.roofline.CYCLES`), prints of each op and
type the cycles that its kernels show beside those that distsim has, with the errors of both and of bytes
alone, and writes ``results/element_rates.csv`` and a picture. ``--preset`` names the machine (dgx-h200).
``--measure`` makes the table first, where torch and a GPU are: half a minute.

The cycles of a row are its seconds, less what begins a kernel, by the multiprocessors and their clock over
its elements; of an op and a type the median of rows of at least 8 million elements.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from common import RESULTS, panels, save, write_csv
from measure_machine import Run, TorchBackend, device_seconds

from distsim.cost.roofline import CYCLES
from distsim.hardware import load_cluster
from distsim.ir import Device

COLUMNS = ("op", "dtype", "rows", "columns", "seconds")
SIZES = [(rows, columns) for rows in (4096, 8192, 32768) for columns in (1024, 2048, 4096)]
LOGITS = [(rows, columns) for rows in (2048, 8192) for columns in (50304, 128256)]
SCORES = [(65536, 1024), (65536, 2048)]
FEWEST = 2**23
HEADS, HEAD = 32, 128
BYTES: Mapping[str, Callable[[int], float]] = {
    "Cast": lambda size: 6.0,
    "Cast+Add": lambda size: 10.0,
    "Neg": lambda size: 2.0 * size,
    "Gelu": lambda size: 2.0 * size,
    "Swish": lambda size: 2.0 * size,
    "GeluGrad": lambda size: 3.0 * size,
    "SwishGrad": lambda size: 3.0 * size,
    "broadcast": lambda size: 2.0 * size,
    "Concat": lambda size: 2.0 * size,
    "LayerNormalization": lambda size: 2.0 * size,
    "RMSNormalization": lambda size: 2.0 * size,
    "LayerNormalizationGrad": lambda size: 5.0 * size,
    "RMSNormalizationGrad": lambda size: 5.0 * size,
    "LogSoftmax": lambda size: 2.0 * size,
    "Softmax": lambda size: 2.0 * size,
    "LogSoftmaxGrad": lambda size: 3.0 * size,
    "SoftmaxGrad": lambda size: 3.0 * size,
}
"""Bytes that an op reads and writes of an element of so many bytes, each operand once, unless a gradient of
a norm, which two kernels read."""


# --- measuring --------------------------------------------------------------------------------------------


def runs(torch: Any, rows: int, columns: int, dtype: str) -> Iterator[tuple[str, Run]]:
    """Yield the kernels of torch over [rows, columns] of a type."""
    aten, kind = torch.ops.aten, getattr(torch, dtype)

    def filled(*shape: int) -> Any:
        return torch.randn(shape, dtype=kind, device="cuda") * 0.1

    x, y = filled(rows, columns), filled(rows, columns)
    if (rows, columns) in SCORES:
        yield "Softmax", lambda: aten._softmax(x, -1, False)
        yield "SoftmaxGrad", lambda: aten._softmax_backward_data(x, y, -1, kind)
        return
    if (rows, columns) in LOGITS:
        yield "LogSoftmax", lambda: aten._log_softmax(x, -1, False)
        yield "LogSoftmaxGrad", lambda: aten._log_softmax_backward_data(x, y, -1, kind)
        return
    if dtype != "float32":
        wide = x.float()
        yield "Cast", lambda: x.float()
        yield "Cast+Add", lambda: wide + x
    yield "Gelu", lambda: aten.gelu(x)
    yield "GeluGrad", lambda: aten.gelu_backward(y, x)
    yield "Swish", lambda: aten.silu(x)
    yield "SwishGrad", lambda: aten.silu_backward(y, x)
    seq = rows * columns // HEADS // HEAD
    heads = x.view(seq, HEADS, HEAD).transpose(0, 1)  # as attention takes them, of one sequence
    table, half = filled(seq, HEAD), heads[..., : HEAD // 2]
    yield "broadcast", lambda: heads * table
    yield "Neg", lambda: -half
    yield "Concat", lambda: torch.cat((half, half), -1)
    scale, bias = filled(columns), filled(columns)
    _, mean, deviation = aten.native_layer_norm(x, [columns], scale, bias, 1e-5)
    yield "LayerNormalization", lambda: aten.native_layer_norm(x, [columns], scale, bias, 1e-5)
    yield (
        "LayerNormalizationGrad",
        lambda: aten.native_layer_norm_backward(
            y, x, [columns], mean, deviation, scale, bias, [True, True, True]
        ),
    )
    _, root = aten._fused_rms_norm(x, [columns], scale, 1e-5)
    yield "RMSNormalization", lambda: aten._fused_rms_norm(x, [columns], scale, 1e-5)
    yield (
        "RMSNormalizationGrad",
        lambda: aten._fused_rms_norm_backward(y, x, [columns], root, scale, [True, True]),
    )


def measured(torch: Any) -> Iterator[dict[str, object]]:
    """Yield a row of the table for each kernel."""
    backend = TorchBackend(torch, "cuda")
    for dtype in ("bfloat16", "float32"):
        for rows, columns in (*SIZES, *LOGITS, *SCORES):
            for op, run in runs(torch, rows, columns, dtype):
                seconds = device_seconds(run, backend, time.perf_counter)
                yield dict(zip(COLUMNS, (op, dtype, rows, columns, f"{seconds:.6g}"), strict=True))
            torch.cuda.empty_cache()


def measure(path: Path) -> int:
    """Write the table; the exit status is 2 without torch or a GPU."""
    try:
        torch = import_module("torch")
    except ImportError:
        print("torch is not installed; measure where it is", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU; measure on a machine with one", file=sys.stderr)
        return 2
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(
            f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n"
        )
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in measured(torch):
            writer.writerow(row)
    return 0


# --- what it says -----------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, without remarks."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def compared(rows: Sequence[Mapping[str, str]], device: Device) -> list[dict[str, object]]:
    """Return a line for each op and type: cycles that it shows and that distsim has, and errors."""
    cycles_a_second = device.rates.processors * device.rates.clock
    bandwidth = device.dram_bandwidth * device.bytes_efficiency
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        elements = int(row["rows"]) * int(row["columns"])
        if row["op"] == "Neg":
            elements //= 2
        seconds = float(row["seconds"]) - device.kernel_launch_overhead
        groups.setdefault((row["op"], row["dtype"]), []).append((elements, seconds))
    lines: list[dict[str, object]] = []
    for (op, dtype), found in groups.items():
        size = 4 if dtype == "float32" else 2
        large = [(elements, seconds) for elements, seconds in found if elements >= FEWEST]
        shown = statistics.median([seconds * cycles_a_second / elements for elements, seconds in large])
        known = CYCLES[op][size > 2]

        def error(cycles: float, group: Sequence[tuple[int, float]], bytes_each: float) -> float:
            return statistics.fmean(
                [
                    abs(max(n * bytes_each / bandwidth, n * cycles / cycles_a_second) / seconds - 1)
                    for n, seconds in group
                ]
            )

        moved = BYTES[op](size)
        lines.append(
            {
                **{"op": op, "dtype": dtype, "kernels": len(large)},
                **{"cycles": f"{shown:.3g}", "distsim": known},
                "of_bytes": f"{moved / bandwidth * cycles_a_second:.3g}",
                "error": f"{error(known, large, moved):.1%}",
                "error_of_bytes_alone": f"{error(0.0, large, moved):.1%}",
            }
        )
    return lines


def main() -> int:
    """Print and write; the exit status is 2 without a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--preset", default="dgx-h200")
    parser.add_argument("--measure", action="store_true", help="write the table first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.measure and (status := measure(given.table)):
        return status
    try:
        rows = read(given.table)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    lines = compared(rows, load_cluster(given.preset).devices[0])
    for line in lines:
        print(
            "  ".join(f"{value!s:>22}" if name == "op" else f"{value!s:>9}" for name, value in line.items())
        )
    given.out.mkdir(parents=True, exist_ok=True)
    write_csv(given.out / "element_rates.csv", lines)
    draw(lines, given.out / "element_rates.png")
    return 0


def draw(lines: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draw cycles an element beside those in which the memory moves its bytes."""
    figure, (axis,) = panels(1, 7.5, 5)
    names = [f"{line['op']}, {line['dtype']}" for line in lines]
    places = range(len(lines))
    axis.barh(list(places), [float(str(line["cycles"])) for line in lines], label="measured")
    axis.scatter([float(str(line["distsim"])) for line in lines], list(places), c="C1", s=18, label="distsim")
    axis.scatter(
        [float(str(line["of_bytes"])) for line in lines],
        list(places),
        c="black",
        marker="|",
        label="its bytes alone",
    )
    axis.set_yticks(list(places), names, fontsize=6)
    axis.set(xlabel="cycles of a multiprocessor for an element")
    axis.legend(fontsize=7)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
