"""Imported models compute the same under a plan."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_cases import (
    LEARNING_RATE,
    running_statistics,
)
from training_models import assert_same_step, laid_out, mesh_of

from distsim.executor import SequentialExecutor
from distsim.importer import import_from_onnx
from distsim.ir import Function, Role
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import SGD, add_loss, differentiate

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
    program = laid_out(joint, mesh_of(plan.dp, plan.tp, plan.pp), order)
    assert_same_step(joint, program, inputs, expected)
