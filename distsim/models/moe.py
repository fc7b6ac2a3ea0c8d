"""Transformers with mixtures of experts in the manner of Mixtral (Jiang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.ir import DType, Float32, Function
from distsim.models.decoder import THETA, decoder
from distsim.models.decoder_sizes import DecoderSizes, Positions
from distsim.models.mixture import DISPATCHERS, WEIGHTED, Mixture
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.routing import Loads, Routing
from distsim.models.sizes import builder, check_sizes


@dataclass(frozen=True)
class MoeSizes:
    """The sizes of a decoder with mixtures of experts; unless given, those of Mixtral 8x7B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    experts: int = 8
    top_k: int = 2
    shared: int = 0
    seq: int = 4096
    batch: int = 8
    vocab: int = 32000
    groups: int = 1
    aux_loss: float = 0.0
    aux_over: int = 1
    dispatcher: str = DISPATCHERS[0]
    n_group: int = 1
    topk_group: int = 1
    weighted: str = WEIGHTED[0]

    def __post_init__(self) -> None:
        check_sizes(layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads)
        check_sizes(seq=self.seq, batch=self.batch, vocab=self.vocab)

    @property
    def decoder(self) -> DecoderSizes:
        """The sizes of the decoder, which has no batch and no sequence."""
        return DecoderSizes(
            self.layers,
            self.hidden,
            self.vocab,
            GroupedHeads(self.heads, self.kv_heads),
            FeedForward(self.ffn),
            Mixture(
                self.experts,
                self.top_k,
                self.ffn,
                self.shared,
                groups=self.groups,
                aux_loss=self.aux_loss,
                aux_over=self.aux_over,
                dispatcher=self.dispatcher,
                n_group=self.n_group,
                topk_group=self.topk_group,
                weighted=self.weighted,
            ),
            positions=Positions(self.seq, theta=THETA),
        )


@builder(MoeSizes)
def moe(
    sizes: MoeSizes,
    concentration: float | None = None,
    capacity: float | None = None,
    seed: int = 0,
    dtype: DType | str = Float32(),  # noqa: B008
    routings: Sequence[Routing] | None = None,
    pad: bool | None = None,
) -> Function:
    """Return a decoder with mixtures of experts for feed-forwards, of :class:`MoeSizes` in order or by name.

    Inputs and output as those of :func:`distsim.models.llama`. Each of the ``experts`` is a SwiGLU
    feed-forward of width ``ffn``, each token goes to ``top_k`` of them and to ``shared`` more. The load of
    layer i is drawn with seed ``seed + i``, ``concentration``, ``capacity`` and ``pad``
    (:func:`draw_routing`), or given: ``routings``, one a layer. Layers of equal load are Calls of one callee.
    A sequence is routed in ``groups`` of neighbouring tokens, each by itself. ``aux_loss`` and
    ``aux_over``: the loss that balances the experts, ``dispatcher``: how rows get to ranks of experts
    (:class:`distsim.models.mixture.Mixture`).

    >>> sizes = dict(layers=2, hidden=16, heads=4, kv_heads=2, ffn=8, seq=8, batch=2, vocab=32)
    >>> function = moe(experts=4, top_k=2, **sizes)
    >>> sum(value.type.size for value in function.parameters)
    5840
    """
    loads = Loads(concentration, capacity, seed, routings, pad)
    return decoder(sizes.decoder, sizes.batch, sizes.seq, dtype, loads, "moe", "math")
