"""The model of Megatron-LM's arguments: the sizes of a decoder."""

from __future__ import annotations

import re
from typing import cast

from distsim.errors import ImportModelError, PlanError
from distsim.importer.configs.arithmetic import flags_of
from distsim.importer.configs.tracked import TrackedFields
from distsim.importer.decoders import model_names, named_sizes
from distsim.importer.decoders.family_fields import MAX_CONFIG_LAYERS
from distsim.models.decoder_sizes import (
    GPT_NAMES,
    LLAMA_NAMES,
    MIXED_NAMES,
    DecoderSizes,
    DropoutRates,
    ExpertLayers,
    Positions,
)
from distsim.models.mixture import MAX_EXPERTS, Mixture
from distsim.models.parts.attention import GroupedHeads, Latent
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm
from distsim.plan.stacks import STACKS

VOCABULARIES = (
    (r"llama-?3|llama_3", 128256),
    (r"deepseek-?(ai/)?(deepseek-)?v2", 102400),
    (r"deepseek", 129280),
    (r"qwen", 151936),
    (r"mistral|mixtral|llama-?2|llama2tokenizer", 32000),
    (r"gpt-?oss", 201088),
    (r"nemotron-4|gpt-?neox", 50432),
    (r"gpt2|gpt-2", 50257),
)
"""How many tokens the vocabularies of some tokenizers have, by their names (the models' config.json)."""

USUAL_VOCABULARY = 50257
"""Of GPT-2's byte pairs, the tokenizer of Megatron-LM's examples (--vocab-file gpt2-vocab.json)."""

Made = tuple[DecoderSizes, dict[str, object], int]


def model_of(fields: TrackedFields, notes: list[str]) -> Made:
    """Return the sizes, the options of the loads of experts, and what the vocabulary of a rank is padded to.

    Appends to ``notes`` what is not quite as the arguments say.
    """
    hidden = fields.count("--hidden-size")
    layers = fields.count("--num-layers", most=MAX_CONFIG_LAYERS)
    bias = not fields.on("--disable-bias-linear")
    experts, loads = _experts(fields, notes)
    if experts is not None and bias:
        notes.append("biases of experts are left out")
    kind = fields.text("--normalization")
    if kind not in ("LayerNorm", "RMSNorm"):
        raise fields.refusal("--normalization", "LayerNorm or RMSNorm")
    offset = 1.0 if fields.on("--apply-layernorm-1p") else 0.0
    norm = Norm("rms" if kind == "RMSNorm" else "layer", fields.number("--norm-epsilon"), offset)
    positions = _positions(fields, layers, notes)
    plain = GPT_NAMES if kind == "LayerNorm" else LLAMA_NAMES
    try:
        sizes = DecoderSizes(
            layers,
            hidden,
            _vocabulary(fields, notes),
            _attention(fields, hidden, layers, bias, notes),
            _feed_forward(fields, hidden, bias),
            experts,
            _expert_layers(fields, layers, notes) if experts else ExpertLayers(),
            norm,
            positions,
            _dropout(fields),
            not fields.on("--untie-embeddings-and-output-weights"),
            names=plain if experts is None else MIXED_NAMES,
        )
    except PlanError as error:
        raise ImportModelError(f"{fields.origin}: {error}") from error
    return sizes, loads, fields.count("--make-vocab-size-divisible-by")


def _dropout(fields: TrackedFields) -> DropoutRates:
    hidden = fields.rate("--hidden-dropout")
    return DropoutRates(hidden, fields.rate("--attention-dropout"), hidden)


