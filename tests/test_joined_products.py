"""Products that a framework has as one: queries, keys and values; a gate and what it gates."""

from collections import Counter
from dataclasses import replace

import pytest
from training_models import (
    F64,
    small_gpt,
    topology_of,
)

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.hardware import load_cluster
from distsim.ir import BFloat16, Float32, Function, FunctionMaker, Op, Role, Tensor, Value, callees
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.mixture import Mixture
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.ops import op_label, signature_of, work
from distsim.ops.kernel import KERNEL
from distsim.ops.matmul import GROUP
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate, precision_named
from distsim.transforms.autodiff.precision import SCALINGS
from distsim.transforms.kernels import KERNELS, fuse
from distsim.transforms.kernels.products import gradients_apart

APART = replace(KERNELS["fused"], name="apart", products="apart", strided_batches=False)
ROWS, WIDTH = 4096, 2048


def products(widths: tuple[int, ...], group: bool = True) -> Function:
    """Products of one x with weights of some widths, all results squared and summed."""
    maker = FunctionMaker("products")
    x = maker.add_input_value("x", Tensor(BFloat16(), (ROWS, WIDTH)), Role.INPUT)
    first = maker.add("Relu", [x])[0]  # so that a gradient of what is multiplied is wanted
    weight = maker.add_input_value("w", Tensor(BFloat16(), (WIDTH, WIDTH)), Role.PARAMETER)
    first = maker.add("MatMul", [first, weight])[0]
    losses: list[Value] = []
    for n, width in enumerate(widths):
        weight = maker.add_input_value(f"w{n}", Tensor(BFloat16(), (WIDTH, width)), Role.PARAMETER)
        made = maker.add("MatMul", [first, weight], {GROUP: "all"} if group else {})[0]
        target = maker.add_input_value(f"t{n}", Tensor(BFloat16(), (ROWS, width)), Role.INPUT)
        losses.append(maker.add("Loss", [made, target], {"N": ROWS})[0])
    total = losses[0]
    for loss in losses[1:]:
        total = maker.add("Add", [total, loss])[0]
    maker.set_outputs([total])
    return maker.finalize()


def run_by(function: Function, kernels) -> Function:
    return fuse(gradients_apart(differentiate(function, SGD()), kernels), kernels).function


def seconds_by_label(function: Function) -> dict[str, list[float]]:
    """The seconds of the kernels of products with one of several weights, on an A100."""
    costs = CostModel(load_cluster("dgx-a100"))
    device = costs.topology.devices[0]
    found: dict[str, list[float]] = {}
    for op in function.ops:
        label = op_label(op)
        first = op.inputs[0].name if op.inputs else ""
        if label.startswith("MatMul") and first != "relu0" and op.outputs:
            found.setdefault(label, []).append(costs.seconds(signature_of(op), (device,)))
    return found


@pytest.mark.parametrize("widths", [(2048, 2048, 2048), (2048, 512, 512), (5632, 5632)])
def test_one_kernel_takes_what_one_product_of_the_joined_width_takes(widths):
    """Forward, for the weights and for the operand; without the additions that parts would need."""
    together = run_by(products(widths), KERNELS["fused"])
    whole = run_by(products((sum(widths),)), KERNELS["fused"])
    apart = run_by(products(widths), APART)
    ours, one, many = (seconds_by_label(each) for each in (together, whole, apart))
    for label in ("MatMul", "MatMulGradA", "MatMulGradB"):
        assert sorted(ours[label]) == pytest.approx(sorted(one[label]), rel=1e-9), label
        assert sum(ours[label]) < sum(many[label])
    assert [op_label(op) for op in together.ops].count("Add") == len(widths) - 1  # of the losses alone
    assert [op_label(op) for op in apart.ops].count("Add") == 2 * (len(widths) - 1)


