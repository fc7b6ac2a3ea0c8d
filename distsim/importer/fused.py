"""ONNX's kernels of attention (operator set 23 and later) as the operators of the house.

Operands with their heads in one dimension, [batch, seq, heads * size], are brought into four. What an
operator of the house does not do (a cache of keys and values) has to be written out; so have the scores,
beside it, which are no result of the kernel: where nobody needs them, they are left out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx.helper

from distsim.errors import ImportModelError
from distsim.importer.values.operands import Entry
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import as_tensor
from distsim.ir.value import Value
from distsim.ops.places import shape_of

FUSED = frozenset({"Attention", "RotaryEmbedding"})
"""The operators of ONNX that have a form of the house."""

_HEADS = {"Attention": ("q_num_heads", "kv_num_heads", "kv_num_heads"), "RotaryEmbedding": ("num_heads",)}


RESULTS = 3
"""How many results of a node :func:`add_fused` makes, if there are so many; the scores are another."""


def house_attributes(
    op_type: str, attributes: Mapping[str, Any], inputs: Sequence[Entry | None]
) -> dict[str, Any] | None:
    """Return the attributes of the operator of the house; None where it does not do what the node does."""
    if op_type == "RotaryEmbedding":
        return {name: value for name, value in attributes.items() if name != "num_heads"}
    if any(entry is not None for entry in inputs[4:]):
        return None  # a cache, or the number of keys in it
    query, key, value, mask = ([*map(_dtype, inputs[:4]), None] * 2)[:4]
    if query is None or query != key or key != value or (mask is not None and mask.kind in "iu"):
        return None
    wide = np.dtype(np.float64 if query == np.float64 else np.float32)
    number = int(onnx.helper.np_dtype_to_tensor_dtype(wide))
    if attributes.get("softmax_precision", number) != number:
        return None
    window = _window(attributes)
    return (
        None
        if window is None
        else {n: attributes[n] for n in ("scale", "softcap") if n in attributes} | window
    )


def _window(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is seen, as attributes of the house; None for windows that it does not have."""
    left, right = (int(attributes.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    causal = bool(attributes.get("is_causal", 0)) or right == 0
    if right > 0 and not causal:
        return None
    made: dict[str, Any] = {"is_causal": 1} if causal else {}
    return made | ({"window": left + 1} if left >= 0 else {})


def _dtype(entry: Entry | None) -> np.dtype[Any] | None:
    if isinstance(entry, Value):
        return as_tensor(entry.type, entry.name).dtype.np
    return None if entry is None else entry.dtype


def add_fused(
    maker: FunctionMaker,
    op_type: str,
    values: Sequence[Value],
    attributes: Mapping[str, Any],
    given: Mapping[str, Any],
    names: tuple[str, str],
) -> tuple[Value, ...]:
    """Add the operator of the house; return the results that ONNX's has, up to :data:`RESULTS`.

    ``attributes`` are those of the house, ``given`` those of the node, ``names`` that of the op and that of
    its first result. Raises :class:`ImportModelError` where heads do not divide three dimensions.
    """
    formals = _HEADS[op_type]
    if any(len(shape_of(value)) != 3 for value in values[: len(formals)]):
        if op_type == "RotaryEmbedding":
            return maker.add(op_type, values, attributes, output_names=[names[1]], name=names[0])
        own = [names[1], f"{names[1]}_lse"]
        return maker.add(op_type, values, attributes, output_names=own, name=names[0])[0], *values[1:3]

    def add(op: str, value: Value, called: str | None = None, **options: Any) -> Value:
        outputs = None if called is None else [called]
        return maker.add(op, [value], options, output_names=outputs, name=names[0])[0]

    apart: list[Value] = []
    for value, formal in zip(values, formals, strict=False):
        (batch, seq, hidden), count = shape_of(value), int(given.get(formal, 0))
        if count < 1 or hidden % count:
            raise ImportModelError(
                f"has {formal}={count}, which does not divide {value} into heads; operands of three "
                "dimensions need it"
            )
        apart.append(add("Reshape", value, shape=(batch, seq, count, hidden // count)))
    if op_type == "RotaryEmbedding":
        turned = maker.add(op_type, [*apart, *values[1:]], {**attributes, "seq_axis": 1}, name=names[0])[0]
        return (add("Reshape", turned, names[1], shape=shape_of(values[0])),)
    heads = [add("Transpose", value, perm=(0, 2, 1, 3)) for value in apart]
    mixed = maker.add(op_type, [*heads, *values[3:]], attributes, name=names[0])[0]
    batch, count, seq, size = shape_of(mixed)
    joined = add("Transpose", mixed, perm=(0, 2, 1, 3))
    return add("Reshape", joined, names[1], shape=(batch, seq, count * size)), heads[1], heads[2]
