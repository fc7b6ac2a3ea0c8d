"""Precision policies: the bytes they keep, what is summed in which type, the same step whatever the plan."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from precision_models import MODELS, PLANS, in_float64, joint_of, rounded, small_gpt, updates, values
from topology_models import bare_cluster
from training_models import F64, Maker, assemble, laid_out, mesh_of, random_inputs

from distsim.errors import CostError, PlanError
from distsim.executor import CostModel, SequentialExecutor
from distsim.interpret import count_flops
from distsim.ir import (
    Attributes,
    BFloat16,
    Float8E5M2,
    Float16,
    Float32,
    Role,
    all_ops,
    verify,
)
from distsim.models import gpt, mlp
from distsim.ops import compute, signature_of, work
from distsim.schedule import schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, differentiate, precision_named, shard
from distsim.transforms.autodiff.precision import POLICIES
from distsim.transforms.autodiff.set_precision import set_precision
from distsim.transforms.kernels import fuse, kernels_named
from distsim.transforms.kernels.attention import set_attention

KEPT = {
    "fp32": 16,
    "tf32": 16,
    "bf16": 8,
    "mixed": 18,
    "mixed_bf16_grads": 16,
    "mixed_fp16": 20,
    "fp8": 18,
    "fsdp2": 16,
    "fsdp": 18,
    "amp": 16,
}
"""Bytes a parameter that Adam keeps with each policy, as layouts.md has them."""


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_a_parameter_are_those_of_the_frameworks(policy):
    """Weight, master, states, the gradient that is summed, and the copy that the optimizer reads of it."""
    joint = joint_of("gpt", policy)
    verify(joint)
    sums = precision_named(policy)
    copies = sums.gradient_sum.itemsize if sums.update != sums.gradient_sum else 0
    total = size = 0
    for op in updates(joint):
        weight, gradient, *states = op.inputs
        assert gradient.type.dtype == sums.update
        total += weight.type.nbytes + gradient.type.nbytes + sum(state.type.nbytes for state in states)
        total += copies * gradient.type.size
        size += weight.type.size
    assert total == KEPT[policy] * size
    held = sum(v.type.nbytes for v in joint.inputs if v.role in (Role.PARAMETER, Role.STATE))
    assert held == (KEPT[policy] - sums.update.itemsize - copies) * size
    assert size >= sum(v.type.size for v in joint.inputs if v.role is Role.PARAMETER) / len(updates(joint))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "mixed", "mixed_bf16_grads", "fsdp2", "fp8"])
def test_the_simulated_memory_has_these_bytes(policy):
    """At the peak of a step of many microbatches all gradients are there, and the sum of the losses."""
    joint = joint_of("gpt", policy)
    program = laid_out(joint, mesh_of(1, 1, 1), schedule("1f1b", 1, 4))
    (memory,) = program_memory(program).ranks
    size = sum(v.type.size for v in joint.inputs if v.role is Role.PARAMETER)
    kept = sum(memory.by_kind.get(kind, 0) for kind in ("parameters", "state", "gradients"))
    assert kept - joint.outputs[0].type.nbytes == KEPT[policy] * size


def test_every_policy_has_its_bytes():
    assert POLICIES.keys() == KEPT.keys()


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fp8"])
@pytest.mark.parametrize("model", ["gpt", "tied"])
def test_in_float64_every_policy_is_the_same_step(model, policy):
    """Of models without tables of numbers, which are rounded to the type in which they are used."""
    plain = differentiate(in_float64(MODELS[model]()), Adam())
    inputs = random_inputs(plain, 0)
    expected = SequentialExecutor().compute(plain, inputs)
    joint = in_float64(joint_of(model, policy))
    given = dict(zip([v.name for v in plain.inputs], inputs, strict=True))
    for value in joint.inputs:
        if value.name.endswith(".master"):
            given[value.name] = given[value.name.removesuffix(".master")]
    results = SequentialExecutor().compute(joint, [given[v.name] for v in joint.inputs])
    made = dict(zip([v.name for v in joint.outputs], results, strict=True))
    for value, array in zip(plain.outputs, expected, strict=True):
        np.testing.assert_allclose(made[value.name], array, rtol=1e-9, atol=1e-11, err_msg=value.name)


@pytest.mark.parametrize("policy", ["mixed", "mixed_fp16", "fsdp2", "fsdp", "amp"])
@pytest.mark.parametrize(("plan", "remat", "zero"), PLANS, ids=str)
def test_in_float64_every_plan_is_the_same_step(policy, plan, remat, zero):
    """The plan is made of the real types, which say what travels, and is computed without rounding."""
    joint = joint_of("gpt" if plan.tp > 1 else "tied", policy)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    program = laid_out(joint, mesh_of(plan.dp, plan.tp, plan.pp), order, remat, zero)
    inputs = random_inputs(joint, 1)
    expected = SequentialExecutor().compute(in_float64(joint), inputs)
    made = assemble(program, SequentialExecutor().compute(in_float64(program.to_function()), inputs))
    for placed, array in zip(made, expected, strict=True):
        np.testing.assert_allclose(placed.array, array, rtol=1e-9, atol=1e-11, err_msg=placed.name)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fp32"])
def test_in_its_own_types_a_policy_computes_the_step_to_their_tolerance(policy):
    """One step of SGD, so that the new weight less the old one is the gradient."""
    function = small_gpt()
    exact = differentiate(in_float64(function), SGD(lr=1.0))
    joint = differentiate(function, SGD(lr=1.0), precision=precision_named(policy))
    inputs = [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(exact, 2)]
    by_name = dict(zip([v.name for v in exact.inputs], inputs, strict=True))
    given = [by_name[v.name.removesuffix(".master")] for v in joint.inputs]
    results = SequentialExecutor().compute(joint, rounded(joint, given))
    expected = SequentialExecutor().compute(exact, inputs)
    for value, array in zip(joint.outputs, results, strict=True):
        assert array.dtype == value.type.dtype.np, value.name
    loss, wanted = float(results[0]), float(expected[0])
    assert loss == pytest.approx(wanted, rel=2e-2)
    names = [v.name for v in joint.outputs]
    for value, array in zip(exact.outputs[1:], expected[1:], strict=True):
        name = value.name.removesuffix(".new")
        kept = f"{name}.master.new"
        made = results[names.index(kept if kept in names else value.name)].astype(float)
        old = by_name[name]
        change, real = made - old, array - old
        assert np.linalg.norm(change - real) <= 0.1 * np.linalg.norm(real) + 0.02 * np.linalg.norm(old)


@pytest.mark.parametrize("policy", ["mixed", "mixed_bf16_grads", "mixed_fp16", "fsdp2", "fsdp", "amp"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_gradients_travel_and_are_summed_in_the_type_of_the_policy(model, policy):
    """Least cost would reduce bf16 gradients before they are cast to float32."""
    joint = joint_of(model, policy)
    local = shard(joint, mesh_of(dp=2, tp=2), 2).function
    sent = [op for op in all_ops(local) if op.op_type == "MPIAllreduce" and op.attributes["axis"] == "dp"]
    weights = {op.inputs[0].type.dtype for op in sent if op.inputs[0].type.rank}
    assert weights == {precision_named(policy).gradient_sum}
    marks = [op.outputs[0].type for op in all_ops(local) if op.op_type == "Accumulate"]
    assert {type_.dtype for type_ in marks if type_.rank} == weights


def test_a_sum_over_microbatches_adds_what_backward_makes_to_it():
    """Of the later microbatches no gradient is cast: one kernel reads 2 and 4 bytes and writes 4."""
    program = laid_out(joint_of("gpt", "mixed"), mesh_of(1, 1, 2), schedule("1f1b", 2, 4))
    for stage in program.stages:
        later = stage.backward.accumulating
        adds = [op for op in later.ops if op.op_type == "AccumulateInto" and op.inputs[0].type.rank]
        assert adds and not [op for op in later.ops if op.op_type == "GradientCast"]
        assert {tuple([v.type.dtype for v in op.inputs]) for op in adds} == {(Float32(), BFloat16())}
        assert len(stage.backward.accumulating_names) in (0, len(later.ops))


@pytest.mark.parametrize("policy", ["mixed", "fsdp2"])
@pytest.mark.parametrize("model", ["gpt", "tied"])
def test_a_gradient_is_cast_once_it_is_complete(policy, model):
    """Only casts of what the same op made are between the two: it is reduced while backward goes on."""
    ops = joint_of(model, policy).ops
    maker = {value: number for number, op in enumerate(ops) for value in op.outputs}
    casts = [number for number, op in enumerate(ops) if op.op_type == "GradientCast"]
    assert len(casts) > 2
    for number in casts:
        made = maker[ops[number].inputs[0]]
        between = {maker[v] for each in range(made + 1, number) for v in ops[each].inputs}
        assert between <= {made}, ops[number]


@pytest.mark.parametrize("policy", ["fsdp", "amp:gradient_sum=bfloat16"])
def test_what_a_gradient_is_cast_from_is_summed_where_it_is_of_that_type(policy):
    """But what else reads the cast has it still: here the gradient of what is subtracted."""
    make = Maker("two")
    x, label = make.data("x", 4, 8), make.data("label", 4, 8)
    one, other = make.parameter("one", 8, 8), make.parameter("other", 8, 8)
    product = make("MatMul", x, make("Sub", one, other))
    function = set_precision(make.end(make("Loss", product, label, N=4)), Float32(), F64)
    joint = differentiate(function, Adam(), precision=precision_named(policy))
    verify(joint)
    makers = {op.outputs[0]: op for op in joint.ops}
    (first,) = [makers[op.inputs[1]] for op in updates(joint) if op.inputs[0].name == "one"]
    assert first.op_type == "GradientCopy" and makers[first.inputs[0]].op_type.startswith("MatMul")


@pytest.mark.parametrize("policy", ["mixed", "mixed_bf16_grads", "fsdp2"])
def test_gradients_of_few_layers_are_whole_at_a_time(policy):
    """With zero=3 a gradient is divided soon after it is made, however many layers there are."""
    passing = ("activations", "workspace", "communication")
    found = []
    for layers in (4, 8):
        function = gpt(layers=layers, hidden=64, heads=2, seq=4, batch=2, vocab=16)
        joint = differentiate(function, SGD(), precision=precision_named(policy))
        program = laid_out(joint, mesh_of(2, 1, 1), schedule("1f1b", 1, 1), "none", "zero=3")
        (memory,) = program_memory(program).ranks
        found.append([memory.by_kind[kind] for kind in passing])
    assert found[0] == found[1]


def test_fsdp_gathers_what_is_used_and_reduces_what_is_summed():
    joint = joint_of("gpt", "fsdp2")
    program = laid_out(joint, mesh_of(2, 1, 1), schedule("1f1b", 1, 2), "none", "zero=3")
    flat = program.to_function()
    gathers = {op.inputs[0].type.dtype for op in all_ops(flat) if op.op_type == "MPIAllgather"}
    scatters = {op.inputs[0].type.dtype for op in all_ops(flat) if op.op_type == "MPIReduceScatter"}
    assert (gathers, scatters) == ({BFloat16()}, {Float32()})


def test_amp_multiplies_in_half_and_normalizes_in_float32():
    joint = joint_of("gpt", "amp")
    kinds = {
        kind: {op.inputs[0].type.dtype for op in all_ops(joint) if op.op_type == kind}
        for kind in ("MatMul", "LayerNormalization", "Softmax", "CrossEntropyLoss")
    }
    assert kinds.pop("MatMul") == {BFloat16()}
    assert set().union(*kinds.values()) == {Float32()}


def test_amp_adds_biases_in_half_as_operands_of_their_products():
    """torch.autocast casts all operands of ``linear``: activations stay as products make them."""
    joint = joint_of("gpt", "amp")
    kinds = {
        kind: {op.inputs[0].type.dtype for op in all_ops(joint) if op.op_type == kind}
        for kind in ("Gelu", "GeluGrad")
    }
    assert kinds == {"Gelu": {BFloat16()}, "GeluGrad": {BFloat16()}}
    sums = [op for op in all_ops(joint) if op.op_type == "Add"]
    biases = [op for op in sums if any(len(value.type.shape) == 1 for value in op.inputs)]
    assert biases and {op.outputs[0].type.dtype for op in biases} == {BFloat16()}
    assert Float32() in {op.outputs[0].type.dtype for op in sums}  # of what goes through all layers


@pytest.mark.parametrize("kernels", ["ops", "eager", "compiled"])
def test_products_of_every_kernel_run_at_the_rate_of_the_policy(kernels):
    """A bias that the kernel of a product adds changes nothing, and attention as one kernel has no TF32."""
    found = {
        policy: fuse(joint_of("gpt", policy), kernels_named(kernels)).function for policy in ("fp32", "tf32")
    }
    rates = {
        policy: {
            op.attributes.get("rate", "")
            for op in all_ops(function)
            if (demand := work(signature_of(op))) is not None and demand.matrix
        }
        for policy, function in found.items()
    }
    assert rates == {"fp32": {""}, "tf32": {"tfloat32"}}
    flash = differentiate(set_attention(small_gpt(), "flash"), SGD(), precision=precision_named("tf32"))
    kinds = {op.op_type for op in all_ops(flash) if "rate" in op.attributes}
    assert "MatMul" in kinds and not any(kind.startswith("Attention") for kind in kinds)


def test_linear_layers_multiply_in_8_bits_but_for_the_predictions():
    joint, mixed = joint_of("gpt", "fp8"), joint_of("gpt", "mixed")
    kinds = Counter(op.op_type for op in all_ops(joint))
    products = [op for op in all_ops(mixed) if op.op_type == "MatMul"]
    held = [op for op in products if op.inputs[1].role is Role.PARAMETER]
    linear = len(held) - 1
    assert linear > 4 and kinds["Float8MatMul"] == linear == kinds["Float8MatMulGradB"]
    assert kinds["MatMul"] == len(products) - linear
    of_gradients = [op for op in all_ops(joint) if op.outputs[0].type.dtype == Float8E5M2()]
    assert len(of_gradients) == linear
    assert count_flops(joint) == pytest.approx(count_flops(mixed), rel=0.1)


@pytest.mark.parametrize("policy", ["mixed", "fp8"])
def test_ranks_compute_a_policy_to_the_tolerance_of_its_types(policy):
    joint = differentiate(small_gpt(), SGD(lr=1.0), precision=precision_named(policy))
    inputs = rounded(joint, [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(joint, 2)])
    expected = SequentialExecutor().compute(joint, inputs)
    flat = laid_out(joint, mesh_of(2, 2, 2), schedule("1f1b", 2, 2)).to_function()
    made = SequentialExecutor().compute(flat, inputs)
    assert float(made[0][0]) == pytest.approx(float(expected[0]), rel=2e-2)


def test_products_run_at_the_rate_of_their_types():
    h100 = bare_cluster("dgx-h100")
    device = h100.devices[:1]
    model = CostModel(h100)
    seconds = {}
    for policy in ("fp32", "tf32", "bf16", "fp8"):
        joint = differentiate(mlp(layers=2, width=8192, batch=8192), SGD(), precision=precision_named(policy))
        products = [op for op in all_ops(joint) if work(signature_of(op)).matrix]
        seconds[policy] = max(model.seconds(signature_of(op), device) for op in products)
    for slow, fast, ratio in (("fp32", "tf32", 494.7 / 67), ("tf32", "bf16", 2), ("bf16", "fp8", 2)):
        assert seconds[slow] / seconds[fast] == pytest.approx(ratio * (2 if fast == "fp8" else 1), rel=0.05)
    a100 = bare_cluster("dgx-a100")
    with pytest.raises(CostError, match="has no rate for float8e4m3fn"):
        for op in all_ops(joint):
            CostModel(a100).seconds(signature_of(op), a100.devices[:1])


def test_tf32_reads_ten_bits():
    x = np.array([[1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11]], np.float32)
    (made,) = compute("MatMul", Attributes({"rate": "tfloat32"}), None, [x, np.eye(3, dtype=np.float32)], 1)
    np.testing.assert_array_equal(made, [[1 + 2**-10, 1, 1 + 2**-9]])


def test_of_uniform_policies_no_value_is_cast():
    for policy, dtype in (("fp32", Float32()), ("bf16", BFloat16())):
        joint = joint_of("gpt", policy)
        assert not [op for op in all_ops(joint) if op.op_type in ("Cast", "GradientCast")]
        floating = [v for v in values(joint) if v.type.dtype.is_floating]
        assert {v.type.dtype for v in floating if not v.name.endswith("_lse")} == {dtype}


def test_a_note_says_the_policy():
    assert any("master f32, gradients summed in f32" in note for note in joint_of("gpt", "mixed").notes)


def test_a_policy_of_ones_own_comes_from_a_file(tmp_path):
    """Megatron's precision-aware optimizer: bf16 gradients, fp16 master, bf16 moments."""
    path = tmp_path / "aware.toml"
    path.write_text('base = "mixed_bf16_grads"\nmaster = "float16"\nstates = ["bf16", "bf16"]\n')
    policy = precision_named(str(path))
    wanted = replace(POLICIES["mixed_bf16_grads"], name="aware", master=Float16(), states=(BFloat16(),) * 2)
    assert policy == wanted
    joint = differentiate(small_gpt(), Adam(), precision=policy)
    held = sum(v.type.nbytes for v in joint.inputs if v.role in (Role.PARAMETER, Role.STATE))
    assert held == 8 * sum(op.inputs[0].type.size for op in updates(joint))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "none"', "base 'none' is not one of fp32"),
        ('masters = "f32"', "'masters' is not a field"),
        ('master = "f31"', "'f31' is not one of"),
        ('used = "float64"', "used cannot be float64; choose one of float16"),
        ("states = []", "states lists no type"),
        ("states = [3]", "states cannot be"),
        ("loss_scale = -1", "must be finite and over 0"),
        ('product_rate = "fast"', "product_rate cannot be 'fast'"),
        ('wide_ops = ["Softmax", "Sofmax"]', "wide_ops: there is no op Sofmax; did you mean Softmax"),
        ('linear = "float16"', "linear cannot be float16"),
        ("= 3", "is not a TOML file"),
    ],
)
def test_a_file_that_is_no_policy_is_refused_by_field(tmp_path, text, said):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(said)):
        precision_named(str(path))


def test_a_policy_that_is_not_there_is_refused():
    for name, said in (
        ("fp31", "not the path of a .toml file, nor one of fp32"),
        ("nowhere.toml", "cannot be read"),
    ):
        with pytest.raises(PlanError, match=said):
            precision_named(name)
