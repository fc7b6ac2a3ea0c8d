"""The max-plus engine: matrices of blocks and steps of pipelines in closed form, periods that are skipped."""

import math
import weakref
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from executor_models import cluster
from program_models import Habits, Writer, invent_script

from distsim.errors import CostError, ScheduleError
from distsim.executor import CostModel, Simulator
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Float64, FunctionMaker, Literal, Mesh, Role, Tensor, Value
from distsim.program.block import Block
from distsim.program.parts import ProgramOutput, Stage
from distsim.program.program import Program
from distsim.schedule import Action, Kind, Schedule, gpipe, one_f_one_b
from distsim.simulation.action_times import ActionTimes, timed_program
from distsim.simulation.maxplus.engine import run_program
from distsim.simulation.tasks.block_matrix import START, StageRanks, block_tasks
from distsim.simulation.tasks.grid import on_grid

ZEROS = Literal(np.zeros((6, 1)))
F, B = Kind.FORWARD, Kind.BACKWARD


class Rules:
    """Every ModelWork takes the seconds that it says, everything else those given."""

    def __init__(self, communication=0.0, compute=0.0):
        self.communication, self.other = communication, compute

    def compute(self, signature, demand, device):
        return signature.attributes.get("flops", self.other)

    def communicate(self, kind, nbytes, group, topology):
        return self.communication(group) if callable(self.communication) else self.communication


# --- the matrix of a block -----------------------------------------------------------------------------


def summary_of(build, ranks=2, communication=3.0, inputs=1):
    """The tasks of a function on one rank class, and its matrix with all of its ports."""
    topology, devices = cluster(ranks)
    mesh = Mesh(devices, dp=1, tp=ranks)
    maker = FunctionMaker("f")
    values = [maker.add_input_value(f"x{i}", Tensor(Float64(), (6, 1), mesh)) for i in range(inputs)]
    build(maker, *values)
    return tasks_of(maker.finalize(), mesh, CostModel(topology, rules=Rules(communication)))


def tasks_of(function, mesh, cost_model):
    ranks = StageRanks(mesh, np.zeros(len(mesh), np.int64))
    tasks = block_tasks(function, ranks, cost_model, overlap=True)
    return tasks, tasks.summary(range(len(tasks.ports)))


def work(maker, seconds, *values):
    return maker.add_op("ModelWork", inputs=values, attributes={"flops": seconds})


def test_a_chain_on_one_stream_adds_its_durations():
    def chain(maker, x):
        for seconds in (1.0, 2.0, 4.0):
            x = work(maker, seconds, x)

    _, summary = summary_of(chain)
    np.testing.assert_array_equal(summary.clocks, [[7.0, 7.0]])  # from the stream, from x
    assert summary.tasks.tolist() == [2]
    np.testing.assert_array_equal(summary.ends, [[7.0, 7.0]])


def test_a_fork_and_join_on_two_streams():
    def fork(maker, x):
        a = work(maker, 2.0, x)
        r = maker.add_op("MPIAllreduce", inputs=[a], attributes={"axis": "tp"})
        b = work(maker, 5.0, a)
        work(maker, 1.0, r, b)

    tasks, summary = summary_of(fork)
    assert [stream.name for stream in tasks.stream_table] == ["compute", "collective tp"]
    compute, collective = [2 + 5 + 1, 3 + 1, 2 + 5 + 1], [2 + 3, 3, 2 + 3]  # from compute, collective, x
    np.testing.assert_array_equal(summary.clocks, [compute, collective])


def test_a_port_that_only_the_second_stream_waits_for():
    def late(maker, x, y):
        work(maker, 2.0, x)
        maker.add_op("MPIAllreduce", inputs=[y], attributes={"axis": "tp"})

    _, summary = summary_of(late, inputs=2)
    never = -math.inf
    np.testing.assert_array_equal(summary.clocks, [[2, never, 2, never], [never, 3, never, 3]])


def product(left, right):
    """The product of two matrices in the algebra of max and +, by its definition."""
    return np.array(
        [
            [max((a + b for a, b in zip(row, column, strict=True)), default=-math.inf) for column in right.T]
            for row in left
        ]
    ).reshape(left.shape[0], right.shape[1])


def plain_summary(tasks):
    """The matrix of a block in plain Python: rows of entries -> latest end."""
    streams, width = len(tasks.stream_table), len(tasks.stream_table) + len(tasks.ports)
    unit = [[0.0 if i == j else -math.inf for j in range(width)] for i in range(width)]
    clocks, ends = unit[:streams], []
    for task in range(len(tasks)):
        used = tasks.streams[tasks.stream_start[task] : tasks.stream_start[task + 1]].tolist()
        deps = tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]].tolist()
        rows = [clocks[s] for s in used] + [ends[d] if d >= 0 else unit[streams - 2 - d] for d in deps]
        ends.append([max(column) + float(tasks.durations[task]) for column in zip(*rows, strict=True)])
        for s in used:
            clocks[s] = ends[-1]
    return np.array(clocks).reshape(streams, width), np.array(ends).reshape(len(tasks), width)


