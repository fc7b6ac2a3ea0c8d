"""Every plan computes the same step: loss and new parameters as on one device, on every replica."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from training_models import (
    SCHEDULES,
    Maker,
    assert_same_step,
    bert,
    flat_mlp,
    from_onnx,
    fused_attention,
    laid_out,
    mesh_of,
    mlp,
    plans,
    random_inputs,
    refuses,
    small_gpt,
    small_llama,
    small_mlp,
    tied,
)

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.ir import Device, Float64, Function, FunctionMaker, Literal, Tensor, Value, pformat, verify
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import (
    SGD,
    Adam,
    differentiate,
    parallel_transform_3d,
    steady_state_transform,
)


def imported() -> Function:
    with TemporaryDirectory() as folder:
        return from_onnx(Path(folder) / "small.onnx")


def updated_at_once() -> Function:
    """Eight layers, each weight updated as soon as its gradient is there, as the notebooks write it."""
    joint = flat_mlp(layers=8, optimizer=True)
    updates = {op.inputs[1]: op for op in joint.ops if op.op_type == "SGDOptimizer"}
    ops = [op for op in joint.ops if op.op_type != "SGDOptimizer"]
    ordered = [each for op in ops for each in (op, *(updates[v] for v in op.outputs if v in updates))]
    assert len(ordered) == len(joint.ops) and ordered[-1].op_type == "SGDOptimizer"
    return replace(joint, ops=tuple(ordered))


JOINTS = {
    "flat": lambda: flat_mlp(),
    "flat with sgd": lambda: flat_mlp(optimizer=True),
    "flat with sgd at once": updated_at_once,
    "mlp": lambda: differentiate(small_mlp(layers=6), SGD(lr=0.1)),
    "gpt": lambda: differentiate(small_gpt(), Adam()),
    "gpt of two heads": lambda: differentiate(small_gpt(heads=2, batch=4), None),
    "llama": lambda: differentiate(small_llama(), Adam()),
    "llama of one key head": lambda: differentiate(small_llama(kv_heads=1, batch=4), None),
    "imported": lambda: differentiate(imported(), SGD(lr=0.1)),
    "tied": lambda: differentiate(tied(), Adam()),
    "tied, gradients": lambda: differentiate(tied(), None),
    "fused attention": lambda: differentiate(fused_attention(), SGD(lr=0.1)),
    "bert": lambda: differentiate(bert(), SGD(lr=0.1)),
}


@dataclass(frozen=True)
class Case:
    """A joint function, inputs, and what one device makes of them."""

    joint: Function
    inputs: list[np.ndarray]
    expected: list[np.ndarray]


@cache
def case(name: str) -> Case:
    return case_of(JOINTS[name]())


def case_of(joint: Function, seed: int = 0) -> Case:
    inputs = random_inputs(joint, seed)
    return Case(joint, inputs, SequentialExecutor().compute(joint, inputs))


def assert_plan(known: Case, plan: Plan) -> None:
    mesh = mesh_of(plan.dp, plan.tp, plan.pp)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    if refuses(known.joint, plan.tp):
        with pytest.raises(PlanError, match=f"tp={plan.tp} divides no matrix product"):
            laid_out(known.joint, mesh, order)
        return
    program = laid_out(known.joint, mesh, order)
    assert_same_step(known.joint, program, known.inputs, known.expected)


SEVERAL = [
    Plan(2, 1, 1, 1),
    Plan(1, 2, 1, 1),
    Plan(1, 1, 2, 1),
    Plan(1, 1, 1, 4),
    Plan(4, 2, 1, 1),
    Plan(2, 2, 2, 2, "1f1b"),
    Plan(2, 2, 2, 2, "gpipe"),
    Plan(1, 2, 4, 4, "1f1b"),
    Plan(1, 1, 6, 4, "gpipe"),
    Plan(1, 8, 1, 2),
    Plan(2, 1, 3, 2, "1f1b"),
    Plan(1, 3, 2, 1),
]


def text(item: object) -> str:
    return str(item)


@pytest.mark.parametrize("plan", plans(batch=8, deepest=7), ids=text)
@pytest.mark.parametrize("name", ["flat", "flat with sgd"])
def test_a_flat_joint_function_under_every_plan(name, plan):
    assert_plan(case(name), plan)


@pytest.mark.parametrize("plan", plans(batch=8), ids=text)
def test_an_mlp_of_calls_under_every_plan(plan):
    assert_plan(case("mlp"), plan)


@pytest.mark.parametrize("plan", plans(batch=8, microbatches=(1, 4), deepest=7), ids=text)
def test_a_gpt_under_every_plan(plan):
    assert_plan(case("gpt"), plan)


@pytest.mark.parametrize("plan", plans(batch=8, deepest=8), ids=text)
def test_an_imported_model_under_every_plan(plan):
    assert_plan(case("imported"), plan)


OTHERS = ("flat with sgd at once", "gpt of two heads", "llama", "llama of one key head", "tied")
OTHERS += ("tied, gradients", "fused attention", "bert")


def several(name: str) -> list[Plan]:
    """Those that a batch of four and the layers of a model allow, and one more."""
    deepest = 5 if name.startswith("tied") else 6
    fit = [plan for plan in SEVERAL if plan.pp <= deepest and plan.dp * plan.microbatches <= 4]
    return list(dict.fromkeys([*fit, Plan(1, 2, 3, 2)]))


@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name in OTHERS for plan in several(name)], ids=str
)
def test_other_models_under_several_plans(name, plan):
    assert_plan(case(name), plan)


# --- tied parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adam()], ids=text)
def test_a_tied_parameter_is_new_on_both_stages_and_only_the_parameter_is_sent(optimizer):
    known = case_of(differentiate(tied(), optimizer))
    program = laid_out(known.joint, mesh_of(2, 2, 2), schedule("1f1b", 2, 2))
    (table,) = [given for given in program.inputs if given.source.name == "wte"]
    assert table.stages == (0, 1)
    copies = {output.key.name: output.copies for output in program.outputs if output.copies}
    assert list(copies) == ["wte.new"], f"copies of {copies}: only the parameter itself is shared"
    assert_same_step(known.joint, program, known.inputs, known.expected)


def test_two_steps_of_a_tied_model_are_two_steps_on_one_device():
    """The second step starts from what the first one left on every stage."""
    joint = differentiate(tied(), SGD(lr=0.1))
    first = case_of(joint)
    start = len(joint.inputs) - len(joint.parameters)
    second = [*first.inputs[:start], *first.expected[1:]]
    expected = SequentialExecutor().compute(joint, second)
    program = laid_out(joint, mesh_of(2, 1, 2), schedule("1f1b", 2, 2))
    assert_same_step(joint, program, second, expected)


# --- the other ways to say it ------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2)], ids=text)
def test_parallel_transform_3d_then_steady_state(degrees):
    """As in the notebooks: inputs on device 0, workers after it, a flat function."""
    dp, hp, pp = degrees
    holder, *workers = [Device(i, "gpu") for i in range(1 + dp * hp * pp)]
    joint = on_device(flat_mlp(optimizer=True), holder)
    known = case_of(joint)
    made = parallel_transform_3d(joint, dp, hp, pp, [holder, *workers], num_microbatches=2)
    verify(made)
    results = SequentialExecutor().compute(made, known.inputs)
    used = {device for value in made.outputs for device in value.type.device.devices}
    assert used <= set(workers)
    for ranks in (results[0],):
        for loss in ranks:
            np.testing.assert_allclose(loss, known.expected[0], rtol=1e-9)
    steady, inputs = steady_state_transform(made)
    assert inputs == steady.inputs
    kinds = {op.op_type for op in steady.ops}
    assert not kinds & {"MPIScatter", "MPIBroadcast"}


def on_device(function: Function, device: Device) -> Function:
    maker = FunctionMaker(function.name)
    env: dict[Value, Value] = {}
    for value in function.inputs:
        env[value] = maker.add_input_value(value.name, value.type.on(device), value.role)
    for op in function.ops:
        made = maker.add(op.op_type, [env[v] for v in op.inputs], op.attributes)
        env.update(zip(op.outputs, made, strict=True))
    maker.set_outputs([env[value] for value in function.outputs])
    return maker.finalize()


def test_parallelize_is_the_same_composition():
    from training_models import topology_of

    known, plan = case("mlp"), Plan(2, 2, 2, 2)
    assert_same_step(
        known.joint, parallelize(known.joint, plan, topology_of(9)), known.inputs, known.expected
    )


# --- whatever comes -------------------------------------------------------------------------------


class Sample:
    """A random function and plan, printed so that a failure can be read."""

    def __init__(self, joint: Function, plan: Plan) -> None:
        self.joint, self.plan = joint, plan

    def __repr__(self) -> str:
        return f"{self.plan}\n{pformat(self.joint)}"


@st.composite
def random_plans(draw, batch: int, deepest: int) -> Plan:
    dp = draw(st.sampled_from([d for d in (1, 2, 3, 4) if batch % d == 0]))
    m = draw(st.sampled_from([m for m in (1, 2, 3, 4) if batch // dp % m == 0]))
    tp = draw(st.sampled_from([t for t in (1, 2, 3, 4) if dp * t <= 8]))
    pp = draw(st.sampled_from([p for p in range(1, deepest + 1) if dp * tp * p <= 8]))
    return Plan(dp, tp, pp, m, draw(st.sampled_from(list(SCHEDULES))))


@st.composite
def sized_cases(draw):
    """One of the models in sizes that may or may not be divisible, and a plan."""
    batch, layers = draw(st.sampled_from([2, 4, 6, 12])), draw(st.integers(1, 4))
    width = draw(st.sampled_from([2, 3, 4, 6, 8]))
    kind = draw(st.sampled_from(["flat", "mlp", "gpt", "tied"]))
    optimizer = draw(st.sampled_from([SGD(0.1), Adam(), None]))
    if kind == "flat":
        joint = flat_mlp(layers, width, batch, optimizer=optimizer is not None)
    elif kind == "mlp":
        sizes = [draw(st.sampled_from([2, 3, 4, 6])) for _ in range(2)]
        joint = differentiate(mlp(layers, width, batch, *sizes, dtype=Float64()), optimizer)
    elif kind == "gpt":
        heads = draw(st.sampled_from([h for h in (1, 2, 3, 4) if width % h == 0]))
        joint = differentiate(small_gpt(draw(st.integers(1, 2)), width, heads, 3, batch), optimizer)
    else:
        joint = differentiate(tied(batch, 3, width, layers), optimizer)
    deepest = {"flat": 2 * layers + 1, "mlp": 2 * layers + 1, "gpt": 6, "tied": 4}[kind]
    return Sample(joint, draw(random_plans(batch, min(deepest, 8))))


@given(sized_cases(), st.integers(0, 3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_models_of_any_size_under_any_plan(found, seed):
    assert_plan(case_of(found.joint, seed), found.plan)


UNARY = ("Relu", "Tanh", "Sigmoid", "Gelu", "Neg", "Exp")


@st.composite
def random_models(draw):
    """A random graph of [batch, seq, width] values: any op may read any value made before."""
    batch, seq, width = draw(st.sampled_from([2, 4])), 2, draw(st.sampled_from([4, 8]))
    make = Maker("random")
    x, target = make.data("x", batch, seq, width), make.data("target", batch, seq, width)
    pool, weights = [x], [make.parameter("w0", width, width)]

    def pick() -> Value:
        return draw(st.sampled_from(pool))

    for index in range(draw(st.integers(1, 8))):
        kind = draw(
            st.sampled_from(("linear", "tied", "binary", "unary", "norm", "softmax", "split", "heads"))
        )
        if kind == "linear":
            y = make.linear(pick(), f"l{index}", width, width)
        elif kind == "tied":
            w = draw(st.sampled_from(weights))
            w = make("Transpose", w, perm=(1, 0)) if draw(st.booleans()) else w
            y = make("MatMul", pick(), w)
        elif kind == "binary":
            y = make(draw(st.sampled_from(["Add", "Sub", "Mul"])), pick(), pick())
        elif kind == "unary":
            y = make(draw(st.sampled_from(UNARY)), make("Mul", pick(), B=0.5))
        elif kind == "norm":
            own = [make.parameter(f"{name}{index}", width) for name in ("scale", "bias")]
            y = make("LayerNormalization", pick(), *own, axis=-1)
        elif kind == "softmax":
            y = make("Softmax", pick(), axis=draw(st.sampled_from([-1, 1])))
        elif kind == "split":
            sizes = draw(st.sampled_from([(width // 2, width // 2), (width // 4, 3 * width // 4)]))
            a, b = make.add("Split", [pick()], {"axis": 2, "split": sizes})
            y = make.add("Concat", [b, a], {"axis": 2})[0]
        else:
            y = make("Reshape", pick(), shape=(batch, seq, 2, width // 2))
            y = make("Transpose", make("Transpose", y, perm=(0, 2, 1, 3)), perm=(0, 2, 1, 3))
            y = make("Reshape", y, shape=(batch, seq, width))
        pool.append(make("Tanh", y) if kind in ("tied", "binary", "unary") else y)
    last = make("Add", make("MatMul", pool[-1], weights[0]), pick())
    function = make.end(make("Loss", last, target, N=batch))
    joint = differentiate(function, draw(st.sampled_from([SGD(0.1), None])))
    return Sample(joint, draw(random_plans(batch, 4)))


@given(random_models(), st.integers(0, 3))
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_random_graphs_under_any_plan(found, seed):
    known = case_of(found.joint, seed)
    assume(all(np.isfinite(array).all() for array in known.expected))
    assert_plan(known, found.plan)


# --- what needs the whole batch ---------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(2, 1, 1, 1), Plan(2, 2, 1, 1), Plan(2, 1, 2, 1)], ids=text)
def test_a_mean_over_the_batch_is_taken_over_data_parallel_ranks(plan):
    assert_plan(case_of(differentiate(centred(), SGD(lr=0.1))), plan)


def centred() -> Function:
    make = Maker("centred")
    x, target = make.data("x", 4, 8), make.data("target", 4, 8)
    y = make.linear(x, "first", 8, 8)
    y = make("Sub", y, make("ReduceMean", y, axes=Literal(np.array([0])), keepdims=1))
    return make.end(make("Loss", make.linear(y, "second", 8, 8), target, N=4))


def test_scalar_inputs_are_not_divided():
    make = Maker("scaled")
    x, target = make.data("x", 4, 8), make.data("target", 4, 8)
    scale = make.add_input_value("scale", Tensor(Float64(), ()))
    loss = make("Loss", make("Mul", make.linear(x, "l", 8, 8), scale), target, N=4)
    assert_plan(case_of(differentiate(make.end(loss), SGD(lr=0.1))), Plan(2, 2, 2, 2))
