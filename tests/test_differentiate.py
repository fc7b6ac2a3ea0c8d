"""Gradients against central finite differences, updates against the optimizers' formulas."""

import itertools

import numpy as np
import pytest
from training_models import (
    F64,
    Maker,
    bert,
    fused_attention,
    mlp,
    random_inputs,
    small_gpt,
    small_llama,
    small_mlp,
    tied,
)

from distsim.errors import PlanError, UnknownOperatorError
from distsim.executor import SequentialExecutor
from distsim.ir import Function, Int64, Role, Tensor, callees, count_ops, verify
from distsim.models import deepseek, moe
from distsim.transforms import SGD, Adam, differentiate, inline, optimizer_named

EPSILON = 1e-5


def compute(function: Function, inputs) -> list[np.ndarray]:
    return SequentialExecutor().compute(function, inputs)


def directional(function: Function, inputs, index: int, direction: np.ndarray) -> float:
    """The derivative of the loss along a direction of one input, by a fourth-order central difference."""

    def loss(step: float) -> float:
        moved = list(inputs)
        moved[index] = inputs[index] + step * EPSILON * direction
        return float(compute(function, moved)[0])

    return (8 * (loss(1) - loss(-1)) - (loss(2) - loss(-2))) / (12 * EPSILON)


def assert_gradients(function: Function, seed: int = 0, directions: int = 2) -> None:
    """Every gradient agrees with finite differences along random directions, to 1e-6 of its norm."""
    joint = differentiate(function, None)
    verify(joint)
    inputs = random_inputs(function, seed)
    loss, *grads = compute(joint, inputs)
    assert loss == compute(function, inputs)[0]
    assert len(grads) == len(function.parameters)
    rng = np.random.default_rng(seed + 1)
    for parameter, grad in zip(function.parameters, grads, strict=True):
        index = function.inputs.index(parameter)
        for _ in range(directions):
            direction = rng.standard_normal(parameter.type.shape)
            expected = directional(function, inputs, index, direction)
            scale = np.linalg.norm(grad) * np.linalg.norm(direction)
            assert abs(np.vdot(grad, direction) - expected) <= 1e-6 * scale + 1e-9, (
                f"{parameter.name}: {np.vdot(grad, direction)} along a direction, "
                f"finite differences say {expected}"
            )


