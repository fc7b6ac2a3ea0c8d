"""What is made of weights once a step: casts and gathers that every microbatch reads, wherever they were."""

from collections import Counter
from functools import cache
from itertools import cycle

import numpy as np
import pytest
from mixed_step import assert_same_mixed_step, computed, joint_of
from precision_models import rounded
from training_models import assemble, assert_all_readers_agree, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.ir import Attributes, Function, all_ops, callees, verify
from distsim.ir.rewrite import flatten, retype_op, rewrite
from distsim.models import gpt
from distsim.ops.conversion import ONCE
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, differentiate, precision_named
from distsim.transforms.outlining.lift import lift_weights

PLANS = [
    "microbatches=3",
    "pp=2,microbatches=4",
    "pp=2,microbatches=4,remat=full",
    "pp=2,microbatches=4,remat=min_cut",
    "pp=2,microbatches=4,schedule=interleaved,chunks=2,remat=every:2",
    "pp=2,microbatches=4,schedule=zb_h1",
    "pp=2,microbatches=4,schedule=zb_v,chunks=2",
    "pp=2,microbatches=4,schedule=dualpipe_v,chunks=2",
    "tp=2,sp=on,microbatches=2",
    "dp=2,pp=2,microbatches=2,zero=1,overlap_params=on",
    "dp=2,pp=2,microbatches=3,zero=3,reshard=never",
]
"""Under which each weight is cast once, on each rank that has it."""
EACH = [("dp=2,microbatches=3,zero=3", 2), ("pp=2,microbatches=4,schedule=pipedream", 1)]
"""Under which each pass, or each forward pass, casts it anew."""
GATHERED = ["dp=2,microbatches=2,zero=3,remat=uniform:2", "dp=2,tp=2,sp=on,zero=3,remat=every:2"]
"""Under which what waits for a gather is made between the casts that a layer reads and the layer."""


@cache
def trained(policy: str) -> Function:
    return differentiate(gpt(4, 8, 2, 4, 12, 16), SGD(), precision=precision_named(policy))


def unmarked(function: Function) -> Function:
    """The same function in which nothing is said to be made once a step."""
    done = {}
    for each in (*callees(function), function):
        done[each] = rewrite(
            each,
            lambda op, env: (
                retype_op(
                    op,
                    env,
                    "unmarked",
                    Attributes({key: value for key, value in op.attributes.items() if key != ONCE}),
                    tuple([done[callee] for callee in op.subfunctions]),
                ),
            ),
        )
    return done[function]


def marked(function: Function) -> Counter:
    return Counter(op.op_type for op in all_ops(function) if op.attributes.get(ONCE))


def laid_out(joint: Function, text: str) -> Program:
    plan = Plan.parse(text)
    return parallelize(joint, plan, topology_of(plan.devices))


def computed_by(program: Program, inputs) -> list:
    return assemble(program, SequentialExecutor().compute(program.to_function(), inputs))


TEXTS = [*PLANS, *[text for text, _ in EACH], *GATHERED]


@pytest.mark.parametrize(("text", "policy"), list(zip(TEXTS, cycle(["fp8", "fsdp2"]), strict=False)))
def test_the_step_is_that_in_which_each_microbatch_casts_anew(policy, text):
    """To the bit, in its own types, on every rank; and all readers of the table agree."""
    joint = trained(policy)
    inputs = rounded(joint, [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(joint, 2)])
    program, plain = laid_out(joint, text), laid_out(unmarked(joint), text)
    for placed, array in zip(computed_by(program, inputs), computed_by(plain, inputs), strict=True):
        np.testing.assert_array_equal(placed.array, array.array, err_msg=placed.name)
    assert_all_readers_agree(program)


@pytest.mark.parametrize("text", PLANS)
def test_without_rounding_it_is_that_of_one_device(text):
    """Of a model with a weight that two stages cast."""
    joint = joint_of("tied, even", "fsdp2")
    assert_same_mixed_step(laid_out(joint, text), *computed("tied, even", "fsdp2"))


