"""GPT-style transformers (Radford et al. 2019; Vaswani et al. 2017), pre-norm, learned positions."""

from __future__ import annotations

from distsim.ir import DType, Float32, Function
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import GPT_NAMES, DecoderSizes, Positions
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm
from distsim.models.sizes import check_sizes


def gpt(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    seq: int = 1024,
    batch: int = 8,
    vocab: int = 50304,
    ffn: int | None = None,
    dtype: DType | str = Float32(),  # noqa: B008
) -> Function:
    """Return a decoder-only transformer with a cross-entropy loss (:func:`distsim.models.decoder.decoder`).

    LayerNorm, attention with separate query, key and value projections under a causal mask, LayerNorm, a
    GELU feed-forward of width ``ffn`` (4 x hidden), ``seq`` learned positions. The output head has its own
    weight, and attention is written out.

    >>> from distsim.interpret import count_flops
    >>> function = gpt(layers=2, hidden=64, heads=4, seq=32, batch=2, vocab=128)
    >>> function.outputs[0].type.shape, count_flops(function) > 2 * 2 * 32 * 12 * 2 * 64**2
    ((), True)
    """
    check_sizes(seq=seq, batch=batch)
    sizes = DecoderSizes(
        layers,
        hidden,
        vocab,
        GroupedHeads(heads, bias=True, out_bias=True),
        FeedForward(ffn, "gelu", gated=False, bias=True),
        norm=Norm("layer"),
        positions=Positions(seq, learned=True),
        names=GPT_NAMES,
    )
    return decoder(sizes, batch, seq, dtype, name="gpt", attention="math")