def _vocabulary(fields: TrackedFields, notes: list[str]) -> int:
    for name in ("--padded-vocab-size", "--vocab-size"):
        if fields.given(name):
            return fields.count(name)
    written = " ".join([fields.text("--tokenizer-model", ""), fields.text("--tokenizer-type", "")]).lower()
    found = next((size for pattern, size in VOCABULARIES if re.search(pattern, written)), None)
    if found is not None:
        notes.append(f"--vocab-size: taken to be {found}, that of the tokenizer {written.strip()[:60]}")
        return found
    like = _like(fields)
    size = USUAL_VOCABULARY if like is None else named_sizes(like).vocab
    notes.append(f"--vocab-size: no argument says it; taken to be {size}, that of {like or 'GPT-2'}")
    return size


def _like(fields: TrackedFields) -> str | None:
    """Return the name of a model of the library whose layers have the same sizes."""
    named = ("--num-layers", "--hidden-size", "--num-attention-heads", "--num-experts")
    own = tuple(fields.value(name) for name in named)
    width = fields.value("--ffn-hidden-size")
    for name in model_names():
        sizes = named_sizes(name)
        experts = None if sizes.experts is None else sizes.experts.experts
        widths = (None, sizes.feed_forward.width(sizes.hidden), sizes.experts and sizes.experts.ffn)
        if own == (sizes.layers, sizes.hidden, sizes.attention.heads, experts) and width in widths:
            return name
    return None


def _positions(fields: TrackedFields, layers: int, notes: list[str]) -> Positions:
    seq = fields.count("--seq-length")
    context = fields.maybe_count("--max-position-embeddings") or seq
    kind = fields.text("--position-embedding-type")
    if fields.on("--use-rotary-position-embeddings"):
        kind = "rope"
    if kind not in ("learned_absolute", "rope", "yarn", "mrope", "none"):
        raise fields.refusal("--position-embedding-type", "learned_absolute, rope, yarn or none")
    latent, theta = fields.on("--multi-latent-attention"), fields.number("--rotary-base")
    learned, turned = kind == "learned_absolute" and not latent, (kind != "none" or latent,)
    if fields.value("--no-rope-freq") not in (None, 0):
        if latent or kind in ("none", "learned_absolute"):
            notes.append("--no-rope-freq: of no effect without rotary positions, or in latent attention")
        else:
            turned = _turned(fields, layers)
    return Positions(max(context, seq), learned=learned, theta=theta, turned=turned)


def _turned(fields: TrackedFields, layers: int) -> tuple[bool, ...]:
    """Return in which layers heads are rotated: all but each n-th, or but those that a list says with 1."""
    every = fields.value("--no-rope-freq")
    if type(every) is int and 1 <= every <= layers and layers % every == 0:
        return (*(True,) * (every - 1), False)
    flags = flags_of(str(every))
    if not flags or len(flags) != layers or any(each not in (0, 1) for each in flags):
        raise fields.refusal(
            "--no-rope-freq", f"a divisor of {layers} layers, or a list such as ([0]*3+[1])*8 of as many"
        )
    return tuple([not flag for flag in flags])


