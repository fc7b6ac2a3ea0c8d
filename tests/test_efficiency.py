"""What share of a peak kernels reach, by kind and shape: closed forms, and kernels that others measured."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_models import small_gpt

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.cost.efficiency import element_type, kind_of_work
from distsim.errors import SimulationError, TypeRuleError
from distsim.hardware import load_cluster
from distsim.ir import (
    Attributes,
    BFloat16,
    Device,
    Float8E4M3FN,
    Float32,
    FunctionMaker,
    Int64,
    Tensor,
    Topology,
)
from distsim.ir.kernel_rates import KINDS_OF_WORK, KernelRates
from distsim.ops import Signature, types, work
from distsim.plan import Plan
from distsim.simulation import Simulator
from distsim.simulation.explain.interval import BETWEEN, SPREADS, clash, correction, interval_of
from distsim.transforms import Adam, differentiate

SHARES = KernelRates(tuple([(kind, 0.5) for kind in KINDS_OF_WORK]), processors=108)
GPU = Device(0, "gpu", 1e13, 1e15, 0.0, peaks=(("bfloat16", 312e12),), rates=SHARES)
BF16 = BFloat16()


def signature(op_type: str, *shapes: tuple[int, ...], **attributes) -> Signature:
    given = tuple([Tensor(BF16, shape) for shape in shapes])
    found = Attributes(attributes)
    return Signature(op_type, found, given, tuple(types(op_type, found, given, None)))


def grouped(groups: int, rows: int, n: int, k: int) -> Signature:
    """A product of so many rows a group by a matrix [k, n] for each."""
    given = Tensor(BF16, (groups * rows, k)), Tensor(BF16, (groups, k, n)), Tensor(Int64(), (groups,))
    return Signature(
        "GroupedMatMul",
        Attributes(),
        given,
        tuple(types("GroupedMatMul", Attributes(), given, None)),
    )


def seconds(device: Device, which: Signature) -> float:
    return CostModel(Topology.hierarchical(device, 1, [])).seconds(which, (device,))


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        (signature("MatMul", (4, 128, 256), (256, 512)), "linear"),
        (signature("MatMulGradB", (4, 128, 256), (4, 128, 512), shape=(256, 512)), "linear"),
        (signature("MatMul", (4, 8, 128, 64), (4, 8, 64, 128)), "batched"),
        (signature("Attention", (1, 8, 256, 64), (1, 8, 256, 64), (1, 8, 256, 64)), "attention"),
        (grouped(8, 64, 32, 16), "grouped"),
        (signature("Relu", (4, 4)), "memory"),
        (signature("Conv", (4, 8, 16, 16), (8, 8, 3, 3)), "linear"),
        (signature("Conv", (4, 8, 16, 16), (8, 8, 3, 3), (8,)), "linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.op_type,
)
def test_kinds_of_work(which, kind):
    assert kind_of_work(which, work(which), element_type(which)) == kind


def test_a_bias_takes_nothing_of_a_convolution():
    shapes = (64, 512, 7, 7), (512, 512, 3, 3)
    plain, biased = (
        seconds(GPU, signature("Conv", *shapes, *bias, pads=(1,) * 4)) for bias in ((), ((512,),))
    )
    assert biased == pytest.approx(plain, rel=1e-3)


def test_tiles_are_those_of_types_of_16_bits():
    single = [Tensor(Float32(), shape) for shape in ((512, 256), (256, 512))]
    which = Signature("MatMul", Attributes(), tuple(single), (Tensor(Float32(), (512, 512)),))
    assert seconds(GPU, which) == pytest.approx(2 * 512 * 256 * 512 / (1e13 * 0.5))


def test_rows_by_index_are_a_kind_of_their_own():
    given = (Tensor(BF16, (100, 8)), Tensor(Int64(), (4,)))
    which = Signature("Gather", Attributes({"axis": 0}), given, (Tensor(BF16, (4, 8)),))
    assert kind_of_work(which, work(which), "bfloat16") == "embedding"


def test_a_product_fills_waves_of_tiles_and_needs_depth():
    """108 tiles of 128 x 256 are a wave; 109 take two."""
    depth, whole = 512, (128 * 108, 256)
    for rows, waves in ((128 * 108, 1), (128 * 109, 2)):
        filled = rows / 128 / (108 * waves)
        share = 0.5 * filled**0.72 * depth / (depth + 148)
        found = seconds(GPU, signature("MatMul", (rows, depth), (depth, 256)))
        assert found == pytest.approx(2 * rows * 256 * depth / (312e12 * share))
    shallow = seconds(GPU, signature("MatMul", (whole[0], 148), (148, 256)))
    assert shallow == pytest.approx(2 * whole[0] * 256 * 148 / (312e12 * 0.25))


@pytest.mark.parametrize(
    ("tiles", "depth", "parts"), [(54, 3072, 2), (18, 9216, 6), (54, 512, 1), (108, 9216, 1), (1, 10**6, 16)]
)
def test_the_depth_of_few_tiles_is_divided(tiles, depth, parts):
    """By up to sixteen, if that is faster; to add its part takes each as long as 150 more of depth."""
    found = seconds(GPU, signature("MatMul", (128 * tiles, depth), (depth, 256)))
    share = 0.5 * (tiles * parts / 108) ** 0.72 / (1 + (148 + 150 * (parts > 1)) * parts / depth)
    assert found == pytest.approx(2 * 128 * tiles * 256 * depth / (312e12 * share))


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 20000))
def test_one_group_is_a_product(m, n, k):
    plain = seconds(GPU, signature("MatMul", (m, k), (k, n)))
    assert seconds(GPU, grouped(1, m, n, k)) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("given_share", [True, False])
def test_tiles_of_all_groups_fill_waves_and_the_matrices_are_read_besides(given_share):
    """27 groups of 4 tiles are a wave of 108; without a share of their own they have that of others."""
    groups, rows, n, k = 27, 128, 1024, 512
    shares = tuple([(kind, share) for kind, share in SHARES.shares if given_share or kind != "grouped"])
    device = replace(GPU, rates=replace(SHARES, shares=shares), dram_bandwidth=1e14)
    product = 2 * groups * rows * n * k / (312e12 * 0.5 * k / (k + 148))
    read = groups * n * k * 2 / 1e14
    assert seconds(device, grouped(groups, rows, n, k)) == pytest.approx(product + read)
    more = seconds(device, grouped(groups + 1, rows, n, k))
    waves = 112 / 216
    one_more = 2 * (groups + 1) * rows * n * k / (312e12 * 0.5 * waves**0.72 * k / (k + 148))
    assert more == pytest.approx(one_more + read * (groups + 1) / groups)


@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 4))
def test_chunks_on_several_streams_fill_waves_as_the_whole_product(count, rows, columns):
    """Of whole tiles: all of them take what the product takes."""
    m, n, k = 128 * rows, 256 * columns, 5120  # too many parts of the depth would be no faster
    chunk = seconds(GPU, signature("MatMul", (m, k), (k, n), beside=count))
    assert count * chunk == pytest.approx(seconds(GPU, signature("MatMul", (m * count, k), (k, n))))


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 20000), st.integers(1, 2000))
def test_a_deeper_product_is_no_faster(m, n, k, more):
    shallow, deep = (seconds(GPU, signature("MatMul", (m, each), (each, n))) for each in (k, k + more))
    assert deep >= shallow * (1 - 1e-9)


def test_operands_of_8_bits_need_twice_the_depth():
    """As many bytes, hence."""
    peaks = (("float8e4m3fn", 312e12),)
    device = replace(GPU, peaks=peaks)
    narrow = Tensor(Float8E4M3FN(), (128 * 108, 296)), Tensor(Float8E4M3FN(), (296, 256))
    which = Signature("MatMul", Attributes(), narrow, (Tensor(BF16, (128 * 108, 256)),))
    assert seconds(device, which) == pytest.approx(2 * 128 * 108 * 256 * 296 / (312e12 * 0.25))


@pytest.mark.parametrize(("causal", "half"), [(0, 70.0), (1, 410.0)])
@pytest.mark.parametrize(("size", "share"), [(128, 0.5), (64, 0.4)])
@pytest.mark.parametrize("block", [128, 256])
def test_attention_by_sequence_and_head(causal, half, size, share, block):
    heads = ((1, 8, 1024, size),) * 3
    which = signature("Attention", *heads, is_causal=causal)
    flops, blocks = work(which).flops, 8 * 1024 / block
    filled = blocks / (blocks + 1.7 * 108)
    device = replace(GPU, rates=replace(SHARES, query_block=block))
    assert seconds(device, which) == pytest.approx(flops / (312e12 * share * 1024 / (1024 + half) * filled))


@pytest.mark.parametrize(("causal", "half"), [(0, 230.0), (1, 630.0)])
@pytest.mark.parametrize(("size", "share"), [(128, 0.5), (64, 0.43)])
@pytest.mark.parametrize("keys", [1024, 8192])
def test_attention_backward_by_blocks_of_keys(causal, half, size, share, keys):
    """Each of 128 keys of a head, whatever a block of the forward kernel takes."""
    forward = signature("Attention", (1, 8, 1024, size), *[(1, 8, keys, size)] * 2, is_causal=causal)
    saved = (*forward.inputs, *forward.outputs, forward.outputs[0])
    which = Signature("AttentionGrad", forward.attributes, saved, forward.inputs)
    blocks = 8 * keys / 128
    filled = keys / (keys + half) * blocks / (blocks + 0.66 * 108)
    device = replace(GPU, rates=replace(SHARES, query_block=256))
    assert seconds(device, which) == pytest.approx(work(which).flops / (312e12 * share * filled))


@pytest.mark.parametrize(
    ("kernel", "size", "filled"),
    [
        ("", 80, 96),
        ("flash2", 96, 96),
        ("triton", 96, 128),
        ("cudnn", 80, 128),
        ("cudnn", 192, 192),
        ("", 320, 320),
    ],
)
def test_heads_are_filled_up_to_a_size_that_the_kernel_is_made_for(kernel, size, filled):
    named = {"kernel": kernel} if kernel else {}
    shape, whole = (1, 8, 1024, size), (1, 8, 1024, filled)
    found, full = (seconds(GPU, signature("Attention", *[each] * 3, **named)) for each in (shape, whole))
    assert found == pytest.approx(full)


def test_attention_by_kernel():
    """As fast as the device says, never beyond its best; as usual where it says nothing."""
    heads = ((1, 8, 1024, 128),) * 3
    device = replace(GPU, rates=replace(SHARES, attentions=(("triton", 0.5), ("flash3", 100.0))))
    usual, triton, other, fast = (
        seconds(device, signature("Attention", *heads, **({"kernel": kernel} if kernel else {})))
        for kernel in ("", "triton", "cudnn", "flash3")
    )
    assert (triton, other) == pytest.approx((2 * usual, usual))
    assert fast == pytest.approx(work(signature("Attention", *heads)).flops / 312e12)
    with pytest.raises(TypeRuleError, match="kernel=fast must be one of flash1"):
        signature("Attention", *heads, kernel="fast")


FLASH2 = {
    # TFLOP/s forward and backward at head size 128, 16k tokens, 2048 / 128 heads, by (causal, sequence): the
    # figures of FlashAttention-2 (Dao 2023) for A100.
    **{(0, 512): 151, (0, 1024): 173, (0, 2048): 187, (0, 4096): 196},
    **{(1, 512): 99, (1, 1024): 133, (1, 2048): 155, (1, 4096): 173},
}


def test_attention_as_it_was_measured():
    """The kernel alone: the share that a step reaches of it is taken out."""
    device = load_cluster("dgx-a100", ["device.variation=0"]).devices[0]
    inside = dict(device.rates.shares)["attention"] / 0.874  # what calibrated_figures.py starts from
    known = device.rates.shares
    shares = tuple([(kind, share / inside) for kind, share in known if kind.startswith("attention")])
    alone = replace(device, rates=replace(device.rates, shares=shares), kernel_launch_overhead=0.0)
    for (causal, seq), measured in FLASH2.items():
        heads = ((16384 // seq, 16, seq, 128),) * 3
        forward = signature("Attention", *heads, is_causal=causal)
        saved = (*forward.inputs, *forward.outputs, forward.outputs[0])
        options = Attributes({"is_causal": causal})
        backward = Signature("AttentionGrad", options, saved, forward.inputs)
        flops = 3.5 * work(forward).flops
        found = flops / (seconds(alone, forward) + seconds(alone, backward)) / 1e12
        assert found == pytest.approx(measured, rel=0.06)


# --- intervals and breakdowns ------------------------------------------------------------------------------


def test_an_interval_has_the_spread_of_the_device_and_of_what_is_less_known():
    low, high, level = interval_of(2.0, 0.1, {"linear": 2.0})
    assert (low, high, level) == pytest.approx((2 / math.exp(0.16449), 2 * math.exp(0.16449), 0.9), rel=1e-4)
    wider = interval_of(2.0, 0.1, {"linear": 1.0, "send": 1.0}).high
    assert math.log(wider / 2) == pytest.approx(1.6449 * math.hypot(0.1, SPREADS["send"] / 2), rel=1e-4)
    known = {"linear": 0.04, "host": 1.0}
    wider = interval_of(2.0, 0.1, {"linear": 1.0, "send": 1.0}, uncertainties=known).high
    assert math.log(wider / 2) == pytest.approx(
        1.6449 * math.hypot(0.1, 0.04 / 2, SPREADS["send"] / 2), rel=1e-4
    )
    assert interval_of(2.0, 0.0, {"linear": 2.0}) is None
    with pytest.raises(SimulationError, match="level=1.5"):
        interval_of(2.0, 0.1, {}, 1.5)


def test_steps_of_ones_own_correct_and_narrow():
    """By so much as the variance between machines is of the mean of so many: none, one, many."""
    parts = {"linear": 1.0}
    plain = interval_of(1.0, 0.1, parts)
    one = interval_of(1.0, 0.1, parts, own=[1.2])
    many = interval_of(1.0, 0.1, parts, own=[1.2] * 10_000)
    centre = [math.sqrt(each.low * each.high) for each in (plain, one, many)]
    assert centre == pytest.approx([1.0, 1.2**BETWEEN, 1.2], rel=1e-3)
    variances = [
        (math.log(each.high / each.low) / math.log(plain.high / plain.low)) ** 2 for each in (one, many)
    ]
    assert variances == pytest.approx([1 - BETWEEN**2, 1 - BETWEEN], rel=1e-3)
    assert correction([1.2, 1.2, 50.0]) == correction([1.2] * 3)  # a run that went wrong
    assert not clash([1.2] * 10_000)
    with pytest.raises(SimulationError, match="0 is no ratio of measured to predicted"):
        correction([1.0, 0.0])
    with pytest.raises(SimulationError, match="'1.05' is no ratio"):
        correction(["1.05"])


def test_steps_of_ones_own_that_disagree_or_do_not_fit_widen():
    plain = interval_of(1.0, 0.08, {"linear": 1.0})
    low, high, _ = interval_of(1.0, 0.08, {"linear": 1.0}, own=[0.7, 1.3])  # with each other
    assert low < 0.7 < plain.low < plain.high < 1.3 < high
    assert not clash([0.7, 1.3])
    for runs in ([3.0], [3.0, 3.0], [3.0] * 5, [0.4, 0.42]):  # with the prediction
        low, high, _ = interval_of(1.0, 0.08, {"linear": 1.0}, own=runs)
        assert low < min(runs) and max(runs) < high
        assert clash(runs)
    usual = [interval_of(1.0, 0.08, {"linear": 1.0}, own=[1.1] * count) for count in (1, 2, 3, 5)]
    widths = [high / low for low, high, _ in (plain, *usual)]
    assert widths == sorted(widths, reverse=True)


def chain(topology: Topology):
    maker = FunctionMaker("chain")
    value = maker.add_input_value("x", Tensor(BF16, (256, 256), topology.devices[0]))
    (value,) = maker.add("MatMul", [value, value])
    maker.set_outputs(maker.add("Relu", [value]))
    return maker.finalize()


def test_a_breakdown_sums_to_the_step():
    topology = load_cluster("dgx-a100")
    function = chain(topology)
    simulation = Simulator(CostModel(topology, kernels="eager")).interpret(function, function.inputs)
    with pytest.raises(SimulationError, match="no phases"):
        simulation.breakdown("phase")
    for by in ("kind", "operator", "module", "axis"):
        assert sum(simulation.breakdown(by).values()) == pytest.approx(simulation.step_time)
    assert {"host", "memory"} >= set(simulation.breakdown("kind"))
    with pytest.raises(SimulationError, match="breakdown by 'colour'"):
        simulation.breakdown("colour")


def test_backward_and_updates_count_to_modules():
    """Backward multiplies twice where forward does once, and what runs again once more; none is "other"."""
    topology = load_cluster("dgx-a100")
    model = differentiate(small_gpt(layers=4, batch=16), Adam())
    ways = {}
    for remat in ("none", "full"):
        plan = Plan.parse(f"dp=2,tp=2,remat={remat}")
        simulation = Simulator(CostModel(topology)).simulate(parallelize(model, plan, topology))
        ways[remat] = simulation.breakdown("module")
        assert ways[remat].get("other", 0.0) < 0.02 * simulation.step_time
    forward = small_gpt(layers=4, batch=16)
    alone = Simulator(CostModel(topology)).simulate(parallelize(forward, Plan.parse("dp=2,tp=2"), topology))
    products = alone.breakdown("module")["mlp"]
    assert ways["none"]["mlp"] > 2 * products
    assert ways["full"]["mlp"] > ways["none"]["mlp"] + 0.8 * products
    assert ways["none"]["updates"] > 0


def test_hosts_of_compiled_kernels_and_of_nanotron_are_known_by_themselves():
    """A chain of two small kernels is bound by its host, whatever its way of launching."""
    own = {"compiled": 0.5, "eager_waiting": 0.3}
    wide = ["host=0.1", *[f"host_{way}={deviation}" for way, deviation in own.items()]]
    wide = [f"device.uncertainty.{each}" for each in wide]
    for kernels, deviation in {"eager": 0.1, "fused": 0.1, **own}.items():
        topology = load_cluster("dgx-a100", wide)
        function = chain(topology)
        simulation = Simulator(CostModel(topology, kernels=kernels)).interpret(function, function.inputs)
        parts, spread = simulation.breakdown("kind"), topology.devices[0].rates.spread
        known = dict(topology.devices[0].rates.uncertainties) | {"host": deviation}
        assert simulation.interval() == interval_of(
            simulation.step_period, spread, parts, uncertainties=known
        )
        assert parts["host"] > simulation.step_period / 2


def test_without_a_host_there_is_no_interval():
    topology = load_cluster("dgx-a100")
    function = chain(topology)
    assert Simulator(CostModel(topology)).interpret(function, function.inputs).interval() is None


def test_phases_of_a_step_of_pairs():
    topology = load_cluster("dgx-a100")
    plan = Plan.parse("pp=2,microbatches=8,schedule=dualpipe")
    program = parallelize(differentiate(small_gpt(layers=4, batch=16), Adam()), plan, topology)
    simulation = Simulator(CostModel(topology)).simulate(program)
    found = simulation.breakdown("phase")
    assert sum(found.values()) == pytest.approx(simulation.step_time)
    assert found["forward with backward"] > found["backward"] and "other" not in found
