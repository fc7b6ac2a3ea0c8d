"""Choosing how every op and value is placed along one axis of ranks, all at once.

One variable per op (its strategy) and one per value (the state in which it is handed on: a partial
sum is taken once, for all readers). A function that is called many times has its variables once, so
all of its calls are placed alike. The objective is time, counted in bytes sent: what the collectives
move, and the matrix flops of a rank at the machine's balance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from distsim.errors import PlanError
from distsim.executor.cost_model import element_type
from distsim.ir import Device, Function, Op, Tensor, Value
from distsim.ir.function import callees
from distsim.ops import Pieces, operator, signature_of, work
from distsim.ops.operator import factors_of, labels_of
from distsim.transforms.eliminate import Problem, Solution, Table, solve
from distsim.transforms.placement import FORBIDDEN, PARTIAL, REPLICATED, State, divisible, moved_bytes
from distsim.transforms.strategies import Allowed, Strategy, rule_of, strategies

LINK_SHARE = 1 / 7
"""What a link moves of what device memory moves: A100, 300e9 of 2.0e12 byte/s (NVIDIA A100 datasheet).
The placement is chosen before the links are known, and for all axes alike."""
UNDIVIDED = 16.0
"""Who asks for ranks wants the work divided, and the weights with it: matrix flops that are not count this
many times, so that a product stays whole only where dividing it sends far more than it saves."""
DIVIDED_SHARE = 0.67
"""A placement that divides less than this of the matrix flops all the same (small models: the backward
pass alone is two thirds) is given up for one that divides all it can, as the batch always is."""
INSISTENT = 1e7
"""How many times undivided flops count then."""
TOUCH_WEIGHT = 1e-6
"""Cost of a byte that a kernel touches on its own device: breaks ties between equal communication."""
BATCH_TOUCH_WEIGHT = 1e3
"""The same over the batch, of which every op is divided if at all possible."""
START_BYTES = 1048576.0
"""A collective costs its start besides its bytes: some 10 us, in which 100 GB/s move 1 MiB."""
READER_WEIGHT = 1e-9
"""Breaks ties: a collective that one reader asks for is run where the value is made, so early."""
AVOIDED = 1e6
"""Times dearer, over the batch, is what microbatches cannot do: bring a divided value together, divide
one that is made once, or take a sum inside a callee. It is chosen where nothing else is possible."""


@dataclass(frozen=True)
class Decision:
    """How ops and values are placed along one axis.

    ``moved`` is the bytes sent per rank and step, ``divided`` the share of the matrix flops that is
    divided over the ranks, ``proven`` whether no placement costs less.
    """

    strategies: Mapping[Op, Strategy]
    states: Mapping[Value, State]
    moved: float
    proven: bool
    divided: float = 1.0

    def state(self, value: Value) -> State:
        """Return the state in which a value is handed on."""
        return self.states.get(value, REPLICATED)


@dataclass(frozen=True)
class Axis:
    """What the choice may do: ``ranks`` ranks, factors that may be divided, states that are given."""

    ranks: int
    device: Device
    allowed: Callable[[Op], Allowed]
    given: Mapping[Value, State]
    over_time: bool = False
    """The axis is the batch, which is divided over microbatches as well."""
    repeats: Mapping[Value, float] | None = None
    """How often a value is moved: in parts of the batch it is once in all, a weight every time anew."""


def decide(function: Function, axis: Axis) -> Decision:
    """Return the least-cost placement of every op and value of ``function`` and of its callees."""
    chooser = _Chooser(function, axis)
    if not axis.over_time:
        found = chooser.decide(UNDIVIDED)
        if found.divided >= DIVIDED_SHARE:
            return found
    return chooser.decide(INSISTENT)


def can_divide(function: Function, axis: Axis) -> bool:
    """Return whether any matrix product of ``function`` or its callees can be divided over the ranks."""
    functions = (*callees(function), function)
    pieces = pieces_of(functions)
    products = (op for f in functions for op in f.ops if op.op_type != "Call" and _matrix_flops(op) > 0)
    return any(
        strategy.factor is not None
        for op in products
        for strategy in strategies(signature_of(op), axis.ranks, axis.allowed(op), pieces)
    )


class _Chooser:
    def __init__(self, function: Function, axis: Axis) -> None:
        self.function, self.axis = function, axis
        self.insistence = 1.0
        self.functions = (*callees(function), function)
        self.times = _times_called(function)
        self.pieces = pieces_of(self.functions)
        self.options: dict[Op, tuple[Strategy, ...]] = {}
        self.domains: dict[Value, tuple[State, ...]] = {}
        ops = [(op, self.times[id(f)]) for f in self.functions for op in f.ops if op.op_type != "Call"]
        self.top = frozenset(function.ops)
        self.inputs = frozenset(function.inputs)
        self.ops = ops
        self._options()
        self._domains()

    def _divided(self, chosen: Mapping[Op, Strategy]) -> float:
        total = sum(times * _matrix_flops(op) for op, times in self.ops)
        done = sum(times * _matrix_flops(op) for op, times in self.ops if chosen[op].factor is not None)
        return done / total if total else 1.0

    def decide(self, insistence: float) -> Decision:
        """Return the least-cost placement when undivided flops count ``insistence`` times."""
        self.insistence = insistence
        self.problem = Problem()
        self.op_variable: dict[Op, int] = {}
        self.value_variable = {v: self.problem.variable(self._held(v)) for v in self.domains}
        for op, times in self.ops:
            self._add_op(op, times)
        for current in self.functions:
            for op in current.ops:
                if op.op_type == "Call":
                    self._add_call(op, self.times[id(current)])
        self._ends()
        solution = solve(self.problem)
        if not np.isfinite(solution.cost):
            raise PlanError(
                f"{self.function.name}: no way to run it on {self.axis.ranks} ranks agrees with the "
                "placements that are given"
            )
        return self._result(solution)

    def _options(self) -> None:
        axis = self.axis
        for op, _ in self.ops:
            signature = signature_of(op)
            allowed = axis.allowed(op)
            outputs_only = _outputs_only(op)
            found = strategies(
                signature, axis.ranks, lambda f, p, a=allowed, o=outputs_only: f in o or a(f, p), self.pieces
            )
            self.options[op] = found

    def _domains(self) -> None:
        """A value may be in any state that its producer makes or that a reader asks for."""
        wanted: dict[Value, dict[State, None]] = {}
        made: dict[Value, dict[State, None]] = {}
        for op, _ in self.ops:
            for strategy in self.options[op]:
                for value, state in zip(op.inputs, strategy.inputs, strict=True):
                    wanted.setdefault(value, {})[state] = None
                for value, state in zip(op.outputs, strategy.outputs, strict=True):
                    made.setdefault(value, {})[state] = None
        calls = [op for f in self.functions for op in f.ops if op.op_type == "Call"]
        for call in (*calls, *reversed(calls)):  # states travel through calls both ways
            for outer, inner in zip(call.inputs, call.callee.inputs, strict=True):
                wanted.setdefault(outer, {}).update(wanted.get(inner, {}))
                made.setdefault(inner, {}).update(made.get(outer, {}))
            for outer, inner in zip(call.outputs, call.callee.outputs, strict=True):
                made.setdefault(outer, {}).update(made.get(inner, {}))
                wanted.setdefault(inner, {}).update(wanted.get(outer, {}))
        inputs = self.inputs
        for value in (
            v for f in self.functions for v in (*f.inputs, *(o for op in f.ops for o in op.outputs))
        ):
            states = {REPLICATED: None, **made.get(value, {}), **wanted.get(value, {})}
            if value in inputs:
                states.pop(PARTIAL, None)
            fits = tuple(s for s in states if divisible(_tensor(value).shape, s, self.axis.ranks))
            given = self.axis.given.get(value)
            self.domains[value] = fits if given is None else (given,)

    def _held(self, value: Value) -> list[float]:
        """What it costs to keep an input, so that a rank keeps only the part that it uses."""
        whole = TOUCH_WEIGHT * _tensor(value).nbytes if value in self.inputs else 0.0
        return [whole / self.axis.ranks if state.sharded else whole for state in self.domains[value]]

    def _add_op(self, op: Op, times: int) -> None:
        options, ranks = self.options[op], self.axis.ranks
        flops = _matrix_flops(op) / self._flops_per_byte(op)
        touched = (BATCH_TOUCH_WEIGHT if self.axis.over_time else TOUCH_WEIGHT) * _touched(op)
        costs = [
            times * ((flops + touched) / ranks if s.factor is not None else self.insistence * flops + touched)
            for s in options
        ]
        variable = self.problem.variable(costs)
        self.op_variable[op] = variable
        for index, value in enumerate(op.outputs):
            scale = times * self._repeats(value)
            raw = tuple(s.outputs[index] for s in options)
            table = self._moves(op, value, raw, self.domains[value]) * scale
            self._pair(variable, value, table)
        for index, value in enumerate(op.inputs):
            scale = times * self._repeats(value)
            asked = tuple(s.inputs[index] for s in options)
            table = self._moves(op, value, self.domains[value], asked) * (scale * (1 + READER_WEIGHT))
            self._pair(variable, value, table.T)

    def _moves(self, op: Op, value: Value, sources: tuple[State, ...], targets: tuple[State, ...]) -> Table:
        table = _moves(_tensor(value), sources, targets, self.axis.ranks)
        if self.axis.over_time:
            avoided = PARTIAL if op not in self.top else None
            dear = np.array([[s.sharded or s is avoided or t.sharded for t in targets] for s in sources])
            moved = np.array([[s != t for t in targets] for s in sources])
            table = table + np.where(dear & moved, AVOIDED * _tensor(value).nbytes, 0.0)
        return table

    def _add_call(self, op: Op, times: int) -> None:
        sources = (*op.inputs, *op.callee.outputs)
        targets = (*op.callee.inputs, *op.outputs)
        for source, target in zip(sources, targets, strict=True):
            scale = times * self._repeats(source)
            table = self._moves(op, source, self.domains[source], self.domains[target]) * scale
            self._pair(self.value_variable[source], target, table)

    def _flops_per_byte(self, op: Op) -> float:
        """Return the flops that take as long as sending one byte."""
        device = self.axis.device
        return device.peak(element_type(signature_of(op))) / (LINK_SHARE * device.dram_bandwidth)

    def _repeats(self, value: Value) -> float:
        return 1.0 if self.axis.repeats is None else self.axis.repeats.get(value, 1.0)

    def _pair(self, variable: int, value: Value, table: Table) -> None:
        self.problem.pair(variable, self.value_variable[value], table)

    def _ends(self) -> None:
        """Outputs are not partial; what is updated in place stays where it is."""
        producer = {value: op for op in self.function.ops for value in op.outputs}
        inputs = self.inputs
        for value in self.function.outputs:
            domain = self.domains[value]
            self.problem.unary[self.value_variable[value]] += [
                FORBIDDEN if state is PARTIAL else 0.0 for state in domain
            ]
            op = producer.get(value)
            place = None if op is None else operator(op.op_type).in_place.get(op.outputs.index(value))
            if op is not None and place is not None and op.inputs[place] in inputs:
                source = op.inputs[place]
                same = [[0.0 if a == b else FORBIDDEN for b in domain] for a in self.domains[source]]
                self._pair(self.value_variable[source], value, np.array(same))

    def _result(self, solution: Solution) -> Decision:
        chosen = {op: self.options[op][solution.choices[v]] for op, v in self.op_variable.items()}
        states = {v: self.domains[v][solution.choices[n]] for v, n in self.value_variable.items()}
        moved = self._moved(chosen, states)
        return Decision(chosen, states, moved, solution.proven, self._divided(chosen))

    def _moved(self, chosen: Mapping[Op, Strategy], states: Mapping[Value, State]) -> float:
        """Return the bytes sent per rank; a state that several readers ask for is made once."""
        moved = 0.0
        for function in self.functions:
            moves: dict[tuple[Value, State, State], None] = {}
            for op in function.ops:
                if op.op_type == "Call":
                    inputs = [states[v] for v in op.callee.inputs]
                    outputs = [states[v] for v in op.callee.outputs]
                else:
                    inputs, outputs = list(chosen[op].inputs), list(chosen[op].outputs)
                moves |= {(v, s, states[v]): None for v, s in zip(op.outputs, outputs, strict=True)}
                moves |= {(v, states[v], s): None for v, s in zip(op.inputs, inputs, strict=True)}
            ranks = self.axis.ranks
            sent = sum(self._repeats(v) * moved_bytes(_tensor(v), s, t, ranks) for v, s, t in moves)
            moved += self.times[id(function)] * sent
        return moved


@lru_cache(maxsize=65536)
def _moves(tensor: Tensor, sources: tuple[State, ...], targets: tuple[State, ...], ranks: int) -> Table:
    # Forbidden moves stay infinite whatever the scale; 0 * inf does not occur as scales are positive.
    ranks = max(ranks, 2)
    table = np.array([[moved_bytes(tensor, s, t, ranks) for t in targets] for s in sources])
    table = np.where(table > 0, table + START_BYTES, table)
    own_part = np.array([[s is REPLICATED and t is not s for t in targets] for s in sources])
    return np.where(own_part, TOUCH_WEIGHT * 2 * tensor.nbytes, table)  # a copy on the device


def _times_called(function: Function) -> dict[int, int]:
    times = {id(function): 1}
    for current in (function, *reversed(callees(function))):
        for op in current.ops:
            if op.op_type == "Call":
                times[id(op.callee)] = times.get(id(op.callee), 0) + times[id(current)]
    return times


def pieces_of(functions: tuple[Function, ...]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return, by size of a dimension, the pieces that some op makes of such a dimension."""
    found: dict[int, dict[tuple[int, ...], None]] = {}
    for op in (op for f in functions for op in f.ops if op.op_type != "Call"):
        rule = rule_of(signature_of(op))
        for dim in (dim for dims in (*rule.inputs, *rule.outputs) for dim in dims) if rule else ():
            for label in labels_of(dim):
                if isinstance(label, Pieces):
                    found.setdefault(sum(label.sizes), {})[label.sizes] = None
    return {size: tuple(pieces) for size, pieces in found.items()}


def _outputs_only(op: Op) -> frozenset[str]:
    """Factors that no input has: the op makes the same numbers on every rank, so may make fewer."""
    rule = rule_of(signature_of(op))
    if rule is None:
        return frozenset()
    inputs = {factor for dims in rule.inputs for dim in dims for factor in factors_of(dim)}
    outputs = {factor for dims in rule.outputs for dim in dims for factor in factors_of(dim)}
    return frozenset(outputs - inputs)


def _matrix_flops(op: Op) -> float:
    found = work(signature_of(op))
    return found.flops if found is not None and found.matrix else 0.0


def _touched(op: Op) -> float:
    return float(sum(_tensor(value).nbytes for value in (*op.inputs, *op.outputs)))


def _tensor(value: Value) -> Tensor:
    if not isinstance(value.type, Tensor):
        raise PlanError(f"{value.name} must be a tensor, not {value.type}")
    return value.type
