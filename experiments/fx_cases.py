"""Cases of torch.fx's partitioner as JSON: read, run with distsim, written in the same form.

A case has ``nodes`` (name, op, inputs, output_bytes, total_bytes, latencies), ``devices``, ``mode`` and what
came out: ``error``, or ``partitions``, ``node_to_partition``, ``dag``, latencies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from distsim.device_placement import Item, Partition, PartitionDevice, Problem, make_partition, partition

Case = dict[str, Any]

MODES = {
    "size_based": "size_based",
    "sparse_nn": "sparse_nn",
    "cost_aware": "cost_aware",
    "kl_based": "kernighan_lin",
    "kernighan_lin": "kernighan_lin",
    "aot_based": "ahead_of_time",
    "ahead_of_time": "ahead_of_time",
}
ASSIGNMENTS = ("node_to_partition_mapping", "assignment", "node_to_partition")
EMBEDDING = re.compile(r"embed|(^|[._])emb(?![a-z])", re.IGNORECASE)


class CountedByReader(Problem):
    """A problem in which what comes into a part counts once for each op that reads it.

    So torch.fx's partitioner counts: more than a part holds, and only good for reproducing its figures.
    """

    def times(self, readers: int) -> int:
        """How often a part counts an item of another one that so many of its ops read."""
        return readers


def problem_of(case: Case, kind: type[Problem] = Problem) -> Problem:
    """Return the case's graph; a module is an embedding if its ``embedding`` key or its target says so."""
    number: dict[str, int] = {}
    items: list[Item] = []
    outputs: list[int] = []
    for node in case["nodes"]:
        inputs = tuple(dict.fromkeys(number[name] for name in node["inputs"]))
        if node["op"] == "output":
            outputs = list(inputs)
            break
        is_op = node["op"].startswith("call_")
        named = node["op"] == "call_module" and EMBEDDING.search(str(node.get("target", "")))
        latency = float(node.get("mem_latency", 0.0)), float(node.get("compute_latency", 0.0))
        sizes = int(node["output_bytes"]), int(node["total_bytes"])
        embedding = bool(node.get("embedding", named))
        number[node["name"]] = len(items)
        items.append(Item(node["name"], inputs if is_op else (), *sizes, *latency, is_op, embedding))
    return kind(tuple(items), tuple(outputs))


def devices_of(case: Case) -> list[PartitionDevice]:
    """Return the case's devices."""
    return [
        PartitionDevice(d["name"], int(d["available_mem_bytes"]), d["logical_id"]) for d in case["devices"]
    ]


def run(case: Case, problem: Problem) -> Partition:
    """Partition the problem as the case says. Of an ahead-of-time case the outcome is what was given."""
    mode = MODES[case["mode"]]
    assignment = places = None
    if mode == "ahead_of_time":
        given = _first(case, *ASSIGNMENTS)
        if not given:
            raise KeyError(ASSIGNMENTS[0])
        ops = {problem.items[op].name for op in problem.ops}
        assignment = {name: int(part) for name, part in given.items() if name in ops}
        places = _first(case, "partition_to_logical_device_mapping") or {
            part["id"]: part["logical_device_ids"] for part in case.get("partitions", ())
        }
        places = {int(part): ids for part, ids in places.items()} or None
        if places and case.get("saturate_host") and case.get("partitions"):
            places = {part: ids[:1] for part, ids in places.items()}  # the rest are its replicas
    rate = float(case.get("transfer_rate_bytes_per_sec") or 0.0)
    saturate = bool(case.get("saturate_host"))
    return partition(problem, devices_of(case), mode, rate, saturate, assignment, assigned_devices=places)


def _first(case: Case, *keys: str) -> dict[str, Any]:
    return next((case[key] for key in keys if case.get(key)), {})


def recorded_latency(case: Case) -> float:
    """Return the graph latency of the recorded parts where they are; infinite for a recorded error."""
    if case.get("error"):
        return math.inf
    problem, devices = problem_of(case), devices_of(case)
    number = {item.name: k for k, item in enumerate(problem.items)}
    place = {device.id: k for k, device in enumerate(devices)}
    groups = [[number[name] for name in part["nodes"]] for part in case["partitions"]]
    placed = [[place[i] for i in part["logical_device_ids"]] for part in case["partitions"]]
    rate = float(case["transfer_rate_bytes_per_sec"])
    return make_partition(problem, devices, groups, placed, rate).latency


