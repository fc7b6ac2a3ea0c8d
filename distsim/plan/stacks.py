"""Stacks: what the software that trains a model chooses unless told otherwise, each choice with its source.

A stack is defaults only: every one of them is an option of its own, which goes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distsim.errors import PlanError
from distsim.suggestions import choices_for


@dataclass(frozen=True)
class Stack:
    """The defaults of a framework.

    ``precision``: a policy of :data:`distsim.transforms.autodiff.precision.POLICIES` (None: as the model is
    written); ``attention``: of :data:`distsim.ops.attention_options.ATTENTION_CHOICES` (None: ``flash`` or
    ``math``, by the element type); ``kernels``: of
    :data:`distsim.transforms.kernels.KERNELS`; ``remat``: what a plan recomputes that does not say;
    ``optimizer`` and ``clip``: the norm to which gradients are clipped (None: they are not); ``sp``: how
    tensor-parallel ranks divide the sequence as well, a field of a plan, as is ``zero``, that of one with
    several ranks of the data; ``vocabulary_multiple``: what the
    vocabulary of each tensor-parallel rank is padded to a multiple of (0: it is not); ``plan``: further
    fields of a plan with several data-parallel ranks, by ``zero``; ``tp_overlap``: the same field of one with
    several tensor-parallel ranks, ``stages`` of one with a pipeline; ``contexts``: which kind of context
    parallelism it has for one; ``repeated_keys``: attention is given as many heads of keys as of queries
    (:mod:`distsim.transforms.key_heads`); ``scaling`` and ``linear_ops``: those of
    operands of 8 bits, where they are asked for (none: all); ``weighted``: where rows of experts are
    multiplied by their gates, of a model that does not say (:class:`distsim.models.mixture.Mixture`);
    ``offloads_alone``: layers go to the host neither in a pipeline, nor recomputed, nor all of them.
    ``source`` says where these are from.

    >>> stack_named("megatron").precision, stack_named("megatron").clip
    ('mixed', 1.0)
    """

    name: str
    precision: str | None
    attention: str | None
    kernels: str
    remat: str
    optimizer: str
    clip: float | None
    source: str
    sp: str = "off"
    zero: int = 0
    tp_overlap: str = "on"
    stages: str = "even"
    scaling: str = "delayed"
    linear_ops: tuple[str, ...] = ()
    vocabulary_multiple: int = 0
    repeated_keys: bool = False
    weighted: str = "tokens"
    offloads_alone: bool = False
    contexts: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    plan: Mapping[int, Mapping[str, str | int]] = field(
        default_factory=dict[int, Mapping[str, str | int]], hash=False
    )

    @property
    def family(self) -> str:
        """The framework, of whatever year.

        >>> stack_named("megatron_2021").family
        'megatron'
        """
        return self.name.partition("_")[0]

    def spread_fields(self, zero: int) -> dict[str, str | int]:
        """Return fields of a plan that has several ranks of the data, and this stage of ZeRO."""
        return dict(self.plan.get(zero, {}))


_TORCHTITAN = Stack(
    *("torchtitan", "fsdp2", "flash2", "eager_complex", "every_early:2", "adamw", 1.0),
    source="torchtitan 238fa995, config/job_config.py: mixed_precision_param bfloat16, "
    "mixed_precision_reduce float32, selective activation checkpointing of every second layer, "
    "compile off, max_norm 1.0; attention by scaled_dot_product_attention; "
    "models/llama3/infra/parallelize.py: norms are SequenceParallel "
    "wherever there is tensor parallelism; data_parallel_shard_degree -1, all ranks; "
    "fsdp_reshard_after_forward default; fully_shard, which is torch's FSDP2; MmBackward0 of torch "
    "returns both gradients before a DTensor is redistributed; components/float8.py without a "
    "recipe_name: torchao's tensorwise scaling, of linear layers but not of experts; layers a stage, "
    "embedding and head counted as one each (distributed/pipeline_parallel.py); distributed/utils.py, "
    "create_context_parallel_ctx: context parallelism of torch, context_parallel_rotate_method allgather",
    stages="default",
    sp="dtensor",
    zero=3,
    tp_overlap="off",
    scaling="tensorwise",
    linear_ops=("MatMul", "Gemm"),
    contexts={"allgather": "torch_allgather", "ring": "torch_alltoall"},
    plan={3: {"reshard": "auto", "bucket": "fsdp2"}},
)

_MEGATRON = {zero: {"bucket": "megatron", "overlap_grads": "off"} for zero in (0, 1, 2)}

STACKS = {
    stack.name: stack
    for stack in (
        Stack("plain", None, None, "eager", "none", "adam", None, "PyTorch, op by op; nothing added"),
        Stack(
            *("torch", "amp", None, "eager", "none", "adamw", None),
            source="PyTorch as its guides train language models: torch.autocast to bfloat16 over weights in "
            "float32 (docs, amp), scaled_dot_product_attention, AdamW, nothing compiled; stages of whole "
            "layers, embedding and head counted as one each (torchtitan's distributed/pipeline_parallel.py, "
            "over torch.distributed.pipelining)",
            stages="default",
        ),
        Stack(
            *("megatron", "mixed", "cudnn", "fused", "none", "adamw", 1.0),
            source="Megatron-LM core 0.12, megatron/training/arguments.py: --bf16 sums and reduces gradients "
            "in float32, attention of Transformer Engine (cuDNN's on Hopper and later), fusions on, that of "
            "sums of gradients into products too; "
            "--clip-grad 1.0; no recomputation unless asked; --overlap-grad-reduce, --overlap-param-gather "
            "off: one bucket after backward; --make-vocab-size-divisible-by 128, times the tensor-parallel "
            "ranks; equally many layers a stage (transformer_block.py, get_num_layers_to_build); rows are "
            "weighted within experts (fusions/fused_bias_swiglu.py, weighted_bias_swiglu_impl, since "
            "26596307 of April 2025, which is in core 0.12 and not in 0.11); what it refuses beside "
            "--cpu-offloading-num-layers: core/transformer/transformer_config.py, cpu_offloading",
            stages="layers",
            vocabulary_multiple=128,
            weighted="experts",
            offloads_alone=True,
            plan=_MEGATRON,
        ),
        Stack(
            *("megatron_2021", "mixed_fp16", "math", "fused_2021", "full", "adamw", 1.0),
            source="Narayanan et al. 2021 (SC21), sections 3.5, 4.2 and 5: mixed precision in fp16, fused "
            "scale-mask-softmax, bias-GELU and bias-dropout-add, activation recomputation; its code at the "
            "time reduces one contiguous buffer of gradients after the backward pass and pads vocabularies "
            "as Megatron-LM core does; its linear layers return both gradients before that of the input is "
            "reduced (megatron/mpu/layers.py); equally many layers a stage (megatron/model/transformer.py); "
            "hosts copy the sizes of each microbatch's tokens from the device (megatron/mpu/data.py); "
            "two kernels read all for gradients of a layer norm (fused_kernels/layer_norm_cuda_kernel.cu)",
            stages="layers",
            vocabulary_multiple=128,
            tp_overlap="off",
            plan=_MEGATRON,
        ),
        _TORCHTITAN,
        replace(
            _TORCHTITAN,
            name="torchtitan_2025",
            source="torchtitan 2887250b of June 2025: as torchtitan, but for models/llama3/model/model.py, "
            "which repeats heads of keys before attention (repeat_kv, until ff0829c1 of January 2026)",
            repeated_keys=True,
        ),
        Stack(
            *("fsdp", "fsdp", "flash2", "eager", "none", "adamw", 1.0),
            source="training scripts with torch's FullyShardedDataParallel: gradients are reduced in "
            "bfloat16 too (MixedPrecision of IBM's fms-fsdp, fms_fsdp/policies/mixed_precision.py; of "
            "Lightning, plugins/precision/fsdp.py; of Accelerate, utils/dataclasses.py), attention by "
            "scaled_dot_product_attention, clipping to 1.0 (fms_fsdp/utils/train_utils.py), activations are "
            "recomputed if asked; parameters are divided (FULL_SHARD, the default of torch)",
            stages="default",
            zero=3,
        ),
        Stack(
            *("maxtext", "fsdp", "cudnn", "xla", "full_early", "adamw", 1.0),
            source="MaxText 37e3f440 of December 2024, configs/base.yml: remat_policy full, weights in "
            "float32, computing in bfloat16, gradient_clipping_threshold 1.0, parameters divided over all "
            "devices (ici_fsdp_parallelism); its recipes on GPUs have attention cudnn_flash_te and XLA's "
            "latency hiding scheduler (NVIDIA/JAX-Toolbox); gradients are reduced in the type of the "
            "products that make them; layers/quantizations.py, Fp8DotGeneralOp: delayed scaling",
            zero=3,
        ),
        Stack(
            *("paxml", "fsdp", "cudnn", "xla_te", "full_early", "adamw", 1.0),
            source="Pax as NVIDIA's recipes run it (JAX-Toolbox, rosetta; dgxc-benchmarking of January 2025, "
            "paxml/configure.sh: ENABLE_TE=1): layers of Transformer Engine, parameters cast to bfloat16 "
            "before they are gathered, clip_gradient_norm_to_value 1.0, checkpoints that save nothing unless "
            "told (paxml, model_params.py), delayed scaling (transformer_engine/jax, 4e2ce516)",
            zero=3,
        ),
        Stack(
            *("composer", "fsdp2", "triton", "eager_loss", "none", "adamw", 1.0),
            source="llm-foundry 0.1 to 0.4: models/mpt/configuration_mpt.py, attn_impl triton (of 2022, from "
            "before FlashAttention-2), modeling_mpt.py, loss_fn fused_crossentropy (flash_attn's), and its "
            "benchmarks' configuration: FSDP of torch with FULL_SHARD, bfloat16 computing, "
            "activation_checkpointing off, gradient_clipping 1.0; amp_fp8 is Transformer Engine's with its "
            "default recipe, delayed",
            zero=3,
        ),
        Stack(
            *("deepspeed", "mixed_bf16_grads", "flash2", "eager_deepspeed", "none", "adamw", None),
            source="DeepSpeed, runtime/config.py: bf16 with float32 master weights, with ZeRO gradients in "
            "the type of training (without it: deepspeed_bf16), gradient_clipping 0; attention and "
            "checkpointing are the model's; "
            "runtime/zero/config.py: reduce_bucket_size 5e8, overlap_comm with stage 3 only",
            plan={zero: {"bucket": "deepspeed", "overlap_grads": "off"} for zero in (0, 1, 2)},
        ),
        Stack(
            *("deepspeed_pipeline", "mixed", "flash2", "fused_deepspeed", "none", "adamw", None),
            source="DeepSpeed's engine for pipelines in bfloat16, as BLOOM ran it under Megatron-DeepSpeed "
            "(b005db86 of July 2022): runtime/bf16_optimizer.py adds each microbatch's gradients to float32 "
            "buffers (update_hp_grads), divides the optimizer's state over data-parallel ranks, whatever "
            "stage of ZeRO is named, and gathers parameters into lists of slices; runtime/pipe/engine.py "
            "sums the buffers over these ranks, whole, after the last microbatch (_exec_reduce_grads), and "
            "refuses further stages; equally many layers a stage (the model's partition_method); the model's "
            "kernels are Megatron-LM's of 2021, as are its vocabularies",
            stages="layers",
            vocabulary_multiple=128,
            tp_overlap="off",
            plan={
                0: {"zero": 1, "bucket": "nanotron", "overlap_grads": "off"},
                1: {"bucket": "nanotron", "overlap_grads": "off"},
            },
        ),
        Stack(
            *("deepspeed_bf16", "mixed", "flash2", "eager_deepspeed", "none", "adamw", None),
            source="DeepSpeed in bfloat16 without ZeRO, on one stage (v0.9.5, runtime/engine.py: "
            "get_data_types has gradients summed in float32 unless ZeRO divides something, "
            "_do_optimizer_sanity_check takes BF16_Optimizer then): as the stack deepspeed_pipeline, the "
            "optimizer's state is divided and float32 buffers are summed whole at the end "
            "(buffered_allreduce_fallback), but the model and its kernels are the user's",
            plan={0: {"zero": 1, "bucket": "nanotron", "overlap_grads": "off"}},
        ),
        Stack(
            *("scaling", "mixed_bf16_grads", "flash2", "eager", "none", "adamw:kernel=foreach", 1.0),
            source="Aleph Alpha's scaling (737f8558), src/scaling/core: gradients are summed as autograd "
            "makes them, in bfloat16, whatever the pipeline, summed whole over ranks after the last "
            "microbatch (in float32, which is not modelled), and of a rank's part copied to float32 for "
            "torch's AdamW (optimizer/parameter_group.py, allreduce.py; its zero is stage 1); "
            "gradient_clipping 1.0 (optimizer_config.py); modules are torch's, a gate and what it gates two "
            "products (nn/mlp.py); a linear layer returns both gradients before that of its input is reduced "
            "(nn/linear/column_parallel_linear.py)",
            stages="layers",
            tp_overlap="off",
            plan={zero: {"bucket": "nanotron", "overlap_grads": "off"} for zero in (0, 1)},
        ),
        Stack(
            *("deepspeed_2021", "mixed_fp16", "math", "eager_deepspeed", "none", "adamw", None),
            source="DeepSpeed of April 2021 (fbece50b), runtime/zero/constants.py: fp16, no clipping, as "
            "deepspeed of stages 1 and 2; stage3.py and partition_parameters.py: parameters are gathered one "
            "by one, each into a list of a tensor a rank; before each and after those of a module the "
            "device is waited for (_allgather_param, _synchronize_communication)",
            plan={
                **{zero: {"bucket": "deepspeed", "overlap_grads": "off"} for zero in (0, 1, 2)},
                3: {"reshard": "blocking"},
            },
        ),
        Stack(
            *("nanotron", "mixed", "flash2", "eager_waiting", "none", "adamw", 1.0),
            source="nanotron, config/config.py and its example configurations: accumulate_grad_in_fp32, "
            "FlashAttention-2, recompute_layer false, clip_grad 1.0; trainer.py: buckets of torch's DDP, or "
            "with ZeRO-1 and float32 sums (make_ddp) all gradients at once after backward, reduced whole "
            "(reduce_scatter=False), and parameters gathered into lists of slices (optim/zero.py); "
            "microbatches are copied to the device, and waited for, one by one (dataloader.py); losses in "
            "steps, as Megatron-LM's (parallel/tensor_parallel/functional.py)",
            plan={0: {"bucket": "nanotron"}, 1: {"bucket": "nanotron", "overlap_grads": "off"}},
        ),
    )
}
"""The stacks by name."""


def stack_named(name: str) -> Stack:
    """Return the stack of a name.

    Raises :class:`PlanError` for another name.
    """
    if name not in STACKS:
        raise PlanError(f"stack {name!r} is unknown; choose one of {choices_for(name, STACKS)}")
    return STACKS[name]
