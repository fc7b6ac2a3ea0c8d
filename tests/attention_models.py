"""Ways to write attention, and what is asked of recognising them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from training_models import (
    Maker,
    random_inputs,
)

from distsim.interpret import SequentialExecutor
from distsim.ir import (
    Float64,
    Function,
    Int64,
    Literal,
    Op,
    Tensor,
    Value,
    all_ops,
)
from distsim.transforms.kernels.attention import set_attention

BATCH, HEADS, SEQ, SIZE = 2, 4, 6, 4
HIDDEN = HEADS * SIZE


def attentions(function: Function) -> list[Op]:
    return [op for op in all_ops(function) if op.op_type == "Attention"]


def kinds(function: Function) -> set[str]:
    return {op.op_type for op in all_ops(function)}


def assert_same(one: Function, other: Function, rtol: float = 1e-9) -> None:
    inputs = random_inputs(one)
    assert [v.type for v in one.outputs] == [v.type for v in other.outputs]
    pair = (SequentialExecutor().compute(function, inputs) for function in (one, other))
    for a, b in zip(*pair, strict=True):
        np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(a, np.float64), rtol=rtol, atol=rtol)


def assert_recognised(function: Function, count: int = 1) -> Op:
    """What is recognised computes the same, and nothing of what was written is left."""
    others = sum(op.op_type == "Softmax" for op in all_ops(function)) - count  # routers of experts
    made = set_attention(function, "flash")
    assert len(attentions(made)) == count, made.notes
    assert made.notes == (*function.notes, f"attention: {count} as one kernel each (flash)")
    assert sum(op.op_type == "Softmax" for op in all_ops(made)) == others
    assert_same(function, made)
    return attentions(made)[0]


def assert_not_recognised(function: Function, why: str) -> None:
    made = set_attention(function, "flash")
    assert made.ops == function.ops
    assert made.notes[0] == "attention: none recognised (flash)"
    assert why in made.notes[1]


class Spelling:
    """One way to write attention of [batch, heads, seq, size] out of projections."""

    def __init__(self, kv_heads: int = HEADS, dtype: Any = Float64) -> None:
        self.make = Maker("spelled")
        self.dtype = dtype()
        group = HEADS // kv_heads
        self.kv_heads, self.group = kv_heads, group
        self.q, self.k, self.v = (
            self.projected(name, count) for name, count in (("q", HEADS), ("k", kv_heads), ("v", kv_heads))
        )

    def projected(self, name: str, heads: int) -> Value:
        flat = self.value(name, BATCH, SEQ, heads * SIZE)
        apart = self.make("Reshape", flat, shape=(BATCH, SEQ, heads, SIZE))
        return self.make("Transpose", apart, perm=(0, 2, 1, 3))

    def value(self, name: str, *shape: int, dtype: Any = None) -> Value:
        return self.make.add_input_value(name, Tensor(dtype or self.dtype, shape))

    def constant(self, array: Any) -> Value:
        return self.make("Constant", value=Literal(array))

    def repeated(self, x: Value) -> Value:
        if self.group == 1:
            return x
        x = self.make("Unsqueeze", x, axes=(2,))
        x = self.make("Expand", x, shape=(BATCH, self.kv_heads, self.group, SEQ, SIZE))
        return self.make("Reshape", x, shape=(BATCH, HEADS, SEQ, SIZE))

    def turned(self, k: Value, folded: bool) -> Value:
        """The keys transposed, in one step or as torch's exporter does."""
        if not folded:
            return self.make("Transpose", k, perm=(0, 1, 3, 2))
        k = self.make("Reshape", k, shape=(-1, SEQ, SIZE))
        k = self.make("Transpose", k, perm=(0, 2, 1))
        return self.make("Reshape", k, shape=(BATCH, HEADS, SIZE, SEQ))

    def end(self, weights: Value, v: Value | None = None) -> Function:
        mixed = self.make("MatMul", weights, self.repeated(self.v) if v is None else v)
        back = self.make("Transpose", mixed, perm=(0, 2, 1, 3))
        return self.make.end(self.make("Reshape", back, shape=(BATCH, SEQ, HIDDEN)))


