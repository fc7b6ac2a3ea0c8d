"""What a training function computes: what its loss needs and the outputs that are kept, nothing dead."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from training_models import F64, Maker, assert_same_step, flat_mlp, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator, count_flops
from distsim.ir import (
    Float32,
    Function,
    FunctionMaker,
    Literal,
    all_ops,
    callees,
    count_ops,
    trim,
    verify,
)
from distsim.plan import Plan
from distsim.transforms import (
    SGD,
    Adam,
    add_loss,
    block_costs,
    differentiate,
    inline,
    outline,
    set_precision,
)

TOPOLOGY = topology_of(8)
COSTS = CostModel(TOPOLOGY)
GATHERED_ONCE = "zero=3,reshard=never"
PLANS = [
    "dp=2,microbatches=2",
    "pp=4",
    "pp=3,tp=2,microbatches=4,schedule=gpipe",
    f"pp=4,dp=2,{GATHERED_ONCE}",
    "pp=4,dp=2,zero=3,microbatches=2",
    "pp=2,dp=2,remat=full",
    "pp=4,remat=min_cut,microbatches=2",
    f"pp=2,dp=2,{GATHERED_ONCE},remat=matmuls",
    "pp=2,dp=2,stages=auto",
]
BATCH = WIDTH = 8


def stack(head: bool, layers: int = 6) -> Function:
    """Products one after the other, with a second output off the first, or without it."""
    make = Maker("stack")
    x = make.data("x", BATCH, WIDTH)
    hidden = []
    for index in range(layers):
        x = make("Relu", make("MatMul", x, make.parameter(f"w{index}", WIDTH, WIDTH)))
        hidden.append(x)
    outputs = [x]
    if head:
        operands = [hidden[0], make.parameter("p", WIDTH, WIDTH)]
        outputs += make.add("MatMul", operands, output_names=["pooled"])
    make.set_outputs(outputs)
    return make.finalize()


@cache
def trained(head: bool, *keep: str) -> Function:
    return differentiate(add_loss(stack(head), keep=keep), Adam(), keep)


def computed(joint: Function):
    inputs = random_inputs(joint)
    return inputs, SequentialExecutor().compute(joint, inputs)


def simulate(joint: Function, text: str):
    program = parallelize(joint, Plan.parse(text), TOPOLOGY)
    return program, Simulator(COSTS).simulate(program)


# --- what the loss does not need -------------------------------------------------------------------


@pytest.mark.parametrize("text", PLANS)
def test_an_output_that_the_loss_does_not_need_costs_nothing(text):
    program, simulation = simulate(trained(True), text)
    _, without = simulate(trained(False), text)
    assert simulation.step_time == without.step_time
    assert simulation.flops == without.flops
    assert count_flops(trained(True)) == count_flops(trained(False)) <= simulation.flops
    peaks = [made.peak_memory[device] for made in (simulation, without) for device in TOPOLOGY.devices[:1]]
    assert peaks[0] == peaks[1]
    assert_same_step(trained(True), program, *computed(trained(True)))


CHOSEN = "its loss is mse of relu11, as the model has none and no other is asked for"


def test_a_note_says_what_was_left_out():
    note = (
        "left out, as the loss does not need it: 1 output (pooled), 1 op, 1 parameter (p); "
        "keep (--keep NAME) an output to have it computed"
    )
    assert add_loss(stack(True)).notes == trained(True).notes == (note, CHOSEN)
    assert add_loss(stack(False)).notes == trained(False).notes == (CHOSEN,)
    assert add_loss(stack(False), "mse").notes == ()
    for text in PLANS:
        program = parallelize(trained(True), Plan.parse(text), TOPOLOGY)
        assert program.notes.count(note) == 1, text
    joint = trained(True)
    for handed_on in (inline(joint), outline(joint), set_precision(joint, Float32(), F64)):
        assert handed_on.notes == (note, CHOSEN)


def test_the_loss_of_a_model_that_ends_in_one_leaves_out_the_rest():
    make = Maker("ends")
    x, target, w = make.data("x", 4, 3), make.data("target", 4, 3), make.parameter("w", 3, 3)
    y = make("MatMul", x, w)
    loss = make("Loss", y, target, N=4)
    unused = make("MatMul", y, make.parameter("p", 3, 3))
    make.set_outputs([loss, unused])
    function = add_loss(make.finalize())
    assert [op.op_type for op in function.ops] == ["MatMul", "Loss"]
    assert function.outputs == (loss,) and [v.name for v in function.inputs] == ["x", "target", "w"]
    assert add_loss(function) is function


def test_a_function_made_by_hand_keeps_its_inputs_and_says_what_is_dead():
    make = Maker("hand")
    x, target = make.data("x", 4, 3), make.data("target", 4, 3)
    w, idle = make.parameter("w", 3, 3), make.parameter("idle", 3, 3)
    y = make("MatMul", x, w)
    make("Exp", make("MatMul", y, idle))
    function = make.end(make("Loss", y, target, N=4))
    joint = differentiate(function, SGD())
    assert [value.name for value in joint.inputs] == ["x", "target", "w", "idle"]
    assert joint.notes == ("left out, as the loss does not need it: 2 ops (exp2), 1 parameter (idle)",)
    assert not [op for op in joint.ops if op.op_type == "Exp"]


# --- dead code in callees and in joint functions ---------------------------------------------------


def layers(cache_: bool, count: int = 4) -> Function:
    """Calls of a layer that also returns a cache, of which another callee makes one more."""
    inner = Maker("project")
    a, v = inner.data("a", BATCH, WIDTH), inner.parameter("v", WIDTH, WIDTH)
    inner.set_outputs([inner("Tanh", a), inner("MatMul", a, v)])
    project = inner.finalize()
    layer = Maker("layer")
    x, w = layer.data("x", BATCH, WIDTH), layer.parameter("w", WIDTH, WIDTH)
    y = layer("MatMul", x, w)
    if cache_:
        y, made = layer.add("Call", [y, layer.parameter("v", WIDTH, WIDTH)], None, (project,), ["y", "c"])
        layer.set_outputs([layer("Add", x, y), layer("Relu", made)])
    else:
        layer.set_outputs([layer("Add", x, layer("Tanh", y))])
    callee = layer.finalize()
    make = Maker("layers")
    x, target = make.data("x", BATCH, WIDTH), make.data("target", BATCH, WIDTH)
    caches = []
    for index in range(count):
        own = [make.parameter(f"{p.name}{index}", WIDTH, WIDTH) for p in callee.parameters]
        x, *more = make.add("Call", [x, *own], None, (callee,), [f"h{index}", f"cache{index}"][: 1 + cache_])
        caches += more
    make.set_outputs([make("Loss", x, target, N=BATCH), *caches])
    return make.finalize()


def test_dead_outputs_of_calls_are_taken_out_of_the_callee_once_for_all_calls():
    joint, without = (differentiate(layers(cache_), Adam()) for cache_ in (True, False))
    verify(joint)
    assert count_flops(joint) == count_flops(without)
    assert count_ops(joint) == count_ops(without)
    assert len(callees(without)) == 5  # forward, backward; those of the first layer; update
    assert len(callees(joint)) == 5 + 2  # what a layer calls, forward and backward
    assert joint.notes == (
        "left out, as the loss does not need it: 4 outputs (cache0, cache1, cache2, cache3), 8 ops, "
        "4 parameters (v0, v1, v2, v3); keep (--keep NAME) an output to have it computed",
    )
    for text in (f"pp=4,dp=2,{GATHERED_ONCE}", "pp=2,remat=full"):
        program, simulation = simulate(joint, text)
        assert simulation.step_time == simulate(without, text)[1].step_time
        assert_same_step(joint, program, *computed(joint))


def test_calls_that_need_other_outputs_have_another_callee():
    joint = differentiate(layers(True), Adam(), ["cache2"])
    verify(joint)
    forward = [op for op in joint.ops if op.is_call][:4]
    assert forward[1].callee is forward[3].callee is not forward[2].callee
    assert [len(op.outputs) for op in forward] == [2, 2, 3, 2]  # h and what backward reads
    assert count_flops(joint) - count_flops(differentiate(layers(True), Adam())) == 2 * 8**3 + 8 * 8
    for text in PLANS:
        assert_same_step(joint, simulate(joint, text)[0], *computed(joint))


def test_what_every_layer_of_a_flat_model_keeps_is_made_in_forward():
    """Blocks are found in it again: the marks are then within callees."""
    names = [f"cache{index}" for index in range(4)]
    joint = differentiate(inline(inline(layers(True))), Adam(), names)
    assert any(op.op_type == "ForwardOutput" for callee in callees(outline(joint)) for op in callee.ops)
    for text in ("pp=4", f"pp=4,dp=2,{GATHERED_ONCE},microbatches=2", "pp=2,remat=min_cut"):
        program = simulate(joint, text)[0]
        assert_same_step(joint, program, *computed(joint))
        made = [key.name for stage in program.stages for key in stage.forward.outputs]
        assert [name for name in made if name in names] == names
        if text == "pp=4":
            assert [output.stage for output in program.outputs[1:5]] == [0, 1, 2, 3]


def dead_joint() -> tuple[Function, Function]:
    """A joint function by hand with a dead product, chains and a dead collective; and without."""
    plain = flat_mlp(optimizer=True)
    make = FunctionMaker("mlp")
    make.adopt_inputs(plain.inputs)
    for op in plain.ops:
        make.adopt(op)
        if op.op_type == "MatMul":
            make.add_op("Exp", inputs=[make.add_op("MatMul", inputs=[op.outputs[0], plain.inputs[2]])])
        if op.op_type == "MatMulGrad":
            make.add_op("Tanh", inputs=[op.outputs[0]])
    make.set_outputs(plain.outputs)
    return make.finalize(), plain


def test_a_joint_function_with_dead_ops_is_simulated_without_them_and_says_so():
    dead, plain = dead_joint()
    for text in ("dp=1", "pp=3", f"pp=2,dp=2,{GATHERED_ONCE}", "pp=2,remat=min_cut"):
        program, simulation = simulate(dead, text)
        expected = simulate(plain, text)[1]
        assert simulation.step_time == expected.step_time
        assert simulation.flops == expected.flops >= count_flops(dead) == count_flops(plain)
        assert "as no output needs it: 9 ops (exp2, exp6, exp10, tanh16, " in program.notes[0]
        assert_same_step(dead, program, *computed(dead))
    assert simulate(dead, "pp=3")[1].flops == count_flops(dead)
    assert block_costs(dead, COSTS) == block_costs(plain, COSTS)


def test_a_parameter_that_only_backward_reads_is_gathered_where_it_is_read():
    """As in an export with its own backward pass, where nothing tells the second output from a gradient."""
    joint = trained(True, "pooled")
    marks = [op for op in joint.ops if op.op_type == "ForwardOutput"]
    env = {op.outputs[0]: op.inputs[0] for op in marks}
    ops = [replace(op, inputs=tuple(env.get(v, v) for v in op.inputs)) for op in joint.ops if op not in marks]
    export = replace(joint, ops=tuple(ops), outputs=tuple(env.get(v, v) for v in joint.outputs))
    verify(export)
    for text in PLANS:
        assert_same_step(export, simulate(export, text)[0], *computed(export))


def test_trim_takes_what_an_unread_input_of_a_callee_needs():
    inner = Maker("first")
    a, _ = inner.data("a", 2), inner.data("b", 2)
    inner.set_outputs([inner("Exp", a)])
    callee, make = inner.finalize(), Maker("outer")
    x = make.data("x", 2)
    make("Send", x, to=TOPOLOGY.devices[1])
    make.set_outputs([make.call(callee, x, make("Relu", x))])
    function = make.finalize()
    made = trim(function)
    assert [op.op_type for op in made.function.ops] == ["Call"] and made.function.ops[0].inputs == (x,)
    assert [op.op_type for op in made.dead] == ["Relu", "Send"]
    assert trim(made.function).function is made.function


# --- outputs that are kept --------------------------------------------------------------------------


@pytest.mark.parametrize("text", PLANS)
def test_a_kept_output_is_made_in_forward_and_is_that_of_one_device(text):
    joint = trained(True, "pooled")
    program, simulation = simulate(joint, text)
    inputs, expected = computed(joint)
    assert_same_step(joint, program, inputs, expected)
    kept = program.outputs[1]
    assert kept.key.name == "pooled" and kept.stage == 0, "off the first product, it is made with it"
    assert kept.key in program.stages[0].forward.outputs
    given = {value.name: array for value, array in zip(joint.inputs, inputs, strict=True)}
    pooled = np.maximum(given["x"] @ given["w0"], 0) @ given["p"]
    np.testing.assert_allclose(expected[1], pooled, rtol=1e-12)
    assert simulation.flops >= count_flops(joint)
    once = 2 * BATCH * WIDTH**2
    assert count_flops(joint) == count_flops(trained(True)) + once
    products = [op for stage in program.stages for op in all_ops(stage.forward.function)]
    assert sum(op.op_type == "MatMul" for op in products) == 7


def test_the_outputs_are_the_loss_what_is_kept_then_what_training_makes():
    joint = trained(True, "pooled")
    names = [value.name for value in joint.outputs]
    assert names[:3] == ["loss", "pooled", "w0.new"] and "p.new" not in names
    assert [value.name for value in add_loss(stack(True), keep=["pooled"]).outputs] == ["loss", "pooled"]
    both = differentiate(add_loss(stack(True), keep=["pooled", "relu11"]), None, ["pooled", "relu11"])
    assert [value.name for value in both.outputs[:3]] == ["loss", "relu11", "pooled"], "in the model's order"
    assert both.notes == (CHOSEN,)


def oddities() -> Function:
    """Outputs of many kinds: batch in another dimension, a mean, indices, after the loss, inputs."""
    make = Maker("odd")
    x, target = make.data("x", 8, 4), make.data("target", 8, 4)
    w = make.parameter("w", 4, 4)
    h = make("Tanh", make("MatMul", x, w))
    y = make("MatMul", h, make.parameter("v", 4, 4))
    loss = make("Loss", y, target, N=8)
    turned = make("Transpose", h, perm=(1, 0))
    outputs = {
        "turned": turned,
        "mean": make("ReduceMean", h, axes=(0,), keepdims=0),
        "largest": make("ArgMax", h, axis=1, keepdims=0),
        "perplexity": make("Exp", loss),
        "bias": make("Add", make.parameter("q", 4), B=1.0),
        "fixed": make.add("Constant", (), {"value": Literal(np.arange(3.0))})[0],
        "data": x,
        "weight": w,
        "row": make("Reshape", w, shape=(16,)),
        "merged": make("Reshape", turned, shape=(32,)),
    }
    named = [make.add("Identity", [value], output_names=[name])[0] for name, value in outputs.items()]
    make.set_outputs([loss, y, *named])
    return make.finalize()


def test_kept_outputs_of_every_kind_are_those_of_one_device():
    function = oddities()
    names = [value.name for value in function.outputs[1:-1]]
    joint = differentiate(function, Adam(), names)
    for text in (
        "dp=2,microbatches=4",
        f"pp=2,dp=2,{GATHERED_ONCE},remat=min_cut,microbatches=2",
        "pp=2,tp=2",
    ):
        program = simulate(joint, text)[0]
        assert_same_step(joint, program, *computed(joint))
        held = {key for stage in program.stages for key in stage.backward.outputs}
        assert held.isdisjoint(output.key for output in program.outputs[1 : len(names) + 1])


def test_a_kept_output_whose_microbatches_lie_between_each_other_is_refused():
    joint = differentiate(oddities(), Adam(), ["merged"])
    assert_same_step(joint, simulate(joint, "pp=2,dp=2")[0], *computed(joint))
    with pytest.raises(PlanError, match="'merged' has the batch in parts.*2 microbatches.*microbatches=1"):
        simulate(joint, "microbatches=2")


def test_unknown_names_are_refused_with_those_that_there_are():
    marked = add_loss(stack(True), keep=["pooled"])
    unknown = ["pooled", "pool"]
    for ask in (lambda: add_loss(stack(True), keep=unknown), lambda: differentiate(marked, SGD(), unknown)):
        with pytest.raises(PlanError, match=r"keep: stack has no output 'pool'; it has (\w+), pooled"):
            ask()
    with pytest.raises(PlanError, match="list of names"):
        add_loss(stack(True), keep="pooled")
