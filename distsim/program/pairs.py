"""Pairs of actions that overlap: one Function that does what two do."""

from __future__ import annotations

from distsim.ir import Function


def interleave(one: Function, other: Function) -> Function:
    """Return the function with the inputs, ops and outputs of both."""
    return Function(
        f"{one.name}_{other.name}",
        (*one.inputs, *other.inputs),
        (*one.ops, *other.ops),
        (*one.outputs, *other.outputs),
    )
