"""FSDP: parameters, gradients and optimizer state divided over dp; what gathered weights cost in memory."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from training_models import (
    F64,
    Maker,
    assert_all_readers_agree,
    assert_same_step,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    small_llama,
    small_mlp,
    tied,
    topology_of,
)

from distsim.cost.demand import collective_of
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulation, Simulator
from distsim.hardware import collective_time, load_cluster
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Function, FunctionMaker, Mesh, Role, Value, all_ops, callees, verify
from distsim.ir.type import BFloat16
from distsim.models import gpt, llama, moe
from distsim.ops import signature_of
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.memory.timeline import memory_timeline
from distsim.simulation.memory.walk import KINDS
from distsim.transforms import SGD, Adam, differentiate, gathered, pipeline, rematerialize, shard, zero
from distsim.transforms.data_parallel.gathers import chains
from distsim.transforms.recompute.saves import Tag

MODELS = {
    "mlp": lambda: differentiate(small_mlp(layers=6), Adam()),
    "gpt": lambda: differentiate(small_gpt(), SGD(lr=0.1)),
    "llama": lambda: differentiate(small_llama(layers=3), Adam()),
    "llama, gradients": lambda: differentiate(small_llama(), None),
    "odd mlp": lambda: differentiate(biased_mlp(), Adam()),
    "odd gpt": lambda: differentiate(small_gpt(hidden=6, heads=2, batch=12), Adam()),
    "odd llama": lambda: differentiate(small_llama(hidden=12, heads=2, kv_heads=2, batch=12), SGD(lr=0.1)),
    "tied": lambda: differentiate(tied(batch=12, hidden=7), Adam()),
    "one scale": lambda: differentiate(one_scale(), SGD(lr=0.1)),
    "scaled loss": lambda: differentiate(one_scale(weighted=True), SGD(lr=0.1)),
}


def biased_mlp() -> Function:
    """Six layers of 8 and 5 features in turn, with biases."""
    widen = Maker("widen")
    x, w, b = widen.data("x", 36, 5), widen.parameter("w", 5, 8), widen.parameter("b", 8)
    widened = widen.end(widen("Gelu", widen("Add", widen("MatMul", x, w), b)))
    make = Maker("odd_mlp")
    x, z = make.data("x", 36, 5), make.data("z", 36, 5)
    for number in range(3):
        x = make.layer(widened, x, f"h{number}")
        x = make.linear(x, f"o{number}", 8, 5)
    return make.end(make("Loss", x, z, N=36))


def one_scale(weighted: bool = False) -> Function:
    """Four layers that share a vector, as exports do that hold equal parameters once; a learned weight."""
    layer = Maker("layer")
    scaled = layer("Mul", layer.data("x", 8, 4), layer.parameter("scale", 4))
    callee = layer.end(layer("Tanh", layer("MatMul", scaled, layer.parameter("w", 4, 4))))
    make = Maker("one_scale")
    x, scale = make.data("x", 8, 4), make.parameter("scale", 4)
    for i in range(4):
        x = make.call(callee, x, scale, make.parameter(f"w{i}", 4, 4))
    loss = make("Loss", x, make.data("t", 8, 4), N=8)
    return make.end(make("Mul", loss, make.parameter("weight")) if weighted else loss)


@cache
def case(name: str):
    joint = MODELS[name]()
    inputs = random_inputs(joint, 0)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


# --- the same numbers on every rank --------------------------------------------------------------------

CASES = [
    ("mlp", Plan(2, 1, 1, 1), "none", "zero=3,reshard=never"),
    ("mlp", Plan(4, 1, 2, 2, "gpipe"), "full", "zero=3"),
    ("gpt", Plan(2, 2, 2, 2), "min_cut", "zero=3"),
    ("gpt", Plan(4, 1, 1, 2), "every:2", "zero=3,reshard=never"),
    ("llama", Plan(2, 1, 3, 2), "none", "zero=3"),
    ("llama", Plan(2, 2, 1, 2), "full", "zero=3"),
    ("llama", Plan(2, 1, 3, 2), "full_early", "zero=3"),
    ("llama", Plan(2, 1, 2, 2), "full", "zero=3,reshard=never"),
    ("llama", Plan(2, 1, 1, 2), "full", "zero=3,reshard=blocking"),
    ("llama, gradients", Plan(4, 2, 1, 1), "none", "zero=3"),
    ("odd mlp", Plan(3, 1, 1, 2), "none", "zero=3,reshard=never"),
    ("odd mlp", Plan(4, 1, 3, 3, "gpipe"), "full", "zero=3"),
    ("odd gpt", Plan(4, 2, 2, 3), "min_cut", "zero=3"),
    (
        "odd gpt",
        Plan(12, 1, 1, 1),
        "budget:0.5",
        "zero=3,reshard=never",
    ),  # three ranks have nothing of a bias but padding
    ("odd gpt", Plan(3, 1, 2, 2), "full", "zero=3,reshard=never"),
    ("odd llama", Plan(3, 2, 1, 2), "matmuls", "zero=3"),
    ("tied", Plan(3, 1, 2, 2), "none", "zero=3"),
    ("one scale", Plan(2, 1, 4, 2), "full", "zero=3"),
    ("one scale", Plan(2, 1, 4, 1), "matmuls", "zero=3"),
]


@pytest.mark.parametrize(("name", "plan", "remat", "weights"), CASES, ids=str)
def test_every_rank_computes_the_same_step(name: str, plan: Plan, remat: str, weights: str) -> None:
    joint, inputs, expected = case(name)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    program = laid_out(joint, mesh_of(plan.dp, plan.tp, plan.pp), order, remat, weights)
    assert_same_step(joint, program, inputs, expected)
    assert_all_divided(program)
    assert_all_readers_agree(program)


def assert_all_divided(program: Program) -> None:
    """Of every parameter, and of its state, a rank has ceil(n / dp) elements of the n that tp leaves it."""
    dp, tp = (program.mesh.axis_size(axis) for axis in ("dp", "tp"))
    for given in program.inputs:
        if given.source.role in (Role.PARAMETER, Role.STATE):
            along = {axis for _, axis, _ in given.shards}
            assert [shard[:2] for shard in given.shards][-1:] == [(None, "dp")]
            assert given.key.type.shape == (
                math.ceil(given.source.type.size / (tp if "tp" in along else 1) / dp),
            )
    assert not any("whole" in note for note in program.notes)


def local_of(name: str, dp: int, smallest: int = 1):
    joint, _, _ = case(name)
    return zero(shard(joint, logical_mesh(mesh_of(1, 1, 1).devices[0], dp, 1)), smallest=smallest)


def test_parameters_state_and_updates_take_a_part_of_the_memory() -> None:
    joint, _, _ = case("mlp")
    plans = [
        laid_out(joint, mesh_of(4, 1, 1), schedule("1f1b", 1, 1), "none", f) for f in ("zero=0", "zero=3")
    ]
    whole, part = (program_memory(program).ranks[0].end for program in plans)
    loss = 8
    assert part - loss == (whole - loss) / 4
    for op in all_ops(local_of("mlp", 4).function):
        if op.op_type == "AdamOptimizer":
            assert {value.type.size for value in op.inputs} == {8 * 8 // 4}


def test_gradients_are_reduce_scattered_and_weights_gathered_twice_or_once() -> None:
    joint, _, _ = case("llama")
    local = local_of("llama", 2)
    parameters = len(joint.parameters)
    used_in_backward = parameters - 1  # the gradient of the embedding does not read it
    for reshard, gathers in ((False, parameters), (True, parameters + used_in_backward)):
        function = rematerialize(local.function, "none", gathered(local.function, reshard))
        verify(function)
        count = Counter(op.op_type for op in function.ops)
        assert count["MPIAllgather"] == gathers
        assert count["MPIReduceScatter"] == parameters
        assert count["MPIAllreduce"] == 1  # the loss


def test_only_what_is_asked_to_stays_whole() -> None:
    small = local_of("llama", 2, smallest=20)
    assert {v.name.split(".")[-1] for v in small.function.parameters if v.type.shape == (16,)} == {"scale"}


def test_what_all_tp_ranks_hold_is_divided_over_dp() -> None:
    sizes = {"hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 8, "seq": 6, "vocab": 16, "batch": 6}
    routing = {"experts": 4, "shared": 1, "capacity": 1.0, "concentration": 1.0}
    joint = differentiate(moe(layers=4, **sizes, **routing, dtype=F64), SGD(lr=0.1))
    inputs = random_inputs(joint, 0)
    rng = np.random.default_rng(0)
    inputs[0] = np.stack([rng.permutation(16)[:6] for _ in range(6)])  # equal tokens would be dropped
    program = laid_out(joint, mesh_of(3, 2, 1), schedule("1f1b", 1, 2), zero="zero=3")
    assert_all_divided(program)
    axes = [{axis for _, axis, _ in given.shards} for given in program.inputs]
    assert {"dp"} in axes and {"dp", "tp"} in axes
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


def test_what_is_gathered_and_scattered_has_the_padded_size() -> None:
    """Bytes of a collective are those of n ceil(size / n) elements, whatever the shape of the parameter."""
    joint, ranks = case("odd gpt")[0], 4
    topology = topology_of(ranks)
    group = tuple(topology.devices)
    local = zero(shard(joint, Mesh(group, dp=ranks, tp=1)))
    padded = Counter([8 * ranks * math.ceil(math.prod(v.type.shape) / ranks) for v in joint.parameters])
    assert {8 * v.type.size for v in joint.parameters} - set(padded) != set(), "some are padded"
    found = {name: Counter[int]() for name in ("MPIAllgather", "MPIReduceScatter")}
    model = CostModel(topology)
    for op in local.function.ops:
        if op.op_type in found:
            whole = max(op.inputs[0].type, op.outputs[0].type, key=lambda type_: type_.nbytes)
            found[op.op_type][whole.nbytes] += 1
            kind, nbytes = collective_of(signature_of(op), group)
            assert nbytes == whole.nbytes == ranks * min(v.type.nbytes for v in (*op.inputs, *op.outputs))
            assert model.communication_seconds(signature_of(op), group) == pytest.approx(
                collective_time(kind, whole.nbytes, group, topology)
            )
    assert found["MPIReduceScatter"] == padded
    assert set(found["MPIAllgather"]) == set(padded)
    pads = [op for op in local.function.ops if op.op_type == "Pad"]
    assert len(pads) == sum(v.type.size % ranks > 0 for v in joint.parameters), "where there is padding only"


def test_530b_is_divided_over_1120_ranks() -> None:
    """1120 = 2^5 * 5 * 7, hidden = 2^12 * 5: it divides no dimension of any parameter."""
    ranks, hidden, vocab, seq = 1120, 20480, 51200, 64
    joint = differentiate(gpt(2, hidden, 128, seq, ranks, vocab, dtype=BFloat16()), Adam())
    assert not any(size % ranks == 0 for v in joint.parameters for size in v.type.shape)
    topology = load_cluster("dgx-a100:140")
    mesh = Mesh(topology.devices, pp=1, dp=ranks, tp=1)
    program = laid_out(joint, mesh, schedule("1f1b", 1, 1), "full", "zero=3")
    assert_all_divided(program)
    own = sum(2 * math.ceil(v.type.size / ranks) for v in joint.parameters)
    in_blocks = sum(512 * math.ceil(2 * math.ceil(v.type.size / ranks) / 512) for v in joint.parameters)
    (use,) = program_memory(program).ranks
    assert (use.by_kind["parameters"], use.by_kind["state"]) == (in_blocks, 2 * in_blocks)
    elements = 2 * (12 * hidden**2 + 13 * hidden) + (2 * vocab + seq + 2) * hidden
    assert 0 <= own - 2 * elements / ranks < 2 * len(joint.parameters)
    assert Simulator(CostModel(topology)).simulate(program).step_time > 0


def test_gradients_of_a_table_that_two_stages_read_are_added_once_a_step() -> None:
    """As without (test_pipeline): its gradient goes down once, whole, and its new part up."""
    joint = case("tied")[0]
    for microbatches in (1, 4):
        order = schedule("1f1b", 2, microbatches)
        flat = laid_out(joint, mesh_of(3, 1, 2), order, zero="zero=3").to_function()
        sent = Counter(op.inputs[0].type.shape for op in flat.ops if op.op_type == "Send")
        assert (sent[16, 7], sent[math.ceil(16 * 7 / 3),]) == (1, 1)


@pytest.mark.parametrize(("pp", "times"), [(1, 4), (2, 1)])
def test_gradients_of_stages_are_scattered_once_a_step(pp: int, times: int) -> None:
    """As torch's pipeline stages let FSDP do it, whole sums after the last backward pass; else each time."""
    joint, order = differentiate(small_mlp(layers=2), SGD()), schedule("1f1b", pp, 4)
    program = laid_out(joint, mesh_of(2, 1, pp), order, zero="zero=3")
    counts = Simulator(CostModel(topology_of(2 * pp))).simulate(program).timeline.op_runs
    scattered = [len(op.outputs) * n for op, _, n, _ in counts if op.op_type == "MPIReduceScatter"]
    assert sum(scattered) == 2 * times
    for use in program_memory(program).ranks:
        whole = 2 * use.by_kind["parameters"]
        assert (use.by_kind["gradients"] >= whole) == (pp > 1)


