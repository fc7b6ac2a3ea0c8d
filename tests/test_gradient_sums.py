"""Sums of gradients: onto zeros, and added by the products that make them."""

from dataclasses import replace
from functools import cache

import pytest
from training_models import computed_over_ranks, small_gpt, topology_of

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.cost.efficiency import efficiencies
from distsim.ir import Device, Function, Role, Topology, all_ops
from distsim.models import gpt, llama
from distsim.ops import op_label, signature_of, work
from distsim.ops.operator import Work
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels.policies import KERNELS

ADDS = "MatMulGradB+AccumulateInto"


BUILDERS = {
    "gpt": lambda batch: gpt(2, 8, 4, 4, batch, 16),
    "llama": lambda batch: llama(2, 16, 4, 2, 24, 4, batch, 16),
    "small": lambda batch: small_gpt(batch=batch),
    "four layers": lambda batch: small_gpt(batch=batch, layers=4),
}


@cache
def trained(model: str, batch: int, precision: str | None = None) -> Function:
    policy = precision_named(precision) if precision else None
    return differentiate(BUILDERS[model](batch), Adam(), precision=policy)


def program_of(text="microbatches=3", kernels="fused", precision="mixed", model="gpt", batch=6):
    plan = Plan.parse(text)
    return parallelize(
        trained(model, batch, precision), plan, topology_of(plan.devices), kernels=KERNELS[kernels]
    )


def ops_of(program, *labels):
    return [op for op in all_ops(program.to_function()) if op_label(op) in labels]


@pytest.mark.parametrize("kernels", ["fused", "fused_2022", "eager_waiting"])
@pytest.mark.parametrize(
    "text",
    [
        "dp=2,tp=2,pp=2,microbatches=4,schedule=zb_h1",
        "dp=2,pp=2,microbatches=4,schedule=interleaved,chunks=2,overlap_grads=on,bucket=megatron,zero=1",
        "dp=2,tp=2,microbatches=2,sp=on,remat=full,zero=2",
        "pp=2,microbatches=4,schedule=dualpipe_v,chunks=2",
    ],
)
def test_every_rank_computes_the_same_step_however_gradients_are_summed(kernels, text):
    joint = trained("small" if "chunks" not in text else "four layers", 8)
    computed_over_ranks(joint, Plan.parse(text), kernels)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_kernel_fills_a_buffer_of_zeros_to_which_each_microbatch_adds(microbatches):
    """4 bytes of each element are written once a step, and each microbatch adds to each sum once."""
    program = program_of(f"microbatches={microbatches}", "fused_2022")
    inputs = [each.source for each in program.parts.inputs]
    elements = sum(value.type.size for value in inputs if value.role is Role.PARAMETER)
    (zeros,) = ops_of(program, "ZeroSums")
    assert work(signature_of(zeros)) == Work(0.0, 0.0, 4.0 * elements)
    added = [work(signature_of(op)) for op in ops_of(program, "AccumulateInto") if op.inputs[1].type.shape]
    assert sum(each.bytes_read for each in added) == microbatches * (2 + 4) * elements
    assert sum(each.bytes_written for each in added) == microbatches * 4 * elements
    assert not ops_of(program, "GradientCast")


@pytest.mark.parametrize(
    ("kernels", "precision", "zeros"),
    [
        *[("eager_waiting", "mixed", True), ("eager_waiting", "mixed_fp16", False)],
        *[("fused_2021", "mixed", True), ("fused_2021", "mixed_fp16", False)],
        *[("fused_2022", "mixed_fp16", True), ("fused", "mixed_fp16", True)],
        *[("fused_deepspeed", "mixed_fp16", False), ("eager", "mixed", False)],
        *[("eager_deepspeed", "mixed", True), ("eager_deepspeed", "mixed_bf16_grads", False)],
    ],
)
def test_which_sums_begin_as_zeros(kernels, precision, zeros):
    """Megatron-LM's until August 2021 where they have another type; DeepSpeed's, nanotron's there alone."""
    assert bool(ops_of(program_of(kernels=kernels, precision=precision), "ZeroSums")) == zeros


@pytest.mark.parametrize("kernels", ["fused", "eager_waiting"])
def test_parts_of_gradients_that_are_divided_at_once_begin_with_no_zeros(kernels):
    """Each microbatch's gradients are scattered there before they are summed: no product has the sum."""
    program = program_of("dp=2,microbatches=2,zero=2", kernels, batch=8)
    assert not ops_of(program, "ZeroSums", ADDS)
    assert ops_of(program, "AccumulateInto")


@pytest.mark.parametrize("model", BUILDERS)
def test_products_add_the_gradients_of_their_weights_to_the_sums(model):
    """They read and write 4 bytes of each element of a sum besides their operands; what no product makes is
    added by itself, and nothing is cast or added twice."""
    program = program_of(model=model)
    fused, apart = ops_of(program, ADDS), ops_of(program, "AccumulateInto")
    plain = program_of(kernels="fused_2022", model=model)
    made = ops_of(plain, "MatMulGradB")
    # Products of a weight are those whose results are summed; others are of attention that is written out.
    one_by_one = [op for op in ops_of(plain, "AccumulateInto") if op.outputs[0].type.rank > 1]
    total = sum(op.outputs[0].type.size for op in one_by_one)
    inside = sum(value.type.size for op in fused for value in op.outputs)
    rest = sum(op.outputs[0].type.size for op in apart if op.outputs[0].type.rank > 1)
    assert inside + rest == total and inside > rest
    assert len(fused) < len(made)
    for op in fused:
        demand, size = work(signature_of(op)), sum(value.type.size for value in op.outputs)
        operands = sum(value.type.nbytes for value in op.inputs[: -len(op.outputs)])
        assert (demand.bytes_read, demand.bytes_written) == (operands + 4 * size, 4 * size)
        assert op.attributes["added"] == 8 * size


def test_what_a_product_adds_takes_some_of_its_bytes_besides():
    """0.45 of what the DRAM takes for them, where the product itself is bound by its flops."""
    device = Device(0, "gpu", 1e12, 1e12, 0.0)
    op = ops_of(program_of(), ADDS)[0]
    signature = signature_of(op)
    plain = replace(signature, attributes=type(op.attributes)({**op.attributes, "added": 0.0}))
    for given in (device, replace(device, dram_bandwidth=1e15)):
        costs = CostModel(Topology.hierarchical(given, 1, []))
        flops, _ = efficiencies(signature, work(signature), "bfloat16", given)
        product = work(signature).flops / (given.peak("bfloat16") * flops)
        moved = (work(signature).bytes_read + work(signature).bytes_written) / given.dram_bandwidth
        added = 0.45 * op.attributes["added"] / given.dram_bandwidth
        assert costs.seconds(plain, (given,)) == pytest.approx(max(product, moved))
        assert costs.seconds(signature, (given,)) == pytest.approx(max(product + added, moved))
