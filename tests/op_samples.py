"""A sample of an operator: an op and arrays for its values, from which :mod:`op_checks` checks its rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distsim.ir import Tensor
from distsim.ir.registry import output_types
from distsim.ir.type import from_numpy
from distsim.ir.value import Attributes
from distsim.ops import Signature


@dataclass(frozen=True)
class Sample:
    """An op: its values, attributes and operator set. ``grads`` are the outputs that carry a gradient.

    What a gradient rule refuses, with an error, is said: ``refused`` inputs, which have no gradient, and
    ``unused`` outputs, which may not influence the loss. Nothing else of a floating-point type is left out:
    where there are no ``grads``, the rule refuses them all.
    """

    op_type: str
    arrays: tuple[np.ndarray, ...]
    attributes: Attributes = field(default_factory=Attributes)
    version: int | None = None
    grads: tuple[int, ...] = (0,)
    refused: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()

    @property
    def wanted(self) -> list[bool]:
        """The inputs that have a gradient: all of a floating-point type but those refused."""
        return [t.dtype.is_floating and i not in self.refused for i, t in enumerate(self.types)]

    @property
    def types(self) -> tuple[Tensor, ...]:
        return tuple(Tensor(from_numpy(array.dtype), array.shape) for array in self.arrays)

    @property
    def signature(self) -> Signature:
        made = output_types(self.op_type, self.attributes, self.types, (), self.version)
        return Signature(self.op_type, self.attributes, self.types, made, self.version)

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, a.shape)) or "-" for a in self.arrays)
        options = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op_type}({shapes};{options}){'' if self.version is None else self.version}"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, none within 0.05 of zero, where many functions have a kink."""
    array = np.random.default_rng((seed, *shape)).normal(size=shape)
    return np.asarray(array + np.copysign(0.05, array))


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers from 0.5 to 2."""
    return np.asarray(np.random.default_rng((seed, 1, *shape)).uniform(0.5, 2.0, size=shape))


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers from -0.9 to 0.9, none within 0.01 of zero."""
    array = np.random.default_rng((seed, 2, *shape)).uniform(-0.89, 0.89, size=shape)
    return np.asarray(array + np.copysign(0.01, array))


def integers(*shape: int, high: int = 4, low: int = 0, seed: int = 0) -> np.ndarray:
    """Integers from low to high - 1."""
    return np.asarray(np.random.default_rng((seed, 3, *shape)).integers(low, high, size=shape))


def sample(
    op_type: str,
    *arrays: np.ndarray | tuple[int, ...],
    version: int | None = None,
    grads: tuple[int, ...] = (0,),
    refused: tuple[int, ...] = (),
    unused: tuple[int, ...] = (),
    **attributes: Any,
) -> Sample:
    """Return a sample; a tuple stands for normal numbers of that shape, others at every place."""
    made = (
        normal(*item, seed=place) if isinstance(item, tuple) else np.asarray(item)
        for place, item in enumerate(arrays)
    )
    return Sample(op_type, tuple(made), Attributes(attributes), version, grads, refused, unused)
