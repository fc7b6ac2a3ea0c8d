"""Peak memory of programs composed from blocks: equal to the step written out, and closed forms."""

import pickle
from dataclasses import replace
from weakref import WeakValueDictionary

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_models import Machine
from training_models import SCHEDULES, Maker, bert, flat_mlp, laid_out, mesh_of, small_gpt, small_mlp, tied

import distsim
from distsim.errors import PlanError, ScheduleError
from distsim.ir import Function, Role
from distsim.models import gpt, mlp
from distsim.program.program import Program
from distsim.schedule import Action, Kind, Schedule, schedule
from distsim.simulation.memory import table_changes
from distsim.simulation.memory.peak import KINDS, peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.memory.rank_calls import Irregular
from distsim.simulation.memory.row_changes import RankUse
from distsim.simulation.memory.table_changes import changes_of
from distsim.transforms import SGD, Adam, differentiate, steady_state_transform
from distsim.transforms.autodiff.precision import POLICIES

OPTIMIZERS = (None, SGD(), Adam())


def composed(program: Program) -> bool:
    return changes_of(program.parts, program.table()) is not None


def described(use) -> tuple:
    """All that is told of a use of memory; of the ops at the peak their operators, and the task's name."""
    at = [op.op_type for op in use.at], use.at[0].name if use.at else ""
    return use.peak, use.end, dict(use.by_kind), at


def assert_same_memory(program: Program) -> None:
    """Composed and written out: the same peak, end, kinds, and op at the peak on every device."""
    expected = peak_memory(steady_state_transform(program.to_function())[0])
    found = program_memory(program)
    assert {d: described(found.devices[d]) for d in expected} == {
        d: described(use) for d, use in expected.items()
    }
    assert found.peaks == tuple(use.peak for use in found.ranks)
    for use, mesh in zip(found.ranks, program.mesh.slices("pp"), strict=True):
        assert sum(use.by_kind.values()) == use.peak
        assert min(use.by_kind.values()) >= 0
        modules = program_memory(program).saved_by_module(mesh.devices[0])
        assert sum(modules.values()) == use.by_kind["activations"]


@st.composite
def hand_made(draw, stages: int, microbatches: int) -> Schedule:
    """Any order of the tasks that a pipeline allows."""
    ranks: list[list[Action]] = [[] for _ in range(stages)]
    tasks = [
        Action(p, s, i)
        for p in (Kind.FORWARD, Kind.BACKWARD)
        for s in range(stages)
        for i in range(microbatches)
    ]
    made = Schedule("hand-made", stages, microbatches, ())
    done: set[Action] = set()
    while tasks:
        ready = [task for task in tasks if done.issuperset(made.inputs(task))]
        task = draw(st.sampled_from(ready))
        tasks.remove(task)
        done.add(task)
        ranks[task.stage].append(task)
    return Schedule(made.name, stages, microbatches, tuple(map(tuple, ranks)))


@st.composite
def schedules(draw, stages: int, microbatches: int) -> Schedule:
    name = draw(st.sampled_from([*SCHEDULES, "hand-made"]))
    if name == "hand-made":
        return draw(hand_made(stages, microbatches))
    return schedule(name, stages, microbatches)


