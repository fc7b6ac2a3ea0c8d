"""The schedules by name: tables of torch and of the papers, closed forms, and sizes that do not fit."""

from __future__ import annotations

import csv
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_replay import peaks, replay

from distsim import search
from distsim.errors import ScheduleError, SimulationError
from distsim.plan import Plan
from distsim.plan_search.workers import _check_importable
from distsim.schedule import (
    FLUSH,
    SCHEDULES,
    Generator,
    Kind,
    Schedule,
    WarmUp,
    Weights,
    catalogue,
    example,
    gpipe,
    read_csv,
    register_schedule,
    schedule,
    warm_up_schedule,
    write_csv,
)

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "schedules"
REFERENCE = Path(os.environ.get("DISTSIM_REFERENCE", ROOT.parent / "shared" / "reference")) / "schedules"

# The names of the tables, and those of the generators that make them.
TABLES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_torch",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
    "ZB-H1": "zb_h1",
    "ZB-H2": "zb_h2",
    "DualPipe": "dualpipe",
    "ZB-1p": "zb_auto",
    "ZB-2p": "zb_auto",
    "ZB-V": "zb_v_greedy",
    "V-Half": "v_half",
    "V-Min": "v_min",
    "1F1B-V": "1f1b_v",
}
MADE = [*SCHEDULES]


def check_row(folder: Path, row: dict[str, str]) -> None:
    """The generator makes the very table, and what is read off it is what the index says."""
    p, v, m = (int(row[key]) for key in "pvm")
    name = TABLES[row["schedule"]]
    options = {"memory_limit": 2 * p} if row["schedule"] == "ZB-2p" else {}
    made = schedule(name, p, m, v, **options)
    table = read_csv(folder / f"{row['name']}.csv", name, copies=made.copies)
    assert made == table, row["name"]
    assert (made.num_ranks, made.chunks, made.num_microbatches) == (p, v, m // made.copies)
    counted = peaks(made)
    for which, key in enumerate(("peak_inflight", "peak_until_I", "peak_pending_W")):
        asked = (made.in_flight, made.until_i, made.pending_w)[which]
        expected = [int(number) for number in row[f"{key}_per_rank"].split()]
        assert [asked(rank) for rank in range(p)] == counted[which] == expected, row["name"]
    for send, at in ((0.0, ""), (0.1, "_send0.1")):
        makespan, span = replay(made, send)
        assert makespan == pytest.approx(float(row[f"makespan{at}"]), abs=1e-9)
        assert span == pytest.approx(float(row[f"rank_span{at}"]), abs=1e-9)
        atomic, _ = replay(made, send, atomic=True)
        assert atomic == pytest.approx(float(row[f"makespan_atomic{at}"]), abs=1e-9)


def rows_of(index: Path) -> list[dict[str, str]]:
    with index.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["schedule"] in TABLES]


@pytest.mark.parametrize("row", rows_of(DATA / "generated.csv"), ids=lambda row: row["name"])
def test_a_reference_table_is_made(row):
    check_row(DATA, row)


@pytest.mark.parametrize("folder", ["torch", "published"])
def test_all_reference_tables_are_made(folder):
    if not (REFERENCE / folder).is_dir():
        pytest.skip("no reference tables; set DISTSIM_REFERENCE to their folder")
    rows = rows_of(REFERENCE / folder / "index.csv")
    for row in rows:
        check_row(REFERENCE / folder, row)
    assert len(rows) == {"torch": 142, "published": 86}[folder]


