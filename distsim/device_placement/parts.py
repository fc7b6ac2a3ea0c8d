"""A partition: which part every op is in, where the parts are, what they hold and how long they take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from distsim.device_placement.pieces import piece_of
from distsim.device_placement.problem import PartitionDevice, Problem
from distsim.device_placement.quotient import PartLatency, Quotient
from distsim.errors import CyclicPartitionError, NotEnoughMemoryError, PartitionError
from distsim.ir import Function, FunctionMaker, Op, Value, copy_function


@dataclass(frozen=True, slots=True)
class Part:
    """One part, by numbers of items and of parts.

    ``items`` are its ops and the outside inputs that they read, ``bytes`` what it needs on each of its
    ``devices`` (several are replicas), ``level`` the most edges on a way to it from a part without parents.

    >>> from distsim.device_placement.problem import Item
    >>> problem = Problem((Item("x", (), 4, 4, is_op=False), Item("a", (0,), 4, 4), Item("b", (1,), 4, 4)))
    >>> devices = [PartitionDevice("d0", 12, 0), PartitionDevice("d1", 8, 1)]
    >>> partition = make_partition(problem, devices, [[1], [2]], [[0], [1]])
    >>> [(part.ops, part.parents) for part in partition.parts]
    [((1,), ()), ((2,), (0,))]
    """

    index: int
    ops: tuple[int, ...]
    items: tuple[int, ...]
    bytes: int
    devices: tuple[PartitionDevice, ...]
    parents: tuple[int, ...]
    children: tuple[int, ...]
    level: int


@dataclass(frozen=True)
class Partition:
    """The parts of a :class:`Problem`, made with :func:`make_partition` and checked by :meth:`verify`.

    ``transfer_rate`` is in bytes per second (per unit of the latencies); 0 if it was not given, and then
    there is no :attr:`latency`.

    >>> from distsim.device_placement.problem import Item
    >>> problem = Problem((Item("x", (), 4, 4, is_op=False), Item("a", (0,), 4, 4), Item("b", (1,), 4, 4)))
    >>> devices = [PartitionDevice("d0", 12, 0), PartitionDevice("d1", 8, 1)]
    >>> partition = make_partition(problem, devices, [[1], [2]], [[0], [1]])
    >>> len(partition.parts)
    2
    """

    problem: Problem
    devices: tuple[PartitionDevice, ...]
    parts: tuple[Part, ...]
    transfer_rate: float = 0.0
    mode: str = ""

    @cached_property
    def part_of(self) -> tuple[int, ...]:
        """The part of every item that is an op; -1 for outside inputs, which many parts may hold."""
        found = [-1] * len(self.problem.items)
        for part in self.parts:
            for op in part.ops:
                found[op] = part.index
        return tuple(found)

    @cached_property
    def quotient(self) -> Quotient:
        """The graph of the parts: edges, bytes on them, an order."""
        return Quotient(self.problem, [part.items for part in self.parts])

    @property
    def order(self) -> tuple[int, ...]:
        """The parts in an order in which each comes after those that it reads."""
        return self.quotient.order

    @cached_property
    def dag(self) -> tuple[DagNode, ...]:
        """For each part, in :attr:`order`, the items that it takes and those that it hands on."""
        return dag_of(self.problem, self.part_of, self.order)

    @cached_property
    def latencies(self) -> tuple[PartLatency, ...]:
        """The latency of every part: its critical path."""
        return self.quotient.latencies

    @cached_property
    def latency(self) -> float:
        """The critical path over the parts: their latencies, and bytes / rate for each edge.

        An edge is free between parts on the same devices. Nothing waits for a device here, so this is what
        the original judges by, not how long a run takes (which the simulator says). Raises
        :class:`PartitionError` when bytes move and there is no rate.
        """
        return self.quotient.latency([part.devices for part in self.parts], self.transfer_rate)

    def bytes_on(self, device: PartitionDevice) -> int:
        """Bytes that a device holds: the items of all its parts, what several of them need once."""
        return self.problem.bytes_of({i for part in self.parts if device in part.devices for i in part.items})

    def verify(self) -> Partition:
        """Return the partition itself if it keeps every rule.

        Each op is in exactly one part and with it the outside inputs it reads; no part is empty; parts do
        not wait for each other in a circle; every part is on at least one device and on each once; every
        device has the memory for what it holds. Raises a :class:`PartitionError` that says which rule is
        broken, with the numbers.
        """
        self._verify_ops()
        for part in self.parts:
            where = [device.name for device in part.devices]
            if not where or len(set(part.devices)) != len(where):
                raise PartitionError(
                    f"part {part.index} is on devices {where}; it must be on some, each once"
                )
            if any(device not in self.devices for device in part.devices):
                raise PartitionError(
                    f"part {part.index} is on {where}, which are not all devices of the problem"
                )
        if len(self.order) != len(self.parts):
            stuck = sorted(set(range(len(self.parts))) - set(self.order))
            raise CyclicPartitionError(
                f"parts {stuck} wait for each other in a circle; put ops that depend on each other both ways "
                "into one part"
            )
        for device in self.devices:
            need = self.bytes_on(device)
            if need > device.memory:
                here = [part.index for part in self.parts if device in part.devices]
                raise NotEnoughMemoryError(
                    f"parts {here} need {need} bytes on {device.name}, which has {device.memory}: "
                    f"{need - device.memory} too many"
                )
        return self

    def _verify_ops(self) -> None:
        count = [0] * len(self.problem.items)
        for part in self.parts:
            if not part.ops:
                raise PartitionError(f"part {part.index} is empty; leave it out")
            for op in part.ops:
                count[op] += 1
            missing = set(self.problem.close(part.ops)).difference(part.items)
            if missing:
                names = [self.problem.items[item].name for item in sorted(missing)]
                raise PartitionError(f"part {part.index} does not hold {names}, which its ops read")
        for op in self.problem.ops:
            if count[op] != 1:
                raise PartitionError(
                    f"{self.problem.items[op].name} is in {count[op]} parts; it must be in exactly one"
                )

    def cut(self) -> Function:
        """Return the problem's function as Calls of ``part_0``, ``part_1``, ..., one per part, in order.

        It computes what the function computes. Raises :class:`PartitionError` when the problem was not
        made from a function.
        """
        if self.problem.function is None:
            raise PartitionError(
                "the problem was not made from a function (problem_of), so there is none to cut"
            )
        numbers = {op: k for k, op in enumerate(self.problem.ops)}
        groups = [[numbers[op] for op in part.ops] for part in self.parts]
        return cut(self.problem.function, groups, self.order)


def make_partition(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    groups: Sequence[Collection[int]],
    placed: Sequence[Sequence[int]],
    transfer_rate: float = 0.0,
    mode: str = "",
) -> Partition:
    """Return the verified partition with these parts: ``groups[k]`` is on the devices number ``placed[k]``.

    A group names items; the outside inputs that its ops read are added.

    >>> from distsim.device_placement.problem import Item
    >>> problem = Problem((Item("x", (), 4, 4, is_op=False), Item("a", (0,), 4, 4), Item("b", (1,), 4, 4)))
    >>> devices = [PartitionDevice("d0", 12, 0), PartitionDevice("d1", 8, 1)]
    >>> [part.bytes for part in make_partition(problem, devices, [[1], [2]], [[0], [1]]).parts]
    [8, 8]
    """
    items = [tuple(sorted(set(problem.close(problem.ops_in(group))).union(group))) for group in groups]
    quotient = Quotient(problem, items)
    parts = tuple(
        Part(
            index,
            tuple(problem.ops_in(held)),
            held,
            piece_of(problem, held).bytes,
            tuple(devices[number] for number in where),
            quotient.parents[index],
            quotient.children[index],
            quotient.levels[index],
        )
        for index, (held, where) in enumerate(zip(items, placed, strict=True))
    )
    return Partition(problem, tuple(devices), parts, transfer_rate, mode).verify()


def add_op(problem: Problem, part: Part, op: int) -> Part:
    """Return the part with one more op and the outside inputs that it reads; its bytes follow.

    Its parents, children and level are those of the partition that it was in.

    >>> from distsim.device_placement.problem import Item, PartitionDevice
    >>> problem = Problem((Item("x", (), 4, 4, is_op=False), Item("a", (0,), 4, 4), Item("b", (1,), 4, 4)))
    >>> part = make_partition(problem, [PartitionDevice("d", 16, 0)], [[1, 2]], [[0]]).parts[0]
    >>> smaller = remove_op(problem, part, 2)
    >>> part.bytes, smaller.bytes, add_op(problem, smaller, 2) == part
    (12, 8, True)
    """
    if not problem.items[op].is_op or op in part.ops:
        raise PartitionError(
            f"{problem.items[op].name} cannot be added to part {part.index}: no op, or there"
        )
    items = tuple(sorted({*part.items, *problem.close([op])}))
    return replace(
        part,
        ops=tuple(sorted((*part.ops, op))),
        items=items,
        bytes=piece_of(problem, items).bytes,
    )


def remove_op(problem: Problem, part: Part, op: int) -> Part:
    """Return the part without an op and without the outside inputs that only it reads there.

    >>> from distsim.device_placement.problem import Item
    >>> problem = Problem((Item("x", (), 4, 4, is_op=False), Item("a", (0,), 4, 4), Item("b", (1,), 4, 4)))
    >>> devices = [PartitionDevice("d0", 12, 0), PartitionDevice("d1", 8, 1)]
    >>> partition = make_partition(problem, devices, [[1], [2]], [[0], [1]])
    >>> both = move_op(partition, 2, to=0).parts[0]
    >>> remove_op(problem, both, 2).ops
    (1,)
    """
    if op not in part.ops:
        raise PartitionError(f"{problem.items[op].name} is not in part {part.index}, so it cannot be removed")
    rest = tuple(other for other in part.ops if other != op)
    needed = set(problem.close(rest))
    gone = {i for i in problem.close([op]) if i not in needed}
    items = tuple(item for item in part.items if item not in gone)
    return replace(part, ops=rest, items=items, bytes=piece_of(problem, items).bytes)


def move_op(partition: Partition, op: int, to: int) -> Partition:
    """Return the verified partition in which an op is in part ``to``; a part that it leaves empty is gone.

    The parts stay on their devices. Raises :class:`PartitionError` when the result breaks a rule.

    >>> from distsim.device_placement.problem import Item
    >>> problem = Problem((Item("x", (), 4, 4, is_op=False), Item("a", (0,), 4, 4), Item("b", (1,), 4, 4)))
    >>> devices = [PartitionDevice("d0", 12, 0), PartitionDevice("d1", 8, 1)]
    >>> partition = make_partition(problem, devices, [[1], [2]], [[0], [1]])
    >>> [part.ops for part in move_op(partition, 2, to=0).parts]
    [(1, 2)]
    """
    home = partition.part_of[op]
    if home < 0 or not 0 <= to < len(partition.parts) or home == to:
        name = partition.problem.items[op].name
        raise PartitionError(
            f"{name} is in part {home} and cannot move to part {to} of {len(partition.parts)}"
        )
    groups = {part.index: list(part.ops) for part in partition.parts}
    groups[home].remove(op)
    groups[to].append(op)
    kept = [part for part in partition.parts if groups[part.index]]
    number = {device: k for k, device in enumerate(partition.devices)}
    return make_partition(
        partition.problem,
        partition.devices,
        [groups[part.index] for part in kept],
        [[number[device] for device in part.devices] for part in kept],
        partition.transfer_rate,
        partition.mode,
    )


@dataclass(frozen=True, slots=True)
class DagNode:
    """A part as one step, by numbers of items.

    ``inputs`` are the items of other parts and from outside that it reads, in the order in which it does;
    ``outputs`` those of its ops that others read, in the order in which they first do, then what the whole
    returns besides.

    >>> from distsim.device_placement.problem import Item
    >>> problem = Problem((Item("x", (), 4, 4, is_op=False), Item("a", (0,), 4, 4), Item("b", (1,), 4, 4)))
    >>> devices = [PartitionDevice("d0", 12, 0), PartitionDevice("d1", 8, 1)]
    >>> partition = make_partition(problem, devices, [[1], [2]], [[0], [1]])
    >>> partition.dag[1].inputs
    (1,)
    """

    part: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def dag_of(problem: Problem, part_of: Sequence[int], order: Sequence[int]) -> tuple[DagNode, ...]:
    """Return a node for every part, in the order given; ``part_of`` is -1 for outside inputs."""
    inputs: dict[int, dict[int, None]] = {part: {} for part in order}
    outputs: dict[int, dict[int, None]] = {part: {} for part in order}
    for op in problem.ops:
        for read in problem.items[op].inputs:
            if part_of[read] != part_of[op]:
                inputs[part_of[op]][read] = None
                if part_of[read] >= 0:
                    outputs[part_of[read]][read] = None
    for item in problem.outputs:
        if part_of[item] >= 0:
            outputs[part_of[item]][item] = None
    return tuple(DagNode(part, tuple(inputs[part]), tuple(outputs[part])) for part in order)


def cut(function: Function, groups: Sequence[Sequence[int]], order: Sequence[int]) -> Function:
    """Return ``function`` as Calls of ``part_k`` with the ops number ``groups[k]``, called in ``order``.

    A callee takes what its ops read from outside, in the order in which they read it, and returns what
    other parts read or the function returns (of a part of which nothing is read, all that it makes last).
    It computes what ``function`` computes. Raises ``IRError`` when a part reads one that comes later.
    """
    users: dict[Value, list[int]] = {}
    part_of = {number: index for index, group in enumerate(groups) for number in group}
    for number, op in enumerate(function.ops):
        for value in op.inputs:
            users.setdefault(value, []).append(part_of[number])
    returned = set(function.outputs)
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    copies: dict[Value, Value] = {value: value for value in function.inputs}
    for index in order:
        ops = [function.ops[number] for number in sorted(groups[index])]
        made = [value for op in ops for value in op.outputs]
        wanted = [v for v in made if v in returned or any(part != index for part in users.get(v, ()))]
        wanted = wanted or [value for value in made if value not in users]
        callee, reads = _callee(f"part_{index}", ops, wanted)
        inputs = [copies[value] for value in reads]
        names = [value.name for value in wanted]
        outputs = maker.add("Call", inputs, None, (callee,), names, None, callee.name)
        copies.update(zip(wanted, outputs, strict=True))
    maker.set_outputs([copies[value] for value in function.outputs])
    return maker.finalize()


def _callee(name: str, ops: Sequence[Op], wanted: Sequence[Value]) -> tuple[Function, list[Value]]:
    """Return a function of these ops, and the values of the caller that it takes."""
    made = {value for op in ops for value in op.outputs}
    reads = list(dict.fromkeys(value for op in ops for value in op.inputs if value not in made))
    return copy_function(Function(name, tuple(reads), tuple(ops), tuple(wanted))), reads
