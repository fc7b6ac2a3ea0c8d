"""How 8-bit operands are scaled: by the passes before, by their largest element, by rows; experts too."""

from collections import Counter
from dataclasses import replace
from functools import cache
from weakref import ref

import numpy as np
import pytest
from precision_models import rounded, small_gpt
from topology_models import bare_cluster
from training_models import assemble, assert_all_readers_agree, random_inputs, topology_of

import distsim
from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.errors import PlanError, TypeRuleError
from distsim.executor import SequentialExecutor
from distsim.importer import load_model
from distsim.ir import Attributes, Float8E4M3FN, Float8E5M2, Float32, Tensor, all_ops, verify
from distsim.ir.rewrite import flatten
from distsim.models import mlp, moe
from distsim.ops import Signature, compute, operator, sharding_rule, signature_of, work
from distsim.ops.conversion import ONCE
from distsim.ops.float8 import ANEW
from distsim.ops.onnx_bridge import type_number
from distsim.plan import Plan
from distsim.plan_search.views.text import describe
from distsim.study.choices import Choices
from distsim.study.options import ModelOptions
from distsim.transforms import SGD, Adam, add_loss, differentiate, precision_named
from distsim.transforms.autodiff.precision import SCALINGS
from distsim.transforms.autodiff.set_precision import apply_precision
from distsim.transforms.kernels import KERNELS
from distsim.transforms.pipelining.float8 import _kept_up

E4M3, E5M2 = type_number(Float8E4M3FN()), type_number(Float8E5M2())


def small_moe():
    sizes = {"hidden": 16, "heads": 4, "kv_heads": 2, "seq": 6, "vocab": 16, "ffn": 8, "experts": 4}
    return moe(layers=2, batch=8, **sizes)


@cache
def trained(model, scaling):
    joint = differentiate(model(), SGD(lr=1.0), precision=precision_named(f"fp8:scaling={scaling}"))
    inputs = rounded(joint, [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(joint, 2)])
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


def program_of(joint, text):
    plan = Plan.parse(text)
    return parallelize(joint, plan, topology_of(plan.devices))


def reduced(function):
    """The ops that take a maximum over ranks, but for those of a loss of divided classes."""
    maker = {value: op.op_type for op in function.ops for value in op.outputs}
    found = [op for op in function.ops if op.attributes.get("reduce") == "max"]
    return [op for op in found if maker[op.inputs[0]] != "LargestLogit"]


# --- the ops ---------------------------------------------------------------------------------------------


def test_an_operand_takes_the_whole_range_of_its_type():
    """Whatever its size: the largest element of each sample is the largest number, and comes back."""
    x = np.array([[3e-5, -1e-5], [700.0, 50.0], [0.0, 0.0]], np.float32)
    (amax,) = compute("Float8Amax", Attributes({}), None, [x], 1)
    np.testing.assert_array_equal(amax, [[np.float32(3e-5)], [700], [0]])
    (whole,) = compute("Float8Amax", Attributes({"whole": 1}), None, [x], 1)
    np.testing.assert_array_equal(whole, [[700]])
    (cast,) = compute("Float8Cast", Attributes({"to": E4M3}), None, [x, amax], 1)
    assert np.abs(cast.astype(np.float32)).max(axis=1).tolist() == [448, 448, 0]
    eye = np.eye(2, dtype=np.float32)
    ones = np.ones((1, 1), np.float32)
    (unit,) = compute("Float8Cast", Attributes({"to": E4M3}), None, [eye, ones], 1)
    to = Attributes({"to": type_number(Float32())})
    (back,) = compute("Float8MatMul", to, None, [cast, unit, amax, ones], 1)
    np.testing.assert_allclose(back, x, rtol=2**-4)  # half of the last of three binary digits


def test_a_cast_of_delayed_scaling_also_makes_the_largest_element():
    x = np.array([[-600.0, 2.0]], np.float32)
    cast, amax = compute("Float8Cast", Attributes({"to": E5M2, "amax": 1, "delayed": 1}), None, [x], 2)
    assert (float(cast[0, 0]), amax.tolist()) == (-640, [600])
    (factor,) = compute("Float8Scales", Attributes({"to": E5M2}), None, [np.array([4.0, 0.0], np.float32)], 1)
    assert factor.tolist() == [57344 / 4, 1]


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1), (3, 1)])
def test_largest_elements_of_another_tensor_are_refused(shape):
    types = operator("Float8Cast").types
    assert types is not None
    with pytest.raises(TypeRuleError, match="are not the largest elements of an operand"):
        types(Attributes({"to": E4M3}), (Tensor(Float32(), (4, 8), None), Tensor(Float32(), shape, None)))


