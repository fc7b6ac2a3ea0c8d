"""The blocks of a table carried over to parts that differ in sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from distsim.ir import Function, Value
from distsim.program.parts import Parts
from distsim.program.table import CONCAT, BoundBlock, Key, RankKeys, TableCalls
from distsim.resizing import Unlike, likeness_of
from distsim.schedule import Kind

Named = Callable[[int, int], RankKeys]
"""By rank and of which microbatch, the keys of values."""


def resized_calls(calls: TableCalls, of: Parts, parts: Parts, named: Named) -> TableCalls | None:
    """Return what blocks that were bound ``of`` some parts are of ``parts``, which differ in sizes alone.

    ``named`` gives the keys of values on a rank, of which microbatch.
    None where a block is of two passes at once or of half a pass, or joins what has another size.
    """
    if parts.like is None:
        return None
    values = parts.like[1]
    functions, moved = _functions(of, parts), _Moved(values, named)
    blocks: list[BoundBlock] = []
    for block in calls.blocks:
        function = None if block.function is None else functions.get(block.function)
        if function is None and block.function is not None:
            function = _joined(block, of, parts)
        reads, makes = moved.keys(block.reads), moved.keys(block.makes)
        if (function is None) != (block.function is None) or block.pair:
            return None
        if block.kind == CONCAT and reads != block.reads:
            return None
        same = function is block.function and reads is block.reads and makes is block.makes
        blocks.append(block if same else replace(block, function=function, reads=reads, makes=makes))
    return TableCalls(tuple(blocks), calls.pattern, moved.keys(calls.outputs), (calls, values))


def _joined(block: BoundBlock, of: Parts, parts: Parts) -> Function | None:
    """Return what stands for a pass with another function within it, if anything does."""
    stage = block.stages[0] % len(parts.blocks)
    if block.function is None or block.kind not in (Kind.FORWARD.value, Kind.BACKWARD.value):
        return None
    one, two = (
        forward if block.kind == Kind.FORWARD.value else backward
        for forward, backward, _ in (of.blocks[stage], parts.blocks[stage])
    )
    for other in block.begins or (stage,):
        within, own = ((each.ahead if block.begins else each.early).get(other) for each in (of, parts))
        if within is None or own is None or within.function is not own.function:
            return None
    before, after = (one.accumulating, two.accumulating) if block.adds else (one.function, two.function)
    likeness = None if after is None else likeness_of(after)
    if likeness is None or likeness.like is not before:
        return None
    with suppress(Unlike):
        return likeness.carry_function(block.function)
    return None


def _functions(of: Parts, parts: Parts) -> dict[Function, Function]:
    """Return what stands for the functions of blocks."""
    found: dict[Function, Function] = {}
    for (*passes, updates), (*own, later) in zip(of.blocks, parts.blocks, strict=True):
        for one, two in zip([*passes, *[b for _, b in updates]], [*own, *[b for _, b in later]], strict=True):
            found[one.function] = two.function
            if one.accumulating is not None and two.accumulating is not None:
                found[one.accumulating] = two.accumulating
    return found


class _Moved:
    """What stands for the keys of values of other sizes; calls of a stage share theirs."""

    def __init__(self, values: Mapping[Value, Value], named: Named) -> None:
        self.values, self.named = values, named
        self.done: dict[int, tuple[Key, ...]] = {}  # by the objects' ids: the blocks that have them stay

    def keys(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        found = self.done.get(id(keys))
        if found is None:
            values, named = self.values, self.named
            moved = [place for place, key in enumerate(keys) if key[0] in values]
            own = list(keys) if moved else []
            for place in moved:
                value, rank, which = keys[place]
                own[place] = named(rank, which)[values[value]]
            found = self.done[id(keys)] = tuple(own) if moved else keys
        return found
