"""Pictures of steps and schedules: which boxes there are, in which colours, with which numbers."""

import csv
import itertools

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from training_models import laid_out, mesh_of, small_mlp, topology_of

import distsim
from distsim.cost import CostModel
from distsim.report import describe_schedule
from distsim.report.schedule_picture import COLOURS, KIND_NAMES, Mark, chunk_of, colour_of, schedule_figure
from distsim.report.timeline import timeline_figure
from distsim.schedule import Kind, one_f_one_b, schedule
from distsim.simulation import Simulator
from distsim.simulation.action_times import ActionTimes
from distsim.simulation.calls import call_times, communication_times
from distsim.simulation.schedule_times import time_schedule
from distsim.simulation.tasks.rank_classes import communicates
from distsim.transforms import SGD, differentiate


def boxes_of(figure):
    """(left, right, low, high, colour) of every box, in order of time."""
    (axes,) = figure.axes
    drawn = axes.collections[-1]  # over communication, which is drawn before
    assert type(drawn) is PolyCollection
    boxes = []
    for path, colour in zip(drawn.get_paths(), drawn.get_facecolors(), strict=True):
        (left, low), (right, high) = path.get_extents().get_points()
        boxes.append((left, right, low, high, tuple(colour[:3])))
    return sorted(boxes)


def numbered(figure):
    """Per row, from left to right, (colour, number) of the boxes with a number."""
    rows = {}
    for text in figure.axes[0].texts:
        x, y = text.get_position()
        (colour,) = [
            c for left, right, low, high, c in boxes_of(figure) if left < x < right and low < y < high
        ]
        rows.setdefault(round(y), []).append((x, -y, colour, int(text.get_text())))
    return [[(colour, number) for _, _, colour, number in sorted(rows[row])] for row in sorted(rows)]


def colours_and_numbers(order, leave_out=None):
    """What a row for each rank must show, but for the actions of a kind and a stage."""
    chunks = chunk_of(order)
    return [
        [
            (pytest.approx(colour_of(Mark(a.kind.value, -1, chunks[a.stage]), order.chunks)), a.microbatch)
            for a in actions
            if (a.kind, a.stage) != leave_out
        ]
        for actions in order.actions
    ]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "dualpipe_v"])
def test_a_schedule_is_drawn_action_by_action(name):
    order = schedule(name, 2, 4, 2 if name == "interleaved" else None)
    figure = schedule_figure(time_schedule(order))
    assert len(boxes_of(figure)) == sum(map(len, order.actions))
    assert numbered(figure) == colours_and_numbers(order)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    kinds = {KIND_NAMES[action.kind.value] for actions in order.actions for action in actions}
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown - kinds == ({"(lighter: later stages of a rank)"} if order.chunks > 1 else set())


def test_a_pair_that_runs_together_is_one_box_over_the_other():
    order = schedule("dualpipe", 2, 8)
    found = time_schedule(order, together=True)
    pairs = [(box.start, box.end) for cells in found.ranks for box in cells for _ in box.cell[1:]]
    boxes = boxes_of(schedule_figure(found))
    halves = [(left, right) for left, right, low, high, _ in boxes if high - low < 0.5]
    assert len(pairs) > 2 and sorted(halves) == sorted([*pairs, *pairs])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb_h1"])
def test_a_step_shows_its_schedule(name):
    """A row for each rank, its actions as the schedule orders and numbers them, then the update."""
    order = schedule(name, 2, 4, 2 if name == "interleaved" else None)
    joint = differentiate(small_mlp(layers=4, width=64, batch=64), SGD())
    simulation = Simulator(CostModel(topology_of(4))).simulate(laid_out(joint, mesh_of(2, 1, 2), order))
    figure = timeline_figure(simulation)
    # Nobody waits for the gradient of the data: the first stage has nothing to do in I.
    assert numbered(figure) == colours_and_numbers(order, leave_out=(Kind.BACKWARD_INPUT, 0))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["gpu:0, gpu:1", "gpu:2, gpu:3"]
    update = pytest.approx(to_rgb(COLOURS["update"]))
    # Updates of neighbours touch: a box for each rank at least.
    assert {round(low) for _, _, low, _, colour in boxes_of(figure) if colour == update} == {0, 1}
    kinds = {KIND_NAMES[action.kind.value] for actions in order.actions for action in actions}
    shown = {text.get_text() for text in figure.legends[0].get_texts() if text.get_text()[0] != "("}
    assert shown == {*kinds, "update", "communication"}


