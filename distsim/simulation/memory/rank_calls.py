"""What each rank does in a table of calls, with numbers for keys: ranks that do the same are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distsim.cache import cached
from distsim.ir import Function, Role, Tensor, Type, Value
from distsim.program.parts import ProgramInput
from distsim.program.table import ONCE, SEND, BoundBlock, Key, Table, TableCalls
from distsim.schedule import FLUSH, LAST, LATER, Kind, Schedule
from distsim.schedule.codes import code_of, number_of
from distsim.simulation.memory.plan import gradient_inputs

Slots = tuple[int, ...]
Places = tuple[tuple[int, int], ...]
"""(slot, which): as of keys, :data:`ONCE` for a value of which there is one a step."""

BEGINS = 4
"""Beside :data:`LATER` and :data:`LAST`: a call makes, once a step, what later ones read."""

_CODES = {kind.value: kind.code for kind in Kind}


class Irregular(Exception):
    """Microbatches share memory in a way that the rows of a few of them do not show."""


class Slot(NamedTuple):
    """A value on a rank: its bytes (0 where it is on no device), and its role if it is an input there."""

    nbytes: int
    role: Role | None


@cached("slots, by bytes and role", 4096)
def _slot(nbytes: int, role: Role | None) -> Slot:
    """Return a slot, the same object every time: of thousands few differ."""
    return Slot(nbytes, role)


class SlotCall(NamedTuple):
    """A block of one action: what it reads and makes, and the numbers of the transfers that follow it.

    ``sizes`` are the bytes of what it makes.
    """

    function: Function
    reads: Places
    makes: Places
    sizes: tuple[int, ...]
    sends: tuple[int, ...]


class TailCall(NamedTuple):
    """A row after the last action, as far as one rank takes part: a transfer reads or makes on it, or both.

    ``copy`` is that of the model whose microbatches are sent one by one; -1 for what happens once.
    """

    kind: str
    function: Function | None
    reads: Places
    makes: Places
    sizes: tuple[int, ...]
    copy: int


@dataclass(frozen=True)
class RankCalls:
    """What a rank does, whatever its number.

    ``calls`` are by (code of i and kind for its i-th stage, sum of :data:`LATER` if it adds to sums made
    before, :data:`LAST` if it goes on with them and :data:`BEGINS` if it makes what later ones read);
    ``sent`` are the slots of the transfers from it that follow calls, by number, ``brought`` those that such
    transfers bring. ``pairs`` are the places of the inputs that a call (kind and stage, the same sum) reads
    as gradients if it overlaps another one (2 * its kind and stage, + 1 if that one comes first). ``held``:
    see :class:`distsim.program.parts.Parts`.
    """

    slots: tuple[Slot, ...]
    calls: tuple[tuple[tuple[int, int], SlotCall], ...]
    sent: Slots
    brought: Slots
    tail: tuple[TailCall, ...]
    outputs: Places
    pairs: tuple[tuple[tuple[int, int, int], tuple[int, ...]], ...]
    held: float = 0.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def outline(self) -> tuple[object, ...]:
        """What there is beside functions and sizes: models that are divided otherwise have it in common."""
        calls = [(key, call.reads, call.makes, call.sends) for key, call in self.calls]
        tail = [(row.kind, row.function is None, row.reads, row.makes, row.copy) for row in self.tail]
        roles = tuple([slot.role for slot in self.slots])
        return roles, *calls, *tail, self.sent, self.brought, self.outputs, self.pairs, self.held

    @cached_property
    def _hash(self) -> int:
        """Of thousands of slots, which are looked up again and again, made once."""
        return hash((self.slots, self.calls, self.sent, self.brought, self.tail, self.outputs))


class Rank(NamedTuple):
    """A pipeline rank: what it does, its stages, and what is which there.

    By numbers in the table: ``sent`` gives the numbers of transfers of blocks, ``brought`` the slots that
    blocks bring, ``tail`` the places in its tail of rows after the last action; ``slots`` those of values.
    """

    calls: RankCalls
    stages: tuple[int, ...]
    sent: Mapping[int, int]
    brought: Mapping[int, int]
    tail: Mapping[int, int]
    slots: Mapping[Value, int]


def size_of(type_: Type) -> int:
    """Return the bytes that a value takes on each device that holds it; 0 if none does."""
    return type_.allocated if isinstance(type_, Tensor) and type_.device is not None else 0


def ranks_of(table: Table, inputs: Sequence[ProgramInput], held: float = 0.0) -> tuple[Rank, ...]:
    """Return what each rank does, with buffers of gradients (``Parts.held``).

    Raises :class:`Irregular` where sums do not belong to one stage.

    So it does where weights are updated between the actions: versions of them come and go.
    """
    schedule = table.order.schedule
    if schedule.weights != FLUSH:
        raise Irregular
    roles = roles_of_ranks(schedule, inputs)
    ends = int(table.start[table.tail])
    numbers: list[int] = np.unique(table.block[:ends]).tolist()
    each = max(schedule.num_microbatches, 1)
    firsts: list[int] = table.microbatch[ends:, 0].tolist()
    last: list[int] = table.block[ends:].tolist()
    tail = [table.blocks[number] for number in last]
    stages: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
    for stage, rank in enumerate(schedule.rank_of):
        stages[rank].append(stage)
    builders = [_Builder(own, roles[rank]) for rank, own in enumerate(stages)]
    for number in numbers:
        block = table.blocks[number]
        if block.kind == SEND:
            builders[block.rank].sends.setdefault(block.reads[0].value, []).append(number)
            builders[block.target].brought.append((number, block.makes[0]))
        else:
            builders[block.rank].add(block)
    for builder in builders:
        builder.number_calls()
    for row, (block, first) in enumerate(zip(tail, firsts, strict=True)):
        for rank in dict.fromkeys(block.ranks):
            builders[rank].add_tail(row, block, rank, first // each)
    for key in table.outputs:
        builders[key.rank].outputs.append(builders[key.rank].place(key))
    return tuple([builder.rank(held) for builder in builders])


def resized_ranks(ranks: Sequence[Rank], calls: TableCalls) -> tuple[Rank, ...]:
    """Return the ranks of the blocks of tables, if these are those of blocks that differ in sizes alone."""
    if calls.like is None:
        return tuple(ranks)
    like, values = calls.like
    pairs = zip(like.blocks, calls.blocks, strict=True)
    functions = {a.function: b.function for a, b in pairs if a.function and b.function and a is not b}
    outputs = {each: tuple([size_of(v.type) for v in each.outputs]) for each in functions.values()}
    found: list[Rank] = []
    done: dict[object, RankCalls] = {}
    for rank in ranks:
        moved = {value: values[value] for value in values.keys() & rank.slots.keys()}
        own = {rank.slots[value]: size_of(new.type) for value, new in moved.items()}
        key = rank.calls, tuple(sorted(own.items()))
        if key not in done:
            done[key] = _resized(rank.calls, own, functions, outputs)
        slots = {**rank.slots, **{new: rank.slots[value] for value, new in moved.items()}}
        found.append(rank._replace(calls=done[key], slots=slots))
    return tuple(found)


def _resized(
    calls: RankCalls,
    sizes: Mapping[int, int],
    functions: Mapping[Function, Function],
    outputs: Mapping[Function, tuple[int, ...]],
) -> RankCalls:
    """Return what a rank does with these bytes of slots, functions, and bytes of what they make."""
    slots = list(calls.slots)
    for slot, nbytes in sizes.items():
        slots[slot] = _slot(nbytes, slots[slot].role)
    each: list[tuple[tuple[int, int], SlotCall]] = []
    for key, call in calls.calls:
        function = functions.get(call.function)
        own = call if function is None else call._replace(function=function, sizes=outputs[function])
        each.append((key, own))
    tail: list[TailCall] = []
    for row in calls.tail:
        function = None if row.function is None else functions.get(row.function)
        own = row if function is None else row._replace(function=function, sizes=outputs[function])
        tail.append(own)
    return replace(calls, slots=tuple(slots), calls=tuple(each), tail=tuple(tail))


def roles_of_ranks(schedule: Schedule, inputs: Sequence[ProgramInput]) -> list[dict[Value, Role]]:
    """Return per rank the roles of the inputs that it holds."""
    roles: list[dict[Value, Role]] = [{} for _ in range(schedule.num_ranks)]
    for given in inputs:
        for first in range(0, schedule.num_stages, max(schedule.chain, 1)):
            for stage in given.stages:
                roles[schedule.rank_of[first + stage]][given.key] = given.source.role
    return roles


def families(block: BoundBlock, stages: Sequence[int]) -> tuple[int, ...]:
    """Return of each action of a block the code of its kind and of its stage among those of its rank."""
    pairs = zip(block.kind, block.stages, strict=True)
    return tuple([code_of(stages.index(stage), _CODES[kind]) for kind, stage in pairs])


def _how(block: BoundBlock) -> int:
    """Return what a block does to sums, as of :class:`RankCalls`."""
    return LATER * block.adds + LAST * block.ends + BEGINS * bool(block.begins)


class _Builder:
    """Numbers the keys of one rank in the order in which its calls name them."""

    def __init__(self, stages: Sequence[int], roles: Mapping[Value, Role]) -> None:
        self.stages, self.roles = tuple(stages), roles
        self.blocks: dict[tuple[int, int], BoundBlock] = {}
        self.sends: dict[Value, list[int]] = {}
        self.brought: list[tuple[int, Key]] = []
        self.number: dict[Value, int] = {}
        self.slots: list[Slot] = []
        self.calls: list[tuple[tuple[int, int], SlotCall]] = []
        self.sent: dict[int, int] = {}
        self.sent_slots: list[int] = []
        self.tail: list[TailCall] = []
        self.tail_number: dict[int, int] = {}
        self.outputs: list[tuple[int, int]] = []
        self.gradients: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def place(self, key: Key) -> tuple[int, int]:
        """Return the slot of a key, and of which microbatch it is."""
        slot = self.number.get(key.value)
        return self._new_slot(key.value) if slot is None else slot, key.which

    def _new_slot(self, value: Value) -> int:
        slot = self.number.setdefault(value, len(self.slots))
        if slot == len(self.slots):
            self.slots.append(_slot(size_of(value.type), self.roles.get(value)))
        return slot

    def places(self, keys: Iterable[Key]) -> Places:
        """Return the slots of keys."""
        known, new = self.number.get, self._new_slot
        found = [(known(value), value, which) for value, _, which in keys]
        return tuple([(new(v) if slot is None else slot, which) for slot, v, which in found])

    def sizes_of(self, function: Function) -> tuple[int, ...]:
        """Return the bytes of the outputs of a function."""
        return tuple([size_of(value.type) for value in function.outputs])

    def add(self, block: BoundBlock) -> None:
        """Take in a block of one action or two."""
        if block.pair:
            self._add_pair(block)
        for each in block.pair or (block,):
            known = self.blocks.setdefault((families(each, self.stages)[0], _how(each)), each)
            if (known.function, known.reads, known.makes) != (each.function, each.reads, each.makes):
                raise Irregular  # more tells them apart than what they do to sums

    def _add_pair(self, block: BoundBlock) -> None:
        """Note what two blocks that overlap read as gradients: more, perhaps, than either of them alone."""
        one, two = block.pair
        for each, other in ((one, two), (two, one)):
            if not {key for key in each.reads if key.which == ONCE}.isdisjoint(other.makes):
                raise Irregular  # it reads the sum as it was before both
        inputs, count = gradient_inputs(block.callee), len(one.reads)
        of_both = [i for i in inputs if i < count], [i - count for i in inputs if i >= count]
        for side, (each, other, places) in enumerate(zip((one, two), (two, one), of_both, strict=True)):
            (family,), (beside,) = families(each, self.stages), families(other, self.stages)
            key = family, _how(each), 2 * beside + side
            if self.gradients.setdefault(key, tuple(places)) != tuple(places):
                raise Irregular

    def number_calls(self) -> None:
        """Number the keys of the calls, by stage and kind."""
        summing: dict[int, int] = {}
        for (family, how), block in sorted(self.blocks.items(), key=lambda item: item[0]):
            reads, makes = self.places(block.reads), self.places(block.makes)
            numbers = [number for key in block.makes for number in self._sends(key)]
            call = SlotCall(block.callee, reads, makes, self.sizes_of(block.callee), tuple(numbers))
            self.calls.append(((family, how), call))
            for slot, which in makes:
                if which == ONCE and summing.setdefault(slot, number_of(family)) != number_of(family):
                    raise Irregular  # two copies of a stage on one rank make one sum

    def _sends(self, key: Key) -> list[int]:
        """Return the numbers of the transfers of what a call makes."""
        blocks = self.sends.get(key.value, ()) if key.which != ONCE else ()
        for block in blocks:
            if block not in self.sent:
                self.sent[block] = len(self.sent_slots)
                self.sent_slots.append(self.number[key.value])
        return [self.sent[block] for block in blocks]

    def add_tail(self, row: int, block: BoundBlock, rank: int, copy: int) -> None:
        """Take in a row after the last action."""
        self.tail_number[row] = len(self.tail)
        reads = self.places([key for key in block.reads if key.rank == rank])
        makes = self.places([key for key in block.makes if key.rank == rank])
        sizes = () if block.function is None else self.sizes_of(block.function)
        self.tail.append(TailCall(block.kind, block.function, reads, makes, sizes, copy))

    def rank(self, held: float) -> Rank:
        """Return the rank."""
        brought = {number: self.place(key)[0] for number, key in self.brought}
        calls = RankCalls(
            tuple(self.slots),
            tuple(self.calls),
            tuple(self.sent_slots),
            tuple(sorted({*brought.values()})),
            tuple(self.tail),
            tuple(self.outputs),
            tuple(sorted(self.gradients.items())),
            held,
        )
        return Rank(calls, self.stages, self.sent, brought, self.tail_number, self.number)
