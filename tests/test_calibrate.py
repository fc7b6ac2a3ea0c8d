"""Timings of a machine become its figures: known ones come back, measured ones predict what was measured."""

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from said import says

from distsim.calibration import Timing, calibrate, read_timings
from distsim.calibration.machine import Machine
from distsim.calibration.timings import (
    AttentionShape,
    CollectiveCall,
    KernelCall,
    LaunchCall,
    attention,
    memory,
    product,
)
from distsim.cli import main
from distsim.cost import CostModel
from distsim.errors import TimingsError
from distsim.hardware import collective_time, figures, load_cluster, presets
from distsim.hardware.cluster_text import cluster_text, complete_table

DATA = Path(__file__).parent / "data" / "calibration"
PRODUCTS = [product(m, n, k, "bfloat16") for m in (1024, 4096) for n in (1000, 8192) for k in (512, 4096)]
SHAPES = [AttentionShape(2, 16, 16, seq, 128, causal) for seq in (1024, 8192) for causal in (True, False)]
COPIES = [memory(2**power) for power in range(12, 31, 2)]
SIZES = [2**power for power in range(10, 31, 2)]
ALONE = ["device.variation=0"]  # kernels are timed on one device, not on the slowest of a node


def timed(machine: str, calls) -> list[Timing]:
    """What the calls take on a machine by the cost model."""
    topology = load_cluster(machine, ALONE)
    costs, devices = CostModel(topology, kernels="eager"), topology.devices
    found = []
    for call in calls:
        if isinstance(call, KernelCall):
            seconds = costs.seconds(call.signature, (devices[0],))
        elif isinstance(call, LaunchCall):
            seconds = call.kernels * devices[0].rates.launch(call.mode)
        else:
            group = tuple(devices[i] for i in Machine(devices[0], topology.levels, 8).places(call))
            seconds = collective_time(call.kind, call.nbytes, group, topology)
        found.append(Timing(call, seconds, "made.csv", f"line {len(found) + 2}"))
    return found


