"""A mixture of experts as ops of static shapes: token choice, capacity, shared experts.

Each token scores all experts and goes to the ``top_k`` best (Shazeer et al. 2017), whose outputs are added,
weighted by their gates. An expert has a number of *slots* per sequence (:class:`Routing`), or per group of
neighbouring tokens (GShard, Lepikhin et al. 2021); the tokens that give it the largest gates take them, the
others are dropped from it. A slot that nobody takes holds a token with weight zero, so results are those of
dropless token choice wherever the slots suffice.

So that tokens spread over the experts, a loss may be added to the model's (GShard; Switch Transformers,
Fedus et al. 2022, equations 4 to 6): a coefficient times the sum over experts of f_e P_e, where f_e is
E / (k T) times the choices of expert e by T tokens, and P_e the mean of its shares of their scores. The T
tokens are those of a sequence (DeepSeek-V3, DeepSeek-AI 2024, equations 17 to 20; Megatron-LM's
``seq_aux_loss``) or of several neighbouring ones (its ``aux_loss``, of a microbatch); the loss is the mean
over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distsim.errors import PlanError
from distsim.ir import Literal, Value
from distsim.ir.type import as_tensor
from distsim.models.parts.feed_forward import FeedForward, feed_forward
from distsim.models.parts.layer_maker import ACTIVATIONS, LayerMaker, check_activation
from distsim.models.routing import Routing
from distsim.models.sizes import check_caps, check_counts, check_sizes
from distsim.ops.matmul import GROUP
from distsim.ops.parts import shown_sizes
from distsim.suggestions import choices_for
from distsim.token_choice import TokenChoice

SCORES = {"softmax": "Softmax", "sigmoid": "Sigmoid"}
DISPATCHERS = ("alltoall", "allgather", "deepep")
WEIGHTED = ("tokens", "experts")
MAX_EXPERTS = 2**16
"""Of a layer: 32 times those of Switch-C (Fedus et al. 2022)."""

MAX_ROWS = 2**24
"""Of all experts for a sequence or a group: each is a number in the function."""


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture: ``shared`` experts see every token, as one feed-forward ``shared * ffn`` wide;
    with a ``shared_gate`` times the sigmoid of a score of the token (Qwen2-MoE).

    ``score``: softmax (Mixtral, DeepSeek-V2) or sigmoid (DeepSeek-V3). The gates are the scores of the chosen
    experts, divided by their sum if there are several and they are ``normalized``, multiplied by ``scale``.
    Each expert is a gated feed-forward with the ``activation``. A sequence is routed in so many ``groups`` of
    neighbouring tokens, each by itself. ``aux_loss``: the coefficient of the loss that balances the experts,
    0 for none, of the tokens of ``aux_over`` sequences together. ``dispatcher``: where ranks have experts
    each, their tokens' rows are sent to them (``alltoall``), or all ranks have all tokens and take rows of
    them (``allgather``), as Megatron-LM's ``--moe-token-dispatcher-type``, or a token goes once to each node
    and rank that it reaches (``deepep``, :mod:`distsim.hardware.collectives`). A token chooses among the
    experts of its ``topk_group`` best of ``n_group`` groups of neighbouring experts (node-limited routing): a
    group is as good as its best expert (DeepSeek-V2), with sigmoid scores as its two best (DeepSeek-V3).
    ``weighted``: where rows are multiplied by their gates: back at the ranks of their ``tokens``, or before
    the last product of the ``experts``, to whose ranks gates are sent beside the rows (Megatron-LM since core
    0.12: ``weighted_bias_swiglu_impl``, one kernel each way that saves what it reads alone, and the
    probabilities' all-to-all of its token_dispatcher.py).
    """

    experts: int
    top_k: int
    ffn: int
    shared: int = 0
    score: str = "softmax"
    scale: float = 1.0
    normalized: bool = True
    activation: str = "silu"
    groups: int = 1
    aux_loss: float = 0.0
    aux_over: int = 1
    dispatcher: str = DISPATCHERS[0]
    n_group: int = 1
    topk_group: int = 1
    weighted: str = WEIGHTED[0]
    shared_gate: bool = False

    def __post_init__(self) -> None:
        check_sizes(experts=self.experts, top_k=self.top_k, ffn=self.ffn, groups=self.groups)
        check_sizes(aux_over=self.aux_over)
        check_caps(aux_loss=self.aux_loss)
        if self.aux_over > 1 and not self.aux_loss:
            raise PlanError(
                f"aux_over={self.aux_over} sequences are balanced together by aux_loss, which is 0; give "
                "aux_loss=0.01, or leave aux_over out"
            )
        if self.experts > MAX_EXPERTS:
            raise PlanError(f"experts={self.experts} of a layer are more than {MAX_EXPERTS}; use fewer")
        if self.top_k > self.experts:
            raise PlanError(f"top_k={self.top_k} of only {self.experts} experts")
        check_counts(shared=self.shared)
        if self.shared_gate and not self.shared:
            raise PlanError("shared_gate is of shared experts, of which there are none; give shared=1")
        if self.score not in SCORES:
            raise PlanError(f"score={self.score!r} is not one of {choices_for(self.score, SCORES)}")
        if self.dispatcher not in DISPATCHERS:
            raise PlanError(
                f"dispatcher={self.dispatcher!r} is not one of {choices_for(self.dispatcher, DISPATCHERS)}"
            )
        if self.weighted not in WEIGHTED:
            raise PlanError(
                f"weighted={self.weighted!r} is not one of {choices_for(self.weighted, WEIGHTED)}"
            )
        check_caps(scale=self.scale)
        check_activation(self.activation)
        self._check_groups()

    def _check_groups(self) -> None:
        check_sizes(n_group=self.n_group, topk_group=self.topk_group)
        if self.experts % self.n_group:
            raise PlanError(
                f"n_group={self.n_group} does not divide the {self.experts} experts; give one that does, or "
                "n_group=1,topk_group=1"
            )
        if self.topk_group > self.n_group:
            raise PlanError(f"topk_group={self.topk_group} of only n_group={self.n_group} groups of experts")
        if self.top_k > (usable := self.experts // self.n_group * self.topk_group):
            raise PlanError(
                f"top_k={self.top_k} of the {usable} experts that topk_group={self.topk_group} of "
                f"n_group={self.n_group} groups have; use a larger topk_group"
            )

    @property
    def choice(self) -> TokenChoice:
        """How a token chooses its experts."""
        return TokenChoice(self.top_k, self.experts, self.n_group, self.topk_group)

    def tokens(self, seq: int) -> int:
        """Return how many tokens of a sequence are routed together; refuse groups that do not divide it."""
        if seq % self.groups:
            raise PlanError(
                f"groups={self.groups} does not divide the sequence of {seq} tokens; use one that does"
            )
        return seq // self.groups


class Mixed(NamedTuple):
    """What a mixture makes of its tokens [batch, seq, hidden], and its loss, a scalar, if it has one."""

    tokens: Value
    aux_loss: Value | None


def mixture(layer: LayerMaker, x: Value, sizes: Mixture, routing: Routing) -> Mixed:
    """Add a mixture that reads ``x`` [batch, seq, hidden] and return what it makes of it, and its loss.

    Parameters: ``router.w`` [hidden, experts], ``experts.gate.w`` and ``experts.up.w`` [experts, hidden,
    ffn], ``experts.down.w`` [experts, ffn, hidden], and those of the shared feed-forward and its gate.
    ``routing`` is of a group of tokens. Raises :class:`PlanError` when it is not for these experts or so
    many tokens.
    """
    tokens = sizes.tokens(layer.seq)
    if len(routing.slots) != sizes.experts or max(routing.slots) > tokens or not routing.rows:
        raise PlanError(
            f"slots {shown_sizes(routing.slots)} are not for {sizes.experts} experts and {tokens} tokens"
        )
    if routing.rows > MAX_ROWS:
        raise PlanError(f"experts would serve {routing.rows} rows at once, more than 2^24; use a smaller seq")
    leading = (layer.batch,) if sizes.groups == 1 else (layer.batch, sizes.groups)
    shape = (*leading, tokens, layer.hidden)
    grouped = x if sizes.groups == 1 else layer("Reshape", x, name="grouped", shape=shape)
    scores, assigned = _assigned(layer, grouped, sizes)
    balance = _balance(layer, scores, assigned, sizes) if sizes.aux_loss else None
    gates, taken = _taken(layer, assigned, routing)
    places: dict[str, object] = {"batch_dims": len(leading)}
    if sizes.dispatcher == "allgather":
        places["groups"] = routing.slots
    rows = layer("GatherND", grouped, taken, name="dispatched", **places)
    shared = None
    if sizes.shared:  # before the experts: while rows are on their way, unless kernels wait for them
        wide = FeedForward(sizes.shared * sizes.ffn, sizes.activation)
        shared = feed_forward(layer, x, wide, prefix="shared.")
        if sizes.shared_gate:
            score = layer("Sigmoid", layer.linear(x, "shared.score", layer.hidden, 1))
            shared = layer("Mul", shared, score, name="shared.gated_tokens")
    within = sizes.weighted == "experts"
    rows = _experts(layer, rows, sizes, routing, gates if within else None)
    rows = rows if within else layer("Mul", rows, gates, name="weighted")
    made = layer("GatherNDGrad", taken, rows, name="combined", shape=shape, **places)
    if sizes.groups > 1:
        made = layer("Reshape", made, name="ungrouped", shape=(layer.batch, layer.seq, layer.hidden))
    return Mixed(made if shared is None else layer("Add", made, shared, name="mixed_experts"), balance)


def _assigned(layer: LayerMaker, x: Value, sizes: Mixture) -> tuple[Value, Value]:
    """Return scores and gates [..., tokens, experts]: zero for the experts that a token does not choose."""
    logits = layer.linear(x, "router", layer.hidden, sizes.experts)
    axis = {"axis": -1} if sizes.score == "softmax" else {}
    scores = layer(SCORES[sizes.score], logits, name="scores_of_experts", **axis)
    usable = scores if sizes.topk_group == sizes.n_group else _of_best_groups(layer, scores, sizes)
    attributes = {"K": Literal(np.array([sizes.top_k])), "axis": -1}
    best, chosen = layer.maker.add("TopK", [usable], attributes, output_names=["best", "chosen"])
    gates = best
    if sizes.normalized and sizes.top_k > 1:
        gates = layer("Div", best, layer("ReduceSum", best, axes=(-1,), keepdims=1), name="gates")
    if sizes.scale != 1.0:
        gates = layer("Mul", gates, name="scaled_gates", B=sizes.scale)
    shape = as_tensor(logits.type, logits.name).shape
    return scores, layer("GatherElementsGrad", chosen, gates, name="assigned", shape=shape, axis=-1)


def _of_best_groups(layer: LayerMaker, scores: Value, sizes: Mixture) -> Value:
    """Return the scores [..., tokens, experts], zero for experts of groups that are not among the best."""
    shape = as_tensor(scores.type, scores.name).shape
    grouped = layer("Reshape", scores, shape=(*shape[:-1], sizes.n_group, shape[-1] // sizes.n_group))

    def best(source: Value, count: int, name: str) -> tuple[Value, Value]:
        attributes = {"K": Literal(np.array([count])), "axis": -1}
        values, places = layer.maker.add("TopK", [source], attributes, output_names=[name, f"{name}.places"])
        return values, places

    counted = min(2 if sizes.score == "sigmoid" else 1, shape[-1] // sizes.n_group)
    of_group, _ = best(grouped, counted, "best_of_groups")
    of_group = layer("ReduceSum", of_group, name="scores_of_groups", axes=(-1,), keepdims=0)
    values, places = best(of_group, sizes.topk_group, "best_groups")
    picked = layer("Sign", values, name="picked")  # scores are positive: ones
    mask = layer("GatherElementsGrad", places, picked, shape=(*shape[:-1], sizes.n_group), axis=-1)
    mask = layer("Unsqueeze", mask, name="usable_groups", axes=(len(shape),))
    return layer("Reshape", layer("Mul", grouped, mask), name="usable_scores", shape=shape)


def _balance(layer: LayerMaker, scores: Value, assigned: Value, sizes: Mixture) -> Value:
    """Return the loss that balances the experts, of scores and gates [..., tokens, experts]."""
    together, batch = sizes.aux_over, layer.batch
    if batch % together:
        raise PlanError(f"aux_over={together} does not divide the batch of {batch}; use one that does")
    if sizes.score != "softmax":  # shares of the experts, which sum to 1
        scores = layer("Div", scores, layer("ReduceSum", scores, axes=(-1,), keepdims=1), name="shares")

    def summed(source: Value, name: str) -> Value:
        """The sum over the tokens that are balanced together: [batch / together, experts]."""
        tokens = (1,) if sizes.groups == 1 else (1, 2)
        made = layer("ReduceSum", source, name=name, axes=tokens, keepdims=0)
        if together == 1:
            return made
        shape = (batch // together, together, sizes.experts)
        return layer("ReduceSum", layer("Reshape", made, shape=shape), axes=(1,), keepdims=0)

    choices = summed(layer("Sign", assigned, name="aux_loss.chosen"), "aux_loss.choices")
    both = layer("Mul", choices, summed(scores, "aux_loss.shares"))
    tokens = together * layer.seq
    each = sizes.experts / (sizes.top_k * tokens**2) * (together / batch)
    total = layer("ReduceSum", both, axes=(0, 1), keepdims=0)
    return layer("Mul", total, name="aux_loss", B=sizes.aux_loss * each)


def _taken(layer: LayerMaker, assigned: Value, routing: Routing) -> tuple[Value, Value]:
    """Return of each row its gate and its token, both [..., rows, 1]: slot by slot, expert by expert."""
    *leading, _, experts = as_tensor(assigned.type, assigned.name).shape
    depth, first = max(routing.slots), len(leading)
    perm = (*range(first), first + 1, first)
    by_expert = layer("Transpose", assigned, perm=perm)
    attributes = {"K": Literal(np.array([depth])), "axis": -1}
    names = ["gates_of_experts", "tokens_of_experts"]
    found = layer.maker.add("TopK", [by_expert], attributes, output_names=names)
    slots = [expert * depth + slot for expert, count in enumerate(routing.slots) for slot in range(count)]

    def rows(source: Value) -> Value:
        flat = layer("Reshape", source, shape=(*leading, experts * depth))
        if len(slots) < experts * depth:
            flat = layer("Gather", flat, axis=first, indices=Literal(np.array(slots, np.int64)))
        return layer("Unsqueeze", flat, axes=(first + 1,))

    gates, tokens = (rows(value) for value in found)
    return gates, tokens


def _experts(layer: LayerMaker, rows: Value, sizes: Mixture, routing: Routing, gates: Value | None) -> Value:
    """Each row through the gated feed-forward of its expert, and times its gate if that is given."""
    device = {} if layer.like.device is None else {"device": layer.like.device}
    counts = layer("Constant", name="slots", value=Literal(np.array(routing.slots, np.int64)), **device)
    known: dict[str, object] = {"sizes": routing.slots}
    if sum(routing.demand) != routing.rows:
        known["chosen"] = sum(routing.demand)
    if not routing.padded:
        known["counted"] = 1
    if sizes.dispatcher == "deepep":
        known["exchange"] = str(sizes.choice)

    def grouped(source: Value, name: str, width_in: int, width_out: int, group: str = "") -> Value:
        weight = layer.parameter(f"experts.{name}.w", sizes.experts, width_in, width_out)
        of = {GROUP: group} if group else {}
        return layer("GroupedMatMul", source, weight, counts, name=f"experts.{name}", **known, **of)

    op_type, _ = ACTIVATIONS[sizes.activation]
    gate = grouped(rows, "gate", layer.hidden, sizes.ffn, "experts.gated")
    gate = layer.activated(gate, sizes.activation, f"experts.{op_type.lower()}")
    up = grouped(rows, "up", layer.hidden, sizes.ffn, "experts.gated")
    inner = layer("Mul", gate, up, name="experts.gated")
    if gates is not None:
        inner = layer("Mul", inner, gates, name="experts.weighted")
    return grouped(inner, "down", sizes.ffn, layer.hidden)
