"""A mixture of experts as ops of static shapes: token choice, capacity, shared experts, expert parallelism.

Each token scores all experts and goes to the ``top_k`` best (Shazeer et al. 2017), whose outputs are added,
weighted by their gates. An expert has a number of *slots* per sequence (:class:`Routing`); the tokens that
give it the largest gates take them, the others are dropped from it. A slot that nobody takes holds a token
with weight zero, so results are those of dropless token choice wherever the slots suffice.

With experts divided over a mesh axis ``ep`` each rank works on the slots of its own experts for the sequences
of every rank: the rows go there by an all-to-all and come back by another. All ranks hold as many rows as the
busiest (the rest is padding, zero and paid for), since that is whom all wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distsim.errors import PlanError
from distsim.ir import Literal, Mesh, Value
from distsim.models.parts.feed_forward import FeedForward, feed_forward
from distsim.models.parts.layer_maker import ACTIVATIONS, LayerMaker, check_activation
from distsim.models.routing import Routing
from distsim.models.sizes import check_caps, check_counts, check_sizes

SCORES = {"softmax": "Softmax", "sigmoid": "Sigmoid"}
AXIS = "ep"
MAX_EXPERTS = 2**16
"""Of a layer: 32 times those of Switch-C (Fedus et al. 2022)."""

MAX_ROWS = 2**24
"""Of all experts for a sequence: each is a number in the function."""


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture: ``shared`` experts see every token, as one feed-forward ``shared * ffn`` wide.

    ``score``: softmax (Mixtral, DeepSeek-V2) or sigmoid (DeepSeek-V3). The gates are the scores of the chosen
    experts, divided by their sum if there are several and they are ``normalized``, multiplied by ``scale``.
    Each expert is a gated feed-forward with the ``activation``.
    """

    experts: int
    top_k: int
    ffn: int
    shared: int = 0
    score: str = "softmax"
    scale: float = 1.0
    normalized: bool = True
    activation: str = "silu"

    def __post_init__(self) -> None:
        check_sizes(experts=self.experts, top_k=self.top_k, ffn=self.ffn)
        if self.experts > MAX_EXPERTS:
            raise PlanError(f"experts={self.experts} of a layer are more than {MAX_EXPERTS}; use fewer")
        if self.top_k > self.experts:
            raise PlanError(f"top_k={self.top_k} of only {self.experts} experts")
        check_counts(shared=self.shared)
        if self.score not in SCORES:
            raise PlanError(f"score={self.score!r} is not one of {', '.join(SCORES)}")
        check_caps(scale=self.scale)
        check_activation(self.activation)


@dataclass(frozen=True)
class _Places:
    """Which slot each row is: its place among [experts, depth], and whether it is one or padding."""

    depth: int
    rows: np.ndarray
    used: np.ndarray


def mixture(layer: LayerMaker, x: Value, sizes: Mixture, routing: Routing) -> Value:
    """Add a mixture that reads ``x`` [batch, seq, hidden] and return what it makes of it.

    Parameters: ``router.w`` [hidden, experts], ``experts.gate.w`` and ``experts.up.w`` [experts, hidden,
    ffn], ``experts.down.w`` [experts, ffn, hidden], and those of the shared feed-forward. Where x is on a
    mesh with an axis ``ep``, each rank has its part of the experts. Raises :class:`PlanError` when the
    routing is not for these experts or their ranks.
    """
    if len(routing.slots) != sizes.experts or max(routing.slots) > layer.seq or not routing.rows:
        raise PlanError(
            f"slots {routing.slots} are not for {sizes.experts} experts and sequences of {layer.seq} tokens"
        )
    if routing.rows > MAX_ROWS:
        raise PlanError(
            f"experts would serve {routing.rows} rows a sequence, more than 2^24; use a smaller seq"
        )
    ranks = _ranks(layer)
    places = _places(routing, ranks)
    assigned = _assigned(layer, x, sizes)
    gates, tokens = _taken(layer, assigned, sizes.experts, places)
    rows = layer("GatherND", x, tokens, name="dispatched", batch_dims=1)
    if ranks > 1:
        rows = layer("MPIAlltoall", rows, name="received", axis=AXIS, split=1, concat=0)
    rows = _experts(layer, rows, sizes, routing, ranks)
    if ranks > 1:
        rows = layer("MPIAlltoall", rows, name="returned", axis=AXIS, split=0, concat=1)
    weighted = layer("Mul", rows, gates, name="weighted")
    shape = (layer.batch, layer.seq, layer.hidden)
    made = layer("GatherNDGrad", tokens, weighted, name="combined", shape=shape, batch_dims=1)
    if sizes.shared:
        wide = FeedForward(sizes.shared * sizes.ffn, sizes.activation)
        made = layer("Add", made, feed_forward(layer, x, wide, prefix="shared."), name="mixed_experts")
    return made