def fits(name: str, p: int, m: int, v: int) -> bool:
    """Which sizes a schedule takes, written apart from the generators."""
    if SCHEDULES[name].chunks not in (None, v):
        return False
    return {
        "interleaved": v == 1 or m % p == 0,
        "combined_1f1b": m % p == 0 and (v > 1 or p == 1),
        "interleaved_torch": m % max(1, m // p) == 0,
        "interleaved_zb": m % max(1, m // p) == 0,
        "dualpipe_v": m >= 2 * p,
        "dualpipe": p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
        "pipedream_2bw": m >= p,
    }.get(name, True)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(MADE), st.integers(1, 9), st.integers(1, 24), st.integers(1, 4))
def test_every_size_makes_a_schedule_that_runs_or_is_refused(name, p, m, v):
    v = SCHEDULES[name].chunks or v
    if not fits(name, p, m, v):
        with pytest.raises(ScheduleError, match=f"^{name}: .*; choose"):
            schedule(name, p, m, v)
        return
    made = schedule(name, p, m, v)
    made.check()
    assert (made.name, made.num_ranks, made.chunks) == (name, p, v)
    assert made.num_microbatches * made.copies == m and made.num_stages == p * v
    down = [*range(p)] * v if SCHEDULES[name].placement == "loop" else [*range(p), *range(p)[::-1]]
    assert list(made.rank_of) == down
    assert schedule(name, p, m, v) is made
    if made.kinds <= {*map(Kind, "FBIW")}:  # those that torch has
        assert read_csv(write_csv(made), name, made.copies, made.weights) == made
    makespan, span = replay(made)
    assert span >= 3 * made.num_microbatches * v and makespan >= span
    assert peaks(made) == tuple(
        [asked(rank) for rank in range(p)] for asked in (made.in_flight, made.until_i, made.pending_w)
    )


@cache
def figures(name: str, p: int, m: int, v: int, atomic: bool = False) -> tuple[float, float, int]:
    """Return makespan, span and the most pairs in flight on a rank."""
    made = schedule(name, p, m, v)
    return *replay(made, atomic=atomic), max(map(made.in_flight, range(p)))


SIZES = [(p, m, v) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8, 12, 16, 24) for v in (1, 2, 3)]


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_makespans_and_peaks_have_their_closed_forms(p, m, v):
    looped = 3 * m * v + 3 * (p - 1)
    assert figures("looped_bfs", p, m, v)[2] == m * v
    if m >= p:
        assert figures("looped_bfs", p, m, v)[0] == looped
    if m % p == 0 and v > 1:
        assert schedule("interleaved", p, m, v).actions == schedule("interleaved_torch", p, m, v).actions
        assert figures("interleaved", p, m, v)[0] == looped
        made = schedule("interleaved", p, m, v)
        expected = [min(p * v + p - 1 - 2 * r, m * v) for r in range(p)]
        assert list(map(made.in_flight, range(p))) == expected
        made = schedule("combined_1f1b", p, m, v)
        assert [figures(made.name, p, m, v, atomic)[0] for atomic in (False, True)] == [looped, looped]
        expected = [min(p * v + p - 2 * r, m * v) for r in range(p)]
        assert list(map(made.in_flight, range(p))) == expected
        assert figures("interleaved_zb", p, m, v)[::2] == (3 * m * v + p - 1, p * v)
    if v == 1:
        one = 3 * (m + p - 1)
        assert figures("gpipe", p, m, 1)[::2] == (one, m)
        assert figures("1f1b", p, m, 1)[::2] == (one, min(m, p))
        if m >= p:
            assert figures("zb_h1", p, m, 1)[0] == 3 * m + p - 1
        if m >= 2 * p - 1:
            assert figures("zb_h2", p, m, 1)[1:] == (3 * m, 2 * p - 1)
        rising = [p - r for r in range(p)]
        made = schedule("zb_h1", p, m, 1)
        assert list(map(made.until_i, range(p))) == [min(m, held) for held in rising]
    if v == 2 and m >= 2 * p - 1:
        assert figures("zb_v", p, m, 2) == (6 * m + p - 1, 6 * m, 2 * p)
    if v == 2 and m >= 2 * p:
        assert figures("dualpipe_v", p, m, 2)[0] == 6 * m + p - 1
        assert figures("dualpipe_v", p, m, 2, atomic=True)[::2] == (
            6 * m + 2 * (p - 1),
            min(2 * p + 1, 2 * m),
        )
        if m % 2 == 0 and p % 2 == 0:
            assert figures("dualpipe", p, m, 2)[0] == 3 * m + p // 2 - 1
            assert figures("dualpipe", p, m, 2, atomic=True)[::2] == (3 * m + p - 2, min(p + 1, m))


