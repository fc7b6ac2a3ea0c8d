"""differentiate: forward function -> joint function (forward, backward, optimizer)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distsim.errors import PlanError, UnknownOperatorError, expect, wrong_type
from distsim.ir import Attributes, Function, Literal, Op, Tensor, Value, trim
from distsim.ir.function import readers_of
from distsim.ir.module_names import added_name
from distsim.ir.type import as_tensor
from distsim.ops import GradientContext, operator
from distsim.ops.float8 import EIGHT_BITS
from distsim.transforms.autodiff.constant_folding import FoldingMaker
from distsim.transforms.autodiff.loss import how_to_mark, kept_outputs, mark_forward, only_needed
from distsim.transforms.autodiff.optimizers import SGD, Optimizer
from distsim.transforms.autodiff.precision import Precision
from distsim.transforms.autodiff.set_precision import apply_precision, set_product_rate
from distsim.transforms.autodiff.updates import (
    add_updates,
    cast_gradients,
    check_clip,
    gradient_factor,
    scaled_gradient,
)

Mask = tuple[bool, ...]


def differentiate(
    function: Function,
    optimizer: Optimizer | None = SGD(),  # noqa: B008
    keep: Sequence[str] = (),
    precision: Precision | None = None,
    clip: float | None = None,
) -> Function:
    """Return the function that runs ``function``, its backward pass and ``optimizer``.

    The first output of ``function`` is the loss, a floating-point scalar (see :func:`add_loss`).
    Outputs: the loss, then those of ``function`` that ``keep`` names, in their order, then per parameter in
    order its new value, then its new optimizer state; with ``optimizer=None``, the gradients instead.
    Optimizer state comes in as inputs of role STATE. A parameter that does not influence the loss, or that
    ops read as a buffer only (running statistics), keeps its value and is not an output. What is kept is
    computed by the forward pass (``ForwardOutput`` marks it); ops that no output needs are left out, those
    of callees too, and a note of the function says which.

    ``precision`` decides the types of all: of the forward pass (:func:`apply_precision`), of gradients as
    they are summed (``GradientCast``) and read by the optimizer, of its state; a note says which policy it
    is. None: types stay as they are, and gradients and state are of the parameter's.

    ``clip`` is the norm over all gradients to which they are clipped before the update (None: not at all); a
    precision with a loss scale has the loss scaled before the backward pass, and the gradients unscaled.

    The parameters of one Call are updated by one Call, of a callee that all Calls with parameters of
    the same types share (see :func:`add_updates`).

    Reverse accumulation over the ops and through Calls: a callee is differentiated once per set of
    wanted gradients, into a forward function that also returns what backward needs, and a backward
    function. Raises :class:`UnknownOperatorError` for an operator without a gradient, and
    :class:`PlanError` without a loss, without parameters, and for a name that no output has.

    >>> from distsim.models import mlp
    >>> step = differentiate(mlp(layers=1, width=4, batch=2), SGD(lr=0.1))
    >>> [value.name for value in step.outputs]
    ['loss', 'w0.new']
    """
    _check_given(function, optimizer, clip)
    loss = _loss_of(function)
    kept = kept_outputs(function, keep, loss)
    function = mark_forward(only_needed(function, (loss, *kept), "the loss does not need it"))
    loss_scale = None
    if precision is not None:
        function = apply_precision(function, precision)
        function = replace(function, notes=(*function.notes, f"precision {precision}"))
        loss, loss_scale = function.outputs[0], precision.loss_scale
    trained = _trained(function)
    pass_ = _Pass(FoldingMaker(f"{function.name}_training", function.notes), _Callees())
    for value in function.inputs:
        pass_.copies[value] = pass_.maker.add_input_value(value.name, value.type, value.role)
    wanted = _influenced(function, trained)
    pass_.plan(function, wanted, [loss])
    pass_.forward(function)
    seed = 1.0 if loss_scale is None else loss_scale
    pass_.grads[loss] = pass_.maker.number(seed, as_tensor(loss.type, "the loss"), "one")
    pass_.backward(function, wanted)
    pairs = [(pass_.copies[p], pass_.grads[p]) for p in trained if p in pass_.grads]
    if precision is not None:
        pairs = cast_gradients(pass_.maker, pairs, precision)
    owners = _owners(function, pass_.copies)
    factor = gradient_factor(pass_.maker, pairs, owners, clip, loss_scale)
    outputs = [pass_.copies[value] for value in function.outputs]
    if optimizer is None:
        outputs += [scaled_gradient(pass_.maker, grad, factor, f"d{weight.name}") for weight, grad in pairs]
    else:
        outputs += add_updates(pass_.maker, optimizer, pairs, owners, precision, factor)
    pass_.maker.set_outputs(outputs)
    joint = trim(pass_.maker.finalize()).function  # rules make gradients that nothing needs
    rate = "" if precision is None else precision.product_rate
    return set_product_rate(joint, rate) if rate else joint


def _check_given(function: object, optimizer: object, clip: float | None) -> None:
    expect("function", function, Function, "a forward function, as load_model() makes of a model's name")
    if optimizer is not None and not callable(getattr(optimizer, "update", None)):
        raise wrong_type(
            "optimizer", optimizer, "an optimizer, as optimizer_named() makes of a text, or None"
        )
    check_clip(clip)


def _loss_of(function: Function) -> Value:
    """Return the loss of a function that can be trained."""
    if not function.outputs:
        raise PlanError(f"{function.name} has no outputs; the first one must be a scalar loss")
    loss = function.outputs[0]
    if not (isinstance(loss.type, Tensor) and loss.type.shape == () and loss.type.dtype.is_floating):
        raise PlanError(
            f"{function.name}: the first output, {loss}, must be a scalar loss; append one with add_loss"
        )
    if not function.parameters:
        raise PlanError(
            f"{function.name} has no input marked as a parameter (Role.PARAMETER); {how_to_mark(function)}"
        )
    return loss


def _owners(function: Function, copies: Mapping[Value, Value]) -> dict[Value, tuple[Op, str]]:
    """Return, by copy of each parameter that one Call alone reads, that Call and the callee's name for it."""
    readers: dict[Value, dict[Op, None]] = {value: {} for value in function.parameters}
    for op in function.ops:
        for value in op.inputs:
            if value in readers:
                readers[value][op] = None
    found: dict[Value, tuple[Op, str]] = {}
    for value, ops in readers.items():
        op = next(iter(ops), None)
        if op is not None and len(ops) == 1 and op.is_call:
            found[copies[value]] = (op, op.callee.inputs[op.inputs.index(value)].name)
    return found


