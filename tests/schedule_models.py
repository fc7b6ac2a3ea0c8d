"""Random schedules for the tests of the engines: any order that does not deadlock, and regular ones."""

from __future__ import annotations

from random import Random

from distsim.schedule import Action, Kind, Schedule, example, gpipe, one_f_one_b

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD


def any_order(rng: Random, stages: int, microbatches: int) -> Schedule:
    """Return a random order that does not deadlock, microbatches in any order."""
    ranks: list[list[Action]] = [[] for _ in range(stages)]
    done: set[Action] = set()
    left = [
        Action(phase, s, m)
        for phase in (FORWARD, BACKWARD)
        for s in range(stages)
        for m in range(microbatches)
    ]
    rules = Schedule("any", stages, microbatches, ())
    while left:
        ready = [task for task in left if all(needed in done for needed in rules.inputs(task))]
        task = rng.choice(ready)
        left.remove(task)
        done.add(task)
        ranks[task.stage].append(task)
    return Schedule("any", stages, microbatches, tuple(map(tuple, ranks)))


def in_groups(rng: Random, stages: int, microbatches: int) -> Schedule:
    """Return the order in which every rank runs a few forwards, then their backwards, and so on."""
    size = rng.randint(1, 3)
    tasks: list[tuple[Kind, int]] = []
    for first in range(0, microbatches, size):
        group = range(first, min(first + size, microbatches))
        tasks += [*((FORWARD, m) for m in group), *((BACKWARD, m) for m in group)]
    ranks = [tuple(Action(phase, s, m) for phase, m in tasks) for s in range(stages)]
    return Schedule(f"groups of {size}", stages, microbatches, tuple(ranks))


def backwards_reversed(rng: Random, stages: int, microbatches: int) -> Schedule:
    """Return all forwards, then all backwards from the last microbatch to the first."""
    forward, back = range(microbatches), range(microbatches - 1, -1, -1)
    ranks = [
        (*(Action(FORWARD, s, m) for m in forward), *(Action(BACKWARD, s, m) for m in back))
        for s in range(stages)
    ]
    return Schedule("reversed", stages, microbatches, tuple(ranks))


def warmed_up(rng: Random, stages: int, microbatches: int) -> Schedule:
    """Return 1F1B with some more forwards ahead on each rank than it needs."""
    ranks, ahead = [], 0
    for stage in reversed(range(stages)):
        ahead = min(microbatches, ahead + (stage < stages - 1) + rng.choice([0, 0, 1, 2]))
        tasks = [Action(FORWARD, stage, m) for m in range(ahead)]
        for m in range(microbatches):
            tasks += [Action(FORWARD, stage, m + ahead)] if m + ahead < microbatches else []
            tasks.append(Action(BACKWARD, stage, m))
        ranks.append(tuple(tasks))
    return Schedule("warmed up", stages, microbatches, tuple(reversed(ranks)))


def copies_to_host(name: str) -> bool:
    """Whether a schedule of the catalogue takes devices that have a link to their host."""
    made = example(name)
    return made is not None and any(kind.runs.stream for kind in made.kinds)


SCHEDULES = {
    "1f1b": lambda rng, stages, count: one_f_one_b(stages, count),
    "gpipe": lambda rng, stages, count: gpipe(stages, count),
    "any": any_order,
    "groups": in_groups,
    "reversed": backwards_reversed,
    "warmed up": warmed_up,
}
