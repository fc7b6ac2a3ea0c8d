"""Functions to train in tests, and the check that a parallel step computes what one device computes.

Everything is float64, so that two ways to compute the same sum agree to 1e-9.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

from distsim.compose import build_program, parallelize
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware.rank_axes import RankAxes
from distsim.importer import import_from_onnx
from distsim.ir import (
    Device,
    Float64,
    Function,
    FunctionMaker,
    Int64,
    Link,
    Literal,
    Mesh,
    Role,
    Tensor,
    Topology,
    Value,
)
from distsim.models import gpt, llama, mlp
from distsim.ops.parts import gather, scatter
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import Schedule
from distsim.simulation.events import engine as events
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.tasks import recurrence
from distsim.simulation.tasks.task_table import lower
from distsim.transforms import add_loss, set_precision
from distsim.transforms.kernels.policies import KERNELS

F64 = Float64()
SCHEDULES = ("1f1b", "gpipe")
"""Of one stage a rank and whole backward passes; test_pipeline_schedules.py has all."""
VOCAB = 16
Inputs = list[np.ndarray]


class Maker(FunctionMaker):
    """A FunctionMaker in float64 with short names for what these models use."""

    def data(self, name: str, *shape: int) -> Value:
        return self.add_input_value(name, Tensor(F64, shape))

    def tokens(self, name: str, *shape: int) -> Value:
        return self.add_input_value(name, Tensor(Int64(), shape))

    def parameter(self, name: str, *shape: int) -> Value:
        return self.add_input_value(name, Tensor(F64, shape), Role.PARAMETER)

    def __call__(self, op_type: str, *inputs: Value, **attributes: object) -> Value:
        return self.add(op_type, inputs, attributes)[0]

    def call(self, callee: Function, *inputs: Value) -> Value:
        return self.add("Call", inputs, None, (callee,))[0]

    def layer(self, callee: Function, x: Value, name: str) -> Value:
        """Call ``callee`` on x and on fresh parameters of its own."""
        own = [self.parameter(f"{name}.{v.name}", *v.type.shape) for v in callee.parameters]
        return self.call(callee, x, *own)

    def linear(self, x: Value, name: str, rows: int, columns: int) -> Value:
        y = self("MatMul", x, self.parameter(f"{name}.w", rows, columns))
        return self("Add", y, self.parameter(f"{name}.b", columns))

    def end(self, loss: Value) -> Function:
        self.set_outputs([loss])
        return self.finalize()


def flat_mlp(layers: int = 3, width: int = 8, batch: int = 8, optimizer: bool = False) -> Function:
    """The joint function of the DistIR notebooks, written by hand: no roles, no Calls."""
    make = FunctionMaker("mlp")
    type_ = Tensor(F64, (batch, width))
    x, z = make.add_input_value("x", type_), make.add_input_value("z", type_)
    weights = [make.add_input_value(f"w{i}", Tensor(F64, (width, width))) for i in range(layers)]
    saved, a = [], x
    for w in weights:
        y = make.add_op("MatMul", inputs=[a, w])
        saved.append((a, y))
        a = make.add_op("Relu", inputs=[y])
    loss = make.add_op("Loss", inputs=[a, z], attributes={"N": batch}, output_names=["loss"])
    da = make.add_op("LossGrad", inputs=[a, z], attributes={"N": batch})
    grads = []
    for w, (a, y) in zip(reversed(weights), reversed(saved), strict=True):
        dy = make.add_op("ReluGrad", inputs=[y, da])
        da, dw = make.add_op("MatMulGrad", inputs=[a, w, dy])
        grads.append(dw)
    grads.reverse()
    if optimizer:
        lr = {"lr": 0.1}
        grads = [
            make.add_op("SGDOptimizer", inputs=[w, dw], attributes=lr)
            for w, dw in zip(weights, grads, strict=True)
        ]
    make.set_outputs([loss, *grads])
    return make.finalize()


def small_mlp(layers: int = 4, width: int = 8, batch: int = 8) -> Function:
    return mlp(layers, width, batch, dtype=F64)


def small_gpt(layers: int = 2, hidden: int = 8, heads: int = 4, seq: int = 4, batch: int = 8) -> Function:
    return gpt(layers, hidden, heads, seq, batch, VOCAB, dtype=F64)


def small_llama(
    layers: int = 2, hidden: int = 16, heads: int = 4, kv_heads: int = 2, seq: int = 4, batch: int = 8
) -> Function:
    return llama(layers, hidden, heads, kv_heads, 24, seq, batch, VOCAB, dtype=F64)


def attention(make: Maker, query: Value, key: Value, value: Value, heads: int) -> Value:
    """Multi-head attention of [batch, seq, hidden], without a mask."""
    batch, seq, hidden = query.type.shape
    size = hidden // heads

    def split(x: Value, *order: int) -> Value:
        return make("Transpose", make("Reshape", x, shape=(batch, seq, heads, size)), perm=order)

    scores = make("MatMul", split(query, 0, 2, 1, 3), split(key, 0, 2, 3, 1))
    scores = make("Div", scores, B=float(np.sqrt(size)))
    mixed = make("MatMul", make("Softmax", scores, axis=-1), split(value, 0, 2, 1, 3))
    return make("Reshape", make("Transpose", mixed, perm=(0, 2, 1, 3)), shape=(batch, seq, hidden))


def fused_attention(batch: int = 4, seq: int = 4, hidden: int = 8, heads: int = 4) -> Function:
    """Query, key and value in one projection, taken apart by Split, as in GPT-2."""
    make = Maker("fused_attention")
    x, target = make.data("x", batch, seq, hidden), make.data("target", batch, seq, hidden)
    joint = make.linear(x, "qkv", hidden, 3 * hidden)
    query, key, value = make.add("Split", [joint], {"axis": 2, "num_outputs": 3})
    y = make.linear(attention(make, query, key, value, heads), "proj", hidden, hidden)
    return make.end(make("Loss", y, target, N=batch))


def tied(batch: int = 4, seq: int = 4, hidden: int = 8, layers: int = 2) -> Function:
    """A language model whose output head is its embedding: the first and the last stage share it."""
    block = Maker("block")
    x = block.data("x", batch, seq, hidden)
    wide = block("Gelu", block.linear(x, "up", hidden, 2 * hidden))
    block.set_outputs([block("Add", x, block.linear(wide, "down", 2 * hidden, hidden))])
    callee = block.finalize()
    make = Maker("tied")
    tokens, labels = make.tokens("tokens", batch, seq), make.tokens("labels", batch, seq)
    table = make.parameter("wte", VOCAB, hidden)
    x = make("Gather", table, tokens, axis=0)
    for index in range(layers):
        x = make.layer(callee, x, f"h{index}")
    logits = make("MatMul", x, make("Transpose", table, perm=(1, 0)))
    return make.end(make("CrossEntropyLoss", logits, labels, N=batch * seq))


def bert(batch: int = 4, seq: int = 4, hidden: int = 8, heads: int = 2) -> Function:
    """The op mix of a BERT export: decomposed LayerNorm and GELU, a mask by Where, a Tanh pooler, Gemm."""
    make = Maker("bert")
    tokens, mask = make.tokens("tokens", batch, seq), make.tokens("mask", batch, seq)
    labels = make.tokens("labels", batch)
    x = make("Gather", make.parameter("words", VOCAB, hidden), tokens, axis=0)
    x = make("Add", x, make.parameter("positions", seq, hidden))
    x = decomposed_norm(make, x, "embedded", hidden)
    query, key, value = (make.linear(x, name, hidden, hidden) for name in ("q", "k", "v"))
    allowed = make("Equal", make("Unsqueeze", mask, axes=(2,)), B=Literal(np.array(1)))
    value = make("Where", allowed, value, Y=Literal(np.array(0.0)))
    x = make("Add", x, make.linear(attention(make, query, key, value, heads), "proj", hidden, hidden))
    x = decomposed_norm(make, x, "attended", hidden)
    y = make.linear(x, "fc", hidden, 4 * hidden)
    erf = make("Add", make("Erf", make("Div", y, B=float(np.sqrt(2)))), B=1.0)
    y = make("Mul", make("Mul", y, erf), B=0.5)
    x = decomposed_norm(make, make("Add", x, make.linear(y, "out", 4 * hidden, hidden)), "fed", hidden)
    first = make("Gather", x, axis=1, indices=Literal(np.array(0)))
    pooled = make("Tanh", make.linear(first, "pool", hidden, hidden))
    logits = make("Gemm", pooled, make.parameter("cls.w", 4, hidden), make.parameter("cls.b", 4), transB=1)
    return make.end(make("CrossEntropyLoss", logits, labels, N=batch))


def decomposed_norm(make: Maker, x: Value, name: str, hidden: int) -> Value:
    centred = make("Sub", x, make("ReduceMean", x, axes=(-1,), keepdims=1))
    variance = make("ReduceMean", make("Pow", centred, Y=2.0), axes=(-1,), keepdims=1)
    y = make("Div", centred, make("Sqrt", make("Add", variance, B=1e-5)))
    y = make("Mul", y, make.parameter(f"{name}.scale", hidden))
    return make("Add", y, make.parameter(f"{name}.bias", hidden))


def from_onnx(path, batch: int = 8, width: int = 8) -> Function:
    """A small float32 model written to ``path``, imported, in float64 and with a loss."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (width, 2 * width), "b1": (2 * width,), "w2": (width, 2 * width), "b2": (width,)}
    shapes |= {"scale": (width,), "bias": (width,), "w3": (width, 4)}
    stored = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h0"]),
        helper.make_node("Add", ["h0", "b1"], ["h1"]),
        helper.make_node("Sigmoid", ["h1"], ["h2"]),
        helper.make_node("Mul", ["h1", "h2"], ["h3"]),
        helper.make_node("Gemm", ["h3", "w2", "b2"], ["h4"], transB=1),
        helper.make_node("Add", ["h4", "x"], ["h5"]),
        helper.make_node("LayerNormalization", ["h5", "scale", "bias"], ["h6"], axis=-1),
        helper.make_node("Relu", ["h6"], ["h7"]),
        helper.make_node("MatMul", ["h7", "w3"], ["y"]),
    ]
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])]
        for name, size in (("x", width), ("y", 4))
    ]
    graph = helper.make_graph(nodes, "small", *ends, stored)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return add_loss(set_precision(import_from_onnx(path, batch=batch), F64), "mse")


