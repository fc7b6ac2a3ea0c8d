"""Recomputation in pipelines: functions with several losses and with skips over stages; its memory."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import expert_models
import pytest
from training_models import Maker, assert_same_step, laid_out, random_inputs, small_gpt, tied

from distsim.compose import parallelize
from distsim.executor import CostModel, SequentialExecutor, Simulator, count_flops
from distsim.hardware import load_cluster
from distsim.ir import Function, Mesh, Role
from distsim.models import llama
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import schedule
from distsim.simulation import bytes_sent
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.kernels.attention import set_attention
from distsim.transforms.op_graph import is_gather

CLUSTER = load_cluster("dgx-a100")
POLICIES = ("min_cut", "budget:0", "budget:0.5", "budget:1")


def two_losses() -> Function:
    """The second loss is of what the first one's layer starts with."""
    make = Maker("two_losses")
    x, t, t2 = (make.data(name, 8, 4) for name in ("x", "t", "t2"))
    h = make("Tanh", make("MatMul", x, make.parameter("w0", 4, 4)))
    h = make("Mul", h, make("Sigmoid", h))
    y = make("MatMul", h, make.parameter("w1", 4, 4))
    return make.end(make("Add", make("Loss", y, t, N=8), make("Loss", h, t2, N=8)))


def skips(layers: int = 6) -> Function:
    """Every layer reads what the first one made."""
    make = Maker("skips")
    x, t = make.data("x", 8, 4), make.data("t", 8, 4)
    h = first = make("Gelu", make("MatMul", x, make.parameter("w", 4, 4)))
    for i in range(layers):
        h = make("Gelu", make("MatMul", make("Mul", h, first), make.parameter(f"w{i}", 4, 4)))
    return make.end(make("Loss", h, t, N=8))


def block() -> Function:
    make = Maker("block")
    x, y, w = make.data("x", 8, 4), make.data("y", 8, 4), make.parameter("w", 4, 4)
    h = make("Mul", make("Gelu", make("MatMul", x, w)), make("Sigmoid", y))
    return make.end(make("Add", h, make("Tanh", y)))


def random_function(seed: int) -> Function:
    """Ops and Calls that read any earlier value, some of them read by nobody, and several losses."""
    draw = random.Random(seed)
    make, callee = Maker("random"), block()
    x, t = make.data("x", 8, 4), make.data("t", 8, 4)
    values, losses = [x], []

    def any_value():
        return draw.choice(values[-3:] if draw.random() < 0.6 else values)

    for i in range(draw.randint(6, 12)):
        kind = draw.choice(("Tanh", "Gelu", "Mul", "Add", "MatMul", "MatMul", "Call", "Call", "Loss"))
        if kind == "Loss":
            losses.append(make("Loss", any_value(), t, N=8))
        elif kind == "Call":
            values.append(make.call(callee, any_value(), any_value(), make.parameter(f"c{i}", 4, 4)))
        elif kind == "MatMul":
            values.append(make("MatMul", any_value(), make.parameter(f"w{i}", 4, 4)))
        else:
            count = 2 if kind in ("Mul", "Add") else 1
            values.append(make(kind, *[any_value() for _ in range(count)]))
    total = make("Loss", make("MatMul", values[-1], make.parameter("last", 4, 4)), t, N=8)
    for loss in losses:
        total = make("Add", total, loss)
    return make.end(total)


def assert_a_step(joint: Function, pp: int, microbatches: int, policies: tuple[str, ...]) -> None:
    """Written out it computes what one device does; engines and memory agree with what is written out."""
    inputs = random_inputs(joint)
    expected = SequentialExecutor().compute(joint, inputs)
    mesh = Mesh(CLUSTER.devices[:pp], pp=pp, dp=1, tp=1)
    costs = CostModel(CLUSTER)
    fast, events = Simulator(costs), Simulator(costs, engine="events")
    for policy in policies:
        program = laid_out(joint, mesh, schedule("1f1b", pp, microbatches), policy)
        assert_same_step(joint, program, inputs, expected)
        assert fast.simulate(program).step_time == pytest.approx(events.simulate(program).step_time)
        peaks = peak_memory(program.to_function(steady=True))
        for device, use in program_memory(program).devices.items():
            assert use.peak == peaks[device].peak


@pytest.mark.parametrize("function", [two_losses, skips])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 1), (5, 4), (6, 2)])
def test_no_stage_waits_for_one_that_waits_for_it(
    function: Callable[[], Function], pp: int, microbatches: int
) -> None:
    assert_a_step(differentiate(function(), SGD(lr=0.1)), pp, microbatches, POLICIES)


