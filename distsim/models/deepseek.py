"""DeepSeek-style transformers (DeepSeek-AI 2024, "DeepSeek-V2"; 2025, "DeepSeek-V3 Technical Report").

Multi-head latent attention: keys and values come from one compressed vector per position, to which a key of
its own carries the position (decoupled rotary embedding), shared by all heads. The first layers are dense,
the others mixtures of experts with shared ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.ir import DType, Float32, Function
from distsim.models.decoder import THETA, decoder
from distsim.models.decoder_sizes import MIXED_NAMES, DecoderSizes, ExpertLayers, Positions
from distsim.models.mixture import DISPATCHERS, WEIGHTED, Mixture
from distsim.models.parts.attention import Latent
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.routing import Loads, Routing
from distsim.models.sizes import builder, check_counts, check_sizes


@dataclass(frozen=True)
class DeepseekSizes:
    """The sizes of a DeepSeek-style decoder; unless given, those of DeepSeek-V3, dense and without q_lora."""

    layers: int = 61
    hidden: int = 7168
    heads: int = 128
    ffn: int = 18432
    q_lora: int = 0
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    experts: int = 0
    top_k: int = 8
    expert_ffn: int = 2048
    shared: int = 1
    dense: int = 3
    seq: int = 4096
    batch: int = 8
    vocab: int = 129280
    groups: int = 1
    aux_loss: float = 0.0
    aux_over: int = 1
    dispatcher: str = DISPATCHERS[0]
    n_group: int = 1
    topk_group: int = 1
    weighted: str = WEIGHTED[0]

    def __post_init__(self) -> None:
        check_sizes(layers=self.layers, hidden=self.hidden, ffn=self.ffn)
        check_sizes(seq=self.seq, batch=self.batch, vocab=self.vocab)
        check_counts(experts=self.experts, dense=self.dense)

    @property
    def decoder(self) -> DecoderSizes:
        """The sizes of the decoder, which has no batch and no sequence."""
        experts = None
        if self.experts:
            experts = Mixture(
                self.experts,
                self.top_k,
                self.expert_ffn,
                self.shared,
                "sigmoid",
                2.5,
                groups=self.groups,
                aux_loss=self.aux_loss,
                aux_over=self.aux_over,
                dispatcher=self.dispatcher,
                n_group=self.n_group,
                topk_group=self.topk_group,
                weighted=self.weighted,
            )
        return DecoderSizes(
            self.layers,
            self.hidden,
            self.vocab,
            Latent(self.heads, self.q_lora, self.kv_lora, self.nope, self.rope, self.value),
            FeedForward(self.ffn),
            experts,
            ExpertLayers(self.dense),
            positions=Positions(self.seq, theta=THETA),
            names=MIXED_NAMES,
        )


@builder(DeepseekSizes)
def deepseek(
    sizes: DeepseekSizes,
    concentration: float | None = None,
    capacity: float | None = None,
    seed: int = 0,
    dtype: DType | str = Float32(),  # noqa: B008
    routings: Sequence[Routing] | None = None,
    pad: bool | None = None,
) -> Function:
    """Return a DeepSeek-style decoder with a loss, of :class:`DeepseekSizes` in order or by name.

    Inputs and output, the mean cross entropy, are those of :func:`distsim.models.llama`. ``q_lora``: rank of
    the compression of the queries (1536 in DeepSeek-V3), 0 for none. Without ``experts`` every layer has a
    SwiGLU feed-forward of width ``ffn``; with them (256 in DeepSeek-V3) the first ``dense`` layers have, and
    each of the others
    ``experts`` of width ``expert_ffn``, of which a token takes ``top_k``, and ``shared`` experts for all.
    Loads, ``routings`` (one a layer of experts), ``groups``, ``aux_loss``, ``aux_over`` and
    ``dispatcher`` are those of :func:`distsim.models.moe`.

    >>> sizes = dict(hidden=16, heads=2, kv_lora=4, nope=4, rope=2, value=4, seq=8, batch=2, vocab=32)
    >>> function = deepseek(layers=2, ffn=8, **sizes)
    >>> sum(value.type.size for value in function.parameters)
    2840
    """
    loads = Loads(concentration, capacity, seed, routings, pad)
    return decoder(sizes.decoder, sizes.batch, sizes.seq, dtype, loads, "deepseek", "math")
