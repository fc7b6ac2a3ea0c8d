"""Devices, topologies and the closed forms of collectives."""

import dataclasses
import math
import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsim.errors import CostError, TopologyError
from distsim.hardware import (
    COLLECTIVES,
    collective_algorithms,
    collective_time,
    load_cluster,
)
from distsim.ir.device import Device
from distsim.ir.link import Link
from distsim.ir.topology import Level, Topology


def gpus(count: int) -> list[Device]:
    return [Device(i, "gpu") for i in range(count)]


def pair_table(count: int, gbps: float = 200.0, latency: float = 0.0) -> Topology:
    topology = Topology()
    devices = [topology.add_device("gpu") for _ in range(count)]
    for a in devices:
        for b in devices[: a.id]:
            topology.set_bandwidth(a, b, gbps, latency)
    return topology


def cluster(nodes: int, per_node: int, inside: Link, across: Link) -> Topology:
    levels = [Level("inside", inside, per_node), Level("across", across)]
    return Topology.hierarchical(Device(0, "gpu"), nodes * per_node, levels)


class TestDevice:
    def test_defaults_are_those_of_the_notebooks(self):
        device = Topology().add_device("gpu")
        assert (device.throughput, device.dram_bandwidth, device.kernel_launch_overhead) == (
            1.4e13,
            9e11,
            1e-5,
        )
        assert device.memory == math.inf
        assert device.flops_efficiency == device.bytes_efficiency == 1.0

    def test_value_semantics(self):
        a, b = Device(3, "gpu", memory=8e10), Device(3, "gpu", memory=8e10)
        assert a == b
        assert hash(a) == hash(b)
        assert a != dataclasses.replace(a, kind="cpu")
        assert str(a) == repr(a) == "gpu:3"
        assert {pickle.loads(pickle.dumps(a)): 1}[b] == 1

    def test_hash_does_not_depend_on_the_process(self):
        # Numbers hash alike in every process, strings do not; a pickled device keeps its hash.
        assert hash(Device(3, "gpu")) == hash(Device(3, "cpu")) == hash((3, 1.4e13, 9e11, math.inf))

    @pytest.mark.parametrize(
        "change",
        [
            {"throughput": 0.0},
            {"dram_bandwidth": math.inf},
            {"dram_bandwidth": math.nan},
            {"kernel_launch_overhead": -1e-6},
            {"memory": -1.0},
            {"memory": math.nan},
            {"flops_efficiency": 1.5},
            {"bytes_efficiency": 0.0},
            {"peaks": (("float32", -1.0),)},
        ],
    )
    def test_refuses_figures_without_meaning(self, change: dict[str, object]):
        with pytest.raises(TopologyError, match=f"gpu:0.*{next(iter(change))}"):
            Device(0, "gpu", **change)  # type: ignore[arg-type]