class Scaled(SGD):
    """Divides the gradient by its largest element: an optimizer that looks at all of it."""

    def update(
        self, maker: FunctionMaker, weight: Value, grad: Value, precision: object
    ) -> tuple[Value, ...]:
        (largest,) = maker.add("ReduceMax", [grad], {"keepdims": 0})
        return super().update(maker, weight, *maker.add("Div", [grad, largest]), precision)


class Watched(SGD):
    """Returns the largest element of the new parameter as well."""

    def update(
        self, maker: FunctionMaker, weight: Value, grad: Value, precision: object
    ) -> tuple[Value, ...]:
        (new,) = super().update(maker, weight, grad, precision)
        return new, *maker.add("ReduceMax", [new], {"keepdims": 0})


@pytest.mark.parametrize("name", ["tied", "one scale", "scaled loss"])
@pytest.mark.parametrize("weights", ["zero=3,reshard=never", "zero=3"])
def test_backward_runs_on_the_stages_on_which_it_does_without(name: str, weights: str) -> None:
    """Of layers too that read what another stage gathers first, and of what the end of the step reads."""
    joint = case(name)[0]
    products = [
        [
            sum(op.op_type == "MatMulGrad" for op in all_ops(stage.backward.function))
            for stage in laid_out(joint, mesh_of(2, 1, 2), schedule("1f1b", 2, 2), "none", each).stages
        ]
        for each in ("zero=0", weights)
    ]
    assert products[0] == products[1] and all(products[0])


