"""Losses that are scaled, weighted, summed, fed to other ops or made in callees: gradients and plans."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_differentiate import assert_gradients, compute, directional
from training_models import F64, Maker, assert_same_step, laid_out, mesh_of, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError, UnknownOperatorError
from distsim.ir import Function, Literal, Tensor, Value, callees
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import SGD, Adam, differentiate

BATCH, WIDTH, CLASSES = 4, 8, 4


class Net(Maker):
    """Layers of tanh(x w), each with a loss at hand; parameters and targets are made as asked for."""

    def __init__(self, name: str = "net") -> None:
        super().__init__(name)
        self.x = self.data("x", BATCH, WIDTH)
        self.layers = 0

    def go(self) -> Value:
        """One more layer."""
        w = self.parameter(f"w{self.layers}", WIDTH, WIDTH)
        self.x, self.layers = self("Tanh", self("MatMul", self.x, w)), self.layers + 1
        return self.x

    def squared(self, x: Value | None = None, target: Value | None = None) -> Value:
        target = self.data("target", BATCH, WIDTH) if target is None else target
        return self("Loss", self.go() if x is None else x, target, N=BATCH)

    def entropy(self) -> Value:
        labels, head = self.tokens("labels", BATCH), self.parameter("head", WIDTH, CLASSES)
        return self("CrossEntropyLoss", self("MatMul", self.go(), head), labels, N=BATCH)

    def scalar(self, name: str) -> Value:
        return self.parameter(name)

    def weighted(self) -> Value:
        """Kendall et al. 2018: each loss is weighted by exp(-s) and s is trained."""
        losses = [self.squared(), self.entropy()]
        scaled = [
            self("Mul", loss, self("Exp", self("Neg", self.scalar(f"s{i}")))) for i, loss in enumerate(losses)
        ]
        return self("Add", *scaled)

    def auxiliary(self) -> Value:
        """A loss on every layer, the early ones counted by little."""
        early = [self("Mul", self.squared(), B=0.1) for _ in range(3)]
        return self("Sum", self.entropy(), *early)

    def decayed(self) -> Value:
        """With the squares of the first weights."""
        loss, w = self.squared(), self.inputs[1]
        return self("Add", loss, self("Mul", self("ReduceSumSquare", w, keepdims=0), B=0.01))

    def given_weight(self) -> Value:
        alpha = self.add_input_value("alpha", Tensor(F64, ()))
        return self("Add", self.entropy(), self("Mul", alpha, self.squared()))

    def distilled(self) -> Value:
        """The target is computed from parameters, too."""
        student, teacher = self.go(), self("MatMul", self.inputs[0], self.parameter("t", WIDTH, WIDTH))
        return self("Mul", self.squared(student, teacher), B=0.5)


def negated(net: Net) -> Value:
    return net("Neg", net.entropy())


def twice(net: Net) -> Value:
    loss = net.squared()
    return net("Add", loss, net("Mul", loss, B=0.25))


def called(net: Net) -> Value:
    """The head and its loss are one callee."""
    inner = Net("head")
    w, head = inner.parameter("w", WIDTH, WIDTH), inner.parameter("head", WIDTH, CLASSES)
    logits = inner("MatMul", inner("Tanh", inner("MatMul", inner.x, w)), head)
    inner.set_outputs([inner("CrossEntropyLoss", logits, inner.tokens("labels", BATCH), N=BATCH)])
    labels = net.tokens("labels", BATCH)
    own = [net.parameter("w.head", WIDTH, WIDTH), net.parameter("head", WIDTH, CLASSES)]
    return net.call(inner.finalize(), net.go(), *own, labels)


def called_scaled(net: Net) -> Value:
    return net("Mul", called(net), B=-0.5)


def layered(net: Net, weight: str = "") -> Value:
    """Layers that return what they make and a loss of their own, as a mixture of experts does.

    With ``weight``, an operator, each of these is multiplied by the operator's value at a trained scalar.
    """
    inner = Maker("layer")
    x, w = inner.data("x", BATCH, WIDTH), inner.parameter("w", WIDTH, WIDTH)
    y = inner("Tanh", inner("MatMul", x, w))
    loss = inner("Loss", y, x, N=BATCH)
    loss = inner("Mul", loss, inner(weight, inner.parameter("s"))) if weight else loss
    inner.set_outputs([y, loss])
    layer, x, total = inner.finalize(), net.x, None
    for index in range(2):
        own = [net.parameter(f"{p.name}.{index}", *p.type.shape) for p in layer.parameters]
        x, loss = net.add("Call", [x, *own], None, (layer,))
        total = loss if total is None else net("Add", total, loss)
    net.x = x
    return net("Add", net.squared(), net("Mul", total, B=0.01))


LINEAR = {
    "half": lambda net: net("Mul", net.squared(), B=0.5),
    "nothing": lambda net: net("Mul", net.squared(), A=0.0),
    "negated": negated,
    "divided": lambda net: net("Div", net.entropy(), B=Literal(np.array(3.0))),
    "difference": lambda net: net("Sub", net.squared(), net.entropy()),
    "averaged": lambda net: net("Mean", net.squared(), net.entropy(), net.squared()),
    "twice": twice,
    "auxiliary": Net.auxiliary,
    "weighted by parameters": Net.weighted,
    "weighted by an input": Net.given_weight,
    "times an input": lambda net: net("Mul", net.squared(), net.add_input_value("a", Tensor(F64, ()))),
    "weight decay": Net.decayed,
    "computed target": Net.distilled,
    "target alone": lambda net: net.squared(net.inputs[0], net.go()),
    "its own target": lambda net: net("Neg", net.squared(x := net.go(), x)),
    "in a callee": called,
    "in a callee, scaled": called_scaled,
    "in every layer": layered,
    "in every layer, weighted by parameters": lambda net: layered(net, "Identity"),
    "in every layer, weighted by functions of parameters": lambda net: layered(net, "Exp"),
}
NONLINEAR = {
    "exponential": lambda net: net("Exp", net("Mul", net.squared(), B=0.01)),
    "product": lambda net: net("Mul", net.squared(), net.entropy()),
    "quotient": lambda net: net("Div", net.squared(), net.entropy()),
}


def model(build) -> Function:
    net = Net()
    return net.end(build(net))


@pytest.mark.parametrize("name", [*LINEAR, *NONLINEAR])
def test_gradients_are_those_of_finite_differences(name):
    assert_gradients(model({**LINEAR, **NONLINEAR}[name]), directions=1)


# --- what backward consists of --------------------------------------------------------------------


def backward_of(function: Function) -> list:
    joint = differentiate(function, None)
    return list(joint.ops[len(function.ops) :])


@pytest.mark.parametrize("build", [Net.squared, Net.entropy])
def test_the_gradient_of_the_loss_itself_reads_no_gradient_and_no_constant(build):
    first, *rest = backward_of(model(build))
    assert first.op_type in ("LossGrad", "CrossEntropyLossGrad")
    saved = {"lse": 1} if first.op_type == "CrossEntropyLossGrad" else {}  # which it reads besides
    assert len(first.inputs) == 2 + len(saved) and dict(first.attributes) == {"N": BATCH, **saved}
    assert "Constant" not in {op.op_type for op in rest}


@pytest.mark.parametrize("name", ["half", "negated", "divided", "averaged", "auxiliary", "twice"])
def test_known_weights_take_no_op(name):
    """As many backward ops as the losses alone have, and nothing that reads a scalar."""
    ops = backward_of(model(LINEAR[name]))
    assert not {"Constant", "Mul", "Neg", "Div"} & {op.op_type for op in ops}
    assert all(value.type.rank for op in ops for value in op.inputs)


def test_the_weight_of_a_known_gradient_is_its_number():
    grads = [op for op in backward_of(model(Net.auxiliary)) if op.op_type.endswith("LossGrad")]
    assert sorted(op.attributes.get("dy", 1.0) for op in grads) == [0.1, 0.1, 0.1, 1.0]


def test_a_gradient_that_is_computed_is_the_third_operand():
    alpha = model(Net.given_weight)
    (scaled,) = [op for op in backward_of(alpha) if op.op_type == "LossGrad"]
    assert [value.type.shape for value in scaled.inputs] == [(BATCH, WIDTH), (BATCH, WIDTH), ()]


def test_a_loss_that_is_a_parameter_has_the_gradient_one():
    make = Net()
    function = make.end(make.scalar("w"))
    assert [float(array) for array in compute(differentiate(function, None), [np.zeros((4, 8)), 3.0])] == [
        3,
        1,
    ]
    make = Net()
    function = make.end(make("Add", make.squared(), make.scalar("w")))
    assert_gradients(function)
    assert compute(differentiate(function, None), random_inputs(function))[-1] == 1


# --- buffers --------------------------------------------------------------------------------------


def normed(statistic: str) -> Function:
    """A normalization in inference; one of its statistics is computed from a parameter."""
    make = Net()
    held = {name: make.parameter(name, WIDTH) for name in ("scale", "bias", "mean", "var")}
    held["var"] = (
        make("Add", make("Mul", held["var"], held["var"]), B=0.5) if statistic == "var" else held["var"]
    )
    held["mean"] = make("Sin", held["mean"]) if statistic == "mean" else held["mean"]
    y = make("BatchNormalization", make.go(), *held.values())
    return make.end(make.squared(y))


def test_running_statistics_stay_as_they_are_also_in_callees():
    function = normed("")
    names = [value.name for value in differentiate(function).outputs[1:]]
    assert names == ["scale.new", "bias.new", "w0.new"]
    make = Maker("top")
    x, target = make.data("x", BATCH, WIDTH), make.data("target", BATCH, WIDTH)
    loss = make.call(
        function, x, *(make.parameter(v.name, *v.type.shape) for v in function.parameters), target
    )
    assert [value.name for value in differentiate(make.end(loss)).outputs[1:]] == names


def turned(make: Maker, x: Value, angles: Value) -> Value:
    """A rotary embedding of [batch, width] by tables that are made of stored angles."""
    rows = make("Reshape", x, shape=(BATCH, 1, 1, WIDTH))
    tables = [make("Expand", make(op, angles), shape=(BATCH, 1, WIDTH // 2)) for op in ("Cos", "Sin")]
    return make("Reshape", make("RotaryEmbedding", rows, *tables), shape=(BATCH, WIDTH))


def test_what_leads_to_tables_alone_is_not_trained_also_in_callees():
    make = Net()
    angles = make.parameter("angles", 1, 1, WIDTH // 2)
    function = make.end(make.squared(turned(make, make.go(), angles)))
    names = [value.name for value in differentiate(function).outputs[1:]]
    assert names == ["w0.new"]
    top = Maker("top")
    x, target = top.data("x", BATCH, WIDTH), top.data("target", BATCH, WIDTH)
    loss = top.call(function, x, *(top.parameter(v.name, *v.type.shape) for v in function.parameters), target)
    assert [value.name for value in differentiate(top.end(loss)).outputs[1:]] == names


@pytest.mark.parametrize("statistic", ["mean", "var"])
def test_a_statistic_that_is_computed_has_a_gradient(statistic):
    function = normed(statistic)
    joint = differentiate(function, None)
    names = [v.name for v in function.parameters if v.name in ("scale", "bias", "w0", statistic)]
    inputs = [abs(array) for array in random_inputs(function)]
    _, *grads = compute(joint, inputs)
    grad = dict(zip(names, grads, strict=True))[statistic]
    (place,) = [i for i, v in enumerate(function.inputs) if v.name == statistic]
    expected = directional(function, inputs, place, np.ones(WIDTH))
    assert grad.sum() == pytest.approx(expected, rel=1e-6) and abs(expected) > 1e-3


def test_weights_of_classes_are_given():
    make = Net()
    logits, labels = (
        make("MatMul", make.go(), make.parameter("head", WIDTH, CLASSES)),
        make.tokens("labels", BATCH),
    )
    weights = make.parameter("weights", CLASSES)
    function = make.end(make("SoftmaxCrossEntropyLoss", logits, labels, weights))
    assert [value.name for value in differentiate(function).outputs[1:]] == ["w0.new", "head.new"]
    make.set_outputs([make("SoftmaxCrossEntropyLoss", logits, labels, make("Exp", weights))])
    with pytest.raises(UnknownOperatorError, match="no gradient of its operand weights; make it a constant"):
        differentiate(make.finalize())


# --- plans ----------------------------------------------------------------------------------------

PLANS = [
    Plan(dp=2),
    Plan(tp=2),
    Plan(microbatches=4),
    Plan(pp=2, microbatches=2),
    Plan(dp=2, tp=2, pp=2, microbatches=2),
    Plan(tp=2, pp=2, microbatches=4, schedule="gpipe"),
]


def program_of(joint: Function, plan: Plan):
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    return laid_out(joint, mesh_of(plan.dp, plan.tp, plan.pp), order)


def assert_plans(function: Function, plans, optimizer=None) -> None:
    joint = differentiate(function, optimizer)
    inputs = random_inputs(joint)
    expected = compute(joint, inputs)
    for plan in plans:
        assert_same_step(joint, program_of(joint, plan), inputs, expected)


@pytest.mark.parametrize("name", LINEAR)
def test_a_sum_of_losses_under_every_plan_is_that_of_one_device(name):
    assert_plans(model(LINEAR[name]), PLANS, SGD(lr=0.1))


@pytest.mark.parametrize("text", ["microbatches=2,remat=full", "pp=2,dp=2,microbatches=2,remat=full"])
def test_layers_with_weighted_losses_recompute_in_every_microbatch(text):
    """Only the gradients of the weights wait for the losses of the whole batch."""
    joint = differentiate(model(lambda net: layered(net, "Exp")), SGD(lr=0.1))
    program, inputs = parallelize(joint, Plan.parse(text), topology_of(4)), random_inputs(joint)
    assert_same_step(joint, program, inputs, compute(joint, inputs))


@pytest.mark.parametrize("name", NONLINEAR)
def test_a_function_of_a_loss_is_that_of_the_whole_batch(name):
    function = model(NONLINEAR[name])
    assert_plans(function, [Plan(dp=2), Plan(dp=2, tp=2, pp=2)], Adam())
    with pytest.raises(PlanError, match="of the whole batch, so the batch cannot be divided"):
        program_of(differentiate(function), Plan(microbatches=2))


def test_the_backward_pass_of_a_loss_on_an_early_stage_waits_for_no_scalar():
    """Its value goes to the last stage once a step, and its weight is known where it is made."""
    program = program_of(differentiate(model(Net.auxiliary)), Plan(pp=2, microbatches=2))
    first, last = program.stages
    assert [op.op_type for op in first.forward.function.ops].count("Loss") > 0
    assert not [value for value in last.forward.inputs if value.type.shape == ()]
    assert not [value for value in first.backward.inputs if value.type.shape == ()]


@st.composite
def combinations(draw) -> tuple[Function, Plan]:
    """Random losses of random layers, combined at random; and a plan."""
    net = Net("random")
    losses = [draw(st.sampled_from([Net.squared, Net.entropy, Net.distilled, called]))(net)]
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["new", "scale", "neg", "add", "sub", "mean", "parameter", "twice"]))
        a, b = (draw(st.sampled_from(losses)) for _ in range(2))
        if kind == "new":
            losses.append(draw(st.sampled_from([Net.squared, Net.entropy]))(net))
        elif kind == "scale":
            losses.append(net("Mul", a, B=draw(st.sampled_from([-2.0, 0.0, 0.3, 1.0]))))
        elif kind == "neg":
            losses.append(net("Neg", a))
        elif kind == "parameter":
            losses.append(net("Mul", a, net.scalar(f"p{index}")))
        elif kind == "mean":
            losses.append(net("Mean", *losses))
        elif kind == "twice":
            losses.append(net("Add", a, a))
        else:
            losses.append(net(kind.title(), a, b))
    return net.end(net("Sum", *losses)), draw(st.sampled_from(PLANS))


@given(combinations(), st.integers(0, 3))
@settings(max_examples=25)
def test_any_combination_of_losses(found, seed):
    function, plan = found
    assert_gradients(function, seed, directions=1)
    assert_plans(function, [plan])


def test_the_backward_pass_of_a_callee_reads_the_gradient_of_its_loss():
    ahead, behind = callees(differentiate(model(called_scaled), None))[:2]
    assert (ahead.name, behind.name) == ("head", "head_backward")
    (grad,) = [op for op in behind.ops if op.op_type == "CrossEntropyLossGrad"]
    assert grad.inputs[2] in behind.inputs
