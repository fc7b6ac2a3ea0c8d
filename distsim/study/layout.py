"""The step of a model laid out by a plan; what the plan leaves open is as the stack has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distsim.errors import PlanError
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import TABLE, Schedule
from distsim.study.choices import Choices


def plan_asked(plan: str | Plan | None, order: Schedule | None = None) -> str | Plan:
    """Return the plan that is asked for, by default one device; with a table its schedule is that.

    The table says how many stages a rank has, where the plan does not. Raises :class:`PlanError` for a plan
    that names another schedule beside it.

    >>> plan_asked(None)
    'dp=1'
    """
    if plan is None or isinstance(plan, str):
        text = "dp=1" if plan is None else plan
        if order is None:
            return text
        if "schedule=" in text.replace(f"schedule={TABLE}", ""):
            raise PlanError("--schedule-csv says what the schedule is: leave schedule= out of --plan")
        named = text if "schedule=" in text else f"{text},schedule={TABLE}"
        return named if "chunks=" in named else f"{named},chunks={order.stages_a_rank}"
    if order is None or plan.schedule == TABLE:
        return plan
    if plan.schedule != Plan().schedule:
        raise PlanError(f"a table says what the schedule is: give no schedule={plan.schedule} beside it")
    return replace(plan, schedule=TABLE, chunks=order.stages_a_rank)


def lay_out(
    asked: str | Plan, choices: Choices, build: Callable[[Plan], Program]
) -> tuple[Plan, Program, list[str]]:
    """Return the plan that is asked for, the program that ``build`` makes of it, and notes.

    What the stack has for what the plan does not say may not suit the model: every second layer of one layer
    is recomputed, say, or a sequence is divided that there is not. Where the error names it, it is left out,
    and a note says why. Raises what ``build`` raises besides.
    """
    plan, said = choices.plan(asked), list[str]()
    open_fields = () if isinstance(asked, Plan) else [own for own in _DEFAULTS if f"{own}=" not in asked]
    while True:
        try:
            return plan, build(plan), said
        except PlanError as error:
            named = [own for own in open_fields if _named(plan, own, str(error))]
            if not named:
                raise
            value, instead = _DEFAULTS[named[0]]
            plan = replace(plan, **{named[0]: value})
            said.append(f"{instead}, as the default of {choices.stack.name} does not fit: {error}")


def settled(asked: str | Plan, plan: Plan, choices: Choices) -> str | Plan:
    """Return what was asked for with the fields that :func:`lay_out` left out of the plan it made."""
    if isinstance(asked, Plan):
        return asked
    usual, every = choices.plan(asked), _DEFAULTS.items()
    left_out = [name for name, (value, _) in every if getattr(plan, name) == value != getattr(usual, name)]
    return ",".join([asked, *(f"{name}={_DEFAULTS[name][0]}" for name in left_out)])


_DEFAULTS = {"remat": ("none", "nothing is recomputed"), "sp": ("off", "no sequence is divided")}
"""Fields that a stack has defaults of: what they are without, and what that is called."""


def _named(plan: Plan, field: str, error: str) -> bool:
    value = getattr(plan, field)
    return value != _DEFAULTS[field][0] and f"{field}={value}" in error
