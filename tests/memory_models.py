"""Peak memory as a machine would have it, which runs a function with buffers, and functions to run.

Written from the rules in :mod:`distsim.simulation.memory.peak` and nothing else. A variable holds its buffer
until its last use, what a function returns until it has returned; a buffer that no variable holds is free,
unless it is that of a parameter, of state or of a constant. Nothing is planned ahead, nothing is composed.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import strategies as st
from program_models import Inventor

from distsim.ir import (
    Attributes,
    Device,
    Float,
    Function,
    FunctionMaker,
    Literal,
    Mesh,
    Op,
    Role,
    Tensor,
    Value,
)
from distsim.ir.device import devices_of
from distsim.ops import operator
from distsim.ops.replaced import replaced_by
from distsim.program.block import Block
from distsim.program.parts import Parts, ProgramOutput
from distsim.program.program import Program
from distsim.schedule import Action, Cell, Kind, Schedule, one_f_one_b
from distsim.schedule.action import HALVES


class Buffer:
    """The memory of a value on its devices, and how many variables hold it."""

    def __init__(self, value: Value) -> None:
        self.place = value.type.device if isinstance(value.type, Tensor) else None
        self.nbytes = 0 if self.place is None else value.type.nbytes
        self.stays = value.role is not Role.INPUT
        self.holders = 0


class Machine:
    """Runs a function: ``peak`` are the most bytes that were in use on each device.

    It runs twice: the first run finds the inputs of which there are new values elsewhere, which do not stay.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.replaced: set[Value] = set()
        for _ in range(2):
            self.in_use: dict[Device, int] = {}
            self.peak: dict[Device, int] = {}
            given = [self.take(self.allocate(value)) for value in function.inputs]
            for value, buffer in zip(function.inputs, given, strict=True):
                buffer.stays &= value not in self.replaced
            self.given = dict(zip(given, function.inputs, strict=True))
            self.versions = {value for value in function.inputs if value.role is not Role.INPUT}
            self.run(function, given)

    def allocate(self, value: Value) -> Buffer:
        buffer = Buffer(value)
        for device in devices_of(buffer.place):
            self.in_use[device] = self.in_use.get(device, 0) + buffer.nbytes
            self.peak[device] = max(self.peak.get(device, 0), self.in_use[device])
        return buffer

    def take(self, buffer: Buffer) -> Buffer:
        buffer.holders += 1
        return buffer

    def drop(self, buffer: Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders and not buffer.stays:
            for device in devices_of(buffer.place):
                self.in_use[device] -= buffer.nbytes

    def run(self, function: Function, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Run a function on buffers that its inputs hold; what it returns is held once for each output."""
        last = {value: number for number, op in enumerate(function.ops) for value in op.inputs}
        held = dict(zip(function.inputs, arguments, strict=True))
        for value in function.inputs:
            if value not in last and value not in function.outputs:
                self.drop(held.pop(value))
        for number, op in enumerate(function.ops):
            before = dict(held)
            ending = [v for v in dict.fromkeys(op.inputs) if last[v] == number and v not in function.outputs]
            if op.is_call:
                given = [self.take(held[value]) for value in op.inputs]
                for value in ending:
                    self.drop(held.pop(value))
                held.update(zip(op.outputs, self.run(op.callee, given), strict=True))
            else:
                for place, value in enumerate(op.outputs):
                    shared = self.shared(op, place, held, [held[value] for value in ending])
                    held[value] = self.take(shared or self.allocate(value))
                for value in ending:
                    self.drop(held.pop(value))
            if function is self.function:
                self.note_replaced(op, held, before)
            for value in op.outputs:
                if value not in last and value not in function.outputs:
                    self.drop(held.pop(value))
        returned = [self.take(held[value]) for value in function.outputs]
        for buffer in held.values():
            self.drop(buffer)
        return returned

    def note_replaced(self, op: Op, held: dict[Value, Buffer], before: dict[Value, Buffer]) -> None:
        """Note the inputs of a function in whose memory the new value is not."""
        for output, taken in replaced_by(op).items():
            value, old = op.outputs[output], op.inputs[taken]
            if old in self.versions:
                self.versions.add(value)
                if held[value] is not before[old] and before[old] in self.given:
                    self.replaced.add(self.given[before[old]])

    def shared(
        self, op: Op, place: int, held: dict[Value, Buffer], ending: Sequence[Buffer]
    ) -> Buffer | None:
        """Return the buffer in which a result is: that of a view, or of what nobody holds any longer."""
        meaning = operator(op.op_type)
        if meaning.view:
            buffer = held[op.inputs[0]]
        elif place in replaced_by(op):
            buffer = held[op.inputs[replaced_by(op)[place]]]
            if buffer.holders > sum(each is buffer for each in ending):
                return None
        else:
            return None
        made = Buffer(op.outputs[place])
        return buffer if (made.place, made.nbytes) == (buffer.place, buffer.nbytes) else None


@st.composite
def functions(draw, depth: int = 0) -> Function:
    """Ops, views, in-place ops and calls of such functions, on any values there are, in any order."""
    maker, values, type_ = FunctionMaker("f"), list[Value](), Tensor(Float(), (100,), Device(0, "gpu"))
    for _ in range(draw(st.integers(1, 3))):
        role = Role.INPUT if depth else draw(st.sampled_from(list(Role)))
        values.append(maker.add_input_value("x", type_, role))
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["Add", "SGDOptimizer", "SGDOptimizer", "Identity", "Call", "Call"]))
        callees = [draw(functions(depth + 1))] if kind == "Call" and depth < 2 else []
        if kind == "Call" and not callees:
            continue
        count = len(callees[0].inputs) if callees else 1 if kind == "Identity" else 2
        given = [draw(st.sampled_from(values)) for _ in range(count)]
        values += maker.add(kind, given, {"lr": 0.1} if kind == "SGDOptimizer" else None, callees)
    maker.set_outputs(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))
    return maker.finalize()


# --- schedules and programs of every kind ---------------------------------------------------------------


def any_schedule(rng: Random, chain: int, microbatches: int, own_pairs: bool = False) -> Schedule:
    """Stages on any rank, whole backwards and halves, pairs, copies of the model.

    The order in which ranks choose among what can run is random, or follows preferences, so that it repeats.
    ``own_pairs``: two actions of one stage may be a pair.
    """
    copies = rng.choice([1, 1, 1, 2])
    stages, num_ranks = chain * copies, rng.randint(1, chain)
    if copies == 2 and chain % num_ranks == 0 and num_ranks % 2 == 0:
        loop = [stage % num_ranks for stage in range(chain)]
        rank_of = [*loop, *(num_ranks - 1 - rank for rank in loop)]
    else:
        copies, stages = 1, chain
        rank_of = [min(s % (2 * num_ranks), 2 * num_ranks - 1 - s % (2 * num_ranks)) for s in range(chain)]
        if rng.random() < 0.5:
            rank_of = [stage % num_ranks for stage in range(chain)]
    halved = rng.choice([0.0, 0.0, 1.0, 0.5])
    halves = {(s, m) for s in range(stages) for m in range(microbatches) if rng.random() < halved}
    paired, cap = rng.choice([0.0, 0.5, 1.0]), rng.randint(1, 2 * chain)
    left: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage in range(stages):
        for m in range(microbatches):
            split = (stage, m) in halves
            kinds = [
                Kind.FORWARD,
                *([Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if split else [Kind.BACKWARD]),
            ]
            left[rank_of[stage]] += [Action(kind, stage, m) for kind in kinds]
    prefer = rng.sample([Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.FORWARD, Kind.BACKWARD_WEIGHT], 4)
    random, backward = rng.random() < 0.4, rng.random() < 0.2

    def wanted(action: Action) -> tuple:
        if random:
            return (rng.random(),)
        reverse = backward and action.kind is not Kind.FORWARD
        return prefer.index(action.kind), -action.microbatch if reverse else action.microbatch, action.stage

    def ready(action: Action) -> bool:
        stage, m = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return stage % chain == 0 or (Kind.FORWARD, stage - 1, m) in done
        if action.kind is Kind.BACKWARD_WEIGHT:
            return (Kind.BACKWARD_INPUT, stage, m) in done
        last = (stage + 1) % chain == 0
        after = Kind.BACKWARD_INPUT if (stage + 1, m) in halves else Kind.BACKWARD
        return (Kind.FORWARD, stage, m) in done and (last or (after, stage + 1, m) in done)

    done: set[tuple[Kind, int, int]] = set()
    place_of = {action: place for own in left for place, action in enumerate(own)}
    waiting = [[*range(len(own))] for own in left]  # places of those that are not ready
    able: list[set[int]] = [set() for _ in left]
    ranks: list[list[Cell]] = [[] for _ in range(num_ranks)]
    flying = [0] * num_ranks
    while any(waiting) or any(able):
        cells: list[Cell] = []
        for rank, own in enumerate(left):
            able[rank].update(place for place in waiting[rank] if ready(own[place]))
            waiting[rank] = [place for place in waiting[rank] if place not in able[rank]]
            can = sorted([own[place] for place in sorted(able[rank])], key=wanted)
            few = [a for a in can if a.kind is not Kind.FORWARD or flying[rank] < cap]
            if not (few or can):
                continue
            one = (few or can)[0]
            sums = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            others = [a for a in can if a.kind is not one.kind]
            others = [
                a
                for a in others
                if a.stage != one.stage or (own_pairs and not {a.kind, one.kind}.issubset(sums))
            ]
            cells.append((one, others[0]) if others and rng.random() < paired else (one,))
        for cell in cells:
            rank = rank_of[cell[0].stage]
            ranks[rank].append(cell)
            for action in cell:
                able[rank].remove(place_of[action])
                flying[rank] += {"F": 1, "B": -1, "W": -1}.get(action.kind.value, 0)
        done.update([(action.kind, action.stage, action.microbatch) for cell in cells for action in cell])
    return Schedule("any", stages, microbatches, ranks, rank_of, copies)


class Placed(Inventor):
    """Invents a program for a schedule with its stages on any ranks.

    Where there are copies of the model, what a microbatch makes is no output, and no update reads it, unless
    it is put together over all.
    """

    copies = 1

    def _for_update(self, stage: int) -> list[Value]:
        own = super()._for_update(stage)
        made = {key for keys in (*self.forward, *self.backward) for key in keys} | set(self.data)
        return own if self.copies == 1 else [key for key in own if key not in made]

    def outputs(self) -> tuple[ProgramOutput, ...]:
        """Return some of everything that was made."""
        made = {key for keys in (*self.forward, *self.backward) for key in keys} | set(self.data)
        outputs = super().outputs()
        return tuple([o for o in outputs if self.copies == 1 or o.microbatched or o.key not in made])

    def placed(self, schedule: Schedule, mesh: Mesh) -> Program:
        """Return the program on a mesh of the schedule's ranks."""
        whole = self.program(one_f_one_b(self.count, schedule.num_microbatches))
        halves = [self.halves(s, stage.backward) for s, stage in enumerate(whole.stages)]
        blocks = tuple([(stage.forward, stage.backward, stage.updates) for stage in whole.stages])
        parts = Parts("invented", blocks, whole.inputs, whole.outputs, {HALVES.made_by: tuple(halves)})
        slices = mesh.slices("pp")
        stages = [replace(stage, mesh=slices[schedule.rank_of[s]]) for s, stage in enumerate(whole.stages)]
        return replace(whole, mesh=mesh, stages=tuple(stages), schedule=schedule, shared_parts=parts)

    def halves(self, stage: int, whole: Block) -> tuple[Block, Block]:
        """Cut a backward in two: both compute all of it, W reads a value of I besides."""
        sums = set(whole.accumulated)
        pending = self.writer.key(f"pending{stage}", 1)
        first = [i for i, key in enumerate(whole.outputs) if key not in sums]
        second = [i for i, key in enumerate(whole.outputs) if key in sums]
        if not second:
            return (whole, Block(_part(whole.function, []), whole.inputs, ()))
        rest = _part(whole.function, second, extra=pending)
        more = _part(whole.accumulating, second, pending, len(whole.accumulated)) if sums else None
        half = Block(
            _part(whole.function, first, made=pending),
            whole.inputs,
            (*(whole.outputs[i] for i in first), pending),
        )
        outputs = tuple(whole.outputs[i] for i in second)
        return half, Block(rest, (*whole.inputs, pending), outputs, whole.accumulated, more)


def _part(
    function: Function,
    outputs: Sequence[int],
    extra: Value | None = None,
    sums: int = 0,
    made: Value | None = None,
) -> Function:
    """Return a function with some of its outputs, one more input before its sums, or one more result."""
    returned, inputs = [function.outputs[i] for i in outputs], list(function.inputs)
    ops = list(function.ops)
    if extra is not None:
        given = Value("pending", extra.type)
        inputs.insert(len(inputs) - sums, given)
        ops.append(Op("ModelWork", (given,), (Value("read", extra.type),), Attributes({"flops": 1.0})))
    if made is not None:
        value = Literal(np.full(made.type.shape, 0.5))
        result = Value("pending", made.type)
        attributes = Attributes({"value": value, "device": made.type.device})
        ops.append(Op("Constant", (), (result,), attributes))
        returned.append(result)
    return Function(function.name, tuple(inputs), tuple(ops), tuple(returned))


def invent_placed(seed: int) -> Program:
    """Return a program of any stages under any schedule."""
    rng = Random(seed)
    chain, dp, tp = rng.choice([1, 2, 3, 4, 4, 6]), rng.randint(1, 2), rng.randint(1, 2)
    count = rng.choice([1, 2, 3, 4, 6, 8, 12, rng.randint(1, 24)])
    schedule = any_schedule(rng, chain, count, own_pairs=True)
    devices = [Device(i, "gpu") for i in range(max(chain, schedule.num_ranks) * dp * tp)]
    mesh = Mesh(devices[: schedule.num_ranks * dp * tp], pp=schedule.num_ranks, dp=dp, tp=tp)
    inventor = Placed(rng, Mesh(devices[: chain * dp * tp], pp=chain, dp=dp, tp=tp))
    inventor.copies = schedule.copies
    return inventor.placed(schedule, mesh)
