"""A plan as it is printed is one to ask for, and gives what was said of it."""

import csv
import json
import re
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from cli_cases import run

import distsim
from distsim.cli import main
from distsim.errors import DistsimError, PlanError
from distsim.hardware import load_cluster
from distsim.importer.configs import read_deepspeed, read_megatron_args, read_torchtitan
from distsim.plan.stacks import STACKS
from distsim.plan_search.trial import PlanTrial
from distsim.study.choices import Choices
from distsim.study.options import ModelOptions
from distsim.study.search import PlanStudy

GPT = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"


@pytest.mark.parametrize(
    ("stack", "sets"),
    [
        ("torchtitan", "tp=1|2,pp=1,zero=0|3,sp=off,remat=none,microbatch_size=1"),
        (
            "megatron",
            "dp=2,pp=2,tp=2,zero=1,sp=off,stages=even|layers,schedule=1f1b|interleaved,chunks=1,microbatches=2,remat=none",
        ),
    ],
)
def test_the_text_of_a_plan_that_a_search_found_is_one_to_simulate(stack, sets):
    found = distsim.search(GPT, "dgx-a100", sets, 16, top=9, stack=stack)
    assert len(found.fitting) == 4
    for trial in found.fitting:
        alone = distsim.simulate(GPT, "dgx-a100", trial.text, 16, stack=stack)
        assert (alone.step_period, alone.known_step.plan) == (trial.seconds, trial.text)


def test_what_would_make_it_fit_is_what_asking_for_it_gives(capsys):
    """The stack fills in what a change leaves open: FSDP2's buckets for ``zero=3``, say."""
    model = GPT.replace("seq=32,vocab=100", "seq=64,vocab=64")
    small = ["simulate", model, "--batch", 8, "--stack", "torchtitan", "--cluster", "dgx-a100"]
    small += ["--set", "device.memory=4MiB", "--set", "device.context=1B", "--plan"]
    assert main([*map(str, small), "dp=4,zero=0"]) == 3
    advice = re.findall(r"^note: it would fit with (.*): (.*), at most (.*)$", capsys.readouterr().out, re.M)
    assert len(advice) == 3
    for change, seconds, peak in advice:
        fields = {"dp": 4, "zero": 0} | dict(part.split("=") for part in change.split(", "))
        assert main([*map(str, small), ",".join(f"{name}={own}" for name, own in fields.items())]) == 0
        out = capsys.readouterr().out
        assert f"\nstep time     {seconds} (" in out and peak in out


MEGATRON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --bf16"
)
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\n[parallelism]\n'


@pytest.mark.parametrize(
    ("option", "text", "sets", "said"),
    [
        ("megatron-args", f"{MEGATRON} ", "tp=1,zero=0", "bucket=megatron,overlap_grads=off"),
        ("megatron-args", f"{MEGATRON} ", "tp=1,zero=1", "zero=1,bucket=megatron,overlap_grads=off"),
        (
            "megatron-args",
            f"{MEGATRON} --overlap-grad-reduce --ddp-bucket-size 9999",
            "tp=1,zero=1",
            "zero=1,bucket=9999p",
        ),
        (
            "megatron-args",
            f"{MEGATRON} --sequence-parallel --tensor-model-parallel-size 2 --tp-comm-overlap",
            "tp=2,zero=0,sp=on",
            "sp=on,bucket=megatron,overlap_grads=off,tp_overlap=split",
        ),
        ("torchtitan", TITAN, "tp=1,zero=3", "zero=3,reshard=auto,bucket=fsdp2"),
        (
            "torchtitan",
            f"{TITAN}data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8",
            "tp=1,zero=0",
            "bucket=torch",
        ),
        (
            "deepspeed",
            '{"train_micro_batch_size_per_gpu": 2}',
            "tp=1,zero=2",
            "bucket=deepspeed,overlap_grads=off",
        ),
    ],
)
def test_a_search_has_what_a_file_says_of_ranks(tmp_path, capsys, option, text, sets, said):
    path, out = tmp_path / "file", tmp_path / "found.csv"
    path.write_text(text)
    small = (GPT, "--cluster", "dgx-a100", f"--{option}", path)
    plan = f"pp=1,cp=1,remat=none,microbatches=1,{sets}"
    _, err = run(capsys, "search", *small, "--plan", plan, "--csv", out)
    (found,) = csv.DictReader(out.read_text().splitlines())
    batch = 8 if "tp=2" in sets else 16
    assert f"batch {batch}, that of its own layout on 8 devices" in err and said in found["plan"]
    step = tmp_path / "step.json"
    run(capsys, "simulate", *small, "--plan", found["plan"], "--json", step)
    assert json.loads(step.read_text())["step_s"] == float(found["step_s"])


