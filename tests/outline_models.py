"""Functions in which blocks repeat, and the check that two functions are one, op by op."""

from collections.abc import Sequence

from training_models import F64, Maker

from distsim.ir import Function, FunctionMaker, Role, Tensor, Value, callees
from distsim.ir.rewrite import flatten
from distsim.models import mlp

SHAPE = (2, 4)


def flat(function: Function) -> Function:
    """The function without Calls."""
    return flatten(function)


def layers(count: int, **options: int) -> Function:
    """A flat MLP."""
    sizes = {"width": 8, "batch": 8, **options}
    return flat(mlp(count, dtype=F64, **sizes))


def calls(function: Function) -> dict[str, int]:
    """How often each callee is called."""
    found = {callee.name: 0 for callee in reversed(callees(function))}
    for caller in (function, *callees(function)):
        for op in caller.ops:
            if op.is_call:
                found[op.callee.name] += 1
    return found


def distinct(function: Function) -> int:
    """Ops when each callee is written once."""
    return sum(len(f.ops) for f in (function, *callees(function)))


def meaning(function: Function) -> list[int]:
    """A number for each output that says all of how it is made from the inputs, whatever the order of ops.

    Two functions whose outputs have equal numbers (in one ``table``) are the same expression.
    """
    return _meaning(function, TABLE)


TABLE: dict[object, int] = {}


def _meaning(function: Function, table: dict[object, int]) -> list[int]:
    numbers: dict[Value, int] = {}
    for index, value in enumerate(function.inputs):
        key = ("input", index, value.name, value.type, value.role)
        numbers[value] = table.setdefault(key, len(table))
    for op in function.ops:
        given = tuple(numbers[value] for value in op.inputs)
        for index, value in enumerate(op.outputs):
            key = (op.op_type, op.attributes, op.version, given, index, value.type)
            numbers[value] = table.setdefault(key, len(table))
    return [numbers[value] for value in function.outputs]


# --- functions written by recipe: steps are (kind, where the operands come from) ----------------------

UNARY = ("Relu", "Tanh", "Neg")
BINARY = ("Add", "Mul", "Sub")
Step = tuple[str, int, int]
"""(kind, how far back the first operand lies, how far back the second one)."""


class Recipe:
    """Writes steps into a function; values before the first are the data input."""

    def __init__(self) -> None:
        self.make = Maker("recipe")
        self.values = [self.make.data("x", *SHAPE)]
        self.shared = self.make.parameter("shared", *SHAPE)
        self.weights = 0

    def back(self, distance: int) -> Value:
        return self.values[-min(distance, len(self.values))]

    def step(self, step: Step) -> None:
        kind, one, two = step
        first, second = self.back(one), self.back(two)
        if kind == "weight":
            self.weights += 1
            weight = self.make.parameter(f"w{self.weights}", SHAPE[1], SHAPE[1])
            self.values.append(self.make("MatMul", first, weight))
        elif kind == "shared":
            self.values.append(self.make("Add", first, self.shared))
        elif kind == "split":
            left, right = self.make.add("Split", [first], {"axis": 1, "num_outputs": 2})
            self.values.append(self.make("Concat", right, left, axis=1))
        elif kind in UNARY:
            self.values.append(self.make(kind, first))
        else:
            self.values.append(self.make(kind, first, second))

    def block(self, steps: Sequence[Step], times: int) -> None:
        for _ in range(times):
            for step in steps:
                self.step(step)

    def end(self, unread: bool = False) -> Function:
        """End in a loss of the last four values, or of all values that nothing reads."""
        target = self.make.data("target", *SHAPE)
        read = {value for op in self.make.ops for value in op.inputs}
        *rest, total = [v for v in self.values if v not in read] if unread else self.values[-4:]
        for value in rest:
            total = self.make("Add", total, value)
        return self.make.end(self.make("Loss", total, target, N=SHAPE[0]))


def masked_layers(count: int) -> Function:
    """Layers that share a mask which the first one makes in its midst, as exporters write it."""
    make = FunctionMaker("masked")
    x = make.add_input_value("x", Tensor(F64, (4, 4)))
    seen = make.add_input_value("seen", Tensor(F64, (4, 4)))
    mask: Value | None = None
    for index in range(count):
        weights = [
            make.add_input_value(f"h.{index}.{name}", Tensor(F64, (4, 4)), Role.PARAMETER)
            for name in ("up.weight", "down.weight")
        ]
        wide = make.add("MatMul", [x, weights[0]], name=f"m.h.{index}.up/mm")[0]
        if mask is None:
            mask = make.add("Mul", [seen], {"B": -1e4}, name="m.h.0/mask")[0]
        wide = make.add("Add", [wide, mask], name=f"m.h.{index}/add")[0]
        x = make.add("MatMul", [wide, weights[1]], name=f"m.h.{index}.down/mm")[0]
    make.set_outputs([x])
    return make.finalize()