# --- the step --------------------------------------------------------------------------------------------

PLANS = [
    *("dp=2,microbatches=2", "dp=2,tp=2,pp=2,microbatches=2", "tp=2,sp=on", "dp=2,zero=3,microbatches=2"),
    *("pp=2,microbatches=4,schedule=zb_h1", "tp=2,sp=on,tp_overlap=split,remat=full"),
]
MIXTURES = ["dp=2,ep=2,tp=2,sp=on", "dp=2,ep=2,tp=2,sp=on,etp=1", "dp=2,pp=2,ep=2,microbatches=2,zero=1"]


LAID_OUT = [*[(small_gpt, text) for text in PLANS], *[(small_moe, text) for text in MIXTURES]]


@pytest.mark.parametrize(  # each layout with every other scaling
    ("model", "text", "scaling"),
    [(*each, scaling) for at, each in enumerate(LAID_OUT) for scaling in SCALINGS[at % 2 :: 2]],
)
def test_every_rank_computes_the_same_step(model, text, scaling):
    """To some units of the last place of bfloat16: ranks of tp have scales of their own columns."""
    joint, inputs, expected = trained(model, scaling)
    program = program_of(joint, text)
    made = assemble(program, SequentialExecutor().compute(program.to_function(), inputs))
    for placed, array in zip(made, expected, strict=True):
        own, whole = (np.asarray(each, np.float64) for each in (placed.array, array))
        assert np.abs(own - whole).max() <= 0.03 * np.abs(whole).max(), placed.name


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("model", [small_gpt, small_moe])
def test_gradients_are_those_of_16_bits_to_the_digits_that_8_have(model, scaling):
    joint = differentiate(model(), None, precision=precision_named(f"fp8:scaling={scaling}"))
    plain = differentiate(model(), None, precision=precision_named("mixed"))
    inputs = rounded(joint, [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(joint, 2)])
    own, whole = (
        np.concatenate(
            [np.ravel(each).astype(np.float64) for each in SequentialExecutor().compute(f, inputs)]
        )
        for f in (joint, plain)
    )
    assert np.linalg.norm(own - whole) <= 0.1 * np.linalg.norm(whole)


def test_of_delayed_scaling_each_pass_makes_factors_of_all_ranks_largest_elements():
    """Those of the casts of the undivided step, whatever part a rank has: one message a pass."""
    joint, inputs, _ = trained(small_gpt, "delayed")
    flat = flatten(joint)
    read = [op.inputs[0] for op in flat.ops if op.op_type == "Float8Cast" and not op.attributes.get(ONCE)]
    arrays = SequentialExecutor().compute(replace(flat, outputs=tuple(read)), inputs)
    largest = sorted(float(np.abs(np.asarray(array, np.float32)).max()) for array in arrays)
    for text in ("dp=2", "dp=2,remat=full", "dp=2,pp=2,microbatches=1"):
        function = flatten(program_of(joint, text).to_function())
        ends = [op for op in function.ops if op.op_type == "Float8Scales"]
        sent = reduced(function)
        assert len(ends) == len(sent) == 2 * Plan.parse(text).pp
        whole = replace(function, outputs=tuple([op.inputs[0] for op in ends]))
        made = SequentialExecutor().compute(whole, inputs)
        ranks = [[amaxes.tolist() for amaxes in each] for each in made]
        assert all(own == each[0] for each in ranks for own in each)
        assert sorted([amax for each in ranks for amax in each[0]]) == pytest.approx(largest)


def test_of_delayed_scaling_the_message_goes_over_all_ranks_of_a_stage_in_every_pass():
    joint, _, _ = trained(small_gpt, "delayed")
    for text, ranks in (("dp=2,tp=2,cp=1,pp=2,microbatches=2", 4), ("tp=4", 4), ("pp=2,microbatches=2", 1)):
        plan = Plan.parse(text)
        function = flatten(program_of(joint, text).to_function())
        sent = reduced(function)
        assert len(sent) == (2 * plan.pp * plan.microbatches if ranks > 1 else 0)
        assert all(len(op.inputs[0].type.device.devices) == ranks for op in sent)
        assert sum(op.op_type == "Float8Scales" for op in function.ops) == 2 * plan.pp * plan.microbatches


