"""What a training takes: the closed forms of Young and Daly, dollars and energy, and how clusters compare."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import lambertw
from training_models import topology_of

from distsim.errors import PlanError
from distsim.hardware import figures
from distsim.models import mlp
from distsim.plan_search import search
from distsim.plan_search.training.columns import cost_columns, plan_cost_columns
from distsim.plan_search.training.estimate import OBJECTIVES, DeviceRates, Training, TrainingCosts
from distsim.plan_search.training.goodput import (
    FAILURES,
    HOUR,
    Reliability,
    daly_interval,
    progress_share,
    young_interval,
)
from distsim.plan_search.views.cluster_comparison import ClusterComparison
from distsim.study.clusters import sized_clusters
from distsim.transforms import Adam, differentiate

SECONDS = st.floats(1.0, 1e6)


def best_interval(between, write):
    """Where the derivative of progress_share() is 0, for W that solves W exp(W) = -exp(-1 - delta/M)."""
    return between * (1 + lambertw(-math.exp(-1 - write / between)).real)


@given(SECONDS, st.floats(1e-5, 0.1), st.floats(0, 0.1))
def test_intervals_are_near_the_best_one(between, write, restart):
    write, restart = write * between, restart * between
    best = best_interval(between, write)
    assert young_interval(between, write) == math.sqrt(2 * write * between)
    assert daly_interval(between, write) == pytest.approx(best, rel=2e-3)
    shares = [progress_share(between, write, restart, tau) for tau in (best * 0.97, best, best * 1.03)]
    assert shares[1] == max(shares)
    # The higher order is never worse than the first, to rounding.
    daly, young = (
        progress_share(between, write, restart, order(between, write))
        for order in (daly_interval, young_interval)
    )
    assert daly >= young * (1 - 1e-9) and daly == pytest.approx(shares[1], rel=1e-5)


def test_limits_of_goodput():
    assert Reliability(failures=0.0).goodput(1024, 10**12).share == 1.0
    # Checkpoints that cost nothing: what is lost is the time to restart, and failures while restarting.
    free = Reliability(storage=1.0, restart=60.0).goodput(8, 0)
    assert free.share == math.exp(-60.0 / free.between)
    # Rare failures: 1 - sqrt(2 delta / M) is lost, to first order.
    rare = Reliability(failures=1e-7, restart=0.0).goodput(1, 10**9)
    assert 1 - rare.share == pytest.approx(math.sqrt(2 * rare.write / rare.between), rel=1e-2)
    assert daly_interval(10.0, 20.0) == 10.0  # no shorter than M, where a checkpoint takes as long as 2 M
    assert Reliability(failures=1e9).goodput(1, 10**15).share == 0.0
    assert progress_share(math.inf, 1.0, 5.0, 9.0) == 0.9


def test_twice_the_devices_fail_twice_as_often_and_write_twice_as_fast():
    one, two = (Reliability().goodput(count, 10**12) for count in (512, 1024))
    assert one.between == 2 * two.between and one.write == 2 * two.write
    assert one.young == pytest.approx(2 * two.young) and one.share > two.share


def test_llama_3_made_progress_for_over_90_percent_of_its_time():
    """405B parameters with 16 bytes each on 16,384 GPUs: the paper says so of its 54 days, section 3.3.4."""
    found = Reliability().goodput(16384, 405 * 10**9 * 16)
    assert 0.9 < found.share < 0.95
    assert found.between == pytest.approx(3.1 * HOUR, rel=0.01)
    assert pytest.approx(419 / 54 / 24) == FAILURES * 16384


def test_daly_is_what_chance_gives():
    """Failures drawn at random: work in pieces, each written, begun anew after every failure."""
    rng, between, write, restart, interval = Random(7), 1000.0, 20.0, 50.0, 180.0
    clock, done, pieces, fails = 0.0, 0, 4000, rng.expovariate(1 / between)
    while done < pieces:
        need = interval + write
        if clock + need <= fails:
            clock, done = clock + need, done + 1
            continue
        while True:  # until a restart goes through
            clock, fails = fails, fails + rng.expovariate(1 / between)
            if clock + restart <= fails:
                clock += restart
                break
    assert pieces * interval / clock == pytest.approx(
        progress_share(between, write, restart, interval), rel=0.02
    )


# --- dollars, energy, clusters ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    step = differentiate(mlp(layers=2, width=64, batch=16), Adam())
    return {
        f"{count} devices": search(step, topology_of(count), "tp=1,pp=1,remat=none,zero=0", top=1)
        for count in (2, 8)
    }


def test_what_a_training_takes_is_what_its_steps_take(results):
    result = results["8 devices"]
    never = Training(1e9, pue=1.5, reliability=Reliability(failures=0.0))
    costs = TrainingCosts(never, DeviceRates(2.0, "given", 400.0, 100.0))
    found = costs.by(result.step, result.best)
    hours = 1e9 / 16 * result.best.seconds / 3600
    assert found.hours == pytest.approx(hours)
    assert found.to_dict()["dollars"] == pytest.approx(hours * 8 * 2.0)
    assert found.hours_interval is None  # these devices have no spread
    wide = replace(result.best, low=result.best.seconds / 2, high=result.best.seconds * 3)
    of_wide = costs.by(result.step, wide)
    assert of_wide.hours_interval == pytest.approx((hours / 2, hours * 3))
    told = of_wide.to_dict()
    assert (told["hours_low"], told["hours_high"]) == pytest.approx((hours / 2, hours * 3))
    table = {name: cell(of_wide) for name, cell in cost_columns([of_wide], "tokens").items()}
    assert table["90 %"] == f"{hours / 48:.3g} to {hours / 8:.3g}"
    assert "90 %" not in plan_cost_columns([of_wide], "tokens")
    assert found.to_dict()["tokens_per_dollar"] == pytest.approx(1e9 / (hours * 16.0))
    assert found.to_dict()["kwh"] == pytest.approx(hours * 8 * 0.5 * 1.5)
    assert found.step_kwh == pytest.approx(result.best.seconds / 3600 * 8 * 0.5 * 1.5)
    # All of it is longer by what failures cost.
    often = TrainingCosts(Training(1e9, reliability=Reliability(failures=1.0, storage=1e6)))
    fails = often.by(result.step, result.best)
    assert fails.hours == pytest.approx(hours / fails.goodput.share) and fails.goodput.share < 1
    # 16 bytes a parameter: weight and two moments of 4 bytes, of which the product has one of each.
    weights = 2 * 64 * 64 * 4
    assert result.step.state_bytes == pytest.approx(3 * weights, rel=0.01)
    assert not {"dollars", "kwh", "price"} & fails.to_dict().keys()


def of_training(results, training, rates):
    """The same results, of a training at rates."""
    return {name: replace(own, costs=TrainingCosts(training, rates[name])) for name, own in results.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_clusters_are_ranked_by_one_objective(results, name):
    rates = {"2 devices": DeviceRates(4.0, "a", 100.0), "8 devices": DeviceRates(1.0, "b", 700.0)}
    compared = ClusterComparison(of_training(results, Training(1e9), rates), name)
    values = [OBJECTIVES[name].cluster(estimate) for _, estimate in compared.ranked]
    assert values == sorted(values)
    text = str(compared)
    assert text.splitlines()[1].startswith(compared.ranked[0][0])
    assert "(Daly; Young: " in text and "1 $ a GPU-hour, b" in text and "unknown, so 0 W of its host" in text


def test_an_objective_that_a_cluster_does_not_know_is_refused(results):
    for name, missing in (("cost", "--price"), ("energy", "device.power")):
        with pytest.raises(PlanError, match=missing):
            str(ClusterComparison(results, name))
    unpriced = of_training(results, Training(1e9), dict.fromkeys(results, DeviceRates()))
    text = str(ClusterComparison(unpriced))
    assert "GPU-hours" in text and "2 devices, 8 devices: without kWh: what a GPU draws is not known" in text


def test_presets_have_dated_prices_and_hosts():
    rates = DeviceRates.of(figures("aws-p5"))
    assert rates.price == pytest.approx(55.04 / 8) and "2026-08-26" in rates.price_source
    assert (rates.watts, rates.host_watts) == (700.0, 575.0)
    assert DeviceRates.of(figures("dgx-h100", ["device.power_limit=500W"])).watts == 500.0
    assert DeviceRates.of(figures("aws-p5"), 3.0).price == 3.0
    assert DeviceRates.of(figures("dgx-1")).price is None


def test_nodes_of_several_kinds_have_no_one_price(tmp_path):
    file = tmp_path / "mixed.toml"
    file.write_text('base = "aws-p5"\n[[nodes]]\ncount = 1\n[[nodes]]\ncount = 1\nbase = "aws-p4d"\n')
    (mixed,) = sized_clusters([str(file)], None, [])
    assert len(mixed.topology.devices) == 16 and DeviceRates.of(mixed.figures) == DeviceRates()
    rates = mixed.rates(None)
    assert (rates.watts, rates.host_watts) == (
        pytest.approx((700 + 400) / 2),
        pytest.approx((575 + 412.5) / 2),
    )
    assert rates.price == pytest.approx((6.88 + DeviceRates.of(figures("aws-p4d")).price) / 2)
    assert rates.kinds == 2 and mixed.rates(3.0).price == 3.0
    (other,) = sized_clusters([str(file)], None, ["device.power=300W"])
    assert other.rates(None).watts == pytest.approx((300 + 400) / 2)
    file.write_text('base = "aws-p5"\n[[nodes]]\ncount = 3\n[[nodes]]\ncount = 1\nbase = "dgx-h100"\n')
    assert (mixed.rates(None).price, mixed.rates(None).watts) == (None, 700.0)
    file.write_text('base = "aws-p5"\n[[nodes]]\ncount = 2\n')
    assert DeviceRates.of(mixed.figures).price == pytest.approx(6.88)
