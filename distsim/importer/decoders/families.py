"""How the fields of each family of Hugging Face, ``model_type``, are read: the sizes of its decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from distsim.importer.decoders.config_fields import ConfigFields
from distsim.importer.decoders.family_fields import (
    ACTIVATIONS,
    MAX_CONFIG_LAYERS,
    grouped_heads,
    rotary_base,
    rotary_dims,
    rotary_positions,
    whole_rotary,
    window_of,
    windowed_layers,
)
from distsim.importer.decoders.layer_norm_families import (
    cohere2,
    falcon,
    gpt2,
    gpt_neox,
    opt,
    stablelm,
    starcoder2,
)
from distsim.models.decoder_sizes import MIXED_NAMES, DecoderSizes, DropoutRates, ExpertLayers, Positions
from distsim.models.mixture import MAX_EXPERTS, Mixture
from distsim.models.parts.attention import Latent
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm


def _rotary(fields: ConfigFields, positions: Positions | None = None) -> DecoderSizes:
    """What the families with rotary positions, by default of whole heads, RMSNorm and a gated feed-forward
    share."""
    activation = fields.choice("hidden_act", ACTIVATIONS)
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        grouped_heads(fields),
        FeedForward(fields.count("intermediate_size"), activation),
        norm=Norm(epsilon=fields.number("rms_norm_eps")),
        positions=positions or whole_rotary(fields),
        dropout=DropoutRates(attention=fields.rate("attention_dropout")),
        tied=fields.flag("tie_word_embeddings"),
    )


def _with_heads(sizes: DecoderSizes, **changes: object) -> DecoderSizes:
    return replace(sizes, attention=replace(sizes.attention, **changes))


def _llama(fields: ConfigFields) -> DecoderSizes:
    bias = fields.flag("attention_bias")
    sizes = _with_heads(_rotary(fields), bias=bias, out_bias=bias)
    return replace(sizes, feed_forward=replace(sizes.feed_forward, bias=fields.flag("mlp_bias")))


def _smollm3(fields: ConfigFields) -> DecoderSizes:
    """Llama whose heads are not rotated in some layers; windows, if they are used, are in those."""
    sizes, every = _llama(fields), fields.count("no_rope_layer_interval", most=MAX_CONFIG_LAYERS)
    given = fields.items("no_rope_layers", sizes.layers) or [
        (i + 1) % every != 0 for i in range(sizes.layers)
    ]
    if len(given) != sizes.layers or any(each not in (0, 1) for each in given):
        raise fields.refusal("no_rope_layers", f"{sizes.layers} items, 1 where a layer has positions, else 0")
    turned = tuple([bool(each) for each in given])
    if fields.flag("use_sliding_window"):
        windowed = windowed_layers(fields, tuple([not each for each in turned]))
        sizes = _with_heads(sizes, window=window_of(fields), windowed=windowed)
    return replace(sizes, positions=replace(sizes.positions, turned=turned))


def _granite(fields: ConfigFields) -> DecoderSizes:
    """Llama whose embeddings, scores, branches and logits are scaled (maximal update parametrization)."""
    sizes = _with_heads(_llama(fields), scale=fields.number("attention_multiplier"))
    embedded = fields.number("embedding_multiplier")
    return replace(
        sizes,
        embedding_scale=None if embedded == 1.0 else embedded,
        branch_scale=fields.number("residual_multiplier"),
        logit_scale=1.0 / fields.number("logits_scaling"),
    )


def _mistral(fields: ConfigFields) -> DecoderSizes:
    return _with_heads(_rotary(fields), window=window_of(fields))


def _phi3(fields: ConfigFields) -> DecoderSizes:
    """Llama with a window, whose heads may turn in part; weights that it has in one have a name each here."""
    fields.refuse_unless("embd_pdrop", 0, 0.0)  # which its class holds and does not apply
    sizes = _rotary(fields, rotary_positions(fields))
    turned = rotary_dims(fields, grouped_heads(fields).size(sizes.hidden))
    dropout = replace(sizes.dropout, residual=fields.rate("resid_pdrop"))
    return replace(_with_heads(sizes, window=window_of(fields), rotary_dims=turned), dropout=dropout)


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
    return {"window": window_of(fields), "windowed": windowed_layers(fields, default)}


def _qwen3_heads(fields: ConfigFields) -> DecoderSizes:
    bias = fields.flag("attention_bias")
    return _with_heads(_rotary(fields), bias=bias, out_bias=bias, norm="head")


def _qwen2_moe(fields: ConfigFields) -> DecoderSizes:
    """Qwen2 with experts, of which one is shared, as wide as several, and gated; windows, if they are used,
    in every other layer of those before ``max_window_layers``."""
    sizes = _with_heads(_rotary(fields), bias=fields.flag("qkv_bias"))
    if fields.flag("use_sliding_window"):
        last = fields.count("max_window_layers", least=0)
        default = tuple(index % 2 == 0 and index < last for index in range(sizes.layers))
        sizes = _with_heads(sizes, window=window_of(fields), windowed=windowed_layers(fields, default))
    made = _with_qwen_experts(fields, sizes)
    width, name = fields.count("moe_intermediate_size"), "shared_expert_intermediate_size"
    shared = fields.count(name)
    if shared % width:
        raise fields.refusal(name, f"a multiple of moe_intermediate_size={width}")
    experts = replace(_qwen_experts(fields), shared=shared // width, shared_gate=True)
    return replace(made, experts=experts)


def _qwen3_moe(fields: ConfigFields) -> DecoderSizes:
    """Qwen3 with experts; windows, if they are used, are in all layers."""
    window = window_of(fields) if fields.flag("use_sliding_window") else 0
    return _with_qwen_experts(fields, _with_heads(_qwen3_heads(fields), window=window))


def _with_qwen_experts(fields: ConfigFields, sizes: DecoderSizes) -> DecoderSizes:
    dense = fields.items("mlp_only_layers", sizes.layers)
    if any(type(each) is not int or not 0 <= each < sizes.layers for each in dense):
        raise fields.refusal("mlp_only_layers", f"a list of layers from 0 to {sizes.layers - 1}")
    every = fields.count("decoder_sparse_step")
    return replace(
        sizes,
        experts=_qwen_experts(fields),
        expert_layers=ExpertLayers(every=every, phase=every - 1, without=tuple(cast(list[int], dense))),
        names=MIXED_NAMES,
    )


def _qwen_experts(fields: ConfigFields) -> Mixture:
    experts = _experts(fields, "num_experts", "moe_intermediate_size")
    return replace(experts, normalized=fields.flag("norm_topk_prob"))


def _gemma(fields: ConfigFields) -> DecoderSizes:
    """GeGLU by the tanh form of GELU, also where an older file says ``hidden_act`` gelu."""
    fields.refuse_unless("hidden_activation", "gelu_pytorch_tanh", "gelu")  # of older classes
    return _with_offsets(fields, fields.choice("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}))


def _with_offsets(fields: ConfigFields, activation: str, positions: Positions | None = None) -> DecoderSizes:
    """What all generations of Gemma share: norms that add 1, scaled embeddings."""
    bias = fields.flag("attention_bias")
    sizes = _with_heads(_rotary(fields, positions), bias=bias, out_bias=bias)
    return replace(
        sizes,
        feed_forward=replace(sizes.feed_forward, activation=activation),
        norm=replace(sizes.norm, offset=1.0),
        embedding_scale=float(sizes.hidden) ** 0.5,
    )


def _gemma2(fields: ConfigFields) -> DecoderSizes:
    """Gemma with a second norm behind each branch, caps, and a window in every other layer from the first."""
    return _with_caps(fields, (True, False), whole_rotary(fields))


def _with_caps(fields: ConfigFields, windowed: tuple[bool, ...], positions: Positions) -> DecoderSizes:
    sizes = _with_offsets(fields, fields.choice("hidden_activation", ACTIVATIONS), positions)
    return replace(
        _with_heads(
            sizes,
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            softcap=fields.cap("attn_logit_softcapping"),
            window=window_of(fields),
            windowed=windowed_layers(fields, windowed),
        ),
        norm=replace(sizes.norm, place="around"),
        softcap=fields.cap("final_logit_softcapping"),
    )


def _gemma3(fields: ConfigFields) -> DecoderSizes:
    """Gemma 2 with norms of queries and keys, windows but in each so-many-th layer, and another base of
    rotations where they are; by default without caps."""
    fields.refuse_unless("use_bidirectional_attention", False)
    every, rope = (
        fields.count("sliding_window_pattern", most=MAX_CONFIG_LAYERS),
        fields.part("rope_parameters"),
    )
    fields.refuse_unless("_sliding_window_pattern", every)
    tables = (rope.part("full_attention"), rope.part("sliding_attention"))
    for each in (fields, rope, *tables):
        each.refuse_unless("partial_rotary_factor", 1, 1.0)
    whole, local = (each.table.get("rope_theta") for each in tables)
    positions = Positions(
        fields.count("max_position_embeddings"),
        theta=rotary_base(fields, "rope_theta") if whole is None else tables[0].number("rope_theta"),
        local_theta=fields.number("rope_local_base_freq")
        if local is None
        else tables[1].number("rope_theta"),
    )
    windowed = (True,) * (every - 1) + (False,)
    return _with_heads(_with_caps(fields, windowed, positions), norm="head")


def _glm4(fields: ConfigFields) -> DecoderSizes:
    """Norms around each branch, and heads of which a part turns, here in another order of their columns."""
    sizes = _rotary(fields, rotary_positions(fields))
    turned = rotary_dims(fields, sizes.attention.turned(sizes.hidden))
    sizes = _with_heads(sizes, bias=fields.flag("attention_bias"), rotary_dims=turned)
    return replace(sizes, norm=replace(sizes.norm, place="around"))


def _olmo2(fields: ConfigFields) -> DecoderSizes:
    """Llama whose norms are behind attention and feed-forward, with a norm of all queries and one of keys."""
    sizes = _with_joint_norms(fields)
    return replace(sizes, norm=replace(sizes.norm, place="after"))


def _olmoe(fields: ConfigFields) -> DecoderSizes:
    """Experts, as wide as ``intermediate_size``, and norms of all queries and of all keys."""
    fields.refuse_unless("clip_qkv")
    experts = _experts(fields, "num_experts", "intermediate_size")
    normalized = fields.flag("norm_topk_prob")
    return replace(_with_joint_norms(fields), experts=replace(experts, normalized=normalized))


def _with_joint_norms(fields: ConfigFields) -> DecoderSizes:
    bias = fields.flag("attention_bias")
    return _with_heads(_rotary(fields), bias=bias, out_bias=bias, norm="all")


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
        whole_rotary(fields),
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
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "granite": _granite,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "gpt2": gpt2,
    "opt": opt,
    "gpt_neox": gpt_neox,
    "falcon": falcon,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "cohere2": cohere2,
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
