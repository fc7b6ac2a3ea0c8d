"""Wiring of blocks: which times each of their calls reads and writes, and its matrix.

What a block makes and another one reads has a *cell*, unless the reader waits anyway for a stream that is
never free before the value is there. Which that is follows from the order of the blocks' tasks alone,
whatever they take. What remains is little: what crosses ranks, and sums that other streams read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from weakref import proxy

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.hardware.routes import among
from distsim.ir import NO_ATTRIBUTES, Attributes, Op, Value
from distsim.ir.type import as_tensor
from distsim.ops import Signature
from distsim.ops.marks import HOST
from distsim.program.table import LATEST, ONCE, BoundBlock, Key
from distsim.simulation.maxplus.block_links import Address, BlockLinks, address
from distsim.simulation.maxplus.matrices import (
    Cells,
    Class,
    Matrices,
    Product,
    Wiring,
    matrix_of,
    ordered_alike,
    starts,
)
from distsim.simulation.tasks.block_matrix import (
    START,
    BlockTasks,
    Bools,
    Place,
    StageRanks,
    single_task,
)
from distsim.simulation.tasks.grid import task_seconds
from distsim.simulation.tasks.program_ranks import ProgramRanks
from distsim.simulation.tasks.rank_classes import ClassExchange
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.templates import Ints


class Wirer:
    """Makes the wiring of blocks; ``last`` are the makers that run last (:meth:`BlockLinks.last_makers`)."""

    def __init__(
        self,
        flow: BlockLinks,
        last: Sequence[int],
        ranks: ProgramRanks,
        tasks: Sequence[BlockTasks | None],
        cost_model: CostModel,
        overlap: bool,
    ) -> None:
        self.flow, self.ranks, self.tasks = flow, ranks, tasks
        self.cost_model, self.overlap = cost_model, overlap
        self.makers, self.sources = list(flow.makers), list(flow.sources)
        for (reader, makers), maker in zip(flow.contested, last, strict=True):
            if maker >= 0:
                self._settle(reader, makers, maker)
        self.made: Wiring | None = None
        self.latest: list[Value] = []
        places = [(r, c) for r, own in enumerate(ranks.slices) for c in range(len(own.members))]
        self.classes = {place: number for number, place in enumerate(places)}
        self.registers: dict[tuple[object, ...], int] = {}
        self.batched: dict[tuple[Address, int], int] = {}
        self.streams = [self._streams(n) for n in range(len(flow.blocks))]
        self.entries: list[dict[Place, None]] = [{} for _ in flow.blocks]
        self.results: list[dict[Place, None]] = [{} for _ in flow.blocks]

    def wiring(self) -> Wiring:
        """Return the wiring."""
        for number in range(len(self.flow.blocks)):
            for entry in self._uncovered(number):
                self._enter(number, entry)
        products: list[Product] = []
        first = [0]
        for number, block in enumerate(self.flow.blocks):
            products += self._products(number, block)
            first.append(len(products))
        made = tuple(products)
        clocks = len(self.registers)  # those of streams: values come after
        ins = self._cells([(p.streams, p.entries, self.flow.blocks[p.block].reads) for p in made])
        outs = self._cells([(p.streams, p.results, self.flow.blocks[p.block].makes) for p in made])
        return Wiring(
            flow=self.flow,
            ranks=self.ranks,
            overlap=self.overlap,
            products=made,
            first=np.array(first, np.int64),
            matrices=Matrices(ins, outs, matrix_of(made), len(self.registers), clocks),
            batched=len(self.batched),
            clocks=self._clocks(),
        )

    def kept(self, wiring: Wiring) -> Wirer:
        """Return what :meth:`resized` needs of ``wiring``, which was made here: it refers neither to the flow
        nor to the cost model, which keep it."""
        found = copy(self)
        found.flow, found.cost_model = BlockLinks((), 0), proxy(self.cost_model)
        found.made, found.latest = replace(wiring, flow=found.flow), _latest(self.flow)
        return found

    def resized(self, flow: BlockLinks, tasks: Sequence[BlockTasks | None]) -> Wiring | None:
        """Return the wiring of blocks that differ in sizes alone from those whose wiring is kept; None where
        their tasks are in another order."""
        if self.made is None or not all(map(ordered_alike, self.tasks, tasks)):
            return None
        own = copy(self)
        own.flow, own.tasks = flow, tasks
        made = tuple([p for number, block in enumerate(flow.blocks) for p in own._products(number, block)])
        values = dict(zip(self.latest, _latest(flow), strict=True))
        matrices = self.made.matrices
        ins, outs = (
            side._replace(latest={n: (values[value], rank) for n, (value, rank) in side.latest.items()})
            for side in (matrices.ins, matrices.outs)
        )
        matrices = replace(matrices, ins=ins, outs=outs, matrix=matrix_of(made))
        return replace(self.made, flow=flow, products=made, matrices=matrices)

    # --- streams --------------------------------------------------------------------------------------

    def _register(self, *cell: object) -> int:
        return self.registers.setdefault(cell, len(self.registers))

    def _stream(self, rank: int, stream: Stream) -> int:
        return self._register("stream", (rank, stream.rank_class), stream.name)

    def _streams(self, number: int) -> tuple[int, ...]:
        """Return the registers of the streams of a block's tasks."""
        block, tasks = self.flow.blocks[number], self.tasks[number]
        if tasks is None:
            return ()
        return tuple([self._stream(block.rank, stream) for stream in tasks.stream_table])

    def _slice(self, block: BoundBlock) -> StageRanks:
        return self.ranks.slices[block.rank]

    def _pairs(self, block: BoundBlock) -> list[tuple[int, int]]:
        """Return the pairs of rank classes of a transfer."""
        pairs = self._slice(block).pairs(self.ranks.slices[block.target])
        return [(part.sources[0], part.targets[0]) for part in pairs]

    def _occupied(self, block: BoundBlock, classes: Place) -> tuple[int, ...]:
        """Return the registers of what is no call: of a transfer between two classes, of a join on one."""
        if block.target < 0:
            return tuple([self._stream(block.rank, stream) for stream in self._of_join(block, classes[0])])
        source, target = (block.rank, classes[0]), (block.target, classes[1])
        if self.overlap:
            return (self._register("channel", source, target),)
        return tuple([self._register("stream", place, "all") for place in (source, target)])

    def _of_join(self, block: BoundBlock, rank_class: int) -> list[Stream]:
        """Return the streams of a join on a class: what it runs on, and what issues it."""
        names = ["compute" if self.overlap else "all"]
        if self._launch_of_join(block, rank_class) is not None:
            names.append(HOST)
        return [Stream(rank_class, name) for name in names]

    def _launch_of_join(self, block: BoundBlock, rank_class: int) -> float | None:
        """Return the seconds of the host for a join on a class, None where it takes none."""
        device = self._slice(block).members[rank_class][0]
        seconds = self.cost_model.launch_seconds(join_signature(block), device)
        return task_seconds(block.makes[0].value.name, seconds) if seconds else None

    def _clocks(self) -> dict[Class, Ints]:
        found: dict[Class, list[int]] = {place: [] for place in self.classes}
        for cell, number in self.registers.items():
            if cell[0] == "stream":
                found[cell[1]].append(number)  # pyright: ignore[reportArgumentType]
            elif cell[0] == "channel":
                for place in cell[1:]:
                    found[place].append(number)  # pyright: ignore[reportArgumentType]
        return {place: np.array(numbers, np.int64) for place, numbers in found.items()}

    # --- what may delay a block -----------------------------------------------------------------------

    def _settle(self, reader: int, makers: tuple[int, ...], last: int) -> None:
        """Let a block that runs after several makers of what it reads read what the last of them made."""
        own = list(zip(self.flow.blocks[reader].reads, self.makers[reader], strict=True))
        late = [key.which in (ONCE, LATEST) and each == makers for key, each in own]
        self.sources[reader] = [
            tuple([result for result in each if result[0] == last]) if after else each
            for after, each in zip(late, self.sources[reader], strict=True)
        ]
        self.makers[reader] = [tuple([maker for maker, _ in each]) for each in self.sources[reader]]

    def _uncovered(self, number: int) -> list[Place]:
        """Return the (input, rank class) for which a block waits on streams that may all be free before."""
        block, tasks = self.flow.blocks[number], self.tasks[number]
        if tasks is None:
            return self._uncovered_transfer(number, block)
        makers, sources, ports = self.makers[number], self.sources[number], list(tasks.port_of)
        groups: dict[tuple[int, ...], list[int]] = {}
        for port, (place, _) in enumerate(ports):
            if makers[place]:
                groups.setdefault(makers[place], []).append(port)
        found: list[Place] = []
        for group, own in groups.items():
            entered = tasks.order.enters[own]
            hidden = np.ones_like(entered)
            for n, maker in enumerate(group):
                results = np.array([(sources[ports[p][0]][n][1], ports[p][1]) for p in own], np.int64)
                hidden &= self._hidden(maker, results, self.streams[number])
            late: list[int] = np.array(own, np.int64)[~(hidden & entered).any(axis=1)].tolist()
            for port in late:
                if not self._waited(number, ports[port], tasks.order.enters[port]):
                    found.append(ports[port])
        return found

    def _uncovered_transfer(self, number: int, block: BoundBlock) -> list[Place]:
        makers = self.sources[number][0]
        if not makers:
            return []
        classes = self._pairs(block) if block.target >= 0 else [(c, c) for c in range(self._width(block))]
        found: dict[Place, None] = {}
        for pair in classes:
            streams = self._occupied(block, pair)
            hidden = np.ones((1, len(streams)), np.bool_)
            for maker, place in makers:
                hidden &= self._hidden(maker, np.array([(place, pair[0])], np.int64), streams)
            if not hidden.any():
                found[0, pair[0]] = None
        return list(found)

    def _width(self, block: BoundBlock) -> int:
        return len(self._slice(block).members)

    def _hidden(self, maker: int, results: Ints, streams: Sequence[int]) -> Bools:
        """[results, streams]: is a stream never free, after a block, before its (output, class) is there?"""
        tasks = self.tasks[maker]
        if tasks is None:
            return self._hidden_transfer(self.flow.blocks[maker], results, streams)
        return _columns(tasks.order.hides[results[:, 0], results[:, 1]], self.streams[maker], streams)

    def _hidden_transfer(self, block: BoundBlock, results: Ints, streams: Sequence[int]) -> Bools:
        found = np.zeros((len(results), len(streams)), np.bool_)
        for source, target in self._pairs(block) if block.target >= 0 else ():
            own = self._occupied(block, (source, target))
            found |= np.outer(results[:, 1] == target, np.isin(streams, own))
        return found

    def _waited(self, number: int, entry: Place, enters: Bools) -> bool:
        """Whether blocks that must have run for the same microbatch waited for the same on such a stream."""
        key = self.flow.key_of(number, entry[0])
        if key.which >= ONCE:
            return False
        seen: set[tuple[int, ...]] = set()
        reads, makers, sources = self.flow.blocks[number].reads, self.makers[number], self.sources[number]
        for other, before, made in zip(reads, makers, sources, strict=True):
            if other.which != key.which or not before or before in seen:
                continue
            seen.add(before)
            held = enters.copy()
            for maker, place in made:
                held &= self._wait(maker, place, (key, entry[1]), self.streams[number])
            if held.any():
                return True
        return False

    def _wait(self, maker: int, place: int, entry: tuple[Key, int], streams: Sequence[int]) -> Bools:
        """[streams]: is a stream never free, after a block, before what it read for a result is there?"""
        block, tasks = self.flow.blocks[maker], self.tasks[maker]
        key, rank_class = entry
        wanted = key._replace(which=block.makes[place].which)
        if tasks is None or wanted.which >= ONCE or wanted not in block.reads:
            return np.zeros(len(streams), np.bool_)
        port = tasks.port_of.get((block.reads.index(wanted), rank_class))
        if port is None:
            return np.zeros(len(streams), np.bool_)
        return _columns(tasks.order.waits[port : port + 1], self.streams[maker], streams)[0]

    def _enter(self, number: int, entry: Place) -> None:
        """Let a block read an input, and its makers tell when it is there."""
        if entry in self.entries[number]:
            return
        self.entries[number][entry] = None
        for maker, place in self.sources[number][entry[0]]:
            self.results[maker][place, entry[1]] = None
            tasks = self.tasks[maker]
            made = START if tasks is None else int(tasks.makers[place, entry[1]])
            if made < START and self.sources[maker][-2 - made]:  # it returns what it reads, as it came
                self._enter(maker, (-2 - made, entry[1]))

    # --- products -------------------------------------------------------------------------------------

    def _products(self, number: int, block: BoundBlock) -> list[Product]:
        tasks = self.tasks[number]
        if tasks is None:
            if block.target < 0:
                return [self._join(number, block, c) for c in range(self._width(block))]
            parts = self._slice(block).pairs(self.ranks.slices[block.target])
            return [self._transfer(number, block, part) for part in parts]
        entries, results = tuple(self.entries[number]), tuple(self.results[number])
        shown = tuple([self._shown(block.rank, s.rank_class, s.name) for s in tasks.stream_table])
        return [Product(number, tasks, self.streams[number], shown, entries, results)]

    def _shown(self, rank: int, rank_class: int, name: str) -> Stream:
        return Stream(self.classes[rank, rank_class], name)

    def _transfer(self, number: int, block: BoundBlock, part: ClassExchange) -> Product:
        """Return what a value costs between two rank classes."""
        (value,), (a,), (b,) = [key.value for key in block.reads], part.sources, part.targets
        type_ = as_tensor(value.type, value.name)
        signature = Signature("Send", NO_ATTRIBUTES, (type_,), (type_,))
        group = among(part.group, part.family, self.cost_model.topology)
        asked = self.cost_model.communication_seconds(signature, group)
        seconds = task_seconds(value.name, asked)
        source, target = self._slice(block).mesh, self.ranks.slices[block.target].mesh
        here, there = Value(value.name, type_.on(source)), Value(value.name, type_.on(target))
        shown = (
            self._shown(block.rank, a, f"send {self.classes[block.target, b]}" if self.overlap else "all"),
            self._shown(block.target, b, f"receive {self.classes[block.rank, a]}" if self.overlap else "all"),
        )
        op = Op("Send", (here,), (there,), Attributes({"to": target}))
        return self._single(number, (a, b), seconds, op, shown)

    def _join(self, number: int, block: BoundBlock, rank_class: int) -> Product:
        """Return what it costs to put the microbatches of a value together."""
        signature, part = join_signature(block), self._slice(block)
        name = block.makes[0].value.name
        asked = self.cost_model.seconds(signature, part.members[rank_class][:1])
        parts = [Value(f"{name}.{i}", t.on(part.mesh)) for i, t in enumerate(signature.inputs)]
        whole = Value(name, signature.outputs[0].on(part.mesh))
        op = Op("Concat", tuple(parts), (whole,), signature.attributes)
        shown = tuple(
            [self._shown(block.rank, s.rank_class, s.name) for s in self._of_join(block, rank_class)]
        )
        launch = self._launch_of_join(block, rank_class)
        return self._single(number, (rank_class, rank_class), task_seconds(name, asked), op, shown, launch)

    def _single(
        self,
        number: int,
        classes: Place,
        seconds: float,
        op: Op,
        shown: tuple[Stream, ...],
        launch: float | None = None,
    ) -> Product:
        """Return the product of a single op that reads on one class and makes on another."""
        streams = self._occupied(self.flow.blocks[number], classes)
        entries = tuple([entry for entry in self.entries[number] if entry[1] == classes[0]])
        results = tuple([result for result in self.results[number] if result[1] == classes[1]])
        tasks = single_task(op, seconds, len(streams), classes, launch)
        return Product(number, tasks, streams, shown, entries, results)

    def _cells(self, sides: Sequence[tuple[Sequence[int], Sequence[Place], Sequence[Key]]]) -> Cells:
        """Return the cells of one side of all products: streams, then keys."""
        numbers: list[int] = []
        which: list[int] = []
        latest: dict[int, tuple[Value, int]] = {}
        for streams, places, keys in sides:
            numbers += streams
            which += [ONCE] * len(streams)
            for place, rank_class in places:
                key = keys[place]
                number = self._cell(key, rank_class)
                if key.which == LATEST:
                    latest[number] = (key.value, key.rank)
                numbers.append(number)
                which.append(key.which)
        sizes = np.array([len(streams) + len(places) for streams, places, _ in sides], np.int64)
        return Cells(starts(sizes), np.array(numbers, np.int64), np.array(which, np.int64), latest)

    def _cell(self, key: Key, rank_class: int) -> int:
        if key.which == ONCE:
            return self._register("value", address(key), rank_class)
        return self.batched.setdefault((address(key), rank_class), len(self.batched))


def _latest(flow: BlockLinks) -> list[Value]:
    """Return the values of which blocks read the latest."""
    return [key.value for block in flow.blocks for key in block.reads if key.which == LATEST]


def _columns(rows: Bools, own: Sequence[int], streams: Sequence[int]) -> Bools:
    """Return [rows, streams] of [rows, own streams]: False for a stream that is not among the own."""
    found = np.zeros((len(rows), len(streams)), np.bool_)
    both = [(i, own.index(register)) for i, register in enumerate(streams) if register in own]
    if both:
        here, there = zip(*both, strict=True)
        found[:, list(here)] = rows[:, list(there)]
    return found


def join_signature(block: BoundBlock) -> Signature:
    """Return the signature of the ``Concat`` of a block: of one part of its key per microbatch."""
    ((read,), (made,)) = block.reads, block.makes
    part, whole = (as_tensor(key.value.type, key.value.name) for key in (read, made))
    count = whole.shape[block.dim] // max(part.shape[block.dim], 1)
    return Signature("Concat", Attributes({"axis": block.dim}), (part,) * count, (whole,))
