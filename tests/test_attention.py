"""Attention as one operator: against the same written out in ops, its work, its types."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import normal, sample

from distsim.errors import TypeRuleError
from distsim.interpret import SequentialExecutor
from distsim.ir import BFloat16, Float32, Float64, Function, FunctionMaker, Role, Tensor, all_ops
from distsim.ir.type import Bool, from_numpy
from distsim.ops import signature_of, work
from distsim.ops.attention_options import AttentionOptions, pairs_seen, seen
from distsim.ops.written_attention import write_attention
from distsim.transforms import differentiate

Options = dict[str, Any]


def trained(arrays: list[np.ndarray], options: Options, written: bool, mask_learns: bool = False) -> Function:
    """Loss and gradients of a sum of Y, each number of it times one of the last array."""
    maker = FunctionMaker("trained")
    *own, weights = arrays
    roles = [Role.PARAMETER] * 3 + [Role.PARAMETER if mask_learns else Role.INPUT] * (len(own) - 3)
    values = [
        maker.add_input_value(f"x{i}", Tensor(from_numpy(a.dtype), a.shape), role)
        for i, (a, role) in enumerate(zip(own, roles, strict=True))
    ]
    factor = maker.add_input_value("factor", Tensor(Float64(), weights.shape))
    op = () if written else maker.add("Attention", values, options)
    product = maker.add("Mul", [write_attention(maker, values, options) if written else op[0], factor])
    maker.set_outputs(maker.add("ReduceSum", product, {"keepdims": 0}))
    return differentiate(maker.finalize(), None)


def assert_as_written_out(arrays: list[np.ndarray], options: Options, mask_learns: bool = False) -> None:
    heads, v_size = arrays[0].shape[:3], arrays[2].shape[3]
    given = [*arrays, normal(*heads, v_size, seed=77)]
    op, ops = (
        SequentialExecutor().compute(trained(given, options, written, mask_learns), given)
        for written in (False, True)
    )
    assert len(op) == len(ops) == 4 + mask_learns
    for one, other in zip(op, ops, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[np.ndarray], Options, bool]:
    size = st.integers(1, 5)
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seq, kv_seq, width, v_width = (draw(size) for _ in range(4))
    heads = kv_heads * group
    arrays = [
        normal(batch, heads, seq, width, seed=1),
        normal(batch, kv_heads, kv_seq, width, seed=2),
        normal(batch, kv_heads, kv_seq, v_width, seed=3),
    ]
    options: Options = {}
    if draw(st.booleans()):
        options["is_causal"] = 1
    if draw(st.booleans()) and kv_seq >= seq:
        options["window"] = draw(st.integers(1, 6))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.3, 1.0, -0.5]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0]))
    if draw(st.booleans()):
        options |= {"dropout": 0.4, "seed": draw(st.integers(0, 3))}
    kind = draw(st.sampled_from(["none", "boolean", "added", "learned"]))
    if kind != "none":
        full = (batch, heads, seq, kv_seq)
        rank = draw(st.integers(2, 4))
        shape = tuple(draw(st.sampled_from([1, n])) for n in full[4 - rank :])
        mask = normal(*shape, seed=4)
        if kind == "boolean":  # each query sees itself, or the first key: a softmax of nothing is no number
            mask = mask > 0
            mask[..., 0] = True
            places = range(min(mask.shape[-2:]))
            mask[..., places, places] = True
            if "window" in options:
                mask[...] = True
        arrays.append(mask)
    return arrays, options, kind == "learned"


@given(cases())
@settings(max_examples=60)
def test_computes_and_differentiates_as_written_out(case: tuple[list[np.ndarray], Options, bool]) -> None:
    assert_as_written_out(*case)


def test_a_boolean_mask_is_as_written_out() -> None:
    arrays = [normal(2, 4, 6, 4), normal(2, 2, 6, 4, seed=1), normal(2, 2, 6, 4, seed=2)]
    for shape in ((6, 6), (1, 6), (4, 6, 6), (2, 1, 6, 6), (2, 4, 1, 6)):
        mask = normal(*shape, seed=3) > 0
        mask[..., 0] = True
        assert_as_written_out([*arrays, mask], {"is_causal": 1})


@pytest.mark.parametrize("options", [{}, {"is_causal": 1}, {"scale": 0.2, "softcap": 1.5}])
@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
def test_the_onnx_package_says_the_same(options: Options, kind: str) -> None:
    from onnx.reference import ReferenceEvaluator

    arrays = [
        normal(2, 4, 6, 4).astype(np.float32),
        *(normal(2, 2, 5, n).astype(np.float32) for n in (4, 3)),
    ]
    if kind != "none":
        mask = normal(2, 1, 6, 5, seed=3)
        arrays.append(mask > 0.2 if kind == "boolean" else mask.astype(np.float32))
    names = ["Q", "K", "V", "attn_mask"][: len(arrays)]
    node = onnx.helper.make_node("Attention", names, ["Y"], **options)
    theirs = ReferenceEvaluator(node, opsets={"": 23}).run(None, dict(zip(names, arrays, strict=True)))[0]
    maker = FunctionMaker("op")
    values = [
        maker.add_input_value(n, Tensor(from_numpy(a.dtype), a.shape))
        for n, a in zip(names, arrays, strict=True)
    ]
    maker.set_outputs(maker.add("Attention", values, options)[:1])
    (ours,) = SequentialExecutor().compute(maker.finalize(), arrays)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient() -> None:
    arrays = [normal(1, 1, 3, 2), normal(1, 1, 3, 2, seed=1), normal(1, 1, 3, 2, seed=2)]
    mask = np.array([[True, True, True], [False, False, False], [True, False, True]])
    given = [*arrays, mask, normal(1, 1, 3, 2, seed=5)]
    _, dq, dk, dv = SequentialExecutor().compute(trained(given, {}, written=False), given)
    assert not dq[0, 0, 1].any() and dq[0, 0, 0].any()
    assert all(np.isfinite(x).all() for x in (dk, dv))


# --- work --------------------------------------------------------------------------------------------


def demand(seq: int, dtype: Any = Float32, batch: int = 1, heads: int = 1, size: int = 4, **options: Any):
    maker = FunctionMaker("work")
    qkv = [
        maker.add_input_value(n, Tensor(dtype(), (batch, heads, seq, size)), Role.PARAMETER) for n in "qkv"
    ]
    made = maker.add("Attention", qkv, options)[0]
    maker.set_outputs(maker.add("ReduceSum", [made], {"keepdims": 0}))
    return differentiate(maker.finalize(), None)


def works(function: Function) -> list[Any]:
    return [work(signature_of(op)) for op in all_ops(function) if op.op_type.startswith("Attention")]


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 8))
@settings(max_examples=20)
def test_flops_are_four_and_ten_for_each_pair_and_number(seq: int, batch: int, heads: int, size: int) -> None:
    """4 b h s^2 d forward; backward makes the scores again: 2.5 times that (Dao 2023, section 4.1)."""
    ahead, behind = works(demand(seq, batch=batch, heads=heads, size=size))
    assert ahead.matrix and behind.matrix
    assert ahead.flops == 4 * batch * heads * seq * seq * size
    assert behind.flops == 2.5 * ahead.flops
    causal = works(demand(seq, batch=batch, heads=heads, size=size, is_causal=1))
    assert [w.flops for w in causal] == [ahead.flops / 2, behind.flops / 2]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 14), st.booleans())
def test_a_window_counts_the_pairs_that_are_seen(seq: int, kv_seq: int, window: int, causal: bool) -> None:
    options = AttentionOptions(is_causal=causal, window=window)
    visible = seen(np.arange(seq), np.arange(kv_seq), options)
    assert visible is not None
    own = 0.5 * min(seq, kv_seq) if causal else 0.0
    assert pairs_seen(seq, kv_seq, options) == visible.sum() - own


@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_a_smaller_window_is_never_more_work(seq: int, kv_seq: int, causal: bool) -> None:
    windows = (*range(1, seq + 3), None)
    pairs = [pairs_seen(seq, kv_seq, AttentionOptions(is_causal=causal, window=w)) for w in windows]
    assert pairs == sorted(pairs)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 10 * 10),
        ({"is_causal": 1}, 10 * 10),
        ({"is_causal": 1, "window": 3}, 10 + 2 * 9 + 2 * 8),
        ({"is_causal": 1, "window": 20}, 10 * 10),
        ({"window": 3}, 10 * 10 - 28),  # all but those further behind
    ],
    ids=str,
)
def test_the_model_multiplies_all_pairs_of_its_window_and_none_again(
    options: dict[str, Any], pairs: int
) -> None:
    ahead, behind = works(demand(10, batch=2, heads=3, size=8, **options))
    assert ahead.model_flops == 4 * 2 * 3 * pairs * 8
    assert behind.model_flops == 2 * ahead.model_flops


def test_bytes_are_those_of_operands_results_and_log_sums() -> None:
    batch, heads, seq, size = 2, 3, 16, 4
    ahead, behind = works(demand(seq, BFloat16, batch, heads, size, is_causal=1))
    tensor, log_sums = 2 * batch * heads * seq * size, 4 * batch * heads * seq
    assert (ahead.bytes_read, ahead.bytes_written) == (3 * tensor, tensor + log_sums)
    assert (behind.bytes_read, behind.bytes_written) == (5 * tensor + log_sums, 3 * tensor)


def test_no_value_has_the_size_of_the_scores() -> None:
    joint = demand(64, heads=2, size=4, is_causal=1, softcap=2.0, dropout=0.1, window=9)
    values = [v for op in all_ops(joint) for v in op.outputs]
    assert max(v.type.size for v in values) == 2 * 64 * 4
    saved = [v.type.size for op in joint.ops if op.op_type == "AttentionGrad" for v in op.inputs]
    assert sorted(saved) == [2 * 64, *[2 * 64 * 4] * 5]


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 6, 16),) * 3, {}, "reshape and transpose what has its heads in one dimension"),
        (((2, 4, 6, 4), (2, 3, 6, 4), (2, 3, 6, 4)), {}, "3 heads of K and V do not divide 4 of Q"),
        (((2, 4, 6, 4), (2, 4, 6, 5), (2, 4, 6, 4)), {}, "Q and K in their last dimension"),
        (((2, 4, 6, 4), (2, 4, 6, 4), (2, 4, 7, 4)), {}, "K and V in their heads and their sequence"),
        (((2, 4, 6, 4),) * 3, {"window": 0}, "window=0 must be at least 1"),
        (((2, 4, 6, 4),) * 3, {"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        (((2, 4, 6, 4),) * 3, {"softcap": -1.0}, "softcap=-1.0 must be a finite number from 0"),
        (((2, 4, 6, 4),) * 3, {"causal": 1}, "no attribute 'causal'; it has is_causal, scale"),
        (((2, 4, 6, 4),) * 2, {}, "takes Q, K, V and maybe attn_mask, 2 values given"),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: tuple[tuple[int, ...], ...], options: Options, message: str
) -> None:
    with pytest.raises(TypeRuleError, match=message):
        _ = sample("Attention", *shapes, **options).signature


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Tensor(Float32(), (6, 5)), "does not broadcast to"),
        (Tensor(Float32(), (1, 1, 1, 6, 6)), "does not broadcast to"),
        (Tensor(from_numpy(np.int64), (6, 6)), "must be boolean or real; cast it first"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Tensor, message: str) -> None:
    maker = FunctionMaker("refused")
    qkv = [maker.add_input_value(n, Tensor(Float32(), (2, 4, 6, 4))) for n in "qkv"]
    with pytest.raises(TypeRuleError, match=message):
        maker.add("Attention", [*qkv, maker.add_input_value("mask", mask)])


def test_operands_of_unlike_types_are_refused() -> None:
    maker = FunctionMaker("refused")
    types = (Float32(), Float32(), BFloat16())
    qkv = [maker.add_input_value("x", Tensor(dtype, (2, 4, 6, 4))) for dtype in types]
    with pytest.raises(TypeRuleError, match="must be real and of one type"):
        maker.add("Attention", qkv)
    booleans = [maker.add_input_value("x", Tensor(Bool(), (2, 4, 6, 4)))] * 3
    with pytest.raises(TypeRuleError, match="must be real and of one type"):
        maker.add("Attention", booleans)