def invented(seed):
    """A writer and two scripts on one mesh, the second one over what the first returns."""
    rng = Random(seed)
    habits = Habits(tuple(rng.uniform(0, 2) for _ in range(4)), ("dp", "tp"))
    one = invent_script(rng, [(1, Role.INPUT), (20, Role.INPUT)], habits, most=8)
    two = invent_script(rng, [(one.made[i], Role.INPUT) for i in one.outputs], habits, most=8)
    return one, two


@pytest.mark.parametrize("seed", range(40))
def test_the_compiled_matrix_is_the_one_in_plain_python(seed):
    topology, devices = cluster(4)
    mesh = Mesh(devices, dp=2, tp=2)
    script, _ = invented(seed)
    function = Writer(mesh).function("f", script, script.outputs)
    tasks, summary = tasks_of(function, mesh, CostModel(topology, rules=Rules(0.7, 0.1)))
    clocks, ends = plain_summary(tasks)
    np.testing.assert_array_equal(summary.clocks, clocks)
    np.testing.assert_array_equal(summary.ends, ends[summary.tasks])
    assert {*tasks.makers[tasks.makers >= 0].tolist()} == {*summary.tasks.tolist()}


def reaches(tasks, task, stream):
    """Whether a task ends before a stream is free after the block: by the definition, edge by edge."""
    used = [set(tasks.streams[a:b].tolist()) for a, b in pairwise(tasks.stream_start.tolist())]
    deps = [set(tasks.deps[a:b].tolist()) for a, b in pairwise(tasks.dep_start.tolist())]
    found = {task}
    for later in range(task + 1, len(tasks)):
        beside = any(used[later] & used[each] for each in found)
        if deps[later] & found or beside:
            found.add(later)
    return any(stream in used[each] for each in found)


@pytest.mark.parametrize("seed", range(40))
def test_what_hides_what_follows_from_the_order_of_tasks(seed):
    """By its definition, and whatever tasks take: a stream that hides a result is never free before it."""
    topology, devices = cluster(4)
    mesh = Mesh(devices, dp=2, tp=2)
    script, _ = invented(seed)
    function = Writer(mesh).function("f", script, script.outputs)
    for costs in ((0.7, 0.1), (0.0, 0.0), (0.0, 5.0)):
        tasks, summary = tasks_of(function, mesh, CostModel(topology, rules=Rules(*costs)))
        for index, (made,) in enumerate(tasks.makers.tolist()):
            for stream, hidden in enumerate(tasks.order.hides[index, 0].tolist()):
                if made >= 0:
                    assert hidden == reaches(tasks, made, stream)
                    assert not hidden or (summary.clocks[stream] >= summary.end(made)).all()
        entries = summary.clocks[:, len(tasks.stream_table) :]
        assert ((entries >= 0) | ~tasks.order.waits.T).all()
        for port, enters in enumerate(tasks.order.enters):
            waiting = [
                task
                for task in range(len(tasks))
                if -2 - port in tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]]
            ]
            for stream in np.flatnonzero(enters).tolist():
                uses = np.repeat(np.arange(len(tasks)), np.diff(tasks.stream_start))[tasks.streams == stream]
                assert all(any(reached(tasks, use, task) for use in uses.tolist()) for task in waiting)


def reached(tasks, before, task):
    """Whether a task starts only after another one has begun: it is that one, or follows it."""
    found = {before}
    used = [set(tasks.streams[a:b].tolist()) for a, b in pairwise(tasks.stream_start.tolist())]
    for later in range(before + 1, task + 1):
        deps = set(tasks.deps[tasks.dep_start[later] : tasks.dep_start[later + 1]].tolist())
        if deps & found or any(used[later] & used[each] for each in found):
            found.add(later)
    return task in found


def embedded(tasks, summary, streams, inputs):
    """The matrix [streams, outputs; streams, inputs] of a block over all streams and values of one class."""
    width = len(streams) + inputs
    unit = np.where(np.eye(width, dtype=bool), 0.0, -math.inf)
    own = [streams.index(s) for s in tasks.stream_table]
    columns = [*own, *(len(streams) + tasks.ports[port][0] for port in summary.ports)]
    rows = unit[: len(streams)].copy()
    for i, row in zip(own, summary.clocks, strict=True):
        rows[i] = -math.inf
        rows[i, columns] = row
    made = []
    for (maker,) in tasks.makers.tolist():
        made.append(unit[len(streams) - 2 - maker] if maker < START else np.full(width, -math.inf))
        if maker >= 0:
            made[-1][columns] = summary.end(maker)
    return np.array([*rows, *made]).reshape(len(streams) + len(made), width)


