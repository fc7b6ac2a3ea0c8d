"""pipeline: cut a joint function into the stages of a Program."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import multimode
from weakref import WeakValueDictionary

from distsim.cache import Cache
from distsim.cost.cost_model import CostModel, DeviceCosts
from distsim.errors import PlanError
from distsim.ir import (
    Environment,
    Function,
    FunctionMaker,
    Mesh,
    Op,
    Role,
    Topology,
    Value,
    rewire_op,
    rewrite,
    substitute,
)
from distsim.ir.rewrite import inline
from distsim.ops import operator
from distsim.ops.replaced import replaced_by
from distsim.program.block import FIRST_CALL, LAST_CALL, StageBlocks
from distsim.program.parts import Parts, ProgramInput, ProgramOutput, Stage
from distsim.program.program import Program
from distsim.schedule import Schedule
from distsim.transforms.data_parallel.buckets import Bucketed, bucketed
from distsim.transforms.data_parallel.prefetch import prefetch
from distsim.transforms.kernels import fuse_stages
from distsim.transforms.op_graph import Numbered, StageMap, early_sums
from distsim.transforms.pipelining.received import await_received
from distsim.transforms.pipelining.shared_weights import copy_weights
from distsim.transforms.pipelining.stage_blocks import Blocks, Group, group_of
from distsim.transforms.pipelining.stage_inputs import keep_received
from distsim.transforms.pipelining.stages import assign_stages
from distsim.transforms.sharding.layout import Divisions
from distsim.transforms.sharding.shard import Sharded

Starts = tuple[int, ...]
"""Where stages begin: places among the forward ops that take time; the first is 0."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A local function cut into stages, whatever the schedule and wherever they run."""

    name: str
    pattern: Mesh
    stages: tuple[StageBlocks, ...]
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]
    notes: tuple[str, ...]

    def program(
        self, mesh: Mesh, schedule: Schedule, saving_all: Callable[[], Program] | None = None
    ) -> Program:
        """Return the program that runs the stages on the slices of ``mesh`` in this order.

        ``saving_all`` makes the one that recomputes nothing, if this one recomputes.
        """
        slices, count = mesh.slices("pp"), len(self.stages)
        if schedule.num_ranks != len(slices) or schedule.chain != count:
            raise PlanError(
                f"the schedule has {schedule.chain} stages on {schedule.num_ranks} ranks, the mesh has "
                f"pp={len(slices)}, the function was cut into {count} stages; make them agree"
            )
        places = [slices[schedule.rank_of[stage]] for stage in range(count)]
        return Program(
            self.name,
            mesh,
            self.pattern,
            tuple([Stage(own, *blocks) for own, blocks in zip(places, self.stages, strict=True)]),
            schedule,
            self.inputs,
            self.outputs,
            self.notes,
            saving_all,
            self.parts,
        )

    @cached_property
    def parts(self) -> Parts:
        """What the programs of this cut have in common, verified once."""
        return Parts(self.name, self.stages, self.inputs, self.outputs)


def pipeline(local: Sharded, mesh: Mesh, schedule: Schedule, cost_model: CostModel | None = None) -> Program:
    """Cut what :func:`shard` made into stages on the slices of ``mesh`` (axes pp, dp, tp).

    Stages are of even time by ``cost_model``, by default on the devices of the mesh. Each becomes a forward
    and a backward function of one microbatch (with a variant that adds to the sums of earlier microbatches)
    and the functions that run once per step. Raises :class:`PlanError` when the function has fewer forward
    ops than there are stages.
    """
    count = schedule.num_microbatches * schedule.copies
    if count != local.microbatches:
        raise PlanError(
            f"the schedule has {count} microbatches, the function was sharded for "
            f"{local.microbatches}; make them agree"
        )
    costs = (cost_model or CostModel(Topology())).on(mesh.devices[0])
    return cut_stages(local, schedule.chain, costs).program(mesh, schedule)


