"""How attention is divided: over batch and heads, and, over ranks of a context, in the sequence.

Kinds of context parallelism divide the sequence of what an attention reads and makes:

- ``allgather``: queries are divided, keys and values brought together before (Llama 3, Dubey et al. 2024,
  section 3.3.2; TransformerEngine's "all_gather"); their gradients come out as sums over the ranks;
- ``ring``: all three are divided, keys and values pass around (:mod:`distsim.ops.ring_attention`);
- ``torch_allgather``, ``torch_alltoall``: a ring whose keys and values are gathered at once, or pass around,
  as torch has it (:mod:`distsim.ops.torch_context`);
- ``ulysses``: heads are divided in place of the sequence, by all-to-alls (DeepSpeed-Ulysses, Jacobs et al.
  2023; TransformerEngine's "a2a").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.ops.attention import formals_of, sizes_of
from distsim.ops.attention_options import ATTENTION_FORMALS, AttentionOptions, AttentionSizes
from distsim.ops.broadcast import aligned
from distsim.ops.operator import Operator, Signature, register
from distsim.ops.places import places
from distsim.ops.ring_attention import attend_part, attend_part_backward, attend_ring, attend_ring_backward
from distsim.ops.sharding_rule import Decomposition, Dim, Pieces, ShardingRule
from distsim.ops.torch_context import attend_backward_by, attend_by

TORCH_ROTATES = {"torch_allgather": "allgather", "torch_alltoall": "alltoall"}
"""The kinds of torch, and its names of how their keys and values come."""

_RINGS = ("ring", *TORCH_ROTATES)
"""The factors of queries and keys that are divided alike, each called as its kind."""
_TORCH = {
    (backward, rotate): Decomposition((attend_backward_by if backward else attend_by)(rotate))
    for backward in (False, True)
    for rotate in TORCH_ROTATES.values()
}


def _labels(
    sizes: AttentionSizes, formals: Sequence[str], signature: Signature
) -> dict[str, tuple[Dim, ...]]:
    """Return the labels of the operands: batch, heads, and the sequence, of queries (``seq``), or of queries
    and keys (``ring``, and the kinds of torch).

    The heads divide with those of keys and values (``heads``), or inside each group (``group``), of which
    keys and values are then whole. What a mask that is static fills stays whole.
    """
    group = Pieces("group", (sizes.group,) * sizes.kv_heads)
    heads: Dim = "heads" if sizes.group == 1 else "group" if sizes.kv_heads == 1 else ("heads", group)
    shared = None if sizes.kv_heads == 1 and sizes.group > 1 else "heads"
    square = sizes.seq == sizes.kv_seq
    seq: Dim = ("seq", *_RINGS) if square else "seq"
    query: tuple[Dim, ...] = ("batch", heads, seq, None)
    keys: tuple[Dim, ...] = ("batch", shared, _RINGS if square else None, None)
    found: dict[str, tuple[Dim, ...]] = {
        "Q": query,
        "K": keys,
        "V": keys,
        "Y": ("batch", seq, heads) if signature.attributes.get("joined", 0) else query,
        "lse": query[:3],
        "dY": query,
    }
    index = places(formals, signature.attributes, len(signature.inputs))
    if "attn_mask" in index:
        shape = signature.inputs[index["attn_mask"]].shape
        found["attn_mask"] = aligned(shape, sizes.scores, query)
    return found


def _ways(
    sizes: AttentionSizes, signature: Signature, masked: bool, backward: bool
) -> tuple[dict[str, str], dict[str, Decomposition]]:
    """Return by kind of context parallelism the factor that it divides, and what becomes of the op so.

    A mask has a row of numbers for all keys of a query: it divides with the queries, not around a ring. One
    beside a causal mask or a window does not say where its rows are in the sequence.
    """
    options = AttentionOptions.of_attributes(signature.attributes)
    placed = options.is_causal or options.window is not None
    kinds, decompositions = {"ulysses": "heads"}, dict[str, Decomposition]()
    if not (masked and placed):
        kinds["allgather"] = "seq"
    if placed and not masked:
        decompositions["seq"] = Decomposition(attend_part_backward if backward else attend_part)
    if not masked and sizes.seq == sizes.kv_seq:
        kinds |= {factor: factor for factor in _RINGS}
        decompositions["ring"] = Decomposition(attend_ring_backward if backward else attend_ring)
        for kind, rotate in TORCH_ROTATES.items():
            decompositions[kind] = _TORCH[backward, rotate]
    return kinds, decompositions


def _rule(signature: Signature, formals: Sequence[str], results: Sequence[str]) -> ShardingRule:
    sizes = sizes_of(formals, signature.attributes, signature.inputs)
    labels = _labels(sizes, formals, signature)
    index: Mapping[str, int] = places(formals, signature.attributes, len(signature.inputs))
    masked = "attn_mask" in index or "attn_mask" in signature.attributes
    kinds, decompositions = _ways(sizes, signature, masked, "dY" in index)
    inputs, outputs = (tuple([labels[name] for name in names]) for names in (index, results))
    linear = ((index["dY"],),) if "dY" in index else ()
    return ShardingRule(
        inputs, outputs, linear, whole=("seq", *_RINGS), decompositions=decompositions, context=kinds
    )


def _sharding(signature: Signature) -> ShardingRule:
    handed_on = ("K", "V") if "last" in signature.attributes else ()
    return _rule(signature, ATTENTION_FORMALS, ("Y", "lse", *handed_on))


def _grad_sharding(signature: Signature) -> ShardingRule:
    formals = formals_of(signature.attributes, len(signature.inputs), 3)
    return _rule(signature, formals, ATTENTION_FORMALS[: len(signature.outputs)])


register(Operator("Attention", sharding=_sharding))
register(Operator("AttentionGrad", sharding=_grad_sharding))
