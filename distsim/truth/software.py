"""The software of a row: its stack, kernels, attention and precision, by the columns that describe it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from distsim.ir import BFloat16, Float8E4M3FN, Float16
from distsim.plan.stacks import STACKS, Stack
from distsim.transforms.autodiff.precision import POLICIES, Precision
from distsim.truth.row import MissingFeatureError, Row, cell, number, plain, zero_of

FLASH_TRAINING = r"^flash-?att(entio)?n\b.*\btraining"
FRAMEWORKS = (
    (FLASH_TRAINING, "torch", "flash_attention"),
    (r"\bllm\.c\b", "megatron", "fused_logits"),
    ("aleph ?alpha", "scaling", None),
    (r"hai-llm|\bmeta internal", "megatron", None),
    ("torchtitan", "torchtitan", None),
    ("nanotron", "nanotron", None),
    ("megatron.*deepspeed", "deepspeed", "fused_deepspeed"),  # the model is Megatron-LM's
    ("deepspeed|neox|colossal|intern-?evo|internlm", "deepspeed", None),
    ("composer|llm-?foundry", "composer", None),
    (r"olmo|torchtune|\bverl\b", "torchtitan", None),
    (r"fsdp|fairscale|lit-?gpt|lightning|accelerate|axolotl|\btrl\b", "fsdp", None),
    ("parax|alpa", "plain", "xla_2021"),
    (r"\bpax", "paxml", None),
    ("jax|xla|maxtext|levanter|easylm", "maxtext", None),
    (r"nemo ?2\b|megatron[- ]bridge", "megatron", "fused_loss"),
    ("megatron|megascale|nemo|mcore|galvatron|transformer ?engine", "megatron", None),
    ("sagemaker model parallel", "deepspeed", None),
    ("pytorch|torch|transformers|hugging ?face", "torch", None),
)
"""The stack of a framework whose column has the pattern, the first that fits, and kernels where they are not
the stack's: codes that reduce FSDP's gradients in float32 are as torchtitan; what XLA compiles is as MaxText.
FlashAttention's own training scripts, and llm.c, have fused kernels of norms with residuals, of MLPs and of
the loss (flash-attention, training/README.md; llm.c, llmc/*.cuh); codes in house of 3D parallelism are as
Megatron-LM, which they descend from or say that they resemble; SageMaker's sharding is MiCS, on DeepSpeed;
NeMo 2 fuses the loss (nemo/collections/llm/gpt/model/base.py, cross_entropy_loss_fusion)."""

LOSS_COMPILED = "2025-04"
"""Since when torchtitan compiles the loss with the blocks (bbb1b616; 9dec370 of December 2024 says that this
"causes CUDA errors, turning off for now")."""

FAST_NORMS = "2021-10"
"""Since when Megatron-LM has apex's FastLayerNorm (a2fdcdf0); Megatron-DeepSpeed had not before it took over
Megatron-LM of 2023 (9446eaac of July 2023: megatron/model/fused_layer_norm.py)."""

OWN_LOOP = "fused_2021_epilogues"
"""Megatron-DeepSpeed hands a step to DeepSpeed if it is asked to (f01c9e6e of June 2023: ``if
args.deepspeed`` in megatron/training.py), and keeps Megatron-LM's own loop, reduction and optimizer of 2021.
A row that names no stage of ZeRO has those. Rows of calibrate.csv show it: over 2 to 16 microbatches seconds
lie on lines that begin at what an update takes on the device alone, a few milliseconds, where the 300
gradients and more that DeepSpeed reads one by one would take a host 30."""

LOOP_OF_2021 = "2023-08"
"""Since when Megatron-DeepSpeed is Megatron-LM of 2023 (9446eaac of July)."""

LOSS_FUSED = {
    "fused": "fused_loss",
    **dict.fromkeys(
        ("fused_waiting", "fused_2022", "fused_2021", OWN_LOOP, "fused_deepspeed"), "fused_loss_waiting"
    ),
}
"""What policies are with the fused cross entropy of Megatron-LM (7b4a6d76 of June 2024)."""

PASSES_TIMED = "2022-08"
"""Until when the timers of Megatron-LM wait for the device before and after each pass (77efcccb). Since the
month after its products add to sums of gradients in 16 bits too (07916bf2)."""

ADAM_FUSED = "2025-03"
"""Since when torchtitan's AdamW is torch's fused one unless asked (6e498855 of February 2025); foreach before
(torchtitan/optimizer.py of 9dec370)."""

KEYS_GROUPED = "2026-02"
"""Since when torchtitan gives attention heads of keys as they are (ff0829c1 of January 2026)."""

ROWS_WEIGHED = "2025-04"
"""Since when experts of Megatron-LM weigh their rows (26596307): older rows do where their tokens are."""

WITH_FSDP = ("torch", "torchtitan", "fsdp", "composer", "plain", "maxtext", "paxml")
"""Stacks in which ZeRO-3 is FSDP, of torch or XLA: parameters in float32, gathered in 16 bits."""

_MATH = (
    r"\b(no|non|not|without|w/o)[ -]*flash|unfused|\b(math|eager|naive|standard|vanilla|einsum|baddbmm)\b"
    r"|scale-mask-softmax|fused softmax"
)
_FLASH = r"flash|\bfa-?[1-4]?\b|cudnn|sdpa|xformers|memory[- ]efficient|triton|fused attention|splash|\bte\b"

_KERNELS = (
    (r"flash[- ]?(attention|attn)?[- ]?v?3\b|\bfa-?3\b", "flash3"),
    (r"flash[- ]?(attention|attn)?[- ]?v?2\b|\bfa-?2\b", "flash2"),
    (r"flash[- ]?(attention|attn)?[- ]?v?1\b|\bfa-?1\b", "flash1"),
    (r"triton", "triton"),
    (r"cudnn|transformer[- ]?engine|\bte\b|fused attention", "cudnn"),
    (r"sdpa", "flash2"),
)
"""The kernel of attention that a column names."""

ATTENTION_FUSED = "2023-03"
"""Since when torch has scaled_dot_product_attention, which rows that say nothing run: torch 2.0."""

_EIGHT_BITS = r"\b(mx)?fp8|float-?8|\be4m3"
_SCALINGS = (
    (r"row-?wise", "rowwise"),
    (r"block-?wise|\bmx-?fp8", "blockwise"),
    (r"tensor-?wise|current|dynamic", "tensorwise"),
    (r"delayed", "delayed"),
)
"""How 8-bit operands are scaled, where a column names a recipe."""

_NO_BRAIN = r"\b[vp]100(?![0-9])"
"""GPUs without products in bfloat16."""

_HALF, _BRAIN = r"fp-?16|float-?16\b|\bhalf\b", r"bf-?16|bfloat-?16"


@dataclass(frozen=True)
class Software:
    """What trains the model of a row."""

    stack: Stack
    kernels: str
    attention: str
    precision: Precision


def software_of(row: Row, assumed: list[str]) -> Software:
    """Return the software of a row; append to ``assumed`` what no column says.

    Raises :class:`MissingFeatureError` for a framework, an attention or a type that is not known.
    """
    stack, kernels = _stack(row, zero_of(row), assumed)
    framework = plain(row, "framework")
    if stack.family not in framework:
        assumed.append(f"the stack {stack.name} for {framework:.40}")
    said = " ".join([plain(row, "notes"), plain(row, "overlap"), framework])
    if re.search(r"torch[. ]?compile|\+ ?compile", said):
        kernels = "compiled"
        if stack.family == "torchtitan":
            kernels = "compiled_complex" if _month(row) >= LOSS_COMPILED else "compiled_blocks"
    if kernels == "fused_deepspeed" and stack.name == "deepspeed_2021":
        kernels = "fused_2021"
    if kernels == "fused_2021" and stack.name == "megatron_2021" and _month(row) >= FAST_NORMS:
        kernels = "fused_waiting" if _month(row) > PASSES_TIMED else "fused_2022"
    if re.search(r"fused[- ]cross|cross[- ]entropy[- ](loss[- ])?fus", said):
        kernels = LOSS_FUSED.get(kernels, kernels)
    kernels += _graphs(said)
    precision = _precision(row, stack, zero_of(row, stack.zero))
    if not plain(row, "precision"):
        assumed.append(f"precision {precision.name}")
    return Software(stack, kernels, _attention(row, stack, precision, assumed), precision)


_DATE = r"(?<![0-9a-f])(20[0-9]{2})-?(0[1-9]|1[0-2])([0-9]{2})?(?![0-9a-f])"
_CONTAINER = r"\bcontainer ([0-9]{2})\.(0[1-9]|1[0-2])\b"
_ARXIV = r"arxiv:([0-9]{2})(0[1-9]|1[0-2])\.[0-9]{4,5}"


def _month(row: Row) -> str:
    """Return of which month the software of a row is, as in 2024-12; nothing where no column says it.

    NVIDIA's containers are numbered by it. If no column has a date it is as old as the paper, by its number
    at arXiv.
    """
    for column in ("framework", "source_url"):
        found = re.search(_DATE, plain(row, column))
        if found:
            return f"{found[1]}-{found[2]}"
    found = re.search(_CONTAINER, plain(row, "framework")) or re.search(_ARXIV, plain(row, "source_url"))
    return f"20{found[1]}-{found[2]}" if found else ""


_GRAPHS = r"cuda[ _-]?graphs?"
_NO_GRAPHS = rf"\b(no|without) {_GRAPHS}|{_GRAPHS}( are| is)?[ =:]*(off|not|no|none|disabled|false)\b"


def _graphs(said: str) -> str:
    """Return which CUDA graphs the columns of software say: ``:layers``, ``:step`` or none.

    Where they are only said to be on, those of layers are (``enable_cuda_graph`` of NeMo and Megatron-LM).
    """
    for clause in re.split(r"[;,]", re.sub(r"\([^()]*\)", "", said)):
        if re.search(_GRAPHS, clause) and not re.search(_NO_GRAPHS, clause):
            return ":step" if re.search(r"full[- ]iteration|whole[- ]step", clause) else ":layers"
    return ""


def eight_bits(row: Row) -> bool:
    """Whether linear layers of a row have operands of 8 bits."""
    return bool(re.search(_EIGHT_BITS, plain(row, "precision")))


def _stack(row: Row, zero: int, assumed: list[str]) -> tuple[Stack, str]:
    framework = plain(row, "framework")
    for pattern, name, kernels in FRAMEWORKS:
        if re.search(pattern, framework):
            if kernels == "fused_deepspeed" and not cell(row, "zero"):
                name, kernels = "megatron", OWN_LOOP if _month(row) < LOOP_OF_2021 else None
                assumed.append("Megatron-LM's own loop, as no stage of ZeRO is named")
            # Megatron-LM, or DeepSpeed with ZeRO-3, in fp16 without flash attention is that of 2021.
            old = (
                (name == "megatron" or (name == "deepspeed" and zero == 3))
                and _kind(row) != "flash"
                and _is_half(row)
            )
            if name == "deepspeed" and _is_brain(row):
                name = _sums_wide(zero, number(row, "pp", 1))
            stack = STACKS[f"{name}_2021" if old else name]
            if name in framework and name == "torchtitan" and "" < _month(row) < KEYS_GROUPED:
                stack = STACKS["torchtitan_2025"]
                if _month(row) < ADAM_FUSED:
                    stack = replace(stack, optimizer="adamw:kernel=foreach")
            if "" < _month(row) < ROWS_WEIGHED:
                stack = replace(stack, weighted="tokens")
            return stack, kernels or stack.kernels
    raise MissingFeatureError(f"a stack for {framework or 'a row without a framework'!r:.60}")


def _sums_wide(zero: int, stages: float) -> str:
    """Return the stack of DeepSpeed in bfloat16; its BF16_Optimizer, which sums gradients in float32, have
    pipelines, of ZeRO's stages 0 and 1, and what has neither pipeline nor ZeRO."""
    if zero < 2 and stages > 1:
        return "deepspeed_pipeline"
    return "deepspeed" if zero else "deepspeed_bf16"


def _is_half(row: Row) -> bool:
    """Whether the column of precision names neither bfloat16 nor 8 bits; if it names nothing, whether the GPU
    has no products in bfloat16, which stacks of today compute in."""
    if not plain(row, "precision"):
        return bool(re.search(_NO_BRAIN, plain(row, "hw_gpu")))
    return not _is_brain(row) and not eight_bits(row)


def _is_brain(row: Row) -> bool:
    """Whether the column of precision names bfloat16."""
    return bool(re.search(_BRAIN, plain(row, "precision")))


def _kind(row: Row) -> str:
    """Return what the column of attention says: flash, math, or nothing."""
    text = plain(row, "attention")
    if not text or re.search(_MATH, text):
        return "math" if text else ""
    if re.search(_FLASH, text):
        return "flash"
    raise MissingFeatureError(f"attention {text!r:.60}")


def _attention(row: Row, stack: Stack, precision: Precision, assumed: list[str]) -> str:
    kind = _kind(row)
    if kind == "math":
        return kind
    text = plain(row, "attention")
    found = next((kernel for pattern, kernel in _KERNELS if re.search(pattern, text)), None)
    if found is None:
        fused = stack.name == "torch" and precision.compute.itemsize <= 2
        fused = fused and not "" < _month(row) < ATTENTION_FUSED
        usual = stack.attention or kind or ("flash" if fused else "math")
        found = kind if kind and usual == "math" else usual
        assumed.append(f"attention {found}")
    return found


def _precision(row: Row, stack: Stack, zero: int) -> Precision:
    # Of two types of 16 bits between which a table does not decide it is the first.
    text = re.sub(rf"({_HALF}|{_BRAIN})/({_HALF}|{_BRAIN})", r"\1", plain(row, "precision"))
    sharding = plain(row, "fsdp")
    half, brain, eight = bool(re.search(_HALF, text)), bool(re.search(_BRAIN, text)), eight_bits(row)
    if re.search(r"(mx|nv)?fp4|int-?[48]|float-?4", text):
        raise MissingFeatureError(f"precision {text!r:.60}")
    if zero == 3 and stack.family in WITH_FSDP and (half or brain or eight or not text):
        wide = bool(re.search(r"(fp|float)-?32|\bdefault\b", sharding))
        policy = POLICIES["fsdp" if stack.precision == "fsdp" and not wide else "fsdp2"]
        if half and not brain:
            policy = replace(policy, used=Float16(), compute=Float16(), loss_scale=65536.0)
            policy = replace(policy, name=f"{policy.name}_fp16")
        if policy.gradient_sum in (Float16(), BFloat16()):
            policy = replace(policy, gradient_sum=policy.compute)
        elif re.search(r"mixed-precision ?[=:] ?pure|\bpure\b", sharding):
            # Composer's PURE: gradients are reduced in the type of computing, DEFAULT in float32.
            policy = replace(policy, name=f"{policy.name}_pure", gradient_sum=policy.compute)
    elif re.search(r"\bamp|autocast", text):
        policy = POLICIES["amp"]
        if half and not brain:
            policy = replace(policy, name="amp_fp16", compute=Float16(), loss_scale=65536.0)
        if re.search(FLASH_TRAINING, plain(row, "framework")):  # softmax(..., dtype=v.dtype): modules/mha.py
            wide = tuple([op for op in policy.wide_ops if op != "Softmax"])
            policy = replace(policy, name=f"{policy.name}_softmax", wide_ops=wide)
    elif half and not brain:
        policy = POLICIES["mixed_fp16"]
    elif brain or eight:
        reduced = re.search(rf"({_HALF}|{_BRAIN})[- ](grad|reduc)", plain(row, "overlap"))
        policy = _brain(f"{text}; {reduced[0] if reduced else ''}", stack)
    elif re.search(r"tf-?32", text):
        policy = POLICIES["tf32"]
    elif re.search(r"fp-?32|float-?32|\bsingle\b", text):
        policy = POLICIES["fp32"]
    elif not text or "mixed" in text:
        policy = POLICIES[stack.precision or "mixed"]
    else:
        raise MissingFeatureError(f"precision {text!r:.60}")
    if re.search(rf"({_BRAIN})[- ](optimizer[- ])?(states?|moments)\b", text):
        policy = replace(policy, name=f"{policy.name}_states", states=(BFloat16(),))
    if re.search(r"\b(no|without( an?)?) master\b", text):
        policy = replace(policy, name=f"{policy.name}_no_master", master=None)
    if not eight:
        return policy
    scaling = next((name for pattern, name in _SCALINGS if re.search(pattern, text)), stack.scaling)
    policy = replace(policy, name=f"{policy.name}_fp8", linear=Float8E4M3FN())
    return policy.of_stack(scaling, stack.linear_ops)


def _brain(text: str, stack: Stack) -> Precision:
    """Return the policy for bfloat16, or for either type of 16 bits."""
    if re.search(r"(fp|float)-?32[- ](grad|reduc|accum)", text):
        return POLICIES["mixed"]
    if re.search(r"bf(loat)?-?16[- ](grad|reduc)", text):
        return POLICIES["mixed_bf16_grads"]
    if re.search(rf"\bpure[- ]({_BRAIN})|({_BRAIN})[- ]pure", text):
        return POLICIES["bf16"]
    policy = POLICIES[stack.precision or "mixed"]
    return (
        policy if BFloat16() in (policy.used, policy.compute) or re.search(_HALF, text) else POLICIES["mixed"]
    )
