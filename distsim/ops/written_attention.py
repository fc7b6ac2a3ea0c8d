"""Attention written out in ops, as it runs where no kernel does it all: "math" attention.

Scores of [batch, heads, seq, kv_seq] are written and read by every op: products, scale, cap, mask, softmax,
dropout, product. Where query heads share a key and a value head, the products are broadcast over the group
([batch, kv_heads, group, seq, kv_seq]): nothing is repeated in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.ir.maker import FunctionMaker
from distsim.ir.type import Bool, as_tensor
from distsim.ir.value import Attributes, Literal, Value
from distsim.ops.attention_options import ATTENTION_FORMALS, AttentionOptions, AttentionSizes
from distsim.ops.onnx_bridge import static_array
from distsim.ops.places import places, shape_of
from distsim.ops.softmax import CAUSAL


def write_attention(
    maker: FunctionMaker,
    inputs: Sequence[Value],
    attributes: Mapping[str, Any] | None = None,
    name: str = "attention",
    op_name: str = "",
    causal_mask: bool = False,
) -> Value:
    """Add the ops that an ``Attention`` of these inputs and attributes stands for; return its Y, ``name``.

    ``op_name`` is that of every op. ``causal_mask``: the mask among the inputs hides all after the diagonal,
    and may hide more. The result is that of the op, but for a query that sees no key at all
    (the op gives zeros, a softmax of nothing is not a number). Raises what the op's type rule raises.

    >>> from distsim.ir import Float, Tensor
    >>> maker = FunctionMaker("f")
    >>> qkv = [maker.add_input_value(name, Tensor(Float(), (2, 4, 8, 16))) for name in "qkv"]
    >>> write_attention(maker, qkv, {"is_causal": 1})
    attention: f32[2, 4, 8, 16]
    >>> [op.op_type for op in maker.ops]  # doctest: +NORMALIZE_WHITESPACE
    ['Transpose', 'MatMul', 'Mul', 'ConstantOfShape', 'Trilu', 'Add', 'Softmax', 'MatMul']
    """
    writer = _AttentionWriter(maker, inputs, Attributes(attributes or {}), op_name)
    writer.causal |= causal_mask
    return writer.write(name)


class _AttentionWriter:
    """Writes one attention into a maker."""

    def __init__(
        self, maker: FunctionMaker, inputs: Sequence[Value], attributes: Attributes, op_name: str
    ) -> None:
        self.maker, self.op_name = maker, op_name
        self.options = AttentionOptions.of_attributes(attributes)
        self.query, self.key, self.value = inputs[:3]
        self.sizes = AttentionSizes.of_shapes(*(shape_of(value) for value in inputs[:3]))
        self.type = as_tensor(self.query.type, self.query.name)
        self.causal = self.options.is_causal
        index = places(ATTENTION_FORMALS, attributes, len(inputs))
        self.mask = inputs[index["attn_mask"]] if "attn_mask" in index else None
        if "attn_mask" in attributes:
            self.mask = self.constant(static_array(attributes["attn_mask"], self.type.dtype))

    def add(self, op_type: str, *inputs: Value, called: str | None = None, **attributes: Any) -> Value:
        names = None if called is None else [called]
        return self.maker.add(op_type, inputs, attributes, output_names=names, name=self.op_name)[0]

    def constant(self, array: Any) -> Value:
        return self.add("Constant", value=Literal(array), **self.placed())

    def placed(self) -> dict[str, Any]:
        return {} if self.type.device is None else {"device": self.type.device}

    def write(self, name: str) -> Value:
        """Add all ops."""
        sizes, options = self.sizes, self.options
        grouped = sizes.group > 1
        query, key, value = self.query, self.key, self.value
        if grouped:
            shape = (sizes.batch, sizes.kv_heads, sizes.group, sizes.seq, sizes.size)
            query = self.add("Reshape", query, shape=shape)
            key, value = (self.add("Unsqueeze", v, axes=(2,)) for v in (key, value))
        turned = self.turned(key, 5 if grouped else 4)
        scores = self.add("MatMul", query, turned, called="scores")
        scale = 1.0 / float(np.sqrt(sizes.size)) if options.scale is None else options.scale
        if scale != 1:
            scores = self.add("Mul", scores, called="scaled", B=scale)
        if options.softcap:
            capped = self.add("Tanh", self.add("Mul", scores, B=1.0 / options.softcap))
            scores = self.add("Mul", capped, called="capped", B=options.softcap)
        scores = self.masked(scores, grouped)
        square = self.causal and sizes.seq == sizes.kv_seq
        marks = {CAUSAL: 1} if square else {}
        mixed = self.add("Softmax", scores, called="probabilities", axis=-1, **marks)
        if options.dropout:
            drawn = {
                "ratio": np.array(options.dropout),
                "training_mode": np.array(True),
                "seed": options.seed,
            }
            mixed = self.add("Dropout", mixed, called="dropped", **drawn)
        if not grouped:
            return self.add("MatMul", mixed, value, called=name)
        return self.add("Reshape", self.add("MatMul", mixed, value), called=name, shape=sizes.output)

    def turned(self, key: Value, rank: int) -> Value:
        """Return [..., size, seq] of a key: by one op from its source if it was transposed to be one."""
        perm = (*range(rank - 2), rank - 1, rank - 2)
        made = next((op for op in reversed(self.maker.ops) if key in op.outputs), None)
        if made is not None and made.op_type == "Transpose" and "perm" in made.attributes:
            before: tuple[int, ...] = tuple(made.attributes["perm"])
            key, perm = made.inputs[0], tuple(before[axis] for axis in perm)
        return self.add("Transpose", key, perm=perm)

    def masked(self, scores: Value, grouped: bool) -> Value:
        """Hide what is not seen."""
        options, mask = self.options, self.mask
        if options.is_causal:
            scores = self.add("Add", scores, self.hidden(k=1, upper=1), called="masked")
        if options.window is not None and options.window < self.sizes.seq:
            scores = self.add("Add", scores, self.hidden(k=-options.window, upper=0), called="windowed")
        if mask is None:
            return scores
        mask = self.by_group(mask) if grouped else mask
        if as_tensor(mask.type, mask.name).dtype == Bool():
            return self.add("Where", mask, scores, called="allowed", Y=self.fill(-math.inf, ()))
        if as_tensor(mask.type, mask.name).dtype != self.type.dtype:
            mask = self.add("CastLike", mask, scores)
        return self.add("Add", scores, mask, called="allowed")

    def hidden(self, k: int, upper: int) -> Value:
        """Return the table [seq, kv_seq] that is -inf on one side of a diagonal."""
        shape = (self.sizes.seq, self.sizes.kv_seq)
        infinite = self.add("ConstantOfShape", input=shape, value=self.fill(-math.inf, (1,)), **self.placed())
        return self.add("Trilu", infinite, k=k, upper=upper)

    def fill(self, number: float, shape: tuple[int, ...]) -> Literal:
        return Literal(np.full(shape, number, self.type.dtype.np))

    def by_group(self, mask: Value) -> Value:
        """Return a mask over heads as one over groups and the heads in them."""
        shape = shape_of(mask)
        if len(shape) < 3:
            return mask
        heads = (self.sizes.kv_heads, self.sizes.group) if shape[-3] > 1 else (1, 1)
        return self.add("Reshape", mask, shape=(*shape[:-3], *heads, *shape[-2:]))
