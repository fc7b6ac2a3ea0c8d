"""Attention recognised in every spelling, and written out: the same numbers before and after."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from training_models import (
    Maker,
    assert_same_step,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    small_llama,
    small_mlp,
)

from distsim.errors import PlanError
from distsim.importer import import_from_onnx
from distsim.interpret import SequentialExecutor
from distsim.ir import (
    BFloat16,
    Float16,
    Float32,
    Float64,
    Function,
    Int64,
    Literal,
    Op,
    Role,
    Tensor,
    Value,
    all_ops,
    trim,
)
from distsim.models import deepseek, moe
from distsim.ops.attention_options import AttentionOptions, seen
from distsim.schedule import schedule
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels.attention import default_attention, set_attention
from distsim.transforms.kernels.fused_attention import as_options

BATCH, HEADS, SEQ, SIZE = 2, 4, 6, 4
HIDDEN = HEADS * SIZE
REFERENCE = Path(os.environ.get("DISTSIM_REFERENCE", "/nonexistent")) / "onnx"


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


def recognised(function: Function, count: int = 1) -> Op:
    """What is recognised computes the same, and nothing of what was written is left."""
    others = sum(op.op_type == "Softmax" for op in all_ops(function)) - count  # routers of experts
    made = set_attention(function, "flash")
    assert len(attentions(made)) == count, made.notes
    assert made.notes == (f"attention: {count} as one kernel each (flash)",)
    assert sum(op.op_type == "Softmax" for op in all_ops(made)) == others
    assert_same(function, made)
    return attentions(made)[0]


def not_recognised(function: Function, why: str) -> None:
    made = set_attention(function, "flash")
    assert made.ops == function.ops
    assert made.notes[0] == "attention: none recognised (flash)"
    assert why in made.notes[1]


# --- the builders of the house ---------------------------------------------------------------------


SIZES = {"hidden": 16, "heads": 4, "seq": 8, "batch": 2, "vocab": 32, "dtype": Float64()}


def small_deepseek() -> Function:
    return deepseek(layers=2, ffn=8, kv_lora=4, nope=4, rope=2, value=6, **SIZES)


def small_moe() -> Function:
    return moe(layers=2, kv_heads=2, **SIZES)


@pytest.mark.parametrize("build", [small_gpt, small_llama, small_deepseek, small_moe])
def test_decoders_are_causal_without_a_table(build: Any) -> None:
    """The mask is a table that the decoder hands to its layers: it is known there, and goes."""
    function = build()
    op = recognised(function, 2)
    assert dict(op.attributes) == {"is_causal": 1} and len(op.inputs) == 3
    flash = set_attention(function, "flash")
    assert not {"Trilu", "ConstantOfShape"} & kinds(flash)
    assert all(v.name != "causal" for o in flash.ops if o.is_call for v in o.callee.inputs)
    written = set_attention(flash, "math")
    assert "Attention" not in kinds(written) and written.notes == ("attention: 2 written out (math)",)
    assert_same(function, written)
    again = set_attention(written, "flash")
    assert [op.attributes for op in attentions(again)] == [op.attributes] * 2


def test_layers_are_still_one_callee() -> None:
    for kind in ("flash", "math"):
        made = set_attention(set_attention(small_gpt(layers=3), "flash"), kind)
        assert len({op.callee for op in made.ops if op.is_call}) == 1


def test_nothing_of_the_size_of_the_scores_is_saved() -> None:
    seq = 36
    for build in (small_gpt, small_llama):
        joint = differentiate(set_attention(build(seq=seq, batch=2), "flash"))
        shapes = [v.type.shape for op in all_ops(joint) for v in op.outputs if not op.is_call]
        assert not [shape for shape in shapes if shape.count(seq) > 1]


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)])
def test_a_step_is_the_same_on_every_mesh(dp: int, tp: int, pp: int) -> None:
    for build in (small_gpt, small_llama):
        joint = differentiate(set_attention(build(), "flash"), SGD(0.1))
        inputs = random_inputs(joint)
        expected = SequentialExecutor().compute(joint, inputs)
        program = laid_out(joint, mesh_of(dp, tp, pp), schedule("1f1b", pp, 2))
        assert_same_step(joint, program, inputs, expected)
        if tp > 1:  # the heads are divided
            heads = {
                op.inputs[0].type.shape[1]
                for op in all_ops(program.to_function())
                if op.op_type == "Attention"
            }
            assert heads == {4 // tp}


# --- spellings -------------------------------------------------------------------------------------


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


@given(spellings())
@settings(max_examples=80)
def test_every_spelling_is_recognised(case: tuple[Function, dict[str, Any], bool]) -> None:
    function, expected, kept = case
    op = recognised(function)
    attributes = dict(op.attributes)
    assert attributes.pop("scale", 0.5) == pytest.approx(expected.pop("scale"))
    assert attributes == expected
    assert len(op.inputs) == 3 + kept
    assert [v.type.shape[1] for v in op.inputs[1:3]] == [op.inputs[1].type.shape[1]] * 2
    kv = next(v for v in function.inputs if v.name == "k").type.shape[2] // SIZE
    assert op.inputs[1].type.shape == (BATCH, kv, SEQ, SIZE)


def test_groups_as_one_broadcast_product() -> None:
    at = Spelling(2)
    q = at.make("Reshape", at.q, shape=(BATCH, 2, 2, SEQ, SIZE))
    k = at.make("Unsqueeze", at.make("Transpose", at.k, perm=(0, 1, 3, 2)), axes=(2,))
    mask = at.value("mask", BATCH, 2, 2, SEQ, SEQ)
    weights = at.make("Softmax", at.make("Add", at.make("MatMul", q, k), mask), axis=-1)
    mixed = at.make("MatMul", weights, at.make("Unsqueeze", at.v, axes=(2,)))
    op = recognised(at.make.end(mixed))
    assert [v.type.shape[1] for v in op.inputs] == [4, 2, 2, 4]


def test_a_softmax_in_float32_between_casts() -> None:
    at = Spelling(dtype=Float16)
    scores = at.make("MatMul", at.q, at.turned(at.k, False))
    wide = at.make(
        "Add", at.make("Cast", scores, to=TensorProto.FLOAT), at.value("m", SEQ, SEQ, dtype=Float32())
    )
    weights = at.make("Cast", at.make("Softmax", wide, axis=-1), to=TensorProto.FLOAT16)
    function = at.end(weights)
    made = set_attention(function, "flash")
    (op,) = attentions(made)
    assert [v.type.dtype for v in op.inputs] == [*[Float16()] * 3, Float32()]
    inputs = [
        np.asarray(x, v.type.dtype.np) for x, v in zip(random_inputs(function), function.inputs, strict=True)
    ]
    a, b = (SequentialExecutor().compute(f, inputs)[0] for f in (function, made))
    np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)


# --- masks are folded only where their numbers say so ------------------------------------------------


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 8), st.booleans(), st.integers(0, 48))
@settings(max_examples=60)
def test_a_mask_is_folded_only_if_it_is_exactly_that(
    seq: int, kv_seq: int, window: int, causal: bool, flip: int
) -> None:
    visible = seen(seq, kv_seq, AttentionOptions(is_causal=causal, window=window))
    assert visible is not None
    for mask in (visible, np.where(visible, 0.0, -np.inf), np.stack([visible] * 3)[:, None]):
        folded = as_options(mask, (seq, kv_seq))
        if visible.any(axis=1).all():
            assert folded is not None
            same = seen(seq, kv_seq, folded)
            np.testing.assert_array_equal(np.ones_like(visible) if same is None else same, visible)
    other = visible.copy()
    other.flat[flip % other.size] ^= True
    folded = as_options(other, (seq, kv_seq))
    if folded is not None:
        same = seen(seq, kv_seq, folded)
        np.testing.assert_array_equal(np.ones_like(other) if same is None else same, other)


def test_a_mask_that_adds_something_else_is_kept() -> None:
    for visible, shown, hidden in ((CAUSAL, 0.1, -np.inf), (CAUSAL, 0, -100.0), (CAUSAL[::-1], 0, -np.inf)):
        at, table = Spelling(), np.where(visible, shown, hidden)
        scores = at.make("Add", at.make("MatMul", at.q, at.turned(at.k, False)), at.constant(table))
        op = recognised(at.end(at.make("Softmax", scores, axis=-1)))
        assert len(op.inputs) == 4 and "is_causal" not in op.attributes


def test_a_table_that_differs_from_call_to_call_is_kept() -> None:
    """Layers of full and of local attention that share one callee."""
    inner = Spelling()
    table = inner.value("table", SEQ, SEQ)
    scores = inner.make("Add", inner.make("MatMul", inner.q, inner.turned(inner.k, False)), table)
    layer = inner.end(inner.make("Softmax", scores, axis=-1))
    for tables, folded in (((CAUSAL, BAND), False), ((BAND, BAND), True)):
        make = Maker("two")
        x = make.data("x", BATCH, SEQ, HIDDEN)
        for visible in tables:
            known = make("Constant", value=Literal(np.where(visible, 0, -1e4)))
            x = make.call(layer, x, x, x, known)
        op = recognised(make.end(x), 2)
        assert (len(op.inputs) == 3) == folded
        assert op.attributes.get("window") == (3 if folded else None)


# --- what is no attention ----------------------------------------------------------------------------


def test_what_is_left_as_written_says_why() -> None:
    def spelled(change: Any) -> Function:
        at = Spelling()
        return change(at, at.make("MatMul", at.q, at.turned(at.k, False)))

    def softmax(at: Spelling, scores: Value) -> Value:
        return at.make("Softmax", scores, axis=-1)

    def returned(at: Spelling, scores: Value) -> Function:
        weights = softmax(at, scores)
        at.make.set_outputs([at.make("MatMul", weights, at.v), weights])
        return at.make.finalize()

    not_recognised(spelled(returned), "its scores or probabilities are returned")
    not_recognised(
        spelled(lambda at, s: at.end(at.make("Softmax", s, axis=1))), "Softmax is not over the last dimension"
    )
    not_recognised(
        spelled(lambda at, s: at.make.end(at.make("ReduceMax", softmax(at, s), axes=(-1,)))),
        "its probabilities go to an op ReduceMax",
    )
    not_recognised(
        spelled(lambda at, s: at.end(softmax(at, at.make("Where", at.constant(CAUSAL), s, Y=np.array(0.0))))),
        "a Where that hides none of them",
    )
    not_recognised(
        spelled(lambda at, s: at.end(softmax(at, at.make("Exp", s)))),
        "its scores come from an op Exp",
    )


def test_a_router_is_no_attention() -> None:
    make = Maker("router")
    x = make.data("x", 8, HIDDEN)
    weights = make("Softmax", make("MatMul", x, make.parameter("w", HIDDEN, 4)), axis=-1)
    not_recognised(
        make.end(make("MatMul", weights, make.parameter("v", 4, HIDDEN))), "keys or values are weights"
    )


def test_a_function_that_brings_its_backward_is_left() -> None:
    joint = differentiate(set_attention(small_gpt(), "flash"))
    for kind in ("flash", "math"):
        made = set_attention(joint, kind)
        assert made.ops == joint.ops
        assert made.notes == ("attention: left as it is, with the backward pass that the function brings",)


def test_kinds_and_their_default() -> None:
    with pytest.raises(PlanError, match="attention='fast' is not one of flash, math"):
        set_attention(small_gpt(), "fast")
    assert [default_attention(d()) for d in (BFloat16, Float16, Float32, Float64)] == ["flash"] * 2 + [
        "math"
    ] * 2
    function = small_gpt()
    made = set_attention(function, "math")
    assert made.ops == function.ops and made.notes == ("attention: as the model writes it (math)",)
    plain = small_mlp()
    assert set_attention(plain, "math").notes == ()
    assert set_attention(plain, "flash").notes == ("attention: none recognised (flash)",)


# --- reference exports -------------------------------------------------------------------------------


@cache
def exported(name: str) -> Function:
    path = REFERENCE / f"{name}.onnx"
    if not path.exists():
        pytest.skip("set DISTSIM_REFERENCE to the folder of reference exports")
    sizes = {"batch": 2, "seq": 16} if name.endswith("dynamic") else {}
    return import_from_onnx(path, **sizes)


@pytest.mark.parametrize(
    ("name", "count"),
    [("bert-base", 12), ("gpt2-dynamic", 12), ("llama-56m", 8), ("qwen3-op18", 4), ("gptneox-op23", 4)],
)
def test_reference_exports_compute_the_same(name: str, count: int) -> None:
    function = exported(name)
    made, written = set_attention(function, "flash"), set_attention(function, "math")
    assert len(attentions(made)) == count and "Softmax" not in kinds(made)
    assert not attentions(written)
    first = next(op.outputs[0].name for op in made.ops if op.op_type == "Attention")
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal(2**16).astype(np.float32)
    drawn: dict[str, np.ndarray] = {}

    def draw(value: Value) -> np.ndarray:
        if not value.type.dtype.is_floating:
            return np.ones(value.type.shape, value.type.dtype.np)
        scale = 0.05 if value.role is Role.PARAMETER else 1.0
        return np.resize(np.roll(scale * numbers, rng.integers(2**16)), value.type.shape)

    results: list[np.ndarray] = []
    for each in (function, made, written):
        part = trim(each, [next(v for op in each.ops for v in op.outputs if v.name == first)], ()).function
        drawn |= {v.name: draw(v) for v in part.inputs if v.name not in drawn}
        results += SequentialExecutor().compute(part, [drawn[v.name] for v in part.inputs])
    assert np.isfinite(results[0]).all() and results[0].std() > 0
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=2e-3, atol=2e-4)
