"""Both engines, one meaning: what the block-wise, the op-wise and the event simulation find is the same."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from memory_models import Placed, any_schedule
from program_models import Case, invent
from schedule_models import SCHEDULES, copies_to_host
from topology_models import invent_topology

from distsim.errors import ScheduleError
from distsim.executor import CostModel, SequentialExecutor, Simulation, Simulator
from distsim.ir import Mesh, pformat
from distsim.ops.parts import scatter
from distsim.schedule import SCHEDULES as NAMED
from distsim.schedule import Kind
from distsim.schedule import schedule as named_schedule
from distsim.simulation.events import engine as events
from distsim.simulation.maxplus.engine import run_program
from distsim.simulation.maxplus.row_loop import run_rounds
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.tasks import recurrence
from distsim.simulation.tasks.task_table import lower
from distsim.simulation.tasks.timeline import FlatTimeline
from distsim.transforms import steady_state_transform

CHUNK = 20


def chunks(count):
    """Ranges of seeds, so that processes share them."""
    return pytest.mark.parametrize("seeds", [range(i, i + CHUNK) for i in range(0, count, CHUNK)], ids=str)


def lanes(simulation, mesh):
    """What each device does on each kind of stream, in order: (start, end, op type, path)."""
    members = simulation.classes.members
    stage = {device: mesh.coordinates(device)["pp"] for device in mesh.devices}
    found = {}
    for span in simulation.spans():
        kind = span.stream.name.split()
        if kind[0] in ("send", "receive"):
            kind[1] = stage[members[int(kind[1])][0]]
        for device in members[span.stream.rank_class]:
            found.setdefault((device, *kind), []).append((span.start, span.end, span.op.op_type, span.path))
    return found


def assert_same(one, other, mesh):
    """To the bit: durations are on a grid on which their sums are exact."""
    assert one.step_time == other.step_time
    assert one.flops == pytest.approx(other.flops, rel=1e-12)
    assert {device: one.timestamps[device] for device in other.timestamps} == other.timestamps
    if mesh.devices[-1] in other.timestamps:
        assert one.shares(mesh.devices[-1]) == other.shares(mesh.devices[-1])
    found, expected = lanes(one, mesh), lanes(other, mesh)
    assert found.keys() == expected.keys()
    for lane, spans in found.items():
        assert spans == expected[lane], lane


def assert_engines_agree(case):
    program, model = case.program, case.cost_model
    found = Simulator(model, case.overlap).simulate(program)
    flat = program.to_function(steady=True)
    for lockstep in (True, False) if case.seed % 8 == 0 else (True,):
        tasks = lower(flat, model, case.overlap, lockstep)
        start, end = recurrence.run(tasks)
        np.testing.assert_array_equal(events.run(tasks), (start, end))
        timeline = FlatTimeline(tasks, start, end)
        one_by_one = Simulation(timeline, flat, model, lambda _: found, lambda: timeline)  # noqa: B023
        assert_same(found, one_by_one, program.mesh)


@chunks(60)
def test_block_by_block_op_by_op_and_event_by_event(seeds):
    """Times by every engine, and memory stage by stage as of the step written out."""
    for seed in seeds:
        case = invent(seed)
        try:
            assert_engines_agree(case)
            assert_memory_as_written_out(case.program)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def assert_memory_as_written_out(program):
    """As of the step in steady state, which below is held equal to the whole without its beginning."""
    found = program_memory(program)
    for device, use in peak_memory(program.to_function(steady=True)).items():
        stage = program.mesh.coordinates(device)["pp"]
        own = found.ranks[stage]
        assert found.peaks[stage] == use.peak
        assert (own.peak, own.end, own.by_kind) == (use.peak, use.end, use.by_kind)


def invent_placed(seed, microbatches=None):
    """A case with several stages a rank, backwards in halves, pairs, copies, or none of these."""
    rng = Random(seed)
    chain, dp, tp = rng.choice([1, 2, 3, 4, 4, 6]), rng.randint(1, 2), rng.randint(1, 2)
    if rng.random() < 0.5:
        schedule = any_schedule(rng, chain, microbatches or rng.randint(1, 12))
    else:
        schedule = invent_named(rng, chain, microbatches or rng.randint(1, 12))
        chain = schedule.chain
    count = schedule.num_ranks
    topology = invent_topology(rng, max(chain, count) * dp * tp)
    inventor = Placed(rng, Mesh(topology.devices[: chain * dp * tp], pp=chain, dp=dp, tp=tp))
    inventor.copies = schedule.copies
    mesh = Mesh(topology.devices[: count * dp * tp], pp=count, dp=dp, tp=tp)
    program = inventor.placed(schedule, mesh)
    return Case(seed, program, CostModel(topology), rng.random() < 0.7)


def invent_named(rng, stages, microbatches):
    """A schedule that is known by name, of about so many stages and microbatches."""
    while True:
        flushed = [name for name in NAMED if not name.startswith("pipedream")]
        name = rng.choice([name for name in flushed if not copies_to_host(name)])
        chunks = NAMED[name].chunks or rng.choice([1, 2, 3])
        try:
            return named_schedule(name, max(1, stages // chunks), microbatches, chunks)
        except ScheduleError:  # it takes other numbers of ranks or of microbatches
            microbatches += rng.choice([0, 1])


@chunks(60)
def test_any_stages_a_rank_halves_pairs_and_copies(seeds):
    for seed in seeds:
        case = invent_placed(seed)
        try:
            assert_engines_agree(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


# --- periods -------------------------------------------------------------------------------------------


def computed_in_full(model):
    """The times of a simulated table of which every repetition is computed, and how many there are."""
    state = model.state()
    return state.times, run_rounds(model.calls, None, state)


def assert_skipped_exactly(case):
    """What follows from periods is what computing everything gives; return how much of it was computed."""
    run = run_program(case.program, case.cost_model, case.overlap)
    times, computed = computed_in_full(run.model)
    np.testing.assert_array_equal(run.times, times)
    return run.computed, computed


@chunks(40)
def test_skipped_repetitions_are_those_that_would_be_computed(seeds):
    kinds = ("1f1b", "gpipe", "groups", "warmed up")
    for seed in seeds:
        microbatches = Random(seed).choice([20, 50, 100, 300, 600])
        assert_skipped_exactly(invent(seed, microbatches, kinds[seed % 4]))


@chunks(20)
def test_skipped_repetitions_of_any_stages_a_rank(seeds):
    for seed in seeds:
        assert_skipped_exactly(invent_placed(seed, Random(seed).choice([20, 50, 100])))


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_most_repetitions_are_skipped(kind):
    counts = [assert_skipped_exactly(invent(seed, 400, kind)) for seed in range(10)]
    computed, every = np.sum(counts, axis=0)
    assert computed < 0.25 * every


# --- one program, written out in several ways -----------------------------------------------------------


def run_blocks(program, inputs):
    """Compute a program block by block in the order of its schedule, with NumPy."""
    values, last, count = {}, {}, program.schedule.num_microbatches

    def put(key, microbatch, ranks):
        values[key, microbatch] = ranks
        last[key] = microbatch

    def get(key, microbatch):
        for at in (microbatch, None, last[key]):
            if (key, at) in values:
                return values[key, at]
        raise KeyError(key)

    def call(function, block, arguments, microbatch):
        results = SequentialExecutor().compute(function, arguments)
        for key, ranks in zip(block.outputs, results, strict=True):
            put(key, None if key in block.accumulated else microbatch, ranks)

    for given, array in zip(program.inputs, inputs, strict=True):
        for ranks in [scatter(array, program.stages[0].mesh, given.shards)]:
            if not given.microbatched:
                put(given.key, None, ranks)
                continue
            parts = [np.split(rank, count) for rank in ranks]
            for microbatch in range(count):
                put(given.key, microbatch, [part[microbatch] for part in parts])
    for step in program.schedule.order():
        for task in step:
            stage = program.stages[task.stage]
            block = stage.forward if task.kind is Kind.FORWARD else stage.backward
            if not block.outputs:
                continue
            so_far = [values[key, None] for key in block.accumulated if (key, None) in values]
            arguments = [get(key, task.microbatch) for key in block.inputs] + so_far
            call(block.accumulating if so_far else block.function, block, arguments, task.microbatch)
    updates = sorted(
        (number, index, place)
        for index, stage in enumerate(program.stages)
        for place, (number, _) in enumerate(stage.updates)
    )
    for _, index, place in updates:
        block = program.stages[index].updates[place][1]
        if block.outputs:
            call(block.function, block, [get(key, None) for key in block.inputs], None)
    outputs = []
    for output in program.outputs:
        if output.microbatched and count > 1:
            parts = [get(output.key, i) for i in range(count)]
            outputs.append([np.concatenate(ranks) for ranks in zip(*parts, strict=True)])
        else:
            outputs.append(get(output.key, 0 if output.microbatched else None))
    copies = [get(output.key, None) for output in program.outputs for _ in output.copies]
    return outputs + copies


def with_whole_pattern(seed, schedule=None):
    """The first case from a seed on whose blocks NumPy can compute: their pattern has every replica."""
    while True:
        case = invent(seed, Random(seed).randint(1, 4), schedule)
        if len(case.program.pattern) == len(case.program.stages[0].mesh):
            return case
        seed += 10_000


@chunks(60)
def test_numpy_computes_the_same_block_by_block_and_written_out(seeds):
    for seed in seeds:
        program, rng = with_whole_pattern(seed).program, np.random.default_rng(seed)
        inputs = [rng.standard_normal(given.source.type.shape) for given in program.inputs]
        expected = run_blocks(program, inputs)
        found = SequentialExecutor().compute(program.to_function(), inputs)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def structure(function):
    """The ops of a function, and what each reads: an op's output, or an input by its name and place."""
    made = {value: (value.name, str(value.type)) for value in function.inputs}
    rows = []
    for number, op in enumerate(function.ops):
        callees = [pformat(callee) for callee in op.subfunctions]
        rows.append((op.op_type, op.name, op.attributes, callees, [made[value] for value in op.inputs]))
        made.update({value: (number, place) for place, value in enumerate(op.outputs)})
    return rows, [made[value] for value in function.outputs]


@chunks(60)
def test_steady_is_the_steady_state_of_the_whole(seeds):
    for seed in seeds:
        program = invent(seed).program
        steady, other = program.to_function(steady=True), steady_state_transform(program.to_function())[0]
        assert structure(steady) == structure(other)
        held, expected = (Counter((v.name, v.type, v.role) for v in f.inputs) for f in (steady, other))
        assert held == expected


@pytest.mark.parametrize("kind", SCHEDULES)
def test_one_program_under_every_kind_of_schedule(kind):
    for seed in range(3):
        case = invent(seed, 7, kind)
        assert_engines_agree(case)
        assert_engines_agree(replace(case, overlap=not case.overlap))


def test_an_invented_program_follows_from_its_seed():
    one, other = invent(3), invent(3)
    assert pformat(one.program.to_function()) == pformat(other.program.to_function())
    assert isinstance(one.cost_model, CostModel)