@pytest.mark.parametrize(("kind", "pp"), [("math", 3), ("math", 8), ("flash", 5)])
def test_stages_that_cut_attention_run_their_part_again(kind: str, pp: int) -> None:
    joint = differentiate(set_attention(small_gpt(), kind), SGD(lr=0.1))
    assert_a_step(joint, pp, 2, ("attention", "ops:MatMul+Attention"))


def skipping_blocks() -> Function:
    """Four equal blocks, each of which reads the two before it, and a loss of the second one."""
    make, callee = Maker("skipping_blocks"), block()
    x, t = make.data("x", 8, 4), make.data("t", 8, 4)
    made = [make("MatMul", x, make.parameter("first", 4, 4))] * 2
    for i in range(4):
        made.append(make.call(callee, made[-1], made[-2], make.parameter(f"w{i}", 4, 4)))
    losses = [make("Loss", make("Exp", value), t, N=8) for value in (made[3], made[5])]
    return make.end(make("Add", *losses))


@pytest.mark.parametrize("pp", [2, 3, 5, 8])
def test_stages_that_cut_blocks_run_their_part_again_whole(pp: int) -> None:
    joint = differentiate(skipping_blocks(), SGD(lr=0.1))
    assert_a_step(joint, pp, 2, ("full", "full_early", "every:2", "every_early:2"))
    mesh = Mesh(CLUSTER.devices[:pp], pp=pp, dp=1, tp=1)
    simulator, order = Simulator(CostModel(CLUSTER)), schedule("1f1b", pp, 2)
    full, none = (simulator.simulate(laid_out(joint, mesh, order, each)).flops for each in ("full", "none"))
    assert full - none == 4 * count_flops(block())


def blocks_with_losses() -> Function:
    """Two equal blocks, each with a loss of its own, which is of what the block makes halfway."""
    inner = Maker("block")
    x, up, down = inner.data("x", 8, 4), inner.parameter("up", 4, 4), inner.parameter("down", 4, 4)
    h = inner("MatMul", inner("Tanh", inner("MatMul", x, up)), down)
    own = inner("ReduceMean", inner("Mul", h, h), axes=(0, 1), keepdims=0)
    inner.set_outputs([inner("Add", h, x), own])
    make, callee = Maker("blocks_with_losses"), inner.finalize()
    x, t, losses = make.data("x", 8, 4), make.data("t", 8, 4), []
    for i in range(2):
        weights = [make.parameter(f"{name}{i}", 4, 4) for name in ("up", "down")]
        x, own = make.add("Call", [x, *weights], None, (callee,))
        losses.append(own)
    return make.end(make("Add", make("Loss", x, t, N=8), losses[1]))


@pytest.mark.parametrize("pp", [4, 6])
def test_the_backward_of_a_blocks_own_loss_stays_on_its_stage(pp: int) -> None:
    joint = differentiate(blocks_with_losses(), SGD(lr=0.1))
    assert_a_step(joint, pp, 2, ("full", "full_early"))


@pytest.mark.parametrize(("seed", "pp"), [(1, 6), (2, 8), (3, 4), (4, 2), (5, 3), (7, 5), (11, 7), (20, 8)])
def test_random_losses_and_skips(seed: int, pp: int) -> None:
    assert_a_step(differentiate(random_function(seed), SGD(lr=0.1)), pp, 2, POLICIES)


def test_recomputation_that_saves_no_memory_is_noted() -> None:
    """Peaks are those of the step without recomputation at most, or a note has both figures."""
    costs, noted = CostModel(CLUSTER), 0
    for joint in (differentiate(each(), SGD(lr=0.1)) for each in (tied, small_gpt)):
        for plan in (Plan(1, 1, 1, 2), Plan(2, 1, 2, 2, zero=3), Plan(1, 2, 4, 2)):
            none = Simulator(costs).simulate(parallelize(joint, plan, CLUSTER))
            assert not any("recomputation" in note for note in none.notes)
            for policy in ("full", "matmuls", "min_cut"):
                program = parallelize(joint, replace(plan, remat=policy), CLUSTER)
                simulation = Simulator(costs).simulate(program)
                own, other = (max(each.peak_memory.values()) for each in (simulation, none))
                notes = [note for note in simulation.notes if "recomputation saves no memory" in note]
                assert bool(notes) == (own > other)
                assert all(f"{own:,} bytes" in note and f"remat=none {other:,}" in note for note in notes)
                noted += len(notes)
    assert noted


