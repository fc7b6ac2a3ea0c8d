"""What would make a plan fit in memory: plans next to one that does not, each simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from distsim.errors import DistsimError
from distsim.plan import Plan
from distsim.simulate import Simulation

Simulate = Callable[[Plan], Simulation]

Change = dict[str, object]
"""Fields of a plan, and what they become."""

SPLITS = (2, 4, 8)
"""By how much the microbatches of a plan are made smaller."""


@dataclass(frozen=True)
class Remedy:
    """A plan that fits: what it changes, its seconds a step, and the bytes in use on its fullest device."""

    change: str
    plan: Plan
    step_time: float
    peak: int

    def __str__(self) -> str:
        return self.change


def remedies(plan: Plan, devices: int, simulate: Simulate, most: int = 3) -> list[Remedy]:
    """Return up to ``most`` plans that fit on ``devices`` devices and differ little, the fastest first.

    One change is tried at a time: recomputing, parameters divided over dp, smaller microbatches, and tensor
    or pipeline ranks in the place of data-parallel ones (or on devices that are idle). Where fewer than
    ``most`` of them are enough, two at once. A change that the function or the batch does not allow is left
    out.
    """
    changes = list(_changes(plan, devices))
    found = list(_that_fit(plan, changes, simulate))
    if len(found) < most:
        pairs = [one | two for one, two in combinations(changes, 2) if one.keys().isdisjoint(two)]
        known = {remedy.plan for remedy in found}
        enough = [change for change in changes if _changed(plan, change) in known]
        pairs = [pair for pair in pairs if not any(each.items() <= pair.items() for each in enough)]
        found += _that_fit(plan, pairs, simulate)
    return sorted(found, key=lambda remedy: remedy.step_time)[:most]


def _changes(plan: Plan, devices: int) -> Iterator[Change]:
    """Yield the single changes."""
    if plan.remat == "none":
        yield {"remat": "attention"}
    if plan.remat != "full":
        yield {"remat": "full"}
    if plan.dp > 1 and plan.fsdp != "reshard":
        yield {"fsdp": "reshard"}
    for parts in SPLITS:
        yield {"microbatches": plan.microbatches * parts}
    for axis in ("tp", "pp"):
        degree = 2 * getattr(plan, axis)
        if plan.dp % 2 == 0:
            yield {axis: degree, "dp": plan.dp // 2}
        elif 2 * plan.devices <= devices:
            yield {axis: degree}


def _changed(plan: Plan, change: Change) -> Plan | None:
    try:
        return replace(plan, **change)  # pyright: ignore[reportArgumentType]
    except DistsimError:
        return None


def _that_fit(plan: Plan, changes: Sequence[Change], simulate: Simulate) -> Iterator[Remedy]:
    for change in changes:
        other = _changed(plan, change)
        if other is None:
            continue
        try:
            simulation = simulate(other)
            if not simulation.fits:
                continue
            text = ", ".join(f"{name}={value}" for name, value in change.items())
            yield Remedy(text, other, simulation.step_time, max(simulation.peak_memory.values()))
        except DistsimError:  # this plan does not suit the function, the batch or the schedule
            continue
