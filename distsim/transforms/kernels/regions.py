"""Regions: the ops by which one value follows from one other, element by element or along its rows.

A region is grown backwards from its last op. An op joins it when nothing else reads what the op makes, so
that one kernel can stand for all of them. Of what comes in, numbers that are known and vectors along the
rows (a scale, a bias) are operands; the rest has to be one value, of the shape of what comes out. Casts
between real types change nothing here: a region is computed in float64.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distsim.ir import Literal, Op, Role, Tensor, Value
from distsim.ops import compute, operator, signature_of
from distsim.ops.operator import Array
from distsim.ops.places import shape_of
from distsim.transforms.kernels.known import FunctionScope, draws
from distsim.transforms.kernels.policies import fusible, is_pointwise

MOST_OPS = 16
"""Larger regions are not looked at: a LayerNormalization between casts has 13 ops, a GELU 10."""

MOST_IN_CHAIN = 6
"""Nor are longer ones of which each op has one operand: a Softplus has 3 ops, a Sigmoid 4."""


@dataclass(frozen=True)
class OpRegion:
    """Ops in order, from ``source`` [..., n] and ``vectors`` (n elements each) to the result of the last op.

    ``numbers`` are the known operands, among them the ``scalars`` that may be settings of a function.
    """

    source: Value
    vectors: tuple[Value, ...]
    ops: tuple[Op, ...]
    numbers: dict[Value, Array]

    @property
    def last(self) -> Op:
        """The op that makes the result."""
        return self.ops[-1]

    @property
    def along_rows(self) -> bool:
        """Whether elements depend on others of their row."""
        return bool(self.vectors) or any(_reduces(op) for op in self.ops)

    @property
    def scalars(self) -> tuple[float, ...]:
        """The known numbers, those among the attributes included."""
        found = [array for array in self.numbers.values() if array.size == 1 and array.dtype.kind == "f"]
        for op in self.ops:
            for item in op.attributes.values():
                array = np.asarray(getattr(item, "array", item))
                if array.size == 1 and array.dtype.kind == "f":
                    found.append(array)
        return tuple(dict.fromkeys([float(array.reshape(-1)[0]) for array in found]))

    @property
    def structure(self) -> Hashable:
        """All that :meth:`compute` depends on: regions that have this in common compute the same."""
        names: dict[Value, Hashable] = {self.source: str(self.source.type)}
        names |= {value: (place, shape_of(value)) for place, value in enumerate(self.vectors)}
        names |= {value: Literal(array) for value, array in self.numbers.items()}
        made: list[Hashable] = []
        for op in self.ops:
            operands = tuple([names[value] for value in op.inputs])
            made.append((op.op_type, op.attributes, op.version, operands))
            names[op.outputs[0]] = len(made)
        return tuple(made)

    def compute(self, source: Array, vectors: Sequence[Array]) -> Array:
        """Return the result for other numbers of the source, with any leading dimensions, in float64."""
        env: dict[Value, Array] = {self.source: source, **self.numbers}
        env |= dict(zip(self.vectors, vectors, strict=True))
        for op in self.ops:
            given = [env[value] for value in op.inputs]
            made = [given[0]] if op.op_type == "Cast" else _computed(op, given)
            env |= dict(zip(op.outputs, made, strict=True))
        return env[self.last.outputs[0]]


def _computed(op: Op, given: Sequence[Array]) -> Sequence[Array]:
    return compute(op.op_type, op.attributes, op.version, given, len(op.outputs))


def _reduces(op: Op) -> bool:
    return op.op_type.startswith("Reduce")


def _is_real(value: Value) -> bool:
    return isinstance(value.type, Tensor) and value.type.dtype.is_floating


def regions_of(scope: FunctionScope, last: Op) -> Iterator[OpRegion]:
    """Yield the regions of at least two ops that end with an op, the smallest first.

    The source and the result have one shape, of at least one dimension, and one real type.
    """
    if len(last.outputs) != 1 or not shape_of(last.outputs[0]) or not _is_real(last.outputs[0]):
        return
    growth = _Growth(scope, shape_of(last.outputs[0]))
    if not growth.absorb(last):
        return
    returned = set(scope.function.outputs)
    while len(growth.ops) <= (MOST_IN_CHAIN if growth.is_chain else MOST_OPS):
        if len(growth.frontier) == 1:
            (source,) = growth.frontier
            enough = sum(op.op_type != "Cast" for op in growth.ops) > 1
            if enough and source.type == last.outputs[0].type:
                yield growth.region(source)
        # The source precedes all that follows from it: the latest value is never the source of the others.
        made = [(scope.numbers[op], op) for value in growth.frontier if (op := scope.makers.get(value))]
        _, op = max(made, key=lambda pair: pair[0], default=(0, None))
        if op is None or not returned.isdisjoint(op.outputs) or not growth.absorb(op):
            return


@dataclass
class _Growth:
    """The ops so far, and the values that they read which may be made by more of them."""

    scope: FunctionScope
    whole: tuple[int, ...]
    ops: list[Op] = field(default_factory=list[Op])
    frontier: dict[Value, None] = field(default_factory=dict[Value, None])
    vectors: dict[Value, None] = field(default_factory=dict[Value, None])
    numbers: dict[Value, Array] = field(default_factory=dict[Value, Array])
    is_chain: bool = True

    def region(self, source: Value) -> OpRegion:
        return OpRegion(source, tuple(self.vectors), tuple(reversed(self.ops)), dict(self.numbers))

    def absorb(self, op: Op) -> bool:
        """Take an op in, if it can be part of a region and nothing outside reads what it makes."""
        if len(op.outputs) != 1 or not self._computes_rows(op):
            return False
        mine = {*self.ops, op}
        if self.ops and not mine.issuperset(self.scope.readers.get(op.outputs[0], ())):
            return False
        wide: list[Value] = []
        vectors: list[Value] = []
        numbers: dict[Value, Array] = {}
        for value in op.inputs:
            known = self.scope.known(value) if _size(value) == 1 or _reduces(op) else None
            if known is not None:
                numbers[value] = known.astype(np.float64) if known.dtype.kind not in "iub" else known
            elif self._is_vector(value):
                vectors.append(value)
            elif shape_of(value) in (self.whole, (*self.whole[:-1], 1)):
                wide.append(value)
            else:
                return False
        if not wide:
            return False
        self.ops.append(op)
        self.is_chain &= len(wide) == 1
        self.frontier.pop(op.outputs[0], None)
        self.frontier.update(dict.fromkeys(wide))
        self.vectors.update(dict.fromkeys(vectors))
        self.numbers |= numbers
        return True

    def _computes_rows(self, op: Op) -> bool:
        """Whether an op computes elements from those in their place, or numbers along the rows."""
        if op.op_type == "Cast":
            return _is_real(op.inputs[0]) and _is_real(op.outputs[0])
        if draws(op) or not fusible(op) or operator(op.op_type).compute is None:
            return False
        if _reduces(op):
            rows = self.whole[-1] > 1 and shape_of(op.inputs[0]) == self.whole
            return rows and shape_of(op.outputs[0]) == (*self.whole[:-1], 1)
        return is_pointwise(signature_of(op)) and all(_is_small(item) for item in op.attributes.values())

    def _is_vector(self, value: Value) -> bool:
        shape, n = shape_of(value), self.whole[-1]
        if n == 1 or _size(value) != n or shape[-1:] != (n,):
            return False
        return len(shape) < len(self.whole) or shape != self.whole or value.role is Role.PARAMETER


def _size(value: Value) -> int:
    return value.type.size if isinstance(value.type, Tensor) else 0


def _is_small(item: Any) -> bool:
    return np.asarray(getattr(item, "array", item)).size <= 1