def test_of_tensorwise_scaling_ranks_that_divide_rows_agree_and_others_do_not_ask():
    joint, _, _ = trained(small_gpt, "tensorwise")
    texts = ("tp=2", "tp=2,sp=on", "dp=4,microbatches=2")
    sent = {text: len(reduced(flatten(program_of(joint, text).to_function()))) for text in texts}
    # What q, k and v, and the up projection, read has divided rows; so has the gradient of the other two.
    assert sent == {"tp=2": 0, "tp=2,sp=on": 4 * 2, "dp=4,microbatches=2": 0}


def test_what_a_scaling_costs():
    """Tensorwise reads each operand once more; the others do not; all multiply as fast."""
    cluster = bare_cluster("dgx-h100")
    model, device = CostModel(cluster), cluster.devices[:1]
    seconds, kinds = {}, {}
    for scaling in SCALINGS:
        policy = precision_named(f"fp8:scaling={scaling}")
        joint = differentiate(mlp(layers=2, width=4096, batch=4096), SGD(), precision=policy)
        verify(joint)
        ops = [op for op in all_ops(joint) if op.op_type.startswith("Float8")]
        seconds[scaling] = sum(model.seconds(signature_of(op), device) for op in ops)
        kinds[scaling] = Counter(op.op_type for op in ops)
    assert kinds["delayed"] == kinds["rowwise"] == kinds["blockwise"]
    assert seconds["delayed"] == seconds["rowwise"]
    casts = kinds["tensorwise"]["Float8Cast"]
    assert kinds["tensorwise"] == kinds["delayed"] | {"Float8Amax": casts}
    gpu = cluster.devices[0]
    once = 2 * 4096**2 / (gpu.dram_bandwidth * gpu.bytes_efficiency) + gpu.kernel_launch_overhead
    assert seconds["tensorwise"] - seconds["delayed"] == pytest.approx(casts * once, rel=0.01)
    both = 4096**2 / (gpu.dram_bandwidth * gpu.bytes_efficiency)  # a kernel writes each operand twice
    assert seconds["blockwise"] - seconds["rowwise"] == pytest.approx(casts * both, rel=0.01)


@pytest.mark.parametrize(
    ("scaling", "kernels", "read"),
    [
        ("rowwise", "eager", 4),
        ("rowwise", "compiled", 4),
        ("tensorwise", "eager", 1),
        ("delayed", "eager", 0),
        ("blockwise", "eager", 0),
        ("tensorwise", "fused", 0),  # Transformer Engine's casts write both ways
    ],
)
def test_gradients_read_operands_turned_each_once(scaling, kernels, read):
    """Queries, keys and values multiply one input; each has a gradient of its own. Weights are cast along
    their columns too where they have scales of rows."""
    joint, _, _ = trained(small_gpt, scaling)
    program = parallelize(joint, Plan.parse("dp=1"), topology_of(1), kernels=KERNELS[kernels])
    ops = {id(op): op for op in all_ops(program.to_function())}.values()  # those of two layers are the same
    turns = [op for op in ops if op.op_type == "Float8Turn"]
    products = [op for op in ops if op.op_type == "Float8MatMulGradB"]
    wanted = {value for op in products for value in op.inputs[:2]}
    if scaling == "rowwise":
        wanted |= {op.inputs[0] for op in ops if op.op_type == "Float8MatMulGradA"}
    assert all(op.attributes.get(ANEW, 0) == (kernels == "compiled") for op in turns)
    assert {op.outputs[0] for op in turns} == (wanted if read else set())
    assert len({op.inputs[0] for op in turns}) == len(turns)
    for op in turns:
        demand, size = work(signature_of(op)), op.inputs[0].type.size
        assert (demand.bytes_read, demand.bytes_written) == (read * size, size)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bucket", ["fsdp2", "auto"])
def test_a_unit_gathers_what_it_casts_and_what_it_does_not_together(scaling, bucket):
    """Scales of norms stay in 16 bits, and are gathered with the weights of their layer, no earlier."""
    plan = Plan.parse(f"dp=2,tp=1,pp=1,zero=3,bucket={bucket}")
    found = []
    for precision in ("fsdp2", f"fsdp2:linear=float8e4m3fn,scaling={scaling}"):
        joint = differentiate(small_gpt(), SGD(), precision=precision_named(precision))
        program = parallelize(joint, plan, topology_of(2), kernels=KERNELS["compiled"])
        gathers = [op for op in all_ops(program.to_function()) if op.op_type == "MPIAllgather"]
        found.append([sorted(value.type.size for value in op.inputs) for op in gathers])
    assert found[0] == found[1] and max(map(len, found[0])) > 5


