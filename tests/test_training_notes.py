"""What is said of a framework's file where it says less, or other, than what is simulated."""

import json
import re

import pytest

from distsim.cli import main
from distsim.errors import ImportModelError
from distsim.importer.configs import read_deepspeed, read_megatron_args, read_torchtitan


def written(folder, text, name):
    path = folder / name
    path.write_text(text)
    return path


def test_deepspeed_recomputes_where_something_says_how(tmp_path):
    """The table itself turns nothing on: the model calls deepspeed.checkpointing, or does not."""
    off = {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None}
    table = {"train_batch_size": 8, "activation_checkpointing": off, "zero_optimization": {"stage": 0}}
    config = read_deepspeed(written(tmp_path, json.dumps(table), "ds.json"))
    assert config.fields["remat"] == "none" and "turns nothing on" in " ".join(config.notes)
    table["activation_checkpointing"] = {**off, "contiguous_memory_optimization": True}
    assert read_deepspeed(written(tmp_path, json.dumps(table), "ds.json")).fields["remat"] == "full"


def test_advice_holds_the_batch_that_a_file_says_of_a_rank(tmp_path, capsys):
    table = {
        **{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        **{"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    }
    path = written(tmp_path, json.dumps(table), "ds.json")
    model = "gpt:layers=2,hidden=64,heads=4,seq=64,vocab=64"
    command = ["simulate", model, "--deepspeed", path, "--cluster", "dgx-a100:1"]
    command += ["--set", "device.memory=3MiB", "--set", "device.context=1B"]
    assert main([*map(str, command)]) == 3
    out = capsys.readouterr().out
    assert "batch 64" in out and '"auto" of train_batch_size: 4 a rank, 2 times' in out
    advised = re.findall("it would fit with (.*?) and --batch 64: ", out)
    assert advised
    plan = advised[0].replace(" ", "")
    assert main([*map(str, command), "--plan", plan, "--batch", "64"]) == 0


def test_torchtitan_says_which_products_its_filter_does_not_keep(tmp_path):
    text = '[model]\nname="llama3"\nflavor="8B"\nconverters=["quantize.linear.float8"]\n[training]\n'
    said = {}
    for names in ('"output"', '"output", "attention.wq"', ""):
        path = written(tmp_path, f"{text}[quantize.linear.float8]\nfilter_fqns=[{names}]\n", "titan.toml")
        said[names] = [note for note in read_torchtitan(path).notes if "filter_fqns" in note]
    assert said['"output"'] == []
    assert "attention.wq" in said['"output", "attention.wq"'][0] and "the head stays" in said[""][0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--pipeline-model-parallel-size 2", "0 with 2 pipeline ranks"),
        ("--recompute-granularity full --recompute-method uniform", "0 where activations are recomputed"),
        ("--cpu-offloading-num-layers 4", "a whole number from 0 to 3"),
    ],
)
def test_megatron_offloads_layers_beside_nothing_else(tmp_path, more, said):
    """megatron/core/transformer/transformer_config.py refuses these."""
    text = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
        "--global-batch-size 8 --vocab-size 128 --cpu-offloading-num-layers 3 "
    )
    assert read_megatron_args(written(tmp_path, text, "args.txt")).fields["offload"] == 3
    with pytest.raises(ImportModelError, match=said):
        read_megatron_args(written(tmp_path, text + more, "args.txt"))


def test_what_megatron_refuses_is_said_and_not_advised(capsys):
    model = "gpt:layers=4,hidden=64,heads=4,seq=64,vocab=64"
    command = ["simulate", model, "--stack", "megatron", "--cluster", "dgx-a100", "--batch", "16"]
    assert main([*command, "--plan", "dp=2,pp=2,offload=1"]) == 0
    assert "megatron refuses offload=1 with pp=2; simulated all the same" in capsys.readouterr().out
    short = ["--set", "device.memory=3MiB", "--set", "device.context=1B"]
    assert main([*command, *short, "--plan", "dp=1"]) == 3
    advised = re.findall("it would fit with (.*?): ", capsys.readouterr().out)
    assert advised and not any("offload=4" in each for each in advised)
    assert not any("offload" in each and ("pp=" in each or "remat" in each) for each in advised)