@pytest.mark.parametrize("seed", range(40))
def test_one_after_the_other_is_the_product_of_their_matrices(seed):
    topology, devices = cluster(4)
    mesh, writer = Mesh(devices, dp=2, tp=2), Writer(Mesh(devices, dp=2, tp=2))
    model = CostModel(topology, rules=Rules(0.7, 0.1))
    one, two = invented(seed)
    f, g = writer.function("f", one, one.outputs), writer.function("g", two, two.outputs)
    maker = FunctionMaker("f;g")
    maker.adopt_inputs([writer.key(f"x{i}", width, role) for i, (width, role) in enumerate(one.inputs)])
    between = maker.add("Call", maker.inputs, subfunctions=[f])
    maker.set_outputs(maker.add("Call", between, subfunctions=[g]))
    both, whole = tasks_of(maker.finalize(), mesh, model)
    (f_tasks, f_matrix), (g_tasks, g_matrix) = tasks_of(f, mesh, model), tasks_of(g, mesh, model)
    streams = list(dict.fromkeys((*f_tasks.stream_table, *g_tasks.stream_table, *both.stream_table)))
    left = embedded(g_tasks, g_matrix, streams, len(one.outputs))
    right = embedded(f_tasks, f_matrix, streams, len(one.inputs))
    np.testing.assert_array_equal(product(left, right), embedded(both, whole, streams, 2))


# --- steps of pipelines --------------------------------------------------------------------------------


def pipeline(schedule, forward, backward, communication=0.0):
    """A program of one op per stage and phase, in seconds per stage, and its cost model."""
    count = schedule.num_stages
    topology, devices = cluster(count)
    mesh, pattern = Mesh(devices, pp=count, dp=1, tp=1), logical_mesh(devices[0], 1, 1)
    type_ = Tensor(Float64(), (6, 1), pattern)

    def block(name, seconds, inputs):
        maker = FunctionMaker(name)
        values = [maker.add_input_value(f"a{i}", type_) for i in range(len(inputs))]
        values = values or [maker.add_op("Constant", attributes={"value": ZEROS, "device": pattern})]
        work(maker, seconds, *values)
        made = Value(name, type_)
        return Block(maker.finalize(), tuple(inputs), (made,)), made

    forwards, backwards, before, after = [], [], [], []
    for stage in range(count):
        one, made = block(f"f{stage}", forward[stage], before)
        forwards.append((one, made))
        before = [made]
    for stage in reversed(range(count)):
        one, made = block(f"b{stage}", backward[stage], [forwards[stage][1], *after])
        backwards.insert(0, one)
        after = [made]
    stages = tuple(Stage(mesh.at(pp=i), forwards[i][0], backwards[i], ()) for i in range(count))
    outputs = (ProgramOutput(after[0], (), False, 0),)
    program = Program("pipeline", mesh, pattern, stages, schedule, (), outputs)
    return program, CostModel(topology, rules=Rules(communication))


SIZES = [(1, 1), (1, 7), (2, 1), (3, 2), (4, 4), (4, 9), (8, 64), (5, 200)]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_equal_stages_take_m_plus_p_minus_1_rounds(make, stages, microbatches):
    program, model = pipeline(make(stages, microbatches), [1.5] * stages, [2.75] * stages)
    expected = (microbatches + stages - 1) * (1.5 + 2.75)
    for engine in ("maxplus", "events"):
        simulation = Simulator(model, engine=engine).simulate(program)
        assert simulation.step_time == expected
    assert simulation.shares(program.mesh.devices[0]).busy == microbatches * 4.25


@pytest.mark.parametrize("bottleneck", range(4))
@pytest.mark.parametrize("microbatches", [1, 4, 30])
def test_gpipe_with_stages_of_any_speed(bottleneck, microbatches):
    forward, backward = [1.0, 2.0, 0.5, 3.0], [4.0, 1.0, 2.0, 1.5]
    forward[bottleneck] *= 7
    backward[3 - bottleneck] *= 5
    program, model = pipeline(gpipe(4, microbatches), forward, backward)
    each = sum(forward) + sum(backward)
    expected = each + (microbatches - 1) * (max(forward) + max(backward))
    assert run_program(program, model).step_time == expected


