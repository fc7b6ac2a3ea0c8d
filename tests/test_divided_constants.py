"""Constants as large as the batch, or as what tp divides: every plan computes what one device computes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from expert_models import EVEN, MIXTRAL
from test_memory_program import assert_same_memory
from test_parallel_equivalence import assert_plan, case_of, text
from training_models import F64, VOCAB, Maker, attention, computed_over_ranks, mesh_of, topology_of

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulator
from distsim.ir import Function, Int64, Literal, Role, Tensor, Value, all_ops
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import Positions
from distsim.ops import operator
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate, shard

BATCH, SEQ, HIDDEN = 8, 4, 8
PLANS = [
    Plan(2, 1, 1, 1),
    Plan(1, 1, 1, 4),
    Plan(2, 1, 1, 2),
    Plan(1, 1, 2, 2),
    Plan(1, 2, 1, 2),
    Plan(2, 2, 2, 2, "gpipe"),
]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


def mean_loss(kind: str, scale: bool, square: bool) -> Function:
    make = Maker(f"{kind} of {'squares' if square else 'values'}")
    y = make("MatMul", make.data("x", BATCH, 4), make.parameter("w", 4, 4))
    y = make("Mul", y, B=0.1) if scale else y
    y = make("Mul", y, y) if square else y
    return make.end(make(kind, y, axes=(0, 1), keepdims=0))


class Net(Maker):
    """Two layers of [batch, seq, hidden], between which a test puts something, and a loss."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.x = self.data("x", BATCH, SEQ, HIDDEN)
        self.y = self("Relu", self.linear(self.x, "in", HIDDEN, HIDDEN))

    def constant(self, array: np.ndarray) -> Value:
        return self("Constant", value=Literal(array))

    def done(self, y: Value) -> Function:
        y = self.linear(y, "out", HIDDEN, HIDDEN)
        return self.end(self("Loss", y, self.data("z", BATCH, SEQ, HIDDEN), N=BATCH))


def positions() -> Function:
    """Position ids, the same for every sample, made of a range."""
    net = Net("positions")
    ids = net("Expand", net("Unsqueeze", net.constant(np.arange(SEQ)), axes=(0,)), shape=(BATCH, SEQ))
    table = net("Gather", net.parameter("wpe", SEQ, HIDDEN), ids, axis=0)
    return net.done(net("Add", net.y, table))


def positions_of_samples() -> Function:
    """Position ids that differ from sample to sample, counted through the batch."""
    net = Net("positions of samples")
    count = net("Reshape", net.constant(np.arange(BATCH * SEQ)), shape=(BATCH, SEQ))
    ids = net("Mod", count, B=VOCAB)
    return net.done(net("Add", net.y, net("Gather", net.parameter("wpe", VOCAB, HIDDEN), ids, axis=0)))


def causal_mask() -> Function:
    """A triangle, repeated for every sample, put into the scores of an attention."""
    net = Net("causal mask")
    scores = net("MatMul", net.y, net("Transpose", net.y, perm=(0, 2, 1)))
    seen = net("Trilu", net("ConstantOfShape", input=(SEQ, SEQ), value=Literal(np.ones(1))), upper=0)
    seen = net("Expand", net("Cast", seen, to=9), shape=(BATCH, SEQ, SEQ))
    scores = net("Where", seen, scores, Y=Literal(np.array(-1e4)))
    return net.done(net("MatMul", net("Softmax", scores, axis=-1), net.y))


def heads_and_bias() -> Function:
    """A bias of attention for every sample and head: tp divides the heads, the batch the samples."""
    net = Net("heads and bias")
    query, key, value = (net.linear(net.y, name, HIDDEN, HIDDEN) for name in ("q", "k", "v"))
    bias = net("Transpose", net.constant(numbers(BATCH, SEQ, 4, 2)), perm=(0, 2, 1, 3))
    bias = net("Reshape", bias, shape=(BATCH, SEQ, HIDDEN))
    mixed = attention(net, net("Add", query, bias), key, value, 4)
    return net.done(net.linear(mixed, "proj", HIDDEN, HIDDEN))


def dropped() -> Function:
    """A mask that differs from sample to sample, an attribute."""
    net = Net("dropped")
    return net.done(net("Mul", net.y, B=Literal((numbers(BATCH, SEQ, HIDDEN) > 0) * 2.0)))


