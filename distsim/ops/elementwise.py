"""Functions of one number: one table of f and its derivative, from which the operators are made.

``XGrad(s, dy)`` is dy times the derivative of X, where s is what forward has to save: the input, or the
output where the derivative is simpler in it. All of these move memory; flops count an exponential, a
logarithm, a square root or an error function as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    arity,
    common_device,
    memory_bound,
    register,
)
from distsim.ops.places import same_shape_rule
from distsim.ops.sharding_rule import ShardingRule

Formula = Callable[[Any, Attributes], Any]


@dataclass(frozen=True)
class Unary:
    """One operator: ``f(x, attributes)`` and its derivative ``df(s, attributes)`` at what is saved."""

    name: str
    f: Formula
    df: Formula | None = None
    """None: zero wherever it exists, or the result has no gradient (booleans)."""
    saves_output: bool = False
    flops: float = 1.0
    """Operations of f per element; f' and the product with dy are taken to be twice as many."""
    linear: bool = False


def grad_types(op_type: str) -> Callable[[Attributes, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return the type rule of ``XGrad(s, dy)``: two tensors of one type give a third."""

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(op_type, inputs, 2)
        saved, grad = inputs
        if saved.shape != grad.shape or saved.dtype != grad.dtype:
            raise TypeRuleError(f"{op_type}: the saved tensor {saved} and the gradient {grad} must agree")
        return (grad.on(common_device(op_type, inputs)),)

    return types


def no_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """Return that no operand gets a gradient: the derivative is zero, or there is none."""
    return [None] * len(ctx.inputs)


def erf(x: Any) -> Any:
    """Return the error function, in double precision."""
    from scipy.special import erf as function  # 0.1 s that only computing needs

    made: Any = function(np.asarray(x, np.float64))
    return made


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)), without overflow."""
    made: Any = 0.5 * (1 + np.tanh(0.5 * x))
    return made


def _where(condition: Any, x: Any, y: Any) -> Array:
    return np.where(np.asarray(condition), np.asarray(x), np.asarray(y))


# --- formulas that need more than a line -------------------------------------------------------------

_TANH_SCALE = math.sqrt(2 / math.pi)
_CUBE = 0.044715  # Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016


def _gelu(x: Any, a: Attributes) -> Any:
    if a.get("approximate", "none") == "tanh":
        return 0.5 * x * (1 + np.tanh(_TANH_SCALE * (x + _CUBE * x**3)))
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


def _gelu_slope(x: Any, a: Attributes) -> Any:
    if a.get("approximate", "none") == "tanh":
        t = np.tanh(_TANH_SCALE * (x + _CUBE * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH_SCALE * (1 + 3 * _CUBE * x * x)
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + erf(x * math.sqrt(0.5))) + x * density


def _exponential_unit(x: Any, scale: float, alpha: float, rate: float = 1.0) -> Any:
    """Return scale x for x > 0 and scale alpha (exp(x / rate) - 1) below (ELU, SELU, CELU)."""
    return scale * _where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) / rate))


def _exponential_slope(x: Any, scale: float, alpha: float, rate: float = 1.0) -> Any:
    return scale * _where(x > 0, 1.0, alpha / rate * np.exp(np.minimum(x, 0) / rate))


def _selu(a: Attributes) -> tuple[float, float]:
    # The defaults of ONNX: Klambauer et al. 2017 in single precision.
    return a.get("gamma", 1.05070102214813232421875), a.get("alpha", 1.67326319217681884765625)


def _hard_sigmoid(x: Any, a: Attributes) -> Any:
    return np.clip(a.get("alpha", 0.2) * x + a.get("beta", 0.5), 0, 1)


def _hard_sigmoid_slope(x: Any, a: Attributes) -> Any:
    inner = a.get("alpha", 0.2) * x + a.get("beta", 0.5)
    return a.get("alpha", 0.2) * ((inner > 0) & (inner < 1))


def _hard_swish_slope(x: Any, a: Attributes) -> Any:
    return _where(x >= 3, 1.0, _where(x <= -3, 0.0, x / 3 + 0.5))


