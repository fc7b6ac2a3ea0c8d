"""What the Calls of a joint function cost as blocks, on whatever mesh the function is written for.

:func:`call_costs` prices a function that no plan divides: the part of one rank of a mixture of experts, say,
with the all-to-alls in it. Each forward Call with its backward Call is a block; what lies before the first is
one (the embedding), and what lies after the last (norm, output head, loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.cost.cost_model import CostModel
from distsim.errors import PartitionError
from distsim.ir import Device, Function, Op, Role, Value, needed_ops
from distsim.ir.device import devices_of
from distsim.ir.type import as_tensor
from distsim.ops import signature_of
from distsim.simulate.simulator import Simulator
from distsim.stage_balance.cost import BlockCost


def call_costs(function: Function, cost_model: CostModel) -> tuple[BlockCost, ...]:
    """Return the blocks of a joint function of forward and backward, in order, for ``auto_split``.

    Seconds are those of a simulated pass over a block on all ranks of the function's mesh, or on the first
    device of the topology where it is on none. Bytes: ``state`` is the parameters of a block and their
    gradients, ``saved`` what its backward reads of the forward pass. A forward and a backward Call are told
    to be of one block by the name that ``differentiate`` gives both.

    Raises :class:`PartitionError` when there is no such pair, and what the cost model raises.
    """
    calls: dict[str, list[Op]] = {}
    for op in function.ops:
        if op.is_call:
            calls.setdefault(op.name, []).append(op)
    pairs = {name: ops for name, ops in calls.items() if len(ops) == 2}
    if not pairs:
        raise PartitionError(
            f"{function.name} has no Call with a backward Call of its name; outline what repeats and "
            "differentiate it without an optimizer"
        )
    pricer = _CallPricer(function, cost_model, {op: name for name, ops in pairs.items() for op in ops})
    return tuple([pricer.block(name) for name in ("embedding", *pairs, "head")])


@dataclass
class _BlockOps:
    """The ops of a block."""

    forward: list[Op]
    backward: list[Op]


class _CallPricer:
    """Tells which op belongs to which block, and prices Calls, each callee once, and single ops."""

    def __init__(self, function: Function, cost_model: CostModel, owners: dict[Op, str]) -> None:
        self.cost_model, self.simulator = cost_model, Simulator(cost_model)
        self.where = _where(function, cost_model)
        self.ahead = set(needed_ops(function.ops, function.outputs[:1]))  # of the loss
        variable = _variable(function)
        self.constants = [op for op in function.ops if op not in variable]
        self.blocks = {name: _BlockOps([], []) for name in ("embedding", *owners.values(), "head")}
        self.produced: dict[Value, Op] = {}
        seen: set[str] = set()
        count = len(self.blocks) - 2
        for op in function.ops:
            if op not in variable:
                continue
            owner = owners.get(op)
            if owner is not None:
                seen.symmetric_difference_update((owner,))
            forward = op in self.ahead
            name = owner or ("embedding" if not seen else "head" if len(seen) == count else None)
            if name is None:
                raise PartitionError(f"{function.name}: {op!r} stands between two blocks; put it into one")
            (self.blocks[name].forward if forward else self.blocks[name].backward).append(op)
            if forward:
                self.produced.update(dict.fromkeys(op.outputs, op))
        self._seconds: dict[Function, float] = {}

    def block(self, name: str) -> BlockCost:
        """Return the block of this name."""
        own = self.blocks[name]
        mine = {value: None for op in own.forward for value in op.outputs}
        elsewhere = {value for op in self.ahead if op not in own.forward for value in op.inputs}
        read = {value: None for op in own.forward for value in op.inputs}
        kept = {value: None for op in own.backward for value in op.inputs if value in self.produced}
        state = 2 * sum(_nbytes(value) for value in read if value.role is Role.PARAMETER)
        return BlockCost(
            name,
            self.seconds(own.forward),
            self.seconds(own.backward),
            sent=sum(_nbytes(value) for value in mine if value in elsewhere),
            state=state,
            saved=sum(map(_nbytes, kept)),
            shared=self.seconds(self.constants),
        )

    def seconds(self, ops: Sequence[Op]) -> float:
        """Return the seconds of these ops, one after the other."""
        return sum(map(self._one, ops))

    def _one(self, op: Op) -> float:
        if not op.is_call:
            return self.cost_model.seconds(signature_of(op), self.where)
        found = self._seconds.get(op.callee)
        if found is None:
            types = [as_tensor(value.type, value.name) for value in op.callee.inputs]
            placed = [type_.on(type_.device or self.where[0]) for type_ in types]
            found = self._seconds[op.callee] = self.simulator.interpret(op.callee, placed).step_time
        return found


def _where(function: Function, cost_model: CostModel) -> tuple[Device, ...]:
    """Return the devices that run the function."""
    for value in function.inputs:
        device = as_tensor(value.type, value.name).device
        if device is not None:
            return tuple(devices_of(device))
    return (cost_model.topology.devices[0],)


def _variable(function: Function) -> dict[Op, None]:
    """Return the ops that depend on an input of the function: all but those that make constants."""
    found: dict[Op, None] = {}
    known = set(function.inputs)
    for op in function.ops:
        if any(value in known for value in op.inputs):
            found[op] = None
            known.update(op.outputs)
    return found


def _nbytes(value: Value) -> int:
    return as_tensor(value.type, value.name).nbytes
