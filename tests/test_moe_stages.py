"""Layers of experts as blocks of a pipeline: what they cost, and how their loads move the split."""

from itertools import pairwise

import pytest
from topology_models import bare_cluster

from distsim.errors import PartitionError
from distsim.executor import CostModel
from distsim.hardware import collective_time
from distsim.hardware.rank_axes import RankAxes
from distsim.ir import Function
from distsim.models import Routing, draw_routing, moe
from distsim.ops.parts import Groups
from distsim.plan.rank_layout import ExpertRanks
from distsim.stage_balance import BlockCost, auto_split, split_time
from distsim.transforms import block_costs, differentiate

RANKS, LAYERS, SEQ = 4, 8, 1024
EVEN = draw_routing(16, 2, SEQ)
SKEWED = draw_routing(16, 2, SEQ, concentration=0.3, seed=1)
TOPOLOGY = bare_cluster("dgx-a100")
COSTS = CostModel(TOPOLOGY)
MESH = RankAxes.of(dp=RANKS, tp=1, ep=ExpertRanks(RANKS)).mesh(TOPOLOGY.devices[:RANKS])


def joint(loads: list[Routing], shared: int = 0) -> Function:
    sizes = {
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 4,
        "ffn": 2048,
        "experts": 16,
        "top_k": 2,
        "vocab": 8192,
    }
    options = {"layers": len(loads), "routings": loads, "shared": shared}
    return differentiate(moe(seq=SEQ, batch=RANKS, **sizes, **options), None)


def layer_cost(load: Routing, shared: int = 0) -> BlockCost:
    return block_costs(joint([load], shared=shared), COSTS, MESH)[1]


def test_rows_go_to_the_experts_and_back():
    """A layer takes longer than without links by two all-to-alls of the busiest rank's rows, and what tells
    the ranks of these."""
    load = Routing((SEQ,) * 16, SKEWED.slots)
    layer = block_costs(joint([load]), COSTS, MESH)[1]
    nbytes = RANKS * Groups(load.slots).largest(RANKS) * 1024 * 4
    moved = collective_time("all_to_all", nbytes, tuple(TOPOLOGY.devices[:RANKS]), TOPOLOGY)
    assert 0 < 2 * moved < layer.forward
    fast = CostModel(TOPOLOGY)
    fast.communication_seconds = lambda signature, group: 0.0
    without = block_costs(joint([load]), fast, MESH)[1]
    told = collective_time("all_gather", RANKS * 16 * 8, tuple(TOPOLOGY.devices[:RANKS]), TOPOLOGY)
    assert layer.forward - without.forward == pytest.approx(2 * moved + told, rel=0.001)
    # The gradient of the shared input's other reader runs beside one of them.
    assert moved < layer.backward - without.backward < 2 * moved


def test_the_busiest_rank_bounds_the_layer_and_the_capacity_bounds_the_busiest_rank():
    even, skewed = layer_cost(EVEN), layer_cost(SKEWED)
    assert SKEWED.rows == EVEN.rows and Groups(SKEWED.slots).largest(RANKS) > 1.5 * Groups(
        EVEN.slots
    ).largest(RANKS)
    assert skewed.work > 1.3 * even.work
    capped = [
        layer_cost(draw_routing(16, 2, SEQ, 0.3, capacity, 1, False)).work
        for capacity in (1.0, 1.25, 2.0, 16.0)
    ]
    assert all(a <= b for a, b in pairwise(capped))
    assert capped[0] <= even.work * 1.001
    assert capped[-1] == skewed.work
    # Padded to the capacity a layer takes as long however it is skewed.
    padded, even = (layer_cost(draw_routing(16, 2, SEQ, chance, 1.25, 1)).work for chance in (0.3, None))
    assert padded == even >= capped[1]


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
        costs = block_costs(joint([SKEWED if i in skewed else EVEN for i in range(LAYERS)]), COSTS, MESH)
        found = auto_split(costs, 4, 16)
        assert found.proven
        return costs, found.sizes

    even, early, late = split(range(0)), split(range(2)), split(range(6, 8))
    # Of the blocks the first is the embedding, the last two are the norm and the head.
    assert even[1] == (3, 2, 2, 4)
    assert early[1] == (2, 2, 3, 4)
    assert late[1] == (4, 2, 2, 3)
    for costs, sizes in (early, late):
        assert split_time(costs, sizes, 16) < 0.98 * split_time(costs, even[1], 16)


def test_a_split_that_does_not_fit_is_refused_with_what_is_missing():
    costs = block_costs(joint([EVEN] * LAYERS), COSTS, MESH)
    least = max(auto_split(costs, 4, 16).memory)
    assert max(auto_split(costs, 4, 16, memory=least).memory) <= least
    with pytest.raises(PartitionError, match="GiB|MiB"):
        auto_split(costs, 4, 16, memory=least / 4)
