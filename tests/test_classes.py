"""Rank classes by refinement: exact as device by device, with as few classes as that allows."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from executor_models import DRAM, GBPS, LAUNCH, add_grad, cluster, f32, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.executor import CostModel
from distsim.ir import FunctionMaker, Mesh, Topology
from distsim.ir.link import Link
from distsim.simulation.tasks.color_refinement import Relation, refine
from distsim.simulation.tasks.rank_classes import rank_classes

# --- refine ------------------------------------------------------------------------------------------


def blocks(colours):
    """A partition as a set of sets: whatever the numbers."""
    found = {}
    for device, colour in enumerate(colours):
        found.setdefault(colour, set()).add(device)
    return set(map(frozenset, found.values()))


def meets(device, colours, relations):
    """What a device meets, by the definition: a bag of (relation, cost, own places, colours)."""
    bag = []
    for number, relation in enumerate(relations):
        for group, cost in zip(relation.groups.tolist(), relation.cost.tolist(), strict=True):
            seen = [int(colours[d]) for d in group]
            if relation.ordered:
                bag += [(number, cost, i, tuple(seen)) for i, d in enumerate(group) if d == device]
            else:
                bag += [(number, cost, 0, tuple(sorted(seen)))] * group.count(device)
    return Counter(bag)


def refined_by_definition(colours, relations):
    colours = list(colours)
    while True:
        kinds, new = [], []
        for device in range(len(colours)):
            kind = (colours[device], meets(device, colours, relations))
            if kind not in kinds:
                kinds.append(kind)
            new.append(kinds.index(kind))
        if len(blocks(new)) == len(blocks(colours)):
            return new
        colours = new


@st.composite
def partitions(draw):
    n = draw(st.integers(1, 9))
    colours = draw(st.lists(st.integers(-1, 1), min_size=n, max_size=n))
    relations = []
    for _ in range(draw(st.integers(0, 3))):
        width = draw(st.integers(1, min(n, 3)))
        row = st.lists(st.integers(0, n - 1), min_size=width, max_size=width, unique=draw(st.booleans()))
        groups = draw(st.lists(row, max_size=8))
        cost = [draw(st.integers(0, 1)) for _ in groups]
        members = np.array(groups, np.int64).reshape(len(groups), width)
        relations.append(Relation(members, np.array(cost, np.int64), draw(st.booleans())))
    return np.array(colours), relations


@given(partitions())
@settings(max_examples=300)
def test_refine_finds_the_coarsest_stable_partition(case):
    colours, relations = case
    found = refine(colours, relations)
    assert blocks(found.tolist()) == blocks(refined_by_definition(colours.tolist(), relations))
    assert sorted(set(found.tolist())) == list(range(found.max() + 1))


def test_a_path_is_folded_in_the_middle():
    # In a path of n devices the distance from the nearer end is what tells devices apart.
    for n in (2, 3, 8, 9, 64):
        path = Relation(np.array([[i, i + 1] for i in range(n - 1)]), np.zeros(n - 1, np.int64), False)
        found = refine(np.zeros(n, np.int64), [path])
        assert blocks(found.tolist()) == {frozenset({i, n - 1 - i}) for i in range(n)}
        ordered = replace(path, ordered=True)
        assert len(blocks(refine(np.zeros(n, np.int64), [ordered]).tolist())) == n


def test_a_symmetric_grid_stays_whole_and_one_odd_device_splits_it_by_rows_and_columns():
    grid = np.arange(12 * 7).reshape(12, 7)
    relations = [Relation(g, np.zeros(len(g), np.int64), False) for g in (grid, grid.T.copy())]
    assert not refine(np.zeros(84, np.int64), relations).any()
    odd = np.zeros(84, np.int64)
    odd[grid[3, 4]] = 1
    found = refine(odd, relations)
    rest = set(range(84)) - set(grid[3].tolist()) - set(grid[:, 4].tolist())
    here = grid[3, 4]
    expected = [{here}, set(grid[3].tolist()) - {here}, set(grid[:, 4].tolist()) - {here}, rest]
    assert blocks(found.tolist()) == set(map(frozenset, expected))


# --- rank classes ------------------------------------------------------------------------------------


def step(meshes, microbatches=3, axes=("tp", "dp")):
    """A pipeline of stages that compute and communicate, forward and back again, one output each."""
    maker = FunctionMaker("step")
    for i in range(microbatches):
        x = maker.add_input_value(f"x{i}", f32(64, 64, on=meshes[0]))
        for mesh in (*meshes, *meshes[-2::-1]):
            if x.type.device != mesh:
                x = maker.add_op("Send", inputs=[x], attributes={"to": mesh})
            x = add_grad(maker, x, x)
            for axis in axes:
                x = maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": axis})
    return maker.finalize()


def with_slow(devices, *slow):
    return [replace(d, dram_bandwidth=d.dram_bandwidth / 3) if d.id in slow else d for d in devices]


def joined(devices, thin=(), node=None):
    """A topology of these devices: each pair has its own link, or there are nodes of ``node``.

    The links ``thin`` (pairs of ids) have a tenth of the bandwidth of the others.
    """
    topology = Topology()
    made = [
        topology.add_device(d.kind, d.throughput, d.dram_bandwidth, d.kernel_launch_overhead) for d in devices
    ]
    if node is None:
        for a, b in combinations(made, 2):
            topology.set_bandwidth(a, b, GBPS)
    else:
        topology.add_level("node", Link(1e11, 1e-6), node)
        topology.add_level("net", Link(1e10, 1e-5))
    for a, b in thin:
        if a != b:
            topology.set_bandwidth(made[a], made[b], GBPS / 10)
    return topology, made


def assert_exact(topology, function, **options):
    """In classes as device by device; return the sizes of the classes."""
    one, each = (
        simulate(topology, function, **options),
        simulate(topology, function, lockstep=False, **options),
    )
    assert list(one.timestamps) == list(each.timestamps)
    np.testing.assert_allclose(
        list(one.timestamps.values()), list(each.timestamps.values()), rtol=1e-12, atol=0
    )
    assert one.flops == each.flops
    for device in each.timestamps:
        shares, expected = one.shares(device), each.shares(device)
        assert (shares.busy, shares.bubble) == pytest.approx(
            (expected.busy, expected.bubble), rel=1e-9, abs=1e-15
        )
    classes = one.classes
    assert classes.lockstep == (len(classes.members) < len(each.timestamps))
    return [len(group) for group in classes.members]


def test_one_slow_device_of_sixteen_gives_four_classes_per_stage():
    topology, devices = joined(with_slow(cluster(16)[1], 5))
    meshes = [Mesh(devices[8 * i : 8 * i + 8], dp=4, tp=2) for i in range(2)]
    # Itself, its partner along tp, its peers along dp, and the rest: in its stage and in the other.
    assert sorted(assert_exact(topology, step(meshes))) == [1, 1, 1, 1, 3, 3, 3, 3]
    assert sorted(assert_exact(topology, step(meshes), overlap=False)) == [1, 1, 1, 1, 3, 3, 3, 3]


def test_one_thin_link_gives_few_classes():
    topology, devices = joined(cluster(16)[1], thin=[(2, 3)])
    meshes = [Mesh(devices[8 * i : 8 * i + 8], dp=4, tp=2) for i in range(2)]
    # The pair along tp that it joins, and the other pairs: both members of a pair are alike.
    assert sorted(assert_exact(topology, step(meshes, axes=("tp",)))) == [2, 2, 6, 6]
    topology, devices = joined(cluster(16)[1], thin=[(2, 10)])
    meshes = [Mesh(devices[8 * i : 8 * i + 8], dp=4, tp=2) for i in range(2)]
    assert sorted(assert_exact(topology, step(meshes))) == [1, 1, 1, 1, 3, 3, 3, 3]


def test_a_thin_link_that_nobody_uses_splits_nothing():
    topology, devices = joined(cluster(16)[1], thin=[(0, 9)])
    meshes = [Mesh(devices[8 * i : 8 * i + 8], dp=4, tp=2) for i in range(2)]
    assert assert_exact(topology, step(meshes)) == [8, 8]


def test_one_slow_device_in_closed_form():
    """Every group that it is in waits for it, and the others do not."""
    topology, devices = joined(with_slow(cluster(8)[1], 0))
    mesh = Mesh(devices, dp=4, tp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(10**6, on=mesh))
    y = add_grad(maker, x, x)
    maker.add_op("MPIAllreduce", inputs=[y], attributes={"axis": "tp"})
    simulation = simulate(topology, maker.finalize())
    fast, slow, reduce = LAUNCH + 12e6 / DRAM, LAUNCH + 36e6 / DRAM, 4e6 / 1e10
    expected = [slow + reduce] * 2 + [fast + reduce] * 6
    assert list(simulation.timestamps.values()) == pytest.approx(expected, rel=1e-12)
    assert sorted(map(len, simulation.classes.members)) == [1, 1, 6]


def test_uneven_nodes_split_the_groups_that_cross_them():
    # Groups of two along tp on nodes of three: some lie inside, some cross.
    topology, devices = joined(cluster(12)[1], node=3)
    mesh = Mesh(devices, dp=6, tp=2)
    assert sorted(assert_exact(topology, step([mesh], axes=("tp",)))) == [4, 8]


def test_what_stays_on_its_device_is_told_from_what_is_sent():
    topology, devices = joined(cluster(8)[1], node=8)
    here, there = Mesh(devices[:4], dp=4), Mesh([*devices[:2], *devices[6:]], dp=4)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(10**6, on=here))
    maker.add_op("Send", inputs=[x], attributes={"to": there})
    assert sorted(assert_exact(topology, maker.finalize())) == [2, 2, 2]
    simulation = simulate(topology, maker.finalize())
    expected = [0.0] * 2 + [1e-6 + 4e6 / 1e11] * 4
    assert list(simulation.timestamps.values()) == pytest.approx(expected, rel=1e-12)


def test_what_passes_between_a_device_and_a_mesh():
    topology, devices = joined(with_slow(cluster(5)[1], 2))
    mesh, host = Mesh(devices[:4], tp=4), devices[4]
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(64, 64, on=host))
    w = maker.add_input_value("w", f32(64, 64, on=host))
    shards = ((0, "tp", None),)
    part = maker.add_op("MPIScatter", inputs=[x], attributes={"to": mesh, "shards": shards})
    whole = maker.add_op("MPIBroadcast", inputs=[w], attributes={"to": mesh})
    back = {"to": host, "shards": shards, "from_mesh": mesh}
    maker.add_op("MPIGather", inputs=[add_grad(maker, part, part)], attributes=back)
    add_grad(maker, whole, whole)
    assert sorted(assert_exact(topology, maker.finalize())) == [1, 1, 3]


def test_a_shift_along_a_ring_is_simulated_device_by_device():
    """Where nothing overlaps each send waits for the one before it: no two devices do the same."""
    topology, devices = cluster(4)
    here, there = Mesh(devices, tp=4), Mesh([*devices[1:], devices[0]], tp=4)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(1000, on=here))
    maker.add_op("Send", inputs=[x], attributes={"to": there})
    for overlap, times in ((True, 1), (False, 4)):
        assert assert_exact(topology, maker.finalize(), overlap=overlap) == [1] * 4
        simulation = simulate(topology, maker.finalize(), overlap=overlap)
        assert simulation.step_time == pytest.approx(times * 4000 / 1e10)


def test_crossed_sends_take_apart_their_own_meshes_only():
    topology, devices = cluster(6)
    a, b, crossed = Mesh(devices[:2], tp=2), Mesh(devices[2:4], tp=2), Mesh(devices[3:1:-1], tp=2)
    other = Mesh(devices[4:], tp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(1000, on=a))
    y = maker.add_input_value("y", f32(1000, on=other))
    for to in (b, crossed):
        maker.add_op("Send", inputs=[x], attributes={"to": to})
    add_grad(maker, y, y)
    assert sorted(assert_exact(topology, maker.finalize())) == [1, 1, 1, 1, 2]


@st.composite
def asymmetric(draw):
    """A random function on meshes of several shapes, that may share devices, on an irregular topology."""
    n = 12
    slow = draw(st.lists(st.integers(0, n - 1), max_size=2))
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    thin, node = draw(st.lists(pair, max_size=2)), draw(st.sampled_from([None, 2, 3, 4]))
    topology, devices = joined(with_slow(cluster(n, launch=1e-7)[1], *slow), thin, node)
    meshes = [
        Mesh(devices[0:4], dp=2, tp=2),
        Mesh(devices[4:8], dp=2, tp=2),
        Mesh(devices[4:8], dp=4, tp=1),
        Mesh(devices[8:12], dp=1, tp=4),
        Mesh(devices[2:10], dp=4, tp=2),
        Mesh(devices[4:12], dp=4, tp=2),
        Mesh([devices[i] for i in (5, 4, 7, 6)], dp=2, tp=2),
        Mesh(devices[2:10], {"dp": ("ep", "cp")}, cp=2, tp=2, ep=2),
    ]
    meshes = [meshes[i] for i in sorted(draw(st.sets(st.integers(0, 7), min_size=1)))]
    maker = FunctionMaker("random")
    values = [maker.add_input_value(f"x{i}", f32(8, 512, on=mesh)) for i, mesh in enumerate(meshes)]
    for _ in range(draw(st.integers(1, 20))):
        x = values[draw(st.integers(0, len(values) - 1))]
        kind = draw(st.sampled_from(["compute", "dp", "tp", "send", "transfer"]))
        mesh = x.type.device
        if kind == "compute":
            same = [v for v in values if v.type == x.type]
            values.append(add_grad(maker, x, draw(st.sampled_from(same))))
        elif kind == "send":
            to = draw(st.sampled_from([m for m in meshes if m.axes == mesh.axes]))
            values.append(maker.add_op("Send", inputs=[x], attributes={"to": to}))
        elif kind == "transfer":
            there = {"to": draw(st.sampled_from(devices)), "shards": (), "from_mesh": mesh}
            alone = maker.add_op("MPIGather", inputs=[x], attributes=there)
            alone = add_grad(maker, alone, alone)
            to = draw(st.sampled_from(meshes))
            values.append(maker.add_op("MPIBroadcast", inputs=[alone], attributes={"to": to}))
        else:
            values.append(maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": kind}))
    return topology, maker.finalize()


@given(asymmetric(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_classes_and_device_by_device_agree_on_irregular_topologies(case, overlap):
    topology, function = case
    assert_exact(topology, function, overlap=overlap)


def test_device_by_device_keeps_the_order_of_the_classes():
    topology, devices = cluster(4)
    function = step([Mesh(devices[:2], dp=1, tp=2), Mesh(devices[2:], dp=1, tp=2)])
    together = rank_classes(function, CostModel(topology))
    alone = rank_classes(function, CostModel(topology), lockstep=False)
    assert together.members == (tuple(devices[:2]), tuple(devices[2:]))
    assert alone.members == tuple((d,) for d in devices) and not alone.lockstep
