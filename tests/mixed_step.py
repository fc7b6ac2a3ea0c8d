"""Small models trained under a precision policy, and that every rank computes their step."""

from functools import cache

import numpy as np
from precision_models import in_float64
from training_models import F64, assemble, random_inputs, small_gpt, small_llama, small_mlp, tied

from distsim.executor import SequentialExecutor
from distsim.ir import Float32, Function
from distsim.program.program import Program
from distsim.transforms import Adam, differentiate, precision_named, set_precision

MODELS = {
    "gpt": lambda: small_gpt(batch=12),
    "odd gpt": lambda: small_gpt(hidden=6, heads=2, batch=12),
    "llama": lambda: small_llama(layers=3, batch=12),
    "mlp": lambda: small_mlp(layers=4, batch=12),
    "tied": lambda: tied(batch=12, hidden=7),
    "tied, even": lambda: tied(batch=12),
}


@cache
def joint_of(model: str, policy: str, clip: float | None = None) -> Function:
    function = set_precision(MODELS[model](), Float32(), F64)
    return differentiate(function, Adam(), precision=precision_named(policy), clip=clip)


@cache
def computed(model: str, policy: str, clip: float | None = None):
    """Return the inputs of a step, and what one device computes of them without rounding."""
    joint = joint_of(model, policy, clip)
    inputs = random_inputs(joint, 1)
    return inputs, SequentialExecutor().compute(in_float64(joint), inputs)


def assert_same_mixed_step(program: Program, inputs, expected) -> None:
    """Every rank computes, without rounding, what one device does."""
    results = SequentialExecutor().compute(in_float64(program.to_function()), inputs)
    for placed, array in zip(assemble(program, results), expected, strict=True):
        np.testing.assert_allclose(placed.array, array, rtol=1e-9, atol=1e-11, err_msg=placed.name)
