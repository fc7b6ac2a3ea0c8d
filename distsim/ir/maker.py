"""The one place where functions are built."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distsim.errors import DistsimError, IRError, shortened
from distsim.ir.function import Function, Op
from distsim.ir.registry import check_attributes, output_types
from distsim.ir.type import Type
from distsim.ir.value import NO_ATTRIBUTES, Attributes, Role, Value
from distsim.ir.verify import verify_one


class FunctionMaker:
    """Builds a :class:`Function`: add inputs and ops, then :meth:`finalize`.

    >>> from distsim.ir.type import Float, Tensor
    >>> maker = FunctionMaker("double")
    >>> x = maker.add_input_value("x", Tensor(Float(), (2,)))
    >>> y = maker.add_op("Add", inputs=[x, x])
    >>> maker.finalize()
    Function('double', 1 inputs, 1 ops, 1 outputs)
    """

    def __init__(self, name: str = "function", notes: tuple[str, ...] = ()) -> None:
        self.name, self.notes = name, notes
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self.outputs: list[Value] | None = None
        self.module = ""
        self.origin = ""
        """The name of ops that are added without one where no module is."""
        self._defined: set[Value] = set()
        self._typed: set[Op] = set()  # made by the rules of their operators

    def add_input_value(self, name: str, type: Type, role: Role = Role.INPUT) -> Value:
        """Add an input of a type and a role, and return its value."""
        if not isinstance(role, Role):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise IRError(f"{self.name}: the role of {name} is {role!r}; give a Role, as Role.PARAMETER")
        value = Value(name, type, role)
        self.inputs.append(value)
        self._defined.add(value)
        return value

    @contextmanager
    def within(self, module: str) -> Generator[None]:
        """Within it, ops without a name are named as exporters name them, ``module/output``: an op's origin.

        One inside of another is the module of a module, ``attention.norm``.
        """
        outer = self.module
        self.module = f"{outer}.{module}" if outer else module
        try:
            yield
        finally:
            self.module = outer

    def add_op(
        self,
        op_type: str,
        name: str = "",
        inputs: Sequence[Value] = (),
        attributes: Mapping[str, Any] | None = None,
        subfunctions: Sequence[Function] = (),
        output_names: Sequence[str] | None = None,
        version: int | None = None,
    ) -> Any:
        """Add an op and return its output, or the tuple of its outputs when there are several.

        The types of the outputs follow from the operator's type rule. Raises an error that names
        the op when an input is not of this function, or the rule refuses the inputs or an attribute. An
        operand that is a constant is an attribute of its name: ``Reshape`` has ``shape=(4, 2)``.
        """
        if isinstance(inputs, Value):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise IRError(f"{self.name}: {op_type} reads {inputs!r}; give inputs=[...], a list of values")
        if op_type != "Call":
            try:
                check_attributes(op_type, _attributes(attributes), version)
            except DistsimError as error:
                raise type(error)(f"{self.name}: {error}") from error
        outputs = self.add(op_type, inputs, attributes, subfunctions, output_names, version, name)
        return outputs[0] if len(outputs) == 1 else outputs

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
        """Like :meth:`add_op`, but always return a tuple."""
        attrs = attributes if isinstance(attributes, Attributes) else _attributes(attributes)
        for value in inputs:
            if value not in self._defined:
                if not isinstance(value, Value):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise IRError(
                        f"{self.name}: {op_type} reads {shortened(value)}, no value; a constant operand is "
                        "an attribute of its name"
                    )
                raise IRError(
                    f"{self.name}: {op_type} ({name or 'unnamed'}) reads {value!r}, which is not a "
                    "value of this function; add its producer, or an input, first"
                )
        values = tuple(inputs)
        types = tuple([value.type for value in values])
        callees = tuple(subfunctions)
        try:
            made = output_types(op_type, attrs, types, callees, version)
        except DistsimError as error:
            arguments = ", ".join(map(repr, values))
            raise type(error)(f"{self.name}: {op_type}({arguments}): {error}") from error
        names = self._names(op_type, output_names, len(made))
        outputs = tuple([Value(n, t) for n, t in zip(names, made, strict=True)])
        if self.module and not name and outputs:
            name = f"{self.module}/{outputs[0].name}"
        op = Op(op_type, values, outputs, attrs, callees, version, name or self.origin)
        self.ops.append(op)
        self._typed.add(op)
        self._defined.update(outputs)
        return outputs

    def copy(
        self,
        op: Op,
        values: Mapping[Value, Value],
        attributes: Mapping[str, Any] | None = None,
        subfunctions: Sequence[Function] | None = None,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Add an op like ``op``, its inputs replaced by ``values[input]``; return its outputs.

        The names of its outputs, its version and what is not given here are the op's.
        """
        return self.add(
            op.op_type,
            [values[value] for value in op.inputs],
            op.attributes if attributes is None else attributes,
            op.subfunctions if subfunctions is None else subfunctions,
            [value.name for value in op.outputs],
            op.version,
            op.name if name is None else name,
        )

    def adopt_inputs(self, values: Sequence[Value]) -> None:
        """Take over the inputs of another function: the same values, not copies."""
        self.inputs.extend(values)
        self._defined.update(values)

    def adopt(self, op: Op) -> None:
        """Take over an op of another function as it is; :meth:`finalize` checks it."""
        self.ops.append(op)
        self._defined.update(op.outputs)

    def set_outputs(self, outputs: Sequence[Value]) -> None:
        """Say what the function returns; without this, all values that no op reads."""
        given: list[Any] = [outputs] if isinstance(outputs, Value | str) else list(outputs)
        other = given if isinstance(outputs, Value) else [v for v in given if not isinstance(v, Value)]
        if other:
            raise IRError(f"{self.name} cannot return {shortened(other[0])}; give a list of its values")
        self.outputs = given

    def finalize(self) -> Function:
        """Return the frozen function, after checking every rule of the IR (:func:`verify`)."""
        outputs = self._unread() if self.outputs is None else self.outputs
        function = Function(self.name, tuple(self.inputs), tuple(self.ops), tuple(outputs), self.notes)
        verify_one(function, self._typed)  # callees were verified when they were made
        return function

    def _unread(self) -> list[Value]:
        read = {value for op in self.ops for value in op.inputs}
        return [value for op in self.ops for value in op.outputs if value not in read]

    def _names(self, op_type: str, given: Sequence[str] | None, count: int) -> Sequence[str]:
        if given is None:
            stem = f"{op_type.lower()}{len(self.ops)}"
            return [stem] if count == 1 else [f"{stem}_{i}" for i in range(count)]
        if len(given) != count:
            raise IRError(
                f"{self.name}: {op_type} makes {count} outputs, {len(given)} names given: {list(given)}"
            )
        return given


def _attributes(items: Mapping[str, Any] | None) -> Attributes:
    return Attributes(items) if items else NO_ATTRIBUTES
