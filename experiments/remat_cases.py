"""Saved and recomputed values of joint graphs beside those that PyTorch and AutoParallel chose.

``python experiments/remat_cases.py DIR`` reads every ``*.json`` under DIR, in the formats of the measured
cases ``remat/`` (one partitioner a file: min-cut with a memory budget, or default) and ``replay/`` (replay,
min-cut and default), and prints a line per file and partitioner: match, difference, or corrected where the
original has a defect that ours must not have, with the reason. Status 1: one differs or cannot be read.

The cases name an op's tensors but not its other arguments; a list of their text under ``args`` is read too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from joint_cases import Case, Expected, read_case
from merge_equal import merge_equal

from distsim.errors import DistsimError
from distsim.transforms.recompute.saves import (
    JointGraph,
    NodeRole,
    Saves,
    Tag,
    Trait,
    save_for_backward,
    save_replayed,
    save_within_budget,
)

RNG = re.compile(r"run_(with|and_save)_rng_state(_\d+)?")
KINDS = ("match", "corrected", "difference", "unreadable")


@dataclass(frozen=True)
class Verdict:
    """How one partitioner's answer compares with what was recorded: match, corrected or difference."""

    case: str
    partitioner: str
    kind: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.case} [{self.partitioner}]" + (
            f": {self.reason}" if self.reason else ""
        )


def main() -> int:
    """Run the folder given and print a line for each partitioner of each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of cases, searched with its subfolders")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        print(f"{folder} is no folder", file=sys.stderr)
        return 2
    verdicts = list(run_folder(folder))
    for verdict in verdicts:
        print(verdict)
    counts = {kind: sum(verdict.kind == kind for verdict in verdicts) for kind in KINDS}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 0 if verdicts and not counts["difference"] + counts["unreadable"] else 1


def run_folder(folder: Path) -> Iterator[Verdict]:
    """Compare every case under a folder."""
    for path in sorted(folder.rglob("*.json")):
        try:
            case = read_case(path)
        except (DistsimError, OSError, ValueError, ArithmeticError, RecursionError) as error:
            yield Verdict(str(path.relative_to(folder)), "-", "unreadable", str(error).splitlines()[0])
            continue
        for partitioner, expected in case.expected.items():
            yield compare(case, partitioner, expected)


def compare(case: Case, partitioner: str, expected: Expected) -> Verdict:
    """Run one partitioner on a case and judge its answer."""
    case = replace(case, graph=told_apart(case.graph, expected))
    try:
        saves = partition(case, partitioner)
    except DistsimError as error:
        kind = "match" if expected.get("error") else "difference"
        return Verdict(case.name, partitioner, kind, str(error))
    wrong = differences(saves, expected)
    if not wrong:
        return Verdict(case.name, partitioner, "match")
    reason = defect(case, partitioner, expected)
    if reason:
        return Verdict(case.name, partitioner, "corrected", f"{reason}; {wrong}")
    return Verdict(case.name, partitioner, "difference", wrong)


def told_apart(graph: JointGraph, expected: Expected) -> JointGraph:
    """Return the graph in which no value is equal to an earlier one that the record names beside it.

    A merged value loses its name, so their other arguments, which cases do not tell, are not the same: the
    sums of a square matrix along its rows and along its columns.
    """
    named = {name for key in ("saved", "recomputed_in_bw", "bw_ops") for name in expected.get(key, ())}
    nodes = list(graph.nodes)
    while True:
        later = [i for members in merge_equal(graph).members for i in members[1:] if nodes[i].name in named]
        if not later:
            return graph
        for i in later:
            nodes[i] = replace(nodes[i], key=(nodes[i].key, nodes[i].name))
        graph = replace(graph, nodes=tuple(nodes))


def partition(case: Case, partitioner: str, merge: Callable[[JointGraph], JointGraph] | None = None) -> Saves:
    """Run a partitioner as the original does: the cut and the replay merge equal values first."""
    if partitioner == "default":
        return save_for_backward(case.graph)
    graph = (merge or merged)(case.graph)
    return save_replayed(graph) if partitioner == "replay" else save_within_budget(graph, case.budget)


def merged(graph: JointGraph) -> JointGraph:
    """Return the graph with equal values merged, all their tags kept."""
    return merge_equal(graph).graph


def merged_by_first(graph: JointGraph) -> JointGraph:
    """Return the graph with equal values merged as the original does: the later ones' tags are lost."""
    result = merge_equal(graph)
    firsts = [graph.nodes[members[0]] for members in result.members]
    nodes = [
        replace(node, tag=first.tag, replay=first.replay, region=first.region)
        for node, first in zip(result.graph.nodes, firsts, strict=True)
    ]
    return replace(result.graph, nodes=tuple(nodes))


