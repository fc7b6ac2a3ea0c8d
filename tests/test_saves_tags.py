"""Replay, its precedence, and the chains that gather sharded parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from saves_models import CHEAP, computed, computed_apart, joint_graph, primal, tangent

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
    gather_chains,
    merge_equal,
    record,
    recorded,
    save_by_region,
    save_for_backward,
    save_min_cut,
    save_replayed,
    save_within_budget,
    with_gathers,
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
    second, origins = captured_again(first.graph)
    again = save_replayed(recorded(second, record(first), origins))
    assert computed_apart(again) == computed(second)
    wanted = {name for name in first.names if graph.nodes[graph.positions[name]].role is NodeRole.OP}
    tagged = {origins.get(name, name) for name in again.names}
    inputs = {node.name for node in graph.nodes if node.role is NodeRole.PRIMAL}
    assert tagged - inputs == wanted


def captured_again(graph):
    nodes: list[JointNode] = []
    place: dict[int, int] = {}
    origins: dict[str, str] = {}
    for position, node in enumerate(graph.nodes):
        inputs = tuple(place[each] for each in node.inputs)
        name = node.name if node.role is not NodeRole.OP else f"second_{node.name}"
        origins[name] = node.name
        nodes.append(replace(node, name=name, inputs=inputs, tag=None, replay=None))
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


def sharded_layers(count, ranks=4, nbytes=1024):
    """Layers y = x @ w whose parameter is cast, gathered, waited for and transposed; backward reads w too."""
    nodes = [primal("x", 64), tangent("dy", 64)]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    value, weights = 0, []

    def add(name, inputs, size, traits, phase=forward):
        nodes.append(JointNode(name, tuple(inputs), size, phase=phase, traits=traits))
        return len(nodes) - 1

    for i in range(count):
        nodes.append(primal(f"shard{i}", 2 * nbytes // ranks, Trait.FREE))
        cast = add(f"cast{i}", [len(nodes) - 1], nbytes // ranks, CHEAP | Trait.CAST)
        gather = add(f"gather{i}", [cast], nbytes, COLLECTIVE | Trait.GATHER)
        wait = add(f"wait{i}", [gather], nbytes, COLLECTIVE | Trait.WAIT)
        view = add(f"view{i}", [wait], nbytes, CHEAP | Trait.VIEW)
        value = add(f"mm{i}", [value, view], 64, HEAVY)
        weights.append(view)
    gradient = 1
    for i in reversed(range(count)):
        gradient = add(f"dmm{i}", [gradient, weights[i]], 64, HEAVY, backward)
    return JointGraph(tuple(nodes), (value, gradient), 1)


def test_a_gather_chain_runs_from_the_parameter_to_its_views():
    graph = sharded_layers(2)
    chains = gather_chains(graph)
    name = [node.name for node in graph.nodes]
    assert [[name[i] for i in chain.nodes] for chain in chains] == [
        [f"cast{i}", f"gather{i}", f"wait{i}", f"view{i}"] for i in range(2)
    ]
    assert [[name[i] for i in chain.last] for chain in chains] == [["wait0"], ["wait1"]]
    assert gather_chains(graph, parameters=()) == ()


@pytest.mark.parametrize("partitioner", [save_for_backward, save_min_cut, save_replayed, save_by_region])
def test_resharded_parameters_are_not_held(partitioner):
    layers, nbytes = 3, 1024
    graph = sharded_layers(layers, nbytes=nbytes)
    resharded = partitioner(with_gathers(graph, reshard=True))
    assert all(name.startswith(("x", "shard", "mm")) for name in resharded.names)
    again = {resharded.graph.nodes[each].name for each in resharded.recomputed}
    assert {f"gather{i}" for i in range(layers)} <= again
    held = partitioner(with_gathers(graph, reshard=False))
    assert {name for name in held.names if not name.startswith(("x", "mm"))} == {"wait0", "wait1", "wait2"}
    assert not any(held.graph.nodes[each].has(COLLECTIVE) for each in held.recomputed)
    gathered = sum(held.graph.sizes[i] for i in held.saved if held.graph.nodes[i].name.startswith("wait"))
    assert gathered == layers * nbytes


def test_items_and_concatenations_of_a_gathered_parameter_belong_to_the_chain():
    """A gather along another dimension than the first: the pieces are split and concatenated."""
    nodes = [
        primal("shard", 4, Trait.FREE),
        tangent("dy"),
        JointNode("gather", (0,), 8, traits=COLLECTIVE | Trait.GATHER),
        JointNode("wait", (2,), 8, traits=COLLECTIVE | Trait.WAIT),
        JointNode("split", (3,), kind=NodeKind.TUPLE, traits=CHEAP | Trait.VIEW),
        JointNode("left", (4,), 4, item=0, traits=CHEAP),
        JointNode("right", (4,), 4, item=1, traits=CHEAP),
        JointNode("cat", (5, 6), 8, traits=Trait.CONCATENATION),
        JointNode("y", (7,), 8, traits=HEAVY),
        JointNode("dx", (1, 7), 8),
    ]
    nodes[2:9] = [replace(node, phase=Phase.FORWARD) for node in nodes[2:9]]
    graph = JointGraph(tuple(nodes), (8, 9), 1)
    (chain,) = gather_chains(graph)
    assert (chain.nodes, chain.last) == ((2, 3, 4, 5, 6, 7), (7,))
    for partitioner in (save_for_backward, save_min_cut, save_replayed):
        assert partitioner(with_gathers(graph, reshard=False)).names == ("cat",)
        assert partitioner(with_gathers(graph, reshard=True)).names == ("shard",)


def test_an_order_of_the_user_goes_before_resharding():
    graph = sharded_layers(1)
    wait = graph.positions["wait0"]
    nodes = [replace(node, tag=Tag.MUST_SAVE) if i == wait else node for i, node in enumerate(graph.nodes)]
    tagged = with_gathers(replace(graph, nodes=tuple(nodes)), reshard=True)
    assert "wait0" in save_for_backward(tagged).names


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
