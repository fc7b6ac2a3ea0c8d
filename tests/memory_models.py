"""Peak memory as a machine would have it, which runs a function with buffers, and functions to run.

Written from the rules in :mod:`distsim.simulate.memory.peak` and nothing else. A variable holds its buffer
until its last use, what a function returns until it has returned; a buffer that no variable holds is free,
unless it is that of a parameter, of state or of a constant. Nothing is planned ahead, nothing is composed.
"""

from collections.abc import Sequence

from hypothesis import strategies as st

from distsim.ir import Device, Float, Function, FunctionMaker, Op, Role, Tensor, Value
from distsim.ir.device import devices_of
from distsim.ops import operator


class Buffer:
    """The memory of a value on its devices, and how many variables hold it."""

    def __init__(self, value: Value) -> None:
        self.place = value.type.device if isinstance(value.type, Tensor) else None
        self.nbytes = 0 if self.place is None else value.type.nbytes
        self.stays = value.role is not Role.INPUT
        self.holders = 0


class Machine:
    """Runs a function: ``peak`` are the most bytes that were in use on each device."""

    def __init__(self, function: Function) -> None:
        self.in_use: dict[Device, int] = {}
        self.peak: dict[Device, int] = {}
        self.run(function, [self.take(self.allocate(value)) for value in function.inputs])

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
            ending = [v for v in dict.fromkeys(op.inputs) if last[v] == number and v not in function.outputs]
            if op.op_type == "Call":
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
            for value in op.outputs:
                if value not in last and value not in function.outputs:
                    self.drop(held.pop(value))
        returned = [self.take(held[value]) for value in function.outputs]
        for buffer in held.values():
            self.drop(buffer)
        return returned

    def shared(
        self, op: Op, place: int, held: dict[Value, Buffer], ending: Sequence[Buffer]
    ) -> Buffer | None:
        """Return the buffer in which a result is: that of a view, or of what nobody holds any longer."""
        meaning = operator(op.op_type)
        if meaning.view:
            buffer = held[op.inputs[0]]
        elif place in meaning.in_place:
            buffer = held[op.inputs[meaning.in_place[place]]]
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
