"""What XLA launches: sums of rows end a kernel, operands of 8 bits are turned, scans copy what they save."""

from functools import cache
from weakref import ref

import pytest
from precision_models import small_gpt
from test_kernels import known
from training_models import (
    assert_all_readers_agree,
    assert_same_step,
    random_inputs,
    small_llama,
    topology_of,
)

from distsim.compose import parallelize
from distsim.interpret import SequentialExecutor
from distsim.ir import BFloat16, Float32, FunctionMaker, Tensor, all_ops, callees
from distsim.ops import op_label, operator, signature_of, work
from distsim.ops.onnx_bridge import type_number
from distsim.ops.operator import read_again
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate, precision_named
from distsim.transforms.kernels import KERNELS, fuse
from distsim.transforms.kernels.fusion import kernel_of

XLA = ("xla", "xla_2021", "xla_te")


def again(name, model, op_type):
    """How often kernels read what ops of a type read, beyond once; of kernels by the ops that they run."""
    found = set()
    for each in callees(fuse(known(model)[0], KERNELS[name]).function):
        for op in each.ops:
            for part in op.subfunctions[0].ops if op.op_type == "Kernel" else (op,):
                if part.op_type == op_type:
                    types = [value.type for value in part.inputs]
                    most = max(type_.size for type_ in types)
                    once = sum(type_.nbytes for type_ in types if type_.size == most)
                    found.add(read_again(part.attributes, types) / once)
    return found


@pytest.mark.parametrize(
    ("name", "model", "op_type", "times"),
    [
        ("xla", "llama", "RMSNormalizationGrad", 2),
        ("xla", "gpt", "LayerNormalizationGrad", 2),
        ("xla", "gpt", "SoftmaxGrad", 1),
        ("xla", "gpt", "Softmax", 0),
        ("xla_2021", "gpt", "Softmax", 2),
        ("xla_2021", "llama", "RMSNormalization", 1),
        ("xla_te", "gpt", "LayerNormalizationGrad", 0),
        ("compiled", "gpt", "LayerNormalizationGrad", 0),
    ],
)
def test_sums_of_rows_are_read_again_by_what_is_made_with_them(name, model, op_type, times):
    assert again(name, model, op_type) == {times}


@pytest.mark.parametrize("name", XLA)
def test_a_kernel_reads_again_what_its_parts_do(name):
    """Beside each operand once: the bytes of every part whose kernels are several."""
    function, seen = fuse(known("gpt")[0], KERNELS[name]).function, 0
    for each in callees(function):
        for op in each.ops:
            if op.op_type != "Kernel":
                continue
            parts = op.subfunctions[0].ops
            more = sum(read_again(part.attributes, [value.type for value in part.inputs]) for part in parts)
            once = sum(value.type.nbytes for value in op.inputs)
            if "updated" not in op.attributes:  # kernels of updates are several
                assert work(signature_of(op)).bytes_read == once + more
                seen += more > 0
    assert seen or name == "xla_te"


def test_transformer_engine_joins_norms_and_activations_with_nothing():
    labels = {
        op_label(op)
        for each in callees(fuse(known("gpt")[0], KERNELS["xla_te"]).function)
        for op in each.ops
        if "Normalization" in op_label(op) or "Gelu" in op_label(op)
    }
    assert labels == {"LayerNormalization", "LayerNormalizationGrad", "Gelu", "GeluGrad"}
    joined = [
        op_label(op) for each in callees(fuse(known("gpt")[0], KERNELS["xla"]).function) for op in each.ops
    ]
    assert "Add+Gelu" in joined and not [label for label in joined if label.startswith("MatMul+")]


def test_transformer_engine_gates_in_the_kernel_of_an_activation():
    """As other kernels do, forward and backward."""

    def gated(name):
        functions = callees(fuse(known("llama")[0], KERNELS[name]).function)
        return sorted([op_label(op) for each in functions for op in each.ops if "Swish" in op_label(op)])

    assert gated("xla_te") == gated("fused")
    assert {"Swish+Mul", "Mul+SwishGrad"} <= {*gated("xla_te")}


@cache
def trained():
    joint = differentiate(small_gpt(), SGD(lr=1.0), precision=precision_named("fp8"))
    inputs = [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(joint, 2)]
    return joint, inputs


@pytest.mark.parametrize("name", XLA)
def test_operands_of_8_bits_that_do_not_lie_along_what_is_summed_are_turned(name):
    """Of each product the weight, and both operands of its gradient, each once; casts are of no other
    kernel, but for those of Transformer Engine's norms and activations."""
    joint, _ = trained()
    program = parallelize(joint, Plan.parse("dp=1"), topology_of(1), kernels=KERNELS[name])
    ops = {id(op): op for op in all_ops(program.to_function())}.values()  # those of two layers are the same
    turned = {op.outputs[0]: op.inputs[0] for op in ops if op.op_type == "Float8Turn"}
    wanted = {op.inputs[1] for op in ops if op.op_type == "Float8MatMul"}
    wanted |= {value for op in ops if op.op_type == "Float8MatMulGradB" for value in op.inputs[:2]}
    assert turned.keys() == wanted and len({*turned.values()}) == len(turned)
    casts = {op_label(op) for op in ops if "Float8Cast" in op_label(op)}
    engine = {f"{op}+Float8Cast" for op in ("LayerNormalization", "Gelu", "GeluGrad")}
    assert casts - {"Float8Cast"} == (engine if name == "xla_te" else set())