def cut_stages(local: Sharded, num_stages: int, costs: DeviceCosts, starts: Starts | None = None) -> Cut:
    """Cut what :func:`shard` made into ``num_stages`` stages of even time by ``costs``, or at ``starts``.

    What was cut already is not cut again while someone holds it: plans that differ in their schedule, or
    divide the batch into as many parts, share it.
    """
    source = _Source.of(local)
    key = num_stages, costs.key, starts, local.kernels, local.buckets
    found = source.cuts.get(key)
    if found is None:
        function, assigned = source.function, assign_stages(source.function, num_stages, costs, starts)
        own = copy_weights(function, assigned)
        if own is not function:
            function, assigned = own, assign_stages(own, num_stages, costs, starts)
        # Untied, a function may have its stages elsewhere: what each of them keeps is decided after that.
        function, assigned = _untie(function, assigned, num_stages, costs, starts)
        function, assigned = keep_received(function, assigned)
        made = bucketed(*prefetch(function, assigned, local.buckets is not None), local.buckets)
        found = _Cutter(local, source, made, num_stages).cut()
        source.cuts[key] = found
    return found


def to_cut(local: Sharded) -> Numbered:
    """Return the function whose forward ops the starts of :func:`cut_stages` count."""
    return _Source.of(local).function


class _Source:
    """What is known of a local function before it is cut, and how it was cut."""

    def __init__(self, local: Sharded) -> None:
        self.function = function = _without_early_sums(local.function, local.microbatches)
        self.inputs: list[Value] = []
        for key, source in zip(function.inputs, local.sources, strict=True):
            same = source.role is key.role
            self.inputs.append(source if same else Value(source.name, source.type, key.role))
        divided = Divisions()
        self.divided = [
            (divided.of(place, value), place.batch.sharded, max(place.batch.dim, 0))
            for place, value in zip(local.inputs, function.inputs, strict=True)
        ]
        given: list[Function | None] = [None] * (len(self.inputs) - len(local.made))
        self.made = [*given, *local.made]
        self.outputs = [
            (divided.of(place, value), place.batch)
            for place, value in zip(local.outputs, local.function.outputs, strict=True)
        ]
        # No cache: the cuts that are in use.
        self.cuts: WeakValueDictionary[Hashable, Cut] = WeakValueDictionary()

    @staticmethod
    def of(local: Sharded) -> _Source:
        return _SOURCES.get(local.function, local.microbatches > 1, lambda: _Source(local))


_SOURCES = Cache[Function, _Source]("what is cut, by local function and whether it has microbatches", 2)


def _without_early_sums(local: Function, microbatches: int) -> Numbered:
    """Return the function without marks of sums that a microbatch waits for: with one they are there already.

    A Call waits as a whole for all that it reads, and hides what is the same for every microbatch. One in the
    way is written out: of a callee with a loss and its trained weight, the gradient of that weight waits for
    the loss, the rest of the backward pass does not.
    """
    function = Numbered(local)
    early = early_sums(function)
    if not early:
        return function
    calls = _calls_at(function, early.values()) if microbatches > 1 else ()
    if calls:
        return _without_early_sums(inline(local, calls), microbatches)
    dropped = {function.ops[number] for number in early}
    if microbatches > 1:
        mark, reader = next((function.ops[a], function.ops[b]) for a, b in early.items())
        raise PlanError(
            f"{reader!r} needs {mark.outputs[0].name!r} of the whole batch, so the batch cannot be divided "
            f"into {microbatches} microbatches; use microbatches=1"
        )

    def change(op: Op, env: Environment) -> tuple[Op, ...]:
        if op not in dropped:
            return (rewire_op(op, env),)
        (env[op.outputs[0]],) = substitute(op.inputs[:1], env)
        return ()

    return Numbered(rewrite(local, change))


def _calls_at(function: Numbered, readers: Iterable[int]) -> set[Op]:
    """Return those of the readers that are Calls, and the Calls that make what the others read."""
    found: set[int] = set()
    for op in readers:
        called = function.ops[op].is_call
        found.update([op] if called else [function.producer[value] for value in function.reads[op]])
    return {function.ops[op] for op in found if op >= 0 and function.ops[op].is_call}