def test_an_update_that_needs_whole_operands_is_refused() -> None:
    def local(model: Function, optimizer: SGD):
        return shard(differentiate(model, optimizer), logical_mesh(mesh_of().devices[0], 2, 1))

    for made in (local(small_gpt(), Watched()), local(small_mlp(), Watched())):
        with pytest.raises(PlanError, match="needs its operands whole.*use zero=0"):
            zero(made)


def test_a_gradient_that_is_read_whole_before_the_update_is_divided_for_it() -> None:
    for model in (small_mlp(width=7, batch=6), biased_mlp()):  # updated one by one, and by layers, in Calls
        joint = differentiate(model, Scaled())
        inputs = random_inputs(joint, 0)
        program = laid_out(joint, mesh_of(3, 1, 1), schedule("1f1b", 1, 2), zero="zero=3,reshard=never")
        assert_all_divided(program)
        assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


def test_a_pattern_of_replicas_is_refused() -> None:
    joint, _, _ = case("mlp")
    figures = mesh_of(1, 1, 1).devices[0]
    with pytest.raises(PlanError, match="pattern of 2 of 4 data-parallel ranks"):
        zero(shard(joint, logical_mesh(figures, 2, 1), 1, 4))
    with pytest.raises(PlanError, match="reshard='keep' is unknown; choose one of always, never"):
        laid_out(joint, mesh_of(2, 1, 1), schedule("1f1b", 1, 1), zero="zero=3,reshard=keep")


