"""A stage's backward pass in two halves: I makes what the stages before wait for, W the rest.

Gradients of weights are needed at the end of the step only; gradients of inputs keep other stages waiting
(Qi et al. 2024, *Zero Bubble Pipeline Parallelism*, section 2). Which op is of which half follows from who
needs its results and nothing else: I is what the outputs need that are waited for, W is all other ops. An op
whose outputs are needed by different halves is taken apart: a Call into two callees, an op into the parts
that its operator tells of (``Operator.part``); any other op is of I. W reads what I made under new keys.

An op that takes neither time nor memory (``runs_kernel`` says no: constants, and views) is run again by W,
so that of a value and its views one passes. A view that waits (``OptimizationBarrier``) has waited in I: in W
it waits for something that passes anyway, or else for nothing. If I reads what it is a view of, it keeps I
back too: a checkpointed block runs again, whole, in I, whoever reads the gradient first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from distsim.cost.demand import runs_kernel
from distsim.errors import IRError
from distsim.ir import Function, Op, Value, all_ops
from distsim.ops import operator, signature_of
from distsim.program.block import Block, StageBlocks

Places = tuple[int, ...]
"""Places among the inputs, the outputs or the ops of a function."""


def split_backward(block: Block, waited: Collection[Value]) -> tuple[Block, Block]:
    """Return the halves (I, W) of a backward block; ``waited`` are those of its outputs that others wait for.

    I returns these, the other outputs that it makes on the way, and what W reads of it; W carries all sums
    over microbatches. I has no ops if nobody waits, and W makes nothing if everybody waits for everything:
    the other half is then the block itself. Blocks that share their Functions share those of the halves.
    Raises :class:`IRError` for a key that the block does not make, or that is or follows from a sum.
    """
    summed = [key for key in block.accumulated if key in waited]
    if summed:
        raise IRError(
            f"{block.function.name}: {summed[0].name!r} is summed over microbatches, so no stage can wait "
            "for it within one; wait for what is summed"
        )
    places = _places(block, waited)
    late = tuple([place for place in _late(block) if place not in places])
    halves = halves_of(block.function, places, late)
    if not places:
        return Block(halves.first, (), ()), block
    if not halves.second.ops and not halves.second.outputs:
        return block, Block(halves.second, (), ())
    made = [block.outputs[place] for place in halves.first_makes]
    made += [Value(v.name, v.type) for v in halves.first.outputs[len(made) :]]
    first = Block(
        halves.first,
        tuple([block.inputs[place] for place in halves.first_reads]),
        tuple(made),
        names=_picked(block.names, halves.first_ops),
    )
    read = [block.inputs[place] for place in halves.second_reads]
    read += [made[place] for place in halves.passed]
    more, names = _accumulating(block, places, late, halves)
    second = Block(
        halves.second,
        tuple(read),
        tuple([block.outputs[place] for place in halves.second_makes]),
        block.accumulated,
        more,
        _picked(block.names, halves.second_ops),
        names,
    )
    return first, second


def stage_halves(stages: Sequence[StageBlocks]) -> tuple[tuple[Block, Block], ...]:
    """Return (I, W) of each stage: others wait for what their blocks of every microbatch read."""
    readers: dict[Value, set[int]] = {}
    for stage, (forward, backward, _) in enumerate(stages):
        for key in (*forward.inputs, *backward.inputs):
            readers.setdefault(key, set()).add(stage)
    found: list[tuple[Block, Block]] = []
    for stage, (_, backward, _) in enumerate(stages):
        waited = [key for key in backward.outputs if readers.get(key, set()) - {stage}]
        found.append(split_backward(backward, waited))
    return tuple(found)


def _places(block: Block, keys: Iterable[Value]) -> Places:
    place = {key: i for i, key in enumerate(block.outputs)}
    for key in keys:
        if key not in place:
            raise IRError(
                f"{block.function.name} does not make {key.name!r}, which is to be waited for; it makes "
                f"{', '.join(own.name for own in block.outputs) or 'nothing'}"
            )
    return tuple(sorted({place[key] for key in keys}))


def _late(block: Block) -> Places:
    """Return the places of the outputs that are sums over microbatches, or follow from them."""
    more = block.accumulating
    if more is None:
        return ()
    found = set(more.inputs[len(block.inputs) :])
    for op in more.ops:
        if not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return tuple([place for place, value in enumerate(more.outputs) if value in found])


def _picked(names: Sequence[str], ops: Places) -> tuple[str, ...]:
    return tuple([names[op] for op in ops]) if names else ()


def _accumulating(
    block: Block, waited: Places, late: Places, plain: Halves
) -> tuple[Function | None, tuple[str, ...]]:
    """Return W of every microbatch but the first, and the names of its ops."""
    if block.accumulating is None or not block.accumulated:
        return None, ()
    more = halves_of(block.accumulating, waited, late, len(block.accumulated))
    if more.ports != plain.ports:
        raise IRError(
            f"{block.function.name} and {block.accumulating.name} do not come apart alike: their first "
            "halves read, make or pass on something else; let them differ in the sums only"
        )
    return more.second, _picked(block.accumulating_names, more.second_ops)


@dataclass(frozen=True, eq=False)
class Halves:
    """A function in two: ``first`` makes what is waited for, ``second`` the rest of the outputs.

    ``first`` reads the inputs of the function at ``first_reads``, and returns its outputs at ``first_makes``
    and then what only ``second`` reads. ``second`` reads the inputs at ``second_reads``, then the outputs of
    ``first`` at ``passed``, then the sums so far, and returns the outputs at ``second_makes``.
    ``first_ops`` and ``second_ops`` say of each of their ops which one of the function it is, or is part of.
    """

    first: Function
    second: Function
    first_reads: Places
    second_reads: Places
    first_makes: Places
    second_makes: Places
    passed: Places
    first_ops: Places
    second_ops: Places

    @property
    def ports(self) -> object:
        """What has to agree where halves of two functions take each other's places."""
        reads = self.first_reads, self.second_reads
        return reads, self.first_makes, self.passed, [value.type for value in self.first.outputs]


