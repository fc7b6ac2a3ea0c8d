"""The action of CONTRIBUTING.md, added to distsim as the page says, and what follows: run by a test, apart.

``python tests/new_action.py CONTRIBUTING.md FOLDER``; the folder is for what makes its blocks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from added_kinds import add_kinds


def add_action(page: Path, folder: Path) -> None:
    """Have this process know the kinds of the page, the ways that it names besides, and what they run."""
    about = page.read_text(encoding="utf-8").partition("\n## An action\n")[2]
    lines, source = re.findall(r"^```text\n(.*?)^```", about, re.DOTALL | re.MULTILINE)
    kinds, ways = lines.split("\n\n")
    (folder / "on_host.py").write_text(source, encoding="utf-8")
    add_kinds(kinds, ast.literal_eval(ways.removeprefix("WAYS = ")), folder)


if __name__ == "__main__":
    add_action(*map(Path, sys.argv[1:]))

from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402
from training_models import (  # noqa: E402
    assert_all_readers_agree,
    assert_same_step,
    random_inputs,
    small_mlp,
)

from distsim.compose import parallelize  # noqa: E402
from distsim.cost import CostModel  # noqa: E402
from distsim.errors import PlanError, ScheduleError  # noqa: E402
from distsim.executor import SequentialExecutor  # noqa: E402
from distsim.hardware import load_cluster  # noqa: E402
from distsim.ir import Function, Link, Topology  # noqa: E402
from distsim.plan import Plan  # noqa: E402
from distsim.plan_search.bounds.pipeline_bounds import flights  # noqa: E402
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem  # noqa: E402
from distsim.plan_search.run import FixedModel  # noqa: E402
from distsim.report import describe_schedule  # noqa: E402
from distsim.report.schedule_picture import COLOURS, LAUNCHES, schedule_figure  # noqa: E402
from distsim.report.timeline import timeline_figure  # noqa: E402
from distsim.schedule import (  # noqa: E402
    Action,
    Cell,
    Generator,
    Kind,
    Schedule,
    register_schedule,
    schedule,
    write_csv,
)
from distsim.simulation import Simulation, Simulator  # noqa: E402
from distsim.simulation.action_times import ActionTimes, timed_program  # noqa: E402
from distsim.simulation.memory.program_memory import program_memory  # noqa: E402
from distsim.simulation.memory.timeline import memory_timeline  # noqa: E402
from distsim.simulation.schedule_times import time_schedule  # noqa: E402
from distsim.transforms import SGD, differentiate  # noqa: E402
from distsim.transforms.kernels.policies import KERNELS  # noqa: E402


def offloaded(order: Schedule, every: int) -> Schedule:
    """A schedule in which of so many microbatches one is copied to the host and back."""
    ranks: list[list[Cell]] = []
    for cells in order.ranks:
        ranks.append([])
        for cell in cells:
            own = [action for action in cell if action.microbatch % every == 0]
            back = [Action(Kind("R"), a.stage, a.microbatch) for a in own if a.kind.value in "BI"]
            out = [Action(Kind("O"), a.stage, a.microbatch) for a in own if a.kind is Kind.FORWARD]
            ranks[-1] += [*[(action,) for action in back], cell, *[(action,) for action in out]]
    sizes = order.num_stages, order.num_microbatches
    return Schedule(f"{order.name}_offloaded{every}", *sizes, ranks, order.rank_of, order.copies)


def earlier(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a rank, each copy back listed before the pass that it stood behind."""
    found = list(cells)
    for place, cell in enumerate(found):
        if cell[0].kind.value == "R":
            found.insert(max(n for n in range(place) if found[n][0].kind.value in "FB"), found.pop(place))
    return found


