"""Operators that compute numbers: every rule against what the operator computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import op_samples_math as samples
import op_samples_shape
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_checks import (
    backward,
    check_all,
    check_gradient,
    check_sharding,
    check_types,
    divided,
    floating_outputs,
    run,
)
from op_samples import Sample, normal, sample

from distsim.errors import TypeRuleError, UnknownOperatorError
from distsim.ir import Attributes, Device, Float32, Float64, FunctionMaker, Mesh, Tensor
from distsim.ir.type import BFloat16, DType, Float16
from distsim.ops import (
    GradientContext,
    attention,
    batch_norm,
    broadcast,
    choice,
    conversion,
    elementwise,
    gemm,
    group_norm,
    grouped,
    matmul,
    normalization,
    operator,
    reduction,
    registered,
    rotary,
    sharding_rule,
    softmax,
    work,
)
from distsim.ops.onnx_bridge import schema_of
from distsim.ops.operator import Operator
from distsim.ops.places import places

ALL = (*samples.SAMPLES, *samples.DRAWN)


@pytest.mark.parametrize("of", samples.SAMPLES, ids=str)
def test_rules(of: Sample) -> None:
    check_all(of)


@pytest.mark.parametrize("of", samples.DRAWN, ids=str)
def test_rules_of_drawn_numbers(of: Sample) -> None:
    check_types(of)
    assert check_sharding(of, numbers=False)
    if of.grads:
        for emitted in check_gradient(of).samples():
            check_types(emitted)
            check_sharding(emitted, numbers=False)


@pytest.mark.parametrize("dtype", [Float32(), Float16(), BFloat16()], ids=lambda dtype: dtype.name)
def test_results_keep_the_element_type(dtype: DType) -> None:
    """Forward and backward, whatever the samples' operators compute in between."""
    for of in ALL:
        narrow = _narrowed(of, dtype)
        if narrow is None:
            continue
        check_types(narrow)
        if narrow.grads and operator(of.op_type).gradient is not None:
            for emitted in backward(narrow).samples():
                check_types(emitted)


def _narrowed(of: Sample, dtype: DType) -> Sample | None:
    """The sample in another element type; None where an attribute is an array of float64, or ONNX refuses."""
    if any(hasattr(value, "array") and value.array.dtype == np.float64 for value in of.attributes.values()):
        return None
    old = of.version is not None or of.op_type in ("TopK", "NegativeLogLikelihoodLoss", "Dropout")
    if of.op_type == "Cast" or (old and dtype == BFloat16()):
        return None
    arrays = tuple(a.astype(dtype.np) if a.dtype == np.float64 else a for a in of.arrays)
    return replace(of, arrays=arrays)


# --- coverage ----------------------------------------------------------------------------------------

MODULES = (
    *(attention, batch_norm, broadcast, choice, conversion, elementwise, gemm, group_norm, grouped, matmul),
    *(normalization, reduction, rotary, softmax),
)


def _own() -> list[Operator]:
    """The operators whose sharding rule stands in one of the modules."""
    names = {module.__name__ for module in MODULES}
    found = [operator(name) for name in registered()]
    return [one for one in found if one.sharding is not None and one.sharding.__module__ in names]


def test_every_operator_is_sampled_and_can_be_divided() -> None:
    factors = divided(ALL)
    own = [one.name for one in _own()]
    assert len(own) > 120
    assert sorted(set(own) - set(factors)) == []
    assert sorted(name for name in own if not factors[name]) == []


def test_every_operator_has_its_rules() -> None:
    for one in _own():
        assert one.work is not None, one.name
        assert one.compute is not None or one.name.startswith("Cast"), one.name
        if one.name.endswith(("Grad", "GradA", "GradB")):
            assert one.types is not None, one.name
        else:
            assert one.gradient is not None, one.name


def _of_gradient_rules() -> dict[str, list[Sample]]:
    """The samples of every operator that has a gradient rule."""
    found = {name: list[Sample]() for name in registered() if operator(name).gradient is not None}
    for of in (*ALL, *op_samples_shape.SAMPLES):
        if of.op_type in found:
            found[of.op_type].append(of)
    return found


def test_every_gradient_rule_is_checked() -> None:
    """By a sample with a gradient, unless the operator makes nothing that could have one."""
    lacking = [
        name
        for name, ops in _of_gradient_rules().items()
        if not ops or not any(of.grads or not floating_outputs(of) for of in ops)
    ]
    # Those of 8 bits round, see test_float8_scaling; the last one runs on several ranks: see below.
    rounding = ["Float8Amax", "Float8Cast", "Float8GroupedMatMul", "Float8MatMul"]
    assert lacking == [*rounding, "MPIAlltoall"]