def test_streams_have_a_row_each():
    joint = differentiate(small_mlp(layers=4, width=64, batch=64), SGD())
    program = laid_out(joint, mesh_of(2, 1, 2), schedule("1f1b", 2, 4))
    simulation = Simulator(CostModel(topology_of(4))).simulate(program)
    figure = timeline_figure(simulation, streams=True)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == len({(span.stream.rank_class, span.stream.name) for span in simulation.spans()})
    assert labels[0] == "gpu:0, gpu:1  compute"
    computes = [row for row, label in enumerate(labels) if label.endswith("compute")]
    order = program.schedule
    assert dict(zip(computes, numbered(figure), strict=True)) == dict(
        zip(computes, colours_and_numbers(order), strict=True)
    )
    few = timeline_figure(simulation, rows=3, streams=True)
    assert f"; {len(labels) - 3} more rows not shown" in few.axes[0].get_title()


def test_launches_are_not_drawn_as_communication():
    plan = "dp=2,tp=2,pp=2,microbatches=2"
    model = "gpt:layers=4,hidden=32,heads=2,seq=8,vocab=32"
    figure = timeline_figure(distsim.simulate(model, "dgx-a100", plan, 8, kernels="eager"), streams=True)
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"communication", "launches by the host"} <= shown
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    colours = {
        to_hex(bar.get_facecolor()[0])
        for bar in figure.axes[0].collections
        for path in bar.get_paths()
        if labels[round(path.vertices[:, 1].mean())].endswith("host")
    }
    assert colours == {COLOURS["launches by the host"]}


