"""A local function with its ops and values numbered, and what each op is to a pipeline.

All that does not depend on where the function is cut, found once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from distsim.cache import Cache
from distsim.cost.cost_model import DeviceCosts
from distsim.ir import Attributes, Function, Op, Role, Tensor, Value, substitute
from distsim.ops import operator
from distsim.ops.conversion import ONCE
from distsim.resizing import Likeness

Numbers = tuple[int, ...]


class Numbered:
    """The ops of a function are 0, 1, ... in order; its values are its inputs, then what each op makes.

    ``reads[op]``, ``makes[op]``: the values; ``producer[value]``: the op, or -1 for an input;
    ``uses[value]``: how often ops read it; ``held[value]``: it is an input that stays over microbatches.

    Of each op, ``sums`` says whether it marks a sum over microbatches, ``steps`` whether it comes after
    one, hence runs once per step, ``loose`` whether it makes a constant (it belongs to no stage: each
    that reads one makes it itself), ``forward`` whether the loss, or what is marked as an output of the
    forward pass, depends on it (and it is neither of the two before). Ops of equal ``kinds`` differ in names
    and values only.

    ``copies`` are the backward ops that compute a forward op again, with that op, and the barriers through
    which they read; ``originals`` the forward values that what they make is equal to, ``regathered`` those of
    what is gathered once more, whether or not anything is computed again.
    """

    def __init__(self, function: Function) -> None:
        self.name, self.inputs, self.ops = function.name, function.inputs, function.ops
        self.num_inputs = len(function.inputs)
        self.values: list[Value] = list(function.inputs)
        self.producer = [-1] * self.num_inputs
        number = {value: i for i, value in enumerate(function.inputs)}
        self.reads: list[Numbers] = []
        self.makes: list[Numbers] = []
        for index, op in enumerate(function.ops):
            self.reads.append(tuple([number[value] for value in op.inputs]))
            for value in op.outputs:
                number[value] = len(self.values)
                self.values.append(value)
                self.producer.append(index)
            self.makes.append(tuple([number[value] for value in op.outputs]))
        self.outputs = [number[value] for value in function.outputs]
        self.uses = [0] * len(self.values)
        for read in self.reads:
            for value in read:
                self.uses[value] += 1
        self.held = [value.role is not Role.INPUT for value in function.inputs]
        self.held += [False] * (len(self.values) - self.num_inputs)
        self.sums = [is_sum(op) for op in function.ops]
        self.steps = self._steps()
        self.loose = self._loose()
        self.has_loose = any(self.loose)
        self.forward = self._forward()
        self._seconds: dict[Hashable, dict[int, float]] = {}
        # Of this one and those resized: what follows from the stages of the ops that take time.
        self.stage_maps: dict[Hashable, list[ChosenMap]] = {}
        self.forward_stages: dict[Hashable, list[int]] = {}

    def nbytes(self, values: Sequence[int]) -> int:
        """Return the bytes of values."""
        return sum([self.values[value].type.nbytes for value in values])

    def resized(self, likeness: Likeness) -> Numbered:
        """Return the function that differs from this one in sizes alone, as another one does from that of
        which this was made; what they have in common is found once. Raises :class:`Unlike`."""
        found = copy(self)
        for name in ("kinds", "copies", "originals", "regathered"):  # of attributes
            found.__dict__.pop(name, None)
        found.inputs, found.ops = substitute(self.inputs, likeness.values), likeness.carry_ops(self.ops)
        found.values = list(substitute(self.values, likeness.values))
        found._seconds = {}
        return found

    @cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """The ops that read each value, an op as often as it reads it; no entry where none does."""
        found: dict[int, list[int]] = {}
        for op, read in enumerate(self.reads):
            for value in read:
                found.setdefault(value, []).append(op)
        return found

    @cached_property
    def kinds(self) -> list[int]:
        """A number for each op, the same for ops that differ in names and values only."""
        return _kinds(self.ops)

    @cached_property
    def _forward_ops(self) -> list[int]:
        return [index for index, forward in enumerate(self.forward) if forward]

    def _steps(self) -> list[bool]:
        made, found = [False] * len(self.values), list[bool]()
        for index, read in enumerate(self.reads):
            step = any(made[value] for value in read)
            found.append(step)
            if step or self.sums[index]:
                for value in self.makes[index]:
                    made[value] = True
        return found

    def _loose(self) -> list[bool]:
        made, found = [False] * len(self.values), list[bool]()
        returned = set(self.outputs)
        for read, makes in zip(self.reads, self.makes, strict=True):
            constant = all(made[value] for value in read)
            for value in makes if constant else ():
                made[value] = True
            found.append(constant and returned.isdisjoint(makes))
        return found

    def _forward(self) -> list[bool]:
        """Ancestors of the loss, the first scalar output, and of what ``ForwardOutput`` marks; every op when
        there is no loss."""
        losses = [v for v in self.outputs if _scalar(self.values[v])]
        found = [not losses] * len(self.ops)
        marked = _marking(self.ops)
        todo = [*losses[:1], *(value for op in marked for value in self.makes[op])]
        while todo:
            op = self.producer[todo.pop()]
            if op >= 0 and not found[op]:
                found[op] = True
                todo.extend(self.reads[op])
        return [
            f and not (step or constant)
            for f, step, constant in zip(found, self.steps, self.loose, strict=True)
        ]

    @cached_property
    def originals(self) -> dict[int, int]:
        """What backward computes again -> the forward value that it is equal to."""
        found: dict[int, int] = {}
        for index, original in self.copies.items():
            if not operator(self.ops[index].op_type).waits:
                found.update(zip(self.makes[index], self.makes[original], strict=True))
        return found

    @cached_property
    def copies(self) -> dict[int, int]:
        """The backward ops that compute a forward op again, found by what they compute -> that op."""
        if not any(operator(op.op_type).waits for op in self.ops):
            return {}
        same = list(range(len(self.values)))  # the first value that a value is equal to
        equal: dict[Hashable, list[int]] = {}  # forward ops that compute the same
        found: dict[int, tuple[int, ...]] = {}  # those that a backward op may be a copy of
        for index, (op, read) in enumerate(zip(self.ops, self.reads, strict=True)):
            meaning = operator(op.op_type)
            if meaning.waits or meaning.host_stream:
                for value, original in zip(self.makes[index], read, strict=False):
                    same[value] = same[original]
                continue
            key = self.kinds[index], *[same[value] for value in read]
            if self.forward[index] or self.loose[index]:
                equal.setdefault(key, []).append(index)
            elif key in equal:
                found[index] = tuple(equal[key])
            for value, first in zip(self.makes[index], self.makes[equal.get(key, [index])[0]], strict=True):
                same[value] = first
        copies = self._originals(found)
        for index, original in list(copies.items()):
            for made in [self.producer[value] for value in self.reads[index]]:
                if made >= 0 and operator(self.ops[made].op_type).waits:
                    copies[made] = original
        return copies

    @cached_property
    def regathered(self) -> dict[int, int]:
        """What backward gathers again -> the forward value that it is equal to."""
        known: dict[Hashable, int] = {}
        found: dict[int, int] = {}
        for index, (op, read) in enumerate(zip(self.ops, self.reads, strict=True)):
            if is_gather(op):
                key = self.kinds[index], *[found.get(value, value) for value in read]
                if self.forward[index]:
                    known.setdefault(key, index)
                elif key in known:
                    found.update(zip(self.makes[index], self.makes[known[key]], strict=True))
        return found

    def _originals(self, found: dict[int, tuple[int, ...]]) -> dict[int, int]:
        """Choose the forward op of each copy: the one that the original of a reader reads, or one without."""
        read_by: dict[int, int] = {}
        chosen: dict[int, int] = {}
        taken: set[int] = set()
        for index in reversed(found):
            free = [each for each in found[index] if each not in taken] or found[index]
            original = read_by.get(index, -1)
            original = chosen[index] = original if original in found[index] else free[0]
            taken.add(original)
            for value, first in zip(self.reads[index], self.reads[original], strict=True):
                made = self.producer[value]
                if made in found:
                    read_by[made] = self.producer[first]
        return chosen

    def seconds(self, costs: DeviceCosts) -> dict[int, float]:
        """Return how long each forward op keeps the device busy; equal ops are looked at once.

        What is made of parameters alone is work of the op that reads it first; of none if once a step. Where
        rules let all take no time, each that is no view counts the same.
        """
        found = self._seconds.get(costs.key)
        if found is None:
            known, found = dict[Hashable, float](), dict[int, float]()
            for index in self._forward_ops:
                op = self.ops[index]
                kind = (op.attributes, op.subfunctions) if op.is_call else index
                known[kind] = found[index] = known[kind] if kind in known else costs.seconds(op)
            if not any(found.values()):
                found = {index: float(_kernels(self.ops[index])) for index in found}
            once = self.once()
            for index in sorted(self.of_weights & found.keys()):  # before its reader
                first = self._first_reader
                reader = min([first[v] for v in self.makes[index] if v in first], default=-1)
                if reader in found:
                    found[reader] += 0.0 if index in once else found[index]
                    found[index] = 0.0
            self._seconds[costs.key] = found
        return found

    @cached_property
    def of_weights(self) -> set[int]:
        """The forward ops that read parameters, or what such ops make of them, and else constants at most."""
        found: set[int] = set()
        weight = self.held.copy()
        for index, (op, read) in enumerate(zip(self.ops, self.reads, strict=True)):
            made = [self.producer[value] for value in read]
            alone = all(
                w or (m >= 0 and self.loose[m]) for w, m in zip([weight[v] for v in read], made, strict=True)
            )
            if self.forward[index] and not op.is_call and alone and any(weight[value] for value in read):
                found.add(index)
                for value in self.makes[index]:
                    weight[value] = True
        return found

    def once(self, stage: Sequence[int] = ()) -> set[int]:
        """Return the forward ops that run once a step: those that are marked so (:data:`ONCE`), what leads to
        them, and views.

        They read parameters alone. Not what is made of one that is gathered over ranks for each pass, nor
        what only such a gather reads: it is there as long as that. Given the ``stage`` of each op, not what
        another stage reads: that is sent to it with each microbatch.
        """
        marked = [bool(op.attributes.get(ONCE)) for op in self.ops]
        if not any(marked):
            return set()
        moved: set[int] = set()
        for index in sorted(self.of_weights):
            before = {self.producer[value] for value in self.reads[index]}
            moves = operator(self.ops[index].op_type).moves and not marked[index]
            users = [user for value in self.makes[index] for user in self.readers.get(value, ())]
            away = stage and any(stage[user] != stage[index] for user in users if not self.steps[user])
            if moves or away or not before.isdisjoint(moved):
                moved.add(index)
        found: set[int] = set()
        for index in sorted(self.of_weights - moved, reverse=True):
            users = [user for value in self.makes[index] for user in self.readers.get(value, ())]
            if (marked[index] and not moved.issuperset(users)) or not found.isdisjoint(users):
                found.add(index)
        for index in sorted(self.of_weights - moved - found):
            before = {self.producer[value] for value in self.reads[index]}
            if operator(self.ops[index].op_type).view and before <= found:
                found.add(index)
        return found

    @cached_property
    def _first_reader(self) -> dict[int, int]:
        """The first op that reads each value."""
        found: dict[int, int] = {}
        for index in reversed(range(len(self.ops))):
            for value in self.reads[index]:
                found[value] = index
        return found


def numbered(function: Function) -> Numbered:
    """Return a function with its values numbered, made once."""
    return _NUMBERED.get(function, None, lambda: Numbered(function))


_NUMBERED = Cache[Function, Numbered]("functions with their values numbered", 1)


@dataclass(frozen=True, eq=False)
class StageMap:
    """The stage of every per-microbatch op (-1 for the others), by number of the op.

    ``homes`` are the stages that read a parameter or constant in forward (the first one updates it).
    """

    stage: Sequence[int]
    homes: Mapping[int, tuple[int, ...]]


class ChosenMap(NamedTuple):
    """Stages that follow from those of the forward pass and from what is smaller than what: of values (some,
    others, whether these are fewer bytes than those)."""

    smaller: tuple[tuple[Numbers, Numbers, bool], ...]
    assigned: StageMap


def _kernels(op: Op) -> int:
    return sum(map(_kernels, op.callee.ops)) if op.is_call else int(not operator(op.op_type).view)


def is_sum(op: Op) -> bool:
    """Whether an op marks the sum over microbatches."""
    return op.op_type == "Accumulate"


def hands_on(op: Op) -> bool:
    """Whether an op moves what it is given, or gives it another name."""
    meaning = operator(op.op_type)
    return not op.is_call and (meaning.view or meaning.communication is not None)


def hands_on_gradient(op: Op) -> bool:
    """Whether an op makes of a gradient the same one: moved, of another type or shape, copied or scaled."""
    return hands_on(op) or op.op_type in _SAME_GRADIENT


_SAME_GRADIENT = (
    "AverageGradients",
    "Cast",
    "CopyIn",
    "GradientCast",
    "GradientCopy",
    "Pad",
    "ScaleGradient",
)


def _scalar(value: Value) -> bool:
    return isinstance(value.type, Tensor) and value.type.shape == ()


def is_gather(op: Op) -> bool:
    """Whether an op puts together on each rank what several have."""
    meaning = operator(op.op_type).communication
    return meaning is not None and meaning.kind == "all_gather"


def _marking(ops: Sequence[Op]) -> list[int]:
    """Return the ops that mark an output of the forward pass, and the Calls that run such an op."""
    known: dict[Function, bool] = {}
    return [number for number, op in enumerate(ops) if _marks(op, known)]


def _marks(op: Op, known: dict[Function, bool]) -> bool:
    if not op.is_call:
        return op.op_type == "ForwardOutput"
    if op.callee not in known:
        known[op.callee] = any(_marks(inner, known) for inner in op.callee.ops)
    return known[op.callee]


def _kinds(ops: Sequence[Op]) -> list[int]:
    """Return a number for each op, the same for ops that differ in names and values only."""
    attributes: dict[Attributes, int] = {}
    known: dict[int, int] = {}  # the same objects occur again and again: a look-up by identity
    kinds: dict[Hashable, int] = {}
    found: list[int] = []
    for op in ops:
        given = known.get(id(op.attributes))
        if given is None:
            given = known[id(op.attributes)] = attributes.setdefault(op.attributes, len(attributes))
        kind = (op.op_type, given, op.subfunctions, op.version, len(op.inputs), len(op.outputs))
        found.append(kinds.setdefault(kind, len(kinds)))
    return found
