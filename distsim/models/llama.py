"""Llama-style transformers (Touvron et al. 2023; Grattafiori et al. 2024, "The Llama 3 Herd of Models").

Pre-norm with RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention
(Ainslie et al. 2023) and a SwiGLU feed-forward (Shazeer 2020); no biases.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distsim.errors import PlanError
from distsim.ir import DType, Float32, Function, Tensor, Value
from distsim.models.decoder import LayerMaker, decoder
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
        check_heads(self.hidden, self.heads, self.kv_heads)


@builder(LlamaSizes)
def llama(sizes: LlamaSizes, dtype: DType = Float32()) -> Function:  # noqa: B008
    """Return a Llama-style decoder with a cross-entropy loss, of :class:`LlamaSizes` in order or by name.

    Inputs: ``tokens`` and ``labels`` [batch, seq] and the parameters; output: the mean loss over the
    positions. The layers are Calls of one callee: RMSNorm, causal attention of ``heads`` query heads in
    ``kv_heads`` groups that share a key and a value head, RMSNorm, and a SwiGLU feed-forward of width
    ``ffn``. The output head has its own weight. Raises :class:`PlanError` naming the sizes when
    ``kv_heads`` does not divide ``heads``, ``heads`` not ``hidden``, or a head has no even width.

    >>> function = llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=8, batch=2, vocab=32)
    >>> sum(value.type.size for value in function.parameters)
    4944
    """
    width = sizes.hidden // sizes.heads
    layer = LayerMaker("layer", Tensor(dtype, (sizes.batch, sizes.seq, sizes.hidden)), width)
    x = attention_block(layer, sizes.heads, sizes.kv_heads)
    x = layer("Add", x, layer.swiglu(layer.norm(x, "norm2", sizes.hidden), sizes.ffn), name="x2")
    return decoder("llama", [layer.finish(x)] * sizes.layers, sizes.vocab, width)


def check_heads(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise :class:`PlanError` when the heads do not divide what they should."""
    if hidden % heads or hidden // heads % 2:
        raise PlanError(f"heads={heads} does not divide hidden={hidden} into heads of an even width")
    if heads % kv_heads:
        raise PlanError(f"kv_heads={kv_heads} does not divide heads={heads}")


def attention_block(layer: LayerMaker, heads: int, kv_heads: int) -> Value:
    """Add RMSNorm, grouped-query attention and the residual sum, and return the sum."""
    hidden, size = layer.hidden, layer.hidden // heads
    normed = layer.norm(layer.x, "norm1", hidden)
    query = layer.linear(normed, "q", hidden, hidden)
    key, value = (layer.linear(normed, name, hidden, kv_heads * size) for name in ("k", "v"))
    mixed = _attention(layer, heads, kv_heads, (query, key, value))
    return layer("Add", layer.x, layer.linear(mixed, "o", hidden, hidden), name="x1")


def _attention(
    layer: LayerMaker, heads: int, kv_heads: int, projections: tuple[Value, Value, Value]
) -> Value:
    """Return the attention of the projections [batch, seq, width], in groups that share keys and values.

    Queries are [batch, kv_heads, group, seq, size], keys and values [batch, kv_heads, 1, seq, size]: each
    product is broadcast over a group, so that nothing is repeated in memory and what divides the
    dimension kv_heads divides queries, keys and values alike.
    """
    batch, seq, hidden, size = layer.batch, layer.seq, layer.hidden, layer.hidden // heads

    def split(source: Value, group: int) -> Value:
        parts = layer("Reshape", source, shape=(batch, seq, kv_heads, group, size))
        return layer("Transpose", parts, perm=(0, 2, 3, 1, 4))

    group = heads // kv_heads
    query, key = layer.rotated(split(projections[0], group)), layer.rotated(split(projections[1], 1))
    weights = layer.weights(query, key, size)
    mixed = layer("MatMul", weights, split(projections[2], 1), name="mixed")
    joined = layer("Transpose", mixed, perm=(0, 3, 1, 2, 4))
    return layer("Reshape", joined, name="attention", shape=(batch, seq, hidden))