@pytest.mark.parametrize("bottleneck", range(4))
@pytest.mark.parametrize("microbatches", [5, 30, 3000])
def test_one_f_one_b_waits_for_its_slowest_stage(bottleneck, microbatches):
    forward, backward = [1.0] * 4, [2.0] * 4
    forward[bottleneck], backward[bottleneck] = 10.0, 20.0
    program, model = pipeline(one_f_one_b(4, microbatches), forward, backward)
    expected = 3.0 * bottleneck + microbatches * 30.0  # it is reached, never waits, and is left
    run = run_program(program, model)
    assert run.step_time == expected
    assert run.computed < 40


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("send", [0.0, 0.25])
def test_thousands_of_microbatches_follow_from_a_few(make, send):
    stages, microbatches = 8, 5004  # 60 and a multiple of 8
    program, model = pipeline(make(stages, microbatches), [1.0] * stages, [2.0] * stages, send)
    run = run_program(program, model)
    assert run.computed < 100
    if make is gpipe or not send:
        expected = (microbatches + stages - 1) * 3.0 + 2 * (stages - 1) * send
        assert run.step_time == expected
    else:
        few = {
            m: run_program(*pipeline(make(stages, m), [1.0] * 8, [2.0] * 8, send)).step_time for m in (60, 68)
        }
        cycle = (few[68] - few[60]) / 8
        assert run.step_time == few[60] + (microbatches - 60) * cycle


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("send", [0.1, 1.0, 40.0])
def test_sends_make_one_f_one_b_repeat_every_p_microbatches(stages, send):
    """The circuit down the pipeline and back is p microbatches and 2 (p - 1) sends long."""
    program, model = pipeline(one_f_one_b(stages, 2000), [1.0] * stages, [2.0] * stages, send)
    run = run_program(program, model)
    ends = run.times[run.model.registers :].reshape(-1, 2000)  # of what is sent, per microbatch
    inner = ends[:, 1000 : 1000 + 2 * stages]
    period = stages * 3.0 + 2 * (stages - 1) * on_grid(send)
    np.testing.assert_array_equal(inner[:, stages:] - inner[:, :stages], period)
    assert run.computed < 5 * stages + 10


def test_what_needs_no_cell_has_none():
    """A value that goes to the next block of its rank on one stream; a sum is there after the last call."""
    program, model = timed_program(one_f_one_b(4, 32), ActionTimes(send=0.25))
    wiring = run_program(program, model).model.wiring
    for product in wiring.products:
        block = wiring.flow.blocks[product.block]
        assert len(product.entries) <= 1 and len(product.results) <= 1, "what crosses ranks, each way"
        assert block.kind != "Send" or len(product.streams) == 1
    assert wiring.batched == 2 * 2 * 3  # made and received, forward and backward, over three boundaries


# --- errors --------------------------------------------------------------------------------------------


def test_a_schedule_that_deadlocks_names_the_circle():
    ranks = (Action(F, 0, 0), Action(B, 0, 0)), (Action(B, 1, 0), Action(F, 1, 0))
    with pytest.raises(ScheduleError, match=r"knotted deadlocks after 1 action: B0@1 waits for F0@1"):
        pipeline(Schedule("knotted", 2, 1, ranks), [1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize("engine", ["maxplus", "events"])
@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_an_unusable_cost_names_the_op(engine, cost):
    program, model = pipeline(gpipe(2, 2), [1.0, 1.0], [1.0, 1.0], communication=cost)
    with pytest.raises(CostError, match=rf"Send\(.*costs {cost} s; a cost must be a number, finite"):
        Simulator(model, engine=engine).simulate(program)
    program, model = pipeline(gpipe(2, 2), [1.0, 1.0], [1.0, cost])
    with pytest.raises(CostError, match=rf"ModelWork\(.*has Work\(flops={cost}"):
        Simulator(model, engine=engine).simulate(program)


@pytest.mark.parametrize("engine", ["maxplus", "events"])
@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_an_unusable_cost_of_custom_rules_names_the_op(engine, cost):
    class Broken(Rules):
        def compute(self, signature, demand, device):
            return cost

    program, model = pipeline(gpipe(2, 2), [1.0, 1.0], [1.0, 1.0])
    model = CostModel(model.topology, rules=Broken())
    with pytest.raises(CostError, match=rf"ModelWork\(.*costs {cost} s"):
        Simulator(model, engine=engine).simulate(program)


def test_what_was_made_for_a_program_goes_with_it(collect):
    program, model = timed_program(one_f_one_b(3, 7))
    kept = [weakref.ref(each) for each in (model, program.parts, program.table())]
    kept.append(weakref.ref(run_program(program, model).model.wiring))
    del program
    collect()
    assert [each() is None for each in kept] == [False, True, True, True]
    del model
    collect()
    assert kept[0]() is None
