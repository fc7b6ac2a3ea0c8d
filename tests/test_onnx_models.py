"""Real ONNX models import, train under every plan that divides their batch, and have every rule they need."""

import difflib
import os
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from training_models import assert_same_step, mesh_of, plans, refuses

from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator, count_flops
from distsim.hardware import load_cluster
from distsim.importer import import_from_onnx
from distsim.ir import Function, Role, Value, all_ops, verify
from distsim.ops import operator
from distsim.parallelize import parallelize
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import SGD, add_loss, build_program, differentiate, steady_state_transform

DATA = Path(__file__).parent / "data"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
REFERENCE = Path(os.environ.get("DISTSIM_REFERENCE", "/nonexistent")) / "onnx"
PACKAGED = {
    **{path.stem.removeprefix("light_"): path for path in sorted(LIGHT.glob("light_*.onnx"))},
    "gpt2": Path(__file__).parents[1] / "distsim" / "models" / "data" / "gpt2.onnx",
    "mlp": DATA / "mlp.onnx",
}
OTHERS = {f"reference {path.stem}": path for path in sorted(REFERENCE.glob("*.onnx"))}
FILES = PACKAGED | OTHERS
SIZES = {"gpt2": {"batch": 8, "seq": 64}, "reference gpt2-dynamic": {"batch": 8, "seq": 64}}
BATCH = dict.fromkeys(FILES, 1) | {"gpt2": 8, "mlp": 32}
BATCH |= {"reference gpt2-dynamic": 8, "reference gpt2-forward-backward": 2, "reference mlp": 32}
LEARNING_RATE = 0.01

TOPOLOGY = load_cluster("dgx-a100")
COST_MODEL = CostModel(TOPOLOGY, strict=True)


@cache
def forward(name: str) -> Function:
    parameters = ("p_*",) if name.endswith("forward-backward") else ()
    return import_from_onnx(FILES[name], parameters=parameters, **SIZES.get(name, {}))


@cache
def training(name: str) -> Function:
    """The joint function; an export with a backward pass of its own is one as it is."""
    if name.endswith("forward-backward"):
        return forward(name)
    return differentiate(add_loss(forward(name)), SGD(LEARNING_RATE))


def running_statistics(function: Function) -> set[Value]:
    """The mean and the variance of each batch normalisation: stored, but not trained."""
    return {v for op in function.ops if op.op_type == "BatchNormalization" for v in op.inputs[3:5]}


# --- what is imported -----------------------------------------------------------------------------


def test_the_nine_models_of_the_onnx_package_are_there():
    expected = (
        "bvlc_alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet squeezenet vgg19 zfnet512"
    )
    assert list(PACKAGED)[:-2] == expected.split()


@pytest.mark.parametrize("name", FILES)
def test_imports_and_differentiates_to_correct_ir(name):
    function, joint = forward(name), training(name)
    verify(function)
    verify(joint)
    sizes = {value.type.shape[0] for value in function.inputs_with(Role.INPUT)}
    assert BATCH[name] in sizes
    if joint is function:
        return
    loss, *new = joint.outputs
    assert loss.type.shape == ()
    trained = [v for v in function.parameters if v not in running_statistics(function)]
    assert [(v.name, v.type) for v in new] == [(f"{v.name}.new", v.type) for v in trained]


@pytest.mark.parametrize("name", [name for name in FILES if "gpt2" in name])
def test_no_shape_arithmetic_is_left_in_gpt2(name):
    function = training(name)
    shape_ops = {"Shape", "Size", "Range", "ConstantOfShape", "NonZero"}
    assert not shape_ops & {op.op_type for op in all_ops(function)}
    if not name.endswith("forward-backward"):  # this one counts the labels that are not padding
        scalars = [v for op in forward(name).ops for v in op.outputs if v.type.rank == 0]
        assert not [v for v in scalars if not v.type.dtype.is_floating], "a size that is computed"


# --- every plan that divides the batch ------------------------------------------------------------

