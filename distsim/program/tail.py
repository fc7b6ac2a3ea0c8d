"""What a step does after its last action: sums of copies, updates by round, outputs, shared parameters.

Of updates, what does not run after each batch of microbatches already.
"""

from __future__ import annotations

from typing import Protocol

from distsim.ir import Function, Op, Value
from distsim.ir.type import as_tensor
from distsim.program.block import FIRST_CALL, LAST_CALL, Block
from distsim.program.links import Maker
from distsim.program.parts import Parts, ProgramOutput
from distsim.program.table import CONCAT, EVERY, FIRST, LATEST, ONCE, SEND, UPDATE, BoundBlock, Key, RankKeys
from distsim.program.weight_versions import WeightVersions
from distsim.schedule import IssueOrder, Kind


class Bound(Protocol):
    """What binds the passes of a program to ranks."""

    parts: Parts
    rank_of: tuple[int, ...]
    copies: int
    chain: int
    versions: WeightVersions | None
    ends_early: bool

    @property
    def makers(self) -> dict[Value, Maker]:
        """Who makes each key."""
        ...

    @property
    def readers(self) -> dict[Value, tuple[int, ...]]:
        """The stages whose passes over a microbatch read each key."""
        ...

    def on(self, rank: int, which: int) -> RankKeys:
        """Return the keys of values on a rank, of which microbatch."""
        ...

    def transfer(self, value: Value, source: int, target: int, which: int) -> BoundBlock:
        """Return what brings a value from one rank to another."""
        ...