class TestTopology:
    def test_gbps_are_gigabits(self):
        topology = pair_table(2, gbps=200, latency=3e-6)
        a, b = topology.devices
        assert topology.link(a, b) == topology.link(b, a) == Link(25e9, 3e-6)
        assert topology.level(a, b) is None

    def test_missing_link_says_how_to_set_it(self):
        topology = Topology()
        a, b = topology.add_device("cpu"), topology.add_device("gpu")
        with pytest.raises(TopologyError, match=r"cpu:0 and gpu:1: call set_bandwidth\(cpu:0, gpu:1, gbps\)"):
            topology.link(a, b)

    def test_both_ends_must_belong(self):
        topology = pair_table(2)
        for stranger in (Device(7, "gpu"), Device(0, "cpu")):
            with pytest.raises(TopologyError, match=f"{stranger} is not one of the 2 devices"):
                topology.set_bandwidth(topology.devices[1], stranger, 100)
        with pytest.raises(TopologyError, match="itself"):
            topology.set_bandwidth(topology.devices[0], topology.devices[0], 100)

    def test_devices_is_a_copy(self):
        topology = pair_table(2)
        topology.devices.clear()
        assert len(topology.devices) == 2

    def test_smallest_level_that_holds_both(self):
        inside, pod, across = Link(3e11), Link(5e10), Link(1e10)
        levels = [Level("node", inside, 8), Level("pod", pod, 64), Level("cluster", across)]
        topology = Topology.hierarchical(Device(0, "gpu"), 256, levels)
        d = topology.devices
        assert topology.link(d[0], d[7]) == inside
        assert topology.link(d[7], d[8]) == pod
        assert topology.link(d[63], d[64]) == across
        assert topology.level(d[7], d[8]).name == "pod"
        topology.set_bandwidth(d[0], d[7], 8)
        assert topology.link(d[7], d[0]).bandwidth == 1e9
        cut = topology.groups_by_level([d[0], d[9], d[1], d[65]])
        assert cut["node"] == ((d[0], d[1]), (d[9],), (d[65],))
        assert cut["pod"] == ((d[0], d[9], d[1]), (d[65],))
        assert cut["cluster"] == ((d[0], d[9], d[1], d[65]),)

    def test_without_a_top_level_nothing_joins_the_groups(self):
        topology = Topology.hierarchical(Device(0, "gpu"), 4, [Level("node", Link(1e9), 2)])
        with pytest.raises(TopologyError, match="gpu:1 and gpu:2"):
            topology.link(topology.devices[1], topology.devices[2])

    def test_levels_must_nest(self):
        topology = Topology.hierarchical(Device(0, "gpu"), 24, [Level("node", Link(1e9), 8)])
        with pytest.raises(TopologyError, match="12 must be a multiple"):
            topology.add_level("pod", Link(1e9), 12)
        with pytest.raises(TopologyError, match="already"):
            topology.add_level("node", Link(1e9), 16)
        topology.add_level("all", Link(1e9))
        with pytest.raises(TopologyError, match="before"):
            topology.add_level("more", Link(1e9), 32)

    @pytest.mark.parametrize(
        "bad", [(0.0, 0.0, 1.0), (1e9, -1.0, 1.0), (1e9, 0.0, 1.1), (math.nan, 0.0, 1.0)]
    )
    def test_link_refuses(self, bad: tuple[float, float, float]):
        with pytest.raises(TopologyError):
            Link(*bad)