def _ranks(layer: LayerMaker) -> int:
    mesh = layer.like.device
    has = isinstance(mesh, Mesh) and AXIS in dict(mesh.axes)
    return mesh.axis_size(AXIS) if has and isinstance(mesh, Mesh) else 1


def _places(routing: Routing, ranks: int) -> _Places:
    """Lay the slots out rank by rank, expert by expert, each rank padded to the busiest."""
    depth, per_rank = max(routing.slots), routing.busiest(ranks)
    rows: list[int] = []
    used: list[bool] = []
    expert = 0
    for group in routing.groups(ranks):
        own = [(expert + i) * depth + slot for i, slots in enumerate(group) for slot in range(slots)]
        padding = per_rank - len(own)
        rows += own + [0] * padding
        used += [True] * len(own) + [False] * padding
        expert += len(group)
    return _Places(depth, np.array(rows, np.int64), np.array(used))


def _constant(layer: LayerMaker, array: np.ndarray, name: str) -> Value:
    device: dict[str, Any] = {} if layer.like.device is None else {"device": layer.like.device}
    return layer("Constant", name=name, value=Literal(array), **device)


def _assigned(layer: LayerMaker, x: Value, sizes: Mixture) -> Value:
    """Return the gates [batch, seq, experts]: zero for the experts that a token does not choose."""
    logits = layer.linear(x, "router", layer.hidden, sizes.experts)
    axis = {"axis": -1} if sizes.score == "softmax" else {}
    scores = layer(SCORES[sizes.score], logits, name="scores_of_experts", **axis)
    attributes = {"K": Literal(np.array([sizes.top_k])), "axis": -1}
    best, chosen = layer.maker.add("TopK", [scores], attributes, output_names=["best", "chosen"])
    gates = best
    if sizes.normalized and sizes.top_k > 1:
        gates = layer("Div", best, layer("ReduceSum", best, axes=(-1,), keepdims=1), name="gates")
    if sizes.scale != 1.0:
        gates = layer("Mul", gates, name="scaled_gates", B=sizes.scale)
    shape = (layer.batch, layer.seq, sizes.experts)
    return layer("GatherElementsGrad", chosen, gates, name="assigned", shape=shape, axis=-1)


def _taken(layer: LayerMaker, assigned: Value, experts: int, places: _Places) -> tuple[Value, Value]:
    """Return of each row its gate [batch, rows, 1] and its token [batch, rows, 1]."""
    by_expert = layer("Transpose", assigned, perm=(0, 2, 1))
    attributes = {"K": Literal(np.array([places.depth])), "axis": -1}
    names = ["gates_of_experts", "tokens_of_experts"]
    found = layer.maker.add("TopK", [by_expert], attributes, output_names=names)

    everything = np.array_equal(places.rows, np.arange(experts * places.depth))

    def rows(source: Value) -> Value:
        flat = layer("Reshape", source, shape=(layer.batch, experts * places.depth))
        return flat if everything else layer("Gather", flat, axis=1, indices=Literal(places.rows))

    gates, tokens = (layer("Unsqueeze", rows(value), axes=(2,)) for value in found)
    if not places.used.all():
        used = Literal(places.used.astype(layer.like.dtype.np).reshape(-1, 1))
        gates = layer("Mul", gates, _constant(layer, used.array, "used"))
    return gates, tokens


def _experts(layer: LayerMaker, rows: Value, sizes: Mixture, routing: Routing, ranks: int) -> Value:
    """Each row through the SwiGLU feed-forward of its expert."""
    local = sizes.experts // ranks
    counts = _constant(layer, np.array(routing.slots, np.int64), "slots")
    if ranks > 1:
        counts = layer("LocalSlice", counts, name="own_slots", axis=AXIS, dim=0)

    def grouped(source: Value, name: str, width_in: int, width_out: int) -> Value:
        weight = layer.parameter(f"experts.{name}.w", local, width_in, width_out)
        return layer("GroupedMatMul", source, weight, counts, name=f"experts.{name}")

    op_type, _ = ACTIVATIONS[sizes.activation]
    gate = grouped(rows, "gate", layer.hidden, sizes.ffn)
    gate = layer.activated(gate, sizes.activation, f"experts.{op_type.lower()}")
    up = grouped(rows, "up", layer.hidden, sizes.ffn)
    return grouped(layer("Mul", gate, up, name="experts.gated"), "down", sizes.ffn, layer.hidden)
