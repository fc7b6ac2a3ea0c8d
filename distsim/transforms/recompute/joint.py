"""A joint function and its passes: told apart, taken apart, and of a forward Call with its backward Call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distsim.cache import Cache
from distsim.ir import Function, Op, Role, Value, needed_ops, rewire_op, rewrite, substitute
from distsim.ir.rewrite import flatten
from distsim.transforms.op_graph import is_sum, numbered


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint function and its passes.

    ``forward`` are the ops that the loss depends on, ``constants`` those that only follow from constants
    (each pass makes them itself), ``steps`` those that run once per step, after a sum over microbatches.
    All other ops are backward: gradients and what is made of them. ``tangents`` are the inputs that are
    gradients. ``free`` are values that are in memory anyway, in both passes: parameters, optimizer state,
    constants. ``outputs`` are the places of the outputs that the forward pass returns. ``copies`` are the
    ops that compute a forward op again, where that is known, with that op, and the barriers that they read.
    """

    function: Function
    forward: AbstractSet[Op]
    constants: AbstractSet[Op]
    steps: AbstractSet[Op]
    tangents: AbstractSet[Value]
    free: AbstractSet[Value]
    outputs: tuple[int, ...]
    copies: Mapping[Op, Op] = field(default_factory=dict[Op, Op])

    @staticmethod
    def of(function: Function) -> Joint:
        """Return the passes of a function whose loss is its first scalar output."""
        graph = numbered(function)
        held = [v for v, stays in zip(function.inputs, graph.held, strict=False) if stays]
        constants = [op for op, loose in zip(function.ops, graph.loose, strict=True) if loose]
        forward = [op for op, ahead in zip(function.ops, graph.forward, strict=True) if ahead]
        steps = [op for op, once in zip(function.ops, graph.steps, strict=True) if once]
        made = [v for op in constants for v in op.outputs]
        ahead = {v for op in forward for v in op.outputs}
        outputs = tuple([i for i, v in enumerate(function.outputs) if v in ahead])
        return Joint(function, set(forward), set(constants), set(steps), set(), {*held, *made}, outputs)

    def behind(self, op: Op) -> bool:
        """Whether an op is of the backward pass."""
        return op not in self.forward and op not in self.constants and op not in self.steps

    @property
    def made(self) -> dict[Value, Op]:
        """The values that the forward pass makes, in order, and the op that makes each."""
        return {v: op for op in self.function.ops if op in self.forward for v in op.outputs}


