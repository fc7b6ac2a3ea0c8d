"""Checks of what an op would do, beyond its type rule: mistakes that would pass unnoticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import ImportModelError
from distsim.importer.folding import shape_constant, without_repeats
from distsim.importer.operands import Entry
from distsim.importer.tensors import MAX_ELEMENTS
from distsim.ir.op import Value
from distsim.ir.type import Tensor, as_tensor


def check_indices(inputs: Sequence[Entry | None], attributes: Mapping[str, Any]) -> None:
    """Known indices must be inside: positions beyond the table, say, when ``seq`` is too long."""
    data, indices = inputs[0], inputs[1]
    if not isinstance(data, Value) or not isinstance(indices, np.ndarray) or not indices.size:
        return
    shape = as_tensor(data.type, data.name).shape
    axis = attributes.get("axis", 0)
    if not -len(shape) <= axis < len(shape):
        raise ImportModelError(f"gathers along axis {axis} of {data!r}")
    indices = without_repeats(indices)
    low, high = int(indices.min()), int(indices.max())
    if low < -shape[axis] or high >= shape[axis]:
        raise ImportModelError(
            f"takes the indices {low} to {high} of {data!r}, which has {shape[axis]} entries on axis {axis}; "
            "a symbolic dimension is bound to more than the model was made for"
        )


def check_legacy(inputs: Sequence[Entry | None], axis: int) -> None:
    """Before operator set 7 the second operand could stand anywhere; today it stands at the end."""
    ranks = [len(shape_constant("Shape", entry, {})) for entry in inputs if entry is not None]
    if len(ranks) == 2 and axis not in (ranks[0] - ranks[1], -ranks[1]):
        raise ImportModelError(
            f"broadcasts from axis {axis} as operator sets before 7 did; convert the model with "
            "onnx.version_converter"
        )


def check_reshape(values: Sequence[Value], made: Sequence[Value]) -> None:
    """A Reshape keeps the number of elements, which ONNX's type rule does not check."""
    before, after = as_tensor(values[0].type, "data"), as_tensor(made[0].type, "reshaped")
    if before.size != after.size:
        raise ImportModelError(f"makes {after} of {before}: the number of elements must stay the same")


def check_size(type_: Tensor) -> None:
    """Raise when no machine could hold a tensor."""
    if type_.size > MAX_ELEMENTS:
        raise ImportModelError(f"makes a tensor of shape {list(type_.shape)}: more than 2^46 elements")