class TestClosedForms:
    @pytest.mark.parametrize("n", [2, 3, 8])
    def test_flat(self, n: int):
        topology = pair_table(n, gbps=80, latency=2e-6)
        group, size, b, a = tuple(topology.devices), 6e8, 1e10, 2e-6
        one_pass = (n - 1) / n * size / b + (n - 1) * a
        expected = {
            "all_reduce": 2 * one_pass,
            "broadcast": size / b + (n - 1) * a,
            **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather"), one_pass),
        }
        for kind, seconds in expected.items():
            assert collective_time(kind, size, group, topology) == pytest.approx(seconds, rel=1e-12), kind
        sent = collective_time("send", size, group[:2], topology)
        assert sent == pytest.approx(size / b + a, rel=1e-12)

    @pytest.mark.parametrize("kind", COLLECTIVES)
    @pytest.mark.parametrize(("places", "taken"), [((0, 1, 2, 3), 3e-5), ((0, 1, 4, 5), 7e-5)])
    def test_a_start_is_taken_once_that_of_the_slowest_level(self, kind: str, places: tuple[int, ...], taken):
        def seconds(inside: float, across: float) -> float:
            levels = [
                Level("in", Link(4e9, 1e-6), 4, start=inside),
                Level("out", Link(1e9, 5e-6), start=across),
            ]
            topology = Topology.hierarchical(Device(0, "gpu"), 8, levels)
            ranks = (places[0], places[-1]) if kind == "send" else places
            return collective_time(kind, 1e6, tuple([topology.devices[i] for i in ranks]), topology)

        assert seconds(3e-5, 7e-5) == pytest.approx(seconds(0.0, 0.0) + taken, rel=1e-12)

    @pytest.mark.parametrize("kind", COLLECTIVES)
    @pytest.mark.parametrize(("places", "segment"), [((0, 1, 2, 3), 3e-6), ((0, 1, 4, 5), 7e-6)])
    def test_segments_cost_twice_the_root_of_their_time_and_of_what_the_bytes_take(
        self, kind: str, places: tuple[int, ...], segment
    ):
        """As the best number of them, found by trying, does."""

        def seconds(nbytes: float, inside: float, across: float) -> float:
            levels = [
                Level("in", Link(4e9, 1e-6), 4, start=2e-5, segment_time=inside),
                Level("out", Link(1e9, 5e-6), segment_time=across),
            ]
            topology = Topology.hierarchical(Device(0, "gpu"), 8, levels)
            ranks = (places[0], places[-1]) if kind == "send" else places
            return collective_time(kind, nbytes, tuple([topology.devices[i] for i in ranks]), topology)

        latency, alone = seconds(0.0, 3e-6, 7e-6), seconds(1e7, 0.0, 0.0)
        moved = alone - latency
        best = min(moved + k * segment + moved / k for k in range(1, 500))
        assert seconds(1e7, 3e-6, 7e-6) == pytest.approx(latency + best, rel=1e-4)
        assert latency == seconds(0.0, 0.0, 0.0)

    @pytest.mark.parametrize("kind", COLLECTIVES)
    def test_one_rank_costs_nothing(self, kind: str):
        topology = pair_table(2)
        assert collective_time(kind, 1e9, (topology.devices[0],), topology) == 0

    def test_all_reduce_is_reduce_scatter_and_all_gather(self):
        topology = pair_table(5, latency=1e-6)
        group = tuple(topology.devices)
        parts = [collective_time(k, 7e6, group, topology) for k in ("reduce_scatter", "all_gather")]
        assert collective_time("all_reduce", 7e6, group, topology) == pytest.approx(sum(parts))

    def test_slowest_link_of_the_ring_counts(self):
        topology = pair_table(4, gbps=80)
        a, b, c, d = topology.devices
        topology.set_bandwidth(a, c, 8)  # not between neighbours: a ring does not use it
        assert collective_time("all_gather", 4e9, (a, b, c, d), topology) == pytest.approx(0.3)
        assert collective_time("all_gather", 4e9, (a, c, b, d), topology) == pytest.approx(3.0)
        # An exchange uses every pair: a and c need 1 s for theirs and 0.1 s for each of two others.
        assert collective_time("all_to_all", 4e9, (a, b, c, d), topology) == pytest.approx(1.2)

    def test_efficiency_scales_bandwidth(self):
        group = tuple(gpus(2))
        for efficiency in (1.0, 0.5):
            topology = Topology.hierarchical(group[0], 2, [Level("l", Link(1e9, 0.0, efficiency))])
            assert collective_time("all_reduce", 1e9, group, topology) == pytest.approx(1 / efficiency)

    def test_a_changed_topology_is_costed_anew(self):
        topology = pair_table(2, gbps=8)
        group = tuple(topology.devices)
        assert collective_time("send", 1e9, group, topology) == 1
        topology.set_bandwidth(*group, 16)
        assert collective_time("send", 1e9, group, topology) == 0.5

    def test_errors(self):
        topology = pair_table(3)
        group = tuple(topology.devices)
        with pytest.raises(CostError, match="unknown collective 'reduce'"):
            collective_time("reduce", 1, group, topology)
        for size in (-1, math.nan, math.inf):
            with pytest.raises(CostError, match="bytes"):
                collective_time("all_reduce", size, group, topology)
        with pytest.raises(CostError, match="group has 3"):
            collective_time("send", 1, group, topology)
        with pytest.raises(CostError, match="empty"):
            collective_time("send", 1, (), topology)
        with pytest.raises(CostError, match="twice"):
            collective_time("all_reduce", 1, (group[0], group[0]), topology)


