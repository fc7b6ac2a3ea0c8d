"""Save or recompute on joint graphs: closed forms, brute force, and what must hold of every partition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saves_models import CHEAP, chain, computed, computed_apart, joint_graph, merge_equal, primal, tangent

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves import (
    JointGraph,
    JointNode,
    MinCutOptions,
    NodeKind,
    Phase,
    Tag,
    Trait,
    needs,
    save_by_region,
    save_for_backward,
    save_min_cut,
    save_replayed,
    save_within_budget,
    split,
)
from distsim.transforms.recompute.saves.budget import Budget, exact_knapsack, rounded_knapsack
from distsim.transforms.recompute.saves.flow import minimum_cut
from distsim.transforms.recompute.saves.mincut import Bans, cut_network, cut_values, prepared, value_cost

PARTITIONERS = {
    "default": save_for_backward,
    "regions": save_by_region,
    "replay": save_replayed,
    "min_cut": save_min_cut,
    "budget 0": lambda graph: save_within_budget(graph, 0.0),
    "budget 0.3": lambda graph: save_within_budget(graph, 0.3),
    "aggressive": lambda graph: save_min_cut(graph, MinCutOptions().aggressive()),
}


def names(graph, positions):
    return [graph.nodes[each].name for each in positions]


# Closed forms.


def test_a_chain_of_cheap_ops_saves_its_input_alone():
    for length in (1, 4, 30):
        graph = chain(length, nbytes=8)
        assert save_for_backward(graph).nbytes == 8 * length
        saves = save_min_cut(graph)
        assert (saves.names, saves.nbytes) == (("x",), 8)
        assert names(graph, saves.recomputed) == [f"f{i}" for i in range(length - 1)]
        assert saves.seconds == length - 1


def test_compute_intensive_ops_are_saved_and_a_budget_recomputes_its_share_of_them():
    graph = chain(8, nbytes=1000, traits=Trait.COMPUTE_INTENSIVE)
    assert save_min_cut(graph).nbytes == 8000
    for share, recomputed in ((1.0, 0), (0.5, 4), (0.25, 6), (0.0, 7)):
        saves = save_within_budget(graph, share)
        assert saves.nbytes <= 1000 + share * 7000
        assert len(saves.recomputed) == recomputed


def test_a_region_keeps_what_enters_it():
    saves = save_by_region(chain(12, per_region=4))
    assert saves.names == ("x", "f3", "f7")
    assert len(saves.recomputed) == 12 - 2 - 1  # f3 and f7 are saved, f11 is read by no gradient
    assert saves.backward[0] in saves.recomputed


def test_recomputed_ops_run_right_before_they_are_needed():
    graph = chain(12, per_region=4)
    saves = save_by_region(graph)
    assert names(graph, saves.backward)[:9] == ["f8", "f9", "f10", "g11", "g10", "g9", "g8", "f4", "f5"]
    together = split(saves.graph, saves.saved, lazily=False)
    assert together.recomputed == saves.recomputed
    assert sorted(together.backward) == sorted(saves.backward)
    assert list(together.backward) == sorted(together.backward)


def test_without_a_backward_pass_nothing_is_saved():
    graph = JointGraph((primal("x"), JointNode("y", (0,), 4, tag=Tag.MUST_SAVE)), (1,), 1)
    for name, partitioner in PARTITIONERS.items():
        assert partitioner(graph).saved == (), name


def test_only_the_sizes_are_saved_where_backward_asks_for_nothing_else():
    nodes = (
        primal("x"),
        tangent("dy"),
        JointNode("big", (0,), 4000, phase=Phase.FORWARD),
        JointNode("y", (2,), 4, phase=Phase.FORWARD),
        JointNode("size", (2,), kind=NodeKind.SIZE),
        JointNode("dx", (1, 4), 4),
    )
    assert save_for_backward(JointGraph(nodes, (3, 5), 1)).names == ("size",)


# What must hold of every partition.


@pytest.mark.parametrize("name", PARTITIONERS)
def test_the_two_passes_compute_what_the_joint_graph_does(name):
    answered = 0
    for graph in map(joint_graph, range(200)):
        try:
            saves = PARTITIONERS[name](graph)
        except RematerializationError:  # tags that contradict each other
            continue
        answered += 1
        forward = needs(graph).forward
        assert computed_apart(saves) == computed(graph)
        assert len(set(saves.saved)) == len(saves.saved)
        for position in saves.saved:
            assert graph.nodes[position].kind is not NodeKind.TUPLE
        for position in saves.recomputed:
            node = graph.nodes[position]
            assert node.wants_recompute or not node.has(Trait.COLLECTIVE) or position not in forward
            assert node.tag is not Tag.MUST_SAVE or node.has(Trait.VIEW)
    assert answered > 150


def test_merging_keeps_what_is_computed_and_the_strongest_tag():
    merges = 0
    for graph in map(joint_graph, range(200)):
        merged = merge_equal(graph)
        assert computed(merged.graph) == computed(graph)
        for node, members in zip(merged.graph.nodes, merged.members, strict=True):
            tags = [graph.nodes[i].tag for i in members if graph.nodes[i].tag is not None]
            assert node.tag is max(tags, key=lambda tag: tag.value, default=None)
            merges += len(members) > 1
        assert merge_equal(merged.graph).graph == merged.graph
    assert merges > 10


# Brute force.


@given(
    edges=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.one_of(st.none(), st.integers(0, 20))),
        max_size=18,
    )
)
@settings(max_examples=80)
def test_the_cut_is_the_least_and_of_these_the_nearest_to_the_sink(edges):
    edges = [(tail, head, capacity) for tail, head, capacity in edges if tail != head]
    best = None
    for inside in itertools.product([False, True], repeat=5):
        at_sink = [False, *inside, True]
        crossing = [c for tail, head, c in edges if not at_sink[tail] and at_sink[head]]
        if None not in crossing:
            found = (sum(crossing), sum(at_sink), at_sink)
            best = found if best is None else min(best, found)
    cut = minimum_cut(edges, nodes=7, source=0, sink=6)
    if best is None:
        assert cut is None
    else:
        assert cut is not None
        assert (cut.capacity, cut.at_sink.tolist()) == (best[0], best[2])


@pytest.mark.parametrize("seed", range(40))
def test_min_cut_is_the_best_of_all_saved_sets(seed):
    """A saved set will do if backward needs nothing that is banned; its cost is the sum of its values'."""
    graph = prepared(joint_graph(seed, most=4))
    need, options = needs(graph), MinCutOptions()
    banned = cut_network(need, options).banned
    bans = Bans(need, options, frozenset())
    candidates = [i for i in range(len(graph)) if i not in need.tangents]
    costs = {i: value_cost(bans, i) for i in candidates if not graph.nodes[i].wants_recompute}
    choices = [i for i, cost in costs.items() if cost is not None]

    def possible(saved):
        goals = [i for i in need.backward if i not in need.tangents]
        goals += [i for position in need.tangents for i in graph.nodes[position].inputs]
        forced = [i for i in candidates if graph.nodes[i].wants_recompute]
        goals += [i for position in forced for i in graph.nodes[position].inputs]
        seen = set()
        while goals:
            position = goals.pop()
            if position in saved or position in need.tangents or position in seen:
                continue
            seen.add(position)
            if position in banned:
                return False
            goals += graph.nodes[position].inputs
        return True

    subsets = itertools.chain.from_iterable(
        itertools.combinations(choices, size) for size in range(len(choices) + 1)
    )
    costs_of_possible = [sum(costs[i] for i in saved) for saved in subsets if possible(set(saved))]
    try:
        found = cut_values(need, options)
    except RematerializationError:
        assert not costs_of_possible
        return
    assert possible(set(found.saved))
    assert found.cost == sum(costs[i] for i in found.saved)
    assert found.cost <= min(costs_of_possible, default=found.cost)


