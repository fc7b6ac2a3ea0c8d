"""A schedule and a program as arrays: what the compiled loop over a schedule reads."""

from __future__ import annotations

from typing import Any, NamedTuple

from distsim.compile import compiled


class Order(NamedTuple):
    """The rounds of a schedule (:class:`distsim.schedule.Rounds`) and the number of its microbatches."""

    num_microbatches: int
    start: Any
    repeats: Any
    stage: Any
    phase: Any
    microbatch: Any
    ends_step: Any


class Wiring(NamedTuple):
    """What each call of a block, and each send, reads and writes.

    A *cell* is a time: cells below ``registers`` are single (when a stream is free, when a sum is there),
    the others hold one time per microbatch. Call ``4 * (2 * stage + phase) + variant`` (1: not the first of
    its stage and phase, 2: the last) multiplies the cells ``ins`` by its matrix, [outs, ins] in row-major
    order from ``matrix_start``, into the cells ``outs``. Sends belong to 2 * stage + phase, follow after
    its step and occupy two registers, ``send_first`` and ``send_second``; a source of -1 is there already.
    """

    registers: int
    matrix_start: Any
    matrix: Any
    in_start: Any
    ins: Any
    out_start: Any
    outs: Any
    send_start: Any
    send_source: Any
    send_first: Any
    send_second: Any
    send_target: Any
    send_seconds: Any


class Record(NamedTuple):
    """What is kept of every call and send when it is asked for: arrays with room for all of them.

    ``sequence`` has the calls, and the complements of the sends, in the order in which they are issued.
    """

    variant: Any
    microbatch: Any
    entries: Any
    send: Any
    send_microbatch: Any
    send_begin: Any
    sequence: Any


@compiled
def place(cell: int, microbatch: int, order: Any, wiring: Any) -> int:
    """Return where the time of a cell is kept, for one microbatch."""
    if cell < wiring.registers:
        return cell
    return wiring.registers + (cell - wiring.registers) * order.num_microbatches + microbatch
