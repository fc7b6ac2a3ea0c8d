"""Wiring of a Program: which times each call of a block and each send reads and writes.

A value that a block makes and another one reads has a *cell*, one time per microbatch, unless the reader
waits anyway for a stream that is never free before the value is there. What remains is little: what
crosses stages, and sums that the step's last part reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.ir import NO_ATTRIBUTES, Value
from distsim.ir.type import as_tensor
from distsim.ops import Signature
from distsim.program.program import Program
from distsim.simulate.maxplus.registers import Wiring
from distsim.simulate.tasks.block_matrix import START, BlockTasks, Bools, StageRanks, Summary
from distsim.simulate.tasks.lower import usable
from distsim.simulate.tasks.templates import Floats, Ints

Cell = tuple[object, ...]
"""The name of a time: a stream, a channel, a sum or a value on a rank class of a stage."""

Source = Callable[[int, Value, int], int]
"""(stage, key, rank class) -> cell."""


Result = tuple[int, int]
"""(output of a block, rank class)."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """One send of a value to another stage, between two rank classes, and its cells."""

    key: Value
    stages: tuple[int, int]
    classes: tuple[int, int]
    seconds: float
    source: int
    channels: tuple[int, int]
    target: int


@dataclass(eq=False)
class Cells:
    """Numbers of cells: registers first, then those with a time per microbatch (as ~number until then)."""

    registers: dict[Cell, int] = field(default_factory=dict[Cell, int])
    batched: dict[Cell, int] = field(default_factory=dict[Cell, int])

    def register(self, *cell: object) -> int:
        """Return the number of a single time."""
        return self.registers.setdefault(cell, len(self.registers))

    def value(self, *cell: object) -> int:
        """Return the complement of the number of a time per microbatch."""
        return ~self.batched.setdefault(cell, len(self.batched))

    def final(self, numbers: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return numbers with those per microbatch after the registers; -1 stays (``NOTHING``)."""
        count = len(self.registers)
        return np.array(
            [-1 if n == NOTHING else n if n >= 0 else count + ~n for n in numbers], np.int64
        ).reshape(len(numbers))


NOTHING = -(2**62)
"""No cell: what is there from the start."""