CAUSAL = np.tri(SEQ, dtype=bool)


BAND = CAUSAL & ~np.tri(SEQ, k=-3, dtype=bool)


MASKS = ("table", "band", "where", "fill", "given", "padding")


SHAPES = ((BATCH, 1, SEQ, SEQ), (SEQ, SEQ), (HEADS, 1, 1))


@st.composite
def spellings(draw: st.DrawFn) -> tuple[Function, dict[str, Any], bool]:
    """A function, the attributes expected of its attention, and whether it keeps a mask."""
    at = Spelling(draw(st.sampled_from([1, 2, HEADS])))
    make, expected, kept = at.make, {}, False
    q, k = at.q, at.repeated(at.k)
    scale = draw(st.sampled_from(["none", "query", "both", "scores", "divided", "constant"]))
    if scale in ("query", "both"):
        q = make("Mul", q, B=0.7)
    turned = at.turned(k, draw(st.booleans()))
    if scale == "both":
        turned = make("Div", turned, B=2.0)
    total = {"query": 0.7, "both": 0.35, "none": 1.0}.get(scale, 0.25)
    merged = draw(st.booleans())  # batch and heads in one dimension, as torch.bmm has them
    if merged:
        q = make("Reshape", q, shape=(BATCH * HEADS, SEQ, SIZE))
        turned = make("Reshape", turned, shape=(BATCH * HEADS, SIZE, SEQ))
    scores = make("MatMul", q, turned)
    if scale == "scores":
        scores = make("Mul", scores, B=0.25)
    elif scale == "divided":
        scores = make("Div", scores, B=4.0)
    elif scale == "constant":
        scores = make("Mul", at.constant(np.array(0.25)), scores)
    if draw(st.booleans()):
        scores = make("Mul", make("Tanh", make("Div", scores, B=3.0)), B=3.0)
        expected["softcap"] = 3.0
    if merged:
        scores = make("Reshape", scores, shape=(BATCH, HEADS, SEQ, SEQ))
    expected["scale"] = total
    for mask in draw(st.lists(st.sampled_from(MASKS), max_size=2)):
        fill = draw(st.sampled_from([-1e4, -np.inf, float(np.finfo(np.float64).min) / 8]))
        if mask in ("table", "band"):
            visible = CAUSAL if mask == "table" else BAND
            table = at.constant(np.where(visible, 0, fill).reshape(1, 1, SEQ, SEQ))
            scores = make("Add", *draw(st.permutations([scores, table])))
        elif mask == "where":
            scores = make("Where", at.constant(CAUSAL), scores, Y=np.array(fill))
        elif mask == "fill":
            scores = make("Where", at.constant(~CAUSAL), at.constant(np.array(fill)), scores)
        elif mask == "given":
            kept, name = True, f"mask{len(make.ops)}"
            scores = make("Add", scores, at.value(name, *draw(st.sampled_from(SHAPES))))
        else:
            kept = True
            padding = make("Equal", at.value(f"ids{len(make.ops)}", BATCH, 1, 1, SEQ, dtype=Int64()), B=7)
            scores = make("Where", padding, at.constant(np.array(fill)), scores)
        if mask != "given" and mask != "padding":
            expected["is_causal"] = 1
        if mask == "band":
            expected["window"] = 3
    weights = make("Softmax", scores, axis=-1)
    if draw(st.booleans()):
        weights = make("Where", make("IsNaN", weights), weights, X=np.array(0.0))
    if draw(st.booleans()):
        weights = make("Dropout", weights, ratio=np.array(0.25), training_mode=np.array(True), seed=5)
        expected |= {"dropout": 0.25, "seed": 5}
    return at.end(weights), expected, kept
