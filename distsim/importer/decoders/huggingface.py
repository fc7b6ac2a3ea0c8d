"""import_from_hf: the decoder that a Hugging Face ``config.json`` describes.

What each field means is what transformers (5.23) makes of it for the family, ``model_type``, and so is what
one that is left out means (:mod:`.class_defaults`). Not built, as
none of it changes a step's ops or parameters: rescaled rotary frequencies (``rope_scaling``), the element
type of the checkpoint and its quantization (the step's precision says what is used), the choice of experts
by groups (loads are drawn). Not built either, which a note says: multi-token prediction
(``num_nextn_predict_layers``), an optional module of DeepSeek-V3 that its published count leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from distsim.errors import ImportModelError, PlanError, wrong_type
from distsim.importer.decoders.class_defaults import CLASS_DEFAULTS
from distsim.importer.decoders.config_fields import ConfigFields, read_config
from distsim.importer.decoders.near_families import near_family
from distsim.ir import DType, Float32, Function
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import (
    GPT_NAMES,
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
from distsim.suggestions import did_you_mean

Config = str | os.PathLike[str] | Mapping[str, object]

DEFAULT_BATCH, MAX_DEFAULT_SEQ = 8, 8192

MAX_CONFIG_LAYERS = 250
"""Twice those of the deepest published models. With as many the whole way from a stranger's file to its step
takes some five seconds, and half a minute with everything divided and recomputed; a model that is built in
Python, or whose ``layers=`` is an option, may have :data:`distsim.models.sizes.MAX_LAYERS`."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""What transformers' names of activations stand for."""


def import_from_hf(
    config: Config,
    batch: int = DEFAULT_BATCH,
    seq: int | None = None,
    dtype: DType | str = Float32(),  # noqa: B008
    attention: str = "flash",
) -> Function:
    """Return the forward function, with a loss, of a ``config.json`` or of the table that it holds.

    ``seq``: by default the longest sequence that the model was made for, at most 8,192 tokens;
    ``attention``: ``flash`` or ``math``. The families are those of :data:`FAMILIES`. Raises
    :class:`ImportModelError` naming the field, its value and what is usable where a field is missing or makes
    no sense; :class:`PlanError` for a sequence that is too long.

    >>> config = dict(model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...               num_attention_heads=4, num_key_value_heads=2, vocab_size=32)
    >>> function = import_from_hf(config, batch=2, seq=8)
    >>> sum(value.type.size for value in function.parameters)
    4944
    """
    sizes = sizes_from_hf(config)
    length = default_seq(sizes) if seq is None else seq
    function = decoder(sizes, batch, length, dtype, name="model", attention=attention)
    return replace(function, notes=(*function.notes, *sizes.left_out))


def default_seq(sizes: DecoderSizes) -> int:
    """Return how long sequences are unless that is given: as the model was made for, up to 8,192 tokens."""
    return min(sizes.positions.context, MAX_DEFAULT_SEQ)


