"""Two functions as one: it computes what both do, each in its order, side by side."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from halves_models import local_inputs, random_blocks
from hypothesis import given
from hypothesis import strategies as st
from training_models import Maker, small_gpt, topology_of

from distsim.compose import parallelize
from distsim.cost.demand import runs_kernel
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware import load_cluster
from distsim.ir import Device, Float64, Function, FunctionMaker, Mesh, Tensor, all_ops, verify
from distsim.models import gpt
from distsim.ops import operator, signature_of
from distsim.plan import Plan
from distsim.program.passes.overlap_pairs import interleave, interleaved_names
from distsim.transforms import SGD, differentiate


def numbered_names(function: Function, side: str) -> tuple[str, ...]:
    return tuple(f"{side}{place}" for place in range(len(function.ops)))


def named(function: Function, side: str) -> Function:
    """The function, what it calls too, with ops that say whose they are."""
    ops = [
        replace(
            op,
            name=f"{side}{place}",
            subfunctions=tuple(named(callee, side) for callee in op.subfunctions),
        )
        for place, op in enumerate(function.ops)
    ]
    return replace(function, ops=tuple(ops))


def assert_interleaved(a: Function, b: Function) -> Function:
    both = interleave(a, b)
    verify(both)
    assert [v.type for v in both.inputs] == [v.type for v in (*a.inputs, *b.inputs)]
    assert [v.role for v in both.inputs] == [v.role for v in (*a.inputs, *b.inputs)]
    compute, inputs = SequentialExecutor().compute, [local_inputs(f, i) for i, f in enumerate((a, b))]
    expected = [*compute(a, inputs[0]), *compute(b, inputs[1])]
    for made, array in zip(compute(both, inputs[0] + inputs[1]), expected, strict=True):
        np.testing.assert_array_equal(made, array)
    ops = list(all_ops(interleave(named(a, "a"), named(b, "b"))))
    for side, function in (("a", a), ("b", b)):
        own = [(op.op_type, op.attributes) for op in ops if op.name.split(".")[-1].startswith(side)]
        assert own == [(op.op_type, op.attributes) for op in all_ops(function)]
    assert len(ops) == sum(1 for function in (a, b) for _ in all_ops(function))
    return both


def chain(length: int, name: str = "chain", every: int = 1) -> Function:
    """Equal ops one after the other; only each one in ``every`` takes time."""
    make = Maker(name)
    x = make.data("x", 4, 6)
    for place in range(length):
        x = make("Tanh", x) if place % every == 0 else make("Reshape", x, shape=x.type.shape)
    make.set_outputs([x])
    return make.finalize()


@pytest.mark.parametrize("seed", range(60))
def test_random_functions_side_by_side(seed):
    blocks = [*random_blocks(seed), *random_blocks(seed + 1000)]
    for one, other in pairwise(blocks):
        assert_interleaved(one.function, other.accumulating or other.function)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 3))
def test_both_have_done_the_same_share_at_every_point(a, b, every):
    one, other = chain(a, "one"), chain(b, "other", every)
    total = {"a": a, "b": sum(runs_kernel(op.op_type) for op in other.ops)}
    names = interleaved_names(one, other, numbered_names(one, "a"), numbered_names(other, "b"))
    done = {"a": 0, "b": 0}
    for name, op in zip(names, interleave(one, other).ops, strict=True):
        done[name[0]] += runs_kernel(op.op_type)
        if all(total.values()):
            shares = [done[side] / total[side] for side in "ab"]
            assert abs(shares[0] - shares[1]) <= 0.5 / total["a"] + 0.5 / total["b"] + 1e-12
    assert done == total


def test_a_function_beside_itself_alternates():
    one = chain(5)
    names = interleaved_names(one, one, numbered_names(one, "a"), numbered_names(one, "b"))
    assert names == tuple(f"{side}{place}" for place in range(5) for side in "ab")
    assert interleave(one, one) is interleave(one, one)
    assert interleaved_names(one, one, (), ()) == ("",) * 10


def stack(callee: Function, count: int, before: int = 0) -> Function:
    make = Maker("stack")
    x = make.data("x", 4, 6)
    for _ in range(before):
        x = make("Sigmoid", x)
    for _ in range(count):
        x = make.call(callee, x)
    make.set_outputs([x])
    return make.finalize()


def test_layers_that_run_side_by_side_stay_layers():
    forward, backward = chain(3, "forward"), chain(6, "backward")
    both = assert_interleaved(stack(forward, 4), stack(backward, 4, before=1))
    calls = [op for op in both.ops if op.is_call]
    assert len(calls) == 4 and len(both.ops) == 5
    assert {op.callee for op in calls} == {interleave(forward, backward)}
    names = interleaved_names(stack_ := stack(forward, 2), stack_, ("h0", "h1"), ("g0", "g1"))
    assert names == ("h0+g0", "h1+g1")


def test_calls_without_a_partner_are_written_out():
    one, other = stack(chain(4), 3), chain(6)
    both = assert_interleaved(one, other)
    assert not any(op.is_call for op in both.ops) and len(both.ops) == 18
    names = interleaved_names(one, other, ("h0", "h1", "h2"), ())
    assert [name for name in names if name] == [f"h{i}" for i in range(3) for _ in range(4)]
    halves = assert_interleaved(stack(chain(2), 4), stack(chain(4), 2))  # by half of the longer, no more
    assert not any(op.is_call for op in halves.ops)
    alone = assert_interleaved(stack(chain(4), 3), chain(0))
    assert [op.op_type for op in alone.ops] == ["Call"] * 3


def moving(pattern: str) -> Function:
    """Ops one after the other: c computes, s sends it to other ranks."""
    make = FunctionMaker("moving")
    type_ = Tensor(Float64(), (4, 6), Mesh([Device(0, "gpu"), Device(1, "gpu")], dp=2))
    x = make.add_input_value("x", type_)
    for letter in pattern:
        moves = {"attributes": {"axis": "dp"}} if letter == "s" else {}
        x = make.add_op("MPIAllreduce" if moves else "Tanh", inputs=[x], **moves)
    return make.finalize()


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ("cccc", "csc", "a0 b0 b1 a1 a2 a3 b2"),  # what reads it waits for all that the other has to do
        ("cscscc", "scccsc", "b0 a0 a1 b1 b2 b3 b4 a2 a3 b5 a4 a5"),  # or until that would wait as well
        ("csc", "cc", "a0 a1 b0 b1 a2"),
        ("s", "ss", "a0 b0 b1"),
    ],
)
def test_communication_is_issued_at_once_and_hidden_behind_the_other(a, b, names):
    one, other = moving(a), moving(b)
    found = interleaved_names(one, other, numbered_names(one, "a"), numbered_names(other, "b"))
    assert " ".join(found) == names


def test_a_barrier_waits_right_before_what_it_keeps_back():
    make = Maker("waits")
    x = make.data("x", 4, 6)
    y = make("Tanh", make("OptimizationBarrier", make("Tanh", x), x))
    make.set_outputs([y])
    waits, other = make.finalize(), chain(2)
    names = interleaved_names(other, waits, numbered_names(other, "a"), numbered_names(waits, "b"))
    assert names == ("a0", "b0", "a1", "b1", "b2")


@pytest.mark.parametrize("plan", ["pp=2,tp=2,microbatches=2", "pp=2,microbatches=2,remat=full"])
def test_the_forward_and_the_backward_pass_of_stages(plan):
    plan = Plan.parse(plan)
    program = parallelize(differentiate(small_gpt(layers=4), SGD()), plan, topology_of(plan.pp * plan.tp))
    for first, second in ((0, 1), (1, 0)):
        forward, backward = program.stages[first].forward, program.stages[second].backward
        both = assert_interleaved(forward.function, backward.accumulating)
        assert sum(op.is_call for op in both.ops) == 2


def test_communication_of_one_runs_behind_computation_of_the_other():
    """With tensor parallelism a layer waits for its all-reduces; beside another, for half as long at most."""
    topology = load_cluster("dgx-a100")
    joint = differentiate(gpt(8, 2048, 16, 1024, 4, 1024), SGD())
    program = parallelize(joint, Plan.parse("pp=4,tp=2,microbatches=4"), topology)
    forward, backward = program.stages[1].forward.function, program.stages[1].backward.function
    both, costs = interleave(forward, backward), CostModel(topology)
    simulator = Simulator(costs)
    times = [simulator.interpret(each, each.inputs).step_time for each in (forward, backward, both)]
    group = tuple(topology.devices[:2])
    moved = [signature_of(op) for op in all_ops(both) if operator(op.op_type).communication is not None]
    communication = sum(costs.communication_seconds(signature, group) for signature in moved)
    assert times[2] < times[0] + times[1] - 0.5 * communication
