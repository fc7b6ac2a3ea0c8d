"""The changes of memory of a Program's stages as arrays, kept for other schedules and microbatch counts.

What is kept is small: the changes of the events, per distinct stage and position of a microbatch. The
outline of the stages, and the plans and walks of their functions, are not: they are made again for
positions that have not been met.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from distsim.ir import Value
from distsim.program.parts import Stage
from distsim.program.program import Program
from distsim.simulate.memory.kernel import Ints
from distsim.simulate.memory.life import NOTHING, Amounts, Change, Life, LifeUse, Living, Position, lives
from distsim.simulate.memory.outline import Irregular, Outline, outline
from distsim.simulate.memory.plan import forget
from distsim.simulate.memory.positions import Pattern, Positions
from distsim.simulate.tasks.rank_classes import place_of

_MOST = 1024
"""Programs' stages that are remembered; those not used for longest are forgotten first."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Amounts, a row each: bytes in all, then by kind. ``each`` come on top once per microbatch.

    Rows of calls and sends: (stage, variant, phase); of edges: (edge, variant of the target).
    """

    start: Ints
    start_each: Ints
    call_net: Ints
    call_top: Ints
    sent_net: Ints
    edge_net: Ints
    edge_top: Ints
    step_net: Ints
    step_top: Ints
    step_net_each: Ints
    step_top_each: Ints


class Table:
    """What the stages do, per variant of the positions: ``uses``, and ``step`` at the end."""

    def __init__(self, stages: _Stages, uses: tuple[tuple[LifeUse | None, ...], ...]) -> None:
        self.stages, self.uses = stages, uses
        ending = [[use for use in own if use is not None][-1] for own in uses]  # the last microbatch
        self.step = [ending[stage].step[number] for stage, number in stages.order]
        self.edge_start = stages.edge_start
        self.edge_target = stages.edge_target
        self.step_stage = stages.step_stage
        self._columns: dict[int, Columns] = {}

    def columns(self, count: int) -> Columns:
        """Return the amounts: in all (one column), or by kind too."""
        found = self._columns.get(count)
        if found is None:
            found = self._columns[count] = self._rows(count)
        return found

    def _rows(self, count: int) -> Columns:
        most = max([len(own) for own in self.uses], default=0)
        padded = [(*own, *[None] * (most - len(own))) for own in self.uses]
        calls = [c for own in padded for use in own for c in (_BOTH if use is None else use.called)]
        sent = [c for own in padded for use in own for c in (_BOTH if use is None else use.sent)]
        edges = [
            _NONE if use is None else use.received[number]
            for _, _, target, number in self.stages.edges
            for use in padded[target]
        ]
        start = self.stages.start
        rows = (
            [once for once, _ in start],
            [each for _, each in start],
            [c.net for c in calls],
            [c.peak for c in calls],
            [c.net for c in sent],
            [c.net for c in edges],
            [c.peak for c in edges],
            [c.net for c in self.step],
            [c.peak for c in self.step],
            [c.net_each for c in self.step],
            [c.peak_each for c in self.step],
        )
        return Columns(*[_array(amounts, count) for amounts in rows])


class _Stages:
    """What is remembered of some stages.

    ``number`` says which life each stage has among the distinct ones, ``uses`` what a microbatch in a
    position does there.
    """

    def __init__(self, found: Outline) -> None:
        self.kept, self.order, self.edges = found.kept, found.order, found.edges
        distinct = _distinct(found.lives)
        self.number = tuple([distinct.index(life) for life in found.lives])
        starts = [_start(life) for life in distinct]
        self.start = [starts[number] for number in self.number]
        counts = np.zeros(2 * len(found.lives) + 1, np.int64)
        for source, phase, _, _ in found.edges:
            counts[2 * source + phase + 1] += 1
        self.edge_start: Ints = np.cumsum(counts)
        self.edge_target: Ints = np.array([target for _, _, target, _ in found.edges], np.int64)
        self.step_stage: Ints = np.array([stage for stage, _ in found.order], np.int64)
        self.uses: dict[tuple[int, Position], LifeUse] = {}
        self.tables: dict[Positions, Table | None] = {}

    def table(self, positions: Positions, more: bool, outlined: Callable[[], Outline]) -> Table | None:
        """Return the table for these positions; ``outlined`` makes the outline of the program."""
        asked = {
            (number, position)
            for number, own in zip(self.number, positions.of, strict=True)
            for position in own
            if position is not None
        }
        missing = asked.difference(self.uses)
        if missing:
            with _no_collection():
                self._tell(outlined(), sorted(missing), more)
        if not all(self.uses[key].apart for key in asked):
            return None
        uses = [
            tuple([None if position is None else self.uses[number, position] for position in own])
            for number, own in zip(self.number, positions.of, strict=True)
        ]
        return Table(self, tuple(uses))

    def _tell(self, found: Outline, missing: Sequence[tuple[int, Position]], more: bool) -> None:
        walk, known = lives(), dict[int, Living]()
        for number, position in missing:
            if number not in known:
                known[number] = Living(found.lives[self.number.index(number)], more, walk)
            self.uses[number, position] = known[number].use(position)
        for living in known.values():
            for function in living.life.functions:
                forget(function)


def _distinct(found: Sequence[Life]) -> list[Life]:
    """Return the lives that differ; equal ones have the very same functions, so few are compared."""
    distinct: list[Life] = []
    for life in found:
        if life not in distinct:
            distinct.append(life)
    return distinct


class _Known:
    """What is remembered, with what it is found by; ``stages`` is None where there is no outline."""

    def __init__(self, program: Program, found: Outline | None) -> None:
        self.keys = [_parts(stage) for stage in program.stages], program.inputs, program.outputs
        self.stages = None if found is None else _Stages(found)


@contextmanager
def _no_collection() -> Generator[None]:
    """Put the collector of cycles off: what is made here is many small objects, and no cycle."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_KNOWN: OrderedDict[tuple[int, ...], _Known] = OrderedDict()


