"""Functions that differ in sizes alone: what is made of one, and carried over, is as if made anew."""

from dataclasses import replace
from itertools import cycle

import pytest
from training_models import mesh_of

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulator
from distsim.hardware import load_cluster
from distsim.ir import BFloat16, Device, FunctionMaker, Op, Role, Tensor, Value, verify
from distsim.ir.type import Float
from distsim.models import gpt
from distsim.ops import Operator, register
from distsim.ops.conversion import ONCE
from distsim.ops.onnx_bridge import type_number
from distsim.plan import Plan
from distsim.resizing import Unlike, likeness_of, shared
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, differentiate, precision_named
from distsim.transforms.kernels.policies import KERNELS
from distsim.transforms.sharding import shard as sharding
from distsim.transforms.sharding.shard import shard

CLUSTER = load_cluster("dgx-h100:1")
PLANS = [
    Plan(2, 2, 2),
    Plan(2, 1, 4, schedule="gpipe"),
    Plan(1, 2, 4, schedule="zb_h1"),
    Plan(4, 1, 2, zero=1),
    Plan(4, 1, 2, zero=3),
    Plan(2, 2, 2, remat="full"),
    Plan(2, 2, 2, sp="on", remat="attention"),
    Plan(2, 1, 2, chunks=2, schedule="interleaved"),
    Plan(2, 2, 1),
    Plan(2, 2, 2, overlap_grads="off"),
]
SIZES = (1, 2, 8)
GPU = Device(0, "gpu")

register(Operator("MemoryRows", types=lambda a, x: (x[0].with_shape((2, *x[0].shape[1:])),), view=True))


def product(batch, width=4):
    """relu(x w) of so many rows."""
    maker = FunctionMaker("product")
    x = maker.add_input_value("x", Tensor(Float(), (batch, 3)))
    w = maker.add_input_value("w", Tensor(Float(), (3, width)))
    made = maker.add("MatMul", [x, w], output_names=["y"])
    maker.set_outputs(maker.add("Relu", made, output_names=["z"]))
    return maker.finalize()


