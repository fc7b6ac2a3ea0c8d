"""The one builder of decoder-only transformers: embedding, layers as Calls, norm, output head, loss.

How many parameters a decoder has: all of them, those that a token meets, those of the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distsim.errors import PlanError
from distsim.ir import DType, Float32, Function, Int64, Literal, Tensor, Value
from distsim.ir.type import as_tensor
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.mixture import mixture
from distsim.models.parts.attention import GroupedHeads, grouped_attention, latent_attention
from distsim.models.parts.feed_forward import feed_forward
from distsim.models.parts.layer_maker import LayerMaker, PartMaker
from distsim.models.routing import Loads, Routing, describe_loads
from distsim.ops.attention_options import ATTENTIONS, AttentionOptions
from distsim.ops.onnx_bridge import type_number

THETA = 500_000.0
"""The base of the rotary frequencies of Llama 3 (Grattafiori et al. 2024, table 3)."""

MASKED = -1e4
"""What is added to the scores of tokens that are not seen: small enough in float16 too."""


@dataclass(frozen=True)
class _LayerKind:
    """What tells one layer from another: its window (0: none), the slots of its experts (None: dense), and
    whether its heads are rotated.

    ``load``: what its experts are asked for, and ``theta``, the base of its rotations, are not in the ops.
    """

    window: int
    slots: tuple[int, ...] | None
    turned: bool
    load: Routing | None = field(compare=False)
    theta: float = field(compare=False)


def decoder(
    sizes: DecoderSizes,
    batch: int,
    seq: int,
    dtype: DType | str = Float32(),  # noqa: B008
    loads: Loads = Loads(),  # noqa: B008
    name: str = "decoder",
    attention: str = "flash",
) -> Function:
    """Return a decoder with a cross-entropy loss.

    Inputs: ``tokens`` and ``labels`` [batch, seq] and the parameters; output: the mean loss over the
    positions, with what layers of experts add to it. Layers that are alike are Calls of one callee; layers of
    experts are alike where their slots are (:class:`Routing`). ``attention``: ``flash``, one op, or ``math``,
    written out with a mask that all layers share. Raises :class:`PlanError` for sequences or loads that the
    sizes do not allow.
    """
    sizes.check_input(batch, seq)
    if attention not in ATTENTIONS:
        raise PlanError(f"attention={attention!r} is not one of {', '.join(ATTENTIONS)}")
    top = PartMaker(name, Tensor(dtype, (batch, seq, sizes.hidden)))
    tokens, labels = (
        top.maker.add_input_value(data, Tensor(Int64(), (batch, seq))) for data in ("tokens", "labels")
    )
    table = top.parameter(sizes.names.embed, sizes.vocab, sizes.hidden)
    with top.within("embedding"):
        x = _embedded(top, sizes, table, tokens)
    kinds = _kinds(sizes, seq, loads)
    if sizes.experts is not None and (drawn := [kind.load for kind in kinds if kind.load is not None]):
        top.maker.notes = (describe_loads(drawn, sizes.experts.groups),)
    made = {kind: _layer(sizes, top.like, kind, attention == "math") for kind in dict.fromkeys(kinds)}
    bases = [kind.theta for kind in kinds if kind.turned]
    rotations = _rotations(top, sizes.rotary, bases) if bases else {}
    windows = dict.fromkeys(kind.window for kind in kinds) if attention == "math" else ()
    masks = {window: {"causal": _mask(top, window)} for window in windows}
    losses: list[Value] = []
    for index, kind in enumerate(kinds):
        layer = made[kind]
        tables = (rotations[kind.theta] if kind.turned else {}) | masks.get(kind.window, {})
        own = [top.parameter(f"h{index}.{v.name}", *_shape(v)) for v in layer.parameters]
        inputs = [x, *tables.values(), *own]
        names = [f"x{index}", f"aux_loss{index}"][: len(layer.outputs)]
        x, *aux = top.maker.add("Call", inputs, None, (layer,), names, None, f"h{index}")
        losses += aux
    x = top.norm(x, sizes.names.final, sizes.hidden, sizes.norm, "final")
    with top.within("head"):
        logits = top.scaled(_logits(top, sizes, x, table), sizes.logit_scale, "scaled_logits")
        logits = top.capped(logits, sizes.softcap, "capped_logits")
        own = "cross_entropy" if losses else "loss"
        loss = top("CrossEntropyLoss", logits, labels, name=own, N=batch * seq)
        return top.finish(top("Sum", loss, *losses, name="loss") if losses else loss)


def _embedded(top: PartMaker, sizes: DecoderSizes, table: Value, tokens: Value) -> Value:
    """Return [batch, seq, hidden]: the embedding of the tokens, with learned positions if there are any."""
    _, seq, hidden = top.like.shape
    x = top("Gather", table, tokens, name="embedded", axis=0)
    if sizes.embedding_scale is not None:
        x = top("Mul", x, name="scaled", B=sizes.embedding_scale)
    if sizes.positions.learned:
        first = sizes.positions.skipped
        rows = first + sizes.positions.context
        places = top.parameter(sizes.names.positions, rows, hidden)
        if seq < rows:
            places = top("Slice", places, name="places", starts=(first,), ends=(first + seq,), axes=(0,))
        x = top("Add", x, places, name="x")
    return top.dropped(x, sizes.dropout.embedding, "kept")


def _logits(top: PartMaker, sizes: DecoderSizes, x: Value, table: Value) -> Value:
    if sizes.tied:
        return top("MatMul", x, top("Transpose", table, perm=(1, 0)), name="logits")
    return top("MatMul", x, top.parameter("head", sizes.hidden, sizes.vocab), name="logits")


def _kinds(sizes: DecoderSizes, seq: int, loads: Loads) -> list[_LayerKind]:
    """Return what each layer is. A window of the whole sequence is none."""
    with_experts = [index for index in range(sizes.layers) if sizes.has_experts(index)]
    found: dict[int, Routing] = {}
    if sizes.experts is not None:
        drawn = loads.of_layers(
            sizes.experts.experts, sizes.experts.top_k, len(with_experts), sizes.experts.tokens(seq)
        )
        found = dict(zip(with_experts, drawn, strict=True))
    windows = [sizes.attention.window_of(index) for index in range(sizes.layers)]
    bases = [sizes.positions.base(bool(window)) for window in windows]
    slots = {index: load.slots for index, load in found.items()}
    return [
        _LayerKind(
            window if window < seq else 0,
            slots.get(index),
            sizes.positions.turns(index),
            found.get(index),
            base,
        )
        for index, (window, base) in enumerate(zip(windows, bases, strict=True))
    ]


def _layer(sizes: DecoderSizes, x_type: Tensor, kind: _LayerKind, masked: bool) -> Function:
    """Return a layer: two branches, each of a norm and attention or feed-forward, added to what came in, the
    second to what the first made of it or both at once (``sizes.branches``)."""
    names = sizes.names
    name = names.dense_layer if kind.load is None else names.expert_layer
    layer = LayerMaker(name, x_type, sizes.rotary if kind.turned else 0, masked)
    normed = _before(layer, sizes, layer.x, names.norm1)
    with layer.within("attention"):
        attended = _attention(layer, sizes, normed, kind.window)
    x, first, aux = layer.x, _branch(layer, sizes, attended, 1), None
    if sizes.branches == "sequential":
        x = _added(layer, x, first, "x1")
    if sizes.branches != "parallel_one_norm":
        normed = _before(layer, sizes, x, names.norm2)
    if kind.load is None or sizes.experts is None:
        with layer.within("mlp"):
            made = feed_forward(layer, normed, sizes.feed_forward, (names.gate, names.up, names.down))
    else:
        with layer.within("experts"):
            made, aux = mixture(layer, normed, sizes.experts, kind.load)
    branch = _branch(layer, sizes, made, 2)
    if sizes.branches != "sequential":
        branch = _added(layer, first, branch, "branches")
    x = _added(layer, x, branch, "x2")
    return layer.finish(x) if aux is None else layer.finish(x, aux)


def _attention(layer: LayerMaker, sizes: DecoderSizes, source: Value, window: int) -> Value:
    heads, out = sizes.attention, sizes.names.out
    rate = sizes.dropout.attention
    if isinstance(heads, GroupedHeads):
        options = AttentionOptions(True, heads.scale, heads.softcap, window or None, rate)
        return grouped_attention(layer, source, heads, options, sizes.norm, out)
    return latent_attention(layer, source, heads, AttentionOptions(True, dropout=rate), sizes.norm, out)


def _before(layer: LayerMaker, sizes: DecoderSizes, x: Value, name: str) -> Value:
    """Return what a branch reads: normalized, unless its norm is behind it."""
    return x if sizes.norm.place == "after" else layer.norm(x, name, sizes.hidden, sizes.norm)


def _branch(layer: LayerMaker, sizes: DecoderSizes, branch: Value, index: int) -> Value:
    """Return what of a branch is added: with its norm, dropout and scale, if it has them."""
    if sizes.norm.place != "before":
        branch = layer.norm(branch, f"norm{index}_out", sizes.hidden, sizes.norm)
    with layer.within("residual"):
        branch = layer.dropped(branch, sizes.dropout.residual, f"kept{index}")
        return layer.scaled(branch, sizes.branch_scale, f"scaled{index}")


def _added(layer: LayerMaker, x: Value, branch: Value, name: str) -> Value:
    with layer.within("residual"):
        return layer("Add", x, branch, name=name)


def _shape(value: Value) -> tuple[int, ...]:
    return as_tensor(value.type, value.name).shape


def _on(top: PartMaker) -> dict[str, Any]:
    return {} if top.like.device is None else {"device": top.like.device}


def _rotations(top: PartMaker, size: int, bases: Sequence[float]) -> dict[float, dict[str, Value]]:
    """Return, by the base, cosine and sine [seq, size] of the angles: position times base^(-2i / size), for
    both halves.

    Worked out in float32 at least: bfloat16 does not tell positions beyond 256 apart.
    """
    dtype, seq = top.like.dtype, top.like.shape[1]
    wide = dtype.np if dtype.np.itemsize >= 4 else np.dtype(np.float32)
    positions = Literal(np.arange(seq, dtype=wide).reshape(seq, 1))
    places = top("Constant", name="positions", value=positions, **_on(top))

    def tables(base: float, prefix: str) -> dict[str, Value]:
        frequencies = base ** (-2.0 * np.arange(size // 2) / size)
        rates = Literal(np.concatenate([frequencies, frequencies]).astype(wide))
        angles = top("Mul", places, name=f"{prefix}angles", B=rates)

        def table(op_type: str, name: str) -> Value:
            if wide == dtype.np:
                return top(op_type, angles, name=name)
            return top("Cast", top(op_type, angles), name=name, to=type_number(dtype))

        return {"cos": table("Cos", f"{prefix}cos"), "sin": table("Sin", f"{prefix}sin")}

    found = dict.fromkeys(bases)
    return {base: tables(base, f"base{number}." if number else "") for number, base in enumerate(found)}


def _mask(top: PartMaker, window: int) -> Value:
    """Return the mask [seq, seq] that hides later tokens, and those that are ``window`` or more before."""
    seq = top.like.shape[1]
    fill = Literal(np.full(1, MASKED, top.like.dtype.np))
    hidden = top("ConstantOfShape", input=(seq, seq), value=fill, **_on(top))
    if not window:
        return top("Trilu", hidden, name="causal", k=1, upper=1)
    later, earlier = (top("Trilu", hidden, k=k, upper=upper) for k, upper in ((1, 1), (-window, 0)))
    return top("Add", later, earlier, name=f"causal{window}")


@dataclass(frozen=True)
class ParameterCount:
    """The parameters of a model.

    ``active_params``: without the experts that a token is not sent to; the embedding counts in full.
    ``embedding_params``: those of the table of tokens, which may be the output head's too.
    """

    params: int
    active_params: int
    embedding_params: int


def count_parameters(sizes: DecoderSizes) -> ParameterCount:
    """Count the parameters of a decoder: those of its function, which is built for two tokens.

    >>> from distsim.models.parts.attention import GroupedHeads
    >>> count_parameters(DecoderSizes(2, 16, 32, GroupedHeads(4, 2)))
    ParameterCount(params=8784, active_params=8784, embedding_params=512)
    """
    top_k, experts = (1, 1) if sizes.experts is None else (sizes.experts.top_k, sizes.experts.experts)
    return count_parameters_of(decoder(sizes, 1, min(2, sizes.positions.context)), top_k, experts)


def count_parameters_of(function: Function, top_k: int = 1, experts: int = 1) -> ParameterCount:
    """Count the parameters of a function of which a token meets ``top_k`` of so many experts.

    >>> from distsim.models import mlp
    >>> count_parameters_of(mlp(layers=2, width=8))
    ParameterCount(params=128, active_params=128, embedding_params=0)
    """
    counts = {v: math.prod(as_tensor(v.type, v.name).shape) for v in function.parameters}
    routed = sum(count for value, count in counts.items() if ".experts." in value.name)
    embedded = {op.inputs[0] for op in function.ops if op.op_type == "Gather"}
    total = sum(counts.values())
    embedding = sum(count for value, count in counts.items() if value in embedded)
    return ParameterCount(total, total - routed + routed * top_k // experts, embedding)