def chosen() -> Function:
    """A condition that differs from sample to sample, and what is taken elsewhere."""
    net = Net("chosen")
    condition = Literal(numbers(BATCH, 1, 1) > 0)
    return net.done(net("Where", net.y, condition=condition, Y=Literal(numbers(SEQ, HIDDEN))))


def targets_of_ones() -> Function:
    net = Net("targets of ones")
    target = net("ConstantOfShape", input=(BATCH, SEQ, HIDDEN), value=Literal(np.ones(1)))
    return net.end(net("Loss", net.y, net("Add", target, B=1.0), N=BATCH))


def constant_labels() -> Function:
    net = Net("constant labels")
    labels = net.constant(np.random.default_rng(0).integers(0, HIDDEN, (BATCH, SEQ)))
    return net.end(net("CrossEntropyLoss", net.y, labels, N=BATCH))


def batch_in_the_middle() -> Function:
    """The constant and the sum have the batch in dimension 1."""
    net = Net("batch in the middle")
    y = net("Transpose", net.y, perm=(1, 0, 2))
    y = net("Add", net("Mul", y, net.constant(numbers(SEQ, BATCH, 1))), B=Literal(numbers(BATCH, 1)))
    return net.done(net("Transpose", y, perm=(1, 0, 2)))


def summed_along() -> Function:
    """A cumulative sum along the batch of a constant mixes samples of the constant only."""
    net = Net("summed along")
    total = net("CumSum", net.constant(numbers(BATCH, HIDDEN)), axis=Literal(np.array(0)))
    return net.done(net("Add", net.y, net("Unsqueeze", net("Exp", net("Neg", total)), axes=(1,))))


def in_layers() -> Function:
    """Two calls of a layer that has a mask for every sample in it."""
    layer = Maker("layer")
    x = layer.data("x", BATCH, SEQ, HIDDEN)
    y = layer("Mul", layer.linear(x, "fc", HIDDEN, HIDDEN), B=Literal(numbers(BATCH, 1, HIDDEN)))
    layer.set_outputs([layer("Add", x, layer("Relu", y))])
    callee = layer.finalize()
    net = Net("in layers")
    return net.done(net.layer(callee, net.layer(callee, net.y, "h0"), "h1"))


def given_constant() -> Function:
    """A constant that the caller gives: too large to be in the function."""
    net = Net("given constant")
    mask = net.add_input_value("mask", Tensor(F64, (SEQ, BATCH, 1)), Role.CONSTANT)
    ids = net.add_input_value("ids", Tensor(Int64(), (BATCH, SEQ)), Role.CONSTANT)
    y = net("Add", net.y, net("Gather", net.parameter("wpe", VOCAB, HIDDEN), ids, axis=0))
    return net.done(net("Mul", y, net("Transpose", mask, perm=(1, 0, 2))))


def norm_of_channels(attributes: dict[str, np.ndarray]) -> Function:
    """A BatchNormalization of what a convolution makes; operands are arrays among the attributes."""
    make = Maker("norm of channels")
    x = make.data("x", BATCH, 4, 3, 3)
    y = make("Conv", x, make.parameter("w", 8, 4, 3, 3), pads=(1, 1, 1, 1))
    trained = [make.parameter(name, 8) for name in AFFINE if name not in attributes]
    y = make("BatchNormalization", y, *trained, **{k: Literal(v) for k, v in attributes.items()})
    y = make("Relu", y)
    y = make("Conv", y, make.parameter("v", 4, 8, 3, 3), B=Literal(numbers(4)))
    return make.end(make("Loss", y, make.data("z", BATCH, 4, 1, 1), N=BATCH))


STATISTICS = {"input_mean": numbers(8), "input_var": np.abs(numbers(8)) + 1}
AFFINE = {"scale": numbers(8), "B": numbers(8)}


def columns() -> Function:
    """Arrays of as many numbers as a layer has columns, which tp divides."""
    net = Net("columns")
    y = net("Mul", net.y, B=Literal(numbers(HIDDEN)))
    y = net("Pow", net("Abs", y), Y=Literal(np.abs(numbers(HIDDEN)) + 1))
    y = net("Where", y, condition=Literal(numbers(HIDDEN) > -0.5), Y=Literal(numbers(HIDDEN)))
    y = net("Add", y, net("Sub", net.y, A=Literal(numbers(HIDDEN))))
    return net.done(net("Div", y, B=Literal(np.abs(numbers(HIDDEN)) + 1)))