def ids_of(case: Case, count: int) -> list[int]:
    """Return the names of our parts: 0, 1, ..., except that an assignment names its own."""
    if MODES[case["mode"]] != "ahead_of_time":
        return list(range(count))
    given = _first(case, *ASSIGNMENTS)
    ops = {node["name"] for node in case["nodes"] if node["op"].startswith("call_")}
    return sorted({int(part) for name, part in given.items() if name in ops})


def outcome(case: Case, result: Partition) -> Case:
    """Return what came out in the form of a case."""
    items = result.problem.items
    ids = ids_of(case, len(result.parts))
    parts = [
        {
            "id": ids[part.index],
            "nodes": sorted(items[item].name for item in part.items),
            "used_mem_bytes": part.bytes,
            "logical_device_ids": [device.id for device in part.devices],
            "parents": [ids[k] for k in part.parents],
            "children": [ids[k] for k in part.children],
            "bfs_level": part.level,
        }
        for part in result.parts
    ]
    found: Case = {"error": None, "partitions": parts}
    ops_only = MODES[case["mode"]] == "ahead_of_time"
    found["node_to_partition"] = {
        items[item].name: ids[part.index]
        for part in result.parts
        for item in part.items
        if items[item].is_op or not ops_only
    }
    found["dag"], found["module_graph_nodes"] = dag(case, result, ids)
    if "partition_latency" in case:
        found["partition_latency"] = {
            str(ids[k]): list(latency) for k, latency in enumerate(result.latencies)
        }
    if "total_latency" in case:
        found["total_latency"] = result.latency
    return found


def dag(case: Case, result: Partition, ids: Sequence[int]) -> tuple[list[Case], int]:
    """Return the calls of the parts in the order of split_module, and how many nodes that graph has."""
    problem, part_of = result.problem, result.part_of
    reads = {node.part: node.inputs for node in result.dag}
    hands = {node.part: node.outputs for node in result.dag}
    waits = {part: {part_of[i]: None for i in read if part_of[i] >= 0} for part, read in reads.items()}
    readers: dict[int, dict[int, None]] = {part: {} for part in reads}
    for op in problem.ops:
        for read in problem.items[op].inputs:
            if part_of[read] not in (-1, part_of[op]):
                readers[part_of[read]][part_of[op]] = None
    seen = dict.fromkeys(part_of[op] for op in problem.ops)
    ready, order = [part for part in seen if not waits[part]], list[int]()
    while ready:
        order.append(part := ready.pop())
        for reader in readers[part]:
            del waits[reader][part]
            if not waits[reader]:
                ready.append(reader)
    names = {number: item.name for number, item in enumerate(problem.items) if not item.is_op}
    users: dict[str, dict[str, None]] = {}
    picks, calls = 0, list[Case]()
    for part in order:
        call = f"submod_{ids[part]}"
        made = [call]
        inputs = [names[read] for read in reads[part]]
        if len(hands[part]) > 1:
            made = ["getitem" if k == 0 else f"getitem_{k}" for k in range(picks, picks + len(hands[part]))]
            picks += len(made)
        names |= zip(hands[part], made, strict=False)
        for name in inputs:
            users.setdefault(name, {})[call] = None
        where = [device.id for device in result.parts[part].devices]
        sizes = {"logical_device_ids": where, "size_bytes": result.parts[part].bytes}
        calls.append({"node": call, "inputs": inputs, "outputs": made, **sizes})
    for item in problem.outputs:
        users.setdefault(names[item], {})["output"] = None
    for call in calls:
        if call["outputs"] == [call["node"]] and len(users.get(call["node"], ())) > 1:
            call["outputs"] = list(users[call["node"]])
    outside = sum(not item.is_op for item in problem.items)
    return calls, outside + len(calls) + picks + 1
