"""Any schedule: stages in any placement, copies, backward in halves, pairs; and damage to it."""

from __future__ import annotations

import pickle
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_replay import peaks, replay

from distsim.errors import ScheduleError
from distsim.schedule import LETTERS, Action, Cell, Kind, Schedule, Weights
from distsim.schedule.codes import code_of

F, B, I, W = map(Kind, "FBIW")  # noqa: E741


def needs(action: Action, chain: int, halved: set[tuple[int, int]]) -> list[Action]:
    """What an action waits for, written apart from Schedule.inputs."""
    s, m = action.stage, action.microbatch
    before, after = s // chain == (s - 1) // chain, s // chain == (s + 1) // chain
    if action.kind is F:
        return [Action(F, s - 1, m)] if before else []
    if action.kind is W:
        return [Action(I, s, m)]
    return [Action(F, s, m)] + ([Action(I if (s + 1, m) in halved else B, s + 1, m)] if after else [])


def invent(seed: int) -> tuple[Schedule, set[tuple[int, int]]]:
    """Return a schedule that runs, of any kind, and the (stage, microbatch) whose backward is in halves."""
    rng = Random(seed)
    ranks, copies, m = rng.randint(1, 4), rng.choice([1, 1, 2]), rng.randint(1, 5)
    chain = max(rng.randint(1, 6), -(-ranks // copies))
    stages = chain * copies
    rank_of = [*range(ranks), *[rng.randrange(ranks) for _ in range(stages - ranks)]]
    rng.shuffle(rank_of)
    share = rng.choice([0.0, 0.5, 1.0])
    halved = {(s, k) for s in range(stages) for k in range(m) if rng.random() < share}
    left = [Action(F, s, k) for s in range(stages) for k in range(m)]
    for s in range(stages):
        for k in range(m):
            left += [Action(I, s, k), Action(W, s, k)] if (s, k) in halved else [Action(B, s, k)]
    done: set[Action] = set()
    rows: list[list[Cell]] = [[] for _ in range(ranks)]
    overlap = rng.choice([0.0, 0.5])
    while left:
        ready = [action for action in left if done.issuperset(needs(action, chain, halved))]
        one = rng.choice(ready)
        mates = [a for a in ready if rank_of[a.stage] == rank_of[one.stage] and a.kind is not one.kind]
        cell = (one, rng.choice(mates)) if mates and rng.random() < overlap else (one,)
        rows[rank_of[one.stage]].append(cell)
        done.update(cell)
        left = [action for action in left if action not in cell]
    return Schedule("any", stages, m, rows, rank_of, copies), halved


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6))
def test_the_order_is_its_definition(seed):
    made, halved = invent(seed)
    made.check()
    waiting = [list(cells) for cells in made.ranks]
    finished: set[Action] = set()
    steps: list[list[Action]] = []
    ranks: list[int] = []
    while any(waiting):
        ready = [
            rank
            for rank, cells in enumerate(waiting)
            if cells and all(finished.issuperset(needs(a, made.chain, halved)) for a in cells[0])
        ]
        assert ready
        ranks += ready
        steps.append([action for rank in ready for action in waiting[rank].pop(0)])
        finished.update(steps[-1])
    assert [list(step) for step in made.order()] == steps
    where, ends_step = made.merged()
    assert where.tolist() == ranks and ends_step.sum() == len(steps)
    assert all(set(made.inputs(a)) == set(needs(a, made.chain, halved)) for a in finished)
    flat = [action for step in steps for action in step]
    codes = made.codes_in_order
    listed = codes[codes >= 0].tolist()
    assert [code_of(a.microbatch * made.num_stages + a.stage, a.kind.code) for a in flat] == listed
    assert peaks(made) == tuple(
        [asked(r) for r in range(made.num_ranks)] for asked in (made.in_flight, made.until_i, made.pending_w)
    )
    assert replay(made, atomic=True)[0] <= 2 * len(listed)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6))
