"""PipeDream and PipeDream-2BW: steps without a flush, of which each stage updates its weights as it goes.

The reference is one device that keeps every version: microbatch m computes its gradient with, of each stage,
the version that the papers say, and the stage's newest weights take the step.
"""

import numpy as np
import pytest
from pipedream_models import BATCH, MODELS, PLANS, joint_of, planned, replace_name
from training_models import assemble, laid_out, mesh_of, random_inputs, small_mlp, tied

from distsim.compose import parallelize
from distsim.errors import PlanError, ScheduleError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware import load_cluster
from distsim.ir import FunctionMaker, Role
from distsim.plan import Plan
from distsim.schedule import (
    Action,
    IssueOrder,
    Kind,
    Schedule,
    Weights,
    issue_order,
    one_f_one_b,
    schedule,
)
from distsim.schedule.codes import kind_of, number_of
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, differentiate


def version_read(order, stage, microbatch):
    """How many updates the stage has made to the weights that a microbatch reads there."""
    ranks, every = order.num_ranks, order.weights.update_every
    if order.name == "pipedream":
        return max(0, microbatch - (ranks - 1 - stage))
    return max(0, microbatch // every - 1)


def one_update(optimizer, value, *given):
    """The new value of a parameter and of its state, as the optimizer makes them."""
    maker = FunctionMaker("update")
    weight = maker.add_input_value("w", value.type, Role.PARAMETER)
    maker.set_outputs(optimizer.update(maker, weight, maker.add_input_value("g", value.type)))
    return SequentialExecutor().compute(maker.finalize(), list(given))


def part_of(array, microbatch, count, dp):
    """The samples of a microbatch: so many of each replica's."""
    return np.concatenate([np.split(own, count)[microbatch] for own in np.split(array, dp)])


def reference(model, optimizer, order, inputs, stage_of, dp):
    """The loss, then new parameters and state by name, on one device."""
    joint, count, every = joint_of(model, optimizer), order.num_microbatches, order.weights.update_every
    part = differentiate(MODELS[model](BATCH // count), None)
    given = dict(zip([value.name for value in joint.inputs], inputs, strict=True))
    weights = [value for value in part.inputs if value.role is Role.PARAMETER]
    versions = {value.name: [given[value.name]] for value in weights}
    state = {v.name: [given[n] for n in (f"{v.name}.m", f"{v.name}.v") if n in given] for v in weights}
    losses, sums = [], dict.fromkeys(versions, 0.0)
    for m in range(count):
        read = {n: known[version_read(order, stage_of[n], m)] for n, known in versions.items()}
        data = {n: part_of(given[n], m, count, dp) for n in given if n not in versions and "." not in n}
        made = SequentialExecutor().compute(part, [(read | data)[value.name] for value in part.inputs])
        losses.append(made[0])
        for value, gradient in zip(weights, made[1:], strict=True):
            sums[value.name] += gradient / count  # the loss is a mean over the whole batch
        if m % every == every - 1:
            for value in weights:
                name = value.name
                new, *state[name] = one_update(optimizer, value, versions[name][-1], sums[name], *state[name])
                versions[name].append(new)
                sums[name] = 0.0
    found = {"loss": np.mean(losses)} | {f"{n}.new": known[-1] for n, known in versions.items()}
    return found | {f"{n}.{k}.new": a for n, own in state.items() for k, a in zip("mv", own, strict=False)}


def check(model, optimizer, order, **layout):
    joint = joint_of(model, optimizer)
    inputs = random_inputs(joint)
    dp = layout.pop("dp", 1)
    tp = layout.pop("tp", 1)
    program = laid_out(joint, mesh_of(dp, tp, order.num_ranks), order, **layout)
    stage_of = {given.key.name: given.stages[0] for given in program.inputs}
    expected = reference(model, optimizer, order, inputs, stage_of, dp)
    results = SequentialExecutor().compute(program.to_function(), inputs)
    made = {placed.name: placed.array for placed in assemble(program, results)}
    assert made.keys() == expected.keys()
    for name, array in made.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)


# --- what is computed -----------------------------------------------------------------------------------

ORDERS = [("pipedream", 8, {}), ("pipedream_2bw", 8, {}), ("pipedream_2bw", 16, {"update_every": 4})]


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize(("name", "microbatches", "options"), ORDERS)
def test_every_microbatch_reads_its_version(name, microbatches, options, pp):
    check("mlp", SGD(0.5), schedule(name, pp, microbatches, **options))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp": 2},
        {"tp": 2},
        {"remat": "full"},
        {"remat": "min_cut"},
        {"dp": 2, "zero": "zero=1"},
        {"dp": 2, "zero": "zero=2"},
        {"dp": 2, "zero": "zero=3"},
        {"dp": 2, "zero": "zero=3,reshard=never", "remat": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_in_every_layout(name, layout):
    check("gpt", Adam(0.05), schedule(name, 2, 4), **layout)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_one_microbatch(name):
    check("mlp", SGD(0.5), schedule(name, 1, 1))


def test_without_a_pipeline_pipedream_is_sgd_one_microbatch_after_the_other():
    joint, inputs = joint_of("mlp", SGD(0.5)), random_inputs(joint_of("mlp", SGD(0.5)))
    program = laid_out(joint, mesh_of(pp=1), schedule("pipedream", 1, 4))
    made = SequentialExecutor().compute(program.to_function(), inputs)
    step = differentiate(MODELS["mlp"](BATCH // 4), SGD(0.5 / 4))  # the loss is a mean over the whole batch
    data = [np.split(each, 4) for each in inputs[:2]]
    weights = inputs[2:]
    for m in range(4):
        _, *weights = SequentialExecutor().compute(step, [data[0][m], data[1][m], *weights])
    for (array,), expected in zip(made[1:], weights, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-9)


# --- which versions are read ----------------------------------------------------------------------------


def written_out(order: IssueOrder):
    """Every cell: stage, kind, microbatch, version, update."""
    columns = (order.family[:, 0], order.microbatch[:, 0], order.version, order.update)
    cells = list(zip(*[column.tolist() for column in columns], strict=True))
    for begin, end, times, moved in zip(
        order.start[:-1], order.start[1:], order.repeats, order.advance, strict=True
    ):
        for k in range(times):
            for family, *numbers in cells[begin:end]:
                yield number_of(family), kind_of(family), *[n + k * moved if n >= 0 else -1 for n in numbers]


@pytest.mark.parametrize(("name", "options"), [("pipedream", {}), ("pipedream_2bw", {"update_every": 4})])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 8), (3, 40), (4, 60)])
def test_every_action_reads_the_version_of_the_papers(name, options, ranks, microbatches):
    made = schedule(name, ranks, microbatches, **options)
    every, order = made.weights.update_every, issue_order(made)
    seen = 0
    for stage, kind, microbatch, version, update in written_out(order):
        assert version == version_read(made, stage, microbatch) * every - 1
        ends = kind == Kind.BACKWARD.code and microbatch % every == every - 1
        assert update == (microbatch if ends else -1)
        seen += 1
    assert seen == 2 * ranks * microbatches
    assert len(order.code) < seen or microbatches == 8, "what repeats is written once"


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_versions_held(ranks):
    for count in (2 * ranks, 28):
        made = schedule("pipedream", ranks, count)
        assert [made.versions_of(s) for s in range(ranks)] == [ranks - s for s in range(ranks)]
    assert schedule("pipedream", ranks, 1).versions_of(0) == 1
    assert {schedule("pipedream_2bw", ranks, 4 * ranks).versions_of(s) for s in range(ranks)} == {2}
    assert one_f_one_b(ranks, 8).versions_of(0) == 1


# --- time and memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("overlap", [True, False])
def test_engines_agree(text, overlap):
    program, costs = planned(text)
    simulation = Simulator(costs, overlap).simulate(program)
    events = Simulator(costs, overlap, engine="events").simulate(program)
    assert simulation.step_time == events.step_time == simulation.flat().step_time
    assert simulation.timestamps == events.timestamps
    assert sorted((s.path, s.start, s.end) for s in simulation.spans()) == sorted(
        (s.path, s.start, s.end) for s in events.spans()
    )


@pytest.mark.parametrize("text", PLANS)
def test_memory_is_that_of_the_step_written_out(text):
    program, _ = planned(text)
    expected = peak_memory(program.to_function(steady=True))
    memory = program_memory(program)
    assert memory.peaks == tuple(use.peak for use in memory.ranks)
    for device, use in memory.devices.items():
        other = expected[device]
        assert (use.peak, use.end, use.by_kind) == (other.peak, other.end, other.by_kind)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory_of_the_versions(ranks):
    """Weights that backward reads, too, are there p - s times, or twice: all but those of the first layer."""
    layers, joint = 8 // ranks, differentiate(small_mlp(layers=8, width=256, batch=16), SGD())

    def weights(name):
        program = laid_out(joint, mesh_of(pp=ranks), schedule(name, ranks, 16))
        use = program_memory(program).ranks
        return [each.by_kind["parameters"] / (256 * 256 * 8) for each in use]

    assert weights("1f1b") == [layers] * ranks
    stashed = [layers * (ranks - stage) for stage in range(ranks)]
    assert weights("pipedream") == [stashed[0] - (ranks - 1), *stashed[1:]]
    assert weights("pipedream_2bw")[1:] == [2 * layers] * (ranks - 1)


def test_a_step_is_explained_and_its_updates_are_named():
    program, costs = planned(PLANS[0])
    simulation = Simulator(costs).simulate(program)
    assert "critical path" in str(simulation.explain())
    paths = {span.path.split("/")[0] for span in simulation.spans()}
    assert {f"U{m}@{s}" for m in range(8) for s in range(4)} <= paths


# --- orders of one's own ----------------------------------------------------------------------------------


def test_a_table_with_backward_in_halves_and_several_stages_a_rank():
    """Weights are updated after W, and I and W read what F read."""
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    ranks = [
        [Action(kind, stage, m) for m in range(4) for kind, stage in work]
        for work in (
            [(kinds[0], 0), (kinds[0], 1), (kinds[1], 1), (kinds[1], 0), (kinds[2], 1), (kinds[2], 0)],
        )
    ]
    order = Schedule("own", 2, 4, ranks, (0, 0), weights=Weights(1))
    halves = replace_name(order, "pipedream")
    joint = joint_of("mlp", SGD(0.5))
    inputs = random_inputs(joint)
    program = laid_out(joint, mesh_of(pp=1), halves)
    stage_of = dict.fromkeys([given.key.name for given in program.inputs], 0)  # as one stage: no delay
    expected = reference("mlp", SGD(0.5), halves, inputs, stage_of, 1)
    for placed in assemble(program, SequentialExecutor().compute(program.to_function(), inputs)):
        np.testing.assert_allclose(placed.array, expected[placed.name], rtol=1e-9, atol=1e-11)


# --- what does not go -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pp=4,microbatches=2,schedule=pipedream_2bw", "choose 4"),
        (
            "pp=4,microbatches=8,schedule=pipedream_2bw:3",
            "update_every=3 must divide 8 .* one of 4, 8",
        ),
        ("pp=2,microbatches=8,schedule=pipedream,stages=auto", "stages=auto .* pipedream has none"),
    ],
)
def test_plans_that_do_not_fit(text, named):
    costs = CostModel(load_cluster("dgx-a100"))
    with pytest.raises(PlanError, match=named):
        parallelize(joint_of("mlp", SGD(0.5)), Plan.parse(text), costs.topology, costs)


