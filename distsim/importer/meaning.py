"""Checks of what an op would do, beyond its type rule: mistakes that would pass unnoticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import ImportModelError
from distsim.importer.folding import Folder, shape_constant
from distsim.importer.limits import check_shape
from distsim.importer.operands import Entry
from distsim.ir.type import Tensor, as_tensor
from distsim.ir.value import Value


def check_indices(inputs: Sequence[Entry | None], attributes: Mapping[str, Any], folder: Folder) -> None:
    """Known indices must be inside: positions beyond the table, say, when ``seq`` is too long."""
    data, indices = inputs[0], inputs[1]
    if data is None or not isinstance(indices, np.ndarray) or not indices.size or indices.dtype.kind != "i":
        return
    shape = as_tensor(data.type, data.name).shape if isinstance(data, Value) else data.shape
    axis = attributes.get("axis", 0)
    if not -len(shape) <= axis < len(shape):
        raise ImportModelError(f"gathers along axis {axis} of a tensor of shape {list(shape)}")
    low, high = folder.bounds(indices)
    if low < -shape[axis] or high >= shape[axis]:
        raise ImportModelError(
            f"takes the indices {low} to {high} of {data if isinstance(data, Value) else list(shape)!r}, "
            f"which has {shape[axis]} entries on axis {axis}; "
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


def check_size(type_: Tensor) -> None:
    """Raise when no machine could hold a tensor."""
    check_shape("makes a tensor that", type_.shape)
