"""torchtitan's TOML -> a training; names and defaults of torchtitan/config/job_config.py.

https://github.com/pytorch/torchtitan at 238fa9953e4a, the last with TOML; older names are understood.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from distsim.errors import ImportModelError
from distsim.importer.configs.tracked import TrackedFields
from distsim.importer.configs.training import BatchSizes, TrainingConfig, with_layout
from distsim.importer.decoders import named_sizes
from distsim.importer.decoders.config_fields import MAX_CONFIG_BYTES
from distsim.importer.tensors import read_bytes
from distsim.models.decoder_sizes import MIXED_NAMES, DecoderSizes, ExpertLayers, Positions
from distsim.models.mixture import Mixture
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.plan.stacks import STACKS, Stack

NAMED = {
    **{f"llama3/{size}": f"llama3-{size.lower()}" for size in ("8B", "70B", "405B")},
    **{"deepseek_v3/16B": "deepseek-v2-lite", "deepseek_v3/236B": "deepseek-v2"},
    **{"deepseek_v3/671B": "deepseek-v3"},
    **{f"qwen3/{size}": f"qwen3-{size.lower()}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{f"qwen3/{size}": f"qwen3-{size.lower()}" for size in ("30B-A3B", "235B-A22B")},
}
"""The models of torchtitan by name and flavor, and those of the library that have the same sizes."""


def _llama4(experts: int, every: int) -> DecoderSizes:
    """torchtitan/models/llama4: a token takes one expert, beside one for all; experts in each layer or each
    second, with all positions rotary and attention over all tokens before."""
    return DecoderSizes(
        *(48, 5120, 202048),
        GroupedHeads(40, 8),
        FeedForward(16384),
        Mixture(experts, 1, 8192, 1, "sigmoid", normalized=False),
        ExpertLayers(every=every, phase=every - 1),
        positions=Positions(1048576, theta=500000.0),
        names=MIXED_NAMES,
    )


BUILT = {
    "llama3/debugmodel": DecoderSizes(6, 256, 2048, GroupedHeads(16), FeedForward(768)),
    "llama4/17bx16e": _llama4(16, 1),
    "llama4/17bx128e": _llama4(128, 2),
}
"""Those that have no name in the library."""

FLOAT8_RECIPES = ("tensorwise", "rowwise")
"""Recipes of torchao, as their scales are called here. Not ``rowwise_with_gw_hp``, whose products for
gradients of weights have 16 bits."""

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved_torch",
    "loopedbfs": "looped_bfs",
    "interleavedzerobubble": "interleaved_zb",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipe_v",
}
"""Schedules by torch's names of their classes (torch.distributed.pipelining.schedules)."""

