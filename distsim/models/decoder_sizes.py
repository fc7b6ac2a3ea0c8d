"""The sizes of a decoder-only transformer: records of its parts, from which one builder makes all families.

What a family has is a value here, never a branch in the builder: Llama is RMSNorm, grouped heads and SwiGLU,
GPT-2 LayerNorm, heads with biases and a GELU feed-forward. Sizes that do not fit are refused by name.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from distsim.errors import PlanError
from distsim.models.mixture import Mixture
from distsim.models.parts.attention import GroupedHeads, Latent
from distsim.models.parts.feed_forward import SWIGLU, FeedForward
from distsim.models.parts.layer_maker import RMS, Norm
from distsim.models.sizes import (
    check_caps,
    check_counts,
    check_elements,
    check_layers,
    check_rates,
    check_sizes,
)
from distsim.suggestions import choices_for

MAX_TOKENS = 2**24
"""Of a sequence: each position is a number in the function (tables of rotary positions)."""


@dataclass(frozen=True)
class ExpertLayers:
    """Which layers have experts: those from ``dense`` on, each ``every``-th of them, but not ``without``.

    Layer i counts when (i - ``phase``) is a multiple of ``every``.
    """

    dense: int = 0
    every: int = 1
    phase: int = 0
    without: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_counts(dense=self.dense, phase=self.phase)
        check_sizes(every=self.every)

    def has(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer >= self.dense and (layer - self.phase) % self.every == 0 and layer not in self.without


@dataclass(frozen=True)
class Positions:
    """Where positions come from: a table of ``context`` rows that is learned, or rotations of base ``theta``.

    ``context``: the longest sequence that the model was made for; beyond it there is no learned position.
    ``skipped``: rows of the table ahead of those, which no token reads (OPT has two). ``local_theta``: the
    base in layers with a window, None being the same (Gemma 3 has another). ``turned``, repeated over the
    layers: whether heads are rotated (Yang et al. 2025, NoPE in every so-many-th layer).
    """

    context: int = 8192
    learned: bool = False
    theta: float = 10_000.0
    skipped: int = 0
    local_theta: float | None = None
    turned: tuple[bool, ...] = (True,)

    def __post_init__(self) -> None:
        if not self.turned:
            raise PlanError("turned=() says of no layer whether its heads are rotated; leave it as (True,)")
        check_sizes(context=self.context)
        check_counts(skipped=self.skipped)
        for name, base in (("theta", self.theta), ("local_theta", self.base(True))):
            if not (math.isfinite(base) and base > 0):
                raise PlanError(f"{name}={base!r} must be a positive number")

    def base(self, windowed: bool) -> float:
        """Return the base of the rotations of layers with a window, or of the others."""
        return self.local_theta if windowed and self.local_theta is not None else self.theta

    def turns(self, layer: int) -> bool:
        """Whether the heads of a layer are rotated."""
        return not self.learned and self.turned[layer % len(self.turned)]


@dataclass(frozen=True)
class DropoutRates:
    """Rates of dropout (Srivastava et al. 2014): of the embedding, of attention's weights, of each branch."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0

    def __post_init__(self) -> None:
        check_rates(**{f"{name}_dropout": rate for name, rate in asdict(self).items()})


BRANCHES = ("sequential", "parallel", "parallel_one_norm")
"""How attention and feed-forward of a layer follow each other: what feed-forward reads is what attention was
added to; or both read what came into the layer and are added to it together (Wang and Komatsuzaki 2021,
GPT-J), each behind a norm of its own (GPT-NeoX) or behind one (GPT-J, Falcon 7B)."""


@dataclass(frozen=True)
class PartNames:
    """What a family calls its parameters and layers."""

    embed: str = "embed"
    positions: str = "positions"
    norm1: str = "norm1"
    norm2: str = "norm2"
    out: str = "o"
    gate: str = "gate"
    up: str = "up"
    down: str = "down"
    final: str = "norm"
    dense_layer: str = "layer"
    expert_layer: str = "layer"


