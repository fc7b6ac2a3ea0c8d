"""Random programs for the tests of the engines: blocks, schedules, meshes and topologies of any kind.

A program is invented directly, without a transform, so that it has what no transform makes: blocks without
outputs, outputs that are inputs, sums of anything, values that skip stages. Everything follows from a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from schedule_models import SCHEDULES
from topology_models import invent_topology

from distsim.executor import CostModel
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Float64, Function, FunctionMaker, Literal, Mesh, Role, Tensor, Value
from distsim.ops import Operator, Work, register
from distsim.program.block import Block
from distsim.program.parts import ProgramInput, ProgramOutput, Stage
from distsim.program.program import Program
from distsim.schedule import Schedule

ROWS = 6
"""Dimension 0 of every local value: every degree up to 3 divides it."""
WIDTHS = (1, 20)


def _mix(attributes, arrays):
    return [arrays[0] / 2 + sum(array.mean() for array in arrays[1:])]


def _lasting(signature):
    return Work(signature.attributes["flops"], 0, 0, matrix=True)


register(Operator("ModelWork", types=lambda a, x: (x[0],), compute=_mix, work=_lasting))
register(
    Operator("ModelPair", types=lambda a, x: (x[0],) * 2, compute=lambda a, x: _mix(a, x) * 2, work=_lasting)
)
register(Operator("ModelView", types=lambda a, x: (x[0],), compute=lambda a, x: [x[0]], view=True))


# --- what a block does ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of a script: it reads earlier values by number and adds as many as ``results``."""

    kind: str
    operands: tuple[int, ...] = ()
    seconds: float = 0.0
    width: int = 1
    axis: str = "dp"
    callee: Script | None = None


