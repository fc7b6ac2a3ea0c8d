"""Samples of the operators that compute numbers: products, element-wise ones, reductions, norms."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto
from op_samples import Sample, integers, normal, positive, sample, unit

from distsim.ir import Literal
from distsim.ops.elementwise import UNARY, Unary

MATMUL: tuple[Sample, ...] = (
    sample("MatMul", (4, 6), (6, 8)),
    sample("MatMul", (2, 4, 6), (6, 8)),
    sample("MatMul", (2, 4, 2, 6), (2, 4, 6, 2)),
    sample("MatMul", (4, 1, 2, 6), (6, 6, 4)),
    sample("MatMul", (6, 4), (2, 4, 6)),
    sample("MatMul", (6,), (6, 4)),
    sample("MatMul", (2, 4, 6), (6,)),
    sample("MatMul", (6,), (6,)),
    sample("MatMul", (6,), (4, 6, 2)),
    sample("MatMul", (4, 1), B=np.array([[2.0]])),
    sample("MatMul", (1, 4), A=np.array([[2.0]])),
    sample("Gemm", (4, 6), (6, 8)),
    sample("Gemm", (6, 4), (6, 8), (8,), transA=1, alpha=0.5, beta=2.0),
    sample("GroupedMatMul", (6, 4), (3, 4, 8), np.array([2, 0, 4])),
    sample("GroupedMatMul", (2, 10, 4), (2, 4, 6), np.array([3, 5])),
    sample("Gemm", (4, 6), (8, 6), (4, 1), transB=1),
    sample("Gemm", (6, 4), (8, 6), (4, 8), transA=1, transB=1, beta=0.5),
    sample("Gemm", (6, 4), (8, 6), transA=1, transB=1, alpha=3.0),
    sample("Gemm", (4, 6), (8, 6), (1, 8), transB=1),
    sample("Gemm", (4, 6), (6, 8), C=np.array([3.0])),
    sample("Gemm", (4, 6), (6, 8), ()),
)

# Where f is defined and smooth; a range other than the normal numbers needs its own entry.
_RANGES = {
    "Log": positive,
    "Sqrt": positive,
    "Asin": unit,
    "Acos": unit,
    "Atanh": unit,
    "Tan": unit,
}
_OPTIONS: dict[str, tuple[dict[str, object], ...]] = {
    "Gelu": ({}, {"approximate": "tanh"}),
    "LeakyRelu": ({}, {"alpha": 0.3}),
    "ThresholdedRelu": ({}, {"alpha": 0.3}),
    "Elu": ({}, {"alpha": 0.3}),
    "Celu": ({"alpha": 0.7},),
    "Selu": ({}, {"alpha": 1.5, "gamma": 2.0}),
    "HardSigmoid": ({}, {"alpha": 0.7, "beta": 0.1}),
    "Swish": ({}, {"alpha": 0.7}),
    "IsInf": ({}, {"detect_negative": 0}),
}


def _unary(entry: Unary) -> tuple[Sample, ...]:
    array = _RANGES.get(entry.name, normal)(2, 4)
    if entry.name == "Acosh":
        array = positive(2, 4) + 0.6
    elif entry.name == "Not":
        array = array > 0
    elif entry.name == "BitwiseNot":
        array = integers(2, 4)
    elif entry.name in ("IsNaN", "IsInf"):
        array = np.array([[1.0, np.nan], [-np.inf, np.inf]])
    elif entry.name in ("HardSigmoid", "HardSwish"):
        array = 2.1 * array  # on both sides of both kinks
    grads = () if entry.name in ("Not", "BitwiseNot", "IsNaN", "IsInf") else (0,)
    made = _OPTIONS.get(entry.name, ({},))
    return tuple(sample(entry.name, array, grads=grads, **options) for options in made)


UNARY_SAMPLES: tuple[Sample, ...] = (
    *(one for entry in UNARY for one in _unary(entry)),
    sample("Neg", integers(2, 4), grads=()),
    sample("Abs", integers(2, 4, low=-3), grads=()),
    sample("Sign", ()),
)

_MASK = normal(2, 4) > 0
BROADCAST: tuple[Sample, ...] = (
    *(
        one
        for name in ("Add", "Sub", "Mul", "Div")
        for one in (
            sample(name, (2, 4), (2, 4)),
            sample(name, (2, 4), (4,)),
            sample(name, (4, 1), (2, 1, 6)),
            sample(name, (), (2, 4)),
            sample(name, (2, 4), B=0.1),
            sample(name, (2, 4), A=0.1),
            sample(name, (2, 4), B=np.array([[2.0], [3.0]])),
            sample(name, (2, 1), A=np.array([2.0, 3.0, 4.0, 5.0])),
            sample(name, integers(2, 4, low=-5, high=6), integers(4, low=1), grads=()),
        )
    ),
    sample("Mod", (2, 4), B=0.7, fmod=1),
    sample("Mod", (2, 4), positive(4), fmod=1, refused=(1,)),
    sample("Mod", integers(2, 4, low=-9, high=9), integers(4, low=1), grads=()),
    *(sample(name, normal(2, 4) > 0, normal(4, seed=1) > 0, grads=()) for name in ("And", "Or", "Xor")),
    *(
        sample(name, integers(2, 4), integers(4, seed=1), grads=())
        for name in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    ),
    sample("Less", (2, 4), B=0.1, grads=()),
    *(
        sample(name, integers(2, 4), integers(4, seed=1), grads=())
        for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ),
    sample("BitShift", integers(2, 4).astype(np.uint8), Y=2, direction="LEFT", grads=()),
    sample("Pow", positive(2, 4), Y=2.5),
    sample("Pow", (2, 4), Y=3.0),
    sample("Pow", (2, 4), Y=0.0),
    sample("Pow", (2, 4), integers(4, seed=1)),
    sample("Pow", positive(2, 4), normal(4, seed=1)),
    sample("Pow", (2, 4), X=np.array(3.0)),
    sample("Pow", positive(4), X=np.array([0.0, 2.0, 3.0, 0.5])),
)
CHOICE: tuple[Sample, ...] = (
    sample("Where", _MASK, normal(2, 4, seed=1), normal(4, seed=2)),
    sample("Where", _MASK, normal(4, seed=1), Y=np.array(-1e4)),
    sample("Where", _MASK, normal(2, 1, seed=1), X=np.array(0.0)),
    sample("Where", normal(2, 4), normal(4, seed=2), condition=_MASK),
    sample("Clip", (2, 4), min=-0.5, max=0.5),
    sample("Clip", (2, 4), max=0.5),
    sample("Clip", (2, 4), max=np.array(0.5), absent=("min",)),
    sample("Clip", (2, 4), version=6, min=-0.5, max=0.5),
    sample("Clip", (2, 4), np.array(-0.5), np.array(0.5), refused=(1, 2)),
    sample("Clip", integers(2, 4), np.array(1), np.array(2), grads=()),
    *(
        one
        for name in ("Max", "Min", "Sum", "Mean")
        for one in (
            sample(name, (2, 4)),
            sample(name, (2, 4), (4,)),
            sample(name, (2, 1), (4,), (2, 4)),
        )
    ),
    sample("PRelu", (2, 4), (4,)),
    sample("PRelu", (2, 4), slope=0.25),
)
CONVERSION: tuple[Sample, ...] = (
    sample("Identity", (2, 4)),
    sample("OptimizationBarrier", (2, 4), (4,)),
    sample("Cast", (2, 4), to=TensorProto.DOUBLE),
    sample("Cast", (2, 4), to=TensorProto.INT32, grads=()),
    sample("Cast", integers(2, 4), to=TensorProto.FLOAT, grads=()),
    sample("CastLike", (2, 4), (3,)),
    sample("Dropout", (2, 4)),
    sample("Dropout", (2, 4), outputs=2),
    sample("Dropout", (2, 4), version=7, ratio=0.3),
)
_STATS = ((4,), (4,), (4,), positive(4))
CHANNEL_NORMS: tuple[Sample, ...] = (
    sample("BatchNormalization", (2, 4, 2, 6), *_STATS),
    sample("BatchNormalization", (2, 4), *_STATS, version=9, epsilon=1e-3),
    sample("BatchNormalization", (2, 1, 4), (1,), (1,), positive(1), input_mean=np.array([0.5])),
    sample("BatchNormalization", (2, 1, 4), (1,), (1,), (1,), version=9, var=np.array([0.5])),
    sample("InstanceNormalization", (2, 4, 6), (4,), (4,)),
    sample("InstanceNormalization", (2, 4, 2, 3), (4,), (4,), epsilon=1e-3),
    sample("GroupNormalization", (2, 8, 3), (4,), (4,), num_groups=4),
    sample("GroupNormalization", (2, 8, 3), (8,), (8,), num_groups=4, version=21),
    sample("GroupNormalization", (2, 8, 2, 3), (8,), (8,), num_groups=2, version=21),
    sample("LRN", (2, 6, 4), size=3, alpha=0.5, beta=0.7, bias=1.5),
    sample("LRN", (2, 6, 4), size=4, alpha=0.5),
)

DRAWN: tuple[Sample, ...] = (
    sample("Attention", (2, 4, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4), unused=(1,), dropout=0.3, seed=3),
    sample("Attention", *((2, 2, 6, 4),) * 3, (6, 6), unused=(1,), dropout=0.3, softcap=2.0, is_causal=1),
    sample("Dropout", (4, 6), ratio=0.3, training_mode=np.array(True), seed=3),
    sample("Dropout", (4, 6), ratio=0.3, training_mode=np.array(True), seed=3, outputs=2),
    sample("Dropout", (4, 6), np.array(0.3), np.array(True), seed=3, refused=(1,)),
    sample("BatchNormalization", (4, 4, 3), *_STATS, training_mode=1),
    sample("BatchNormalization", (4, 4, 3), *_STATS, training_mode=1, outputs=3, unused=(1, 2)),
    sample("BatchNormalization", (4, 4, 3), *_STATS, version=9, outputs=5, unused=(1, 2, 3, 4)),
)
"""Samples whose numbers change, and only they, when the op is divided: every rank draws a mask of its
own, or takes the statistics of its own part of the batch."""

_SIMPLE = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2")
_REDUCTIONS = (*_SIMPLE, "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
REDUCTION: tuple[Sample, ...] = (
    *(
        one
        for name in _REDUCTIONS
        for one in (
            sample(name, positive(2, 4, 6), axes=(1,)),
            sample(name, positive(2, 4, 6), axes=(0, -1), keepdims=0),
            sample(name, positive(2, 4), keepdims=0),
            sample(name, positive(2, 4), version=11, axes=(1,)),
        )
    ),
    *(sample(name, (2, 4), axes=(0,)) for name in (*_SIMPLE, "ReduceSumSquare", "ReduceLogSumExp")),
    sample("ReduceProd", np.array([[0.0, 2.0, 3.0, 4.0], [0.0, 2.0, 0.0, 4.0]]), axes=(1,)),
    sample("ReduceSum", integers(2, 4), axes=(1,), grads=()),
    sample("ReduceSum", (2, 4), noop_with_empty_axes=1),
    sample("ReduceMax", integers(2, 4), axes=(1,), grads=()),
    sample("ArgMax", (2, 4), grads=()),
    sample("ArgMax", integers(2, 4, high=2), axis=-1, keepdims=0, select_last_index=1, grads=()),
    sample("ArgMin", integers(2, 4, high=2), axis=1, grads=()),
    sample("TopK", (4, 6), K=np.array([2])),
    sample("TopK", (4, 6), K=np.array([3]), axis=0, largest=0),
    sample("TopK", (4, 6), version=1, k=2),
    sample("CumSum", (4, 6), axis=1),
    sample("CumSum", (4, 6), axis=0, exclusive=1),
    sample("CumSum", (4, 6), axis=-1, reverse=1),
    sample("CumSum", (4, 6), np.array(1), reverse=1, exclusive=1),
)

_LABELS = integers(4, high=6)
SOFTMAX: tuple[Sample, ...] = (
    *(
        one
        for name in ("Softmax", "LogSoftmax")
        for one in (sample(name, (4, 6)), sample(name, (2, 4, 6), axis=1), sample(name, (6,), axis=0))
    ),
    *(
        one
        for reduction in ("mean", "sum", "none")
        for one in (
            sample("SoftmaxCrossEntropyLoss", (4, 6), _LABELS, reduction=reduction),
            sample("SoftmaxCrossEntropyLoss", (4, 6), _LABELS, reduction=reduction, outputs=2, unused=(1,)),
            sample("SoftmaxCrossEntropyLoss", (4, 6), _LABELS, reduction=reduction, ignore_index=2),
            sample("SoftmaxCrossEntropyLoss", (2, 6, 4), integers(2, 4, high=6), reduction=reduction),
            sample("NegativeLogLikelihoodLoss", (4, 6), _LABELS, reduction=reduction),
            sample("NegativeLogLikelihoodLoss", (2, 6, 4), integers(2, 4, high=6), reduction=reduction),
        )
    ),
    *(
        sample(name, (4, 6), _LABELS, positive(6), reduction=reduction, refused=(2,))
        for name in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for reduction in ("mean", "sum", "none")
    ),
    # Labels that the file knows are a static operand.
    *(
        one
        for reduction in ("mean", "none")
        for one in (
            sample("SoftmaxCrossEntropyLoss", (4, 6), labels=Literal(_LABELS), reduction=reduction),
            sample("NegativeLogLikelihoodLoss", (4, 6), target=Literal(_LABELS), reduction=reduction),
        )
    ),
)
NORMALIZATION: tuple[Sample, ...] = (
    sample("LayerNormalization", (2, 4, 6), (6,)),
    sample("LayerNormalization", (2, 4, 6), (6,), (6,)),
    sample("LayerNormalization", (2, 4, 6), (4, 6), (4, 6), axis=1, epsilon=1e-3),
    sample("LayerNormalization", (2, 4, 6), (6,), (6,), outputs=3, unused=(1, 2)),
    sample("LayerNormalization", (2, 4, 6), (4, 6), (6,), axis=-2),
    sample("LayerNormalization", (2, 4, 6), (6,), Scale=np.array([2.0])),
    sample("LayerNormalization", (2, 4, 6), (6,), B=np.array([2.0])),
    sample("RMSNormalization", (2, 4, 6), (6,)),
    sample("RMSNormalization", (2, 4, 6), (4, 6), axis=1, version=23),
)

_QKV = ((2, 4, 6, 4), (2, 4, 6, 4), (2, 4, 6, 4))
_GROUPED = ((2, 4, 6, 4), (2, 2, 8, 4), (2, 2, 8, 6))
_SEEN = np.tril(np.ones((6, 8), bool), 3) & (normal(2, 1, 6, 8, seed=9) > -1.5)
_SEEN[:, :, :, 0] = True
ATTENTION: tuple[Sample, ...] = (
    sample("Attention", *_QKV, unused=(1,)),
    sample("Attention", *_QKV, unused=(1,), is_causal=1, scale=0.3),
    sample("Attention", *_QKV, unused=(1,), is_causal=1, window=2, softcap=1.5),
    sample("Attention", *_QKV, unused=(1,), window=3),
    sample("Attention", *_GROUPED, unused=(1,)),
    sample("Attention", *_GROUPED, unused=(1,), is_causal=1),
    sample("Attention", (2, 4, 6, 4), (2, 1, 6, 4), (2, 1, 6, 4), unused=(1,), softcap=2.0),
    sample("Attention", (2, 8, 6, 4), (2, 2, 8, 4), (2, 2, 8, 2), _SEEN, unused=(1,)),
    sample("Attention", *_GROUPED, normal(6, 8, seed=5), unused=(1,), softcap=2.0),
    sample("Attention", *_GROUPED, normal(4, 1, 8, seed=5), unused=(1,), is_causal=1),
    sample("Attention", *_QKV, normal(2, 1, 1, 6, seed=5), unused=(1,)),
    sample("Attention", *_QKV, unused=(1,), attn_mask=np.array(0.5)),
    sample("Attention", *_QKV, np.zeros((6, 6), bool), unused=(1,)),  # nothing is seen
)
_TURNS = normal(2, 6, 2, seed=1)
ROTARY: tuple[Sample, ...] = (
    sample("RotaryEmbedding", (2, 4, 6, 4), _TURNS, _TURNS + 1, refused=(1, 2)),
    sample("RotaryEmbedding", (2, 4, 6, 4), _TURNS[:1], _TURNS[:1] + 1, refused=(1, 2), interleaved=1),
    sample(
        "RotaryEmbedding", (2, 6, 4, 6), _TURNS, _TURNS, refused=(1, 2), rotary_embedding_dim=4, seq_axis=1
    ),
    sample("RotaryEmbedding", (2, 4, 6, 4), (8, 2), (8, 2), integers(2, 6, high=8), refused=(1, 2)),
)

_LOGITS = normal(2, 4, 6)
LOSS: tuple[Sample, ...] = (
    sample("Loss", (4, 6), (4, 6), N=4),
    sample("Loss", (2, 4, 2), (2, 4, 2), N=8),
    sample("LossGrad", (4, 6), (4, 6), N=8),
    sample("LossGrad", (4, 6), (4, 6), N=8, dy=-0.5),
    sample("CrossEntropyLoss", (4, 6), _LABELS, N=4),
    sample("CrossEntropyLoss", _LOGITS, integers(2, 4, high=6), N=16),
    sample("CrossEntropyLossGrad", (4, 6), _LABELS, N=4),
    sample("CrossEntropyLossGrad", _LOGITS, integers(2, 4, high=6), N=16, dy=0.25),
)

SAMPLES: tuple[Sample, ...] = (
    *MATMUL,
    *UNARY_SAMPLES,
    *BROADCAST,
    *CHOICE,
    *CONVERSION,
    *REDUCTION,
    *SOFTMAX,
    *NORMALIZATION,
    *ATTENTION,
    *ROTARY,
    *CHANNEL_NORMS,
    *LOSS,
)