def times() -> None:
    """Alone a microbatch takes all its actions; of several, copies run beside what others compute.

    A fetch begins where it stands, however early it could: before its own backward that waits for all of it,
    one action earlier it is hidden.
    """
    one, half = schedule("gpipe", 1, 1), ActionTimes({"O": 0.5, "R": 0.5})
    seconds = ActionTimes({"O": 2.0, "R": 3.0})
    assert time_schedule(offloaded(one, 1), seconds).makespan == 1 + 2 + 3 + 2
    found = time_schedule(offloaded(schedule("gpipe", 1, 4), 1), half)
    assert (found.makespan, found.busy, found.schedule.in_flight(0)) == (4 * 3 + 4 * 0.5, (12.0,), 1)
    early = time_schedule(Schedule("early", 1, 4, [earlier(found.schedule.ranks[0])]), half)
    assert (early.makespan, early.busy, early.schedule.in_flight(0)) == (4 * 3, (12.0,), 2)
    assert {stream: len(cells) for stream, cells in found.beside[0].items()} == {"offload": 4, "fetch": 4}
    for name, chunks in (("zb_v", 2), ("dualpipe_v", 2), ("interleaved", 2)):  # to itself, too
        order = schedule(name, 2, 4, chunks)
        late = time_schedule(offloaded(order, 1), half).makespan - time_schedule(order, half).makespan
        assert 0 < late <= 0.5 * 2 * 4 * chunks * 2
    text = describe_schedule(time_schedule(offloaded(one, 1), seconds))
    assert "offload 2, reload 3" in text
    assert text.splitlines()[3:6] == [
        "rank 0     F0                B0---",
        "  offload     O0---",
        "  fetch             R0------",
    ]
    assert len(schedule_figure(found).axes[0].collections) == 3


