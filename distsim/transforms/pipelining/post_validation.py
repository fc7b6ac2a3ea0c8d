"""Post-update validation: no stage waits, before its update, for what others know of their gradients.

What clips gradients, and tells whether one of a scaled loss overflowed, is a sum over all stages, for which
each update waits: so no rank begins the next step before all have ended this one, and a parallelogram of a
schedule gains nothing (Qi et al. 2024, "Zero bubble pipeline parallelism", ICLR, section 4). Their fork of
Megatron-LM (sail-sg/zero-bubble-pipeline-parallelism 3a91d0c8, README.md, "Optimizer Post Validation":
``--enable-optimizer-post-validation``) steps on each rank as if neither happened, by the state of that rank
and of those before it; the whole one goes round while the next step fills the pipeline, and a step that was
wrong is rolled back and taken again.

Here a stage goes by its own gradients, which is the same factor where nothing is clipped and nothing
overflows. What the ranks before it know, they know when they end, ahead of it in a parallelogram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.errors import PlanError
from distsim.ir import FunctionMaker, Value
from distsim.ops.training import sums_squares
from distsim.transforms.op_graph import Numbered, StageMap
from distsim.transforms.pipelining.cut_blocks import place_steps

_FACTOR = "GradientFactor"


def validate_later(function: Numbered, assigned: StageMap) -> Numbered:
    """Return the function with a factor of all gradients for each stage, of the gradients of that stage.

    Raises :class:`PlanError` where there is no such factor: gradients are neither clipped nor scaled.
    """
    factor = next((number for number, op in enumerate(function.ops) if op.op_type == _FACTOR), None)
    if factor is None:
        raise PlanError(
            "post_validation=on lets updates not wait for the norm of all gradients, and none is taken: they "
            "are neither clipped nor is the loss scaled; leave it out, or clip"
        )
    stages, _ = place_steps(function, assigned)
    sums = _StageSums(function, factor, stages)
    whole = sums.factor
    summing, own = {*sums.squares.values()}, dict[int, Value]()  # the factor of each stage
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    for number, op in enumerate(function.ops):
        if number in sums.inner:
            continue
        if whole in function.reads[number]:
            stage = stages[number] if stages[number] in summing else min(summing)
            if stage not in own:
                own[stage] = sums.add(maker, stage)
            inputs = [own[stage] if v == whole else function.values[v] for v in function.reads[number]]
            op = replace(op, inputs=tuple(inputs))
        maker.adopt(op)
    maker.set_outputs([function.values[value] for value in function.outputs])
    return Numbered(maker.finalize())


class _StageSums:
    """The ops that make a factor of the squares of gradients, which each stage sums of its own.

    ``inner`` are their numbers, in order: additions, shares, sums over ranks, all linear, and the factor;
    ``squares`` the values that they start from, with the stage of each.
    """

    def __init__(self, function: Numbered, factor: int, stages: Sequence[int]) -> None:
        self.function, self.factor = function, function.makes[factor][0]
        self.squares: dict[int, int] = {}
        found, todo = set[int](), [factor]
        while todo:
            number = todo.pop()
            op = function.ops[number]
            if op.op_type == "SquareSum" or sums_squares(op):
                self.squares |= dict.fromkeys(function.makes[number], stages[number])
            elif number not in found:
                found.add(number)
                todo += [function.producer[value] for value in self._summed(number)]
        self.inner = sorted(found)

    def _summed(self, number: int) -> list[int]:
        """Return what an op reads that follows from gradients: not the share of a sum that a rank counts."""
        function = self.function
        made = [(value, function.producer[value]) for value in function.reads[number]]
        return [value for value, op in made if op >= 0 and function.steps[op]]

    def add(self, maker: FunctionMaker, stage: int) -> Value:
        """Add the ops that make a factor of the squares of a stage alone; return it."""
        function = self.function
        made = {value: function.values[value] for value, own in self.squares.items() if own == stage}
        for number in self.inner:
            op, summed = function.ops[number], self._summed(number)
            terms = [made[value] for value in summed if value in made]
            (output,) = function.makes[number]
            if len(terms) == len(summed):
                inputs = [made.get(value, function.values[value]) for value in function.reads[number]]
                made[output] = Value(op.outputs[0].name, op.outputs[0].type)
                maker.adopt(replace(op, inputs=tuple(inputs), outputs=(made[output],)))
            elif terms:  # of a sum of two, what is of this stage
                (made[output],) = terms
        return made[self.factor]