# --- inputs and devices ----------------------------------------------------------------------------


def random_inputs(function: Function, seed: int = 0) -> Inputs:
    """Random values for the inputs: token ids in 0..3, small parameters, positive second moments."""
    rng = np.random.default_rng(seed)

    def draw(value: Value) -> np.ndarray:
        if not value.type.dtype.is_floating:
            return rng.integers(0, 4, value.type.shape)
        array = rng.standard_normal(value.type.shape)
        return np.abs(array) if value.role is Role.STATE else array * (1.0 if value.type.rank < 2 else 0.5)

    return [draw(value) for value in function.inputs]


def topology_of(count: int, gbps: float = 100.0, **device: float) -> Topology:
    topology = Topology()
    gpus = [topology.add_device("gpu", **device) for _ in range(count)]
    for i, a in enumerate(gpus):
        for b in gpus[:i]:
            topology.set_bandwidth(a, b, gbps=gbps)
    return topology


def mesh_of(dp: int = 1, tp: int = 1, pp: int | None = None, host_link: Link | None = None) -> Mesh:
    devices = [Device(i, "gpu", host_link=host_link) for i in range(dp * tp * (pp or 1))]
    return RankAxes.of(dp, tp).mesh(devices, pp)


def laid_out(
    joint: Function,
    mesh: Mesh,
    order: Schedule,
    remat: str = "none",
    zero: str = "zero=0",
    stages: str = "even",
    cost_model: CostModel | None = None,
    sp: str = "off",
) -> Program:
    """The program of a joint function on all of a mesh, in an order of any making.

    ``zero`` are fields of a plan, as in ``zero=3,reshard=never``.
    """
    pp, dp, tp = (mesh.axis_size(axis) for axis in ("pp", "dp", "tp"))
    degrees = f"dp={dp},tp={tp},pp={pp},microbatches={order.num_microbatches}"
    plan = Plan.parse(f"{degrees},stages={stages},remat={remat},{zero},sp={sp}")
    return build_program(joint, mesh, plan, cost_model, order)


