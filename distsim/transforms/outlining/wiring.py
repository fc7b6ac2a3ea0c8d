"""A function as integers, on which repeats are found: a label per op, a number per value, who reads what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.ir import Attributes, Function, Op, Role, Tensor, Type, Value
from distsim.ops import signature_of, work

_Key = tuple[object, ...]


Integers = npt.NDArray[Any]

WEIGHTS = (Role.PARAMETER, Role.STATE)


class CallWiring:
    """The ops of a function in canonical order, with labels and operands as arrays.

    Two ops have one label when they differ only in names and in which values they read: same operator,
    attributes, version, callee, types. Values are numbered in order: first the inputs of the function,
    then the results of the ops, so that value ``v`` is made inside of ops [i, j) exactly when
    ``first[i] <= v < first[j]``.

    Canonical order: an op that depends on no weight and whose label occurs once (a mask that the first
    layer makes and all layers read) goes to the front; every other op stays in its place.

    ``labels[i]``: of op i. ``operands[reads[i] : reads[i + 1]]``: the values that it reads.
    ``first[i]``: its first result. ``made[v]``: the op that makes value v, -1 for an input.
    ``products[j] - products[i]``: matrix products with weights in ops [i, j).
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        kinds = _Kinds()
        labels = [kinds.label(op) for op in function.ops]
        marked = any(value.role is not Role.INPUT for value in function.inputs)
        # Where no role is marked, any input may be a weight.
        weights = {value for value in function.inputs if value.role in WEIGHTS or not marked}
        self.ops, labels = _canonical(function, labels, weights)
        self.values: list[Value] = list(function.inputs)
        number = {value: i for i, value in enumerate(self.values)}
        made = [-1] * len(self.values)
        operands: list[int] = []
        reads, first = [0], list[int]()
        for index, op in enumerate(self.ops):
            operands.extend([number[value] for value in op.inputs])
            reads.append(len(operands))
            first.append(len(self.values))
            for value in op.outputs:
                number[value] = len(self.values)
                self.values.append(value)
                made.append(index)
        first.append(len(self.values))
        self.labels: Integers = np.array(labels, np.int64)
        self.operands: Integers = np.array(operands, np.int64)
        self.reads: Integers = np.array(reads, np.int64)
        self.first: Integers = np.array(first, np.int64)
        self.made: Integers = np.array(made, np.int64)
        self.readers: Integers = np.repeat(np.arange(len(self.ops)), np.diff(self.reads))
        self.returned: Integers = np.array([number[value] for value in function.outputs], np.int64)
        self.products: Integers = np.cumsum([0, *_Products(kinds).count(self.ops, labels, weights)])

    def block_operands(self, starts: Integers, length: int) -> Integers:
        """Return [repetition, operand]: the values read by ``length`` ops from each start; labels agree."""
        begin = int(starts[0])
        count = int(self.reads[begin + length] - self.reads[begin])
        return self.operands[self.reads[starts][:, None] + np.arange(count)]

    def inner(self, starts: Integers, length: int) -> Integers:
        """Return [repetition, operand]: which result of the block is read, -1 for a value from outside."""
        return np.maximum(self.block_operands(starts, length) - self.first[starts][:, None], -1)


class _Kinds:
    """Numbers for what ops are; equal objects have equal numbers, and one object is hashed once."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._by_id: dict[int, int] = {}
        self._labels: dict[_Key, int] = {}

    def label(self, op: Op) -> int:
        """Return the number of all that an op is, except its names and the values it reads."""
        number = self._number
        key: _Key = (
            op.op_type,
            number(op.attributes),
            op.version,
            op.subfunctions,
            tuple([number(value.type) for value in op.inputs]),
            tuple([number(value.type) for value in op.outputs]),
        )
        return self._labels.setdefault(key, len(self._labels))

    def _number(self, item: Attributes | Type) -> int:
        found = self._by_id.get(id(item))
        if found is None:
            found = self._by_id[id(item)] = self._numbers.setdefault(item, len(self._numbers))
        return found


def _canonical(
    function: Function, labels: Sequence[int], weights: set[Value]
) -> tuple[Sequence[Op], Sequence[int]]:
    counts = Counter(labels)
    free = set(function.inputs) - weights
    front: list[int] = []
    for index, op in enumerate(function.ops):
        if counts[labels[index]] == 1 and free.issuperset(op.inputs):
            free.update(op.outputs)
            front.append(index)
    if front == list(range(len(front))):
        return function.ops, labels
    early = set(front)
    order = [*front, *(index for index in range(len(labels)) if index not in early)]
    return [function.ops[index] for index in order], [labels[index] for index in order]


class _Products:
    """Counts the matrix products with a weight: an input that is held, or one turned, cast or viewed."""

    def __init__(self, kinds: _Kinds) -> None:
        self.kinds = kinds
        self.matrix: dict[int, bool] = {}
        self.callees: dict[tuple[Function, tuple[bool, ...]], int] = {}

    def count(self, ops: Sequence[Op], labels: Iterable[int], held: set[Value]) -> list[int]:
        """Return the count of each op, where ``held`` are weights; what is made of one alone joins them."""
        counts: list[int] = []
        for op, label in zip(ops, labels, strict=True):
            if op.is_call:
                counts.append(self.call(op, held))
            else:
                counts.append(int(not held.isdisjoint(op.inputs) and self.is_matrix(op, label)))
                if len(op.inputs) == 1 and op.inputs[0] in held:
                    held.update(op.outputs)
        return counts

    def call(self, op: Op, held: set[Value]) -> int:
        key = (op.callee, tuple([value in held for value in op.inputs]))
        if key not in self.callees:
            inside = {value for value, weight in zip(op.callee.inputs, key[1], strict=True) if weight}
            self.callees[key] = sum(self.count(op.callee.ops, map(self.kinds.label, op.callee.ops), inside))
        return self.callees[key]

    def is_matrix(self, op: Op, label: int) -> bool:
        """Return whether the flops of an op run on the matrix units."""
        if label not in self.matrix:
            tensors = all(isinstance(value.type, Tensor) for value in (*op.inputs, *op.outputs))
            asked = work(signature_of(op)) if tensors else None
            self.matrix[label] = asked is not None and asked.matrix
        return self.matrix[label]