def _trained(function: Function) -> list[Value]:
    """Return the parameters that some op reads otherwise than as a buffer, or that are returned.

    What leads to tables of ops alone, such as the angles of a rotary embedding, is not read so.
    """
    used, _ = _read(function, {})
    return [value for value in function.parameters if value in used]


def _read(
    current: Function, known: dict[Function, tuple[set[Value], set[Value]]]
) -> tuple[set[Value], set[Value]]:
    """Return what is read otherwise than as a buffer, and what otherwise than as a table."""
    if current not in known:
        found, needed = set(current.outputs), set(current.outputs)
        for op in reversed(current.ops):
            if needed.isdisjoint(op.outputs):
                continue
            if op.is_call:
                pairs = list(zip(op.inputs, op.callee.inputs, strict=True))
                for own, inner in zip((found, needed), _read(op.callee, known), strict=True):
                    own.update(value for value, formal in pairs if formal in inner)
                continue
            meaning = operator(op.op_type)
            held = meaning.buffers(op.attributes, len(op.inputs)) if meaning.buffers else ()
            plain = [value for place, value in enumerate(op.inputs) if place not in held]
            found.update(plain)
            needed.update(plain if meaning.tables else op.inputs)
        known[current] = found, needed
    return known[current]


def _influenced(function: Function, sources: Sequence[Value]) -> set[Value]:
    """Return the floating-point values that depend on ``sources``: those that need a gradient."""
    found = set(sources)
    for op in function.ops:
        if any(value in found for value in op.inputs):
            found.update(v for v in op.outputs if (isinstance(v.type, Tensor) and v.type.dtype.is_floating))
    return found


@dataclass(frozen=True)
class _Linearized:
    """A callee's forward function with saved outputs, and its backward function.

    ``saved`` are the callee's values that backward reads: inputs first, then those that ``forward``
    returns after the callee's own outputs. ``grads`` tells of which outputs backward takes the gradient,
    ``inputs`` of which inputs it makes one.
    """

    forward: Function
    backward: Function
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    grads: tuple[int, ...]
    inputs: tuple[int, ...]