def _hinge(x: Any) -> Any:
    made: Any = np.maximum(x, 0)
    return made


def _softplus(x: Any) -> Any:
    return _hinge(x) + np.log1p(np.exp(-np.abs(x)))


def _mish_slope(x: Any, a: Attributes) -> Any:
    t = np.tanh(_softplus(x))
    return t + x * (1 - t * t) * sigmoid(x)


def _swish_slope(x: Any, a: Attributes) -> Any:
    alpha = a.get("alpha", 1.0)
    s = sigmoid(alpha * x)
    return s + alpha * x * s * (1 - s)


def _is_inf(x: Any, a: Attributes) -> Any:
    down, up = a.get("detect_negative", 1), a.get("detect_positive", 1)
    negative: Any = np.signbit(x)
    return np.isinf(x) & ((bool(up) & ~negative) | (bool(down) & negative))


# --- the table ---------------------------------------------------------------------------------------

UNARY: tuple[Unary, ...] = (
    Unary("Relu", lambda x, a: _hinge(x), lambda x, a: x > 0),
    Unary("Neg", lambda x, a: -x, linear=True),
    Unary("Abs", lambda x, a: np.abs(x), lambda x, a: np.sign(x)),
    Unary("Exp", lambda x, a: np.exp(x), lambda y, a: y, saves_output=True),
    Unary("Log", lambda x, a: np.log(x), lambda x, a: 1 / x),
    Unary("Sqrt", lambda x, a: np.sqrt(x), lambda y, a: 0.5 / y, saves_output=True),
    Unary("Reciprocal", lambda x, a: 1 / x, lambda y, a: -y * y, saves_output=True),
    Unary("Tanh", lambda x, a: np.tanh(x), lambda y, a: 1 - y * y, saves_output=True),
    Unary("Sigmoid", lambda x, a: sigmoid(x), lambda y, a: y * (1 - y), saves_output=True, flops=4),
    Unary("Erf", lambda x, a: erf(x), lambda x, a: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
    Unary("Gelu", _gelu, _gelu_slope, flops=5),
    Unary("Softplus", lambda x, a: _softplus(x), lambda x, a: sigmoid(x), flops=3),
    Unary("Softsign", lambda x, a: x / (1 + np.abs(x)), lambda x, a: (1 + np.abs(x)) ** -2.0, flops=3),
    Unary("Mish", lambda x, a: x * np.tanh(_softplus(x)), _mish_slope, flops=5),
    Unary("Swish", lambda x, a: x * sigmoid(a.get("alpha", 1.0) * x), _swish_slope, flops=5),
    Unary(
        "LeakyRelu",
        lambda x, a: _where(x < 0, a.get("alpha", 0.01) * x, x),
        lambda x, a: _where(x < 0, a.get("alpha", 0.01), 1.0),
    ),
    Unary(
        "ThresholdedRelu",
        lambda x, a: _where(x > a.get("alpha", 1.0), x, 0.0),
        lambda x, a: x > a.get("alpha", 1.0),
    ),
    Unary(
        "Elu",
        lambda x, a: _exponential_unit(x, 1.0, a.get("alpha", 1.0)),
        lambda x, a: _exponential_slope(x, 1.0, a.get("alpha", 1.0)),
        flops=3,
    ),
    Unary(
        "Celu",
        lambda x, a: _exponential_unit(x, 1.0, a.get("alpha", 1.0), a.get("alpha", 1.0)),
        lambda x, a: _exponential_slope(x, 1.0, a.get("alpha", 1.0), a.get("alpha", 1.0)),
        flops=4,
    ),
    Unary(
        "Selu",
        lambda x, a: _exponential_unit(x, *_selu(a)),
        lambda x, a: _exponential_slope(x, *_selu(a)),
        flops=4,
    ),
    Unary("HardSigmoid", _hard_sigmoid, _hard_sigmoid_slope, flops=4),
    Unary("HardSwish", lambda x, a: x * np.clip(x / 6 + 0.5, 0, 1), _hard_swish_slope, flops=5),
    Unary("Sin", lambda x, a: np.sin(x), lambda x, a: np.cos(x)),
    Unary("Cos", lambda x, a: np.cos(x), lambda x, a: -np.sin(x)),
    Unary("Tan", lambda x, a: np.tan(x), lambda y, a: 1 + y * y, saves_output=True),
    Unary("Asin", lambda x, a: np.arcsin(x), lambda x, a: 1 / np.sqrt(1 - x * x)),
    Unary("Acos", lambda x, a: np.arccos(x), lambda x, a: -1 / np.sqrt(1 - x * x)),
    Unary("Atan", lambda x, a: np.arctan(x), lambda x, a: 1 / (1 + x * x)),
    Unary("Sinh", lambda x, a: np.sinh(x), lambda x, a: np.cosh(x)),
    Unary("Cosh", lambda x, a: np.cosh(x), lambda x, a: np.sinh(x)),
    Unary("Asinh", lambda x, a: np.arcsinh(x), lambda x, a: 1 / np.sqrt(1 + x * x)),
    Unary("Acosh", lambda x, a: np.arccosh(x), lambda x, a: 1 / np.sqrt(x * x - 1)),
    Unary("Atanh", lambda x, a: np.arctanh(x), lambda x, a: 1 / (1 - x * x)),
    Unary("Floor", lambda x, a: np.floor(x)),
    Unary("Ceil", lambda x, a: np.ceil(x)),
    Unary("Round", lambda x, a: np.rint(x)),
    Unary("Sign", lambda x, a: np.sign(x)),
    Unary("Not", lambda x, a: ~x),
    Unary("BitwiseNot", lambda x, a: ~x),
    Unary("IsNaN", lambda x, a: np.isnan(x)),
    Unary("IsInf", _is_inf, flops=3),
)

_BOOLEAN = ("IsNaN", "IsInf")
_NOT_ONLY_REAL = ("Relu", "Neg", "Abs", "Sign", "Not", "BitwiseNot", *_BOOLEAN)
"""Operators whose types ONNX checks; the others take real numbers, bfloat16 as well in any operator set."""


def _real_types(op_type: str) -> Callable[[Attributes, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(op_type, inputs, 1)
        if not inputs[0].dtype.is_floating:
            raise TypeRuleError(f"{op_type} takes real numbers, not {inputs[0]}; cast it first")
        return inputs

    return types


def _register(entry: Unary) -> None:
    grad_name = f"{entry.name}Grad"

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        made = np.asarray(entry.f(arrays[0], attributes))
        return [made if entry.name in _BOOLEAN else made.astype(arrays[0].dtype, copy=False)]

    def gradient(ctx: GradientContext) -> Sequence[Value | None]:
        saved = ctx.outputs[0] if entry.saves_output else ctx.inputs[0]
        return [ctx.maker.add(grad_name, (saved, ctx.grad), ctx.attributes)[0]]

    def compute_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        saved, dy = arrays
        if entry.df is None:
            raise TypeRuleError(f"{entry.name} has no derivative")
        return [np.asarray(dy * entry.df(saved, attributes)).astype(dy.dtype, copy=False)]

    def sharding(signature: Signature) -> ShardingRule:
        return same_shape_rule(signature, ((0,),) if entry.linear else ())

    def linear_gradient(ctx: GradientContext) -> Sequence[Value | None]:
        return [ctx.maker.add(entry.name, (ctx.grad,), ctx.attributes)[0]]

    rule = gradient if entry.df is not None else linear_gradient if entry.linear else no_gradient
    register(
        Operator(
            entry.name,
            types=None if entry.name in _NOT_ONLY_REAL else _real_types(entry.name),
            compute=compute,
            work=lambda s: memory_bound(s, entry.flops),
            gradient=rule,
            sharding=sharding,
        )
    )
    if entry.df is not None:
        register(
            Operator(
                grad_name,
                types=grad_types(grad_name),
                compute=compute_grad,
                work=lambda s: memory_bound(s, 2 * entry.flops),
                sharding=lambda s: same_shape_rule(s, ((1,),)),
            )
        )


for _entry in UNARY:
    _register(_entry)