def refuses(joint: Function, tp: int) -> bool:
    """Whether tp ranks can divide no matrix of the model, so that the plan is refused."""
    matrices = [shape for v in joint.inputs if v.role is not Role.INPUT and len(shape := v.type.shape) > 1]
    if not matrices:  # unmarked, as in the notebook: what has no batch
        matrices = [v.type.shape for v in joint.inputs]
    # Kernels and the three colours of an image are whole on every rank.
    sizes = [n for shape in matrices for n in (shape[:1] if shape[1:2] == (3,) else shape[:2])]
    return tp > 1 and not any(n % tp == 0 for n in sizes)


def plans(batch: int, most: int = 8, microbatches=(1, 2, 4), deepest: int = 8) -> list[Plan]:
    """Every plan of at most ``most`` devices that divides the batch."""
    degrees = range(1, most + 1)
    return [
        Plan(dp, tp, pp, m, name)
        for dp in degrees
        for tp in degrees
        for pp in degrees
        for m in microbatches
        for name in ("1f1b", "gpipe")
        if dp * tp * pp <= most and batch % (dp * m) == 0 and pp <= deepest
        if name == "1f1b" or (pp > 1 and m > 1)  # otherwise the two are one schedule
    ]


# --- equivalence -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """One output of a parallel step: what it is called, its whole value, where it lies."""

    name: str
    array: np.ndarray


