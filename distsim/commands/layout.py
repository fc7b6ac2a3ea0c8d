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

    What the stack recomputes, if the plan does not say, may not suit the model: every second layer of one
    layer, say. Then nothing is recomputed, and a note says why. Raises what ``build`` raises for a plan that
    fails without as well.
    """
    plan = choices.plan(text)
    try:
        return plan, build(plan), []
    except PlanError as error:
        plain = replace(plan, remat="none")
        if plan == plain or "remat=" in text:
            raise
        program = build(plain)
        return plain, program, [f"nothing is recomputed, as the default of {stack} does not fit: {error}"]
