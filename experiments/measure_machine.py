"""Time kernels, launches and collectives of this machine, for ``distsim calibrate``; needs torch and GPUs.

One GPU: ``python experiments/measure_machine.py --out mine.csv``. With collectives, over the GPUs of a node
or of several: ``torchrun --nproc-per-node 8 experiments/measure_machine.py --out mine.csv``. Then ``distsim
calibrate mine.csv --base dgx-h100 --out mine.toml``. Some three minutes; nothing else may run on the GPUs.

A kernel is issued so often that it takes :data:`LONG_ENOUGH`, then waited for; the median of :data:`ROUNDS`
such runs counts, after two that do not. Shapes are large, so that the device is busy throughout. Of launches,
those of small kernels in eager mode with autograd, the host alone is timed. Collectives run as often on every
rank; the first rank writes.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from distsim.calibration.timings import AttentionShape
from distsim.calibration.timings_csv import COLUMNS

LONG_ENOUGH, ROUNDS, MOST_REPEATS = 0.02, 5, 200
LAUNCHES = 75
"""How often the small kernels are issued: fewer than a device queues (some 1,000)."""
PRODUCTS = [
    *((m, n, k) for m in (2048, 8192) for n, k in ((4096, 4096), (12288, 4096), (4096, 11008), (8192, 8192))),
    *((4096, n, 4096) for n in (512, 1024, 2048)),
    *((4096, 4096, k) for k in (256, 1024, 16384)),
    (8192, 28672, 8192),
    *((8192, n, k) for n, k in ((768, 768), (3072, 768), (768, 3072))),
    *((m, n, 8192) for m, n in ((768, 3072), (512, 2048), (2048, 2048))),
    *((m, n, 32768) for m, n in ((768, 768), (2048, 4096))),
    *((512, n, k) for n, k in ((2048, 8192), (8192, 2048))),
    *((4096, 128256, 2048), (16384, 50304, 768)),
]
"""[m, k] times [k, n]: the linear layers of models of 1 to 70 billion parameters, and thin ones; those of
small models and of gradients of their weights; predictions."""
BATCHED = [
    *((heads, seq, n, k) for heads, seq in ((64, 2048), (128, 1024)) for n, k in ((seq, 128), (128, seq))),
    *((8, m, n, k) for m in (2048, 4096) for n, k in ((2048, 2048), (4096, 1024))),
]
"""So many of [m, k] times [k, n]: scores of attention, and what they weigh, which memory bounds or nearly;
and some as deep as those of linear layers."""
ATTENTIONS = [
    *(
        AttentionShape(max(1, 16384 // seq), 16, 16, seq, 128, causal)
        for seq in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ),
    *(AttentionShape(16384 // seq, 32, 32, seq, 64, True) for seq in (512, 1024, 2048, 8192)),
    *(AttentionShape(1, heads, heads // 4, 8192, 128, True) for heads in (4, 8, 32)),
    *(AttentionShape(1, heads, heads, 32768, 128, True) for heads in (2, 16)),
]
FLOAT8 = "float8e4m3fn"
ATTENTION_KERNELS = {"flash2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
"""The kernels of torch for attention, by distsim's names."""
COPIES = [2**power for power in range(14, 32)]
COLLECTIVE_BYTES = [2**power for power in range(12, 31, 2)]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

Run = Callable[[], object]
Timings = Iterator[dict[str, object]]


