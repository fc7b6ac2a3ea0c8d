"""Computing what is known at import: shape arithmetic, masks, positions; with a limit on time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import ImportModelError
from distsim.importer.limits import COMPUTED_ELEMENTS, TOTAL_ELEMENTS
from distsim.importer.values.operands import Entry
from distsim.ir.registry import output_types
from distsim.ir.type import Tensor, as_tensor, from_numpy
from distsim.ir.value import Attributes, Value
from distsim.ops import compute
from distsim.ops.operator import Array

_ELEMENTWISE = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Cos", "Div", "Equal", "Erf", "Exp", "Floor", "Greater"}
    | {"GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mod", "Mul"}
    | {"Neg", "Not", "Or", "Pow", "Reciprocal", "Round", "Sigmoid", "Sign", "Sin", "Sqrt", "Sub", "Sum"}
    | {"Tanh", "Where", "Xor"}
)
_OTHER = frozenset(
    {"ArgMax", "ArgMin", "CastLike", "Clip", "Compress", "Concat", "ConstantOfShape", "CumSum", "Expand"}
    | {"EyeLike", "Flatten", "Gather", "GatherElements", "GatherND", "NonZero", "OneHot", "Pad", "Range"}
    | {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "ScatterElements"}
    | {"ScatterND", "Slice", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze"}
)
"""All take time in proportion to their operands and results; others (MatMul, Einsum) are not folded."""

_SLOW: Mapping[str, int] = {"ScatterElements": 16, "ScatterND": 32}
"""What ``onnx.reference`` computes element by element in Python: 1 to 2.5 us each, others below 0.06 us."""

_DATA_SIZED = frozenset({"NonZero", "Compress"})
"""Computed without a type rule: the size of the output is at most that of the operand."""


class Folder:
    """Computes ops on known operands, as long as results stay small, one by one and together."""

    def __init__(self) -> None:
        self._left = TOTAL_ELEMENTS
        # What was found by looking at all elements, by id of an array that is kept alive: once each, however
        # many ops read it.
        self._looked: dict[tuple[int, int], bool] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._alive: list[Array] = []

    @np.errstate(all="ignore")  # what is divided by zero or cut to an integer is so in the model too
    def fold(
        self, op_type: str, attributes: Attributes, version: int | None, operands: Sequence[Entry], count: int
    ) -> Sequence[Array] | None:
        """Return the results of an op; None when an operand is unknown, or a result large."""
        known = [entry for entry in operands if not isinstance(entry, Value)]
        elementwise = op_type in _ELEMENTWISE
        if len(known) < len(operands) or not (elementwise or op_type in _OTHER):
            return None
        if op_type in _DATA_SIZED:
            size = sum(array.size * max(1, array.ndim) for array in known)
            return self._compute(op_type, attributes, version, known, count) if self._affords(size) else None
        types = tuple([Tensor(from_numpy(array.dtype), array.shape) for array in known])
        made = [as_tensor(t, op_type) for t in output_types(op_type, attributes, types, (), version)]
        if op_type == "Expand":
            return [np.broadcast_to(known[0], made[0].shape)]  # takes no memory
        if elementwise:
            known = [self._compact(array, known) for array in known]
            size = math.prod(
                np.broadcast_shapes(*[array.shape for array in known], _static_shape(attributes))
            )
            if not self._affords(size):
                return None
            result = self._compute(op_type, attributes, version, known, count)[0]
            return [np.broadcast_to(result.astype(made[0].dtype.np, copy=False), made[0].shape)]
        size = sum(t.size for t in made) + sum(array.size for array in known)
        if not self._affords(size * _SLOW.get(op_type, 1)):
            return None
        results = self._compute(op_type, attributes, version, known, count)
        for type_, result in zip(made, results, strict=False):
            if result.shape != type_.shape:
                raise ImportModelError(f"computes to shape {list(result.shape)}, its type is {type_}")
        return [r.astype(t.dtype.np, copy=False) for t, r in zip(made, results, strict=False)]

    def _affords(self, size: int) -> bool:
        if size > COMPUTED_ELEMENTS or (size > self._left and size > 64):
            return False
        self._left -= size
        return True

    def _compute(
        self,
        op_type: str,
        attributes: Attributes,
        version: int | None,
        known: Sequence[Array],
        count: int,
    ) -> Sequence[Array]:
        try:
            return compute(op_type, attributes, version, known, count)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ImportModelError(f"cannot be computed from the constants that it reads: {error}") from error

    def shrink(self, op_type: str, inputs: Sequence[Entry | None]) -> Sequence[Entry | None]:
        """Return the operands with constants that repeat along an axis shortened where the op repeats them.

        A mask of [batch, 1, s, s] added to scores of [batch, heads, s, s] becomes [1, 1, s, s]: it takes
        less memory and does not tie the function to its batch.
        """
        values = [as_tensor(entry.type, entry.name).shape for entry in inputs if isinstance(entry, Value)]
        if op_type not in (*_ELEMENTWISE, "Attention") or not values:
            return inputs
        made: list[Entry | None] = []
        for entry in inputs:
            if isinstance(entry, np.ndarray):
                full = [
                    k
                    for k in range(1, entry.ndim + 1)
                    if any(len(s) >= k and s[-k] == entry.shape[-k] for s in values)
                ]
                entry = _shortened(
                    entry, [k for k in full if entry.shape[-k] > 1 and self._repeats(entry, k)]
                )
            made.append(entry)
        return made

    def bounds(self, indices: Array) -> tuple[int, int]:
        """Return the least and the greatest of the integers."""
        found = self._bounds.get(id(indices))
        if found is None:
            small = without_repeats(indices)
            found = self._bounds[id(indices)] = int(small.min()), int(small.max())
            self._alive.append(indices)
        return found

    def _compact(self, array: Array, together: Sequence[Array]) -> Array:
        """Return the array shortened along the axes on which all operands repeat themselves."""
        axes = [
            k
            for k in range(1, array.ndim + 1)
            if array.shape[-k] > 1
            and all(other.ndim < k or other.shape[-k] == 1 or self._repeats(other, k) for other in together)
        ]
        return _shortened(array, axes)

    def _repeats(self, array: Array, k: int) -> bool:
        """Return whether the array is the same all along its axis ``k`` from the end."""
        if array.shape[-k] <= 1 or array.strides[-k] == 0:
            return True
        key = (id(array), k)
        if key not in self._looked:
            self._looked[key] = _is_constant_along(array, k)
            self._alive.append(array)
        return self._looked[key]


def shape_constant(op_type: str, entry: Entry, attributes: Mapping[str, Any]) -> Array:
    """Return the result of ``Shape`` or ``Size``, which all values have."""
    shape = as_tensor(entry.type, entry.name).shape if isinstance(entry, Value) else entry.shape
    if op_type == "Size":
        return np.asarray(math.prod(shape), np.int64)
    return np.asarray(shape[attributes.get("start", 0) : attributes.get("end")], np.int64)


def repeated_axes(array: Array) -> tuple[int, ...]:
    """Return the axes, counted from the end (1 is the last), along which a large view repeats itself."""
    return tuple(k for k in range(1, array.ndim + 1) if array.shape[-k] > 1 and array.strides[-k] == 0)


def without_repeats(array: Array) -> Array:
    """Return the part of a view that :func:`repeated_axes` repeat."""
    return _shortened(array, repeated_axes(array))


def _shortened(array: Array, axes: Sequence[int]) -> Array:
    """Return the first part of an array along these axes, counted from the end."""
    index = [slice(None)] * array.ndim
    for k in axes:
        index[-k] = slice(0, 1)
    return array[tuple(index)] if axes else array


def _is_constant_along(array: Array, k: int) -> bool:
    if array.size > COMPUTED_ELEMENTS:
        return False
    first = array[tuple(slice(0, 1) if axis == array.ndim - k else slice(None) for axis in range(array.ndim))]
    return bool((array == first).all())


def _static_shape(attributes: Attributes) -> tuple[int, ...]:
    sizes = [value.array.size for value in attributes.values() if hasattr(value, "array")]
    return (max(sizes),) if sizes and max(sizes) > 1 else ()
