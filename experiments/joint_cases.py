"""Joint forward-backward graphs of PyTorch as JSON, with what its partitioners saved: the reader.

Two formats, those of the measured cases ``remat/`` and ``replay/``. A graph is a list of nodes: ``name``,
``op`` (placeholder, get_attr, call_function, output), ``target``, ``inputs`` (each tensor once), ``shape``,
``bytes``, the pass it was recorded in (``tag``), the checkpointing policy (``recompute``), the replay tags
(``custom``), and, where given, ``args`` (text of the other arguments) and ``ac_graph_id`` (region).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aten

from distsim.transforms.recompute.saves import (
    EVERY_OUTPUT,
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Phase,
    Tag,
    Trait,
    needs,
)

PHASES = {
    "is_forward": Phase.FORWARD,
    "is_backward": Phase.BACKWARD,
    "must_be_in_forward": Phase.MUST_FORWARD,
    "must_be_in_backward": Phase.MUST_BACKWARD,
}
PARTITIONERS = {
    "min_cut_rematerialization_partition": "min_cut",
    "default_partition": "default",
    "min_cut": "min_cut",
    "default": "default",
    "replay": "replay",
}
RECORDED = ("saved", "recomputed_in_bw", "bw_ops", "fw_out", "error")
UNKNOWN = 64
"""What a size counts that the case gives as a symbol."""

MOST_BYTES = 2**50

Expected = dict[str, Any]
Row = dict[str, Any]
Shapes = list[list[int]]


class CaseError(ValueError):
    """A file is not a case: what is wrong with it, in one line."""


@dataclass(frozen=True)
class Case:
    """A joint graph, its memory budget, and what each partitioner made of it."""

    name: str
    graph: JointGraph
    budget: float
    expected: dict[str, Expected]


def read_case(path: Path) -> Case:
    """Read a file; raise :class:`CaseError`, or the error of JSON or of the graph, if it is no case."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [checked(row) for row in field(content, "joint", list)]
    parameters = content.get("static_lifetime_input_indices") or []
    if not isinstance(parameters, list):
        raise CaseError("'static_lifetime_input_indices' is no list")
    several = "results" in content
    graph = read_graph(rows, field(content, "num_fwd_outputs", int), set(parameters), several)
    if several:
        results = field(content, "results", dict)
        expected = {partitioner(key): record(field(results, key, dict)) for key in results}
    else:
        expected = {partitioner(field(content, "partitioner", str)): record(content)}
    budget = content.get("budget", 1.0)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise CaseError(f"the budget is {budget!r}, not a number")
    return Case(str(content.get("name", path.stem)), graph, float(budget), expected)


def field(content: Any, key: str, kind: type) -> Any:
    """Return a field of a JSON object, which must be there and of this kind."""
    if not isinstance(content, dict):
        raise CaseError(f"expected an object with {key!r}, not {type(content).__name__}")
    if not isinstance(content.get(key), kind):
        raise CaseError(f"{key!r} is missing or no {kind.__name__}")
    return content[key]


def partitioner(name: str) -> str:
    """Return the short name of a partitioner."""
    if name not in PARTITIONERS:
        raise CaseError(f"unknown partitioner {name!r}; known are {', '.join(PARTITIONERS)}")
    return PARTITIONERS[name]


def record(content: dict[str, Any]) -> Expected:
    """Return what was recorded of one partitioner, saved values by name."""
    found = {key: content[key] for key in RECORDED if content.get(key) is not None}
    for key in ("saved", "recomputed_in_bw", "bw_ops", "fw_out"):
        if key in found:
            names = field(found, key, list)
            found[key] = [str(each[0] if isinstance(each, list) and each else each) for each in names]
    if not found:
        raise CaseError(f"nothing was recorded; expected one of {', '.join(RECORDED)}")
    return found


def checked(row: Any) -> Row:
    """Return a node's row with the fields that every node must have."""
    for key, kind in (("name", str), ("op", str), ("target", str), ("inputs", list)):
        field(row, key, kind)
    if not all(isinstance(each, str) for each in row["inputs"]):
        raise CaseError(f"'inputs' of {row['name']} are no names: {row['inputs']!r}")
    return row


def read_graph(
    rows: Sequence[Row], num_forward_outputs: int, parameters: set[Any], several: bool
) -> JointGraph:
    """Return the graph of the rows; with ``several`` a shape is a list of shapes."""
    shapes = {row["name"]: shapes_of(row, several) for row in rows}
    tuples = {str(row["inputs"][0]) for row in rows if aten.is_item(row["target"]) and row["inputs"]}
    place: dict[str, int] = {}
    nodes: list[JointNode] = []
    items: dict[str, int] = {}
    outputs: list[str] = []
    primals = 0
    for row in rows:
        unknown = [each for each in row["inputs"] if each not in place]
        if unknown:
            raise CaseError(f"{row['name']} reads {unknown[0]!r}, which no earlier node is named")
        if row["op"] == "output":
            outputs = row["inputs"]
            break
        node = JointNode(
            name=row["name"],
            inputs=tuple(place[each] for each in row["inputs"]),
            nbytes=0 if row["name"] in tuples else nbytes(row, shapes[row["name"]]),
            role=role(row),
            kind=NodeKind.TUPLE if row["name"] in tuples else kind(row, shapes[row["name"]]),
            tag=tag(row),
        )
        if node.role is NodeRole.OP:
            node = operator(node, row, [shapes[each] for each in row["inputs"]], shapes[node.name], items)
        elif node.role is NodeRole.PRIMAL:
            node = replace(node, traits=Trait.FREE if primals in parameters else Trait.NONE)
            primals += 1
        place[row["name"]] = len(nodes)
        nodes.append(node)
    return with_outputs(nodes, [place[each] for each in outputs], num_forward_outputs)


