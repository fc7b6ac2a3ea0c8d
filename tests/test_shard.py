"""What sharding chooses and writes: the known patterns, and as few collectives as they take."""

from collections import Counter

import numpy as np
import pytest
from training_models import Maker, flat_mlp, fused_attention, laid_out, mesh_of, small_gpt, small_mlp, tied

from distsim.errors import PlanError
from distsim.ir import (
    Float64,
    Function,
    FunctionMaker,
    Literal,
    Mesh,
    Role,
    Tensor,
    all_ops,
    callees,
    verify,
)
from distsim.models import gpt, mlp, moe
from distsim.ops import operator
from distsim.schedule import schedule
from distsim.transforms import SGD, Adam, differentiate, shard
from distsim.transforms.sharding.problem_graph import overwritten


def collectives(function: Function, axis: str | None = None) -> Counter:
    """Collectives by operator, over one axis or all, every Call written out."""
    ops = [op for op in all_ops(function) if operator(op.op_type).communication is not None]
    return Counter(op.op_type for op in ops if axis in (None, op.attributes.get("axis")))


def placements(sharded) -> dict[str, str]:
    """Name of each input -> its placement over the tensor-parallel axis."""
    return {v.name: str(p.along("tp")) for v, p in zip(sharded.sources, sharded.inputs, strict=True)}


def callee_named(function: Function, name: str) -> Function:
    (found,) = [f for f in callees(function) if f.name == name]
    return found


