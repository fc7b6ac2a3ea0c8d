"""What is distinct in a function: its ops once per callee, its values in groups that are alike.

A function of many layers has few distinct callees, but values of its own for each layer: parameters,
gradients, activations. Values that only Calls make and read, in the same places of the same callees,
cost the same wherever they are placed, so one choice for all of them is as good as one for each. The same
holds of ops of one operand that stand between such Calls, as a cast of each gradient. The choice of
placements is therefore made per *group*: its price is that of what is distinct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distsim.errors import PlanError
from distsim.ir import Function, Op, Role, Tensor, Value
from distsim.ir.function import callees
from distsim.ops import Signature, operator, sharding_rule, signature_of, work


@dataclass(frozen=True, slots=True)
class Group:
    """Values of one function that are alike: of one type, made and read in the same places.

    ``count`` is how many there are, ``times`` how often their function is called, ``role`` that of an
    input of the whole function (None: not one), ``returned`` whether the whole function returns them.
    """

    type: Tensor
    count: int
    times: int
    role: Role | None
    returned: bool


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """Plain ops that are alike, mostly one: how often they run, each one's matrix flops and bytes touched,
    and the groups of their values."""

    ops: tuple[Op, ...]
    signature: Signature
    times: int
    top: bool
    flops: float
    touched: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def op(self) -> Op:
        """The first of the ops."""
        return self.ops[0]


@dataclass(frozen=True, slots=True)
class Tie:
    """A value handed to a callee or back: from one group to another, ``times`` in all.

    ``outer`` is the one of the two that belongs to the caller, ``top`` whether that is the whole function,
    ``in_place`` whether the callee overwrites it.
    """

    source: int
    target: int
    outer: int
    times: int
    top: bool
    in_place: bool


@dataclass(frozen=True, eq=False)
class Structure:
    """The distinct ops, values and Calls of a function."""

    name: str
    nodes: tuple[Node, ...]
    groups: tuple[Group, ...]
    ties: tuple[Tie, ...]
    number: Mapping[Value, int]
    """The group of each value."""
    pinned: frozenset[int] = frozenset()
    """The groups whose values stay sums that are not yet taken, if they are made so: see :func:`_pinned`."""
    weights: frozenset[int] = frozenset()
    """The groups of parameters that products read, and of what follows from such alone: see
    :func:`_weights`."""


def structure_of(function: Function, known: Mapping[Value, Role], merged: bool = True) -> Structure:
    """Return what is distinct in ``function``, whose inputs have the roles ``known``.

    Where an output is written in place of an input, both are one value. With ``merged=False`` every
    other value is a group of its own.
    """
    return _GraphBuilder(function, known, merged).build()


def written(op: Op, index: int) -> int | None:
    """Return the operand whose memory an output of ``op`` takes over, also where a callee does it."""
    if not op.is_call:
        return operator(op.op_type).in_place.get(index)
    callee = op.callee
    value = callee.outputs[index]
    for inner in callee.ops:
        if value in inner.outputs:
            place = written(inner, inner.outputs.index(value))
            if place is None or inner.inputs[place] not in callee.inputs:
                return None
            return callee.inputs.index(inner.inputs[place])
    return None


def overwritten(op: Op) -> frozenset[int]:
    """Return the operands whose memory outputs of ``op`` take over."""
    if not op.is_call:
        places = operator(op.op_type).in_place
        return frozenset([place for index, place in places.items() if index < len(op.outputs)])
    found = [written(op, index) for index in range(len(op.outputs))]
    return frozenset([place for place in found if place is not None])


_Use = tuple[int, bool, int]
"""(callee, whether it makes the value, which argument or result)."""


class _GraphBuilder:
    def __init__(self, function: Function, known: Mapping[Value, Role], merged: bool) -> None:
        self.function, self.known, self.merged = function, known, merged
        self.functions = (*callees(function), function)
        self.place = {each: number for number, each in enumerate(self.functions)}
        self.times = _times_called(function)
        self.number: dict[Value, int] = {}
        self.groups: list[Group] = []
        self.between: dict[Op, object] = {}  # ops between Calls, with what tells them apart

    def build(self) -> Structure:
        for function in self.functions:
            self._group(function)
        nodes: list[Node] = []
        ties: dict[tuple[int, int, int, bool, bool], int] = {}
        taken: dict[Function, frozenset[int]] = {}
        for function in self.functions:
            times, top = self.times[function], function is self.function
            alike: dict[object, list[Op]] = {}
            for op in function.ops:
                if not op.is_call:
                    alike.setdefault(self.between.get(op, op), []).append(op)
                    continue
                if op.callee not in taken:
                    taken[op.callee] = overwritten(op)
                pairs = zip(self._of(op.inputs), self._of(op.callee.inputs), strict=True)
                for place, (outer, inner) in enumerate(pairs):
                    key = (outer, inner, outer, top, place in taken[op.callee])
                    ties[key] = ties.get(key, 0) + times
                for inner, outer in zip(self._of(op.callee.outputs), self._of(op.outputs), strict=True):
                    key = (inner, outer, outer, top, False)
                    ties[key] = ties.get(key, 0) + times
            nodes += [self._node(tuple(ops), times, top) for ops in alike.values()]
        found = tuple(
            Tie(s, t, outer, times, top, in_place) for (s, t, outer, top, in_place), times in ties.items()
        )
        marked = _pinned(nodes, found), _weights(nodes, self.groups, found)
        return Structure(self.function.name, tuple(nodes), tuple(self.groups), found, self.number, *marked)

    def _of(self, values: tuple[Value, ...]) -> tuple[int, ...]:
        return tuple([self.number[value] for value in values])

    def _node(self, ops: tuple[Op, ...], times: int, top: bool) -> Node:
        op, times = ops[0], times * len(ops)
        signature = signature_of(op)
        demand = work(signature)
        flops = demand.flops if demand is not None and demand.matrix else 0.0
        touched = float(sum(tensor.nbytes for tensor in (*signature.inputs, *signature.outputs)))
        return Node(ops, signature, times, top, flops, touched, self._of(op.inputs), self._of(op.outputs))

    def _group(self, function: Function) -> None:
        """Give every value of one function its group."""
        top = function is self.function
        homes = _in_place(function) if top else {}
        uses, alone = self._uses(function, homes)
        around = self._between(function, homes, uses, alone) if top and self.merged else {}
        returned = {homes.get(value, value) for value in function.outputs} if top else set[Value]()
        keys: dict[object, int] = {}
        counts: list[int] = []
        first = len(self.groups)
        members: list[tuple[Value, Role | None]] = []
        values = [*function.inputs, *(v for op in function.ops for v in op.outputs)]
        for value in values:
            home = homes.get(value, value)
            if home is not value:
                self.number[value] = self.number[home]
                continue
            role = self.known.get(value) if top else None
            own = uses[value]
            key: object = (value.type, role, value in returned, around.get(value), *sorted(own))
            if value in alone:
                key = value
            place = keys.setdefault(key, len(members))
            if place == len(members):
                members.append((value, role))
                counts.append(0)
            counts[place] += 1
            self.number[value] = first + place
        times = self.times[function]
        self.groups += [
            Group(_tensor(value), count, times, role, value in returned)
            for (value, role), count in zip(members, counts, strict=True)
        ]

    def _between(
        self,
        function: Function,
        homes: Mapping[Value, Value],
        uses: Mapping[Value, Sequence[_Use]],
        alone: set[Value],
    ) -> dict[Value, object]:
        """Find the ops of one operand between Calls; of what they read and make, say what tells it apart."""
        plain = [op for op in function.ops if not op.is_call]
        touched = Counter([homes.get(value, value) for op in plain for value in (*op.inputs, *op.outputs)])
        held = {*function.inputs, *function.outputs}
        found: dict[Value, object] = {}
        for op in plain:
            values = (*op.inputs, *op.outputs)
            if (len(op.inputs), len(op.outputs)) != (1, 1) or not held.isdisjoint(values):
                continue
            if any(touched[value] > 1 for value in values):
                continue
            ends = [(value.type, *sorted(uses[value])) for value in values]
            self.between[op] = key = (op.op_type, op.attributes, op.version, *ends)
            for place, value in enumerate(values):
                found[value] = place, key
                alone.discard(value)
        return found

    def _uses(
        self, function: Function, homes: Mapping[Value, Value]
    ) -> tuple[dict[Value, list[_Use]], set[Value]]:
        """Return where Calls make and read each value, and the values that are a group of their own."""
        uses: dict[Value, list[_Use]] = {value: [] for value in function.inputs}
        alone: set[Value] = set()
        for op in function.ops:
            uses.update((value, []) for value in op.outputs)
            if not op.is_call:
                alone.update(homes.get(v, v) for v in (*op.inputs, *op.outputs))
                continue
            callee = self.place[op.callee]
            for index, value in enumerate(op.inputs):
                uses[homes.get(value, value)].append((callee, False, index))
            for index, value in enumerate(op.outputs):
                uses[homes.get(value, value)].append((callee, True, index))
        if not self.merged:
            alone.update(uses)
        elif function is not self.function:  # ties bind these to other values, of the caller
            alone.update((*function.inputs, *function.outputs))
        return uses, alone


def _pinned(nodes: Sequence[Node], ties: Sequence[Tie]) -> frozenset[int]:
    """Return the groups that pinned ops read, and those of which these are made by linear ops of little work.

    Through additions, views, transpositions and the like the sum could be taken earlier, through Calls too.
    """
    found = {number for node in nodes if operator(node.op.op_type).pinned for number in node.inputs}
    made = {number: node for node in nodes for number in node.outputs}
    sources: dict[int, list[int]] = {}
    for tie in ties:
        sources.setdefault(tie.target, []).append(tie.source)
    todo = list(found)
    while todo:
        number = todo.pop()
        before = list(sources.get(number, ()))
        node = made.get(number)
        if node is not None and not node.flops:
            rule = sharding_rule(node.signature)
            places = range(len(node.inputs))
            if rule is not None and tuple(places) in rule.linear:  # in all that it reads, jointly
                before += node.inputs
        fresh = [each for each in before if each not in found]
        found.update(fresh)
        todo += fresh
    return frozenset(found)


def _weights(nodes: Sequence[Node], groups: Sequence[Group], ties: Sequence[Tie]) -> frozenset[int]:
    """Return the groups of parameters that products read, cast or transposed maybe, as callees have them too.

    A table that no product reads, of positions or of an embedding, is none.
    """
    sources: dict[int, list[int]] = {}
    for tie in ties:
        sources.setdefault(tie.target, []).append(tie.source)
    for node in nodes:
        if len(node.inputs) == 1 and not node.flops:
            for number in node.outputs:
                sources.setdefault(number, []).append(node.inputs[0])
    read = {number for node in nodes if node.flops for number in node.inputs}
    found = set[int]()
    for number in read:
        chain, todo = {number}, [number]
        while todo:
            last = todo.pop()
            before = sources.get(last, ()) if groups[last].role is None else ()  # an update writes parameters
            fresh = [each for each in before if each not in chain]
            chain.update(fresh)
            todo += fresh
        roots = [each for each in chain if each not in sources or groups[each].role is not None]
        if all(groups[each].role is Role.PARAMETER for each in roots):
            found |= chain
    return frozenset(found)


def _in_place(function: Function) -> dict[Value, Value]:
    """Return, by output that is written in place of an input of the function, that input."""
    producer = {value: op for op in function.ops for value in op.outputs}
    inputs = set(function.inputs)
    found: dict[Value, Value] = {}
    known: dict[tuple[Function, int], int | None] = {}
    for value in function.outputs:
        op = producer.get(value)
        if op is None:
            continue
        index = op.outputs.index(value)
        if op.is_call:
            key = (op.callee, index)
            if key not in known:
                known[key] = written(op, index)
            place = known[key]
        else:
            place = written(op, index)
        if place is not None and op.inputs[place] in inputs and op.inputs[place].type == value.type:
            found[value] = op.inputs[place]
    return found


def _times_called(function: Function) -> dict[Function, int]:
    times = {function: 1}
    for current in (function, *reversed(callees(function))):
        for op in current.ops:
            if op.is_call:
                times[op.callee] = times.get(op.callee, 0) + times[current]
    return times


def _tensor(value: Value) -> Tensor:
    if not isinstance(value.type, Tensor):
        raise PlanError(f"{value.name} must be a tensor, not {value.type}")
    return value.type