def test_dualpipe_takes_as_long_as_in_deepseeks_figure():
    assert figures("dualpipe", 8, 20, 2, atomic=True)[0] == 66


def test_what_torch_runs_where_megatron_refuses_is_a_schedule_of_its_own():
    # One chunk: torch warms up twice as far ahead as 1F1B.
    wide, plain = schedule("interleaved_torch", 4, 8, 1), schedule("interleaved", 4, 8, 1)
    assert plain.actions == schedule("1f1b", 4, 8).actions
    assert [wide.in_flight(rank) for rank in range(4)] == [7, 5, 3, 1]
    assert (replay(wide, 0.1)[0], replay(plain, 0.1)[0]) == pytest.approx((33.6, 34.6))
    # No multiple of p: two groups of 5 on 4 ranks.
    fives, fours = (schedule("interleaved_torch", 4, m, 2) for m in (10, 8))
    assert (fives.in_flight(0), fours.in_flight(0)) == (12, 11)
    with pytest.raises(ScheduleError, match="choose 8 or 12"):
        schedule("interleaved", 4, 10, 2)


def test_weights_and_copies_are_told_apart():
    orders = [schedule(name, 3, 6) for name in ("1f1b", "pipedream", "pipedream_2bw")]
    assert [made.weights for made in orders] == [FLUSH, Weights(1), Weights(3, delayed=True)]
    assert len({made.actions for made in orders}) == 1 and len(set(orders)) == 3
    made = schedule("dualpipe", 4, 8)
    assert (made.copies, made.chain, made.rank_of) == (2, 4, (0, 1, 2, 3, 3, 2, 1, 0))
    first = [action for actions in made.actions for action in actions if action.kind.value == "F"]
    assert {str(a) for a in first if not made.inputs(a)} == {f"F{m}@{s}" for m in range(4) for s in (0, 4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 4, 9, 2), "9 microbatches on 4 ranks do not fit: .* choose 8 or 12"),
        (("interleaved", 4, 3, 2), "choose 4$"),
        (("interleaved_torch", 4, 9), "choose 8 or 10"),
        (("interleaved_zb", 2, 5, 1), "choose 4 or 6"),
        (("dualpipe_v", 4, 7), "at least as many as stages, two a rank; choose 8$"),
        (("dualpipe", 4, 9), "choose 8 or 10"),
        (("dualpipe", 3, 8), "3 ranks do not pair up; choose 4, or dualpipe_v"),
        (("pipedream_2bw", 4, 2), "choose 4$"),
        (("zb_v", 4, 8, 1), "zb_v: chunks=1, but a rank holds 2 stages; say chunks=2"),
        (("1f1b", 4, 8, 2), "1f1b: chunks=2, but a rank holds 1 stage; say chunks=1"),
        (("zb_h1", 4, 8, True), "chunks=True must be an integer of at least 1"),
        (("looped_bfs", 4, 8, 0), "chunks=0 must be an integer of at least 1"),
        (("zigzag", 4, 8), "unknown schedule 'zigzag'; choose one of 1f1b, gpipe, interleaved"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        schedule(*arguments)


def test_an_option_that_a_schedule_does_not_have_is_refused():
    with pytest.raises(ScheduleError, match="1f1b: unknown option times; it takes none"):
        schedule("1f1b", 2, 2, times=(1, 1, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_catalogue_says_what_each_schedule_is(name):
    known = SCHEDULES[name]
    assert known.source and re.fullmatch(r"[^.\n]{10,60}", known.description)
    assert known.placement in ("loop", "V", "two copies") and known.chunks in (None, 1, 2)


def test_large_schedules_are_made_and_checked():
    for name in ("1f1b", "interleaved", "zb_v", "dualpipe"):
        made: Schedule = schedule(name, 32, 256)
        made.check()


def test_a_schedule_of_ones_own_is_known_by_name():
    again = Generator(lambda p, m, chunks: gpipe(p, m), 1, "loop", "GPipe by another name", "this test")
    assert register_schedule("own", again) is register_schedule("own", again) is SCHEDULES["own"]
    try:
        assert schedule("own", 2, 3) == gpipe(2, 3) and Plan(schedule="own").schedule == "own"
    finally:
        del catalogue._SCHEDULES["own"]
    for name, words in (("1f1b", "there is a schedule '1f1b' already"), ("a b", "use lower-case letters")):
        with pytest.raises(ScheduleError, match=words):
            register_schedule(name, again)
    for other in (gpipe, replace(again, make=None)):
        with pytest.raises(ScheduleError, match="is no Generator of a function that makes it"):
            register_schedule("other", other)


def test_what_a_generator_makes_is_a_schedule(monkeypatch):
    rows = Generator(lambda p, m, chunks: [[]] * p, 1, "loop", "rows", "this test")
    monkeypatch.setitem(catalogue._SCHEDULES, "rows", rows)
    with pytest.raises(
        ScheduleError, match=r"rows: its generator makes \[\[\], \[\]\], no Schedule; return Sch"
    ):
        schedule("rows", 2, 3)


def test_what_a_schedule_is_like_is_told_by_the_smallest_that_is_made(monkeypatch):
    """Plans and searches ask how steps end, whatever sizes a schedule takes."""

    def picky(p, m, chunks):
        if p < 8:
            raise ScheduleError(f"picky: {p} ranks do not do")
        return gpipe(p, m)

    monkeypatch.setitem(catalogue._SCHEDULES, "picky", Generator(picky, 1, "loop", "of many ranks", "here"))
    made = example("picky")
    assert made is not None and (made.num_ranks, made.weights) == (8, FLUSH)
    found = search("gpt2", "dgx-a100", batch=8, workers=1, plan="tp=1,pp=2|8,schedule=picky")
    assert found.trials


@pytest.mark.parametrize("shape", [WarmUp(2, (1,)), WarmUp(2, (1, 0), (0, 0, 0))])
def test_a_shape_of_other_ranks_is_refused(shape):
    with pytest.raises(ScheduleError, match="own: a shape of [13] ranks for 2"):
        warm_up_schedule("own", 2, 2, 1, shape)
    with pytest.raises(ScheduleError, match="own: pairs of forward and backward have whole backwards"):
        warm_up_schedule("own", 2, 2, 1, WarmUp(2, (1, 0), (0, 0), paired=True))


def gpipe_again(p: int, m: int, chunks: int) -> Schedule:
    return gpipe(p, m)


def test_processes_of_a_search_know_what_was_registered_or_it_is_refused_by_name(monkeypatch):
    """They import what makes a schedule; what they cannot import is named before any plan is tried."""
    asked = {"batch": 8, "plan": "tp=1,pp=2,microbatch_size=1,schedule=own"}
    for make in (gpipe_again, lambda p, m, chunks: gpipe(p, m)):
        own = Generator(make, 1, "loop", "GPipe by another name", "this test")
        monkeypatch.setitem(catalogue._SCHEDULES, "own", own)
        if make is gpipe_again:
            found, alone = (search("mlp:layers=4", "dgx-a100", workers=n, **asked) for n in (2, 1))
            assert found.best == alone.best and "schedule=own" in found.best.text
            continue
        with pytest.raises(SimulationError, match="'own' was registered in this process, and others cannot"):
            search("mlp:layers=4", "dgx-a100", workers=2, **asked)
    monkeypatch.setattr(gpipe_again, "__module__", "__main__")
    with pytest.raises(SimulationError, match="'own' was registered"):
        _check_importable({"own": replace(own, make=gpipe_again)}, elsewhere=True)


def test_a_schedule_of_other_chunks_than_asked_for_is_refused(monkeypatch):
    own = Generator(lambda p, m, chunks: gpipe(p, m), None, "loop", "GPipe of one stage a rank", "this test")
    monkeypatch.setitem(catalogue._SCHEDULES, "own", own)
    with pytest.raises(ScheduleError, match="own has 1 stages a rank, whatever is asked for, here chunks=2"):
        schedule("own", 2, 4, 2)


def test_a_table_of_a_spreadsheet_is_read(tmp_path):
    """With the mark of UTF-8 before its first cell."""
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert read_csv(path, "own").num_microbatches == 1
