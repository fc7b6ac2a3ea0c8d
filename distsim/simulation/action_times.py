"""A schedule alone: a Program in which every action of a stage takes a given time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from distsim.cost.cost_model import CostModel
from distsim.cost.demand import Group
from distsim.errors import ScheduleError
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Attributes, Bool, Device, Function, FunctionMaker, Mesh, Tensor, Topology, Value
from distsim.ir.link import Link
from distsim.ir.topology import Level
from distsim.ops import Signature, Work, operator
from distsim.program.block import Block, StageBlocks
from distsim.program.parts import Parts, ProgramInput, ProgramOutput, Stage
from distsim.program.passes.overlap_pairs import interleave
from distsim.program.program import Program
from distsim.schedule import FLUSH, Kind, Schedule
from distsim.schedule.action import HALVES

_SHORTEST, _LONGEST = 1e-9, 1e9
"""Seconds that an action may take."""


@dataclass(frozen=True)
class ActionTimes:
    """Seconds of the actions of every stage, and until what it sends has arrived on another rank.

    ``seconds`` are by the letters of kinds, and 1 for what is not there. A whole backward takes what I and W
    take. A message occupies nobody: ``send`` may be at most the least time of the actions that send, so that
    none overtakes or waits for the one before it.

    >>> times = ActionTimes({"F": 2.0, "W": 0.5})
    >>> [times.of_kind(kind) for kind in Kind][:4]
    [2.0, 1.5, 1.0, 0.5]
    """

    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    send: float = 0.0

    def __post_init__(self) -> None:
        known = {kind.value: kind for kind in TIMED}
        for letter, seconds in self.seconds.items():
            if letter not in known:
                raise ScheduleError(
                    f"{letter!r:.40} is no kind that has a time; choose from {', '.join(known)}"
                )
            if not _SHORTEST <= seconds <= _LONGEST:
                name = known[letter].name.lower()
                raise ScheduleError(f"{name}={seconds:g} must be between {_SHORTEST:g} and {_LONGEST:g}")
        forward, back = self.of_kind(Kind.FORWARD), self.of_kind(Kind.BACKWARD_INPUT)
        if not 0 <= self.send <= min(forward, back):
            raise ScheduleError(
                f"send={self.send:g} must be between 0 and the shorter of forward={forward:g} and "
                f"backward_input={back:g}: a message would wait for the one before"
            )

    def of_kind(self, kind: Kind) -> float:
        """Return the seconds of a kind of action."""
        if kind is Kind.BACKWARD:
            return self.of_kind(Kind.BACKWARD_INPUT) + self.of_kind(Kind.BACKWARD_WEIGHT)
        return self.seconds.get(kind.value, 1.0)


TIMED = tuple([kind for kind in Kind if kind is not Kind.BACKWARD])
"""The kinds that have a time of their own."""


class _Given:
    """Cost rules by which a Delay takes what it says, and a message its time in flight."""

    def __init__(self, send: float) -> None:
        self.send = send

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds of a compute op."""
        return float(signature.attributes.get("seconds", 0.0))

    def communicate(self, kind: str, nbytes: float, group: Group, topology: Topology) -> float:
        """Seconds in flight; the transfer of what has arrived takes none."""
        return self.send if kind == "all_reduce" else 0.0


class _GivenCosts(CostModel):
    """The costs of these rules, by which a copy to or from the host takes what it says as well."""

    def seconds(self, signature: Signature, where: Group) -> float:
        """Seconds of an op."""
        if operator(signature.op_type).host_stream:
            return float(signature.attributes["seconds"])
        return super().seconds(signature, where)


