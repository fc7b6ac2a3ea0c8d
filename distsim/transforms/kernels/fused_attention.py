"""The op Attention in the place of one that was found: its operands brought to four dimensions, its mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distsim.errors import DistsimError
from distsim.ir import FunctionMaker, Op, Value
from distsim.ir.type import Bool, as_tensor
from distsim.ops.attention_options import AttentionOptions, seen
from distsim.ops.operator import Array
from distsim.ops.places import shape_of
from distsim.transforms.kernels.axes import Dims, Step, steps_to
from distsim.transforms.kernels.known import Changes, FunctionScope
from distsim.transforms.kernels.recognition import HIDDEN, FoundAttention, Mask, NoAttentionError, Operand


class OpWriter(FunctionMaker):
    """Makes the ops that stand for one op, whose inputs they read and whose name they have."""

    def __init__(self, given: Sequence[Value], name: str) -> None:
        super().__init__(name)
        self.adopt_inputs(given)

    def one(self, op_type: str, *inputs: Value, **attributes: Any) -> Value:
        """Add an op with one output."""
        return self.add(op_type, inputs, attributes, name=self.name)[0]

    def standing_for(self, value: Value, result: Value) -> tuple[Op, ...]:
        """Return the ops, of which the one that makes ``result`` makes ``value``."""
        made: list[Op] = []
        for op in self.ops:
            outputs = tuple([value if output is result else output for output in op.outputs])
            made.append(op if outputs == op.outputs else replace(op, outputs=outputs))
        return tuple(made)


def joined(one: AttentionOptions, other: AttentionOptions) -> AttentionOptions:
    """Return the first with what the other one hides hidden too."""
    window = min([each.window for each in (one, other) if each.window is not None], default=None)
    return replace(one, is_causal=one.is_causal or other.is_causal, window=window)


def as_options(mask: Array, scores: tuple[int, int]) -> AttentionOptions | None:
    """Return what a mask says, if it is that of causal attention, of a window, or of all; else None.

    A mask is boolean (what is seen), or added: 0 where a key is seen, ``HIDDEN`` or less where not.

    >>> as_options(np.tri(4, dtype=bool), (4, 4))
    AttentionOptions(is_causal=True, scale=None, softcap=0.0, window=None, dropout=0.0, seed=0, kernel='')
    """
    if mask.dtype == np.bool_:
        visible = mask
    else:
        visible = mask == 0
        if not (visible | (mask <= HIDDEN)).all():
            return None
    table = visible.reshape(-1, *((1, 1, *visible.shape)[-2:]))
    if not (table == table[:1]).all():
        return None
    seq, kv_seq = scores
    visible = np.broadcast_to(table[0], scores)
    if visible.all():
        return AttentionOptions()
    first = int(np.argmax(visible[-1]))
    window = None if first == 0 else max(seq - first, 1)
    for options in (AttentionOptions(is_causal=True, window=window), AttentionOptions(window=window)):
        expected = seen(np.arange(seq), np.arange(kv_seq), options)
        if expected is not None and np.array_equal(visible, expected):
            return options
    return None


def fused_attention(scope: FunctionScope, found: FoundAttention) -> Changes:
    """Return the ops in the place of the last op of what was found, whose output the last of them makes.

    Where groups of heads are all that is done with that output, they stand for the op that makes heads of
    them. Raises :class:`NoAttentionError` where the operator has no form for it.
    """
    try:
        return _Fusion(scope, found).changes()
    except NoAttentionError as error:
        error.is_close = True
        raise


class _Fusion:
    """Writes one op Attention; batch, heads and sequences are the leaves of the scores' dimensions."""

    def __init__(self, scope: FunctionScope, found: FoundAttention) -> None:
        self.scope, self.found, self.atoms = scope, found, found.atoms
        lead = tuple([self.atoms.leaves(dim) for dim in found.scores[:-2]])
        flat = tuple([leaf for dim in lead for leaf in dim])
        self.batch = lead[0] if len(lead) > 1 else self._batch(flat)
        self.heads = flat[len(self.batch) :]
        self.seq, self.kv_seq = (self.atoms.leaves(dim) for dim in found.scores[-2:])

    def _batch(self, flat: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part of one leading dimension that is the first of queries with four dimensions."""
        for _, dims in self.found.query.arrangements:
            first = self.atoms.leaves(dims[0]) if len(dims) == 4 else None
            if first is not None and flat[: len(first)] == first:
                return first
        return flat

    def changes(self) -> Changes:
        """Return the ops, and for which op they stand."""
        found, last = self.found, self.found.last
        given = [self._nearest(operand) for operand in (found.query, found.key, found.value)]
        sources = [value for value, _ in given]
        if len({as_tensor(value.type, value.name).dtype for value in (*sources, last.outputs[0])}) != 1:
            raise NoAttentionError("its queries, keys and values are not of one type")
        writer = OpWriter(list(dict.fromkeys([*sources, *(mask.value for mask in found.masks)])), last.name)
        values = [self._arranged(writer, *source) for source in given]
        options, mask = self._masks(writer)
        if options.scale == 1.0 / math.sqrt(shape_of(values[0])[-1]):
            options = replace(options, scale=None)
        name = last.outputs[0].name
        try:
            made, _ = writer.add(
                "Attention", [*values, *mask], options.attributes(), (), (name, f"{name}_lse"), name=last.name
            )
        except DistsimError as error:
            raise NoAttentionError(str(error)) from error
        if shape_of(made) != shape_of(last.outputs[0]):
            last = self._as_heads(last, shape_of(made))
        if shape_of(made) != shape_of(last.outputs[0]):
            made = writer.one("Reshape", made, shape=shape_of(last.outputs[0]))
        return {last: writer.standing_for(last.outputs[0], made)}

    def _as_heads(self, last: Op, shape: tuple[int, ...]) -> Op:
        """Return the only reader of what the last op makes, if it gives that this shape; else the last op."""
        readers = list(self.scope.readers.get(last.outputs[0], ()))
        if len(readers) != 1 or last.outputs[0] in self.scope.function.outputs:
            return last
        again = readers[0].op_type == "Reshape" and shape_of(readers[0].outputs[0]) == shape
        return readers[0] if again else last

    def _nearest(self, operand: Operand) -> tuple[Value, tuple[Step, ...]]:
        """Return the arrangement of an operand from which the fewest ops lead to four dimensions."""
        found: list[tuple[Value, tuple[Step, ...]]] = []
        for value, dims in operand.arrangements:
            source = tuple([self.atoms.leaves(dim) for dim in dims])
            steps = steps_to(self.atoms, source, self._target(operand, source))
            if steps is not None:
                found.append((value, steps))
        if not found:
            raise NoAttentionError("its heads are repeated in an order that no group has")
        return min(found, key=lambda way: (sum(op == "Transpose" for op, _ in way[1]), len(way[1])))

    def _target(self, operand: Operand, source: Dims) -> Dims:
        """Return [batch, the heads or those that it has of them, sequence, size]."""
        there = [leaf for dim in source for leaf in dim]
        sequence = self.seq if operand is self.found.query else self.kv_seq
        heads = tuple([leaf for leaf in self.heads if leaf in there])
        if heads != self.heads[: len(heads)] or (operand is self.found.query and heads != self.heads):
            raise NoAttentionError("its heads are repeated in an order that no group has")
        known = {*self.batch, *heads, *sequence}
        return self.batch, heads, sequence, tuple([leaf for leaf in there if leaf not in known])

    def _arranged(self, writer: OpWriter, value: Value, steps: tuple[Step, ...]) -> Value:
        for op_type, numbers in steps:
            value = writer.one(op_type, value, **{"perm" if op_type == "Transpose" else "shape": numbers})
        return value

    def _masks(self, writer: OpWriter) -> tuple[AttentionOptions, list[Value]]:
        """Return the options with what masks are known to say, and the mask that is left, if any."""
        options = self.found.options
        size = self.atoms.size(self.seq), self.atoms.size(self.kv_seq)
        merged: Value | None = None
        for mask in self.found.masks:
            known = self._known(mask)
            folded = None if known is None else as_options(known, size)
            if folded is None:
                merged = self._merged(writer, merged, self._placed(writer, mask))
            else:
                options = joined(options, folded)
        return options, [] if merged is None else [merged]

    def _known(self, mask: Mask) -> Array | None:
        array = self.scope.known(mask.value)
        if array is None:
            return None
        if mask.is_boolean:
            return array if mask.shows else ~array
        return array if mask.factor == 1 else array * mask.factor

    def _placed(self, writer: OpWriter, mask: Mask) -> Value:
        """Return a mask over [batch, heads, seq, kv_seq], boolean or to be added."""
        value = mask.value
        if mask.is_boolean and not mask.shows:
            value = writer.one("Not", value)
        if not mask.is_boolean and mask.factor != 1:
            value = writer.one("Mul", value, B=mask.factor)
        own = {leaf for dim in mask.dims for leaf in self.atoms.leaves(dim)}
        shape: list[int] = []
        for dim in (self.batch, self.heads, self.seq, self.kv_seq):
            if own.intersection(dim) not in (set(), set(dim)):
                raise NoAttentionError("its mask has some of the factors of its heads, not all")
            shape.append(self.atoms.size(dim) if own.intersection(dim) else 1)
        given = shape_of(value)
        if (1,) * (4 - len(given)) + given == tuple(shape):
            return value
        return writer.one("Reshape", value, shape=tuple(shape))

    def _merged(self, writer: OpWriter, one: Value | None, other: Value) -> Value:
        """Return a mask that hides what either does."""
        if one is None:
            return other
        booleans = [as_tensor(value.type, value.name).dtype == Bool() for value in (one, other)]
        if all(booleans):
            return writer.one("And", one, other)
        if not any(booleans):
            return writer.one("Add", one, other)
        shown, added = (one, other) if booleans[0] else (other, one)
        hidden = np.asarray(-np.inf, as_tensor(added.type, added.name).dtype.np)
        return writer.one("Where", shown, added, Y=hidden)
