"""Programs: equal stages share their Functions, on a pattern that stands for every stage's slice."""

import sys

import pytest
from training_models import (
    SCHEDULES,
    Maker,
    assert_same_step,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    small_mlp,
)

from distsim.executor import SequentialExecutor
from distsim.ir import Device, Function, Mesh, Op, all_ops, verify
from distsim.program.block import Block
from distsim.program.program import Program
from distsim.schedule import schedule
from distsim.transforms import SGD, Adam, differentiate, steady_state_transform


def program_of(joint: Function, dp: int = 1, tp: int = 1, pp: int = 1, m: int = 1, first: int = 0) -> Program:
    devices = [Device(first + i, "gpu") for i in range(dp * tp * pp)]
    return laid_out(joint, Mesh(devices, pp=pp, dp=dp, tp=tp), schedule("1f1b", pp, m))


def blocks_of(program: Program) -> list[list[Block]]:
    """The blocks of each stage, in order."""
    return [[s.forward, s.backward, *(block for _, block in s.updates)] for s in program.stages]


def normalised() -> Function:
    """Over the batch, so that every rank needs the whole of it."""
    make = Maker("whole")
    x, target = make.data("x", 8, 8), make.data("target", 8, 8)
    y = make("Softmax", make("MatMul", x, make.parameter("w", 8, 8)), axis=0)
    return differentiate(make.end(make("Loss", y, target, N=8)))


# --- the pattern -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "replicas"), [(1, 1), (2, 2), (4, 2), (8, 2)])
def test_two_replicas_stand_for_any_number_of_them(dp, replicas):
    pattern = program_of(differentiate(small_mlp(batch=8)), dp, 2, 2, first=3).pattern
    assert pattern.axes == (("dp", replicas), ("tp", 2))
    assert [device.id for device in pattern.devices] == list(range(2 * replicas))


def test_every_block_lies_on_the_pattern():
    program = program_of(differentiate(small_gpt(), Adam()), 4, 2, 2, 2)
    for block in (block for blocks in blocks_of(program) for block in blocks):
        for function in (block.function, *([block.accumulating] if block.accumulating else [])):
            verify(function)
            assert {v.type.device for op in all_ops(function) for v in op.outputs} == {program.pattern}


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_shapes_that_depend_on_the_number_of_replicas_make_a_pattern_of_all_of_them(dp):
    joint = normalised()
    program, inputs = program_of(joint, dp), random_inputs(joint)
    assert program.pattern.axis_size("dp") == dp
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


@pytest.mark.parametrize(("dp", "tp", "pp", "m"), [(4, 1, 1, 2), (8, 1, 1, 1), (4, 2, 2, 2)])
def test_many_replicas_compute_what_one_device_computes(dp, tp, pp, m):
    joint = differentiate(small_gpt(batch=8), Adam())
    program, inputs = program_of(joint, dp, tp, pp, m), random_inputs(joint)
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


def test_no_device_of_the_pattern_is_left_in_what_is_written_out():
    program = program_of(differentiate(small_gpt(), Adam()), 4, 1, 2, first=16)
    flat = program.to_function()
    verify(flat)
    for op in all_ops(flat):
        for value in op.outputs:
            assert value.type.device in {stage.mesh for stage in program.stages}, op
        assert program.pattern not in op.attributes.values(), op


# --- sharing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD(), Adam()], ids=str)
@pytest.mark.parametrize("model", [small_mlp, small_gpt])
def test_the_stages_between_the_ends_have_the_same_functions(model, optimizer):
    joint = differentiate(model(layers=16), optimizer)
    program = program_of(joint, 1, 2, 8, 4)
    _, *between, _ = blocks_of(program)
    sizes = [len(all_names(blocks)) for blocks in between]
    equal = [blocks for blocks, size in zip(between, sizes, strict=True) if size == max(sizes)]
    assert len(equal) >= 4
    for blocks in equal:
        for block, first in zip(blocks, equal[0], strict=True):
            assert block.function is first.function and block.accumulating is first.accumulating
    keys = [key for blocks in blocks_of(program) for block in blocks for key in block.outputs]
    assert len(keys) == len(dict.fromkeys(keys)), "each stage makes values of its own"


