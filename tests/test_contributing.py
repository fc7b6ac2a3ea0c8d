"""The examples of CONTRIBUTING.md do what it says, and the folders that it calls full are."""

import re
import subprocess
import sys

import numpy as np
import pytest
from test_architecture import CATALOGUES, MODULES, MOST_ENTRIES, PACKAGES, ROOT
from test_docs import PAGES, blocks
from training_models import computed_over_ranks, random_inputs, small_mlp

from distsim.executor import SequentialExecutor
from distsim.hardware import load_cluster
from distsim.ir import all_ops
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate

PAGE = PAGES["CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def signed():
    """A joint function, and what the transform of the page makes of it."""
    (example,) = blocks(PAGE, "python")
    names = {}
    exec(compile(example, "CONTRIBUTING.md", "exec"), names)
    joint = differentiate(small_mlp(layers=4), SGD(lr=0.125))
    return joint, names["sign_gradients"](joint)


def test_the_transform_takes_the_signs_of_gradients(signed):
    joint, made = signed
    inputs = random_inputs(joint)
    plain, own = (SequentialExecutor().compute(function, inputs) for function in signed)
    given = {value.name: array for value, array in zip(joint.inputs, inputs, strict=True)}
    assert [value.name for value in made.outputs] == [value.name for value in joint.outputs]
    updated = 0
    for value, old, new in zip(joint.outputs, plain, own, strict=True):
        before = given.get(value.name.removesuffix(".new"))
        if before is None:
            np.testing.assert_array_equal(new, old)  # the loss
        else:
            updated += 1
            np.testing.assert_allclose(new, before - 0.125 * np.sign(before - old), rtol=1e-12)
    assert updated == 4


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2,pp=2,microbatches=2", "dp=2,pp=2,microbatches=2"])
def test_the_transform_is_computed_over_every_rank(signed, plan):
    program = computed_over_ranks(signed[1], Plan.parse(plan))
    assert sum(op.op_type == "Sign" for op in all_ops(program.to_function())) >= 4  # one a weight


def test_the_action_takes_a_file_and_its_lines(tmp_path):
    """In a process of its own, whose kinds have it: see ``new_action.py``."""
    command = [sys.executable, "tests/new_action.py", "CONTRIBUTING.md", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_kind_that_makes_again_what_another_made(tmp_path):
    """What is in flight, sent and bounded, in a process whose kinds have it: see ``made_again.py``."""
    command = [sys.executable, "tests/made_again.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_preset_is_a_cluster(tmp_path):
    (text,) = blocks(PAGE, "toml")
    path = tmp_path / "half.toml"
    path.write_text(text)
    topology = load_cluster(str(path))
    assert len(topology.devices) == 4 and topology.devices[0].memory == 94 * 2**30


def test_the_full_folders_are_named():
    said = re.search(r"full are (.*?)\. `wc", PAGE, re.DOTALL)[1]
    full = {
        package.removeprefix("distsim.").replace(".", "/")
        for package in PACKAGES
        if package not in CATALOGUES
        and len([p for p in MODULES[package].parent.iterdir() if p.name != "__pycache__"]) == MOST_ENTRIES
    }
    assert set(re.findall(r"`([\w/]+)`", said)) == full
