"""Time training steps of plain PyTorch on one GPU, as rows that ``distsim validate`` reads; needs torch.

``python experiments/measure_steps.py --out steps.csv`` trains each of :data:`STEPS` for some seconds, one
after the other, and writes a row for each: model, software, seconds of a step, and the peak of memory that
torch has allocated. Then ``distsim validate steps.csv``, or ``experiments/calibrate.py`` with it as one more
table. ``--trace FOLDER`` writes a trace of one step of each as well (torch's profiler), for ``distsim
calibrate``; ``--only`` takes those whose names begin so. Some five minutes, of which compilers take two.

In ``experiments/measured/h200_steps.csv`` what was run more than once is the mean of its runs, which its
notes list. ``step_kernels.py`` makes a table of the traces.

A step is what people write: forward passes and backward passes of all microbatches, gradients summed where
they are, torch's fused AdamW, no clipping, tokens on the device already. Seconds are those of steps that
follow each other without waiting, after some that do not count: the median of :data:`ROUNDS` runs.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS, LONG_ENOUGH, WARM_UP = 3, 1.0, 3
COLUMNS = (
    *("id", "source", "source_url", "hw_gpu", "gpu_mem_gb", "n_gpus", "gpus_per_node", "model", "arch"),
    *("n_layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied_emb", "precision", "framework"),
    *("attention", "dp", "tp", "pp", "zero", "recompute", "micro_batch", "global_batch", "n_microbatches"),
    *("iter_time_s", "peak_mem_gb", "mem_kind", "outcome", "notes"),
)
EFFICIENT = "memory-efficient"
"""The kernel of attention that torch has for float32."""
BACKENDS = {
    "SDPA cuDNN": "CUDNN_ATTENTION",
    "SDPA flash2": "FLASH_ATTENTION",
    EFFICIENT: "EFFICIENT_ATTENTION",
}
"""What scaled_dot_product_attention is held to, as torch calls it, by what a row says."""
SOURCE = "distsim experiments/measure_steps.py"


@dataclass(frozen=True)
class Step:
    """A training step: the sizes of a decoder, and how it is trained.

    ``precision``: ``amp bf16`` (parameters in float32), ``bf16 pure``, ``tf32`` or ``fp32``. ``recompute``:
    ``none`` or ``full``, of whole layers.
    """

    name: str
    arch: str
    n_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int
    n_microbatches: int = 1
    precision: str = "amp bf16"
    recompute: str = "none"
    compiled: bool = False
    attention: str = "SDPA cuDNN"


def _gpt(name: str, layers: int, hidden: int, heads: int, seq: int, batch: int, **how: Any) -> Step:
    return Step(name, "gpt", layers, hidden, heads, heads, 4 * hidden, 50304, seq, batch, **how)


def _llama(name: str, sizes: tuple[int, int, int, int, int], seq: int, batch: int, **how: Any) -> Step:
    return Step(name, "llama", *sizes, 128256, seq, batch, **how)


_1B, _3B = (16, 2048, 32, 8, 8192), (28, 3072, 24, 8, 8192)
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
)
"""From steps whose host takes longer than their device to steps of long sequences."""


# --- the models -------------------------------------------------------------------------------------------


def attention(torch: Any, step: Step, query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Return attention over heads [batch, heads, seq, size], by a kernel of its own or written out."""
    functional = torch.nn.functional
    if step.attention == "math":
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        return functional.softmax(scores + mask, dim=-1) @ value
    grouped, kernels = step.kv_heads != step.heads, torch.nn.attention
    with kernels.sdpa_kernel(getattr(kernels.SDPBackend, BACKENDS[step.attention])):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def norm(torch: Any, step: Step) -> Any:
    """Return a normalization of a model: LayerNorm of a GPT, RMSNorm of a Llama."""
    if step.arch == "gpt":
        return torch.nn.LayerNorm(step.hidden)
    return torch.nn.RMSNorm(step.hidden, eps=1e-5)


