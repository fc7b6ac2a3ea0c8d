"""Simulated steps against what the papers' formulas say, to rounding."""

from functools import cache

import pytest
from training_models import SCHEDULES, small_mlp, topology_of

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulation, Simulator
from distsim.hardware import collective_time
from distsim.ir import Float32, Function, Topology, all_ops, callees
from distsim.models import gpt, mlp
from distsim.ops import Signature, signature_of, work
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.simulation.tasks.grid import on_grid
from distsim.transforms import SGD, differentiate, steady_state_transform


class UnitRules:
    """Seconds by the kind of op: ``forward`` per MatMul, ``backward`` per gradient of one, else nothing."""

    def __init__(self, forward: float, backward: float, send: float = 0.0) -> None:
        self.forward, self.backward, self.send = forward, backward, send

    def compute(self, signature: Signature, demand: object, device: object) -> float:
        if signature.op_type == "MatMul":
            return self.forward
        return self.backward if signature.op_type.startswith("MatMulGrad") else 0.0

    def communicate(self, kind: str, nbytes: float, group: object, topology: object) -> float:
        return self.send if kind == "send" else 0.0


@cache
def topology(count: int = 8) -> Topology:
    return topology_of(count)


def simulate(program: Program, cost_model: CostModel, **options: bool) -> Simulation:
    steady, inputs = steady_state_transform(program.to_function())
    return Simulator(cost_model, **options).interpret(steady, inputs)


# --- pipelines ------------------------------------------------------------------------------------


@cache
def two_layers_a_stage(p: int, m: int) -> Function:
    """For p stages and m microbatches of one sample, no optimizer."""
    return differentiate(mlp(layers=2 * p, width=2, batch=m), None)


@cache
def equal_stages(p: int, m: int, name: str) -> Function:
    program = parallelize(two_layers_a_stage(p, m), Plan(pp=p, microbatches=m, schedule=name), topology())
    return steady_state_transform(program.to_function())[0]


def makespan(p: int, m: int, name: str, rules: UnitRules) -> float:
    function = equal_stages(p, m, name)
    return Simulator(CostModel(topology(), rules=rules)).interpret(function, function.inputs).step_time


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("m", [1, 2, 4, 5, 13])
@pytest.mark.parametrize("p", [1, 2, 4, 5, 8])
def test_the_makespan_of_equal_stages_is_m_plus_p_minus_1_times_a_microbatch(name, p, m):
    """GPipe (Huang et al. 2019) and PipeDream-flush (Narayanan et al. 2021): the same bubble."""
    for forward, backward in ((1.0, 1.0), (1.0, 2.0), (3.0, 2.0)):
        f, b = 2 * forward, 2 * backward
        assert makespan(p, m, name, UnitRules(forward, backward)) == (m + p - 1) * (f + b)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_p_minus_1_microbatches_on_every_device(name):
    p, m = 4, 6
    function = equal_stages(p, m, name)
    cost_model = CostModel(topology(), rules=UnitRules(1.0, 2.0))
    simulation = Simulator(cost_model).interpret(function, function.inputs)
    for device in topology().devices[:p]:
        shares = simulation.shares(device)
        assert (shares.busy, shares.exposed_communication, shares.bubble) == (6.0 * m, 0.0, 6.0 * (p - 1))


@pytest.mark.parametrize("p", [2, 4, 7])
def test_with_one_microbatch_every_send_is_on_the_critical_path(p):
    for name in SCHEDULES:
        found = makespan(p, 1, name, UnitRules(1.0, 2.0, send=0.25))
        assert found == p * 6.0 + 2 * (p - 1) * 0.25


@pytest.mark.parametrize("m", [2, 8])
def test_gpipe_hides_all_sends_but_those_of_the_fill_and_of_the_drain(m):
    """A send shorter than a stage delays the first microbatch at each boundary, each way."""
    p, send = 4, 0.5
    assert makespan(p, m, "gpipe", UnitRules(1.0, 2.0, send)) == (m + p - 1) * 6.0 + 2 * (p - 1) * send


