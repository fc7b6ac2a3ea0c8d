"""rewrite: a Function copied op by op. A transform says what becomes of an op, not how to walk.

The *environment* says what stands for a value in the copy; a value that it does not have stands for itself,
so that what does not change is shared with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_

from distsim.cache import Cache
from distsim.errors import DistsimError, TypeRuleError
from distsim.ir.function import Function, Op, callees
from distsim.ir.registry import output_types
from distsim.ir.type import Type
from distsim.ir.value import Attributes, Value

Environment = dict[Value, Value]
"""A value of the original -> what stands for it in the copy."""

Change = Callable[[Op, Environment], Iterable[Op]]
"""The ops in the place of one; those whose results are others than its own enter them in the environment."""


def rewrite(function: Function, change: Change, inputs: Sequence[Value] | None = None) -> Function:
    """Return ``function`` on these ``inputs`` (its own, unless given), each op replaced by what it becomes.

    It is ``function`` itself if nothing changes. Types are not checked again: ops that are not of
    ``function`` must have the types of their operators, as :func:`retype_op` derives them.

    >>> from distsim.ir import Float, FunctionMaker, Tensor
    >>> maker = FunctionMaker("f")
    >>> x = maker.add_input_value("x", Tensor(Float(), (2,)))
    >>> y = maker.add_op("Relu", inputs=[x], output_names=["y"])
    >>> rewrite(maker.finalize(), lambda op, env: [copy_op(op, env), copy_op(op, env)]).ops
    (y = Relu(x), y = Relu(x))
    """
    given = function.inputs if inputs is None else tuple(inputs)
    env = {old: new for old, new in zip(function.inputs, given, strict=True) if old is not new}
    ops = tuple([made for op in function.ops for made in change(op, env)])
    outputs = substitute(function.outputs, env)
    unchanged = given == function.inputs and outputs == function.outputs  # values are equal when identical
    if unchanged and len(ops) == len(function.ops) and all(map(is_, ops, function.ops)):
        return function
    return replace(function, inputs=given, ops=ops, outputs=outputs)


def rewrite_all(function: Function, change: Callable[[Function, Function], Function]) -> Function:
    """Return what ``function`` becomes when ``change`` is made to each of its callees, once, and then to it.

    ``change`` is given a function as it was, and as it is with Calls of what its callees have become.
    """
    done: dict[Function, Function] = {}

    def calling(op: Op, _: Environment) -> tuple[Op]:
        called = tuple([done[callee] for callee in op.subfunctions])
        return (op if called == op.subfunctions else replace(op, subfunctions=called),)

    for before in (*callees(function), function):
        done[before] = change(before, rewrite(before, calling))
    return done[function]


class KeptRewrites:
    """What functions become by one rewrite, each kept with it by a key: made once.

    ``what`` says what is kept and by what key, ``size`` of how many keys for each function.
    """

    def __init__(self, what: str, size: int) -> None:
        self._kept = Cache[Function, Function | None](what, size)

    def of(self, function: Function, key: Hashable, rewritten: Callable[[], Function]) -> Function:
        """Return what ``rewritten`` made of a function: itself where nothing changes."""

        def make() -> Function | None:  # what is kept does not hold its owner
            made = rewritten()
            return None if made is function else made

        return self._kept.get(function, key, make) or function


def substitute(values: Iterable[Value], env: Mapping[Value, Value]) -> tuple[Value, ...]:
    """Return what stands for each of the values."""
    own = tuple(values)
    return own if env.keys().isdisjoint(own) else tuple(map(env.get, own, own))


def rewire_op(op: Op, env: Mapping[Value, Value]) -> Op:
    """Return the op that reads what stands for its inputs, and makes the same outputs."""
    inputs = substitute(op.inputs, env)
    if inputs == op.inputs:
        return op
    return Op(op.op_type, inputs, op.outputs, op.attributes, op.subfunctions, op.version, op.name)


def copy_op(op: Op, env: Environment, name: str | None = None, names: Sequence[str] | None = None) -> Op:
    """Return the op that reads what stands for its inputs and makes values of its own, entered in ``env``.

    ``name`` is the copy's, ``names`` those of its outputs, both by default as the op has them.
    """
    outputs = tuple(
        [
            Value(value.name if names is None else names[place], value.type, value.role)
            for place, value in enumerate(op.outputs)
        ]
    )
    # A record of its own, not ``replace``: steps of many layers are copied some ten times for each plan.
    given, name = substitute(op.inputs, env), op.name if name is None else name
    copy = Op(op.op_type, given, outputs, op.attributes, op.subfunctions, op.version, name)
    env.update(zip(op.outputs, outputs, strict=True))
    return copy


def copy_function(function: Function) -> Function:
    """Return the function with values of its own; its callees are shared."""
    inputs = [Value(value.name, value.type, value.role) for value in function.inputs]
    return rewrite(function, lambda op, env: (copy_op(op, env),), inputs)


def retype_op(
    op: Op,
    env: Environment,
    where: str,
    attributes: Attributes | None = None,
    subfunctions: tuple[Function, ...] | None = None,
) -> Op:
    """Return the op that reads what stands for its inputs, with outputs of the types that then follow.

    Outputs whose type stays are the same values; the others are entered in ``env``. Raises the error of the
    operator's type rule, naming the function (``where``), the op and its inputs.
    """
    inputs = substitute(op.inputs, env)
    attributes = op.attributes if attributes is None else attributes
    callees = op.subfunctions if subfunctions is None else subfunctions
    types = tuple([value.type for value in inputs])
    try:
        made = output_types(op.op_type, attributes, types, callees, op.version)
    except DistsimError as error:
        arguments = ", ".join(map(repr, inputs))
        names = ", ".join(value.name for value in op.outputs)
        raise type(error)(
            f"{where}: {names} = {op.op_type}({arguments}) does not fit its new input types: {error}"
        ) from error
    if len(made) != len(op.outputs):
        raise TypeRuleError(
            f"{where}: {op!r} has {len(op.outputs)} outputs, but makes {len(made)} of its new inputs"
        )
    outputs = tuple([retype(value, type_) for value, type_ in zip(op.outputs, made, strict=True)])
    env.update((old, new) for old, new in zip(op.outputs, outputs, strict=True) if old is not new)
    return replace(op, inputs=inputs, outputs=outputs, attributes=attributes, subfunctions=callees)


def retype(value: Value, type_: Type) -> Value:
    """Return the value with this type, itself if it has it."""
    return value if value.type is type_ or value.type == type_ else replace(value, type=type_)


def inline(function: Function, calls: Collection[Op] | None = None) -> Function:
    """Return ``function`` with its Calls, or those given, replaced by the ops of the callee (one level).

    What a Call returns keeps the names that the Call gives it.
    """

    def change(op: Op, env: Environment) -> Iterator[Op]:
        if not op.is_call or (calls is not None and op not in calls):
            yield rewire_op(op, env)
            return
        inner = dict(zip(op.callee.inputs, substitute(op.inputs, env), strict=True))
        named = {v: outer.name for v, outer in zip(op.callee.outputs, op.outputs, strict=True)}
        for part in op.callee.ops:
            name = f"{op.name}.{part.name}" if op.name and part.name else op.name or part.name
            yield copy_op(part, inner, name, [named.get(value, value.name) for value in part.outputs])
        env.update(zip(op.outputs, substitute(op.callee.outputs, inner), strict=True))

    return rewrite(function, change)


def flatten(function: Function) -> Function:
    """Return ``function`` with every Call written out, those in callees too."""
    while any(op.is_call for op in function.ops):
        function = inline(function)
    return function