def test_integers_and_actions_are_one_schedule(seed):
    made, _ = invent(seed)
    sizes = made.name, made.num_stages, made.num_microbatches
    other = Schedule.from_codes(*sizes, made.codes, made.rank_of, made.copies)
    assert other == made and hash(other) == hash(made) and str(other) == str(made)
    assert other.ranks == made.ranks and other.actions == made.actions
    for each in (made, other):
        again = pickle.loads(pickle.dumps(each))
        assert again == made and again.order() == made.order()
    assert Schedule.from_codes(*sizes, made.codes, made.rank_of, made.copies, "double") != other


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6))
def test_damage_is_refused_alike_in_integers_and_in_actions(seed):
    made, _ = invent(seed)
    rng = Random(seed)
    codes = [row.copy() for row in made.codes]
    rank = rng.choice([r for r, row in enumerate(codes) if len(row)])
    row, at = codes[rank], rng.randrange(len(codes[rank]))
    how = rng.choice(["swap", "drop", "repeat", "change", "move", "pair"])
    if how == "swap":
        to = rng.randrange(len(row))
        row[[at, to]] = row[[to, at]]
    elif how == "drop":
        codes[rank] = np.delete(row, at, axis=0)
    elif how == "repeat":
        codes[rank] = np.insert(row, rng.randrange(len(row)), row[at], axis=0)
    elif how == "move":
        codes[rank] = np.delete(row, at, axis=0)
        to = rng.randrange(len(codes))
        codes[to] = np.insert(codes[to], rng.randint(0, len(codes[to])), row[at], axis=0)
    else:
        number = rng.randrange(-1, made.num_stages * made.num_microbatches + 1)
        row[at, how == "pair"] = code_of(number, rng.randrange(len(Kind)))
    sizes = "damaged", made.num_stages, made.num_microbatches
    numbers = Schedule.from_codes(*sizes, codes, made.rank_of, made.copies)
    actions = Schedule(*sizes, numbers.ranks, made.rank_of, made.copies)
    found: list[str] = []
    for each in (numbers, actions):
        try:
            each.check()
        except ScheduleError as error:
            found.append(str(error))
    assert len(found) in (0, 2) and len(set(found)) <= 1
    assert how in ("swap", "move", "change", "pair") or found
    assert all(re.search(rf"[{LETTERS}]-?\d+@\d+|rank \d+ holds no stage", text) for text in found)


def chain_of_two(**changes: object) -> Schedule:
    rows = [[Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)]]
    return Schedule("two", 2, 1, rows, **changes)


def test_one_rank_may_hold_several_stages():
    made = chain_of_two()
    made.check()
    assert (made.rank_of, made.chunks, made.num_ranks, made.chain) == ((0, 0), 2, 1, 2)
    assert str(made) == "two: 2 stages on 1 rank, 1 microbatch\nrank 0: F0@0 F0@1 B0@1 B0@0"
    assert repr(made) == "Schedule(two: 2 stages on 1 rank, 1 microbatch)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_of": (0,)}, "two: 2 stages but a rank for 1; give each stage a rank"),
        ({"rank_of": (0, 1)}, r"stage 1 is on rank 1, but ranks are 0\.\.0"),
        ({"rank_of": (0, -1)}, "stage 1 is on rank -1"),
        ({"copies": 3}, "copies=3 does not divide 2 stages"),
        ({"copies": 0}, "copies=0 does not divide"),
        ({"weights": Weights(2)}, "update_every=2 does not divide 1 microbatch;"),
    ],
)
def test_placements_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ScheduleError, match=message):
        chain_of_two(**changes).check()


def test_a_rank_without_a_stage_is_refused():
    with pytest.raises(ScheduleError, match="two: rank 1 holds no stage; leave it out"):
        Schedule("two", 1, 1, [[Action(F, 0, 0), Action(B, 0, 0)], []]).check()


def test_huge_sizes_are_refused_without_being_written_down():
    rows = [[Action(F, 0, 0), Action(B, 0, 0)]]
    codes = [np.array([[0, -1]])]
    for made in (Schedule("huge", 1, 10**15, rows), Schedule.from_codes("huge", 1, 10**15, codes)):
        with pytest.raises(ScheduleError, match="missing F1@0, F2@0.* and 19999999999999"):
            made.check()


@pytest.mark.parametrize(
    "row", [[[0, -1], [1.5, -1]], [[0.0, -1.0]], [[True, False]], [["0", "-1"]], [[2**64 - 1, 1]]]
)
def test_codes_that_are_not_integers_are_refused(row):
    row = np.array(row)
    said = re.escape(f"mine: the codes of rank 1 are {row.dtype}, not integers that int64 holds; give")
    with pytest.raises(ScheduleError, match=said):
        Schedule.from_codes("mine", 2, 1, [np.array([[0, -1], [1, -1]]), row])


def test_codes_are_integers_of_any_size():
    made = Schedule("mine", 1, 1, [[Action(F, 0, 0), Action(B, 0, 0)]])
    for kind in (np.int8, np.int32, np.int64):
        assert Schedule.from_codes("mine", 1, 1, [np.array([[0, -1], [1, -1]], kind)]) == made
    assert Schedule.from_codes("mine", 1, 1, [np.array([])]).codes[0].shape == (0, 2)


def test_a_pair_starts_when_both_can():
    rows = [
        [Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)],
        [Action(F, 1, 0), (Action(F, 1, 1), Action(B, 1, 0)), Action(B, 1, 1)],
    ]
    made = Schedule("pairs", 2, 2, rows)
    assert [len(step) for step in made.order()] == [1, 2, 2, 2, 1]
    assert "(F1@1;B0@1)" in str(made)
    stuck = [[Action(F, 0, 0), (Action(F, 1, 0), Action(B, 1, 0)), Action(B, 0, 0)]]
    with pytest.raises(ScheduleError, match=r"\(F0@1;B0@1\) waits for F0@1, which runs beside it; reorder"):
        Schedule("stuck", 2, 1, stuck).check()