def memory() -> None:
    """Over time, where that is more: what is copied is there until it is, however early that was issued.

    GPipe on one rank, F takes 1, O takes t: when F has ended m times the first copy back takes memory, and
    of those to the host floor((m - 1) / t) have ended, or when the first has.
    """
    for m, seconds, held in ((4, 0.5, 2), (4, 3.0, 4), (6, 2.0, 5), (8, 1.0, 2), (5, 9.0, 5)):
        assert seconds < 1 or held == m - max((m - 1) // seconds, 1) + 1
        order = offloaded(schedule("gpipe", 1, m), 1)
        program, costs = timed_program(order, ActionTimes({"O": seconds, "R": 0.5}))
        assert program_memory(program).peaks == (1,) == (order.in_flight(0),)
        for engine in ("maxplus", "events"):
            found = Simulator(costs, engine=engine).simulate(program)
            uses = [*found.memory.values()]
            assert {use.peak for use in uses} == {line.peak for line in memory_timeline(found)} == {held}
            assert {sum(use.by_kind.values()) for use in uses} == {held}
            assert found.rank_memory.peaks == (held,)
            assert {use.at[-1].op_type for use in uses} <= {"Fetch", "Delay"}
        text = describe_schedule(time_schedule(order, ActionTimes({"O": seconds, "R": 0.5})))
        busy = f"{3 * m / found.step_time:.1%}"
        assert f"in flight  in memory\n0          0  {busy}          1          {held}\n" in text


def steps() -> None:
    """Every reader has it: computed over all ranks, both engines and the step written out, and memory."""
    joint, topology = differentiate(small_mlp(layers=8), SGD()), load_cluster("dgx-a100")
    costs, inputs = CostModel(topology), random_inputs(joint)
    expected = SequentialExecutor().compute(joint, inputs)
    for name, text in (
        ("gpipe", "pp=2,microbatches=4"),
        ("1f1b", "dp=2,pp=2,microbatches=4"),
        ("zb_h1", "tp=2,pp=2,microbatches=4"),
        ("interleaved", "pp=2,microbatches=4,chunks=2"),
        ("zb_v", "pp=2,microbatches=4,chunks=2"),
    ):
        plan = Plan.parse(f"{text},schedule={name}")
        order = schedule(name, plan.pp, plan.microbatches, plan.chunks)
        plain = parallelize(joint, plan, topology, costs)
        for every in (1, 2):
            own = offloaded(order, every)
            program = parallelize(joint, replace(plan, schedule="table"), topology, costs, schedule=own)
            assert_same_step(joint, program, inputs, expected)
            assert_all_readers_agree(program, costs)
            first, before = program_memory(program).peaks[0], program_memory(plain).peaks[0]
            assert first < before if every == 1 else first <= before
            assert "what O (offload) and R (reload) copy" in program.notes[-1]
        simulated = Simulator(costs).simulate(program)
        lines = {device: line.peak for line in memory_timeline(simulated) for device in line.devices}
        for device, use in simulated.memory.items():
            assert use.peak == max(lines[device], program_memory(program).devices[device].peak)
            assert sum(simulated.saved_by_module(device).values()) == use.by_kind["activations"]
            assert sum(use.by_kind.values()) == use.peak and simulated.peak_memory[device] == use.peak
    assert simulated.step_time > Simulator(costs).simulate(plain).step_time
    assert simulated.breakdown("phase").keys() & {"offload", "reload"}
    pictures(simulated)


def pictures(simulated: Simulation) -> None:
    """Copies are drawn in the colours of their kinds, on their own streams or below the passes of a rank."""
    for streams in (False, True):
        figure = timeline_figure(simulated, streams=streams)
        bars = [strips for strips in figure.axes[0].collections if len(strips.get_paths())]
        drawn = {to_hex(colour) for strips in bars for colour in strips.get_facecolors()}
        labels = {text.get_text() for text in figure.legends[0].get_texts()}
        assert labels >= {"forward", "offload", "reload", "communication"} and LAUNCHES not in labels
        assert drawn >= {Kind("O").colour, Kind("R").colour, COLOURS["communication"]}


def refusals() -> None:
    own = offloaded(schedule("1f1b", 2, 4), 1)
    with pytest.raises(ScheduleError, match=r"torch's tables have no O \(offload\), as of O0@0"):
        write_csv(own)
    early = [[(a,) for a in sorted(row, key=lambda a: a.kind is Kind.BACKWARD)] for row in own.actions]
    with pytest.raises(ScheduleError, match="missing R0@0"):
        Schedule("lost", 2, 4, [[c for c in row if c[0].kind.value != "R"] for row in early]).check()
    first = [Action(Kind(letter), 0, 0) for letter in "FROB"]
    with pytest.raises(ScheduleError, match="R0@0 waits for O0@0"):
        Schedule("early", 1, 1, [first]).check()
    register_schedule(
        "own", Generator(lambda p, m, _: offloaded(schedule("1f1b", p, m), 1), 1, "loop", "own", "own")
    )
    plan = Plan.parse("pp=2,microbatches=4,schedule=own")
    found = flights(plan)  # between what is copied away and what comes back nothing is held for sure
    assert found is not None and found.least == (1, 1)
    joint, known = differentiate(small_mlp(layers=8), SGD()), load_cluster("dgx-a100")
    with pytest.raises(
        PlanError, match=r"runs O \(offload\), and stages are balanced by the times of F, B, I, W"
    ):
        parallelize(joint, replace(plan, stages="auto"), known, CostModel(known))
    bare = Topology.of_devices([replace(device, host_link=None) for device in known.devices], known.levels)
    with pytest.raises(
        PlanError, match="schedule=1f1b_offloaded1 copies to the host, and gpu:0 has no host_link"
    ):
        parallelize(joint, plan, bare, CostModel(bare))


def searches() -> None:
    """Plans are ranked, and fit, by the memory over time: here that of copies that are slow."""
    joint, known, plan = *slow_step(1e30), Plan.parse("pp=2,microbatches=4,schedule=own")
    evaluator = PlanEvaluator(SearchProblem(FixedModel(joint), known, KERNELS["ops"]))
    trial, step = evaluator.trial(plan), evaluator.simulate(plan)
    peaks = program_memory(step.simulated).peaks
    assert trial.fits and step.fits
    assert trial.peak == max(line.peak for line in memory_timeline(step)) > max(peaks)
    joint, known = slow_step((trial.peak + max(peaks)) / 2)
    evaluator = PlanEvaluator(SearchProblem(FixedModel(joint), known, KERNELS["ops"]))
    assert not evaluator.trial(plan).fits and not evaluator.simulate(plan).fits
    assert evaluator.trial(plan).missing == trial.peak - known.devices[0].usable


def slow_step(memory: float) -> tuple[Function, Topology]:
    """A step, and devices with so many bytes and a slow link to the host."""
    topology = load_cluster("dgx-a100")
    own = {"host_link": Link(1e7), "memory": memory, "context": 0.0, "fragmentation": 0.0, "segment": 1}
    devices = [replace(device, **own) for device in topology.devices]
    return differentiate(small_mlp(layers=8), SGD()), Topology.of_devices(devices, topology.levels)


if __name__ == "__main__":
    times()
    memory()
    steps()
    refusals()
    searches()
