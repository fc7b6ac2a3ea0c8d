"""`import distsim`: its names, what they take, and that they are what the command line does."""

import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import distsim
from distsim.cli import main
from distsim.compose import parallelize
from distsim.errors import (
    MissingExtraError,
    OptionError,
    PlanError,
    SimulationError,
    TopologyError,
    TypeRuleError,
)
from distsim.hardware import load_cluster
from distsim.ir import BFloat16, Float32, Tensor, pformat
from distsim.models import mlp
from distsim.plan.stacks import STACKS
from distsim.schedule import schedule, write_csv
from distsim.study.options import EngineOptions, ModelOptions, SimulationKeywords, TrainingKeywords
from distsim.study.search_options import SearchKeywords, SearchOptions
from distsim.transforms import SGD, differentiate
from distsim.transforms.autodiff.precision import POLICIES
from distsim.transforms.autodiff.set_precision import set_precision
from distsim.transforms.kernels.policies import KERNELS

ROOT = Path(__file__).parents[1]
GPT = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
SLOW = ("numpy", "onnx", "numba", "simpy", "scipy", "matplotlib", "msgspec", "ml_dtypes", "pandas", "rich")


def out_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work", ["", "from distsim.cli import main\ntry: main(['--help'])\nexcept SystemExit: 0"]
)
def test_importing_distsim_and_help_load_nothing_that_takes_long(work):
    code = f"import sys, distsim\n{work}\nprint([name for name in {SLOW} if name in sys.modules])"
    assert out_of(code).splitlines()[-1] == "[]"


