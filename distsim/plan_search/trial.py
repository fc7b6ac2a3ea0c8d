"""A plan that was tried: what came out, as a record that goes through a line of JSON unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from distsim.plan import Plan
from distsim.plan_search.bounds.layer_figures import LayerWork

SLOWER, TOO_LARGE, LATER = "time", "memory", "later"
"""Why a plan was discarded without being tried: its bounds are beyond the best so far, or the memory; or it
is put off, because others may be better."""

STATUSES = ("simulated", "too large", "refused", "discarded: slower", "discarded: too large")
"""What may become of a plan; ``too large`` ones were built and their memory counted, no more."""


@dataclass(frozen=True)
class PlanTrial:
    """What became of a plan.

    ``seconds`` of a step, from one to the next; ``peak`` bytes in use on the fullest device, of ``usable``;
    ``missing``: the most bytes by which a device has too few. Of a plan that misses more than
    :data:`distsim.plan_search.evaluation.NEARLY` of the memory, seconds are not known: 0. ``work``: seconds
    of the products of a microbatch, summed over stages (:mod:`distsim.plan_search.bounds.plan_bounds`);
    ``layers``: what is known of these (:mod:`distsim.plan_search.bounds.layer_work`). ``refused`` says why it
    does not suit the model or the cluster; ``discarded`` is ``SLOWER`` or ``TOO_LARGE`` where bounds prove
    that it is none of the best, ``LATER`` while it is put off, and ``""`` where it was tried.

    ``low`` and ``high``: between which seconds a measured step is to be expected; 0 where that is not known.
    ``parts``: seconds of the critical path by kind. Both are there for the best plans alone. ``always``:
    fields that the short text has even for one rank.
    """

    text: str
    seconds: float = 0.0
    peak: int = 0
    usable: float = 0.0
    missing: float = 0.0
    work: float = 0.0
    layers: LayerWork | None = None
    refused: str = ""
    discarded: str = ""
    low: float = 0.0
    high: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    always: frozenset[str] = frozenset()

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return Plan.parse(self.text)

    @property
    def short(self) -> str:
        """The text of the plan without degrees of one.

        >>> PlanTrial("dp=2,tp=1,pp=4,microbatches=8,schedule=1f1b").short
        'dp=2,pp=4,microbatches=8,schedule=1f1b'
        """
        parts = self.text.split(",")
        one = {"dp=1", "tp=1", "pp=1", *(("schedule=1f1b",) if "pp=1" in parts else ())}
        alone = {part for part in one if part.partition("=")[0] not in self.always}
        return ",".join(part for part in parts if part not in alone) or "dp=1"

    @property
    def simulated(self) -> bool:
        """Whether its seconds are known."""
        return self.seconds > 0

    @property
    def fits(self) -> bool:
        """Whether it was simulated, and no device needs more than is usable of it."""
        return self.simulated and not self.missing

    @property
    def status(self) -> str:
        """Which of :data:`STATUSES` it has."""
        if self.discarded:
            said = {SLOWER: "discarded: slower", TOO_LARGE: "discarded: too large", LATER: "put off"}
            return said[self.discarded]
        if self.refused:
            return "refused"
        return "simulated" if self.simulated else "too large"

    def bound_by(self, most: int = 2) -> str:
        """Return the kinds of work that most of the critical path consists of, with their shares.

        >>> PlanTrial("dp=1", 4.0, parts={"linear": 3.0, "attention": 0.8, "send": 0.2}).bound_by()
        'linear 75%, attention 20%'
        """
        total = sum(self.parts.values())
        return ", ".join(f"{kind} {own / total:.0%}" for kind, own in list(self.parts.items())[:most])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not as they are by default, the text first: they make the same trial.

        >>> PlanTrial("dp=1", 4.0, peak=0).to_dict()
        {'text': 'dp=1', 'seconds': 4.0}
        """
        made = asdict(self)
        return {own.name: made[own.name] for own in fields(self) if made[own.name] != _default(own)}


def _default(own: Field[Any]) -> Any:
    """Return what a field is where nothing is said; a text always says something."""
    return own.default if own.default_factory is MISSING else own.default_factory()
