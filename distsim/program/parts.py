"""The parts of a Program: what the stages run, whatever the schedule and wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module

from distsim.errors import IRError, ScheduleError
from distsim.ir import Function, Mesh, Value, substitute
from distsim.ops.parts import Shard
from distsim.program import passes
from distsim.program.block import FIRST_CALL, LAST_CALL, ActionBlocks, Block, StageBlocks, with_outputs
from distsim.program.links import Maker, Row, awaited, in_order, makers_of, verify_actions, verify_reads
from distsim.program.passes.overlap_pairs import interleave
from distsim.program.weight_versions import WeightVersions, weight_versions
from distsim.schedule import Kind
from distsim.schedule.action import HALVES

Shards = tuple[Shard, ...]
"""What ``MPIScatter`` does to a global value."""


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank runs, and where: ``mesh`` is its slice, with the axes dp and tp.

    The blocks lie on the pattern of the program: stages that do the same have the same Functions.
    ``updates`` are (round, block): by round, and in a round by stage, they are issued one after the other,
    and read what was made before.
    """

    mesh: Mesh
    forward: Block
    backward: Block
    updates: tuple[tuple[int, Block], ...]


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """A global input: its value in the function that was parallelised, its key, and its division.

    ``microbatched``: dimension ``dim`` is divided over microbatches as well. ``stages``: who holds it.
    ``made``: what makes it, without inputs, if it is a constant that the caller does not give.
    """

    source: Value
    key: Value
    shards: Shards
    microbatched: bool
    stages: tuple[int, ...]
    dim: int = 0
    made: Function | None = None


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """A global output: its key, its division, and the stage that makes it, or holds it if it is an input.

    ``microbatched``: there is one value per microbatch, which make up dimension ``dim``. ``copies`` are
    stages to which the new value of a parameter that they share is sent.
    """

    key: Value
    shards: Shards
    microbatched: bool
    stage: int
    copies: tuple[int, ...] = ()
    dim: int = 0


