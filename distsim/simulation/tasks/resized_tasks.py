"""The tasks of a block of other sizes: those of the block that it is like, each as long as its op takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Op
from distsim.resizing import Likeness, likeness_of
from distsim.simulation.tasks.block_matrix import BlockTasks, StageRanks
from distsim.simulation.tasks.lower import UNISSUED, Lowering


def resized_tasks(
    tasks: BlockTasks, function: Function, ranks: StageRanks, cost_model: CostModel, overlap: bool
) -> BlockTasks | None:
    """Return the tasks of a function that differs in sizes alone from that of ``tasks``, on the same ranks.

    None where an op is more than one task a call, as on several rank classes or with launches: which they
    are may depend on its size.
    """
    likeness, lowering = likeness_of(function), Lowering(ranks, cost_model, overlap)
    if likeness is None or lowering.issues or len(ranks.members) > 1:
        return None
    for stream in tasks.stream_table:
        lowering.stream(stream.rank_class, stream.name)
    changed = _changed(likeness, function)
    first = np.zeros(len(tasks.op_table), np.int64)
    first[tasks.op[::-1]] = np.arange(len(tasks))[::-1]
    seconds = tasks.durations[first]
    ops, runs = list(tasks.op_table), dict[int, int]()
    for number, op in enumerate(ops):
        if op in changed:
            owner, ops[number] = changed[op]
            run = _run(lowering, owner, ops[number])
            if run is None:
                return None
            runs[number] = run
    ways, begins, streams = list(lowering.runs), tasks.stream_start.tolist(), tasks.streams.tolist()
    for number, run in runs.items():
        seconds[number], own = ways[run]
        task = int(first[number])
        if own != tuple(streams[begins[task] : begins[task + 1]]):
            return None
    calls = [None if op is None or op not in changed else changed[op][1] for op in tasks.call_op]
    call_op = tuple([own or op for own, op in zip(calls, tasks.call_op, strict=True)])
    found = replace(
        tasks, durations=seconds[tasks.op], op_table=tuple(ops), call_op=call_op, _summaries={}, _products={}
    )
    found.__dict__["order"] = tasks.order  # of what they take it knows nothing
    return found


def _changed(likeness: Likeness, function: Function) -> dict[Op, tuple[Function, Op]]:
    """Return the ops of a function and its callees that are others, each with what it is, and where."""
    found = {op: (function, own) for op, own in likeness.ops.items()}
    for callee in {own.callee for own in likeness.ops.values() if own.is_call}:
        inner = likeness_of(callee)
        if inner is not None:
            found |= _changed(inner, callee)
    return found


def _run(lowering: Lowering, function: Function, op: Op) -> int | None:
    """Return the run of the one task of an op; None if it has not one."""
    kind = lowering.kind(function, op)
    if kind is None:
        exchanges = lowering.exchanges(op)
        return None if len(exchanges) != 1 or exchanges[0].issues or exchanges[0].slows else exchanges[0].run
    return None if len(kind) != 1 or kind[0][2] != UNISSUED else kind[0][1]
