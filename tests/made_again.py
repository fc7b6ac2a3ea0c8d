"""A kind that makes again what the forward pass of its stage made, added to distsim: run by a test, apart.

``python tests/made_again.py FOLDER``; the folder is for what makes its blocks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from added_kinds import add_kinds

KINDS = """\
    AGAIN = "R", "recompute", "#000", InFlight(1, frees="F"), WaitsFor("F", holds="BI"), Runs("again.naive")
    OWN = "S", "own", "#000", InFlight(1, frees="F"), WaitsFor("F", holds="BI"), Runs("again.own")
    UNSAID = "T", "unsaid", "#000", InFlight(), WaitsFor("F", holds="BI"), Runs("again.unsaid")
"""
PASSES = '''
"""What a forward pass made, made again: all of it, and what its backward pass alone reads."""

from dataclasses import replace

from distsim.ir import Function
from distsim.program.block import Block


def naive(stages):
    """Return forward passes without their sums: what other stages read of them is made again too."""
    found = []
    for forward, _, _ in stages:
        keys = dict(zip(forward.outputs, forward.function.outputs, strict=True))
        found.append((_block(forward, [key for key in keys if key not in forward.accumulated]),))
    return tuple(found)


def own(stages):
    """Return by stage what makes again what its backward pass alone reads of its forward pass."""
    readers = {}
    for stage, (forward, backward, _) in enumerate(stages):
        for key in (*forward.inputs, *backward.inputs):
            readers.setdefault(key, set()).add(stage)
    found = []
    for stage, (forward, backward, _) in enumerate(stages):
        saved = [key for key in forward.outputs if key in backward.inputs and readers[key] == {stage}]
        found.append((_block(forward, [key for key in saved if key not in forward.accumulated]),))
    return tuple(found)


unsaid = own


def _block(forward, keys):
    made = dict(zip(forward.outputs, forward.function.outputs, strict=True))
    needed, ops = {made[key] for key in keys}, []
    for op in reversed(forward.function.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            ops.insert(0, op)
    given = dict(zip(forward.function.inputs, forward.inputs, strict=True))
    inputs = tuple([value for value in given if value in needed])
    function = Function("again", inputs, tuple(ops), tuple([made[key] for key in keys]))
    return Block(function, tuple([given[value] for value in inputs]), tuple(keys))
'''

if __name__ == "__main__":
    (Path(sys.argv[1]) / "again.py").write_text(PASSES, encoding="utf-8")
    add_kinds(KINDS, ("FRIW", "FRB", "FSIW", "FSB", "FTB"), Path(sys.argv[1]))

from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
from training_models import (  # noqa: E402
    Maker,
    assert_all_readers_agree,
    assert_same_step,
    random_inputs,
    small_mlp,
)

import distsim  # noqa: E402
from distsim.compose import parallelize  # noqa: E402
from distsim.cost import CostModel  # noqa: E402
from distsim.errors import IRError, ScheduleError  # noqa: E402
from distsim.executor import SequentialExecutor  # noqa: E402
from distsim.hardware import load_cluster  # noqa: E402
from distsim.ir import Topology  # noqa: E402
from distsim.plan import Plan  # noqa: E402
from distsim.plan_search.bounds.pipeline_bounds import flights  # noqa: E402
from distsim.report import describe_schedule  # noqa: E402
from distsim.schedule import (  # noqa: E402
    Action,
    Cell,
    Generator,
    Kind,
    Schedule,
    register_schedule,
    schedule,
)
from distsim.schedule.action import check_ways  # noqa: E402
from distsim.simulation import bytes_sent  # noqa: E402
from distsim.simulation.action_times import timed_program  # noqa: E402
from distsim.simulation.memory.program_memory import program_memory  # noqa: E402
from distsim.simulation.schedule_times import time_schedule  # noqa: E402
from distsim.transforms import SGD, differentiate  # noqa: E402


def again(order: Schedule, letter: str, every: int = 1) -> Schedule:
    """A schedule that makes one of so many microbatches again right before its backward pass."""
    ranks: list[list[Cell]] = []
    for cells in order.ranks:
        ranks.append([])
        for cell in cells:
            own = [a for a in cell if a.microbatch % every == 0 and a.kind.value in "BI"]
            ranks[-1] += [*[(Action(Kind(letter), a.stage, a.microbatch),) for a in own], cell]
    sizes = order.num_stages, order.num_microbatches
    return Schedule(f"{order.name}_{letter}{every}", *sizes, ranks, order.rank_of, order.copies)


def held() -> None:
    """What is in flight is what is held where each of it is a byte, side by side on a rank too."""
    for name, chunks in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("zb_h1", 1),
        ("interleaved", 2),
        ("zb_v", 2),
        ("dualpipe_v", 2),
        ("dualpipe", None),
    ):
        for every in (1, 2):
            made = again(schedule(name, 4, 8, chunks), "S", every)
            found = tuple(made.in_flight(rank) for rank in range(4))
            assert program_memory(timed_program(made)[0]).peaks == found, (name, every)
    assert [again(schedule("1f1b", 4, 8), "S").in_flight(rank) for rank in range(4)] == [1, 1, 1, 1]
    assert again(schedule("gpipe", 4, 8), "S", 2).in_flight_of(3) == 4 + 1
    text = describe_schedule(time_schedule(again(schedule("zb_v", 2, 4), "R")))
    assert "past F and not past B or W, but where R (recompute) freed it" in text


def steps() -> None:
    """Every reader has it, and ranks send what they send without it: who makes a key first sends it."""
    joint, topology = differentiate(small_mlp(layers=8), SGD()), load_cluster("dgx-a100")
    costs, inputs = CostModel(topology), random_inputs(joint)
    expected = SequentialExecutor().compute(joint, inputs)
    for name, text in (
        ("1f1b", "dp=2,pp=2,microbatches=4"),
        ("zb_h1", "tp=2,pp=2,microbatches=4"),
        ("zb_v", "pp=2,microbatches=4,chunks=2"),
        ("dualpipe", "pp=2,microbatches=4"),
    ):
        plan = Plan.parse(f"{text},schedule={name}")
        order = schedule(name, plan.pp, plan.microbatches, plan.chunks if plan.chunks > 1 else None)
        plain = parallelize(joint, plan, topology, costs)
        for letter in "RS":
            own = again(order, letter)
            program = parallelize(joint, replace(plan, schedule="table"), topology, costs, schedule=own)
            assert_same_step(joint, program, inputs, expected)
            assert_all_readers_agree(program, costs)
            sent, before = bytes_sent(program, topology), bytes_sent(plain, topology)
            for what in ("activation", "gradient of activation"):
                assert {d: n[what] for d, n in sent.items() if what in n} == {
                    d: n[what] for d, n in before.items() if what in n
                }


def kept_and_sent() -> None:
    """What its backward pass reads, and the next stage too, is kept, as it is sent, and not made again."""
    make = Maker("tanh")
    value, target = make.data("x", 8, 8), make.data("target", 8, 8)
    values = [value]
    for layer in range(4):  # the third adds what the first makes
        product = make("MatMul", values[-1], make.parameter(f"w{layer}", 8, 8))
        values.append(make("Tanh", make("Add", product, values[1]) if layer == 2 else product))
    joint = differentiate(make.end(make("Loss", values[-1], target, N=8)), SGD())
    topology, inputs = load_cluster("dgx-a100"), random_inputs(joint)
    order = again(schedule("1f1b", 2, 4), "R")
    plan, costs = Plan.parse("pp=2,microbatches=4,schedule=table"), CostModel(topology)
    program = parallelize(joint, plan, topology, costs, schedule=order)
    first, second = program.stages
    (sent,) = {*first.forward.outputs} & {*first.backward.inputs} & {*second.forward.inputs}
    assert sent not in program.parts.part(0, Kind("R")).outputs
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))
    assert_all_readers_agree(program, costs)
    table = program.table()
    sends = [table.blocks[block] for block, _, _ in table.rows() if table.blocks[block].kind == "Send"]
    assert sum(block.reads[0].value == sent for block in sends) == 4


def gpipe_again(ranks: int, microbatches: int, _: int) -> Schedule:
    return again(schedule("gpipe", ranks, microbatches), "S")


def searches() -> None:
    """A plan that fits as it makes again what it saves is not discarded for what it would save."""
    for name, make in (
        ("gpipe_again", gpipe_again),
        ("r_again", lambda p, m, _: again(schedule("1f1b", p, m), "R")),
    ):
        register_schedule(name, Generator(make, 1, "loop", "makes forward passes again", "own"))
        found = flights(Plan(pp=4, microbatches=8, schedule=name))
        assert found is not None and found.least == (1, 1, 1, 1)
    model = "gpt:layers=8,hidden=256,heads=4,seq=512,vocab=512"
    known = load_cluster("dgx-a100")
    own = [replace(device, memory=device.context + 200 * 2**20) for device in known.devices]
    limited = Topology.of_devices(own, known.levels)
    for names in ("gpipe_again", "gpipe|gpipe_again"):
        plans = f"pp=4,dp=1,tp=2,microbatches=8,remat=none,schedule={names}"
        found = distsim.search(model, limited, plans, 32)
        assert found.best.plan.schedule == "gpipe_again"
        assert [trial.plan.schedule for trial in found.fitting] == ["gpipe_again"]


def refusals() -> None:
    """What is made again is declared to be; and what is declared leaves nothing in flight."""
    unsaid = again(schedule("gpipe", 2, 4), "T")
    said = r"T0@0 makes 'saved0' again, of which nothing is left since F \(forward\), and adds nothing "
    with pytest.raises(IRError, match=rf"{said}.* as InFlight\(1, frees='F'\)"):
        timed_program(unsaid)
    register_schedule("unsaid", Generator(lambda p, m, _: unsaid, 1, "loop", "makes it again, unsaid", "own"))
    found = flights(Plan(pp=2, microbatches=4, schedule="unsaid"))
    assert found is not None and found.least == (0, 0)  # as nothing is known of it
    with pytest.raises(
        ScheduleError, match="what runs F, W leaves 1 in flight until I and -1 pending W; say"
    ):
        check_ways(["FB", "FW"])


if __name__ == "__main__":
    held()
    steps()
    kept_and_sent()
    searches()
    refusals()
