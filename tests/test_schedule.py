"""Pipeline schedules against their closed forms, and integers that must be refused."""

import itertools
import pickle
import re
from dataclasses import FrozenInstanceError
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.errors import DistsimError, ScheduleError
from distsim.schedule import (
    Action,
    IssueOrder,
    Kind,
    Schedule,
    Weights,
    gpipe,
    issue_order,
    one_f_one_b,
    schedule,
)
from distsim.schedule.codes import CODES, NO_KIND, kind_of, number_of

SCHEDULES = ("1f1b", "gpipe")
SIZES = list(itertools.product(range(1, 9), range(1, 17)))
sizes = st.tuples(st.integers(1, 10), st.integers(1, 20))


def F(stage: int, microbatch: int) -> Action:
    return Action(Kind.FORWARD, stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    return Action(Kind.BACKWARD, stage, microbatch)


def finish_times(plan: Schedule, forward: int, backward: int) -> dict[Action, int]:
    """Longest path over data and rank order, written apart from Schedule.inputs and Schedule.order."""
    last = plan.num_stages - 1
    before = {task: earlier for tasks in plan.actions for earlier, task in itertools.pairwise(tasks)}
    end: dict[Action, int] = {}

    def visit(task: Action) -> int:
        stack = [task]
        while stack:
            task = stack[-1]
            needs = [before[task]] if task in before else []
            if task.kind is Kind.FORWARD:
                needs += [F(task.stage - 1, task.microbatch)] if task.stage else []
            else:
                needs += [F(task.stage, task.microbatch)]
                needs += [B(task.stage + 1, task.microbatch)] if task.stage < last else []
            waiting = [need for need in needs if need not in end]
            stack += waiting
            if not waiting:
                duration = forward if task.kind is Kind.FORWARD else backward
                end[task] = max((end[need] for need in needs), default=0) + duration
                stack.pop()
        return end[task]

    for tasks in plan.actions:
        for task in tasks:
            visit(task)
    return end


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 2)])
def test_makespan_and_bubble_have_the_closed_form(name, forward, backward):
    for p, m in SIZES:
        makespan = max(finish_times(schedule(name, p, m), forward, backward).values())
        assert makespan == (m + p - 1) * (forward + backward), (p, m)
        bubble = 1 - Fraction(m * (forward + backward), makespan)
        assert bubble == Fraction(p - 1, m + p - 1), (p, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_task_is_run_once_on_the_rank_of_its_stage(name):
    for p, m in SIZES:
        made = schedule(name, p, m)
        made.check()
        assert (made.name, made.num_stages, made.num_microbatches) == (name, p, m)
        for stage, tasks in enumerate(made.actions):
            assert sorted(tasks) == [phase(stage, i) for phase in (F, B) for i in range(m)]


def test_gpipe_holds_every_microbatch_and_1f1b_only_as_many_as_stages_remain():
    for p, m in SIZES:
        for stage in range(p):
            assert gpipe(p, m).in_flight(stage) == m
            assert one_f_one_b(p, m).in_flight(stage) == min(m, p - stage)


def test_unit_steps_are_the_unit_time_makespan():
    for name, (p, m) in itertools.product(SCHEDULES, SIZES):
        assert len(schedule(name, p, m).order()) == 2 * (m + p - 1), (name, p, m)


@settings(deadline=None)
@given(st.sampled_from(list(SCHEDULES)), sizes)
def test_order_agrees_with_every_rank_and_with_the_data(name, size):
    made = schedule(name, *size)
    steps = made.order()
    when = {task: at for at, step in enumerate(steps) for task in step}
    assert len(when) == sum(map(len, steps)) == 2 * size[0] * size[1]
    assert all(when[need] < when[task] for task in when for need in made.inputs(task))
    for rank, tasks in enumerate(made.actions):
        assert tasks == tuple(task for step in steps for task in step if task.stage == rank)
    # Eager: nothing could have run a step sooner.
    finish = finish_times(made, 1, 1)
    assert all(when[task] + 1 == finish[task] for task in when)


@settings(deadline=None)
@given(st.sampled_from(list(SCHEDULES)), sizes, st.data())
def test_any_order_of_the_tasks_either_runs_or_names_a_true_circle(name, size, data):
    made = schedule(name, *size)
    rank = data.draw(st.integers(0, size[0] - 1))
    shuffled = tuple(data.draw(st.permutations(made.actions[rank])))
    other = Schedule("shuffled", *size, (*made.ranks[:rank], shuffled, *made.ranks[rank + 1 :]))
    try:
        steps = other.order()
    except ScheduleError as error:
        waits = re.findall(
            r"(\w+@\d+) waits for (\w+@\d+)(?:, which rank \d+ runs after (\w+@\d+))?", str(error)
        )
        assert waits
        place = {str(task): (task, at) for tasks in other.actions for at, task in enumerate(tasks)}
        followers = [*waits[1:], waits[0]]
        for (waiter, wanted, blocker), follower in zip(waits, followers, strict=True):
            assert place[wanted][0] in other.inputs(place[waiter][0])
            assert follower[0] == (blocker or wanted)
            if blocker:
                assert place[blocker][0].stage == place[wanted][0].stage
                assert place[blocker][1] < place[wanted][1]
    else:
        assert sum(map(len, steps)) == 2 * size[0] * size[1]


def steps_task_by_task(made: Schedule) -> list[list[Action]]:
    """The definition of Schedule.order, written apart from it: sets of Action objects, no integers."""
    waiting = [list(tasks) for tasks in made.actions]
    finished: set[Action] = set()
    steps: list[list[Action]] = []
    while any(waiting):
        step = [tasks[0] for tasks in waiting if tasks and finished.issuperset(made.inputs(tasks[0]))]
        assert step, "deadlock"
        for task in step:
            waiting[task.stage].pop(0)
        finished.update(step)
        steps.append(step)
    return steps


def expanded(order: IssueOrder) -> list[list[Action]]:
    """The steps that rounds stand for."""
    steps: list[list[Action]] = []
    for r, repeats in enumerate(order.repeats.tolist()):
        cells = slice(order.start[r], order.start[r + 1])
        assert repeats >= 1 and order.start[r] < order.start[r + 1]
        for k in range(repeats):
            moved = k * int(order.advance[r])
            for step in range(int(order.step[cells].max()) + 1):
                own = np.flatnonzero(order.step[cells] == step) + cells.start
                steps.append([action_of(order, cell, moved) for cell in own])
    return steps


def action_of(order: IssueOrder, cell: int, moved: int) -> Action:
    family = int(order.family[cell, 0])
    return Action(tuple(Kind)[kind_of(family)], number_of(family), int(order.microbatch[cell, 0]) + moved)


@st.composite
def hand_made(draw) -> Schedule:
    """A valid schedule: a random linear order of all tasks that agrees with the data, cut by rank.

    Runs of equal choices make orders in which much repeats; single ones make orders in which little does.
    """
    p, m = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    model = gpipe(p, m)
    waiting = [[phase(stage, i) for i in range(m)] for stage in range(p) for phase in (F, B)]
    ranks: list[list[Action]] = [[] for _ in range(p)]
    finished: set[Action] = set()
    random = draw(st.randoms(use_true_random=False))
    sticky = draw(st.sampled_from([0.0, 0.5, 0.9]))
    last: list[Action] | None = None
    while any(waiting):
        ready = [tasks for tasks in waiting if tasks and finished.issuperset(model.inputs(tasks[0]))]
        if not (last in ready and random.random() < sticky):
            last = random.choice(ready)
        task = last.pop(0)
        finished.add(task)
        ranks[task.stage].append(task)
    return Schedule("hand-made", p, m, tuple(map(tuple, ranks)))


@settings(deadline=None)
@given(
    st.one_of(hand_made(), st.builds(schedule, st.sampled_from(list(SCHEDULES)), *[st.integers(1, 20)] * 2))
)
def test_rounds_are_the_order_and_the_order_is_its_definition(made):
    expected = steps_task_by_task(made)
    assert list(map(list, made.order())) == expected
    assert expanded(issue_order(made)) == expected


@settings(deadline=None)
@given(hand_made())
def test_a_schedule_of_integers_equals_the_one_of_tasks(made):
    counts = made.num_stages, made.num_microbatches
    codes = made.codes
    other = Schedule.from_codes("hand-made", *counts, codes)
    assert other == made and made == other and hash(other) == hash(made)
    assert other.ranks == made.ranks and str(other) == str(made)
    assert [other.in_flight(s) for s in range(len(codes))] == [made.in_flight(s) for s in range(len(codes))]
    assert pickle.loads(pickle.dumps(other)) == pickle.loads(pickle.dumps(made)) == made
    shorter = Schedule("hand-made", made.num_stages, made.num_microbatches, made.ranks[:-1])
    assert other != shorter and shorter != other and other != "hand-made"
    back = [row[::-1] for row in codes]
    assert Schedule.from_codes("other", *counts, codes) != other
    assert Schedule.from_codes("hand-made", *counts, back) != other
    assert Schedule.from_codes("hand-made", *counts, codes, weights=Weights(1)) != other


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [4, 16, 64])
def test_what_rounds_hold_does_not_grow_with_the_microbatches(name, p):
    found = {(len(order.rank), *distinct_rounds(order)) for order in orders(name, p)}
    assert len(found) == 1, "neither the cells written nor the rounds grow"
    _, cells, rounds = found.pop()
    assert cells <= 2 * p * (p + 1) and rounds <= 8


