"""What stands between the gradients and the optimizer: their norm over all parameters, and a common factor.

``SquareSum(x)`` is the sum of squares in float32, ``GradientFactor(total; clip, loss_scale)`` what every
gradient is multiplied by, and ``ScaleGradient(x, factor; to)`` that product, of the type ``to``;
``ScaleGradient(x; to, factor)`` is that with a number which is known.

The norm is clipped as torch.nn.utils.clip_grad_norm_ does it (Pascanu et al. 2013): by clip / (norm + 1e-6)
if that is less than 1. A gradient of a loss that was scaled is divided by ``loss_scale`` (Micikevicius et al.
2018, "Mixed precision training", section 3.2). Where some number is not finite the factor is 0, and 0 times
anything is 0 here: a step that overflowed moves no weight by its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx.helper

from distsim.errors import TypeRuleError
from distsim.ir import Op
from distsim.ir.type import Float32, Tensor, from_numpy
from distsim.ir.value import Attributes
from distsim.ops.normalization import widened
from distsim.ops.operator import (
    Array,
    Operator,
    Signature,
    Work,
    arity,
    common_device,
    memory_bound,
    register,
)
from distsim.ops.sharding_rule import ShardingRule, letters


def _wide(tensor: Tensor) -> Tensor:
    """Return the scalar type in which numbers of a tensor are summed: float32, or more if they have more."""
    dtype = tensor.dtype if tensor.dtype.itemsize > 4 else Float32()
    return Tensor(dtype, (), tensor.device)


def sums_squares(op: Op) -> bool:
    """Whether a Call does nothing but sum the squares of what it is given, or a share of them."""
    if not op.is_call:
        return False
    inner = {part.op_type for part in op.callee.ops}
    return "SquareSum" in inner and inner <= {"SquareSum", "Add", "Mul"}


def _square_sum_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("SquareSum", inputs, 1)
    return (_wide(inputs[0]),)


def _square_sum(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [np.asarray(np.square(widened(arrays[0])).sum())]


def _square_sum_work(signature: Signature) -> Work:
    given, made = signature.inputs[0], signature.outputs[0]
    return Work(2.0 * given.size, float(given.nbytes), float(made.nbytes))


register(
    Operator(
        "SquareSum",
        types=_square_sum_types,
        compute=_square_sum,
        work=_square_sum_work,
        sharding=lambda s: ShardingRule((letters(s.inputs[0].rank),), ((),)),
    )
)


def _factor_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("GradientFactor", inputs, 1)
    if inputs[0].shape:
        raise TypeRuleError(f"GradientFactor takes the sum of all squares, a scalar, not {inputs[0]}")
    return inputs


def _factor(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (total,) = arrays
    scale, clip = attributes.get("loss_scale", 1.0), attributes.get("clip")
    norm = math.sqrt(float(total)) / scale if np.isfinite(total) else math.inf
    factor = 0.0 if math.isinf(norm) else 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return [np.asarray(factor / scale, total.dtype)]


register(
    Operator(
        "GradientFactor",
        types=_factor_types,
        compute=_factor,
        work=lambda s: memory_bound(s, 4.0),
        sharding=lambda s: ShardingRule(((),), ((),)),
    )
)


def _scale_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    known = "factor" in attributes
    arity("ScaleGradient", inputs, 1 if known else 2)
    if not known and inputs[1].shape:
        raise TypeRuleError(f"ScaleGradient: the factor must be a scalar, not {inputs[1]}")
    to = from_numpy(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))
    return (Tensor(to, inputs[0].shape, common_device("ScaleGradient", inputs)),)


def _scale(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    grad = arrays[0]
    factor = attributes["factor"] if "factor" in attributes else arrays[1]
    made = widened(grad) * factor if factor != 0 else np.zeros(grad.shape)
    return [made.astype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]), copy=False)]


def _scale_sharding(signature: Signature) -> ShardingRule:
    dims, *rest = letters(signature.inputs[0].rank), *signature.inputs[1:]
    return ShardingRule((dims, *[() for _ in rest]), (dims,))


register(
    Operator(
        "ScaleGradient",
        types=_scale_types,
        compute=_scale,
        work=lambda s: memory_bound(s, 1.0),
        sharding=_scale_sharding,
        overwrites={0: 0},
    )
)