# All plans for the models that are quick; for the others (0.3 to 3 s a plan) one per kind of axis and one
# with all axes. A batch of 1 leaves dp = microbatches = 1.
QUICK = ("bvlc_alexnet", "squeezenet", "vgg19", "zfnet512", "mlp")
SOME_OF_ONE = [Plan(), Plan(tp=2), Plan(pp=3), Plan(tp=4, pp=2)]
SOME = {
    **dict.fromkeys(FILES, SOME_OF_ONE),
    "densenet121": [Plan(pp=2), Plan(tp=2, pp=3)],
    "inception_v2": [Plan(pp=4), Plan(tp=2, pp=2)],
    "resnet50": [*SOME_OF_ONE, Plan(tp=3), Plan(tp=8), Plan(pp=8)],
    "gpt2": [
        *(Plan(), Plan(dp=8), Plan(tp=8), Plan(tp=3, pp=2, microbatches=8), Plan(dp=2, pp=4, microbatches=4)),
        *(Plan(dp=2, tp=2, pp=2, microbatches=2), Plan(pp=7, microbatches=8, schedule="gpipe")),
    ],
    "reference gpt2-dynamic": [Plan(dp=4, tp=2), Plan(dp=2, tp=2, pp=2, microbatches=4)],
    # Its loss divides by a count over the batch that backward reads: no microbatches.
    "reference gpt2-forward-backward": [Plan(), Plan(dp=2, tp=2, pp=2), Plan(tp=2, pp=4)],
    "reference mlp": [Plan(dp=2, tp=2, pp=2, microbatches=2), Plan(dp=8, microbatches=4)],
}


def plans_of(name: str) -> list[Plan]:
    if name not in QUICK:
        return SOME[name]
    counts = tuple(m for m in (1, 2, 4, 8, 16, 32) if BATCH[name] % m == 0)
    return [plan for plan in plans(BATCH[name], microbatches=counts) if plan.schedule == "1f1b"]


CASES = [(name, plan) for name in FILES for plan in plans_of(name)]


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_simulates_under_a_plan(name, plan):
    joint = training(name)
    if refuses(joint, plan.tp):
        with pytest.raises(PlanError, match=f"tp={plan.tp} divides no matrix product"):
            parallelize(joint, plan, TOPOLOGY)
        return
    program = parallelize(joint, plan, TOPOLOGY)
    step, inputs = steady_state_transform(program.to_function())
    verify(step)
    simulation = Simulator(COST_MODEL).interpret(step, inputs)
    assert simulation.step_time > 0
    assert list(simulation.timestamps) == TOPOLOGY.devices[: plan.devices]
    for device in simulation.timestamps:
        shares = simulation.shares(device)
        parts = (shares.busy, shares.exposed_communication, shares.bubble)
        assert shares.busy > 0 and min(parts) > -1e-12
        assert sum(parts) == pytest.approx(simulation.step_time, rel=1e-9)
        assert simulation.peak_memory[device] > 0
    # Nothing of the model is lost: all devices together do at least its work.
    assert simulation.flops >= count_flops(joint) * (1 - 1e-9)
    if plan.devices == plan.microbatches == 1:
        assert simulation.shares(TOPOLOGY.devices[0]).exposed_communication == 0
        assert simulation.flops == pytest.approx(count_flops(joint), rel=1e-9)


@pytest.mark.parametrize("name", FILES)
def test_a_plan_that_does_not_divide_the_batch_is_refused_with_the_numbers(name):
    batch = BATCH[name]
    divisors = ", ".join(str(d) for d in range(1, batch + 1) if batch % d == 0)
    refused = [(dp, m) for dp in range(1, 9) for m in (1, 2, 3, 5) if batch % (dp * m)]
    assert len(refused) >= 8
    for dp, m in refused if name in QUICK else refused[::6]:
        with pytest.raises(PlanError) as caught:
            parallelize(training(name), Plan(dp=dp, microbatches=m), TOPOLOGY)
        text = str(caught.value)
        assert text.startswith(f"dp={dp} times microbatches={m} does not divide the batch of {batch} ")
        assert text.endswith(f"must be one of {divisors}")


# --- which rules the operators of these models have -----------------------------------------------

GOLDEN = DATA / "op_coverage.txt"
RULES = ("types", "meaning", "work", "gradient", "sharding")
HEADER = " ".join(
    f"{title:<22}" if i == 0 else f"{title:<10}" for i, title in enumerate(["op", *RULES, "in"])
)


def row(op_type: str, where: str) -> str:
    """One line of the table: where each rule comes from (``onnx``: the onnx package's own)."""
    known = operator(op_type)
    cells = [
        "own" if known.types else "onnx",
        "own" if known.compute else "onnx",
        "own" if known.work else "-",
        "own" if known.gradient else "-",
        "own" if known.sharding else "-",
        where,
    ]
    return " ".join([f"{op_type:<22}", *(f"{cell:<10}" for cell in cells)]).rstrip()


def found_in(files: dict) -> dict[str, str]:
    """Each op type of these models -> whether a model has it, or only its training step."""
    found = {op.op_type: "training" for name in files for op in all_ops(training(name))}
    return found | {op.op_type: "model" for name in files for op in all_ops(forward(name))}


