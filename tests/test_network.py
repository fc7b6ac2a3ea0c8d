"""Channels, what collectives put on them, and max-min fair shares."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_models import ACROSS, INSIDE, nodes
from simpy import Environment
from simpy.events import Timeout

from distsim.errors import TopologyError
from distsim.hardware import (
    COLLECTIVES,
    channels,
    collective_algorithms,
    collective_time,
    collective_transfer,
    load_cluster,
)
from distsim.ir import Device, Topology
from distsim.ir.link import Link
from distsim.ir.topology import Level
from distsim.simulation.events.flows import Flow, Traffic, fair_rates

# --- channels ----------------------------------------------------------------------------------------


def names(topology, a, b):
    return [channel.name for channel in channels(topology.devices[a], topology.devices[b], topology)]


def test_a_message_passes_the_ports_of_the_level_that_joins_its_ends():
    topology = nodes(2, per_node=4, per_port=2)
    assert names(topology, 0, 3) == ["nvlink port of gpu:0, out", "nvlink port of gpu:3, in"]
    assert names(topology, 1, 6) == ["nic port of gpu:0..gpu:1, out", "nic port of gpu:6..gpu:7, in"]
    topology.set_bandwidth(topology.devices[1], topology.devices[6], gbps=8)
    assert names(topology, 1, 6) == ["link gpu:1 to gpu:6"]
    assert names(topology, 6, 1) == ["link gpu:6 to gpu:1"]


def test_an_uplink_carries_what_its_ports_do_divided_by_the_oversubscription():
    topology = nodes(3, per_node=4, per_port=2, oversubscription=4)
    out, up, down, into = channels(topology.devices[0], topology.devices[11], topology)
    assert (out.capacity, into.capacity) == (ACROSS, ACROSS)
    assert (up.name, down.name) == ("nic uplink of gpu:0..gpu:3, out", "nic uplink of gpu:8..gpu:11, in")
    assert up.capacity == down.capacity == 2 * ACROSS / 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices_per_port": 0}, "devices_per_port=0 must be at least 1"),
        ({"devices_per_port": 3}, "ports of 3 devices would straddle the groups of 4"),
        ({"group_size": 8, "devices_per_port": 16}, "must be at least 1 and divide the group of 8"),
        ({"oversubscription": 0.5}, "oversubscription=0.5 must be finite and at least 1"),
        ({"oversubscription": math.inf}, "oversubscription=inf must be finite"),
    ],
)
def test_levels_that_make_no_sense(options, says):
    topology = Topology.hierarchical(Device(0, "gpu"), 16, [Level("node", Link(1e9), 4)])
    with pytest.raises(TopologyError, match=says):
        topology.add_level("all", Link(1e9), **options)


def test_oversubscription_wants_a_level_below():
    with pytest.raises(TopologyError, match="oversubscription=2 needs a level below it"):
        Topology.hierarchical(Device(0, "gpu"), 4, [Level("all", Link(1e9), oversubscription=2)])


# --- what collectives put on channels ----------------------------------------------------------------


def test_ranks_that_share_a_nic_have_half_of_it_each():
    own, shared = nodes(4, per_port=1), nodes(4, per_port=2)
    # Rings over both ranks of 4 nodes: bounded by the NICs, k rails of them or one.
    for topology, rails in ((own, 2), (shared, 1)):
        group = tuple(topology.devices)
        time = collective_algorithms("all_gather", 1e9, group, topology)["rails"]
        assert time == pytest.approx(7 / 8 * 1e9 / (rails * ACROSS), rel=1e-12)
        one = group[0], group[2]  # two ranks on their own have the NIC to themselves
        assert collective_time("send", 1e9, one, topology) == 1e9 / ACROSS
    pairwise = collective_algorithms("all_to_all", 1e9, tuple(shared.devices), shared)["pairwise"]
    assert pairwise == pytest.approx(2 * 6 / 8 * 1e9 / ACROSS, rel=1e-12)  # both ranks, 1/8 to each of 6


def test_a_preset_whose_gpus_share_nics():
    topology = load_cluster("dgx-2:2")
    devices = topology.devices
    alone = collective_time("send", 1e9, (devices[0], devices[16]), topology)
    assert alone == pytest.approx(1e9 / (0.9 * 12.5e9) + 1e-5)
    rails = collective_time("all_gather", 1e10, tuple(devices), topology)
    assert rails > 31 / 32 * 1e10 / (8 * 0.9 * 12.5e9)  # 8 NICs a node, not 16


@st.composite
def clusters(draw):
    per_node = draw(st.sampled_from([2, 3, 4]))
    ports = draw(st.sampled_from([n for n in (1, 2, 4) if per_node % n == 0]))
    start = draw(st.sampled_from([0.0, 3e-5]))
    levels = [Level("nvlink", Link(draw(st.sampled_from([2e10, 1e11])), 1e-6, 0.8), per_node, start=start)]
    count = per_node * draw(st.integers(1, 3))
    if draw(st.booleans()):
        levels.append(Level("leaf", Link(1e10, 5e-6), count if count > per_node else 2 * per_node, ports))
        count = 2 * (levels[-1].group_size or 1)
    spread = draw(st.sampled_from([1.0, 2.0, 4.0]))
    levels.append(Level("spine", Link(draw(st.sampled_from([1e10, 4e9])), 1e-5), None, ports, spread))
    return Topology.hierarchical(Device(0, "gpu"), count, levels)


@given(st.data())
@settings(max_examples=150)
def test_a_collective_alone_never_asks_for_more_than_a_channel_carries(data):
    topology = data.draw(clusters())
    devices = topology.devices
    group = tuple(data.draw(st.permutations(devices))[: data.draw(st.integers(2, len(devices)))])
    for kind in COLLECTIVES:
        ranks = group[:2] if kind == "send" else group
        transfer = collective_transfer(kind, 1e8, ranks, topology)
        assert transfer.seconds == collective_time(kind, 1e8, ranks, topology)
        assert 0 < transfer.latency < transfer.seconds
        moving = transfer.seconds - transfer.latency
        for channel, load in transfer.loads(topology).items():
            assert load <= channel.capacity * moving * (1 + 1e-9)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_rank_gets_at_least_the_bytes_that_it_lacks(kind):
    topology = nodes(4, per_node=4, per_port=1)
    group = tuple(topology.devices)[: 2 if kind == "send" else None]
    n, size = len(group), 1e9
    got = dict.fromkeys(group, 0.0)
    for (_, b), nbytes in collective_transfer(kind, size, group, topology).hops:
        got[b] += nbytes
    least = {
        "all_reduce": 2 * (n - 1) / n,
        "broadcast": 1,
        "send": 1,
        "scatter": 1 / n,
        "gather": (n - 1) / n,
    }
    takers = {"gather": group[:1], "all_reduce": group, "all_gather": group}.get(kind, group[1:])
    for device in takers:
        assert got[device] >= least.get(kind, (n - 1) / n) * size * (1 - 1e-12)


def test_an_all_reduce_over_rails_in_closed_form():
    topology = nodes(2, per_node=4, per_port=1)
    group = tuple(topology.devices)
    transfer = collective_transfer("broadcast", 1e9, group, topology)
    assert transfer.algorithm == "rails"
    assert transfer.seconds == pytest.approx(1e9 / min(INSIDE, 4 * ACROSS))
    loads = {channel.name: load for channel, load in transfer.loads(topology).items()}
    assert loads["nvlink port of gpu:1, out"] == pytest.approx(3 / 4 * 1e9)
    assert loads["nic port of gpu:1, out"] == pytest.approx(1 / 4 * 1e9)


# --- max-min fair shares -----------------------------------------------------------------------------


def test_equal_shares_of_one_channel():
    assert fair_rates([(10, {"a": 1})] * 4, {"a": 10}) == [2.5] * 4


def test_what_one_cannot_use_the_others_share():
    assert fair_rates([(1, {"a": 1}), (10, {"a": 1}), (10, {"a": 1})], {"a": 10}) == [1, 4.5, 4.5]


def test_a_flow_over_two_channels_is_bound_by_the_narrower():
    both = fair_rates([(10, {"a": 1}), (10, {"a": 1, "b": 1}), (10, {"b": 1})], {"a": 10, "b": 4})
    assert both == [8, 2, 2]


def test_sessions_over_a_net_in_closed_form():
    """Three meet on d, so they have 1/3; on a the two others have 1/2 each; b and c are never full."""
    sessions = ["a", "bd", "d", "ac", "cd"]
    rates = fair_rates([(9, dict.fromkeys(s, 1)) for s in sessions], dict.fromkeys("abcd", 1))
    assert rates == pytest.approx([1 / 2, 1 / 3, 1 / 3, 1 / 2, 1 / 3])


def test_no_flows():
    assert fair_rates([], {}) == []


@st.composite
def shared(draw, weighted=True):
    names = "abcdef"[: draw(st.integers(1, 6))]
    capacity = {name: draw(st.floats(0.1, 100)) for name in names}
    weight = st.floats(0.01, 1) if weighted else st.just(1.0)
    use = st.dictionaries(st.sampled_from(names), weight, max_size=4)
    flows = draw(st.lists(st.tuples(st.floats(0.01, 200), use), max_size=12))
    return flows, capacity


@given(shared())
def test_rates_are_max_min_fair(given_):
    """Each flow is at its limit or passes a full channel on which none has a higher rate: this is unique."""
    flows, capacity = given_
    rates = fair_rates(flows, capacity)
    used = {
        c: math.fsum(rate * use.get(c, 0) for rate, (_, use) in zip(rates, flows, strict=True))
        for c in capacity
    }
    assert all(used[c] <= capacity[c] * (1 + 1e-9) for c in capacity)
    for rate, (limit, use) in zip(rates, flows, strict=True):
        assert 0 < rate <= limit
        highest = {c: max(r for r, (_, u) in zip(rates, flows, strict=True) if c in u) for c in use}
        assert rate == limit or any(
            used[c] >= capacity[c] * (1 - 1e-9) and highest[c] <= rate * (1 + 1e-9) for c in use
        )


# --- flows under way ---------------------------------------------------------------------------------


def ends_of(arrivals, capacity):
    """When flows end that arrive at these times: (time, flow)."""
    environment, ends = Environment(), [0.0] * len(arrivals)

    def done(number):
        ends[number] = environment.now

    traffic = Traffic(environment, capacity, done)
    for number, (time, flow) in enumerate(arrivals):
        Timeout(environment, time).callbacks.append(lambda _, n=number, f=flow: traffic.enter(n, f))
    environment.run()
    return ends


def ends_by_the_definition(arrivals, capacity):
    """The same, with all rates computed anew at every arrival and end."""
    left = {n: flow.seconds for n, (_, flow) in enumerate(arrivals)}
    ends, now = [0.0] * len(arrivals), 0.0
    while left:
        active = [n for n in left if arrivals[n][0] <= now]
        flows = [arrivals[n][1] for n in active]
        uses = [(f.limit, {c: d / f.limit for c, d in f.demands}) for f in flows]
        rates = fair_rates(uses, dict(enumerate(capacity)))
        speed = {n: rate / f.limit for n, f, rate in zip(active, flows, rates, strict=True)}
        coming = [arrivals[n][0] for n in left if arrivals[n][0] > now]
        until = min([*(now + left[n] / speed[n] for n in active), *coming])
        for n in active:
            done = now + left[n] / speed[n] <= until * (1 + 1e-13)
            left[n] -= (until - now) * speed[n]
            if done:
                ends[n] = until
                del left[n]
        now = until
    return ends


def flow_of(seconds, *demands):
    return Flow(0.0, seconds, max(rate for _, rate in demands), tuple(demands))


def test_two_flows_take_exactly_twice_as_long():
    flow = flow_of(3.0, (0, 10.0))
    assert ends_of([(0.0, flow)], [10.0]) == [3.0]
    assert ends_of([(0.0, flow), (0.0, flow)], [10.0]) == [6.0, 6.0]


def test_a_flow_that_comes_later_shares_what_is_left():
    flow = flow_of(4.0, (0, 10.0))
    assert ends_of([(0.0, flow), (2.0, flow)], [10.0]) == [6.0, 8.0]


def test_flows_that_fit_beside_each_other_take_no_longer():
    assert ends_of([(0.0, flow_of(4.0, (0, 5.0))), (1.0, flow_of(4.0, (0, 5.0)))], [10.0]) == [4.0, 5.0]


@st.composite
def traffic_cases(draw):
    capacity = draw(st.lists(st.floats(1, 10), min_size=1, max_size=5))
    arrivals = []
    for _ in range(draw(st.integers(1, 10))):
        use = draw(st.sets(st.integers(0, len(capacity) - 1), min_size=1, max_size=3))
        demands = [(c, capacity[c] * draw(st.floats(0.1, 1))) for c in sorted(use)]
        arrivals.append(
            (draw(st.sampled_from([0.0, 0.5, 1.0, 2.25])), flow_of(draw(st.floats(0.1, 3)), *demands))
        )
    return arrivals, capacity


@given(traffic_cases())
@settings(max_examples=150)
def test_only_what_changes_is_computed_anew_with_the_same_result(case):
    arrivals, capacity = case
    ends = ends_of(arrivals, capacity)
    assert ends == pytest.approx(ends_by_the_definition(arrivals, capacity), rel=1e-7)
    # No window of time sees more bytes of a channel than it can carry.
    for channel, carries in enumerate(capacity):
        moved = [f.seconds * dict(f.demands).get(channel, 0.0) for _, f in arrivals]
        for begin in {time for time, _ in arrivals}:
            for end in ends:
                inside = [
                    m for m, (t, _), e in zip(moved, arrivals, ends, strict=True) if t >= begin and e <= end
                ]
                assert math.fsum(inside) <= carries * max(end - begin, 0.0) * (1 + 1e-6)


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=8))
def test_work_is_conserved(sizes):
    """One channel that every flow could fill is busy until the last byte is through."""
    ends = ends_of([(0.0, flow_of(size, (0, 10.0))) for size in sizes], [10.0])
    assert max(ends) == pytest.approx(math.fsum(sizes), rel=1e-9)
    assert sorted(range(len(sizes)), key=sizes.__getitem__) == sorted(
        range(len(sizes)), key=lambda n: (ends[n], sizes[n])
    )