@pytest.mark.parametrize(("policy", "kind"), [("fp8", "Float8Cast"), ("fsdp2", "Cast")])
def test_a_weight_is_cast_once_a_step(policy, kind):
    """Once a step, whatever is computed again; or, dropped after each pass, in each; or by its version."""
    joint = trained(policy)
    weights = marked(joint)[kind]
    assert weights == (6 * 4 if policy == "fp8" else len(joint.parameters))
    for text in PLANS:
        assert marked(laid_out(joint, text).to_function())[kind] == weights, text
    for text, passes in EACH:
        made = marked(laid_out(joint, text).to_function())[kind]
        again = weights if policy == "fp8" else 34  # not what is added, or looked up
        assert made == Plan.parse(text).microbatches * (weights + (passes - 1) * again), text


def test_what_autocast_casts_it_casts_for_each_microbatch():
    """Its cache of weights ends with the forward pass."""
    assert not marked(trained("amp"))
    casts = [
        sum(op.op_type == "Cast" for op in all_ops(laid_out(trained("amp"), text).to_function()))
        for text in ("microbatches=1", "microbatches=3")
    ]
    assert casts[1] == 3 * casts[0]


def test_one_copy_is_held_however_many_microbatches_are_in_flight():
    """With gpipe all are: one more would hold one more byte for each weight of the linear layers."""
    joint = trained("fp8")
    more = []
    for each in (joint, unmarked(joint)):
        texts = [f"pp=2,microbatches={microbatches},schedule=gpipe" for microbatches in (4, 6)]
        fewer, most = [laid_out(each, text) for text in texts]
        more.append(program_memory(most).ranks[0].peak - program_memory(fewer).ranks[0].peak)
    linear = 2 * 12 * 8 * 8
    assert more[1] - more[0] == 2 * linear


@pytest.mark.parametrize("text", ["pp=2,microbatches=3", "microbatches=2", "pp=2,microbatches=2,remat=full"])
def test_what_is_gathered_and_never_dropped_is_gathered_once_a_step(text):
    program = laid_out(trained("fp8"), f"dp=2,zero=3,reshard=never,{text}")
    for stage in program.stages:
        passes = [stage.forward.function, stage.backward.function]
        assert not [op for each in passes for op in all_ops(each) if op.op_type == "MPIAllgather"]
    sizes = [
        sum(value.type.size for value in op.outputs)
        for op in all_ops(program.to_function())
        if op.op_type == "MPIAllgather"
    ]
    assert sum(sizes) >= sum(v.type.size for v in trained("fp8").parameters)
    assert sum(sizes) <= sum(v.type.size + 2 for v in trained("fp8").parameters)


@pytest.mark.parametrize("fields", ["", "dp=2,zero=3,reshard=never,"])
def test_without_a_flush_weights_that_stages_share_are_refused_though_passes_read_casts(fields):
    with pytest.raises(PlanError, match="'wte' passes between stages 0 and 1"):
        laid_out(joint_of("tied, even", "fsdp2"), f"{fields}pp=2,microbatches=2,schedule=pipedream").table()


def test_lifted_out_of_calls_a_function_computes_the_same():
    """Once of each weight, though a Call in a Call reads it; what is lifted is no output of a Call."""
    joint = trained("fp8")
    lifted = lift_weights(joint)
    verify(lifted)
    own = [op for op in lifted.ops if op.attributes.get(ONCE)]
    assert len(own) == 6 * 4 == sum(marked(lifted).values())
    assert len({op.inputs[0] for op in own}) == len(own)
    inputs = rounded(joint, random_inputs(joint, 1))
    for one, other in zip(
        SequentialExecutor().compute(lifted, inputs),
        SequentialExecutor().compute(flatten(joint), inputs),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    assert lift_weights(lifted) is lifted and lift_weights(trained("amp")) is trained("amp")
