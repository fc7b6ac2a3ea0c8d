"""Kernels: which ops one launch runs; fused, a step computes, costs and holds what it should."""

from functools import cache
from random import Random

import pytest
from decoder_models import small
from training_models import assert_same_step, mesh_of, random_inputs, small_gpt, small_llama, tied

from distsim.compose import build_program, parallelize
from distsim.cost import CostModel
from distsim.errors import PlanError
from distsim.hardware import load_cluster
from distsim.interpret import SequentialExecutor, count_flops
from distsim.ir import Float, Float16, FunctionMaker, Role, Tensor, all_ops, callees, verify
from distsim.models import gpt, llama
from distsim.ops import op_label, signature_of, work
from distsim.plan import Plan
from distsim.simulation import Simulator
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels import KERNELS, Kernels, fuse, kernels_named
from distsim.transforms.kernels.attention import set_attention
from distsim.transforms.kernels.losses import losses_apart

MODELS = {"gpt": small_gpt, "llama": small_llama, "tied": tied}


@cache
def known(model):
    joint = differentiate(MODELS[model](), Adam() if model == "gpt" else SGD())
    inputs = random_inputs(joint)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


@cache
def of_whole_blocks(model):
    """A model whose scores, of 8 matrices and 32 keys, Megatron-LM's kernel of a softmax takes."""
    half = Float16()
    if model == "llama":
        made = llama(1, 16, 4, 2, 24, 32, 2, 32, dtype=half)
    else:
        made = gpt(1, 16, 2, 32, 4, 32, dtype=half)
    return differentiate(made, SGD())


def kernels_of(model, name, layer):
    function = fuse(of_whole_blocks(model), KERNELS[name]).function
    return [
        label
        for callee in callees(function)
        if callee.name == layer
        for op in callee.ops
        if "+" in (label := op_label(op))
    ]


def test_eager_mode_adds_a_bias_in_the_kernel_of_its_product():
    assert kernels_of("gpt", "eager", "layer") == ["MatMul+Add"] * 6
    assert kernels_of("gpt", "eager", "layer_backward") == []


def test_megatrons_fusions():
    """bias + GELU, bias + residual, scale + mask + softmax; a bias that none takes is the product's.

    Queries, keys and values are one product."""
    found = kernels_of("gpt", "fused", "layer")
    assert found == ["MatMul+Add", "Mul+Add+Softmax", "Add+Add", "Add+Gelu", "Add+Add"]
    rotary = "Split+Neg+Concat+Mul+Mul+Add"
    llama = kernels_of("llama", "fused", "layer")
    assert llama == [rotary] * 2 + ["Mul+Add+Softmax", "Swish+Mul"]  # of query and of key


@pytest.mark.parametrize("policy", ["eager", "fused", "compiled"])
@pytest.mark.parametrize("bias_first", [False, True])
def test_a_bias_is_added_by_the_kernel_of_its_product_on_either_side(policy, bias_first):
    maker = FunctionMaker("linear")
    x = maker.add_input_value("x", Tensor(Float(), (4, 8)))
    w = maker.add_input_value("w", Tensor(Float(), (8, 8)))
    b = maker.add_input_value("b", Tensor(Float(), (8,)))
    pair = [maker.add_op("MatMul", inputs=[x, w]), b]
    maker.add_op("Add", inputs=pair[::-1] if bias_first else pair)
    (op,) = fuse(maker.finalize(), KERNELS[policy]).function.ops
    assert op_label(op) == "MatMul+Add"


def test_a_vector_that_is_a_product_is_no_bias_of_it():
    maker = FunctionMaker("vector")
    x = maker.add_input_value("x", Tensor(Float(), (4, 8)))
    v = maker.add_input_value("v", Tensor(Float(), (8,)))
    w = maker.add_input_value("w", Tensor(Float(), (8, 8)))
    maker.add_op("Add", inputs=[x, maker.add_op("MatMul", inputs=[v, w])])
    assert len(fuse(maker.finalize(), KERNELS["eager"]).function.ops) == 2


