"""What differs between a recorded result and ours, and what is wrong with a record."""

from __future__ import annotations

import math
from typing import Any

from fx_cases import Case, devices_of, problem_of

from distsim import errors
from distsim.device_placement import Partition, Problem, add_op, remove_op

KINDS = {
    "No devices": errors.NoDevicesError,
    "no operations in the module": errors.NoOpsError,
    "enough memory for the module": errors.NotEnoughMemoryError,
    "too large to fit": errors.OpTooLargeError,
    "Cannot Get a Valid Partition": errors.NoMappingError,
    "can not fit into one device": errors.NoMappingError,
    "must have same memory size": errors.UnequalMemoriesError,
    "devices, but only": errors.TooFewDevicesError,
    "cycle exists between partitions": errors.CyclicPartitionError,
}


def error_kind(text: str) -> type[errors.PartitionError] | None:
    """Return our error for a recorded one; None for one that is no judgement but a crash."""
    return next((kind for part, kind in KINDS.items() if part in text), None)


def crash(case: Case) -> str | None:
    """Return what happened if the original broke off with an error that says nothing about the input."""
    text = case.get("error")
    if text and error_kind(text) is None:
        return f"it breaks off with {text!r}"
    return None


def differences(case: Case, found: Case, ours: Partition) -> list[str]:
    """Return a line for every figure that is not as recorded."""
    lines: list[str] = []
    old = {part["id"]: part for part in case["partitions"]}
    new = {part["id"]: part for part in found["partitions"]}
    if list(old) != list(new) and sorted(old) != sorted(new):
        return [f"parts {sorted(old)}, but ours are {sorted(new)}"]
    related = any(part["parents"] for part in old.values())
    levels = any(part["bfs_level"] >= 0 for part in old.values())
    for number, part in old.items():
        keys = ["nodes", "used_mem_bytes", "logical_device_ids"]
        keys += ["parents", "children"] if related else []
        keys += ["bfs_level"] if levels else []
        for key in keys:
            if part[key] != new[number][key]:
                lines.append(f"part {number} has {key} {part[key]}, ours {new[number][key]}")
    for key in ("node_to_partition", "dag", "module_graph_nodes"):
        if key in case and case[key] != found[key]:
            lines.append(f"{key} is {case[key]}, ours {found[key]}")
    if "partition_latency" in case:
        sums = critical_sums(ours)
        for k, (name, values) in enumerate(found["partition_latency"].items()):
            memory, compute, overall = case["partition_latency"][name]
            # The record holds the sums along any one of the longest paths.
            known = len(sums[k]) >= MOST_SUMS or (memory, compute) in sums[k]
            if not math.isclose(overall, values[2], rel_tol=1e-12) or not known:
                lines.append(f"part {name} takes {case['partition_latency'][name]}, ours {values}")
    total = case.get("total_latency")
    if total is not None and not math.isclose(total, found["total_latency"], rel_tol=1e-12):
        lines.append(f"the latency is {total}, ours {found['total_latency']}")
    return lines


def critical_sums(ours: Partition) -> list[set[tuple[float, float]]]:
    """Return for each part the (memory, compute) sums along all its longest paths."""
    items, part_of = ours.problem.items, ours.part_of
    best: dict[int, tuple[float, set[tuple[float, float]]]] = {}
    found: list[tuple[float, set[tuple[float, float]]]] = [(0.0, {(0.0, 0.0)}) for _ in ours.parts]
    for op in ours.problem.ops:
        before: tuple[float, set[tuple[float, float]]] = (0.0, {(0.0, 0.0)})
        for read in items[op].inputs:
            if part_of[read] == part_of[op]:
                before = _longer(before, best[read])
        item = items[op]
        sums = {(memory + item.memory, compute + item.compute) for memory, compute in before[1]}
        best[op] = before[0] + item.latency, sums
        found[part_of[op]] = _longer(found[part_of[op]], best[op])
    return [sums for _, sums in found]


MOST_SUMS = 2000
"""Of more longest paths than this in a part, any sums are taken for right."""


def _longer(
    first: tuple[float, set[tuple[float, float]]], second: tuple[float, set[tuple[float, float]]]
) -> tuple[float, set[tuple[float, float]]]:
    if first[0] == second[0]:
        return first[0], set(sorted(first[1] | second[1])[:MOST_SUMS])
    return max(first, second, key=lambda pair: pair[0])


