"""Nodes of several kinds, and slow ones: what they take, in both engines, and what is refused."""

import re

import pytest
from cluster_files import FREE, step, write

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.errors import PlanError, TopologyError
from distsim.hardware import collective_time, describe, load_cluster
from distsim.hardware.presets import figures_by_kind
from distsim.ir import Topology
from distsim.ir.link import Link
from distsim.ir.topology import Level
from distsim.models import gpt
from distsim.plan import Plan
from distsim.simulation.memory.program_memory import program_memory
from distsim.study.clusters import sized_clusters
from distsim.transforms import Adam, differentiate


def test_kinds_of_nodes(tmp_path):
    text = '[[nodes]]\ncount = 2\n[[nodes]]\ncount = 1\nbase = "dgx-h100"\ndevice = { memory = "70 GiB" }\n'
    path = write(tmp_path, text)
    topology, h100 = load_cluster(path), load_cluster("dgx-h100").devices[0]
    assert len(topology.devices) == 24
    assert topology.devices[15].peaks == load_cluster("dgx-a100").devices[0].peaks
    assert (topology.devices[16].peaks, topology.devices[16].memory) == (h100.peaks, 70 * 2**30)
    assert "nodes: 1 of dgx-h100, with other memory" in describe(path)


def test_kinds_of_nodes_have_their_own_links_inside(tmp_path):
    """A message within a node takes what it takes there, one between nodes what the file says."""
    mixed = load_cluster(write(tmp_path, '[[nodes]]\ncount = 2\n[[nodes]]\ncount = 1\nbase = "dgx-h100"\n'))
    ours, theirs = load_cluster("dgx-a100:2"), load_cluster("dgx-h100")
    for kind in ("all_reduce", "all_to_all"):
        alone = [collective_time(kind, 1e9, tuple(each.devices[:8]), each) for each in (ours, theirs)]
        nodes = [tuple(mixed.devices[begin : begin + 8]) for begin in (0, 8, 16)]
        assert [collective_time(kind, 1e9, node, mixed) for node in nodes] == [alone[0], *alone]
    assert mixed.link(mixed.devices[8], mixed.devices[16]) == ours.levels[1].link
    assert mixed.of_direct_writes().level(*mixed.devices[16:18]).start == 0.0 < theirs.levels[0].start


@pytest.mark.parametrize("engine", ["maxplus", "events"])
def test_equal_devices_are_told_apart_by_their_links(engine):
    """Of two nodes the one with slower links is waited for, be it the first or the second."""
    fast, slow, between = (
        Level("nvlink", Link(1e10), 4),
        Level("nvlink", Link(1e9), 4),
        Level("ib", Link(1e9)),
    )
    device = load_cluster("dgx-a100").devices[0]
    both = Topology.hierarchical(device, 8, [slow, between])
    one, other = (Topology.hierarchical(device, 8, [level, between]) for level in (fast, slow))
    one.set_levels_of(4, 4, [slow])
    other.set_levels_of(4, 4, [fast])
    assert len(CostModel(one).routes([tuple(one.devices[:4]), tuple(one.devices[4:])])) == 2
    seconds = [step(topology, "dp=2,tp=4", engine) for topology in (both, one, other)]
    assert seconds == [seconds[0]] * 3
    assert seconds[0] > step(Topology.hierarchical(device, 8, [fast, between]), "dp=2,tp=4", engine)
    with pytest.raises(TopologyError, match="level 'nvlink' of groups of 4 has no place on 3 devices from 5"):
        one.set_levels_of(5, 3, [slow])


@pytest.mark.parametrize(
    "base, other, said",
    [
        ("dgx-h100", "dgx-2", "a node of dgx-2 has 16 devices, and those of this cluster 8"),
        ("dgx-2", "dgx-a100", "a node of dgx-a100 has 8 devices, and those of this cluster 16"),
        ("dgx-a100", "dgx-1", "joined by nvlink of 4 and nvlink-cube of 8, in this cluster by nvlink of 8"),
    ],
)
def test_nodes_of_other_shapes_are_refused(tmp_path, base, other, said):
    text = f'[[nodes]]\ncount = 1\n[[nodes]]\ncount = 1\nbase = "{other}"\n'
    with pytest.raises(TopologyError, match=re.escape(said)):
        load_cluster(write(tmp_path, text, base))


def test_larger_nodes_are_taken_in_part_where_the_file_says_so(tmp_path):
    two = '[[nodes]]\ncount = 1\n[[nodes]]\ncount = 1\nbase = "dgx-2"\n'
    path = write(tmp_path, two)
    assert len(load_cluster(path, ["devices_per_node=4"]).devices) == 8
    assert len(load_cluster(write(tmp_path, f"devices_per_node = 8\n{two}")).devices) == 16