TWO_A_RANK = ("interleaved_torch", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v")
"""Those of several stages a rank: two, unless pipeline_parallel_layers_per_stage says otherwise."""

_ROTATES = {"allgather": "torch_allgather", "alltoall": "torch_alltoall"}
"""The kinds of context parallelism by torch's rotate methods."""

WITHOUT_EFFECT = (
    "job|profiling|metrics|lr_scheduler|checkpoint|comm|validation|debug|memory_estimation|experimental"
    "|fault_tolerance"
)
_PLAIN = {
    "model": r"hf_assets_path|tokenizer_path|print_after_conversion",
    "optimizer": r"lr|beta1|beta2|eps|weight_decay|implementation|early_step_in_backward",
    "training": r"dataset|dataset_path|steps|gc_freq|gc_debug|seed|deterministic|warmup_steps|dataloader"
    r"|mixed_precision_reduce",
    "activation_checkpoint": r"early_stop|preserve_rng_state|determinism_check|debug|visualize_.*"
    r"|per_op_sac_.*",
    "parallelism": r"pipeline_parallel_expert_parallel_overlap|enable_compiled_autograd"
    r"|context_parallel_load_balancer|disable_loss_parallel",
    "compile": "backend",
}
"""Of each table the fields that bear neither on time nor on memory, or by less than what is modelled."""


def read_torchtitan(path: str | os.PathLike[str]) -> TrainingConfig:
    """Return the training that a TOML file of torchtitan describes.

    Raises :class:`ImportModelError` for a file that is none, and for a field that is out of range or that
    matters and is not simulated, by name.
    """
    origin = os.fspath(path)
    data = read_bytes(path, MAX_CONFIG_BYTES)
    try:
        table = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ImportModelError(f"{path} is not a TOML file: {error}") from error
    whole = TrackedFields(origin, table, {})
    if "model" not in table or not {"training", "parallelism"} & table.keys():
        raise ImportModelError(f"{path} has no [model] with [training], as a configuration of torchtitan has")
    notes: list[str] = []
    name, sizes, lacks = _model(whole.part("model"))
    eight = _eight_bits(whole, notes)
    layout = _TitanLayout(whole, named_sizes(name) if name else sizes, eight, notes)
    fields = layout.fields()
    training = whole.part("training")
    stack = _stack(whole, layout, eight, notes)
    seq, batch = _with(training, "seq_len", 2048), layout.batch()
    unknown = [field for field in whole.unread(WITHOUT_EFFECT) if not _is_plain(field)]
    return TrainingConfig(
        *(origin, with_layout(stack, fields), fields, name, sizes),
        seq=seq,
        batch=batch,
        copies=layout.replicate if layout.shards else 1,
        notes=tuple(notes),
        unknown=tuple(unknown),
        lacks=lacks,
    )


def _with(fields: TrackedFields, name: str, default: int) -> int:
    return fields.count(name) if fields.given(name) else default


def _is_plain(field: str) -> bool:
    table, _, name = field.partition(".")
    return bool(name and re.fullmatch(_PLAIN.get(table, ""), name)) or table == "quantize"


def _model(model: TrackedFields) -> tuple[str | None, DecoderSizes | None, str]:
    """Return the name of a model of the library, or the sizes of one that has none, or why there are none."""
    family, flavor = model.text("name", "llama3"), model.text("flavor", "debugmodel")
    names = {each.lower(): each for each in (*NAMED, *BUILT)}
    plain = re.sub(r"_(flex_attn|varlen_attn|flex|varlen|irope)$", "", f"{family}/{flavor}".lower())
    if plain not in names:
        known = ", ".join((*NAMED, *BUILT))
        return None, None, f"name = {family[:40]!r} with flavor = {flavor[:40]!r} is not one of {known}"
    return NAMED.get(names[plain]), BUILT.get(names[plain]), ""


KEPT_WIDE = ("output", "router.gate")
"""Products that stay in 16 bits here whatever filter_fqns says."""


def _filtered(tables: Sequence[TrackedFields]) -> list[str]:
    """Say which products filter_fqns keeps in 16 bits, or does not, and the other way round here."""
    found: list[str] = []
    for table in tables:
        if table.given("filter_fqns"):
            names = table.words("filter_fqns")
            if others := [name for name in names if name not in KEPT_WIDE]:
                found.append(f"filter_fqns {', '.join(others)[:80]}: in 8 bits here, as all but the head")
            if KEPT_WIDE[0] not in names:
                found.append(f"filter_fqns without {KEPT_WIDE[0]!r}: the head stays in 16 bits here")
    return found


def _eight_bits(whole: TrackedFields, notes: list[str]) -> str:
    """Return the fields of a precision with operands of 8 bits, "" where these are not: tables about that
    count where a converter asks for it."""
    converters = whole.part("model").words("converters")
    linear = [each for each in converters if re.search(r"float8|mx", each) and "grouped" not in each]
    for each in converters:
        if not re.fullmatch(r"(quantize\.(linear|grouped_mm)\.)?(float8|mx)", each):
            notes.append(f"model.converters: {each[:40]!r} is not known, and without effect")
    if any("mx" in each for each in linear):
        notes.append("model.converters: MXFP8 runs as products of 8 bits with one scale")
    gathers = whole.part("quantize").part("linear").part("float8"), whole.part("float8")
    if linear and any(each.on("enable_fsdp_float8_all_gather") for each in gathers):
        notes.append("enable_fsdp_float8_all_gather: parameters are gathered in 16 bits")
    if not linear:
        return ""
    notes += _filtered(gathers)
    recipe = next((name for each in gathers if (name := each.text("recipe_name", ""))), "tensorwise")
    if recipe not in FLOAT8_RECIPES:
        raise gathers[0].refusal("recipe_name", f"one of {', '.join(FLOAT8_RECIPES)}")
    scaling = "blockwise" if any("mx" in each for each in linear) else recipe
    grouped = any("grouped" in each for each in converters)
    return f"linear=float8e4m3fn,scaling={scaling},linear_ops=MatMul+Gemm{'+GroupedMatMul' * grouped}"


def _stack(whole: TrackedFields, layout: _TitanLayout, eight: str, notes: list[str]) -> Stack:
    training, compiled = whole.part("training"), whole.part("compile")
    if training.on("enable_cpu_offload"):
        raise training.refusal("enable_cpu_offload", "false: parameters on the host are not simulated")
    wide = training.text("mixed_precision_param", "bfloat16") == "float32"
    if training.text("dtype", "float32") == "bfloat16":
        policy = "bf16"
    elif wide:
        policy = "fp32"
    else:
        policy = "fsdp2" if layout.shards else "amp"
    if eight:
        policy += f":{eight}"
    components = compiled.words("components") or ["model", "loss"]
    whole_model = (compiled.on("enable") and "model" in components) or training.on("compile")
    if compiled.on("enable") and not whole_model:
        notes.append("compile.components without model: the loss is compiled alone, and runs as it is")
    kernels = "compiled_complex" if whole_model else "eager_complex"
    if compiled.on("enable") and whole_model and "loss" not in components:
        kernels = "compiled_blocks"
    optimizer = whole.part("optimizer").text("name", "AdamW").lower()
    if optimizer not in ("adam", "adamw"):
        raise whole.part("optimizer").refusal("name", "Adam or AdamW")
    clip = training.number("max_norm") if training.given("max_norm") else 1.0
    return replace(
        STACKS["torchtitan"],
        precision=policy,
        kernels=kernels,
        optimizer=optimizer,
        clip=clip,
    )


class _TitanLayout:
    """The fields of a plan, from ``[parallelism]``, ``[training]`` and ``[activation_checkpoint]``."""

    def __init__(
        self, whole: TrackedFields, sizes: DecoderSizes | None, eight: str, notes: list[str]
    ) -> None:
        self._whole, self._sizes, self._eight, self._notes = whole, sizes, eight, notes
        own = self._own = whole.part("parallelism")
        self.replicate = _with(own, "data_parallel_replicate_degree", 1)
        self._shard = own.value("data_parallel_shard_degree")
        if self._shard is None or self._shard == -1:
            self._shard = -1
        else:
            self._shard = own.count("data_parallel_shard_degree")
        axes = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
        self._degrees = {axis: _with(own, f"{name}_parallel_degree", 1) for axis, name in axes.items()}

    @property
    def shards(self) -> bool:
        """Whether parameters are divided (FSDP) over data-parallel ranks, in place of DDP or nothing."""
        return self._shard != 1 or self._degrees["cp"] > 1

    def fields(self) -> dict[str, str | int]:
        """Return the fields of a plan."""
        own, degrees = self._own, self._degrees
        found: dict[str, str | int] = {name: size for name, size in degrees.items() if size > 1}
        if isinstance(self._shard, int) and self._shard > 0:
            found["dp"] = self.replicate * self._shard
        etp = _with(own, "expert_tensor_parallel_degree", 1)
        if self._sizes is not None and self._sizes.experts is None:
            found.pop("ep", None)
        elif degrees["ep"] > 1 and degrees["tp"] > 1:
            found["etp"] = etp
        found |= {"sp": "dtensor", "tp_overlap": "split" if own.on("enable_async_tensor_parallel") else "off"}
        if degrees["cp"] > 1:
            rotate = own.text("context_parallel_rotate_method", "allgather")
            found["cp_kind"] = _ROTATES.get(rotate, _ROTATES["allgather"])
        if self.shards:
            reshard = own.text("fsdp_reshard_after_forward", "default")
            if reshard not in ("default", "always", "never"):
                raise own.refusal("fsdp_reshard_after_forward", "default, always or never")
            reshard = "auto" if reshard == "default" else reshard
            found |= {"zero": 3, "reshard": reshard, "bucket": "fsdp2"}
        else:
            own.value("fsdp_reshard_after_forward")
            found["bucket"] = "torch"
        if own.text("expert_parallel_comm_backend", "standard") != "standard":
            self._notes.append("expert_parallel_comm_backend: tokens are sent by all-to-all")
        return found | {"remat": self._remat()} | self._pipeline()

    def _remat(self) -> str:
        own = self._whole.part("activation_checkpoint")
        mode, option = own.text("mode", "selective"), own.text("selective_ac_option", "2")
        if mode == "none":
            return "none"
        if mode == "full":
            return "full_early"
        if mode == "memory_budget":
            budget = own.number("memory_budget") if own.given("memory_budget") else 0.5
            return f"budget:{min(budget, 1.0):g}"
        if mode != "selective":
            raise own.refusal("mode", "selective, full, memory_budget or none")
        if option == "op":  # distributed/activation_checkpoint.py: attention, each second product
            saved = "Float8MatMul/2+MatMul/2+Attention" if self._eight else "MatMul/2+Attention"
            return f"ops:{saved}+MPIReduceScatter" if self._degrees["tp"] > 1 else f"ops:{saved}"
        if not re.fullmatch(r"[1-9][0-9]{0,3}", option):
            raise own.refusal("selective_ac_option", "op, or a whole number n for each n-th layer")
        return f"every_early:{option}"

    def _pipeline(self) -> dict[str, str | int]:
        own, pp = self._own, self._degrees["pp"]
        written = own.text("pipeline_parallel_schedule", "1F1B")
        schedule = SCHEDULES.get(written.lower())
        each, ends = own.value("pipeline_parallel_layers_per_stage"), self._ends()
        parts = own.value("module_fqns_per_model_part")
        splits = own.words("pipeline_parallel_split_points")
        micro = _with(own, "pipeline_parallel_microbatch_size", 1)
        if pp == 1:
            return {}
        if own.text("pipeline_parallel_schedule_csv"):
            raise own.refusal("pipeline_parallel_schedule_csv", "left out; give the table as --schedule-csv")
        if schedule is None:
            raise own.refusal(
                "pipeline_parallel_schedule", f"one of {', '.join(SCHEDULES)}, in torch's capitals"
            )
        if micro < 1 or parts is not None:
            raise own.refusal("module_fqns_per_model_part", "left out; give stages= in --plan")
        chunks = 2 if schedule in TWO_A_RANK else 1
        if self._sizes is None:
            own.value("pipeline_parallel_layers_per_stage")
            return {"schedule": schedule, "stages": "default", **({"chunks": chunks} if chunks > 1 else {})}
        layers = self._sizes.layers
        if each is not None:
            stages = math.ceil((layers + sum(ends)) / own.count("pipeline_parallel_layers_per_stage"))
            if stages % pp:
                raise own.refusal(
                    "pipeline_parallel_layers_per_stage", f"such that {stages} stages divide over {pp} ranks"
                )
            chunks = stages // pp
        counts = self._split(splits, layers) or _counts(layers, pp * chunks, ends)
        if splits:
            chunks = max(1, len(counts) // pp)
        if min(counts) < 1:
            raise own.refusal("pipeline_parallel_degree", f"such that each stage of {layers} layers has one")
        made: dict[str, str | int] = {"schedule": schedule, "stages": "-".join(map(str, counts))}
        return made | ({"chunks": chunks} if chunks > 1 else {})

    def _ends(self) -> tuple[int, int]:
        """Return how many layers the embedding and the head count as."""
        names = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
        first, last = (self._own.count(name, 0) if self._own.given(name) else 1 for name in names)
        return first, last

    def _split(self, splits: list[str], layers: int) -> list[int]:
        """Return the layers of stages that begin at modules such as layers.8."""
        if not splits:
            return []
        places = [int(match[1]) for each in splits if (match := re.fullmatch(r"layers\.([0-9]{1,4})", each))]
        bounds = [0, *places, layers]
        if len(places) != len(splits) or bounds != sorted(bounds):
            raise self._own.refusal("pipeline_parallel_split_points", "modules such as layers.8, in order")
        return [after - first for first, after in pairwise(bounds)]

    def batch(self) -> BatchSizes:
        """Return the sequences of a step: with a pipeline its microbatches, else those of a rank."""
        training = self._whole.part("training")
        local = next(
            (training.count(name) for name in ("local_batch_size", "batch_size") if training.given(name)), 8
        )
        total = training.value("global_batch_size")
        whole = training.count("global_batch_size") if total not in (None, -1) else None
        micro = _with(self._own, "pipeline_parallel_microbatch_size", 1)
        if self._degrees["pp"] == 1:
            piped = None if local % micro else micro
            return BatchSizes(whole, local, None, 1 if whole is None else None, piped, local)
        if local % micro:
            raise self._own.refusal(
                "pipeline_parallel_microbatch_size", f"a divisor of local_batch_size {local}"
            )
        if whole is not None:
            self._notes.append(
                "global_batch_size: where a rank has more sequences than local_batch_size, torchtitan runs "
                "its pipeline anew for each so many, and here one runs through, with less of a bubble"
            )
        return BatchSizes(whole, micro, None, local // micro if whole is None else None, micro, local)


def _counts(layers: int, stages: int, ends: tuple[int, int]) -> list[int]:
    """Return the layers of each stage, the first ones a layer more (generate_llm_fqn_per_model_part).

    >>> _counts(32, 4, (1, 1))
    [8, 9, 8, 7]
    """
    each, more = divmod(layers + sum(ends), stages)
    counts = [each + (number < more) for number in range(stages)]
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts
