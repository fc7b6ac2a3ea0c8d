"""lift_weights: what is made once a step of weights alone stands outside of the Calls that read it.

A Call runs for every microbatch, and again where it is computed again. So what frameworks make of weights
once a step (:data:`distsim.ops.conversion.ONCE`), and what that is made of, is no part of it: the Call reads
it, as it reads a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from distsim.ir import Environment, Function, Op, Role, Value, needed_ops, rewire_op, rewrite, substitute
from distsim.ir.rewrite import copy_op
from distsim.ops.conversion import ONCE


def lift_weights(function: Function) -> Function:
    """Return ``function`` with what is made once a step of weights outside of Calls, once of each weight.

    Itself where there is nothing to lift. Inputs and outputs stay.
    """
    held = [place for place, value in enumerate(function.inputs) if value.role is not Role.INPUT]
    return _WeightLifter().outside(function, tuple(held))


@dataclass(frozen=True, eq=False)
class _Lifted:
    """A callee without the ops ``lifted``, which read its inputs and each other.

    ``rest`` reads the old inputs at ``reads``, then the values ``given`` of lifted ops; it makes the old
    outputs at ``makes``. ``passed`` are the other outputs, by place: values of lifted ops.
    """

    inputs: tuple[Value, ...]
    lifted: tuple[Op, ...]
    rest: Function
    reads: tuple[int, ...]
    given: tuple[Value, ...]
    makes: tuple[int, ...]
    passed: dict[int, Value]


class _WeightLifter:
    """Lifts out of each callee once for the places of the weights that it is given."""

    def __init__(self) -> None:
        self.known: dict[tuple[Function, tuple[int, ...]], _Lifted | None] = {}

    def outside(self, function: Function, held: Sequence[int]) -> Function:
        """Return a function with what its Calls make once a step outside of them; ``held`` are weights."""
        weights = {function.inputs[place] for place in held}  # old values, with what is made of them alone
        made: dict[Hashable, Op] = {}

        def change(op: Op, env: Environment) -> Iterator[Op]:
            if op.is_call:
                places = tuple([place for place, value in enumerate(op.inputs) if value in weights])
                found = self.of(op.callee, places) if places else None
                if found is None:
                    yield rewire_op(op, env)
                else:
                    weights.update([op.outputs[place] for place in found.passed])
                    yield from _calls(op, found, env, made)
                return
            if _is_of(op, weights):
                weights.update(op.outputs)
            yield rewire_op(op, env)

        return rewrite(function, change)

    def of(self, callee: Function, held: tuple[int, ...]) -> _Lifted | None:
        """Return a callee with what is lifted out of it, None if that is nothing."""
        key = callee, held
        if key not in self.known:
            self.known[key] = _lifted(callee, self.outside(callee, held), held)
        return self.known[key]


def _calls(op: Op, found: _Lifted, env: Environment, made: dict[Hashable, Op]) -> Iterator[Op]:
    """Yield what is lifted out of a Call, unless it is there already, and the Call of the rest."""
    inner = dict(zip(found.inputs, substitute(op.inputs, env), strict=True))
    for part in found.lifted:
        key = part.op_type, part.attributes, part.version, substitute(part.inputs, inner)
        if key not in made:
            made[key] = copy_op(part, inner, _named(op, part))
            yield made[key]
        inner.update(zip(part.outputs, made[key].outputs, strict=True))
    env.update({op.outputs[place]: inner[value] for place, value in found.passed.items()})
    reads = (*[inner[found.inputs[place]] for place in found.reads], *substitute(found.given, inner))
    outputs = tuple([op.outputs[place] for place in found.makes])
    yield replace(op, inputs=reads, outputs=outputs, subfunctions=(found.rest,))


def _named(call: Op, part: Op) -> str:
    """Return the name of what was in a Call: of its module, if it has a name."""
    if not call.name:
        return part.name
    return f"{call.name}.{part.name}" if "/" in part.name else f"{call.name}/{part.name}"


def _is_of(op: Op, weights: Collection[Value]) -> bool:
    """Whether an op, which is no Call, reads weights alone."""
    return bool(op.inputs) and not op.subfunctions and all(value in weights for value in op.inputs)


def _lifted(callee: Function, function: Function, held: Sequence[int]) -> _Lifted | None:
    """Return the parts of ``function``, which is ``callee`` with what its own Calls make outside of them."""
    weights = {function.inputs[place] for place in held}
    alone: list[Op] = []
    for op in function.ops:
        if _is_of(op, weights):
            weights.update(op.outputs)
            alone.append(op)
    once = [value for op in alone if op.attributes.get(ONCE) for value in op.outputs]
    if not once:
        return None
    lifted = needed_ops(alone, once)
    gone = {*lifted}
    rest = [op for op in function.ops if op not in gone]
    made = {value for op in lifted for value in op.outputs}
    makes = tuple([place for place, value in enumerate(function.outputs) if value not in made])
    passed = {place: value for place, value in enumerate(function.outputs) if value in made}
    outputs = tuple([function.outputs[place] for place in makes])
    read = {*outputs, *[value for op in rest for value in op.inputs]}
    reads = tuple([place for place, value in enumerate(function.inputs) if value in read])
    given = tuple([value for op in lifted for value in op.outputs if value in read])
    formals = [Value(value.name, value.type, Role.PARAMETER) for value in given]
    inputs = [*[function.inputs[place] for place in reads], *formals]
    env = dict(zip(given, formals, strict=True))
    rewired = tuple([rewire_op(op, env) for op in rest])
    plain = replace(function, inputs=tuple(inputs), ops=rewired, outputs=outputs)
    return _Lifted(function.inputs, tuple(lifted), plain, reads, given, makes, passed)
