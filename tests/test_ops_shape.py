"""Operators of shapes, movement, indexing, convolution: against onnx.reference and closed forms."""

import itertools
from pathlib import Path

import numpy as np
import op_samples_shape as samples
import pytest
from op_checks import check_all
from op_checks import divided as divided_factors

from distsim import ops
from distsim.errors import TypeRuleError
from distsim.ir import Device, FunctionMaker, Literal
from distsim.ir.type import Float, Float64, Tensor, from_numpy
from distsim.ir.value import Attributes
from distsim.ops import Signature, compute, operator, registered, sharding_rule, types, work
from distsim.ops.einsum import parse
from distsim.ops.onnx_bridge import onnx_compute
from distsim.ops.shape import reshape_labels
from distsim.ops.sharding_rule import Pieces
from distsim.ops.windows import windows

RANDOM = np.random.default_rng(7)


def numbers(*shape):
    return RANDOM.standard_normal(shape)


def signature(op_type, arrays, version=None, **attributes):
    inputs = tuple(Tensor(from_numpy(a.dtype), a.shape) for a in arrays)
    made = types(op_type, Attributes(attributes), inputs, version)
    return Signature(op_type, Attributes(attributes), inputs, made, version)


def agrees(op_type, arrays, version=None, **attributes):
    """Our NumPy meaning equals that of onnx.reference, and its shape the one that onnx infers."""
    sig = signature(op_type, arrays, version, **attributes)
    count = len(sig.outputs)
    ours = compute(op_type, sig.attributes, version, arrays, count)
    theirs = onnx_compute(op_type, sig.attributes, version, arrays, count)
    for mine, other, type_ in zip(ours, theirs, sig.outputs, strict=True):
        assert mine.shape == other.shape == type_.shape
        assert mine.dtype == type_.dtype.np
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("of", samples.SAMPLES, ids=str)
def test_rules(of):
    check_all(of)


# Own NumPy meanings against onnx.reference.