LLAMA_NAMES = PartNames()
GPT_NAMES = PartNames("wte", "wpe", "ln1", "ln2", "proj", "gate", "fc", "out", "ln_f")
MIXED_NAMES = PartNames(dense_layer="dense_layer", expert_layer="expert_layer")


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder: layers of attention and feed-forward, or experts where ``expert_layers`` are.

    ``tied``: the output head is the embedding. ``embedding_scale``: what embeddings are multiplied by (the
    root of hidden in Gemma), ``branch_scale`` and ``logit_scale`` what of branches and logits are (Granite).
    ``softcap`` c: logits are c tanh(logits / c), 0 being none. ``branches``: of :data:`BRANCHES`. Batch and
    sequence are no sizes of a model: they are given when it is built. ``left_out`` says what a model has
    besides that is not built. Raises :class:`PlanError` naming what does not fit.
    """

    layers: int
    hidden: int
    vocab: int
    attention: GroupedHeads | Latent
    feed_forward: FeedForward = SWIGLU
    experts: Mixture | None = None
    expert_layers: ExpertLayers = ExpertLayers()
    norm: Norm = RMS
    positions: Positions = Positions()
    dropout: DropoutRates = DropoutRates()
    tied: bool = False
    embedding_scale: float | None = None
    softcap: float = 0.0
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    branches: str = BRANCHES[0]
    names: PartNames = LLAMA_NAMES
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(layers=self.layers, hidden=self.hidden, vocab=self.vocab)
        check_caps(softcap=self.softcap, embedding_scale=self.embedding_scale or 0.0)
        check_caps(branch_scale=self.branch_scale, logit_scale=self.logit_scale)
        check_layers(self.layers)
        if self.branches not in BRANCHES:
            raise PlanError(
                f"branches={self.branches!r} is not one of {choices_for(self.branches, BRANCHES)}"
            )
        turns = [self.positions.turns(layer) for layer in range(self.layers)]
        self.attention.check(self.hidden, (all if isinstance(self.attention, Latent) else any)(turns))
        check_elements(self._largest())

    def _largest(self) -> list[tuple[str, int]]:
        """How many elements the weights have that several sizes multiply."""
        found = [
            ("the embedding (vocab x hidden)", self.vocab * self.hidden),
            ("the feed-forward (hidden x ffn)", self.hidden * self.feed_forward.width(self.hidden)),
        ]
        if isinstance(self.attention, Latent):
            widest = max(self.attention.nope + self.attention.rope, self.attention.value)
            narrow = max(self.attention.q_lora, self.attention.kv_lora, self.hidden)
            found.append(("a projection of the heads", self.attention.heads * widest * narrow))
        else:
            width = self.attention.heads * self.attention.size(self.hidden)
            found.append(("a projection of the heads (hidden x heads x head_dim)", width * self.hidden))
        if self.experts is not None:
            inner = self.experts.ffn * max(self.experts.experts, self.experts.shared)
            found.append(("the experts (experts x hidden x expert_ffn)", inner * self.hidden))
        return found

    @property
    def rotary(self) -> int:
        """How many dimensions of a head carry rotary positions: 0 where positions are learned."""
        return 0 if self.positions.learned else self.attention.turned(self.hidden)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of the feed-forward."""
        return self.experts is not None and self.expert_layers.has(layer)

    def check_input(self, batch: int, seq: int) -> None:
        """Raise :class:`PlanError` when the decoder does not take sequences of ``seq`` tokens."""
        check_sizes(batch=batch, seq=seq)
        if self.positions.learned and seq > self.positions.context:
            raise PlanError(
                f"seq={seq} is beyond the {self.positions.context} positions that are learned; "
                f"use seq of at most {self.positions.context}, or give context={seq}"
            )
        if seq > MAX_TOKENS:
            raise PlanError(f"seq={seq} is more than 2^24 tokens; make it smaller")