def test_the_schedules_agree_with_a_real_cost_model_where_links_are_free():
    topology = topology_of(4, gbps=1e12, kernel_launch_overhead=0)
    joint = differentiate(mlp(layers=8, width=64, batch=64), None)
    times = {
        name: simulate(
            parallelize(joint, Plan(pp=4, microbatches=8, schedule=name), topology), CostModel(topology)
        )
        for name in SCHEDULES
    }
    assert times["gpipe"].step_time == pytest.approx(times["1f1b"].step_time, rel=1e-4)


# --- memory ---------------------------------------------------------------------------------------


def stage_memory(p: int, m: int, name: str) -> list[dict[str, int]]:
    """Bytes by kind at the peak of each stage; microbatches of 64 samples, width 4."""
    joint = differentiate(mlp(layers=2 * p, width=4, batch=64 * m), None)
    simulation = simulate(
        parallelize(joint, Plan(pp=p, microbatches=m, schedule=name), topology()), CostModel(topology())
    )
    return [dict(simulation.memory[device].by_kind) for device in topology().devices[:p]]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("m", [2, 3, 4, 5, 8])
def test_saved_activations_are_those_of_the_microbatches_in_flight(name, m):
    """Narayanan et al. 2021, section 2.2: m for GPipe, min(m, p - stage) for 1F1B."""
    p, one = 4, 64 * 4 * 4
    alone = [memory["activations"] + memory["communication"] for memory in stage_memory(p, 1, name)]
    found = [memory["activations"] + memory["communication"] for memory in stage_memory(p, m, name)]
    # Per microbatch a stage keeps its input (stage 0 has it among its inputs), y0, a0 and y1 of its two
    # layers, and the last stage the prediction as well.
    for stage in range(p):
        in_flight = m if name == "gpipe" else min(m, p - stage)
        saved = (3 + (stage > 0) + (stage == p - 1)) * one
        grown = found[stage] - alone[stage]
        assert grown == pytest.approx((in_flight - 1) * saved, abs=1.01 * one + 16 * m), (
            f"stage {stage}: {grown / one} activations more than with one microbatch, "
            f"{in_flight} in flight would keep {(in_flight - 1) * saved / one} more"
        )


def test_1f1b_memory_does_not_grow_with_the_microbatches_and_gpipe_memory_does():
    def busiest(name: str, m: int) -> list[int]:
        return [memory["activations"] for memory in stage_memory(4, m, name)]

    assert busiest("1f1b", 8) == pytest.approx(busiest("1f1b", 16), abs=16 * 16)
    assert all(b > 1.8 * a for a, b in zip(busiest("gpipe", 8), busiest("gpipe", 16), strict=True))


