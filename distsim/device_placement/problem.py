"""What is partitioned: ops and outside inputs with their sizes and latencies, and the devices to put them on.

A :class:`Problem` knows no tensors, so one can be written by hand, read from a file, or taken from a
Function with :func:`problem_of`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from distsim.cost.cost_model import CostModel
from distsim.errors import NoDevicesError, NoOpsError, PartitionError
from distsim.ir import Device, Function, Op, Role, Value
from distsim.ops import Signature, signature_of

WHAT_BYTES_ARE = "parameters and all that ops make, nothing freed, as torch.fx's partitioner counts"
"""What bytes of a part, or of the whole, are: for errors and tables."""


@dataclass(frozen=True, slots=True)
class Item:
    """An op, or an input from outside (a placeholder or a constant that several ops may read).

    ``inputs`` are the numbers of the items that it reads, each once, in the order of its arguments.
    ``output_bytes`` is what it hands on; ``total_bytes`` adds the parameters that live with it. ``memory``
    and ``compute`` are its two latencies, of which the longer one counts; the unit is the caller's, for
    :func:`problem_of` seconds. Outside inputs read nothing and take no time.

    >>> Item("add", inputs=(0, 1), output_bytes=8, total_bytes=8).is_op
    True
    """

    name: str
    inputs: tuple[int, ...]
    output_bytes: int
    total_bytes: int
    memory: float = 0.0
    compute: float = 0.0
    is_op: bool = True
    embedding: bool = False

    @property
    def latency(self) -> float:
        """How long it runs: the longer of its two latencies."""
        return max(self.memory, self.compute)


@dataclass(frozen=True, slots=True)
class PartitionDevice:
    """A device to put parts on: ``memory`` in bytes; ``id`` is the name that a partition reports.

    >>> PartitionDevice("gpu:0", memory=80 * 2**30, id=0).memory // 2**30
    80
    """

    name: str
    memory: int
    id: int


@dataclass(frozen=True)
class Problem:
    """Items in topological order, and which of them the whole returns.

    ``function``, when the problem was made from one: its ops are the problem's ops, in order.

    >>> x = Item("x", (), 16, 16, is_op=False)
    >>> problem = Problem((x, Item("a", (0,), 16, 96), Item("b", (1,), 16, 16), Item("c", (1, 2), 16, 16)))
    >>> problem.ops, problem.readers[1]
    ((1, 2, 3), (2, 3))
    >>> problem.bytes_of([2, 3])  # 16 each, and a's 16 from outside, once
    48
    """

    items: tuple[Item, ...]
    outputs: tuple[int, ...] = ()
    function: Function | None = None

    def __post_init__(self) -> None:
        for number, item in enumerate(self.items):
            if len(set(item.inputs)) != len(item.inputs) or any(not 0 <= i < number for i in item.inputs):
                raise PartitionError(
                    f"item {number}, {item.name}, reads {item.inputs}; each must be an earlier one, once"
                )
            if item.inputs and not item.is_op:
                raise PartitionError(f"{item.name} comes from outside, so it cannot read {item.inputs}")
            figures = (item.output_bytes, item.total_bytes, item.memory, item.compute)
            if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
                raise PartitionError(
                    f"{item.name} has output and total bytes, memory and compute latency {figures}; "
                    "each must be finite and not negative"
                )

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The numbers of the ops, in order."""
        return tuple([number for number, item in enumerate(self.items) if item.is_op])

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each item the ops that read it, in order."""
        found: list[list[int]] = [[] for _ in self.items]
        for number, item in enumerate(self.items):
            for read in item.inputs:
                found[read].append(number)
        return tuple(map(tuple, found))

    @property
    def total_bytes(self) -> int:
        """Bytes of all items, read or not, on one device."""
        return sum(item.total_bytes for item in self.items)

    def bytes_of(self, items: Collection[int]) -> int:
        """Bytes that a device needs to hold these items and what they read of others, each once."""
        held = set(items)
        outside = {i for number in held for i in self.items[number].inputs if i not in held}
        own = sum([self.items[number].total_bytes for number in held])
        return own + sum([self.items[number].output_bytes for number in outside])

    def times(self, readers: int) -> int:
        """How often a part counts an item of another one that so many of its ops read: once."""
        return min(readers, 1)

    def ops_in(self, items: Iterable[int]) -> list[int]:
        """Return the ops among items, in order."""
        return sorted([number for number in items if self.items[number].is_op])

    def close(self, ops: Collection[int]) -> tuple[int, ...]:
        """Return these ops and the outside inputs that they read, in order."""
        outside = {i for op in ops for i in self.items[op].inputs if not self.items[i].is_op}
        return tuple(sorted(outside.union(ops)))


def problem_of(function: Function, cost_model: CostModel, device: Device | None = None) -> Problem:
    """Return the problem of partitioning ``function``; latencies in seconds on ``device``.

    An item for every op, and one for every input of the function, except that a parameter or constant
    which a single op reads lives with that op (it counts in its ``total_bytes``, as the weights of a
    module do in torch.fx); one which several ops read is an outside input of each. An op with several
    outputs hands on all of them. A Call is one item; :func:`distsim.transforms.inline` writes it out.

    The rules of ``cost_model`` give the two latencies, that of an op's bytes and that of its flops (by the
    roofline ``launch + bytes / bandwidth`` and ``launch + flops / peak``); the longer is what the op costs.
    The ops of a Call run one after the other, so its latencies are sums. The device is the first of the cost
    model's topology unless one is given. An op is an embedding when it gathers rows of a parameter, or is a
    Call of one that does.

    >>> from distsim.cost import CostModel
    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> problem = problem_of(mlp(layers=2, width=16, batch=8), CostModel(load_cluster("dgx-a100")))
    >>> [item.name for item in problem.items if not item.is_op]
    ['x', 'target']
    """
    device = cost_model.topology.devices[0] if device is None else device
    users: dict[Value, list[int]] = {value: [] for value in function.inputs}
    for number, op in enumerate(function.ops):
        for value in dict.fromkeys(op.inputs):
            if value in users:
                users[value].append(number)
    held = {v for v, by in users.items() if len(by) == 1 and v.role in (Role.PARAMETER, Role.CONSTANT)}
    number_of: dict[Value, int] = {}
    items: list[Item] = []
    for value in function.inputs:
        if value not in held:
            number_of[value] = len(items)
            items.append(Item(value.name, (), value.type.nbytes, value.type.nbytes, is_op=False))
    costs, parameters = _OpLatencies(cost_model, device), frozenset(function.parameters)
    for op in function.ops:
        inputs = tuple(dict.fromkeys(number_of[value] for value in op.inputs if value not in held))
        made = sum(value.type.nbytes for value in op.outputs)
        own = sum(value.type.nbytes for value in dict.fromkeys(op.inputs) if value in held)
        memory, compute = costs.latencies(op)
        name = op.outputs[0].name if op.outputs else op.op_type
        embedding = _is_embedding(op, parameters)
        items.append(Item(name, inputs, made, made + own, memory, compute, True, embedding))
        number_of.update(dict.fromkeys(op.outputs, len(items) - 1))
    returned = dict.fromkeys(number_of[value] for value in function.outputs if value in number_of)
    return Problem(tuple(items), tuple(returned), function)


class _OpLatencies:
    """The two latencies of ops on one device; equal signatures and callees are looked at once."""

    def __init__(self, cost_model: CostModel, device: Device) -> None:
        self._cost_model, self._device = cost_model, device
        self._ops: dict[Signature, tuple[float, float]] = {}
        self._callees: dict[Function, tuple[float, float]] = {}

    def latencies(self, op: Op) -> tuple[float, float]:
        if op.is_call:
            found = self._callees.get(op.callee)
            if found is None:
                parts = [self.latencies(part) for part in op.callee.ops]
                found = (sum(memory for memory, _ in parts), sum(max(pair) for pair in parts))
                self._callees[op.callee] = found
            return found
        signature = signature_of(op)
        found = self._ops.get(signature)
        if found is None:
            found = self._ops[signature] = self._cost_model.latencies(signature, self._device)
        return found


def _is_embedding(op: Op, parameters: Collection[Value]) -> bool:
    if op.op_type == "Gather":
        return op.inputs[0] in parameters
    inner = dict(zip(op.callee.inputs, op.inputs, strict=True)) if op.is_call else {}
    held = {formal for formal, value in inner.items() if value in parameters}
    return bool(held) and any(_is_embedding(part, held) for part in op.callee.ops)


def check_problem(problem: Problem, devices: Sequence[PartitionDevice]) -> None:
    """Raise :class:`PartitionError` for no ops, no devices, one given twice, or without a number of bytes."""
    if not devices:
        raise NoDevicesError(
            f"no devices are given for {len(problem.ops)} ops of {problem.total_bytes} bytes"
        )
    if not problem.ops:
        raise NoOpsError(
            f"there are 0 ops among {len(problem.items)} items, so there is nothing to partition"
        )
    for number, device in enumerate(devices):
        if device in devices[:number]:
            raise PartitionError(f"{device} is given twice; each device needs a name or an id of its own")
        if not (math.isfinite(device.memory) and device.memory >= 0):
            raise PartitionError(f"device {device.name} has {device.memory} bytes of memory; give 0 or more")