class TestHierarchy:
    inside, across = Link(1e11), Link(1e10)

    def test_algorithms_of_an_all_reduce(self):
        topology = cluster(4, 8, self.inside, self.across)
        times = collective_algorithms("all_reduce", 3.2e9, tuple(topology.devices), topology)
        assert times["ring"] == pytest.approx(2 * 31 / 32 * 3.2e9 / 1e10)
        assert times["rails"] == pytest.approx(2 * 31 / 32 * 3.2e9 / min(1e11, 8 * 1e10))
        inside = 2 * 7 / 8 * 3.2e9 / 1e11
        assert times["hierarchical"] == pytest.approx(inside + 2 * 3 / 4 * 3.2e9 / 8 / 1e10)
        assert collective_time("all_reduce", 3.2e9, tuple(topology.devices), topology) == times["rails"]

    def test_inside_a_node_only_the_ring(self):
        topology = cluster(4, 8, self.inside, self.across)
        node = tuple(topology.devices[8:16])
        assert collective_algorithms("all_reduce", 8e9, node, topology) == {
            "ring": pytest.approx(2 * 7 / 8 * 8e9 / 1e11)
        }

    def test_latency_decides_for_small_messages(self):
        topology = cluster(64, 8, Link(1e11, 1e-6), Link(1e10, 1e-5))
        group = tuple(topology.devices)
        times = collective_algorithms("all_reduce", 1024, group, topology)
        # inside: 2 x 7 steps; across: a tree of depth 6, down and up
        latency = 14 * 1e-6 + 12 * 1e-5
        assert min(times, key=lambda name: times[name]) == "hierarchical"
        assert times["hierarchical"] == pytest.approx(latency, rel=0.01)
        one_a_node = collective_algorithms("all_reduce", 1024, group[::8], topology)
        assert one_a_node["tree"] == pytest.approx(12 * 1e-5, rel=0.01)
        assert one_a_node["tree"] < one_a_node["ring"]

    def test_uneven_groups_fall_back_to_the_ring(self):
        topology = cluster(2, 4, self.inside, self.across)
        group = tuple(topology.devices[:5])
        assert list(collective_algorithms("all_gather", 1e9, group, topology)) == ["ring"]

    def test_three_levels(self):
        levels = [Level("node", Link(1e11), 4), Level("pod", Link(1e10), 16), Level("all", Link(1e9))]
        topology = Topology.hierarchical(Device(0, "gpu"), 64, levels)
        group = tuple(topology.devices)
        times = collective_algorithms("all_reduce", 1.6e9, group, topology)
        # S over 4 inside, S/4 over 16 across, of which 4 to a pod; by rails: min(1e10, 4 x 1e9).
        across = min(2 * 15 / 16 * 4e8 / 4e9, 2 * 3 / 4 * 4e8 / 1e10 + 2 * 3 / 4 * 1e8 / 1e9)
        assert times["hierarchical"] == pytest.approx(2 * 3 / 4 * 1.6e9 / 1e11 + across)

    @pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "broadcast"])
    def test_what_is_no_all_reduce_goes_around_rings(self, kind):
        topology = cluster(64, 8, Link(1e11, 1e-6), Link(1e10, 1e-5))
        times = collective_algorithms(kind, 1024, tuple(topology.devices), topology)
        assert set(times) == {"ring", "rails"}
        across = 63 if kind == "broadcast" else 64
        assert min(times.values()) == pytest.approx((511 - across) * 1e-6 + across * 1e-5, rel=0.001)

    def test_a_ring_over_nodes_comes_back_to_the_first(self):
        """Beside its bytes, us on p5.48xlarge: crazyguitar/aws-gpu-communication-benchmark, fd167f9."""
        rates = {2: 140.06, 4: 86.25, 8: 47.03, 16: 25.10, 32: 12.43}  # GB/s of 32 MiB, nccl_all_gather.csv
        hops: list[float] = []
        for nodes, rate in rates.items():

            def seconds(latency: str, nodes: int = nodes) -> float:
                settings = ["efa.efficiency=1", "nvlink.latency=0us", f"efa.latency={latency}"]
                topology = load_cluster(f"aws-p5:{nodes}", settings)
                return collective_time("all_gather", 2**25, tuple(topology.devices), topology)

            alone = seconds("0us")
            hops.append((2**25 / (rate * 1e9) - alone) / (seconds("1s") - alone))
        assert max(hops) / min(hops) < 1.25  # it would be 1.6 with a hop less

    def test_exchange_counts_peers_by_level(self):
        topology = cluster(2, 4, self.inside, self.across)
        group = tuple(topology.devices)
        times = collective_algorithms("all_to_all", 8e9, group, topology)
        assert times == {"pairwise": pytest.approx(max(3 * 1e9 / 1e11, 4 * 1e9 / 1e10))}  # both at once
        table = Topology()
        devices = [table.add_device("gpu") for _ in range(8)]
        for a in devices:
            for b in devices[: a.id]:
                table.set_link(a, b, topology.link(a, b))
        flat = collective_algorithms("all_to_all", 8e9, tuple(devices), table)
        assert flat["pairwise"] == pytest.approx(3 * 1e9 / 1e11 + 4 * 1e9 / 1e10)  # one link after the other

    def test_messages_are_under_way_together(self):
        """The next is posted 2 us after the one before, or when that is there."""
        topology = cluster(4, 8, Link(1e11, 1e-6), Link(1e10, 1e-5))
        found = [
            collective_time("all_to_all", 0, tuple(topology.devices[:ranks]), topology)
            for ranks in (8, 16, 32)
        ]
        assert found == pytest.approx([7e-6, 1e-5 + 7 * 2e-6, 1e-5 + 23 * 2e-6])

    def test_measured_all_to_alls(self):
        """GB/s on p5.48xlarge: crazyguitar/aws-gpu-communication-benchmark, fd167f9, nccl_alltoall.csv."""
        measured = {(2, 32): 47.78, (2, 2048): 84.53, (8, 32): 29.13, (8, 2048): 50.41, (32, 2048): 40.94}
        for (nodes, mib), rate in measured.items():
            topology = load_cluster(f"aws-p5:{nodes}")
            seconds = collective_time("all_to_all", mib * 2**20, tuple(topology.devices), topology)
            assert seconds == pytest.approx(mib * 2**20 / (rate * 1e9), rel=0.12), (nodes, mib)

    @given(
        kind=st.sampled_from(COLLECTIVES),
        nodes=st.integers(1, 5),
        per_node=st.sampled_from([2, 3, 8]),
        size=st.floats(0, 1e12),
        speeds=st.tuples(st.floats(1e6, 1e12), st.floats(1e6, 1e12)),
        latencies=st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3)),
        faster=st.tuples(st.floats(1, 10), st.floats(1, 10)),
    )
    def test_more_bandwidth_is_never_slower(
        self,
        kind: str,
        nodes: int,
        per_node: int,
        size: float,
        speeds: tuple[float, float],
        latencies: tuple[float, float],
        faster: tuple[float, float],
    ):
        def seconds(factors: tuple[float, float]) -> float:
            links = [Link(s * f, a) for s, a, f in zip(speeds, latencies, factors, strict=True)]
            topology = cluster(nodes, per_node, *links)
            devices = tuple(topology.devices)
            group = (devices[0], devices[-1]) if kind == "send" else devices
            return collective_time(kind, size, group, topology)

        assert seconds(faster) <= seconds((1.0, 1.0)) * (1 + 1e-12)

    @given(st.sampled_from([k for k in COLLECTIVES if k != "send"]), st.floats(0, 1e11), st.floats(0, 1e11))
    def test_more_bytes_are_never_faster(self, kind: str, a: float, b: float):
        topology = cluster(3, 4, Link(1e11, 1e-6), Link(1e10, 1e-5))
        group = tuple(topology.devices)
        small, large = (collective_time(kind, size, group, topology) for size in sorted((a, b)))
        assert small <= large

    def test_a_thousand_ranks_are_quick(self):
        topology = load_cluster("dgx-h100:128")
        group = tuple(topology.devices)
        start = time.perf_counter()
        for kind in ("all_reduce", "all_to_all"):
            collective_time(kind, 1e9, group, topology)
        first = time.perf_counter() - start
        start = time.perf_counter()
        for size in range(100):
            collective_time("all_reduce", size, group, topology)
        assert first < 2.0
        assert time.perf_counter() - start < 1.0
