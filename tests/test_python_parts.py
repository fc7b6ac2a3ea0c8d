"""The parts of `simulate` in Python: what they are given is checked there; what comes back is kept whole."""

import pickle
import re

import pytest

import distsim
from distsim.cli import main
from distsim.compose import parallelize
from distsim.errors import OptionError
from distsim.hardware import load_cluster
from distsim.models import mlp
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate

GPT = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
JOINT = differentiate(mlp(layers=2, width=8, batch=4), SGD())
DGX = load_cluster("dgx-a100")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: parallelize(JOINT, "dp=2", DGX),
            "plan='dp=2' is of type str; it may be a Plan, as Plan.parse",
        ),
        (
            lambda: parallelize(JOINT, Plan(), "dgx-a100"),
            "topology='dgx-a100' is of type str; it may be a Top",
        ),
        (
            lambda: parallelize(JOINT, Plan(), DGX, kernels="eager"),
            "kernels='eager' .* as KERNELS\\['eager'\\]",
        ),
        (
            lambda: parallelize("gpt", Plan(), DGX),
            "function='gpt' is of type str; it may be a joint function",
        ),
        (lambda: distsim.CostModel("dgx-a100"), "topology='dgx-a100' is of type str; it may be a Topology"),
        (lambda: differentiate(mlp(), "adam"), "optimizer='adam' is of type str; it may be an optimizer, as"),
        (
            lambda: differentiate("gpt"),
            "function='gpt' is of type str; it may be a forward function, as load_",
        ),
        (lambda: distsim.Simulator(DGX), "cost_model=.* is of type Topology; it may be a CostModel, as"),
        (
            lambda: distsim.Simulator(distsim.CostModel(DGX)).simulate(JOINT),
            "program=.* is of type Function; it may be a Program, as parallelize",
        ),
    ],
)
def test_what_the_parts_of_simulate_take_is_said(call, said):
    with pytest.raises(OptionError, match=said):
        call()


@pytest.mark.parametrize("options", [{}, {"contention": True}])
@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,microbatches=4,schedule=pipedream"])
def test_a_simulation_is_pickled_with_all_that_it_says(plan, options):
    """As what a pool of processes returns, or a notebook keeps."""
    step = distsim.simulate(GPT, "dgx-a100", plan, 16, **options)
    again = pickle.loads(pickle.dumps(step))
    assert again.to_dict() == step.to_dict() and again.peak_memory == step.peak_memory
    assert str(again.explain()) == str(step.explain())


def test_notes_are_those_that_the_command_prints(capsys):
    assert (
        main(["simulate", "gpt2", "--cluster", "dgx-1", "--plan", "dp=4", "--batch", "8", "--seq", "64"]) == 0
    )
    printed = re.findall(r"(?m)^note: (.*)", capsys.readouterr().out)
    step = distsim.simulate("gpt2", "dgx-1", "dp=4", 8, 64)
    assert list(step.notes) == printed == step.to_dict()["notes"] and len(printed) > 2