@given(
    items=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=9),
    room=st.integers(-1, 120),
)
@settings(max_examples=80)
def test_the_exact_knapsack_is_the_best_of_all(items, room):
    sizes, seconds = [size for size, _ in items], [float(each) for _, each in items]
    best = max(
        (
            sum(seconds[i] for i in chosen)
            for count in range(len(items) + 1)
            for chosen in itertools.combinations(range(len(items)), count)
            if sum(sizes[i] for i in chosen) <= room
        ),
        default=0,
    )
    kept = exact_knapsack(sizes, seconds, room)
    assert sum(seconds[i] for i in kept) == (best if room >= 0 else 0)
    assert sum(sizes[i] for i in kept) <= max(room, 0)


# The memory budget.


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 0.77, 1.0])
def test_a_budget_is_never_exceeded(share):
    for seed in range(60):
        graph = joint_graph(seed, most=14, tags=seed % 2 == 0)
        budget = Budget(graph, MinCutOptions(), share)
        try:
            assert save_within_budget(graph, share).nbytes <= budget.room
        except RematerializationError:  # tags that contradict each other
            assert seed % 2 == 0


def test_rounding_sizes_would_save_eight_times_the_budget():
    """Twenty values of 4/100,000 of the range each: rounded to 1/10,000 they weigh nothing."""
    small, large = 40, 1_000_000 - 20 * 40
    heavy = Trait.COMPUTE_INTENSIVE
    nodes = [primal("x", 0), tangent("dy", 0), JointNode("large", (0,), large, traits=heavy, seconds=1.0)]
    nodes += [JointNode(f"small{i}", (2,), small, traits=heavy, seconds=9.0) for i in range(20)]
    nodes.append(JointNode("y", tuple(range(2, 23)), 8, traits=heavy))
    nodes.append(JointNode("dx", tuple(range(1, 23)), 8))
    graph = JointGraph(tuple(nodes), (23, 24), 1)
    share = 0.0001
    sizes = [small / 1_000_000] * 20
    assert len(rounded_knapsack(sizes, [9.0] * 20, share)) * small == 8 * share * 1_000_000
    saves = save_within_budget(graph, share)
    assert (saves.nbytes, len(saves.saved)) == (2 * small, 1 + 2)  # and x, of no bytes


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_budget_is_a_share(share):
    with pytest.raises(RematerializationError, match="from 0 to 1"):
        save_within_budget(chain(2), share)


