"""What calls in Python take beside text: mappings, NumPy's numbers, devices' names; what they say else."""

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest

import distsim
from distsim.errors import ImportModelError, OptionError, PlanError, TopologyError
from distsim.hardware import load_cluster
from distsim.importer.decoders import named_sizes
from distsim.importer.decoders.near_families import _NEAR
from distsim.importer.source import BUILDERS
from distsim.models.overrides import options_of

ROOT = Path(__file__).parents[1]
GPT = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
FIELDS = {"dp": [8, 4], "pp": 1, "zero": 0, "remat": "none", "sp": "off", "microbatch_size": 1}


@pytest.fixture(scope="module")
def step():
    return distsim.simulate(GPT, "dgx-a100", "dp=2,tp=2", 8, precision="bf16")


def test_what_a_notebook_has_as_mappings_is_what_the_text_says(tmp_path):
    """Plans, models, figures of a cluster; NumPy's numbers are numbers."""
    text = distsim.simulate(GPT, "dgx-a100", "dp=2,tp=2", 8, stack="megatron", set=["device.memory=40GiB"])
    fields = {"dp": np.int64(2), "tp": 2}
    for settings in ({"device.memory": "40GiB"}, "device.memory=40GiB"):
        step = distsim.simulate(GPT, "dgx-a100", fields, np.int64(8), stack="megatron", set=settings)
        assert step.to_dict() == text.to_dict()
        assert load_cluster("dgx-a100", settings).devices[0].memory == 40 * 2**30
    alone = [distsim.simulate(GPT, "dgx-a100", plan, 8).to_dict() for plan in ({}, None, "dp=1")]
    assert alone[0] == alone[1] == alone[2]
    sets = "dp=8|4,pp=1,zero=0,remat=none,sp=off,microbatch_size=1"
    own, found = (
        distsim.search(GPT, "dgx-a100", each, 16, against=plan)
        for each, plan in ((FIELDS, {"dp": 8}), (sets, "dp=8"))
    )
    assert own.to_dict() == found.to_dict()
    file = ROOT / "tests" / "data" / "configs" / "Qwen3-0.6B.json"
    config = {**json.loads(file.read_text()), "num_hidden_layers": 2}
    by = ("dgx-a100", {"dp": 8}, 8, 64)
    made, read = (distsim.simulate(model, *by) for model in (config, f"{file}:layers=2"))
    assert (made.step_time, made.peak_memory) == (read.step_time, read.peak_memory), "trained as a file is"
    assert made.known_step.name == "qwen3 config"
    (tmp_path / "config.json").write_text(json.dumps(config))
    for folder in (tmp_path, f"{tmp_path}:layers=2"):
        assert distsim.simulate(folder, *by).step_time == made.step_time
    tried = distsim.search(config, "dgx-a100", FIELDS, 16, 64, journal=tmp_path / "j")
    assert tried.best.text == distsim.search(str(tmp_path), "dgx-a100", FIELDS, 16, 64).best.text


def test_one_text_is_a_list_of_it():
    step = distsim.simulate("gpt:layers=1,hidden=32,heads=2,vocab=64", "dgx-a100", batch=8, bind="seq=4")
    assert step.known_step.sequence == 4


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"model": None},
            OptionError,
            "model=None is of type NoneType; it may be a name or a path",
        ),
        ({"model": b"gpt2"}, OptionError, "model=b'gpt2' is of type bytes"),
        ({"model": {"model_type": "llama", "vocab_size": 8}}, ImportModelError, "is missing; it must be"),
        ({"model": {"model_type": "gpt2", "n_embd": math.nan}}, ImportModelError, "a finite number"),
        ({"cluster": ["dgx-a100"]}, OptionError, "distsim.search takes a list"),
        ({"cluster": None}, OptionError, "cluster=None is of type NoneType"),
        ({"set": [3]}, OptionError, "set=3 is of type int; it may be a mapping as {'device.memory'"),
        ({"set": {"device.memry": "1GiB"}}, TopologyError, "did you mean device.memory"),
        ({"plan": ["dp=2"]}, OptionError, "plan=['dp=2'] is of type list; it may be text as dp=2,tp=4"),
        ({"plan": {"dp": [1, 2]}}, PlanError, "dp=[1, 2]: a plan has one value a field"),
        ({"plan": {"dp": 2.0}}, PlanError, "dp='2.0' is not an integer"),
        ({"plan": {"dp": "2,tp=2"}}, PlanError, "'2,tp=2' is no field, or value of one"),
        ({"plan": {"dpp": 2}}, PlanError, "did you mean pp or dp?"),
        ({"batch": "8"}, OptionError, "batch='8' is of type str; it may be a whole number or None"),
        ({"clip": "1"}, OptionError, "clip='1' is of type str; it may be a number or None"),
        ({"overlap": "no"}, OptionError, "overlap='no' is of type str; it may be True or False"),
    ],
)
def test_an_argument_of_another_type_is_said_with_what_it_may_be(options, error, said):
    with pytest.raises(error) as raised:
        distsim.simulate(**{"model": GPT, "cluster": "dgx-a100", "batch": 8, **options})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda step: load_cluster(3), "cluster=3 is of type int"),
        (lambda step: distsim.load_model(3), "model=3"),
        (lambda step: distsim.import_from_hf(3), "config=3"),
        (lambda step: distsim.import_from_onnx(0), "path=0 is of type int"),
        (lambda step: distsim.Plan.parse({"dp": 2}), r"distsim.Plan(dp=2, tp=4)"),
        (lambda step: distsim.compare([step, step]), "compare(*steps)"),
    ],
)
def test_other_names_say_what_they_may_be_given(step, call, said):
    with pytest.raises(OptionError) as raised:
        call(step)
    assert said in str(raised.value)


def test_devices_are_found_by_the_names_that_tables_have(step):
    device = max(step.memory, key=lambda each: each.id)
    for figures in (step.memory, step.peak_memory, step.timestamps, step.host_memory):
        assert figures["gpu:3"] == figures[device]
    assert step.shares("gpu:3") == step.shares(device)
    assert step.saved_by_module("gpu:3") == step.saved_by_module(device)
    for unknown in (lambda: step.memory["gpu:4"], lambda: step.shares("gpu:4")):
        with pytest.raises(KeyError, match="'gpu:4' does not occur; there are gpu:0 to gpu:3"):
            unknown()


def test_zero_without_ranks_to_divide_over_is_noted():
    for plan, said in (("zero=3", True), ("zero=1,tp=2", True), ("dp=2,zero=3", False), ("tp=2", False)):
        notes = distsim.simulate(GPT, "dgx-a100", plan, 8).known_step.notes
        assert any("has no effect: it divides over the ranks of dp and cp" in note for note in notes) == said


@pytest.mark.parametrize(
    ("config", "near"),
    [
        ({"model_type": "bloom", "hidden_size": 64, "n_head": "x"}, "gpt:hidden=64, with learned positions"),
        ({"model_type": "mllama", "text_config": {"num_key_value_heads": 8}}, "llama:kv_heads=8, text alone"),
    ],
)
def test_a_family_that_is_not_read_says_what_comes_near(config, near):
    with pytest.raises(ImportModelError) as raised:
        distsim.load_model(config)
    assert f"; near it comes {near}" in str(raised.value)


def test_what_comes_near_has_the_options_that_are_said():
    for near in _NEAR.values():
        if near.model in BUILDERS:
            known = inspect.signature(BUILDERS[near.model]).parameters.keys()
        else:
            known = {*options_of(named_sizes(near.model))}
        assert near.fields.keys() <= {*known}