def _untie(
    function: Numbered, assigned: StageMap, num_stages: int, costs: DeviceCosts, starts: Starts | None
) -> tuple[Numbered, StageMap]:
    """Sum over microbatches before adding gradients that come from two stages.

    A parameter that two stages read (tied embeddings) gets a gradient from each, and each may have a part of
    the loss; adding them per microbatch would send one of them every time.
    """
    tied: dict[Op, tuple[Op, ...]] = {}
    for number, op in enumerate(function.ops):
        if function.sums[number]:
            found = _added_before(function, number)
            if found and _from_two_stages(function, assigned, found[0]):
                tied[op] = tuple([function.ops[each] for each in found])
    if not tied:
        return function, assigned
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    gone = {each for ops in tied.values() for each in ops}
    for op in function.ops:
        if op in tied:
            added, *scattered = tied[op]
            sums: list[Value] = []
            for value in added.inputs:
                for each in scattered:
                    value = maker.add(each.op_type, [value], each.attributes, output_names=[value.name])[0]
                sums += maker.add("Accumulate", [value], output_names=[value.name])
            maker.adopt(Op(added.op_type, tuple(sums), op.outputs))
        elif op not in gone:
            maker.adopt(op)
    maker.set_outputs([function.values[value] for value in function.outputs])
    untied = Numbered(maker.finalize())
    return untied, assign_stages(untied, num_stages, costs, starts)


def _added_before(function: Numbered, sum_: int) -> list[int]:
    """Return the op that makes what is summed over microbatches, and what casts and scatters it after it."""
    found = [function.producer[function.reads[sum_][0]]]
    # As zero writes a gradient flat and scatters it, and before that precision casts it.
    for passed in ("MPIReduceScatter", "Pad", "Reshape", "GradientCast"):
        made = found[0]
        if made < 0:
            break
        if passed in ("Pad", "Reshape") and len(found) == 1:
            continue
        if function.ops[made].op_type == passed and function.uses[function.makes[made][0]] == 1:
            found.insert(0, function.producer[function.reads[made][0]])
    return found if found[0] >= 0 else []


def _from_two_stages(function: Numbered, assigned: StageMap, added: int) -> bool:
    """Whether an op adds what two stages make, and its sum is read once."""
    if function.ops[added].op_type not in ("Add", "Sum") or len(function.reads[added]) < 2:
        return False
    (value,) = function.makes[added]
    if function.uses[value] + function.outputs.count(value) > 1:
        return False
    makers = [function.producer[v] for v in function.reads[added]]
    return len({assigned.stage[op] for op in makers if op >= 0 and assigned.stage[op] >= 0}) > 1


_NAMES = {"R": "reduce", "A": "gather"}
"""What runs once a step within the last backward call of a stage, and within its first forward call."""