@dataclass(frozen=True, eq=False)
class Parts:
    """The blocks of a program and what passes between them, on whatever mesh and in whatever order.

    Verified when made: each key is made once, by one block or as an input, and whatever a block reads is
    there when the block runs, under any schedule. Raises :class:`IRError` that names the blocks, as ``B0@1``
    for the backward of stage 1, and, where blocks wait for each other, the cycle. ``like`` are parts that
    differ in sizes alone, and what stands for their keys: what was verified of them is so of these.
    ``held``: the bytes of buffers that hold gradients all step, by byte of the parameters of a rank; 0 where
    gradients take memory as they come. ``given``: what stands in the place of what a function makes of the
    blocks (:class:`distsim.schedule.action.Runs`), by its name.
    """

    name: str
    blocks: tuple[StageBlocks, ...]
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]
    given: Mapping[str, ActionBlocks] = field(default_factory=dict[str, ActionBlocks])
    overlap: Callable[[Function, Function], Function] = interleave
    like: tuple[Parts, Mapping[Value, Value]] | None = None
    held: float = 0.0

    @cached_property
    def halves(self) -> tuple[tuple[Block, Block], ...]:
        """The backward pass of each stage in two: what the stages before wait for, and the rest."""
        return tuple([(first, rest) for first, rest in self.made_by(HALVES.made_by)])

    def part(self, stage: int, kind: Kind) -> Block:
        """Return what an action of a stage runs; raises :class:`ScheduleError` if that is nothing."""
        each = self.made_by(kind.runs.made_by)[stage]
        if kind.place >= len(each):
            raise ScheduleError(
                f"{self.name}: no part of a program is what {kind.value} ({kind.phase}) runs; name what "
                "makes it in the line of the kind (schedule/action.py)"
            )
        return each[kind.place]

    def made_by(self, name: str) -> ActionBlocks:
        """Return the blocks that a function of ``distsim/program/passes`` makes of those of the stages.

        Raises :class:`IRError` for one that reads what is not there, or makes what is made elsewhere
        (:func:`verify_actions`).
        """
        found = self._made.get(name)
        if found is None:
            kinds = [kind for kind in Kind if kind.runs.made_by == name]
            found = self.given[name] if name in self.given else _function(name, kinds)(self.blocks)
            if self.like is None:
                for stage, (own, (_, whole, _)) in enumerate(zip(found, self.blocks, strict=True)):
                    rows = [Row(stage, k, b.inputs, b.outputs) for k, b in zip(kinds, own, strict=False)]
                    verify_actions(self.name, rows, whole.outputs, self.makers())
            if name != HALVES.made_by:
                found = tuple([self._made_first(stage, kinds, own) for stage, own in enumerate(found)])
            self._made[name] = found
        return found

    def _made_first(self, stage: int, kinds: Sequence[Kind], own: Sequence[Block]) -> tuple[Block, ...]:
        """Return the blocks of kinds without what they make again that another stage reads.

        Who made it first has sent it, and holds it for its own stage too.
        """
        found: list[Block] = []
        for kind, block in zip(kinds, own, strict=False):
            left = [
                key not in self._sent or not self._is_made_again(stage, kind, key) for key in block.outputs
            ]
            found.append(block if all(left) else with_outputs(block, left))
        return (*found, *own[len(found) :])

    def _is_made_again(self, stage: int, kind: Kind, key: Value) -> bool:
        """Whether what a kind makes has been made by one of its stage that it waits for."""
        first = self.makers()[key].phase
        return any(
            other is first or (other.runs == HALVES and key in self.part(stage, other).outputs)
            for other in awaited(kind)[1:]
        )

    @cached_property
    def _sent(self) -> frozenset[Value]:
        """The keys that a pass of another stage reads than makes them."""
        makers = self.makers()
        return frozenset(
            [
                key
                for stage, passes in enumerate(self.blocks)
                for block in passes[:2]
                for key in block.inputs
                if key in makers and makers[key].place >= 0 and makers[key].stage != stage
            ]
        )

    @cached_property
    def _made(self) -> dict[str, ActionBlocks]:
        """The blocks of kinds by what makes them: those that were cut, to begin with."""
        return {"": tuple([stage[:2] for stage in self.blocks])}

    @cached_property
    def early(self) -> Mapping[int, Block]:
        """By stage what the last call of a pass may go on with (:attr:`Block.place`)."""
        return self._placed(LAST_CALL)

    @cached_property
    def ahead(self) -> Mapping[int, Block]:
        """By stage what its first forward call makes besides (:attr:`Block.place`)."""
        return self._placed(FIRST_CALL)

    def begun(self, rank_of: Sequence[int], flush: bool) -> dict[int, list[int]]:
        """Return by stage the stages whose gathers run within its first forward call.

        A rank begins with its own of the first of its stages; those of each further one run beside the stage
        before it, in which its links are idle (Megatron-LM's ``param_sync_func`` of interleaved schedules,
        which starts those of the first two before anything is received).
        Without a flush a version of the weights is gathered by the stage itself. Stages are those of all
        copies of the model, one after the other, on these ranks.
        """
        of_rank: dict[tuple[int, int], list[int]] = {}
        for stage, rank in enumerate(rank_of):
            if self.blocks[stage % len(self.blocks)][0].outputs:
                of_rank.setdefault((stage // len(self.blocks), rank), []).append(stage)
        found: dict[int, list[int]] = {}
        for stages in of_rank.values():
            first = [stages[0], *stages[:-1]] if flush else stages
            for stage, at in zip(stages, first, strict=True):
                if stage % len(self.blocks) in self.ahead:
                    found.setdefault(at, []).append(stage)
        return found

    def _placed(self, place: str) -> Mapping[int, Block]:
        updates = enumerate([own for _, _, own in self.blocks])
        return {stage: block for stage, own in updates for _, block in own if block.place == place}

    @cached_property
    def read_later(self) -> frozenset[Value]:
        """The keys that something reads after the last call of a pass, besides the :attr:`early` blocks."""
        updates = [block for _, _, own in self.blocks for _, block in own]
        late = [block for block in updates if block.place != LAST_CALL]
        return frozenset([*[key for block in late for key in block.inputs], *[o.key for o in self.outputs]])

    @cached_property
    def versions(self) -> WeightVersions:
        """What stages do that update their weights without a flush; raises what that function raises."""
        keys = {given.key for given in self.inputs}
        return weight_versions(self.name, self.blocks, self.makers(), keys)

    def __post_init__(self) -> None:
        if self.like is not None:
            if self._is_like(*self.like):
                return
            object.__setattr__(self, "like", None)
        rows, makers = self._rows(), self.makers()
        verify_reads(self.name, rows, {given.key: given.stages for given in self.inputs}, makers)
        for given in self.inputs:
            self._verify_stages(given.key, given.stages)
        for output in self.outputs:
            self._verify_stages(output.key, (output.stage, *output.copies))
            self._verify_output(output, makers.get(output.key))

    def _is_like(self, other: Parts, values: Mapping[Value, Value]) -> bool:
        """Whether blocks read and make what stands for what others do, and ends are alike."""
        sizes = len(self.blocks), len(self.inputs), len(self.outputs), len(self.given), self.overlap
        if sizes != (len(other.blocks), len(other.inputs), len(other.outputs), 0, other.overlap):
            return False
        for own, stage in zip(self.blocks, other.blocks, strict=True):
            if [number for number, _ in own[2]] != [number for number, _ in stage[2]]:
                return False
            if not all(_are_alike(a, b, values) for a, b in zip(_each(own), _each(stage), strict=True)):
                return False
        return all(
            (a.key, a.stages, a.microbatched) == (values.get(b.key, b.key), b.stages, b.microbatched)
            for a, b in zip(self.inputs, other.inputs, strict=True)
        ) and all(
            (a.key, a.stage, a.microbatched, a.copies)
            == (values.get(b.key, b.key), b.stage, b.microbatched, b.copies)
            for a, b in zip(self.outputs, other.outputs, strict=True)
        )

    def _verify_stages(self, key: Value, stages: Sequence[int]) -> None:
        foreign = [stage for stage in stages if not 0 <= stage < len(self.blocks)]
        if foreign:
            raise IRError(
                f"{self.name}: {key.name!r} is on stage {foreign[0]}; choose one of 0..{len(self.blocks) - 1}"
            )

    def _verify_output(self, output: ProgramOutput, maker: Maker | None) -> None:
        if maker is None or maker.stage < 0:
            raise IRError(
                f"{self.name}: no block makes the output {output.key.name!r}, and no stage holds it as an "
                "input; make it in a block"
            )
        if output.microbatched and maker.once:
            raise IRError(
                f"{self.name}: the output {output.key.name!r} is to be put together over microbatches, and "
                "is made once per step; make it an output that is not microbatched"
            )

    def are_of(self, stages: Sequence[Stage], inputs: object, outputs: object) -> bool:
        """Whether these are the parts of a program of these stages."""
        return (
            self.inputs is inputs
            and self.outputs is outputs
            and len(stages) == len(self.blocks)
            and all(
                stage.forward is forward and stage.backward is backward and stage.updates is updates
                for stage, (forward, backward, updates) in zip(stages, self.blocks, strict=True)
            )
        )

    def makers(self) -> dict[Value, Maker]:
        """Return who makes each key."""
        return self._makers

    @cached_property
    def _makers(self) -> dict[Value, Maker]:
        if self.like is not None:
            other, values = self.like
            return {values.get(key, key): maker for key, maker in other.makers().items()}
        given: dict[Value, tuple[tuple[int, ...], bool]] = {}
        for item in self.inputs:
            if item.key in given:
                raise IRError(f"{self.name}: {item.key.name!r} is an input twice; list it once")
            given[item.key] = item.stages, not item.microbatched
        return makers_of(self.name, self._rows(), given)

    def _rows(self) -> list[Row]:
        rows: list[Row] = []
        for stage, (forward, backward, updates) in enumerate(self.blocks):
            for phase, block in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward)):
                rows.append(Row(stage, phase, block.inputs, block.outputs, block.accumulated))
            rows += [Row(stage, None, block.inputs, block.outputs, (), r) for r, block in updates]
        return in_order(rows)