def test_random_values_and_orders_survive_a_budget_of_nothing():
    graph = chain(4)
    nodes = list(graph.nodes)
    nodes[2] = replace(nodes[2], traits=CHEAP | Trait.RANDOM)
    nodes[3] = replace(nodes[3], tag=Tag.MUST_SAVE)
    nodes[4] = replace(nodes[4], traits=Trait.COLLECTIVE)
    saves = save_within_budget(replace(graph, nodes=tuple(nodes)), 0.0)
    assert saves.names == ("x", "f0", "f1", "f2")


# Errors.


def test_what_can_be_neither_saved_nor_recomputed_is_named():
    nodes = (
        primal("x"),
        tangent("dy"),
        JointNode("sort", (0,), kind=NodeKind.TUPLE),
        JointNode("values", (2,), 4, item=0, tag=Tag.MUST_RECOMPUTE),
        JointNode("y", (3,), 4),
        JointNode("dx", (1, 3), 4),
    )
    with pytest.raises(
        RematerializationError, match=r"sort must not be recomputed \(not in the allow-list\)"
    ):
        save_min_cut(JointGraph(nodes, (4, 5), 1))


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        ((primal("x"), primal("x")), (0,), "two nodes"),
        ((JointNode("y", (0,)),), (0,), "node 0 and reads node 0"),
        ((primal("x"), JointNode("y", (0,), item=0)), (1,), "item of something that is no tuple"),
        ((primal("x"),), (1,), "output 1 is none of the 1 nodes"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(nodes, outputs, message):
    with pytest.raises(RematerializationError, match=message):
        JointGraph(nodes, outputs, 1)
