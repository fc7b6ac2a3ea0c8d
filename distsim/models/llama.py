"""Llama-style transformers (Touvron et al. 2023; Grattafiori et al. 2024, "The Llama 3 Herd of Models").

Pre-norm with RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention
(Ainslie et al. 2023) and a SwiGLU feed-forward (Shazeer 2020); no biases.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distsim.ir import DType, Float32, Function
from distsim.models.decoder import THETA, decoder
from distsim.models.decoder_sizes import DecoderSizes, Positions
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.sizes import builder, check_sizes


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a Llama-style decoder; unless given, those of Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    seq: int = 8192
    batch: int = 8
    vocab: int = 128256

    def __post_init__(self) -> None:
        check_sizes(**asdict(self))

    @property
    def decoder(self) -> DecoderSizes:
        """The sizes of the decoder, which has no batch and no sequence."""
        return DecoderSizes(
            self.layers,
            self.hidden,
            self.vocab,
            GroupedHeads(self.heads, self.kv_heads),
            FeedForward(self.ffn),
            positions=Positions(self.seq, theta=THETA),
        )


@builder(LlamaSizes)
def llama(sizes: LlamaSizes, dtype: DType | str = Float32()) -> Function:  # noqa: B008
    """Return a Llama-style decoder with a cross-entropy loss, of :class:`LlamaSizes` in order or by name.

    Inputs: ``tokens`` and ``labels`` [batch, seq] and the parameters; output: the mean loss over the
    positions. The layers are Calls of one callee: RMSNorm, causal attention of ``heads`` query heads in
    ``kv_heads`` groups that share a key and a value head, RMSNorm, and a SwiGLU feed-forward of width
    ``ffn``. The output head has its own weight, and attention is written out. Raises :class:`PlanError`
    naming the sizes when ``kv_heads`` does not divide ``heads``, ``heads`` not ``hidden``, or a head has no
    even width.

    >>> function = llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=8, batch=2, vocab=32)
    >>> sum(value.type.size for value in function.parameters)
    4944
    """
    return decoder(sizes.decoder, sizes.batch, sizes.seq, dtype, name="llama", attention="math")
