"""The same function on other devices of a mesh of equal axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distsim.ir import Attributes, Function, Mesh, Op, Type, Value
from distsim.ir.type import Tensor


class Relocator:
    """Moves functions from one mesh to another: where something lies is all that changes.

    A pattern mesh may have fewer replicas along an axis than the mesh that it stands for: shapes do not
    depend on their number, so types are rewritten and not derived again. Each function is moved
    once under a name.
    """

    def __init__(self, source: Mesh, target: Mesh) -> None:
        self.source, self.target = source, target
        self._functions: dict[tuple[Function, str | None, tuple[str, ...]], Function] = {}
        self._types: dict[Type, Type] = {}
        self._attributes: dict[Attributes, Attributes] = {}
        # The same objects occur again and again: a look-up by identity first. They are kept alive.
        self._known: dict[int, tuple[Type, Type]] = {}

    def function(self, function: Function, name: str | None = None, op_names: Sequence[str] = ()) -> Function:
        """Return the function, and what it calls, on the target mesh, under a name and with named ops."""
        key = (function, name, tuple(op_names))
        found = self._functions.get(key)
        if found is None:
            env = {value: Value(value.name, self.type(value.type), value.role) for value in function.inputs}
            names = op_names or [op.name for op in function.ops]
            ops = [self._op(op, env, own) for op, own in zip(function.ops, names, strict=True)]
            found = Function(
                function.name if name is None else name,
                tuple([env[value] for value in function.inputs]),
                tuple(ops),
                tuple([env[value] for value in function.outputs]),
            )
            self._functions[key] = found
        return found

    def type(self, type_: Type) -> Type:
        """Return the type on the target mesh."""
        known = self._known.get(id(type_))
        if known is not None:
            return known[1]
        found = self._types.get(type_)
        if found is None:
            found = type_
            if isinstance(type_, Tensor) and type_.device == self.source:
                found = type_.on(self.target)
            self._types[type_] = found
        self._known[id(type_)] = type_, found
        return found

    def _op(self, op: Op, env: dict[Value, Value], name: str) -> Op:
        outputs = tuple([Value(value.name, self.type(value.type), value.role) for value in op.outputs])
        inputs = tuple([env[value] for value in op.inputs])
        env.update(zip(op.outputs, outputs, strict=True))
        attributes = self._moved(op.attributes) if op.attributes else op.attributes
        callees = tuple([self.function(callee) for callee in op.subfunctions])
        return Op(op.op_type, inputs, outputs, attributes, callees, op.version, name)

    def _moved(self, attributes: Attributes) -> Attributes:
        found = self._attributes.get(attributes)
        if found is None:
            places: dict[str, Any] = {
                key: self.target for key, item in attributes.items() if item == self.source
            }
            found = Attributes({**attributes, **places}) if places else attributes
            self._attributes[attributes] = found
        return found