def all_names(blocks: list[Block]) -> list[str]:
    return [op.op_type for block in blocks for op in all_ops(block.function)]


def test_stages_that_differ_in_one_attribute_are_not_shared():
    make = Maker("slopes")
    x, target = make.data("x", 8, 8), make.data("target", 8, 8)
    for index in range(4):
        x = make("MatMul", x, make.parameter(f"w{index}", 8, 8))
        x = make("LeakyRelu", x, alpha=0.1 if index < 3 else 0.2)
    joint = differentiate(make.end(make("Loss", x, target, N=8)))
    program, inputs = program_of(joint, pp=4, m=2), random_inputs(joint)
    functions = [stage.forward.function for stage in program.stages]
    assert functions[1] is functions[2] and functions[3] is not functions[2]
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


def test_what_is_written_out_has_the_layers_of_its_stage():
    """Shared Functions name the kind of a layer, none of them; each stage knows the names of its own."""
    program = program_of(differentiate(small_gpt(layers=8)), pp=4, m=2)
    assert {op.name for op in program.stages[1].forward.function.ops} == {"", "h"}
    found: dict[str, list[str]] = {}
    for op in program.to_function().ops:
        if op.is_call and op.name[0] in "FB":
            found.setdefault(op.callee.name, [inner.name for inner in op.callee.ops if inner.is_call])
    layers = [found[f"stage{stage}_forward"] for stage in range(4)]
    assert [name for names in layers for name in names] == [f"h{i}" for i in range(8)]
    for stage, names in enumerate(layers):
        assert found[f"stage{stage}_backward"] == found[f"stage{stage}_backward_next"] == names[::-1]


# --- steady state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", [small_mlp, small_gpt])
def test_written_out_in_steady_state_it_is_what_the_transform_leaves(model, name):
    joint = differentiate(model(), Adam())
    for dp, tp, pp, m in ((1, 1, 1, 1), (2, 2, 2, 2), (4, 1, 2, 2)):
        program = laid_out(joint, mesh_of(dp, tp, pp), schedule(name, pp, m))
        direct = program.to_function(steady=True)
        verify(direct)
        transformed, _ = steady_state_transform(program.to_function())
        assert [text(op) for op in direct.ops] == [text(op) for op in transformed.ops]
        described = sorted((v.name, str(v.type), v.role.value) for v in direct.inputs)
        assert described == sorted((v.name, str(v.type), v.role.value) for v in transformed.inputs)


def text(op: Op) -> tuple[object, ...]:
    """An op, what it reads and makes, and where."""
    return op.op_type, op.name, tuple(map(repr, op.inputs)), tuple(map(repr, op.outputs)), op.attributes


# --- what is made once -------------------------------------------------------------------------------


def test_plans_that_differ_in_their_order_only_share_everything_else():
    joint = differentiate(small_mlp())
    a, b = (laid_out(joint, mesh_of(2, 1, 2), schedule(name, 2, 2)) for name in ("1f1b", "gpipe"))
    assert a.inputs is b.inputs and a.outputs is b.outputs
    assert [stage.forward for stage in a.stages] == [stage.forward for stage in b.stages]


def test_another_cut_of_a_function_does_not_change_the_first():
    joint = differentiate(small_gpt(), Adam())
    before = [text(op) for op in program_of(joint, pp=2, m=2).to_function().ops]
    program_of(joint, pp=4, m=2), program_of(joint, 2, 2, 2, 2)
    assert [text(op) for op in program_of(joint, pp=2, m=2).to_function().ops] == before


def test_what_is_remembered_is_bounded_and_forgotten_with_the_function(monkeypatch, collect):
    joint = differentiate(small_mlp())
    known = sys.modules["distsim.compose.division"]._MEMORIES
    program = program_of(joint, m=1)
    size = len(program.inputs) + len(program.outputs)
    monkeypatch.setattr("distsim.compose.division.MOST_VALUES", 2 * size)
    for m in (2, 4, 8):
        program_of(joint, m=m)
    memory = known.get(joint, None, lambda: None)
    assert memory.size <= 2 * size and len(memory.cuts) == len(memory.keys) == 2
    assert program_of(joint, m=8).inputs is program_of(joint, m=8).inputs
    count = len(known)
    del memory, joint, program
    collect()
    assert len(known) < count
