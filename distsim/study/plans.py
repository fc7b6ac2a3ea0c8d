"""The training step of a model for each of many plans, which share one as far as they divide the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property

from distsim.ir import Function, pformat
from distsim.plan import Plan
from distsim.report.progress import Progress
from distsim.study.choices import Choices
from distsim.study.options import ModelOptions
from distsim.study.training_step import training_step


@dataclass(eq=False)
class ModelOfPlans:
    """Returns the training step that options ask for, for a plan.

    It depends on the plan where a stack pads the vocabulary for tensor-parallel ranks, and where sequences
    are routed to experts part by part. ``aloud``: reading it is said on standard error, the first time.
    """

    options: ModelOptions
    choices: Choices
    aloud: bool = False
    _made: dict[tuple[int, int], Function] = field(default_factory=dict[tuple[int, int], Function])
    _by_text: dict[str, Function] = field(default_factory=dict[str, Function])

    def __call__(self, plan: Plan) -> Function:
        """Return the step: the same object for plans that divide the same."""
        parts = plan.sequence_parts
        return self._step(plan, parts if parts > 1 and self._routes_by_part else 1)

    @cached_property
    def _routes_by_part(self) -> bool:
        """Whether the step depends on how sequences are divided."""
        divided = Plan(cp=2)
        return self._step(Plan(), 1) is not self._step(divided, divided.sequence_parts)

    def _step(self, plan: Plan, parts: int) -> Function:
        key = self.choices.stack.vocabulary_multiple * plan.tp, parts
        if key not in self._made:
            made, _ = training_step(
                self.options, Progress(sys.stderr if self.aloud and not self._made else None), plan
            )
            self._made[key] = self._by_text.setdefault(pformat(made), made)
        return self._made[key]