@st.composite
def networks(draw) -> Function:
    """Layers of one width, each on a sum of earlier activations, with weights that may be shared."""
    batch, width = 12, draw(st.sampled_from([4, 8]))
    make = Maker("network")
    values = [make.data("x", batch, width)]
    weights = []
    for index in range(draw(st.integers(2, 6))):
        if not weights or draw(st.integers(0, 3)):
            weights.append(make.parameter(f"w{index}", width, width))
        x = make("MatMul", values[-1], draw(st.sampled_from(weights[-2:])))
        what = draw(st.sampled_from(["Relu", "Gelu", "view", "bias"]))
        if what == "view":
            x = make("Reshape", make("Reshape", x, shape=(batch, 2, width // 2)), shape=(batch, width))
        elif what == "bias":
            x = make("Add", x, make.parameter(f"b{index}", width))
        else:
            x = make(what, x)
        if draw(st.booleans()):
            x = make("Add", x, draw(st.sampled_from(values)))
        values.append(x)
    return make.end(make("Loss", values[-1], make.data("z", batch, width), N=batch))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_network_on_any_schedule(data):
    joint = differentiate(data.draw(networks()), data.draw(st.sampled_from(OPTIMIZERS)))
    stages, m = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    dp, tp = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    try:
        program = laid_out(joint, mesh_of(dp, tp, stages), data.draw(schedules(stages, m)))
    except PlanError:  # fewer layers than stages, or a batch that does not divide
        return
    assert_same_memory(program)
    assert composed(program)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("model", [small_mlp, small_gpt, tied, bert], ids=lambda model: model.__name__)
def test_models_on_the_schedules(model, optimizer):
    joint = differentiate(model(), optimizer)
    for name in SCHEDULES:
        for pp, m, dp, tp in [(1, 1, 2, 1), (2, 1, 1, 1), (2, 4, 1, 1), (3, 2, 1, 1), (2, 2, 1, 2)]:
            try:
                program = laid_out(joint, mesh_of(dp, tp, pp), schedule(name, pp, m))
            except PlanError:
                continue
            assert_same_memory(program)
            assert composed(program)


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_function_without_calls_or_roles(optimizer):
    for pp in (1, 2, 3):
        assert_same_memory(
            laid_out(flat_mlp(6, optimizer=optimizer), mesh_of(pp=pp), schedule("1f1b", pp, 4))
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_many_microbatches(name):
    joint = differentiate(mlp(4, 4, 40), Adam())
    for pp in (1, 2, 4):
        assert_same_memory(laid_out(joint, mesh_of(pp=pp), schedule(name, pp, 40)))


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_the_peak_of_a_program_is_what_buffers_take(data):
    """Counted by running the step written out with buffers; any value and any input may be an output."""
    joint = differentiate(data.draw(networks()), data.draw(st.sampled_from(OPTIMIZERS)))
    values = [*joint.parameters, *joint.inputs, *(value for op in joint.ops for value in op.outputs)]
    outputs = data.draw(st.lists(st.sampled_from(values), max_size=2))
    joint = replace(joint, outputs=(*joint.outputs, *outputs))
    stages, m = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))
    tp, order = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from(list(SCHEDULES)))
    try:
        program = laid_out(joint, mesh_of(1, tp, stages), schedule(order, stages, m))
    except PlanError:
        return
    function = program.to_function(steady=True)
    counted = Machine(function).peak
    assert {device: use.peak for device, use in peak_memory(function).items()} == counted
    assert program_memory(program).peak_of_devices() == counted


# --- what the end of the step may read ---------------------------------------------------------------


def predicting(layers: int, batch: int) -> Function:
    """A joint function that returns its prediction beside the loss and the new weights."""
    joint = flat_mlp(layers, batch=batch, optimizer=True)
    (loss,) = [op for op in joint.ops if op.op_type == "Loss"]
    return replace(joint, outputs=(*joint.outputs, loss.inputs[0]))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_outputs_of_every_microbatch_are_put_together(data):
    stages, m = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))
    program = laid_out(predicting(4, 8), mesh_of(pp=stages), data.draw(schedules(stages, m)))
    assert any(output.microbatched for output in program.outputs)
    assert_same_memory(program)
    assert composed(program)
    # On another stage than the one that makes them they arrive one by one.
    outputs = [replace(o, stage=0) if o.microbatched else o for o in program.outputs]
    assert_same_memory(replace(program, outputs=tuple(outputs)))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_an_output_may_be_what_the_last_microbatch_made(data):
    stages, m = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 4]))
    program = laid_out(predicting(4, 8), mesh_of(pp=stages), data.draw(schedules(stages, m)))
    stage = data.draw(st.integers(0, stages - 1))
    outputs = [replace(o, microbatched=False, stage=stage) if o.microbatched else o for o in program.outputs]
    program = replace(program, outputs=tuple(outputs))
    assert_same_memory(program)
    assert composed(program)


def test_what_is_written_out_says_the_same(monkeypatch):
    joint = differentiate(tied(), Adam())
    program = laid_out(joint, mesh_of(dp=2, pp=2), schedule("1f1b", 2, 2))
    expected = program_memory(program)
    monkeypatch.setattr("distsim.simulation.memory.program_memory.changes_of", lambda *_: None)
    found = program_memory(program)
    assert [described(a) for a in found.ranks] == [described(b) for b in expected.ranks]


# --- closed forms ------------------------------------------------------------------------------------