@pytest.mark.parametrize(("layers", "plan"), [(5, "pp=4"), (7, "pp=5"), (6, "pp=2,schedule=zb_v,chunks=2")])
def test_cuts_within_layers_send_and_hold_what_they_do_without_recomputation(layers, plan):
    """Of a layer that runs again as a whole each stage has its own part, forward and backward."""
    forward = llama(layers=layers, hidden=64, heads=4, kv_heads=4, ffn=256, seq=64, batch=8, vocab=64)
    policies = ("full", "full_early", "ops:MatMul", "every:2", "attention", "budget:0.5")
    plain, *others = without_and_with(forward, plan, policies)
    sent = bytes_sent(plain, CLUSTER)
    assert all(bytes_sent(again, CLUSTER) == sent for again in others)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("mixtral", "pp=5"),
        ("mixtral", "pp=3,dp=2,ep=2"),
        ("deepseek", "pp=6"),
        ("deepseek", "pp=3,schedule=zb_v,chunks=2"),
        ("llama", "pp=4,cp=2,cp_kind=ring"),
        ("llama", "pp=4,cp=2,cp_kind=allgather"),
        ("llama", "pp=4,tp=2,sp=on"),
    ],
)
def test_cuts_within_layers_of_experts_and_of_divided_sequences(model, plan):
    """What is repeated with a layer of constants alone (where rows go, which tokens a rank has) is no
    gradient's: each stage has its own part of these layers too. What ranks exchange they exchange again."""
    if model == "llama":
        forward = llama(layers=9, hidden=64, heads=4, kv_heads=4, ffn=256, seq=64, batch=8, vocab=64)
    else:
        forward = expert_models.model(model)
    plain, *others = without_and_with(forward, plan, ("full", "ops:MatMul"))
    assert all(len(stages) == 1 for _, stages in holders_of(plain))
    sent = bytes_sent(plain, CLUSTER)
    for again in (bytes_sent(each, CLUSTER) for each in others):
        assert all(again[d][what] >= nbytes for d in sent for what, nbytes in sent[d].items())


def without_and_with(forward: Function, plan: str, policies: Sequence[str]) -> list[Program]:
    """A step without and with recomputation: parameters are on the same ranks and no pass is shorter."""
    joint = differentiate(set_attention(forward, "flash"), Adam())
    plans = [Plan.parse(f"{plan},microbatches=4,remat={each}") for each in ("none", *policies)]
    programs = [parallelize(joint, each, CLUSTER) for each in plans]
    held = [holders_of(each) for each in programs]
    used = [[use.by_kind["parameters"] for use in program_memory(each).devices.values()] for each in programs]
    assert all(each == held[0] for each in held) and all(each == used[0] for each in used)
    plain, *others = [Simulator(CostModel(CLUSTER)).simulate(each).step_time for each in programs]
    assert min(others) >= plain
    return programs


def holders_of(program) -> list[tuple[str, tuple[int, ...]]]:
    """The stages of each parameter, all of which get what it is after the step."""
    new = {output.key.name: {output.stage, *output.copies} for output in program.outputs}
    found = [
        (given.key.name, given.stages)
        for given in program.parts.inputs
        if given.source.role is Role.PARAMETER
    ]
    assert all(new[f"{name}.new"] >= set(stages) for name, stages in found)
    return found


@pytest.mark.parametrize("pp", [4, 5])
@pytest.mark.parametrize("fields", ["tp=2,sp=on", "tp=2,sp=dtensor,tp_overlap=off", "cp=2"])
def test_a_gather_at_a_cut_is_made_above_it_and_no_weight_is_held_twice(pp, fields):
    """What a gather reads is less to send; its gradient's product is where its weight is."""
    forward = llama(layers=5, hidden=1024, heads=16, kv_heads=16, ffn=2816, seq=512, batch=8, vocab=8192)
    joint = differentiate(set_attention(forward, "flash"), Adam())
    program = parallelize(joint, Plan.parse(f"pp={pp},microbatches=4,{fields}"), load_cluster("dgx-a100:2"))
    assert all(len(stages) == 1 for _, stages in holders_of(program))
    for stage in program.stages[:-1]:
        gathered = {value for op in stage.forward.function.ops if is_gather(op) for value in op.outputs}
        read = {value for op in stage.forward.function.ops for value in op.inputs}
        assert gathered <= read
