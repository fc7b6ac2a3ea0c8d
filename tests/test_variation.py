"""The slowest of many devices: what a cluster's size does to the speed of products."""

from statistics import NormalDist, fmean

import pytest

from distsim import simulate
from distsim.errors import TopologyError
from distsim.hardware import load_cluster
from distsim.hardware.variation import speed_of_slowest


@pytest.mark.parametrize("count", [8, 64])
def test_it_is_the_mean_of_the_largest(count):
    """Against means of the largest of normal variables that are drawn."""
    times = NormalDist().samples(2000 * count, seed=count)
    largest = fmean(max(times[first : first + count]) for first in range(0, len(times), count))
    assert 1 / speed_of_slowest(0.1, count) == pytest.approx(1 + 0.1 * largest, rel=0.01)


def test_a_step_of_many_devices_has_slower_products_and_nothing_else():
    one, many = (load_cluster(f"dgx-a100:{nodes}").devices[0] for nodes in (1, 128))
    assert one.flops_efficiency / many.flops_efficiency == pytest.approx(1.027, abs=0.002)
    assert one.dram_bandwidth == many.dram_bandwidth
    alike = load_cluster("dgx-a100:128", ["device.variation=0"]).devices[0]
    assert alike.flops_efficiency == pytest.approx(0.869)


def test_the_peak_of_a_slow_device_is_that_of_its_kind(tmp_path):
    """All of its computation takes twice as long, so it reaches half of the share that it would."""
    path = tmp_path / "slow.toml"
    path.write_text('base = "dgx-a100"\n[[slow]]\nnodes = [0]\nfactor = 2')
    plain, slow = (
        simulate("mlp:layers=2,width=256", cluster, "dp=1", 64, kernels="ops")
        for cluster in ("dgx-a100", str(path))
    )
    assert slow.step_time == pytest.approx(2 * plain.step_time, rel=1e-6)
    assert slow.peak_rate == plain.peak_rate
    assert (slow.mfu, slow.hfu) == pytest.approx((plain.mfu / 2, plain.hfu / 2), rel=1e-6)


def test_a_variation_that_is_none():
    with pytest.raises(TopologyError, match="variation=2 is more than"):
        load_cluster("dgx-a100", ["device.variation=2"])
