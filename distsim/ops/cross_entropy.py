"""CrossEntropyLoss: -sum over positions of log softmax(logits)[label] / N, divided over classes as well.

``logits`` [..., classes], integer ``labels`` [...]; ``N`` is the number of positions in the global batch. In
training the log-sum-exp of each position is made besides, in 32 bits at least, and backward reads it:
``CrossEntropyLossGrad(logits, labels, lse, dy; lse=1)``; without it, it is computed again.

Ranks may have classes of their own, as Megatron-LM divides a vocabulary over tensor-parallel ranks
(``megatron/core/tensor_parallel/cross_entropy.py``): three all-reduces of a number a position bring
together the largest logit, the sum of the exponentials and the logit of the label; backward needs none
(``own_classes=1``: a label that is one past the classes is another rank's).

With ``in_steps=1`` the exponentials are made, summed and divided by their sum one kernel after the other, in
the place of the logits (:mod:`distsim.transforms.kernels.losses`): nothing else changes but what is read and
written. With ``in_place=1`` a gradient is where its logits were, if nothing reads these later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.function import Op
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import Tensor, as_tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.normalization import widened, wider
from distsim.ops.onnx_bridge import type_number
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    TypesRule,
    Work,
    arity,
    bytes_of,
    common_device,
    memory_bound,
    reading_bound,
    register,
)
from distsim.ops.sharding_rule import Decomposition, Dim, ShardingRule, letters
from distsim.ops.training import check_incoming, incoming, scaled


def _check_labels(op_type: str, inputs: Sequence[Tensor]) -> None:
    arity(op_type, inputs, 2)
    logits, labels = inputs
    if logits.shape[:-1] != labels.shape or labels.dtype.is_floating:
        raise TypeRuleError(
            f"{op_type} takes logits [..., classes] and integer labels [...], not {logits} and {labels}"
        )


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check_labels("CrossEntropyLoss", inputs)
    (logits, labels), device = inputs, common_device("CrossEntropyLoss", inputs)
    made = Tensor(logits.dtype, (), device), Tensor(wider(logits.dtype), labels.shape, device)
    return made[: attributes.get("outputs", 1)]


def _log_sum_exp(logits: Array) -> Array:
    top = logits.max(axis=-1)
    return top + np.log(np.exp(logits - top[..., None]).sum(axis=-1))


def _with_others(array: Array) -> Array:
    """Return an array of classes with one more, of zeros: that of the labels of other ranks."""
    return np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, 1)])


def _at_labels(logits: Array, labels: Array) -> Array:
    return np.take_along_axis(logits, labels[..., None].astype(np.int64), axis=-1)[..., 0]


def _loss(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logits, labels = arrays
    wide = widened(logits)
    lse = _log_sum_exp(wide)
    total = (lse - _at_labels(wide, labels)).sum() / attributes["N"]
    return [np.asarray(total, logits.dtype), lse][: attributes.get("outputs", 1)]


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    dy, options = incoming(ctx)
    saved = ctx.outputs[1:]
    options = {**options, "lse": 1} if saved else options
    options.pop("outputs", None)
    return [ctx.add("CrossEntropyLossGrad", *ctx.inputs, *saved, *dy, **options), None]


def _grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    count = 2 + attributes.get("lse", 0)
    check_incoming("CrossEntropyLossGrad", attributes, inputs, count)
    _check_labels("CrossEntropyLossGrad", inputs[:2])
    if count > 2 and inputs[2].shape != inputs[1].shape:
        raise TypeRuleError(f"CrossEntropyLossGrad: lse {inputs[2]} is not of the labels {inputs[1]}")
    return (inputs[0].on(common_device("CrossEntropyLossGrad", inputs)),)


def _grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logits, labels = widened(arrays[0]), arrays[1]
    saved: int = attributes.get("lse", 0)
    lse = arrays[2] if saved else _log_sum_exp(logits)
    grad = _with_others(np.exp(logits - lse[..., None]))
    index = labels[..., None].astype(np.int64)
    np.put_along_axis(grad, index, np.take_along_axis(grad, index, axis=-1) - 1, axis=-1)
    return scaled(attributes, arrays, grad[..., :-1] / attributes["N"], 2 + saved)


LOSS_STEPS = 5
"""How many kernels over the logits a loss in steps is: the largest, subtract, exponentials, sum, divide."""


def _steps_work(signature: Signature, steps: int) -> Work:
    """Work of a loss; in steps, of which all read the logits in 32 bits, and three write them: the largest is
    subtracted, exponentials are taken, and divided by their sum.
    """
    plain = reading_bound(signature, 5.0 if steps == 5 else 3.0)
    if not signature.attributes.get("in_steps", 0):
        return plain
    logits = signature.inputs[0]
    wide = float(logits.size * wider(logits.dtype).itemsize)
    return Work(plain.flops, plain.bytes_read + (steps - 1) * wide, plain.bytes_written + 3 * wide)


# --- ranks with classes of their own ------------------------------------------------------------------


def _reduced(inputs: Sequence[Tensor]) -> Sequence[int]:
    logits, labels = inputs
    return (labels.size * wider(logits.dtype).itemsize,) * 3


def _decomposed_loss(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
    (logits, labels), name = inputs, op.outputs[0].name

    def add(op_type: str, *given: Value, called: str = "", **options: object) -> Value:
        return maker.add(op_type, given, options, output_names=[called or f"{name}.{op_type}"])[0]

    logits_type = as_tensor(logits.type, logits.name)
    own = add("LocalIndices", labels, axis=axis, size=logits_type.shape[-1])
    largest = add("MPIAllreduce", add("LargestLogit", logits), axis=axis, reduce="max")
    total = add("MPIAllreduce", add("SumOfExponentials", logits, largest), axis=axis)
    at_label = add("MPIAllreduce", add("LogitOfLabel", logits, own), axis=axis)
    lse = add("Add", largest, add("Log", total), called=f"{name}_lse")
    narrow = wider(logits_type.dtype) != logits_type.dtype
    options, called = {"N": op.attributes["N"]}, f"{name}.wide" if narrow else name
    loss = maker.add("LossOfPositions", [lse, at_label], options, (), [called], None, op.name)
    if narrow:
        to = type_number(logits_type.dtype)
        loss = maker.add("Cast", loss, {"to": to}, (), [name])
    return (*loss, lse)[: len(op.outputs)]


def _decomposed_grad(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
    logits, labels, *rest = inputs
    size = as_tensor(logits.type, logits.name).shape[-1]
    own = maker.add("LocalIndices", [labels], {"axis": axis, "size": size})
    names = [value.name for value in op.outputs]
    attributes = {**op.attributes, "own_classes": 1}
    return maker.add("CrossEntropyLossGrad", [logits, *own, *rest], attributes, (), names, None, op.name)


def _sharding(signature: Signature) -> ShardingRule:
    labels: tuple[Dim, ...] = letters(signature.inputs[1].rank)
    own: Mapping[str, Decomposition] = {}
    if signature.op_type == "CrossEntropyLoss":
        outputs = ((), labels)[: len(signature.outputs)]
        own = {"classes": Decomposition(_decomposed_loss, _reduced)}
        return ShardingRule(((*labels, "classes"), labels), outputs, decompositions=own)
    saved = signature.attributes.get("lse", 0)
    classes = "classes" if saved else None
    logits, count = (*labels, classes), 2 + saved
    dy = ((),) * (len(signature.inputs) - count)
    if saved:
        own = {"classes": Decomposition(_decomposed_grad)}
    given = (logits, labels, *(labels,) * saved, *dy)
    return ShardingRule(given, (logits,), tuple((count,) for _ in dy), decompositions=own)


# What it is made of: LargestLogit(logits), SumOfExponentials(logits, largest), LogitOfLabel(logits, labels),
# 0 for labels of other ranks, each one number a position; LossOfPositions(lse, logit of label; N).


def _of_positions(op_type: str, count: int) -> TypesRule:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(op_type, inputs, count)
        logits = inputs[0]
        return (Tensor(wider(logits.dtype), logits.shape[:-1], common_device(op_type, inputs)),)

    return types


def _largest(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [widened(arrays[0]).max(axis=-1)]


def _exponentials(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [np.exp(widened(arrays[0]) - arrays[1][..., None]).sum(axis=-1)]


def _of_label(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logits, labels = arrays
    return [_at_labels(_with_others(widened(logits)), labels)]


def _of_label_work(signature: Signature) -> Work:
    """Of the logits, only those of the labels are read."""
    written = bytes_of(signature.outputs)
    return Work(0.0, written + signature.inputs[1].nbytes, written)


def _loss_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("LossOfPositions", inputs, 2)
    return (Tensor(inputs[0].dtype, (), common_device("LossOfPositions", inputs)),)


def _loss_of_positions(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    lse, at_label = arrays
    return [np.asarray((lse - at_label).sum() / attributes["N"], lse.dtype)]


register(
    Operator("LargestLogit", types=_of_positions("LargestLogit", 1), compute=_largest, work=reading_bound)
)
register(
    Operator(
        "SumOfExponentials",
        types=_of_positions("SumOfExponentials", 2),
        compute=_exponentials,
        work=lambda s: _steps_work(s, 4),
    )
)
register(
    Operator("LogitOfLabel", types=_of_positions("LogitOfLabel", 2), compute=_of_label, work=_of_label_work)
)
register(
    Operator(
        "LossOfPositions",
        types=_loss_types,
        compute=_loss_of_positions,
        work=lambda s: reading_bound(s, 2.0),
    )
)
register(
    Operator(
        "CrossEntropyLoss",
        types=_types,
        compute=_loss,
        work=lambda s: _steps_work(s, 5),
        gradient=_gradient,
        saved=lambda attributes, inputs, outputs: ("lse",) if outputs == 1 else (),
        sharding=_sharding,
    )
)
register(
    Operator(
        "CrossEntropyLossGrad",
        types=_grad_types,
        compute=_grad,
        work=lambda s: memory_bound(s, 5.0),
        sharding=_sharding,
    )
)


# --- as two kernels ------------------------------------------------------------------------------------

# LogLikelihoodLoss(logs, labels): CrossEntropyLoss of what a LogSoftmax of the logits makes; its gradient is
# that of the logs, of which it reads the type alone. They are written for kernels, of what a rank runs
# (transforms/kernels/losses.py): they have no gradient rule and are not divided.


def _log_likelihood_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check_labels("LogLikelihoodLoss", inputs)
    return (Tensor(inputs[0].dtype, (), common_device("LogLikelihoodLoss", inputs)),)


def _log_likelihood_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    check_incoming("LogLikelihoodLossGrad", attributes, inputs)
    _check_labels("LogLikelihoodLossGrad", inputs[:2])
    return (inputs[0].on(common_device("LogLikelihoodLossGrad", inputs)),)


def _log_likelihood(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logs, labels = arrays
    picked = np.take_along_axis(logs, labels[..., None].astype(np.int64), axis=-1)
    return [np.asarray(-picked.sum() / attributes["N"], logs.dtype)]


def _log_likelihood_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logs, labels = arrays[:2]
    grad = np.zeros_like(logs)
    np.put_along_axis(grad, labels[..., None].astype(np.int64), -1.0 / attributes["N"], axis=-1)
    return scaled(attributes, arrays, grad)


def _log_likelihood_work(signature: Signature) -> Work:
    """One logarithm a label is read; of a gradient all is written."""
    logs, labels = signature.inputs[:2]
    picked = labels.size * logs.dtype.itemsize
    return Work(float(labels.size), float(labels.nbytes + picked), bytes_of(signature.outputs))


register(
    Operator(
        "LogLikelihoodLoss",
        types=_log_likelihood_types,
        compute=_log_likelihood,
        work=_log_likelihood_work,
    )
)
register(
    Operator(
        "LogLikelihoodLossGrad",
        types=_log_likelihood_grad_types,
        compute=_log_likelihood_grad,
        work=_log_likelihood_work,
    )
)