def timed_program(
    schedule: Schedule, times: ActionTimes | None = None, together: bool = False
) -> tuple[Program, CostModel]:
    """Return the program of a schedule whose actions take these times, and the costs to simulate it with.

    What a stage saves from F until B, or W, is one byte, all else nothing: the peak memory of a rank is the
    number of (stage, microbatch) pairs in flight. A message to the stage before waits for the whole of B. A
    pair of actions takes as long as both: one after the other, each message sent when its action ends, or
    ``together``: started when both can be, its messages sent at the end (as DeepSeek's figures draw it).
    There are no weights, hence no updates of them: of a schedule without a flush it is the order that counts.
    What kinds besides F, B and its halves run is made of the passes that take these times, as in any program.

    Raises :class:`ScheduleError` for one of them that is on another stream than its kind says, and for pairs
    that start ``together`` of actions that are not all on that of computation.

    >>> from distsim.schedule import one_f_one_b
    >>> from distsim.simulation import Simulator
    >>> program, costs = timed_program(one_f_one_b(4, 8))
    >>> Simulator(costs).simulate(program).step_time  # 3 (m + p - 1)
    33.0
    """
    times = times or ActionTimes()
    schedule = schedule.with_weights(FLUSH)
    chain, rank_of = schedule.chain, schedule.rank_of
    topology = Topology.hierarchical(
        Device(0, "rank"), 4 * schedule.num_ranks, [Level("any", Link(1.0, 0.0))]
    )
    mesh = Mesh(topology.devices, pp=schedule.num_ranks, dp=2, tp=2)
    slices = mesh.slices("pp")
    writer = _BlockWriter(logical_mesh(topology.devices[0], 2, 2), times, _crossings(schedule))
    made = [writer.stage(stage) for stage in range(chain)]
    parts = Parts(
        schedule.name,
        tuple([blocks for blocks, _ in made]),
        (ProgramInput(writer.data, writer.data, (), True, (0,)),),
        tuple([ProgramOutput(sums, (), False, stage) for stage, sums in enumerate(writer.sums)]),
        {HALVES.made_by: tuple([halves for _, halves in made])},
        _at_once if together else interleave,
    )
    if together and schedule.pairs_actions and any(kind.runs.stream for kind in schedule.kinds):
        raise ScheduleError(
            f"{schedule.name}: what is copied beside computation starts with nothing together"
        )
    for name in sorted({kind.runs.made_by for kind in schedule.kinds} - {"", HALVES.made_by}):
        kinds = [kind for kind in Kind if kind.runs.made_by == name]
        own = [
            tuple([_timed(block, kind, times) for kind, block in zip(kinds, blocks, strict=True)])
            for blocks in parts.made_by(name)
        ]
        parts = replace(parts, given={**parts.given, name: tuple(own)})
    stages = [Stage(slices[rank_of[stage]], *blocks) for stage, blocks in enumerate(parts.blocks)]
    program = Program(
        schedule.name,
        mesh,
        writer.pattern,
        tuple(stages),
        schedule,
        parts.inputs,
        parts.outputs,
        shared_parts=parts,
    )
    return program, _GivenCosts(topology, rules=_Given(times.send))


def _timed(block: Block, kind: Kind, times: ActionTimes) -> Block:
    """Return the block of a kind with ops that take the time of the kind together, on the stream it names."""

    def timed(function: Function) -> Function:
        busy = [op for op in function.ops if operator(op.op_type).host_stream or op.attributes.get("seconds")]
        if {operator(op.op_type).host_stream for op in busy} != {kind.runs.stream}:
            raise ScheduleError(
                f"{kind.value} ({kind.phase}) does not run on {kind.runs.stream or 'compute'}, or not there "
                "alone; say in its line on which stream it is (schedule/action.py)"
            )
        given = {"seconds": times.of_kind(kind) / len(busy)}
        ops = [
            replace(op, attributes=Attributes({**op.attributes, **given})) if op in busy else op
            for op in function.ops
        ]
        return replace(function, ops=tuple(ops))

    more = None if block.accumulating is None else timed(block.accumulating)
    return replace(block, function=timed(block.function), accumulating=more)


def _crossings(schedule: Schedule) -> list[bool | None]:
    """Return whether what passes into each stage, and out of the last, comes from another rank."""
    ranks = schedule.rank_of[: schedule.chain]
    return [None, *[a != b for a, b in pairwise(ranks)], None]


