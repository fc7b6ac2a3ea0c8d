"""Stages of a pipeline: what is on each, what is sent between them, and the programs they make."""

from collections import Counter

import numpy as np
import pytest
from precision_models import in_float64
from training_models import (
    F64,
    SCHEDULES,
    Maker,
    assemble,
    assert_same_step,
    flat_mlp,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    small_llama,
    small_mlp,
    tied,
)

from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.ir import Device, Float32, Function, Role, all_ops, verify
from distsim.models import gpt, mlp
from distsim.ops.parts import scatter
from distsim.program.program import Program
from distsim.schedule import schedule
from distsim.transforms import (
    SGD,
    Adam,
    PipeDreamScheduler,
    differentiate,
    parallel_transform_3d,
    precision_named,
    set_precision,
    steady_state_transform,
)
from distsim.transforms.autodiff.precision import POLICIES


def program_of(joint: Function, pp: int, microbatches: int = 1, name: str = "1f1b", dp=1, tp=1) -> Program:
    return laid_out(joint, mesh_of(dp, tp, pp), schedule(name, pp, microbatches))


def calls(function: Function) -> Counter:
    return Counter(op.callee.name for op in function.ops if op.is_call)


def sends(function: Function) -> list[tuple[Device, Device, tuple[int, ...]]]:
    """(first device of the source, of the target, shape) of every Send."""
    found = []
    for op in function.ops:
        if op.op_type == "Send":
            source, target = op.inputs[0].type, op.outputs[0].type
            found.append((source.device.devices[0].id, target.device.devices[0].id, source.shape))
    return found


# --- which stage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_equal_layers_make_equal_stages(pp):
    program = program_of(differentiate(mlp(layers=16, width=64, batch=8)), pp)
    for stage in program.stages:
        assert calls(stage.forward.function).total() == calls(stage.backward.function).total() == 8 // pp


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_equal_transformer_layers_make_equal_stages(pp):
    joint = differentiate(gpt(layers=8, hidden=64, heads=4, seq=64, batch=4, vocab=16))
    program = program_of(joint, pp)
    for stage in program.stages:
        assert calls(stage.forward.function)["layer"] == 8 // pp
        assert calls(stage.backward.function)["layer_backward"] == 8 // pp


def test_a_heavy_head_leaves_the_last_stage_fewer_layers():
    """A vocabulary that costs as much as several layers: the bottleneck is balanced, not the count."""
    joint = differentiate(gpt(layers=8, hidden=512, heads=8, seq=512, batch=4, vocab=16384))
    stages = program_of(joint, 4).stages
    layers = [Counter(op.op_type for op in all_ops(s.forward.function))["Softmax"] for s in stages]
    assert sum(layers) == 8 and layers[-1] < 2 and layers[0] >= 2


@pytest.mark.parametrize("optimizer", [SGD(), Adam()], ids=str)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_parameter_its_gradient_and_its_update_are_on_one_stage(pp, optimizer):
    joint = differentiate(small_mlp(layers=8), optimizer)
    program = program_of(joint, pp, 2)
    for stage in program.stages:
        names = [v.name for v in stage.forward.inputs if v.role is Role.PARAMETER]
        assert len(stage.backward.accumulated) == len(names) > 0
        updated = [v.name for _, block in stage.updates for v in block.outputs if v.name.endswith(".new")]
        assert {name.split(".")[0] for name in updated} == set(names)


def test_every_op_of_the_joint_function_is_on_exactly_one_stage():
    joint = differentiate(small_gpt(layers=4), Adam())
    kinds = Counter(op.op_type for op in all_ops(joint))
    for pp in (1, 2, 4):
        found: Counter = Counter()
        for stage in program_of(joint, pp).stages:
            for block in (stage.forward, stage.backward, *(b for _, b in stage.updates)):
                found += Counter(op.op_type for op in all_ops(block.function))
        mask = {"ConstantOfShape": pp, "Trilu": pp}  # a constant is made on every stage that reads it
        assert found == kinds | mask, f"pp={pp}"


def test_stages_run_on_the_slices_of_the_mesh():
    mesh = mesh_of(dp=2, tp=2, pp=2)
    program = laid_out(differentiate(small_mlp()), mesh, schedule("gpipe", 2, 2))
    assert [stage.mesh for stage in program.stages] == [mesh.at(pp=0), mesh.at(pp=1)]
    for op in program.to_function().ops:
        if op.is_call:
            stage = int(op.callee.name.removeprefix("stage").split("_")[0])
            values = [*op.callee.inputs, *(v for inner in op.callee.ops for v in inner.outputs)]
            assert {v.type.device for v in values} == {mesh.at(pp=stage)}