def sizes_from_hf(config: Config, origin: str = "") -> DecoderSizes:
    """Return the sizes of the decoder that a ``config.json``, or the table that it holds, describes.

    ``origin`` begins the errors about a table.
    """
    if isinstance(config, Mapping):
        origin, table = origin or "config", config
    else:
        if not isinstance(config, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("config", config, "the path of a config.json, or what it holds as a mapping")
        origin, table = os.fspath(config), read_config(config)
    family = table.get("model_type")
    defaults = CLASS_DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    fields = ConfigFields(origin, table, defaults)
    fields.finite()
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        instead = near_family(table) or did_you_mean(family, FAMILIES)
        raise fields.refusal("model_type", f"one of {known}{instead}")
    try:
        return replace(FAMILIES[family](fields), left_out=_left_out(fields))
    except PlanError as error:  # sizes that do not fit each other
        raise ImportModelError(f"{fields.origin}: {error}") from error


def _left_out(fields: ConfigFields) -> tuple[str, ...]:
    """Say what the file names that the step would have and is not built."""
    found: list[str] = []
    if layers := fields.table.get("num_nextn_predict_layers"):
        found.append(f"num_nextn_predict_layers={layers!r:.20}: multi-token prediction is not built")
    if fields.table.get("quantization_config"):
        found.append("quantization_config is of the checkpoint; --precision says how it is trained")
    return tuple(found)


def _positions(fields: ConfigFields) -> Positions:
    """Rotary positions; transformers 5 writes their base into a table of its own."""
    rope = fields.part("rope_parameters")
    for each in (fields, rope):
        each.refuse_unless("partial_rotary_factor", 1, 1.0)
    theta = (rope if "rope_theta" in rope.table else fields).number("rope_theta")
    return Positions(fields.count("max_position_embeddings"), theta=theta)


def _heads(fields: ConfigFields) -> GroupedHeads:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads, head_dim = fields.maybe_count("num_key_value_heads"), fields.maybe_count("head_dim")
    if heads % (kv_heads or heads):
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    if head_dim is None and (hidden % heads or hidden // heads % 2):
        raise fields.refusal(
            "num_attention_heads", f"such that hidden_size={hidden} divides into heads of an even width"
        )
    if head_dim is not None and head_dim % 2:
        raise fields.refusal("head_dim", "even, as rotary positions turn pairs")
    return GroupedHeads(
        heads,
        None if kv_heads == heads else kv_heads,
        None if head_dim is not None and head_dim * heads == hidden else head_dim,
    )


def _rotary(fields: ConfigFields) -> DecoderSizes:
    """What the families with rotary positions, RMSNorm and a gated feed-forward share."""
    activation = fields.choice("hidden_act", ACTIVATIONS)
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        _heads(fields),
        FeedForward(fields.count("intermediate_size"), activation),
        norm=Norm(epsilon=fields.number("rms_norm_eps")),
        positions=_positions(fields),
        dropout=DropoutRates(attention=fields.rate("attention_dropout")),
        tied=fields.flag("tie_word_embeddings"),
    )


def _with_heads(sizes: DecoderSizes, **changes: object) -> DecoderSizes:
    return replace(sizes, attention=replace(sizes.attention, **changes))


def _llama(fields: ConfigFields) -> DecoderSizes:
    bias = fields.flag("attention_bias")
    sizes = _with_heads(_rotary(fields), bias=bias, out_bias=bias)
    return replace(sizes, feed_forward=replace(sizes.feed_forward, bias=fields.flag("mlp_bias")))


def _mistral(fields: ConfigFields) -> DecoderSizes:
    return _with_heads(_rotary(fields), window=_window(fields))


def _window(fields: ConfigFields) -> int:
    return fields.maybe_count("sliding_window") or 0


def _windowed(fields: ConfigFields, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers have the window: as ``layer_types`` lists them, unless it is null."""
    layers = fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS)
    types = fields.items("layer_types", layers)
    if not types:
        return default
    known = {"sliding_attention": True, "full_attention": False}
    if len(types) != layers or any(not isinstance(each, str) or each not in known for each in types):
        raise fields.refusal("layer_types", f"{layers} items, each {' or '.join(known)}")
    return tuple(known[cast(str, each)] for each in types)


def _mixtral(fields: ConfigFields) -> DecoderSizes:
    sizes = _mistral(fields)
    return replace(sizes, experts=_experts(fields, "num_local_experts", "intermediate_size"))


def _experts(fields: ConfigFields, number: str, width: str) -> Mixture:
    """The mixture of a family whose gates are the normalized softmax of the chosen experts' scores."""
    experts = fields.count(number, most=MAX_EXPERTS)
    return Mixture(
        experts,
        fields.count("num_experts_per_tok", most=experts),
        fields.count(width),
        activation=fields.choice("hidden_act", ACTIVATIONS),
    )


def _qwen_windows(fields: ConfigFields) -> dict[str, object]:
    """Windows in the layers from ``max_window_layers`` on, if they are used at all."""
    if not fields.flag("use_sliding_window"):
        return {}
    first = fields.count("max_window_layers", least=0)
    default = tuple(
        index >= first for index in range(fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS))
    )
    return {"window": _window(fields), "windowed": _windowed(fields, default)}


def _qwen3_heads(fields: ConfigFields) -> DecoderSizes:
    bias = fields.flag("attention_bias")
    return _with_heads(_rotary(fields), bias=bias, out_bias=bias, norm=True)


def _qwen3_moe(fields: ConfigFields) -> DecoderSizes:
    """Qwen3 with experts; windows, if they are used, are in all layers."""
    window = _window(fields) if fields.flag("use_sliding_window") else 0
    sizes = _with_heads(_qwen3_heads(fields), window=window)
    dense = fields.items("mlp_only_layers", sizes.layers)
    if any(type(each) is not int or not 0 <= each < sizes.layers for each in dense):
        raise fields.refusal("mlp_only_layers", f"a list of layers from 0 to {sizes.layers - 1}")
    every = fields.count("decoder_sparse_step")
    experts = _experts(fields, "num_experts", "moe_intermediate_size")
    return replace(
        sizes,
        experts=replace(experts, normalized=fields.flag("norm_topk_prob")),
        expert_layers=ExpertLayers(every=every, phase=every - 1, without=tuple(cast(list[int], dense))),
        names=MIXED_NAMES,
    )


def _gemma(fields: ConfigFields) -> DecoderSizes:
    """GeGLU by the tanh form of GELU, also where an older file says ``hidden_act`` gelu."""
    fields.refuse_unless("hidden_activation", "gelu_pytorch_tanh", "gelu")  # of older classes
    return _with_offsets(fields, fields.choice("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}))


def _with_offsets(fields: ConfigFields, activation: str) -> DecoderSizes:
    """What both generations of Gemma share: norms that add 1, scaled embeddings."""
    bias = fields.flag("attention_bias")
    sizes = _with_heads(_rotary(fields), bias=bias, out_bias=bias)
    return replace(
        sizes,
        feed_forward=replace(sizes.feed_forward, activation=activation),
        norm=replace(sizes.norm, offset=1.0),
        embedding_scale=float(sizes.hidden) ** 0.5,
    )


def _gemma2(fields: ConfigFields) -> DecoderSizes:
    """Gemma with a second norm behind each branch, caps, and a window in every other layer from the first."""
    sizes = _with_offsets(fields, fields.choice("hidden_activation", ACTIVATIONS))
    return replace(
        _with_heads(
            sizes,
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            softcap=fields.cap("attn_logit_softcapping"),
            window=_window(fields),
            windowed=_windowed(fields, (True, False)),
        ),
        norm=replace(sizes.norm, sandwich=True),
        softcap=fields.cap("final_logit_softcapping"),
    )


def _gpt2(fields: ConfigFields) -> DecoderSizes:
    fields.refuse_unless("scale_attn_weights", True)
    fields.refuse_unless("scale_attn_by_inverse_layer_idx", False)
    fields.refuse_unless("add_cross_attention", False)
    hidden, heads = fields.count("n_embd"), fields.count("n_head")
    if hidden % heads:
        raise fields.refusal("n_head", f"a divisor of n_embd={hidden}")
    activation = fields.choice("activation_function", ACTIVATIONS)
    rates = (fields.rate(name) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"))
    return DecoderSizes(
        fields.count("n_layer", most=MAX_CONFIG_LAYERS),
        hidden,
        fields.count("vocab_size"),
        GroupedHeads(heads, bias=True, out_bias=True),
        FeedForward(fields.maybe_count("n_inner"), activation, gated=False, bias=True),
        norm=Norm("layer", fields.number("layer_norm_epsilon")),
        positions=Positions(fields.count("n_positions"), learned=True),
        dropout=DropoutRates(*rates),
        tied=fields.flag("tie_word_embeddings"),
        names=GPT_NAMES,
    )


def _deepseek(fields: ConfigFields) -> DecoderSizes:
    layers = fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS)
    rope = fields.count("qk_rope_head_dim")
    if rope % 2:
        raise fields.refusal("qk_rope_head_dim", "even, as rotary positions turn pairs")
    experts = None
    if fields.maybe_count("n_routed_experts") is not None:
        number = fields.count("n_routed_experts", most=MAX_EXPERTS)
        n_group, topk_group = _expert_groups(fields, number)
        experts = Mixture(
            number,
            fields.count("num_experts_per_tok", most=number),
            fields.count("moe_intermediate_size"),
            fields.maybe_count("n_shared_experts", least=0) or 0,
            fields.choice("scoring_func", {"softmax": "softmax", "sigmoid": "sigmoid"}),
            fields.number("routed_scaling_factor"),
            fields.flag("norm_topk_prob"),
            fields.choice("hidden_act", ACTIVATIONS),
            n_group=n_group,
            topk_group=topk_group,
        )
    return DecoderSizes(
        layers,
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        Latent(
            fields.count("num_attention_heads"),
            fields.maybe_count("q_lora_rank") or 0,
            fields.count("kv_lora_rank"),
            fields.count("qk_nope_head_dim"),
            rope,
            fields.count("v_head_dim"),
            fields.flag("attention_bias"),
        ),
        FeedForward(fields.count("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS)),
        experts,
        ExpertLayers(fields.count("first_k_dense_replace", least=0), fields.count("moe_layer_freq")),
        Norm(epsilon=fields.number("rms_norm_eps")),
        _positions(fields),
        DropoutRates(attention=fields.rate("attention_dropout")),
        fields.flag("tie_word_embeddings"),
        names=MIXED_NAMES,
    )


FAMILIES: dict[str, Callable[[ConfigFields], DecoderSizes]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": lambda fields: _with_heads(_rotary(fields), bias=True, **_qwen_windows(fields)),
    "qwen3": lambda fields: _with_heads(_qwen3_heads(fields), **_qwen_windows(fields)),
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""How each family, ``model_type``, is read."""


def _expert_groups(fields: ConfigFields, experts: int) -> tuple[int, int]:
    """Return into how many groups experts are put, and among how many of these a token chooses."""
    limited = {"greedy": "", "group_limited_greedy": "limited", "noaux_tc": "limited"}
    if not fields.choice("topk_method", limited):
        return 1, 1
    groups = fields.maybe_count("n_group") or 1
    if experts % groups:
        raise fields.refusal("n_group", f"a divisor of the {experts} experts")
    limit = fields.maybe_count("topk_group") or groups
    if limit > groups or fields.count("num_experts_per_tok") > experts // groups * limit:
        raise fields.refusal("topk_group", f"enough, of the {groups} groups, for num_experts_per_tok experts")
    return groups, limit