def test_policies_of_one_name_are_told_apart():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (4, 8)))
    maker.add_op("Tanh", inputs=[maker.add_op("Neg", inputs=[x])])
    function = maker.finalize()
    for joins in (False, True, False):
        policy = Kernels("mine", lambda first, second, joins=joins: joins)
        assert len(fuse(function, policy).function.ops) == (1 if joins else 2)


def test_a_compiler_joins_chains_with_reductions_along_rows():
    assert kernels_of("gpt", "compiled", "layer") == [
        *["MatMul+Add"] * 3,
        *("Mul+Add+Softmax", "Add+Add+LayerNormalization", "Add+Gelu", "Add+Add"),
    ]
    assert "SoftmaxGrad+Mul" in kernels_of("gpt", "compiled", "layer_backward")


@pytest.mark.parametrize("name", ["eager", "fused", "compiled"])
def test_a_transpose_is_a_view_where_strides_are_read(name):
    """Of heads for attention and element by element; what gives them another shape copies, and a product of
    many matrices but for rows and columns, or where sequences come first, as in Megatron-LM."""
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (2, 8, 4, 6)))
    w = maker.add_input_value("w", Tensor(Float(), (5, 32)))

    def turned(value, *perm):
        return maker.add_op("Transpose", inputs=[value], attributes={"perm": perm})

    scaled = maker.add_op("Tanh", inputs=[turned(x, 0, 2, 1, 3)])
    maker.add_op("MatMul", inputs=[scaled, turned(scaled, 0, 1, 3, 2)])
    flat = maker.add_op("Reshape", inputs=[turned(scaled, 0, 2, 1, 3)], attributes={"shape": (12, 32)})
    maker.add_op("MatMul", inputs=[flat, turned(w, 1, 0)])
    maker.add_op("MatMul", inputs=[turned(x, 0, 2, 3, 1), turned(x, 0, 2, 1, 3)])
    function = maker.finalize()
    fused = fuse(function, KERNELS[name]).function
    verify(fused)
    kinds = [op.op_type for op in fused.ops if op.op_type.startswith("Transpose")]
    last = "TransposedView" if name == "fused" else "Transpose"
    assert kinds == ["TransposedView"] * 2 + ["Transpose"] + ["TransposedView"] + [last] * 2
    inputs = random_inputs(function)
    for one, other in zip(*(SequentialExecutor().compute(f, inputs) for f in (function, fused)), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("name", ["eager", "fused", "compiled"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_attention_makes_is_copied_nowhere(name, family):
    """Kernels write [batch, seq, heads, size]: outputs, and gradients through rotary embeddings, are read
    where they lie. Written out as products of many matrices, attention makes matrices of each head."""
    joint = differentiate(set_attention(small(family), "flash2"), SGD())
    fused = fuse(joint, KERNELS[name]).function
    verify(fused)
    assert not [op for op in all_ops(fused) if op.op_type == "Transpose"]
    inputs = random_inputs(joint)
    for one, other in zip(*(SequentialExecutor().compute(f, inputs) for f in (joint, fused)), strict=True):
        assert (one == other).all()
    written = fuse(differentiate(set_attention(small(family), "math"), SGD()), KERNELS[name]).function
    assert [op for op in all_ops(written) if op.op_type == "Transpose"]


@pytest.mark.parametrize(("reader", "kind"), [("MatMul", "Transpose"), ("Tanh", "TransposedView")])
def test_a_view_of_joined_dimensions_is_in_order_for_a_product(reader, kind):
    """[batch, heads, size, seq] as [batch, seq, heads x size] is a view, whose rows a product would join."""
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (2, 4, 6, 8)))
    turned = maker.add_op("Transpose", inputs=[x], attributes={"perm": (0, 3, 1, 2)})
    flat = maker.add_op("Reshape", inputs=[turned], attributes={"shape": (2, 8, 24)})
    w = [maker.add_input_value("w", Tensor(Float(), (24, 5)))] if reader == "MatMul" else []
    maker.add_op(reader, inputs=[flat, *w])
    assert fuse(maker.finalize(), KERNELS["eager"]).function.ops[0].op_type == kind


def test_a_transpose_of_attention_into_another_order_is_a_copy():
    maker = FunctionMaker("f")
    heads = [maker.add_input_value(n, Tensor(Float(), (2, 4, 8, 6))) for n in "qkv"]
    made = maker.add("Attention", heads)[0]
    for perm in ((0, 2, 1, 3), (2, 0, 1, 3)):
        turned = maker.add_op("Transpose", inputs=[made], attributes={"perm": perm})
        maker.add_op("Reshape", inputs=[turned], attributes={"shape": (16, 24)})
    kinds = [op.op_type for op in fuse(maker.finalize(), KERNELS["eager"]).function.ops]
    assert kinds == ["Attention", "TransposedView", "Reshape", "Transpose", "Reshape"]


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_eager_mode_takes_a_cross_entropy_apart(precision):
    """log_softmax saves its result, as large as the logits that a fused loss saves; in backward there is the
    gradient of nll_loss beside it and beside that of the logits: one tensor more."""
    batch, seq, vocab = 2, 16, 512
    model = gpt(1, 8, 2, seq, batch, vocab)
    joint = differentiate(model, SGD(), precision=precision_named(precision))
    topology = load_cluster("dgx-a100")
    uses = {}
    for name in ("ops", "eager", "fused"):
        program = parallelize(joint, Plan(), topology, kernels=KERNELS[name])
        uses[name] = program_memory(program).ranks[0]
    logits = batch * seq * vocab * (4 if precision == "mixed" else 2)
    assert uses["eager"].peak - uses["ops"].peak == pytest.approx(logits, rel=0.05)
    function = losses_apart(joint, KERNELS["eager"])
    labels = [op_label(op) for op in function.ops if "Log" in op.op_type]
    assert labels == ["LogSoftmax", "LogLikelihoodLoss", "LogLikelihoodLossGrad", "LogSoftmaxGrad"]
    assert losses_apart(function, KERNELS["eager"]) is function


def test_a_loss_whose_gradient_lies_elsewhere_is_taken_apart():
    """Classes that tp does not divide: forward has them whole, backward the sequence in parts; of the loss's
    second output, which eager mode does not make, nothing is moved there."""
    joint = differentiate(gpt(2, 512, 8, 64, 16, 100), SGD())
    plan, topology = Plan(dp=2, tp=8, sp="on"), load_cluster("dgx-a100:2")
    [stage] = parallelize(joint, plan, topology, kernels=KERNELS["eager"]).stages
    for block in (stage.forward, stage.backward):
        verify(block.function)
    kinds = [op.op_type for block in (stage.forward, stage.backward) for op in block.function.ops]
    assert {"LogSoftmax", "LogSoftmaxGrad"} <= set(kinds) and "CrossEntropyLoss" not in kinds


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_computes_a_cross_entropy_in_steps(tp):
    """Of the logits in 32 bits: the largest is read, and subtracted, exponentials are taken, summed, and
    divided by the sum; over ranks the first is an op of its own. Fused it is one kernel that reads them."""
    batch, seq, vocab = 2, 16, 512
    joint = differentiate(gpt(1, 8, 2, seq, batch, vocab), SGD(), precision=precision_named("mixed"))
    topology, logits = load_cluster("dgx-a100"), batch * seq * vocab * 4 // tp
    read: dict[str, list[tuple[float, float]]] = {}
    for name in ("fused", "fused_loss"):
        program = parallelize(joint, Plan(tp=tp), topology, kernels=KERNELS[name])
        ops = [op for stage in program.stages for op in all_ops(stage.forward.function)]
        found = [op for op in ops if op.op_type in ("CrossEntropyLoss", "SumOfExponentials", "Kernel")]
        found = [
            op for op in found if "CrossEntropyLoss" in op_label(op) or op.op_type == "SumOfExponentials"
        ]
        demands = [work(signature_of(op)) for op in found]
        read[name] = [(demand.bytes_read, demand.bytes_written) for demand in demands]
    (steps,), (whole,) = read.values()
    wanted = (5 - (tp > 1)) * logits, 3 * logits
    assert steps == pytest.approx(wanted, rel=0.01)
    assert whole == pytest.approx((logits, 0) if tp > 1 else (logits // 2, logits), rel=0.02, abs=400)


@pytest.mark.parametrize("kernels", ["fused", "eager_waiting"])
def test_a_cross_entropy_in_steps_computes_the_same(kernels):
    function = differentiate(gpt(1, 8, 2, 16, 2, 64), SGD())
    steps = losses_apart(function, KERNELS[kernels])
    assert [op.attributes["in_steps"] for op in steps.ops if op.op_type == "CrossEntropyLoss"] == [1]
    inputs = random_inputs(function)
    for one, other in zip(*(SequentialExecutor().compute(f, inputs) for f in (function, steps)), strict=True):
        assert (one == other).all()


def test_a_kernel_reads_and_writes_what_crosses_it_and_does_all_the_flops():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (64, 32)))
    w = maker.add_input_value("w", Tensor(Float(), (32, 16)))
    b = maker.add_input_value("b", Tensor(Float(), (16,)))
    product = maker.add_op("MatMul", inputs=[x, w])
    biased = maker.add_op("Add", inputs=[product, b])
    maker.add_op("Gelu", inputs=[biased])
    function = maker.finalize()
    alone = sum(work(signature_of(op)).flops for op in function.ops)
    fused = fuse(function, KERNELS["fused"]).function
    assert [op_label(op) for op in fused.ops] == ["MatMul", "Add+Gelu"]
    verify(fused)
    found = [work(signature_of(op)) for op in fused.ops]
    assert sum(each.flops for each in found) == alone
    # What the GELU alone reads is not written.
    assert (found[1].bytes_read, found[1].bytes_written) == (4 * (64 * 16 + 16), 4 * 64 * 16)
    assert found[0].matrix and not found[1].matrix


@pytest.mark.parametrize("seed", range(40))
def test_kernels_never_wait_for_each_other(seed):
    """Whatever pairs a policy joins, in whatever graph: verified, and the same numbers."""
    rng = Random(seed)
    maker = FunctionMaker("random")
    values = [maker.add_input_value(f"x{i}", Tensor(Float(), (3, 4))) for i in range(2)]
    for _ in range(25):
        pair = [rng.choice(values[-6:]) for _ in range(2)]
        kind = rng.choice(("Add", "Mul", "Tanh", "Neg", "Softmax"))
        values.append(maker.add_op(kind, inputs=pair[: 2 if kind in ("Add", "Mul") else 1]))
    maker.set_outputs(rng.sample(values[2:], 3) + values[-1:])
    function = maker.finalize()
    chosen: dict[tuple[object, object], bool] = {}

    def joins(first, second):
        return chosen.setdefault((first, second), rng.random() < 0.6)

    fused = fuse(function, Kernels(f"random {seed}", joins)).function
    verify(fused)
    assert len(fused.ops) < len(function.ops)
    inputs = random_inputs(function, seed)
    expected = SequentialExecutor().compute(function, inputs)
    for one, other in zip(SequentialExecutor().compute(fused, inputs), expected, strict=True):
        assert (one == other).all()


LAYOUTS = (
    *("dp=2,tp=2,pp=2,microbatches=2", "pp=2,microbatches=4,schedule=zb_h1", "tp=2,remat=full"),
    *("dp=2,zero=3,remat=matmuls", "pp=2,chunks=2,microbatches=2,schedule=interleaved,stages=even"),
)


@pytest.mark.parametrize("name", ["eager", "fused", "compiled"])
@pytest.mark.parametrize("model", MODELS)
def test_a_fused_step_computes_the_step(model, name):
    joint, inputs, expected = known(model)
    for text in LAYOUTS:
        plan = Plan.parse(text)
        if plan.chunks > 1 and model != "gpt":
            continue
        mesh = mesh_of(plan.dp, plan.tp, plan.pp)
        program = build_program(joint, mesh, plan, kernels=kernels_named(name))
        assert_same_step(joint, program, inputs, expected)


def test_engines_and_memory_agree_and_fewer_kernels_take_less():
    joint = known("gpt")[0]
    topology = load_cluster("dgx-a100")
    plan = Plan.parse("dp=2,pp=2,microbatches=2")
    times, flops, peaks = {}, {}, {}
    for name, kernels in KERNELS.items():
        program = parallelize(joint, plan, topology, kernels=kernels)
        cost = CostModel(topology)
        simulation = Simulator(cost).simulate(program)
        assert Simulator(cost, engine="events").simulate(program).step_time == simulation.step_time
        written = peak_memory(program.to_function(steady=True))
        assert program_memory(program).peak_of_devices() == {d: use.peak for d, use in written.items()}
        times[name], flops[name] = simulation.step_time, simulation.flops
        peaks[name] = max(use.peak for use in written.values())
    assert times["ops"] > times["eager"] > max(times["fused"], times["compiled"])
    assert flops["ops"] >= count_flops(joint)
    assert flops["eager"] < flops["ops"], "the exponentials of a loss are not made of its logits again"
    assert flops["compiled"] > flops["ops"], "the bias before a GELU is added twice"
    additions = 2 * 2 * (8 * 4 * 8)  # of each layer two, of a gradient for each token's numbers
    # Of each gradient on both replicas: added onto zeros, two for its square, and divided.
    passes = 2 * 4 * sum([value.type.size for value in joint.inputs if value.role is Role.PARAMETER])
    assert flops["compiled"] - flops["fused"] == additions - passes, "one product adds as it multiplies"
    assert peaks["compiled"] <= peaks["ops"]
    assert peaks["fused_waiting"] < peaks["fused_2022"], "what a product adds is not there by itself"


def test_unknown_kernels_are_refused():
    with pytest.raises(PlanError, match="kernels='inductor' is unknown; choose one of ops, eager, fused"):
        kernels_named("inductor")


@pytest.mark.parametrize("name", ["eager", "fused", "fused_2021", "fused_deepspeed", "eager_waiting"])
@pytest.mark.parametrize(
    ("model", "op_type"), [("gpt", "LayerNormalizationGrad"), ("llama", "RMSNormalizationGrad")]
)
def test_torch_and_megatron_of_2021_read_gradients_of_norms_twice(name, model, op_type):
    """X and dy by the kernel of the input, and by that of scale and bias; it makes two or three results."""
    function = fuse(known(model)[0], KERNELS[name]).function
    ops = [op for each in callees(function) for op in each.ops if op.op_type == op_type]
    assert ops
    for op in ops:
        x, scale, dy = (value.type.nbytes for value in op.inputs)
        assert x == dy
        times = 2 if name in ("eager", "fused_2021", "fused_deepspeed") else 1
        assert work(signature_of(op)).bytes_read == times * 2 * x + scale
        assert work(signature_of(op)).bytes_written == x + (len(op.outputs) - 1) * scale


def test_torch_of_2021_adds_biases_of_linear_layers_by_kernels_of_their_own():
    """Of queries, keys and values; those of the other products are of kernels that Megatron-LM fuses."""
    function = fuse(of_whole_blocks("gpt"), KERNELS["fused_2021"]).function
    labels = [op_label(op) for each in callees(function) if each.name == "layer" for op in each.ops]
    assert labels.count("Add") == 3 and labels.count("MatMul") == 4 + 2  # of weights; scores and their mix
    later = fuse(of_whole_blocks("gpt"), KERNELS["fused_deepspeed"]).function
    labels = [op_label(op) for each in callees(later) if each.name == "layer" for op in each.ops]
    assert labels.count("Add") == 0 and labels.count("MatMul+Add") == 1
