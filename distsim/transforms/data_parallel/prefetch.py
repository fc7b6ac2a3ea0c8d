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
        self.weights: set[int] = set()

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
                written, after = _as_messages(written, copied) if whole else (written, [])
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
        """Go through the ops; a gather belongs to the unit of the first op that reads its result."""
        function, reader = self.function, self.first_reader
        waiting: dict[int, list[int]] = {}  # first reader -> gathers
        for number in sorted(self.chain):
            last = number
            while last in self.chain:
                last = min(reader[value] for value in function.makes[last])
            waiting.setdefault(last, []).append(number)
        open_unit: dict[tuple[int, bool], _Unit | None] = {}
        gathered = {value for number in self.chain for value in function.makes[number]}
        weights = self.weights = set(gathered)  # with what is made of them alone
        for number, op in enumerate(function.ops):
            if number in self.chain or function.steps[number] or function.loose[number]:
                continue
            key = (self.assigned.stage[number], function.forward[number])
            reads = [v for v in function.reads[number] if v in gathered]
            call = op.is_call
            if reads and not call and weights.issuperset(function.reads[number]):
                weights.update(function.makes[number])
            if not reads:
                if call:
                    open_unit[key] = None
                continue
            unit = open_unit.get(key)
            layer = layer_of(op)
            if unit is not None and call and layer and unit.layer == layer:  # it reads what was cast for it
                unit.anchor = unit.anchor or self._anchor(number, weights, unit.start)
            elif unit is None or call or unit.layer != layer:
                unit = _Unit(number, self._anchor(number, weights), [], layer)
                self.units.setdefault(key, []).append(unit)
            unit.gathers += waiting.get(number, ())
            open_unit[key] = None if call else unit

    def _anchor(self, number: int, weights: set[int], start: int | None = None) -> Value | None:
        """Return what the op waits for: what it reads that is made last, before ``start``, and no weight."""
        function = self.function
        read = [v for v in function.reads[number] if v not in weights and not function.held[v]]
        read = [v for v in read if function.producer[v] < 0 or not function.loose[function.producer[v]]]
        read = [v for v in read if start is None or function.producer[v] < start]
        return function.values[max(read)] if read else None

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


def _as_messages(ops: Sequence[Op], copied: bool) -> tuple[list[Op], list[Op]]:
    """Return ops of which those that gather do so together: after what they read, before what reads them.

    And the ops for when what is gathered is used: where it is ``copied``, the copies and all that reads them.
    """
    first, sent, last = list[Op](), list[Op](), list[Op]()
    late = set[Value]()
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
