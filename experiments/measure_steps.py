"""Time training steps of plain PyTorch on one GPU, as rows that ``distsim validate`` reads; needs torch.

``python experiments/measure_steps.py --out steps.csv`` trains each of :data:`STEPS` for some seconds, one
after the other, and writes a row for each: model, software, seconds of a step, and the peak of memory that
torch has allocated. Then ``distsim validate steps.csv``, or ``experiments/calibrate.py`` with it as one more
table. ``--trace FOLDER`` writes a trace of one step of each as well (torch's profiler), for ``distsim
calibrate``; ``--only`` takes those whose names begin so. Some ten minutes, of which compilers take five.

In ``experiments/measured/h200_steps.csv`` what was run more than once is the mean of its runs, which its
notes list. ``step_kernels.py`` makes a table of the traces.

A step is what people write: forward passes and backward passes of all microbatches, gradients summed where
they are, torch's fused AdamW, no clipping, tokens on the device already; or what torchtitan makes of it
(:mod:`sharded_training`; those of 8 bits need torchao). Seconds are those of steps that
follow each other without waiting, after some that do not count: the median of :data:`ROUNDS` runs.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import sharded_training
from step_models import EFFICIENT, Step, decoder, tables_of

ROUNDS, LONG_ENOUGH, WARM_UP = 3, 1.0, 3
COLUMNS = (
    *("id", "source", "source_url", "hw_gpu", "gpu_mem_gb", "n_gpus", "gpus_per_node", "model", "arch"),
    *("n_layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied_emb", "precision", "framework"),
    *("attention", "dp", "tp", "pp", "zero", "recompute", "micro_batch", "global_batch", "n_microbatches"),
    *("iter_time_s", "peak_mem_gb", "mem_kind", "outcome", "notes"),
)
SOURCE = "distsim experiments/measure_steps.py"


def _gpt(name: str, layers: int, hidden: int, heads: int, seq: int, batch: int, **how: Any) -> Step:
    return Step(name, "gpt", layers, hidden, heads, heads, 4 * hidden, 50304, seq, batch, **how)


def _llama(name: str, sizes: tuple[int, int, int, int, int], seq: int, batch: int, **how: Any) -> Step:
    return Step(name, "llama", *sizes, 128256, seq, batch, **how)


def _sharded(name: str, layers: int, sizes: tuple[int, int, int, int], **how: Any) -> Step:
    kinds = {"precision": "bf16", "recompute": "selective (per-op SAC)", "attention": "SDPA flash2"}
    return _llama(name, (layers, *sizes), 8192, 1, **{**kinds, **how}, compiled=True, sharded=True)


_1B, _3B = (16, 2048, 32, 8, 8192), (28, 3072, 24, 8, 8192)
_8B, _70B = (4096, 32, 8, 14336), (8192, 64, 8, 28672)
STEPS = (
    _gpt("gpt_124m_b1", 12, 768, 12, 1024, 1),
    _gpt("gpt_124m_b8", 12, 768, 12, 1024, 8),
    _gpt("gpt_124m_b32", 12, 768, 12, 1024, 32),
    _gpt("gpt_350m_b2_x8", 24, 1024, 16, 1024, 2, n_microbatches=8),
    _gpt("gpt_350m_b16", 24, 1024, 16, 1024, 16),
    _gpt("gpt_1.3b_b4", 24, 2048, 16, 2048, 4),
    _gpt("gpt_1.3b_b8_full", 24, 2048, 16, 2048, 8, recompute="full"),
    _gpt("gpt_1.3b_b2_math", 24, 2048, 16, 2048, 2, attention="math"),
    _gpt("gpt_2.7b_b2", 32, 2560, 32, 2048, 2),
    _gpt("gpt_2.7b_b4_pure_x4", 32, 2560, 32, 2048, 4, precision="bf16 pure", n_microbatches=4),
    _gpt("gpt_350m_b8_tf32", 24, 1024, 16, 1024, 8, precision="tf32", attention=EFFICIENT),
    _gpt("gpt_350m_b4_fp32", 24, 1024, 16, 1024, 4, precision="fp32", attention=EFFICIENT),
    _llama("llama_1b_s2048_b4", _1B, 2048, 4),
    _llama("llama_1b_s8192_b1_pure", _1B, 8192, 1, precision="bf16 pure"),
    _llama("llama_1b_s32768_b1_full", _1B, 32768, 1, precision="bf16 pure", recompute="full"),
    _llama("llama_1b_s512_b1_x4", _1B, 512, 1, n_microbatches=4),
    _llama("llama_3b_s4096_b1", _3B, 4096, 1),
    _llama("llama_3b_s4096_b2_pure", _3B, 4096, 2, precision="bf16 pure"),
    _llama("llama_3b_s8192_b2_full", _3B, 8192, 2, precision="bf16 pure", recompute="full"),
    _gpt("gpt_124m_b32_compiled", 12, 768, 12, 1024, 32, compiled=True),
    _gpt("gpt_1.3b_b4_compiled", 24, 2048, 16, 2048, 4, compiled=True),
    _llama("llama_1b_s8192_b1_compiled", _1B, 8192, 1, precision="bf16 pure", compiled=True),
    _llama("llama_1b_s512_b1_compiled", _1B, 512, 1, precision="bf16 pure", compiled=True),
    _llama("llama_3b_s4096_b2_compiled", _3B, 4096, 2, precision="bf16 pure", compiled=True),
    _sharded("titan_8b_8_layers", 8, _8B),
    _sharded("titan_8b_8_layers_fp8_rowwise", 8, _8B, precision="fp8 rowwise"),
    _sharded("titan_8b_8_layers_fp8_tensorwise", 8, _8B, precision="fp8 tensorwise"),
    _sharded("titan_8b_4_layers_full", 4, _8B, recompute="full"),
    _sharded("titan_8b_4_layers_full_fp8_rowwise", 4, _8B, recompute="full", precision="fp8 rowwise"),
    _sharded("titan_70b_1_layer", 1, _70B),
    _sharded("titan_70b_1_layer_fp8_rowwise", 1, _70B, precision="fp8 rowwise"),
)
"""From steps whose host takes longer than their device to steps of long sequences."""


# --- the steps --------------------------------------------------------------------------------------------


class Training:
    """A step that can be run: a model, its optimizer and its tokens on a device."""

    def __init__(self, torch: Any, step: Step, device: str) -> None:
        self.torch, self.step, self.device = torch, step, device
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = step.precision == "tf32"
        self.narrow = torch.bfloat16 if "bf16" in step.precision else torch.float32
        dtype = torch.bfloat16 if step.precision == "bf16 pure" else torch.float32
        with torch.device(device):
            self.model = decoder(torch, step).to(dtype)
            self.tokens = torch.randint(0, step.vocab, (2, step.n_microbatches, step.micro_batch, step.seq))
        self.tables = tables_of(torch, step, device, self.narrow)
        if step.sharded:
            sharded_training.join_alone(device)
            self.run_model = sharded_training.wrapped(torch, self.model, step)
        else:
            self.run_model = torch.compile(self.model) if step.compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")

    def __call__(self) -> None:
        """Issue one step."""
        for tokens, labels in zip(*self.tokens, strict=True):
            with self._autocast():
                loss = self.run_model(tokens, labels, self.tables)
            (loss / self.step.n_microbatches if self.step.n_microbatches > 1 else loss).backward()
        if self.step.sharded:
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> Any:
        if self.step.precision != "amp bf16":
            return nullcontext()
        return self.torch.autocast(self.device, self.torch.bfloat16)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def seconds(self) -> float:
        """Return the seconds of a step among others."""

        def elapsed(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                self()
            self.synchronize()
            return (time.perf_counter() - start) / count

        elapsed(WARM_UP)
        once = elapsed(1)
        count = max(2, min(50, round(LONG_ENOUGH / once)))
        return median([elapsed(count) for _ in range(ROUNDS)])

    def trace(self, path: Path) -> None:
        """Write what torch's profiler says of one step."""
        profiler = self.torch.profiler
        kinds = [profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            kinds.append(profiler.ProfilerActivity.CUDA)
        with profiler.profile(activities=kinds, record_shapes=True) as found:
            self()
            self.synchronize()
        found.export_chrome_trace(str(path))


def measured(torch: Any, step: Step, device: str, trace: Path | None) -> dict[str, object]:
    """Return the row of a step; one that does not fit, or fails, has no seconds, and says so."""
    row: dict[str, object] = row_of(step)
    gpu = device == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        training = Training(torch, step, device)
        row["iter_time_s"], row["outcome"] = f"{training.seconds():.6g}", "ok"
        if gpu:
            row["peak_mem_gb"] = f"{torch.cuda.max_memory_allocated() / 2**30:.6g}"
            row["notes"] = f"{row['notes']}; reserved {torch.cuda.max_memory_reserved() / 2**30:.4g} GiB"
        if trace is not None:
            training.trace(trace / f"{step.name}.json.gz")
    except torch.OutOfMemoryError:
        row["outcome"] = "oom"
    except (ImportError, RuntimeError) as error:  # no torchao; a GPU without products of 8 bits
        row["outcome"], row["notes"] = "failed", f"{row['notes']}; {str(error).strip().splitlines()[0][:200]}"
    finally:
        training = None
        torch.compiler.reset()
    return row


def row_of(step: Step) -> dict[str, object]:
    """Return what a row says of a step before it is measured, but for the machine."""
    sizes = {name: value for name, value in asdict(step).items() if name in COLUMNS}
    return {
        **sizes,
        "id": step.name,
        "source": SOURCE,
        "source_url": "experiments/measure_steps.py",
        **dict.fromkeys(("n_gpus", "gpus_per_node", "dp", "tp", "pp"), 1),
        "zero": 3 if step.sharded else 0,
        "model": step.name,
        "tied_emb": "yes" if step.arch == "gpt" else "no",
        "global_batch": step.micro_batch * step.n_microbatches,
        "mem_kind": "GiB allocated",
        "notes": "torch.compile" if step.compiled else "eager",
    }


def write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    """Write the table, row by row, so that what was timed is kept if it is stopped."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            file.flush()
            print(
                ", ".join(
                    f"{name}={row.get(name, '')}" for name in ("id", "outcome", "iter_time_s", "peak_mem_gb")
                )
            )
            sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 2 without torch or a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("steps.csv"), metavar="CSV")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace of a step of each")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="those that begin so")
    parser.add_argument(
        "--attention", choices=("cuDNN", "flash2"), default="cuDNN", help="its kernel for 16 bits"
    )
    given = parser.parse_args(arguments)
    try:
        torch = import_module("torch")
        import_module("torch.utils.checkpoint")
        import_module("torch.nn.attention")
    except ImportError:
        print(
            "torch is not installed; run this where models are trained (pip install torch)", file=sys.stderr
        )
        return 2
    if not torch.cuda.is_available():
        print("torch finds no GPU; run this on a machine with one", file=sys.stderr)
        return 2
    machine = {
        "hw_gpu": torch.cuda.get_device_name(),
        "gpu_mem_gb": round(torch.cuda.get_device_properties(0).total_memory / 1e9),
    }

    def framework(step: Step) -> str:
        loop = "torchtitan's step, " if step.sharded else ""
        return f"{loop}PyTorch {torch.__version__} {time.strftime('%Y-%m-%d')}"

    if given.trace is not None:
        given.trace.mkdir(parents=True, exist_ok=True)
    chosen = [
        replace(step, attention=f"SDPA {given.attention}") if step.attention == "SDPA cuDNN" else step
        for step in STEPS
        if step.name.startswith(tuple(given.only))
    ]
    write(
        given.out,
        (
            {**measured(torch, step, "cuda", given.trace), **machine, "framework": framework(step)}
            for step in chosen
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
