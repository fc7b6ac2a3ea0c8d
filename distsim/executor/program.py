"""Program: the stages of a pipeline, each held once, and the order in which they run.

A stage is up to three kinds of blocks: ``forward`` and ``backward``, run once per microbatch, and
``updates``, run once per step. Values pass between blocks under *keys*: the values of the joint
function from which the stages were cut. What is in flight is what a block reads of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distsim.errors import IRError, ScheduleError
from distsim.executor.links import Maker, Row, in_order, makers_of, verify_reads
from distsim.executor.written import WrittenOut
from distsim.ir import Function, Mesh, Value
from distsim.ops.communication import Shard
from distsim.schedule import Kind, Schedule

Shards = tuple[Shard, ...]
"""What ``MPIScatter`` does to a global value."""


@dataclass(frozen=True)
class Block:
    """A Function of one stage and the keys of its inputs and outputs.

    ``accumulated`` are the keys whose values are summed over microbatches. ``accumulating`` is the
    variant for every microbatch but the first: it takes the sums so far as further inputs, after
    ``inputs``, and returns them, in the places of the accumulated outputs, with its part added.

    Stages that do the same share their Functions, in which ops have no names (h3, say, is a layer of one
    stage only): ``names`` are those of the ops of ``function`` here, ``accumulating_names`` likewise.

    Raises :class:`IRError` when keys and functions do not fit.
    """

    function: Function
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    accumulated: tuple[Value, ...] = ()
    accumulating: Function | None = None
    names: tuple[str, ...] = ()
    accumulating_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        function, more = self.function, self.accumulating
        reads, makes, sums = len(self.inputs), len(self.outputs), len(self.accumulated)
        sizes = [(function, reads)] if more is None else [(function, reads), (more, reads + sums)]
        for each, given in sizes:
            if (len(each.inputs), len(each.outputs)) != (given, makes):
                raise IRError(
                    f"{each.name} has {len(each.inputs)} inputs and {len(each.outputs)} outputs, its block "
                    f"gives it {given} and has {makes} keys for what it makes; give one key for each"
                )
        if sums and more is None:
            raise IRError(
                f"{function.name}: {self.accumulated[0].name!r} is summed over microbatches, and there is no "
                "function that adds to the sum so far; give the block an accumulating one"
            )
        made = set(self.outputs)
        for key in self.accumulated:
            if key not in made:
                raise IRError(
                    f"{function.name}: the sum {key.name!r} is none of the block's outputs; list it there"
                )


StageBlocks = tuple[Block, Block, tuple[tuple[int, Block], ...]]
"""The blocks of a stage, wherever it runs: forward, backward, updates by round."""


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
    for the backward of stage 1, and, where blocks wait for each other, the cycle.
    """

    name: str
    blocks: tuple[StageBlocks, ...]
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]

    def __post_init__(self) -> None:
        rows, makers = self._rows(), self.makers()
        verify_reads(self.name, rows, {given.key: given.stages for given in self.inputs}, makers)
        for given in self.inputs:
            self._verify_stages(given.key, given.stages)
        for output in self.outputs:
            self._verify_stages(output.key, (output.stage, *output.copies))
            self._verify_output(output, makers.get(output.key))

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


@dataclass(frozen=True)
class Program:
    """A scheduled, parallelised training step: the thing that is simulated.

    ``mesh`` has the axes pp, dp and tp; stage i runs on its slice pp=i. ``pattern``, with the axes dp and
    tp, is the mesh on which the types of all blocks are: it stands for the slice of every stage. Its devices
    are numbered from 0 and lie nowhere; replicas do the same, so two of them stand for any number, unless
    local shapes depend on how many there are. :meth:`to_function` writes the program out as one Function.
    ``notes`` say what a user should know of how it was placed. ``saving_all`` makes the program that
    recomputes nothing, with which memory is compared when it is asked for; None for one that recomputes
    nothing itself.

    Verified when made, so that whatever reads a program finds one that can run: raises
    :class:`ScheduleError` for a schedule of another number of stages, or whose ranks wait for each other, and
    :class:`IRError` for stages on other ranks than their own and for blocks that do not fit together
    (:class:`Parts`, which programs of the same blocks share).
    """

    name: str
    mesh: Mesh
    pattern: Mesh
    stages: tuple[Stage, ...]
    schedule: Schedule
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]
    notes: tuple[str, ...] = ()
    saving_all: Callable[[], Program] | None = field(default=None, compare=False, repr=False)
    parts: Parts | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.schedule.num_stages != len(self.stages):
            raise ScheduleError(
                f"{self.name}: the schedule {self.schedule.name} is for {self.schedule.num_stages} stages, "
                f"the program has {len(self.stages)}; make them agree"
            )
        self._verify_ranks()
        object.__setattr__(self, "parts", self._own_parts())
        self.schedule.check()

    def makers(self) -> dict[Value, Maker]:
        """Return who makes each key."""
        return self._own_parts().makers()

    def _own_parts(self) -> Parts:
        """Return the parts: those given if they are of these stages, as those of the same cut are."""
        if self.parts is not None and self.parts.are_of(self.stages, self.inputs, self.outputs):
            return self.parts
        blocks = tuple([(stage.forward, stage.backward, stage.updates) for stage in self.stages])
        return Parts(self.name, blocks, self.inputs, self.outputs)

    def _verify_ranks(self) -> None:
        """Check that each stage runs on its own slice of the mesh."""
        slices = self.mesh.slices("pp")
        if len(slices) != len(self.stages):
            raise IRError(
                f"{self.name}: {len(self.stages)} stages on a mesh of pp={len(slices)}; make them agree"
            )
        for index, (stage, own) in enumerate(zip(self.stages, slices, strict=True)):
            if stage.mesh is own or stage.mesh == own:
                continue
            others = [s for s, other in enumerate(self.stages) if s != index and _meet(stage, other)]
            shared = f", which stage {others[0]} runs on as well; a rank runs one stage" if others else ""
            raise IRError(
                f"{self.name}: stage {index} runs on {stage.mesh}{shared}; give it the slice pp={index} of "
                f"the program's mesh, {own}"
            )

    def to_function(self, steady: bool = False) -> Function:
        """Return the whole step as one flat Function of Calls, Sends and collectives, written out when read.

        It starts from the global inputs on the device on which their types say they are and brings
        them to their ranks; ``steady`` leaves that part out (as
        :func:`distsim.transforms.steady_state_transform` does): every rank holds its inputs,
        as far as it reads or returns them. Its outputs are those of the program in order, then the copies.
        """
        return WrittenOut.of(self, steady)


def _meet(one: Stage, other: Stage) -> bool:
    return any(device in other.mesh for device in one.mesh.devices)
