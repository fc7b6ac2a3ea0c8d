"""A function to cut beside the first one that it differs from in sizes alone: what is made of one follows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property

from distsim.cache import Cache
from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Value, substitute
from distsim.program.block import Block, StageBlocks
from distsim.resizing import Likeness, Unlike
from distsim.transforms.data_parallel.gradient_buckets import REDUCTIONS
from distsim.transforms.op_graph import Numbered


class Sized:
    """A function: ``first``, or what differs from it as ``likeness`` says.

    Changes that follow from ops alone are made of the first one and carried over.
    """

    def __init__(self, first: Numbered, likeness: Likeness | None = None) -> None:
        self.first, self.likeness = first, likeness

    @cached_property
    def own(self) -> Numbered:
        """The function itself; raises :class:`Unlike`."""
        return self.first if self.likeness is None else self.first.resized(self.likeness)

    def alone(self) -> Sized:
        """Return the function as one that nothing is carried over to."""
        return self if self.likeness is None else Sized(self.own)

    def changed(self, key: Hashable, change: Callable[[Numbered], Numbered]) -> Sized:
        """Return what a change that follows from ops alone, and ``key``, makes of the function."""
        first = self.first

        def made() -> Numbered | None:
            found = change(first)
            return None if found is first else found

        found = _CHANGED.get(first, key, made)
        return self if found is None else Sized(found, self.likeness)

    def stages(self, stages: Sequence[StageBlocks]) -> tuple[StageBlocks, ...]:
        """Return the blocks of stages that were made of the first one; raises :class:`Unlike`."""
        if self.likeness is None:
            return tuple(stages)
        likeness = self.likeness
        return tuple(
            [
                (
                    _carried(forward, likeness),
                    _carried(backward, likeness),
                    tuple([(number, _carried(block, likeness)) for number, block in updates]),
                )
                for forward, backward, updates in stages
            ]
        )


def sized_values(function: Numbered) -> frozenset[Value]:
    """Return the values on whose sizes it may depend how a function is cut, beside its forward pass: what is
    read once a step, and by what reduces gradients."""
    found = [
        op.inputs
        for number, op in enumerate(function.ops)
        if function.steps[number] or (op.op_type in REDUCTIONS and not over_tensor(op.attributes["axis"]))
    ]
    return frozenset([value for inputs in found for value in inputs])


def _carried(block: Block, likeness: Likeness) -> Block:
    function, more = likeness.carry_function(block.function), block.accumulating
    adding = None if more is None else likeness.carry_function(more)
    inputs, outputs = (substitute(keys, likeness.values) for keys in (block.inputs, block.outputs))
    if not likeness.values.keys().isdisjoint(block.accumulated):
        raise Unlike
    if (function, adding, inputs, outputs) == (block.function, more, block.inputs, block.outputs):
        return block
    return replace(block, function=function, accumulating=adding, inputs=inputs, outputs=outputs)


_CHANGED = Cache[Numbered, Numbered | None]("changes of functions that follow from ops alone", 64)
