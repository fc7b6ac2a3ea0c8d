"""``distsim compare``: steps side by side; what makes the difference sums to it."""

import json
import re
from itertools import pairwise
from math import fsum

import pytest
from cli_cases import run
from hypothesis import given
from hypothesis import strategies as st
from said import says

import distsim
from distsim.cli import main
from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.errors import OptionError, SimulationError
from distsim.hardware import load_cluster
from distsim.models import mlp
from distsim.plan import Plan
from distsim.report.difference import NEXT_STEP, StepComparison, differences
from distsim.report.figures import StepFigures
from distsim.simulation import Simulator
from distsim.simulation.calls import BUBBLE, device_parts
from distsim.transforms import SGD, differentiate

MODEL = ("compare", "gpt:layers=4,hidden=64,heads=4,seq=32,vocab=100", "--batch", 16)
PLANS = ("--plan", "dp=2,tp=2", "--plan", "dp=2,pp=2,microbatches=4", "--plan", "tp=4,microbatches=2")
STEP = differentiate(mlp(layers=8, width=64, batch=32), SGD())
DGX = load_cluster("dgx-a100")


def simulated(plan, **options):
    costs = CostModel(DGX, kernels="eager")
    return Simulator(costs, **options).simulate(parallelize(STEP, Plan.parse(plan), DGX, costs))


def figures(plan):
    return StepFigures.of(plan, simulated(plan), (32, "samples"), 0.0)


@pytest.mark.parametrize("plan", ["dp=2,tp=2,pp=2,microbatches=4", "dp=4,zero=3", "pp=4,microbatches=2"])
def test_what_the_mean_device_does_sums_to_the_step_and_to_its_shares(plan):
    simulation = simulated(plan)
    parts = device_parts(simulation)
    assert fsum(parts.values()) == pytest.approx(simulation.step_time, abs=1e-12)
    groups = [(simulation.shares(own[0]), len(own)) for own in simulation.classes.members]
    devices = sum(count for _, count in groups)
    exposed = sum(shares.exposed_communication * count for shares, count in groups) / devices
    bubble = sum(shares.bubble * count for shares, count in groups) / devices
    moved = [own for part, own in parts.items() if part.startswith(("exposed", "slowed"))]
    assert fsum(moved) == pytest.approx(exposed, abs=1e-12)
    idle = [own for part, own in parts.items() if part.startswith(BUBBLE)]
    assert fsum(idle) == pytest.approx(bubble, abs=1e-12)


def test_a_pipeline_of_free_sends_loses_its_bubble():
    """Closed form: p stages and m microbatches idle for (p - 1) / (m + p - 1) of the step."""
    topology = load_cluster("dgx-a100", ["device.kernel_launch_overhead=0us"])

    class Unit(CostModel):
        def seconds(self, signature, where):
            return 1e-3 * (signature.op_type in ("Relu", "ReluGrad"))

        def communication_seconds(self, signature, group):
            return 0.0

    costs = Unit(topology)
    program = parallelize(STEP, Plan.parse("pp=4,microbatches=8"), topology, costs)
    simulation = Simulator(costs).simulate(program)
    assert device_parts(simulation)[BUBBLE] / simulation.step_time == pytest.approx(3 / 11)


SECONDS = st.integers(0, 2**50).map(lambda ticks: ticks / 2**40)
PARTS = st.dictionaries(st.sampled_from("abcdefgh"), SECONDS)


@given(PARTS, PARTS, SECONDS, SECONDS)
def test_differences_sum_exactly_and_the_largest_is_first(first, second, more, less):
    one, other = sum(first.values()) + more, sum(second.values()) + less
    found = differences((one, first), (other, second))
    left_out = max(one, other) * 2e-9  # rests that are roundings
    assert sum(own.seconds for own in found) == pytest.approx(other - one, rel=0, abs=left_out)
    assert all(abs(a.seconds) >= abs(b.seconds) > 0 for a, b in pairwise(found))
    if not (more or less):
        assert sum(own.seconds for own in found) == other - one
    assert [own.seconds for own in differences((other, second), (one, first))] == [-o.seconds for o in found]


def test_steps_without_a_flush_overlap():
    found = differences((2.0, {"a": 2.0}), (1.5, {"a": 2.0}))
    assert [(own.part, own.seconds) for own in found] == [(NEXT_STEP, -0.5)]


