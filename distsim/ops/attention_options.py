"""What an attention is: its options, its sizes, and which keys a query sees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.kernel_rates import ATTENTION_KERNELS
from distsim.ops.operator import Array

Shape = tuple[int, ...]

ATTENTIONS = ("flash", "math")
"""How attention runs: as one kernel, the op ``Attention``, or written out in ops."""

ATTENTION_CHOICES = (*ATTENTIONS, *ATTENTION_KERNELS)
"""The same, or as which kernel: ``flash`` is the one that a device has its figures for."""

ATTENTION_FORMALS = ("Q", "K", "V", "attn_mask")
OPTION_NAMES = ("is_causal", "scale", "softcap", "window", "dropout", "seed", "kernel")


@dataclass(frozen=True)
class AttentionOptions:
    """The attributes of ``Attention``.

    ``scale``: of the products (None: 1 / sqrt(size)); ``softcap`` c: c tanh(scores / c) before the mask, 0
    for none (Gemma 2); ``window``: how many tokens a query sees up to its own place, itself included (None:
    all); ``dropout``: the share of the probabilities that is dropped, by numbers drawn from ``seed``;
    ``kernel``: which of ``ATTENTION_KERNELS`` runs it, "" being the device's usual one.
    """

    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    dropout: float = 0.0
    seed: int = 0
    kernel: str = ""

    @staticmethod
    def of_attributes(attributes: Mapping[str, Any]) -> AttentionOptions:
        """Return the options that are among the attributes of an op; those of others are refused."""
        beside = ("attn_mask", "absent", "bias", "joined", "last", "pairs", "version", "rate")
        allowed = (*OPTION_NAMES, *beside)
        unknown = [name for name in attributes if name not in allowed]
        if unknown:
            raise TypeRuleError(
                f"Attention has no attribute {unknown[0]!r}; it has {', '.join(OPTION_NAMES)}"
            )
        window, scale = attributes.get("window"), attributes.get("scale")
        made = AttentionOptions(
            bool(attributes.get("is_causal", 0)),
            None if scale is None else float(scale),
            float(attributes.get("softcap", 0.0)),
            None if window is None else int(window),
            float(attributes.get("dropout", 0.0)),
            int(attributes.get("seed", 0)),
            attributes.get("kernel", ""),
        )
        for name, fits, rule in (
            ("scale", made.scale is None or math.isfinite(made.scale), "a finite number"),
            ("softcap", 0 <= made.softcap < math.inf, "a finite number from 0 (none) on"),
            ("window", made.window is None or made.window >= 1, "at least 1: a query sees itself"),
            ("dropout", 0 <= made.dropout < 1, "at least 0 and below 1"),
            ("kernel", made.kernel in ("", *ATTENTION_KERNELS), f"one of {', '.join(ATTENTION_KERNELS)}"),
        ):
            if not fits:
                raise TypeRuleError(f"Attention: {name}={attributes[name]} must be {rule}")
        return made

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that say the same; what is as by default is left out."""
        usual = AttentionOptions()
        given = {
            name: getattr(self, name) for name in OPTION_NAMES if getattr(self, name) != getattr(usual, name)
        }
        return given | ({"is_causal": 1} if self.is_causal else {})


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of an attention, read off the shapes of its operands; those that do not fit are refused."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    kv_seq: int
    size: int
    v_size: int

    @staticmethod
    def of_shapes(query: Shape, key: Shape, value: Shape) -> AttentionSizes:
        """Return the sizes, or raise :class:`TypeRuleError` with the shapes."""
        if not len(query) == len(key) == len(value) == 4:
            raise TypeRuleError(
                f"Attention takes Q, K, V of [batch, heads, seq, size], not {query}, {key}, {value}; "
                "reshape and transpose what has its heads in one dimension"
            )
        made = AttentionSizes(query[0], query[1], key[1], query[2], key[2], query[3], value[3])
        if key != (made.batch, made.kv_heads, made.kv_seq, made.size) or value[:3] != key[:3]:
            raise TypeRuleError(
                f"Attention of Q {query}, K {key}, V {value}: batches must agree, Q and K in their last "
                "dimension, K and V in their heads and their sequence"
            )
        if made.kv_heads == 0 or made.heads % made.kv_heads:
            raise TypeRuleError(
                f"Attention: {made.kv_heads} heads of K and V do not divide {made.heads} of Q into groups"
            )
        return made

    @property
    def group(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def scores(self) -> Shape:
        """The shape that a mask is broadcast to; no tensor has it."""
        return (self.batch, self.heads, self.seq, self.kv_seq)

    @property
    def output(self) -> Shape:
        """The shape of Y."""
        return (self.batch, self.heads, self.seq, self.v_size)


def pairs_seen(seq: int, kv_seq: int, options: AttentionOptions) -> float:
    """Return how many pairs of query and key are multiplied for each head.

    Under a causal mask half of all pairs of a square, as FlashAttention's figures count (Dao 2023, section
    4.1: a key in the query's own place counts half); under a window those of them that it does not hide.

    >>> pairs_seen(4, 4, AttentionOptions(is_causal=True))
    8.0
    >>> pairs_seen(4, 4, AttentionOptions(is_causal=True, window=2))  # 0.5 + 1.5 + 1.5 + 1.5
    5.0
    """
    place = np.arange(seq, dtype=np.int64)
    last = np.minimum(place + 1, kv_seq) if options.is_causal else np.full(seq, kv_seq)
    first = 0 if options.window is None else np.maximum(place + 1 - options.window, 0)
    own = 0.5 * min(seq, kv_seq) if options.is_causal else 0.0
    return float(np.maximum(last - first, 0).sum()) - own


def seen(queries: Array, keys: Array, options: AttentionOptions) -> Array | None:
    """Return which keys a query sees by the causal mask and the window, [seq, kv_seq]; None: all.

    ``queries`` [seq] and ``keys`` [kv_seq] are their places in the sequence.
    """
    if not options.is_causal and options.window is None:
        return None
    behind = queries[:, None] - keys[None, :]
    found = behind >= 0 if options.is_causal else np.ones(behind.shape, bool)
    return found if options.window is None else found & (behind < options.window)