class _Callees:
    """Differentiates every callee once per (wanted inputs, given output gradients)."""

    def __init__(self) -> None:
        self._done: dict[tuple[Function, Mask, Mask], _Linearized] = {}

    def linearize(self, callee: Function, wanted: Mask, given: Mask) -> _Linearized:
        key = (callee, wanted, given)
        if key not in self._done:
            self._done[key] = self._linearize(callee, wanted, given)
        return self._done[key]

    def _linearize(self, callee: Function, wanted: Mask, given: Mask) -> _Linearized:
        influenced = _influenced(callee, [v for v, w in zip(callee.inputs, wanted, strict=True) if w])
        forward = FoldingMaker(callee.name)
        ahead = _Pass(forward, self)
        for value in callee.inputs:
            ahead.copies[value] = forward.add_input_value(value.name, value.type, value.role)
        ahead.plan(callee, influenced, [v for v, g in zip(callee.outputs, given, strict=True) if g])
        ahead.forward(callee)

        backward = FoldingMaker(f"{callee.name}_backward")
        behind = _Pass(backward, self)
        behind.linearized = ahead.linearized
        everything = [*callee.inputs, *(v for op in callee.ops for v in op.outputs)]
        back_of: dict[Value, Value] = {}
        for value in everything:
            behind.copies[value] = backward.add_input_value(value.name, value.type, value.role)
            back_of[behind.copies[value]] = ahead.copies[value]
        for op, values in ahead.extras.items():
            own = tuple(backward.add_input_value(v.name, v.type) for v in values)
            behind.extras[op] = own
            back_of.update(zip(own, values, strict=True))
        grads = tuple(i for i, v in enumerate(callee.outputs) if given[i] and v in influenced)
        for index in grads:
            value = callee.outputs[index]
            behind.accumulate(value, backward.add_input_value(f"d{value.name}", value.type))
        behind.backward(callee, influenced)
        targets = [i for i, v in enumerate(callee.inputs) if wanted[i] and v in behind.grads]
        backward.set_outputs([behind.grads[callee.inputs[i]] for i in targets])
        return self._wire(callee, ahead, backward, back_of, grads, tuple(targets))

    def _wire(
        self,
        callee: Function,
        ahead: _Pass,
        backward: FoldingMaker,
        back_of: dict[Value, Value],
        given: tuple[int, ...],
        targets: tuple[int, ...],
    ) -> _Linearized:
        """Keep only the forward values that backward reads, and return them from forward."""
        read = {value for op in backward.ops for value in op.inputs} | set(backward.outputs or ())
        backward.inputs = [v for v in backward.inputs if v in read or v not in back_of]
        own_inputs = [ahead.copies[v] for v in callee.inputs]
        own_outputs = [ahead.copies[v] for v in callee.outputs]
        saved = [back_of[v] for v in backward.inputs if v in back_of]
        from_inputs = tuple(own_inputs.index(v) for v in saved if v in own_inputs)
        rest = [v for v in saved if v not in own_inputs]
        extra = [v for v in dict.fromkeys(rest) if v not in own_outputs]
        outputs = [*own_outputs, *extra]
        ahead.maker.set_outputs(outputs)
        order = {v: i for i, v in enumerate([*own_inputs, *rest])}
        grads = [v for v in backward.inputs if v not in back_of]
        kept = sorted((v for v in backward.inputs if v in back_of), key=lambda v: order[back_of[v]])
        backward.inputs = [*kept, *grads]
        return _Linearized(
            ahead.maker.finalize(),
            backward.finalize(),
            tuple(sorted(from_inputs)),
            tuple(outputs.index(v) for v in rest),
            given,
            targets,
        )