def removal(case: Case, ours: Partition) -> list[str]:
    """Check the bytes of a part before and after an op leaves or joins it (``remove_NAME``, ``add_NAME``)."""
    lines: list[str] = []
    number = {item.name: k for k, item in enumerate(ours.problem.items) if item.is_op}
    for key, recorded in case.items():
        action, _, name = key.partition("_")
        if action in ("remove", "add") and name in number:
            part = ours.parts[ours.part_of[number[name]]]
            without = remove_op(ours.problem, part, number[name])
            again = add_op(ours.problem, without, number[name])
            steps = (part, without) if action == "remove" else (without, again)
            figures = {"before": steps[0].bytes, "after": steps[1].bytes}
            if figures != recorded:
                lines.append(f"{key} gives {recorded}, ours {figures}")
    return lines


def defects(case: Case) -> list[str]:
    """Return what is wrong with a recorded result, by the rules of partitions."""
    if case.get("error"):
        return []
    problem = problem_of(case)
    number = {item.name: k for k, item in enumerate(problem.items)}
    held = {part["id"]: [number[name] for name in part["nodes"]] for part in case["partitions"]}
    return [
        *_placement_defects(case, problem, held),
        *_member_defects(case, problem, held),
        *_memory_defects(case, problem, held),
        *_order_defects(case, problem, held),
    ]


def _placement_defects(case: Case, problem: Problem, held: dict[int, list[int]]) -> list[str]:
    lines: list[str] = []
    for part in case["partitions"]:
        name, ids = part["id"], part["logical_device_ids"]
        if not ids:
            lines.append(f"its part {name} has no device")
        if len(set(ids)) != len(ids):
            lines.append(f"its part {name} is on devices {ids}, one of them twice")
        if not any(problem.items[item].is_op for item in held[name]):
            lines.append(f"its part {name} is empty")
    said = {part["id"]: (part["logical_device_ids"], part["used_mem_bytes"]) for part in case["partitions"]}
    for call in case.get("dag", ()):
        part = int(call["node"].rsplit("_", 1)[-1])
        here = call["logical_device_ids"], call["size_bytes"]
        if part in said and here != said[part]:
            lines.append(
                f"its dag has part {part} on devices {here[0]} with {here[1]} bytes, not {said[part]}"
            )
    return lines


def _member_defects(case: Case, problem: Problem, held: dict[int, list[int]]) -> list[str]:
    lines: list[str] = []
    homes: dict[int, list[int]] = {op: [] for op in problem.ops}
    for part, items in held.items():
        for item in items:
            if item in homes:
                homes[item].append(part)
    said = case.get("node_to_partition", {})
    for op, parts in homes.items():
        name = problem.items[op].name
        if len(parts) != 1:
            lines.append(f"its {name} is in parts {parts}")
        elif name in said and said[name] != parts[0]:
            lines.append(f"it moves {name} to part {parts[0]} and then cuts with it in part {said[name]}")
    return lines


def _memory_defects(case: Case, problem: Problem, held: dict[int, list[int]]) -> list[str]:
    lines: list[str] = []
    on: dict[Any, set[int]] = {}
    for part in case["partitions"]:
        for device in part["logical_device_ids"]:
            on.setdefault(device, set()).update(held[part["id"]])
    for device in devices_of(case):
        need = problem.bytes_of(on.get(device.id, set()))
        if need > device.memory:
            lines.append(f"it puts {need} bytes on {device.name}, which has {device.memory}")
    return lines


def _order_defects(case: Case, problem: Problem, held: dict[int, list[int]]) -> list[str]:
    if len(held) < 2 or any(part["parents"] for part in case["partitions"]):
        return []
    home = {item: part for part, items in held.items() for item in items if problem.items[item].is_op}
    cross = any(home.get(i, home[op]) != home[op] for op in home for i in problem.items[op].inputs)
    wrong = cross and "total_latency" in case
    return ["it leaves given parts unconnected, so that its latency is the slowest part's"] if wrong else []


def explained(case: Case) -> bool:
    """Whether counting per reader and counting once can differ: some op output has several readers."""
    problem = problem_of(case)
    return any(len(problem.readers[op]) > 1 for op in problem.ops)