def _parts(stage: Stage) -> tuple[object, ...]:
    """What a stage consists of, wherever it runs."""
    return stage.forward, stage.backward, stage.updates


def table_of(program: Program, pattern: Pattern) -> Table | None:
    """Return the table of a program's stages; None where it has to be written out."""
    more = pattern.microbatches > 1
    parts = [part for stage in program.stages for part in _parts(stage)]
    key = (id(program.inputs), id(program.outputs), more, *map(id, parts))
    known, found = _KNOWN.get(key), None
    if known is None:
        with _no_collection(), suppress(Irregular):
            found = outline(program, more)
        known = _KNOWN[key] = _Known(program, found)
        if len(_KNOWN) > _MOST:
            _KNOWN.popitem(last=False)
    else:
        _KNOWN.move_to_end(key)
    stages = known.stages
    if stages is None or not all(pattern.last_ends[stage][phase] for stage, phase in stages.kept):
        return None
    if pattern.positions not in stages.tables:
        stages.tables[pattern.positions] = stages.table(
            pattern.positions, more, lambda: found or outline(program, more)
        )
    return stages.tables[pattern.positions]


_NONE = Change(NOTHING, NOTHING)
_BOTH = (_NONE, _NONE)


def _array(amounts: Sequence[Amounts], columns: int) -> Ints:
    return np.array([row[:columns] for row in amounts], np.int64).reshape(len(amounts), columns)


def _start(life: Life) -> tuple[Amounts, Amounts]:
    """Return what is there before the step: once, and once per microbatch."""
    once, each = list(NOTHING), list(NOTHING)
    blocks = {slot for block in life.blocks if block is not None for slot in block.inputs}
    for given in life.given:
        value = Value("", life.types[given.slot])
        nbytes = 0 if place_of(value) is None else value.type.nbytes
        # Of parts that only the end of the step reads there is the last.
        amounts = each if given.part and (given.slot in blocks or given.slot in life.each) else once
        amounts[0] += nbytes
        amounts[1 + given.kind] += nbytes
    return tuple(once), tuple(each)