class _Pass:
    """Copies a function forward into a maker, and emits its backward pass into one."""

    def __init__(self, maker: FoldingMaker, callees: _Callees) -> None:
        self.maker, self.callees = maker, callees
        self.copies: dict[Value, Value] = {}
        self.grads: dict[Value, Value] = {}
        self.linearized: dict[Op, _Linearized] = {}
        self.saved: dict[Op, list[str]] = {}  # the names of what ops make besides
        self.extras: dict[Op, tuple[Value, ...]] = {}
        self.readers: dict[Value, list[Op]] = {}

    def plan(self, function: Function, wanted: set[Value], outputs: Sequence[Value]) -> None:
        """Decide how each Call is differentiated, by which of its outputs will have a gradient, and what ops
        make besides for theirs.
        """
        live = set(outputs) & wanted
        for op in reversed(function.ops):
            if not any(v in live for v in op.outputs):
                continue
            if op.is_call:
                mask = tuple(v in wanted for v in op.inputs)
                given = tuple(v in live for v in op.outputs)
                self.linearized[op] = self.callees.linearize(op.callee, mask, given)
            elif any(v in wanted for v in op.inputs):
                rule = operator(op.op_type).saved
                names = () if rule is None else rule(op.attributes, len(op.inputs), len(op.outputs))
                self.saved[op] = [f"{op.outputs[0].name}_{name}" for name in names]
            live.update(v for v in op.inputs if v in wanted)

    def forward(self, function: Function) -> None:
        """Copy the ops; one that is differentiated also returns what its backward reads besides."""
        for op in function.ops:
            inputs = [self.copies[v] for v in op.inputs]
            names, attributes = [v.name for v in op.outputs], op.attributes
            if self.saved.get(op):
                names += self.saved[op]
                attributes = Attributes({**attributes, "outputs": len(names)})
            plan = self.linearized.get(op)
            subfunctions = op.subfunctions
            if plan is not None:
                subfunctions = (plan.forward,)
                names += [v.name for v in plan.forward.outputs[len(op.outputs) :]]
            made = self.maker.add(op.op_type, inputs, attributes, subfunctions, names, op.version, op.name)
            self.copies.update(zip(op.outputs, made, strict=False))
            self.extras[op] = made[len(op.outputs) :]

    def backward(self, function: Function, wanted: set[Value]) -> None:
        """Emit the gradients that follow from those that are there."""
        self.readers = readers_of(function.ops)
        for op in reversed(function.ops):
            if any(v in self.grads for v in op.outputs) and any(v in wanted for v in op.inputs):
                self.maker.origin = added_name(op)
                if op.is_call:
                    self.call(op)
                else:
                    self.op(op, wanted)
        self.maker.origin = ""

    def accumulate(self, value: Value, grad: Value) -> None:
        known = self.grads.get(value)
        if known is not None:
            grad = self.maker.add("Add", [known, grad], output_names=[f"d{value.name}"])[0]
        self.grads[value] = grad

    def op(self, op: Op, wanted: set[Value]) -> None:
        rule = operator(op.op_type).gradient
        if rule is None:
            raise UnknownOperatorError(
                f"operator {op.op_type} ({op!r}) has no gradient rule; give it one in distsim.ops, or "
                "differentiate a function without it"
            )
        context = GradientContext(
            self.maker,
            op,
            tuple(self.copies[v] for v in op.inputs),
            (*(self.copies[v] for v in op.outputs), *self.extras[op]),
            tuple(self.grads.get(v) for v in op.outputs),
            tuple(v in wanted for v in op.inputs),
            self.maker.numbers,
            self.readers,
            self.copies,
        )
        self._take(op.inputs, rule(context), wanted.__contains__, op)

    def _zero(self, value: Value) -> Value:
        """The gradient of an output of a Call that does not reach the loss, where another one does."""
        type_ = as_tensor(value.type, value.name)
        shape = Literal(np.asarray(type_.shape, np.int64))
        zero = {"value": Literal(np.zeros((1,), type_.dtype.np)), "input": shape, "device": type_.device}
        return self.maker.add("ConstantOfShape", (), zero, output_names=[f"d{value.name}"])[0]

    def call(self, op: Op) -> None:
        plan = self.linearized[op]
        saved = [self.copies[op.inputs[i]] for i in plan.saved_inputs]
        results = [*(self.copies[v] for v in op.outputs), *self.extras[op]]
        saved += [results[i] for i in plan.saved_outputs]
        grads = [self.grads.get(v) or self._zero(v) for v in (op.outputs[i] for i in plan.grads)]
        inputs = [*saved, *grads]
        names = [f"d{op.inputs[i].name}" for i in plan.inputs]
        made = self.maker.add("Call", inputs, op.attributes, (plan.backward,), names, None, op.name)
        for index, grad in zip(plan.inputs, made, strict=True):
            self.accumulate(op.inputs[index], grad)

    def _take(
        self, inputs: Sequence[Value], made: Sequence[Value | None], wanted: Callable[[Value], bool], op: Op
    ) -> None:
        if len(made) != len(inputs):
            raise UnknownOperatorError(
                f"the gradient rule of {op.op_type} made {len(made)} gradients for {len(inputs)} inputs"
            )
        for value, grad in zip(inputs, made, strict=True):
            if grad is None or not wanted(value):
                continue
            if grad.type != value.type and as_tensor(value.type, value.name).dtype not in EIGHT_BITS:
                raise UnknownOperatorError(
                    f"the gradient rule of {op.op_type} made {grad} for {value}: the types must agree"
                )
            self.accumulate(value, grad)
