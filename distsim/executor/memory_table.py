"""The changes of memory of a Program's stages as arrays, kept for other schedules and microbatch counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distsim.executor.classes import place_of
from distsim.executor.memory_kernel import Ints
from distsim.executor.memory_life import NOTHING, Amounts, Change, Life, LifeUse, live
from distsim.executor.memory_outline import Outline, outline
from distsim.executor.memory_positions import Pattern, Positions
from distsim.executor.memory_walk import KIND_OF_ROLE
from distsim.executor.program import Program, Stage
from distsim.ir import Value

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

    def only(self, columns: int) -> Columns:
        """Return the first columns."""
        return Columns(*[np.ascontiguousarray(array[:, :columns]) for array in vars(self).values()])


@dataclass(frozen=True, eq=False)
class Table:
    """What the stages do, per variant of the positions; ``uses`` and ``step`` say it in words."""

    outline: Outline
    uses: tuple[tuple[LifeUse | None, ...], ...]
    step: tuple[Change, ...]
    edge_start: Ints
    edge_target: Ints
    step_stage: Ints
    known: dict[int, Columns] = field(default_factory=dict[int, Columns])

    def columns(self, count: int) -> Columns:
        """Return the amounts: in all (one column), or by kind too."""
        found = self.known.get(count)
        if found is None:
            found = self.known[count] = self.known[len(NOTHING)].only(count)
        return found


class _Known:
    """What is remembered of some stages; it keeps what it is found by."""

    def __init__(self, program: Program, more: bool) -> None:
        self.keys = [_parts(stage) for stage in program.stages], program.inputs, program.outputs
        self.outline = outline(program, more)
        self.tables: dict[Positions, Table | None] = {}


_KNOWN: OrderedDict[tuple[int, ...], _Known] = OrderedDict()


def _parts(stage: Stage) -> tuple[object, ...]:
    """What a stage consists of, wherever it runs."""
    return stage.forward, stage.backward, stage.updates


def table_of(program: Program, pattern: Pattern) -> Table | None:
    """Return the table of a program's stages; None where it has to be written out."""
    more = pattern.microbatches > 1
    parts = [part for stage in program.stages for part in _parts(stage)]
    key = (id(program.inputs), id(program.outputs), more, *map(id, parts))
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = _Known(program, more)
        if len(_KNOWN) > _MOST:
            _KNOWN.popitem(last=False)
    else:
        _KNOWN.move_to_end(key)
    if known.outline is None:
        return None
    if not all(pattern.last_ends[stage][phase] for stage, phase in known.outline.kept):
        return None
    if pattern.positions not in known.tables:
        known.tables[pattern.positions] = _table(known.outline, pattern.positions, more)
    return known.tables[pattern.positions]


def _table(found: Outline, positions: Positions, more: bool) -> Table | None:
    uses = [
        [None if position is None else live(life, position, more) for position in own]
        for life, own in zip(found.lives, positions.of, strict=True)
    ]
    if not all(use is None or use.apart for own in uses for use in own):
        return None
    variants = max([len(own) for own in uses], default=0)
    for own in uses:
        own += [None] * (variants - len(own))
    calls = [c for own in uses for use in own for c in (_BOTH if use is None else use.called)]
    sent = [c for own in uses for use in own for c in (_BOTH if use is None else use.sent)]
    edges = [
        _NONE if use is None else use.received[number]
        for _, _, target, number in found.edges
        for use in uses[target]
    ]
    ending = [
        next(use for use, position in zip(own, at, strict=False) if use and position and position.ends)
        for own, at in zip(uses, positions.of, strict=True)
    ]
    step = [ending[stage].step[number] for stage, number in found.order]
    start = [_start(life) for life in found.lives]
    counts = np.zeros(2 * len(found.lives) + 1, np.int64)
    for source, phase, _, _ in found.edges:
        counts[2 * source + phase + 1] += 1
    table = Table(
        found,
        tuple(map(tuple, uses)),
        tuple(step),
        np.cumsum(counts),
        np.array([target for _, _, target, _ in found.edges], np.int64),
        np.array([stage for stage, _ in found.order], np.int64),
    )
    table.known[len(NOTHING)] = Columns(
        _rows([once for once, _ in start]),
        _rows([each for _, each in start]),
        _rows([c.net for c in calls]),
        _rows([c.peak for c in calls]),
        _rows([c.net for c in sent]),
        _rows([c.net for c in edges]),
        _rows([c.peak for c in edges]),
        _rows([c.net for c in step]),
        _rows([c.peak for c in step]),
        _rows([c.net_each for c in step]),
        _rows([c.peak_each for c in step]),
    )
    return table


_NONE = Change(NOTHING, NOTHING)
_BOTH = (_NONE, _NONE)


def _rows(amounts: Sequence[Amounts]) -> Ints:
    return np.array(amounts, np.int64).reshape(len(amounts), len(NOTHING))


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
        amounts[1 + KIND_OF_ROLE[given.role]] += nbytes
    return tuple(once), tuple(each)
