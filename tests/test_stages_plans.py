"""Stages chosen for a model: what its blocks cost, what plans make of it, and that it computes the same."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from topology_models import bare_cluster
from training_models import (
    assert_same_step,
    flat_mlp,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    small_llama,
    tied,
    topology_of,
)

from distsim.errors import PartitionError, PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Mesh, Topology
from distsim.ir.kernel_rates import NO_RATES
from distsim.models import gpt, llama, mlp
from distsim.plan import Plan
from distsim.schedule import Kind, schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.stage_balance import StageProblem, mesh_communication, split_time
from distsim.transforms import SGD, Adam, block_costs, differentiate, outline, shard
from distsim.transforms.pipelining import stage_choice
from distsim.transforms.pipelining.model_blocks import costs_of, model_blocks
from distsim.transforms.pipelining.pipeline import cut_stages

MODELS = {
    "mlp": lambda: differentiate(mlp(layers=9, width=1024, batch=2048), SGD(lr=0.1)),
    "gpt": lambda: differentiate(
        gpt(layers=6, hidden=512, heads=8, seq=256, vocab=20000, batch=16), Adam(lr=0.1)
    ),
    "llama": lambda: differentiate(
        llama(layers=5, hidden=512, heads=8, kv_heads=4, ffn=1024, seq=256, vocab=4000, batch=16), SGD(lr=0.1)
    ),
}


@cache
def model(name):
    return MODELS[name]()


@cache
def cluster():
    topology = bare_cluster("dgx-a100:2")
    return topology, CostModel(topology)


def outlined(name):
    joint = model(name)
    return joint if any(op.is_call for op in joint.ops) else outline(joint)


def calls_per_stage(program):
    return [sum(op.is_call for op in s.forward.function.ops) for s in program.stages]


def planned(name, plan, stages):
    topology, cost_model = cluster()
    mesh = Mesh(topology.devices[: plan.devices], pp=plan.pp, dp=plan.dp, tp=plan.tp)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    return laid_out(model(name), mesh, order, stages=stages, cost_model=cost_model)


def step_time(program, cost_model):
    return Simulator(cost_model).simulate(program).step_time


# --- what blocks cost ----------------------------------------------------------------------------------


def test_the_blocks_of_a_model_are_its_layers_and_what_lies_around_them():
    topology, cost_model = cluster()
    costs = block_costs(model("gpt"), cost_model, microbatches=4)
    assert [cost.name for cost in costs] == ["embedded", *[f"h{i}" for i in range(6)], "final", "logits"]
    layers = costs[1:7]
    assert len({(c.forward, c.backward, c.sent, c.saved) for c in layers[1:]}) == 1
    assert all(1.5 < c.backward / c.forward < 2.5 for c in layers)
    width, tokens, vocabulary, positions = 512, 4 * 256, 20000, 256
    assert all(c.sent == c.gradient == 4 * tokens * width for c in costs[:8])
    assert costs[-1].sent == 0
    # Parameters, the sums of their gradients, and Adam's two moments, of 4 bytes each.
    assert layers[1].state == 4 * 4 * (12 * width**2 + 13 * width)
    assert costs[-1].state == 4 * 4 * vocabulary * width + 4  # and the sum of the loss
    assert sum(c.state for c in costs[:2]) == layers[1].state + 4 * 4 * (vocabulary + positions) * width
    # An embedding is costed by the bytes that it moves: what is looked up, and the gradient of the table.
    device = topology.devices[0]
    rate = device.dram_bandwidth * device.bytes_efficiency
    assert costs[0].forward >= 2 * 4 * tokens * width / rate
    assert costs[0].backward >= 4 * vocabulary * width / rate


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_memory_of_blocks_is_that_of_their_stages(name):
    topology, cost_model = cluster()
    mesh, order = Mesh(topology.devices[:2], pp=2, dp=1, tp=1), schedule("1f1b", 2, 8)
    program = laid_out(model(name), mesh, order, stages="default")
    costs = block_costs(model(name), cost_model, microbatches=8)
    first = 1 + calls_per_stage(program)[0]
    memory = StageProblem(costs, order).memory((first, len(costs) - first))
    peaks = program_memory(program).peaks
    assert memory[0] == pytest.approx(peaks[0], rel=0.08)  # an embedding's workspace is not used at the peak
    assert memory[1] == pytest.approx(peaks[1], rel=0.002)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(("dp", "tp", "within"), [(1, 1, 2e-3), (2, 1, 0.02), (1, 2, 0.01)])
def test_the_costs_of_blocks_foretell_the_simulated_step(name, dp, tp, within):
    topology, cost_model = cluster()
    rng = np.random.default_rng(dp + 2 * tp)
    for stages, microbatches, order in ((2, 4, "1f1b"), (4, 8, "1f1b"), (3, 4, "gpipe")):
        mesh = Mesh(topology.devices[: stages * dp * tp], pp=stages, dp=dp, tp=tp)
        device = logical_mesh(mesh.devices[0], 1, 1).devices[0]
        local = shard(outlined(name), logical_mesh(device, dp, tp), microbatches, dp)
        blocks = model_blocks(local, cost_model.on(device))
        costs = costs_of(local, blocks, mesh.at(pp=0), cost_model)
        firsts = (0, *sorted(rng.choice(np.arange(1, len(blocks)), stages - 1, replace=False).tolist()))
        cut = cut_stages(local, stages, cost_model.on(device), blocks.stages(firsts))
        sizes = np.diff([*firsts, len(blocks)]).tolist()
        foretold = split_time(costs, sizes, microbatches, order, mesh_communication(mesh, cost_model))
        simulated = step_time(cut.program(mesh, schedule(order, stages, microbatches)), cost_model)
        assert foretold == pytest.approx(simulated, rel=within), (stages, sizes)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(
    ("order", "ranks", "microbatches"),
    [("zb_h1", 3, 4), ("interleaved_zb", 2, 4), ("zb_v", 2, 4), ("dualpipe_v", 2, 8), ("dualpipe", 4, 8)],
)
def test_the_costs_of_blocks_foretell_a_step_with_backward_in_halves(name, order, ranks, microbatches):
    topology, cost_model = cluster()
    made = schedule(order, ranks, microbatches, 2 if order == "interleaved_zb" else None)
    mesh = Mesh(topology.devices[:ranks], pp=ranks, dp=1, tp=1)
    pattern = logical_mesh(mesh.devices[0], 1, 1)
    local = shard(outlined(name), pattern, microbatches, 1)
    blocks = model_blocks(local, cost_model.on(pattern.devices[0]))
    costs = costs_of(local, blocks, mesh.at(pp=0), cost_model, Kind.BACKWARD_INPUT in made.kinds)
    inner = costs[1]
    assert inner.half + inner.weight > inner.backward, "what makes two gradients is launched twice"
    firsts = (0, 1, 3, 5)[: made.chain]
    cut = cut_stages(local, made.chain, cost_model.on(pattern.devices[0]), blocks.stages(firsts))
    sizes = np.diff([*firsts, len(blocks)]).tolist()
    foretold = split_time(costs, sizes, microbatches, made, mesh_communication(mesh, cost_model))
    simulated = step_time(cut.program(mesh, made), cost_model)
    if made.copies == 1:
        assert foretold == pytest.approx(simulated, rel=5e-4)
    else:  # the copies' sums of gradients follow
        assert simulated * 0.97 < foretold < simulated


# --- plans ---------------------------------------------------------------------------------------------

JOINTS = {
    "flat": lambda: flat_mlp(layers=5, optimizer=True),
    "gpt": lambda: differentiate(small_gpt(layers=4), Adam()),
    "llama": lambda: differentiate(small_llama(), SGD(lr=0.1)),
    "tied": lambda: differentiate(tied(layers=3), Adam()),
}


@pytest.mark.parametrize(
    ("name", "stages"), [("flat", "auto"), ("gpt", "default"), ("llama", "auto"), ("tied", "auto")]
)
def test_the_step_computes_the_same_whatever_its_stages(name, stages):
    joint = JOINTS[name]()
    inputs = random_inputs(joint, 0)
    expected = SequentialExecutor().compute(joint, inputs)
    cost_model = CostModel(topology_of(8))
    for dp, tp, pp, m, order in ((2, 1, 3, 2, "gpipe"), (1, 2, 2, 2, "1f1b")):
        if (name, tp) == ("flat", 2):
            continue  # its widths are not divided
        program = laid_out(
            joint, mesh_of(dp, tp, pp), schedule(order, pp, m), stages=stages, cost_model=cost_model
        )
        assert_same_step(joint, program, inputs, expected)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_auto_is_never_slower_than_even_or_default(name):
    _, cost_model = cluster()
    faster = 0
    for text in (
        "pp=2,microbatches=4",
        "pp=4,microbatches=8",
        "dp=2,pp=3,microbatches=4,schedule=gpipe",
        "pp=8,microbatches=8",
    ):
        plan = Plan.parse(text)
        times = {}
        for stages in ("even", "default", "auto"):
            if stages == "default" and plan.pp == 8 and name != "gpt":
                continue  # more stages than layers
            times[stages] = step_time(planned(name, plan, stages), cost_model)
        best = times.pop("auto")
        assert best <= min(times.values()) * (1 + 1e-12), text
        faster += best < 0.995 * min(times.values())
    assert faster


def test_auto_is_the_cut_by_counting_layers_where_that_is_faster_than_all_others(monkeypatch):
    monkeypatch.setattr(stage_choice, "_searched", lambda *given: [])
    topology, cost_model = cluster()
    mesh, order = Mesh(topology.devices[:2], pp=2, dp=1, tp=1), schedule("1f1b", 2, 4)
    costs = cost_model.on(topology.devices[0])
    local = shard(model("llama"), mesh_of(1, 1), 4, 1)
    uneven = cut_stages(local, 2, costs, model_blocks(local, costs).stages((0, 1)))  # the embedding alone
    found = stage_choice.fastest_cut([local], uneven, mesh, order, cost_model).program(mesh, order)
    assert calls_per_stage(found) == [3, 2]
    assert found.notes[-1].startswith("stages=auto: the cut by counting layers is the fastest")


def test_default_counts_layers_as_torchtitan_does():
    topology, _ = cluster()
    joint = differentiate(
        llama(layers=12, hidden=64, heads=4, kv_heads=4, ffn=128, seq=16, vocab=100, batch=8)
    )
    mesh = Mesh(topology.devices[:4], pp=4, dp=1, tp=1)
    program = laid_out(joint, mesh, schedule("1f1b", 4, 8), stages="default")
    assert calls_per_stage(program) == [3, 4, 3, 2]
    first, last = (program.stages[i].forward.function.ops for i in (0, 3))
    assert any(op.op_type == "Gather" for op in first)
    assert [op.op_type for op in last if op.op_type != "Constant"][-3:] == [
        "RMSNormalization",
        "MatMul",
        "CrossEntropyLoss",
    ]


def test_the_gradient_of_an_embedding_is_made_where_its_table_is():
    topology, cost_model = cluster()
    local, costs = shard(model("llama"), mesh_of(1, 1), 4, 1), cost_model.on(topology.devices[0])
    cut = cut_stages(local, 2, costs, model_blocks(local, costs).stages((0, 1)))  # the embedding alone
    ops = [[op.op_type for op in backward.function.ops] for _, backward, _ in cut.stages]
    assert ops[0] == ["GatherGrad"]
    assert "GatherGrad" not in ops[1]


# --- memory, and what is refused -----------------------------------------------------------------------


def small_memory(nbytes, count=2):
    topology = topology_of(count, memory=nbytes)
    return Mesh(topology.devices, pp=count, dp=1, tp=1), CostModel(topology)


def test_a_plan_whose_stages_fit_is_found_though_the_even_one_does_not():
    joint, order = model("gpt"), schedule("1f1b", 2, 8)
    mesh, cost_model = small_memory(10**12)
    even = laid_out(joint, mesh, order)
    peak = max(program_memory(even).peaks)
    tight, cost_model = small_memory(peak - 2**20)
    found = laid_out(joint, tight, order, stages="auto", cost_model=cost_model)
    assert program_memory(found).missing <= 0 < program_memory(laid_out(joint, tight, order)).missing
    mesh, cost_model = small_memory(2**27)
    with pytest.raises(PartitionError, match=r"at best some stage is over by [\d,.]+ MiB, stage \d of sizes"):
        laid_out(joint, mesh, order, stages="auto", cost_model=cost_model)


def test_one_stage_has_to_fit_as_well():
    joint, order = model("gpt"), schedule("1f1b", 1, 8)
    mesh, cost_model = small_memory(10**12, count=1)
    even, found = (laid_out(joint, mesh, order, stages=s, cost_model=cost_model) for s in ("even", "auto"))
    simulate = Simulator(cost_model).simulate
    assert simulate(found).step_time == simulate(even).step_time
    mesh, cost_model = small_memory(max(program_memory(even).peaks) - 2**20, count=1)
    with pytest.raises(PartitionError, match=r"no split into 1 stages fits.*the best is over by 1\.0 MiB"):
        laid_out(joint, mesh, order, stages="auto", cost_model=cost_model)


def test_what_was_found_is_said_and_found_again():
    plan = Plan.parse("pp=4,microbatches=8")
    one, two = (planned("gpt", plan, "auto") for _ in range(2))
    assert one.stages[0].forward is two.stages[0].forward
    assert one.notes[-1].startswith("stages=auto: ")


def test_what_cannot_be_is_refused():
    topology, _ = cluster()
    mesh, order = Mesh(topology.devices[:2], pp=2, dp=1, tp=1), schedule("1f1b", 2, 2)
    with pytest.raises(
        PlanError, match="stages='best' is unknown; choose one of even, default, layers, auto"
    ):
        laid_out(model("gpt"), mesh, order, stages="best")
    with pytest.raises(PlanError, match="stages=auto simulates splits; give build_program a cost_model"):
        laid_out(model("gpt"), mesh, order, stages="auto")
    with pytest.raises(PlanError, match="stages=default counts layers, but the function repeats no block"):
        laid_out(flat_mlp(layers=1), mesh_of(1, 1, 2), order, stages="default")
    deep = Mesh(topology.devices[:16], pp=16, dp=1, tp=1)
    with pytest.raises(PlanError, match="stages=default: 16 stages, but only 8 to divide"):
        laid_out(model("gpt"), deep, schedule("1f1b", 16, 2), stages="default")


def test_launches_are_part_of_what_they_launch_and_no_constants():
    """Where a host is slower than its kernels, a block takes what launches do, and none is refused."""
    topology = bare_cluster("dgx-a100")
    device = replace(topology.devices[0], rates=replace(NO_RATES, launches=(("eager", 1e-4),)))
    topology = Topology.of_devices([device] * 8, topology.levels)
    step = outline(differentiate(gpt(layers=4, hidden=32, heads=2, seq=16, batch=4, vocab=64), SGD()))
    blocks = block_costs(step, CostModel(topology, kernels="eager"))
    layers = [block for block in blocks if block.name.startswith("h")]
    assert all(block.shared < block.forward / 4 and block.after <= block.backward for block in blocks[1:-1])
    assert all(block.forward > 1e-3 and block.backward > block.forward for block in layers)