def _function(name: str, kinds: Sequence[Kind]) -> Callable[[Sequence[StageBlocks]], ActionBlocks]:
    """Return a function of ``distsim/program/passes``, by module and name, that makes what kinds run.

    Raises :class:`ScheduleError` where there is none.
    """
    short, _, function = name.partition(".")
    module = f"{passes.__name__}.{short}"
    try:
        found = getattr(import_module(module), function, None)
        lacks = "" if found else f"which has no function {function!r}"
    except ModuleNotFoundError as error:
        if error.name != module:  # something that it imports
            raise
        found, lacks = None, f"of which there is no file {short}.py in distsim/program/passes"
    if found is None:
        lines = " and ".join([f"{kind.value} ({kind.phase})" for kind in kinds])
        raise ScheduleError(
            f"what {lines} runs is made by {name!r} of {module}, {lacks}; name in its line what makes it, as "
            f"Runs({HALVES.made_by!r}) does (schedule/action.py)"
        )
    return found


def _each(stage: StageBlocks) -> list[Block]:
    """Return the blocks of a stage."""
    return [*stage[:2], *[block for _, block in stage[2]]]


def _are_alike(one: Block, two: Block, values: Mapping[Value, Value]) -> bool:
    """Whether a block is another one but for sizes, with what stands for its values."""
    if one is two:
        return values.keys().isdisjoint(one.inputs) and values.keys().isdisjoint(one.outputs)
    return (
        one.inputs == substitute(two.inputs, values)
        and one.outputs == substitute(two.outputs, values)
        and one.accumulated == two.accumulated
        and (one.accumulating is None) == (two.accumulating is None)
        and one.place == two.place
        and (one.names, one.accumulating_names) == (two.names, two.accumulating_names)
    )