def test_every_operand_that_can_have_a_gradient_is_a_value_in_some_sample() -> None:
    """An operand that is an attribute in all of them could be given no gradient unseen."""
    unseen: set[tuple[str, str]] = set()
    for name, ops in _of_gradient_rules().items():
        schema = schema_of(name, None)
        if schema is None or not any(floating_outputs(of) for of in ops):
            continue
        formals = [formal.name for formal in schema.inputs]
        kinds = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        real = {f.name for f in schema.inputs if "tensor(float)" in kinds.get(f.type_str, (f.type_str,))}
        for of in ops:
            variadic = len(of.arrays) > len(formals)
            index = {formals[0]: 0} if variadic else places(formals, of.attributes, len(of.arrays))
            real -= {formal for formal, i in index.items() if of.types[i].dtype.is_floating and of.grads}
        unseen.update((name, formal) for formal in real)
    assert unseen == set()


@pytest.mark.parametrize("concat", [1, ((1, 2, None), (1, 2, (6, -6)))], ids=str)
def test_the_gradient_of_an_all_to_all_is_its_adjoint(concat: int | tuple[object, ...]) -> None:
    """<f(x), dy> = <x, f'(dy)>, summed over the ranks; joined along one axis, or along two."""
    maker, ranks = FunctionMaker(), 4
    mesh = Mesh([Device(i, "gpu") for i in range(ranks)], {"ep": ("dp", "cp")}, dp=2, cp=2)
    x = maker.add_input_value("x", Tensor(Float64(), (4, 6), mesh))
    outputs = maker.add("MPIAlltoall", [x], {"axis": "ep", "split": 0, "concat": concat})
    dy = maker.add_input_value("dy", outputs[0].type)
    ahead, known = maker.ops[-1], operator("MPIAlltoall")
    assert known.gradient is not None and known.communication is not None
    (grad,) = known.gradient(GradientContext(maker, ahead, (x,), outputs, (dy,), (True,)))
    assert grad is not None and grad.type == x.type
    xs, dys = ([normal(*v.type.shape, seed=10 * i + r) for r in range(ranks)] for i, v in enumerate((x, dy)))
    ys, dxs = (
        known.communication.compute(op.attributes, a) for op, a in zip(maker.ops, (xs, dys), strict=True)
    )
    np.testing.assert_allclose(np.vdot(ys, dys), np.vdot(xs, dxs))


def test_an_all_to_all_over_two_axes_is_what_their_ranks_hold_put_together() -> None:
    """Ranks (d, c) hold batch d and, of two halves of a sequence each, the c-th from either end: zigzag."""
    whole = np.arange(2 * 8 * 4.0).reshape(2, 8, 4)
    halves = [np.r_[0:2, 6:8], np.r_[2:6]]
    ranks = [whole[d : d + 1, halves[c]] for d in range(2) for c in range(2)]
    attributes = Attributes({"split": 2, "concat": ((0, 2, None), (1, 2, (4, -4)))})
    known = operator("MPIAlltoall").communication
    assert known is not None
    for place, made in enumerate(known.compute(attributes, ranks)):
        np.testing.assert_array_equal(made, whole[:, :, place : place + 1])


# --- closed forms ------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 4))
def test_matmul_work(m: int, k: int, n: int, batch: int) -> None:
    of = sample("MatMul", np.zeros((batch, m, k), np.float32), np.zeros((k, n), np.float32))
    demand = work(of.signature)
    assert demand is not None and demand.matrix
    assert demand.flops == 2 * batch * m * k * n
    assert demand.bytes_read == 4 * (batch * m * k + k * n)
    assert demand.bytes_written == 4 * batch * m * n
    (grad,) = backward(of).samples()
    twice = work(grad.signature)
    assert twice is not None and twice.matrix and twice.flops == 2 * demand.flops


def test_matmul_gradient_makes_only_what_is_wanted() -> None:
    of = sample("MatMul", (2, 4, 6), (6, 8))
    only = [[one.op_type for one in backward(of, wanted).samples()] for wanted in ((1, 1), (1, 0), (0, 1))]
    assert only == [["MatMulGrad"], ["MatMulGradA"], ["MatMulGradB"]]


def test_matmul_is_sharded_by_columns_by_rows_and_by_batch() -> None:
    rule = sharding_rule(sample("MatMul", (2, 4, 6), (6, 8)).signature)
    assert rule is not None
    assert rule.inputs == (("b0", "m", "k"), ("k", "n"))
    assert rule.outputs == (("b0", "m", "n"),)


def test_gemm_work_counts_the_transposed_operand() -> None:
    demand = work(sample("Gemm", (6, 4), (8, 6), transA=1, transB=1).signature)
    assert demand is not None and demand.flops == 2 * 4 * 6 * 8


def test_a_view_costs_nothing() -> None:
    for of in (sample("Identity", (2, 4)), sample("Dropout", (2, 4))):
        demand = work(of.signature)
        assert demand is not None and (demand.flops, demand.bytes_read, demand.bytes_written) == (0, 0, 0)


