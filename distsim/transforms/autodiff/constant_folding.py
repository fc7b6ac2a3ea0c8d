"""FoldingMaker: a maker of functions that works out at once what follows from known numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.ir import Attributes, Function, FunctionMaker, Literal, Op, Tensor, Value
from distsim.ir.type import as_tensor
from distsim.ops import compute
from distsim.ops.operator import Array


class FoldingMaker(FunctionMaker):
    """A :class:`FunctionMaker` in which numbers can be values before there are ops that make them.

    An op that reads nothing but known numbers and makes tensors of one element is computed instead of
    added: its results are known as well. A number becomes a ``Constant`` only where another op, or the
    caller, reads it, just before; a number that no op reads leaves no trace.

    >>> from distsim.ir import Float
    >>> maker = FoldingMaker("scaled")
    >>> x = maker.add_input_value("x", Tensor(Float(), (4,)))
    >>> half = maker.add("Mul", [maker.number(1.0, Tensor(Float(), ()))], {"B": 0.5})
    >>> len(maker.ops), float(maker.numbers[half[0]])
    (0, 0.5)
    >>> maker.set_outputs([maker.add_op("Mul", inputs=[x, *half])])
    >>> [op.op_type for op in maker.ops]
    ['Constant', 'Mul']
    """

    def __init__(self, name: str = "function", notes: tuple[str, ...] = ()) -> None:
        super().__init__(name, notes)
        self.numbers: dict[Value, Array] = {}
        """The values that are known, each an array of one element."""
        self._made: set[Value] = set()

    def number(self, number: float, type_: Tensor, name: str = "number") -> Value:
        """Return a value of a type of one element that is known to be ``number``."""
        value = Value(name, type_)
        self.numbers[value] = np.full(type_.shape, number, type_.dtype.np)
        self._defined.add(value)
        return value

    def add(
        self,
        op_type: str,
        inputs: Sequence[Value] = (),
        attributes: Mapping[str, Any] | None = None,
        subfunctions: Sequence[Function] = (),
        output_names: Sequence[str] | None = None,
        version: int | None = None,
        name: str = "",
    ) -> tuple[Value, ...]:
        """Add an op, or compute it where all that it reads is known; return its outputs."""
        outputs = super().add(op_type, inputs, attributes, subfunctions, output_names, version, name)
        if self.numbers.keys().isdisjoint(inputs):
            return outputs
        op = self.ops.pop()
        if op_type != "Call" and all(v in self.numbers for v in inputs) and all(map(_one_element, outputs)):
            arrays = [self.numbers[value] for value in inputs]
            results = compute(op_type, op.attributes, version, arrays, len(outputs))
            self.numbers.update(zip(outputs, results, strict=True))
        else:
            self._make(inputs)
            self.ops.append(op)
        return outputs

    def set_outputs(self, outputs: Sequence[Value]) -> None:
        """Say what the function returns; numbers among it are made."""
        self._make(outputs)
        super().set_outputs(outputs)

    def _make(self, values: Sequence[Value]) -> None:
        """Add the Constants of those values that are known and not there yet."""
        for value in values:
            if value in self.numbers and value not in self._made:
                device = as_tensor(value.type, value.name).device
                constant = {"value": Literal(self.numbers[value]), "device": device}
                self.ops.append(Op("Constant", (), (value,), Attributes(constant)))
                self._made.add(value)


def _one_element(value: Value) -> bool:
    return isinstance(value.type, Tensor) and value.type.size == 1