def with_outputs(nodes: Sequence[JointNode], outputs: Sequence[int], num_forward_outputs: int) -> JointGraph:
    """Return the graph; outputs are listed once each, so a gradient may stand where a forward output did."""
    graph = JointGraph(tuple(nodes), tuple(outputs), min(max(num_forward_outputs, 0), len(outputs)))
    tangents = needs(replace(graph, num_forward_outputs=0)).tangents
    late = [place for place, each in enumerate(graph.forward_outputs) if each in tangents]
    return replace(graph, num_forward_outputs=late[0]) if late else graph


def operator(
    node: JointNode, row: Row, inputs: Sequence[Shapes], results: Shapes, items: dict[str, int]
) -> JointNode:
    """Return an op's node with what its operator says; ``items`` counts the items taken of each tuple."""
    target = row["target"]
    item = None
    if aten.is_item(target) and row["inputs"]:
        parent = row["inputs"][0]
        item = row["index"] if isinstance(row.get("index"), int) else items.get(parent, 0)
        items[parent] = item + 1
    traits, phase = aten.traits(target), PHASES.get(str(row.get("tag")))
    if traits & Trait.IMPURE and phase not in (Phase.MUST_FORWARD, Phase.MUST_BACKWARD):
        phase = Phase.MUST_BACKWARD if phase is Phase.BACKWARD else Phase.MUST_FORWARD
    known = [shapes[0] if len(shapes) == 1 else None for shapes in inputs]
    key = None
    if isinstance(row.get("args"), str):
        key = (target, row["args"])
    elif item is not None or aten.mergeable(target, len(node.inputs)):
        key = (target, node.nbytes, str(results), item)
    region = row.get("ac_graph_id")
    read = 0 if aten.packet(target) in aten.LISTS else None
    return replace(
        node,
        phase=phase,
        item=item,
        traits=traits,
        key=key,
        replay=replay(row),
        region=region if isinstance(region, int) else None,
        seconds=aten.flops(target, known, results[0] if len(results) == 1 else None),
        read_bytes=read,
    )


def shapes_of(row: Row, several: bool) -> Shapes:
    """Return the shapes of the tensors that a node gives."""
    shape = row.get("shape")
    if not isinstance(shape, list):
        return []
    plain = not several or any(isinstance(size, str | int) for size in shape)
    shapes = [shape] if plain else shape
    for each in shapes:
        if not isinstance(each, list) or not all(isinstance(size, str | int) for size in each):
            raise CaseError(f"the shape of {row['name']} is {shape!r}")
    return [[size if isinstance(size, int) else UNKNOWN for size in each] for each in shapes]


def nbytes(row: Row, shapes: Shapes) -> int:
    """Return the bytes recorded, else those of the shapes in 4 bytes an element."""
    given = row.get("bytes")
    if given is None:
        given = 4 * sum(math.prod(shape) for shape in shapes)
    if isinstance(given, str) and not given.lstrip("-").isdigit():
        given = 4 * sum(math.prod(shape) for shape in shapes)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < MOST_BYTES:
        raise CaseError(f"the bytes of {row['name']} are {str(given)[:40]}")
    return given


def kind(row: Row, shapes: Shapes) -> NodeKind:
    """Tell what kind of value a node gives that no item is taken of."""
    if len(shapes) == 1:
        return NodeKind.TENSOR
    if len(shapes) > 1:
        return NodeKind.TUPLE
    if aten.is_size(row["target"]) or (row["op"] == "placeholder" and row["target"].startswith("primals")):
        return NodeKind.SIZE
    return NodeKind.TUPLE if row["target"].startswith(("aten.", "prims.")) else NodeKind.OPAQUE


def role(row: Row) -> NodeRole:
    """Tell where a node's value comes from."""
    if row["op"] == "get_attr":
        return NodeRole.CONSTANT
    if row["op"] != "placeholder":
        return NodeRole.OP
    if "fwd_seed" in row["target"] or "fwd_base" in row["target"]:
        return NodeRole.SEED
    return NodeRole.TANGENT if "tangents" in row["target"] or "bwd_" in row["target"] else NodeRole.PRIMAL


def tag(row: Row) -> Tag | None:
    """Return the checkpointing policy of a node."""
    name = str(row.get("recompute", "None")).rpartition(".")[2]
    return Tag[name] if name in Tag.__members__ else None


def replay(row: Row) -> tuple[int, ...] | None:
    """Return a node's replay tag."""
    custom = row.get("custom")
    if not isinstance(custom, dict) or not custom.get("ap_must_save"):
        return None
    indices = custom.get("ap_must_save_getitem_indices")
    if indices is None:
        return EVERY_OUTPUT
    if not isinstance(indices, list) or not all(isinstance(each, int) for each in indices):
        raise CaseError(f"the replay indices of {row['name']} are {indices!r}")
    return tuple(indices)
