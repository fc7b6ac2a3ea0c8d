"""The plan of a row: each field of a plan from the columns that say it.

A field that a plan does not have is the missing feature where it changes what runs where, and left out, with
a word, where it changes when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from distsim.errors import PlanError
from distsim.plan import Plan
from distsim.plan.stacks import Stack
from distsim.schedule import SCHEDULES
from distsim.truth.row import (
    MissingFeatureError,
    Row,
    cell,
    number,
    plain,
    says_zero,
    without_remark,
    zero_of,
)
from distsim.truth.software import eight_bits
from distsim.truth.stage_layers import StageSizes, stages_of

TIMING = ("overlap_grads", "overlap_params", "tp_overlap", "bucket")
"""Fields that change when something runs, not what or where."""

SCHEDULE_NAMES = (
    (r"none|1f1b|pipedream-flush|one-f-one-b|dapple", "1f1b"),
    (r"1f1b with layer redistribution|1f1b redistributed", "1f1b"),
    (r"interleaved[- ]?(1f1b)?|1f1b[- ](i|interleaved|vpp)|vpp|virtual pipeline", "interleaved"),
    (r"gpipe|afab|all-forward-all-backward|f-then-b", "gpipe"),
    (r"looped[- ]bfs|breadth[- ]first( pipeline)?", "looped_bfs"),
    (r"(zero[- ]bubble )?zb-?h1", "zb_h1"),
    (r"(zero[- ]bubble )?zb-?h2", "zb_h2"),
    (r"(zero[- ]bubble )?zb-?1p", "zb_auto:1"),
    (r"(zero[- ]bubble )?zb-?2p", "zb_auto:2"),
    (r"interleaved[- ]zero[- ]bubble|interleaved[- ]zb", "interleaved_zb"),
    (r"(zero[- ]bubble )?zb-?v", "zb_v"),
    (r"v-half", "v_half"),
    (r"v-min", "v_min"),
    (r"dual-?pipe-?v|cut-in-half", "dualpipe_v"),
    (r"dual-?pipe", "dualpipe"),
)
"""Schedules by how papers and tables write them, remarks left out."""

COMBINED = r"\b1f1b (a2a|all-?to-?all)[- ]overlap(ped)?|overlap-moe-expert-parallel-comm"
"""What a column of overlap says of pipelines whose tokens travel beside the other pass's computation."""

_NOT_COMBINED = (
    rf"\b(no|not|without|w/o|non)[- ]+(a |any |the |-+)*({COMBINED})|({COMBINED})[ :=]*(off|false|no|0)\b"
)

POST_VALIDATION = r"zero-bubble"
"""Frameworks whose updates wait for no other stage under zero-bubble schedules: the fork of Megatron-LM by
their authors, whose README (3a91d0c8) has ``--enable-optimizer-post-validation`` among the "quick settings to
enable Zero Bubble"."""

EARLY_CHECKPOINT = ("torch", "torchtitan", "composer", "plain", "maxtext", "paxml")
"""Stacks whose checkpoints are torch.utils.checkpoint without reentrance, or jax.checkpoint: a block
recomputed is left as soon as backward has all it needs, or what it does not need is not compiled."""

CONTEXT = (
    (r"a2a|ulysses|all-?to-?all", "ulysses"),
    (r"all-?gather", "allgather"),
    (r"ring|p2p|zigzag", "ring"),
)
"""Kinds of context parallelism, by how they are written."""

CONTEXT_DEFAULTS = {"torchtitan": "allgather", "deepspeed": "ulysses"}
"""Of stacks where a row does not say (torchtitan: context_parallel_rotate_method; DeepSpeed: Ulysses); of the
others, as Megatron-LM's cp_comm_type p2p, it is a ring."""


@dataclass(frozen=True)
class Layout:
    """The plan of a row, and what its columns say that no plan says."""

    plan: Plan
    left_out: tuple[str, ...]