CONVOLUTIONS = [
    {},
    {"pads": (1, 2, 0, 1)},
    {"strides": (2, 1), "pads": (1, 1, 1, 1)},
    {"dilations": (2, 1), "strides": (1, 3)},
    {"auto_pad": "SAME_UPPER", "strides": (2, 3)},
    {"auto_pad": "SAME_LOWER", "strides": (2, 1)},
    {"auto_pad": "VALID"},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("group", [1, 2])
def test_conv_is_that_of_onnx(options, group):
    arrays = [numbers(2, 4, 7, 8), numbers(6, 4 // group, 3, 2), numbers(6)]
    agrees("Conv", arrays, group=group, **options)
    agrees("Conv", arrays[:2], group=group, **options)


def test_conv_of_any_rank():
    agrees("Conv", [numbers(2, 3, 9), numbers(4, 3, 3)], strides=(2,), pads=(1, 0))
    agrees("Conv", [numbers(1, 2, 4, 5, 6), numbers(3, 2, 2, 3, 1)], pads=(0, 1, 0, 1, 0, 1))
    agrees("Conv", [numbers(1, 6, 5, 5), numbers(6, 1, 3, 3)], group=6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strides": (2, 3), "pads": (1, 0, 0, 1)},
        {"strides": (2, 2), "output_padding": (1, 1), "pads": (1, 1, 1, 1)},
        {"dilations": (2, 1), "strides": (1, 2)},
        {"strides": (2, 2), "output_shape": (9, 8)},
    ],
)
def test_conv_transpose_is_that_of_onnx(options):
    arrays = [numbers(2, 4, 4, 4), numbers(4, 3, 3, 2), numbers(3)]
    agrees("ConvTranspose", arrays, **options)
    agrees("ConvTranspose", arrays[:2], **options)


def test_conv_transpose_in_groups_is_one_for_each_group():
    # onnx.reference of onnx 1.23 fails for groups.
    x, w, b = numbers(2, 4, 4, 4), numbers(4, 3, 3, 3), numbers(6)
    (made,) = compute("ConvTranspose", Attributes({"group": 2, "strides": (2, 1)}), None, [x, w, b], 1)
    parts = [
        compute("ConvTranspose", Attributes({"strides": (2, 1)}), None, [x[:, at], w[at], b[of]], 1)[0]
        for at, of in ((slice(0, 2), slice(0, 3)), (slice(2, 4), slice(3, 6)))
    ]
    np.testing.assert_allclose(made, np.concatenate(parts, axis=1), rtol=1e-12)


POOLS = [
    {},
    {"strides": (2, 2)},
    {"strides": (2, 3), "pads": (1, 0, 0, 1)},
    {"strides": (2, 2), "ceil_mode": 1},
    {"strides": (3, 2), "pads": (1, 1, 1, 1), "ceil_mode": 1},
    {"auto_pad": "SAME_UPPER", "strides": (2, 2)},
    {"auto_pad": "VALID", "strides": (2, 2)},
    {"dilations": (2, 1), "strides": (2, 2)},
]


@pytest.mark.parametrize("options", POOLS)
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("include", [0, 1])
def test_pooling_is_that_of_onnx(op_type, options, include):
    if op_type == "AveragePool":
        options = {**options, "count_include_pad": include}
    for size in (7, 8):
        agrees(op_type, [numbers(2, 3, size, 9)], kernel_shape=(3, 2), **options)


def test_same_lower_pads_in_front():
    # onnx.reference makes one window too few; the shape is that of the type rule.
    x = np.arange(5.0).reshape(1, 1, 5)
    for auto_pad, expected in (("SAME_LOWER", [0, 2, 4]), ("SAME_UPPER", [1, 3, 4])):
        options = {"kernel_shape": (2,), "strides": (2,), "auto_pad": auto_pad}
        (made,) = compute("MaxPool", Attributes(options), None, [x], 1)
        assert made.tolist() == [[expected]]
        assert signature("MaxPool", [x], **options).outputs[0].shape == (1, 1, 3)


def test_max_pool_of_integers_and_with_positions():
    image = np.array([[[-3, -5, -7]]], np.int8)
    (made,) = compute("MaxPool", Attributes({"kernel_shape": (2,), "pads": (1, 1)}), None, [image], 1)
    np.testing.assert_array_equal(made, np.array([[[-3, -3, -5, -7]]], np.int8))
    agrees("MaxPool", [numbers(2, 2, 4, 4)], kernel_shape=(2, 2), strides=(2, 2), outputs=2)


def test_global_pooling_is_that_of_onnx():
    agrees("GlobalAveragePool", [numbers(2, 3, 4, 5)])
    agrees("GlobalMaxPool", [numbers(2, 3, 4, 5)])


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_pad_is_that_of_onnx(mode):
    x = numbers(3, 4, 5)
    agrees("Pad", [x], pads=(0, 1, 2, 0, 2, 1), mode=mode)
    agrees("Pad", [x], pads=(1, 2), axes=(-1,), mode=mode)
    agrees("Pad", [x], version=2, pads=(0, 1, 0, 0, 1, 0), mode="edge")


def test_pad_with_a_value_and_with_negative_amounts():
    x = numbers(3, 4)
    agrees("Pad", [x], pads=(0, 1, 2, 0), constant_value=2.5)
    agrees("Pad", [x, np.asarray(1.5)], pads=(0, 1, 2, 0))
    (made,) = compute("Pad", Attributes({"pads": (-1, 1, 0, -2)}), None, [x], 1)
    np.testing.assert_array_equal(made, np.pad(x[1:, :-2], ((0, 0), (1, 0))))


def test_gathers_are_those_of_onnx():
    x = numbers(3, 4, 5)
    agrees("Gather", [x, np.array([[0, -1], [2, 1]])], axis=1)
    agrees("Gather", [x], axis=2, indices=Literal(3))
    agrees("GatherElements", [x, RANDOM.integers(-4, 4, (3, 6, 5))], axis=1)
    agrees("GatherND", [x, np.array([[0, 1], [-1, 2]])])
    agrees("GatherND", [x, np.array([[[0], [1]], [[3], [2]], [[1], [1]]])], batch_dims=1)


def test_einsum_is_that_of_onnx():
    for equation, shapes in [
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("...ij,...jk", [(5, 2, 3), (5, 3, 4)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("ii->i", [(3, 3)]),
        ("ij->", [(2, 3)]),
        ("i,j,k->kij", [(2,), (3,), (4,)]),
    ]:
        agrees("Einsum", [numbers(*shape) for shape in shapes], equation=equation)


def test_half_precision_keeps_its_type_and_sums_in_float32():
    x, w = np.ones((1, 4096, 1, 1), np.float16), np.ones((1, 4096, 1, 1), np.float16)
    (made,) = compute("Conv", Attributes(), None, [x, w], 1)
    assert made.dtype == np.float16
    assert made.item() == 4096  # sums of ones in float16 stop at 2048


# Work: closed forms.


def test_conv_flops():
    # ResNet-50's first convolution: 2 * 64 * 112 * 112 * 3 * 7 * 7 (He et al. 2016, table 1: 118 M
    # multiply-adds).
    first = signature(
        "Conv", [np.empty((1, 3, 224, 224)), np.empty((64, 3, 7, 7))], strides=(2, 2), pads=(3,) * 4
    )
    done = work(first)
    assert done.flops == 2 * 118_013_952
    assert done.matrix
    assert done.bytes_written == 64 * 112 * 112 * 8
    depthwise = signature("Conv", [np.empty((2, 32, 8, 8)), np.empty((32, 1, 3, 3))], group=32, pads=(1,) * 4)
    assert work(depthwise).flops == 2 * 2 * 32 * 8 * 8 * 9


def test_conv_grad_takes_a_convolution_per_gradient():
    x, w, dy = np.empty((2, 3, 8, 8)), np.empty((4, 3, 3, 3)), np.empty((2, 4, 6, 6))
    once = work(signature("Conv", [x, w])).flops
    assert work(signature("ConvGrad", [x, w, dy])).flops == 2 * once
    assert work(signature("ConvGrad", [x, w, dy], wanted=("dw",))).flops == once


def test_einsum_flops_are_those_of_the_matmul_it_is():
    a, b = np.empty((2, 3, 4)), np.empty((2, 4, 5))
    assert work(signature("Einsum", [a, b], equation="bij,bjk->bik")).flops == 2 * 2 * 3 * 4 * 5
    # An outer product adds nothing up.
    assert work(signature("Einsum", [a[0, 0], b[0, 0]], equation="i,j->ij")).flops == 4 * 5


def test_a_gather_reads_what_it_takes():
    table, tokens = np.empty((50257, 768), np.float32), np.zeros((4, 16), np.int64)
    done = work(signature("Gather", [table, tokens]))
    assert done.bytes_read == 4 * 16 * (768 * 4 + 8)
    assert done.bytes_written == 4 * 16 * 768 * 4


@pytest.mark.parametrize("op_type", ["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Unflatten"])
def test_views_do_no_work(op_type):
    attributes = {"Reshape": {"shape": (6, 1)}, "Unsqueeze": {"axes": (0,)}, "Unflatten": {"shape": (5,)}}
    shape = (6,) if op_type == "Unflatten" else (2, 3, 1)
    done = work(signature(op_type, [np.empty(shape)], **attributes.get(op_type, {})))
    assert (done.flops, done.bytes_read, done.bytes_written) == (0, 0, 0)
    assert operator(op_type).view


# Windows: counts against ONNX's type rule over many sizes.


def test_window_counts_are_those_that_onnx_infers():
    for size, kernel, stride, pad, dilation, ceiling in itertools.product(
        (5, 8), (1, 3), (1, 2, 3), (0, 1), (1, 2), (0, 1)
    ):
        if pad >= kernel:
            continue
        options = {
            "strides": (stride,),
            "pads": (pad, pad),
            "dilations": (dilation,),
            "ceil_mode": ceiling,
        }
        sig = signature("MaxPool", [np.empty((1, 1, size))], kernel_shape=(kernel,), **options)
        assert windows(Attributes(options), (size,), (kernel,)).counts == sig.outputs[0].shape[2:], options


# Sharding rules, where a number of labels says it best.


@pytest.mark.parametrize(
    ("source", "target", "labels"),
    [
        ((8, 5, 6), (40, 6), (("d0", "d0.1", "d1"), (("d0", Pieces("d0.1", (5,) * 8)), "d1"))),
        ((40, 6), (8, 5, 6), ((("d0", Pieces("d0.1", (5,) * 8)), "d1"), ("d0", "d0.1", "d1"))),
        (
            (2, 5, 12),
            (2, 5, 3, 4),
            (("d0", "d1", ("d2", Pieces("d2.1", (4,) * 3))), ("d0", "d1", "d2", "d2.1")),
        ),
        ((6, 4), (8, 3), (("d0", None), ("d0", None))),
        ((4, 1, 3), (4, 3), (("d0", None, "d1"), ("d0", "d1"))),
        ((0, 3), (3, 0), ((None, None), (None, None))),
        ((), (1, 1), ((), (None, None))),
        ((2, 3), (3, 2), (("d0", None), ("d0", None))),
    ],
)
def test_labels_of_a_reshape(source, target, labels):
    assert reshape_labels(source, target) == labels


def test_a_bias_is_a_share_on_each_rank_where_the_input_channels_are_divided():
    x, w, b = np.empty((2, 4, 5, 5)), np.empty((6, 4, 3, 3)), np.empty(6)
    plain, biased = sharding_rule(signature("Conv", [x, w])), sharding_rule(signature("Conv", [x, w, b]))
    assert plain.inputs == (("n", "ci", None, None), ("co", "ci", None, None))
    assert biased.inputs == (*plain.inputs, ("co",))
    assert plain.addends == () and biased.addends == (2,)


@pytest.mark.parametrize(
    ("channels", "weight", "group", "divided"),
    [(8, (8, 1), 8, True), (8, (16, 1), 8, True), (8, (8, 4), 2, False), (4, (6, 2), 2, True)],
)
def test_groups_are_divided_where_any_number_of_ranks_gets_whole_groups(channels, weight, group, divided):
    sig = signature("Conv", [np.empty((2, channels, 5)), np.empty((*weight, 3))], group=group)
    rule = sharding_rule(sig)
    assert (rule.outputs[0][1] == "g") == divided
    if divided:
        local = rule.localize(sig.attributes, ((2, weight[0] // 2, 3),))
        assert local["group"] == group // 2


def test_split_and_concat_divide_every_piece():
    x = np.empty((2, 12))
    assert sharding_rule(signature("Split", [x], axis=1, split=(4, 8))).inputs[0][1] == Pieces("part", (4, 8))
    joined = sharding_rule(signature("Concat", [x, x[:, :4]], axis=-1))
    assert joined.outputs[0][1] == Pieces("part", (12, 4))


def test_embedding_gradient_is_partial_over_the_tokens():
    sig = signature("GatherGrad", [np.zeros((4, 6), np.int64), np.empty((4, 6, 8))], shape=(100, 8))
    rule = sharding_rule(sig)
    assert rule.inputs == (("i0", "i1"), ("i0", "i1", "d1"))
    assert rule.outputs == (("rows", "d1"),)


# Types, and what is refused.


def test_a_constant_is_where_it_is_said_to_be():
    device = Device(0, "gpu")
    made = types(
        "Constant", Attributes({"value": Literal(np.ones((2, 3), np.float32)), "device": device}), (), None
    )
    assert made == (Tensor(Float(), (2, 3), device),)
    with pytest.raises(TypeRuleError, match=r"attribute value, an ir.Literal, not None"):
        types("Constant", Attributes(), (), None)


def test_what_does_not_fit_is_refused():
    maker = FunctionMaker("wrong")
    x = maker.add_input_value("x", Tensor(Float64(), (2, 4, 5)))
    w = maker.add_input_value("w", Tensor(Float64(), (3, 4, 2)))
    with pytest.raises(TypeRuleError, match="ConvGrad takes 3 inputs, 2 given"):
        maker.add("ConvGrad", [x, w])
    with pytest.raises(TypeRuleError, match="is not the gradient of the convolution"):
        maker.add("ConvGrad", [x, w, x])
    with pytest.raises(TypeRuleError, match="is not the gradient of a pooling"):
        maker.add("MaxPoolGrad", [x, x], {"kernel_shape": (2,)})
    with pytest.raises(TypeRuleError, match="its shape must be known"):
        maker.add("ConstantOfShape", [])
    with pytest.raises(TypeRuleError, match="names 2 operands, 1 are given"):
        parse("ij,jk", [2])
    with pytest.raises(TypeRuleError, match=r"must be flat and have the 6 elements of \(2, 3\)"):
        types("Unflatten", Attributes({"shape": (2, 3)}), (Tensor(Float64(), (5,)),), None)
    with pytest.raises(TypeRuleError, match="do not fit 2 spatial dimensions"):
        windows(Attributes({"strides": (1,)}), (4, 4), (2, 2))


# What the samples cover.

DIVIDED = {
    "AveragePool": "c n",
    "Concat": "d0 d1 d2 part",
    "ConstantOfShape": "d0 d1",
    "Conv": "ci co g n",
    "ConvGrad": "ci co g n",
    "ConvTranspose": "ci co g n",
    "DepthToSpace": "c h n w",
    "Gather": "d0 d1 d2 i0 i1 rows",
    "GatherGrad": "d0 d1 d2 i0 i1 rows",
    "GatherND": "b0 d0 i0 i1",
    "GlobalAveragePool": "c n s0",
    "MaxPoolGrad": "c n",
    "Pad": "d0 d1 d2",
    "ScatterElements": "d0",
    "ScatterND": "d0",
    "Slice": "d0 d1 d2",
    "SpaceToDepth": "c h n w",
    "Split": "d0 d1 d2 part",
    "Transpose": "d0 d1 d2 d3 d4 d5",
    "Trilu": "d0",
}


def test_these_factors_have_been_divided():
    found = divided_factors(samples.SAMPLES)
    assert {name: " ".join(sorted(found[name])) for name in DIVIDED} == DIVIDED


def test_every_operator_of_these_files_has_samples():
    files = ("constants", "conv", "einsum", "indexing", "movement", "pool")
    files += ("marks", "resize", "scattering", "shape")
    sources = [Path(ops.__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in files]
    sampled = divided_factors(samples.SAMPLES)
    # Upsample is Resize under its old name, deprecated in the house opset.
    own = [name for name in registered() if any(f'"{name}"' in source for source in sources)]
    names = [name for name in own if operator(name).sharding is not None]
    assert [name for name in names if name not in sampled] == ["Upsample"]


def test_only_what_has_no_gradient_lacks_its_rule():
    without = [name for name in divided_factors(samples.SAMPLES) if operator(name).gradient is None]
    forward = [name for name in without if not name.endswith("Grad")]
    makers = ["Accumulate", "Constant", "ConstantOfShape", "OneHot", "Range", "Resize", "Shape", "Size"]
    assert sorted(set(forward) - {"Add", "ReduceSum", "Sub"}) == makers
