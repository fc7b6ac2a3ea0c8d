"""DeepSpeed's JSON -> how a model is trained; it says nothing of the model.

Names and defaults of deepspeed/runtime/config.py and runtime/zero/config.py
(https://github.com/deepspeedai/DeepSpeed at 1b88ac366fc9); "auto" is what Hugging Face's Trainer fills in.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from distsim.errors import ImportModelError
from distsim.importer.configs.tracked import TrackedFields
from distsim.importer.configs.training import BatchSizes, TrainingConfig, with_layout
from distsim.importer.decoders.config_fields import read_config
from distsim.plan.stacks import STACKS

WITHOUT_EFFECT = (
    r"_.*|scheduler|steps_per_print|wall_clock_breakdown|dump_state|prescale_gradients|zero_allow_untested_.*"
    r"|gradient_predivide_factor|tensorboard|wandb|csv_monitor|comet|comms_logger|flops_profiler|memory_breakdown"
    r"|zero_force_ds_cpu_optimizer|checkpoint|nebula|seed|disable_allgather|dataloader_drop_last|aio|timers"
    r"|data_efficiency|autotuning|train_iters|sparse_gradients|use_data_before_expert_parallel_|elasticity"
)
_PLAIN_ZERO = (
    r"contiguous_gradients|reduce_scatter|allgather_partitions|allgather_bucket_size|sub_group_size"
    r"|round_robin_gradients|ignore_unused_parameters|elastic_checkpoint|load_from_fp32_weights|legacy_stage1"
    r"|(stage3_)?gather_(fp)?16(bit)?_weights_on_model_save|stage3_gather_fp16_weights_on_model_save"
    r"|(stage3_)?(prefetch_bucket_size|param_persistence_threshold|max_live_parameters|max_reuse_distance)"
    r"|(stage3_)?model_persistence_threshold|memory_efficient_linear|cpu_offload_use_pin_memory"
    r"|override_module_apply|log_trace_cache_warnings|use_multi_rank_bucket_allreduce|enable_sanity_checks"
    r"|(stage3_)?module_granularity_threshold|(stage3_)?allgather_sequential|leaf_module"
    r"|(stage3_)?use_all_reduce_for_fetch_params|mics_hierarchical_params_gather"
)
_PLAIN_HALF = (
    "auto_cast|loss_scale|initial_scale_power|loss_scale_window|hysteresis|consecutive_hysteresis"
    "|min_loss_scale|fp16_master_weights_and_grads|immediate_grad_update|check_grad_overflow"
)
_PLAIN_CHECKPOINT = "contiguous_memory_optimization|synchronize_checkpoint_boundary|profile"
_PLAIN = {
    "zero_optimization": _PLAIN_ZERO,
    "fp16": _PLAIN_HALF,
    "bf16": _PLAIN_HALF,
    "optimizer": "params",
    "activation_checkpointing": _PLAIN_CHECKPOINT,
}
_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "momentum"}
REFUSED = {
    "zero_quantized_weights": "parameters gathered in 8 bits",
    "zero_quantized_gradients": "gradients reduced in 4 bits",
    "zeropp_loco_param": "gradients reduced in 4 bits",
    "zenflow": "ZenFlow",
}
"""Fields of ``zero_optimization`` that change a step so much that another would be simulated."""


def read_deepspeed(path: str | os.PathLike[str]) -> TrainingConfig:
    """Return the training that a JSON file of DeepSpeed describes; it names no model and no sequence.

    Raises :class:`ImportModelError` for a file that is none, and for a field that is out of range or that
    matters and is not simulated, by name.
    """
    origin = os.fspath(path)
    table = read_config(path)
    telling = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16")
    if not set(telling) & table.keys():
        raise ImportModelError(
            f"{path} has none of {', '.join(telling)}, as a configuration of DeepSpeed has"
        )
    whole = TrackedFields(origin, table, {})
    notes: list[str] = []
    fields, zero = _layout(whole, notes)
    clip = whole.value("gradient_clipping")
    if clip == "auto":
        notes.append("gradient_clipping: auto is 1.0, the Trainer's max_grad_norm")
        clip = 1.0
    elif clip is not None and clip != 0:
        clip = whole.number("gradient_clipping")
    optimizer = whole.part("optimizer").text("type", "AdamW")
    if optimizer.lower() not in _OPTIMIZERS:
        raise whole.part("optimizer").refusal("type", "one of Adam, AdamW and SGD: others are not simulated")
    precision, stack = _precision(whole, notes), STACKS["deepspeed"]
    if not zero and precision in (
        "mixed_bf16_grads",
        "mixed",
    ):  # BF16_Optimizer, whose buffers are summed whole
        precision, stack = "mixed", STACKS["deepspeed_bf16"]
        fields |= stack.spread_fields(zero)
    stack = replace(
        stack,
        precision=precision,
        optimizer=_OPTIMIZERS[optimizer.lower()],
        clip=float(clip) if isinstance(clip, int | float) and clip else None,
    )
    batch = _batch(whole, notes)
    ranks = whole.part("zero_optimization").value("mics_shard_size")
    if zero == 3 and type(ranks) is int and ranks > 0:
        fields["zero_ranks"] = ranks
    unknown = [name for name in whole.unread(WITHOUT_EFFECT) if not _is_plain(name)]
    return TrainingConfig(
        origin, with_layout(stack, fields), fields, batch=batch, notes=tuple(notes), unknown=tuple(unknown)
    )


def _is_plain(field: str) -> bool:
    table, _, name = field.partition(".")
    return bool(name and re.fullmatch(_PLAIN.get(table, ""), name))


_CHECKPOINTING = (
    *("partition_activations", "number_checkpoints", "contiguous_memory_optimization"),
    *("synchronize_checkpoint_boundary", "profile"),
)
"""Fields of ``activation_checkpointing`` that only say how to recompute: who sets one does."""


def _layout(whole: TrackedFields, notes: list[str]) -> tuple[dict[str, str | int], int]:
    zero = whole.part("zero_optimization")
    stage = zero.count("stage", 0, 3) if zero.given("stage") else 0
    _refuse(zero)
    fields: dict[str, str | int] = {"zero": stage} if stage else {}
    size, overlap = zero.value("reduce_bucket_size"), zero.value("overlap_comm")
    if stage == 3:
        if overlap is False:
            notes.append("overlap_comm false: with stage 3 gradients of a layer are reduced beside compute")
    else:
        fields["bucket"] = "deepspeed"
        if isinstance(size, int | float) and not isinstance(size, bool) and 1 <= size < 2**40:
            fields["bucket"] = f"{int(size)}p"
        elif size not in (None, "auto"):
            raise zero.refusal("reduce_bucket_size", "a number of elements, or auto")
        fields["overlap_grads"] = "on" if overlap is True else "off"
    checkpoints = whole.part("activation_checkpointing")
    if checkpoints.on("cpu_checkpointing"):
        raise checkpoints.refusal("cpu_checkpointing", "false; offload=N in --plan keeps layers on the host")
    if checkpoints.on("partition_activations"):
        notes.append("activation_checkpointing.partition_activations: each rank of tp keeps them whole")
    if any(checkpoints.value(name) for name in _CHECKPOINTING):
        fields["remat"] = "full"
        if checkpoints.given("number_checkpoints") and checkpoints.value("number_checkpoints"):
            notes.append("activation_checkpointing.number_checkpoints: each layer is checkpointed")
    else:
        fields["remat"] = "none"
        notes.append("recomputation is the model's to choose: none, unless --plan says remat=full")
        if "activation_checkpointing" in whole.table:
            notes[-1] += "; activation_checkpointing turns nothing on, and all that it says is off"
    fields |= _degrees(whole)
    return fields, stage


def _degrees(whole: TrackedFields) -> dict[str, str | int]:
    """Return the degrees of tensor and sequence parallelism that newer versions take."""
    found: dict[str, str | int] = {}
    tensor = whole.part("tensor_parallel")
    for name in ("autotp_size", "tp_size"):
        if tensor.given(name) and tensor.value(name) not in (0, 1):
            found["tp"] = tensor.count(name)
    if whole.given("sequence_parallel_size") and whole.value("sequence_parallel_size") not in (0, 1):
        found |= {"cp": whole.count("sequence_parallel_size"), "cp_kind": "ulysses"}
    return found


def _refuse(zero: TrackedFields) -> None:
    for name in ("offload_optimizer", "offload_param"):
        if zero.value(name) is not None:
            device = zero.part(name).text("device", "cpu")
            if device != "none":
                raise ImportModelError(
                    f"{zero.origin}: {name} to {device[:20]!r}: state on the host is not simulated; leave it "
                    'out, or give "device": "none", for what the step takes without'
                )
    for name in ("cpu_offload", "cpu_offload_param", *REFUSED):
        if zero.on(name):
            what = REFUSED.get(name, "state on the host")
            raise zero.refusal(name, f"false: {what} is not simulated")
    if zero.value("zero_hpz_partition_size") not in (None, 0, 1):
        raise zero.refusal("zero_hpz_partition_size", "1: a second copy of parameters is not simulated")


def _enabled(part: TrackedFields) -> object:
    """Whether a type is on: true, false or auto; a table without a word on it is off."""
    return part.value("enabled") if part.given("enabled") else False


def _precision(whole: TrackedFields, notes: list[str]) -> str:
    brain, half = (
        _enabled(whole.part(name) if name in whole.table else whole.part(other))
        for name, other in (("bf16", "bfloat16"), ("fp16", "fp16"))
    )
    if brain is True and half is True:
        raise ImportModelError(
            f"{whole.origin}: bf16 and fp16 are both enabled, which DeepSpeed refuses; enable one of them"
        )
    if brain == "auto" or (half == "auto" and brain is not True):
        notes.append('"auto" precision is taken to be bf16')
        brain, half = True, False
    if whole.part("amp").on("enabled"):
        raise whole.part("amp").refusal("enabled", "false: apex is not simulated; use bf16 or fp16")
    policy = "mixed_bf16_grads" if brain is True else "mixed_fp16" if half is True else "fp32"
    summed = whole.part("data_types").text("grad_accum_dtype") or whole.text("communication_data_type")
    if summed in ("", "auto") or policy == "fp32":
        return policy
    if summed not in _TYPES:
        raise whole.refusal("communication_data_type", f"one of {', '.join(_TYPES)}")
    if policy == "mixed_bf16_grads" and _TYPES[summed] == "float32":
        return "mixed"
    return f"{policy}:gradient_sum={_TYPES[summed]}"


def _batch(whole: TrackedFields, notes: list[str]) -> BatchSizes:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = [None if whole.value(name) in (None, "auto") else whole.count(name) for name in names]
    total, micro, steps = values
    auto = [name for name in names if whole.value(name) == "auto"]
    if auto and total is None and micro is not None and steps is not None:
        notes.append(f'"auto" of {auto[0]}: {micro} a rank, {steps} times, unless --batch says otherwise')
    elif auto and total is None:
        notes.append(f'"auto" of {", ".join(auto)}: as --batch, or microbatches= of --plan, say')
    if total is not None and micro is None and steps is None:
        steps = 1
    if total is None and micro is not None and steps is None:
        steps = 1
    return BatchSizes(total, micro, microbatches=steps)