def layout_of(row: Row, stack: Stack, assumed: list[str]) -> Layout:
    """Return the layout of a row; append what no column says to ``assumed``.

    Raises :class:`MissingFeatureError` for what a plan does not have, and for numbers that contradict.
    """
    degrees = _degrees(row)
    schedule, chunks = _schedule(row, degrees["pp"], assumed)
    layers = number(row, "n_layers")
    stages = degrees["pp"] * chunks
    spread = degrees["dp"] * degrees["cp"] > 1
    zero = zero_of(row, stack.zero if spread else 0)
    items: dict[str, str | int] = {
        **{axis: size for axis, size in degrees.items() if size > 1 or axis in ("dp", "tp", "pp")},
        **{"microbatches": _microbatches(row, degrees["dp"]), "schedule": schedule, "chunks": chunks},
        "remat": _remat(row, stack, layers // stages, assumed),
        **({"stages": _stages(row, stack, stages, assumed)} if degrees["pp"] > 1 else {}),
        **_validation(row, schedule, assumed),
        **_context(row, stack, degrees["cp"]),
        **_sharding(row, zero, assumed),
        **_sequence(row, stack, degrees["tp"]),
        **_experts(row, degrees, assumed),
    }
    said = _overlap(row, spread, spread and zero in (1, 2))
    usual = stack.spread_fields(zero) if spread else {}
    if degrees["tp"] > 1:
        usual["tp_overlap"] = stack.tp_overlap
    else:
        said = {name: value for name, value in said.items() if not name.startswith("tp_")}
    return _planned({**usual, **items, **said})


def _planned(items: Mapping[str, str | int]) -> Layout:
    """Return the plan of some fields, without those of time that no plan has."""
    left_out: list[str] = []
    known = {field.name for field in fields(Plan)}
    for name in [name for name in items if name not in known]:
        if name not in TIMING:
            raise MissingFeatureError(
                f"{name}={items[name]} in a plan" if name == "cp_kind" else f"{name} > 1"
            )
        left_out.append(f"{name}={items[name]}")
    text = ",".join(f"{name}={value}" for name, value in items.items() if name in known)
    try:
        return Layout(Plan.parse(text), tuple(left_out))
    except PlanError as error:
        raise MissingFeatureError(str(error)) from None


# --- degrees and batch ------------------------------------------------------------------------------------


def _degrees(row: Row) -> dict[str, int]:
    """Return the degrees of the axes; dp, if it is not given, is what the others leave of the devices."""
    tp, pp, cp, ep = (number(row, axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    count = number(row, "n_gpus", 0)
    replica = tp * pp * cp
    if not replica:
        raise MissingFeatureError(f"degrees of at least 1, not tp={tp}, pp={pp}, cp={cp}")
    dp = number(row, "dp", count // replica if count % replica == 0 else 0)
    if count and dp * replica != count:
        given = f"tp={tp} pp={pp} cp={cp}"
        raise MissingFeatureError(
            f"degrees that agree with the devices: dp={dp} {given} are {dp * replica}, and n_gpus={count}"
            if cell(row, "dp")
            else f"degrees that agree with the devices: {given} are {replica}, which does not divide "
            f"n_gpus={count}"
        )
    return {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}


def global_batch(row: Row) -> int:
    """Return the sequences of a step, over all replicas; those of microbatches if no column says."""
    dp = _degrees(row)["dp"]
    if cell(row, "global_batch") or not cell(row, "n_microbatches"):
        return number(row, "global_batch")
    return dp * number(row, "micro_batch") * number(row, "n_microbatches")


def _microbatches(row: Row, dp: int) -> int:
    """Return the microbatches of a replica and step."""
    batch = global_batch(row)
    size = number(row, "micro_batch", 0)
    if not size:
        if not cell(row, "n_microbatches"):
            raise MissingFeatureError(
                "a number in column micro_batch, or in n_microbatches, beside global_batch"
            )
        return number(row, "n_microbatches")
    count, rest = divmod(batch, dp * size) if dp else (0, 1)
    if rest or not count:
        raise MissingFeatureError(
            f"whole microbatches: global_batch={batch} is no multiple of dp={dp} times micro_batch={size}"
        )
    return count


# --- pipeline ----------------------------------------------------------------------------------------------


def _schedule(row: Row, pp: int, assumed: list[str]) -> tuple[str, int]:
    """Return the name of the schedule and the stages of a rank."""
    written = without_remark(plain(row, "schedule"))
    if not written and pp > 1:
        assumed.append("schedule 1f1b")
    name = next((name for pattern, name in SCHEDULE_NAMES if re.fullmatch(pattern, written or "none")), None)
    if name is None or (pp > 1 and written == "none"):
        raise MissingFeatureError(f"the schedule {written!r:.60}" + (f" of pp={pp}" if name else ""))
    chunks = max(number(row, "vpp", 1), 1)  # none is written as 0, too
    text = plain(row, "overlap")
    combined = bool(re.search(COMBINED, text)) and not re.search(_NOT_COMBINED, text)
    if pp == 1:
        return "combined_1f1b" if combined else "1f1b", 1
    if name == "1f1b" and chunks > 1:
        name = "interleaved"
    if combined and (name != "interleaved" or chunks == 1):
        raise MissingFeatureError(f"exchanges beside the other pass with {name} and {chunks} stages a rank")
    if combined:
        name = "combined_1f1b"
    takes = SCHEDULES[name.partition(":")[0]].stages_a_rank
    if takes is None and chunks == 1:
        raise MissingFeatureError(f"the stages of a rank (column vpp), of the schedule {written!r:.60}")
    return name, chunks if takes is None else takes


def _validation(row: Row, schedule: str, assumed: list[str]) -> dict[str, str]:
    if not (schedule.startswith("zb") and re.search(POST_VALIDATION, plain(row, "framework"))):
        return {}
    assumed.append("post_validation on")
    return {"post_validation": "on"}


def _stages(row: Row, stack: Stack, stages: int, assumed: list[str]) -> str:
    text = f"{plain(row, 'schedule')} {plain(row, 'notes')}"
    return stages_of(StageSizes.of(row, stages, stack.family == "nanotron"), text, assumed)


# --- what is kept, divided, and when it travels -------------------------------------------------------------


JAX_NAMES = {
    "qkv-proj": ("qkv_proj",),
    "out-proj": ("out_proj",),
    "context": ("context",),
    "qkv-out-proj": ("qkv_proj", "out_proj"),
    "dot-except-mlp": ("qkv_proj", "out_proj"),
    "dot-except-mlpwi": ("qkv_proj", "out_proj", "mlpwo"),
    "dot-with-context-except-mlp": ("qkv_proj", "context", "out_proj"),
    **dict.fromkeys(("encoded-and-out-proj", "context-and-out-proj"), ("context", "out_proj")),
}
"""What MaxText's remat_policy (layers/decoders.py, ``get_remat_policy``) and Praxis' AutodiffCheckpointType
(layers/checkpoint_policy.py) save by names."""


def _remat(row: Row, stack: Stack, layers_a_stage: int, assumed: list[str]) -> str:
    text = plain(row, "recompute")
    early = "_early" if stack.family in EARLY_CHECKPOINT else ""
    count = re.search(r"\b(block|uniform)\b[^0-9]*([0-9]{1,4})|\b([0-9]{1,4}) layers?\b", text)
    every = re.search(r"every ?([0-9]{1,3})|\bselective ?\(?([0-9]{1,3})\)?$", text)
    share = re.search(r"(ratio|share)[ =]*(0?\.[0-9]{1,6})|\b([0-9]{1,2})( ?%)", text)
    if not text:
        assumed.append(f"recompute {stack.remat}")
        return stack.remat
    if re.match(r"(none|no|off|false|0)\b", text):
        return "none"
    if re.match(r"(yes|on|true|1)\b", text):
        return f"full{early}"
    if share and re.match(r"full|block|ratio|selective|[0-9]", text):
        layers = round(layers_a_stage * (float(share[2]) if share[2] else float(share[3]) / 100))
        return f"block:{layers}" if layers else "none"
    if re.match(r"(full|block|uniform)\b", text):
        kind, layers = (count[1] or "uniform", int(count[2] or count[3])) if count else ("uniform", 1)
        return f"full{early}" if kind == "uniform" and layers == 1 else f"{kind}:{layers}"
    if every:
        return f"every{early}:{every[1] or every[2]}"
    named = re.search(rf"\bsave-({'|'.join(JAX_NAMES)})(?![\w-])", text)
    if named:
        return f"names:{'+'.join(JAX_NAMES[named[1]])}"
    if re.search(r"save-dot(-only|-with-no-batch)|\bminimal\b", text):  # XLA's names: products of weights
        saved = "ops:MatMul+Gemm" + "+Float8MatMul" * eight_bits(row)
        return f"{saved}+Attention" if re.search(r"attention|context", text) else saved
    if re.match(r"(selective|sac|attention|core)", text):
        parts = _modules(text)
        if parts:
            return f"parts:{'+'.join(parts)}"
        if re.search(r"per-op|\bop\b|matmul", text):
            # torchtitan, _save_list: attention, what tp ranks scatter, and aten.mm, of which each second. Of
            # 8 bits too: a mode of dispatch sees aten.mm of Float8Tensor before it becomes aten._scaled_mm.
            saved = "Float8MatMul/2+MatMul/2+Attention" if eight_bits(row) else "MatMul/2+Attention"
            return f"ops:{saved}+MPIReduceScatter" if number(row, "tp", 1) > 1 else f"ops:{saved}"
        if re.search(r"attention|core", text) or stack.family == "megatron":
            return "attention"
    raise MissingFeatureError(
        f"recompute {text!r:.60}; of {stack.name} one of none, full, block:N, uniform:N, every N, a share as "
        "50%, selective with what it recomputes (attention, op, modules), or save- and a name of JAX's"
    )


def _context(row: Row, stack: Stack, cp: int) -> dict[str, str | int]:
    if cp == 1:
        return {}
    # Clause by clause: a note has more to say than this.
    columns = (column for name in ("cp_kind", "attention", "overlap") for column in [plain(row, name)])
    clauses = [c for c in plain(row, "notes").split(";") if re.search(r"\bcp\b|context", c)]
    for text in (*columns, *clauses):
        kind = next((kind for pattern, kind in CONTEXT if re.search(pattern, text)), None)
        if kind and (re.search(r"\bcp\b|context|ulysses|ring", text) or text == plain(row, "cp_kind")):
            return {"cp_kind": stack.contexts.get(kind, kind)}
    kind = CONTEXT_DEFAULTS.get(stack.family, "ring")
    return {"cp_kind": stack.contexts.get(kind, kind)}


def _sharding(row: Row, zero: int, assumed: list[str]) -> dict[str, str | int]:
    """Return how state, gradients and parameters are divided over data-parallel ranks."""
    sharding = plain(row, "fsdp")
    if zero and not says_zero(row):
        assumed.append(f"zero={zero}, parameters divided over all ranks")
    found: dict[str, str | int] = {"zero": zero} if zero else {}
    if zero == 3 and "shard-grad-op" in sharding:
        found["reshard"] = "never"
    for text in (sharding, *plain(row, "notes").split(";")) if zero else ():
        ranks = re.search(
            r"(hsdp|hybrid-shard|zero-?[123]?) ?(?:sharded )?"
            r"(size|over|across|within|group of|[=:(])+ ?([0-9]{1,6})\b",
            text,
        )
        if ranks or re.search(r"hybrid|hsdp", text if text is sharding else ""):
            return {**found, "zero_ranks": int(ranks[3]) if ranks else number(row, "gpus_per_node")}
    return found


def _sequence(row: Row, stack: Stack, tp: int) -> dict[str, str | int]:
    text = plain(row, "sp")
    if tp == 1:
        return {}
    if not text:
        return {} if stack.sp == "off" else {"sp": stack.sp}
    if not re.match(r"(yes|on|true|1|no|off|false|0)\b", text):
        raise MissingFeatureError(f"sp {text!r:.60}")
    return {"sp": stack.sp if stack.sp != "off" else "on"} if re.match(r"(yes|on|true|1)\b", text) else {}


def _experts(row: Row, degrees: Mapping[str, int], assumed: list[str]) -> dict[str, int]:
    """Return over how many ranks of tp an expert is divided: all, unless dp and cp are too few for ep."""
    tp, ep = degrees["tp"], degrees["ep"]
    if cell(row, "etp"):
        return {"etp": number(row, "etp")}
    if degrees["dp"] * degrees["cp"] % ep and degrees["dp"] * degrees["cp"] * tp % ep == 0:
        assumed.append("etp 1")
        return {"etp": 1}
    return {}


MODULES = (
    (r"(layer-?|rms-?)?norms?", "norms"),
    (r"activations?|moe-?act", "activations"),
    (r"(mla[- ])?up-?proj(ections?)?", "up_projections"),
    (r"(core-?)?att(entio)?n", "attention"),
)
"""The modules of Megatron-LM's --recompute-modules, as parts of a layer."""


def _modules(text: str) -> list[str]:
    """Return the parts of a layer that a list in brackets names, but for attention alone.

    Raises :class:`MissingFeatureError` for a list of which some are such modules, and some are not.
    """
    listed = re.search(r"\(([^()]*)\)", text)
    items = [item.strip() for item in re.split(r",|\+|\band\b", listed[1])] if listed else []
    found = [next((name for pattern, name in MODULES if re.fullmatch(pattern, item)), None) for item in items]
    named = [name for name in found if name is not None]
    if not named or set(named) == {"attention"}:
        return []
    if len(named) < len(items):
        raise MissingFeatureError(f"recompute {items[found.index(None)]!r:.60} beside {named[0]}")
    return named


_SUBJECTS = (
    (r"\btp\b|tensor|async-?tp|wgrad|user-?buffer", "tp_overlap"),
    (r"param|fsdp prefetch|gathers?\b", "overlap_params"),
    (r"grad|\bddp\b|\bdp\b|reduce-scatter", "overlap_grads"),
)


def _overlap(row: Row, grads: bool, params: bool) -> dict[str, str | int]:
    """Return what the column of overlap says of gradients and parameters, where these travel at all.

    Parameters that ZeRO-3 gathers where they are used are none that travel besides.
    """
    found: dict[str, str | int] = {}
    for clause in re.split(r"[;,]", plain(row, "overlap")):
        off = re.search(r"\b(not|no|off|without|disabled|none)\b", clause)
        on = re.search(r"overlap|prefetch|async|user-?buffer", clause)
        if "not stated" in clause or not (on or off):
            continue
        for name in [name for pattern, name in _SUBJECTS if re.search(pattern, clause)]:
            if name == "tp_overlap":
                # Transformer Engine's and torch's split products, too.
                parts = re.search(r"async|user-?buffer|\btp[- ]comm[- ]overlap", clause)
                found[name] = "off" if off else "split" if parts else "on"
                break
            if grads if name == "overlap_grads" else params:
                found[name] = "off" if off else "on"
    return found
