"""FSDP: parameters, gradients and optimizer state divided over dp; what gathered weights cost in memory."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from training_models import F64, assert_same_step, mesh_of, random_inputs, small_gpt, small_llama, small_mlp

from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulation, Simulator
from distsim.executor.memory import peak_memory
from distsim.executor.memory_program import program_memory
from distsim.executor.memory_timeline import memory_timeline
from distsim.executor.memory_walk import KINDS
from distsim.hardware import load_cluster
from distsim.ir import Function, Mesh, all_ops, callees, verify
from distsim.ir.device import logical_mesh
from distsim.ir.type import BFloat16
from distsim.models import llama, moe
from distsim.partition.saves import Tag
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import (
    SGD,
    Adam,
    build_program,
    differentiate,
    fsdp,
    gathered,
    pipeline,
    rematerialize,
    shard,
)
from distsim.transforms.fsdp import chains

MODELS = {
    "mlp": lambda: differentiate(small_mlp(layers=6), Adam()),
    "gpt": lambda: differentiate(small_gpt(), SGD(lr=0.1)),
    "llama": lambda: differentiate(small_llama(layers=3), Adam()),
    "llama, gradients": lambda: differentiate(small_llama(), None),
}


@cache
def case(name: str):
    joint = MODELS[name]()
    inputs = random_inputs(joint, 0)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


# --- the same numbers on every rank --------------------------------------------------------------------

CASES = [
    ("mlp", Plan(2, 1, 1, 1), "none", "keep"),
    ("mlp", Plan(4, 1, 2, 2, "gpipe"), "full", "reshard"),
    ("gpt", Plan(2, 2, 2, 2), "min_cut", "reshard"),
    ("gpt", Plan(4, 1, 1, 2), "every:2", "keep"),
    ("llama", Plan(2, 1, 3, 2), "none", "reshard"),
    ("llama", Plan(2, 2, 1, 2), "full", "reshard"),
    ("llama", Plan(2, 1, 3, 2), "full_early", "reshard"),
    ("llama", Plan(2, 1, 2, 2), "full", "keep"),
    ("llama, gradients", Plan(4, 2, 1, 1), "none", "reshard"),
]


@pytest.mark.parametrize(("name", "plan", "remat", "weights"), CASES, ids=str)
def test_every_rank_computes_the_same_step(name: str, plan: Plan, remat: str, weights: str) -> None:
    joint, inputs, expected = case(name)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    program = build_program(joint, mesh_of(plan.dp, plan.tp, plan.pp), order, remat, weights)
    assert_same_step(joint, program, inputs, expected)
    peaks = peak_memory(program.to_function(steady=True))
    for device, use in program_memory(program).devices.items():
        assert use.peak == peaks[device].peak
        assert use.end == peaks[device].end


def local_of(name: str, dp: int, smallest: int = 1):
    joint, _, _ = case(name)
    return fsdp(shard(joint, logical_mesh(mesh_of(1, 1, 1).devices[0], dp, 1)), smallest)


def test_parameters_state_and_updates_take_a_part_of_the_memory() -> None:
    joint, _, _ = case("mlp")
    plans = [
        build_program(joint, mesh_of(4, 1, 1), schedule("1f1b", 1, 1), "none", f) for f in ("none", "reshard")
    ]
    whole, part = (program_memory(program).stages[0].end for program in plans)
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


def test_a_parameter_that_cannot_be_divided_stays_whole_and_is_noted() -> None:
    joint = differentiate(small_llama(hidden=12, heads=2, kv_heads=1, batch=10), None)
    local = fsdp(shard(joint, logical_mesh(mesh_of(1, 1, 1).devices[0], 5, 1)))
    whole = [
        v.name for v, place in zip(local.function.inputs, local.inputs, strict=True) if place.held.sharded
    ]
    assert whole == [] and "have no dimension that dp=5 divides" in local.notes[0]
    small = local_of("llama", 2, smallest=20)
    assert small.remarks == ()
    assert {v.name.split(".")[-1] for v in small.function.parameters if v.type.shape == (16,)} == {"scale"}


def test_a_parameter_updated_in_parts_along_tp_stays_whole_and_is_noted() -> None:
    sizes = {"hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 8, "seq": 6, "vocab": 16, "batch": 8}
    routing = {"experts": 4, "shared": 1, "capacity": 1.0, "concentration": 1.0}
    joint = differentiate(moe(layers=4, **sizes, **routing, dtype=F64), SGD(lr=0.1))
    inputs = random_inputs(joint, 0)
    rng = np.random.default_rng(0)
    inputs[0] = np.stack([rng.permutation(16)[:6] for _ in range(8)])  # equal tokens would be dropped
    program = build_program(joint, mesh_of(2, 2, 1), schedule("1f1b", 1, 4), fsdp="reshard")
    assert "h0.o.w the first, are updated in parts, along another axis" in program.notes[0]
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


def test_a_pattern_of_replicas_is_refused() -> None:
    joint, _, _ = case("mlp")
    figures = mesh_of(1, 1, 1).devices[0]
    with pytest.raises(PlanError, match="pattern of 2 of 4 data-parallel ranks"):
        fsdp(shard(joint, logical_mesh(figures, 2, 1), 1, 4))
    with pytest.raises(PlanError, match="fsdp='zero' is unknown; choose one of none, reshard, keep"):
        build_program(joint, mesh_of(2, 1, 1), schedule("1f1b", 1, 1), fsdp="zero")


def test_the_chain_of_a_parameter_is_recognised() -> None:
    local = local_of("mlp", 2)
    found = chains(local.function)
    assert len(found) == 6 and all([op.op_type for op in chain] == ["MPIAllgather"] for chain in found)
    assert set(gathered(local.function).values()) == {Tag.MUST_RECOMPUTE}
    assert set(gathered(local.function, reshard=False).values()) == {Tag.MUST_SAVE}


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
        local = fsdp(local, smallest=4097)
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
    local = fsdp(shard(llama3(), logical_mesh(topology.devices[0], RANKS, 1)), smallest=4097)
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