def test_the_chain_of_a_parameter_is_recognised() -> None:
    local = local_of("mlp", 2)
    found = chains(local.function)
    ops = ["MPIAllgather", "Unflatten"]
    assert len(found) == 6 and all([op.op_type for op in chain] == ops for chain in found)
    assert set(gathered(local.function).values()) == {Tag.MUST_RECOMPUTE}
    tags = gathered(local.function, reshard=False)
    kept = [tags.get(op.outputs[0]) for chain in found for op in chain]
    assert kept == [Tag.MUST_SAVE, None] + [Tag.MUST_SAVE, Tag.MUST_RECOMPUTE] * 5, "of w0 no gradient reads"


# --- figures of Llama 3 8B -------------------------------------------------------------------------------

MIB = 2**20
RANKS, LAYERS = 128, 4
LAYER = {"q": 4096, "k": 1024, "v": 1024, "o": 4096, "gate": 14336, "up": 14336, "down": 14336}
"""The width of each matrix of a layer beside 4096."""


@cache
def llama3() -> Function:
    model = llama(LAYERS, 4096, 32, 8, 14336, seq=256, batch=RANKS, vocab=128256, dtype=BFloat16())
    return differentiate(model, Adam())


@cache
def simulated(remat: str, kept: tuple[str, ...] | None) -> Simulation:
    """A step on 128 GPUs; ``kept`` are the matrices whose gathered weights are saved, None: all are whole."""
    topology = load_cluster("dgx-h100:16")
    devices = topology.devices
    local, tags = shard(llama3(), logical_mesh(devices[0], RANKS, 1)), {}
    if kept is not None:
        local = zero(local, smallest=4097)
        tags = {
            value: Tag.MUST_SAVE if value.name.removesuffix(".w").split(".")[-1] in kept else tag
            for value, tag in gathered(local.function).items()
        }
    function = rematerialize(local.function, remat, tags)
    mesh = Mesh(devices, pp=1, dp=RANKS, tp=1)
    program = pipeline(replace(local, function=function), mesh, schedule("1f1b", 1, 1))
    return Simulator(CostModel(topology)).simulate(program)


