"""Passes with what runs once a step within them: gathers before the first one, reductions after the last one.

So gradients are reduced over ranks bucket by bucket during the last backward pass: frameworks hold the
buckets back until the last microbatch (``no_sync``), then start each as soon as it is full. And so new
parameters are gathered during the first forward pass of the next step, a bucket while the one before is used
(Megatron-LM's ``--overlap-grad-reduce`` and ``--overlap-param-gather``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.cache import Cache
from distsim.ir import Function, Op, Value
from distsim.ops import operator

Places = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Joined:
    """A pass with another function within it: its own outputs at ``kept``, then those of the other.

    ``origins`` says of each op which one it is: (0, place in the pass) or (1, place in the other); nothing
    of a barrier that keeps the two apart.
    """

    function: Function
    kept: Places
    origins: tuple[tuple[int, int] | None, ...]

    def names(self, own: Sequence[str], other: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the ops, given those of the pass and of the other, if there are any."""
        given = own, other
        if not (own or other):
            return ()
        return tuple([given[at[0]][at[1]] if at and given[at[0]] else "" for at in self.origins])


_JOINED = Cache[Function, Joined]("passes with what runs once a step within them, by that", 8)


def ending(function: Function, after: Function, sums: Places, others: frozenset[int]) -> Joined:
    """Return a pass that runs the ops of ``after`` in their order, each as soon as what it reads is there.

    The inputs of ``after`` are the outputs of the pass at ``sums``, which it no longer returns, but those at
    ``others``, which something else reads as well. Made once.
    """
    return _JOINED.get(function, (after, sums, others), lambda: _Joiner(function).ended(after, sums, others))


def beginning(
    function: Function, before: Function, places: Places, start: int = 0, waits: bool = True
) -> Joined:
    """Return a pass that makes some of its inputs by the ops of ``before``, whose inputs follow its own.

    ``places`` says of each input of the pass which output of ``before`` it is, -1 for none: those are no
    inputs any more. What one collective makes is gathered when the pass begins to read what the one before
    makes; the first waits for what its reader waits for besides. Where the pass reads nothing of it, its
    collectives run from op ``start`` on, whose operands they wait for. Unless it ``waits``, none waits for
    anything of the pass. Made once.
    """
    key = before, places, start, waits
    return _JOINED.get(function, key, lambda: _Joiner(function).begun(before, places, start, waits))