class _BlockWriter:
    """Writes the blocks of one stage after the other.

    A message is in flight on a stream of its own, one for each direction: as the collective of the axis dp
    or tp, of two ranks, that nothing else uses.
    """

    def __init__(self, pattern: Mesh, times: ActionTimes, crossings: Sequence[bool | None]) -> None:
        self.pattern, self.times, self.crossings = pattern, times, crossings
        self.data = self._value("x", 0)
        self.saved = [self._value(f"saved{s}", 1) for s in range(len(crossings) - 1)]
        self.sums = [self._value(f"sum{s}", 0) for s in range(len(crossings) - 1)]
        self.forwards = [self._value(f"forward{s}", 0) for s in range(len(crossings))]
        self.backwards = [self._value(f"backward{s}", 0) for s in range(len(crossings))]

    def _value(self, name: str, size: int) -> Value:
        return Value(name, Tensor(Bool(), (size,), self.pattern))

    def stage(self, stage: int) -> tuple[StageBlocks, tuple[Block, Block]]:
        """Return the blocks of a stage, and the halves of its backward pass."""
        times, saved, sums = self.times, self.saved[stage], self.sums[stage]
        above, below = self.crossings[stage], self.crossings[stage + 1]
        gradient = () if below is None else (self.backwards[stage + 1],)
        given = self.data if above is None else self.forwards[stage]
        before = () if above is None else (self.backwards[stage],)
        after = () if below is None else (self.forwards[stage + 1],)
        forward = self._block(
            "F", (given,), times.of_kind(Kind.FORWARD), (saved, *after), "dp" if below else ""
        )
        up = "tp" if above else ""
        backward = self._block("B", (*gradient, saved), times.of_kind(Kind.BACKWARD), (*before, sums), up)
        rest = self._value(f"pending{stage}", 0)
        half = self._block("I", (*gradient, saved), times.of_kind(Kind.BACKWARD_INPUT), (rest, *before), up)
        other = self._block("W", (rest, saved), times.of_kind(Kind.BACKWARD_WEIGHT), (sums,), "")
        return (forward, backward, ()), (half, other)

    def _block(
        self, name: str, inputs: tuple[Value, ...], seconds: float, makes: tuple[Value, ...], axis: str
    ) -> Block:
        """Return what takes ``seconds`` and then makes these keys, a message along ``axis`` if any."""
        sums = tuple([key for key in makes if key in self.sums])
        functions: list[Function] = []
        for adds in ((), sums):
            maker = FunctionMaker(name)
            given = [maker.add_input_value(key.name, key.type) for key in inputs]
            so_far = [maker.add_input_value("so_far", key.type) for key in adds]
            size = 1 if name == "F" else 0
            (done,) = maker.add("Delay", given, {"seconds": seconds, "size": size})
            outputs: list[Value] = []
            for key in makes:
                part = done
                if (key not in self.saved and key is not makes[0]) or key in sums:
                    (part,) = maker.add("Delay", [done], {"seconds": 0.0, "size": 0})
                if key in self.forwards or key in self.backwards:
                    part = maker.add("MPIAllreduce", [part], {"axis": axis})[0] if axis else part
                elif adds and key in sums:
                    (part,) = maker.add("AccumulateInto", [*so_far, part])
                outputs.append(part)
            maker.set_outputs(outputs)
            functions.append(maker.finalize())
        return Block(functions[0], inputs, makes, sums, functions[1] if sums else None)


def _at_once(one: Function, other: Function) -> Function:
    """Return what two functions do if neither has a result before both have all that they read."""
    seconds = sum([op.attributes.get("seconds", 0.0) for op in (*one.ops, *other.ops)])
    maker = FunctionMaker(f"{one.name}{other.name}")
    given = {value: maker.add_input_value(value.name, value.type) for value in (*one.inputs, *other.inputs)}
    (start,) = maker.add("Delay", list(given.values()), {"seconds": seconds, "size": 0})
    for op in (*one.ops, *other.ops):
        if op.op_type == "Delay":
            op = replace(
                op, inputs=(*op.inputs, start), attributes=Attributes({**op.attributes, "seconds": 0.0})
            )
            given[start] = start
        given.update(zip(op.outputs, maker.copy(op, given), strict=True))
    maker.set_outputs([given[value] for value in (*one.outputs, *other.outputs)])
    return maker.finalize()
