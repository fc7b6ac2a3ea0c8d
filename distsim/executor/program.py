"""Program: the stages of a pipeline, each held once, and the order in which they run.

A stage is up to three kinds of blocks: ``forward`` and ``backward``, run once per microbatch, and
``updates``, run once per step. Values pass between blocks under *keys*: the values of the joint
function from which the stages were cut. What is in flight is what a block reads of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from distsim.errors import ScheduleError
from distsim.executor.written import WrittenOut
from distsim.ir import Function, Mesh, Value
from distsim.ops.communication import Shard
from distsim.schedule import Schedule

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
    """

    function: Function
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    accumulated: tuple[Value, ...] = ()
    accumulating: Function | None = None
    names: tuple[str, ...] = ()
    accumulating_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank runs, and where: ``mesh`` is its slice, with the axes dp and tp.

    The blocks lie on the pattern of the program: stages that do the same have the same Functions.
    ``updates`` are (round, block): a block of round r reads what other stages made in rounds before r.
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


@dataclass(frozen=True)
class Program:
    """A scheduled, parallelised training step: the thing that is simulated.

    ``mesh`` has the axes pp, dp and tp. ``pattern``, with the axes dp and tp, is the mesh on which the
    types of all blocks are: it stands for the slice of every stage. Its devices are numbered from 0 and
    lie nowhere; replicas do the same, so two of them stand for any number, unless local shapes depend
    on how many there are. :meth:`to_function` writes the program out as one Function. ``notes`` say what
    a user should know of how it was placed. ``saving_all`` makes the program that recomputes nothing, with
    which memory is compared when it is asked for; None for one that recomputes nothing itself.
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

    def __post_init__(self) -> None:
        if self.schedule.num_stages != len(self.stages):
            raise ScheduleError(
                f"{self.name}: the schedule {self.schedule.name} is for {self.schedule.num_stages} stages, "
                f"the program has {len(self.stages)}; make them agree"
            )

    def to_function(self, steady: bool = False) -> Function:
        """Return the whole step as one flat Function of Calls, Sends and collectives, written out when read.

        It starts from the global inputs on the device on which their types say they are and brings
        them to their ranks; ``steady`` leaves that part out (as
        :func:`distsim.transforms.steady_state_transform` does): every rank holds its inputs,
        as far as it reads or returns them. Its outputs are those of the program in order, then the copies.
        """
        return WrittenOut.of(self, steady)