MODELS = {
    "mlp": lambda: small_mlp(layers=3),
    "mlp of unequal widths": lambda: mlp(3, 6, 4, input_width=5, output_width=3, dtype=F64),
    "gpt": lambda: small_gpt(batch=2),
    "llama": lambda: small_llama(batch=2),
    "moe": lambda: moe(2, 8, 2, 1, 6, 4, 2, 1, 5, 2, 16, concentration=1.0, dtype=F64),
    "deepseek": lambda: deepseek(1, 8, 2, 6, 3, 4, 3, 2, 3, seq=5, batch=2, vocab=16, dtype=F64),
    "fused attention": fused_attention,
    "tied embeddings": tied,
    "bert": bert,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_finite_differences(name):
    assert_gradients(MODELS[name]())


# --- the graph ------------------------------------------------------------------------------------


def test_gradients_of_a_value_that_is_read_several_times_add_up():
    make = Maker("residual")
    x, target, w = make.data("x", 3, 4), make.data("target", 3, 4), make.parameter("w", 4, 4)
    y = make("MatMul", x, w)
    y = make("Add", y, make("Mul", make("Tanh", y), y))  # y is read by three ops
    function = make.end(make("Loss", make("Sub", y, make("Sigmoid", y)), target, N=3))
    assert_gradients(function)


def test_a_parameter_read_by_several_ops_gets_one_gradient():
    make = Maker("shared")
    x, target, w = make.data("x", 3, 4), make.data("target", 3, 4), make.parameter("w", 4, 4)
    y = make("Tanh", make("MatMul", x, w))
    y = make("MatMul", y, make("Transpose", w, perm=(1, 0)))
    function = make.end(make("Loss", make("MatMul", y, w), target, N=3))
    assert len(differentiate(function, None).outputs) == 2
    assert_gradients(function)


def test_a_value_used_twice_by_one_op():
    make = Maker("square")
    x, target, w = make.data("x", 3, 4), make.data("target", 3, 4), make.parameter("w", 4, 4)
    y = make("MatMul", x, w)
    assert_gradients(make.end(make("Loss", make("Mul", y, y), target, N=3)))


def test_a_parameter_that_the_loss_does_not_read_has_no_gradient_and_no_update():
    make = Maker("partly")
    x, target = make.data("x", 3, 4), make.data("target", 3, 4)
    unused, w, idle = (make.parameter(name, 4, 4) for name in ("unused", "w", "idle"))
    make("MatMul", x, idle)  # computed, but not on the way to the loss
    function = make.end(make("Loss", make("MatMul", x, w), target, N=3))
    for optimizer, names in ((SGD(), ["w.new"]), (Adam(), ["w.new", "w.m.new", "w.v.new"])):
        joint = differentiate(function, optimizer)
        assert [value.name for value in joint.outputs[1:]] == names
        assert unused.name in [value.name for value in joint.parameters]


def test_no_gradients_are_made_of_what_is_not_trained():
    make = Maker("first")
    x, target, w = make.data("x", 3, 4), make.data("target", 3, 4), make.parameter("w", 4, 4)
    joint = differentiate(make.end(make("Loss", make("MatMul", x, w), target, N=3)), None)
    (grad,) = joint.outputs[1:]
    shapes = [v.type.shape for op in joint.ops for v in op.outputs]
    assert shapes == [(3, 4), (), (3, 4), *[(4, 4)]] or count_ops(joint) <= 5, joint.ops
    assert grad.type == w.type


# --- calls ----------------------------------------------------------------------------------------


def block(size: int = 4) -> Function:
    make = Maker("block")
    x, w = make.data("x", 3, size), make.parameter("w", size, size)
    make.set_outputs([make("Add", x, make("Tanh", make("MatMul", x, w)))])
    return make.finalize()


def nested(depth: int = 3) -> Function:
    """A layer of two blocks, called ``depth`` times."""
    inner, outer = block(), Maker("layer")
    x = outer.data("x", 3, 4)
    v, w = outer.parameter("v", 4, 4), outer.parameter("w", 4, 4)
    outer.set_outputs([outer.call(inner, outer.call(inner, x, v), w)])
    layer, make = outer.finalize(), Maker("top")
    x, target = make.data("x", 3, 4), make.data("target", 3, 4)
    for index in range(depth):
        x = make.layer(layer, x, f"h{index}")
    return make.end(make("Loss", x, target, N=3))


def test_gradients_through_nested_calls():
    assert_gradients(nested())


def test_a_callee_is_differentiated_once_for_all_its_calls():
    """The first layer needs no gradient of x, the others do: two variants each, however deep."""
    counts = {depth: [f.name for f in callees(differentiate(nested(depth), None))] for depth in (2, 5, 9)}
    assert counts[2] == counts[5] == counts[9]
    joint = differentiate(nested(5), None)
    layers = [op.callee for op in joint.ops if op.is_call]
    forward, backward = layers[:5], layers[5:]
    assert len({id(f) for f in forward[1:]}) == 1 and len({id(f) for f in backward[:4]}) == 1
    assert count_ops(joint) == count_ops(differentiate(nested(4), None)) + (
        count_ops(differentiate(nested(4), None)) - count_ops(differentiate(nested(3), None))
    )


def test_gpt_layers_share_one_forward_one_backward_and_one_update_callee():
    joint = differentiate(small_gpt(layers=6), Adam())
    assert [f.name for f in callees(joint)] == ["layer", "layer_backward", "update"]
    calls = [op.callee.name for op in joint.ops if op.is_call]
    assert calls == ["layer"] * 6 + ["layer_backward"] * 6 + ["update"] * 6


def test_a_callee_saves_only_what_its_backward_reads():
    """Of tanh(x w) + x, backward reads x, w and the tanh: one value is saved besides the output."""
    joint = differentiate(nested(), None)
    inner = [f for f in callees(joint) if f.name == "block"]
    assert inner and all(len(f.outputs) == 2 for f in inner), [f.outputs for f in inner]


def test_a_callee_with_several_outputs_of_which_one_reaches_the_loss():
    inner = Maker("two")
    x, w = inner.data("x", 3, 4), inner.parameter("w", 4, 4)
    y = inner("MatMul", x, w)
    inner.set_outputs([inner("Tanh", y), inner("Exp", y)])
    callee, make = inner.finalize(), Maker("top")
    x, target, w = make.data("x", 3, 4), make.data("target", 3, 4), make.parameter("w", 4, 4)
    used, _ = make.add("Call", [x, w], None, (callee,))
    function = make.end(make("Loss", used, target, N=3))
    assert_gradients(function)
    backward = callees(differentiate(function, None))[-1]
    assert "Exp" not in [op.op_type for op in backward.ops]


def test_a_callee_that_returns_an_input_and_one_value_twice():
    inner = Maker("passing")
    x, w = inner.data("x", 3, 4), inner.parameter("w", 4, 4)
    y = inner("Tanh", inner("MatMul", x, w))
    inner.set_outputs([x, y, y])
    callee, make = inner.finalize(), Maker("top")
    x, target = make.data("x", 3, 4), make.data("target", 3, 4)
    v, w = make.parameter("v", 4, 4), make.parameter("w", 4, 4)
    a, b, c = make.add("Call", [make("MatMul", x, v), w], None, (callee,))
    assert_gradients(make.end(make("Loss", make("Add", make("Mul", a, b), c), target, N=3)))


def through(callee: Function, outputs: int = 2) -> Function:
    """A loss of the sum of the outputs of a callee of (data, data times a parameter)."""
    make = Maker("top")
    x, target = make.data("x", 3, 4), make.data("target", 3, 4)
    made = make.add("Call", [x, make("MatMul", x, make.parameter("w", 4, 4))], None, (callee,))
    y = made[0] if outputs == 1 else make("Add", made[0], made[1])
    return make.end(make("Loss", y, target, N=3))


def test_a_callee_with_an_output_that_no_parameter_reaches():
    inner = Maker("mixed")
    x, y = inner.data("x", 3, 4), inner.data("y", 3, 4)
    inner.set_outputs([inner("Exp", x), inner("Tanh", y)])
    assert_gradients(through(inner.finalize()))


def test_a_callee_with_an_output_through_which_no_gradient_flows():
    inner, make = Maker("inner"), Maker("top")
    x, w = inner.data("x", 3, 4), inner.parameter("w", 4, 4)
    y = inner("MatMul", x, w)
    inner.set_outputs([inner("Tanh", y), inner("Mul", y, B=2.0)])
    x, target, w = make.data("x", 3, 4), make.data("target", 3, 4), make.parameter("w", 4, 4)
    a, b = make.add("Call", [x, w], None, (inner.finalize(),))
    assert_gradients(make.end(make("Loss", make("Add", a, make("Sign", b)), target, N=3)))


def test_a_callee_through_which_no_gradient_flows_at_all():
    inner, make = Maker("steps"), Maker("top")
    x, w = inner.data("x", 3, 4), inner.parameter("w", 4, 4)
    inner.set_outputs([inner("Sign", inner("MatMul", x, w))])
    x, target = make.data("x", 3, 4), make.data("target", 3, 4)
    v, w = make.parameter("v", 4, 4), make.parameter("w", 4, 4)
    y = make("Add", make("MatMul", x, v), make.call(inner.finalize(), x, w))
    joint = differentiate(make.end(make("Loss", y, target, N=3)))
    assert [value.name for value in joint.outputs[1:]] == ["v.new"]


# --- optimizers -----------------------------------------------------------------------------------


def test_sgd_is_its_formula():
    function = small_mlp(layers=3)
    inputs = random_inputs(function)
    _, *grads = compute(differentiate(function, None), inputs)
    loss, *new = compute(differentiate(function, SGD(lr=0.3)), inputs)
    assert loss == compute(function, inputs)[0]
    for weight, grad, made in zip(inputs[2:], grads, new, strict=True):
        np.testing.assert_allclose(made, weight - 0.3 * grad, rtol=1e-14)


def test_adam_is_algorithm_1_of_kingma_and_ba():
    function = small_mlp(layers=3)
    lr, b1, b2, eps, step = 0.1, 0.8, 0.95, 1e-6, 3
    joint = differentiate(function, Adam(lr, b1, b2, eps, step))
    assert [v.name for v in joint.inputs_with(Role.STATE)] == [f"w{i}.{k}" for i in range(3) for k in "mv"]
    inputs = random_inputs(joint)
    weights, states = inputs[2:5], inputs[5:]
    _, *grads = compute(differentiate(function, None), inputs[:5])
    _, *made = compute(joint, inputs)
    new, moments = made[:3], made[3:]
    for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        m = b1 * states[2 * index] + (1 - b1) * grad
        v = b2 * states[2 * index + 1] + (1 - b2) * grad**2
        m_hat, v_hat = m / (1 - b1**step), v / (1 - b2**step)
        np.testing.assert_allclose(moments[2 * index], m, rtol=1e-12)
        np.testing.assert_allclose(moments[2 * index + 1], v, rtol=1e-12)
        np.testing.assert_allclose(new[index], weight - lr * m_hat / (np.sqrt(v_hat) + eps), rtol=1e-12)


@pytest.mark.parametrize("optimizer", [SGD(0.3), Adam()], ids=str)
@pytest.mark.parametrize("build", [small_gpt, small_mlp, tied], ids=lambda f: f.__name__)
def test_updates_of_a_layer_in_one_call_are_the_updates_one_by_one(build, optimizer):
    """Inputs and outputs have the order and names of a function without Calls, and the same numbers."""
    function, flat = build(), build()
    while callees(flat):
        flat = inline(flat)
    layered, plain = differentiate(function, optimizer), differentiate(flat, optimizer)
    assert not callees(plain)
    for ends in ("inputs", "outputs"):
        names = [[(v.name, v.role, v.type) for v in getattr(f, ends)] for f in (layered, plain)]
        assert names[0] == names[1]
    inputs = random_inputs(layered)
    for one, other in zip(compute(layered, inputs), compute(plain, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_parameters_that_several_ops_read_are_updated_on_their_own():
    """The embedding that is also the head belongs to no layer; the layers' parameters do."""
    joint = differentiate(tied(layers=3), SGD())
    alone = [op.inputs[0].name for op in joint.ops if op.op_type == "SGDOptimizer"]
    assert alone == ["wte"]
    updates = [op for op in joint.ops if op.is_call and op.callee.name == "update"]
    assert len(updates) == 3 and len({id(op.callee) for op in updates}) == 1


def test_training_lowers_the_loss():
    function = small_mlp(layers=2)
    joint, inputs, losses = differentiate(function, SGD(lr=0.02)), random_inputs(function), []
    for _ in range(20):
        loss, *weights = compute(joint, inputs)
        losses.append(float(loss))
        inputs[2:] = weights
    assert all(later < earlier for earlier, later in itertools.pairwise(losses)), losses


def test_optimizers_by_name():
    assert (optimizer_named("sgd"), optimizer_named("adam")) == (SGD(), Adam())
    with pytest.raises(PlanError, match="'lion' is not one of adam, adamw, momentum, sgd"):
        optimizer_named("lion")


# --- errors ---------------------------------------------------------------------------------------


def test_the_first_output_must_be_a_scalar_loss():
    make = Maker("predictions")
    x, w = make.data("x", 3, 4), make.parameter("w", 4, 4)
    with pytest.raises(
        PlanError, match=r"predictions: the first output, y: f64\[3, 4\], must be a scalar loss.*add_loss"
    ):
        differentiate(make.end(make.add_op("MatMul", inputs=[x, w], output_names=["y"])))


def test_an_integer_scalar_is_no_loss():
    make = Maker("counts")
    n = make.add_input_value("n", Tensor(Int64(), ()))
    make.parameter("w", 4)
    with pytest.raises(PlanError, match="must be a scalar loss"):
        differentiate(make.end(n))


def test_something_must_be_trained():
    make = Maker("fixed")
    x, target = make.data("x", 3, 4), make.data("target", 3, 4)
    with pytest.raises(PlanError, match=r"fixed has no input marked as a parameter \(Role.PARAMETER\)"):
        differentiate(make.end(make("Loss", x, target, N=3)))


def test_an_operator_without_a_gradient_is_named_with_its_op():
    make = Maker("counted")
    x, target, w = make.data("x", 3, 4), make.data("target", 3, 4), make.parameter("w", 4, 4)
    y = make.add_op(
        "Det", inputs=[make.add_op("MatMul", inputs=[make.parameter("v", 4, 4), w])], output_names=["d"]
    )
    y = make("Mul", make("MatMul", x, w), y)
    with pytest.raises(UnknownOperatorError, match=r"operator Det \(d = Det\(.*\)\) has no gradient rule"):
        differentiate(make.end(make("Loss", y, target, N=3)))