def copies_of(program):
    """Bytes that a forward pass of one stage copies, and of what its products make and backward reads."""
    (forward,) = [forward.function for forward, _, _ in program.parts.blocks]
    copied = products = 0
    for call in [op for op in forward.ops if op.is_call]:
        made = {v: op for op in call.callee.ops for v in op.outputs}
        for value in call.callee.outputs:
            op = made.get(value)
            copied += value.type.nbytes if op and op.op_type == "CopyIn" else 0
            while op is not None and operator(op.op_type).view:
                op = made.get(op.inputs[0])
            demand = None if op is None else work(signature_of(op))
            products += value.type.nbytes if demand is not None and demand.matrix else 0
    return copied, products


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,zero=3,microbatches=2", "tp=2", "dp=1,remat=ops:MatMul"])
def test_scans_copy_what_products_make_and_backward_reads(plan):
    """And what kernels of elements make they write where it stays."""
    joint = differentiate(small_llama(), SGD())
    inputs = random_inputs(joint)
    plan = Plan.parse(plan)
    topology = topology_of(plan.devices)
    programs = {
        name: parallelize(joint, plan, topology, kernels=KERNELS[name]) for name in ("compiled", "xla")
    }
    copied, left = copies_of(programs["xla"])
    none, made = copies_of(programs["compiled"])
    assert copied == made > 0 and none == left == 0
    assert_all_readers_agree(programs["xla"])
    assert_same_step(joint, programs["xla"], inputs, SequentialExecutor().compute(joint, inputs))


def test_what_nothing_repeats_is_no_scan():
    joint = differentiate(small_llama(layers=1), SGD())
    program = parallelize(joint, Plan.parse("dp=1"), topology_of(1), kernels=KERNELS["xla"])
    assert "CopyIn" not in {op.op_type for op in all_ops(program.to_function())}


def test_layers_without_copies_are_forgotten_with_their_function(collect):
    joint = differentiate(small_llama(), SGD())
    program = parallelize(joint, Plan.parse("dp=1,remat=full"), topology_of(1), kernels=KERNELS["xla"])
    layer = ref(next(op.callee for op in program.parts.blocks[0][0].function.ops if op.is_call))
    del joint, program
    collect()
    assert layer() is None


@pytest.mark.parametrize(
    ("scaling", "again", "read"), [("delayed", 1, 1), ("tensorwise", 0, 1), ("rowwise", 1, 4)]
)
def test_casts_are_read_as_their_scales_are_made(scaling, again, read):
    """A largest element that is an op is that kernel; scales of columns are made where operands turn."""
    joint = differentiate(small_gpt(), SGD(), precision=precision_named(f"fp8:scaling={scaling}"))
    program = parallelize(joint, Plan.parse("dp=1"), topology_of(1), kernels=KERNELS["xla"])
    ops = {id(op): op for op in all_ops(program.to_function())}.values()
    casts = [op for op in ops if op.op_type == "Float8Cast"]
    turns = [op for op in ops if op.op_type == "Float8Turn"]
    assert casts and {op.attributes.get("again", 0) for op in casts} == {again}
    assert turns and {work(signature_of(op)).bytes_read / op.inputs[0].type.size for op in turns} == {read}
    if scaling == "tensorwise":
        assert "Float8Amax" in {op.op_type for op in ops}


def test_casts_that_write_both_ways_are_not_turned():
    joint = differentiate(small_gpt(), SGD(), precision=precision_named("fp8:scaling=blockwise"))
    program = parallelize(joint, Plan.parse("dp=1"), topology_of(1), kernels=KERNELS["xla"])
    assert "Float8Turn" not in {op.op_type for op in all_ops(program.to_function())}


def test_what_is_cast_within_a_kernel_is_read_again_as_it_lies():
    """A softmax of 16 bits, computed in 32: 2 more reads of 2 bytes."""
    maker = FunctionMaker("wide")
    x = maker.add_input_value("x", Tensor(BFloat16(), (4, 8)))
    wide = maker.add("Cast", [x], {"to": type_number(Float32())})[0]
    maker.add("Softmax", [wide], {"axis": -1, "again": 2})
    op = kernel_of(maker.ops, maker.ops[-1].outputs)
    assert work(signature_of(op)).bytes_read == 3 * 2 * 32
