"""What would make a plan fit in memory: plans next to one that does not, those that fit simulated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

from distsim.errors import DistsimError, PlanError
from distsim.ir import Function, Role, Topology
from distsim.plan import Plan
from distsim.plan_search.space import ModelTraits
from distsim.program.program import Program
from distsim.simulation import Simulation
from distsim.simulation.memory.peak import fullest_device
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.steady_state import full_program, step_memory

Change = dict[str, str | int]
"""Fields of a plan, and what they become."""

SPLITS = (2, 4, 8)
"""By how much the microbatches of a plan are made smaller, and what is on each rank of tp or pp."""

LEAST = (4, 2, 1)
"""How many samples microbatches have that are made so small as to have no more."""

OFFLOADED = (4, 2, 1)
"""Of how many layers of a stage one is offloaded."""

SEARCH_SECONDS = 20.0
"""How long plans are looked for: a few times what the plan itself took, where it was a large one."""


@dataclass(frozen=True)
class Remedy:
    """A plan that fits: what it changes, its seconds a step, and the bytes in use on its fullest device."""

    change: str
    plan: Plan
    seconds: float
    peak: int

    def __str__(self) -> str:
        return self.change


@dataclass(frozen=True)
class Remedies:
    """Plans that fit, the fastest first, and how many were not tried as there was no time left.

    ``looked_at`` counts those that were tried, or cannot fit; ``fields`` are what they change.
    """

    fit: tuple[Remedy, ...]
    untried: int
    looked_at: int = 0
    fields: tuple[str, ...] = ()


def _replaced(plan: Plan, change: Change) -> Plan:
    return replace(plan, **change)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, eq=False)
class PlanTrials:
    """How plans of a function are tried: ``build`` divides and schedules it, ``simulate`` finds its time.

    ``changed`` returns a plan of which some fields are others.
    """

    function: Function
    topology: Topology
    build: Callable[[Plan], Program]
    simulate: Callable[[Program], Simulation]
    changed: Callable[[Plan, Change], Plan] = _replaced


def remedies(plan: Plan, trials: PlanTrials, most: int = 3, seconds: float = SEARCH_SECONDS) -> Remedies:
    """Return up to ``most`` plans that fit on the devices and differ little.

    One change is tried at a time: smaller microbatches, activations divided over tp in the sequence,
    recomputing, state or parameters divided over dp (which takes in devices that are idle), experts over dp,
    tensor or pipeline ranks in the place of data-parallel ones (or on devices that are idle), and activations
    of some layers, or of all, on the host. Where fewer than ``most`` of them are enough, two at once; where
    no two are, a third beside recomputing all with parameters divided. A change that the function or the
    batch does not allow is left
    out; so is one after which parameters and state alone, divided without a rest, are more than a device has.
    Of the others memory is counted, and those that fit are simulated. No plan is begun that would end after
    ``seconds`` if it took as long as the longest so far.
    """
    search = _RemedySearch(plan, trials, seconds)
    changes = list(_changes(plan, trials))
    found = search.try_all(changes)
    if len(found) < most:
        pairs = [one | two for one, two in combinations(changes, 2) if one.keys().isdisjoint(two)]
        known = {remedy.plan for remedy in found}
        enough = [change for change in changes if search.changed(change) in known]
        pairs = [pair for pair in pairs if not any(each.items() <= pair.items() for each in enough)]
        pairs.sort(key=lambda pair: -int(pair.get("microbatches", 0)))  # the smallest are nearest to enough
        found += search.try_all(pairs)
    if not found:
        idle = len(trials.topology.devices) // plan.devices
        most_saved = {"remat": "full", **_divided(plan), **({"dp": plan.dp * idle} if idle > 1 else {})}
        found = search.try_all([most_saved | one for one in changes if one.keys().isdisjoint(most_saved)])
    fastest = sorted(found, key=lambda remedy: remedy.seconds)[:most]
    fields = tuple(dict.fromkeys(name for change in changes for name in change))
    return Remedies(tuple(fastest), search.untried, search.looked_at, fields)


def _changes(plan: Plan, trials: PlanTrials) -> Iterator[Change]:
    """Yield the single changes."""
    idle = len(trials.topology.devices) // plan.devices
    for parts in _microbatch_splits(plan, trials.function):
        yield {"microbatches": plan.microbatches * parts}
    if plan.tp > 1 and plan.sp == "off":
        yield {"sp": "on"}
    if plan.remat == "none":
        yield {"remat": "attention"}
    if plan.remat != "full":
        yield {"remat": "full"}
    divided = _divided(plan)
    if idle > 1:
        yield {"dp": plan.dp * idle} | divided
    if plan.dp * plan.cp > 1 and not plan.zero:
        yield {"zero": 1}
    yield from _experts_apart(plan, trials.function)
    if plan.dp * plan.cp > 1 and plan.zero < 3:
        yield divided
    elif plan.dp * plan.cp > 1 and plan.reshard not in ("always", "blocking"):
        yield {"reshard": "always"}
    for axis, parts in product(("tp", "pp"), SPLITS):
        degree = parts * getattr(plan, axis)
        if plan.dp % parts == 0:
            yield {axis: degree, "dp": plan.dp // parts}
        elif parts <= idle:
            yield {axis: degree}
    if all(device.host_link is not None for device in trials.topology.devices):
        layers = _layers_of_a_stage(plan, trials.function)
        for count in dict.fromkeys(layers // parts for parts in OFFLOADED):
            if count > plan.offload:
                yield {"offload": count}


def _divided(plan: Plan) -> Change:
    """Parameters divided over dp, with layers for buckets, and nothing to gather after the update."""
    without: Change = {"zero": 3, "bucket": "auto", "overlap_params": "off"}
    return {name: own for name, own in without.items() if getattr(plan, name) != own}


def _microbatch_splits(plan: Plan, function: Function) -> list[int]:
    """Return by how much microbatches may be made smaller, down to a sample."""
    try:
        samples = ModelTraits.of(function).batch // (plan.dp * plan.microbatches)
    except PlanError:  # without a batch
        return [*SPLITS]
    return sorted(
        {*(parts for parts in SPLITS if parts <= samples), *(samples // own for own in LEAST)} - {0, 1}
    )


def _experts_apart(plan: Plan, function: Function) -> Iterator[Change]:
    """Yield the greatest degree in which dp ranks can divide the experts, if that is more than now."""
    try:
        experts = ModelTraits.of(function).experts
    except PlanError:  # without a batch
        return
    degree = math.gcd(experts, plan.dp)
    if experts and degree > plan.ep:
        yield {"ep": degree}


def _layers_of_a_stage(plan: Plan, function: Function) -> int:
    """Return how many layers the largest stage has; 0 if the function has none that repeat."""
    try:
        return math.ceil(ModelTraits.of(function).every_layer / (plan.pp * plan.chunks))
    except PlanError:  # without a batch
        return 0


@dataclass(eq=False)
class _RemedySearch:
    """Tries plans until the time is up."""

    plan: Plan
    trials: PlanTrials
    seconds: float
    begin: float = field(default_factory=time.monotonic)
    longest: float = 0.0
    untried: int = 0
    looked_at: int = 0

    def try_all(self, changes: Sequence[Change]) -> list[Remedy]:
        found: list[Remedy] = []
        for change in changes:
            other = self.changed(change)
            if other is None or other.devices > len(self.trials.topology.devices):
                continue
            if not self._has_room(other):
                self.looked_at += 1
                continue
            start = time.monotonic()
            if start + self.longest > self.begin + self.seconds:
                self.untried += 1
                continue
            self.looked_at += 1
            remedy = self._try(other, ", ".join(f"{name}={value}" for name, value in change.items()))
            self.longest = max(self.longest, time.monotonic() - start)
            found += [] if remedy is None else [remedy]
        return found

    def changed(self, change: Change) -> Plan | None:
        """Return the plan with a change; None where there is none."""
        try:
            return self.trials.changed(self.plan, change)
        except DistsimError:
            return None

    @cached_property
    def held(self) -> tuple[int, int]:
        """The bytes of parameters, and of state, which are held all step."""
        function = self.trials.function
        read = {value for op in function.ops for value in op.inputs}
        given = [v for v in function.inputs if v in read]
        parameters = sum(v.type.nbytes for v in given if v.role is Role.PARAMETER)
        return parameters, sum(v.type.nbytes for v in given if v.role is Role.STATE)

    def _has_room(self, plan: Plan) -> bool:
        """Whether what is held all step fits, if all of it is divided by all that the plan divides it by."""
        parameters, state = self.held
        ranks = max(plan.zero_ranks or plan.dp * plan.cp, plan.ep)
        parameters /= ranks if plan.zero == 3 else plan.ep
        state /= ranks if plan.zero else plan.ep
        room = max(device.usable for device in self.trials.topology.devices)
        return (parameters + state) / (plan.tp * plan.pp) <= room

    def _try(self, plan: Plan, change: str) -> Remedy | None:
        try:
            program = self.trials.build(plan)
            memory = program_memory(full_program(program))
            if memory.missing:
                return None
            simulation = self.trials.simulate(program)
            memory = step_memory(memory, simulation)
            if memory.missing:
                return None
            peaks = memory.peak_of_devices()
            fullest = fullest_device(peaks)
            peak = 0 if fullest is None else peaks[fullest]
            return Remedy(change, plan, simulation.step_period, peak)
        except DistsimError:  # this plan does not suit the function, the batch or the schedule
            return None
