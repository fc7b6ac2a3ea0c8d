"""Units whose weights are gathered together, one ahead: models that weave layers and views of weights."""

import pytest
from precision_models import SIZES
from training_models import Maker, assert_all_readers_agree, assert_same_step, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.executor import SequentialExecutor
from distsim.ir import Function, all_ops
from distsim.models import gpt
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate, precision_named
from distsim.transforms.kernels import KERNELS


class Woven(Maker):
    """Writes ops with names of layers."""

    def op(self, name: str, op_type: str, *inputs, **attributes):
        return self.add(op_type, inputs, attributes, name=name)[0]


def woven(name: str) -> Function:
    """``view``: a layer transposes its weight above another one's ops, and views what that one reads;
    ``bias``: the same, of a view of a view; ``next``: a layer views what the one before reads."""
    m = Woven(name)
    x, target = m.data("x", 8, 4), m.data("target", 8, 4)
    x = m.op("h0.a/m", "MatMul", x, m.parameter("w0", 4, 4))
    w, v = m.parameter("w", 4, 4), m.parameter("v", 4)
    if name == "next":
        x = m.op("h0.a/n", "Mul", x, v)
        x = m.op("h1.a/m", "MatMul", x, w)
        x = m.op("h1.a/n", "Mul", x, m.op("h1.a/u", "Unsqueeze", v, axes=(0,)))
        return m.end(m("Loss", x, target, N=8))
    shared = m.op("h2.a/v1", "Unsqueeze", v, axes=(0,)) if name == "bias" else v
    turned = m.op("h2.a/t", "Transpose", w, perm=(1, 0))
    x = m.op("h1.a/n", "Mul", x, shared)
    if name == "bias":
        x = m.op("h2.a/r", "Gemm", x, turned, m.op("h2.a/v2", "Reshape", shared, shape=(4,)))
    else:
        x = m.op("h2.a/r", "MatMul", x, turned)
        x = m.op("h2.a/q", "Add", x, m.op("h2.a/v2", "Unsqueeze", shared, axes=(0,)))
    return m.end(m("Loss", x, target, N=8))


@pytest.mark.parametrize("reshard", ["always", "never", "blocking"])
@pytest.mark.parametrize("bucket", ["auto", "fsdp2"])
@pytest.mark.parametrize("name", ["view", "bias", "next"])
def test_what_is_read_is_gathered_before(name, bucket, reshard):
    joint = differentiate(woven(name), SGD(lr=0.1))
    plan = Plan.parse(f"dp=2,zero=3,bucket={bucket},reshard={reshard}")
    program = parallelize(joint, plan, topology_of(2))
    inputs = random_inputs(joint)
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))
    assert_all_readers_agree(program)


@pytest.mark.parametrize("precision", ["mixed", "fp8"])
def test_gathers_of_layers_written_out_wait_for_those_before(precision):
    """Stages that cut a layer leave no Calls: each layer is a message all the same, behind a barrier in
    backward, and in forward but for the first two, before which a stage may have run nothing."""
    joint = differentiate(gpt(**{**SIZES, "layers": 3}), SGD(), precision=precision_named(precision))
    plan = Plan.parse("dp=2,pp=2,microbatches=2,zero=3,bucket=auto,stages=even")
    program = parallelize(joint, plan, topology_of(4), kernels=KERNELS["compiled"])
    for stage in program.stages:
        for block, first in ((stage.forward, 2), (stage.backward, 0)):
            ops = list(all_ops(block.function))
            assert not any(op.is_call for op in ops)
            gathers = [n for n, op in enumerate(ops) if op.op_type == "MPIAllgather"]
            assert len(gathers) in (2, 3)  # a layer and a half, and an end
            late = {value for op in ops if op.op_type == "OptimizationBarrier" for value in op.outputs}
            for place in gathers[first:]:
                assert not late.isdisjoint(ancestors(ops, place))


def ancestors(ops, place):
    """What an op reads, and what that was made of."""
    maker = {value: op for op in ops for value in op.outputs}
    found, stack = set(), list(ops[place].inputs)
    while stack:
        value = stack.pop()
        if value not in found:
            found.add(value)
            stack += maker[value].inputs if value in maker else ()
    return found
