"""Two functions as one whose ops alternate: the overlapped forward and backward pass of DualPipe.

A rank issues ops in order, so two blocks side by side are one block with both lists of ops merged. While what
one function reads next is under way between ranks, the other computes: of a layer of experts forward, and
another backward, that is attention beside the combine, the experts beside the dispatch, and so on
(DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, section 3.2.1, figure 4; Megatron-LM,
core/models/common/model_chunk_schedule_plan.py). While neither waits both have done the same share of their
work. How long a message takes is not asked: beside a function that sends nothing all of its work is done
during the first message of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from distsim.cost.demand import runs_kernel
from distsim.ir import Function, Op, Value, all_ops
from distsim.ir.rewrite import inline
from distsim.ops import operator, signature_of, work
from distsim.ops.operator import memory_bound


def interleave(a: Function, b: Function) -> Function:
    """Return the function that takes the inputs of ``a``, then those of ``b``, and returns all outputs so.

    The ops of each keep their order. By shares of the work done (FLOPs and bytes, one counts as much as the
    other), that op comes next whose middle comes first, of ``a`` in a tie. Communication is issued as soon as
    its turn in its own function comes; what reads it lets the other function go first, until that would wait
    for communication as well. What takes no time, a barrier say, comes right before the next op that does.

    A Call of one and a Call of the other that overlap by more than half of the longer become one Call of both
    callees, interleaved: layers stay layers, each distinct pair of which is made once. Other Calls are
    written out, unless the other function has no work.
    """
    return _overlap(a, b).function


def interleaved_names(
    a: Function, b: Function, a_names: Sequence[str], b_names: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the ops of ``interleave(a, b)``, given those of the ops of ``a`` and of ``b``.

    What is of a Call that was written out has the Call's name before its own, as in :func:`inline`; a Call of
    two callees has both names.
    """
    return tuple([_name(origins, (a_names, b_names)) for origins in _overlap(a, b).origins])


@dataclass(frozen=True, eq=False)
class _Overlap:
    """Two functions as one, and where each of its ops comes from."""

    function: Function
    origins: tuple[tuple[_Origin, ...], ...]


_Origin = tuple[int, int, str]
"""(0 or 1: of which function, place among its ops, name within the Call that was written out)."""

_KNOWN: WeakKeyDictionary[Function, WeakKeyDictionary[Function, _Overlap]] = WeakKeyDictionary()


def _overlap(a: Function, b: Function) -> _Overlap:
    known = _KNOWN.setdefault(a, WeakKeyDictionary())
    if b not in known:
        known[b] = _Merger(a, b).run()
    return known[b]


def _name(origins: Sequence[_Origin], names: tuple[Sequence[str], Sequence[str]]) -> str:
    found: list[str] = []
    for side, place, inner in origins:
        outer = names[side][place] if names[side] else ""
        found.append(".".join([part for part in (outer, inner) if part]))
    return "+".join([name for name in found if name])


def _work(op: Op) -> int:
    """Return the FLOPs and bytes of an op, or of all ops of a Call; communication has none."""
    total = 0.0
    for inner in all_ops(op.callee) if op.is_call else (op,):
        if runs_kernel(inner.op_type) and not _communicates(inner):
            signature = signature_of(inner)
            demand = work(signature) or memory_bound(signature)
            total += demand.flops + demand.bytes_read + demand.bytes_written
    return int(total)


def _communicates(op: Op) -> bool:
    return operator(op.op_type).communication is not None


def _numbered(function: Function) -> Function:
    """Return the function with the places of its ops for names: they say where an op comes from."""
    ops = tuple([replace(op, name=str(place)) for place, op in enumerate(function.ops)])
    return replace(function, ops=ops)