def orders(name, p):
    return [issue_order(schedule(name, p, m)) for m in (256, 1024, 1536)]


def distinct_rounds(order):
    """Return (cells, rounds) without a round that is the one before it some microbatches later.

    The first and the last repetition of a round stand alone where calls are a stage's first or last.
    """
    pieces = np.split(order.code, order.start[1:-1])
    same = [
        len(a) == len(b) and len({*(b - a)[a >= 0].tolist()}) == 1 and bool(((a < 0) == (b < 0)).all())
        for a, b in itertools.pairwise(pieces)
    ]
    alone = [piece for piece, again in zip(pieces, [False, *same], strict=True) if not again]
    return sum(map(len, alone)), len(alone)


def test_a_schedule_is_made_once():
    made = schedule("1f1b", 64, 1536)
    assert schedule("1f1b", 64, 1536) is made is one_f_one_b(64, 1536)
    assert issue_order(made) is issue_order(made) and made.order() is made.order()
    assert schedule("1f1b", 1, 1).ranks == schedule("gpipe", 1, 1).ranks
    with pytest.raises(ValueError, match="read-only"):
        issue_order(made).repeats[0] = 7
    with pytest.raises(FrozenInstanceError):
        made.name = "other"


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[0, -1], [0, -1]], "F0@0 is listed twice"),
        ([[0, -1], [1, -1], [CODES, -1]], "rank 0 lists F1@0, but stages are 0..0 and microbatches 0..0"),
        ([[0, -1], [1 - CODES, -1]], "rank 0 lists B-1@0"),
        ([[0, -1], [1, 1 - 2 * CODES]], "rank 0 lists B-2@0"),
        ([[1, -1], [0, -1]], "B0@0 waits for F0@0, which rank 0 runs after B0@0"),
        ([[0, 1]], "(F0@0;B0@0) waits for F0@0, which runs beside it;"),
        ([[0, -1], [3, -1], [2, -1]], "W0@0 waits for I0@0, which rank 0 runs after W0@0"),
        ([[0, -1], [2, 3]], "(I0@0;W0@0) waits for I0@0, which runs beside it"),
        ([[0, -1], [3, -1]], "missing I0@0; a stage runs F and B, or F, I and W,"),
        (
            [[0, -1], [1, -1], [2, -1], [3, -1]],
            "lists both B0@0 and I0@0; a stage runs F and B, or F, I and W,",
        ),
        ([[0, -1], [1, -1], [3, -1]], "lists both B0@0 and W0@0; a stage runs F and B, or F, I and W,"),
        ([[0, -1], [2, -1]], "missing W0@0;"),
        ([[0, 0], [1, -1]], "rank 0 lists (F0@0;F0@0) as one; one action runs at a time, or two of"),
    ],
)
def test_wrong_integers_are_refused_by_the_names_of_their_actions(codes, message):
    wrong = Schedule.from_codes("mine", 1, 1, [np.array(codes)])
    for verify in (wrong.check, wrong.order, partial(issue_order, wrong)):
        with pytest.raises(ScheduleError, match=f"^mine.*{re.escape(message)}"):
            verify()


