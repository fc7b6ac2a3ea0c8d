"""Megatron-LM's arguments -> a training; names, defaults and meanings of megatron/training/arguments.py.

https://github.com/NVIDIA/Megatron-LM at d98e8a64ddf3 (August 2026), core 0.20; older names are understood.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from distsim.errors import ImportModelError
from distsim.importer.configs.arguments import read_arguments
from distsim.importer.configs.megatron_layout import MegatronLayout
from distsim.importer.configs.megatron_model import model_of
from distsim.importer.configs.tracked import TrackedFields
from distsim.importer.configs.training import BatchSizes, TrainingConfig, with_layout
from distsim.plan.stacks import STACKS, Stack

DEFAULTS: dict[str, object] = {
    **{"--kv-channels": None, "--num-query-groups": None, "--ffn-hidden-size": None, "--vocab-size": None},
    **{"--make-vocab-size-divisible-by": 128, "--position-embedding-type": "learned_absolute"},
    **{
        "--normalization": "LayerNorm",
        "--norm-epsilon": 1e-5,
        "--rotary-base": 10000,
        "--rotary-percent": 1.0,
    },
    **{"--hidden-dropout": 0.1, "--attention-dropout": 0.1, "--q-lora-rank": None, "--kv-lora-rank": 32},
    **{"--qk-head-dim": 128, "--qk-pos-emb-head-dim": 64, "--v-head-dim": 128, "--num-experts": None},
    **{"--no-rope-freq": None, "--moe-layer-freq": 1, "--moe-ffn-hidden-size": None, "--moe-router-topk": 2},
    **{"--moe-shared-expert-intermediate-size": None, "--moe-token-dispatcher-type": "allgather"},
    **{"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.0},
    **{"--moe-router-score-function": "softmax", "--moe-router-topk-scaling-factor": None},
    **{"--moe-router-num-groups": None, "--moe-router-group-topk": None},
    **{"--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1, "--context-parallel-size": 1},
    **{"--expert-model-parallel-size": 1, "--expert-tensor-parallel-size": None},
    **{"--cp-comm-type": "p2p", "--micro-batch-size": None, "--global-batch-size": None},
    **{"--recompute-num-layers": 1, "--num-distributed-optimizer-instances": 1, "--clip-grad": 1.0},
    **{"--data-parallel-sharding-strategy": "optim_grads_params", "--max-position-embeddings": None},
    **{"--moe-expert-capacity-factor": None, "--num-virtual-stages-per-pipeline-rank": None},
    **{"--num-layers-per-virtual-pipeline-stage": None, "--decoder-first-pipeline-num-layers": None},
    **{"--decoder-last-pipeline-num-layers": None, "--ddp-bucket-size": None, "--optimizer": "adam"},
    **{"--microbatch-group-size-per-vp-stage": None, "--ddp-num-buckets": None},
    **{"--cpu-offloading-num-layers": None, "--hierarchical-context-parallel-sizes": None},
}

WITHOUT_EFFECT = r"""(?x) --(
    (min-)?lr .* | weight-decay .* | (start|end)-weight-decay .* | adam-.* | sgd-momentum | train-.* | eval-.*
  | log-.* | (no-)?save.* | (no-)?load.* | (no-)?ckpt-.* | dist-ckpt-.* | (use-)?dist-ckpt.* | tensorboard-.*
  | wandb-.* | one-logger-.* | no-one-logger | (per-split-)?data-.* | (valid|test)-data-.* | mock-data | split
  | vocab-file | merge-file | tokenizer-.* | tiktoken-.* | init-method-.* | seed | exit-.* | timing-.*
  | distributed-(backend|timeout-minutes) | num-workers | profile.* | (use-)?pytorch-profiler | nccl-.*
  | num-dataset-builder-threads | dataloader-type | (no-)?mmap-bin-files | use-(mcore|legacy)-models
  | use-te | no-use-tokenizer-model-.*
  | use-persistent-ckpt-worker | use-checkpoint-opt-param-scheduler | (te|inference)-rng-tracker
  | pretrained-checkpoint
  | (no-)?create-attention-mask-in-dataloader | reset-.* | eod-mask-loss
  | no-check-for-nan-in-loss-and-grad | check-for-.* | finetune | auto-detect-ckpt-format | logging-level
  | loss-scale | initial-loss-scale | min-loss-scale | loss-scale-window | hysteresis | decoupled-.*
  | warmup | override-opt-param-scheduler | use-checkpoint-args
  | apply-query-key-layer-scaling | moe-flex-dispatcher-backend | moe-(router|permute)-.*fusion
  | async-save | non-persistent-.* | local-rank | lazy-mpu-init | deterministic-mode
  | empty-unused-memory-level
  | rotary-(scaling|seq-len)-.* | use-rope-scaling | rope-scaling-factor | original-max-position-embeddings
  | mscale(-all-dim)? | yarn-.* | beta-(fast|slow) | rope-type | mtp-loss-scaling-factor | enable-experimental
  | moe-router-(dtype|bias-update-rate|enable-expert-bias|force-load-balancing)
  | moe-z-loss-coeff | moe-token-drop-policy | moe-input-jitter-eps | transformer-impl
  | attention-softmax-in-fp32
  | fp8-(amax|margin|interval|wgrad).* | first-last-layers-bf16 | calculate-per-token-loss
  | no-initialization | perform-initialization | init-model-with-meta-device | bert-no-binary-head
  | accumulate-allreduce-grads-in-fp32 | nproc-per-node | trust-remote-code | export-.* | no-load-.*
  | weight-decay-incr-style | use-cpu-initialization | query-in-block-prob | (en)?coder-seq-length
  | no-masked-softmax-fusion | no-position-embedding | manual-gc.* | ddp-average-in-collective
  | untie-embeddings-and-output-weights | dist-url | rampup-.* | rerun-mode | error-injection-.*
  | straggler-.*
)"""
"""Arguments that bear neither on the time of a step nor on its memory, or by less than what is modelled."""

NOT_MODELLED = {
    "--tp-only-amax-red": "largest elements are reduced over dp too",
    "--fp8-param-gather": "parameters are gathered in 16 bits",
    "--delay-wgrad-compute": "gradients of weights are not put off",
    "--moe-shared-expert-overlap": "shared experts wait while tokens are exchanged",
    "--distribute-saved-activations": "each rank of tp keeps what is saved whole",
    "--defer-embedding-wgrad-compute": "gradients of the output head are not put off",
    "--no-gradient-accumulation-fusion": "products add to sums of gradients, as the kernels of the stack do",
    "--no-bias-gelu-fusion": "kernels are those that Megatron-LM fuses by default",
    "--no-bias-swiglu-fusion": "kernels are those that Megatron-LM fuses by default",
    "--no-bias-dropout-fusion": "kernels are those that Megatron-LM fuses by default",
    "--no-rope-fusion": "kernels are those that Megatron-LM fuses by default",
    "--use-nccl-ub": "collectives are as fast as the cluster's figures",
    "--reuse-grad-buf-for-mxfp8-param-ag": "buffers are not shared",
    "--keep-fp8-transpose-cache": "no transposed copies of weights are kept",
    "--fsdp-double-buffer": "buffers of parameters are as many as are gathered",
    "--no-overlap-p2p-communication": "sends run beside compute",
    "--overlap-param-gather-with-optimizer-step": "parameters are gathered after their update",
    "--step-batch-size-schedule": "the batch is that of the end, --global-batch-size",
    "--rampup-batch-size": "the batch is that of the end, --global-batch-size",
    "--mtp-num-layers": "layers for multi-token prediction are left out",
    "--softmax-type": "attention has the usual softmax",
    "--rotary-interleaved": "pairs turn half a head apart, which takes as long",
    "--cross-entropy-fusion-impl": "the loss is the stack's kernels",
}
"""What takes part in the time or the memory of a step and is simulated in another way, and in which."""

REFUSED = {
    "--optimizer-cpu-offload": "an optimizer on the host",
    "--fp4-format": "products of 4 bits",
    "--is-hybrid-model": "layers of a state-space model",
    "--hybrid-override-pattern": "layers of a state-space model",
    "--hybrid-layer-pattern": "layers of a state-space model",
    "--linear-attention-freq": "linear attention",
    "--experimental-attention-variant": "attention of that kind",
    "--heterogeneous-layers-config-path": "layers that differ as another file says",
    "--heterogeneous-layers-config-encoded-json": "layers that differ as another file says",
    "--decoder-num-layers": "an encoder with a decoder",
    "--vision-backbone-type": "a vision model",
    "--vision-model-type": "a vision model",
    "--language-model-type": "a model that another file describes",
    "--retro-project-dir": "retrieval",
    "--perform-rl-step": "reinforcement learning",
    "--moe-use-upcycling": "upcycling",
}
"""What changes the step so much that another would be simulated, and what it is."""

PROGRAMS = r"bert|t5|retro|mamba|hybrid|vlm|vision|ict|mimo|realm|generation|server|inference"


def read_megatron_args(path: str | os.PathLike[str]) -> TrainingConfig:
    """Return the training that Megatron-LM's arguments in a file describe.

    The file is a shell script, a list of arguments, YAML or JSON; it is read and never run. Raises
    :class:`ImportModelError` for a file without them, and for an argument that is out of range or that
    matters and is not simulated, by name.
    """
    origin = os.fspath(path)
    found = read_arguments(path)
    fields = TrackedFields(origin, found.table, DEFAULTS)
    _refuse(fields, found.script)
    notes: list[str] = []
    sizes, loads, vocabulary_multiple = model_of(fields, notes)
    layout = MegatronLayout.of(fields, sizes, notes)
    micro = fields.maybe_count("--micro-batch-size")
    total = fields.maybe_count("--global-batch-size")
    batch = BatchSizes(total, micro, microbatches=1 if total is None else None)
    for name, instead in NOT_MODELLED.items():
        if fields.on(name):
            notes.append(f"{name}: {instead}")
    if found.notes:
        notes.append(f"includes {', '.join(found.notes)}, which is not read")
    stack = with_layout(_stack(fields, layout, notes), layout.fields)
    return TrainingConfig(
        origin,
        replace(stack, vocabulary_multiple=vocabulary_multiple),
        layout.fields,
        sizes=sizes,
        loads=loads,
        seq=fields.count("--seq-length"),
        batch=batch,
        copies=layout.copies,
        devices=found.devices,
        notes=tuple(dict.fromkeys(notes)),
        unknown=tuple(fields.unread(WITHOUT_EFFECT)),
    )


def _refuse(fields: TrackedFields, script: str) -> None:
    for name, what in REFUSED.items():
        if fields.on(name):
            raise ImportModelError(f"{fields.origin}: {name}: {what} is not simulated; leave it out")
    if re.search(PROGRAMS, os.path.basename(script)):
        raise ImportModelError(
            f"{fields.origin} starts {os.path.basename(script)}, and what is built is a decoder, as "
            "pretrain_gpt.py trains; give the arguments without the script if that is near enough"
        )
    if re.search("mamba|hybrid", " ".join(fields.words("--spec"))):
        raise fields.refusal("--spec", "that of a GPT; a state-space model is not simulated")


def _stack(fields: TrackedFields, layout: MegatronLayout, notes: list[str]) -> Stack:
    base = STACKS["megatron"]
    clip = fields.value("--clip-grad")
    if not isinstance(clip, int | float) or isinstance(clip, bool) or not 0 <= clip < 1e30:
        raise fields.refusal("--clip-grad", "a number from 0")
    fused = fields.on("--cross-entropy-loss-fusion")
    return replace(
        base,
        precision=layout.precision,
        attention=_attention(fields),
        kernels=("fused_loss" if fused else "fused") + _graphs(fields, notes),
        optimizer=_optimizer(fields),
        clip=float(clip) or None,
    )


def _graphs(fields: TrackedFields, notes: list[str]) -> str:
    """Return what the host launches at once, as CUDA graphs: ``:layers``, ``:step`` or nothing
    (transformer_config.py, ``cuda_graph_impl`` and ``cuda_graph_modules``, ``cuda_graph_scope`` before)."""
    implementation = fields.text("--cuda-graph-impl", "none")
    if fields.on("--enable-cuda-graph") or fields.on("--external-cuda-graph"):
        implementation = "local"
    listed = [*fields.words("--cuda-graph-modules"), *fields.words("--cuda-graph-scope")]
    modules = {part for word in listed for part in word.split(",")}
    if implementation == "none":
        return ""
    if implementation not in ("local", "transformer_engine", "full_iteration"):
        raise fields.refusal("--cuda-graph-impl", "one of none, local, transformer_engine, full_iteration")
    if "full_iteration" in (implementation, *modules):
        return ":step"
    if modules - {"full"} and modules != {"attn", "mlp"}:
        notes.append(f"CUDA graphs of {' and '.join(sorted(modules))} are of whole layers, without experts")
    return ":layers"


def _attention(fields: TrackedFields) -> str:
    backend = fields.text("--attention-backend", "auto").lower().rpartition(".")[2]
    flash, local = fields.on("--use-flash-attn"), fields.text("--transformer-impl") == "local"
    known = {"flash": "flash2", "fused": "cudnn", "unfused": "math", "local": "math"}
    if backend == "auto":
        return "flash2" if flash else "math" if local else "cudnn"
    if backend not in known:
        raise fields.refusal("--attention-backend", f"one of auto, {', '.join(known)}")
    return known[backend]


def _optimizer(fields: TrackedFields) -> str:
    name = fields.text("--optimizer")
    known = {"adam": "adamw", "adamw": "adamw", "sgd": "momentum"}
    if name not in known:
        raise fields.refusal("--optimizer", f"one of {', '.join(known)}: others are not simulated")
    return known[name]