def layers(p: int, m: int, name: str, width: int = 64, optimizer=None, dp: int = 1, tp: int = 1) -> Program:
    """Two layers a stage, microbatches of 64 samples in float32."""
    joint = differentiate(mlp(2 * p, width, 64 * m), optimizer)
    return laid_out(joint, mesh_of(dp, tp, p), schedule(name, p, m))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("m", [2, 4, 16, 64])
def test_what_is_saved_is_what_is_in_flight(name, m):
    """m sets for GPipe, min(m, p - s) for 1F1B (Narayanan et al. 2021, section 2.2)."""
    p = 4
    alone = program_memory(layers(p, 2, "1f1b"))
    found = program_memory(layers(p, m, name))
    for stage in range(1, p - 1):  # the first has inputs besides, the last the prediction
        flying = m if name == "gpipe" else min(m, p - stage)
        kept = [memory.ranks[stage].by_kind for memory in (alone, found)]
        saved = [kinds["activations"] + kinds["communication"] for kinds in kept]
        # Its input, and of two layers y0, a0 and y1.
        assert saved[1] - saved[0] == (flying - min(2, p - stage)) * 4 * 64 * 64 * 4


def test_weights_gradients_and_state():
    width, p = 64, 4
    weights = 2 * width * width * 4  # two layers a stage
    for optimizer, state in ((SGD(), 0), (Adam(), 2)):
        for use in program_memory(layers(p, 8, "1f1b", width, optimizer)).ranks:
            assert use.by_kind["parameters"] == weights
            assert use.by_kind["state"] == state * weights
            assert use.by_kind["gradients"] <= weights
            assert use.end >= (1 + state) * weights


def test_tensor_parallelism_divides_the_weights():
    one, halved = (program_memory(layers(2, 4, "1f1b", tp=tp)).ranks for tp in (1, 2))
    for whole, half in zip(one, halved, strict=True):
        assert half.by_kind["parameters"] == whole.by_kind["parameters"] / 2


def test_data_parallelism_divides_the_activations():
    one, halved = (program_memory(layers(2, 4, "1f1b", width=4, dp=dp)).ranks for dp in (1, 2))
    for whole, half in zip(one, halved, strict=True):
        assert half.by_kind["parameters"] == whole.by_kind["parameters"]
        assert half.by_kind["activations"] == whole.by_kind["activations"] / 2


def test_the_step_ends_with_what_it_started_and_its_outputs():
    program = layers(4, 8, "1f1b", optimizer=Adam())
    function = steady_state_transform(program.to_function())[0]
    for stage, use in zip(program.stages, program_memory(program).ranks, strict=True):
        held = sum(
            v.type.nbytes
            for v in function.inputs
            if v.role in (Role.PARAMETER, Role.STATE) and v.type.device == stage.mesh
        )
        loss = 4 if stage is program.stages[-1] else 0
        assert use.end == held + loss


def test_1f1b_does_not_grow_with_the_microbatches_but_for_its_inputs():
    stages = [program_memory(layers(4, m, "1f1b")).ranks[1] for m in (8, 16, 512)]
    assert len({use.peak for use in stages}) == 1
    assert set(stages[0].by_kind) == set(KINDS)


# --- what is shared, and errors ------------------------------------------------------------------------


def test_another_schedule_of_the_same_stages_finds_what_its_calls_use(monkeypatch):
    program = layers(4, 8, "1f1b")
    for name in SCHEDULES:
        program_memory(replace(program, schedule=schedule(name, 4, 8)))
    monkeypatch.setattr("distsim.simulation.memory.walk.Walk._callee", lambda *_: pytest.fail("walked again"))
    peaks = [
        program_memory(replace(program, schedule=schedule(name, 4, m))).peaks
        for name in SCHEDULES
        for m in (2, 8, 100)
    ]
    assert len(set(peaks)) > 1


@pytest.mark.parametrize("m", [1, 2, 8])
def test_ranks_of_models_that_are_divided_otherwise_share_a_sample(m, monkeypatch):
    """What each has is that of the step written out, the functions and sizes being its own."""
    made, init = [], RankUse.__init__

    def counted(use, calls, sample):
        made.append(calls)
        init(use, calls, sample)

    monkeypatch.setattr(RankUse, "__init__", counted)
    monkeypatch.setattr(table_changes, "_FIRST", WeakValueDictionary())  # not those of other tests
    programs = [layers(4, m, "1f1b", 96, Adam(), tp=tp) for tp in (2, 4, 8)]
    assert_same_memory(programs[0])
    first = len(made)
    for program in programs[1:]:
        assert_same_memory(program)
    assert first > 0 and len(made) == first