@dataclass(frozen=True)
class Script:
    """What a function does: the widths and roles of its inputs, its steps, the numbers that it returns."""

    inputs: tuple[tuple[int, Role], ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    made: tuple[int, ...]
    """The widths of all values."""

    @property
    def sums(self) -> tuple[int, ...]:
        """The numbers of the values that are sums over microbatches."""
        first, found = len(self.inputs), []
        for step in self.steps:
            if step.kind == "sum":
                found.append(first)
            first += _results(step)
        return tuple(found)


def _results(step: Step) -> int:
    if step.kind == "call":
        return len(step.callee.outputs)
    return 2 if step.kind == "pair" else 1


@dataclass(frozen=True)
class Habits:
    """How long work may take, and the axes of collectives whose shapes depend on the number of ranks."""

    seconds: tuple[float, ...]
    regrouped: tuple[str, ...]


KINDS = ("work",) * 6 + ("pair", "view", "barrier", "constant", "fill", "dp", "tp", "gather", "swap", "call")


Inputs = Sequence[tuple[int, Role]]


def invent_script(rng: Random, inputs: Inputs, habits: Habits, depth=2, most=6, sums=0) -> Script:
    """Return a random script over these inputs, with up to ``sums`` sums."""
    made, steps, total = [width for width, _ in inputs], [], rng.randint(0, most)
    places = {rng.randint(0, total) for _ in range(rng.randint(0, sums))}
    for place in range(total + 1):
        if place < total:
            _add(steps, made, _invent_step(rng, made, habits, depth))
        if place in places and made:
            _add(steps, made, Step("sum", (rng.randrange(len(made)),)))
    results = range(len(made))
    outputs = tuple(rng.choice(results) for _ in range(rng.randint(0, 3))) if made else ()
    return Script(tuple(inputs), tuple(steps), outputs, tuple(made))


def _add(steps: list[Step], made: list[int], step: Step) -> None:
    steps.append(step)
    if step.kind == "call":
        made += [step.callee.made[i] for i in step.callee.outputs]
    elif step.kind in ("constant", "fill"):
        made.append(step.width)
    else:
        made += [made[step.operands[0]]] * _results(step)


def _invent_step(rng: Random, made: Sequence[int], habits: Habits, depth: int) -> Step:
    kind = rng.choice(KINDS) if made else rng.choice(("constant", "fill"))
    if kind in ("constant", "fill"):
        return Step(kind, width=rng.choice(WIDTHS))
    # The last values more often than the first: chains.
    operands = tuple(
        max(rng.randrange(len(made)), rng.randrange(len(made))) for _ in range(rng.randint(1, 3))
    )
    if kind == "call" and depth:
        callee = invent_script(rng, [(made[i], Role.INPUT) for i in operands], habits, depth - 1, most=4)
        return Step("call", operands, callee=callee)
    if kind in ("work", "pair", "call"):
        return Step("pair" if kind == "pair" else "work", operands, rng.choice(habits.seconds))
    if kind in ("dp", "tp"):
        return Step("reduce", operands[:1], axis=kind)
    reads = operands if kind == "barrier" else operands[:1]
    return Step(kind, reads, axis=rng.choice(habits.regrouped))


class Writer:
    """Writes scripts as functions on the pattern mesh, each once."""

    def __init__(self, pattern: Mesh) -> None:
        self.pattern = pattern
        self.known: dict[object, Function] = {}

    def key(self, name: str, width: int, role: Role = Role.INPUT) -> Value:
        """Return a value of this width."""
        return Value(name, Tensor(Float64(), (ROWS, width), self.pattern), role)

    def function(
        self, name: str, script: Script, outputs: Sequence[int], accumulating: bool = False
    ) -> Function:
        """Return a script as a function; ``accumulating``: it takes its sums so far as further inputs."""
        key = (name, script, tuple(outputs), accumulating)
        if key not in self.known:
            self.known[key] = self._write(name, script, outputs, accumulating)
        return self.known[key]

    def _write(self, name: str, script: Script, outputs: Sequence[int], accumulating: bool) -> Function:
        maker = FunctionMaker(name)
        maker.adopt_inputs([self.key(f"a{i}", width, role) for i, (width, role) in enumerate(script.inputs)])
        values = list(maker.inputs)
        sums = script.sums if accumulating else ()
        so_far = [maker.add_input_value(f"sum{i}", self.key("", script.made[i]).type) for i in sums]
        for step in script.steps:
            values += self._emit(maker, step, [values[i] for i in step.operands], so_far)
        maker.set_outputs([values[i] for i in outputs])
        return maker.finalize()

    def _emit(self, maker, step: Step, operands: list[Value], so_far: list[Value]) -> Sequence[Value]:
        along = {"axis": step.axis, "dim": 0}
        match step.kind:
            case "work" | "pair":
                kind = "ModelPair" if step.kind == "pair" else "ModelWork"
                return maker.add(kind, operands, {"flops": step.seconds})
            case "view" | "barrier":
                kind = "ModelView" if step.kind == "view" else "OptimizationBarrier"
                return maker.add(kind, operands)
            case "constant":
                value = Literal(np.full((ROWS, step.width), 0.25))
                return maker.add("Constant", attributes={"value": value, "device": self.pattern})
            case "fill":
                shape, value = (ROWS, step.width), Literal(np.full(1, 0.5))
                attributes = {"input": shape, "value": value, "device": self.pattern}
                return maker.add("ConstantOfShape", attributes=attributes)
            case "reduce":
                return maker.add("MPIAllreduce", operands, {"axis": step.axis})
            case "gather":
                return maker.add("MPIReduceScatter", maker.add("MPIAllgather", operands, along), along)
            case "swap":
                return maker.add("MPIAlltoall", operands, {"axis": step.axis, "split": 0, "concat": 0})
            case "sum":
                return maker.add("AccumulateInto", [so_far.pop(0), *operands]) if so_far else operands
            case _:
                callee = self.function("callee", step.callee, step.callee.outputs)
                return maker.add("Call", operands, subfunctions=[callee])


# --- programs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program and what to simulate it with."""

    seed: int
    program: Program
    cost_model: CostModel
    overlap: bool

    def __str__(self) -> str:
        mesh = "x".join(str(size) for _, size in self.program.mesh.axes)
        return f"seed {self.seed}: {mesh}, {self.program.schedule.name}, overlap={self.overlap}"


class Inventor:
    """Invents the stages of one program: what may be read where, and who holds what."""

    def __init__(self, rng: Random, mesh: Mesh) -> None:
        self.rng, self.mesh = rng, mesh
        self.count, dp, tp = (size for _, size in mesh.axes)
        few = rng.random() < 0.3  # two replicas stand for all where no shape depends on their number
        self.habits = Habits(_seconds(rng), ("tp",) if few else ("dp", "tp"))
        self.writer = Writer(logical_mesh(mesh.devices[0], min(dp, 2) if few else dp, tp))
        self.scripts: dict[object, list[tuple[Script, tuple[int, ...]]]] = {}
        key, roles = self.writer.key, [Role.PARAMETER, Role.PARAMETER, Role.STATE]
        self.data = [key(f"x{i}", rng.choice(WIDTHS)) for i in range(rng.randint(1, 2))]
        self.held = [key(f"w{i}", rng.choice(WIDTHS), rng.choice(roles)) for i in range(rng.randint(1, 3))]
        self.readers: dict[Value, dict[int, None]] = {key: {} for key in (*self.data, *self.held)}
        self.forward: list[list[Value]] = [[] for _ in range(self.count)]
        self.backward: list[list[Value]] = [[] for _ in range(self.count)]
        self.sums: list[list[Value]] = [[] for _ in range(self.count)]
        self.updated: list[tuple[int, Value]] = []  # (stage, key)

    def pick(self, keys: Sequence[Value], chance: float) -> list[Value]:
        """Return some of these keys."""
        return [key for key in keys if self.rng.random() < chance]

    def block(self, stage: int, name: str, inputs: Sequence[Value], sums: int) -> tuple[Block, list[Value]]:
        """Return a block that reads these keys, and the keys that it makes which are no sums."""
        inputs = list(dict.fromkeys(inputs))
        self.rng.shuffle(inputs)
        for key in inputs:
            self.readers.get(key, {})[stage] = None
        script, places = self._script(name, [(key.type.shape[1], key.role) for key in inputs], sums)
        of = {i: self.writer.key(f"{name}{stage}.{i}", script.made[n]) for i, n in enumerate(places)}
        sums_of = {}
        for i, n in enumerate(places):
            if n in script.sums and n not in sums_of:
                sums_of[n] = of[i]
        accumulated = tuple(sums_of[n] for n in script.sums)
        function = self.writer.function(name, script, places)
        more = (
            self.writer.function(f"{name}_next", script, places, accumulating=True) if accumulated else None
        )
        names = [tuple(f"{name}{stage}.op{i}" for i in range(len(f.ops))) for f in (function, more) if f]
        names = names if self.rng.random() < 0.5 else []
        block = Block(function, tuple(inputs), tuple(of.values()), accumulated, more, *names)
        return block, [key for key in of.values() if key not in accumulated]

    def _script(self, name: str, inputs: Inputs, sums: int) -> tuple[Script, tuple[int, ...]]:
        """Return what a block does and returns: something new, or what another stage does."""
        known = self.scripts.setdefault((name, *inputs), [])
        if not known or self.rng.random() < 0.3:
            script = invent_script(self.rng, inputs, self.habits, sums=sums)
            places = [*script.outputs, *script.sums]
            self.rng.shuffle(places)
            known.append((script, tuple(places)))
        return self.rng.choice(known)

    def per_microbatch(self) -> list[tuple[Block, Block]]:
        """Return forward and backward of every stage."""
        forwards = [self._forward(stage) for stage in range(self.count)]
        backwards = [self._backward(stage) for stage in reversed(range(self.count))]
        return list(zip(forwards, reversed(backwards), strict=True))

    def _forward(self, stage: int) -> Block:
        before = [key for keys in self.forward[:stage] for key in keys]
        own = [*self.pick(self.data, 0.4), *self.pick(self.held, 0.4), *self.pick(before, 0.3)]
        own += self.pick(self.forward[stage - 1] if stage else self.data, 0.8)
        block, self.forward[stage] = self.block(stage, "f", own, sums=1)
        self.sums[stage] += block.accumulated
        return block

    def _backward(self, stage: int) -> Block:
        later = [key for keys in self.backward[stage + 1 :] for key in keys]
        made = [key for keys in self.forward for key in keys]
        own = [*self.pick(self.data, 0.2), *self.pick(self.held, 0.4)]
        own += [*self.pick(later, 0.3), *self.pick(made, 0.2), *self.pick(self.forward[stage], 0.7)]
        own += self.pick(self.sums[stage], 0.1)
        own += self.pick(self.backward[stage + 1] if stage + 1 < self.count else [], 0.8)
        block, self.backward[stage] = self.block(stage, "b", own, sums=2)
        self.sums[stage] += block.accumulated
        return block

    def updates(self) -> list[tuple[tuple[int, Block], ...]]:
        """Return the blocks of every stage that run once per step, in up to three rounds."""
        found: list[list[tuple[int, Block]]] = [[] for _ in range(self.count)]
        for number in range(self.rng.randint(0, 3)):
            made: list[tuple[int, Value]] = []
            for stage in range(self.count):
                if self.rng.random() < 0.6:
                    block, keys = self.block(stage, f"u{number}", self._for_update(stage), sums=0)
                    found[stage].append((number, block))
                    made += [(stage, key) for key in keys]
            self.updated += made
        return [tuple(blocks) for blocks in found]

    def _for_update(self, stage: int) -> list[Value]:
        others = [key for keys in (*self.sums, *self.forward, *self.backward) for key in keys]
        own = [
            *self.sums[stage],
            *self.pick(others, 0.2),
            *self.pick(self.held, 0.4),
            *self.pick(self.data, 0.05),
        ]
        return own + self.pick([key for _, key in self.updated], 0.4)

    def inputs(self) -> tuple[ProgramInput, ...]:
        """Return the inputs that a block reads, divided in ways that fit."""
        found = []
        for key, readers in self.readers.items():
            batched = key in self.data
            shards = [(0, "dp", None)] if batched and self.rng.random() < 0.8 else []
            shards += [(1, "tp", None)] if self.rng.random() < 0.3 else []
            stages = tuple(readers) or (self.rng.randrange(self.count),)
            found.append((key, tuple(shards), batched, stages))
        return tuple(
            ProgramInput(self._source(key, shards, b), key, shards, b, stages)
            for key, shards, b, stages in found
        )

    def _source(self, key: Value, shards, batched: bool) -> Value:
        shape = [ROWS, key.type.shape[1]]
        for dim, axis, _ in shards:
            shape[dim] *= self.mesh.axis_size(axis)
        shape[0] *= self.microbatches if batched else 1
        return Value(key.name, Tensor(Float64(), tuple(shape), self.mesh.devices[0]), key.role)

    def outputs(self) -> tuple[ProgramOutput, ...]:
        """Return some of everything that was made."""
        rng, found = self.rng, []
        for stage in range(self.count):
            for key in self.pick(self.sums[stage], 0.6):
                found.append(ProgramOutput(key, (), False, stage))
            for key in self.pick([*self.forward[stage], *self.backward[stage]], 0.2):
                found.append(ProgramOutput(key, (), rng.random() < 0.7, stage))
        for stage, key in self.updated:
            others = [other for other in range(self.count) if other != stage]
            copies = tuple(other for other in others if rng.random() < 0.2)
            found.append(ProgramOutput(key, (), False, stage, copies))
        for key in self.pick([*self.data, *self.held], 0.1):
            if self.readers[key]:
                found.append(ProgramOutput(key, (), key in self.data, rng.choice(list(self.readers[key]))))
        return tuple(found)

    def program(self, schedule: Schedule) -> Program:
        """Return the program."""
        self.microbatches = schedule.num_microbatches
        blocks, updates = self.per_microbatch(), self.updates()
        stages = [
            Stage(self.mesh.at(pp=i), *blocks[i], updates[i])  # forward, backward, updates
            for i in range(self.count)
        ]
        outputs = self.outputs()
        return Program(
            "invented", self.mesh, self.writer.pattern, tuple(stages), schedule, self.inputs(), outputs
        )


def invent(seed: int, microbatches: int | None = None, schedule: str | None = None) -> Case:
    """Return the case of a seed, with these many microbatches and this kind of schedule if given."""
    rng = Random(seed)
    pp, dp, tp = rng.choice([1, 2, 2, 3, 3, 4, 5]), rng.randint(1, 3), rng.randint(1, 3)
    count = microbatches or rng.choice([1, 2, 3, 4, 5, 6, 8, rng.randint(1, 40)])
    topology = invent_topology(rng, pp * dp * tp)
    devices = topology.devices
    if rng.random() < 0.3:
        rng.shuffle(devices)
    mesh = Mesh(devices, pp=pp, dp=dp, tp=tp)
    order = SCHEDULES[schedule or rng.choice(tuple(SCHEDULES))](rng, pp, count)
    return Case(seed, Inventor(rng, mesh).program(order), CostModel(topology), rng.random() < 0.7)


def _seconds(rng: Random) -> tuple[float, ...]:
    """Return the durations of a program: whole numbers that tie, powers of ten, or any."""
    kinds = (
        lambda: (0.0, 1.0, 1.0, 2.0, 3.0, 7.0),
        lambda: (1.0,),
        lambda: tuple(10 ** rng.uniform(-3, 2) for _ in range(5)),
        lambda: (0.0, *(rng.uniform(0.5, 2.0) for _ in range(4))),
        lambda: (0.0, 0.1, 0.3, 0.7),
    )
    return rng.choice(kinds)()