class Wirer:
    """Collects the cells of a program, block by block; see :func:`wire`."""

    def __init__(
        self,
        program: Program,
        ranks: Sequence[StageRanks],
        tasks: Sequence[Sequence[BlockTasks]],
        cost_model: CostModel,
        overlap: bool,
    ) -> None:
        self.program, self.ranks, self.cost_model, self.overlap = program, ranks, cost_model, overlap
        self.tasks = tasks  # [2 * stage + phase][variant]
        self.blocks = [b for stage in program.stages for b in (stage.forward, stage.backward)]
        self.cells = Cells()
        self.made: dict[Value, tuple[int, int]] = {}  # key -> (block, output)
        self.sums: dict[Value, tuple[int, int]] = {}
        for number, block in enumerate(self.blocks):
            sums = set(block.accumulated)
            for index, key in enumerate(block.outputs):
                (self.sums if key in sums else self.made)[key] = (number, index)
        self.readers = self._readers()
        self.streams = [self._streams(number) for number in range(len(self.blocks))]
        self.ports: list[list[dict[int, int]]] = [[{}, {}] for _ in self.blocks]
        self.exports: list[dict[int, Result]] = [{} for _ in self.blocks]
        self.closing: list[dict[int, Result]] = [{} for _ in self.blocks]
        self.transfers: list[list[Transfer]] = [[] for _ in self.blocks]
        self._makers: dict[int, Ints] = {}
        self._settled: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        for number, block in enumerate(self.blocks):
            if block.outputs:  # the others are not run: they wait for nothing
                self._settle(number)
        for number in range(len(self.blocks)):
            self._send(number)

    def _readers(self) -> dict[Value, tuple[int, ...]]:
        found: dict[Value, dict[int, None]] = {}
        for number, block in enumerate(self.blocks):
            for key in block.inputs:
                found.setdefault(key, {})[number // 2] = None
        return {key: tuple(stages) for key, stages in found.items()}

    def _streams(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the registers of the streams of both variants of a block."""
        first, more = (
            tuple([self.cells.register("stream", number // 2, s.rank_class, s.name) for s in t.stream_table])
            for t in self.tasks[number]
        )
        return first, more

    # --- where a value comes from ---------------------------------------------------------------------

    def source(self, stage: int, key: Value, rank_class: int) -> int:
        """Return the cell that tells when a value is on a stage, NOTHING if it is there from the start."""
        if key in self.sums:
            number, index = self.sums[key]
            cell = self.cells.register("sum", stage, key, rank_class)
            self.exports[number][cell] = (index, rank_class)
            return cell
        if key not in self.made:
            return NOTHING
        number, index = self.made[key]
        if number // 2 == stage:
            made = int(self.tasks[number][1].makers[index, rank_class])
            if made < START:  # the block returns one of its inputs
                return self.source(stage, self.blocks[number].inputs[-2 - made], rank_class)
            if made == START:
                return NOTHING
            cell = self.cells.value("value", stage, key, rank_class)
            self.exports[number][cell] = (index, rank_class)
            return cell
        return self.cells.value("value", stage, key, rank_class)

    def _settle(self, number: int) -> None:
        """Find the ports that may delay a block: those that no stream covers.

        Whether a sum is covered depends on the block itself: first none is a port, then those that turn
        out not to be covered are, until that holds.
        """
        key = self._pattern(number)
        found = self._settled.get(key)
        if found is not None:
            self._take(number, found)
            return
        found = self._settled[key] = [(), ()]
        grown = True
        while grown:
            grown = False
            for variant in range(2):
                uncovered = self._uncovered(number, variant)
                if not set(uncovered) <= set(found[variant]):
                    found[variant] = tuple(sorted({*found[variant], *uncovered}))
                    grown = True
            self._take(number, found)

    def _take(self, number: int, uncovered: Sequence[Sequence[int]]) -> None:
        """Give the uncovered ports of both variants their cells."""
        for variant, tasks in enumerate(self.tasks[number]):
            for port in uncovered[variant]:
                place, rank_class = tasks.ports[port].tolist()
                cell = self.source(number // 2, self.key_of(number, place), rank_class)
                if cell != NOTHING:
                    self.ports[number][variant][port] = cell

    def _pattern(self, number: int) -> tuple[object, ...]:
        """Return what the uncovered ports of a block follow from: equal for stages that are alike."""
        makers = self._makers_of(number)
        own = makers[:, 0] // 2 == number // 2
        places = np.where(own, makers[:, 0] % 2, np.where(makers[:, 0] < 0, -1, -2))
        first = number - number % 2
        inputs = self._makers_of(first)[:, 0] >= 0
        place = {key: i for i, key in enumerate(self.blocks[first].inputs)}
        shared = tuple([place.get(key, -1) for key in self.blocks[number].inputs]) if number % 2 else ()
        tasks = [id(own) for pair in self.tasks[first : first + 2] for own in pair]
        runs = bool(self.blocks[first].outputs)
        return (number % 2, runs, *tasks, places.tobytes(), makers[:, 1].tobytes(), inputs.tobytes(), shared)

    def _uncovered(self, number: int, variant: int) -> list[int]:
        """Return the ports for which some task waits on streams that may all be free before.

        A stream that is never free before a value is there makes waiting for the value needless.
        """
        tasks, streams = self.tasks[number][variant], self.streams[number][variant]
        port, occupied = tasks.readers
        if not len(port):
            return []
        place, rank_class = tasks.ports[port].T
        makers = self._makers_of(number)[place]
        covered = np.zeros(len(port), np.bool_)
        for maker in (number - number % 2, number):
            rows = np.flatnonzero(makers[:, 0] == maker)
            if len(rows):
                hidden = np.ones((len(rows), len(streams)), np.bool_)
                for other in range(2):
                    hidden &= self._cover(maker, other, streams)[makers[rows, 1], rank_class[rows]]
                covered[rows] = (hidden & occupied[rows]).any(axis=1)
        if number % 2:  # a backward block: the forward block may have waited for the same arrival
            for row in np.flatnonzero(~covered & (makers[:, 0] >= 0)).tolist():
                key = self.key_of(number, int(place[row]))
                hidden = self._cover_of_arrival(number - 1, key, int(rank_class[row]), streams)
                covered[row] = (hidden & occupied[row]).any()
        return sorted(set(port[~covered].tolist()))

    def _makers_of(self, number: int) -> Ints:
        """[inputs, 2]: the block and the output that make each input of a block's function, -1 for none."""
        found = self._makers.get(number)
        if found is None:
            block = self.blocks[number]
            none = (-1, -1)
            pairs = [self.made.get(key) or self.sums.get(key, none) for key in block.inputs]
            pairs += [self.sums[key] for key in block.accumulated]
            found = self._makers[number] = np.array(pairs, np.int64).reshape(len(pairs), 2)
        return found

    def _summary(self, number: int, variant: int) -> Summary:
        return self.tasks[number][variant].summary(sorted(self.ports[number][variant]))

    def _cover(self, number: int, variant: int, streams: Sequence[int]) -> Bools:
        """[outputs, classes, streams]: is a stream never free before a result of a block is there?"""
        summary = self._summary(number, variant)
        makers = self.tasks[number][variant].makers
        found = np.zeros((*makers.shape, len(streams)), np.bool_)
        own = self.streams[number][variant]
        both = [(i, own.index(register)) for i, register in enumerate(streams) if register in own]
        made = makers >= 0
        if both:
            here, there = zip(*both, strict=True)
            covering = summary.covering(makers[made])
            rows = np.zeros((len(covering), len(streams)), np.bool_)
            rows[:, list(here)] = covering[:, list(there)]
            found[made] = rows
        found[makers == START] = True
        return found

    def _cover_of_arrival(self, number: int, key: Value, rank_class: int, streams: Sequence[int]) -> Bools:
        """Return which streams are never free before something has arrived for which a block waited."""
        found = np.ones(len(streams), np.bool_)
        for variant, tasks in enumerate(self.tasks[number]):
            if key not in self.blocks[number].inputs:
                return np.zeros(len(streams), np.bool_)
            entry = (self.blocks[number].inputs.index(key), rank_class)
            port = next(iter(np.flatnonzero((tasks.ports == entry).all(axis=1)).tolist()), -1)
            if port not in self.ports[number][variant]:
                return np.zeros(len(streams), np.bool_)
            own, waiting = self.streams[number][variant], self._summary(number, variant).waiting(port)
            found &= [register in own and bool(waiting[own.index(register)]) for register in streams]
        return found

    def key_of(self, number: int, place: int) -> Value:
        """Return the key of an input of a block's function: after its inputs come the sums so far."""
        block = self.blocks[number]
        count = len(block.inputs)
        return block.inputs[place] if place < count else block.accumulated[place - count]

    # --- sends ----------------------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        """Add the sends that follow a block: its results that other stages read per microbatch."""
        for key in self.blocks[number].outputs:
            for target in self.readers.get(key, ()):
                if target != number // 2 and key not in self.sums:
                    self.transfers[number] += self.transfer(key, number // 2, target, self.cells.value)

    def transfer(
        self, key: Value, stage: int, target: int, cell: Callable[..., int], source: Source | None = None
    ) -> list[Transfer]:
        """Return the transfers of a value from a stage to another one, into cells made by ``cell``."""
        found: list[Transfer] = []
        type_ = as_tensor(key.type, key.name)
        signature = Signature("Send", NO_ATTRIBUTES, (type_,), (type_,))
        for part in self.ranks[stage].pairs(self.ranks[target]):
            (a,), (b,) = part.sources, part.targets
            if self.overlap:
                channel = self.cells.register("channel", stage, a, target, b)
                channels = (channel, channel)
            else:
                channels = (
                    self.cells.register("stream", stage, a, "all"),
                    self.cells.register("stream", target, b, "all"),
                )
            found.append(
                Transfer(
                    key,
                    (stage, target),
                    (a, b),
                    usable(key.name, self.cost_model.communication_seconds(signature, part.group)),
                    (source or self.source)(stage, key, a),
                    channels,
                    cell("value", target, key, b),
                )
            )
        return found

    # --- arrays ---------------------------------------------------------------------------------------

    def clocks_of(self, stage: int, rank_class: int) -> list[int]:
        """Return the registers that tell when a rank class of a stage is done: of its streams and sends."""
        place = (stage, rank_class)
        return [
            number
            for cell, number in self.cells.registers.items()
            if (cell[0] == "stream" and cell[1:3] == place)
            or (cell[0] == "channel" and place in (cell[1:3], cell[3:5]))
        ]

    def results(self) -> list[tuple[Ints, Ints]]:
        """Return the (output, rank class) of each block that have a cell: after a call, after the last."""
        found: list[tuple[Ints, Ints]] = []
        for exports, closing in zip(self.exports, self.closing, strict=True):
            both = [list(exports.values()), list((exports | closing).values())]
            inner, last = (np.array(own, np.int64).reshape(len(own), 2) for own in both)
            found.append((inner, last))
        return found

    def arrays(self) -> tuple[Wiring, tuple[Transfer, ...]]:
        """Return what the kernel runs. Call it last: cells that are asked for later are not in it."""
        for number in range(
            len(self.blocks)
        ):  # what a result that is an input needs, before anything is laid out
            for variant in range(2):
                self._passed(number, variant)
        ins: list[list[int]] = []
        outs: list[list[int]] = []
        matrices: list[Floats] = []
        for number in range(len(self.blocks)):
            for variant in range(4):
                entries, results, matrix = self._call(number, variant % 2, closing=variant > 1)
                ins.append(entries)
                outs.append(results)
                matrices.append(matrix.reshape(-1))
        sends = [transfer for own in self.transfers for transfer in own]
        final = self.cells.final
        wiring = Wiring(
            len(self.cells.registers),
            np.cumsum([0, *map(len, matrices)]),
            np.concatenate(matrices),
            np.cumsum([0, *map(len, ins)]),
            final([cell for cells in ins for cell in cells]),
            np.cumsum([0, *map(len, outs)]),
            final([cell for cells in outs for cell in cells]),
            np.cumsum([0, *map(len, self.transfers)]),
            final([transfer.source for transfer in sends]),
            final([transfer.channels[0] for transfer in sends]),
            final([transfer.channels[1] for transfer in sends]),
            final([transfer.target for transfer in sends]),
            np.array([transfer.seconds for transfer in sends], np.float64),
        )
        return wiring, tuple(sends)

    def _call(self, number: int, variant: int, closing: bool) -> tuple[list[int], list[int], Floats]:
        """Return the cells that a call reads, those that it writes, and its matrix [written, read]."""
        block, tasks = self.blocks[number], self.tasks[number][variant]
        if not block.outputs:  # nothing that anyone reads: it is not run
            return [], [], np.empty((0, 0))
        summary, ports = self._summary(number, variant), self.ports[number][variant]
        entries = [*self.streams[number][variant], *(ports[port] for port in summary.ports)]
        results = dict(self.exports[number])
        if closing:
            results |= self.closing[number]
        rows: list[Floats] = list(summary.clocks)
        nothing = np.full(len(entries), -np.inf)
        for index, rank_class in results.values():
            task = int(tasks.makers[index, rank_class])
            rows.append(nothing if task < 0 else summary.end(task))
        matrix = np.array(rows).reshape(len(rows), len(entries))
        for row, cell in self._passed(number, variant, list(results.values())):
            column = np.full((len(rows), 1), -np.inf)
            column[len(summary.clocks) + row] = 0.0
            matrix, entries = np.hstack([matrix, column]), [*entries, cell]
        return entries, [*self.streams[number][variant], *results], matrix

    def _passed(
        self, number: int, variant: int, results: Sequence[Result] | None = None
    ) -> list[tuple[int, int]]:
        """Return (place, cell) of the results that are an input of the block as it came."""
        makers, found = self.tasks[number][variant].makers, list[tuple[int, int]]()
        wanted = [*self.exports[number].values(), *self.closing[number].values()]
        for place, (index, rank_class) in enumerate(wanted if results is None else results):
            made = int(makers[index, rank_class])
            if made < START:
                cell = self.source(number // 2, self.key_of(number, -2 - made), rank_class)
                if cell != NOTHING:
                    found.append((place, cell))
        return found
