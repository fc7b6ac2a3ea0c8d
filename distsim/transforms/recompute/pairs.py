"""A forward Call and the backward Call that reads what it saved, as one joint function and as two again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distsim.ir import Function, Op, Role, Value, rewire_op, rewrite, substitute
from distsim.ir.rewrite import flatten
from distsim.transforms.op_graph import is_sum
from distsim.transforms.recompute.phases import Joint, split_joint


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
    def key(self) -> tuple[object, ...]:
        """Equal for pairs of which the same becomes."""
        return self.forward.callee, self.backward.callee, self.wiring, self.late, self.required, self.free


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
    ops = [rewire_op(op, known) for op in behind.ops]
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


def _with_own_inputs(function: Function) -> Function:
    """Give a function inputs of its own where it has values that another one makes."""
    return rewrite(function, lambda op, env: (rewire_op(op, env),), [replace(v) for v in function.inputs])