@pytest.mark.parametrize("overlap", [True, False])
def test_calls_are_the_same_by_both_engines(overlap):
    joint = differentiate(small_mlp(layers=4, width=64, batch=64), SGD())
    program = laid_out(joint, mesh_of(2, 1, 2), schedule("1f1b", 2, 4))
    found = []
    for engine, lockstep in (("maxplus", True), ("maxplus", False), ("events", False)):
        simulation = Simulator(CostModel(topology_of(4)), overlap, lockstep, engine).simulate(program)
        calls = {
            (call.name, device.id): call.parts
            for call in call_times(simulation)
            for device in simulation.classes.members[call.rank_class]
        }
        found.append(calls)
    names = {
        (str(action), rank) for rank, actions in enumerate(program.schedule.actions) for action in actions
    }
    assert names <= {(name, device // 2) for name, device in found[0]}
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, parts in other.items():
            assert parts == tuple([pytest.approx(part, rel=1e-12) for part in found[0][key]]), key


def test_communication_is_the_union_of_its_spans():
    joint = differentiate(small_mlp(layers=4, width=64, batch=64), SGD())
    program = laid_out(joint, mesh_of(2, 1, 2), schedule("1f1b", 2, 4))
    simulation = Simulator(CostModel(topology_of(4))).simulate(program)
    found = communication_times(simulation)
    spans = [span for span in simulation.spans() if communicates(span.op) and span.end > span.start]
    assert found.keys() == {span.stream.rank_class for span in spans} == {0, 1}
    for rank_class, pieces in found.items():
        own = [(span.start, span.end) for span in spans if span.stream.rank_class == rank_class]
        edges = sorted({moment for span in own for moment in span})
        for left, right in itertools.pairwise(edges):
            middle = (left + right) / 2
            covered = [sum(start < middle < end for start, end in these) for these in (own, pieces)]
            assert bool(covered[0]) == bool(covered[1]) and covered[1] <= 1
    (whole,) = communication_times(simulation, near=simulation.step_time)[0]
    assert whole == (found[0][0][0], found[0][-1][1])


# --- times and text of a schedule ----------------------------------------------------------------------


def test_a_schedule_as_text():
    text = describe_schedule(time_schedule(one_f_one_b(2, 3)))
    assert text.splitlines() == [
        "1f1b: 2 ranks, 3 microbatches; forward 1, backward 1 + 1, send 0",
        "",
        "        0  1  2  3  4  5  6  7  8  9  10 11 12",
        "rank 0  F0 F1       B0--- F2 B1---    B2---",
        "rank 1     F0 B0--- F1 B1--- F2 B2---",
        "",
        "makespan   12",
        "rank span  12, the longest from a rank's first start to its last end",
        "bubble     25.00%, the share of it in which ranks do nothing",
        "",
        "rank  stages   busy  in flight",
        "0          0  75.0%          2",
        "1          1  75.0%          1",
        "busy: of the makespan, while the bubble is of the rank span",
        "in flight: the most pairs of a stage and a microbatch past F and not past B or W",
    ]


def test_what_is_too_wide_is_cut():
    found = time_schedule(one_f_one_b(2, 3))
    text = describe_schedule(found, width=30)
    assert "rank 0  F0 F1       B0--- F2\n" in text and "cut at 7 of 12: --plot draws all of it" in text
    assert max(map(len, text.splitlines()[2:5])) <= 30


def test_times_that_are_no_multiples_are_rounded():
    text = describe_schedule(time_schedule(one_f_one_b(2, 3), ActionTimes(send=0.1)))
    assert "times are rounded to columns of 1" in text
    halves = describe_schedule(time_schedule(one_f_one_b(2, 3), ActionTimes({"F": 1.5})))
    assert "rounded to" not in halves and "\nrank 1     F0 B0- F1 B1- F2 B2-\n" in halves


@pytest.mark.parametrize(
    ("name", "p", "m"), [("1f1b", 4, 8), ("zb_h1", 3, 7), ("zb_v", 2, 5), ("dualpipe", 2, 8)]
)
@pytest.mark.parametrize("together", [False, True])
def test_work_and_bubble_fill_the_longest_span(name, p, m, together):
    order = schedule(name, p, m)
    times = ActionTimes({"F": 3.0, "I": 2.5, "W": 1.25}, 0.5)
    found = time_schedule(order, times, together)
    each = {Kind.FORWARD: 3.0, Kind.BACKWARD: 3.75, Kind.BACKWARD_INPUT: 2.5, Kind.BACKWARD_WEIGHT: 1.25}
    assert found.busy == tuple(sum(each[a.kind] for a in actions) for actions in order.actions)
    assert found.bubble == pytest.approx(1 - found.busy[0] / found.rank_span)
    for cells, own in zip(found.ranks, order.actions, strict=True):
        assert [action for box in cells for action in box.cell] == list(own)
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(cells))


def test_profiled_times_give_a_published_bubble_rate(request):
    """Zero Bubble, table 5, 1.5B on 8 ranks with 24 microbatches; the experiment has the other 59."""
    with (request.path.parent / "data" / "schedules" / "zb_table9.csv").open(encoding="utf-8") as file:
        row = next(csv.DictReader(file))
    assert (row["model"], row["p"], row["m"]) == ("1.5B", "8", "24")
    forward, half, rest, send = (float(row[f"T_{what}_ms"]) for what in ("F", "B", "W", "comm"))
    times = ActionTimes({"F": forward, "I": half, "W": rest}, send)
    assert f"{time_schedule(one_f_one_b(8, 24), times).bubble:.4f}" == "0.2431"


def test_every_kind_of_action_has_a_name_and_a_colour_of_its_own():
    assert {*KIND_NAMES} > {kind.value for kind in Kind}
    assert len({COLOURS[name] for name in KIND_NAMES.values()}) == len(KIND_NAMES)