def test_products_of_no_group_or_of_another_operand_stay_apart():
    function = run_by(products((512, 512), group=False), KERNELS["fused"])
    assert [op_label(op) for op in function.ops].count("MatMul") == 3
    maker = FunctionMaker("two")
    x, y = (maker.add_input_value(n, Tensor(F64, (8, 4))) for n in "xy")
    weights = [maker.add_input_value(n, Tensor(F64, (4, 4)), Role.PARAMETER) for n in "vw"]
    made = [
        maker.add("MatMul", [source, weight], {GROUP: "all"})[0]
        for source, weight in zip((x, y), weights, strict=True)
    ]
    maker.set_outputs(made)
    two = maker.finalize()
    assert fuse(two, KERNELS["fused"]).function is two


def test_a_joined_kernel_does_the_flops_of_its_products():
    function = run_by(products((2048, 512, 512)), KERNELS["fused"])
    flops = [
        work(signature_of(op)).flops for op in function.ops if op_label(op) in ("MatMulGradA", "MatMulGradB")
    ]
    one = 2.0 * ROWS * WIDTH * WIDTH
    assert sorted(flops) == [one] + [1.5 * one] * 2  # of the first product, and of all behind it


def layer_kernels(kernels: str, sizes: DecoderSizes, layer: str, precision: str = "") -> list[Op]:
    """The ops of a layer that runs with some kernels, attention as one op."""
    policy = KERNELS[kernels]
    types = precision_named(precision) if precision else None
    joint = differentiate(decoder(sizes, 2, 16, Float32()), SGD(), precision=types)
    function = gradients_apart(joint, policy)
    fused = fuse(function, policy).function
    return [op for each in callees(fused) if each.name == layer for op in each.ops]


LLAMA = DecoderSizes(2, 32, 64, GroupedHeads(4, 2), FeedForward(48))


@pytest.mark.parametrize(
    ("kernels", "products_of_layer"), [("eager", 7), ("compiled", 7), ("fused", 4), ("eager_waiting", 4)]
)
def test_a_layer_has_four_products_where_its_framework_joins_them(kernels, products_of_layer):
    forward = layer_kernels(kernels, LLAMA, "layer")
    assert len([op for op in forward if op_label(op).startswith("MatMul")]) == products_of_layer


@pytest.mark.parametrize(
    ("kernels", "maker"), [("eager_loss", "TransposedView"), ("eager_waiting", "Transpose")]
)
def test_a_split_that_torch_makes_copies_gradients_side_by_side(kernels, maker):
    """Queries, keys and values from where they lie (llm-foundry), or once more than nanotron brings them
    into order; a gate and what it gates."""
    backward = layer_kernels(kernels, LLAMA, "layer_backward")
    copies = [op for op in backward if op.op_type == "CopyIn"]
    assert sorted([len(op.inputs) for op in copies]) == [2, 3]
    makers = {value: op.op_type for op in backward for value in op.outputs}
    three = next(op for op in copies if len(op.inputs) == 3)
    assert {makers[value] for value in three.inputs} == {maker}
    assert not [op for op in layer_kernels("fused", LLAMA, "layer_backward") if op.op_type == "CopyIn"]


def test_nanotron_copies_heads_and_turns_them_by_one_kernel_each():
    """Queries, keys and values forward, their gradients backward; not what attention makes, or is given."""
    eager, nanotron = (
        [Counter(op_label(op) for op in layer_kernels(kernels, LLAMA, layer)) for layer in PASSES]
        for kernels in ("eager", "eager_waiting")
    )
    assert [each["Transpose"] for each in (*eager, *nanotron)] == [0, 0, 3, 3]
    assert [each["TransposedView"] for each in nanotron] == [1, 1]
    turned = "Split+Neg+Concat+Mul+Mul+Add", "Mul+Mul+Split+Neg+Concat+Add"
    assert [each[name] for each, name in zip(nanotron, turned, strict=True)] == [2, 2]