def differences(saves: Saves, expected: Expected) -> str:
    """Return what differs from the record, "" for nothing.

    For a random op that is tagged for recomputation the original saves the state of its generator as well and
    calls the op and its items by other names; these are passed over.
    """
    nodes = saves.graph.nodes
    name = [node.name for node in nodes]
    random = {node.name for node in nodes if node.wants_recompute and node.has(Trait.RANDOM | Trait.KEPT)}
    renamed = random | {node.name for node in nodes if random and node.item is not None}
    ours: dict[str, list[str]] = {
        "saved": list(saves.names),
        "recomputed_in_bw": [name[each] for each in saves.recomputed],
        "bw_ops": [name[each] for each in saves.backward],
        "fw_out": [*("None" if i is None else name[i] for i in saves.graph.forward_outputs), *saves.names],
    }
    found: list[str] = []
    for key in [key for key in ours if key in expected]:
        mine, theirs = ours[key], expected[key]
        if key in ("saved", "fw_out"):
            states = len(theirs) - len(mine)
            theirs = theirs[:-states] if 0 < states <= len(random) else theirs
        else:
            mine = [each for each in mine if each not in renamed]
            theirs = [each for each in theirs if each not in renamed and not RNG.fullmatch(each)]
        # The order of recomputed ops follows from that of bw_ops, where it is recorded.
        if sorted(mine) != sorted(theirs) or (key != "recomputed_in_bw" and mine != theirs):
            found.append(f"{key} {mine}, recorded {theirs}")
    return "; ".join(found)


def defect(case: Case, partitioner: str, expected: Expected) -> str:
    """Return which known defect of the original explains its record, "" for none."""
    if partitioner == "default":
        return ""
    if not differences(partition(case, partitioner, merged_by_first), expected):
        lost = [
            f"{case.graph.nodes[i].name} (merged into {case.graph.nodes[members[0]].name})"
            for members in merge_equal(case.graph).members
            for i in members[1:]
            if (case.graph.nodes[i].tag, case.graph.nodes[i].replay) != (None, None)
        ]
        return f"the original loses the tag of {', '.join(lost)}"
    if partitioner == "min_cut":
        return budget_defect(case, expected)
    return ""


def budget_defect(case: Case, expected: Expected) -> str:
    """Return how the original's answer breaks its memory budget or its tags, "" if it does not."""
    graph = merged(case.graph)
    recomputed = [graph.positions.get(each) for each in expected.get("recomputed_in_bw", ())]
    nodes = [graph.nodes[each] for each in recomputed if each is not None]
    drawn = [node.name for node in nodes if node.has(Trait.RANDOM) and not node.wants_recompute]
    if drawn:
        return f"the original draws {', '.join(drawn)} anew in backward: another value than in forward"
    untagged = [node.name for node in nodes if node.tag is Tag.MUST_SAVE]
    if untagged:
        return f"the original recomputes {', '.join(untagged)}, tagged MUST_SAVE"
    saved = [graph.positions.get(each) for each in expected.get("saved", ())]
    size = sum(graph.sizes[each] for each in saved if each is not None)
    inputs = sum(graph.sizes[i] for i, node in enumerate(graph.nodes) if node.role is NodeRole.PRIMAL)
    most = save_within_budget(graph, 1.0).nbytes if 0 < case.budget < 1 else 0
    room = case.budget * max(most - inputs, 0)
    if size - inputs > room and case.budget < 1:
        return f"the original saves {size - inputs} bytes beyond the inputs, its budget is {room:.0f}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