@pytest.mark.parametrize(
    ("cell", "code", "kind"),
    [
        ((len(Kind), -1), len(Kind), len(Kind)),
        ((2 * CODES - 1, -1), 2 * CODES - 1, NO_KIND),
        ((-1, 0), -1, NO_KIND),
        ((0, -2), -2, NO_KIND - 1),
    ],
)
def test_codes_of_no_kind_are_refused_by_whoever_looks_at_them(cell, code, kind):
    rows = [[0, -1], [1, -1]], [[CODES, -1], [CODES + 1, -1], cell]
    made = Schedule.from_codes("mine", 2, 1, [np.array(row) for row in rows])
    for verify in (made.check, partial(issue_order, made), partial(str, made)):
        with pytest.raises(ScheduleError, match=f"mine: rank 1 lists the code {code}, of kind {kind}; kinds"):
            verify()


def test_a_schedule_of_nothing_has_no_steps():
    empty = Schedule("none", 2, 0, ((), ()))
    assert empty.order() == () and len(issue_order(empty).repeats) == 0
    assert Schedule("none", 0, 0, ()).order() == ()


def test_a_large_schedule_is_ordered():
    assert len(schedule("1f1b", 64, 512).order()) == 2 * (512 + 64 - 1)


def test_text_is_a_row_per_rank():
    assert str(one_f_one_b(2, 3)) == "\n".join(
        ["1f1b: 2 stages, 3 microbatches", "rank 0: F0 F1 B0 F2 B1 B2", "rank 1: F0 B0 F1 B1 F2 B2"]
    )
    assert str(gpipe(1, 1)) == "gpipe: 1 stage, 1 microbatch\nrank 0: F0 B0"