_HALVES: WeakKeyDictionary[Function, dict[tuple[Places, Places, int], Halves]] = WeakKeyDictionary()
"""By function and how it is split: blocks, and Calls, of one Function share its halves."""


def halves_of(function: Function, waited: Places, late: Places = (), sums: int = 0) -> Halves:
    """Return the halves of a function whose outputs at ``waited`` are waited for; each is made once.

    The outputs ``late``, which are summed over microbatches, are returned by the second half, wherever they
    are made; ``sums`` inputs, the last ones, are the sums so far. Raises :class:`IRError` if what is waited
    for needs one of them.
    """
    known = _HALVES.setdefault(function, {})
    key = waited, late, sums
    if key not in known:
        known[key] = _Splitter(function, waited, sums).halves(late)
    return known[key]


class _Splitter:
    """Puts the ops of one function, with their places in it, into two halves."""

    def __init__(self, function: Function, waited: Places, sums: int) -> None:
        self.function, self.waited = function, waited
        self.inputs = function.inputs[: len(function.inputs) - sums]
        self.sums = function.inputs[len(self.inputs) :]
        self.needed = {function.outputs[place] for place in waited}
        self.first_read = set[Value]()
        self.first: list[tuple[int, Op]] = []
        self.second: list[tuple[int, Op]] = []
        for place in reversed(range(len(function.ops))):
            early, rest = self._divided(function.ops[place])
            self.first_read.update([value for op in early for value in op.inputs])
            self.needed.update([value for op in early for value in op.inputs])
            self.first += [(place, op) for op in early]
            self.second += [(place, op) for op in rest]
        self.second.reverse()
        self.first = self._kept_back(self.first[::-1])
        summed = [value for value in self.sums if value in self.needed]
        if summed:
            raise IRError(
                f"{function.name}: what other stages wait for ({function.outputs[waited[0]].name!r}) needs "
                f"the sum over microbatches {summed[0].name!r}; read sums in an update block"
            )
        self.made = {value for _, op in self.first for value in op.outputs}

    def _divided(self, op: Op) -> tuple[list[Op], list[Op]]:
        """Return what of an op is of the first half, and what is of the second."""
        needed = [value in self.needed for value in op.outputs]
        if not any(needed):
            is_first = operator(op.op_type).waits and op.inputs[0] in self.first_read
            return ([op], []) if is_first else ([], [op])
        rule = operator(op.op_type).part
        if all(needed) or (rule is None and not op.is_call):
            return [op], []
        if rule is None:
            return _split_call(op, tuple([place for place, early in enumerate(needed) if early]))
        signature, halves = signature_of(op), (list[Op](), list[Op]())
        for place, early in enumerate(needed):
            part = rule(signature, place)
            read = tuple([op.inputs[i] for i in part.inputs])
            alone = Op(part.op_type, read, (op.outputs[place],), part.attributes, (), op.version, op.name)
            halves[not early].append(alone)
        return halves

    def _kept_back(self, ops: Sequence[tuple[int, Op]]) -> list[tuple[int, Op]]:
        """Return the ops of the first half, which read through the barriers that only keep them back."""
        found: list[tuple[int, Op]] = []
        through: dict[Value, Value] = {}
        for place, op in ops:
            if through and not through.keys().isdisjoint(op.inputs):
                op = replace(op, inputs=tuple([through.get(value, value) for value in op.inputs]))
            if operator(op.op_type).waits and op.outputs[0] not in self.needed:
                through[self.function.ops[place].inputs[0]] = op.outputs[0]
            found.append((place, op))
        return found

    def halves(self, late: Places) -> Halves:
        """Return the functions of the halves, and what passes between them."""
        function, outputs = self.function, self.function.outputs
        early = [v in self.made for v in outputs]
        for places, is_first in ((late, False), (self.waited, True)):
            for place in places:
                early[place] = is_first
        makes = [p for p, is_first in enumerate(early) if is_first]
        rest = [p for p, is_first in enumerate(early) if not is_first]
        returned = {outputs[p] for p in makes}
        read, again = self._read([outputs[p] for p in rest], returned)
        redone = {value for _, op in again for value in op.outputs}
        crossing = [v for _, op in self.first for v in op.outputs if v in read and v not in redone]
        handed = [*[outputs[p] for p in makes], *[v for v in crossing if v not in returned]]
        place = {value: p for p, value in reversed(list(enumerate(handed)))}
        ops = sorted([*again, *self.second], key=lambda item: item[0])
        ops = [(p, self._waiting(op, read, crossing)) for p, op in ops]
        first_reads = [p for p, v in enumerate(self.inputs) if v in self.needed]
        second_reads = [p for p, v in enumerate(self.inputs) if v in read]
        given = [*[self.inputs[p] for p in second_reads], *crossing, *self.sums]
        return Halves(
            _function(f"{function.name}_input", [self.inputs[p] for p in first_reads], self.first, handed),
            _function(f"{function.name}_weight", given, ops, [outputs[p] for p in rest]),
            tuple(first_reads),
            tuple(second_reads),
            tuple(makes),
            tuple(rest),
            tuple([place[value] for value in crossing]),
            tuple([p for p, _ in self.first]),
            tuple([p for p, _ in ops]),
        )

    def _read(
        self, outputs: Sequence[Value], returned: Collection[Value]
    ) -> tuple[set[Value], list[tuple[int, Op]]]:
        """Return all that the second half has or reads, and the ops of the first half that it runs again."""
        read = {*outputs, *(v for _, op in self.second for v in op.outputs)}
        read.update([v for _, op in self.second for v in self._operands(op)])
        again: list[tuple[int, Op]] = []
        for place, op in reversed(self.first):
            if not read.isdisjoint(op.outputs) and _is_free(op, read, returned):
                again.append((place, op))
                read.update(self._operands(op))
        return read, again

    def _operands(self, op: Op) -> tuple[Value, ...]:
        """Return what the second half has to have to run an op: not what the first half has waited for."""
        if not operator(op.op_type).waits:
            return op.inputs
        there = [value in self.made or value in self.needed for value in op.inputs]
        return tuple([v for i, v in enumerate(op.inputs) if i == 0 or not there[i]])

    def _waiting(self, op: Op, read: Collection[Value], crossing: Sequence[Value]) -> Op:
        """Return an op of the second half that waits for nothing which would pass for this alone.

        If something else is left out, it waits for what is made last of what passes.
        """
        if not operator(op.op_type).waits:
            return op
        kept = [value for value in op.inputs if value in read]  # the first one always is
        if len(kept) == len(op.inputs):
            return op
        if crossing and not set(kept) & set(crossing):
            kept.append(crossing[-1])
        return replace(op, inputs=tuple(kept))