def test_a_mean_over_a_divided_axis_is_averaged() -> None:
    rule = sharding_rule(sample("ReduceMean", (4, 6), axes=(0,)).signature)
    assert rule is not None and rule.mean == ("d0",) and rule.outputs == ((None, "d1"),)


def test_softmax_before_operator_set_13_needs_all_trailing_dimensions() -> None:
    rule = sharding_rule(sample("Softmax", (2, 4, 6), axis=1, version=11).signature)
    assert rule is not None and rule.inputs == (("d0", None, None),)


def test_softmax_of_large_numbers_is_finite() -> None:
    (made,) = run(sample("Softmax", np.array([[1e4, 1e4 - 1.0]])))
    np.testing.assert_allclose(made, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]])


def test_dropout_keeps_the_expected_share_and_scales_it() -> None:
    of = sample("Dropout", np.ones((200, 200)), ratio=0.25, training_mode=np.array(True), seed=5, outputs=2)
    made, mask = run(of)
    assert abs(mask.mean() - 0.75) < 0.01
    np.testing.assert_allclose(made, mask / 0.75)


def test_equal_values_share_the_gradient_of_a_maximum() -> None:
    whole = backward(sample("ReduceMax", np.array([[1.0, 3.0, 3.0]]), axes=(1,), keepdims=0))
    grad, seed = whole.grads[0], whole.inputs[0]
    assert grad is not None and seed is not None
    np.testing.assert_allclose(whole.env[grad][0, 0], 0)
    assert whole.env[grad][0, 1] == whole.env[grad][0, 2] != 0


def test_the_gradient_of_an_exponent_has_the_precision_of_its_type() -> None:
    whole = backward(sample("Pow", np.array([2.0]), X=0.1))
    grad = whole.grads[0]
    assert grad is not None
    (dy,) = (array for value, array in whole.env.items() if value.name.startswith("dpow"))
    np.testing.assert_allclose(whole.env[grad], dy * 0.01 * np.log(0.1), rtol=1e-14)


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes", "message"),
    [
        ("MatMulGrad", ((4, 6), (6, 8), (4, 4)), {}, r"\(4, 8\), its gradient \(4, 4\)"),
        ("MatMulGrad", ((4, 6), (5, 8), (4, 8)), {}, "6 columns do not fit 5 rows"),
        ("MatMulGradA", ((6, 8), (4, 4)), {"shape": (4, 6)}, "its gradient"),
        ("GemmGrad", ((4, 6), (6, 8), (8, 4)), {}, "does not fit"),
        ("ReluGrad", ((4, 6), (4, 5)), {}, "must agree"),
        ("LossGrad", ((4, 6), (4, 6), (4,)), {"N": 4}, r"dy must be a scalar of float32, not f32\[4\]"),
        ("LossGrad", ((4, 6), (4, 6), ()), {"N": 4, "dy": 0.5}, "as an operand or as an attribute, not both"),
        ("LossGrad", ((4, 6),), {"N": 4}, "takes 2 inputs, 1 given"),
        ("Exp", ((4, 6), (4, 6)), {}, "takes 1 inputs, 2 given"),
        ("ReluGrad", ((4, 6),), {}, "takes 2 inputs, 1 given"),
        ("RMSNormalization", ((4, 6), (5,)), {}, "does not broadcast"),
        ("LayerNormalizationGrad", ((4, 6), (6,), (4, 5)), {}, "gradient of X's shape"),
        ("BatchNormalization", ((2, 4, 3), (4,), (5,), (4,), (4,)), {}, "vector of 4 numbers"),
        ("GroupNormalization", ((2, 6, 3), (4,), (4,)), {"num_groups": 4}, "4 groups do not divide 6"),
        ("SoftmaxGrad", ((4, 6), (4, 5)), {"axes": (1,)}, "must agree"),
        ("ReduceMaxGrad", ((4, 6), (4, 1), (4,)), {"axes": (1,)}, "must agree"),
    ],
)
def test_types_that_do_not_fit_are_refused(
    op_type: str, shapes: tuple[tuple[int, ...], ...], attributes: dict[str, object], message: str
) -> None:
    maker = FunctionMaker()
    values = [maker.add_input_value(f"x{i}", Tensor(Float32(), shape)) for i, shape in enumerate(shapes)]
    with pytest.raises(TypeRuleError, match=message):
        maker.add(op_type, values, Attributes(attributes))


def test_a_gradient_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownOperatorError, match="Clip has no gradient of its operand max"):
        backward(sample("Clip", (4,), (), (), grads=(0,)), (True, False, True))
    with pytest.raises(UnknownOperatorError, match="Dropout has no gradient of its operand ratio; make it"):
        backward(sample("Dropout", (4,), (), np.array(True)), (False, True, False))
    with pytest.raises(TypeRuleError, match="only its first output"):
        backward(sample("LayerNormalization", (4, 6), (6,), outputs=3, grads=(0, 1)))
