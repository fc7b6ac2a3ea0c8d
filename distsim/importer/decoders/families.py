"""How the fields of each family of Hugging Face, ``model_type``, are read: the sizes of its decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from distsim.importer.decoders.config_fields import ConfigFields
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


def _positions(fields: ConfigFields) -> Positions:
    """Rotary positions of whole heads."""
    for each in (fields, fields.part("rope_parameters")):
        each.refuse_unless("partial_rotary_factor", 1, 1.0)
    return Positions(fields.count("max_position_embeddings"), theta=_base(fields, "rope_theta"))


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


def _gpt_neox(fields: ConfigFields) -> DecoderSizes:
    """Rotary positions of a part of a head, LayerNorm, and by default both branches of a layer at once."""
    hidden, bias = fields.count("hidden_size"), fields.flag("attention_bias")
    heads = fields.count("num_attention_heads")
    if hidden % heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size={hidden}")
    _unread(fields, {"num_key_value_heads": heads, "head_dim": hidden // heads})
    turned = _rotary_dims(fields, hidden // heads)
    rate, activation = fields.rate("hidden_dropout"), fields.choice("hidden_act", ACTIVATIONS)
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        hidden,
        fields.count("vocab_size"),
        GroupedHeads(heads, bias=bias, out_bias=bias, rotary_dims=turned),
        FeedForward(fields.count("intermediate_size"), activation, gated=False, bias=True),
        norm=Norm("layer", fields.number("layer_norm_eps")),
        positions=Positions(fields.count("max_position_embeddings"), theta=_base(fields, "rotary_emb_base")),
        dropout=DropoutRates(rate, fields.rate("attention_dropout"), rate),
        tied=fields.flag("tie_word_embeddings"),
        branches="parallel" if fields.flag("use_parallel_residual") else "sequential",
    )


def _rotary_dims(fields: ConfigFields, size: int) -> int | None:
    """Return how many dimensions of a head turn, None being all: int(size x share), as in transformers."""
    rope = fields.part("rope_parameters")
    owners = {"partial_rotary_factor": rope, "rotary_pct": fields}
    given = [name for name, owner in owners.items() if owner.table.get(name) is not None]
    name = given[0] if given else "rotary_pct"
    owner = owners[name]
    share = owner.number(name)
    _unread(fields, {"partial_rotary_factor": share})
    turned = int(size * share)
    if share > 1 or turned < 2 or turned % 2:
        raise owner.refusal(name, f"a share of a head that is an even number of its {size} dimensions")
    return None if turned == size else turned


def _unread(fields: ConfigFields, usable: Mapping[str, object]) -> None:
    """Refuse fields that transformers' class does not read where they say other than what it takes."""
    for name, value in usable.items():
        if fields.table.get(name) not in (None, value):
            raise fields.refusal(name, f"{value}, as for transformers: it does not read this field")


def _base(fields: ConfigFields, name: str) -> float:
    """Return the base of rotary positions; transformers 5 writes it into a table of its own."""
    rope = fields.part("rope_parameters")
    if rope.table.get("rope_theta") is not None:
        return rope.number("rope_theta")
    if name != "rope_theta":
        _unread(fields, {"rope_theta": fields.value(name)})
    return fields.number(name)


def _falcon(fields: ConfigFields) -> DecoderSizes:
    """Both branches of a layer at once, of one norm (7B) or of two (40B and 180B, a newer architecture)."""
    fields.refuse_unless("alibi", False)
    fields.refuse_unless("apply_residual_connection_post_layernorm", False)
    fields.refuse_unless("ff_factor", 4)
    new, hidden = fields.flag("new_decoder_architecture"), fields.count("hidden_size")
    parallel, bias = new or fields.flag("parallel_attn"), fields.flag("bias")
    norms = fields.maybe_count("num_ln_in_parallel_attn", most=2) or (2 if new else 1)
    if norms == 2 and not new:
        raise fields.refusal("num_ln_in_parallel_attn", "1 or null: only a new_decoder_architecture has two")
    if not parallel:
        fields.refuse_unless("attention_dropout", 0, 0.0)  # of the residual sum, too
    kv_heads = fields.maybe_count("num_kv_heads") if new else 1 if fields.flag("multi_query") else None
    heads = fields.count("num_attention_heads")
    if not new and kv_heads is None:
        _unread(fields, {"num_kv_heads": heads})
    fields.refuse_unless("hidden_dropout", 0, 0.0)  # of the sum of both branches
    if hidden % heads or hidden // heads % 2:
        raise fields.refusal(
            "num_attention_heads", f"such that hidden_size={hidden} divides into heads of an even width"
        )
    if heads % (kv_heads or heads):
        raise fields.refusal("num_kv_heads", f"a divisor of num_attention_heads={heads}")
    activation = fields.choice("activation", ACTIVATIONS)
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        hidden,
        fields.count("vocab_size"),
        GroupedHeads(heads, None if kv_heads == heads else kv_heads, bias=bias, out_bias=bias),
        FeedForward(fields.maybe_count("ffn_hidden_size"), activation, gated=False, bias=bias),
        norm=Norm("layer", fields.number("layer_norm_epsilon")),
        positions=Positions(fields.count("max_position_embeddings"), theta=_base(fields, "rope_theta")),
        dropout=DropoutRates(attention=fields.rate("attention_dropout")),
        tied=fields.flag("tie_word_embeddings"),
        branches=("parallel_one_norm" if norms == 1 else "parallel") if parallel else "sequential",
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
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
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
