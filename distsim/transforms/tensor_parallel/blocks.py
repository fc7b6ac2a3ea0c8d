"""Blocks of stages whose functions are rewritten op by op, with the names of their ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.ir import Function, Op
from distsim.program.block import Block, StageBlocks


class RewrittenOps(NamedTuple):
    """A function that was rewritten; ``sources`` are, per op, the place of the op that it is of."""

    function: Function
    sources: tuple[int, ...]

    @staticmethod
    def of(function: Function, given: Sequence[Op], made: Sequence[tuple[Op, int]]) -> RewrittenOps | None:
        """Return ``function`` with the ops that were made of those given; None where these are its own."""
        if len(made) == len(given) and all(a is b for (a, _), b in zip(made, function.ops, strict=True)):
            return None
        ops = tuple([op for op, _ in made])
        return RewrittenOps(replace(function, ops=ops), tuple([source for _, source in made]))


Rewrite = Callable[[Function], RewrittenOps | None]
"""A function -> what it becomes, None if it stays as it is; the same whenever it is asked."""


def called(function: Function, rewrite: Rewrite) -> list[Op]:
    """Return the ops of a function, with the functions that they call rewritten."""
    found: list[Op] = []
    for op in function.ops:
        made = rewrite(op.callee) if op.is_call else None
        found.append(op if made is None else replace(op, subfunctions=(made.function,)))
    return found


def rewritten_stages(stages: Sequence[StageBlocks], rewrite: Rewrite) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages with passes rewritten; those that share Functions share them still."""
    return tuple(
        [
            (_block(forward, rewrite), _block(backward, rewrite), updates)
            for forward, backward, updates in stages
        ]
    )


def _block(block: Block, rewrite: Rewrite) -> Block:
    function, names = _part(block.function, block.names, rewrite)
    more, more_names = block.accumulating, block.accumulating_names
    if more is not None:
        more, more_names = _part(more, more_names, rewrite)
    return replace(block, function=function, accumulating=more, names=names, accumulating_names=more_names)


def _part(function: Function, names: tuple[str, ...], rewrite: Rewrite) -> tuple[Function, tuple[str, ...]]:
    found = rewrite(function)
    if found is None:
        return function, names
    return found.function, tuple([names[source] for source in found.sources]) if names else ()
