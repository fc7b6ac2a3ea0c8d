"""A partition: which part every op is in, where the parts are, what they hold and how long they take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from distsim.device_placement.cut import cut
from distsim.device_placement.dag import DagNode, dag_of
from distsim.device_placement.problem import PartitionDevice, Problem
from distsim.device_placement.quotient import PartLatency, Quotient
from distsim.errors import CyclicPartitionError, NotEnoughMemoryError, PartitionError
from distsim.ir import Function


@dataclass(frozen=True, slots=True)
class Part:
    """One part, by numbers of items and of parts.

    ``items`` are its ops and the outside inputs that they read, ``bytes`` what it needs on each of its
    ``devices`` (several are replicas), ``level`` the most edges on a way to it from a part without parents.
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
    items = [tuple(sorted(set(problem.close(ops_of(problem, group))).union(group))) for group in groups]
    quotient = Quotient(problem, items)
    parts = tuple(
        Part(
            index,
            tuple(ops_of(problem, held)),
            held,
            problem.bytes_of(held, problem.per_reader),
            tuple(devices[number] for number in where),
            quotient.parents[index],
            quotient.children[index],
            quotient.levels[index],
        )
        for index, (held, where) in enumerate(zip(items, placed, strict=True))
    )
    return Partition(problem, tuple(devices), parts, transfer_rate, mode).verify()


def ops_of(problem: Problem, items: Collection[int]) -> list[int]:
    """Return the ops among items, in order."""
    return sorted([number for number in items if problem.items[number].is_op])