def after_forward(simulation: Simulation) -> int:
    """Bytes in use when the loss is computed, from the memory timeline, without parameters and state."""
    (timeline,) = memory_timeline(simulation)
    (start,) = [span.start for span in simulation.spans() if span.op.op_type == "CrossEntropyLoss"]
    place = np.searchsorted(timeline.times, start, side="right") - 1
    resident = [KINDS.index(kind) for kind in ("parameters", "state")]
    return int(timeline.in_use[place] - timeline.by_kind[place, resident].sum())


def test_a_layer_has_416_mib_of_gathered_weights() -> None:
    assert sum(4096 * width * 2 for width in LAYER.values()) == 416 * MIB
    topology = load_cluster("dgx-h100:16")
    local = zero(shard(llama3(), logical_mesh(topology.devices[0], RANKS, 1)), smallest=4097)
    own = [chain[-1].outputs[0] for chain in chains(local.function)]
    assert sum(v.type.nbytes for v in own if v.name.startswith("h2.")) == 416 * MIB


def test_keeping_the_weights_of_six_of_seven_products_costs_1216_mib() -> None:
    """Backward needs the results of all products of a layer but the last, with which recomputation stops."""
    again, kept = simulated("full_early", ()), simulated("full_early", tuple(LAYER)[:-1])
    (behind,) = [f for f in callees(again.function) if f.name == "layer_backward"]
    weights = {v.name for op in behind.ops if op.op_type == "MatMul" for v in op.inputs if v in behind.inputs}
    assert weights == {f"{name}.w" for name in LAYER} - {"down.w"}
    whole = after_forward(simulated("full_early", None))
    assert after_forward(again) - whole == 0
    assert after_forward(kept) - whole == LAYERS * 304 * MIB == 1216 * MIB
    assert kept.step_time < again.step_time


def test_keeping_all_gathered_matrices_costs_2666_mib_and_gathering_again_none() -> None:
    again, kept = simulated("none", ()), simulated("none", (*LAYER, "head"))
    whole = after_forward(simulated("none", None))
    assert after_forward(again) - whole == 0
    assert after_forward(kept) - whole == (LAYERS * 416 + 1002) * MIB == 2666 * MIB
    assert kept.step_time < again.step_time
