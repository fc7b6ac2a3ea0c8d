"""A row of published measurements as what distsim takes: model, plan, precision, software, cluster.

A row is translated by its columns alone (those of ``measured/validate.csv``), never by who published it or by
what was measured; what a column leaves open has the default of the software that the row names. What
distsim cannot lay out is refused by the name of the missing feature.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distsim.errors import PlanError
from distsim.hardware import load_cluster
from distsim.ir import Float8E4M3FN, Function, Topology
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import GPT_NAMES, DecoderSizes, DropoutRates, Positions
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm
from distsim.plan import Plan
from distsim.stacks import STACKS, Stack
from distsim.transforms import add_loss, differentiate, optimizer_named
from distsim.transforms.autodiff.precision import POLICIES, Precision

Row = Mapping[str, str]


class MissingFeature(Exception):
    """A row needs a layout, model or figure that distsim or the row does not have; the text says which."""


GPUS = {
    "A100-SXM4-80GB": "dgx-a100",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "V100": "dgx-2",
}
"""The preset for a GPU whose column begins so."""

FRAMEWORKS = (
    ("torchtitan", "torchtitan", None),
    ("nanotron", "nanotron", None),
    ("DeepSpeed", "deepspeed", None),
    ("Composer", "torchtitan", None),  # FSDP of torch, block by block; the model's own checkpointing
    ("Parax", "plain", "compiled"),  # XLA
    ("Megatron", "megatron", None),
)
"""The stack of a framework whose column has the first text, and kernels where they are not the stack's."""

SCHEDULES = (
    (r"none|1f1b", "1f1b"),
    (r"1f1b, \d+ layers/stage \+ embedding on first and LM head on last stage.*", "1f1b"),
    (r"interleaved-1f1b", "interleaved"),
    (r"zero-bubble ZB-1p \(auto-scheduled, mem limit p\)", "zb_auto:1"),
    (r"zero-bubble ZB-2p \(auto-scheduled, mem limit 2p\)", "zb_auto:2"),
)
"""Schedules by what their column says."""

RECOMPUTED = (
    (r"none.*", "none"),
    (r"full.*", "full"),
    (r"selective\(attention.*|selective \(attention.*", "attention"),
    # torchtitan, _op_sac_save_list: aten.mm and attention, of 8-bit products (_scaled_mm) none. That it saves
    # every second product only is left out.
    (r"selective \(per-op SAC\)", "ops:MatMul+Attention"),
)
"""What is recomputed, by what the column says; full stops early in frameworks that use torch's checkpoint."""

VOCAB = 50257
"""Of a GPT whose row gives none: GPT-2's, padded as Megatron-LM pads it."""

PADDED_TO = 128
"""Megatron-LM's --make-vocab-size-divisible-by, times tp."""

MEGATRON_DROPOUT = DropoutRates(0.1, 0.1, 0.1)
"""Defaults of --hidden-dropout and --attention-dropout (megatron/training/arguments.py)."""


@dataclass(frozen=True)
class Case:
    """A row as what distsim takes. ``assumed`` says what no column does."""

    sizes: DecoderSizes
    seq: int
    batch: int
    plan: Plan
    precision: Precision
    attention: str
    kernels: str
    stack: Stack
    gpu: str
    assumed: tuple[str, ...]

    def joint(self) -> Function:
        """Return the training step of the model, with the stack's optimizer and clipping."""
        model = decoder(self.sizes, self.batch, self.seq, attention=self.attention)
        optimizer = optimizer_named(self.stack.optimizer)
        return differentiate(add_loss(model, "auto"), optimizer, (), self.precision, self.stack.clip)

    def topology(self) -> Topology:
        """Return a cluster of the GPUs of the row that is large enough for the plan."""
        single = len(load_cluster(self.gpu).devices)
        return load_cluster(f"{self.gpu}:{-(-self.plan.devices // single)}")


def read_rows(paths: Sequence[Path]) -> list[dict[str, str]]:
    """Return the rows of tables; ``table`` is the name of the one that a row is from."""
    found: list[dict[str, str]] = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            found += [{**row, "table": path.stem} for row in csv.DictReader(file)]
    return found


def case_of(row: Row) -> Case:
    """Return what a row ran.

    Raises :class:`MissingFeature` for what distsim does not lay out, build or cost, and where the row leaves
    out what has no default.
    """
    assumed: list[str] = []
    stack, kernels = _software(row)
    plan = _plan(row, stack)
    attention = _attention(row, stack, assumed)
    if "torch.compile" in row["notes"]:
        kernels = "compiled"
    sizes = _sizes(row, stack, plan, assumed)
    gpu = next((preset for name, preset in GPUS.items() if row["hw_gpu"].startswith(name)), None)
    if gpu is None:
        raise MissingFeature(f"a preset for {row['hw_gpu']}")
    precision = _precision(row, stack, plan)
    batch = _number(row, "global_batch")
    return Case(
        sizes, _number(row, "seq"), batch, plan, precision, attention, kernels, stack, gpu, tuple(assumed)
    )


# --- columns --------------------------------------------------------------------------------------------


def _number(row: Row, column: str, default: int | None = None) -> int:
    """Return the whole number in a column, which may have a ? behind it for one that was inferred."""
    text = row[column].rstrip("?")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"[0-9]+(\.0)?", text):
        raise MissingFeature(f"a number in column {column}, not {row[column]!r}")
    return int(float(text))