MIXED = """\
[[nodes]]
count = 2
[[nodes]]
count = 2
base = "dgx-h100"
[[slow]]
nodes = [0, 3]
factor = 2.0
[[slow]]
devices = [17, 23]
factor = 3.0
"""


def test_so_many_gpus_are_the_first_nodes_of_those_that_are_listed(tmp_path):
    path = write(tmp_path, MIXED)
    every = load_cluster(path).devices
    for found in sized_clusters([path], "8,16,24,32", ()):
        count = len(found.topology.devices)
        assert f"({count} GPUs)" in found.shown
        assert [each.peaks for each in found.topology.devices] == [each.peaks for each in every[:count]]
        nodes = [nodes for nodes, _ in figures_by_kind(path, found.settings)]
        assert sum(nodes) * 8 == count and found.rates(2.0).price == 2.0
    assert [len(each.topology.devices) for each in sized_clusters([path], [24, 8], ())] == [24, 8]


@pytest.mark.parametrize("count", [4, 12, 40])
def test_gpus_that_cut_a_listed_node_or_are_too_many_are_refused(tmp_path, count):
    said = f"--gpus {count}: the \\[\\[nodes\\]\\] of .*mine.toml are 4 of 8 GPUs.*a multiple of 8 up to 32"
    with pytest.raises(PlanError, match=said):
        sized_clusters([write(tmp_path, MIXED)], count, ())


def test_nodes_that_are_set_are_of_those_that_are_listed(tmp_path):
    path = write(tmp_path, MIXED)
    with pytest.raises(TopologyError, match="--set nodes=5: the file's .* are 4; take 1 to 4"):
        load_cluster(path, ["nodes=5"])
    with pytest.raises(TopologyError, match="no figure has this name"):
        load_cluster("dgx-a100", ["nodes=1"])
    with pytest.raises(TopologyError, match="there is no node 4 among"):
        load_cluster(write(tmp_path, MIXED.replace("[0, 3]", "[4]")), ["nodes=1"])


def slow(tmp_path, which: str, factor: float = 2.0, more: str = "") -> str:
    return write(tmp_path, f"{more}[[slow]]\n{which}\nfactor = {factor}\n")


def test_all_of_computation_is_as_much_slower(tmp_path):
    plain = step(load_cluster("dgx-a100"), "dp=1")
    assert step(load_cluster(slow(tmp_path, "devices = [0]")), "dp=1") == pytest.approx(2 * plain, rel=1e-6)
    assert step(load_cluster(slow(tmp_path, "devices = [1]")), "dp=1") == plain


def test_one_slow_replica_slows_all(tmp_path):
    """Where links take no time, one slow device is as bad as two, and the other waits."""
    one, both = (
        step(load_cluster(slow(tmp_path, f"devices = {which}"), FREE)) for which in ("[1]", "[0, 1]")
    )
    assert one == pytest.approx(both, rel=1e-6)
    assert one > 1.9 * step(load_cluster("dgx-a100", FREE))


KINDS = 'devices_per_node = 2\n[[nodes]]\ncount = 1\n[[nodes]]\ncount = 1\nbase = "dgx-h100"\n'


@pytest.mark.parametrize(
    "plan", ["dp=4", "dp=2,tp=2", "pp=4,microbatches=4", "dp=2,pp=2,microbatches=2,zero=3"]
)
def test_engines_agree_where_nodes_differ(tmp_path, plan):
    topology = load_cluster(slow(tmp_path, "devices = [3]", 1.7, KINDS))
    assert step(topology, plan) == step(topology, plan, "events")


def test_stages_are_proven_the_fastest_of_one_kind_of_devices_alone(tmp_path):
    """The search takes costs of the first device; of a step on several kinds its proof says nothing."""
    joint = differentiate(gpt(7, 1024, 8, 512, 16, 1000), Adam())
    kinds, alike = load_cluster(write(tmp_path, KINDS)), load_cluster("dgx-a100")
    plan = Plan.parse("pp=4,microbatches=4,stages=auto")
    notes = [" ".join(parallelize(joint, plan, topology).notes) for topology in (kinds, alike)]
    assert all("proven the fastest by them" in note for note in notes)
    said = "as if all ran on gpu:0: of the step on these 2 kinds of devices"
    assert said in notes[0] and "nothing is proven" in notes[0] and "as if" not in notes[1]


def test_a_node_with_less_memory_is_what_does_not_fit(tmp_path):
    text = '[[nodes]]\ncount = 1\n[[nodes]]\ncount = 1\ndevice = { memory = "2200 MiB" }\n'
    joint = differentiate(gpt(2, 512, 8, 128, 16, 32000), Adam())
    topology = load_cluster(write(tmp_path, text))
    eight, sixteen = (program_memory(parallelize(joint, Plan(dp=dp), topology)).missing for dp in (8, 16))
    assert eight == 0 < sixteen
