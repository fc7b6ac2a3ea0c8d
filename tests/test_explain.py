"""explain(): what bounds a step, and what-ifs that are each simulated."""

import re
from dataclasses import replace

import pytest
from cli_cases import run
from executor_models import FLOPS, add_grad, cluster, f32, simulate
from schedule_models import copies_to_host
from test_critical_path import MODELS
from test_report import two_stages

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulator
from distsim.ir import FunctionMaker, Topology
from distsim.plan import Plan
from distsim.report import plot_explanation
from distsim.schedule import SCHEDULES
from distsim.simulation.explain.what_if import FreeLaunches, FreeOps, communication


def explained(plan, count, model="mlp", overlap=True, **figures):
    topology, _ = cluster(count, **figures)
    program = parallelize(MODELS[model], Plan.parse(plan), topology)
    return Simulator(CostModel(topology), overlap).simulate(program)


def gains(explanation):
    return {what.change: what.gain for what in explanation.what_ifs}


def test_one_op_is_all_launch_and_roofline():
    """Closed form: 2 n^3 flops at the peak and a launch."""
    topology, (gpu,) = cluster(1, launch=1e-5)
    maker = FunctionMaker("one")
    x = maker.add_input_value("x", f32(1024, 1024, on=gpu))
    maker.add_op("MatMul", inputs=[x, x])
    explanation = simulate(topology, maker.finalize()).explain()
    work = 2 * 1024**3 / FLOPS
    assert explanation.step_time == pytest.approx(work + 1e-5)
    assert gains(explanation) == {
        "free MatMul": pytest.approx(work + 1e-5),
        "no kernel launch overhead": pytest.approx(1e-5),
    }
    assert (explanation.bubble, explanation.exposed_communication) == (0.0, 0.0)
    assert "Free MatMul would gain most, 100.0%" in str(explanation)


class Unit(CostModel):
    """A millisecond for each activation and its gradient; everything else is free."""

    def seconds(self, signature, where):
        return 1e-3 * (signature.op_type in ("Relu", "ReluGrad"))

    def communication_seconds(self, signature, group):
        return 0.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 6), (4, 4), (4, 24)])
def test_equal_stages_without_communication_lose_their_bubble(schedule, p, m):
    """Closed form: (m + p - 1) (f + b), of which (p - 1) (f + b) is bubble, and nothing else would help."""
    topology, _ = cluster(p)
    plan = Plan.parse(f"pp={p},microbatches={m},schedule={schedule}")
    program = parallelize(MODELS["mlp"], plan, topology)
    explanation = Simulator(Unit(topology)).simulate(program).explain()
    cycle = 16e-3 / p  # 8 layers, forward and backward of one microbatch
    assert explanation.step_time == pytest.approx((m + p - 1) * cycle)
    assert gains(explanation)["a pipeline that is always full"] == pytest.approx((p - 1) * cycle)
    assert gains(explanation)["free communication"] == 0
    assert explanation.bubble == pytest.approx((p - 1) * cycle)
    assert explanation.imbalance == pytest.approx(0, abs=1e-12)
    assert explanation.critical_path.by_kind["Relu"] == pytest.approx((m + p - 1) * cycle / 2)


@pytest.mark.parametrize("m", [4, 12])
def test_stages_in_turn_lose_half_the_bubble(m):
    """Interleaved, two stages a rank: (p - 1) (f + b) / 2 (Narayanan et al. 2021, section 2.2)."""
    topology, _ = cluster(4)
    plan = Plan.parse(f"pp=4,microbatches={m},schedule=interleaved,chunks=2")
    explanation = Simulator(Unit(topology)).simulate(parallelize(MODELS["mlp"], plan, topology)).explain()
    assert gains(explanation)["a pipeline that is always full"] == pytest.approx(3 * 4e-3 / 2)
    assert explanation.bubble == pytest.approx(3 * 4e-3 / 2)
    assert [load.stage for load in explanation.stages] == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_is_explained(schedule):
    if SCHEDULES[schedule].placement == "two copies" or copies_to_host(schedule):
        return
    chunks = SCHEDULES[schedule].chunks or 2
    simulation = explained(f"pp=2,microbatches=4,schedule={schedule},chunks={chunks}", 2)
    assert all(what.gain >= -1e-12 for what in simulation.explain().what_ifs)
    flat = Simulator(simulation.cost_model, engine="events").simulate(simulation.simulated)
    assert simulation.critical_path == flat.critical_path


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_full_pipeline_takes_a_cycle_for_each_microbatch(schedule):
    """Uneven stages with sends: twice the microbatches take twice as long where the pipeline is full."""
    full = []
    for m in (12, 24):
        simulation = explained(f"pp=3,microbatches={m},schedule={schedule}", 3)
        what = next(what for what in simulation.explain().what_ifs if "always full" in what.change)
        full.append(what.step_time - (simulation.step_time - simulation.timeline.last_microbatch_end))
        assert 0 < what.gain < simulation.step_time
    # The batch of 96 is divided: 12 microbatches of 8 samples, 24 of 4, each nearly all launch overhead.
    assert full[1] == pytest.approx(2 * full[0], rel=0.01)


