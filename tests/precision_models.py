"""Small models with precision policies, for the tests of what is kept, cast, summed and updated."""

from functools import cache

from training_models import F64, tied

from distsim.ir import (
    BFloat16,
    Float16,
    Float32,
    Function,
    Value,
    all_ops,
    callees,
)
from distsim.models import gpt, llama
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate, precision_named, set_precision

SIZES = {"layers": 2, "hidden": 8, "heads": 2, "seq": 4, "batch": 8, "vocab": 16}


def small_gpt() -> Function:
    return gpt(**SIZES)


def small_llama() -> Function:
    return llama(**SIZES, kv_heads=1, ffn=16)


MODELS = {
    "gpt": small_gpt,
    "llama": small_llama,
    "tied": lambda: set_precision(tied(batch=8), Float32(), F64),
}


@cache
def joint_of(model: str, policy: str) -> Function:
    return differentiate(MODELS[model](), Adam(), precision=precision_named(policy))


def in_float64(function: Function) -> Function:
    """The same function with every type a float64: what it computes must not depend on where casts are."""
    used = {value.type.dtype for value in values(function)}
    for source in (BFloat16(), Float16(), Float32()):
        if source in used:
            function = set_precision(function, F64, source)
    return function


def values(function: Function) -> list[Value]:
    found = [function, *callees(function)]
    return [v for each in found for v in (*each.inputs, *(o for op in each.ops for o in op.outputs))]


def updates(function: Function) -> list:
    return [op for op in all_ops(function) if op.op_type.endswith("Optimizer")]


PLANS = [
    (Plan(2, 1, 1, 2), "none", "zero=0"),
    (Plan(2, 2, 2, 2), "full", "zero=0"),
    (Plan(2, 1, 2, 4), "none", "zero=3,reshard=never"),
    (Plan(4, 1, 1, 1), "every:2", "zero=3"),
    (Plan(2, 2, 1, 2), "min_cut", "zero=3"),
]


def rounded(function: Function, inputs: list) -> list:
    """The inputs in the types of a function."""
    return [array.astype(v.type.dtype.np) for v, array in zip(function.inputs, inputs, strict=True)]