def test_names_are_listed_and_one_that_is_none_is_an_error():
    assert set(distsim.__all__) <= set(dir(distsim))
    for name in distsim.__all__:
        assert getattr(distsim, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = distsim.simulat


def test_types_see_the_names_that_are_imported_when_used():
    text = (ROOT / "distsim" / "__init__.py").read_text()
    typed = [line.split(" import ") for line in text.splitlines() if line.startswith("    from distsim")]
    homes = {names.split(" as ")[1]: module.split()[1] for module, names in typed}
    assert homes == {**distsim._HOMES, "models": "distsim"}
    assert {*homes, "__version__"} == set(distsim.__all__)


def test_functions_are_not_hidden_by_packages_that_are_imported():
    code = (
        "import distsim, pkgutil, importlib, inspect\n"
        "for each in pkgutil.iter_modules(distsim.__path__, 'distsim.'):\n"
        "    if each.name != 'distsim.__main__': importlib.import_module(each.name)\n"
        "print([n for n in distsim.__all__ if inspect.ismodule(getattr(distsim, n))])"
    )
    assert out_of(code) == "['models']\n"


@pytest.mark.parametrize("name", [n for n in distsim.__all__ if n not in ("__version__", "models")])
def test_every_name_has_a_docstring_with_an_example(name):
    text = inspect.getdoc(getattr(distsim, name))
    assert text and doctest.DocTestParser().get_examples(text), f"distsim.{name} has no example"


# --- simulate -------------------------------------------------------------------------------------


def test_simulate_does_what_the_command_does(capsys):
    step = distsim.simulate(
        GPT, cluster="dgx-a100:2", plan="dp=2,tp=2,pp=2,microbatches=2", batch=16, stack="megatron"
    )
    command = ["simulate", GPT, "--cluster", "dgx-a100:2", "--batch", "16", "--stack", "megatron", "--json"]
    assert main([*command, "--plan", "dp=2,tp=2,pp=2,microbatches=2"]) == 0
    assert json.loads(capsys.readouterr().out) == step.to_dict()


def test_texts_and_what_they_name_are_the_same():
    text = distsim.simulate(
        *(GPT, "dgx-a100", "dp=2,tp=2", 8),
        precision="mixed",
        kernels="fused",
        stack="nanotron",
        optimizer="sgd:lr=0.1",
    )
    plan = distsim.Plan.parse(text.known_step.plan)
    objects = distsim.simulate(
        *(GPT, load_cluster("dgx-a100"), plan, 8),
        precision=POLICIES["mixed"],
        kernels=KERNELS["fused"],
        stack=STACKS["nanotron"],
        optimizer=SGD(0.1),
    )
    assert objects.step_time == text.step_time and objects.peak_memory == text.peak_memory


def test_a_function_is_differentiated_or_brings_its_backward_pass():
    forward = mlp(layers=4, width=64, batch=16)
    step = distsim.simulate(forward, "dgx-a100", "dp=2", optimizer="sgd")
    joint = distsim.simulate(differentiate(forward, SGD()), "dgx-a100", "dp=2")
    assert step.trains and step.step_time == joint.step_time and step.mfu == joint.mfu > 0
    for size in ({"batch": 8}, {"seq": 8}, {"bind": ["n=3"]}):
        with pytest.raises(
            PlanError, match=f"mlp is a function, which has its sizes: leave out {next(iter(size))}"
        ):
            distsim.simulate(forward, "dgx-a100", **size)


def test_a_forward_pass_is_said_to_be_one():
    topology = load_cluster("dgx-a100")
    program = parallelize(mlp(layers=2, width=64, batch=16), distsim.Plan(dp=2), topology)
    run = distsim.Simulator(distsim.CostModel(topology)).simulate(program)
    assert not run.trains and "a forward pass" in repr(run) and run.to_dict()["training"] is False
    with pytest.raises(SimulationError, match=r"use distsim\.simulate, or throughput"):
        _ = run.mfu
    assert "forward pass" not in repr(distsim.simulate("mlp:layers=2,width=64", topology, batch=16))


def test_paths_and_tables_are_taken(tmp_path):
    table = tmp_path / "order.csv"
    order = schedule("gpipe", 2, 4)
    table.write_text(write_csv(order))
    steps = [
        distsim.simulate("mlp:layers=4,width=64", "dgx-a100", plan, 16, schedule=given).step_time
        for plan in ("pp=2,microbatches=4", distsim.Plan(pp=2, microbatches=4))
        for given in (table, str(table), order)
    ]
    named = distsim.simulate("mlp:layers=4,width=64", "dgx-a100", "pp=2,microbatches=4,schedule=gpipe", 16)
    assert set(steps) == {named.step_time}
    ours = tmp_path / "ours.toml"
    ours.write_text('base = "dgx-a100"\ndevices_per_node = 2\n')
    assert len(distsim.simulate("mlp:layers=4,width=64", ours, "dp=2", 16).timestamps) == 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"optimzer": "sgd"}, OptionError, "simulate has no option 'optimzer'; did you mean optimizer?"),
        ({"stack": "megatro"}, PlanError, "did you mean megatron"),
        ({"precision": "mixd"}, PlanError, "did you mean mixed"),
        ({"kernels": "eagr"}, PlanError, "did you mean eager"),
        ({"attention": "flash4"}, PlanError, "did you mean flash, flash3 or flash2?"),
        ({"optimizer": "adma"}, PlanError, "did you mean adam"),
        ({"optimizer": "adam:bta2=0.9"}, PlanError, "did you mean beta2"),
        ({"loss": "crossentropy"}, PlanError, "did you mean cross_entropy"),
        ({"plan": "dpp=2"}, PlanError, "did you mean pp or dp?"),
        ({"plan": "schedule=interleavd"}, PlanError, "did you mean interleaved"),
        ({"plan": "stages=layer"}, PlanError, "did you mean layers"),
        ({"plan": "remat=ful"}, PlanError, "did you mean full"),
        ({"plan": "zero=3,reshard=nver"}, PlanError, "did you mean never"),
        ({"plan": "cp_kind=rng"}, PlanError, "did you mean ring"),
        ({"cluster": "dgx-h10"}, TopologyError, "did you mean dgx-h100"),
        ({"model": "gpt:layrs=2"}, distsim.DistsimError, "did you mean layers"),
        ({"model": "lama3-8b"}, distsim.DistsimError, "did you mean llama3-8b"),
        (
            {"cluster": load_cluster("dgx-a100"), "set": ["device.memory=1GiB"]},
            TopologyError,
            "is made: change",
        ),
    ],
)
def test_a_name_that_is_none_is_said_with_those_near_it(options, error, said):
    with pytest.raises(error) as raised:
        distsim.simulate(**{"model": GPT, "cluster": "dgx-a100", "batch": 8, **options})
    assert said in str(raised.value)