def assemble(program: Program, results: list) -> list[Placed]:
    """Put the outputs together; every replica, and every copy on another stage, must agree."""
    copies = iter(results[len(program.outputs) :])
    made = []
    for output, ranks in zip(program.outputs, results, strict=False):
        name = output.key.name
        whole = whole_of(ranks, program.stages[output.stage].mesh, output.shards, f"{name}@{output.stage}")
        for stage in output.copies:
            other = whole_of(next(copies), program.stages[stage].mesh, output.shards, f"{name}@{stage}")
            np.testing.assert_allclose(
                other, whole, rtol=1e-12, atol=1e-12, err_msg=f"copy of {name} on {stage}"
            )
        made.append(Placed(name, whole))
    assert next(copies, None) is None, "the function has more outputs than the program says"
    return made


def whole_of(ranks: list[np.ndarray], mesh: Mesh, shards, name: str) -> np.ndarray:
    assert len(ranks) == len(mesh), f"{name}: {len(ranks)} local arrays on {mesh}"
    whole = gather(ranks, mesh, shards)
    for device, part, array in zip(mesh.devices, scatter(whole, mesh, shards), ranks, strict=True):
        if not np.array_equal(array, part):  # which takes a tenth of what the other takes
            text = f"{name}: replicas differ on {device} of {mesh}"
            np.testing.assert_allclose(array, part, rtol=1e-12, atol=1e-12, err_msg=text)
    return whole


def assert_same_step(joint: Function, program: Program, inputs: Inputs, expected: list[np.ndarray]) -> None:
    """The program computes what the joint function computed on one device: ``expected``."""
    flat = program.to_function()
    made = assemble(program, SequentialExecutor().compute(flat, inputs))
    assert len(made) == len(expected) == len(joint.outputs)
    for value, placed, array in zip(joint.outputs, made, expected, strict=True):
        assert placed.array.shape == value.type.shape, f"{value} came out with shape {placed.array.shape}"
        np.testing.assert_allclose(
            placed.array, array, rtol=1e-9, atol=1e-11, err_msg=f"output {value.name} of {program.mesh}"
        )


@lru_cache(4)  # plans of one function follow each other
def computed_alone(joint: Function, draw: Callable[[Function], Inputs]) -> tuple[Inputs, list]:
    """Return inputs of a function, and what one device computes of them."""
    inputs = draw(joint)
    return inputs, SequentialExecutor().compute(joint, inputs)


def computed_over_ranks(
    joint: Function, plan: Plan, kernels: str = "ops", draw: Callable[[Function], Inputs] = random_inputs
) -> Program:
    """Return the program of a plan, on which every rank computes the same step and all readers agree."""
    costs = CostModel(topology_of(plan.devices))
    program = parallelize(joint, plan, costs.topology, costs, kernels=KERNELS[kernels])
    assert_same_step(joint, program, *computed_alone(joint, draw))
    assert_all_readers_agree(program, costs)
    return program


def assert_all_readers_agree(program: Program, cost_model: CostModel | None = None) -> None:
    """Max-plus, events and the step written out take the same time, to the bit, and the same memory."""
    flat = program.to_function(steady=True)
    peaks = peak_memory(flat, program.parts.held)
    for device, use in program_memory(program).devices.items():
        peak = peaks[device]
        assert (use.peak, use.end, use.by_kind) == (peak.peak, peak.end, peak.by_kind)
    costs = cost_model or CostModel(topology_of(len(program.mesh)))
    found = Simulator(costs).simulate(program).step_time
    tasks = lower(flat, costs)
    for _, end in (
        recurrence.run(tasks),
        events.run(tasks),
    ):  # the latter is what Simulator's event engine is
        assert max(end) == found