def test_parameters_and_state_take_their_bytes_divided_by_tensor_and_pipeline_ranks():
    function = mlp(layers=8, width=16, batch=16)
    whole = sum(value.type.nbytes for value in function.parameters)
    for plan in (Plan(), Plan(tp=2), Plan(pp=4), Plan(dp=2, tp=2, pp=2, microbatches=2)):
        simulation = simulate(parallelize(differentiate(function), plan, topology()), CostModel(topology()))
        held = [
            simulation.memory[device].by_kind["parameters"] for device in topology().devices[: plan.devices]
        ]
        assert held == [whole // (plan.tp * plan.pp)] * plan.devices, str(plan)


# --- data parallelism -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_data_parallel_step_is_compute_and_ring_all_reduces(n):
    """Without overlap: the step of one device on its share of the batch, then 2 (n-1)/n S/B a bucket."""
    gbps, width, batch = 100.0, 256, 64
    cost_model = CostModel(topology(8))
    group = tuple(topology().devices[:n])
    function = mlp(layers=4, width=width, batch=batch * n)
    program = parallelize(differentiate(function, SGD()), Plan(dp=n), topology())
    step = simulate(program, cost_model, overlap=False).step_time
    one = parallelize(differentiate(mlp(layers=4, width=width, batch=batch), SGD()), Plan(), topology())
    compute = simulate(one, cost_model, overlap=False).step_time
    sizes = [sum(value.type.nbytes for value in function.parameters), 4]  # one bucket, and the loss
    reduce = sum(on_grid(2 * (n - 1) / n * size / (gbps * 1e9 / 8)) for size in sizes)
    assert step == compute + reduce
    assert reduce == pytest.approx(sum(collective_time("all_reduce", s, group, topology()) for s in sizes))


def test_overlap_hides_communication_behind_compute_but_not_more():
    cost_model = CostModel(topology())
    program = parallelize(differentiate(mlp(8, 256, 512)), Plan(dp=4), topology())
    apart, beside = (simulate(program, cost_model, overlap=overlap) for overlap in (False, True))
    busy = beside.shares(topology().devices[0]).busy
    assert busy <= beside.step_time <= apart.step_time
    assert apart.shares(topology().devices[0]).busy == pytest.approx(busy)


# --- flops ----------------------------------------------------------------------------------------


def matrix_flops(function: Function) -> float:
    """FLOPs of the matrix multiplications on all devices, by the work rules of the ops."""
    total = 0.0
    for op in all_ops(function):
        demand = None if op.op_type in ("Send",) or op.op_type.startswith("MPI") else work(signature_of(op))
        if demand is not None and demand.matrix:
            place = op.outputs[0].type.device
            total += demand.flops * (len(place) if hasattr(place, "devices") else 1)
    return total


B, S, H, L, V = 2, 32, 16, 3, 48


def small() -> Function:
    return gpt(layers=L, hidden=H, heads=4, seq=S, batch=B, vocab=V, dtype=Float32())


def test_a_gpt_layer_has_the_published_flops():
    """Narayanan et al. 2021, appendix: 24 B s h^2 + 4 B s^2 h for the forward pass of a layer."""
    (layer,) = callees(small())
    assert matrix_flops(layer) == 24 * B * S * H**2 + 4 * B * S**2 * H


def test_a_gpt_has_the_published_flops_forward_and_three_times_that_in_training():
    """The same appendix, with the logits 2 B s h V and without recomputation."""
    forward = L * (24 * B * S * H**2 + 4 * B * S**2 * H) + 2 * B * S * H * V
    assert matrix_flops(small()) == forward
    assert matrix_flops(differentiate(small())) == 3 * forward
    assert 3 * forward == pytest.approx(72 * B * L * S * H**2 * (1 + S / (6 * H) + V / (12 * L * H)))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tp=2),
        Plan(tp=4),
        Plan(dp=2),
        Plan(pp=3),
        Plan(microbatches=2),
        Plan(dp=2, tp=2, pp=2),
        Plan(tp=4, pp=2, microbatches=2),
        Plan(tp=2, pp=4, microbatches=2, schedule="gpipe"),
    ],
    ids=str,
)
def test_the_flops_of_all_ranks_are_those_of_the_model(plan):
    joint = differentiate(small())
    program = parallelize(joint, plan, topology())
    assert matrix_flops(program.to_function()) == matrix_flops(joint)


@pytest.mark.parametrize(
    "plan", [Plan(tp=2), Plan(dp=2, microbatches=2), Plan(tp=2, pp=2, microbatches=2)], ids=str
)
def test_simulated_flops_are_those_of_the_ops_of_all_ranks(plan):
    flat = parallelize(differentiate(small_mlp()), plan, topology()).to_function()
    steady, inputs = steady_state_transform(flat)
    found = Simulator(CostModel(topology())).interpret(steady, inputs).flops
    total = 0.0
    for op in all_ops(steady):
        demand = None if op.op_type == "Send" or op.op_type.startswith("MPI") else work(signature_of(op))
        total += demand.flops * len(op.outputs[0].type.device) if demand is not None else 0.0
    assert found == pytest.approx(total, rel=1e-12) and found > 0