def test_what_is_far_is_not_offered():
    with pytest.raises(OptionError) as raised:
        distsim.simulate(GPT, "dgx-a100", tokens=1e9)
    assert "did you mean" not in str(raised.value) and "kernels" in str(raised.value), "all that there are"


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", BFloat16()])
def test_types_are_taken_by_their_names(dtype):
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "batch": 8, "vocab": 100}
    named, made = (distsim.models.gpt(**sizes, dtype=each) for each in (dtype, BFloat16()))
    assert pformat(named) == pformat(made) == pformat(set_precision(distsim.models.gpt(**sizes), dtype))
    assert Tensor(dtype, (2, 3)) == Tensor(BFloat16(), (2, 3))
    assert hash(Tensor(dtype, (2, 3))) == hash(Tensor(BFloat16(), (2, 3)))
    assert distsim.Adam(mean=dtype, square=dtype) == distsim.Adam(mean=BFloat16(), square=BFloat16())
    assert distsim.SGD(momentum=0.9, state=dtype) == distsim.SGD(momentum=0.9, state=BFloat16())
    policy = distsim.Precision("own", dtype, dtype, dtype, "fp32", "float32", ("f32",))
    assert (policy.compute, policy.states) == (BFloat16(), (Float32(),))


def test_a_type_that_is_none_is_said():
    with pytest.raises(TypeRuleError, match=r"'bf61' is not one of .*did you mean bf16\?"):
        distsim.models.mlp(2, 8, 2, dtype="bf61")
    with pytest.raises(TypeRuleError, match="floating-point"):
        distsim.Adam(mean="int8")


def test_options_of_python_are_those_of_the_records():
    ours = {field.name for record in (ModelOptions, EngineOptions) for field in fields(record)}
    by_place = {"model", "batch", "seq", "plan", "outline", "from_file"}
    assert set(SimulationKeywords.__annotations__) == ours - by_place
    of_search = {field.name for field in fields(SearchOptions)} | set(TrainingKeywords.__annotations__)
    by_place = {"clusters", "plan", "objective", "top", "gpus"}
    assert set(SearchKeywords.__annotations__) == of_search - by_place


# --- results --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step():
    return distsim.simulate(GPT, "dgx-a100", "dp=2,tp=2", 8, precision="bf16")


def test_a_simulation_says_its_speed_and_of_what_its_mfu_is(step):
    assert step.tokens_per_second == pytest.approx(8 * 32 / step.step_time)
    assert step.samples_per_second == pytest.approx(8 / step.step_time)
    peak = 4 * step.cost_model.topology.devices[0].peak("bfloat16")
    assert step.mfu == pytest.approx(step.known_step.flops / (step.step_time * peak))
    text = repr(step)
    assert f"{GPT} on dgx-a100, dp=2,tp=2" in text and "fits" in text
    assert "MFU of 312 TFLOP/s each (bfloat16, 4 devices)" in text
    assert json.loads(json.dumps(step.to_dict())) == step.to_dict()


def test_the_slowest_of_the_devices_in_use_is_waited_for():
    large = "gpt:layers=2,hidden=4096,heads=32,seq=2048,vocab=1000"
    sizes = {"batch": 32, "precision": "bf16"}
    node, four = (distsim.simulate(large, cluster, "dp=8", **sizes) for cluster in ("dgx-h100", "dgx-h100:4"))
    assert "24 of 32 devices of dgx-h100:4 are idle" in four.known_step.notes[-1]
    assert (four.step_time, four.mfu) == (node.step_time, node.mfu)
    sets = "dp=8,tp=1,pp=1,zero=0,remat=none,microbatch_size=4"
    found = distsim.search(large, "dgx-h100:4", sets, gpus=8, **sizes)
    wide = distsim.search(large, "dgx-h100:4", "dp=8,tp=4,pp=1,microbatch_size=4", against="dp=8", **sizes)
    assert found.best.seconds == wide.own.seconds == node.step_period


