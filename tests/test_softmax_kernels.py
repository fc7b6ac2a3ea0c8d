"""Softmaxes of scores under a causal mask: what Megatron-LM's kernel reads, and what it does not take."""

from dataclasses import replace

import pytest

from distsim.ir import Float16, callees
from distsim.models import gpt
from distsim.ops import op_label, signature_of, work
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels import KERNELS, fuse


@pytest.mark.parametrize(("name", "seq", "part"), [("fused", 64, 65 / 128), ("eager", 64, 1.0)])
def test_megatrons_softmax_reads_what_a_causal_mask_leaves(name, seq, part):
    """Rows up to the diagonal, forward and backward; it writes all of them, zeros behind the diagonal."""
    joint = differentiate(gpt(1, 16, 2, seq, 4, 32), SGD())
    function = fuse(joint, KERNELS[name]).function
    found = {
        label: work(signature_of(op))
        for each in callees(function)
        for op in each.ops
        if "Softmax" in (label := op_label(op)) and "Log" not in label
    }
    scores, mask = 4 * 2 * seq * seq * 4, seq * seq * 4
    assert {demand.bytes_written for demand in found.values()} == {scores}
    forward, backward = ("Mul+Add+Softmax", "SoftmaxGrad+Mul") if part < 1 else ("Softmax", "SoftmaxGrad")
    assert found[forward].bytes_read == scores * part + (mask if part < 1 else 0)
    assert found[backward].bytes_read == 2 * scores * part


@pytest.mark.parametrize("matrices", [1, 2, 3, 4, 8])
def test_a_softmax_that_megatrons_kernel_does_not_take_runs_in_torch(matrices):
    """Cast, scale, mask, softmax, cast, each of them a kernel, in float32; in backward all but the mask."""
    seq, dtype = 256, Float16()
    joint = differentiate(gpt(1, 16, 1, seq, matrices, 32, dtype=dtype), SGD())
    function = fuse(joint, KERNELS["fused_2021"]).function
    found = {"layer": [], "layer_backward": []}
    for each in callees(function):
        for op in each.ops if each.name in found else ():
            if (
                op.inputs
                and op.outputs[0].type.shape == (matrices, 1, seq, seq)
                and "MatMul" not in op_label(op)
            ):
                demand = work(signature_of(op))
                found[each.name].append((op_label(op), demand.bytes_read + demand.bytes_written))
    scores, mask = 2 * matrices * seq * seq, 2 * seq * seq
    if matrices % 4 == 0:
        part = (seq + 1) / (2 * seq)
        assert found == {
            "layer": [("Mul+Add+Softmax", scores * (1 + part) + mask)],
            "layer_backward": [("SoftmaxGrad+Mul", scores * (1 + 2 * part))],
        }
        return
    cast, wide = ("Cast", 3 * scores), 4 * scores
    assert found == {
        "layer": [cast, ("Mul", wide), ("Add", wide + mask), ("Softmax", wide), cast],
        "layer_backward": [cast, ("SoftmaxGrad", 5 * scores), ("Mul", wide), cast],
    }


def test_over_more_keys_than_it_was_written_for_a_softmax_reads_all():
    few = replace(KERNELS["fused"], name="few", triangles=32)
    joint = differentiate(gpt(1, 16, 2, 64, 4, 32), SGD())
    function = fuse(joint, few).function
    assert not [op for each in callees(function) for op in each.ops if op.attributes.get("triangle")]