def golden_rows() -> list[str]:
    return [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")][1:]


def coverage() -> list[str]:
    """The table as it is now; without the reference exports their lines are taken as still needed."""
    where = {op_type: f"reference {kind}" for op_type, kind in found_in(OTHERS).items()}
    if not OTHERS:
        listed = [line.split() for line in golden_rows()]
        where = {cells[0]: " ".join(cells[6:]) for cells in listed if cells[6] == "reference"}
    where |= found_in(PACKAGED)
    return [row(op_type, where[op_type]) for op_type in sorted(where)]


def test_rules_of_the_operators_are_those_of_the_table():
    difference = difflib.unified_diff(
        golden_rows(), coverage(), "tests/data/op_coverage.txt", "now", "", "", 0
    )
    text = "\n".join(difference)
    assert not text, f"rules have changed; if that is right, change the table:\n{HEADER}\n{text}"


def test_every_operator_has_work_and_sharding():
    for line in golden_rows():
        op_type = line.split()[0]
        assert operator(op_type).work, f"{op_type} has no work rule"
        assert operator(op_type).sharding, f"{op_type} has no sharding rule"


@pytest.mark.parametrize("name", FILES)
def test_every_operator_on_reals_has_a_gradient(name):
    def real(values):
        return any(value.type.dtype.is_floating for value in values)

    types = {op.op_type for op in all_ops(forward(name)) if real(op.inputs) and real(op.outputs)}
    assert types, "a model without operators on reals"
    assert [op_type for op_type in sorted(types) if operator(op_type).gradient is None] == []


# --- imported models compute the same under a plan ------------------------------------------------


def info(name, shape, kind=TensorProto.DOUBLE):
    return helper.make_tensor_value_info(name, kind, shape)


def save(path, nodes, inputs, outputs, stored):
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape) * 0.5