class _Cutter:
    """Puts the ops of a function whose stages are assigned into blocks."""

    def __init__(self, local: Sharded, source: _Source, made: Bucketed, count: int) -> None:
        self.local, self.source, self.count = local, source, count
        self.function, assigned, self.early = made
        self.ahead, self.homes = self.function.once(assigned.stage), assigned.homes
        self.stage = list(assigned.stage)
        function = self.function
        self.round = [-1] * len(function.ops)
        for op, step in enumerate(function.steps):
            if step:
                self._place_step(op)

    def _place_step(self, op: int) -> None:
        """Place an op that runs once per step where its parameter is, or else with most of what it reads."""
        function, homes, read = self.function, self.homes, self.function.reads[op]
        made = [m for m in [function.producer[v] for v in read] if m >= 0 and not function.loose[m]]
        owned = [homes[v][0] for v in map(self._viewed, read) if v in homes]
        most = max([function.values[v].type.nbytes for v in read], default=0)
        large = [function.producer[v] for v in read if function.values[v].type.nbytes == most]
        with_most = [self.stage[m] for m in large if m in made]
        stage = self.stage[op] = min(owned or multimode(with_most) or [self.stage[m] for m in made] or [0])
        before = [self.round[m] + (self.stage[m] != stage) for m in made if self.round[m] >= 0]
        self.round[op] = max(before, default=0)

    def _viewed(self, value: int) -> int:
        """Return what a value is a view of that is taken once per step, such as a rank's part of a weight."""
        function = self.function
        op = function.producer[value]
        while op >= 0 and function.steps[op] and operator(function.ops[op].op_type).view:
            value = function.reads[op][0]
            op = function.producer[value]
        return value

    def cut(self) -> Cut:
        groups = self._groups()
        make = Blocks(self.function, self._read_outside(groups))
        empty: Group = ([], ())
        stages: list[StageBlocks] = []
        for index in range(self.count):
            rounds = sorted(r for s, phase, r in groups if s == index and phase == "U")
            updates = [(r, make.block("update", groups[index, "U", r])) for r in rounds]
            for phase, place, number in (("R", LAST_CALL, 0), ("A", FIRST_CALL, -1)):
                if (index, phase, 0) in groups:
                    block = make.block(_NAMES[phase], groups[index, phase, 0])
                    updates.insert(0, (number, replace(block, place=place)))
            forward = make.block("forward", groups.get((index, "F", 0), empty))
            backward = make.block("backward", groups.get((index, "B", 0), empty))
            stages.append((forward, backward, tuple(updates)))
        local, inputs = self.local, self._inputs(groups)
        fused = await_received(fuse_stages(stages, local.kernels), local.kernels)
        return Cut(self.function.name, local.mesh, fused, inputs, self._outputs(inputs), local.notes)

    def _groups(self) -> dict[tuple[int, str, int], Group]:
        groups: dict[tuple[int, str, int], list[int]] = {}
        function = self.function
        for op, stage in enumerate(self.stage):
            if function.loose[op]:
                continue
            if op in self.early or op in self.ahead:
                key = (stage, "R" if op in self.early else "A", 0)
            elif function.steps[op]:
                key = (stage, "U", self.round[op])
            else:
                key = (stage, "F" if function.forward[op] else "B", 0)
            groups.setdefault(key, []).append(op)
        return {key: group_of(function, ops) for key, ops in groups.items()}

    def _read_outside(self, groups: dict[tuple[int, str, int], Group]) -> Sequence[bool]:
        """Return which values some other block, or the caller, reads."""
        found = [False] * len(self.function.values)
        for values in (self.function.outputs, *(read for _, read in groups.values())):
            for value in values:
                found[value] = True
        return found

    def _inputs(self, groups: dict[tuple[int, str, int], Group]) -> tuple[ProgramInput, ...]:
        alone = [(stage,) for stage in range(self.count)]
        readers: dict[int, tuple[int, ...]] = {}
        for (stage, _, _), (_, read) in sorted(groups.items(), key=lambda item: item[0]):
            for value in read:
                known = readers.get(value, ())
                if value < self.function.num_inputs and stage not in known:
                    readers[value] = (*known, stage) if known else alone[stage]
        for value in self.function.outputs:  # an input that is only handed on
            if value < self.function.num_inputs:
                readers.setdefault(value, (0,))
        keys, source = self.function.inputs, self.source
        return tuple(
            [
                ProgramInput(typed, key, shards, divided, readers.get(value, ()), dim, made)
                for value, (typed, key, (shards, divided, dim), made) in enumerate(
                    zip(source.inputs, keys, source.divided, source.made, strict=True)
                )
            ]
        )

    def _outputs(self, inputs: Sequence[ProgramInput]) -> tuple[ProgramOutput, ...]:
        found: list[ProgramOutput] = []
        function = self.function
        shared = any(len(homes) > 1 for homes in self.homes.values())
        for value, (shards, batch) in zip(function.outputs, self.source.outputs, strict=True):
            op, key = function.producer[value], function.values[value]
            stage = inputs[value].stages[0] if op < 0 else self.stage[op]
            microbatched = batch.sharded and not (op >= 0 and function.steps[op])
            if microbatched and batch.pieces and self.local.microbatches > 1:
                raise PlanError(
                    f"output {key.name!r} has the batch in parts of dimension {batch.dim}, which "
                    f"{self.local.microbatches} microbatches do not make one after the other; use "
                    "microbatches=1, or return it before its dimensions are merged"
                )
            copies = self._copies(op, value, stage) if shared and op >= 0 else ()
            found.append(ProgramOutput(key, shards, microbatched, stage, copies, max(batch.dim, 0)))
        return tuple(found)

    def _copies(self, op: int, value: int, stage: int) -> tuple[int, ...]:
        """Return the other stages that hold the parameter of which ``value`` is the new one."""
        made = self.function.ops[op]
        taken = replaced_by(made).get(value - self.function.makes[op][0])
        if taken is None:
            return ()
        old = self._viewed(self.function.reads[op][taken])
        homes = self.homes.get(old, ()) if self.function.values[old].role is Role.PARAMETER else ()
        return tuple([other for other in homes if other != stage])
