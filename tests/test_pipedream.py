"""PipeDream and PipeDream-2BW: steps without a flush, of which each stage updates its weights as it goes.

The reference is one device that keeps every version: microbatch m computes its gradient with, of each stage,
the version that the papers say, and the stage's newest weights take the step.
"""

from functools import cache

import numpy as np
import pytest
from training_models import assemble, laid_out, mesh_of, random_inputs, small_gpt, small_mlp

from distsim.executor import SequentialExecutor
from distsim.ir import FunctionMaker, Role
from distsim.schedule import schedule
from distsim.transforms import SGD, Adam, differentiate

MODELS = {
    "mlp": lambda batch: small_mlp(layers=8, batch=batch),
    "gpt": lambda batch: small_gpt(3, batch=batch),
}
BATCH = 16


@cache
def joint_of(model, optimizer):
    return differentiate(MODELS[model](BATCH), optimizer)


def version_read(order, stage, microbatch):
    """How many updates the stage has made to the weights that a microbatch reads there."""
    ranks, every = order.num_ranks, order.weights.update_every
    if order.name == "pipedream":
        return max(0, microbatch - (ranks - 1 - stage))
    return max(0, microbatch // every - 1)


def one_update(optimizer, value, *given):
    """The new value of a parameter and of its state, as the optimizer makes them."""
    maker = FunctionMaker("update")
    weight = maker.add_input_value("w", value.type, Role.PARAMETER)
    maker.set_outputs(optimizer.update(maker, weight, maker.add_input_value("g", value.type)))
    return SequentialExecutor().compute(maker.finalize(), list(given))


def part_of(array, microbatch, count, dp):
    """The samples of a microbatch: so many of each replica's."""
    return np.concatenate([np.split(own, count)[microbatch] for own in np.split(array, dp)])


def reference(model, optimizer, order, inputs, stage_of, dp):
    """The loss, then new parameters and state by name, on one device."""
    joint, count, every = joint_of(model, optimizer), order.num_microbatches, order.weights.update_every
    part = differentiate(MODELS[model](BATCH // count), None)
    given = dict(zip([value.name for value in joint.inputs], inputs, strict=True))
    weights = [value for value in part.inputs if value.role is Role.PARAMETER]
    versions = {value.name: [given[value.name]] for value in weights}
    state = {v.name: [given[n] for n in (f"{v.name}.m", f"{v.name}.v") if n in given] for v in weights}
    losses, sums = [], dict.fromkeys(versions, 0.0)
    for m in range(count):
        read = {n: known[version_read(order, stage_of[n], m)] for n, known in versions.items()}
        data = {n: part_of(given[n], m, count, dp) for n in given if n not in versions and "." not in n}
        made = SequentialExecutor().compute(part, [(read | data)[value.name] for value in part.inputs])
        losses.append(made[0])
        for value, gradient in zip(weights, made[1:], strict=True):
            sums[value.name] += gradient / count  # the loss is a mean over the whole batch
        if m % every == every - 1:
            for value in weights:
                name = value.name
                new, *state[name] = one_update(optimizer, value, versions[name][-1], sums[name], *state[name])
                versions[name].append(new)
                sums[name] = 0.0
    found = {"loss": np.mean(losses)} | {f"{n}.new": known[-1] for n, known in versions.items()}
    return found | {f"{n}.{k}.new": a for n, own in state.items() for k, a in zip("mv", own, strict=False)}


def check(model, optimizer, order, **layout):
    joint = joint_of(model, optimizer)
    inputs = random_inputs(joint)
    dp = layout.pop("dp", 1)
    tp = layout.pop("tp", 1)
    program = laid_out(joint, mesh_of(dp, tp, order.num_ranks), order, **layout)
    stage_of = {given.key.name: given.stages[0] for given in program.inputs}
    expected = reference(model, optimizer, order, inputs, stage_of, dp)
    results = SequentialExecutor().compute(program.to_function(), inputs)
    made = {placed.name: placed.array for placed in assemble(program, results)}
    assert made.keys() == expected.keys()
    for name, array in made.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)


# --- what is computed -----------------------------------------------------------------------------------

ORDERS = [("pipedream", 8, {}), ("pipedream_2bw", 8, {}), ("pipedream_2bw", 16, {"update_every": 4})]


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize(("name", "microbatches", "options"), ORDERS)
def test_every_microbatch_reads_its_version(name, microbatches, options, pp):
    check("mlp", SGD(0.5), schedule(name, pp, microbatches, **options))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp": 2},
        {"tp": 2},
        {"remat": "full"},
        {"remat": "min_cut"},
        {"dp": 2, "fsdp": "reshard"},
        {"dp": 2, "fsdp": "keep", "remat": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_in_every_layout(name, layout):
    check("gpt", Adam(0.05), schedule(name, 2, 4), **layout)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_one_microbatch(name):
    check("mlp", SGD(0.5), schedule(name, 1, 1))
