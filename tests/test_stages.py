"""Splits of blocks into stages: closed forms, the simulator, brute force, proofs, memory, errors."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from schedule_models import SCHEDULES, any_order
from stage_models import program_of, random_blocks, random_communication, splits

from distsim.errors import PartitionError
from distsim.executor import Simulator
from distsim.schedule import schedule
from distsim.stage_balance import (
    BlockCost,
    StageProblem,
    auto_split,
    default_split,
    linear_communication,
    program_costs,
    split_time,
)

LAYER = BlockCost("layer", 1.0, 2.0)


# --- closed forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count", "microbatches"), [(1, 3, 1), (4, 2, 9), (5, 3, 12), (8, 1, 64)])
def test_equal_stages_take_the_bubble_of_the_papers(name, stages, count, microbatches):
    found = auto_split([LAYER] * (stages * count), stages, microbatches, name)
    assert found.sizes == (count,) * stages
    assert found.step_time == pytest.approx((microbatches + stages - 1) * 3 * count, rel=1e-12)
    assert found.proven


def test_one_microbatch_takes_all_work_and_every_send():
    blocks = [replace(LAYER, sent=10.0, returned=20.0)] * 6
    links = linear_communication(bandwidth=10.0, latency=0.5)
    assert split_time(blocks, (1, 2, 3), 1, "1f1b", links) == pytest.approx(18 + 2 * (1.5 + 2.5))


def test_sums_updates_collectives_and_constants_are_counted():
    block = BlockCost("b", 1.0, 2.0, recompute=0.5, accumulate=0.25, shared=0.125, reduce=3.0, update=0.75)
    # Two blocks make constants once; the second one's collective runs beside the first one's backward.
    forward, backward, sums = 2.125, 5.0, 0.5
    tail = (3.0 - 2.75) + 3.0 + 2 * 0.75
    assert split_time([block] * 2, (2,), 3) == pytest.approx(3 * (forward + backward) + 2 * sums + tail)


# --- the simulator, and brute force --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_a_split_takes_what_the_simulator_says_of_its_program(seed):
    rng = Random(seed)
    stages, microbatches = rng.randint(1, 6), rng.randint(1, 9)
    blocks = [replace(b, reduce=0.0, overlap=0.0) for b in random_blocks(rng, stages)]
    order = SCHEDULES[rng.choice(sorted(SCHEDULES))](rng, stages, microbatches)
    links = random_communication(rng)
    program, cost_model = program_of(blocks, order, links)
    simulated = Simulator(cost_model).simulate(program).step_time
    sizes = (1,) * stages
    assert split_time(blocks, sizes, microbatches, order, links) == pytest.approx(simulated, rel=1e-12)
    priced = program_costs(program, cost_model)
    for given, found in zip(blocks, priced, strict=True):
        for name in ("forward", "after", "accumulate", "shared", "shared_backward", "update"):
            if name != "after" or found.name != "block 0":  # nothing waits for the first block's gradient
                assert getattr(found, name) == pytest.approx(getattr(given, name), abs=1e-12), name
        assert found.backward == pytest.approx(given.backward + given.recompute)


def test_the_best_of_all_splits_is_found_and_proven():
    for seed in range(600):
        rng = Random(seed)
        count = rng.randint(1, 16)
        stages, microbatches = rng.randint(1, min(count, 7)), rng.randint(1, 10)
        blocks, links = random_blocks(rng, count), random_communication(rng)
        order = SCHEDULES[rng.choice(["1f1b", "1f1b", "gpipe", "warmed up", "groups"])](
            rng, stages, microbatches
        )
        problem = StageProblem(blocks, order, links)
        found = problem.best()
        assert found.proven, seed
        assert found.step_time == problem.time(found.sizes), seed
        best = min(problem.time(sizes) for sizes in splits(count, stages))
        assert found.step_time == pytest.approx(best, rel=1e-9), seed


def test_an_order_of_microbatches_of_any_kind_is_no_harder():
    for seed in range(60):
        rng = Random(seed)
        count = rng.randint(2, 9)
        stages, microbatches = rng.randint(1, min(count, 4)), rng.randint(1, 5)
        order = any_order(rng, stages, microbatches)
        problem = StageProblem(random_blocks(rng, count), order, random_communication(rng))
        best = min(problem.time(sizes) for sizes in splits(count, stages))
        assert problem.best().step_time == pytest.approx(best, rel=1e-9), seed


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 32), (8, 64), (16, 8)])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_34_blocks_are_proven(name, stages, microbatches):
    rng = Random(stages)
    layers = [
        BlockCost("layer", work, 2 * work, sent=1.0) for work in [rng.uniform(0.5, 1.5) for _ in range(32)]
    ]
    blocks = [BlockCost("embedding", 0.1, 0.1, sent=1.0), *layers, BlockCost("head", 2.0, 4.0)]
    found = auto_split(blocks, stages, microbatches, name, linear_communication(20.0), effort=200_000)
    assert found.proven
    assert found.gap == 0


def test_a_search_that_is_cut_short_says_how_far_it_may_be():
    rng = Random(3)
    for _ in range(20):
        blocks = random_blocks(rng, 24)
        short, whole = (auto_split(blocks, 12, 8, effort=effort) for effort in (1, 500_000))
        assert whole.proven
        assert short.lower_bound <= whole.step_time * (1 + 1e-12) <= short.step_time * (1 + 2e-12)
        assert short.gap == pytest.approx(short.step_time / short.lower_bound - 1)


# --- memory --------------------------------------------------------------------------------------------


def memory_of(blocks, sizes, order):
    """State, what is saved of the microbatches in flight, and the largest workspace, stage by stage."""
    found, first = [], 0
    for stage, size in enumerate(sizes):
        own = blocks[first : first + size]
        held = sum(b.state + order.in_flight(stage) * b.saved for b in own)
        found.append(held + max(b.workspace for b in own))
        first += size
    return found


def test_what_does_not_fit_is_never_returned():
    refused = 0
    for seed in range(150):
        rng = Random(seed)
        count = rng.randint(2, 10)
        stages, microbatches = rng.randint(1, min(count, 4)), rng.randint(1, 6)
        blocks, order = (
            random_blocks(rng, count),
            schedule(rng.choice(["1f1b", "gpipe"]), stages, microbatches),
        )
        every = {sizes: memory_of(blocks, sizes, order) for sizes in splits(count, stages)}
        limits = [
            rng.choice([0.9, 1.0, 1.2]) * max(rng.choice(list(every.values()))) + 1 for _ in range(stages)
        ]
        fitting = [
            sizes for sizes, use in every.items() if all(a <= b for a, b in zip(use, limits, strict=True))
        ]
        if not fitting:
            refused += 1
            least = min(max(a - b for a, b in zip(use, limits, strict=True)) for use in every.values())
            with pytest.raises(PartitionError, match=rf"over by {least / 2**20:,.1f} MiB, stage"):
                auto_split(blocks, stages, microbatches, order, memory=limits)
            continue
        found = auto_split(blocks, stages, microbatches, order, memory=limits)
        assert list(found.memory) == pytest.approx(every[found.sizes])
        problem = StageProblem(blocks, order)
        assert found.sizes in fitting
        assert found.step_time == pytest.approx(min(map(problem.time, fitting)), rel=1e-9)
    assert 5 < refused < 100


def test_the_error_says_by_how_much_and_on_which_stage():
    blocks = [BlockCost(f"b{i}", 1.0, 2.0, state=2**30, saved=2**28) for i in range(4)]
    message = (
        r"no split of 4 blocks into 2 stages fits in memory: at best some stage is over by 2,048\.0 MiB, "
        r"stage 0 of sizes 2, 2, which needs 3,072\.0 of 1,024\.0 MiB; use more stages"
    )
    with pytest.raises(PartitionError, match=message):
        auto_split(blocks, 2, 8, memory=2**30)
    assert auto_split(blocks, 2, 8, memory=3 * 2**30).sizes == (2, 2)
    # The last stage holds one microbatch, the first two: with room for it, it takes more.
    assert auto_split(blocks, 2, 8, memory=[1.6 * 2**30, 2**32]).sizes == (1, 3)


# --- torchtitan's counting -----------------------------------------------------------------------------


def test_default_split_counts_as_torchtitan_does():
    assert [default_split(n, 4) for n in (6, 12, 16)] == [(1, 2, 2, 1), (3, 4, 3, 2), (4, 5, 4, 3)]
    assert default_split(3, 2, input_weight=2, output_weight=2) == (2, 1)
    assert default_split(32, 8) == (4, 5, 4, 4, 4, 4, 4, 3)
    assert default_split(7, 1) == (7,)
    assert default_split(2, 4) == (0, 1, 1, 0)
    assert default_split(8, 2, 0, 0) == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0), r"stages=0; give a whole number of at least 1"),
        ((-1, 2), r"layers=-1; give a whole number of at least 0"),
        ((4.0, 2), r"layers=4.0; give a whole number"),
        ((4, 2, -1), r"input_weight=-1; give a whole number of at least 0"),
        (
            (2, 5),
            r"5 stages, but only 4 to divide \(2 layers, input_weight=1 and output_weight=1\).* at most 4",
        ),
        ((5, 4, 3), r"input_weight=3 is more than the 2 that the smallest of 4 stages holds"),
        ((5, 4, 1, 3), r"output_weight=3 is more than the 2 that the smallest of 4 stages holds"),
    ],
)
def test_default_split_refuses_what_torchtitan_refuses(arguments, message):
    with pytest.raises(PartitionError, match=message):
        default_split(*arguments)


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auto_split([LAYER] * 3, 4, 8), r"3 blocks cannot make 4 stages .* at most 3"),
        (lambda: auto_split([], 1, 8), r"0 blocks cannot make 1 stages"),
        (lambda: auto_split([LAYER] * 3, 0, 8), r"stages=0; give a whole number of at least 1"),
        (lambda: auto_split([LAYER] * 3, "2", 8), r"stages='2'; give a whole number"),
        (lambda: auto_split([LAYER] * 3, 2, 0), r"microbatches=0; give a whole number of at least 1"),
        (
            lambda: auto_split([LAYER] * 3, 2, 4, "zigzag"),
            r"schedule='zigzag' is unknown; choose one of 1f1b",
        ),
        (lambda: auto_split([LAYER] * 3, 2, 4, schedule("1f1b", 3, 4)), r"does not fit stages=2"),
        (lambda: auto_split([LAYER] * 3, 2, 4, effort=0), r"effort=0"),
        (lambda: auto_split([LAYER] * 8, 4, 8, "zb_v"), r"does not fit stages=4, microbatches=8"),
        (lambda: split_time([LAYER] * 2, (1, 1), 4, "pipedream"), r"has no flush"),
        (lambda: auto_split([LAYER] * 3, 2, 4, memory=[1.0]), r"memory of 1 ranks is given for 2"),
        (lambda: auto_split([LAYER] * 3, 2, 4, memory=-1.0), r"memory of rank 0 is -1.0 bytes"),
        (lambda: split_time([LAYER] * 3, (3, 0), 4), r"3 blocks into sizes \(3, 0\), which sum to 3"),
        (lambda: split_time([LAYER] * 3, (1, 1), 4), r"which sum to 2"),
        (lambda: BlockCost("b", -1.0, 1.0), r"block b: forward=-1.0"),
        (lambda: BlockCost("b", 1.0, float("nan")), r"block b: backward=nan"),
        (lambda: BlockCost("b", 1.0, 1.0, after=2.0), r"after=2.0 s is part of backward=1.0 s"),
        (lambda: linear_communication(0.0), r"bandwidth=0.0 bytes/s"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_numbers(call, message):
    with pytest.raises(PartitionError, match=message):
        call()


def test_sends_of_impossible_times_are_refused():
    with pytest.raises(PartitionError, match="communication gives a time that is negative"):
        auto_split([replace(LAYER, sent=1.0)] * 3, 2, 4, communication=lambda s, t, b: -1.0)


ORDERS_OF_MANY = [("zb_h1", 3, 1), ("interleaved", 2, 2), ("zb_v", 2, 2), ("dualpipe", 2, 1)]


@pytest.mark.parametrize(("name", "ranks", "chunks"), ORDERS_OF_MANY)
def test_few_splits_of_stages_that_are_not_alone_are_all_tried(name, ranks, chunks):
    order = schedule(name, ranks, 8, None if name == "dualpipe" else chunks)
    for seed in range(20):
        rng = Random(seed)
        blocks, links = random_blocks(rng, 11), random_communication(rng)
        limits = [rng.choice([60.0, 200.0])] * ranks
        problem = StageProblem(blocks, order, links, limits)
        times = [problem.time(sizes) for sizes in splits(11, order.chain) if fits(problem, sizes)]
        if not times:
            with pytest.raises(PartitionError, match="fits in memory"):
                problem.best()
            continue
        found = problem.best()
        assert found.proven and found.gap == 0
        assert found.step_time == problem.time(found.sizes)
        assert found.step_time == pytest.approx(min(times), rel=1e-9), seed
        moved = StageProblem(blocks, order, links).best(effort=5)
        found = StageProblem(blocks, order, links).best()
        assert not moved.proven or moved.step_time == pytest.approx(found.step_time, rel=1e-9)
        assert moved.lower_bound <= found.step_time <= moved.step_time * (1 + 1e-9)


def fits(problem, sizes):
    """Whether what all stages of a rank need is within its limit."""
    order, needed = problem.schedule, np.zeros(problem.schedule.num_ranks)
    for stage, rank in enumerate(order.rank_of):
        needed[rank] += problem.memory(sizes)[stage % order.chain]
    return bool((needed <= problem.limits).all())
