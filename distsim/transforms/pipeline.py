"""pipeline: cut a joint function into the stages of a Program."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from distsim.errors import PlanError
from distsim.executor.program import Block, Program, ProgramInput, ProgramOutput, Stage
from distsim.ir import Function, FunctionMaker, Mesh, Op, Role, Value
from distsim.ops import operator
from distsim.schedule import Schedule
from distsim.transforms.shard import Sharded
from distsim.transforms.stages import StageMap, assign_stages, early_sums, is_sum


def pipeline(local: Sharded, mesh: Mesh, schedule: Schedule) -> Program:
    """Cut what :func:`shard` made into stages on the slices of ``mesh`` (axes pp, dp, tp).

    Each stage becomes a forward and a backward function of one microbatch (with a variant that adds to
    the sums of earlier microbatches) and the functions that run once per step. Raises
    :class:`PlanError` when the function has fewer forward ops than there are stages.
    """
    stages, mesh_stages = len(schedule.ranks), mesh.axis_size("pp")
    if stages != mesh_stages:
        raise PlanError(f"the schedule has {stages} stages, the mesh has pp={mesh_stages}; make them agree")
    if schedule.num_microbatches != local.microbatches:
        raise PlanError(
            f"the schedule has {schedule.num_microbatches} microbatches, the function was sharded for "
            f"{local.microbatches}; make them agree"
        )
    function = _without_early_sums(local.function, local.microbatches)
    function, assigned = _untie(function, mesh)
    return _Cutter(local, function, assigned, mesh, schedule).program()


def _without_early_sums(function: Function, microbatches: int) -> Function:
    """Drop the marks of sums that a microbatch waits for: with one microbatch they are there already."""
    early = early_sums(function)
    if not early:
        return function
    if microbatches > 1:
        mark, reader = next(iter(early.items()))
        raise PlanError(
            f"{reader!r} needs {mark.outputs[0].name!r} of the whole batch, so the batch cannot be divided "
            f"into {microbatches} microbatches; use microbatches=1"
        )
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    plain: dict[Value, Value] = {}
    for op in function.ops:
        if op in early:
            plain[op.outputs[0]] = plain.get(op.inputs[0], op.inputs[0])
        else:
            maker.adopt(replace(op, inputs=tuple(plain.get(v, v) for v in op.inputs)))
    maker.set_outputs([plain.get(v, v) for v in function.outputs])
    return maker.finalize()


def _untie(function: Function, mesh: Mesh) -> tuple[Function, StageMap]:
    """Sum over microbatches before adding gradients that come from two stages.

    A parameter that two stages read (tied embeddings) gets a gradient from each; adding them per
    microbatch would send one of them every time.
    """
    num_stages, device = mesh.axis_size("pp"), mesh.devices[0]
    assigned = assign_stages(function, num_stages, device)
    producer = {value: op for op in function.ops for value in op.outputs}
    counts: dict[Value, int] = {}
    for value in (*(v for op in function.ops for v in op.inputs), *function.outputs):
        counts[value] = counts.get(value, 0) + 1

    def split(op: Op) -> bool:
        added = producer.get(op.inputs[0]) if is_sum(op) else None
        if added is None or added.op_type != "Add" or counts[op.inputs[0]] > 1 or len(added.inputs) < 2:
            return False
        makers = [producer[v] for v in added.inputs if v in producer]
        return len({assigned.stage[op] for op in makers if op in assigned.stage}) > 1

    tied = {op: producer[op.inputs[0]] for op in function.ops if split(op)}
    if not tied:
        return function, assigned
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    gone = set(tied.values())
    for op in function.ops:
        if op in tied:
            sums = [maker.add("Accumulate", [v], output_names=[v.name])[0] for v in tied[op].inputs]
            maker.adopt(Op("Add", tuple(sums), op.outputs))
        elif op not in gone:
            maker.adopt(op)
    maker.set_outputs(function.outputs)
    untied = maker.finalize()
    return untied, assign_stages(untied, num_stages, device)


class _Cutter:
    def __init__(
        self, local: Sharded, function: Function, assigned: StageMap, mesh: Mesh, schedule: Schedule
    ) -> None:
        self.local, self.function, self.assigned = local, function, assigned
        self.mesh, self.schedule = mesh, schedule
        self.count = mesh.axis_size("pp")
        self.producer = {value: op for op in function.ops for value in op.outputs}
        self.step_stage: dict[Op, int] = {}
        self.step_round: dict[Op, int] = {}
        for op in function.ops:
            if op in assigned.step_ops:
                self._place_step(op)

    def _place_step(self, op: Op) -> None:
        homes = self.assigned.homes
        owned = [homes[v][0] for v in op.inputs if v in homes]
        made = [self.producer[v] for v in op.inputs if v in self.producer]
        made = [m for m in made if m not in self.assigned.loose]
        stage = min(owned or [self._stage(m) for m in made] or [0])
        self.step_stage[op] = stage
        before = [self.step_round[m] + (self.step_stage[m] != stage) for m in made if m in self.step_round]
        self.step_round[op] = max(before, default=0)

    def _stage(self, op: Op) -> int:
        return self.step_stage[op] if op in self.step_stage else self.assigned.stage[op]

    def program(self) -> Program:
        groups = self._groups()
        outside = _read_outside(groups.values(), self.function)
        build = _Blocks(outside)
        stages: list[Stage] = []
        for index in range(self.count):
            mesh = self.mesh.at(pp=index)
            rounds = sorted(r for s, phase, r in groups if s == index and phase == "U")
            stages.append(
                Stage(
                    mesh,
                    build.block("forward", groups.get((index, "F", 0), [])),
                    build.block("backward", groups.get((index, "B", 0), [])),
                    tuple((r, build.block("update", groups[index, "U", r])) for r in rounds),
                )
            )
        return Program(
            self.function.name,
            self.mesh,
            self.local.mesh,
            tuple(stages),
            self.schedule,
            self._inputs(stages),
            self._outputs(),
            self.local.notes,
        )

    def _groups(self) -> dict[tuple[int, str, int], list[Op]]:
        groups: dict[tuple[int, str, int], list[Op]] = {}
        for op in self.function.ops:
            if op in self.assigned.loose:
                continue
            if op in self.assigned.step_ops:
                key = (self.step_stage[op], "U", self.step_round[op])
            else:
                key = (self.assigned.stage[op], "F" if op in self.assigned.forward else "B", 0)
            groups.setdefault(key, []).append(op)
        return {key: self._with_constants(ops) for key, ops in groups.items()}

    def _with_constants(self, ops: Sequence[Op]) -> list[Op]:
        """Put before the ops what makes the constants that they read."""
        needed: dict[Op, None] = {}

        def need(op: Op) -> None:
            for value in op.inputs:
                made = self.producer.get(value)
                if made in self.assigned.loose and made not in needed:
                    need(made)
                    needed[made] = None

        for op in ops:
            need(op)
        return [*needed, *ops]

    def _inputs(self, stages: Sequence[Stage]) -> tuple[ProgramInput, ...]:
        found: list[ProgramInput] = []
        returned = set(self.function.outputs)
        for key, source, place in zip(
            self.function.inputs, self.local.sources, self.local.inputs, strict=True
        ):
            readers = [
                index
                for index, stage in enumerate(stages)
                for block in (stage.forward, stage.backward, *(b for _, b in stage.updates))
                if key in block.inputs
            ]
            if key in returned and not readers:
                readers = [0]
            microbatched = place.batch.sharded
            typed = Value(source.name, source.type, key.role)
            found.append(
                ProgramInput(typed, key, place.shards(), microbatched, tuple(dict.fromkeys(readers)))
            )
        return tuple(found)

    def _outputs(self) -> tuple[ProgramOutput, ...]:
        found: list[ProgramOutput] = []
        for key, place in zip(self.function.outputs, self.local.outputs, strict=True):
            op = self.producer.get(key)
            stage = 0 if op is None else self._stage(op)
            copies: tuple[int, ...] = ()
            if op is not None:
                taken = operator(op.op_type).in_place.get(op.outputs.index(key))
                source = None if taken is None else op.inputs[taken]
                if source is not None and source.role is Role.PARAMETER:
                    copies = tuple(s for s in self.assigned.homes.get(source, ()) if s != stage)
            microbatched = place.batch.sharded and op not in self.step_stage
            found.append(ProgramOutput(key, place.shards(), microbatched, stage, copies))
        return tuple(found)


def _read_outside(groups: Iterable[list[Op]], function: Function) -> frozenset[Value]:
    """Return the values that some other block, or the caller, reads."""
    found = set(function.outputs)
    for ops in groups:
        own = {value for op in ops for value in op.outputs}
        found.update(v for op in ops for v in op.inputs if v not in own)
    return frozenset(found)


class _Blocks:
    """Makes blocks; groups of ops that do the same, wired in the same way, share their Functions."""

    def __init__(self, outside: frozenset[Value]) -> None:
        self.outside = outside
        self.made: dict[Hashable, tuple[Function, Function | None]] = {}

    def block(self, phase: str, ops: Sequence[Op]) -> Block:
        """Return the block of these ops, which lie in the order of the function that is cut."""
        made = {value for op in ops for value in op.outputs}
        inputs = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in made))
        outputs = tuple(v for op in ops for v in op.outputs if v in self.outside)
        sums = tuple(op.outputs[0] for op in ops if is_sum(op))
        key = (phase, _structure(ops, inputs, outputs))
        found = self.made.get(key)
        if found is None:
            function = _write(phase, ops, inputs, outputs, ())
            more = _write(f"{phase}_next", ops, inputs, outputs, sums) if sums else None
            found = self.made[key] = function, more
        names = tuple([op.name for op in ops if not is_sum(op)])
        more_names = tuple([op.name for op in ops]) if sums else ()
        return Block(found[0], inputs, outputs, sums, found[1], names, more_names)


def _structure(ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value]) -> Hashable:
    """Return what two groups of ops have in common when they differ in names only."""
    number = {value: i for i, value in enumerate(inputs)}
    wired: list[Hashable] = []
    for op in ops:
        read = tuple([number[value] for value in op.inputs])
        wired.append((op.op_type, op.attributes, op.subfunctions, op.version, read, len(op.outputs)))
        for value in op.outputs:
            number[value] = len(number)
    types = tuple([(value.type, value.role) for value in inputs])
    return types, tuple(wired), tuple([number[value] for value in outputs])


def _write(
    name: str, ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value], sums: Sequence[Value]
) -> Function:
    """Return the function of these ops; the mark of a sum adds to ``sums``, or else is nothing.

    Ops and values are those of the function that is cut, whose types have been checked.
    """
    so_far = {value: Value(f"{value.name}.sum", value.type) for value in sums}
    env: dict[Value, Value] = {}
    written: list[Op] = []
    for op in ops:
        if not is_sum(op):
            read = tuple([env.get(value, value) for value in op.inputs])
            written.append(replace(op, inputs=read, name="") if op.name or read != op.inputs else op)
            continue
        part, key = env.get(op.inputs[0], op.inputs[0]), op.outputs[0]
        if key in so_far:
            written.append(Op("AccumulateInto", (so_far[key], part), op.outputs))
        else:
            env[key] = part
    made = tuple([env.get(value, value) for value in outputs])
    return Function(name, (*inputs, *so_far.values()), tuple(written), made)