def ours(tmp_path, text: str, name: str = "truth.toml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def si(name: str) -> dict[str, float]:
    return {figure.name: figure.si_value for figure in figures(name)}


TRUTH = """base = "dgx-a100"
[device]
kernel_launch_overhead = "3.5 us"
[device.kernels]
linear = 0.83
batched = 0.61
memory = 0.71
attention = 0.55
attention_grad = 0.47
[device.launches]
eager = "11 us"
[[levels]]
name = "nvlink"
efficiency = 0.61
latency = "9 us"
start = "20 us"
segment_time = "8 us"
[[levels]]
name = "infiniband"
efficiency = 0.7
latency = "33 us"
"""


def test_known_figures_come_back(tmp_path):
    truth = ours(tmp_path, TRUTH)
    calls = [
        *PRODUCTS,
        *(product(1024, 1024, 1024, "bfloat16", batch) for batch in (16, 64, 256)),
        *(attention(shape, "bfloat16", backward) for shape in SHAPES for backward in (False, True)),
        *COPIES,
        LaunchCall(300),
        *(CollectiveCall(kind, size, 8) for kind in ("all_reduce", "all_gather") for size in SIZES),
        *(CollectiveCall("all_to_all", size, 4) for size in SIZES),
        *(CollectiveCall("all_reduce", size, 32, 4) for size in SIZES),
    ]
    made = calibrate(timed(f"{truth}:4", calls), "dgx-a100", name="ours", date="2026-01-31")
    found, expected = si(ours(tmp_path, made.text, "ours.toml")), si(truth)
    kernels = {name for name in expected if name.startswith("device.attention.")}
    assert set(expected) - set(found) == kernels != set()  # attention was measured, whatever kernel ran it
    assert set(found) <= set(expected)
    fitted = {figure.name for figure in made.figures}
    assert len(fitted) == 13 and {"device.launches.eager", "levels.nvlink.segment_time"} < fitted
    base, stays = si("dgx-a100"), {name for name in si("dgx-a100") if "launches" not in name} - kernels
    like = {"linear_float8": "linear", "embedding": "memory"}  # these, and launches, change in proportion
    share = {f"device.kernels.{own}": f"device.kernels.{other}" for own, other in like.items()}
    for name in stays | fitted:
        value = expected[name] if name in fitted else base[name]
        if name in share:
            value *= expected[share[name]] / base[share[name]]
        assert found[name] == pytest.approx(value, rel=2e-3), name
    assert all(figure.mean_error < 1e-3 for figure in made.figures)
    assert load_cluster(str(tmp_path / "ours.toml:2")).levels[1].name == "infiniband"


def test_more_than_the_base_says_is_reached_at_best(tmp_path):
    """What reaches more becomes what is reached at best; what was not measured reaches what it did."""
    base = ours(tmp_path, TRUTH, "base.toml")
    text = TRUTH.replace("[device]", "[device]\nflops_efficiency = 0.97\nbytes_efficiency = 0.99")
    faster = ours(tmp_path, text.replace("linear = 0.83", "linear = 1").replace("0.71", "0.98"))
    made = calibrate(timed(faster, [*PRODUCTS, *COPIES]), base, name="ours", date="today")
    found, before = (
        load_cluster(ours(tmp_path, made.text, "o.toml"), ALONE).devices[0],
        load_cluster(base, ALONE).devices[0],
    )
    assert found.flops_efficiency == pytest.approx(0.97, rel=1e-3)
    assert found.bytes_efficiency * found.rates.share("memory") == pytest.approx(0.99 * 0.98, rel=1e-3)
    for kind in ("attention", "attention_grad", "batched"):
        reached = found.flops_efficiency * found.rates.share(kind)
        assert reached == pytest.approx(before.flops_efficiency * before.rates.share(kind), rel=1e-3)
    assert "as more is reached at best" in made.text


def test_more_than_the_peak_is_refused(tmp_path):
    made = calibrate(timed("dgx-h100", PRODUCTS), "dgx-a100", name="ours", date="today")
    assert not made.figures
    assert "of the peak is more than there is: give another base" in made.kept["device.kernels.linear"]


def test_links_may_be_faster_than_the_base_says(tmp_path):
    """Sums in the switch reach more than a ring over the links could."""
    truth = ours(
        tmp_path, 'base = "dgx-h100"\n[[levels]]\nname = "nvlink"\nbandwidth = "700 GB/s"\nefficiency = 0.8\n'
    )
    timings = timed(truth, [CollectiveCall("all_reduce", size, 8) for size in SIZES])
    made = calibrate(timings, "dgx-h100", name="ours", date="today")
    link = load_cluster(ours(tmp_path, made.text, "o.toml")).levels[0].link
    assert link.achieved == pytest.approx(560e9, rel=1e-3)


def test_a_link_that_is_much_faster_than_the_base_says_is_refused(tmp_path):
    truth = ours(tmp_path, 'base = "dgx-h100"\n[[levels]]\nname = "nvlink"\nbandwidth = "900 GB/s"\n')
    timings = timed(truth, [CollectiveCall("all_reduce", size, 8) for size in SIZES])
    made = calibrate(timings, "dgx-h100", name="ours", date="today")
    assert not made.figures
    assert "times the 450 GB/s of the link: give another base" in made.kept["levels.nvlink.bandwidth"]


def test_what_timings_do_not_support_stays():
    large = [CollectiveCall("all_reduce", 2**power, 8) for power in (28, 29, 30, 31)]
    kernels = [PRODUCTS[-1], PRODUCTS[-2]]
    made = calibrate(timed("dgx-a100", [*large, *kernels]), "dgx-a100", name="ours", date="today")
    assert [figure.name for figure in made.figures] == ["levels.nvlink.efficiency"]
    assert made.kept["levels.nvlink.latency"] == "0 of 4 timings depend on it, of 3 needed"
    assert made.kept["device.kernels.linear"] == "2 of 2 timings depend on it, of 3 needed"
    assert made.kept["levels.infiniband"] == "no timings"
    assert made.table["levels"][0]["latency"]["source"].startswith("fitted: vTrain")
    assert "as in dgx-a100, for want of timings: " in str(made)


def test_two_quantities_that_are_not_told_apart():
    """At sizes near each other, start and transfer are one sum."""
    calls = [CollectiveCall("all_reduce", size * 2**20, 8) for size in (11, 12, 13)]
    made = calibrate(timed("dgx-a100", calls), "dgx-a100", name="ours", date="today")
    assert "do not tell it from levels.nvlink.bandwidth" in made.kept["levels.nvlink.latency"]


def test_one_timing_far_off_moves_little(tmp_path):
    timings = timed("dgx-a100", [CollectiveCall("all_reduce", size, 8) for size in SIZES])
    first = timings[0]
    slow = Timing(first.call, 100 * first.seconds, first.file, first.place)
    made = calibrate([slow, *timings[1:]], "dgx-a100", name="ours", date="today")
    assert made.figures[1].value == pytest.approx(1.82, rel=0.05)
    assert made.figures[1].worst.startswith(
        "made.csv, line 2: all_reduce of 1024 bytes over 8 ranks on 1 node: "
    )
    assert "far off: made.csv, line 2" in str(made)


def test_timings_that_contradict_each_other():
    calls = [LaunchCall(100), LaunchCall(100), LaunchCall(100)]
    timings = [Timing(call, 1e-3 * 10**i, "f.csv", f"line {i}") for i, call in enumerate(calls)]
    made = calibrate(timings, "dgx-a100", name="ours", date="today")
    assert "its 3 timings contradict each other: mean error " in made.kept["device.launches.eager"]
    assert not made.figures


def test_other_launches_change_in_proportion(tmp_path):
    text = TRUTH.replace('eager = "11 us"', 'eager = "11 us"\ncompiled = "4 us"\ntensor = "1 us"')
    base = ours(tmp_path, text, "b.toml")
    timings = [Timing(LaunchCall(1000), 22e-3, "trace.json", "1000 launches")]
    made = calibrate(timings, base, name="ours", date="today")
    rates = load_cluster(ours(tmp_path, made.text, "o.toml")).devices[0].rates
    assert (rates.launch("eager"), rates.launch("compiled")) == pytest.approx((22e-6, 8e-6))
    assert rates.tensor == pytest.approx(2e-6)


# --- published timings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "base", "errors"),
    [
        (["a100_kernels.csv"], "dgx-a100", {"device.kernels.linear": 0.06}),
        (["a100_collectives.csv"], "dgx-a100", {"levels.nvlink.latency": 0.12}),
        (
            ["b200_all_reduce_perf.txt", "b200_efa_all_reduce_perf.txt"],
            "dgx-b200",
            {"levels.nvlink.segment_time": 0.08, "levels.infiniband.latency": 0.2},
        ),
    ],
)
def test_published_timings(tmp_path, files, base, errors):
    """The file that is written loads, and predicts the timings as well as it says."""
    timings = read_timings([DATA / name for name in files]).timings
    made = calibrate(timings, base, name="ours", date="2026-01-31")
    assert {figure.name for figure in made.figures} >= set(errors)
    topology = load_cluster(ours(tmp_path, made.text, "o.toml") + ":4", ALONE)
    written = Machine(topology.devices[0], topology.levels, 8)
    for figure in made.figures:
        assert figure.mean_error <= errors.get(figure.name, 0.25)
        assert figure.mean_error < 1.1 * figure.base_error
        if figure.name == "device.flops_efficiency":  # that of the kind that reaches most
            continue
        if figure.name.startswith("levels"):
            own = [t for t in timings if topology.levels[written.level_of(t.call)].name in figure.name]
            seconds = written.collective_seconds(own)
        else:
            own = [t for t in timings if t.call.kind == figure.name.rpartition(".")[2]]
            seconds = written.kernel_seconds(own)
        error = np.abs(seconds / np.array([t.seconds for t in own]) - 1)
        assert (len(own), error.mean(), error.max()) == pytest.approx(
            (figure.points, figure.mean_error, figure.worst_error), abs=1e-3
        )
        source = next(each.source for each in figures(str(tmp_path / "o.toml")) if each.name == figure.name)
        assert f"{figure.points} points, mean error {figure.mean_error:.1%}".replace("%", " %") in source
        assert source.startswith("measured: ") and source.endswith(", 2026-01-31")


