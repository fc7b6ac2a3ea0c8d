"""Replay, its precedence, and gathered parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from saves_models import CHEAP, computed, computed_apart, joint_graph, merge_equal, primal, tangent

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves import (
    EVERY_OUTPUT,
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Phase,
    Tag,
    Trait,
    save_min_cut,
    save_replayed,
    save_within_budget,
)

COLLECTIVE, HEAVY = Trait.COLLECTIVE, Trait.COMPUTE_INTENSIVE


def value_read_by_backward(**tags):
    """x -> op -> y, where the gradient reads op."""
    nodes = (primal("x"), tangent("dy"), JointNode("op", (0,), 4, **tags), JointNode("y", (2,), 4))
    return JointGraph((*nodes, JointNode("dx", (1, 2), 4)), (3, 4), 1)


def pair_read_by_backward(items=None, **tags):
    """x -> a tuple of three items -> y, where the gradient reads all three."""
    nodes = [primal("x"), tangent("dy"), JointNode("split", (0,), kind=NodeKind.TUPLE, **tags)]
    nodes += [JointNode(f"item{i}", (2,), 4, item=i, **(items or {}).get(i, {})) for i in range(3)]
    nodes += [JointNode("y", (3, 4, 5), 12), JointNode("dx", (1, 3, 4, 5), 12)]
    return JointGraph(tuple(nodes), (6, 7), 1)


@pytest.mark.parametrize(
    ("tags", "saved"),
    [
        ({}, ("x",)),
        ({"replay": EVERY_OUTPUT}, ("op",)),
        ({"tag": Tag.MUST_SAVE}, ("op",)),
        ({"replay": EVERY_OUTPUT, "tag": Tag.MUST_RECOMPUTE}, ("x",)),
        ({"replay": EVERY_OUTPUT, "tag": Tag.PREFER_RECOMPUTE}, ("op",)),
        ({"replay": EVERY_OUTPUT, "tag": Tag.PREFER_SAVE}, ("op",)),
        ({"tag": Tag.PREFER_SAVE}, ("x",)),
        ({"kind": NodeKind.OPAQUE}, ("op",)),
        ({"kind": NodeKind.OPAQUE, "tag": Tag.MUST_RECOMPUTE}, ("x",)),
        ({"kind": NodeKind.SIZE}, ("op",)),
        ({"kind": NodeKind.SIZE, "tag": Tag.PREFER_RECOMPUTE}, ("op",)),
        ({"traits": COLLECTIVE}, ("op",)),
        ({"traits": COLLECTIVE, "tag": Tag.MUST_RECOMPUTE}, ("x",)),
    ],
)
def test_what_replay_saves_of_a_value(tags, saved):
    assert save_replayed(value_read_by_backward(**tags)).names == saved


@pytest.mark.parametrize(
    ("tags", "items", "saved"),
    [
        ({}, {}, ("x",)),
        ({"replay": EVERY_OUTPUT}, {}, ("item0", "item1", "item2")),
        ({"replay": (0, 2)}, {}, ("x", "item0", "item2")),
        ({"replay": ()}, {}, ("x",)),
        ({"tag": Tag.MUST_SAVE}, {}, ("item0", "item1", "item2")),
        ({"tag": Tag.MUST_SAVE, "replay": (1,)}, {}, ("item0", "item1", "item2")),
        ({"tag": Tag.MUST_RECOMPUTE, "replay": (0, 1, 2)}, {}, ("x",)),
        ({"tag": Tag.PREFER_RECOMPUTE, "replay": (1,)}, {}, ("x", "item1")),
        ({"replay": (0,)}, {1: {"replay": EVERY_OUTPUT}}, ("x", "item0", "item1")),
        ({"replay": (0,)}, {0: {"replay": EVERY_OUTPUT}}, ("x", "item0")),
        ({"replay": EVERY_OUTPUT}, {1: {"tag": Tag.MUST_RECOMPUTE}}, ("x", "item0", "item2")),
    ],
)
def test_what_replay_saves_of_a_tuple(tags, items, saved):
    assert save_replayed(pair_read_by_backward(items, **tags)).names == saved


def test_a_tuple_is_told_by_its_kind_though_something_else_reads_it():
    graph = pair_read_by_backward(replay=EVERY_OUTPUT)
    nodes = [*graph.nodes[:7], JointNode("length", (2,), 4), JointNode("dx", (1, 3, 7), 4)]
    saves = save_replayed(JointGraph(tuple(nodes), (6, 8), 1))
    assert saves.names == ("x", "item0")
    assert [saves.graph.nodes[each].name for each in saves.recomputed] == ["split"]


@pytest.mark.parametrize("seed", range(60))
def test_a_recorded_partition_is_replayed_on_a_graph_captured_otherwise(seed):
    """The second graph has other names and a view after every op; what is saved is the same."""
    graph = joint_graph(seed, tags=False)
    # What is never recomputed is saved whatever the first partition did.
    nodes = [replace(node, traits=node.traits & ~COLLECTIVE) for node in graph.nodes]
    graph = replace(graph, nodes=tuple(nodes))
    try:
        first = save_min_cut(graph)
    except RematerializationError:
        return
    second, origins = captured_again(first)
    again = save_replayed(second)
    assert computed_apart(again) == computed(second)
    wanted = {name for name in first.names if graph.nodes[graph.positions[name]].role is NodeRole.OP}
    tagged = {origins.get(name, name) for name in again.names}
    inputs = {node.name for node in graph.nodes if node.role is NodeRole.PRIMAL}
    assert tagged - inputs == wanted


def captured_again(saves):
    """The graph captured anew, with the replay tags of what was saved, and the names of its nodes before."""
    graph = saves.graph
    marks: dict[int, tuple[int, ...]] = {}
    for position in saves.saved:
        node = graph.nodes[position]
        if node.item is not None:  # items of a graph captured anew carry no tags of their own
            marks[node.inputs[0]] = (*marks.get(node.inputs[0], ()), node.item)
        elif node.role is NodeRole.OP:
            marks[position] = EVERY_OUTPUT
    nodes: list[JointNode] = []
    place: dict[int, int] = {}
    origins: dict[str, str] = {}
    for position, node in enumerate(graph.nodes):
        inputs = tuple(place[each] for each in node.inputs)
        name = node.name if node.role is not NodeRole.OP else f"second_{node.name}"
        origins[name] = node.name
        nodes.append(replace(node, name=name, inputs=inputs, tag=None, replay=marks.get(position)))
        place[position] = len(nodes) - 1
        if node.role is NodeRole.OP and node.kind is NodeKind.TENSOR and node.phase is Phase.FORWARD:
            nodes.append(JointNode(f"{name}.alias", (len(nodes) - 1,), node.nbytes, phase=node.phase))
            place[position] = len(nodes) - 1 if position % 2 else len(nodes) - 2
    outputs = tuple(None if each is None else place[each] for each in graph.outputs)
    return JointGraph(tuple(nodes), outputs, graph.num_forward_outputs), origins


def test_a_later_duplicate_keeps_its_replay_tag():
    nodes = (
        primal("x"),
        tangent("dy"),
        JointNode("first", (0,), 4, key="exp"),
        JointNode("y", (2,), 4, key="add"),
        JointNode("second", (0,), 4, key="exp", replay=EVERY_OUTPUT),
        JointNode("dx", (1, 4), 4, key="mul"),
    )
    graph = JointGraph(nodes, (3, 5), 1)
    assert save_replayed(merge_equal(graph).graph).names == ("first",)
    orders = [Tag.PREFER_SAVE, Tag.PREFER_RECOMPUTE, Tag.MUST_SAVE, Tag.MUST_RECOMPUTE]
    for weaker, stronger in pairwise(orders):
        for pair in ((weaker, stronger), (stronger, weaker)):
            tagged = list(nodes)
            tagged[2], tagged[4] = (replace(nodes[i], tag=tag) for i, tag in zip((2, 4), pair, strict=True))
            merged = merge_equal(replace(graph, nodes=tuple(tagged))).graph
            assert merged.nodes[2].tag is stronger


# Gathered parameters.


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.5])
def test_no_budget_keeps_a_gathered_table_of_which_backward_reads_a_row(budget):
    nodes = (
        primal("shard", 1000, Trait.FREE),
        tangent("dy"),
        JointNode("wait", (0,), 4000, traits=COLLECTIVE | Trait.WAIT, tag=Tag.MUST_SAVE),
        JointNode("row", (2,), 8, traits=CHEAP),
        JointNode("y", (3,), 8, traits=HEAVY),
        JointNode("dx", (1, 3), 8),
    )
    saves = save_within_budget(JointGraph(nodes, (4, 5), 1), budget)
    assert (saves.names, saves.recomputed) == (("row",), ())
