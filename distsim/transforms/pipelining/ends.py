"""The inputs and outputs of a function as it is cut: how each is divided, and which stages have it."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.errors import PlanError
from distsim.ir import Function, Value
from distsim.program.parts import ProgramInput, ProgramOutput
from distsim.transforms.pipelining.cut_blocks import CutBlocks, CutOutput
from distsim.transforms.sharding.layout import Divisions, Placement
from distsim.transforms.sharding.shard import Sharded


class Ends:
    """The inputs, which are ``keys``, and outputs of a local function.

    What ends are in ``first``, of a function that differs in sizes alone, those are here that are equal.
    """

    def __init__(self, local: Sharded, keys: Sequence[Value], first: Ends | None = None) -> None:
        self.keys, self.returned = tuple(keys), local.function.outputs
        self.sources, self.inputs, self.outputs = local.sources, local.inputs, local.outputs
        given: list[Function | None] = [None] * (len(keys) - len(local.made))
        self.made = [*given, *local.made]
        self._divided = Divisions()
        batches = [place.batch for place in self.outputs]
        self.in_parts = [n for n, batch in enumerate(batches) if batch.sharded and batch.pieces]
        self.same_inputs = [False] * len(self.keys)
        self.same_outputs = [False] * len(self.returned)
        if first is not None:
            alike = _Alike()
            owned = zip(self.keys, first.keys, self.sources, first.sources, strict=True)
            places = zip(self.inputs, first.inputs, strict=True)
            self.same_inputs = [
                key is other and source is own and alike.places(a, b)
                for (key, other, source, own), (a, b) in zip(owned, places, strict=True)
            ]
            values = zip(self.returned, first.returned, strict=True)
            places = zip(self.outputs, first.outputs, strict=True)
            self.same_outputs = [
                key is other and alike.places(a, b)
                for (key, other), (a, b) in zip(values, places, strict=True)
            ]

    def cut_inputs(
        self, blocks: CutBlocks, like: Sequence[ProgramInput] | None = None
    ) -> tuple[ProgramInput, ...]:
        """Return the inputs of a cut; ``like`` are those of the same one of ``first``."""
        held = zip(blocks.inputs, blocks.holders, strict=True)
        if like is None:
            return tuple([self._input(n, *each) for n, each in enumerate(held)])
        return tuple(
            [
                known if same else self._input(n, *each)
                for n, (each, same, known) in enumerate(zip(held, self.same_inputs, like, strict=True))
            ]
        )

    def _input(self, number: int, key: Value, stages: tuple[int, ...]) -> ProgramInput:
        source, place, typed = self.sources[number], self.inputs[number], self.keys[number]
        if source.role is not typed.role:
            source = Value(source.name, source.type, typed.role)
        shards, batch = self._divided.of(place, typed), place.batch
        return ProgramInput(source, key, shards, batch.sharded, stages, max(batch.dim, 0), self.made[number])

    def cut_outputs(
        self, blocks: CutBlocks, like: Sequence[ProgramOutput] | None = None
    ) -> tuple[ProgramOutput, ...]:
        """Return the same of outputs."""
        made = zip(blocks.outputs, blocks.places, strict=True)
        if like is None:
            return tuple([self._output(n, *each) for n, each in enumerate(made)])
        return tuple(
            [
                known if same else self._output(n, *each)
                for n, (each, same, known) in enumerate(zip(made, self.same_outputs, like, strict=True))
            ]
        )

    def _output(self, number: int, key: Value, made: CutOutput) -> ProgramOutput:
        place = self.outputs[number]
        microbatched, dim = place.batch.sharded and not made.once, max(place.batch.dim, 0)
        shards = self._divided.of(place, self.returned[number])
        return ProgramOutput(key, shards, microbatched, made.stage, made.copies, dim)

    def check(self, blocks: CutBlocks, microbatches: int) -> None:
        """Raise :class:`PlanError` for an output that microbatches do not make up one after the other."""
        for number in self.in_parts if microbatches > 1 else ():
            if not blocks.places[number].once:
                raise PlanError(
                    f"output {blocks.outputs[number].name!r} has the batch in parts of dimension "
                    f"{self.outputs[number].batch.dim}, which {microbatches} microbatches do not make one "
                    "after the other; use microbatches=1, or return it before its dimensions are merged"
                )


class _Alike:
    """Whether values of a shape are divided alike; of each pair of placements looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}

    def places(self, one: Placement, two: Placement) -> bool:
        """Whether two placements divide alike what is not divided along the batch."""
        found = self._known.get((id(one), id(two)))
        if found is None:
            found = self._known[id(one), id(two)] = (
                one.states == two.states
                and one.flat == two.flat
                and one.axes[1:] == two.axes[1:]
                and not one.batch.sharded
            )
        return found
