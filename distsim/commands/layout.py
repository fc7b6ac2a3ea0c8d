"""The step of a model laid out by a plan; what the plan leaves open is as the stack has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distsim.commands.model import Choices
from distsim.errors import PlanError
from distsim.plan import Plan
from distsim.program.program import Program


def lay_out(
    text: str, stack: str, choices: Choices, build: Callable[[Plan], Program]
) -> tuple[Plan, Program, list[str]]:
    """Return the plan of a text, the program that ``build`` makes of it, and notes.

    What the stack has for what the plan does not say may not suit the model: every second layer of one layer
    is recomputed, say, or a sequence is divided that there is not. Where the error names it, it is left out,
    and a note says why. Raises what ``build`` raises besides.
    """
    plan, said = choices.plan(text), list[str]()
    while True:
        try:
            return plan, build(plan), said
        except PlanError as error:
            named = [own for own in _DEFAULTS if f"{own}=" not in text and _named(plan, own, str(error))]
            if not named:
                raise
            value, instead = _DEFAULTS[named[0]]
            plan = replace(plan, **{named[0]: value})
            said.append(f"{instead}, as the default of {stack} does not fit: {error}")


_DEFAULTS = {"remat": ("none", "nothing is recomputed"), "sp": ("off", "no sequence is divided")}
"""Fields that a stack has defaults of: what they are without, and what that is called."""


def _named(plan: Plan, field: str, error: str) -> bool:
    value = getattr(plan, field)
    return value != _DEFAULTS[field][0] and f"{field}={value}" in error
