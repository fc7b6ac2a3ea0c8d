"""Adding an op to a part, removing one, moving one."""

from __future__ import annotations

from dataclasses import replace

from distsim.device_placement.parts import Part, Partition, make_partition
from distsim.device_placement.problem import Problem
from distsim.errors import PartitionError


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
        bytes=problem.bytes_of(items, problem.per_reader),
    )


def remove_op(problem: Problem, part: Part, op: int) -> Part:
    """Return the part without an op and without the outside inputs that only it reads there."""
    if op not in part.ops:
        raise PartitionError(f"{problem.items[op].name} is not in part {part.index}, so it cannot be removed")
    rest = tuple(other for other in part.ops if other != op)
    needed = set(problem.close(rest))
    gone = {i for i in problem.close([op]) if i not in needed}
    items = tuple(item for item in part.items if item not in gone)
    return replace(part, ops=rest, items=items, bytes=problem.bytes_of(items, problem.per_reader))


def move_op(partition: Partition, op: int, to: int) -> Partition:
    """Return the verified partition in which an op is in part ``to``; a part that it leaves empty is gone.

    The parts stay on their devices. Raises :class:`PartitionError` when the result breaks a rule.
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
