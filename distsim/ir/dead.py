"""Dead ops: those that no output of a function needs, in the function and in what it calls.

No op does anything but make its outputs, so that a transfer or a collective whose result nobody reads is as
dead as any other. By the same walk it is seen whether a function brings its backward pass.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from distsim.ir.function import Function, Op
from distsim.ir.rewrite import copy_function
from distsim.ir.type import Tensor
from distsim.ir.value import Value

Mask = tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Trimmed:
    """A function without its dead ops, and those ops: of a callee once, however often it is called."""

    function: Function
    dead: tuple[Op, ...]


def trim(
    function: Function, outputs: Sequence[Value] | None = None, stay: Container[Value] | None = None
) -> Trimmed:
    """Return ``function`` with only these of its ``outputs`` (all, unless given), and the ops that they need.

    A Call of which not all outputs are needed is one of a callee that makes, and reads, no more than that:
    the same callee for all Calls that need the same outputs. Inputs that no op reads stay if ``stay`` holds
    them (all do, unless it is given). Values of ``function`` are the same objects; so is a function, or a
    callee, of which everything is needed.

    >>> from distsim.ir import Float, FunctionMaker, Tensor
    >>> maker = FunctionMaker("two")
    >>> x = maker.add_input_value("x", Tensor(Float(), (2,)))
    >>> y, z = maker.add_op("Relu", inputs=[x]), maker.add_op("Exp", inputs=[x])
    >>> trim(maker.finalize(), outputs=[y])
    Trimmed(function=Function('two', 1 inputs, 1 ops, 1 outputs), dead=(exp1 = Exp(x),))
    """
    trimmer = _Trimmer()
    wanted = function.outputs if outputs is None else tuple(outputs)
    made = trimmer.trim(function, wanted, frozenset(function.inputs) if stay is None else stay)
    return Trimmed(made, tuple(trimmer.dead))


def needed_ops(ops: Sequence[Op], outputs: Iterable[Value]) -> list[Op]:
    """Return those of ``ops``, which are in topological order, that ``outputs`` need, in order."""
    needed, found = set(outputs), list[Op]()
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            found.append(op)
    return found[::-1]


class _Trimmer:
    """Trims a function, and each callee once per set of outputs that Calls of it need."""

    def __init__(self) -> None:
        self.dead: dict[Op, None] = {}
        self.callees: dict[tuple[Function, Mask], tuple[Function, Mask]] = {}

    def trim(self, function: Function, outputs: Sequence[Value], stay: Container[Value]) -> Function:
        needed, ops, changed = set(outputs), list[Op](), False
        for op in reversed(function.ops):
            if needed.isdisjoint(op.outputs):
                self.dead[op] = None
                changed = True
                continue
            made = self.call(op, needed) if op.is_call else op
            changed |= made is not op
            needed.update(made.inputs)
            ops.append(made)
        inputs = tuple([v for v in function.inputs if v in needed or v in stay])
        if not changed and len(inputs) == len(function.inputs) and tuple(outputs) == function.outputs:
            return function
        return replace(function, inputs=inputs, ops=tuple(ops[::-1]), outputs=tuple(outputs))

    def call(self, op: Op, needed: set[Value]) -> Op:
        """Return the Call that makes those of its outputs that are needed."""
        mask = tuple([value in needed for value in op.outputs])
        key = op.callee, mask
        if key not in self.callees:
            self.callees[key] = self.callee(*key)
        callee, read = self.callees[key]
        if callee is op.callee:
            return op
        inputs = tuple([v for v, kept in zip(op.inputs, read, strict=True) if kept])
        outputs = tuple([v for v, kept in zip(op.outputs, mask, strict=True) if kept])
        return replace(op, inputs=inputs, outputs=outputs, subfunctions=(callee,))

    def callee(self, function: Function, mask: Mask) -> tuple[Function, Mask]:
        """Return the callee that makes these outputs only, and which inputs of ``function`` it reads."""
        outputs = [v for v, kept in zip(function.outputs, mask, strict=True) if kept]
        made = self.trim(function, outputs, ())
        read = frozenset(made.inputs)
        # Values of its own: Calls that need other outputs may call the callee as it was, in one function.
        own = function if made is function else copy_function(made)
        return own, tuple([v in read for v in function.inputs])


def brings_backward(function: Function) -> bool:
    """Whether a function is joint: it returns a scalar loss and the gradient, or new value, of a parameter.

    Such an output has the type of a parameter and follows, as the prediction does in the gradient of a loss,
    from every input that the loss follows from, but is nothing that the loss is made of. The type alone says
    little: running statistics are like the scale of their normalization, predictions may be like a weight.
    """
    tensors = {value: value.type for value in function.outputs if isinstance(value.type, Tensor)}
    losses = [v for v, type_ in tensors.items() if type_.rank == 0 and type_.dtype.is_floating]
    if not losses:
        return False
    forward = trim(function, losses[:1], ()).function
    held = {*forward.inputs, *(value for op in forward.ops for value in op.outputs)}
    trained = {value.type for value in function.parameters}
    likely = [v for v, type_ in tensors.items() if v not in held and type_.rank and type_ in trained]
    return any(set(forward.inputs).issubset(trim(function, [v], ()).function.inputs) for v in likely)
