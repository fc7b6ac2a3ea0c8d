"""In which order plans are tried: those of the least bounds first, which say more once layers are known.

Of no effect on what comes out, which bounds prove; but the sooner the best are found, the more is discarded.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from distsim.ir import Function
from distsim.plan import Plan
from distsim.plan_search.evaluation import PlanEvaluator, Standing
from distsim.plan_search.trial import PlanTrial

UNITS = 4
"""Units of a round, the fewest, so that there is work for many; but it has no more than twice its plans."""


class Round(NamedTuple):
    """Plans that are tried next, by the division that they share; of those of whose layers more is found out,
    the ones that are expected at most at ``until``."""

    units: Mapping[Hashable, Sequence[Plan]]
    until: float


class PlanQueue:
    """The plans that are left, the most promising first.

    That is by their bounds (:meth:`PlanEvaluator.expected`). Where nothing is known of a plan's layers, its
    bound is taken to rise by half of the least by which that of a plan rose that was put off.
    """

    def __init__(self, plans: Iterable[Plan], evaluator: PlanEvaluator, standing: Standing) -> None:
        self._evaluator, self._unknown = evaluator, Standing()
        self._rise: float | None = None
        self._functions: dict[Function, int] = {}
        self._numbers = {plan: number for number, plan in enumerate(plans)}
        self._left = [(self._guess(plan, standing), number, plan) for plan, number in self._numbers.items()]
        heapq.heapify(self._left)

    def __bool__(self) -> bool:
        return bool(self._left)

    def round(self, size: int, standing: Standing, found: dict[str, PlanTrial]) -> Round:
        """Take so many plans out; those that are discarded by now, or refused at once, are done, and entered
        in ``found``."""
        units: dict[Hashable, list[Plan]] = {}
        count, until = 0, 0.0
        while self._left and count < (size if len(units) >= UNITS else 2 * size):
            guess, number, plan = heapq.heappop(self._left)
            settled, now = self._evaluator.settled(plan, standing), self._guess(plan, standing)
            if settled is not None:
                found[str(plan)] = settled
            elif now > guess:
                heapq.heappush(self._left, (now, number, plan))
            else:
                units.setdefault(self._division(plan), []).append(plan)
                count, until = count + 1, max(until, now)
        return Round(units, until)

    def put_back(self, plans: Iterable[Plan], standing: Standing) -> None:
        """Take in again what was put off."""
        for plan in plans:
            known, before = (self._evaluator.bound(plan, each) for each in (standing, self._unknown))
            rise = 1.0 + (known / before - 1.0) / 2 if before else 1.0
            self._rise = rise if self._rise is None else min(self._rise, rise)
            heapq.heappush(self._left, (self._guess(plan, standing), self._numbers[plan], plan))

    def _division(self, plan: Plan) -> Hashable:
        """Return what plans share that one process tries in order."""
        size = (plan.dp * plan.microbatches) if plan.ep == 1 else (plan.dp, plan.microbatches)
        function = self._functions.setdefault(self._evaluator.problem.model(plan), len(self._functions))
        return function, plan.tp, plan.cp, plan.cp_kind, plan.sp, plan.ep, plan.etp, plan.order, size

    def _guess(self, plan: Plan, standing: Standing) -> float:
        """Return as what a plan is put in order."""
        return self._evaluator.expected(plan, standing, self._rise or 1.0)
