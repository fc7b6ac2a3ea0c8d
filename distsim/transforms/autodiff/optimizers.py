"""How parameters are updated from their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Protocol

from distsim.errors import PlanError, TypeRuleError
from distsim.ir import DType, FunctionMaker, Role, Value
from distsim.ir.type import Tensor, as_tensor, dtype_named
from distsim.suggestions import choices_for, did_you_mean
from distsim.transforms.autodiff.precision import Precision


class Optimizer(Protocol):
    """Adds the update of a parameter to a function."""

    def update(
        self, maker: FunctionMaker, weight: Value, grad: Value, precision: Precision | None
    ) -> tuple[Value, ...]:
        """Return the new parameter, then its new state; the state comes in as inputs of role STATE.

        ``precision`` says of which types the state is, and whether there is a master copy of the parameter,
        which counts as its last state; None: state is of the parameter's type, and there is no master copy.
        """
        ...


def _check_finite(**figures: float) -> None:
    for name, figure in figures.items():
        if not math.isfinite(figure):
            raise PlanError(f"{name}={figure} must be a finite number")


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: ``w - lr * g``; with ``momentum``, of a velocity that it keeps.

    The velocity is ``v' = momentum * v + g`` (Sutskever et al. 2013, as torch.optim.SGD has it), of type
    ``state``, or of that name (None: that of the precision). ``weight_decay * w`` is added to each gradient.
    ``kernel``: "multi" where a policy of kernels updates many parameters with a launch, "single" for one
    each, "foreach" for torch's sequence of kernels, which read and write each of them several times
    (:func:`distsim.ops.optimizers.passes`).

    >>> SGD(lr=0.1, momentum=0.9) == optimizer_named("momentum:lr=0.1")
    True
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    state: DType | None = None
    kernel: str = "multi"

    def __post_init__(self) -> None:
        _name_types(self, "state")
        _check_kernel(self.kernel)
        _check_finite(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def update(
        self, maker: FunctionMaker, weight: Value, grad: Value, precision: Precision | None = None
    ) -> tuple[Value, ...]:
        """Return the new parameter, then its velocity if it has one, then its master copy if it has one."""
        attributes = {"lr": self.lr} | _set(weight_decay=self.weight_decay) | _kernel(self.kernel)
        if not self.momentum:
            return _add(maker, "SGDOptimizer", (weight, grad), attributes, {}, precision)
        attributes["momentum"] = self.momentum
        return _add(maker, "MomentumOptimizer", (weight, grad), attributes, {"v": self.state}, precision)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015): two moments per parameter.

    Of types (or their names) ``mean`` and ``square``, by default those of the precision, without one the
    parameter's. ``weight_decay * w`` is added to each gradient. ``kernel`` is as :class:`SGD` has it.

    >>> Adam(beta2=0.95) == optimizer_named("adam:beta2=0.95")
    True
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    step: int = 1
    weight_decay: float = 0.0
    mean: DType | None = None
    square: DType | None = None
    kernel: str = "multi"

    def __post_init__(self) -> None:
        _name_types(self, "mean", "square")
        _check_kernel(self.kernel)
        _check_finite(
            lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=self.weight_decay
        )
        if self.step < 1 or not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise PlanError(f"{self}: step must be at least 1, beta1 and beta2 in [0, 1)")

    def update(
        self, maker: FunctionMaker, weight: Value, grad: Value, precision: Precision | None = None
    ) -> tuple[Value, ...]:
        """Return the new parameter, its new moments, then its master copy if it has one."""
        names = ("lr", "beta1", "beta2", "eps", "step")
        attributes = {name: getattr(self, name) for name in names} | self._decay() | _kernel(self.kernel)
        moments = {"m": self.mean, "v": self.square}
        return _add(maker, "AdamOptimizer", (weight, grad), attributes, moments, precision)

    def _decay(self) -> dict[str, Any]:
        return _set(weight_decay=self.weight_decay)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weights decay by themselves, by ``lr * weight_decay * w`` (Loshchilov and Hutter 2019).

    >>> AdamW().weight_decay
    0.01
    """

    weight_decay: float = 0.01

    def _decay(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "decoupled": True}


def _check_kernel(kernel: str) -> None:
    if kernel not in ("multi", "single", "foreach"):
        raise PlanError(f"kernel={kernel} is not one of multi, single, foreach")


def _kernel(kernel: str) -> dict[str, Any]:
    """Return the attribute of an optimizer that runs other kernels than one for many parameters."""
    return {} if kernel == "multi" else {"kernel": kernel}


def _set(**figures: float) -> dict[str, Any]:
    """Return the figures that are not zero."""
    return {name: figure for name, figure in figures.items() if figure}


def _add(
    maker: FunctionMaker,
    op_type: str,
    pair: tuple[Value, Value],
    attributes: Mapping[str, Any],
    states: Mapping[str, DType | None],
    precision: Precision | None,
) -> tuple[Value, ...]:
    """Add the update of a parameter by its gradient; states, by name, are of a type or the usual one."""
    weight = pair[0]
    own = as_tensor(weight.type, weight.name)
    usual = [own.dtype if precision is None else precision.state(place) for place in range(len(states))]
    kept = {name: given or other for (name, given), other in zip(states.items(), usual, strict=True)}
    if precision is not None and precision.master is not None:
        kept["master"] = precision.master
    inputs = [
        maker.add_input_value(f"{weight.name}.{name}", Tensor(dtype, own.shape, own.device), Role.STATE)
        for name, dtype in kept.items()
    ]
    names = [f"{weight.name}.new", *[f"{weight.name}.{name}.new" for name in kept]]
    return maker.add(op_type, [*pair, *inputs], attributes, output_names=names)


Named = SGD | Adam

OPTIMIZERS: dict[str, type[SGD] | type[Adam]] = {"adam": Adam, "adamw": AdamW, "momentum": SGD, "sgd": SGD}


def optimizer_named(text: str) -> Named:
    """Return the optimizer of that name with its usual settings, or those that follow the name.

    Raises :class:`PlanError` for an unknown name, and for a setting that is unknown or of another kind.

    >>> optimizer_named("adamw:beta2=0.95,mean=bf16").beta2
    0.95
    """
    name, colon, options = text.partition(":")
    if name not in OPTIMIZERS:
        raise PlanError(f"optimizer {name!r} is not one of {choices_for(name, OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    known = {field.name: field for field in fields(kind)}
    given: dict[str, Any] = {"momentum": 0.9} if name == "momentum" else {}
    for item in options.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in known:
            raise PlanError(
                f"optimizer {text!r}: {item.strip()!r} is not a setting of {name}; choose from "
                f"{', '.join(known)}, as in {name}:lr=0.1{did_you_mean(key, known)}"
            )
        given[key] = _setting(text, known[key], value)
    return kind(**given)


def _setting(text: str, field: Field[Any], value: str) -> Any:
    try:
        if field.default is None:
            return _state_type(value)
        return value if isinstance(field.default, str) else type(field.default)(value)
    except (ValueError, TypeRuleError) as error:
        raise PlanError(f"optimizer {text!r}: {field.name}={value!r}: {error}") from None


def _name_types(optimizer: object, *names: str) -> None:
    """Replace the names of types in fields of an optimizer by the types."""
    for name in names:
        given = getattr(optimizer, name)
        if isinstance(given, str):
            object.__setattr__(optimizer, name, _state_type(given))


def _state_type(name: str) -> DType:
    dtype = dtype_named(name)
    if not dtype.is_floating:
        raise TypeRuleError("choose a floating-point type")
    return dtype
