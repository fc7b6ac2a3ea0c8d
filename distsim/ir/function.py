"""Ops and functions, which hold each other: frozen, typed, in topological order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from distsim.ir.value import NO_ATTRIBUTES, Attributes, Role, Value, setters


@dataclass(frozen=True, eq=False, slots=True, init=False)
class Op:
    """One application of an operator. A ``Call`` carries its callee in ``subfunctions``.

    ``version`` is the ONNX operator-set version whose meaning the op has; None is the house version
    (``distsim.ops.OPSET``).

    >>> from distsim.ir import FunctionMaker
    >>> from distsim.ir.type import Float, Tensor
    >>> maker = FunctionMaker("double")
    >>> x = maker.add_input_value("x", Tensor(Float(), (2,)))
    >>> _ = maker.add_op("Add", inputs=[x, x])
    >>> op = maker.finalize().ops[0]
    >>> op.op_type, op.is_call, op.outputs[0].type.shape
    ('Add', False, (2,))
    """

    op_type: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: Attributes = NO_ATTRIBUTES
    subfunctions: tuple[Function, ...] = ()
    version: int | None = None
    name: str = field(default="")
    signature: Any = field(init=False)
    """What :func:`distsim.ops.signature_of` returned, once asked; an op that is copied has none yet."""

    def __init__(
        self,
        op_type: str,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        attributes: Attributes = NO_ATTRIBUTES,
        subfunctions: tuple[Function, ...] = (),
        version: int | None = None,
        name: str = "",
    ) -> None:
        _SET_TYPE(self, op_type)
        _SET_INPUTS(self, inputs)
        _SET_OUTPUTS(self, outputs)
        _SET_ATTRIBUTES(self, attributes)
        _SET_SUBFUNCTIONS(self, subfunctions)
        _SET_VERSION(self, version)
        _SET_NAME(self, name)

    def __reduce__(self) -> tuple[object, ...]:
        fields = self.op_type, self.inputs, self.outputs, self.attributes, self.subfunctions, self.version
        return Op, (*fields, self.name)

    @property
    def is_call(self) -> bool:
        """Whether this is a Call, which runs another function."""
        return self.op_type == "Call"

    @property
    def callee(self) -> Function:
        """The function that a ``Call`` runs."""
        return self.subfunctions[0]

    def __repr__(self) -> str:
        outputs = ", ".join(value.name for value in self.outputs)
        inputs = ", ".join(value.name for value in self.inputs)
        return f"{outputs} = {self.op_type}({inputs})"


(
    _SET_TYPE,
    _SET_INPUTS,
    _SET_OUTPUTS,
    _SET_ATTRIBUTES,
    _SET_SUBFUNCTIONS,
    _SET_VERSION,
    _SET_NAME,
    keep_signature,
) = setters(Op)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Function:
    """A list of ops in topological order, from ``inputs`` to ``outputs``.

    Made by :meth:`distsim.ir.FunctionMaker.finalize`, which verifies it; a function built by hand is
    checked with :func:`distsim.ir.verify`. ``notes`` say what a user should know of how it was made; a
    transform hands them on.

    >>> from distsim.models import mlp
    >>> forward = mlp(layers=1, width=4, batch=2)
    >>> [op.op_type for op in forward.ops], [value.name for value in forward.inputs]
    (['Call', 'Loss'], ['x', 'target', 'w0'])
    """

    name: str
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    notes: tuple[str, ...] = ()

    def inputs_with(self, *roles: Role) -> tuple[Value, ...]:
        """Return the inputs that have one of these roles, in order."""
        return tuple(value for value in self.inputs if value.role in roles)

    @property
    def parameters(self) -> tuple[Value, ...]:
        """The inputs marked as parameters."""
        return self.inputs_with(Role.PARAMETER)

    def __repr__(self) -> str:
        return (
            f"Function({self.name!r}, {len(self.inputs)} inputs, {len(self.ops)} ops, "
            f"{len(self.outputs)} outputs)"
        )


def callees(function: Function) -> tuple[Function, ...]:
    """Return every distinct function reached through Calls, callees before their callers."""
    found: dict[Function, None] = {}
    _reach(function, found)
    return tuple(found)


# Not within the other: a function there that calls itself is a cycle, which keeps alive all that it has.
def _reach(current: Function, found: dict[Function, None]) -> None:
    for op in current.ops:
        for callee in op.subfunctions:
            if callee not in found:
                _reach(callee, found)
                found[callee] = None


def all_ops(function: Function) -> Iterator[Op]:
    """Yield the ops in order with every Call replaced by the ops of its callee."""
    for op in function.ops:
        if op.is_call:
            yield from all_ops(op.callee)
        else:
            yield op


def readers_of(ops: Iterable[Op]) -> dict[Value, list[Op]]:
    """Return the ops that read each value, one as often as it reads it; no entry where none does."""
    found: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.inputs:
            found.setdefault(value, []).append(op)
    return found


def count_ops(function: Function) -> int:
    """Return the number of ops when every Call is written out."""
    sizes: dict[Function, int] = {}
    for callee in (*callees(function), function):
        sizes[callee] = sum(sizes[op.callee] if op.is_call else 1 for op in callee.ops)
    return sizes[function]
