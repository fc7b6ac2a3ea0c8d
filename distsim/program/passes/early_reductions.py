"""The last call that adds to sums over microbatches, going on with what is made of them while it runs.

So gradients are reduced over ranks bucket by bucket during the last backward pass: frameworks hold the
buckets back until the last microbatch (``no_sync``), then start each as soon as it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distsim.cache import Cache
from distsim.ir import Function, Op, Value

Places = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Ending:
    """A pass with what follows from its sums: its own outputs at ``kept``, then all that is made of them.

    ``origins`` says of each op which one it is: (0, place in the pass) or (1, place in what follows).
    """

    function: Function
    kept: Places
    origins: tuple[tuple[int, int], ...]

    def names(self, own: Sequence[str], after: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the ops, given those of the pass and of what follows, if there are any."""
        given = own, after
        if not (own or after):
            return ()
        return tuple([given[side][place] if given[side] else "" for side, place in self.origins])


def ending(function: Function, after: Function, sums: Places, others: frozenset[int]) -> Ending:
    """Return a pass that runs the ops of ``after`` in their order, each as soon as what it reads is there.

    The inputs of ``after`` are the outputs of the pass at ``sums``, which it no longer returns, but those at
    ``others``, which something else reads as well. Made once.
    """
    return _ENDINGS.get(
        function, (after, sums, others), lambda: _EndingMaker(function, after, sums).write(others)
    )


_ENDINGS = Cache[Function, Ending]("last calls of passes that sum, by what follows from the sums", 8)


class _EndingMaker:
    def __init__(self, function: Function, after: Function, sums: Places) -> None:
        self.function, self.after, self.sums = function, after, sums
        self.env = {own: function.outputs[place] for own, place in zip(after.inputs, sums, strict=True)}
        self.ops: list[Op] = []
        self.origins: list[tuple[int, int]] = []
        self.next = 0

    def write(self, others: frozenset[int]) -> Ending:
        function, after = self.function, self.after
        there = {*function.inputs}
        missing = {*self.env.values()} - there
        for place, op in enumerate(function.ops):
            self.ops.append(op)
            self.origins.append((0, place))
            if not missing.isdisjoint(op.outputs):
                missing.difference_update(op.outputs)
                self._go_on(missing)
        self._go_on(missing)
        gone = {*self.sums} - others
        kept = tuple([place for place in range(len(function.outputs)) if place not in gone])
        outputs = [*[function.outputs[place] for place in kept], *[self.env[v] for v in after.outputs]]
        made = Function(f"{function.name}_last", function.inputs, tuple(self.ops), tuple(outputs))
        return Ending(made, kept, tuple(self.origins))

    def _go_on(self, missing: set[Value]) -> None:
        """Add the ops that come next, up to one that waits for a sum."""
        while self.next < len(self.after.ops):
            op = self.after.ops[self.next]
            inputs = tuple([self.env.get(value, value) for value in op.inputs])
            if not missing.isdisjoint(inputs):
                return
            outputs = tuple([Value(value.name, value.type) for value in op.outputs])
            self.env.update(zip(op.outputs, outputs, strict=True))
            self.ops.append(replace(op, inputs=inputs, outputs=outputs))
            self.origins.append((1, self.next))
            self.next += 1
