"""What families of Hugging Face have in common: how a config's heads, positions and windows are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from distsim.importer.decoders.config_fields import ConfigFields
from distsim.models.decoder_sizes import Positions
from distsim.models.parts.attention import GroupedHeads

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


def whole_rotary(fields: ConfigFields) -> Positions:
    """Rotary positions of whole heads."""
    for each in (fields, fields.part("rope_parameters")):
        each.refuse_unless("partial_rotary_factor", 1, 1.0)
    return rotary_positions(fields)


def rotary_positions(fields: ConfigFields, base: str = "rope_theta") -> Positions:
    """Rotary positions, their base in a field of this name."""
    return Positions(fields.count("max_position_embeddings"), theta=rotary_base(fields, base))


def grouped_heads(fields: ConfigFields) -> GroupedHeads:
    """Heads in groups that share keys and values, of an even width."""
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


def window_of(fields: ConfigFields) -> int:
    """How many tokens a query sees, 0 being all."""
    return fields.maybe_count("sliding_window") or 0


def windowed_layers(fields: ConfigFields, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers have the window: as ``layer_types`` lists them, unless it is null."""
    layers = fields.count("num_hidden_layers", most=MAX_CONFIG_LAYERS)
    types = fields.items("layer_types", layers)
    if not types:
        return default
    known = {"sliding_attention": True, "full_attention": False}
    if len(types) != layers or any(not isinstance(each, str) or each not in known for each in types):
        raise fields.refusal("layer_types", f"{layers} items, each {' or '.join(known)}")
    return tuple(known[cast(str, each)] for each in types)


def rotary_dims(fields: ConfigFields, size: int, name: str = "partial_rotary_factor") -> int | None:
    """Return how many dimensions of a head turn, None being all: int(size x share), as in transformers.

    The share is in field ``name``, or else in the table of its own that transformers 5 writes.
    """
    owner, rope = fields, fields.part("rope_parameters")
    if rope.table.get("partial_rotary_factor") is not None:
        owner, name = rope, "partial_rotary_factor"
    share = owner.number(name)
    refuse_unread(fields, {"partial_rotary_factor": share})
    turned = int(size * share)
    if share > 1 or turned < 2 or turned % 2:
        raise owner.refusal(name, f"a share of a head that is an even number of its {size} dimensions")
    return None if turned == size else turned


def refuse_unread(fields: ConfigFields, usable: Mapping[str, object]) -> None:
    """Refuse fields that transformers' class does not read where they say other than what it takes."""
    for name, value in usable.items():
        if fields.table.get(name) not in (None, value):
            raise fields.refusal(name, f"{value}, as for transformers: it does not read this field")


def rotary_base(fields: ConfigFields, name: str) -> float:
    """Return the base of rotary positions; transformers 5 writes it into a table of its own."""
    rope = fields.part("rope_parameters")
    if rope.table.get("rope_theta") is not None:
        return rope.number("rope_theta")
    if name != "rope_theta":
        refuse_unread(fields, {"rope_theta": fields.value(name)})
    return fields.number(name)