def test_ranks_that_no_sample_of_others_speaks_for_have_their_own(monkeypatch):
    def irregular(use, calls):
        raise Irregular

    monkeypatch.setattr(RankUse, "resized", irregular)
    programs = [layers(4, 8, "1f1b", 96, Adam(), tp=tp) for tp in (2, 4)]  # called in the same way
    for program in programs:
        assert_same_memory(program)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("bucket", "share"), [("megatron", 1.0), ("nanotron", 2.0)])
def test_buffers_hold_gradients_all_step(bucket, share, microbatches):
    """So many bytes a byte of parameters, whatever was made of gradients yet; composed as written out."""
    joint = differentiate(small_gpt(), Adam())
    order = schedule("1f1b", 2, microbatches)
    program, plain = (
        laid_out(joint, mesh_of(2, 1, 2), order, zero=f"zero=0,bucket={kind}") for kind in (bucket, "torch")
    )
    assert (program.parts.held, plain.parts.held) == (share, 0.0)
    found, as_they_come = program_memory(program), program_memory(plain)
    expected = peak_memory(program.to_function(steady=True), share)
    assert {d: described(found.devices[d]) for d in expected} == {
        d: described(use) for d, use in expected.items()
    }
    for use, other in zip(found.ranks, as_they_come.ranks, strict=True):
        assert use.by_kind["gradients"] == round(share * use.by_kind["parameters"])
        assert use.peak >= other.peak - other.by_kind["gradients"] + use.by_kind["gradients"]
    assert_same_memory(plain)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_sixteen_bits_of_gradients_and_state_where_its_weights_are(overlap):
    """2 bytes a weight in buffers, though norms are summed in float32; 12 of state, divided, on its stage."""
    model = gpt(4, 8, 4, 4, 8, 16)
    joint = differentiate(model, Adam(), clip=1.0, precision=POLICIES["mixed_bf16_grads"])
    fields = f"zero=1,bucket=megatron,overlap_params={overlap}"
    program = laid_out(joint, mesh_of(2, 1, 4), schedule("1f1b", 4, 4), zero=fields)
    for use in program_memory(program).ranks:
        weights = use.by_kind["parameters"] / 2
        assert use.by_kind["gradients"] == 2 * weights
        assert use.by_kind["state"] == pytest.approx(12 * weights / 2, rel=0.02)  # parts are padded


def test_missing_says_by_how_much_it_does_not_fit():
    program = layers(2, 2, "1f1b")
    found = program_memory(program)
    assert found.missing == 0  # these devices have no limit
    small = [replace(device, memory=max(found.peaks) - 100.0) for device in program.mesh.devices]
    mesh = type(program.mesh)(small, **dict(program.mesh.axes))
    stages = [replace(stage, mesh=own) for stage, own in zip(program.stages, mesh.slices("pp"), strict=True)]
    full = program_memory(replace(program, mesh=mesh, stages=tuple(stages)))
    assert full.missing == 100
    over = [use.missing(device) for device, use in full.devices.items()]
    assert max(over) == 100 and not all(use.fits(device) for device, use in full.devices.items())


def test_ranks_that_wait_for_each_other_are_refused():
    program = layers(2, 2, "1f1b")
    f, b = Kind.FORWARD, Kind.BACKWARD
    ranks = (
        (Action(f, 0, 0), Action(b, 0, 0), Action(f, 0, 1), Action(b, 0, 1)),
        (Action(f, 1, 0), Action(f, 1, 1), Action(b, 1, 0), Action(b, 1, 1)),
    )
    with pytest.raises(ScheduleError, match="deadlocks"):
        program_memory(replace(program, schedule=Schedule("stuck", 2, 2, ranks)))


def test_a_simulation_is_pickled_with_the_memory_that_was_asked_for():
    simulation = distsim.simulate("mlp:layers=4,width=64", "dgx-a100", "pp=2,microbatches=4", 16)
    device, use = next(iter(simulation.memory.items()))
    again = pickle.loads(pickle.dumps(simulation))
    assert again.peak_memory == simulation.peak_memory
    assert again.memory[device].by_kind == use.by_kind and again.memory[device].peak == use.peak
    assert again.saved_by_module(device) == simulation.saved_by_module(device)