# --- the command and the file -----------------------------------------------------------------------------


def test_the_command_writes_a_cluster(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--base", "dgx-a100", "--set", "device.memory=40GiB", "--date", "2026-01-31"]
    assert main(["calibrate", str(DATA / "a100_kernels.csv"), *options, "--out", "ours.toml"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == [
        "figure",
        "measured",
        "dgx-a100",
        *["points", "mean", "error", "worst", "before"],
    ]
    assert "written: ours.toml; use it as --cluster ours.toml" in out
    made = tomllib.loads(Path("ours.toml").read_text())
    assert made["name"] == "ours"
    assert made["device"]["kernels"]["linear"]["source"].startswith(
        "measured: a100_kernels.csv, 37 points, mean "
    )
    assert made["device"]["memory"] == {"value": 40, "unit": "GiB", "source": "given by --set"}
    assert load_cluster("ours.toml:2").devices[0].memory == 40 * 2**30
    assert (
        main(["calibrate", str(DATA / "a100_collectives.csv"), "--base", "ours.toml", "--out", "ours.toml"])
        == 0
    )
    again = tomllib.loads(Path("ours.toml").read_text())  # measured figures add up
    assert again["device"]["kernels"] == made["device"]["kernels"]


def test_the_command_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kernels = str(DATA / "a100_kernels.csv")
    for arguments, said in [
        ([kernels, "--base", "dgx-a100", "--out", "x.txt"], "--out x.txt: a cluster's file is called .toml"),
        ([kernels, "--base", "none", "--out", "x.toml"], "no cluster is named 'none'"),
        ([kernels, kernels, "--base", "dgx-a100", "--out", "x.toml"], "is given twice"),
        (
            [kernels, "--base", "dgx-a100", "--out", "x.toml", "--date", "yesterday"],
            "as in --date 2026-01-31",
        ),
        (["none.csv", "--base", "dgx-a100", "--out", "x.toml"], "none.csv is not a file"),
        ([kernels, "--base", "dgx-a100", "--out", "none/x.toml"], "there is no folder none"),
        (
            [str(DATA / "b200_all_reduce_perf.txt"), "--base", "rtx-4090", "--out", "x.toml"],
            "devices a node, and",
        ),
    ]:
        assert main(["calibrate", *arguments]) == 2
        assert said in capsys.readouterr().err
    Path("few.csv").write_text("op,seconds,bytes\nmemory,1,1000\n")
    assert main(["calibrate", "few.csv", "--base", "dgx-a100", "--out", "x.toml"]) == 2
    assert "no figure is supported by these timings" in capsys.readouterr().err
    assert not Path("x.toml").exists()


def test_timings_that_the_base_cannot_have(tmp_path):
    mixed = ours(tmp_path, 'base = "dgx-a100"\n[[nodes]]\ncount = 2\n')
    with pytest.raises(TimingsError, match=r"\[\[nodes\]\] or \[\[slow\]\]"):
        calibrate([Timing(LaunchCall(9), 1.0, "f", "p")], mixed, name="ours", date="today")
    with pytest.raises(TimingsError, match="no timings"):
        calibrate([], "dgx-a100", name="ours", date="today")
    alone = ours(
        tmp_path,
        cluster_text({**(table := complete_table("dgx-a100")), "levels": table["levels"][:1]}),
        "l.toml",
    )
    far = [Timing(CollectiveCall("all_reduce", 8, 16, 2), 1.0, "f.csv", "line 2")]
    with pytest.raises(TimingsError, match="f.csv, line 2: .* no level of the base joins its ranks"):
        calibrate(far, alone, name="ours", date="today")
    float8 = [Timing(product(64, 64, 64, "float8e4m3fn"), 1.0, "f.csv", "line 2")]
    with says(TimingsError, "f.csv, line 2: ", "no rate for float8e4m3fn"):
        calibrate(float8, "dgx-a100", name="ours", date="today")


@pytest.mark.parametrize("name", presets())
def test_a_cluster_is_written_and_read_again(tmp_path, name):
    path = ours(tmp_path, cluster_text(complete_table(name, ["device.memory=10GiB"])))
    assert load_cluster(path).devices == load_cluster(name, ["device.memory=10GiB"]).devices
    assert load_cluster(path).levels == load_cluster(name).levels
    given = [
        (each.name, each.si_value, each.source) for each in figures(name) if each.name != "device.memory"
    ]
    assert [(e.name, e.si_value, e.source) for e in figures(path) if e.name != "device.memory"] == given


def test_text_from_outside_is_quoted(tmp_path):
    odd = 'quotes " and \\ and \x7f \n and \t ü \U0001f600 ]'
    text = 'base = "dgx-a100"\n'
    table = complete_table(ours(tmp_path, text))
    table["description"] = odd
    assert tomllib.loads(cluster_text(table))["description"] == odd
    assert math.isinf(tomllib.loads(cluster_text({"a": math.inf}))["a"])
