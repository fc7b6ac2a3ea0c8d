"""Problems, partitions and their rules: closed forms, errors with numbers, cutting into Calls, editing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from partition_problems import longest_by_ways, outside, random_devices, random_function, random_problem

from distsim import errors
from distsim.device_placement import (
    MODES,
    Item,
    PartitionDevice,
    Problem,
    add_op,
    make_partition,
    move_op,
    partition,
    problem_of,
    remove_op,
)
from distsim.executor import CostModel, SequentialExecutor
from distsim.ir import Topology
from distsim.models import gpt, mlp
from distsim.ops import signature_of
from distsim.transforms import inline

CHAIN = Problem(
    (
        outside("x", 8),
        Item("a", (0,), 16, 96, 3.0, 5.0),
        Item("b", (1,), 16, 16, 2.0, 1.0),
        Item("c", (1, 2, 0), 4, 4, 7.0, 0.0),
    ),
    (3,),
)
DEVICES = (PartitionDevice("d0", 200, 0), PartitionDevice("d1", 100, 1))


def device(memory, number=0):
    return PartitionDevice(f"d{number}", memory, number)


def cost_model():
    topology = Topology()
    topology.add_device("gpu")
    return CostModel(topology)


def test_bytes_and_latency_in_closed_form():
    found = make_partition(CHAIN, DEVICES, [[1], [2, 3]], [[0], [1]], transfer_rate=4.0)
    first, second = found.parts
    # a and its input; b, c and x, and a's 16 bytes once although both read them.
    assert (first.bytes, second.bytes) == (96 + 8, 16 + 4 + 8 + 16)
    assert (first.children, second.parents, second.level) == ((1,), (0,), 1)
    assert found.latencies[0] == (3.0, 5.0, 5.0)
    assert found.latencies[1] == (9.0, 1.0, 9.0)
    assert [(node.part, node.inputs, node.outputs) for node in found.dag] == [
        (0, (0,), (1,)),
        (1, (1, 0), (3,)),
    ]
    assert found.latency == 5 + (16 + 8) / 4 + 9  # x counts with a on the edge, as in torch.fx
    assert make_partition(CHAIN, DEVICES, [[1], [2, 3]], [[0], [0]], 4.0).latency == 14.0


def test_the_longest_way_is_found_in_linear_time():
    # 3,000 residual blocks: 2^3000 ways, the longest through every op.
    items = [outside("x", 4)]
    for number in range(6000):
        inputs = (number,) if number % 2 == 0 else (number, number - 1)
        items.append(Item(f"op{number}", inputs, 4, 4, 1.0, 0.5))
    problem = Problem(tuple(items))
    halves = [list(problem.ops[:3000]), list(problem.ops[3000:])]
    found = make_partition(problem, [device(10**6), device(10**6, 1)], halves, [[0], [1]], 4.0)
    assert found.latencies[0] == (3000.0, 1500.0, 3000.0)
    assert found.latency == 6000.0 + 4 / 4.0  # op 2999 is read over the edge, 4 bytes, by two


def test_latency_equals_following_every_way():
    compared = 0
    for seed in range(200):
        problem = random_problem(seed, most_ops=9)
        try:
            found = partition(problem, random_devices(seed, problem), "cost_aware", 7.0)
        except errors.PartitionError:
            continue
        compared += 1
        assert found.latency == pytest.approx(longest_by_ways(found), rel=1e-12)
    assert compared > 80


@pytest.mark.parametrize(
    ("groups", "placed", "error", "text"),
    [
        ([[1], [2]], [[0], [1]], errors.PartitionError, "c is in 0 parts"),
        ([[1, 2], [2, 3]], [[0], [1]], errors.PartitionError, "b is in 2 parts"),
        ([[1, 2, 3], []], [[0], [1]], errors.PartitionError, "part 1 is empty"),
        ([[1, 2], [3]], [[0], []], errors.PartitionError, "part 1 is on devices"),
        ([[1, 2], [3]], [[0], [1, 1]], errors.PartitionError, "each once"),
        ([[1, 3], [2]], [[0], [1]], errors.CyclicPartitionError, r"parts \[0, 1\] wait"),
        ([[1], [2, 3]], [[1], [0]], errors.NotEnoughMemoryError, "104 bytes on d1, which has 100: 4 too"),
    ],
)
def test_a_broken_rule_is_said_with_its_numbers(groups, placed, error, text):
    with pytest.raises(error, match=text):
        make_partition(CHAIN, DEVICES, groups, placed)


def test_items_and_devices_are_checked():
    with pytest.raises(errors.PartitionError, match="earlier one"):
        Problem((Item("a", (0,), 1, 1),))
    with pytest.raises(errors.PartitionError, match="finite"):
        Problem((Item("a", (), 1, 1, float("nan")),))
    with pytest.raises(errors.PartitionError, match="comes from outside"):
        Problem((outside("x", 1), dataclasses.replace(outside("y", 1), inputs=(0,))))
    with pytest.raises(errors.PartitionError, match="-1 bytes"):
        partition(CHAIN, [device(-1)])
    with pytest.raises(errors.PartitionError, match="given twice"):
        partition(CHAIN, [device(60), device(60)])


def test_an_op_removed_and_added_again():
    part = make_partition(CHAIN, DEVICES, [[1], [2, 3]], [[0], [1]]).parts[1]
    smaller = remove_op(CHAIN, part, 3)
    assert (smaller.ops, smaller.items, smaller.bytes) == ((2,), (2,), 16 + 16)
    assert add_op(CHAIN, smaller, 3) == part
    with pytest.raises(errors.PartitionError, match="not in part 1"):
        remove_op(CHAIN, part, 1)
    with pytest.raises(errors.PartitionError, match="cannot be added"):
        add_op(CHAIN, part, 2)


def test_moving_an_op_keeps_the_rules():
    found = make_partition(CHAIN, DEVICES, [[1], [2, 3]], [[0], [1]])
    assert [part.ops for part in move_op(found, 2, 0).parts] == [(1, 2), (3,)]
    assert [
        part.ops
        for part in move_op(make_partition(CHAIN, [device(200)], [[1], [2, 3]], [[0], [0]]), 1, 1).parts
    ] == [(1, 2, 3)]
    with pytest.raises(errors.NotEnoughMemoryError):
        move_op(found, 1, 1)
    with pytest.raises(errors.PartitionError, match="cannot move"):
        move_op(found, 1, 5)


def test_a_function_becomes_a_problem():
    function = inline(gpt(layers=1, hidden=8, heads=2, seq=4, batch=2, vocab=16))
    problem = problem_of(function, model := cost_model())
    assert len(problem.ops) == len(function.ops)
    total = sum(
        value.type.nbytes for value in (*function.inputs, *(v for op in function.ops for v in op.outputs))
    )
    assert problem.total_bytes == total  # nothing is lost, nothing twice
    assert [problem.items[op].name for op in problem.ops if problem.items[op].embedding] == ["embedded"]
    gpu = model.topology.devices[0]
    for op, number in zip(function.ops, problem.ops, strict=True):
        assert problem.items[number].latency == model.seconds(signature_of(op), (gpu,))
    calls = problem_of(gpt(layers=3, hidden=8, heads=2, seq=4, batch=2, vocab=16), cost_model())
    layers = [calls.items[op].latency for op in calls.ops if calls.items[op].name.startswith("x")][1:]
    assert layers[0] == pytest.approx(sum(problem.items[op].latency for op in problem.ops[4:-3]))


def arrays_of(function, seed=0):
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, 4, value.type.shape)
        if value.type.dtype.name.startswith("int")
        else generator.normal(size=value.type.shape).astype(np.float32)
        for value in function.inputs
    ]


def assert_cut_is_equal(function, found, seed=0):
    whole, executor = found.cut(), SequentialExecutor()
    assert [op.op_type for op in whole.ops] == ["Call"] * len(found.parts)
    assert [op.name for op in whole.ops] == [f"part_{k}" for k in found.order]
    arrays = arrays_of(function, seed)
    for mine, theirs in zip(
        executor.compute(whole, list(arrays)), executor.compute(function, arrays), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_function_computes_the_same(mode):
    model, parts = cost_model(), 0
    for seed in range(12):
        function = random_function(seed)
        problem = problem_of(function, model)
        thirds = 3 if mode == "single" else 2
        devices = [device(problem.total_bytes * thirds // 3, i) for i in range(4)]
        given = None
        if mode == "ahead_of_time":
            given = [k * 3 // len(problem.ops) for k in range(len(problem.ops))]
        try:
            found = partition(problem, devices, mode, 1e9, assignment=given, time_limit=0.2)
        except errors.PartitionError:
            continue
        parts += len(found.parts)
        assert_cut_is_equal(function, found, seed)
    assert parts == 12 if mode == "single" else parts > 20


@pytest.mark.parametrize(
    "function",
    [mlp(layers=6, width=16, batch=4), inline(gpt(layers=2, hidden=16, heads=2, seq=4, batch=2, vocab=32))],
    ids=["mlp", "gpt"],
)
def test_models_are_cut_and_compute_the_same(function):
    model = cost_model()
    total = problem_of(function, model).total_bytes
    for mode in ("size_based", "cost_aware", "kernighan_lin"):
        found = partition(
            function, [device(total * 2 // 3, i) for i in range(4)], mode, 1e9, cost_model=model
        )
        assert len(found.parts) > 1
        assert_cut_is_equal(function, found)


def test_only_a_problem_of_a_function_is_cut():
    with pytest.raises(errors.PartitionError, match="not made from a function"):
        make_partition(CHAIN, DEVICES, [[1], [2, 3]], [[0], [1]]).cut()