def test_tasks_sort_by_phase_then_stage_then_microbatch():
    in_order = [F(0, 0), F(0, 1), F(1, 0), B(0, 0), B(0, 1), B(1, 0)]
    assert sorted([B(1, 0), F(1, 0), B(0, 1), F(0, 1), B(0, 0), F(0, 0)]) == in_order
    assert sorted(Kind, reverse=True)[::-1] == list(Kind) and Kind.BACKWARD >= Kind.FORWARD
    assert [(kind.value, kind.code) for kind in Kind][:4] == [("F", 0), ("B", 1), ("I", 2), ("W", 3)]


def test_inputs_of_the_last_stage_and_the_first():
    made = gpipe(2, 1)
    assert made.inputs(F(0, 0)) == ()
    assert made.inputs(F(1, 0)) == (F(0, 0),)
    assert made.inputs(B(1, 0)) == (F(1, 0),)
    assert made.inputs(B(0, 0)) == (F(0, 0), B(1, 0))


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(ScheduleError, match=r"unknown schedule 'zigzag'; choose one of 1f1b, gpipe"):
        schedule("zigzag", 2, 2)
    assert issubclass(ScheduleError, DistsimError) and issubclass(ScheduleError, ValueError)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("p", "m", "message"),
    [(0, 1, "num_ranks=0"), (1, 0, "num_microbatches=0"), (2.0, 1, "num_ranks=2.0"), (1, True, "=True")],
)
def test_sizes_are_integers_of_at_least_one(name, p, m, message):
    with pytest.raises(ScheduleError, match=f"^{name}: .*{re.escape(message)}"):
        schedule(name, p, m)


@pytest.mark.parametrize("rank", [-1, 2])
def test_in_flight_of_no_rank(rank):
    with pytest.raises(ScheduleError, match=rf"no rank {rank}; choose one of 0\.\.1"):
        gpipe(2, 2).in_flight(rank)
