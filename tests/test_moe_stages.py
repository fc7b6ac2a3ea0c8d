"""Layers of experts as blocks of a pipeline: what they cost, and how their loads move the split."""

from itertools import pairwise

import pytest

from distsim.errors import PartitionError
from distsim.executor import CostModel, Simulator
from distsim.hardware import collective_time, load_cluster
from distsim.ir import Function, Mesh, Topology
from distsim.models import Routing, deepseek, draw_routing, llama, moe
from distsim.stage_balance import BlockCost, auto_split, call_costs, split_time
from distsim.transforms import SGD, differentiate

RANKS, LAYERS, SEQ = 4, 8, 1024
EVEN = draw_routing(16, 2, SEQ)
SKEWED = draw_routing(16, 2, SEQ, concentration=0.3, seed=1)
TOPOLOGY = load_cluster("dgx-a100")
COSTS = CostModel(TOPOLOGY)


def joint(loads: list[Routing], topology: Topology = TOPOLOGY, shared: int = 0) -> Function:
    mesh = Mesh(topology.devices[:RANKS], ep=RANKS)
    sizes = {
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 4,
        "ffn": 2048,
        "experts": 16,
        "top_k": 2,
        "vocab": 8192,
    }
    options = {"layers": len(loads), "routings": loads, "shared": shared, "mesh": mesh}
    return differentiate(moe(seq=SEQ, batch=1, **sizes, **options), None)


def layer_cost(load: Routing, shared: int = 0) -> BlockCost:
    return call_costs(joint([load], shared=shared), COSTS)[1]


def test_the_blocks_of_one_device_together_take_what_the_function_takes():
    mesh = Mesh(TOPOLOGY.devices[:1], ep=1)
    sizes = {"hidden": 256, "heads": 8, "ffn": 512, "seq": 64, "vocab": 1000, "experts": 4, "top_k": 2}
    function = differentiate(deepseek(3, **sizes, dense=1, batch=2, mesh=mesh), None)
    costs = call_costs(function, COSTS)
    assert [cost.name for cost in costs] == ["embedding", "h0", "h1", "h2", "head"]
    on_one = Simulator(COSTS).interpret(function, function.inputs)
    total = sum(cost.forward + cost.backward for cost in costs) + costs[0].shared
    assert total == pytest.approx(on_one.step_time, rel=1e-9)
    assert sum(cost.state for cost in costs) == 2 * sum(v.type.nbytes for v in function.parameters)
    assert {cost.sent for cost in costs} == {2 * 64 * 256 * 4, 0}


def test_functions_without_blocks_are_refused():
    with pytest.raises(PartitionError, match="backward Call"):
        call_costs(llama(2, 16, 4, 2, 8, 4, 1, 16), COSTS)
    with pytest.raises(PartitionError, match="without an optimizer"):
        call_costs(differentiate(llama(2, 16, 4, 2, 8, 4, 1, 16), SGD()), COSTS)


def test_rows_go_to_the_experts_and_back():
    """A layer takes longer than without links by two all-to-alls of the busiest rank's rows."""
    load = Routing((SEQ,) * 16, SKEWED.slots)
    layer = call_costs(joint([load]), COSTS)[1]
    nbytes = RANKS * load.busiest(RANKS) * 1024 * 4
    moved = collective_time("all_to_all", nbytes, tuple(TOPOLOGY.devices[:RANKS]), TOPOLOGY)
    assert 0 < 2 * moved < layer.forward
    fast = CostModel(TOPOLOGY)
    fast.communication_seconds = lambda signature, group: 0.0
    without = call_costs(joint([load]), fast)[1]
    beside = TOPOLOGY.devices[0].kernel_launch_overhead  # a rank takes its part of the slots meanwhile
    assert layer.forward - without.forward == pytest.approx(2 * moved - beside, rel=0.001)
    # The gradient of the shared input's other reader runs beside one of them.
    assert moved < layer.backward - without.backward < 2 * moved


def test_the_busiest_rank_bounds_the_layer_and_the_capacity_bounds_the_busiest_rank():
    even, skewed = layer_cost(EVEN), layer_cost(SKEWED)
    assert SKEWED.rows == EVEN.rows and SKEWED.busiest(RANKS) > 1.5 * EVEN.busiest(RANKS)
    assert skewed.work > 1.3 * even.work
    capped = [
        layer_cost(draw_routing(16, 2, SEQ, 0.3, capacity, 1)).work for capacity in (1.0, 1.25, 2.0, 16.0)
    ]
    assert all(a <= b for a, b in pairwise(capped))
    assert capped[0] <= even.work * 1.001
    assert capped[-1] == skewed.work


def test_shared_experts_are_counted():
    """Three products of every token beside the routed ones; what else differs moves bytes."""
    plain, shared = layer_cost(EVEN), layer_cost(EVEN, shared=2)
    device = TOPOLOGY.devices[0]
    products = 3 * 2 * SEQ * 1024 * (2 * 2048) / (device.peak("float32") * device.flops_efficiency)
    assert products < shared.forward - plain.forward < 1.2 * products
    assert 2 * products < shared.backward - plain.backward < 2.3 * products


def test_imbalance_of_routing_moves_the_split():
    """The same model and plan: stages whose layers have a busy rank hold fewer layers."""

    def split(skewed: range) -> tuple[tuple[BlockCost, ...], tuple[int, ...]]:
        costs = call_costs(joint([SKEWED if i in skewed else EVEN for i in range(LAYERS)]), COSTS)
        found = auto_split(costs, 4, 16)
        assert found.proven
        return costs, found.sizes

    even, early, late = split(range(0)), split(range(2)), split(range(6, 8))
    assert even[1] == (3, 2, 2, 3)  # of the blocks, the first is the embedding and the last the head
    assert early[1] == (2, 2, 3, 3)
    assert late[1] == (4, 2, 2, 2)
    for costs, sizes in (early, late):
        assert split_time(costs, sizes, 16) < 0.97 * split_time(costs, even[1], 16)


def test_a_split_that_does_not_fit_is_refused_with_what_is_missing():
    costs = call_costs(joint([EVEN] * LAYERS), COSTS)
    least = max(auto_split(costs, 4, 16).memory)
    assert max(auto_split(costs, 4, 16, memory=least).memory) <= least
    with pytest.raises(PartitionError, match="GiB|MiB"):
        auto_split(costs, 4, 16, memory=least / 4)
