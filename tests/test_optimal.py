"""The optimal mode: closed forms, brute force, layers of ops, little memory, what it says of itself."""

import time

import numpy as np
import pytest
from optimal_models import layered_problem, make_devices, make_problem, random_problem, shortest
from partition_problems import random_devices as mixed_devices
from partition_problems import random_problem as mixed_problem

from distsim.device_placement import Item, Problem, partition
from distsim.device_placement.optimal import compile_search, optimal_partition, search
from distsim.device_placement.optimal.heuristics import anneal
from distsim.device_placement.optimal.jobs import make_jobs
from distsim.device_placement.optimal.states import Clock, no_limit
from distsim.device_placement.optimal.timetable import order_by_time, replay, timetable
from distsim.errors import (
    NoDevicesError,
    NoMappingError,
    NoOpsError,
    NotEnoughMemoryError,
    OpTooLargeError,
    PartitionError,
)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """So that on a new installation the limits of the tests are time to search."""
    compile_search()


def test_equal_ops_without_edges_share_the_devices():
    found = optimal_partition(make_problem([2.0] * 12, [1] * 12, []), make_devices(4), 1.0)
    assert (found.makespan, found.lower_bound, found.proven) == (6.0, 6.0, True)


def test_a_chain_stays_on_one_device():
    chain = make_problem([3.0] * 9, [5] * 9, [(i, i + 1) for i in range(8)])
    found = optimal_partition(chain, make_devices(3), 1.0)
    assert (found.makespan, len(found.parts), found.gap) == (27.0, 1, 0.0)


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 9])
def test_a_fork_moves_while_the_delay_is_less_than_the_work(delay):
    fork = make_problem([1.0, 3.0, 3.0], [delay, 0, 0], [(0, 1), (0, 2)])
    found = optimal_partition(fork, make_devices(2), 1.0)
    assert found.makespan == min(7.0, 1.0 + delay + 3.0)
    assert found.proven


@pytest.mark.parametrize("seed", range(60))
def test_brute_force_finds_none_shorter(seed):
    problem, devices = random_problem(seed, whole=seed % 2 == 0), make_devices(3)
    found = optimal_partition(problem, devices, 1.0, tolerance=0.0, time_limit=60)
    assert found.makespan == pytest.approx(shortest(problem, devices), rel=1e-12)
    assert found.proven
    assert found.gap == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(25))
def test_brute_force_finds_none_shorter_in_little_memory(seed):
    plain = random_problem(seed, count=5, density=0.5)
    x = Item("x", (), 3, 3, is_op=False)
    items = (
        x,
        *(
            Item(
                i.name,
                (0, *[u + 1 for u in i.inputs]) if n % 2 else tuple(u + 1 for u in i.inputs),
                i.output_bytes,
                i.total_bytes,
                i.memory,
                i.compute,
            )
            for n, i in enumerate(plain.items)
        ),
    )
    problem = Problem(items)
    share = problem.total_bytes // 2
    devices = make_devices(1, share) + make_devices(3, share + 4)[1:]
    expected = shortest(problem, devices)
    if expected == float("inf"):
        with pytest.raises((NoMappingError, OpTooLargeError, NotEnoughMemoryError), match="bytes"):
            optimal_partition(problem, devices, 1.0, time_limit=60)
        return
    found = optimal_partition(problem, devices, 1.0, tolerance=0.0, time_limit=60)
    assert found.makespan == pytest.approx(expected, rel=1e-12)
    assert found.proven
    assert all(found.bytes_on(device) <= device.memory for device in devices)


@pytest.mark.parametrize(("layers", "width", "delay"), [(20, 4, 0.1), (10, 8, 0.5), (16, 5, 0.1)])
def test_eighty_ops_in_layers_are_proven(layers, width, delay):
    problem = layered_problem(3, layers, width, delay)
    found = optimal_partition(problem, make_devices(4), 1.0, time_limit=120)
    assert found.proven
    assert found.makespan == found.lower_bound
    assert timetable(found).makespan == found.makespan


def test_without_time_the_gap_is_stated():
    problem = layered_problem(0, 20, 4, 1.0, whole=False)
    found = optimal_partition(problem, make_devices(4), 1.0, time_limit=0.0)
    assert not found.proven
    assert 0 < found.gap < 0.5
    assert found.lower_bound < found.makespan <= sum(item.latency for item in problem.items)


def test_the_time_that_compiling_takes_counts(monkeypatch):
    looks = []

    def beam(jobs, *arguments):
        looks.append(len(jobs.seconds))
        time.sleep(0.3)  # as if it were compiled first
        return search.Found(None, None, 0.0)

    monkeypatch.setattr(search, "beam", beam)
    search.compile_search.cache_clear()
    problem = layered_problem(0, 20, 4, 1.0, whole=False)
    found = optimal_partition(problem, make_devices(4), 1.0, time_limit=0.1)
    assert looks == [80, 80], "one look each way, and none after it"
    assert not found.proven and found.gap < 0.5
    assert timetable(found).makespan == found.makespan