def test_weights_that_stages_share_need_a_flush():
    joint = differentiate(tied(layers=4, batch=16), SGD())
    with pytest.raises(ScheduleError, match=r"passes between stages .* share .* use 1f1b, or untie them"):
        laid_out(joint, mesh_of(pp=2), schedule("pipedream", 2, 4))
    laid_out(joint, mesh_of(pp=1), schedule("pipedream", 1, 4))


def test_without_an_optimizer_there_is_nothing_to_update():
    joint = differentiate(small_mlp(batch=16), None)
    with pytest.raises(ScheduleError, match="no stage updates a weight"):
        laid_out(joint, mesh_of(pp=2), schedule("pipedream", 2, 4))


def test_orders_that_cannot_update_so():
    for weights, named in (
        (Weights(3), "update_every=3 does not divide 4 microbatches"),
        (Weights(1, delayed=True), r"F2@0 reads weights that its stage makes later"),
    ):
        with pytest.raises(ScheduleError, match=named):
            issue_order(schedule("gpipe", 2, 4).with_weights(weights))
    back = [Action(Kind.BACKWARD, 0, m) for m in (2, 3, 0, 1)]
    order = Schedule("back", 1, 4, [[*[Action(Kind.FORWARD, 0, m) for m in range(4)], *back]])
    with pytest.raises(ScheduleError, match=r"stage 0 runs B0@0 after backwards of a later batch"):
        issue_order(order.with_weights(Weights(2)))
    dualpipe = schedule("dualpipe", 2, 8)
    with pytest.raises(ScheduleError, match="2 copies of the model"):
        dualpipe.with_weights(Weights(1)).check()
    with pytest.raises(ScheduleError, match="actions that overlap"):
        schedule("dualpipe_v", 2, 8).with_weights(Weights(1)).check()
