"""Softmaxes of scores under a causal mask: what Megatron-LM's kernel reads, and what it does not take."""

from dataclasses import replace

import pytest

from distsim.ir import Float, Float16, callees
from distsim.models import gpt
from distsim.ops import op_label, signature_of, work
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels import KERNELS, fuse


@pytest.mark.parametrize(("name", "seq", "part"), [("fused", 64, 65 / 128), ("eager", 64, 1.0)])
def test_megatrons_softmax_reads_what_a_causal_mask_leaves(name, seq, part):
    """Rows up to the diagonal, forward and backward; it writes all of them, zeros behind the diagonal."""
    joint = differentiate(gpt(1, 16, 2, seq, 4, 32, dtype=Float16()), SGD())
    function = fuse(joint, KERNELS[name]).function
    found = {
        label: work(signature_of(op))
        for each in callees(function)
        for op in each.ops
        if "Softmax" in (label := op_label(op)) and "Log" not in label
    }
    scores, mask = 4 * 2 * seq * seq * 2, seq * seq * 2
    assert {demand.bytes_written for demand in found.values()} == {scores}
    forward, backward = ("Mul+Add+Softmax", "SoftmaxGrad+Mul") if part < 1 else ("Softmax", "SoftmaxGrad")
    assert found[forward].bytes_read == scores * part + (mask if part < 1 else 0)
    assert found[backward].bytes_read == 2 * scores * part


def kernels_of_scores(policy, matrices, seq=256, dtype=None):
    """The kernels that write scores, with the bytes that each moves, forward and backward."""
    joint = differentiate(gpt(1, 16, 1, seq, matrices, 32, dtype=dtype or Float16()), SGD())
    function = fuse(joint, KERNELS[policy]).function
    found = {"layer": [], "layer_backward": []}
    for each in callees(function):
        for op in each.ops if each.name in found else ():
            scores = op.inputs and op.outputs[0].type.shape == (matrices, 1, seq, seq)
            if scores and "MatMul" not in op_label(op):
                demand = work(signature_of(op))
                found[each.name].append((op_label(op), demand.bytes_read + demand.bytes_written))
    return found["layer"], found["layer_backward"]


@pytest.mark.parametrize("policy", ["fused", "fused_waiting", "fused_2021", "fused_deepspeed"])
@pytest.mark.parametrize("matrices", [4, 8])
def test_megatrons_kernel_takes_matrices_in_fours(policy, matrices):
    scores, mask, part = 2 * matrices * 256**2, 2 * 256**2, 257 / 512
    forward, backward = kernels_of_scores(policy, matrices)
    assert forward == [("Mul+Add+Softmax", scores * (1 + part) + mask)]
    assert backward == [("SoftmaxGrad+Mul", scores * (1 + 2 * part))]


@pytest.mark.parametrize("policy", ["fused_waiting", "fused_2022", "fused_2021", "fused_deepspeed"])
@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_others_are_cast_scaled_masked_and_summed_in_float32(policy, matrices):
    """A kernel each, until December 2023; in backward all but what fills gradients with zeros."""
    scores, mask = 2 * matrices * 256**2, 2 * 256**2
    cast, wide = ("Cast", 3 * scores), 4 * scores
    forward, backward = kernels_of_scores(policy, matrices)
    assert forward == [cast, ("Mul", wide), ("Add", wide + mask), ("Softmax", wide), cast]
    assert backward == [cast, ("SoftmaxGrad", 5 * scores), ("Mul", wide), cast]


@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_others_are_masked_and_summed_in_16_bits_since(matrices):
    """Scaled by their product; the gradient, and what fills it with zeros."""
    scores, mask = 2 * matrices * 256**2, 2 * 256**2
    forward, backward = kernels_of_scores("fused", matrices)
    assert forward == [("Mul+Add", 2 * scores + mask), ("Softmax", 2 * scores)]
    assert backward == [("SoftmaxGrad", 3 * scores), ("Mul", 2 * scores)]


@pytest.mark.parametrize("policy", ["fused", "fused_2021"])
def test_no_kernel_takes_float32(policy):
    names = [[label for label, _ in each] for each in kernels_of_scores(policy, 4, dtype=Float())]
    before = ["Mul", "Add"] if policy == "fused_2021" else ["Mul+Add"]
    assert names == [[*before, "Softmax"], ["SoftmaxGrad", "Mul"]]


def test_over_more_keys_than_it_was_written_for_a_softmax_reads_all():
    few = replace(KERNELS["fused"], name="few", triangles=32)
    joint = differentiate(gpt(1, 16, 2, 64, 4, 32, dtype=Float16()), SGD())
    function = fuse(joint, few).function
    assert not [op for each in callees(function) for op in each.ops if op.attributes.get("triangle")]
