"""Searched and squeezed schedules against published bubble rates and closed forms."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_replay import replay

from distsim.errors import ScheduleError
from distsim.schedule import Schedule, schedule
from distsim.schedule.codes import kind_of
from distsim.schedule.greedy.controllable_memory import (
    one_f_one_b_v,
    v_half,
    v_half_block,
    v_min,
    v_min_block,
)
from distsim.schedule.greedy.zero_bubble import zb_auto, zb_v_greedy

DATA = Path(__file__).parent / "data" / "schedules"


def read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Hidden size and heads of the models of arXiv 2401.10241, table 3; sequences have 1024 tokens.
MODELS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}


def weight_share(model: str) -> float:
    """What W frees of an activation, by table 1 of the paper: 32 h of 34 h + 5 a s per token."""
    hidden, heads = MODELS[model]
    return 32 * hidden / (34 * hidden + 5 * heads * 1024)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p"])
def test_published_bubble_rates(name):
    """Table 5 of arXiv 2401.10241 from the profiled times of its appendix, to the last digit."""
    rows = read("zb_table5_replayed.csv")
    rates = {(row["model"], row["p"], row["m"]): row for row in rows if row["schedule"] == name}
    times = read("zb_table9.csv")
    assert len(rates) == len(times) == 12
    for row in times:
        p, m = int(row["p"]), int(row["m"])
        *seconds, send = (float(row[f"T_{what}_ms"]) / 1e3 for what in ("F", "B", "W", "comm"))
        if name in ("ZB-1p", "ZB-2p"):
            limit, share = int(name[3]) * p, weight_share(row["model"])
            made = zb_auto(p, m, memory_limit=limit, seconds=seconds, send=send, weight_share=share)
        else:
            made = schedule(name.lower().replace("-", "_"), p, m)
        rate = 1 - m * sum(seconds) / replay(made, send, seconds=seconds)[1]
        published = rates[row["model"], row["p"], row["m"]]["bubble_rate_published"]
        assert f"{rate:.4f}" == published, (row["model"], m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_searches_with_equal_times(p, more):
    """Zero bubble in twice 1F1B's memory, or in a V; in 1F1B's as much as ZB-H1."""
    m = 2 * p + more
    one, two, v = zb_auto(p, m), zb_auto(p, m, memory_limit=2 * p), zb_v_greedy(p, m)
    assert replay(one) == (3 * m + p - 1, 3 * m + p - 1)
    assert replay(two) == (3 * m + p - 1, 3 * m)
    assert replay(v) == (6 * m + p - 1, 6 * m)
    assert max(map(one.in_flight, range(p))) == min(p, m)
    assert max(map(v.in_flight, range(p))) == 2 * p


# p: bubble and peak of V-Half, V-Min and 1F1B-V; F, I and W of a stage last one unit each.
SQUEEZED = {
    2: (1, 4, 3, 4, 4, 4),
    4: (5, 6, 11, 4, 15, 6),
    8: (17, 10, 27, 8, 33, 12),
    16: (41, 18, 59, 12, 75, 22),
}


@pytest.mark.parametrize("p", SQUEEZED)
def test_squeezed_schedules_in_closed_form(p):
    for m in (2 * p, 2 * p + 3):
        figures = []
        for make in (v_half, v_min, one_f_one_b_v):
            made = make(p, m)
            figures += [replay(made)[1] - 6 * m, max(map(made.in_flight, range(p)))]
        assert tuple(figures) == SQUEEZED[p]


@pytest.mark.parametrize("make", [v_half, v_min, one_f_one_b_v])
@pytest.mark.parametrize("p", range(1, 8))
def test_squeezed_schedules_of_any_size(make, p):
    """They run, within the memory that many microbatches need, and never longer than block by block."""
    most = max(map(make(p, 4 * p).in_flight, range(p)))
    for m in range(1, 2 * p + 2):
        made = make(p, m)
        made.check()
        assert max(map(made.in_flight, range(p))) <= most
        assert 6 * m <= replay(made)[1] <= 6 * m + 6 * p


@pytest.mark.parametrize("block", [v_half_block, v_min_block])
@pytest.mark.parametrize("p", range(1, 14))
def test_blocks_repeat_without_collision(block, p):
    """Passes of a rank fall into different ticks of the period, and follow each other down and up."""
    ticks = block(p)
    assert all(len(set(row)) == 4 for row in ticks % 6)
    down_and_up = np.concatenate([ticks[:, 0], ticks[::-1, 1], ticks[:, 2], ticks[::-1, 3]])
    assert (np.diff(down_and_up) > 0).all()


durations = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 5.0]), min_size=3, max_size=3)


@settings(max_examples=150)
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.sampled_from([0.0, 0.25, 3.0]), st.booleans())
def test_searches_of_any_times(data, p, m, send, in_a_v):
    """They run, in the memory allowed, and power-of-two units of time change nothing."""
    stages = 2 * p if in_a_v else p
    seconds = data.draw(st.lists(durations, min_size=stages, max_size=stages))
    share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    limit = stages + data.draw(st.integers(0, 4))
    search = zb_v_greedy if in_a_v else zb_auto
    made = search(p, m, memory_limit=limit, seconds=seconds, send=send, weight_share=share)
    made.check()
    assert max(map(made.until_i, range(p))) <= limit
    for rank in range(p):
        kinds = kind_of(made.codes[rank][:, 0])
        held = np.cumsum(np.array([1, 0, share - 1, -share])[kinds])
        assert held.max() <= limit and held[-1] == 0
    scaled = np.array(seconds) / 8
    assert search(p, m, memory_limit=limit, seconds=scaled, send=send / 8, weight_share=share) == made
    work = np.array(seconds).sum(1)
    busiest = max(m * work[list(held)].sum() for held in held_stages(made))
    assert replay(made, send, seconds=seconds)[1] >= busiest


def held_stages(made: Schedule) -> list[list[int]]:
    """The stages of each rank."""
    return [[s for s, rank in enumerate(made.rank_of) if rank == r] for r in range(made.num_ranks)]


def test_more_memory_than_microbatches_changes_nothing():
    for m in (3, 8):
        assert zb_auto(4, m, memory_limit=m) == zb_auto(4, m, memory_limit=float("inf"))


def test_a_rank_has_its_own_limit():
    made = zb_auto(4, 12, memory_limit=(2, 8, 3, 8))
    assert all(made.in_flight(rank) <= limit for rank, limit in enumerate((2, 8, 3, 8)))
    assert made.in_flight(0) == 2


def test_memory_buys_time():
    """The span falls to nothing but work from one microbatch at a time to twice 1F1B's memory."""
    spans = [replay(zb_auto(4, 16, memory_limit=limit))[1] for limit in range(1, 10)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[3] > spans[7] == spans[8] == 48


MAKERS = [zb_auto, zb_v_greedy, v_half, v_min, one_f_one_b_v]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2.0, 4), (4, True), (4, 4, 3)])
def test_sizes_are_refused(make, sizes):
    with pytest.raises(ScheduleError, match=r"must be an integer of at least 1|say chunks=[12]"):
        make(*sizes)


