"""Why no plan of a space has a value that is asked for: numbers that do not go together, and the way out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

from distsim.schedule.refusals import count as count_of

DEGREES = ("dp", "tp", "cp", "pp")
Degrees = dict[str, int]


class EnumeratedPlans(Protocol):
    """What of a space of plans (:class:`distsim.plan_search.space.PlanSpace`) decides what it lacks."""

    @property
    def devices(self) -> int:
        """How many devices a plan has."""
        ...

    @property
    def sets(self) -> Mapping[str, tuple[str, ...]]:
        """The values that are given."""
        ...

    def values(self, name: str) -> Sequence[Any]:
        """The values of a field that are tried."""
        ...

    def microbatches(self, dp: int, cp: int, pp: int) -> list[int]:
        """The numbers of microbatches that are tried."""
        ...

    def schedules(self, pp: int) -> Iterator[tuple[tuple[str, Any], ...]]:
        """The schedules that are tried, each with its chunks."""
        ...


def why_absent(space: EnumeratedPlans, name: str, value: str, batch: int, layers: tuple[int, int]) -> str:
    """Return what keeps a value out, of ``batch`` samples; "" if nothing known.

    As plans are enumerated: degrees that multiply to the devices, ranks that divide the batch, microbatches,
    schedules that have as many stages as there are layers, stages that divide them. ``layers``: those that
    are alike, and all of which stages have equally many; 0: not known, and as many as may be.
    """
    alike, divided = layers
    every = list(degrees_of(space))
    if name in DEGREES and value.isdigit():
        every = [own for own in every if own[name] == int(value)]
        if not every:
            return _no_product(space, name, int(value))
    whole = [own for own in every if batch % own["dp"] == 0]
    if every and not whole:
        return f"it leaves {_one_of('dp', every)}, which does not divide a batch of {batch}"
    counted = [own for own in whole if space.microbatches(own["dp"], own["cp"], own["pp"])]
    if whole and not counted:
        return _no_microbatches(space, whole, batch)
    made = [
        own
        for own in counted
        if own["pp"] == 1 or any(_has(each, name, value) for each in space.schedules(own["pp"]))
    ]
    if counted and (not made or (name == "schedule" and all(own["pp"] == 1 for own in made))):
        return _no_schedule(space, name, value, counted, alike)
    counts = stage_counts(space, made, name, value)
    if counts and all(divided % each for each in counts):
        return (
            f"{count_of(divided, 'layer')} do not make {'|'.join(map(str, counts))} equal stages, as the "
            "stack has them: add stages=default, or give other pp or chunks"
        )
    return ""


def undivided(space: EnumeratedPlans, layers: int) -> str:
    """Say which pp are not tried, as equal stages do not divide the layers; "" if none.

    ``layers``: those of which stages have equally many; 0 where stages may be uneven.
    """
    given = space.sets.get("pp", ())
    left_out = {own["pp"] for own in degrees_of(space) if layers % own["pp"] and str(own["pp"]) not in given}
    pp = ", ".join(map(str, sorted(left_out)))
    why = f"whose equal stages do not divide {layers} layers: stages=default tries them"
    return f"without pp={pp}, {why}" if pp else ""


def stage_counts(
    space: EnumeratedPlans, degrees: Iterable[Degrees], name: str = "", value: str = ""
) -> list[int]:
    """Return how many stages pipelines of these degrees have; those of a value of a field of schedules."""
    found = {
        own["pp"] * dict(each).get("chunks", 1)
        for own in degrees
        if own["pp"] > 1
        for each in space.schedules(own["pp"])
        if _has(each, name, value)
    }
    return sorted(found)


def degrees_of(space: EnumeratedPlans) -> Iterator[Degrees]:
    """Yield the degrees that are tried and multiply to the devices."""
    for tp, cp, pp in product(space.values("tp"), space.values("cp"), space.values("pp")):
        dp, rest = divmod(space.devices, tp * cp * pp)
        if not rest and ("dp" not in space.sets or dp in space.values("dp")):
            yield {"dp": dp, "tp": tp, "cp": cp, "pp": pp}


def _has(schedule: tuple[tuple[str, Any], ...], name: str, value: str) -> bool:
    given = dict(schedule)
    return name not in given or str(given[name]) == value


def _no_product(space: EnumeratedPlans, name: str, value: int) -> str:
    """Say with which values of a degree the others multiply to the devices."""
    given = [other for other in DEGREES if other != name and other in space.sets]
    others = [_values_of(space, other) for other in DEGREES if other != name]
    products = [math.prod(each) for each in product(*others)] if all(others) else []
    left = sorted({space.devices // each for each in products if space.devices % each == 0})
    way = f"leave {' or '.join(given)} open, or give" if given else "give"
    said = " and ".join(f"{other}={'|'.join(space.sets[other])}" for other in given)
    devices = count_of(space.devices, "device")
    if space.devices % value:
        return f"it does not divide {devices}; choose one of {_divisors(space.devices)}"
    if not left:
        return f"{said} do not divide {devices}; {way} others"
    shown = "|".join(map(str, left))
    if value not in left:
        beside = f"{said} leave{'s' * (len(given) == 1)}" if given else "the other degrees leave"
        return f"dp * tp * cp * pp is {devices}, of which {beside} {name}={shown}: {way} one of these"
    return ""


def _values_of(space: EnumeratedPlans, name: str) -> Sequence[int]:
    """Return the values of a degree: those given, or any where none is."""
    if name in space.sets:
        return space.values(name)
    if name == "dp":
        return [each for each in range(1, space.devices + 1) if space.devices % each == 0]
    return space.values(name)


def _no_microbatches(space: EnumeratedPlans, degrees: Sequence[Degrees], batch: int) -> str:
    """Say why no number of microbatches goes with degrees."""
    own = degrees[0]
    samples = batch // own["dp"]
    each = f"each of dp={own['dp']} ranks has {count_of(samples, 'sample')}"
    for field in ("microbatches", "microbatch_size"):
        if field in space.sets:
            return f"{each}, which {field}={'|'.join(space.sets[field])} does not divide; give one that does"
    return (
        f"{each}, fewer than the {own['pp']} microbatches that fill a pipeline of pp={own['pp']}: "
        f"give a batch of {own['dp'] * own['pp']} or more, or microbatches=N"
    )


def _no_schedule(
    space: EnumeratedPlans, name: str, value: str, degrees: Sequence[Degrees], layers: int
) -> str:
    """Say why no schedule goes with degrees: most often, of more stages than there are layers."""
    pipelines = sorted({own["pp"] for own in degrees if own["pp"] > 1})
    if not pipelines:
        return "it is of a pipeline, and no plan has pp of 2 or more"
    names = [value] if name == "schedule" else [str(each) for each in space.values("schedule")]
    fewest = 2 * pipelines[0]
    if "interleaved" not in names or not layers or fewest <= layers:
        return ""
    return (
        f"interleaved with 2 chunks or more has pp * chunks = {pipelines[0]} * 2 = {fewest} stages or more, "
        f"and there are {count_of(layers, 'layer')} alike; give a smaller pp, schedule=1f1b, or chunks=N"
    )


def _one_of(name: str, degrees: Iterable[Degrees]) -> str:
    return f"{name}={'|'.join(str(each) for each in sorted({own[name] for own in degrees}))}"


def _divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