def figures(plan, kernels="ops", precision="fp32", sizes=SIZES[1:]):
    """The step, and all that is known of it and of memory, for each size of a microbatch."""
    layers = plan.pp * plan.chunks
    function = differentiate(gpt(layers, 16, 4, 8, 32, 64), Adam(), precision=precision_named(precision))
    found = []
    for count in (32 // plan.dp // size for size in sizes if size * plan.dp <= 32):
        program = parallelize(function, replace(plan, microbatches=count), CLUSTER, kernels=KERNELS[kernels])
        simulation = Simulator(CostModel(CLUSTER)).simulate(program)
        memory = program_memory(program)
        pieces = [
            (piece.start.tolist(), piece.end.tolist(), [op.op_type for op in piece.op_table])
            for piece in simulation.timeline.pieces()
        ]
        uses = [(use.peak, dict(use.by_kind), use.end) for use in memory.ranks]
        found.append((simulation.step_time, pieces, memory.peaks, uses))
    return found


@pytest.mark.parametrize(
    ("plan", "kernels"), list(zip(PLANS, cycle(["ops", "eager"]), strict=False)), ids=str
)
def test_what_is_carried_over_is_as_if_made_anew(plan, kernels, monkeypatch):
    sizes = SIZES if plan is PLANS[0] else SIZES[1:]  # once to a third, of which a second was made
    carried = figures(plan, kernels, sizes=sizes)
    monkeypatch.setattr(sharding, "shared", lambda function: function)
    assert carried == figures(plan, kernels, sizes=sizes)


@pytest.mark.parametrize("precision", ["mixed", "fsdp2", "fp8"])
def test_so_is_what_casts_weights_once_a_step(precision, monkeypatch):
    carried = figures(PLANS[0], precision=precision)
    monkeypatch.setattr(sharding, "shared", lambda function: function)
    assert carried == figures(PLANS[0], precision=precision)


def test_steps_are_written_out_alike(monkeypatch):
    def written():
        function = differentiate(gpt(2, 8, 2, 4, 16, 8), Adam())
        programs = [parallelize(function, Plan(2, 1, 2, count), CLUSTER) for count in (8, 4, 2)]
        return [program.to_function(steady=True) for program in programs]

    ours = written()
    for function in ours:
        verify(function)
    monkeypatch.setattr(sharding, "shared", lambda function: function)
    assert [len(f.ops) for f in ours] == [len(f.ops) for f in written()]


def test_local_functions_of_other_parts_take_what_is_the_same(monkeypatch):
    monkeypatch.setattr(sharding, "shared", lambda function: function)
    function, mesh = differentiate(gpt(2, 16, 4, 8, 32, 64), Adam()), mesh_of(2, 2)
    locals_ = [shard(function, mesh, count).function for count in (4, 2)]
    for local in locals_:
        verify(local)
    one, two = ({v for op in local.ops for v in (*op.inputs, *op.outputs)} for local in locals_)
    kept = [(a, a is b) for a, b in zip(*[local.inputs for local in locals_], strict=True)]
    assert {same for v, same in kept if v.role in (Role.PARAMETER, Role.STATE)} == {True}
    assert {same for v, same in kept if v.role is Role.INPUT} == {False}
    assert len(one & two) > len(one) / 2 and one != two  # gradients and new weights are the same, too


def test_what_is_decided_does_not_follow_from_what_was_decided_before():
    def decided(function, parts):
        found = shard(function, mesh_of(2, parts[0]), parts[1]).decisions["tp"]
        return found.choices, found.cost, found.moved, found.divided, found.sent

    made = [differentiate(gpt(2, 16, 4, 8, 32, 64), Adam()) for _ in range(7)]
    every = [(tp, count) for tp in (2, 4) for count in (1, 4, 16)]
    assert [decided(made[0], each) for each in every] == [
        decided(own, each) for own, each in zip(made[1:], every, strict=True)
    ]


def test_what_is_equal_is_shared():
    first, other = shared(product(2)), shared(product(5))
    likeness = likeness_of(other)
    assert likeness.like is first
    assert other.inputs[1] is first.inputs[1] and other.inputs[0] is not first.inputs[0]
    assert [value.type.shape for value in (*other.inputs, *other.outputs)] == [(5, 3), (3, 4), (5, 4)]
    verify(other)
    again = shared(product(2))
    assert again is not first and again.ops == first.ops and again.inputs == first.inputs


def test_programs_of_equal_models_are_of_their_own_inputs():
    functions = [differentiate(gpt(2, 8, 2, 4, 16, 8), Adam()) for _ in range(2)]
    for function in functions:
        for count in (8, 4):
            program = parallelize(function, Plan(2, 1, 2, count), CLUSTER)
            of = {given.source for given in program.inputs}
            assert of & {*function.inputs} and not of & {
                v for f in functions if f is not function for v in f.inputs
            }


@pytest.mark.parametrize("change", ["name", "rank", "wiring"])
def test_other_functions_share_nothing(change):
    maker = FunctionMaker("product")
    shape = (2, 7, 3) if change == "rank" else (7, 3)
    x = maker.add_input_value("a" if change == "name" else "x", Tensor(Float(), shape))
    w = maker.add_input_value("w", Tensor(Float(), (3, 3)))
    made = maker.add("MatMul", [x, w], output_names=["y"])
    maker.set_outputs(maker.add("Relu", [x] if change == "wiring" else made, output_names=["z"]))
    function = maker.finalize()
    first = shared(product(2))
    assert first is not None and shared(function) is function and likeness_of(function) is None


def test_what_is_cast_once_a_step_is_unlike_what_each_microbatch_casts():
    def cast(batch, **marks):
        maker = FunctionMaker("product")
        x = maker.add_input_value("x", Tensor(BFloat16(), (batch, 3)))
        w = maker.add_input_value("w", Tensor(Float(), (3, 3)))
        made = maker.add("Cast", [w], {"to": type_number(BFloat16()), **marks}, output_names=["v"])
        maker.set_outputs(maker.add("MatMul", [x, *made], output_names=["y"]))
        return maker.finalize()

    first, other, again = shared(cast(2, **{ONCE: True})), shared(cast(5)), shared(cast(5, **{ONCE: True}))
    assert likeness_of(other) is None and likeness_of(again).like is first


def test_what_reads_a_sum_of_another_size_is_not_carried_over():
    """Models that differ in a weight's width have sums of its gradient that do, too."""
    first = shared(product(2))
    wider = shared(product(2, width=5))
    made = first.ops[0].outputs[0]
    adds = Op("AccumulateInto", (Value("so_far", made.type), made), (Value("sum", made.type),))
    with pytest.raises(Unlike):
        likeness_of(wider).carry_ops([adds])


def rows_shown(rows, handed):
    """The first two of so many rows as a view, which may be handed on; an input that nothing reads."""
    maker = FunctionMaker("rows_shown")
    x = maker.add_input_value("x", Tensor(Float(), (rows, 4), GPU))
    maker.add_input_value("unread", Tensor(Float(), (rows, 8), GPU))
    (made,) = maker.add("Relu", [x], output_names=["made"])
    (part,) = maker.add("MemoryRows", [made], output_names=["part"])
    (last,) = maker.add("Relu", [part], output_names=["last"])
    maker.set_outputs([part, last] if handed else [last])
    return maker.finalize()


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_what_is_carried_over_to_other_sizes_takes_the_memory_of_these(handed, called):
    def function(rows):
        inner = rows_shown(rows, handed)
        if not called:
            return inner
        maker = FunctionMaker("caller")
        given = [maker.add("Relu", [maker.add_input_value(v.name, v.type)])[0] for v in inner.inputs]
        maker.set_outputs(maker.add("Call", given, None, (inner,)))
        return maker.finalize()

    first, *others = (shared(function(rows)) for rows in (2, 3, 5))
    assert likeness_of(others[0]).like is first
    for rows, other in zip((3, 5), others, strict=True):
        use, anew = peak_memory(other)[GPU], peak_memory(function(rows))[GPU]
        assert (use.peak, use.end, use.by_kind) == (anew.peak, anew.end, anew.by_kind)
