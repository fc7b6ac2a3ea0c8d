"""The attention of a layer: grouped heads and multi-head latent attention, down to one core.

The core, softmax(query key' scale) value under a mask, is one op as it is one kernel in frameworks, or it is
written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distsim.errors import PlanError
from distsim.ir import Value
from distsim.models.parts.layer_maker import RMS, LayerMaker, Norm
from distsim.models.sizes import check_caps, check_counts, check_sizes
from distsim.ops.attention_options import AttentionOptions
from distsim.ops.written_attention import write_attention


@dataclass(frozen=True)
class GroupedHeads:
    """``heads`` query heads in ``kv_heads`` groups that share a key and a value head (Ainslie et al. 2023).

    ``kv_heads`` None: as many as heads; ``head_dim`` None: hidden / heads. ``bias``: of queries, keys and
    values, ``out_bias``: of the output. ``norm``: RMSNorm of queries and keys, of each ``head`` or of
    ``all`` of them together (OLMo 2), or none. ``scale`` None: 1 /
    sqrt(head_dim). ``softcap`` c: scores are c tanh(scores / c), 0 being none. ``window``: how many tokens a
    query sees to its left, itself included, 0 being all, in the layers where ``windowed``, repeated over the
    layers, says so. ``rotary_dims``: how many of the first dimensions of a head carry rotary positions, where
    positions are rotary, None being all.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = False
    out_bias: bool = False
    norm: str = ""
    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    windowed: tuple[bool, ...] = (True,)
    rotary_dims: int | None = None

    def __post_init__(self) -> None:
        check_sizes(heads=self.heads, kv_heads=self.groups, head_dim=self.head_dim or 1)
        check_sizes(rotary_dims=2 if self.rotary_dims is None else self.rotary_dims)
        check_counts(window=self.window)
        check_caps(softcap=self.softcap, scale=self.scale or 0.0)
        if self.heads % self.groups:
            fits = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0][-4:]
            usable = " or ".join(fits)
            raise PlanError(
                f"kv_heads={self.groups} does not divide heads={self.heads}: give kv_heads={usable}"
            )
        if self.norm not in ("", "head", "all"):
            raise PlanError(f"queries and keys have a norm of each head, of all or none, not {self.norm!r}")
        if not self.windowed:
            raise PlanError("windowed=() says of no layer whether it has a window; leave it as (True,)")

    @property
    def groups(self) -> int:
        """How many heads keys and values have."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def size(self, hidden: int) -> int:
        """The width of a head of a decoder of width ``hidden``."""
        return self.head_dim or hidden // self.heads

    def turned(self, hidden: int) -> int:
        """How many dimensions of a head carry rotary positions."""
        return self.size(hidden) if self.rotary_dims is None else self.rotary_dims

    def window_of(self, layer: int) -> int:
        """The window of a layer, 0 being none."""
        return self.window if self.windowed[layer % len(self.windowed)] else 0

    def check(self, hidden: int, rotary: bool) -> None:
        """Raise :class:`PlanError` when the heads do not divide what they should."""
        pair = 2 if rotary and self.rotary_dims is None else 1
        if self.head_dim is None and hidden % (self.heads * pair):
            width = " into heads of an even width" if rotary else ""
            raise PlanError(f"heads={self.heads} does not divide hidden={hidden}{width}")
        if self.size(hidden) % pair:
            raise PlanError(f"head_dim={self.head_dim} must be even: positions turn pairs")
        if self.rotary_dims is not None and (self.rotary_dims % 2 or self.rotary_dims > self.size(hidden)):
            raise PlanError(
                f"rotary_dims={self.rotary_dims} must be even, as positions turn pairs, and at most the "
                f"{self.size(hidden)} dimensions of a head"
            )


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024): heads, ranks of compressions, parts of a head.

    ``q_lora`` 0: queries are not compressed. A head's query and key are ``nope`` dimensions without and
    ``rope`` with a position, its value ``value`` dimensions. ``bias``: of the compressions and the output.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(heads=self.heads, kv_lora=self.kv_lora, nope=self.nope, rope=self.rope, value=self.value)
        check_counts(q_lora=self.q_lora)
        if self.rope % 2:
            raise PlanError(f"rope={self.rope} must be even: positions turn pairs")

    def turned(self, hidden: int) -> int:
        """How many dimensions of a head carry rotary positions."""
        return self.rope

    def window_of(self, layer: int) -> int:
        """No layer has a window."""
        return 0

    def check(self, hidden: int, rotary: bool) -> None:
        """Raise :class:`PlanError` without rotary positions: nothing else has to fit."""
        if not rotary:
            raise PlanError(
                "latent attention has rotary positions in all layers: leave out learned ones and turned="
            )


def grouped_attention(
    layer: LayerMaker,
    source: Value,
    sizes: GroupedHeads,
    options: AttentionOptions,
    norm: Norm = RMS,
    out: str = "o",
) -> Value:
    """Add the projections of ``source``, attention of grouped heads, and the output projection ``out``."""
    hidden, size, heads, groups = layer.hidden, sizes.size(layer.hidden), sizes.heads, sizes.groups
    widths = {"q": heads * size, "k": groups * size, "v": groups * size}
    query, key, value = (layer.linear(source, n, hidden, w, sizes.bias, "qkv") for n, w in widths.items())
    inner = Norm(epsilon=norm.epsilon, offset=norm.offset)
    if sizes.norm == "all":
        query = layer.norm(query, "q_norm", widths["q"], inner)
        key = layer.norm(key, "k_norm", widths["k"], inner)
    query = _by_head(layer, query, heads, size)
    key, value = (_by_head(layer, each, groups, size) for each in (key, value))
    if sizes.norm == "head":
        query = layer.norm(query, "q_norm", size, inner)
        key = layer.norm(key, "k_norm", size, inner)
    if layer.turns:
        query, key = (_turned(layer, each, sizes.turned(hidden), size) for each in (query, key))
    joined = _joined(layer, core(layer, query, key, value, options), heads * size)
    return layer.linear(joined, out, heads * size, hidden, sizes.out_bias)


def latent_attention(
    layer: LayerMaker,
    source: Value,
    sizes: Latent,
    options: AttentionOptions,
    norm: Norm = RMS,
    out: str = "o",
) -> Value:
    """Add the projections of ``source``, multi-head latent attention, and the output projection ``out``.

    Pairs (i, i + rope/2) turn, where the published code turns neighbours: the same up to an order of the
    weights' columns. The frequencies are not stretched for longer contexts (YaRN).
    """
    batch, seq, hidden, heads = layer.batch, layer.seq, layer.hidden, sizes.heads
    width, both = sizes.nope + sizes.rope, sizes.nope + sizes.value
    inner = Norm(epsilon=norm.epsilon)

    def split(source: Value, *sizes_of: int) -> tuple[Value, ...]:
        return layer.maker.add("Split", [source], {"split": sizes_of, "axis": -1})

    query = source
    if sizes.q_lora:
        narrow = layer.linear(source, "q_a", hidden, sizes.q_lora, sizes.bias)
        query = layer.norm(narrow, "q_norm", sizes.q_lora, inner)
    query = layer.linear(query, "q", sizes.q_lora or hidden, heads * width)
    plain, turned = split(_by_head(layer, query, heads, width), sizes.nope, sizes.rope)
    query = layer("Concat", plain, layer.rotated(turned), name="query", axis=-1)

    compressed = layer.linear(source, "kv_a", hidden, sizes.kv_lora + sizes.rope, sizes.bias)
    latent, shared = split(compressed, sizes.kv_lora, sizes.rope)
    latent = layer.norm(latent, "kv_norm", sizes.kv_lora, inner)
    pairs = layer.linear(latent, "kv_b", sizes.kv_lora, heads * both)
    plain, value = split(_by_head(layer, pairs, heads, both), sizes.nope, sizes.value)
    position = layer.rotated(layer("Unsqueeze", shared, axes=(1,)))
    position = layer("Expand", position, shape=(batch, heads, seq, sizes.rope))
    key = layer("Concat", plain, position, name="key", axis=-1)

    joined = _joined(layer, core(layer, query, key, value, options), heads * sizes.value)
    return layer.linear(joined, out, heads * sizes.value, hidden, sizes.bias)


def core(layer: LayerMaker, query: Value, key: Value, value: Value, options: AttentionOptions) -> Value:
    """The attention of heads [batch, heads, seq, size]: one op, or written out where the layer has a mask."""
    heads, mask = [query, key, value], layer.tables.get("causal")
    if mask is None:
        names = ["mixed", "log_sum_exp"]
        return layer.maker.add("Attention", heads, options.attributes(), output_names=names)[0]
    rest = replace(options, is_causal=False, window=None)  # the mask says both
    return write_attention(layer.maker, [*heads, mask], rest.attributes(), "mixed", causal_mask=True)


def _turned(layer: LayerMaker, heads: Value, turned: int, size: int) -> Value:
    """Return heads of which the first ``turned`` of ``size`` dimensions have been turned."""
    if turned == size:
        return layer.rotated(heads)
    first, rest = layer.maker.add("Split", [heads], {"split": (turned, size - turned), "axis": -1})
    return layer("Concat", layer.rotated(first), rest, axis=-1)


def _by_head(layer: LayerMaker, source: Value, heads: int, size: int) -> Value:
    """Return [batch, heads, seq, size] of a projection [batch, seq, heads x size]."""
    parts = layer("Reshape", source, shape=(layer.batch, layer.seq, heads, size))
    return layer("Transpose", parts, perm=(0, 2, 1, 3))


def _joined(layer: LayerMaker, mixed: Value, width: int) -> Value:
    """Return [batch, seq, width] of [batch, heads, seq, size]."""
    joined = layer("Transpose", mixed, perm=(0, 2, 1, 3))
    return layer("Reshape", joined, name="attention", shape=(layer.batch, layer.seq, width))