class Backend(Protocol):
    """What runs the kernels of a machine. A run issues its kernels and may return before they are done."""

    ranks: int
    nodes: int
    leader: bool
    description: str
    float8: bool
    """Whether it multiplies numbers of 8 bits."""

    def product(self, m: int, n: int, k: int, dtype: str) -> Run:
        """Return what multiplies [m, k] and [k, n]."""
        ...

    def batched(self, batch: int, m: int, n: int, k: int, dtype: str) -> Run:
        """Return what multiplies so many pairs of [m, k] and [k, n]."""
        ...

    def attention(self, shape: AttentionShape, dtype: str) -> tuple[Run, Run]:
        """Return attention as one kernel, forward and backward."""
        ...

    def copy(self, nbytes: int) -> Run:
        """Return a copy that reads and writes so many bytes together."""
        ...

    def small_kernels(self) -> tuple[Run, int]:
        """Return what issues some kernels that take next to nothing, and how many."""
        ...

    def collective(self, kind: str, nbytes: int) -> Run:
        """Return a collective over all ranks, of so many bytes as ``distsim.hardware.collectives`` counts."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is done."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        ...


def measure(backend: Backend, clock: Callable[[], float], dtype: str = "bfloat16") -> Timings:
    """Yield a row of the table for each thing that is timed; on ranks that do not lead, none of kernels."""
    if backend.leader:
        yield from _kernels(backend, clock, dtype)
    backend.barrier()
    if backend.ranks > 1:
        yield from _collectives(backend, clock)


def _kernels(backend: Backend, clock: Callable[[], float], dtype: str) -> Timings:
    for kind in (dtype, FLOAT8) if backend.float8 else (dtype,):
        for m, n, k in PRODUCTS:
            seconds = device_seconds(backend.product(m, n, k, kind), backend, clock)
            yield {"op": "product", "seconds": seconds, "m": m, "n": n, "k": k, "dtype": kind}
    for batch, m, n, k in BATCHED:
        seconds = device_seconds(backend.batched(batch, m, n, k, dtype), backend, clock)
        yield {"op": "product", "seconds": seconds, "m": m, "n": n, "k": k, "dtype": dtype, "batch": batch}
    for shape in ATTENTIONS:
        for op, run in zip(("attention", "attention_grad"), backend.attention(shape, dtype), strict=True):
            sizes = {**shape._asdict(), "causal": str(shape.causal).lower()}
            yield {"op": op, "seconds": device_seconds(run, backend, clock), "dtype": dtype, **sizes}
    host = 0.0
    run, count = backend.small_kernels()
    for _ in range(ROUNDS):
        seconds = host_seconds(run, backend, clock)
        host = max(host, seconds / (count * LAUNCHES))
        yield {"op": "launch", "seconds": seconds, "kernels": count * LAUNCHES, "mode": "eager"}
    for nbytes in COPIES:
        seconds = device_seconds(backend.copy(nbytes), backend, clock)
        if seconds > 2 * host:  # else the host was timed
            yield {"op": "memory", "seconds": seconds, "bytes": nbytes}


def _collectives(backend: Backend, clock: Callable[[], float]) -> Timings:
    for kind in KINDS:
        for size in COLLECTIVE_BYTES:
            nbytes = max(1, size // (4 * backend.ranks)) * 4 * backend.ranks
            repeats = max(1, min(50, 2**28 // nbytes))
            backend.barrier()
            seconds = device_seconds(backend.collective(kind, nbytes), backend, clock, repeats)
            where = {"ranks": backend.ranks, "nodes": backend.nodes}
            yield {"op": kind, "seconds": seconds, "bytes": nbytes, **where}


def device_seconds(run: Run, backend: Backend, clock: Callable[[], float], repeats: int = 0) -> float:
    """Return the seconds that the device takes for a run, repeated until that is long enough, or so often."""

    def elapsed(count: int) -> float:
        start = clock()
        for _ in range(count):
            run()
        backend.synchronize()
        return clock() - start

    elapsed(1)  # compiles, allocates, chooses algorithms
    once = elapsed(1)
    count = repeats or max(1, min(MOST_REPEATS, math.ceil(LONG_ENOUGH / max(once, 1e-9))))
    return median([elapsed(count) for _ in range(ROUNDS)]) / count


def host_seconds(run: Run, backend: Backend, clock: Callable[[], float]) -> float:
    """Return the seconds in which the host issues :data:`LAUNCHES` runs to a device that is idle before."""
    run()
    backend.synchronize()
    start = clock()
    for _ in range(LAUNCHES):
        run()
    seconds = clock() - start
    backend.synchronize()
    return seconds


class TorchBackend:
    """The machine as torch runs it: on the GPU of this process, or, to try the script, on the CPU."""

    def __init__(self, torch: Any, device: str, attention: str = "") -> None:
        self.torch = torch
        self.device = device
        self.kernel_of_attention = attention
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.nodes = self.ranks // int(os.environ.get("LOCAL_WORLD_SIZE", str(self.ranks)))
        self.leader = int(os.environ.get("RANK", "0")) == 0
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self.ranks > 1:
            torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        self.float8 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
        self.description = f"{self.ranks} x {name}, torch {torch.__version__}"
        if attention:
            self.description += f", attention {attention}"

    def product(self, m: int, n: int, k: int, dtype: str) -> Run:
        """Return what multiplies [m, k] and [k, n]; numbers of 8 bits, which fill their range as scaled ones
        do, have a scale for each tensor."""
        if dtype == FLOAT8:
            narrow, scale = self.torch.float8_e4m3fn, self.torch.ones((), device=self.device)
            a, b = ((self._filled("bfloat16", *size) * 1e4).to(narrow) for size in ((m, k), (n, k)))
            b = b.t()
            wide = self.torch.bfloat16
            return lambda: self.torch._scaled_mm(a, b, scale, scale, out_dtype=wide, use_fast_accum=True)
        a, b, out = self._filled(dtype, m, k), self._filled(dtype, k, n), self._filled(dtype, m, n)
        return lambda: self.torch.mm(a, b, out=out)

    def batched(self, batch: int, m: int, n: int, k: int, dtype: str) -> Run:
        """Return what multiplies so many pairs of [m, k] and [k, n]."""
        a, b, out = (self._filled(dtype, batch, *shape) for shape in ((m, k), (k, n), (m, n)))
        return lambda: self.torch.bmm(a, b, out=out)

    def attention(self, shape: AttentionShape, dtype: str) -> tuple[Run, Run]:
        """Return attention as one kernel, forward and backward, of [batch, seq, heads, size]."""
        sizes = (shape.batch, shape.seq, shape.heads, shape.head_dim)
        kept = (shape.batch, shape.seq, shape.kv_heads, shape.head_dim)
        operands = [
            self._filled(dtype, *each).transpose(1, 2).requires_grad_() for each in (sizes, kept, kept)
        ]
        attend = self.torch.nn.functional.scaled_dot_product_attention
        shared = shape.kv_heads != shape.heads

        def forward() -> Any:
            with self._one_kernel():
                return attend(*operands, is_causal=shape.causal, enable_gqa=shared)

        out, grad = forward(), self._filled(dtype, *sizes).transpose(1, 2)
        return forward, lambda: self.torch.autograd.grad(out, operands, grad, retain_graph=True)

    def _one_kernel(self) -> Any:
        """Return the context in which torch has the kernel of attention that was asked for."""
        if not self.kernel_of_attention:
            return nullcontext()
        kernels = import_module("torch.nn.attention")
        return kernels.sdpa_kernel(getattr(kernels.SDPBackend, ATTENTION_KERNELS[self.kernel_of_attention]))

    def copy(self, nbytes: int) -> Run:
        """Return a copy that reads and writes so many bytes together."""
        source, target = (
            self.torch.zeros(nbytes // 2, dtype=self.torch.uint8, device=self.device) for _ in "ab"
        )
        return lambda: target.copy_(source)

    def small_kernels(self) -> tuple[Run, int]:
        """Return a linear layer, an activation, a sum and a norm, recorded for backward: a kernel each."""
        modules = self.torch.nn
        linear, norm = modules.Linear(64, 64).to(self.device), modules.LayerNorm(64).to(self.device)
        x = self._filled("float32", 16, 64)

        def run() -> Any:
            return norm(modules.functional.gelu(linear(x)) + x)

        return run, 4

    def collective(self, kind: str, nbytes: int) -> Run:
        """Return a collective over all ranks, of so many bytes of single precision."""
        distributed = self.torch.distributed
        whole, part = self._filled("float32", nbytes // 4), self._filled("float32", nbytes // 4 // self.ranks)
        if kind == "all_reduce":
            return lambda: distributed.all_reduce(whole)
        if kind == "all_gather":
            return lambda: distributed.all_gather_into_tensor(whole, part)
        if kind == "reduce_scatter":
            return lambda: distributed.reduce_scatter_tensor(part, whole)
        other = self._filled("float32", nbytes // 4)
        return lambda: distributed.all_to_all_single(other, whole)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.ranks > 1:
            self.torch.distributed.barrier()

    def _filled(self, dtype: str, *shape: int) -> Any:
        """Return a tensor of small random numbers: of zeros, products draw less power and run faster."""
        return self.torch.randn(shape, dtype=getattr(self.torch, dtype), device=self.device) * 0.01


def write(path: Path, remark: str, rows: Iterator[dict[str, object]]) -> int:
    """Write the table, row by row, so that what was timed is kept if it is stopped; return how many rows."""
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {remark}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            seconds = row["seconds"]
            writer.writerow({**row, "seconds": f"{seconds:.6g}"})
            file.flush()
            print(", ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr)
            count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 2 without torch or a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("machine.csv"), metavar="CSV")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--attention",
        choices=list(ATTENTION_KERNELS),
        default="",
        help="its kernel (default: what torch takes)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    given = parser.parse_args(arguments)
    try:
        torch = import_module("torch")
    except ImportError:
        print(
            "torch is not installed; run this where the model is trained (pip install torch)", file=sys.stderr
        )
        return 2
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU; run this on a machine with one", file=sys.stderr)
        return 2
    backend = TorchBackend(torch, given.device, given.attention)
    rows = measure(backend, time.perf_counter, given.dtype)
    if backend.leader:
        count = write(given.out, f"{backend.description}, {time.strftime('%Y-%m-%d')}", rows)
        print(f"table: {given.out}, {count} timings; distsim calibrate {given.out} --base PRESET --out TOML")
    else:
        for _ in rows:
            pass
    if backend.ranks > 1:
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