def products() -> Function:
    """Matrices and indices that are attributes; only half of what the indices give is read."""
    net = Net("products")
    y = net("MatMul", net.y, B=Literal(numbers(HIDDEN, HIDDEN)))
    flat = net("Reshape", y, shape=(BATCH * SEQ, HIDDEN))
    y = net("Gemm", flat, B=Literal(numbers(HIDDEN, HIDDEN)), C=Literal(numbers(HIDDEN)))
    y = net("Gather", y, indices=Literal(np.arange(HIDDEN)[::-1]), axis=1)
    y = net("PRelu", y, slope=Literal(numbers(HIDDEN)))
    return net.done(net("Reshape", y, shape=(BATCH, SEQ, HIDDEN)))


FUNCTIONS = {
    "statistics": lambda: norm_of_channels(STATISTICS | AFFINE),
    "statistics alone": lambda: norm_of_channels(STATISTICS),
    "mean": lambda: mean_loss("ReduceMean", False, False),
    "mean of scaled squares": lambda: mean_loss("ReduceMean", True, True),
    "sum": lambda: mean_loss("ReduceSum", False, False),
    "sum of scaled": lambda: mean_loss("ReduceSum", True, False),
    "sum of scaled squares": lambda: mean_loss("ReduceSum", True, True),
} | {
    made.__name__.replace("_", " "): made
    for made in (
        positions,
        positions_of_samples,
        causal_mask,
        heads_and_bias,
        dropped,
        chosen,
        targets_of_ones,
        constant_labels,
        batch_in_the_middle,
        summed_along,
        in_layers,
        given_constant,
        columns,
        products,
    )
}


@cache
def known(name: str):
    return case_of(differentiate(FUNCTIONS[name](), SGD(lr=0.1)))


@pytest.mark.parametrize("plan", PLANS, ids=text)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_plan_computes_the_same_step(name, plan):
    assert_plan(known(name), plan)


# --- what comes out, and what it costs ------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(1, 1, 1, 4), Plan(2, 1, 2, 2)], ids=text)
def test_an_output_with_the_batch_in_dimension_1_is_put_together_along_it(plan):
    net = Net("transposed")
    net.set_outputs([net("Transpose", net.linear(net.y, "out", HIDDEN, HIDDEN), perm=(1, 0, 2))])
    assert_plan(case_of(net.finalize()), plan)


def test_what_is_the_same_for_every_sample_is_made_in_parts_and_the_rest_comes_in_parts():
    local = shard(known("heads and bias").joint, mesh_of(dp=2), microbatches=2)
    assert [v.type.shape for v in local.sources[-len(local.made) :]] == [(BATCH, SEQ, 4, 2)]
    assert local.function.inputs[-1].type.shape == (BATCH // 4, SEQ, 4, 2)
    made = shard(known("causal mask").joint, mesh_of(dp=2), microbatches=2)
    assert not made.made
    sizes = {op.outputs[0].type.shape for op in made.function.ops if op.op_type == "Expand"}
    assert sizes == {(BATCH // 4, SEQ, SEQ)}


@pytest.mark.parametrize("name", ["columns", "statistics"])
def test_tp_takes_its_part_of_an_array_and_gathers_nothing(name):
    """A rank that had the whole array would have to gather the columns of what it is multiplied with."""
    local = shard(known(name).joint, mesh_of(tp=2))
    kinds = [op.op_type for op in all_ops(local.function) if operator(op.op_type).communication]
    assert "MPIAllgather" not in kinds and "LocalSlice" in {op.op_type for op in all_ops(local.function)}


@pytest.mark.parametrize("name", ["dropped", "in layers", "given constant"])
def test_both_engines_and_the_memory_written_out_agree_on_constants_in_parts(name):
    topology = topology_of(4)
    program = parallelize(known(name).joint, Plan(2, 1, 2, 4), topology)
    blocks, events = (
        Simulator(CostModel(topology), engine=engine).simulate(program) for engine in ("maxplus", "events")
    )
    assert blocks.step_time == pytest.approx(events.step_time, rel=1e-9)
    assert_same_memory(program)


@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_ranks_of_experts_that_divide_no_batch_do_not_divide_what_is_made_for_all(kind):
    """Positions [256, 1], the same along their last dimension, which no number of ranks divides."""
    experts = replace(MIXTRAL.experts, groups=8)
    sizes = replace(MIXTRAL, layers=1, experts=experts, positions=Positions(256))
    joint = differentiate(decoder(sizes, 1, 256, F64, EVEN), SGD())
    computed_over_ranks(joint, Plan.parse(f"cp=4,ep=4,cp_kind={kind}"))