BAD = [
    ({"seconds": (1, 2)}, r"seconds of F, I and W: \(1, 2\) is not \d x 3 numbers, nor one for all"),
    ({"seconds": [(1, 1, 1)] * 3}, "is not . x 3 numbers"),
    ({"seconds": "fast"}, "'fast' is not"),
    ({"seconds": (1, -1, 1)}, r"\(1, -1, 1\) must be at least 0"),
    ({"seconds": (1, float("nan"), 1)}, "must be at least 0"),
    ({"seconds": (1e9, 1, 1)}, r"s of work exceeds 2\.1e\+06 s; give times in seconds"),
    ({"seconds": (float("inf"), 1, 1)}, "inf s of work exceeds"),
    ({"send": float("inf")}, "inf s of work exceeds"),
    ({"send": (1, 1)}, r"send: \(1, 1\) is not a number"),
    ({"memory_limit": 0.5}, "memory_limit=0.5 of rank 0 is less than one activation .* give at least 1"),
    ({"memory_limit": (4, 0)}, "memory_limit=0 of rank 1 is less than one"),
    ({"memory_limit": (4, 4, 4)}, "memory_limit: .* is not 2 numbers"),
    ({"memory_limit": None, "weight_share": 1.5}, "weight_share=1.5 is more than the whole; give 0 to 1"),
]


@pytest.mark.parametrize("search", [zb_auto, zb_v_greedy])
@pytest.mark.parametrize(("options", "message"), BAD)
def test_numbers_are_refused(search, options, message):
    with pytest.raises(ScheduleError, match=message):
        search(2, 4, **options)


def test_a_v_needs_memory_for_its_turn():
    with pytest.raises(
        ScheduleError, match="no order found in the memory of 1 activations a rank; give more, 4"
    ):
        zb_v_greedy(2, 4, memory_limit=1)