def test_experts_multiply_in_8_bits():
    joint, _, _ = trained(small_moe, "delayed")
    kinds = Counter(op.op_type for op in all_ops(joint) if "Grouped" in op.op_type)
    grouped = 3 * 2  # gate, up and down of two layers
    assert kinds == {f"Float8GroupedMatMul{name}": grouped for name in ("", "GradA", "GradB")}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_engines_and_memory_agree(scaling):
    joint = differentiate(small_gpt(), Adam(), precision=precision_named(f"fp8:scaling={scaling}"))
    assert_all_readers_agree(program_of(joint, "dp=2,tp=2,pp=2,microbatches=4,schedule=zb_h1"))


def test_a_policy_of_float32_may_have_linear_layers_in_8_bits():
    joint = differentiate(small_gpt(), SGD(), precision=precision_named("fp32:linear=float8e4m3fn"))
    assert sum(op.op_type == "Float8MatMul" for op in all_ops(joint)) > 4


@pytest.mark.parametrize(
    ("stack", "asked", "scaling", "experts"),
    [
        ("megatron", "fp8", "delayed", True),
        ("megatron", "mixed:linear=float8e4m3fn", "delayed", True),
        ("torchtitan", "fsdp2:linear=float8e4m3fn", "tensorwise", False),
        ("torchtitan", "fsdp2:linear=float8e4m3fn,scaling=rowwise,linear_ops=GroupedMatMul", "rowwise", True),
        ("torchtitan", "fp8", "delayed", True),  # a policy that says it
    ],
)
def test_what_a_policy_leaves_open_is_as_the_stack_does_it(stack, asked, scaling, experts):
    policy = Choices.of(ModelOptions(model="gpt2", stack=stack, precision=asked)).precision
    assert policy is not None
    assert (policy.scaling, "GroupedMatMul" in policy.linear_ops) == (scaling, experts)


def test_an_unknown_scaling_is_refused():
    with pytest.raises(PlanError, match="scaling cannot be 'tensorwide'.*did you mean tensorwise"):
        precision_named("fp8:scaling=tensorwide")


def test_a_router_multiplies_in_the_type_of_the_rest():
    step = apply_precision(add_loss(load_model("mixtral-8x7b:layers=1,seq=16", 2)), precision_named("fp8"))
    products = {op.outputs[0].name: op.op_type for op in all_ops(step) if "MatMul" in op.op_type}
    assert {name for name, kind in products.items() if kind == "MatMul"} == {"router", "logits"}
    assert products["q"] == "Float8MatMul" and products["experts.up"] == "Float8GroupedMatMul"


def test_rows_that_keep_their_own_largest_element_are_not_reduced():
    """Of samples tp ranks reduce what rows have together; of a matrix each row has a number of its own."""

    def reduced(shape, made):
        given = Signature("Float8Amax", Attributes(), (Tensor(Float32(), shape),), (Tensor(Float32(), made),))
        rule = sharding_rule(given)
        return [dim for dim in rule.inputs[0] if dim in rule.finish]

    assert len(reduced((8, 4), (8, 1))) == 1  # columns, each part of which has its own
    assert len(reduced((2, 8, 4), (2, 1, 1))) == 2


def test_functions_that_keep_up_no_scale_are_not_kept(collect):
    function = mlp(layers=1, width=4, batch=2)
    assert _kept_up(function, Float8E4M3FN()) is None
    gone = ref(function)
    del function
    collect()
    assert gone() is None


def test_utilisation_is_of_the_type_in_which_most_of_the_model_is():
    """Its head is in 16 bits, and larger than a layer, but not than all of them."""
    model, options = (
        "gpt:layers=8,hidden=64,heads=4,seq=32,vocab=1024",
        {"precision": "fp8"},
    )
    found = distsim.search(model, "dgx-h100", "dp=8,zero=1,remat=none", 16, **options)
    alone = distsim.simulate(model, "dgx-h100", found.best.text, 16, **options)
    assert (alone.peak_rate.dtype, alone.mfu) == ("float8e4m3fn", found.mfu)
    assert "\nMFU is of 1979 TFLOP/s a device (float8e4m3fn)\n" in describe(found)
    others = [
        distsim.simulate(model, "dgx-h100", plan, 16, **options) for plan in ("pp=8", "dp=8,remat=full")
    ]
    assert {other.peak_rate for other in others} == {alone.peak_rate}