def test_data_goes_only_to_the_stages_that_read_it():
    program = program_of(differentiate(small_mlp(layers=8)), 4, 2)
    stages = {given.source.name: given.stages for given in program.inputs}
    assert stages["x"] == (0,) and stages["target"] == (3,)
    assert [stages[f"w{i}"] for i in range(8)] == [(i // 2,) for i in range(8)]


def test_more_stages_than_ops_are_refused_with_the_numbers():
    joint = differentiate(small_mlp(layers=4))  # written out: four times MatMul and Relu, and the loss
    program_of(joint, 9, 2)
    with pytest.raises(PlanError, match=r"pp=10.*mlp_training has only 9 forward ops.*at most 9"):
        program_of(joint, 10, 2)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("pp", range(1, 8))
def test_every_stage_has_work_to_do(pp, m):
    """Three times MatMul and Relu, and the loss: the sum over microbatches is no stage of its own."""
    for index, stage in enumerate(program_of(flat_mlp(3), pp, m).stages):
        assert stage.forward.function.ops, f"stage {index} of {pp} runs nothing forward"


@pytest.mark.parametrize("pp", [3, 4, 5])
def test_calls_that_are_too_large_for_balanced_stages_are_written_out(pp):
    """Four layers of two matrix products each do not make three stages, or five: products do."""
    joint = differentiate(mlp(layers=8, width=64, batch=8))
    found = []
    for stage in program_of(joint, pp).stages:
        found.append(Counter(op.op_type for op in all_ops(stage.forward.function))["MatMul"])
    assert sum(found) == 8 and max(found) == -(-8 // pp), found


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(2, 1), (2, 4), (4, 2), (4, 8)])
@pytest.mark.parametrize("calls", [True, False])
def test_a_boundary_is_crossed_once_forward_and_once_backward_per_microbatch(calls, pp, m, name):
    width, batch = 8, 16
    joint = differentiate(small_mlp(8, width, batch)) if calls else flat_mlp(8, width, batch, optimizer=True)
    found = Counter(sends(program_of(joint, pp, m, name).to_function()))
    shape = (batch // m, width)
    expected = {(s, s + 1, shape): m for s in range(pp - 1)} | {(s + 1, s, shape): m for s in range(pp - 1)}
    assert found == expected


@pytest.mark.parametrize("m", [1, 2])
def test_transformer_stages_send_the_residual_stream_and_its_gradient(m):
    joint = differentiate(small_gpt(layers=4))
    found = Counter(sends(program_of(joint, 2, m).to_function()))
    shape = (8 // m, 4, 8)
    assert found == {(0, 1, shape): m, (1, 0, shape): m}


def test_sends_go_between_equal_ranks_of_two_stages():
    flat = program_of(differentiate(small_mlp()), 2, 2, dp=2, tp=2).to_function()
    for op in flat.ops:
        if op.op_type == "Send":
            source, target = op.inputs[0].type.device, op.outputs[0].type.device
            assert source.axes == target.axes and not set(source) & set(target)


def test_a_value_skipping_a_stage_is_sent_straight_to_its_reader():
    make = Maker("skip")
    x, target = make.data("x", 4, 8), make.data("target", 4, 8)
    first = y = make("Relu", make("MatMul", x, make.parameter("w0", 8, 8)))
    for index in range(1, 6):
        y = make("Relu", make("MatMul", y, make.parameter(f"w{index}", 8, 8)))
    joint = differentiate(make.end(make("Loss", make("Add", y, first), target, N=4)))
    pairs = Counter((a, b) for a, b, _ in sends(program_of(joint, 3).to_function()))
    assert pairs == {(0, 1): 1, (0, 2): 1, (1, 2): 1, (2, 1): 1, (1, 0): 1, (2, 0): 1}


@pytest.mark.parametrize("m", [1, 4])
def test_a_tied_gradient_is_sent_once_a_step_however_many_microbatches(m):
    """The embedding and the head share a table: its two gradients are added after the microbatches."""
    flat = program_of(differentiate(tied(layers=2), SGD()), 2, m).to_function()
    found = Counter((a, b, shape) for a, b, shape in sends(flat) if len(shape) == 2)
    assert found == {(1, 0, (16, 8)): 1, (0, 1, (16, 8)): 1}, "its gradient down, its new value up"


@pytest.mark.parametrize("zero", ["zero=0", "zero=3"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_stage_sends_what_another_makes_of_weights(policy, zero):
    """Casts of weights, gathers and views belong to the stage that reads them; of tied ones to each."""
    function = set_precision(tied(batch=8), Float32(), F64)
    joint = differentiate(function, Adam(), precision=precision_named(policy))
    program = laid_out(joint, mesh_of(2, 1, 2), schedule("1f1b", 2, 4), zero=zero)
    found = Counter(shape for _, _, shape in sends(program.to_function(steady=True)) if 0 < len(shape) < 3)
    new = (
        (16, 8) if zero == "zero=0" else (64,)
    )  # sums are whole until they are reduced, as torch's stages do it
    assert found == Counter([(16, 8), new]), "its gradient down and its new value up, once a step"
    if policy in ("bf16", "fp8"):
        return  # which cannot be computed without rounding
    inputs = random_inputs(joint, 1)
    expected = SequentialExecutor().compute(in_float64(joint), inputs)
    results = SequentialExecutor().compute(in_float64(program.to_function()), inputs)
    for placed, array in zip(assemble(program, results), expected, strict=True):
        np.testing.assert_allclose(placed.array, array, rtol=1e-9, atol=1e-11, err_msg=placed.name)


def test_layers_of_mixed_precision_are_of_one_stage():
    """FSDP2's casts stand before the layer whose weights they are: a stage begins with those of its own."""
    joint = differentiate(set_precision(small_llama(layers=4), Float32(), F64), None, (), POLICIES["fsdp2"])
    for stages in ("even", "layers"):
        program = laid_out(joint, mesh_of(1, 1, 2), schedule("1f1b", 2, 4), stages=stages)
        found = Counter(shape for _, _, shape in sends(program.to_function(steady=True)))
        assert found == {(2, 4, 16): 2 * 4}, "activations up, their gradients down"


def test_a_stage_whose_backward_makes_nothing_that_is_read():
    """Stage 0 has nothing to train; all that its backward could run is an op that nobody reads."""
    make = Maker("unread")
    x, target = make.data("x", 4, 8), make.data("target", 4, 8)
    first = make("Neg", x)
    make("Exp", first)
    y = make("MatMul", make("Neg", first), make.parameter("w", 8, 8))
    joint = differentiate(make.end(make("Loss", y, target, N=4)))
    program, inputs = program_of(joint, 2, 2), random_inputs(joint)
    assert not calls_named(program, "B0@0")
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


def calls_named(program: Program, name: str) -> list[str]:
    return [op.callee.name for op in program.to_function().ops if op.name == name]


def test_nothing_is_sent_within_one_stage():
    assert not sends(program_of(differentiate(small_gpt()), 1, 4).to_function())


# --- programs -------------------------------------------------------------------------------------


MODELS = {"mlp": lambda: small_mlp(layers=8), "gpt": small_gpt, "tied": lambda: tied(batch=8)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_the_written_out_function_is_correct_ir(model, name):
    for pp, m, dp, tp in ((1, 1, 1, 1), (2, 4, 1, 2), (4, 2, 2, 1)):
        program = program_of(differentiate(MODELS[model](), Adam()), pp, m, name, dp, tp)
        flat = program.to_function()
        verify(flat)
        assert [v.name for v in flat.inputs] == [given.source.name for given in program.inputs]
        assert len(flat.outputs) == len(program.outputs) + sum(len(o.copies) for o in program.outputs)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("pp", "m"), [(1, 4), (2, 4), (4, 8)])
def test_the_schedules_run_the_same_calls_in_another_order(model, pp, m):
    joint = differentiate(MODELS[model](), Adam())
    orders = {}
    for name in SCHEDULES:
        flat = program_of(joint, pp, m, name).to_function()
        orders[name] = [(op.callee.name, op.name) for op in flat.ops if op.is_call]
    assert Counter(orders["gpipe"]) == Counter(orders["1f1b"])
    assert orders["gpipe"] != orders["1f1b"]
    names = Counter(name for _, name in orders["gpipe"])
    tasks = [f"{kind}{i}@{s}" for kind in "FB" for s in range(pp) for i in range(m)]
    assert {n: names[n] for n in tasks} == dict.fromkeys(tasks, 1)


def test_blocks_run_in_the_order_of_the_schedule_on_each_stage():
    order = schedule("1f1b", 4, 8)
    flat = program_of(differentiate(small_mlp(layers=8)), 4, 8).to_function()
    ran = [op.name for op in flat.ops if op.is_call and op.name[0] in "FB"]
    for rank, actions in enumerate(order.actions):
        assert [name for name in ran if name.endswith(f"@{rank}")] == [str(action) for action in actions]


def test_every_stage_is_held_once_however_many_microbatches():
    joint = differentiate(small_mlp(layers=8, batch=16), None)

    def names(m: int) -> set[str]:
        flat = program_of(joint, 4, m).to_function()
        return {op.callee.name for op in flat.ops if op.is_call}

    kinds = ("forward", "backward", "backward_next")
    expected = {f"stage{i}_{kind}" for i in range(4) for kind in kinds} | {"stage3_forward_next"}
    assert names(2) == names(16) == expected


def test_sums_over_microbatches_start_with_the_first_and_are_added_in_place():
    flat = program_of(differentiate(small_mlp(layers=4)), 2, 4).to_function()
    names = {op.name: op.callee.name for op in flat.ops if op.is_call}
    assert [names[f"B{i}@0"] for i in range(4)] == ["stage0_backward", *["stage0_backward_next"] * 3]
    adds = Counter(op.op_type for op in all_ops(flat))["AccumulateInto"]
    assert adds == (4 + 1) * 3  # four weights and the loss, for all microbatches but the first


# --- steady state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_steady_state_has_no_distribution_and_computes_the_same(model):
    joint = differentiate(MODELS[model](), SGD(lr=0.1))
    flat = program_of(joint, 2, 2, dp=2, tp=2).to_function()
    steady, inputs = steady_state_transform(flat)
    verify(steady)
    kinds = Counter(op.op_type for op in steady.ops)
    assert not kinds.keys() & {"MPIScatter", "MPIBroadcast", "Split"}
    assert inputs == steady.inputs
    roles = {
        value.name.split(".")[0] if value.role is Role.INPUT else value.name: value.role
        for value in steady.inputs
    }
    assert roles == {value.name: value.role for value in joint.inputs}
    values = random_inputs(joint)
    expected = SequentialExecutor().compute(flat, values)
    made = SequentialExecutor().compute(steady, local_inputs(flat, steady, values))
    for value, a, b in zip(flat.outputs, expected, made, strict=True):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_allclose(right, left, rtol=1e-12, err_msg=value.name)


def local_inputs(flat: Function, steady: Function, values) -> list[list[np.ndarray]]:
    """What the dropped ops would have made, by name and mesh."""
    known = dict(zip(flat.inputs, values, strict=True))
    made: dict[tuple[str, object], list[np.ndarray]] = {}
    for op in flat.ops:
        if op.op_type in ("MPIScatter", "MPIBroadcast"):
            mesh = op.attributes["to"]
            known[op.outputs[0]] = scatter(known[op.inputs[0]], mesh, op.attributes.get("shards", ()))
        elif op.op_type == "Split":
            parts = [np.split(array, len(op.outputs)) for array in known[op.inputs[0]]]
            known.update({v: [part[i] for part in parts] for i, v in enumerate(op.outputs)})
        else:
            continue
        made.update({(v.name, v.type.device): known[v] for v in op.outputs})
    return [made[v.name, v.type.device] for v in steady.inputs]


def test_steady_state_of_what_distributes_nothing_is_the_function_itself():
    joint = differentiate(small_mlp())
    assert steady_state_transform(joint) == (joint, joint.inputs)


# --- parallel_transform_3d ---------------------------------------------------------------------------


def test_degrees_must_be_positive_and_fit_the_devices():
    joint, devices = flat_mlp(), [Device(i, "gpu") for i in range(4)]
    for degrees, words in (
        ((0, 1, 1, 1), "dp_degree=0 must be a whole number of at least 1"),
        ((1, -1, 1, 1), "hp_degree=-1"),
        ((1, 1, 1, 0), "num_microbatches=0"),
    ):
        dp, hp, pp, m = degrees
        with pytest.raises(PlanError, match=words):
            parallel_transform_3d(joint, dp, hp, pp, devices, m)
    with pytest.raises(PlanError, match=r"dp=2 x hp=2 x pp=2 needs 8 devices, 4 given"):
        parallel_transform_3d(joint, 2, 2, 2, devices, 1)


def test_the_pipedream_scheduler_is_1f1b_with_its_flush():
    assert PipeDreamScheduler(4).schedule(3) == schedule("1f1b", 3, 4)