PASSES = ("layer", "layer_backward")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_8_bits_are_joined_as_those_of_16_and_so_are_their_casts(scaling):
    """Transformer Engine's linear_qkv and linear_fc1: one product each, one cast of the gradient of its
    result, and no sum of gradients of what it multiplied."""
    sixteen, eight, apart = (
        Counter(op_label(op) for layer in PASSES for op in layer_kernels(kernels, LLAMA, layer, precision))
        for kernels, precision in (
            ("fused", "mixed"),
            ("fused", f"fp8:scaling={scaling}"),
            ("eager", f"fp8:scaling={scaling}"),
        )
    )
    for name in ("MatMul", "MatMulGradA", "MatMulGradB"):
        assert (sixteen[name], eight[f"Float8{name}"], apart[f"Float8{name}"]) == (4, 4, 7), name
    assert eight["Add"] == sixteen["Add"]
    casts = eight["Float8Cast"], apart["Float8Cast"]
    assert casts == (4 + 4 + 4, 4 + 7 + 7)  # of what is multiplied, weights, gradients
    assert eight["Float8Amax"] == (casts[0] if scaling == "tensorwise" else 0)


@pytest.mark.parametrize(("precision", "name"), [("mixed", "GroupedMatMul"), ("fp8", "Float8GroupedMatMul")])
def test_experts_have_one_weight_for_gate_and_up_where_their_framework_has(precision, name):
    """Megatron-LM's GroupedMLP: weight1 is twice as wide as the inner dimension; torchtitan's w1 and w3."""
    sizes = replace(LLAMA, experts=Mixture(4, 2, 48))
    fused, eager = (
        [op for layer in PASSES for op in layer_kernels(kernels, sizes, layer, precision)]
        for kernels in ("fused", "eager")
    )
    for kind in ("", "GradA", "GradB"):
        one, other = ([op for op in ops if op_label(op) == name + kind] for ops in (fused, eager))
        assert (len(one), len(other)) == (2, 3)
        assert sum(work(signature_of(op)).flops for op in one) == sum(
            work(signature_of(op)).flops for op in other
        )
    rows = next(op for op in fused if op_label(op) == f"{name}GradA" and op.op_type == KERNEL).outputs
    assert [value.type.shape[-1] for value in rows] == [32]  # of rows as they came, summed
    added = [value for op in eager if op.op_type == "Add" for value in op.outputs]
    assert rows[0].type.shape in [value.type.shape for value in added]
    assert rows[0].type.shape not in [v.type.shape for op in fused if op.op_type == "Add" for v in op.outputs]


def test_a_split_that_torch_makes_is_copied_before_it_is_cast():
    backward = layer_kernels("eager_waiting", LLAMA, "layer_backward", "fp8")
    copied = [value for op in backward if op.op_type == "CopyIn" for value in op.outputs]
    assert len(copied) == 5 and {value.type.dtype for value in copied} == {BFloat16()}
    cast = [op.inputs for op in backward if op_label(op) == "Float8Cast" and len(op.inputs) > 1]
    assert sorted(map(len, cast)) == [2, 3]


def test_a_router_is_a_product_of_its_own():
    """Though it reads what the shared expert reads."""
    sizes = replace(LLAMA, experts=Mixture(4, 2, 48, shared=1))
    forward = layer_kernels("fused", sizes, "layer")
    shapes = [
        [value.type.shape for value in op.inputs[1:]] for op in forward if op_label(op).startswith("MatMul")
    ]
    assert [(32, 4)] in shapes and [(32, 48), (32, 48)] in shapes


def test_products_of_many_matrices_read_strides_where_sequences_come_first():
    """Megatron-LM copies what attention gives back, and gradients for their product."""
    counts = {}
    copying = replace(KERNELS["fused"], name="copying", strided_batches=False)
    for name, policy in (("strided", KERNELS["fused"]), ("copied", copying)):
        joint = differentiate(small_gpt(batch=4), SGD())
        stage = parallelize(joint, Plan(), topology_of(1), kernels=policy).stages[0]
        counts[name] = [
            sum(op.op_type == "Transpose" for each in callees(block.function) for op in each.ops)
            for block in (stage.forward, stage.backward)
        ]
    assert counts == {"copied": [4, 4], "strided": [1, 3]}
