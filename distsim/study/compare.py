"""Steps side by side: what ``distsim compare`` does with those that it simulates."""

from __future__ import annotations

from distsim.errors import OptionError, wrong_type
from distsim.report.difference import StepComparison, parts_title
from distsim.report.figures import DEVICE, StepFigures
from distsim.simulation import Simulation
from distsim.simulation.explain.breakdown import PARTS
from distsim.suggestions import choices_for

WAYS = (DEVICE, *PARTS, "phase")
"""What a difference may be made of: the time of the mean device, or parts of the critical path."""


def compare(*steps: Simulation, by: str = DEVICE) -> StepComparison:
    """Return two or more simulated steps side by side, and what makes each other differ from the first.

    ``steps`` are what :func:`distsim.simulate` returns. ``by``: what the difference is made of, ``device``
    for the time of the mean device (compute by kind, exposed communication by axis, bubble), or the critical
    path by ``kind``, ``operator``, ``module``, ``axis`` or ``phase``. Seconds of the parts sum to it.
    ``print`` what is returned, or take its ``steps`` and :meth:`StepComparison.differences`.

    Raises :class:`OptionError` for another way, and :class:`SimulationError` for fewer than two steps, and
    for steps of which the samples and FLOPs are not known.

    >>> import distsim
    >>> plans = ("dp=2", "tp=2")
    >>> gpt = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
    >>> found = distsim.compare(*(distsim.simulate(gpt, "dgx-a100", plan, 8) for plan in plans))
    >>> sum(part.seconds for part in found.differences(1)) > 0  # tp takes longer
    True
    """
    for step in steps:
        if not isinstance(step, Simulation):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("step", step, "what distsim.simulate returns; of a list it is compare(*steps)")
    if by not in WAYS:
        raise OptionError(f"by={by!r:.40} is not one of {choices_for(by, WAYS)}")
    return StepComparison(tuple([_figures(step, by) for step in steps]), parts_title(by))


def _figures(step: Simulation, by: str) -> StepFigures:
    known = step.known_step
    name = f"{known.name} on {known.cluster}, {known.plan}"
    return StepFigures.of(name, step, (known.tokens, known.unit), known.flops, by)
