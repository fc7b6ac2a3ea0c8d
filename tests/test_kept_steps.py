"""Training steps of models read by name are kept for other plans; what is of a file is read again."""

import json
from dataclasses import replace

import numpy as np
import pytest
from decoder_models import FAMILIES

import distsim
from distsim.cache import MemoryLimit
from distsim.ir import pformat
from distsim.plan.stacks import stack_named
from distsim.report.progress import Progress
from distsim.study import training_step
from distsim.study.options import ModelOptions
from distsim.study.training_step import kept_training_step
from distsim.transforms import SGD
from distsim.transforms.autodiff.precision import precision_named

OPTIONS = ModelOptions("gpt2:layers=2,hidden=64,heads=4", batch=8, seq=64, plan="dp=2")


def step(**changes):
    return kept_training_step(replace(OPTIONS, **changes), Progress())[0]


def test_plans_share_the_step_of_a_model_with_a_name():
    first = step()
    for plan in ("dp=4", "tp=2", "pp=2,microbatches=2", "dp=2,remat=full"):
        assert step(plan=plan) is first
    gpt = ModelOptions("gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100", batch=8)
    assert kept_training_step(gpt, Progress())[0] is kept_training_step(gpt, Progress())[0]


@pytest.mark.parametrize(
    "changes",
    [
        *[
            {"batch": 16},
            {"seq": 32},
            {"model": "gpt2:layers=3,hidden=64,heads=4"},
            {"bind": ["seq=64"], "seq": None},
        ],
        *[{"precision": "bf16"}, {"optimizer": "sgd"}, {"optimizer": "adamw:beta2=0.9"}, {"clip": 1.0}],
        *[{"attention": "math"}, {"stack": "megatron"}, {"stack": "torchtitan"}],
    ],
    ids=str,
)
def test_a_step_that_is_made_otherwise_is_another(changes):
    first, other = step(), step(**changes)
    assert other is not first
    assert step(**changes) is other
    made, _ = training_step.training_step(replace(OPTIONS, **changes), Progress())
    assert pformat(made) == pformat(other)


def test_a_vocabulary_that_is_padded_for_ranks_is_of_its_own_step():
    sizes = [
        next(v.type.shape[0] for v in step(stack="megatron", plan=plan).parameters if v.name == "wte")
        for plan in ("tp=1", "tp=4", "tp=1,dp=2")
    ]
    assert sizes == [50304, 50688, 50304]


def test_a_file_is_read_again(tmp_path):
    path = tmp_path / "config.json"
    layers = []
    for count in (1, 3):
        path.write_text(json.dumps({**FAMILIES["llama"], "num_hidden_layers": count}), encoding="utf-8")
        made = step(model=str(path), seq=8)
        layers.append(sum(v.name.endswith("norm1.scale") for v in made.parameters))
    assert layers == [1, 3]


@pytest.mark.usefixtures("collect")
def test_steps_are_forgotten_when_what_is_kept_takes_too_much(monkeypatch):
    first = step()
    monkeypatch.setattr(training_step, "_LIMIT", MemoryLimit(blocks=-1))
    assert step() is not first


def test_a_kept_step_gives_what_one_made_anew_gives():
    def simulated(plan):
        found = distsim.simulate("gpt2:layers=2", "dgx-a100", plan, 8, 64)
        return found.step_time, found.peak_memory, found.notes, found.mfu

    plans = ("dp=2", "dp=4,zero=3", "tp=2,pp=2,microbatches=4", "dp=2,remat=full")
    together = [simulated(plan) for plan in plans]
    apart = []
    for plan in plans:
        training_step._STEPS.forget(training_step._NAMED)
        apart.append(simulated(plan))
    assert together == apart


class Momentum(SGD):
    """An optimizer of a user's, equal to others by the fields that it inherits."""

    def __init__(self, momentum):
        super().__init__()
        object.__setattr__(self, "own", momentum)

    def update(self, *given):
        return SGD(momentum=self.own).update(*given)


def test_an_optimizer_of_ones_own_is_not_taken_for_another():
    without, with_velocity = (
        distsim.simulate(OPTIONS.model, "dgx-a100", "dp=2", 8, 64, optimizer=Momentum(m)) for m in (0.0, 0.9)
    )
    assert max(with_velocity.peak_memory.values()) > max(without.peak_memory.values())


@pytest.mark.parametrize(
    "own",
    [
        {"precision": replace(precision_named("mixed"), wide_ops=["Softmax"])},
        {"stack": replace(stack_named("megatron"), linear_ops=["MatMul"])},
        {"optimizer": SGD(lr=np.array(0.1))},
    ],
    ids=lambda own: next(iter(own)),
)
def test_what_can_not_be_told_apart_is_made_anew(own):
    assert pformat(step(**own)) == pformat(
        training_step.training_step(replace(OPTIONS, **own), Progress())[0]
    )
