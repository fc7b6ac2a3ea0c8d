"""A split of a function's ops is a Partition of it, and cut into Calls it computes the same."""

import numpy as np

from distsim.device_placement import PartitionDevice, partition, problem_of
from distsim.executor import CostModel, SequentialExecutor
from distsim.hardware import load_cluster
from distsim.models import gpt
from distsim.stage_balance import BlockCost, auto_split


def test_a_split_of_ops_is_a_partition_of_the_function():
    function = gpt(layers=5, hidden=16, heads=2, seq=8, batch=2, vocab=11)
    problem = problem_of(function, CostModel(load_cluster("dgx-a100")))
    items = [problem.items[op] for op in problem.ops]
    split = auto_split([BlockCost(item.name, item.latency, 2 * item.latency) for item in items], 3, 4)
    devices = [PartitionDevice(f"gpu{i}", 10**9, i) for i in range(3)]
    found = partition(
        problem,
        devices,
        "ahead_of_time",
        assignment=split.assignment,
        assigned_devices={i: [i] for i in range(3)},
    )
    assert [len(part.ops) for part in found.parts] == list(split.sizes)
    assert [part.devices[0].id for part in found.parts] == [0, 1, 2]
    rng = np.random.default_rng(0)
    inputs = [
        rng.integers(0, 11, v.type.shape).astype(v.type.dtype.np)
        if not v.type.dtype.is_floating
        else rng.standard_normal(v.type.shape).astype(v.type.dtype.np)
        for v in function.inputs
    ]
    cut = found.cut()
    assert [op.op_type for op in cut.ops] == ["Call"] * 3
    for mine, whole in zip(
        SequentialExecutor().compute(cut, inputs), SequentialExecutor().compute(function, inputs), strict=True
    ):
        np.testing.assert_array_equal(mine, whole)
