"""The layout and the precision of Megatron-LM's arguments: fields of a plan, and the text of a policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from distsim.errors import ImportModelError, ModelLimitError
from distsim.importer.configs.tracked import TrackedFields
from distsim.importer.configs.training import PAIRED
from distsim.models.decoder_sizes import DecoderSizes

MAX_STAGES = 4096
"""Of a pipeline: more than any model has layers."""

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""--data-parallel-sharding-strategy, as stages of ZeRO."""

FP8_RECIPES = {
    "delayed": "delayed",
    "tensorwise": "tensorwise",
    "blockwise": "blockwise",
    "mxfp8": "blockwise",
}
"""How operands are scaled by each recipe of ``--fp8-recipe``: MXFP8's blocks are as others."""
STATE_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8e4m3fn"}
CP_KINDS = {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses"}

SELECTIVE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""--recompute-modules (core/transformer/transformer_config.py)."""

PART_OF = {
    **{"core_attn": "attention", "moe_act": "activations", "shared_experts": "activations"},
    **{"layernorm": "norms", "mla_up_proj": "up_projections"},
}
"""Of modules that are not all of a feed-forward, which part of a layer it is that runs again."""


@dataclass(frozen=True)
class MegatronLayout:
    """Fields of a plan, the text of a precision policy, and how many groups hold the optimizer's state."""

    fields: dict[str, str | int]
    precision: str
    copies: int

    @staticmethod
    def of(fields: TrackedFields, sizes: DecoderSizes, notes: list[str]) -> MegatronLayout:
        """Return the layout; append to ``notes`` what is not quite as the arguments say."""
        degrees = {
            "tp": fields.count("--tensor-model-parallel-size"),
            "pp": fields.count("--pipeline-model-parallel-size"),
            "cp": fields.count("--context-parallel-size"),
            "ep": fields.count("--expert-model-parallel-size"),
        }
        found: dict[str, str | int] = {name: size for name, size in degrees.items() if size > 1}
        etp = fields.maybe_count("--expert-tensor-parallel-size")
        if sizes.experts is None and degrees["ep"] > 1:
            raise fields.refusal("--expert-model-parallel-size", "1 without --num-experts")
        if sizes.experts is not None and etp is not None and etp != degrees["tp"]:
            found["etp"] = etp
        if fields.on("--sequence-parallel") or (sizes.experts is not None and degrees["tp"] > 1 and etp == 1):
            found["sp"] = "on"
        if fields.on("--tp-comm-overlap"):  # "only when sequence parallelism is enabled", says arguments.py
            if degrees["tp"] > 1 and "sp" not in found:
                raise fields.refusal("--tp-comm-overlap", "left out without --sequence-parallel")
            found["tp_overlap"] = "split"
        if fields.on("--use-tp-pp-dp-mapping"):
            found["order"] = "tp-cp-ep-pp-dp"
        if degrees["cp"] > 1:
            found["cp_kind"] = _context(fields)
        found |= _pipeline(fields, sizes, degrees["pp"])
        found["remat"] = _recompute(fields, notes)
        found |= _offload(fields, sizes.layers, degrees["pp"])
        zero = _sharding(fields)
        found |= _data(fields, zero)
        copies = fields.count("--num-distributed-optimizer-instances") if zero else 1
        return MegatronLayout(found, _precision(fields, zero), copies)


def _context(fields: TrackedFields) -> str:
    kinds = list(dict.fromkeys(fields.words("--cp-comm-type")))
    sizes = [int(word) for word in fields.words("--hierarchical-context-parallel-sizes") if word.isdigit()]
    if kinds == ["a2a+p2p"] and sizes:
        return f"usp:{sizes[0]}"
    if len(kinds) != 1 or kinds[0] not in CP_KINDS:
        raise fields.refusal(
            "--cp-comm-type", f"one of {', '.join(CP_KINDS)}, or a2a+p2p with its sizes, for all layers"
        )
    return CP_KINDS[kinds[0]]


# --- pipeline -----------------------------------------------------------------------------------------------


def _pipeline(fields: TrackedFields, sizes: DecoderSizes, pp: int) -> dict[str, str | int]:
    """Return the schedule, the chunks and the layers of each stage."""
    layers, chunks = sizes.layers, fields.maybe_count("--num-virtual-stages-per-pipeline-rank") or 1
    each = fields.maybe_count("--num-layers-per-virtual-pipeline-stage")
    if each is not None and pp > 1:
        chunks, rest = divmod(layers, pp * each)
        if rest or not chunks:
            raise fields.refusal(
                "--num-layers-per-virtual-pipeline-stage", f"such that {layers} layers over {pp} ranks divide"
            )
    first, last = (fields.maybe_count(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    embedding, loss = (fields.on(f"--account-for-{what}-in-pipeline-split") for what in ("embedding", "loss"))
    layout = fields.text("--pipeline-model-parallel-layout")
    group = fields.maybe_count("--microbatch-group-size-per-vp-stage")
    combined = fields.on("--overlap-moe-expert-parallel-comm")
    if pp == 1:
        return {"schedule": PAIRED} if combined else {}
    if group is not None and group != pp:
        raise fields.refusal("--microbatch-group-size-per-vp-stage", f"the {pp} ranks of the pipeline")
    if layout:
        counts = stage_layers(layout, fields.origin)
        if len(counts) % pp or sum(counts) != layers:
            raise ImportModelError(
                f"{fields.origin}: --pipeline-model-parallel-layout has {len(counts)} stages of "
                f"{sum(counts)} layers, and there are {layers} layers and {pp} ranks"
            )
        chunks = len(counts) // pp
        stages = "-".join(map(str, counts))
        if 0 in counts:
            raise ImportModelError(
                f"{fields.origin}: --pipeline-model-parallel-layout has a stage without a layer, which is "
                "not simulated"
            )
    elif first is not None or last is not None:
        stages = _with_ends(fields, layers, pp * chunks, (first, last))
    elif embedding or loss:
        stages = _accounted(fields, layers, pp * chunks, (embedding, loss))
    else:
        stages = "layers"
    if combined and chunks == 1:
        raise fields.refusal(
            "--overlap-moe-expert-parallel-comm", "left out without --num-virtual-stages-per-pipeline-rank"
        )
    looped = PAIRED if combined else "interleaved"
    made: dict[str, str | int] = {"schedule": looped if chunks > 1 else "1f1b", "stages": stages}
    return made | ({"chunks": chunks} if chunks > 1 else {})


def _with_ends(fields: TrackedFields, layers: int, stages: int, ends: tuple[int | None, int | None]) -> str:
    """Return the layers of stages of which the first and the last are said."""
    left = layers - sum(end or 0 for end in ends)
    inner = stages - sum(end is not None for end in ends)
    if inner < 0 or left < 0 or (inner == 0) != (left == 0) or (inner and left % inner):
        raise ImportModelError(
            f"{fields.origin}: the {left} layers that --decoder-first-pipeline-num-layers and -last leave do "
            f"not divide over {inner} stages"
        )
    counts = [left // inner] * inner if inner else []
    counts = [
        *([ends[0]] if ends[0] is not None else []),
        *counts,
        *([ends[1]] if ends[1] is not None else []),
    ]
    return "-".join(map(str, counts))


def _accounted(fields: TrackedFields, layers: int, stages: int, both: tuple[bool, bool]) -> str:
    """Return the layers of stages in which the embedding or the loss counts as one."""
    each, rest = divmod(layers + sum(both), stages)
    if rest or each < 2:
        raise ImportModelError(
            f"{fields.origin}: {layers} layers, with the embedding or the loss as a layer "
            f"(--account-for-embedding-in-pipeline-split, -loss-), do not divide over {stages} stages"
        )
    counts = [each] * stages
    counts[0] -= both[0]
    counts[-1] -= both[1]
    return "-".join(map(str, counts))


def stage_layers(text: str, origin: str) -> list[int]:
    """Return how many decoder layers each stage has by ``--pipeline-model-parallel-layout``.

    ``E`` is the embedding, ``t`` a layer, ``m`` one of multi-token prediction, ``L`` the loss, ``|`` ends a
    stage, ``x*n`` and ``(...)*n`` repeat; commas are for the eye (core/transformer/pipeline_parallel_layer_
    layout.py). Raises :class:`ImportModelError` for anything else.

    >>> stage_layers("Et*3|(tt|)*2,mL", "")
    [3, 2, 2, 0]
    """
    plain = re.sub(r"[\s,]", "", text)
    for _ in range(100):
        match = re.search(r"\(([EtmL|]*)\)(?:\*([0-9]{1,4}))?|([EtmL|])\*([0-9]{1,4})", plain)
        if match is None:
            break
        part, times = match[1] if match[3] is None else match[3], int(match[2] or match[4] or 1)
        if len(plain) + len(part) * times > 100_000:
            raise ModelLimitError(f"{origin}: --pipeline-model-parallel-layout has more than 100,000 parts")
        plain = plain[: match.start()] + part * times + plain[match.end() :]
    if not re.fullmatch(r"[EtmL|]+", plain):
        raise ImportModelError(
            f"{origin}: --pipeline-model-parallel-layout {text[:60]!r} is not of E, t, m, L and |"
        )
    counts = [stage.count("t") for stage in plain.split("|")]
    if len(counts) > MAX_STAGES:
        raise ModelLimitError(f"{origin}: --pipeline-model-parallel-layout has more than {MAX_STAGES} stages")
    return counts


# --- what is kept, and what data-parallel ranks divide ------------------------------------------------------


def _recompute(fields: TrackedFields, notes: list[str]) -> str:
    granularity = fields.text("--recompute-granularity")
    method, layers = fields.text("--recompute-method"), fields.count("--recompute-num-layers")
    modules = [
        word for text in fields.words("--recompute-modules") for word in re.split(r"[\s,\[\]]+", text) if word
    ]
    if fields.on("--recompute-activations") and not granularity:
        granularity = "selective"
    if granularity == "full":
        if method == "block":
            return f"block:{layers}"
        if method not in ("", "uniform"):
            raise fields.refusal("--recompute-method", "uniform or block")
        return "full" if layers == 1 else f"uniform:{layers}"
    if granularity not in ("", "selective"):
        raise fields.refusal("--recompute-granularity", "full or selective")
    if not granularity:
        return "none"
    if unknown := [each for each in modules if each not in SELECTIVE]:
        raise ImportModelError(
            f"{fields.origin}: --recompute-modules {unknown[0]!r} is not one of {', '.join(SELECTIVE)}"
        )
    return _selective(modules or ["core_attn"], notes)


def _selective(modules: Sequence[str], notes: list[str]) -> str:
    """Return what is recomputed for modules; of whole feed-forwards, as much as comes nearest."""
    if "mlp" in modules or "moe" in modules:
        saved = "full" if "core_attn" in modules else "ops:Attention"
        what = "all of a layer" if saved == "full" else "all of a layer but attention"
        notes.append(f"--recompute-modules {' '.join(modules)}: {what} is recomputed, as what comes nearest")
        return saved
    if "shared_experts" in modules:
        notes.append("--recompute-modules shared_experts: of these activations alone are recomputed")
    parts = list(dict.fromkeys(PART_OF[each] for each in modules))
    return "attention" if parts == ["attention"] else f"parts:{'+'.join(parts)}"


def _offload(fields: TrackedFields, layers: int, pp: int) -> dict[str, str | int]:
    """Return how many layers are offloaded; refuses what Megatron-LM does
    (megatron/core/transformer/transformer_config.py, ``cpu_offloading``)."""
    name = "--cpu-offloading-num-layers"
    count = fields.maybe_count(name, 0, layers - 1) or 0
    if count and pp > 1:
        raise fields.refusal(name, f"0 with {pp} pipeline ranks: Megatron-LM refuses both together")
    if count and (fields.text("--recompute-granularity") or fields.on("--recompute-activations")):
        raise fields.refusal(name, "0 where activations are recomputed: Megatron-LM refuses both together")
    return {"offload": count} if count else {}


def _sharding(fields: TrackedFields) -> int:
    distributed = fields.on("--use-distributed-optimizer")
    if fields.on("--use-torch-fsdp2"):
        return 3
    if fields.on("--use-megatron-fsdp") or fields.on("--use-custom-fsdp"):
        strategy = fields.text("--data-parallel-sharding-strategy")
        if strategy not in SHARDING:
            raise fields.refusal("--data-parallel-sharding-strategy", f"one of {', '.join(SHARDING)}")
        return SHARDING[strategy]
    return 1 if distributed else 0


def _data(fields: TrackedFields, zero: int) -> dict[str, str | int]:
    """Return the fields about gradients and parameters of data-parallel ranks."""
    grads, params = fields.on("--overlap-grad-reduce"), fields.on("--overlap-param-gather")
    size = fields.maybe_count("--ddp-bucket-size")
    if fields.maybe_count("--ddp-num-buckets") is not None:
        raise fields.refusal("--ddp-num-buckets", "left out, or --ddp-bucket-size: it is not simulated")
    if zero == 3:
        keeps = fields.on("--torch-fsdp2-no-reshard-after-forward")
        copies = {"bucket": "fsdp2"} if fields.on("--use-torch-fsdp2") else {}
        return {"zero": 3, **({"reshard": "never"} if keeps else {}), **copies}
    made: dict[str, str | int] = {
        **({"zero": zero} if zero else {}),
        "bucket": "megatron" if size is None else f"{size}p",
        "overlap_grads": "on" if grads else "off",
    }
    return made | ({"overlap_params": "on"} if params and zero else {})


def _precision(fields: TrackedFields, zero: int) -> str:
    """Return the policy, with the types that arguments give otherwise behind a colon."""
    brain, half = fields.on("--bf16"), fields.on("--fp16")
    eight = fields.text("--fp8-format") or fields.text("--fp8")
    narrow = fields.on("--grad-reduce-in-bf16")
    if zero == 3 and fields.on("--use-megatron-fsdp"):
        reduced = fields.text("--megatron-fsdp-grad-comm-dtype") or fields.text("--grad-comm-dtype")
        main = fields.text("--megatron-fsdp-main-grads-dtype")
        narrow = narrow or (reduced in ("bf16", "") and main == "bf16")
    policy = "mixed_fp16" if half else "mixed" if brain else "fp32"
    if brain and narrow:
        policy = "mixed_bf16_grads"
    if eight and policy == "mixed":
        policy = "fp8"
    others: list[str] = []
    recipe = fields.text("--fp8-recipe", "delayed")
    if recipe not in FP8_RECIPES:
        raise fields.refusal("--fp8-recipe", f"one of {', '.join(FP8_RECIPES)}")
    if eight and policy not in ("fp8",):
        others.append("linear=float8e4m3fn")
    if eight and FP8_RECIPES[recipe] != "delayed":
        others.append(f"scaling={FP8_RECIPES[recipe]}")
    aware = fields.on("--use-precision-aware-optimizer")
    states = [fields.text(f"--{name}-dtype", "fp32") for name in ("exp-avg", "exp-avg-sq")]
    for name, given in zip(("exp-avg", "exp-avg-sq"), states, strict=True):
        if given not in STATE_TYPES:
            raise fields.refusal(f"--{name}-dtype", f"one of {', '.join(STATE_TYPES)}")
    if aware and states != ["fp32", "fp32"]:
        others.append("states=" + "+".join(STATE_TYPES[each] for each in states))
    for name, own, least in (("main-params", "master", "fp32"), ("main-grads", "update", "fp32")):
        kind = fields.text(f"--{name}-dtype", least)
        if kind not in STATE_TYPES:
            raise fields.refusal(f"--{name}-dtype", f"one of {', '.join(STATE_TYPES)}")
        if aware and kind != "fp32" and policy != "fp32":
            others.append(f"{own}={STATE_TYPES[kind]}")
            if own == "update":
                others.append(f"gradient_sum={STATE_TYPES[kind]}")
    return policy + (":" + ",".join(others) if others else "")