# --- tensor parallelism -----------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("calls", [True, False])
def test_an_mlp_goes_by_columns_then_by_rows(calls, tp):
    """Shoeybi et al. 2019: one all-reduce for two layers forward, one backward."""
    layers = 6
    joint = differentiate(small_mlp(layers)) if calls else flat_mlp(layers, optimizer=True)
    made = shard(joint, mesh_of(tp=tp))
    found = placements(made)
    assert [found[f"w{i}"] for i in range(layers)] == ["S1", "S0"] * (layers // 2)
    assert found["x"] == "R"
    # Forward one all-reduce per pair; backward one too, but none for the input of the first layer
    # where nobody asks for its gradient. MatMulGrad in the flat function makes it, and nobody reads it.
    assert collectives(made.function) == {"MPIAllreduce": layers // 2 + layers // 2 - 1}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_gpt_layer_takes_two_all_reduces_forward_and_two_backward(tp):
    """Shoeybi et al. 2019, section 3: one after attention and one after the MLP, each way."""
    joint = differentiate(small_gpt(layers=3))
    made = shard(joint, mesh_of(tp=tp))
    assert collectives(callee_named(made.function, "layer")) == {"MPIAllreduce": 2}
    assert collectives(callee_named(made.function, "layer_backward")) == {"MPIAllreduce": 2}
    found = placements(made)
    layer = {name: found[f"h1.{name}"] for name in ("q.w", "k.w", "v.w", "proj.w", "fc.w", "out.w")}
    assert layer == dict.fromkeys(("q.w", "k.w", "v.w", "fc.w"), "S1") | dict.fromkeys(
        ("proj.w", "out.w"), "S0"
    )
    biases = {name: found[f"h1.{name}"] for name in ("q.b", "k.b", "v.b", "fc.b", "proj.b", "out.b")}
    assert biases == dict.fromkeys(("q.b", "k.b", "v.b", "fc.b"), "S0") | dict.fromkeys(
        ("proj.b", "out.b"), "R"
    )
    assert made.decisions["tp"].proven


def test_a_gpt_of_real_size_is_divided_in_the_same_way():
    joint = differentiate(gpt(layers=4, hidden=768, heads=12, seq=256, batch=8, vocab=50304), Adam())
    made = shard(joint, mesh_of(tp=4))
    assert collectives(callee_named(made.function, "layer")) == {"MPIAllreduce": 2}
    assert collectives(callee_named(made.function, "layer_backward")) == {"MPIAllreduce": 2}
    assert made.decisions["tp"].proven


def test_all_layers_are_placed_alike():
    found = placements(shard(differentiate(small_gpt(layers=4)), mesh_of(tp=2)))
    for name in ("q.w", "proj.w", "fc.b", "ln1.scale"):
        assert len({found[f"h{i}.{name}"] for i in range(4)}) == 1, name


@pytest.mark.parametrize("tp", [2, 4])
def test_a_fused_projection_is_divided_in_pieces_and_takes_no_all_gather(tp):
    """Query, key and value lie side by side: a rank takes a part of each, so that Split stays local."""
    made = shard(differentiate(fused_attention()), mesh_of(tp=tp))
    found = placements(made)
    assert (found["qkv.w"], found["qkv.b"], found["proj.w"]) == ("S1[8, 8, 8]", "S0[8, 8, 8]", "S0")
    assert collectives(made.function) == {"MPIAllreduce": 1}, "x needs no gradient: one all-reduce, forward"


def test_optimizer_state_lies_where_its_parameter_lies():
    made = shard(differentiate(small_gpt(), Adam()), mesh_of(tp=2))
    found = placements(made)
    names = [v.name for v in made.sources if v.role is Role.PARAMETER]
    assert {n: (found[f"{n}.m"], found[f"{n}.v"]) for n in names} == {n: (found[n],) * 2 for n in names}
    outputs = {v.name: str(p.along("tp")) for v, p in zip(made.function.outputs, made.outputs, strict=True)}
    assert {n: outputs[f"{n}.new"] for n in names if f"{n}.new" in outputs} == {n: found[n] for n in names}


def test_a_parameter_is_updated_as_it_lies():
    """No rank updates a slice of a parameter that it holds whole: that would not be in place."""
    sizes = {"hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 8, "seq": 6, "vocab": 16, "batch": 8}
    routing = {"experts": 4, "shared": 1, "capacity": 1.0, "concentration": 1.0}
    joint = differentiate(moe(layers=4, **sizes, **routing, dtype=Float64()), SGD())
    made = shard(joint, mesh_of(dp=2, tp=2))
    assert {"R", "S0", "S1"} <= set(placements(made).values())
    for function in (*callees(made.function), made.function):
        sliced = {op.outputs[0] for op in function.ops if op.op_type == "LocalSlice"}
        assert all(sliced.isdisjoint([op.inputs[i] for i in overwritten(op)]) for op in function.ops)


def test_degrees_that_divide_no_parameter_are_refused_with_those_that_do():
    with pytest.raises(PlanError, match=r"tp=4 divides no matrix product of mlp_training.*: 2, 3, 6$"):
        shard(differentiate(mlp(4, 6, 8, dtype=Float64())), mesh_of(tp=4))


def test_what_divides_is_divided_beside_what_does_not():
    """Six is no multiple of four, sixteen is: the weight between them is still divided."""
    joint = differentiate(mlp(2, 16, 8, input_width=6, output_width=6, dtype=Float64()))
    found = placements(shard(joint, mesh_of(tp=4)))
    assert (found["w0"], found["w1"]) == ("S1", "S0")


# --- data parallelism -------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("build", [small_gpt, small_mlp, tied], ids=lambda f: f.__name__)
def test_each_gradient_is_all_reduced_once_a_step_after_the_sum_over_microbatches(build, microbatches):
    function = build(batch=8)
    joint = differentiate(function, Adam())
    program = laid_out(joint, mesh_of(dp=2, pp=1), schedule("1f1b", 1, microbatches))
    flat = program.to_function()
    (stage,) = program.stages
    for block in (stage.forward, stage.backward):
        assert not collectives(block.function), f"a collective per microbatch in {block.function.name}"
    assert collectives(flat, "dp").keys() == {"MPIAllreduce"}
    moved = [value for op in all_ops(flat) if op.op_type == "MPIAllreduce" for value in op.inputs]
    sizes = Counter([value.type.size for value in moved])
    assert sizes == Counter([p.type.size for p in function.parameters] + [1]), "and the loss"


def test_the_sum_over_microbatches_is_marked_once_per_gradient_and_for_the_loss():
    function = small_gpt()
    made = shard(differentiate(function), mesh_of(dp=2), microbatches=2)
    marks = [op for op in made.function.ops if op.op_type == "Accumulate"]
    assert len(marks) == len(function.parameters) + 1
    after = {v for op in marks for v in op.outputs}
    reduced = [op for op in all_ops(made.function) if op.op_type == "MPIAllreduce"]
    assert all(op.inputs[0] in after for op in reduced), "reduced before it is summed over microbatches"


def test_data_parallel_gradients_of_divided_parameters_are_all_reduced_in_parts():
    function = small_mlp(layers=4)
    made = shard(differentiate(function), mesh_of(dp=2, tp=2))
    reduced = [op.inputs[0].type for op in all_ops(made.function) if op.attributes.get("axis") == "dp"]
    assert Counter(t.shape for t in reduced) == {(8, 4): 2, (4, 8): 2, (): 1}


# --- nothing to no one ------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [small_gpt, small_mlp, tied, fused_attention], ids=lambda f: f.__name__)
def test_axes_of_one_rank_take_no_collectives(build):
    joint = differentiate(build(batch=4))
    assert not collectives(shard(joint, mesh_of(), microbatches=2).function)
    assert not collectives(shard(joint, mesh_of(dp=2), microbatches=2).function, "tp")
    assert not collectives(shard(joint, mesh_of(tp=2), microbatches=2).function, "dp")


def test_a_forward_function_can_be_sharded_too():
    made = shard(small_mlp(layers=4), mesh_of(dp=2, tp=2))
    verify(made.function)
    assert collectives(made.function, "tp") == {"MPIAllreduce": 2}
    assert collectives(made.function, "dp") == {"MPIAllreduce": 1}


def test_local_functions_are_verified_and_on_the_mesh():
    mesh = mesh_of(dp=2, tp=2)
    made = shard(differentiate(small_gpt()), mesh, microbatches=2)
    verify(made.function)
    for function in (made.function, *callees(made.function)):
        values = [*function.inputs, *(v for op in function.ops for v in op.outputs)]
        assert {v.type.device for v in values} == {mesh}, function.name


def test_description_names_every_input_and_what_is_sent():
    made = shard(differentiate(small_mlp()), mesh_of(dp=2, tp=2), microbatches=2)
    lines = made.describe().splitlines()
    assert lines[0] == "mlp_training on Mesh(dp=2, tp=2)[gpu:0..gpu:3], 2 microbatches"
    assert lines[1] == "  x: dp:S0 tp:R" and lines[3] == "  w0: dp:R tp:S1" and lines[4] == "  w1: dp:R tp:S0"
    assert lines[-1].startswith("  bytes sent per rank (least): dp ") and len(lines) == 1 + 6 + 1


def test_moved_bytes_are_those_of_the_collectives():
    """Ring all-reduces: 2 (n-1)/n of the bytes of each value, local in the other axis."""
    made = shard(differentiate(small_mlp(layers=6)), mesh_of(tp=4))
    sizes = [op.inputs[0].type.nbytes for op in all_ops(made.function) if op.op_type == "MPIAllreduce"]
    assert made.decisions["tp"].moved == pytest.approx(sum(2 * 3 / 4 * size for size in sizes))
    assert made.decisions["dp"].moved == 0 or mesh_of(dp=1)


def test_sharding_is_deterministic():
    joint = differentiate(small_gpt(), Adam())
    texts = {shard(joint, mesh_of(dp=2, tp=2), 2).describe() for _ in range(3)}
    assert len(texts) == 1


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dp", "microbatches", "numbers"),
    [(3, 1, "dp=3 times microbatches=1"), (2, 8, "dp=2 times microbatches=8"), (16, 1, "dp=16")],
)
def test_a_batch_that_does_not_divide_is_refused_with_its_divisors(dp, microbatches, numbers):
    joint = differentiate(small_mlp(batch=8))
    with pytest.raises(PlanError, match=rf"{numbers}.*batch of 8 \(input 'x'\).*one of 1, 2, 4, 8"):
        shard(joint, mesh_of(dp=dp), microbatches)


def test_without_roles_and_without_a_loss_nothing_tells_the_batch():
    maker = FunctionMaker("forward")
    x, w = (maker.add_input_value(name, Tensor(Float64(), (8, 8))) for name in "xw")
    maker.add_op("MatMul", inputs=[x, w])
    with pytest.raises(PlanError, match=r"forward: no input is marked as a parameter and there is no loss"):
        shard(maker.finalize(), mesh_of(dp=2))


def test_roles_follow_from_the_loss_of_a_flat_function():
    made = shard(flat_mlp(layers=2), mesh_of(dp=2))
    assert [v.role for v in made.function.inputs] == [Role.INPUT] * 2 + [Role.PARAMETER] * 2
    assert [str(p.batch) for p in made.inputs] == ["S0", "S0", "R", "R"]


def test_a_batch_of_the_size_of_the_model_is_not_taken_for_it():
    """All sizes are 8: roles follow from how values are used, not from their sizes."""
    made = shard(flat_mlp(layers=2, width=8, batch=8), mesh_of(dp=4, tp=2))
    assert [str(p.batch) for p in made.inputs] == ["S0", "S0", "R", "R"]
    assert [str(p.along("tp")) for p in made.inputs[:2]] == ["R", "R"]


def test_data_inputs_that_disagree_about_the_batch_are_named():
    make = Maker("uneven")
    x, target, mask = make.data("x", 4, 8), make.data("target", 4, 8), make.data("mask", 2, 8)
    make.set_outputs([make("Loss", make("MatMul", x, make.parameter("w", 8, 8)), target, N=4), mask])
    with pytest.raises(PlanError, match=r"uneven: data inputs differ.*x: f64\[4, 8\].*mask: f64\[2, 8\]"):
        shard(make.finalize(), mesh_of(dp=2))


def whole_batch(kind: str) -> Function:
    make = Maker("whole")
    x, target = make.data("x", 4, 8), make.data("target", 4, 8)
    y = make("MatMul", x, make.parameter("w", 8, 8))
    if kind == "softmax":
        y = make("Softmax", y, axis=0)
    else:
        y = make("Sub", y, make("ReduceMean", y, axes=Literal(np.array([0])), keepdims=1))
    return differentiate(make.end(make("Loss", y, target, N=4)))


def test_an_op_that_needs_the_whole_batch_refuses_microbatches_but_not_ranks():
    joint = whole_batch("softmax")
    with pytest.raises(PlanError, match=r"needs the whole batch at once.*2 microbatches; use microbatches=1"):
        shard(joint, mesh_of(), microbatches=2)
    assert collectives(shard(joint, mesh_of(dp=2)).function, "dp")["MPIAllgather"] >= 1


def test_a_sum_over_the_batch_that_is_read_by_sample_refuses_microbatches():
    with pytest.raises(PlanError, match="microbatch"):
        laid_out(whole_batch("mean"), mesh_of(pp=1), schedule("1f1b", 1, 2))


def test_a_mesh_without_the_axes_is_refused():
    mesh = Mesh(mesh_of(dp=2).devices, rows=2)
    with pytest.raises(ValueError, match="has no axis 'dp'"):
        shard(differentiate(small_mlp()), mesh)


def test_gradients_without_an_optimizer_come_out_whole():
    made = shard(differentiate(small_mlp(), None), mesh_of(dp=2, tp=2))
    assert {p.along("tp").kind for p in made.outputs} <= {"R", "S"} and {
        p.batch.kind for p in made.outputs
    } == {"R"}
    assert differentiate(small_mlp(), SGD()).outputs[0].type.shape == ()
