"""Families of Hugging Face with LayerNorm: GPT-2, OPT, GPT-NeoX, Falcon, StarCoder 2, StableLM
and Cohere 2."""

from __future__ import annotations

from dataclasses import replace

from distsim.importer.decoders.config_fields import ConfigFields
from distsim.importer.decoders.family_fields import (
    ACTIVATIONS,
    MAX_CONFIG_LAYERS,
    grouped_heads,
    refuse_unread,
    rotary_dims,
    rotary_positions,
    whole_rotary,
    window_of,
    windowed_layers,
)
from distsim.models.decoder_sizes import GPT_NAMES, DecoderSizes, DropoutRates, Positions
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm


def gpt2(fields: ConfigFields) -> DecoderSizes:
    """Learned positions, biases everywhere."""
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


def opt(fields: ConfigFields) -> DecoderSizes:
    """GPT-2 with ReLU, two rows more in the table of positions, and no dropout of the embedding."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.refuse_unless("do_layer_norm_before", True)
    fields.refuse_unless("word_embed_proj_dim", hidden)
    fields.refuse_unless("_remove_final_layer_norm", False)
    fields.refuse_unless("enable_bias", True)
    fields.refuse_unless("layer_norm_elementwise_affine", True)
    fields.refuse_unless("layerdrop", 0, 0.0)
    if hidden % heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size={hidden}")
    activation = fields.choice("activation_function", ACTIVATIONS)
    rates = (0.0, fields.rate("attention_dropout"), fields.rate("dropout"))
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        hidden,
        fields.count("vocab_size"),
        GroupedHeads(heads, bias=True, out_bias=True),
        FeedForward(fields.count("ffn_dim"), activation, gated=False, bias=True),
        norm=Norm("layer", 1e-5),
        positions=Positions(fields.count("max_position_embeddings"), learned=True, skipped=2),
        dropout=DropoutRates(*rates),
        tied=fields.flag("tie_word_embeddings"),
        names=GPT_NAMES,
    )


def gpt_neox(fields: ConfigFields) -> DecoderSizes:
    """Rotary positions of a part of a head, LayerNorm, and by default both branches of a layer at once."""
    hidden, bias = fields.count("hidden_size"), fields.flag("attention_bias")
    heads = fields.count("num_attention_heads")
    if hidden % heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size={hidden}")
    refuse_unread(fields, {"num_key_value_heads": heads, "head_dim": hidden // heads})
    turned = rotary_dims(fields, hidden // heads, "rotary_pct")
    rate, activation = fields.rate("hidden_dropout"), fields.choice("hidden_act", ACTIVATIONS)
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        hidden,
        fields.count("vocab_size"),
        GroupedHeads(heads, bias=bias, out_bias=bias, rotary_dims=turned),
        FeedForward(fields.count("intermediate_size"), activation, gated=False, bias=True),
        norm=Norm("layer", fields.number("layer_norm_eps")),
        positions=rotary_positions(fields, "rotary_emb_base"),
        dropout=DropoutRates(rate, fields.rate("attention_dropout"), rate),
        tied=fields.flag("tie_word_embeddings"),
        branches="parallel" if fields.flag("use_parallel_residual") else "sequential",
    )


def falcon(fields: ConfigFields) -> DecoderSizes:
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
        refuse_unread(fields, {"num_kv_heads": heads})
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
        positions=rotary_positions(fields),
        dropout=DropoutRates(attention=fields.rate("attention_dropout")),
        tied=fields.flag("tie_word_embeddings"),
        branches=("parallel_one_norm" if norms == 1 else "parallel") if parallel else "sequential",
    )


def starcoder2(fields: ConfigFields) -> DecoderSizes:
    """Grouped heads with a window in all layers, a feed-forward without a gate, and biases in both."""
    bias, activation = fields.flag("use_bias"), fields.choice("hidden_act", ACTIVATIONS)
    rates = (fields.rate(f"{name}_dropout") for name in ("embedding", "attention", "residual"))
    heads = grouped_heads(fields)
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        replace(heads, bias=bias, out_bias=bias, window=window_of(fields)),
        FeedForward(fields.count("intermediate_size"), activation, gated=False, bias=bias),
        norm=Norm("layer", fields.number("norm_epsilon")),
        positions=whole_rotary(fields),
        dropout=DropoutRates(*rates),
        tied=fields.flag("tie_word_embeddings"),
    )


def stablelm(fields: ConfigFields) -> DecoderSizes:
    """Rotary positions of a part of a head and a gated feed-forward; both branches of one norm if
    parallel."""
    fields.refuse_unless("qk_layernorm", False)
    fields.refuse_unless("hidden_dropout", 0, 0.0)  # of the feed-forward alone
    hidden, heads = fields.count("hidden_size"), grouped_heads(fields)
    if heads.head_dim is not None:
        refuse_unread(fields, {"head_dim": hidden // heads.heads})
    turned, activation = rotary_dims(fields, hidden // heads.heads), fields.choice("hidden_act", ACTIVATIONS)
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        hidden,
        fields.count("vocab_size"),
        replace(heads, bias=fields.flag("use_qkv_bias"), rotary_dims=turned),
        FeedForward(fields.count("intermediate_size"), activation),
        norm=Norm("layer", fields.number("layer_norm_eps")),
        positions=rotary_positions(fields),
        dropout=DropoutRates(attention=fields.rate("attention_dropout")),
        tied=fields.flag("tie_word_embeddings"),
        branches="parallel_one_norm" if fields.flag("use_parallel_residual") else "sequential",
    )


def cohere2(fields: ConfigFields) -> DecoderSizes:
    """Both branches of one norm without a bias; layers with a window have rotated heads, here in another
    order of their columns, the others no positions."""
    hidden, heads, bias = fields.count("hidden_size"), grouped_heads(fields), fields.flag("attention_bias")
    if heads.head_dim is not None:
        refuse_unread(fields, {"head_dim": hidden // heads.heads})
    every, window = fields.count("sliding_window_pattern", most=MAX_CONFIG_LAYERS), window_of(fields)
    windowed = windowed_layers(fields, (True,) * (every - 1) + (False,))
    return DecoderSizes(
        fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS),
        hidden,
        fields.count("vocab_size"),
        replace(heads, bias=bias, out_bias=bias, window=window, windowed=windowed),
        FeedForward(fields.count("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS)),
        norm=Norm("layer", fields.number("layer_norm_eps"), bias=False),
        positions=replace(whole_rotary(fields), turned=windowed if window else (False,)),
        dropout=DropoutRates(attention=fields.rate("attention_dropout")),
        tied=fields.flag("tie_word_embeddings"),
        logit_scale=fields.number("logit_scale"),
        branches="parallel_one_norm",
    )