def _attention(
    fields: TrackedFields, hidden: int, layers: int, bias: bool, notes: list[str]
) -> GroupedHeads | Latent:
    heads = fields.count("--num-attention-heads")
    width = fields.maybe_count("--kv-channels")
    grouped, groups = fields.on("--group-query-attention"), fields.maybe_count("--num-query-groups")
    own_norm, qkv_bias = fields.on("--qk-layernorm"), fields.on("--add-qkv-bias")
    if fields.on("--multi-latent-attention"):
        if fields.number("--rotary-percent") != 1.0:
            notes.append(
                "--rotary-percent: what turns of latent attention is --qk-pos-emb-head-dim, all of it"
            )
        return Latent(
            heads,
            fields.maybe_count("--q-lora-rank") or 0,
            fields.count("--kv-lora-rank"),
            fields.count("--qk-head-dim"),
            fields.count("--qk-pos-emb-head-dim"),
            fields.count("--v-head-dim"),
        )
    kv_heads = (groups or 1) if grouped else heads
    if heads % kv_heads:
        raise fields.refusal("--num-query-groups", f"a divisor of --num-attention-heads {heads}")
    if width is None and hidden % heads:
        raise fields.refusal("--num-attention-heads", f"a divisor of --hidden-size {hidden}")
    window, windowed = _window(fields, layers)
    return GroupedHeads(
        heads,
        None if kv_heads == heads else kv_heads,
        None if width is None or width * heads == hidden else width,
        bias=bias or qkv_bias,
        out_bias=bias,
        norm="head" if own_norm else "",
        window=window,
        windowed=windowed,
        rotary_dims=_rotary_dims(fields, width or hidden // heads),
    )


def _rotary_dims(fields: TrackedFields, size: int) -> int | None:
    """Return how many dimensions of a head turn where positions are rotary; None: all."""
    share = fields.number("--rotary-percent")
    turned = int(size * share)
    if share == 1.0 or _learns_positions(fields):
        return None
    if not 2 <= turned <= size or turned % 2:
        raise fields.refusal("--rotary-percent", f"a share of a head that is an even number of its {size}")
    return turned


def _learns_positions(fields: TrackedFields) -> bool:
    kind = fields.text("--position-embedding-type")
    return kind == "learned_absolute" and not fields.on("--use-rotary-position-embeddings")


def _window(fields: TrackedFields, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Return how many tokens a query sees, itself included, and in which layers: all but each n-th."""
    if not fields.on("--window-size"):
        return 0, (True,)
    written = re.findall(r"-?[0-9]{1,9}", " ".join(fields.words("--window-size")))
    if len(written) != 2 or int(written[1]) != 0 or int(written[0]) < 0:
        raise fields.refusal(
            "--window-size", "how many tokens are seen before a token, and 0 after it: 127,0"
        )
    every = fields.value("--window-attn-skip-freq")
    if every is None:
        return int(written[0]) + 1, (True,)
    if type(every) is int and 1 <= every <= layers:
        return int(written[0]) + 1, tuple((layer + 1) % every != 0 for layer in range(every))
    flags = flags_of(str(every))
    if not flags:
        raise fields.refusal("--window-attn-skip-freq", "a whole number or a list of zeros and ones")
    return int(written[0]) + 1, tuple(flag == 1 for flag in flags)


def _feed_forward(fields: TrackedFields, hidden: int, bias: bool) -> FeedForward:
    """Return the feed-forward; by default 4 times as wide, gated two thirds of that in whole 64s."""
    swiglu, geglu = fields.on("--swiglu"), fields.on("--quick-geglu")
    relu = fields.on("--squared-relu")
    gated = swiglu or geglu
    width = fields.maybe_count("--ffn-hidden-size")
    fields.value("--openai-gelu")
    if width is None:
        width = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    activation = "silu" if swiglu else "relu" if relu else "gelu"
    return FeedForward(width, activation, gated, bias)


# --- experts ------------------------------------------------------------------------------------------------


def _experts(fields: TrackedFields, notes: list[str]) -> tuple[Mixture | None, dict[str, object]]:
    count = fields.maybe_count("--num-experts")
    if count is None:
        for name in [name for name in fields.table if name.startswith("--moe-")]:
            fields.value(name)  # of nothing
        return None, {}
    if count > MAX_EXPERTS:
        raise fields.refusal("--num-experts", f"at most {MAX_EXPERTS}")
    top_k = fields.count("--moe-router-topk", most=count)
    width = fields.maybe_count("--moe-ffn-hidden-size") or fields.maybe_count("--ffn-hidden-size")
    width = width or 4 * fields.count("--hidden-size")
    if not fields.on("--swiglu") and not fields.on("--quick-geglu"):
        notes.append("experts are built with gated feed-forwards, three products each")
    if not fields.on("--moe-grouped-gemm"):
        notes.append("without --moe-grouped-gemm: experts of a rank still run as grouped products")
    score = fields.text("--moe-router-score-function")
    if score not in ("softmax", "sigmoid"):
        raise fields.refusal("--moe-router-score-function", "softmax or sigmoid")
    scale = fields.value("--moe-router-topk-scaling-factor")
    if scale is not None:
        scale = fields.number("--moe-router-topk-scaling-factor")
    pre_softmax = fields.on("--moe-router-pre-softmax")
    aux_loss, aux_over = _balance(fields, notes)
    experts = Mixture(
        count,
        top_k,
        width,
        _shared(fields, width, notes),
        score,
        float(scale) if isinstance(scale, float) else 1.0,
        normalized=score == "sigmoid" or not pre_softmax,
        aux_loss=aux_loss,
        aux_over=aux_over,
        dispatcher=_dispatcher(fields),
        n_group=fields.maybe_count("--moe-router-num-groups") or 1,
        topk_group=fields.maybe_count("--moe-router-group-topk") or 1,
        weighted=STACKS["megatron"].weighted,
    )
    return experts, _capacity(fields)


def _shared(fields: TrackedFields, width: int, notes: list[str]) -> int:
    """Return the shared experts, in whole widths of an expert."""
    shared = fields.maybe_count("--moe-shared-expert-intermediate-size")
    if shared is None:
        return 0
    count = max(1, round(shared / width))
    if count * width != shared:
        notes.append(
            f"--moe-shared-expert-intermediate-size {shared}: built {count * width} wide, a multiple of the "
            f"{width} of an expert"
        )
    return count


def _balance(fields: TrackedFields, notes: list[str]) -> tuple[float, int]:
    """Return the coefficient of the loss that balances experts, and over how many sequences it does."""
    kinds = fields.words("--moe-router-load-balancing-type")
    coefficient = fields.value("--moe-aux-loss-coeff")
    numbers = cast(list[object], coefficient) if isinstance(coefficient, list) else [coefficient]
    given = [float(each) for each in numbers if isinstance(each, int | float) and 0 < each < 1e6]
    if not given or kinds in (["none"], ["sinkhorn"]):
        return 0.0, 1
    if kinds == ["seq_aux_loss"]:
        return given[0], 1
    micro = fields.maybe_count("--micro-batch-size") or 1
    if kinds != ["aux_loss"]:
        notes.append(f"--moe-router-load-balancing-type {' '.join(kinds)[:60]}: balanced as by aux_loss")
    return given[0], micro


def _dispatcher(fields: TrackedFields) -> str:
    kind = fields.text("--moe-token-dispatcher-type")
    if kind == "flex" or fields.on("--moe-enable-deepep"):
        return "deepep"
    known = {"alltoall": "alltoall", "alltoall_seq": "alltoall", "allgather": "allgather"}
    if kind not in known:
        raise fields.refusal("--moe-token-dispatcher-type", "alltoall, allgather or flex")
    return known[kind]


def _capacity(fields: TrackedFields) -> dict[str, object]:
    pads = fields.on("--moe-pad-expert-input-to-capacity")
    if fields.value("--moe-expert-capacity-factor") is None:
        return {}
    factor = fields.number("--moe-expert-capacity-factor")
    return {"capacity": factor, "pad": pads}


def _expert_layers(fields: TrackedFields, layers: int, notes: list[str]) -> ExpertLayers:
    """Return which layers have experts: with a frequency of n each n-th from the first, or as a list says."""
    every = fields.value("--moe-layer-freq")
    if every is True:
        notes.append("--moe-layer-freq without a value: all layers have experts")
        return ExpertLayers()
    if type(every) is int and 1 <= every <= layers:
        return ExpertLayers(every=every)
    flags = flags_of(str(every))
    if not flags or len(flags) != layers or any(each not in (0, 1) for each in flags):
        raise fields.refusal(
            "--moe-layer-freq", f"a whole number, or a list such as ([0]*3+[1]*58) of {layers} zeros and ones"
        )
    dense = flags.index(1) if 1 in flags else layers
    return ExpertLayers(dense, without=tuple(n for n, flag in enumerate(flags) if n >= dense and not flag))