def layer(torch: Any, step: Step) -> Any:
    """Return a layer: attention, and a feed-forward, gated in a Llama."""
    nn, functional = torch.nn, torch.nn.functional
    size, groups, gpt = step.hidden // step.heads, step.kv_heads, step.arch == "gpt"

    def turned(x: Any, cosines: Any, sines: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return x * cosines + torch.cat((-second, first), dim=-1) * sines

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = norm(torch, step), norm(torch, step)
            self.query = nn.Linear(step.hidden, step.heads * size, bias=gpt)
            self.key = nn.Linear(step.hidden, groups * size, bias=gpt)
            self.value = nn.Linear(step.hidden, groups * size, bias=gpt)
            self.out = nn.Linear(step.heads * size, step.hidden, bias=gpt)
            self.up = nn.Linear(step.hidden, step.ffn, bias=gpt)
            self.gate = None if gpt else nn.Linear(step.hidden, step.ffn, bias=False)
            self.down = nn.Linear(step.ffn, step.hidden, bias=gpt)

        def forward(self, x: Any, tables: tuple[Any, ...]) -> Any:
            rows, seq, _ = x.shape
            inner = self.norm1(x)
            query, key, value = (
                each(inner).view(rows, seq, -1, size).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            )
            if not gpt:
                query, key = turned(query, *tables[:2]), turned(key, *tables[:2])
            found = attention(torch, step, query, key, value, tables[-1])
            x = x + self.out(found.transpose(1, 2).reshape(rows, seq, -1))
            inner = self.norm2(x)
            if self.gate is None:
                return x + self.down(functional.gelu(self.up(inner)))
            return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))

    return Layer()


def decoder(torch: Any, step: Step) -> Any:
    """Return a decoder-only transformer: a GPT with learned positions and biases, its embedding tied to the
    head, or a Llama with RMSNorm, rotary embeddings, a gated feed-forward and a head of its own."""
    nn, functional, gpt = torch.nn, torch.nn.functional, step.arch == "gpt"

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(step.vocab, step.hidden)
            self.positions = nn.Embedding(step.seq, step.hidden) if gpt else None
            self.layers = nn.ModuleList([layer(torch, step) for _ in range(step.n_layers)])
            self.norm = norm(torch, step)
            self.head = nn.Linear(step.hidden, step.vocab, bias=False)
            if gpt:
                self.head.weight = self.tokens.weight
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens: Any, labels: Any, tables: tuple[Any, ...]) -> Any:
            x = self.tokens(tokens)
            if self.positions is not None:
                x = x + self.positions.weight[: tokens.shape[1]]
            checkpoint = torch.utils.checkpoint.checkpoint
            for each in self.layers:
                again = step.recompute == "full"
                x = checkpoint(each, x, tables, use_reentrant=False) if again else each(x, tables)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.view(-1, step.vocab), labels.view(-1))

    return Decoder()


def tables_of(torch: Any, step: Step, device: str, dtype: Any) -> tuple[Any, ...]:
    """Return cosines and sines of rotary embeddings [seq, head size] of a Llama, and the mask of a step
    whose attention is written out [seq, seq], else None."""
    mask, size = None, step.hidden // step.heads
    if step.attention == "math":
        mask = torch.full((step.seq, step.seq), float("-inf"), device=device, dtype=dtype).triu(1)
    if step.arch == "gpt":
        return (mask,)
    frequencies = 5e5 ** (-torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.outer(torch.arange(step.seq, device=device).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype), mask


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
        self.run_model = torch.compile(self.model) if step.compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")

    def __call__(self) -> None:
        """Issue one step."""
        for tokens, labels in zip(*self.tokens, strict=True):
            with self._autocast():
                loss = self.run_model(tokens, labels, self.tables)
            (loss / self.step.n_microbatches if self.step.n_microbatches > 1 else loss).backward()
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
    """Return the row of a step; one that does not fit has no seconds, and says so."""
    row: dict[str, object] = row_of(step)
    gpu = device == "cuda"
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
        "zero": 0,
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
        "framework": f"PyTorch {torch.__version__} {time.strftime('%Y-%m-%d')}",
    }
    if given.trace is not None:
        given.trace.mkdir(parents=True, exist_ok=True)
    chosen = [
        replace(step, attention=f"SDPA {given.attention}") if step.attention.startswith("SDPA") else step
        for step in STEPS
        if step.name.startswith(tuple(given.only))
    ]
    write(given.out, ({**measured(torch, step, "cuda", given.trace), **machine} for step in chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
