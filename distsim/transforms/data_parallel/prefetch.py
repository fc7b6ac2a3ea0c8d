"""Gathering weights one unit ahead of their use, no earlier and no later.

A unit is a Call, or a run of ops of one layer between Calls, that reads gathered parameters. While one unit
computes, the weights of the next are gathered, as fully sharded data parallelism does it: two units' weights
are in memory at a time, and the gathers overlap with compute as far as its time allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distsim.ir import Function, Op, Value
from distsim.ir.module_names import layer_of
from distsim.ops.coalescing import in_messages
from distsim.ops.conversion import ONCE
from distsim.plan.buckets import Buckets
from distsim.transforms.data_parallel.gathers import chains, copied_out, gathers, listed
from distsim.transforms.op_graph import Numbered, StageMap


def prefetch(
    function: Numbered, assigned: StageMap, buckets: Buckets | None = None
) -> tuple[Numbered, StageMap]:
    """Return the function, whose stages are assigned, with each gather of a parameter one unit earlier.

    With ``buckets`` all gathers of a unit of one element type are one message, as of torch's flat parameters;
    with those that are ``blocking`` each is one of its own, right before its unit, and waits for what that
    waits for. With those that are ``copied`` parameters are copied out of a message when their unit starts.

    In each pass of each stage the gathers of a unit stand before the unit that comes before it there, behind
    a barrier that waits for what that one waits for. Those of the first unit of the forward pass wait for
    nothing, as those do that are made once a step (:meth:`Numbered.once`), those of the first of the backward
    pass for what it reads of the forward pass. A function that
    gathers no parameters over dp is returned as it is.
    """
    if not any(gathers(op) for op in function.ops):
        return function, assigned
    plain = Function(
        function.name,
        tuple(function.inputs),
        tuple(function.ops),
        tuple([function.values[v] for v in function.outputs]),
    )
    found = chains(plain)
    if not found:
        return function, assigned
    return _Prefetcher(function, assigned, plain, found).run(buckets)


@dataclass
class _Unit:
    """Where a unit starts, what its first op waits for, and the gathers whose results it reads first."""

    start: int
    anchor: Value | None
    gathers: list[int]
    layer: str


class _Prefetcher:
    def __init__(
        self, function: Numbered, assigned: StageMap, plain: Function, found: Sequence[tuple[Op, ...]]
    ) -> None:
        self.function, self.assigned, self.plain = function, assigned, plain
        number = {op: i for i, op in enumerate(function.ops)}
        self.first_reader: dict[int, int] = {}  # of each value
        for place in reversed(range(len(function.ops))):
            for value in function.reads[place]:
                self.first_reader[value] = place
        moved = [places for ops in found if self._is_read_in_a_unit(places := [number[op] for op in ops])]
        # A view that is only returned stays where it is.
        self.chain = {place for places in moved for place in places if self._is_read(place)}
        self.roots = {places[0] for places in moved}
        self.units: dict[tuple[int, bool], list[_Unit]] = {}
        self.before: dict[int, list[tuple[list[int], Value | None]]] = {}
        self.weights: set[int] = set()  # what was gathered, and what is made of that alone
        self.read_by: dict[int, int] = {}  # ops of chains, or of weights alone -> what first reads that
        self.open: dict[tuple[int, bool], _Unit | None] = {}  # by stage and pass, what the next op may be of

    def run(self, buckets: Buckets | None) -> tuple[Numbered, StageMap]:
        blocking = buckets is not None and buckets.blocking
        whole = buckets is not None and not blocking
        copied = buckets is not None and buckets.copied and whole
        self._find_units()
        start_of = dict[int, int]()
        for (_, forward), units in self.units.items():
            for place, unit in enumerate(units):
                ahead = unit if blocking or not place else units[place - 1]
                kept = any(self.function.ops[gather].attributes.get(ONCE) for gather in unit.gathers)
                anchor = None if forward and (kept or not place) else ahead.anchor
                if unit.gathers:
                    self.before.setdefault(ahead.start, []).append((unit.gathers, anchor))
                    start_of.update(dict.fromkeys(unit.gathers, unit.start))
        late: dict[int, list[Op]] = {}  # what is done with gathered parameters when their unit starts
        ops: list[Op] = []
        stages: list[int] = []
        blocked = {ahead: gathers_ for ahead, each in self.before.items() for gathers_, _ in each if blocking}
        for number, op in enumerate(self.function.ops):
            for gathers_, anchor in self.before.get(number, ()):
                start = start_of[gathers_[0]]
                if number in late and start != number and not self.function.forward[number]:
                    copies = late.pop(number)  # before the next is gathered, which may have the same buffer
                    ops += copies
                    anchor = copies[0].outputs[0]
                written = [each for gather in gathers_ for each in self._written(gather, anchor)]
                written = [listed(op) if gathers(op) else op for op in written] if blocking else written
                pending = {value for each in late.values() for op in each for value in op.outputs}
                written, after = _as_messages(written, copied, pending) if whole else (written, [])
                ops += written
                if after:
                    late.setdefault(start, []).extend(after)
                stages += [self.assigned.stage[gathers_[0]]] * (len(ops) - len(stages))
            ops += late.pop(number, ())
            if number not in self.chain:
                if copied and gathers(op):
                    ops += copied_out(op)
                else:
                    ops += self._after(number, blocked[number]) if number in blocked else [op]
                stages += [self.assigned.stage[number]] * (len(ops) - len(stages))
        made = Numbered(replace(self.plain, ops=tuple(ops)))
        place = {value: i for i, value in enumerate(made.values)}
        old = self.function.values
        homes = {place[old[value]]: at for value, at in self.assigned.homes.items()}
        return made, StageMap(stages, homes)

    def _is_read(self, place: int) -> bool:
        return any(value in self.first_reader for value in self.function.makes[place])

    def _is_read_in_a_unit(self, chain: Sequence[int]) -> bool:
        """Whether the first op that reads what a chain gathers is one of a pass, on the stage of the chain.

        One that runs once per step belongs to no unit. What another stage reads is gathered for more than
        its unit: to wait for what that unit waits for may be to wait for oneself. These gathers stay where
        they are.
        """
        function, stage = self.function, self.assigned.stage
        read = [v for op in chain for v in function.makes[op] if v in self.first_reader]
        first = min([at for v in read if (at := self.first_reader[v]) not in chain], default=-1)
        if first < 0 or function.steps[first] or function.loose[first]:
            return False
        return all(stage[op] == stage[first] for op in chain)

    def _find_units(self) -> None:
        """Go through the ops; a gather belongs to the unit of the first op that reads its result.

        What is made of weights alone, as casts to 8 bits are, is of the unit that reads it.
        """
        function = self.function
        read = self._find_readers()
        waiting: dict[int, list[int]] = {}  # first reader -> gathers
        for number in sorted(self.chain):
            waiting.setdefault(self.read_by[number], []).append(number)
        begun: dict[int, _Unit] = {}  # by what reads what is made of weights for it
        for number, op in enumerate(function.ops):
            if number in self.chain or function.steps[number] or function.loose[number]:
                continue
            key = (self.assigned.stage[number], function.forward[number])
            if number in self.read_by:
                for reader in self._readers_before(number):
                    if reader >= number and reader not in begun:
                        begun[reader] = self._begin(key, number, reader)
            elif not read.isdisjoint(function.reads[number]):
                unit = begun.get(number) or self._begin(key, number, number)
                unit.gathers = sorted([*unit.gathers, *waiting.get(number, ())])
                self.open[key] = None if op.is_call else unit
            elif op.is_call:
                self.open[key] = None
        self._move_before_readers()

    def _move_before_readers(self) -> None:
        """Let what a chain begins with be of no later unit than what is made of it."""
        function, at = self.function, dict[int, tuple[tuple[int, bool], int]]()
        for key, units in self.units.items():
            for place, unit in enumerate(units):
                at.update(dict.fromkeys(unit.gathers, (key, place)))
        for number in sorted(at, reverse=True):
            key, place = at[number]
            users = [user for value in function.makes[number] for user in function.readers.get(value, ())]
            first = min([at[user][1] for user in users if user in at and at[user][0] == key], default=place)
            if first < place:
                units = self.units[key]
                units[place].gathers.remove(number)
                units[first].gathers = sorted([*units[first].gathers, number])
                at[number] = key, first

    def _begin(self, key: tuple[int, bool], number: int, reader: int) -> _Unit:
        """Return the unit of an op that reads weights, which begins at an op if none of its layer is open."""
        op = self.function.ops[reader]
        unit, layer = self.open.get(key), layer_of(op, added=True)
        if unit is None or op.is_call or unit.layer != layer:
            unit = _Unit(number, self._anchor(reader, number), [], layer)
            self.units.setdefault(key, []).append(unit)
            if not op.is_call:
                self.open[key] = unit
        return unit

    def _find_readers(self) -> set[int]:
        """Find which op first reads what each gather, and each op that reads weights alone, leads to.

        The latter only where that is in the pass and on the stage of its own. Return what units read: what
        was gathered, and what is made of that for them.
        """
        function, stage = self.function, self.assigned.stage
        self.weights.update(value for number in self.chain for value in function.makes[number])
        read, alone = set(self.weights), set[int]()
        for number, op in enumerate(function.ops):
            apart = op.is_call or number in self.chain or function.steps[number] or function.loose[number]
            given = function.reads[number]
            if not apart and given and self.weights.issuperset(given) and self._is_read(number):
                self.weights.update(function.makes[number])
                alone.add(number)
        first: dict[int, int] = {}  # of each value, what reads first what comes of it
        for number in reversed(range(len(function.ops))):
            reader = number
            if number in self.chain or number in alone:
                reader = min(first[value] for value in function.makes[number] if value in first)
                same = function.forward[reader] == function.forward[number] and stage[reader] == stage[number]
                if number in self.chain or (
                    same and not function.steps[reader] and not function.loose[reader]
                ):
                    self.read_by[number] = reader
                    read.update(function.makes[number])
                else:
                    reader = number
            for value in function.reads[number]:
                first[value] = min(reader, first.get(value, reader))
        return read

    def _readers_before(self, number: int) -> list[int]:
        """Return what reads first what an op of weights alone leads to, and what that needs, in order."""
        function, found, stack = self.function, set[int](), [number]
        while stack:
            each = stack.pop()
            found.add(self.read_by[each])
            makers = [function.producer[value] for value in function.reads[each]]
            stack += [maker for maker in makers if maker in self.read_by]
        return sorted(found)

    def _anchor(self, number: int, start: int) -> Value | None:
        """Return what the op waits for: what it reads that is made last, before ``start``, and no weight."""
        function = self.function
        found, seen, stack = set[int](), set[int](), [number]
        while stack:
            for v in function.reads[stack.pop()]:
                maker = function.producer[v]
                if (
                    v in seen
                    or v in self.weights
                    or function.held[v]
                    or (maker >= 0 and function.loose[maker])
                ):
                    continue
                seen.add(v)
                if maker < start:
                    found.add(v)
                elif self.assigned.stage[maker] == self.assigned.stage[number]:
                    stack.append(maker)
        return function.values[max(found)] if found else None

    def _after(self, number: int, waited: Sequence[int]) -> list[Op]:
        """Return an op behind barriers: what it reads besides weights waits for what was gathered last."""
        function, op = self.function, self.function.ops[number]
        last = function.values[function.makes[waited[-1]][0]]
        late: dict[Value, Value] = {}
        for place in dict.fromkeys(function.reads[number]):
            value = function.values[place]
            if place not in self.weights and function.producer[place] >= 0:
                late[value] = Value(value.name, value.type)
        barriers = [Op("OptimizationBarrier", (value, last), (made,)) for value, made in late.items()]
        return [*barriers, replace(op, inputs=tuple([late.get(value, value) for value in op.inputs]))]

    def _written(self, gather: int, anchor: Value | None) -> list[Op]:
        """Return the op of a chain, behind a barrier where the chain starts."""
        op = self.function.ops[gather]
        if gather not in self.roots or anchor is None:
            return [op]
        source = op.inputs[0]
        late = Value(source.name, source.type)
        return [Op("OptimizationBarrier", (source, anchor), (late,)), replace(op, inputs=(late,))]


def _as_messages(ops: Sequence[Op], copied: bool, pending: set[Value]) -> tuple[list[Op], list[Op]]:
    """Return ops of which those that gather do so together: after what they read, before what reads them.

    And the ops for when what is gathered is used: where it is ``copied``, the copies and all that reads them.
    """
    first, sent, last = list[Op](), list[Op](), list[Op]()
    late = set(pending)
    for op in ops:
        if not late.isdisjoint(op.inputs):
            last.append(op)
        elif gathers(op):
            sent.append(op)
        else:
            first.append(op)
            continue
        late.update(op.outputs)
    messages = in_messages(sent)
    if not copied:
        return [*first, *messages, *last], []
    pairs = [copied_out(op) for op in messages]
    return [*first, *[gather for gather, _ in pairs]], [*[copy for _, copy in pairs], *last]