def _split_call(op: Op, waited: Places) -> tuple[list[Op], list[Op]]:
    """Return the Calls of the halves of a callee, the one Call if the second half would take no time."""
    halves = halves_of(op.callee, waited)
    if not any(runs_kernel(inner.op_type) for inner in all_ops(halves.second)):
        return [op], []
    made = [op.outputs[place] for place in halves.first_makes]
    made += [Value(value.name, value.type) for value in halves.first.outputs[len(made) :]]
    read = [op.inputs[place] for place in halves.second_reads]
    read += [made[place] for place in halves.passed]
    given = tuple([op.inputs[place] for place in halves.first_reads])
    rest = tuple([op.outputs[place] for place in halves.second_makes])
    return (
        [replace(op, inputs=given, outputs=tuple(made), subfunctions=(halves.first,))],
        [replace(op, inputs=tuple(read), outputs=rest, subfunctions=(halves.second,))],
    )


def _is_free(op: Op, there: Collection[Value], returned: Collection[Value]) -> bool:
    """Whether an op takes no time, and what it reads passes at no cost in place of what it makes."""
    if op.is_call or runs_kernel(op.op_type):
        return False
    (made,), held = op.outputs, op.inputs[:1]
    if not held or held[0] in there:
        return True
    return made not in returned and held[0].type.nbytes <= made.type.nbytes


def _function(
    name: str, inputs: Sequence[Value], ops: Sequence[tuple[int, Op]], outputs: Sequence[Value]
) -> Function:
    return Function(name, tuple(inputs), tuple([op for _, op in ops]), tuple(outputs))
