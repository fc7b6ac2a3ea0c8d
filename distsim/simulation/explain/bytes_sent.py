"""How many bytes each device sends in a step, by what is sent: read off the table of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from distsim.cost.demand import Group, collective_of, copied_bytes
from distsim.errors import SimulationError
from distsim.hardware import collective_transfer
from distsim.ir import Device, Function, Topology, all_ops
from distsim.ops import operator, signature_of
from distsim.program.program import Program
from distsim.program.table import SEND, BoundBlock
from distsim.schedule import Kind
from distsim.simulation.explain.breakdown import PHASES

ACTIVATION, GRADIENT, ONCE = "activation", "gradient of activation", "once a step"
"""What a message between pipeline ranks is: made by a forward or a backward pass for a microbatch; or else
made once a step, as the summed gradient of a parameter that two stages share, and its new value."""

HOST_COPY = "copy"
"""What there is in place of an algorithm's kind of a copy between a device and its host."""

_Move = tuple[str, str, float, Group]


def bytes_sent(program: Function | Program, topology: Topology) -> Mapping[Device, Mapping[str, float]]:
    """Return the bytes that each device gives to its links in a step, by what is sent, most first.

    Messages are :data:`ACTIVATION`, :data:`GRADIENT` or :data:`ONCE`, collectives ``all_reduce over dp,
    backward``: their kind, mesh axis, and the phase of the call in which they stand. The gradients of
    parameters are what is reduced over dp in a backward pass (bucket by bucket in its last call) or an
    update, and, of two copies of the model, what is sent once a step. Of a collective it is what the
    algorithm that costs take puts on the hops from a device
    (:func:`distsim.hardware.collectives.collective_transfer`): ``2 (n - 1) / n`` of the tensor for an
    all-reduce around a ring. What a hop passes on the way (a port, a switch) is not counted again. Copies to
    the host are ``offload``, and ``fetch`` is what a device is given back. Of the very microbatches of the
    program, also without a flush. ``topology`` is that of the simulation: ``step.cost_model.topology``.

    Raises :class:`SimulationError` for a Function, of which no call says what it is for: simulate a Program.

    >>> import distsim
    >>> plan = "pp=2,microbatches=4"
    >>> step = distsim.simulate("mlp:layers=4,width=64", "dgx-a100", plan=plan, batch=16, kernels="ops")
    >>> first, last = bytes_sent(step.simulated, step.cost_model.topology).values()
    >>> first, last  # 4 messages each of 4 rows of 64 float32
    ({'activation': 4096.0}, {'gradient of activation': 4096.0})
    """
    if not isinstance(program, Program):
        raise SimulationError(f"{program.name} is a Function, whose ops have no phases; simulate a Program")
    found: dict[Device, dict[str, float]] = {device: {} for device in program.mesh.devices}
    for (what, kind, size, group), times in _moves(program).items():
        if kind == HOST_COPY:
            for device in group:
                found[device][what] = found[device].get(what, 0.0) + size * times
            continue
        for (source, _), nbytes in collective_transfer(kind, size, group, topology).hops:
            found[source][what] = found[source].get(what, 0.0) + nbytes * times
    return {device: dict(sorted(own.items(), key=lambda item: -item[1])) for device, own in found.items()}


def _moves(program: Program) -> Mapping[_Move, int]:
    """Return what moves in a step, and how often: what it is, the algorithm's kind, bytes and group."""
    moves: Counter[_Move] = Counter()
    table, slices = program.table(), program.mesh.slices("pp")
    for number, times in Counter(block for block, _, _ in table.rows()).items():
        block = table.blocks[number]
        if block.kind == SEND:
            what, size = _message(program, block)
            for pair in zip(slices[block.rank].devices, slices[block.target].devices, strict=True):
                moves[what, "send", size, pair] += times
        for part in block.pair or (block,):
            for op in all_ops(part.function) if part.function else ():
                meaning, devices = operator(op.op_type), slices[block.rank].devices
                if meaning.host_stream:
                    moves[meaning.host_stream, HOST_COPY, copied_bytes(signature_of(op)), devices] += times
                if meaning.moves:
                    axis = str(op.attributes["axis"])
                    for group in slices[block.rank].groups(axis):
                        kind, size = collective_of(signature_of(op), group)
                        moves[f"{kind} over {axis}, {PHASES[part.kind]}", kind, size, group] += times
    return moves


def _message(program: Program, block: BoundBlock) -> tuple[str, float]:
    """Return what a transfer brings, and its bytes on one device."""
    value = block.reads[0].value
    maker = program.makers().get(value)
    phase = None if maker is None or maker.once else maker.phase
    what = ONCE if phase is None else ACTIVATION if phase is Kind.FORWARD else GRADIENT
    return what, float(value.type.nbytes)