class _Joiner:
    def __init__(self, function: Function) -> None:
        self.function = function
        self.ops: list[Op] = []
        self.origins: list[tuple[int, int] | None] = []

    def _add(self, op: Op, origin: tuple[int, int] | None) -> None:
        self.ops.append(op)
        self.origins.append(origin)

    def _joined(self, inputs: Sequence[Value], kept: Places, made: Sequence[Value], name: str) -> Joined:
        outputs = (*[self.function.outputs[place] for place in kept], *made)
        function = Function(f"{self.function.name}_{name}", tuple(inputs), tuple(self.ops), outputs)
        return Joined(function, kept, tuple(self.origins))

    # --- the last call --------------------------------------------------------------------------------

    def ended(self, after: Function, sums: Places, others: frozenset[int]) -> Joined:
        """Return what :func:`ending` does."""
        function = self.function
        env = {own: function.outputs[place] for own, place in zip(after.inputs, sums, strict=True)}
        missing = {*env.values()} - {*function.inputs}
        left = list(enumerate(after.ops))
        for place, op in enumerate(function.ops):
            self._add(op, (0, place))
            if not missing.isdisjoint(op.outputs):
                missing.difference_update(op.outputs)
                left = self._go_on(left, env, missing)
        self._go_on(left, env, missing)
        gone = {*sums} - others
        kept = tuple([place for place in range(len(function.outputs)) if place not in gone])
        return self._joined(function.inputs, kept, [env[value] for value in after.outputs], "last")

    def _go_on(
        self, left: list[tuple[int, Op]], env: dict[Value, Value], missing: set[Value]
    ) -> list[tuple[int, Op]]:
        """Add the ops that come next, up to one that waits for a sum; return what is left."""
        for number, (place, op) in enumerate(left):
            inputs = tuple([env.get(value, value) for value in op.inputs])
            if not missing.isdisjoint(inputs):
                return left[number:]
            outputs = tuple([Value(value.name, value.type) for value in op.outputs])
            env.update(zip(op.outputs, outputs, strict=True))
            self._add(replace(op, inputs=inputs, outputs=outputs), (1, place))
        return []

    # --- the first call -------------------------------------------------------------------------------

    def begun(self, before: Function, places: Places, start: int, waits: bool) -> Joined:
        """Return what :func:`beginning` does."""
        function = self.function
        made = {
            before.outputs[at]: value for at, value in zip(places, function.inputs, strict=True) if at >= 0
        }
        env: dict[Value, Value] = {
            value: Value(value.name, value.type, value.role) for value in before.inputs
        }
        ahead = self._parts(before, made) if made else self._unread(before, start)
        for place, op in enumerate(function.ops):
            while ahead and ahead[0][0] <= place:
                self._make(before, ahead.pop(0)[1], env, made, op if waits else None)
            self._add(op, (0, place))
        for _, own in ahead:
            self._make(before, own, env, made, None)
        given = [value for value, at in zip(function.inputs, places, strict=True) if at < 0]
        inputs = (*given, *[env[value] for value in before.inputs])
        kept = tuple(range(len(function.outputs)))
        outputs = [made.get(value, env.get(value, value)) for value in before.outputs]
        return self._joined(inputs, kept, outputs, "first")

    def _parts(self, before: Function, made: Mapping[Value, Value]) -> list[tuple[int, list[int]]]:
        """Return, in order, the place before which each part of ``before`` runs, and its ops.

        A part is a collective with what leads to it, or another op: right before what reads it first.
        """
        first: dict[Value, int] = {}
        for place in reversed(range(len(self.function.ops))):
            first.update(dict.fromkeys(self.function.ops[place].inputs, place))
        end = len(self.function.ops)
        needed = {value: first.get(formal, end) for value, formal in made.items()}
        producer = {value: place for place, op in enumerate(before.ops) for value in op.outputs}
        found: list[tuple[int, list[int]]] = []
        at: list[int] = [end] * len(before.ops)
        for place in reversed(range(len(before.ops))):
            op = before.ops[place]
            at[place] = min([needed.get(value, end) for value in op.outputs], default=end)
            for value in op.inputs:
                needed[value] = min(needed.get(value, end), at[place])
        sent = [place for place, op in enumerate(before.ops) if operator(op.op_type).moves]
        sent.sort(key=at.__getitem__)
        taken: set[int] = set()
        for number, place in enumerate(sent):  # each is gathered where the one before is read first
            own = _leading(before, place, producer, taken)
            taken.update(own)
            found.append((at[sent[max(number - 1, 0)]], own))
        found += [(at[place], [place]) for place in range(len(before.ops)) if place not in taken]
        return sorted(found, key=lambda part: part[0])

    def _unread(self, before: Function, start: int) -> list[tuple[int, list[int]]]:
        """Return the same where the pass reads nothing of ``before``: what collectives make is computed with
        after the pass, for which it would wait."""
        producer = {value: place for place, op in enumerate(before.ops) for value in op.outputs}
        found, taken = list[tuple[int, list[int]]](), set[int]()
        for place, op in enumerate(before.ops):
            if operator(op.op_type).moves:
                own = _leading(before, place, producer, taken)
                taken.update(own)
                found.append((start, own))
        end = len(self.function.ops)
        return found + [(end, [place]) for place in range(len(before.ops)) if place not in taken]

    def _anchor(self, op: Op, made: Mapping[Value, Value]) -> Value | None:
        """Return what an op waits for besides weights, if it does."""
        weights = {*made.values()}
        read = [value for value in op.inputs if value not in weights]
        last = {value: place for place, own in enumerate(self.ops) for value in own.outputs}
        return max(read, key=lambda value: last.get(value, -1), default=None)

    def _make(
        self,
        before: Function,
        places: Sequence[int],
        env: dict[Value, Value],
        made: Mapping[Value, Value],
        reader: Op | None,
    ) -> None:
        """Add ops of what runs once a step; a collective waits for what its ``reader`` waits for besides."""
        for place in places:
            op = before.ops[place]
            inputs = [env.get(value, value) for value in op.inputs]
            moves = operator(op.op_type).moves
            anchor = self._anchor(reader, made) if reader is not None and moves else None
            if anchor is not None:
                late = Value(inputs[0].name, inputs[0].type)
                self._add(Op("OptimizationBarrier", (inputs[0], anchor), (late,)), None)
                inputs[0] = late
            outputs = tuple([made.get(value, Value(value.name, value.type)) for value in op.outputs])
            env.update(zip(op.outputs, outputs, strict=True))
            self._add(replace(op, inputs=tuple(inputs), outputs=outputs), (1, place))


def _leading(
    function: Function, place: int, producer: Mapping[Value, int], taken: Collection[int]
) -> list[int]:
    """Return an op and those before it of which it is made, but for those ``taken``, in order."""
    found, todo = {place}, [place]
    while todo:
        for value in function.ops[todo.pop()].inputs:
            made = producer.get(value, -1)
            if made >= 0 and made not in found and made not in taken:
                found.add(made)
                todo.append(made)
    return sorted(found)
