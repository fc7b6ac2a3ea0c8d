"""The same function in other element types: all of one type, or those of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distsim.ir import (
    NO_ATTRIBUTES,
    Attributes,
    BFloat16,
    DType,
    Environment,
    Float16,
    Float32,
    Function,
    FunctionMaker,
    Literal,
    Op,
    Role,
    Tensor,
    Type,
    Value,
    retype_op,
    rewrite,
    rewrite_all,
)
from distsim.ir.module_names import added_name
from distsim.ir.type import dtype_named
from distsim.ops import signature_of, work
from distsim.ops.conversion import ONCE
from distsim.ops.matmul import GROUP
from distsim.ops.onnx_bridge import type_number
from distsim.ops.places import picked, shape_of
from distsim.transforms.autodiff.precision import LINEAR_OPS, LOSSES, SCALINGS, Precision

_CASTS = ("Cast", "CopyIn", "GradientCast", "GradientCopy", "ScaleGradient")
_KEEPS_WEIGHT = ("Cast", "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze")
_WIDTH: dict[DType, int] = {Float16(): 1, BFloat16(): 1, Float32(): 2}
"""The types that a policy casts to each other, and which of two is the wider one."""


def set_precision(
    function: Function,
    dtype: DType | str,
    source: DType | str = Float32(),  # noqa: B008
) -> Function:
    """Return ``function`` with every tensor, constant and cast of type ``source`` turned to ``dtype``.

    Types may be given by their names. Callees are rewritten once each. For the types of a training step:
    :class:`Precision`.
    """

    old, new = dtype_named(source), dtype_named(dtype)

    def change(op: Op, env: Environment) -> tuple[Op]:
        return (retype_op(op, env, function.name, _converted(op, old, new)),)

    def converted(value: Value) -> Value:
        type_ = value.type
        if isinstance(type_, Tensor) and type_.dtype == old:
            return replace(value, type=Tensor(new, type_.shape, type_.device))
        return value

    return rewrite_all(
        function, lambda _, current: rewrite(current, change, [converted(value) for value in current.inputs])
    )


def apply_precision(function: Function, precision: Precision) -> Function:
    """Return a forward function in the types of a policy, with the casts that it asks for.

    What is float32 in ``function`` is so logically. Parameters come in as ``precision.parameter``; where that
    is not ``precision.used`` the first op that reads one finds it cast as a whole. Products read
    ``precision.compute``, and so do biases that are added to what they make, which are operands of theirs
    (torch.autocast casts all of ``linear``); the operators of ``precision.wide_ops`` ``precision.wide``; any
    other op takes the widest type of what it reads, of which constants do not count: they take the type of
    what they meet. A value is cast once for all ops of its function that read it so. What is cast of a
    parameter as a whole, and the weights of linear layers, are marked to be made once a step (:data:`ONCE`).
    """
    wide = all(dtype == Float32() for dtype in (precision.parameter, precision.used, precision.compute))
    if wide and precision.linear is None:
        return function
    return _Caster(precision).function(function, [_held(v, precision) for v in function.inputs], (), True)


def set_product_rate(function: Function, rate: str) -> Function:
    """Return ``function`` with float32 products marked to run at the rate of ``rate``, such as tfloat32.

    Attention as one kernel is no such product: torch's for float32 takes as long with TF32 as without (28 and
    26 TFLOP/s on H200, forward and backward: experiments/measured/h200_step_kernels.csv).
    """

    def change(op: Op, env: Environment) -> tuple[Op]:
        attributes = op.attributes
        product = not op.is_call and _multiplies(op) and not op.op_type.startswith("Attention")
        if product and signature_of(op).outputs[0].dtype == Float32():
            attributes = Attributes({**attributes, "rate": rate})
        return (retype_op(op, env, function.name, attributes),)

    return rewrite_all(function, lambda _, current: rewrite(current, change))


def _converted(op: Op, source: DType, dtype: DType) -> Attributes:
    """Return the attributes of an op with constants and casts of one type turned to another."""

    def attribute(value: Any) -> Any:
        stays = not isinstance(value, Literal) or value.array.dtype != source.np
        return value if stays else Literal(value.array.astype(dtype.np))

    if source == dtype:
        return op.attributes
    attributes = {key: attribute(value) for key, value in op.attributes.items()}
    if op.op_type in _CASTS and attributes.get("to") == type_number(source):
        attributes["to"] = type_number(dtype)
    return Attributes(attributes)


def _chosen_by(function: Function) -> set[Value]:
    """Return what TopK chooses by, back to the products that make it: the scores of a router."""
    found: set[Value] = set()
    for op in reversed(function.ops):
        if op.op_type == "TopK" or (not found.isdisjoint(op.outputs) and op.op_type not in LINEAR_OPS):
            found.update(op.inputs)
    return found


def _multiplies(op: Op) -> bool:
    demand = work(signature_of(op))
    return demand is not None and demand.matrix


def _float_type(value: Value) -> DType | None:
    """Return the type of a value that a policy may cast."""
    type_ = value.type
    return type_.dtype if isinstance(type_, Tensor) and type_.dtype in _WIDTH else None


def _held(value: Value, precision: Precision) -> Type:
    type_ = value.type
    if not (isinstance(type_, Tensor) and type_.dtype == Float32()):
        return type_
    dtype = precision.parameter if value.role is Role.PARAMETER else precision.used
    return Tensor(dtype, type_.shape, type_.device)


class _Caster:
    """Writes functions in the types of a policy, each callee once for the types that it is given."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.done: dict[tuple[Function, tuple[Type, ...], tuple[int, ...]], Function] = {}

    def function(
        self, function: Function, types: Sequence[Type], constants: tuple[int, ...], top: bool = False
    ) -> Function:
        """Return ``function`` for inputs of these types, of which those at some places are constants."""
        key = function, tuple(types), constants
        if key not in self.done:
            self.done[key] = _FunctionCaster(self, function, types, constants, top).build()
        return self.done[key]