@pytest.mark.parametrize(
    "plan", ["dp=2,tp=2,pp=2,microbatches=4", "tp=4", "dp=4,microbatches=2", "pp=4,microbatches=3"]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_every_what_if_is_what_simulating_it_gives(plan, overlap):
    count = 8 if "dp=2" in plan else 4
    simulation = explained(plan, count, "gpt", overlap, gbps=40)
    explanation = simulation.explain()
    for what in explanation.what_ifs:
        assert what.gain == explanation.step_time - what.step_time
        assert what.gain >= -1e-12 * explanation.step_time  # what is cheaper is never slower
        assert what.step_time >= 0
    found = [what.gain for what in explanation.what_ifs]
    assert found == sorted(found, reverse=True)
    free = simulation.again(FreeOps(simulation.cost_model, communication))
    assert gains(explanation)["free communication"] == explanation.step_time - free.step_time
    assert not [part for part in free.critical_path.parts if part.communicates and part.seconds > 0]
    axes = {change for change in gains(explanation) if change.startswith("free collectives")}
    degrees = dict(re.findall(r"(dp|tp|pp)=(\d)", plan))
    assert axes == {f"free collectives over {axis}" for axis in ("dp", "tp") if int(degrees.get(axis, 1)) > 1}
    assert ("free sends" in gains(explanation)) == ("pp" in degrees)
    for part in axes | {"free sends"} & gains(explanation).keys():
        assert gains(explanation)[part] <= gains(explanation)["free communication"] * (1 + 1e-12)


def test_without_launch_overhead_is_a_cluster_without_it():
    simulation = explained("pp=2,dp=2,microbatches=4", 4, launch=1e-5)
    other = explained("pp=2,dp=2,microbatches=4", 4, launch=0)
    assert simulation.again(FreeLaunches(simulation.cost_model)).step_time == pytest.approx(
        other.step_time, rel=1e-9
    )
    assert "no kernel launch overhead" not in gains(other.explain())


def test_both_engines_explain_alike():
    topology, _ = cluster(4)
    program = parallelize(MODELS["gpt"], Plan.parse("tp=2,pp=2,microbatches=4"), topology)
    ours = Simulator(CostModel(topology)).simulate(program).explain()
    theirs = Simulator(CostModel(topology), engine="events").simulate(program).explain()
    for one, other in zip(ours.stages, theirs.stages, strict=True):
        assert (one.stage, one.devices) == (other.stage, other.devices)
        assert one.busy + one.exposed_communication + one.bubble == pytest.approx(ours.step_time)
        assert one.busy == pytest.approx(other.busy, rel=1e-9)
        assert one.bubble == pytest.approx(other.bubble, rel=1e-9)
    expected = gains(ours)
    del expected["a pipeline that is always full"]  # of a Program, block by block
    assert gains(theirs) == {
        change: pytest.approx(gain, rel=1e-6, abs=1e-12) for change, gain in expected.items()
    }


def test_stages_of_a_function_are_who_holds_values_together():
    explanation = two_stages().explain()
    assert [(load.stage, load.devices) for load in explanation.stages] == [(0, 2), (1, 2)]
    assert explanation.devices == 4


def test_an_explanation_says_so_in_words():
    simulation = explained("dp=2,tp=2,pp=2,microbatches=4", 8, "gpt")
    explanation = simulation.explain()
    text = str(explanation)
    assert text.startswith("gpt_training: ")
    assert f"Stage {explanation.most_loaded.stage} computes longest" in text
    assert "What bounds it is the critical path: " in text
    best, second = explanation.what_ifs[:2]
    share = f"{second.gain / explanation.step_time:.1%}"
    assert f"would gain most, {best.gain / explanation.step_time:.1%}; nothing else in this table" in text
    assert text.endswith(f"would gain more than {share}.\n")
    alike = replace(explanation, what_ifs=(best, replace(best, change="no host"), second))
    assert f"{best.change[1:]}, or no host would gain most, each, " in str(alike)
    assert max(map(len, text.splitlines())) < 140


def test_nothing_is_explained_as_nothing():
    topology = Topology()
    gpu = topology.add_device("gpu")
    maker = FunctionMaker("nothing")
    maker.set_outputs([maker.add_input_value("x", f32(4, on=gpu))])
    assert str(simulate(topology, maker.finalize()).explain()) == (
        "nothing: 0 ns a step on 1 device; nothing in it takes time\n"
    )


def test_a_free_launch_on_free_kernels_changes_nothing():
    topology, (gpu,) = cluster(1, launch=0.0)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(64, 64, on=gpu))
    add_grad(maker, x, x)
    assert list(gains(simulate(topology, maker.finalize()).explain())) == ["free LossGrad"]


def test_an_explanation_is_drawn(tmp_path):
    path = tmp_path / "why.png"
    plot_explanation(explained("tp=2,pp=2,microbatches=4", 4, "gpt").explain(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_line_explains(capsys):
    arguments = (
        "mlp:layers=4,width=2048",
        "--cluster",
        "dgx-a100",
        "--batch",
        4096,
        "--plan",
        "pp=2,microbatches=4",
    )
    out, err = run(capsys, "explain", *arguments)
    assert "What bounds it is the critical path" in out and "a pipeline that is always full" in out
    assert "explaining" in err and "memory        fits; the most is" in out
    assert "critical path" not in run(capsys, "simulate", *arguments)[0]
