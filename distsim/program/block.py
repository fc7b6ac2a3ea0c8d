"""Block: a Function of one stage, and the keys of what it reads and makes; blocks of stages rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distsim.cache import Cache
from distsim.errors import IRError
from distsim.ir import Function, Op, Value
from distsim.ir.module_names import joined_name

FIRST_CALL, LAST_CALL = "first", "last"
"""Where a block that runs once a step may be besides its round."""


@dataclass(frozen=True)
class Block:
    """A Function of one stage and the keys of its inputs and outputs.

    ``accumulated`` are the keys whose values are summed over microbatches. ``accumulating`` is the
    variant for every microbatch but the first: it takes the sums so far as further inputs, after
    ``inputs``, and returns them, in the places of the accumulated outputs, with its part added.

    Stages that do the same share their Functions, in which ops have the names of modules alone (h3, say, is
    a layer of one stage only): ``names`` are those of the ops of ``function`` here, ``accumulating_names``
    likewise.

    ``place`` says of a block that runs once a step where it is: ``""`` in its round; :data:`LAST_CALL`: it
    reads nothing but sums of its stage, over microbatches, and may run within the last call that adds to
    them, each op as soon as its operands are complete; :data:`FIRST_CALL`: it reads nothing but inputs of the
    program, and runs within the first forward call of its stage, each op one before what it makes is read.

    Raises :class:`IRError` when keys and functions do not fit.
    """

    function: Function
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    accumulated: tuple[Value, ...] = ()
    accumulating: Function | None = None
    names: tuple[str, ...] = ()
    accumulating_names: tuple[str, ...] = ()
    place: str = ""

    def __post_init__(self) -> None:
        function, more = self.function, self.accumulating
        reads, makes, sums = len(self.inputs), len(self.outputs), len(self.accumulated)
        sizes = [(function, reads)] if more is None else [(function, reads), (more, reads + sums)]
        for each, given in sizes:
            if (len(each.inputs), len(each.outputs)) != (given, makes):
                raise IRError(
                    f"{each.name} has {len(each.inputs)} inputs and {len(each.outputs)} outputs, its block "
                    f"gives it {given} and has {makes} keys for what it makes; give one key for each"
                )
        if sums and more is None:
            raise IRError(
                f"{function.name}: {self.accumulated[0].name!r} is summed over microbatches, and there is no "
                "function that adds to the sum so far; give the block an accumulating one"
            )
        made = set(self.outputs)
        for key in self.accumulated:
            if key not in made:
                raise IRError(
                    f"{function.name}: the sum {key.name!r} is none of the block's outputs; list it there"
                )


def with_outputs(block: Block, left: Sequence[bool]) -> Block:
    """Return the block with the outputs of which ``left`` says that they stay; it runs the same ops."""

    def fewer(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple([value for value, stays in zip(values, left, strict=True) if stays])

    function, more = block.function, block.accumulating
    return replace(
        block,
        function=replace(function, outputs=fewer(function.outputs)),
        outputs=fewer(block.outputs),
        accumulating=None if more is None else replace(more, outputs=fewer(more.outputs)),
    )


StageBlocks = tuple[Block, Block, tuple[tuple[int, Block], ...]]
"""The blocks of a stage, wherever it runs: forward, backward, updates by round."""

ActionBlocks = tuple[tuple[Block, ...], ...]
"""By stage the blocks of the kinds of actions that one function makes, in the order of the kinds."""


class RewrittenOps(NamedTuple):
    """A function that was rewritten; ``parts`` are, per op, the places of the ops that it stands for."""

    function: Function
    parts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(function: Function, given: Sequence[Op], made: Sequence[tuple[Op, int]]) -> RewrittenOps | None:
        """Return ``function`` with the ops that were made of those given, each with the place of the one that
        it is of; None where these are its own."""
        if len(made) == len(given) and all(a is b for (a, _), b in zip(made, function.ops, strict=True)):
            return None
        ops = tuple([op for op, _ in made])
        return RewrittenOps(replace(function, ops=ops), tuple([(source,) for _, source in made]))


Rewrite = Callable[[Function], RewrittenOps | None]
"""A function -> what it becomes, None if it stays as it is; the same whenever it is asked."""


def called(function: Function, rewrite: Rewrite) -> list[Op]:
    """Return the ops of a function, with the functions that they call rewritten."""
    found: list[Op] = []
    for op in function.ops:
        made = rewrite(op.callee) if op.is_call else None
        found.append(op if made is None else replace(op, subfunctions=(made.function,)))
    return found


Writer = Callable[[Sequence[Op], Sequence[Value]], Iterable[tuple[Op, int]]]
"""(ops of a function, its outputs) -> what stands in their place, each with the place of its source."""


def kept_rewrite(what: str) -> Callable[[Writer], Rewrite]:
    """Make of what writes the ops of a function its rewrite, callees first; ``what`` says what is kept."""
    kept = Cache[Function, RewrittenOps | None](what, 2)

    def decorate(write: Writer) -> Rewrite:
        def made(function: Function) -> RewrittenOps | None:
            given = called(function, rewrite)
            return RewrittenOps.of(function, given, [*write(given, function.outputs)])

        def rewrite(function: Function) -> RewrittenOps | None:
            return kept.get(function, None, lambda: made(function))

        return rewrite

    return decorate


def rewritten_block(block: Block, rewrite: Rewrite) -> Block:
    """Return the block with its functions rewritten; the name of an op is the joined one of its part."""

    def part(function: Function, names: tuple[str, ...]) -> tuple[Function, tuple[str, ...]]:
        found = rewrite(function)
        if found is None:
            return function, names
        named = [joined_name(names[i] for i in part) for part in found.parts] if names else []
        return found.function, tuple(named)

    function, names = part(block.function, block.names)
    more, more_names = block.accumulating, block.accumulating_names
    if more is not None:
        more, more_names = part(more, more_names)
    return replace(block, function=function, accumulating=more, names=names, accumulating_names=more_names)


def rewritten_stages(
    stages: Sequence[StageBlocks], rewrite: Rewrite, backward: Rewrite | None = None
) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages with passes rewritten, ``backward`` by another way if that is given.

    Those that share Functions share them still.
    """
    return tuple(
        [
            (rewritten_block(ahead, rewrite), rewritten_block(behind, backward or rewrite), updates)
            for ahead, behind, updates in stages
        ]
    )
