"""Attention recognised in every spelling, and written out: the same numbers before and after."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_models import (
    BAND,
    BATCH,
    CAUSAL,
    HIDDEN,
    SEQ,
    SIZE,
    Spelling,
    assert_not_recognised,
    assert_recognised,
    assert_same,
    attentions,
    kinds,
    spellings,
)
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
    Literal,
    Role,
    Value,
    all_ops,
    trim,
)
from distsim.models import deepseek, llama, moe
from distsim.ops.attention_options import AttentionOptions, seen
from distsim.schedule import schedule
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels.attention import default_attention, set_attention
from distsim.transforms.kernels.fused_attention import as_options

REFERENCE = Path(os.environ.get("DISTSIM_REFERENCE", "/nonexistent")) / "onnx"


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
    op = assert_recognised(function, 2)
    assert dict(op.attributes) == {"is_causal": 1} and len(op.inputs) == 3
    flash = set_attention(function, "flash")
    assert not {"Trilu", "ConstantOfShape"} & kinds(flash)
    assert all(v.name != "causal" for o in flash.ops if o.is_call for v in o.callee.inputs)
    written = set_attention(flash, "math")
    assert "Attention" not in kinds(written) and written.notes[-1] == "attention: 2 written out (math)"
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


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_an_output_is_saved_once_whatever_groups_its_heads_were_in(kv_heads: int) -> None:
    """As the output projection reads it: [batch, seq, heads x size], of which backward sees heads."""
    function = set_attention(llama(layers=2, kv_heads=kv_heads, **SIZES), "flash")
    (grad,) = {op for op in all_ops(differentiate(function)) if op.op_type == "AttentionGrad"}
    assert grad.attributes["joined"] == 1 and (2, 8, 16) in [value.type.shape for value in grad.inputs]
    assert not {(2, kv_heads, 4 // kv_heads, 8, 4)} & {
        v.type.shape for op in all_ops(function) for v in op.outputs
    }


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


def test_backward_of_attention_is_all_of_the_half_that_others_wait_for() -> None:
    """It has no weights: I makes the gradients of queries, keys and values, W reads them."""
    joint = differentiate(set_attention(small_gpt(), "flash"), SGD(0.1))
    inputs = random_inputs(joint)
    program = laid_out(joint, mesh_of(pp=2), schedule("zb_h1", 2, 2))
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))
    calls = [op for op in program.to_function().ops if op.is_call]
    halves = {op.callee.name: {o.op_type for o in all_ops(op.callee)} for op in calls}
    second = [name for name in halves if name.startswith("stage1") and name.endswith(("_input", "_weight"))]
    assert {name.rpartition("_")[2]: "AttentionGrad" in halves[name] for name in second} == {
        "input": True,
        "weight": False,
    }


# --- spellings -------------------------------------------------------------------------------------


@given(spellings())
@settings(max_examples=80)
def test_every_spelling_is_recognised(case: tuple[Function, dict[str, Any], bool]) -> None:
    function, expected, kept = case
    op = assert_recognised(function)
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
    op = assert_recognised(at.make.end(mixed))
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
    visible = seen(np.arange(seq), np.arange(kv_seq), AttentionOptions(is_causal=causal, window=window))
    assert visible is not None
    for mask in (visible, np.where(visible, 0.0, -np.inf), np.stack([visible] * 3)[:, None]):
        folded = as_options(mask, (seq, kv_seq))
        if visible.any(axis=1).all():
            assert folded is not None
            same = seen(np.arange(seq), np.arange(kv_seq), folded)
            np.testing.assert_array_equal(np.ones_like(visible) if same is None else same, visible)
    other = visible.copy()
    other.flat[flip % other.size] ^= True
    folded = as_options(other, (seq, kv_seq))
    if folded is not None:
        same = seen(np.arange(seq), np.arange(kv_seq), folded)
        np.testing.assert_array_equal(np.ones_like(other) if same is None else same, other)


def test_a_mask_that_adds_something_else_is_kept() -> None:
    for visible, shown, hidden in ((CAUSAL, 0.1, -np.inf), (CAUSAL, 0, -100.0), (CAUSAL[::-1], 0, -np.inf)):
        at, table = Spelling(), np.where(visible, shown, hidden)
        scores = at.make("Add", at.make("MatMul", at.q, at.turned(at.k, False)), at.constant(table))
        op = assert_recognised(at.end(at.make("Softmax", scores, axis=-1)))
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
        op = assert_recognised(make.end(x), 2)
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

    assert_not_recognised(spelled(returned), "its scores or probabilities are returned")
    assert_not_recognised(
        spelled(lambda at, s: at.end(at.make("Softmax", s, axis=1))), "Softmax is not over the last dimension"
    )
    assert_not_recognised(
        spelled(lambda at, s: at.make.end(at.make("ReduceMax", softmax(at, s), axes=(-1,)))),
        "its probabilities go to an op ReduceMax",
    )
    assert_not_recognised(
        spelled(lambda at, s: at.end(softmax(at, at.make("Where", at.constant(CAUSAL), s, Y=np.array(0.0))))),
        "a Where that hides none of them",
    )
    assert_not_recognised(
        spelled(lambda at, s: at.end(softmax(at, at.make("Exp", s)))),
        "its scores come from an op Exp",
    )


def test_a_router_is_no_attention() -> None:
    make = Maker("router")
    x = make.data("x", 8, HIDDEN)
    weights = make("Softmax", make("MatMul", x, make.parameter("w", HIDDEN, 4)), axis=-1)
    assert_not_recognised(
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