def test_moves_end_with_the_time():
    jobs = make_jobs([3.0, 2.0, 2.0], [(0, 1, 1.0), (0, 2, 1.0)])
    end, machine = np.array([3.0, 5.0, 7.0]), np.zeros(3, np.int64)
    over = Clock(0.0, 0.0, 0.0)
    ends, where = anneal(jobs, 2, end, machine, 0.0, 10**9, 0, over)
    assert (ends.tolist(), where.tolist()) == ([3.0, 5.0, 7.0], [0, 0, 0])


def test_many_ops_get_a_list_schedule_and_a_bound():
    problem = layered_problem(0, 625, 4, 0.1, whole=False)
    found = optimal_partition(problem, make_devices(4), 1.0)
    assert 0 <= found.gap < 0.4
    assert timetable(found).makespan == found.makespan


def test_a_placing_that_only_cost_aware_finds_is_taken():
    problem = mixed_problem(7027, most_ops=30)
    devices = mixed_devices(7027, problem)
    with pytest.raises(NoMappingError):
        partition(problem, devices, "size_based")
    least = timetable(partition(problem, devices, "cost_aware", 3.0)).makespan
    found = optimal_partition(problem, devices, 3.0, time_limit=0.0)
    assert found.makespan <= least * (1 + 1e-12)
    assert all(found.bytes_on(device) <= device.memory for device in devices)


@pytest.mark.parametrize("seed", [0, 1])
def test_moves_shorten_a_schedule_and_keep_its_rules(seed):
    problem = layered_problem(seed, 10, 8, 1.5, whole=False)
    begun = search.Search(
        make_jobs(
            [item.latency for item in problem.items],
            [
                (u, v, float(problem.items[u].output_bytes))
                for v, i in enumerate(problem.items)
                for u in i.inputs
            ],
        ),
        4,
        no_limit(80, 4),
        Clock(float("inf"), 0.0, 0.0),
    )
    begin = (begun.forward, 4, begun.end, begun.machine, 0.0, 100_000, seed, begun.clock)
    end, machine = anneal(*begin)
    assert begun.lower <= end.max() < 0.95 * begun.upper
    again, same = anneal(*begin)
    assert (again.tolist(), same.tolist()) == (end.tolist(), machine.tolist())
    transfers = [float(item.output_bytes) for item in problem.items]
    ends = replay(problem, machine.tolist(), order_by_time(problem, end.tolist()), transfers)
    assert max(ends) == pytest.approx(end.max(), rel=1e-12)


def test_it_is_a_mode_of_partition():
    problem = random_problem(1)
    found = partition(problem, make_devices(6), "optimal", 1.0, saturate_host=True)
    used = {part.devices[0] for part in found.parts}
    assert found.mode == "optimal"
    assert all(len(part.devices) == 6 // len(used) for part in found.parts)


def test_progress_tells_the_bounds():
    told = []
    problem = layered_problem(0, 20, 4, 0.5)
    optimal_partition(problem, make_devices(4), 1.0, 1.0, progress=lambda low, high: told.append((low, high)))
    assert all(low <= high for low, high in told)
    assert told == [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(told, [told[0], *told], strict=False)]


def test_what_cannot_be_is_refused_with_the_numbers():
    problem = make_problem([1.0, 1.0], [4, 4], [(0, 1)])
    with pytest.raises(PartitionError, match=r"transfer_rate=0.0: op0 hands on 4 bytes"):
        optimal_partition(problem, make_devices(2))
    with pytest.raises(PartitionError, match=r"tolerance=-1"):
        optimal_partition(problem, make_devices(2), 1.0, tolerance=-1)
    with pytest.raises(OpTooLargeError, match=r"op0 needs 4 bytes with what it reads; .* has 3: 1 too few"):
        optimal_partition(problem, make_devices(4, 3), 1.0)
    with pytest.raises(NoDevicesError, match="2 ops"):
        optimal_partition(problem, [])
    with pytest.raises(NoOpsError, match="0 ops among 0 items"):
        optimal_partition(Problem(()), make_devices(1))
    three = make_problem([1.0] * 3, [8] * 3, [])
    with pytest.raises(NotEnoughMemoryError, match=r"needs 24 bytes, 2 devices have 22: 2 more"):
        optimal_partition(three, make_devices(2, 11), 1.0)
    with pytest.raises(NoMappingError, match=r"3 ops of 24 bytes on devices of 15, 15 bytes fits"):
        optimal_partition(three, make_devices(2, 15), 1.0)