class _FunctionCaster:
    def __init__(
        self,
        caster: _Caster,
        function: Function,
        types: Sequence[Type],
        constants: Iterable[int],
        top: bool,
    ) -> None:
        self.caster, self.precision, self.old = caster, caster.precision, function
        self.maker = FunctionMaker(function.name, function.notes)
        self.env: dict[Value, Value] = {}
        self.casts: dict[tuple[Value, DType], Value] = {}
        self.narrow: dict[Value, tuple[Value, ...]] = {}
        self.scaling = self.precision.scaling or SCALINGS[0]
        self.linear_ops = self.precision.linear_ops or LINEAR_OPS
        self.makers: dict[Value, Op] = {}  # of constants made here
        self.products: set[Value] = set()
        self.held: set[Value] = set()
        for value, type_ in zip(function.inputs, types, strict=True):
            self.env[value] = self.maker.add_input_value(value.name, type_, value.role)
            if top and value.role is Role.PARAMETER:
                self.held.add(self.env[value])
        self.constants = {self.env[function.inputs[place]] for place in constants}
        self.weights = {self.env[v] for v in function.inputs if v.role is Role.PARAMETER}
        self.wide_results = {v for op in function.ops if op.op_type in LOSSES for v in op.inputs}
        self.wide_results |= _chosen_by(function)

    def build(self) -> Function:
        for op in self.old.ops:
            self.maker.origin = added_name(op)
            reads = [self._used(self.env[value]) for value in op.inputs]
            made = self._call(op, reads) if op.is_call else self._op(op, reads)
            self.env.update(zip(op.outputs, made, strict=True))
            if all(value in self.constants for value in reads):
                self.constants.update(made)
            if op.op_type in _KEEPS_WEIGHT and reads[0] in self.weights:
                self.weights.update(made)
        self.maker.set_outputs([self.env[value] for value in self.old.outputs])
        return self.maker.finalize()

    def _used(self, value: Value) -> Value:
        """Return a value as ops read it: a parameter is cast as a whole."""
        if value in self.held and _float_type(value) == self.precision.parameter:
            return self._cast(value, self.precision.used, {ONCE: True})
        return value

    def _call(self, op: Op, reads: Sequence[Value]) -> tuple[Value, ...]:
        constants = tuple([place for place, value in enumerate(reads) if value in self.constants])
        callee = self.caster.function(op.callee, [value.type for value in reads], constants)
        names = [value.name for value in op.outputs]
        return self.maker.add("Call", reads, op.attributes, (callee,), names, op.version, op.name)

    def _op(self, op: Op, reads: Sequence[Value]) -> tuple[Value, ...]:
        dtype = self._type_of(op, reads)
        if dtype is not None:
            reads = [value if _float_type(value) is None else self._cast(value, dtype) for value in reads]
        if self._is_linear(op, reads):
            self.products.add(made := self._linear(op, reads))
            return (made,)
        known = [found for value in reads if (found := _float_type(value)) is not None]
        cast = op.op_type in _CASTS
        attributes = _converted(op, Float32(), known[0] if known and not cast else self.precision.used)
        names = [value.name for value in op.outputs]
        made = self.maker.add(op.op_type, reads, attributes, (), names, op.version, op.name)
        if not reads:
            self.makers.update(dict.fromkeys(made, self.maker.ops[-1]))
        if op.op_type in LINEAR_OPS and not self.weights.isdisjoint(reads[:2]):
            self.products.update(made)
        return made

    def _adds_bias(self, op: Op, reads: Sequence[Value]) -> bool:
        """Whether an op adds a weight, a vector along its rows, to what a product with a weight makes."""
        if op.op_type != "Add" or self.products.isdisjoint(reads):
            return False
        rows = shape_of(op.outputs[0])[-1:]
        return any(value in self.weights and shape_of(value) == rows for value in reads)

    def _is_linear(self, op: Op, reads: Sequence[Value]) -> bool:
        """Whether an op is a product of activations with a weight whose operands are cast further."""
        if self.precision.linear is None or op.op_type not in self.linear_ops:
            return False
        plain = op.attributes.get("alpha", 1.0) == op.attributes.get("beta", 1.0) == 1.0
        values = len(reads) >= 2 and not {"A", "B"} & op.attributes.keys() and plain
        return values and any(v in self.weights for v in reads[:2]) and op.outputs[0] not in self.wide_results

    def _linear(self, op: Op, reads: Sequence[Value]) -> Value:
        """Add the product of operands that are cast to ``precision.linear``; return it as it is computed."""
        factors: list[tuple[Value, ...]] = []
        for value, name in zip(reads[:2], ("transA", "transB"), strict=True):
            once = {ONCE: True} if value in self.weights else {}
            if op.attributes.get(name, 0):
                value = self.maker.add("Transpose", [value], {"perm": (1, 0)})[0]
            factors.append(self._narrow(value, once))
        options = {"to": type_number(self.precision.compute), **self._marks, **picked(op.attributes, GROUP)}
        names = [value.name for value in op.outputs]
        operands = [each[0] for each in factors]
        amaxes = [amax for each in factors for amax in each[1:]]
        if op.op_type == "GroupedMatMul":
            operands.append(reads[2])
            options = {**op.attributes, **options}
        kind = f"Float8{op.op_type.replace('Gemm', 'MatMul')}"
        made = self.maker.add(kind, [*operands, *amaxes], options, (), names, None, op.name)[0]
        bias = [*reads[2:]] if op.op_type == "Gemm" else []
        if not bias and "C" not in op.attributes:
            return made
        rest = _converted(op, Float32(), self.precision.compute)
        added = {} if bias else {"B": rest["C"]}
        return self.maker.add("Add", [made, *bias], added, output_names=names)[0]

    @property
    def _marks(self) -> dict[str, int]:
        """What marks casts, and products whose gradients are cast: factors of passes before, both ways."""
        return {"delayed": {"delayed": 1}, "blockwise": {"both": 1}}.get(self.scaling, {})

    def _narrow(self, value: Value, once: Mapping[str, Any]) -> tuple[Value, ...]:
        """Return a value as one of ``precision.linear``, with its largest elements where it is scaled so."""
        if value not in self.narrow:
            amaxes: list[Value] = []
            if self.scaling == "tensorwise":
                whole = {"whole": 1} if once else {}
                amaxes = [*self.maker.add("Float8Amax", [value], {**whole, **once})]
            to = {"to": type_number(self.precision.linear or self.precision.compute)}
            (made,) = self.maker.add("Float8Cast", [value, *amaxes], {**to, **self._marks, **once})
            self.narrow[value] = (made, *amaxes)
        return self.narrow[value]

    def _type_of(self, op: Op, reads: Sequence[Value]) -> DType | None:
        """Return the type that an op reads; None if it takes what there is."""
        if op.op_type in self.precision.wide_ops:
            return self.precision.wide
        if op.inputs and (_multiplies(op) or self._adds_bias(op, reads)):
            return self.precision.compute
        floats = {value: dtype for value in reads if (dtype := _float_type(value)) is not None}
        if len(set(floats.values())) < 2 or op.op_type == "CastLike":
            return None
        counted = [dtype for value, dtype in floats.items() if value not in self.constants]
        return max(counted or floats.values(), key=_WIDTH.__getitem__)

    def _cast(self, value: Value, dtype: DType, marks: Mapping[str, Any] = NO_ATTRIBUTES) -> Value:
        """Return a value as one of a type; a constant is made anew, or else it is cast, once: by a Cast with
        these attributes besides."""
        if _float_type(value) == dtype:
            return value
        found = self.casts.get((value, dtype))
        if found is None:
            op = self.makers.get(value)
            if op is not None and op.op_type == "Constant":
                number = op.attributes["value"]
                literal = Literal(number.array.astype(dtype.np)) if isinstance(number, Literal) else number
                found = self.maker.add("Constant", (), {**op.attributes, "value": literal})[0]
            else:
                options = {"to": type_number(dtype), **marks}
                name = f"{value.name}.{dtype.short}"
                found = self.maker.add("Cast", [value], options, output_names=[name])[0]
            self.casts[value, dtype] = found
            if value in self.weights:
                self.weights.add(found)
            if value in self.constants:
                self.constants.add(found)
        return found