def _software(row: Row) -> tuple[Stack, str]:
    """Return the stack of a row, and its kernels."""
    for name, stack, kernels in FRAMEWORKS:
        if name.lower() in row["framework"].lower():
            # Megatron-LM in fp16 without flash attention is that of 2021.
            old = stack == "megatron" and "bf16" not in row["precision"] and not _says_flash(row)
            found = STACKS["megatron_2021" if old else stack]
            return found, kernels or found.kernels
    raise MissingFeature(f"a stack for {row['framework']}")


def _says_flash(row: Row) -> bool:
    return "flash" in row["attention"] and "no flash" not in row["attention"]


def _attention(row: Row, stack: Stack, assumed: list[str]) -> str:
    if row["attention"]:
        return "flash" if _says_flash(row) else "math"
    found = stack.attention or "math"
    assumed.append(f"attention {found}")
    return found


def _by_text(table: Sequence[tuple[str, str]], text: str, what: str) -> str:
    for pattern, found in table:
        if re.fullmatch(pattern, text):
            return found
    raise MissingFeature(f"{what} {text!r}")


def _plan(row: Row, stack: Stack) -> Plan:
    """Return the plan of a row. Raises :class:`MissingFeature` for one that distsim does not have."""
    dp, zero = _number(row, "dp"), _number(row, "zero", 0)
    for axis in ("cp", "ep"):
        if _number(row, axis, 1) > 1:
            raise MissingFeature(f"{axis} > 1")
    microbatches = _number(row, "global_batch") // (dp * _number(row, "micro_batch"))
    schedule = _by_text(SCHEDULES, row["schedule"].rstrip("?"), "the schedule")
    tp, pp, chunks = _number(row, "tp"), _number(row, "pp"), _number(row, "vpp", 1)
    remat = _by_text(RECOMPUTED, row["recompute"].rstrip("?"), "recompute")
    if remat == "full" and stack.name in ("torchtitan", "plain"):
        remat = "full_early"  # torch.utils.checkpoint without reentrance
    items = {
        **{"dp": dp, "tp": tp, "pp": pp, "microbatches": microbatches},
        **{"schedule": schedule, "chunks": chunks, "remat": remat},
        **({"stages": _stages(_number(row, "n_layers"), pp * chunks)} if pp > 1 else {}),
        **({"zero": zero} if zero else {}),
        **({"sp": "on"} if tp > 1 and row["sp"].startswith("yes") else {}),
    }
    try:
        return Plan.parse(",".join(f"{name}={value}" for name, value in items.items()))
    except PlanError as error:
        raise MissingFeature(str(error)) from None


def _stages(layers: int, stages: int) -> str:
    """Return how layers are cut: equally many; or the embedding and the head count as layers."""
    if layers % stages == 0:
        return "layers"
    if (layers + 2) % stages == 0:
        return "default"
    raise MissingFeature(f"the layers of each of {stages} stages, as {layers} layers do not divide")


def _precision(row: Row, stack: Stack, plan: Plan) -> Precision:
    text = row["precision"]
    if plan.zero == 3:
        policy = POLICIES["fsdp2"]
    elif "amp" in text:
        policy = POLICIES["amp"]
    elif "fp16" in text and "bf16" not in text:
        policy = POLICIES["mixed_fp16"]
    elif "fp32 grad" in text:
        policy = POLICIES["mixed"]
    else:
        policy = POLICIES[stack.precision or "mixed"]
    if text.startswith("fp8"):
        policy = replace(policy, name=f"{policy.name}_fp8", linear=Float8E4M3FN())
    return policy


# --- models ---------------------------------------------------------------------------------------------


def _sizes(row: Row, stack: Stack, plan: Plan, assumed: list[str]) -> DecoderSizes:
    """Return the sizes of the model of a row, by its architecture and numbers."""
    arch = row["arch"]
    if row["moe_experts"]:
        raise MissingFeature("experts in the columns of a row")
    heads = _number(row, "heads")
    kv_heads, ffn = _number(row, "kv_heads", heads), _number(row, "ffn")
    layers, hidden, vocab = (
        _number(row, "n_layers"),
        _number(row, "hidden"),
        _vocab(row, stack, plan, assumed),
    )
    if arch.startswith("gpt"):
        bias = "no bias" not in arch
        tied = row["tied_emb"] != "no"
        if not row["tied_emb"]:
            assumed.append("tied embeddings")
        megatron = stack.name.startswith("megatron")
        if megatron:
            assumed.append("dropout 0.1")
        return DecoderSizes(
            layers,
            hidden,
            vocab,
            GroupedHeads(heads, kv_heads, bias=bias, out_bias=bias),
            FeedForward(ffn, "gelu", gated=False, bias=bias),
            norm=Norm("layer"),
            positions=Positions(_number(row, "seq"), learned=True),
            dropout=MEGATRON_DROPOUT if megatron else DropoutRates(),
            tied=tied,
            names=GPT_NAMES,
        )
    if arch.startswith("llama"):
        return DecoderSizes(
            layers,
            hidden,
            vocab,
            GroupedHeads(heads, kv_heads),
            FeedForward(ffn),
            tied=row["tied_emb"] == "yes",
        )
    raise MissingFeature(f"the sizes of a {arch} in the columns of a row")


def _vocab(row: Row, stack: Stack, plan: Plan, assumed: list[str]) -> int:
    if not row["vocab"]:
        assumed.append(f"vocabulary {VOCAB}")
    vocab = _number(row, "vocab", VOCAB)
    if not stack.name.startswith("megatron"):
        return vocab
    multiple = PADDED_TO * plan.tp
    return -(-vocab // multiple) * multiple
