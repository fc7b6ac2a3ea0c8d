"""Peak memory of programs under schedules of every kind: equal to the step written out, and closed forms."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from memory_models import invent_placed
from program_models import invent
from training_models import mesh_of, small_gpt, small_mlp, tied

from distsim.compose import build_program
from distsim.errors import ScheduleError
from distsim.ir import Function, Link
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import SCHEDULES, Kind, Schedule, schedule
from distsim.simulation.action_times import timed_program
from distsim.simulation.memory.peak import MemoryUse, peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.memory.table_changes import changes_of
from distsim.transforms import SGD, Adam, differentiate

FLUSHED = [name for name in SCHEDULES if not name.startswith("pipedream")]  # see test_pipedream.py
MODELS = {
    "mlp": lambda: differentiate(small_mlp(layers=16, batch=16), Adam()),
    "gpt": lambda: differentiate(small_gpt(layers=3, batch=16), SGD()),
    "tied": lambda: differentiate(tied(layers=4, batch=16), Adam()),
}


@cache
def joint_of(model: str) -> Function:
    return MODELS[model]()


def order_of(name: str, ranks: int, microbatches: int) -> Schedule:
    """A schedule with two stages a rank, if it may have several."""
    generator = SCHEDULES[name]
    if generator.placement == "two copies":
        return schedule(name, ranks, microbatches)
    return schedule(name, ranks, microbatches, generator.chunks or 2)


def program_of(model: str, order: Schedule, dp: int = 1, **layout) -> Program:
    plan = Plan(dp, 1, order.num_ranks, order.num_microbatches * order.copies, **layout)
    mesh = mesh_of(dp, 1, order.num_ranks, Link(25e9))
    return build_program(joint_of(model), mesh, plan, None, order)


def described(use: MemoryUse) -> tuple:
    """All that is said of a use of memory; of the ops at the peak their operators, and the call's name."""
    at = [op.op_type for op in use.at], use.at[0].name if use.at else ""
    return use.peak, use.end, dict(use.by_kind), at


def composed(program: Program) -> bool:
    return changes_of(program.parts, program.table()) is not None


def assert_same_memory(program: Program, note: object = None) -> None:
    """Composed and written out: the same peak, end, kinds, and op at the peak on every device."""
    expected = peak_memory(program.to_function(steady=True))
    memory = program_memory(program)
    assert {d: described(memory.devices[d]) for d in expected} == {
        d: described(use) for d, use in expected.items()
    }, note
    assert memory.peaks == tuple(use.peak for use in memory.ranks)


# --- equal to the step written out ----------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_any_program_on_any_ranks(first):
    """Several stages a rank, halves, pairs, copies of the model, orders that repeat and that do not."""
    kinds = Counter()
    for seed in range(first, first + 20):
        program = invent_placed(seed)
        assert_same_memory(program, seed)
        kinds["pair"] += any(block.pair for block in program.table().blocks)
        kinds["several"] += program.schedule.chunks > 1
        kinds["halves"] += any("W" in block.kind for block in program.table().blocks)
        kinds["composed"] += composed(program)
    assert min(kinds[kind] for kind in ("pair", "several", "halves")) > 0
    assert kinds["composed"] >= 10


def test_any_program_with_a_stage_a_rank():
    programs = [invent(seed).program for seed in range(40)]
    assert sum(map(composed, programs)) >= 25
    for seed, program in enumerate(programs):
        assert_same_memory(program, seed)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", FLUSHED)
def test_every_schedule(name, model):
    program = program_of(model, order_of(name, 2, 8))
    assert_same_memory(program)
    assert composed(program)


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "zb_h2", "interleaved_zb", "zb_v", "dualpipe"])
@pytest.mark.parametrize("layout", [{"remat": "full"}, {"dp": 2, "zero": 3, "reshard": "never"}], ids=str)
def test_with_recomputation_and_divided_parameters(name, layout):
    program = program_of("tied", order_of(name, 2, 4), **layout)
    assert_same_memory(program)
    assert composed(program)


def test_on_four_ranks():
    for name in FLUSHED:
        assert_same_memory(program_of("mlp", order_of(name, 4, 8)), name)


# --- closed forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 16)])
def test_what_is_saved_is_what_is_in_flight(name, ranks, microbatches):
    """A byte from F until B, or W: as many as there are pairs of a stage and a microbatch in flight."""
    order = order_of(name, ranks, microbatches)
    program, _ = timed_program(order)
    assert program_memory(program).peaks == tuple(order.in_flight(rank) for rank in range(ranks))


def test_memory_of_many_microbatches_is_that_of_a_few():
    """Interleaved 1F1B holds no more of 512 microbatches than of 16; the inputs, of no bytes here, grow."""
    few, many = (timed_program(schedule("interleaved", 4, m, 3))[0] for m in (16, 512))
    assert program_memory(few).peaks == program_memory(many).peaks


# --- what is said of it -----------------------------------------------------------------------------------


def test_the_peak_is_named_after_the_call():
    program = program_of("mlp", order_of("dualpipe_v", 2, 8))
    names = [use.at[0].name for use in program_memory(program).ranks]
    calls = {op.name for op in program.to_function(steady=True).ops}
    assert set(names) <= calls
    assert any(name.startswith("(") for name in names), names


def test_peaks_are_of_ranks_and_devices():
    program = program_of("mlp", order_of("interleaved", 2, 4), dp=2)
    memory = program_memory(program)
    assert len(program.stages) == 4 and len(memory.peaks) == len(memory.ranks) == 2
    peaks = [memory.peaks[0]] * 2 + [memory.peaks[1]] * 2
    assert list(memory.peak_of_devices().values()) == peaks
    assert [use.peak for use in memory.devices.values()] == peaks
    devices = [replace(device, memory=max(memory.peaks) - 7.0) for device in program.mesh.devices]
    mesh = type(program.mesh)(devices, **dict(program.mesh.axes))
    slices = mesh.slices("pp")
    stages = [
        replace(stage, mesh=slices[rank])
        for stage, rank in zip(program.stages, program.schedule.rank_of, strict=True)
    ]
    assert program_memory(replace(program, mesh=mesh, stages=tuple(stages))).missing == 7


def test_an_order_that_deadlocks_is_refused():
    order = order_of("interleaved", 2, 4)
    program = program_of("mlp", order)
    cells = [cell for cell in order.ranks[0] if cell[0].kind is Kind.BACKWARD]
    rest = [cell for cell in order.ranks[0] if cell[0].kind is not Kind.BACKWARD]
    stuck = Schedule("stuck", 4, 4, ((*cells, *rest), order.ranks[1]), order.rank_of)
    with pytest.raises(ScheduleError, match="deadlock"):
        program_memory(replace(program, schedule=stuck))


# --- what is kept -----------------------------------------------------------------------------------------


def test_another_number_of_microbatches_walks_nothing_again(monkeypatch):
    orders = [schedule("interleaved", 2, m, 2) for m in (4, 8, 40)]
    program = program_of("mlp", orders[0])
    first = program_memory(program).peaks
    monkeypatch.setattr("distsim.simulation.memory.walk.Walk.walk", lambda *_: pytest.fail("walked again"))
    others = [program_memory(replace(program, schedule=order)).peaks for order in orders[1:]]
    assert all(len(peaks) == len(first) for peaks in others)
