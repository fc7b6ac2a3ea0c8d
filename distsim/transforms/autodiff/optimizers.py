"""How parameters are updated from their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from distsim.errors import PlanError
from distsim.ir import FunctionMaker, Role, Value


class Optimizer(Protocol):
    """Adds the update of a parameter to a function."""

    def update(self, maker: FunctionMaker, weight: Value, grad: Value) -> tuple[Value, ...]:
        """Return the new parameter, then its new state; the state comes in as inputs of role STATE."""
        ...


def _check_finite(**figures: float) -> None:
    for name, figure in figures.items():
        if not math.isfinite(figure):
            raise PlanError(f"{name}={figure} must be a finite number")


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: ``w - lr * g``, no state."""

    lr: float = 0.01

    def __post_init__(self) -> None:
        _check_finite(lr=self.lr)

    def update(self, maker: FunctionMaker, weight: Value, grad: Value) -> tuple[Value, ...]:
        """Return the new parameter."""
        return maker.add("SGDOptimizer", [weight, grad], {"lr": self.lr}, output_names=[f"{weight.name}.new"])


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015): two moments per parameter, of the parameter's type."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    step: int = 1

    def __post_init__(self) -> None:
        _check_finite(lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps)
        if self.step < 1 or not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise PlanError(f"{self}: step must be at least 1, beta1 and beta2 in [0, 1)")

    def update(self, maker: FunctionMaker, weight: Value, grad: Value) -> tuple[Value, ...]:
        """Return the new parameter, then its new moments."""
        attributes = {
            "lr": self.lr,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "step": self.step,
        }
        moments = [
            maker.add_input_value(f"{weight.name}.{name}", weight.type, Role.STATE) for name in ("m", "v")
        ]
        names = [f"{weight.name}.new", f"{weight.name}.m.new", f"{weight.name}.v.new"]
        return maker.add("AdamOptimizer", [weight, grad, *moments], attributes, output_names=names)


OPTIMIZERS: dict[str, type[SGD] | type[Adam]] = {"adam": Adam, "sgd": SGD}


def optimizer_named(name: str) -> Optimizer:
    """Return the optimizer of that name with its usual settings."""
    if name not in OPTIMIZERS:
        raise PlanError(f"optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]()