def test_one_step_is_no_comparison():
    with says(SimulationError, "1 steps", "two or more"):
        StepComparison((figures("dp=2"),), "on the mean device")


@pytest.mark.parametrize("by", ["device", "kind", "phase"])
def test_plans_are_compared_and_their_parts_sum_to_the_difference(capsys, tmp_path, by):
    path = tmp_path / "compared.json"
    out, _ = run(capsys, *MODEL, "--cluster", "dgx-a100", *PLANS, "--by", by, "--json", path)
    record = json.loads(path.read_text())
    steps = {step["name"]: step for step in record["steps"]}
    assert list(steps) == list(PLANS[1::2])
    for name, step in steps.items():
        one = tmp_path / "one.json"
        arguments = (*MODEL[1:], "--cluster", "dgx-a100", "--plan", name, "--json", one)
        plain, _ = run(capsys, "simulate", *arguments)
        shown = re.search(r"step time +([\d.]+ \w+)", plain)[1]
        assert re.search(rf"^{re.escape(name)} +{shown} ", out, re.MULTILINE)
        assert f"{step['mfu']:.1%}" in plain
        assert step["busy_s"] + step["exposed_s"] + step["bubble_s"] == pytest.approx(step["step_s"])
        alone = json.loads(one.read_text())
        own = {"name", "busy_s", "exposed_s", "bubble_s", "parts_s", "tokens_per_s_per_device"}
        assert {key: alone[key] for key in step.keys() - own} == {key: step[key] for key in step.keys() - own}
        notes = [said["note"] for said in record["notes"] if name in said["steps"]]
        assert sorted(notes) == sorted(alone["notes"])
    for each in record["differences"]:
        gap = steps[each["second"]]["step_s"] - steps[each["first"]]["step_s"]
        assert each["difference_s"] == gap
        total = fsum(part["difference_s"] for part in each["parts"])
        assert total == gap if by != "device" else total == pytest.approx(gap, abs=1e-12)


def test_each_plan_runs_on_each_cluster_and_what_fits_nowhere_is_status_3(capsys):
    arguments = (*MODEL, "--cluster", "dgx-a100", "--cluster", "dgx-h100", *PLANS[:4])
    out, _ = run(capsys, *arguments)
    names = [f"{plan} on {cluster}" for cluster in ("dgx-a100", "dgx-h100") for plan in PLANS[1:4:2]]
    assert re.findall(r"^(\S+ on \S+) +\d", out, re.MULTILINE) == names
    little = ("--set", "device.context=0GiB", "--set", "device.memory=2MiB")
    assert main([*map(str, arguments), *little]) == 3
    assert re.search(r"[KM]iB too much", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "a comparison is of two or more: give other values of --plan"),
        (("--plan", "dp=8", "--plan", "dp=8"), "--plan dp=8 is given 2 times"),
        (("--plan", "dp=2", "--plan", "dp=3"), "dp=3: "),
    ],
)
def test_what_cannot_be_compared_is_refused(capsys, options, said):
    assert main([*map(str, MODEL), "--cluster", "dgx-a100", *options]) == 2
    assert said in capsys.readouterr().err


def test_in_python_steps_are_compared_as_the_command_does(capsys):
    model, plans = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100", ("dp=2", "tp=2", "pp=2,microbatches=2")
    found = distsim.compare(*(distsim.simulate(model, "dgx-a100", plan, 8) for plan in plans), by="kind")
    plans = [word for plan in plans for word in ("--plan", plan)]
    out, _ = run(
        capsys, "compare", model, "--cluster", "dgx-a100", "--batch", 8, "--by", "kind", "--json", *plans
    )
    said = json.loads(out)
    assert [step["step_s"] for step in said["steps"]] == [step.seconds for step in found.steps]
    for number, own in enumerate(said["differences"], 1):
        assert own["parts"] == found.to_dict()["differences"][number - 1]["parts"]
    assert "<pre>" in found._repr_html_() and "<gpt" not in found._repr_html_()


def test_a_way_to_compare_that_is_none_is_refused():
    with pytest.raises(OptionError, match="did you mean module"):
        distsim.compare(by="modul")
    with pytest.raises(SimulationError, match="two or more"):
        distsim.compare()
