"""A cross entropy whose gradient is made where its logits were: what it holds; nothing else changes."""

import pytest
from training_models import random_inputs

from distsim import simulate
from distsim.interpret import SequentialExecutor
from distsim.ir import Device, Float, FunctionMaker, Int64, Tensor, all_ops
from distsim.models import gpt
from distsim.simulation.memory.peak import peak_memory
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels import KERNELS, fuse
from distsim.transforms.kernels.losses import losses_apart

TOKENS, CLASSES = 256, 4096
IN_PLACE = ("flash_attention", "fused", "fused_logits", "fused_loss")


@pytest.mark.parametrize(
    ("kernels", "nbytes"),
    [
        # Quotients in float32, where their gradient is made, and the cast of that.
        *[(name, 4 + 2) for name in ("fused", "fused_loss", "fused_2021")],
        ("eager_waiting", 4 + 4),  # in forward, where nanotron subtracts into a copy
        ("fused_logits", 2),  # one tensor in bfloat16
        ("compiled", 2 + 2),  # the gradient beside the logits
        ("eager", 4 + 4 + 4),  # logarithms, and the gradients of torch's two functions
    ],
)
def test_bytes_of_a_logit_where_backward_begins(kernels, nbytes):
    def held(classes: int) -> int:
        model = f"gpt:layers=1,hidden=64,heads=4,seq={TOKENS // 4},vocab={classes}"
        step = simulate(model, "dgx-a100", "dp=1", batch=4, precision="mixed", kernels=kernels)
        (use,) = {use.peak: use.by_kind for use in step.memory.values()}.values()
        return use["activations"] + use["workspace"]

    assert held(2 * CLASSES) - held(CLASSES) == nbytes * TOKENS * CLASSES


@pytest.mark.parametrize("kernels", IN_PLACE)
def test_a_gradient_in_the_place_of_its_logits_is_the_same(kernels):
    function = differentiate(gpt(1, 8, 2, 16, 2, 64), SGD())
    marked = losses_apart(function, KERNELS[kernels])
    grads = [op for op in all_ops(marked) if op.op_type == "CrossEntropyLossGrad"]
    assert [op.attributes["in_place"] for op in grads] == [1]
    fused, inputs = fuse(marked, KERNELS[kernels]).function, random_inputs(function)
    results = [SequentialExecutor().compute(each, inputs) for each in (function, marked, fused)]
    for one, *others in zip(*results, strict=True):
        assert all((one == other).all() for other in others)


def test_policies_whose_gradient_is_in_the_place_of_the_logits():
    assert {name for name, each in KERNELS.items() if each.loss_in_place} >= set(IN_PLACE)
    assert {"eager", "eager_loss", "compiled", "ops"}.isdisjoint(
        name for name, each in KERNELS.items() if each.loss_in_place
    )


@pytest.mark.parametrize("read_later", [False, True])
def test_logits_that_something_reads_later_stay_beside_their_gradient(read_later):
    device = Device(0, "gpu", memory=2**40)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (8, 1024), device))
    labels = maker.add_input_value("labels", Tensor(Int64(), (8,), device))
    logits = maker.add_op("Tanh", inputs=[x])
    grad = maker.add_op("CrossEntropyLossGrad", inputs=[logits, labels], attributes={"N": 8, "in_place": 1})
    maker.add_op("Add", inputs=[grad, logits if read_later else grad])
    use = peak_memory(maker.finalize())[device]
    logits_bytes = 8 * 1024 * 4
    assert use.peak - 512 <= (3 if read_later else 2) * logits_bytes <= use.peak