def test_several_numbers_of_devices_have_no_batch_of_a_file(tmp_path, capsys):
    path = tmp_path / "args"
    path.write_text(MEGATRON)
    command = ["search", "gpt2", "--megatron-args", str(path), "--cluster", "dgx-a100", "--gpus", "8,4"]
    assert main(command) == 2
    assert "4, 8 devices have other ranks: give --batch" in capsys.readouterr().err


MIXTRAL = "mixtral-8x7b:layers=4,hidden=64,heads=8,seq=32"
SPACES = [
    "",
    "zero=0,bucket=25MiB,tp=1",
    "sp=*,tp_overlap=*,tp=2,pp=1",
    "pp=2,chunks=1|2,schedule=*,tp=1,zero=0|1",
]
FILES = [None, *sorted((Path(__file__).parent / "data" / "training").glob("*"))]


def choices_beside(file):
    """Choices by each stack, or by the file of a framework."""
    if file is None:
        return [ModelOptions(MIXTRAL, batch=16, stack=stack) for stack in STACKS]
    for read in (read_deepspeed, read_megatron_args, read_torchtitan):
        with suppress(DistsimError):
            return [ModelOptions(MIXTRAL, batch=16, from_file=read(file).of_model())]
    raise AssertionError(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem if file else "stacks")
def test_a_plan_is_read_as_it_was_written(file):
    """Also its short text: what people copy; of a seventh of the plans, which has each value of a field."""
    topology, count = load_cluster("dgx-a100", ["devices_per_node=4"]), 0
    for options, sets in product(choices_beside(file), SPACES):
        study = PlanStudy.of(options, f"{sets},remat=none|full,cp=1" if sets else "remat=full")
        choices = study.choices
        plans = study.space(topology).plans
        for plan in plans[::7] if len(plans) > 200 else plans:
            trial = PlanTrial(choices.written(plan), always=choices.always_written)
            for text in (trial.text, trial.short):
                asked = text if file is None else choices.file.laid_out(plan.devices, text, 16)[0]
                assert choices.plan(asked) == plan
            count += 1
    assert count > 100


def test_what_a_stack_divides_by_default_may_not_suit_what_a_plan_says():
    choices = Choices.of(ModelOptions(GPT, stack="fsdp"))
    with pytest.raises(PlanError, match="bucket=25MiB .*zero=3: the stack's; add zero=0"):
        choices.plan("dp=8,bucket=25MiB")
    assert choices.written(choices.plan("dp=8,bucket=25MiB,zero=0")).endswith("bucket=25MiB,zero=0")


def test_advice_leaves_out_what_the_step_left_out(capsys):
    """Every second layer of one layer: the stack's default is dropped, and not taken up by a change."""
    command = ["simulate", GPT.replace("layers=2", "layers=1").replace("seq=32,vocab=100", "seq=64,vocab=64")]
    command += ["--batch", "8", "--stack", "torchtitan", "--cluster", "dgx-a100"]
    command += ["--set", "device.memory=4MiB", "--set", "device.context=1B"]
    assert main(command) == 3
    advice = re.findall("^note: it would fit with (.*?):", capsys.readouterr().out, re.MULTILINE)
    assert len(advice) == 3 and not any("remat" in change for change in advice)