@dataclass(frozen=True, eq=False)
class Passes:
    """A joint function taken apart: ``backward`` reads ``saved``, which ``forward`` returns last.

    Both are over the values of the joint function: an input that both passes read is an input of both.
    """

    forward: Function
    backward: Function
    saved: tuple[Value, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the saved values."""
        return sum(value.type.nbytes for value in self.saved)


def split_joint(joint: Function | Joint) -> Passes:
    """Take a joint function apart into its forward and its backward pass.

    The forward function returns the outputs that the forward pass makes, then what backward reads of the
    others, each once, in the order in which it is made; the backward function makes the other outputs. Ops
    that nobody needs are left out.

    >>> from distsim.models import mlp
    >>> from distsim.transforms import differentiate, inline
    >>> split = split_joint(inline(differentiate(mlp(layers=2, width=4, batch=2), None)))
    >>> [value.name for value in split.saved]
    ['y0', 'a0', 'y1', 'a1']
    """
    joint = joint if isinstance(joint, Joint) else Joint.of(joint)
    function, made = joint.function, joint.made
    own = [function.outputs[i] for i in joint.outputs]
    rest = [v for i, v in enumerate(function.outputs) if i not in joint.outputs]
    behind = [op for op in function.ops if op not in joint.forward and op not in joint.constants]
    ops = _needed(function, {*behind, *joint.constants}, rest)
    read = dict.fromkeys([*(v for op in ops for v in op.inputs), *rest])
    saved = tuple([v for v in made if v in read and v not in own])
    given = [v for v in made if v in read]
    inputs = [v for v in function.inputs if v in read or v in joint.tangents]
    ahead = [v for v in function.inputs if v not in joint.tangents]
    back = Function(f"{function.name}_backward", (*inputs, *given), tuple(ops), tuple(rest))
    outputs = (*own, *saved)
    needed = _needed(function, joint.forward | joint.constants, outputs)
    front = Function(f"{function.name}_forward", tuple(ahead), tuple(needed), outputs)
    return Passes(front, back, saved)


def _needed(function: Function, own: AbstractSet[Op], outputs: Iterable[Value]) -> list[Op]:
    """Return those of a pass's ops, constants included, that the outputs need, in order."""
    return needed_ops([op for op in function.ops if op in own], outputs)


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """A forward Call and its backward Call.

    ``wiring`` says of each operand of ``backward`` what it is: (0, i) is operand i of ``forward``, (1, i)
    its result i, (2, i) operand i of its own, i the first place where it reads it. ``late`` are those of its
    operands that the backward pass makes, ``required`` the results of ``forward`` that others read, ``free``
    its operands that are in memory anyway.
    """

    forward: Op
    backward: Op
    wiring: tuple[tuple[int, int], ...]
    late: tuple[int, ...]
    required: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def callees(self) -> tuple[Function, Function]:
        """The functions that the two Calls run."""
        return self.forward.callee, self.backward.callee

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for pairs of the same forward callee of which the same becomes."""
        return self.backward.callee, self.wiring, self.late, self.required, self.free


def find_pairs(joint: Joint) -> list[Pair]:
    """Return the forward Calls with results that only one Call reads, a backward one, in order."""
    function = joint.function
    readers: dict[Value, dict[Op | None, None]] = {}
    for op in function.ops:
        for value in op.inputs:
            readers.setdefault(value, {})[op] = None
    for value in function.outputs:
        readers.setdefault(value, {})[None] = None
    found: list[Pair] = []
    taken: set[Op] = set()
    # What is summed over microbatches is no gradient that one of them waits for.
    late = {v for op in function.ops if joint.behind(op) and not is_sum(op) for v in op.outputs}
    for op in function.ops:
        if not op.is_call or op not in joint.forward:
            continue
        alone = [next(iter(readers[v])) for v in op.outputs if len(readers.get(v, ())) == 1]
        for back in dict.fromkeys(alone):
            if back and back.is_call and back not in joint.forward and back not in taken:
                taken.add(back)
                found.append(_pair(joint, op, back, readers, late))
                break
    return found


def _pair(
    joint: Joint, op: Op, back: Op, readers: dict[Value, dict[Op | None, None]], made: set[Value]
) -> Pair:
    ins = {value: i for i, value in reversed(list(enumerate(op.inputs)))}
    outs = {value: i for i, value in enumerate(op.outputs)}
    own = {value: i for i, value in reversed(list(enumerate(back.inputs)))}
    wiring = [(1, outs[v]) if v in outs else (0, ins[v]) if v in ins else (2, own[v]) for v in back.inputs]
    required = [
        i for i, v in enumerate(op.outputs) if any(reader is not back for reader in readers.get(v, ()))
    ]
    free = [i for i, v in enumerate(op.inputs) if v in joint.free]
    late = [i for i, v in enumerate(back.inputs) if v in made]
    return Pair(op, back, tuple(wiring), tuple(late), tuple(required), tuple(free))


def joint_of(pair: Pair) -> Joint:
    """Return the callees of a pair as one joint function.

    Inputs: those of the forward callee, then what backward reads besides, its tangents. Outputs: the
    required ones of forward, then those of backward.
    """
    ahead, behind = flatten(pair.forward.callee), flatten(pair.backward.callee)
    known: dict[Value, Value] = {}
    tangents: dict[int, Value] = {}
    for formal, (kind, index) in zip(behind.inputs, pair.wiring, strict=True):
        if kind == 2:
            tangents.setdefault(index, formal)
        known[formal] = (ahead.inputs, ahead.outputs, tangents)[kind][index]
    # What both make, such as constants that two passes of one function were given, is made once.
    both = {value for op in ahead.ops for value in op.outputs}
    ops = [rewire_op(op, known) for op in behind.ops if both.isdisjoint(op.outputs)]
    inputs = (*ahead.inputs, *tangents.values())
    outputs = (*[ahead.outputs[i] for i in pair.required], *substitute(behind.outputs, known))
    function = Function(ahead.name, inputs, (*ahead.ops, *ops), outputs)
    free = [v for i, v in enumerate(ahead.inputs) if i in pair.free or v.role is not Role.INPUT]
    held = [v for v in tangents.values() if v.role is not Role.INPUT]
    late = {value for place, value in tangents.items() if place in pair.late}
    constants, made = set[Op](), set[Value]()
    for op in ahead.ops:
        if made.issuperset(op.inputs):
            constants.add(op)
            made.update(op.outputs)
    first = tuple(range(len(pair.required)))
    return Joint(function, set(ahead.ops) - constants, constants, set(), late, {*free, *held, *made}, first)


@dataclass(frozen=True, eq=False, slots=True)
class Rewritten:
    """What becomes of a pair: two callees, and how they are wired.

    ``kept`` are the results of the old forward Call that the new one returns first, ``saved`` the names and
    types of the values that it returns after them. ``reads`` says of each operand of the new backward Call
    what it is, as ``Pair.wiring`` does (there (1, i) is result i of the new forward Call).
    """

    forward: Function
    backward: Function
    kept: tuple[int, ...]
    saved: tuple[Value, ...]
    reads: tuple[tuple[int, int], ...]

    def calls(self, pair: Pair) -> tuple[Op, Op]:
        """Return the Calls that replace those of a pair."""
        ahead, behind = pair.forward, pair.backward
        own = [ahead.outputs[i] for i in self.kept]
        results = (*own, *[Value(value.name, value.type) for value in self.saved])
        inputs = [(ahead.inputs, results, behind.inputs)[kind][i] for kind, i in self.reads]
        return (
            replace(ahead, outputs=results, subfunctions=(self.forward,)),
            replace(behind, inputs=tuple(inputs), subfunctions=(self.backward,)),
        )


def rewritten(pair: Pair, before: Joint, joint: Joint) -> Rewritten:
    """Return what becomes of a pair whose joint function ``before`` was rewritten into ``joint``."""
    split = split_joint(joint)
    count = len(pair.forward.callee.inputs)
    ins = {value: (0, i) for i, value in enumerate(before.function.inputs[:count])}
    tangents = dict.fromkeys([i for kind, i in pair.wiring if kind == 2])
    ins |= {v: (2, i) for v, i in zip(before.function.inputs[count:], tangents, strict=True)}
    outs: dict[Value, tuple[int, int]] = {}
    for i, value in enumerate(split.forward.outputs):
        outs.setdefault(value, (1, i))
    reads = tuple([ins[v] if v in ins else outs[v] for v in split.backward.inputs])
    forward = replace(split.forward, name=pair.forward.callee.name, inputs=before.function.inputs[:count])
    backward = replace(split.backward, name=pair.backward.callee.name)
    return Rewritten(forward, _with_own_inputs(backward), pair.required, split.saved, reads)


class ChangedPair(NamedTuple):
    """What a change makes of the joint function of a pair; ``again``: a part that was asked for is run
    again."""

    joint: Joint
    again: bool = False


class PairCalls(NamedTuple):
    """The Calls that replace those of a pair, none where it stays as it is; ``again``: see
    :class:`ChangedPair`."""

    calls: Mapping[Op, Op]
    again: bool


def changed_pair(pair: Pair, how: Hashable, change: Callable[[Joint], ChangedPair]) -> PairCalls:
    """Return what ``change`` makes of a pair, once for all pairs of which the same becomes, in any function.

    ``how`` tells of all that the change depends on.
    """

    def make() -> tuple[Rewritten | None, bool]:
        before = joint_of(pair)
        after, again = change(before)
        return None if after is before else rewritten(pair, before, after), again

    found, again = _CHANGED.get(pair.forward.callee, (pair.key, how), make)
    if found is None:
        return PairCalls({}, again)
    return PairCalls(dict(zip((pair.forward, pair.backward), found.calls(pair), strict=True)), again)


_CHANGED = Cache[Function, tuple[Rewritten | None, bool]](
    "what pairs of Calls become, by forward callee, wiring and change", 64
)


def with_calls(function: Function, calls: Mapping[Op, Op]) -> Function:
    """Return the function with other Calls in the place of some."""
    return replace(function, ops=tuple([calls.get(op, op) for op in function.ops])) if calls else function


def _with_own_inputs(function: Function) -> Function:
    """Give a function inputs of its own where it has values that another one makes."""
    return rewrite(function, lambda op, env: (rewire_op(op, env),), [replace(v) for v in function.inputs])