def write_cnn(path) -> None:
    """Convolutions (one grouped, one with stride), batch normalisation, a residual, two pools, a Gemm."""
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "g", "b", "mean", "var"], ["n1"]),
        helper.make_node("Relu", ["n1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1], group=2),
        helper.make_node("Add", ["c2", "r1"], ["s"]),
        helper.make_node("MaxPool", ["s"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p", "w3"], ["c3"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["c3"], ["r3"]),
        helper.make_node("GlobalAveragePool", ["r3"], ["a"]),
        helper.make_node("Flatten", ["a"], ["f"]),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["y"], transB=1),
    ]
    stored = {"w1": random(4, 3, 3, 3), "b1": random(4), "g": random(4) + 1, "b": random(4)}
    stored |= {"mean": random(4), "var": np.abs(random(4)) + 1, "w2": random(4, 2, 3, 3)}
    stored |= {"w3": random(8, 4, 3, 3), "w4": random(6, 8), "b4": random(6)}
    save(path, nodes, [info("x", ["batch", 3, 8, 8])], [info("y", ["batch", 6])], stored)


def write_transformer(path) -> None:
    """A causal block as exporters write it: fused projection, Split, heads by the shape of x, Gelu."""
    split = ["q", "k", "v"]
    nodes = [
        helper.make_node("Gather", ["wte", "ids"], ["e"], axis=0),
        helper.make_node("Add", ["e", "wpe"], ["x"]),
        helper.make_node("LayerNormalization", ["x", "g1", "b1"], ["n1"], axis=-1),
        helper.make_node("MatMul", ["n1", "w_qkv"], ["m"]),
        helper.make_node("Add", ["m", "b_qkv"], ["qkv"]),
        helper.make_node("Split", ["qkv"], split, axis=2, num_outputs=3),
        helper.make_node("Shape", ["ids"], ["shape"]),
        helper.make_node("Concat", ["shape", "heads"], ["to_heads"], axis=0),
        helper.make_node("Concat", ["shape", "minus"], ["from_heads"], axis=0),
        *[helper.make_node("Reshape", [t, "to_heads"], [f"{t}4"]) for t in split],
        *[
            helper.make_node(
                "Transpose", [f"{t}4"], [f"{t}h"], perm=[0, 2, 3, 1] if t == "k" else [0, 2, 1, 3]
            )
            for t in split
        ],
        helper.make_node("MatMul", ["qh", "kh"], ["scores"]),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
        helper.make_node("Where", ["mask", "scaled", "low"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["attention"], axis=-1),
        helper.make_node("MatMul", ["attention", "vh"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "from_heads"], ["joined"]),
        helper.make_node("MatMul", ["joined", "w_out"], ["o"]),
        helper.make_node("Add", ["o", "x"], ["x1"]),
        helper.make_node("LayerNormalization", ["x1", "g2", "b2"], ["n2"], axis=-1),
        helper.make_node("MatMul", ["n2", "w_up"], ["u"]),
        helper.make_node("Add", ["u", "b_up"], ["u1"]),
        helper.make_node("Gelu", ["u1"], ["u2"], approximate="tanh"),
        helper.make_node("MatMul", ["u2", "w_down"], ["d"]),
        helper.make_node("Add", ["d", "x1"], ["x2"]),
        helper.make_node("Transpose", ["wte"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["x2", "head"], ["y"]),
    ]
    stored = {"wte": random(16, 8), "wpe": random(4, 8), "g1": random(8) + 1, "b1": random(8)}
    stored |= {"w_qkv": random(8, 24), "b_qkv": random(24), "w_out": random(8, 8)}
    stored |= {"g2": random(8) + 1, "b2": random(8), "w_up": random(8, 32), "b_up": random(32)}
    stored |= {"w_down": random(32, 8), "scale": np.array(2**-0.5), "low": np.array(-1e9)}
    stored |= {"heads": np.array([4, 2]), "minus": np.array([-1]), "mask": np.tril(np.ones((4, 4), bool))}
    ids = info("ids", ["batch", "seq"], TensorProto.INT64)
    save(path, nodes, [ids], [info("y", ["batch", "seq", 16])], stored)


WRITERS = {"cnn": (write_cnn, {"batch": 8}), "transformer": (write_transformer, {"batch": 8, "seq": 4})}


@pytest.fixture(scope="module")
def tiny(request, tmp_path_factory):
    """(path, imported function, stored values, data) of a tiny model."""
    write, sizes = WRITERS[request.param]
    path = tmp_path_factory.mktemp("models") / f"{request.param}.onnx"
    write(path)
    function, values = import_from_onnx(path, load_values=True, **sizes)
    rng = np.random.default_rng(1)
    (given,) = function.inputs_with(Role.INPUT)
    real = given.type.dtype.is_floating
    data = rng.standard_normal(given.type.shape) if real else rng.integers(0, 16, given.type.shape)
    return path, function, values | {given.name: data}


def step_of(function: Function, values: dict) -> tuple[Function, list[np.ndarray], list[np.ndarray]]:
    joint = differentiate(add_loss(function), SGD(LEARNING_RATE))
    (labels,) = [value for value in joint.inputs if value.name == "labels"]
    known = values | {"labels": np.random.default_rng(2).integers(0, 6, labels.type.shape)}
    inputs = [known[value.name] for value in joint.inputs]
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


BOTH = pytest.mark.parametrize("tiny", WRITERS, indirect=True)


@BOTH
def test_a_tiny_model_computes_what_the_reference_evaluator_computes(tiny):
    path, function, values = tiny
    (given,) = function.inputs_with(Role.INPUT)
    expected = ReferenceEvaluator(str(path)).run(None, {given.name: values[given.name]})
    found = SequentialExecutor().compute(function, [values[value.name] for value in function.inputs])
    assert function.outputs[0].type.dtype.name == "float64"
    # The evaluator's Gelu has its constants in float32.
    tolerance = 1e-6 if "Gelu" in {op.op_type for op in function.ops} else 1e-12
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance, atol=tolerance)


@BOTH
def test_the_step_of_a_tiny_model_goes_down_its_gradient(tiny):
    joint, inputs, (_, *new) = step_of(tiny[1], tiny[2])
    frozen = running_statistics(tiny[1])
    names = {value.name for value in tiny[1].parameters if value not in frozen}
    places = [i for i, value in enumerate(joint.inputs) if value.name in names]
    rng = np.random.default_rng(3)
    direction = {i: rng.standard_normal(inputs[i].shape) for i in places}

    def loss(distance):
        moved = [
            array + distance * direction[i] if i in direction else array for i, array in enumerate(inputs)
        ]
        return float(SequentialExecutor().compute(joint, moved)[0])

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    gradients = [(inputs[i] - array) / LEARNING_RATE for i, array in zip(places, new, strict=True)]
    found = sum(float((g * direction[i]).sum()) for i, g in zip(places, gradients, strict=True))
    assert found == pytest.approx(slope, rel=1e-6)
    assert abs(slope) > 1e-3


EQUIVALENT = [
    Plan(dp=4),
    Plan(tp=2),
    Plan(tp=4),
    Plan(pp=3, microbatches=4),
    Plan(dp=2, tp=2, pp=2, microbatches=2),
    Plan(tp=2, pp=4, microbatches=8, schedule="gpipe"),
    Plan(tp=3, microbatches=2),
]


@BOTH
@pytest.mark.parametrize("plan", EQUIVALENT, ids=str)
def test_a_tiny_model_computes_the_same_under_a_plan(tiny, plan):
    joint, inputs, expected = step_of(tiny[1], tiny[2])
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    program = build_program(joint, mesh_of(plan.dp, plan.tp, plan.pp), order)
    assert_same_step(joint, program, inputs, expected)
