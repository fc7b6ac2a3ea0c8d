"""Program: the stages of a pipeline, each held once, and the order in which they run.

A stage is up to three kinds of blocks: ``forward`` and ``backward``, run once per microbatch, and
``updates``, run once per step. Values pass between blocks under *keys*: the values of the joint
function from which the stages were cut. What is in flight is what a block reads of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from distsim.errors import IRError, ScheduleError
from distsim.ir import Function, Mesh, Tensor, Value, callees
from distsim.program.bind import table_of
from distsim.program.links import Maker
from distsim.program.parts import Parts, ProgramInput, ProgramOutput, Stage
from distsim.program.table import Table
from distsim.program.write_out import WrittenOut
from distsim.schedule import FLUSH, Schedule


@dataclass(frozen=True)
class Program:
    """A scheduled, parallelised training step: the thing that is simulated.

    ``mesh`` has the axes pp, dp and tp; stage s runs on its slice ``pp=schedule.rank_of[s]``. ``pattern``,
    with the axes dp and tp, is the mesh on which the types of all blocks are: it stands for the slice of
    every rank. Its devices are numbered from 0 and lie nowhere; replicas do the same, so two of them stand
    for any number, unless local shapes depend on how many there are. :meth:`to_function` writes the program
    out as one Function.
    ``notes`` say what a user should know of how it was placed. ``saving_all`` makes the program that
    recomputes nothing, with which memory is compared when it is asked for; None for one that recomputes
    nothing itself.

    Verified when made, so that whatever reads a program finds one that can run: raises
    :class:`ScheduleError` for a schedule of another number of stages, whose ranks wait for each other, or
    without a flush where stages cannot update their weights alone (:func:`weight_versions`), and
    :class:`IRError` for stages on other ranks than their own and for blocks that do not fit together
    (:class:`Parts`, which programs of the same blocks share).

    >>> from distsim.compose import parallelize
    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> from distsim.plan import Plan
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(mlp(layers=4, width=16, batch=8), SGD())
    >>> program = parallelize(step, Plan(pp=2, microbatches=2), load_cluster("dgx-a100"))
    >>> len(program.stages), program.table().num_ranks
    (2, 2)
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
    shared_parts: Parts | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.schedule.chain != len(self.stages):
            raise ScheduleError(
                f"{self.name}: the schedule {self.schedule.name} is for {self.schedule.chain} stages, "
                f"the program has {len(self.stages)}; make them agree"
            )
        self.schedule.check()
        self._verify_ranks()
        if self.shared_parts is not self.parts:
            self._verify_pattern()
        if self.schedule.weights != FLUSH:
            _ = self.parts.versions
        object.__setattr__(self, "shared_parts", self.parts)

    def table(self) -> Table:
        """Return the table of calls: what the step is, row by row."""
        return self._table

    @cached_property
    def _table(self) -> Table:
        return table_of(self.parts, self.schedule)

    def axis_size(self, axis: str) -> int:
        """Return how many ranks an axis has: dp, tp or pp.

        Types of blocks do not tell: they lie on ``pattern``, on which two replicas stand for any number.
        """
        return self.mesh.axis_size(axis)

    def makers(self) -> dict[Value, Maker]:
        """Return who makes each key."""
        return self.parts.makers()

    @cached_property
    def parts(self) -> Parts:
        """What the stages run: ``shared_parts`` if they are of these stages, as those of the same cut are."""
        if self.shared_parts is not None and self.shared_parts.are_of(self.stages, self.inputs, self.outputs):
            return self.shared_parts
        blocks = tuple([(stage.forward, stage.backward, stage.updates) for stage in self.stages])
        return Parts(self.name, blocks, self.inputs, self.outputs)

    def _verify_ranks(self) -> None:
        """Check that each stage runs on its own slice of the mesh."""
        slices, schedule = self.mesh.slices("pp"), self.schedule
        if len(slices) != schedule.num_ranks:
            raise IRError(
                f"{self.name}: the schedule {schedule.name} is for {schedule.num_ranks} ranks, the mesh has "
                f"pp={len(slices)}; make them agree"
            )
        for index, stage in enumerate(self.stages):
            rank = schedule.rank_of[index]
            if stage.mesh is slices[rank] or stage.mesh == slices[rank]:
                continue
            raise IRError(
                f"{self.name}: stage {index} runs on {stage.mesh}; the schedule {schedule.name} has it on "
                f"rank {rank}: give it the slice pp={rank} of the program's mesh, {slices[rank]}"
            )

    def _verify_pattern(self) -> None:
        """Check that what the blocks have is on the pattern: what is elsewhere nobody would run or hold."""
        blocks = [b for f, b, updates in self.parts.blocks for b in (f, b, *[own for _, own in updates])]
        functions = [f for block in blocks for f in (block.function, block.accumulating) if f is not None]
        for function in dict.fromkeys([each for f in functions for each in (f, *callees(f))]):
            values = [*function.inputs, *[value for op in function.ops for value in op.outputs]]
            for value in values:
                device = value.type.device if isinstance(value.type, Tensor) else None
                if device is not None and device != self.pattern:
                    raise IRError(
                        f"{self.name}: {value.name!r} of {function.name} is on {device}; blocks lie on the "
                        f"program's pattern, {self.pattern}"
                    )

    def to_function(self, steady: bool = False) -> Function:
        """Return the whole step as one flat Function of Calls, Sends and collectives, written out when read.

        It starts from the global inputs on the device on which their types say they are and brings
        them to their ranks; ``steady`` leaves that part out (as
        :func:`distsim.transforms.steady_state_transform` does): every rank holds its inputs,
        as far as it reads or returns them. Its outputs are those of the program in order, then the copies.
        """
        return WrittenOut.of(self, steady)