class Tail:
    """What follows the last action, in the order in which it is issued.

    ``rows`` are (block, first microbatch or -1, repetitions, each of the next microbatch). What is read of
    another rank is sent there just before. ``each`` are the microbatches of a copy of the model.
    """

    def __init__(self, binder: Bound, each: int) -> None:
        self.binder, self.parts, self.each = binder, binder.parts, each
        self.rows: list[tuple[BoundBlock, int, int]] = []
        self.outputs: list[Key] = []
        # By rank: which values are there, and of which microbatch; of which copy.
        self.present: dict[int, dict[Value, int]] = {rank: {} for rank in binder.rank_of}
        self.copy_of: dict[int, dict[Value, int]] = {rank: {} for rank in binder.rank_of}
        self.totals: dict[tuple[Value, int], Value] = {}  # of the sums of all copies of the model
        self._note_present()
        if binder.copies > 1:
            self._sum_copies()
        self._updates()
        for output in self.parts.outputs:
            self.outputs.append(self._output(output))
        for output in self.parts.outputs:
            self.outputs += [self._fetch(output.key, stage, 0) for stage in output.copies]
        read = [key for block, _, _ in self.rows for key in block.reads]
        self._latest = dict.fromkeys([key for key in (*read, *self.outputs) if key.which == LATEST])

    def latest(self, order: IssueOrder) -> dict[tuple[Value, int], int]:
        """Return which microbatch each key is of that is read LATEST: the last that its maker ran.

        Of the copies of the model, the one that has it on this rank: the first, if several have.
        """
        schedule, found = order.schedule, dict[tuple[Value, int], int]()
        for key in self._latest:
            maker, copy = self.binder.makers[key.value], self.copy_of[key.rank][key.value]
            before = schedule.num_microbatches * copy
            if maker.phase is None:
                found[key.value, key.rank] = before + schedule.num_microbatches - 1
                continue
            ends = order.latest[maker.stage + self.binder.chain * copy]
            side = 0 if maker.phase is Kind.FORWARD else 1
            if side and ends[1] != ends[2] and key.value in self.parts.halves[maker.stage][0].outputs:
                side = 2
            found[key.value, key.rank] = before + int(ends[side])
        return found

    def _note_present(self) -> None:
        binder, versions = self.binder, self.binder.versions
        held = [(item.key, not item.microbatched, item.stages) for item in self.parts.inputs]
        for key, maker in binder.makers.items():
            if maker.phase is not None:
                stages = () if maker.once else binder.readers.get(key, ())
                held.append((key, maker.once, (maker.stage, *stages)))
        within = [*self.parts.ahead.items(), *(self.parts.early.items() if binder.ends_early else ())]
        held += [(key, True, (stage,)) for stage, block in within for key in block.outputs]
        for stage, blocks in enumerate(versions.each if versions else ()):
            versioned = {*versions.successor.values()} if versions else set[Value]()
            held += [(key, key not in versioned, (stage,)) for block in blocks for key in block.outputs]
        for key, once, stages in held:
            for copy in range(binder.copies):
                for stage in stages:
                    rank = self._rank(stage, copy)
                    self.present[rank][key] = ONCE if once else LATEST
                    self.copy_of[rank].setdefault(key, copy)

    def _rank(self, stage: int, copy: int) -> int:
        return self.binder.rank_of[stage + copy * self.binder.chain]

    def _fetch(self, key: Value, stage: int, copy: int) -> Key:
        """Return a key on the rank of a stage, sent there from where it was made if need be."""
        rank = self._rank(stage, copy)
        if key not in self.present[rank]:
            source = self._rank(self.binder.makers[key].stage, copy)
            which = self.present[rank][key] = self.present[source][key]
            self.copy_of[rank][key] = self.copy_of[source].get(key, copy)
            value = self.totals.get((key, source), key)
            self.rows.append((self.binder.transfer(value, source, rank, which), -1, 1))
            if value is not key:
                self.totals[key, rank] = value
        return self.binder.on(rank, self.present[rank][key])[self.totals.get((key, rank), key)]

    def _updates(self) -> None:
        versions = self.binder.versions
        blocks = versions.last if versions else [updates for _, _, updates in self.parts.blocks]
        rounds = sorted({number for updates in blocks for number, _ in updates})
        for number in rounds:
            for copy, stage in self._in_order():
                for own, block in blocks[stage]:
                    if own == number and block.outputs and not self._is_within(block):
                        self._update(block, stage, copy)

    def _is_within(self, block: Block) -> bool:
        """Whether a block runs within a call of a microbatch."""
        return block.place == FIRST_CALL or (block.place == LAST_CALL and self.binder.ends_early)

    def _in_order(self) -> list[tuple[int, int]]:
        """Return every (copy, stage) in the order in which they are updated: as they end on their rank.

        Of the stages of a rank the backward pass of the last one ends first, and what is reduced over ranks
        is issued in order: the first stage must not keep the others waiting.
        """
        chain = self.binder.chain
        places = [divmod(place, chain) for place in range(chain * self.binder.copies)]
        on_rank: dict[int, list[int]] = {}
        for copy, stage in places:
            on_rank.setdefault(self._rank(stage, copy), []).append(stage)
        later = [sum([other > stage for other in on_rank[self._rank(stage, copy)]]) for copy, stage in places]
        return [place for _, place in sorted(zip(later, places, strict=True))]

    def _update(self, block: Block, stage: int, copy: int) -> None:
        rank = self._rank(stage, copy)
        reads = tuple([self._fetch(key, stage, copy) for key in block.inputs])
        makes = tuple(map(self.binder.on(rank, ONCE).__getitem__, block.outputs))
        self.present[rank].update(dict.fromkeys(block.outputs, ONCE))
        place = stage + copy * self.binder.chain
        bound = BoundBlock(UPDATE, rank, reads, makes, block.function, block.names, (place,))
        self.rows.append((bound, -1, 1))

    def _output(self, output: ProgramOutput) -> Key:
        """Return the key of an output; what came out per microbatch is put together on its rank."""
        key, count = output.key, self.each * self.binder.copies
        if not output.microbatched or count == 1:
            return self._fetch(key, output.stage, 0)
        rank = self._rank(output.stage, 0)
        for copy in range(self.binder.copies):
            source = self._rank(self.binder.makers[key].stage, copy)
            if source != rank and (copy or key not in self.present[rank]):
                bring = self.binder.transfer(key, source, rank, FIRST)
                self.rows.append((bring, copy * self.each, self.each))
        part = as_tensor(key.type, key.name)
        shape = [size * count if dim == output.dim else size for dim, size in enumerate(part.shape)]
        whole = Key(Value(key.name, part.with_shape(tuple(shape))), rank, ONCE)
        joined = BoundBlock(CONCAT, rank, (Key(key, rank, EVERY),), (whole,), dim=output.dim)
        self.rows.append((joined, -1, 1))
        return whole

    def _sum_copies(self) -> None:
        """Add what each copy of the model summed, on every rank that holds one of them."""
        binder, copies = self.binder, range(self.binder.copies)
        adds: list[tuple[BoundBlock, int, int]] = []
        for key, maker in binder.makers.items():
            if maker.phase is None or not maker.once:
                continue
            add, parts = _addition(key, binder.copies), [Value(key.name, key.type) for _ in copies]
            for copy in copies:
                rank = self._rank(maker.stage, copy)
                reads = [Key(key, rank, ONCE)]
                for other in copies:
                    source = self._rank(maker.stage, other)
                    if other != copy:
                        brought = Key(parts[other], rank, ONCE)
                        reads.append(brought)
                        keys = (Key(key, source, ONCE),), (brought,)
                        self.rows.append((BoundBlock(SEND, source, *keys, target=rank), -1, 1))
                total = self.totals[key, rank] = Value(key.name, key.type)
                makes = (Key(total, rank, ONCE),)
                place = maker.stage + copy * binder.chain
                adds.append((BoundBlock(UPDATE, rank, tuple(reads), makes, add, (), (place,)), -1, 1))
        self.rows += adds


def _addition(value: Value, count: int) -> Function:
    """Return the function that adds so many values of a type."""
    given = tuple([Value(f"{value.name}.{i}", value.type) for i in range(count)])
    ops: list[Op] = []
    total = given[0]
    for each in given[1:]:
        total, before = Value(value.name, value.type), total
        ops.append(Op("Add", (before, each), (total,)))
    return Function("add_copies", given, tuple(ops), (total,))
