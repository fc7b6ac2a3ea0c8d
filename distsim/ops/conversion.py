"""Operators that leave the numbers as they are: Identity, Cast, CastLike, and Dropout, which hides some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Bool, Tensor, as_tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.onnx_bridge import static_array, type_number
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    Work,
    bytes_of,
    common_device,
    memory_bound,
    register,
)
from distsim.ops.places import (
    by_place,
    operands,
    picked,
    places,
    refuse,
    same_shape_rule,
    view_work,
    wanted,
    whole_rule,
)
from distsim.ops.sharding_rule import ShardingRule, letters

ONCE = "once"
"""The attribute of what is made of weights once a step, and held for every microbatch: casts, gathers."""

register(
    Operator(
        "Identity",
        compute=lambda attributes, arrays: [arrays[0]],
        work=view_work,
        gradient=lambda ctx: [ctx.grad],
        sharding=lambda s: same_shape_rule(s, ((0,),)),
        view=True,
    )
)

# --- Cast(input; to), CastLike(input, target_type) ---------------------------------------------------

_CAST_LIKE = ("input", "target_type")


def _cast_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """The type that CastLike takes from its second operand does not depend on the numbers there."""
    if not wanted(_CAST_LIKE, ctx, "input"):
        return [None] * len(ctx.inputs)
    type_ = as_tensor(ctx.inputs[0].type, ctx.inputs[0].name)
    grad = ctx.grad
    if as_tensor(grad.type, "the gradient").dtype != type_.dtype:
        grad = ctx.add("Cast", grad, to=type_number(type_.dtype))
    return by_place(_CAST_LIKE, ctx, {"input": grad})


def _given(signature: Signature) -> Tensor | None:
    """Return the type of what is cast; None where it is static."""
    index = places(_CAST_LIKE, signature.attributes, len(signature.inputs))
    return signature.inputs[0] if "input" in index else None


def _cast_work(signature: Signature) -> Work:
    """CastLike reads the type of its second operand, not its elements."""
    given = _given(signature)
    return Work(0.0, float(given.nbytes if given else 0), bytes_of(signature.outputs))


def _cast_sharding(signature: Signature) -> ShardingRule:
    given, dims = _given(signature), letters(signature.outputs[0].rank)
    if given is None:  # what is cast is whole on every rank
        return whole_rule(signature)
    real = all(t.dtype.is_floating for t in (given, signature.outputs[0]))
    others = tuple((None,) * tensor.rank for tensor in signature.inputs[1:])
    return ShardingRule((dims, *others), (dims,), ((0,),) if real else ())


register(Operator("Cast", work=_cast_work, gradient=_cast_gradient, sharding=_cast_sharding))
register(
    Operator(
        "CastLike",
        work=_cast_work,
        gradient=_cast_gradient,
        sharding=_cast_sharding,
        formals=_CAST_LIKE,
    )
)

# --- Dropout(data, ratio, training_mode; seed) -> (output, mask) -------------------------------------
# Which elements go is a function of seed and shape; kept ones are scaled by 1 / (1 - ratio) (Srivastava
# et al. 2014). In training the mask is saved, one byte an element, and backward reads it, as torch's eager
# dropout does (native_dropout, native_dropout_backward), Megatron-LM's fused bias + dropout + add too.

_DROPOUT = ("data", "ratio", "training_mode")
_DROPOUT_GRAD = ("dY", "mask", "ratio", "training_mode")


def _in_training(attributes: Attributes, inputs: int) -> bool:
    """Whether an op of so many inputs drops, or may: one that reads its ratio or its mode may."""
    return inputs > 1 or bool(static_array(attributes.get("training_mode", 0), None).any())


def _rate(given: Mapping[str, Array]) -> float:
    """The share that is dropped; 0 in inference."""
    return float(given.get("ratio", 0.5)) if given.get("training_mode", False) else 0.0


def _scaled(data: Array, keep: Array, rate: float) -> Array:
    return (data * keep / (1.0 - rate)).astype(data.dtype, copy=False)


def _dropout(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_DROPOUT, attributes, arrays)
    data, rate = given["data"], _rate(given)
    draw = np.random.default_rng(int(attributes.get("seed", 0)))
    keep = draw.uniform(size=data.shape) >= rate if rate else np.ones(data.shape, bool)
    return (_scaled(data, keep, rate), keep)[: int(attributes.get("outputs", 1))]


def _dropout_saved(attributes: Attributes, inputs: int, outputs: int) -> tuple[str, ...]:
    return ("mask",) if outputs == 1 and _in_training(attributes, inputs) else ()


def _dropout_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    refuse("Dropout", _DROPOUT, ctx, "ratio")
    rest = [None] * (len(ctx.inputs) - 1)
    if not _in_training(ctx.attributes, len(ctx.inputs)):
        return [ctx.grad]
    options = picked(ctx.attributes, "ratio", "training_mode", "absent")
    read = (ctx.grad, ctx.outputs[1], *ctx.inputs[1:])
    return [ctx.maker.add("DropoutGrad", read, options)[0], *rest]


def _dropout_work(signature: Signature) -> Work:
    """Inference copies nothing. In training a number is drawn, compared, and the element scaled."""
    if not _in_training(signature.attributes, len(signature.inputs)):
        return view_work(signature)
    return memory_bound(signature, 3.0)


def _dropout_sharding(signature: Signature) -> ShardingRule:
    """In training every rank draws its own mask: as good a one, but not the undivided op's."""
    dims = letters(signature.inputs[0].rank)
    scalars = tuple((None,) * tensor.rank for tensor in signature.inputs[1:])
    dropping = len(signature.outputs) > 1 or _in_training(signature.attributes, len(signature.inputs))
    return ShardingRule((dims, *scalars), (dims,) * len(signature.outputs), () if dropping else ((0,),))


def _dropout_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) < 2 or inputs[1].shape != inputs[0].shape or inputs[1].dtype != Bool():
        raise TypeRuleError(
            f"DropoutGrad takes the gradient of the output and a mask of its shape, not {[*map(str, inputs)]}"
        )
    return (inputs[0].on(common_device("DropoutGrad", inputs)),)


def _dropout_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_DROPOUT_GRAD, attributes, arrays)
    return [_scaled(given["dY"], given["mask"], _rate(given))]


def _dropout_grad_sharding(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    scalars = tuple((None,) * tensor.rank for tensor in signature.inputs[2:])
    return ShardingRule((dims, dims, *scalars), (dims,), ((0,),))


register(
    Operator(
        "Dropout",
        compute=_dropout,
        work=_dropout_work,
        gradient=_dropout_gradient,
        saved=_dropout_saved,
        sharding=_dropout_sharding,
    )
)
register(
    Operator(
        "DropoutGrad",
        types=_dropout_grad_types,
        compute=_dropout_grad,
        work=lambda s: memory_bound(s, 2.0),
        sharding=_dropout_grad_sharding,
    )
)