class _Side:
    """One of the two functions: its ops, the work of each, how much of all is done."""

    def __init__(self, number: int, function: Function) -> None:
        self.number, self.function, self.ops = number, function, function.ops
        self.work = [_work(op) for op in function.ops]
        self.total = sum(self.work) or 1
        self.next_work = [*self.work, 0]  # of the first op from each place on that has any
        for place in reversed(range(len(self.ops))):
            self.next_work[place] = self.work[place] or self.next_work[place + 1]
        self.place = self.done = 0
        self.sent = set[Value]()  # what travels, for which the other function has done nothing yet
        self.sent_at = 0  # after how many ops of both that was
        self.values = {value: Value(value.name, value.type, value.role) for value in function.inputs}

    def calls(self, scale: int = 1) -> list[tuple[Op, int, int]]:
        """Return the Calls that have work, with what is done before and after each, times ``scale``."""
        found: list[tuple[Op, int, int]] = []
        done = 0
        for op, own in zip(self.ops, self.work, strict=True):
            if op.is_call and own:
                found.append((op, done * scale, (done + own) * scale))
            done += own
        return found

    @property
    def head(self) -> Op:
        """The op that comes next."""
        return self.ops[self.place]

    @property
    def middle(self) -> float:
        """The share done in the middle of the next op that has work; communication comes before all."""
        if _communicates(self.head):
            return -1.0
        return (self.done + self.next_work[self.place] / 2) / self.total

    @property
    def waits(self) -> bool:
        """Whether the next op reads what travels."""
        return not self.sent.isdisjoint(self.head.inputs)

    def take(self, before: int) -> tuple[list[Value], list[Value]]:
        """Go on to the next op, ``before`` which so many of both are; return what it reads, and values for
        what it makes."""
        op = self.head
        if _communicates(op):
            self.sent.update(op.outputs)
            self.sent_at = before
        self.done += self.work[self.place]
        self.place += 1
        read = [self.values[value] for value in op.inputs]
        made = [Value(value.name, value.type) for value in op.outputs]
        self.values.update(zip(op.outputs, made, strict=True))
        return read, made

    def outputs(self) -> list[Value]:
        return [self.values[value] for value in self.function.outputs]


class _Merger:
    """Merges the ops of two functions."""

    def __init__(self, a: Function, b: Function) -> None:
        self.names = [op.name for op in a.ops], [op.name for op in b.ops]
        self.name = f"{a.name}_and_{b.name}"
        self.sides = _written_out(_numbered(a), _numbered(b))
        partners = _pairs(*self.sides)
        self.with_partner = {*partners, *partners.values()}
        self.ops: list[Op] = []
        self.origins: list[tuple[_Origin, ...]] = []

    def run(self) -> _Overlap:
        """Return the two functions as one; a Call that has a partner waits for it."""
        a, b = self.sides
        inputs = (*a.values.values(), *b.values.values())
        while left := [side for side in self.sides if side.place < len(side.ops)]:
            ready = [side for side in left if side.head not in self.with_partner]
            free = [side for side in ready if not side.waits]
            if ready and not free:  # what was sent first has had the other's work beside it
                free = [min(ready, key=lambda side: side.sent_at)]
                free[0].sent.clear()
            self._add([min(free, key=lambda side: side.middle)] if ready else left)
        function = Function(self.name, inputs, tuple(self.ops), (*a.outputs(), *b.outputs()))
        return _Overlap(function, tuple(self.origins))

    def _add(self, sides: Sequence[_Side]) -> None:
        """Add the next op of one of the functions, or the Call of the callees of both."""
        heads, read, made = [side.head for side in sides], list[Value](), list[Value]()
        for side in sides:
            operands, results = side.take(len(self.ops))
            read += operands
            made += results
        origins = tuple([_origin(side, op) for side, op in zip(sides, heads, strict=True)])
        op = replace(heads[0], inputs=tuple(read), outputs=tuple(made), name=_name(origins, self.names))
        if len(heads) > 1:
            op = replace(op, subfunctions=(interleave(heads[0].callee, heads[1].callee),))
        self.ops.append(op)
        self.origins.append(origins)


def _origin(side: _Side, op: Op) -> _Origin:
    place, _, inner = op.name.partition(".")
    return side.number, int(place), inner


def _written_out(a: Function, b: Function) -> tuple[_Side, _Side]:
    """Return the two with those Calls written out that have no partner in the other."""
    while True:
        sides = _Side(0, a), _Side(1, b)
        partners = _pairs(*sides)
        alone = [{op for op, _, _ in side.calls()} - {*partners, *partners.values()} for side in sides]
        if not any(alone) or not all(any(side.work) for side in sides):
            return sides
        a, b = (inline(each, calls) if calls else each for each, calls in zip((a, b), alone, strict=True))


def _pairs(a: _Side, b: _Side) -> Mapping[Op, Op]:
    """Return the Calls of ``b`` that overlap Calls of ``a`` by more than half of the longer, by those."""
    found: dict[Op, Op] = {}
    others = b.calls(a.total)
    for op, start, stop in a.calls(b.total):
        while others and others[0][2] <= start:
            others.pop(0)
        for other, begin, end in others:
            if begin >= stop:
                break
            if 2 * (min(stop, end) - max(start, begin)) > max(stop - start, end - begin):
                found[op] = other
    return found