def test_what_a_notebook_shows_is_escaped():
    run = distsim.simulate("mlp:layers=2,width=64", load_cluster("dgx-a100"), batch=8)
    run.step = type(run.step)("<b>model</b>", 8, 0, 1.0, cluster="<i>", plan="dp=1")
    shown = run._repr_html_()
    assert "&lt;b&gt;model&lt;/b&gt; on &lt;i&gt;" in shown and "<b>" not in shown


def test_results_are_rows_of_pandas(step):
    pandas = pytest.importorskip("pandas")
    row = step.to_pandas()
    assert len(row) == 1 and row["step_s"][0] == step.step_time and row["fits"][0]
    assert len(pandas.concat([row, row])) == 2


def test_without_pandas_its_extra_is_named(step, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'distsim\[pandas\]'"):
        step.to_pandas()


def test_search_finds_what_the_command_finds(capsys, tmp_path):
    sets = "tp=1|2,pp=1,zero=1,remat=none,microbatch_size=1|2"
    found = distsim.search(GPT, "dgx-a100", sets, 16, top=2, stack="torchtitan", against="dp=2,tp=4")
    out = tmp_path / "found.json"
    command = ["search", GPT, "--cluster", "dgx-a100", "--batch", "16", "--top", "2", "--stack", "torchtitan"]
    assert main([*command, "--plan", sets, "--against", "dp=2,tp=4", "--json", str(out)]) == 0
    written = json.loads(out.read_text())["searches"][0]
    own = found.to_dict()
    assert {name: written[name] for name in own if name != "step"} == {n: own[n] for n in own if n != "step"}
    assert re.search(r"dp=2,tp=4\S* \(yours\)", capsys.readouterr().out)


def test_the_simulation_that_a_search_found_is_that_of_simulate():
    sets = "tp=1|2,pp=1,zero=1,remat=none,microbatch_size=1"
    found = distsim.search(GPT, "dgx-a100", sets, 16, against="dp=2,tp=2")
    alone = distsim.simulate(GPT, "dgx-a100", found.best.plan, 16)
    own, theirs = found.simulation.to_dict(), alone.to_dict()
    assert {name: own[name] for name in own if name != "notes"} == {n: theirs[n] for n in own if n != "notes"}
    assert (found.simulation.mfu, found.simulation.tokens_per_second) == (found.mfu, found.tokens_per_second)
    assert found.simulation.known_step.name == GPT and found.simulation._repr_html_()
    assert found.simulate(found.own.plan).mfu == distsim.simulate(GPT, "dgx-a100", found.own.plan, 16).mfu
    assert len(distsim.compare(alone, found.simulation, found.simulate(found.own.plan)).steps) == 3


def test_mfu_of_a_search_counts_the_vocabulary_as_each_plan_pads_it():
    sets = "tp=1|8,pp=1,zero=0,remat=none,microbatches=1"
    sizes = {"batch": 8, "stack": "megatron"}
    found = distsim.search("gpt2:layers=1", "dgx-a100", sets, **sizes)
    flops: list[float] = []
    for trial in found.fitting:
        alone = distsim.simulate("gpt2:layers=1", "dgx-a100", trial.plan, **sizes)
        assert (found.mfu_of(trial), found.rows()[len(flops)]["mfu"]) == (alone.mfu, alone.mfu)
        flops.append(alone.known_step.flops)
    # 50,257 rows are padded to a multiple of 128 tp; three products of each.
    assert abs(flops[1] - flops[0]) == 3 * 2 * 8 * 1024 * 768 * (51200 - 50304)


def test_search_of_clusters_is_what_the_command_finds(capsys, tmp_path):
    pytest.importorskip("pandas")
    sets = "tp=1,pp=1,zero=1,remat=none,microbatch_size=1"
    asked = {"tokens": 1e9, "pue": 1.3, "failures": 1e-3, "storage": 0.5, "restart": 7.0}
    found = distsim.search(
        *(GPT, ["dgx-a100", "aws-p5"], sets, 16),
        **{"objective": "cost", "gpus": [4, 8], "price": (2.0, 4.0), "journal": tmp_path / "j.jsonl"},
        **asked,
    )
    out = tmp_path / "found.json"
    options = [text for name, value in asked.items() for text in (f"--{name}", str(value))]
    command = ["search", GPT, "--cluster", "dgx-a100,aws-p5", "--gpus", "4,8", "--plan", sets, *options]
    assert main([*command, "--batch", "16", "--objective", "cost", "--price", "2,4", "--json", str(out)]) == 0
    assert found.to_dict()["searches"] == json.loads(out.read_text())["searches"]
    assert str(found) in capsys.readouterr().out
    assert len(list(tmp_path.glob("j-*.jsonl"))) == len(found) == 4
    table = found.to_pandas()
    dearest = max(range(4), key=lambda row: table["dollars"][row])
    assert (table["dollars"] > 0).all() and table["cluster"][dearest] != found.ranked[0][0]
    assert found.best is found[found.ranked[0][0]] and found.ranked[0][0] in found._repr_html_()
    # Plans have what the training takes by each; where it was not asked for they have not.
    plans = found["dgx-a100 (8 GPUs)"]
    row = plans.rows()[0]
    assert row["dollars"] == pytest.approx(row["hours"] * 8 * 2.0)
    assert "dollars" in plans._repr_html_() and "days for 1 billion tokens" in plans._repr_html_()
    assert "dollars" not in distsim.search(GPT, "dgx-a100", sets, 16).to_pandas()
    alone = distsim.search(GPT, "dgx-a100", sets, 16, gpus=4, tokens="1B", price="2")
    assert alone.rows()[0]["dollars"] == pytest.approx(alone.estimate(alone.best).hours * 4 * 2.0)
    assert alone.best.text == found["dgx-a100 (4 GPUs)"].best.text


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"cluster": "dgx-a100,aws-p5"}, OptionError, r"several are a list, \['dgx-a100', 'aws-p5'\]"),
        ({"cluster": []}, PlanError, "name a cluster"),
        (
            {"cluster": ["dgx-a100", "aws-p5"], "against": "dp=8"},
            PlanError,
            "a plan is of one cluster, and 2",
        ),
        ({"against": "dpp=8"}, PlanError, "did you mean"),
        ({"against": "dp=3"}, PlanError, "--against dp=3"),
        ({"objective": "costs"}, OptionError, "did you mean cost"),
        ({"objective": "cost"}, PlanError, "dgx-a100 does not say its price"),
        ({"gpus": [8, 0]}, PlanError, "is not numbers of GPUs"),
        ({"gpus": 8, "cluster": load_cluster("dgx-a100")}, TopologyError, "is made: --gpus 8"),
        ({"price": [1.0, 2.0]}, PlanError, "2 prices for 1 cluster"),
        ({"price": -1.0}, PlanError, "a number more than 0"),
        ({"resume": True}, PlanError, "goes on with a --journal"),
        ({"dask": "tcp://x:1", "workers": 2}, PlanError, "give one of them"),
        ({"wokers": 2}, OptionError, "did you mean workers"),
        ({"workers": "2"}, OptionError, "it may be a whole number, RemoteWorkers or None"),
        ({"tokens": [1]}, OptionError, "it may be a number, text or None"),
        ({"plan": ["tp=1"]}, OptionError, "it may be text as"),
        ({"plan": {"tp": []}}, PlanError, "'tp=' is not field=value"),
        ({"cluster": [3]}, OptionError, "cluster=3 is of type int"),
        ({"top": "3"}, OptionError, "top='3' is of type str; it may be a whole number"),
    ],
)
def test_what_cannot_be_searched_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        distsim.search(**{"model": GPT, "cluster": "dgx-a100", "batch": 16, "plan": "tp=1,pp=1", **options})


def test_clusters_without_a_plan_are_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"dgx-a100:3: no plan of 24 devices"):
        found = distsim.search(GPT, ["dgx-a100", "dgx-a100:3"], "dp=8,tp=1,pp=1,remat=none", 16)
    assert list(found) == ["dgx-a100"]
    (reason,) = found.refused.values()
    assert reason.startswith("no plan of 24 devices") and found.to_dict()["refused"] == {"dgx-a100:3": reason}


def test_modules_of_examples_are_there():
    assert {importlib.import_module(home).__name__ for home in distsim._HOMES.values()}
