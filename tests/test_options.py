"""Every option of a model and its training is honoured by every command that takes it, or refused by name."""

import argparse
from dataclasses import fields

import pytest
from cli_cases import run

import distsim
from distsim.cli import main
from distsim.commands.options.model import add_model_options
from distsim.commands.options.training_file import READERS
from distsim.errors import PlanError
from distsim.models import mlp
from distsim.report.progress import Progress
from distsim.study.options import BACKWARD, LAYOUT, SIZES, TRAINING, ModelOptions, option_of
from distsim.study.training_step import training_step
from distsim.transforms import SGD, differentiate

GPT = ("gpt:layers=1,hidden=32,heads=2,vocab=64", "--batch", "4")
COMMANDS = {
    "partition": ("simulate", *GPT, "--cluster", "dgx-a100", "--partition", "single"),
    "show": ("show", *GPT),
    "training": ("show", *GPT, "--training"),
    "plan": ("show", *GPT, "--cluster", "dgx-a100", "--plan", "dp=2"),
    "simulate": ("simulate", *GPT, "--cluster", "dgx-a100", "--plan", "dp=2"),
    "compare": ("compare", *GPT, "--cluster", "dgx-a100", "--plan", "dp=2", "--plan", "tp=2"),
    "explain": ("explain", *GPT, "--cluster", "dgx-a100", "--plan", "dp=2"),
}
VALUES = {  # each other than what stands without it
    **{"batch": "8", "seq": "4", "bind": "seq=4", "parameters": "wte", "keep": "logits", "loss": "mse"},
    **{"stack": "megatron", "attention": "flash", "kernels": "compiled", "optimizer": "sgd", "clip": "0.5"},
    **{"precision": "mixed", "cuda_graphs": "layers"},
}


def test_every_field_says_what_it_is_of():
    kinds = {SIZES, BACKWARD, TRAINING, LAYOUT}
    assert all(set(field.metadata["of"]) <= kinds for field in fields(ModelOptions))
    parser = argparse.ArgumentParser(add_help=False)
    add_model_options(parser)
    options = {action.dest for action in parser._actions}
    assert options == {"model", *READERS, *VALUES}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_changes_what_comes_out_or_is_refused_by_name(command, capsys):
    base = run(capsys, *COMMANDS[command])[0]
    for name, value in VALUES.items():
        option = option_of(name)
        status = main([*COMMANDS[command], option, value])
        out, err = capsys.readouterr()
        assert (status == 2 and option[2:] in err) if status else out != base, (name, err)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"clip": 0.0}, "clip"),
        ({"loss": "mse", "stack": "megatron"}, "loss, --stack"),
        ({"precision": "mixed"}, "precision"),
    ],
)
def test_what_a_backward_pass_has_decided_is_refused_by_name(options, name):
    joint = differentiate(mlp(layers=2, width=8, batch=4), SGD())
    with pytest.raises(PlanError, match=f"brings its own backward pass, which decides that: no --{name}$"):
        training_step(ModelOptions(joint, **options), Progress())


def test_a_size_of_nothing_is_a_size_too():
    with pytest.raises(PlanError, match="is a function, which has its sizes: leave out batch"):
        training_step(ModelOptions(mlp(layers=2, width=8, batch=4), batch=0), Progress())


def test_clip_0_clips_nothing_whatever_the_stack_does():
    """As Megatron-LM's --clip-grad 0: then no norm of all gradients passes between stages."""
    model = "llama:layers=2,hidden=64,heads=4,kv_heads=4,ffn=128,seq=32,vocab=64"
    asked = (model, "dgx-h100", "dp=2,pp=2,microbatches=2,schedule=pipedream", 8)
    with pytest.raises(PlanError, match=r"norm of all gradients.*clip nothing \(clip=0\)"):
        distsim.simulate(*asked, stack="megatron")
    assert distsim.simulate(*asked, stack="megatron", clip=0).step_time > 0
