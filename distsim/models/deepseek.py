"""DeepSeek-style transformers (DeepSeek-AI 2024, "DeepSeek-V2"; 2025, "DeepSeek-V3 Technical Report").

Multi-head latent attention: keys and values come from one compressed vector per position, to which a key of
its own carries the position (decoupled rotary embedding), shared by all heads. The first layers are dense,
the others mixtures of experts with shared ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.errors import PlanError
from distsim.ir import DType, Float32, Function, Mesh, Tensor, Value
from distsim.models.decoder import LayerMaker, decoder
from distsim.models.mixture import Mixture, mixture
from distsim.models.moe import equal_once, layer_routings
from distsim.models.routing import Routing
from distsim.models.sizes import builder, check_counts, check_sizes


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention: heads, ranks of the compressions, and what a head is made of.

    ``q_lora`` 0: queries are not compressed. A head's query and key are ``nope`` dimensions without and
    ``rope`` with a position, its value ``value`` dimensions.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int

    def __post_init__(self) -> None:
        check_sizes(heads=self.heads, kv_lora=self.kv_lora, nope=self.nope, rope=self.rope, value=self.value)
        check_counts(q_lora=self.q_lora)
        if self.rope % 2:
            raise PlanError(f"rope={self.rope} must be even: positions turn pairs")


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

    def __post_init__(self) -> None:
        check_sizes(layers=self.layers, hidden=self.hidden, ffn=self.ffn)
        check_sizes(seq=self.seq, batch=self.batch, vocab=self.vocab)
        check_counts(experts=self.experts, dense=self.dense)

    @property
    def latent(self) -> Latent:
        """The sizes of the attention of each layer."""
        return Latent(self.heads, self.q_lora, self.kv_lora, self.nope, self.rope, self.value)

    @property
    def mixture(self) -> Mixture:
        """The sizes of the mixture of a layer of experts."""
        return Mixture(self.experts, self.top_k, self.expert_ffn, self.shared, "sigmoid", 2.5)


@builder(DeepseekSizes)
def deepseek(
    sizes: DeepseekSizes,
    concentration: float | None = None,
    capacity: float | None = None,
    seed: int = 0,
    dtype: DType = Float32(),  # noqa: B008
    routings: Sequence[Routing] | None = None,
    mesh: Mesh | None = None,
) -> Function:
    """Return a DeepSeek-style decoder with a loss, of :class:`DeepseekSizes` in order or by name.

    Inputs and output, the mean cross entropy, are those of :func:`distsim.models.llama`. ``q_lora``: rank of
    the compression of the queries (1536 in DeepSeek-V3), 0 for none. Without ``experts`` every layer has a
    SwiGLU feed-forward of width ``ffn``; with them (256 in DeepSeek-V3) the first ``dense`` layers have, and
    each of the others
    ``experts`` of width ``expert_ffn``, of which a token takes ``top_k``, and ``shared`` experts for all.
    Loads, ``routings`` (one for each layer of experts) and ``mesh`` are those of :func:`distsim.models.moe`.

    >>> sizes = dict(hidden=16, heads=2, kv_lora=4, nope=4, rope=2, value=4, seq=8, batch=2, vocab=32)
    >>> function = deepseek(layers=2, ffn=8, **sizes)
    >>> sum(value.type.size for value in function.parameters)
    2840
    """
    latent = sizes.latent
    x_type = Tensor(dtype, (sizes.batch, sizes.seq, sizes.hidden), mesh)
    plain = min(sizes.layers, sizes.dense) if sizes.experts else sizes.layers
    made: list[Function] = []
    if plain:
        layer = LayerMaker("dense_layer", x_type, latent.rope)
        x = latent_attention(layer, latent)
        x = layer("Add", x, layer.swiglu(layer.norm(x, "norm2", sizes.hidden), sizes.ffn), name="x2")
        made = [layer.finish(x)] * plain
    if plain < sizes.layers:
        experts = sizes.mixture

        def layer_of(load: Routing) -> Function:
            layer = LayerMaker("expert_layer", x_type, latent.rope)
            x = latent_attention(layer, latent)
            routed = mixture(layer, layer.norm(x, "norm2", sizes.hidden), experts, load)
            return layer.finish(layer("Add", x, routed, name="x2"))

        layers = sizes.layers - plain
        loads = layer_routings(experts, layers, sizes.seq, concentration, capacity, seed, routings)
        made += equal_once(loads, layer_of)
    return decoder("deepseek", made, sizes.vocab, latent.rope)


def latent_attention(layer: LayerMaker, sizes: Latent) -> Value:
    """Add RMSNorm, multi-head latent attention and the residual sum, and return the sum.

    Pairs (i, i + rope/2) turn, where the published code turns neighbours: the same up to an order of the
    weights' columns. The frequencies are not stretched for longer contexts (YaRN).
    """
    batch, seq, hidden, heads = layer.batch, layer.seq, layer.hidden, sizes.heads
    width = sizes.nope + sizes.rope
    normed = layer.norm(layer.x, "norm1", hidden)

    def split(source: Value, *sizes_of: int) -> tuple[Value, ...]:
        return layer.maker.add("Split", [source], {"split": sizes_of, "axis": -1})

    def by_head(source: Value, size: int) -> Value:
        parts = layer("Reshape", source, shape=(batch, seq, heads, size))
        return layer("Transpose", parts, perm=(0, 2, 1, 3))

    query = normed
    if sizes.q_lora:
        query = layer.norm(layer.linear(normed, "q_a", hidden, sizes.q_lora), "q_norm", sizes.q_lora)
    narrow = sizes.q_lora or hidden
    plain, turned = split(
        by_head(layer.linear(query, "q", narrow, heads * width), width), sizes.nope, sizes.rope
    )
    query = layer("Concat", plain, layer.rotated(turned), name="query", axis=-1)

    latent, shared = split(
        layer.linear(normed, "kv_a", hidden, sizes.kv_lora + sizes.rope), sizes.kv_lora, sizes.rope
    )
    latent = layer.norm(latent, "kv_norm", sizes.kv_lora)
    both = sizes.nope + sizes.value
    plain, value = split(
        by_head(layer.linear(latent, "kv_b", sizes.kv_lora, heads * both), both), sizes.nope, sizes.value
    )
    position = layer.rotated(layer("Unsqueeze", shared, axes=(1,)))
    position = layer("Expand", position, shape=(batch, heads, seq, sizes.rope))
    key = layer("Concat", plain, position, name="key", axis=-1)

    mixed = layer("MatMul", layer.weights(query, key, width), value, name="mixed")
    joined = layer("Transpose", mixed, perm=(0, 2, 1, 3))
    flat = layer("Reshape", joined, name="attention", shape=(batch, seq, heads * sizes.value))
    return layer("Add", layer.x, layer.linear(flat, "o", heads * sizes.value, hidden), name="x1")
