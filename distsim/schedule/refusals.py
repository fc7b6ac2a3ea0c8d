"""Why a schedule cannot run: sizes that do not fit, what is missing or foreign, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice

from distsim.errors import ScheduleError
from distsim.schedule.action import WAYS, Action, Cell, Kind, cell_text, way_of

Ranks = tuple[tuple[Cell, ...], ...]


def check_placement(name: str, num_stages: int, num_ranks: int, rank_of: Sequence[int], copies: int) -> None:
    """Verify that every stage is on a rank and every rank holds one; raise :class:`ScheduleError`."""
    if len(rank_of) != num_stages:
        stages = count(num_stages, "stage")
        raise ScheduleError(f"{name}: {stages} but a rank for {len(rank_of)}; give each stage a rank")
    for stage, rank in enumerate(rank_of):
        if not 0 <= rank < num_ranks:
            raise ScheduleError(
                f"{name}: stage {stage} is on rank {rank}, but ranks are 0..{num_ranks - 1}; "
                "give one order per rank"
            )
    empty = set(range(num_ranks)) - set(rank_of)
    if empty:
        raise ScheduleError(f"{name}: rank {min(empty)} holds no stage; leave it out")
    if copies < 1 or num_stages % copies:
        raise ScheduleError(
            f"{name}: copies={copies} does not divide {count(num_stages, 'stage')}; copies are equally long"
        )


def check_complete(
    name: str, num_stages: int, num_microbatches: int, rank_of: Sequence[int], ranks: Ranks
) -> None:
    """Verify that every action is there once, on the rank of its stage; raise :class:`ScheduleError`.

    A stage runs of each microbatch all of one of :data:`WAYS`, and nothing else.
    """
    seen: set[Action] = set()
    listed: dict[tuple[int, int], int] = {}  # kinds by stage and microbatch
    for rank, cells in enumerate(ranks):
        for cell in cells:
            check_cell(name, rank, cell, num_stages, num_microbatches)
            for action in cell:
                if rank_of[action.stage] != rank:
                    raise ScheduleError(
                        f"{name}: rank {rank} lists {action}, but stage {action.stage} is on rank "
                        f"{rank_of[action.stage]}; a stage is on one rank"
                    )
                if action in seen:
                    raise ScheduleError(f"{name}: {action} is listed twice; run each action once")
                seen.add(action)
                place = action.stage, action.microbatch
                listed[place] = listed.get(place, 0) | action.kind.bit
    for place, kinds in sorted(listed.items()):
        if not way_of(kinds):
            clash = " and ".join([str(Action(kind, *place)) for kind in _clash(kinds)])
            raise ScheduleError(f"{name}: lists both {clash}; {_ways()}")
    missing = len(way_of(0)) * (num_stages * num_microbatches - len(listed))
    missing += sum(len(way_of(kinds)) for kinds in listed.values()) - len(seen)
    if missing:
        names = ", ".join(map(str, islice(_missing(num_stages, num_microbatches, listed), 5)))
        more = f" and {missing - 5} more" if missing > 5 else ""
        raise ScheduleError(f"{name}: missing {names}{more}; {_ways()}")


def _ways() -> str:
    ways = [f"{', '.join(letters[:-1])} and {letters[-1]}" for letters in sorted(WAYS, key=len)]
    return f"a stage runs {', or '.join(ways)}, of every microbatch"


def _clash(kinds: int) -> tuple[Kind, ...]:
    """Return the fewest kinds, of some that no way has, that no way has."""
    of = [kind for kind in Kind if kind.bit & kinds]
    several = chain.from_iterable(combinations(of, count) for count in range(2, len(of) + 1))
    return next(some for some in several if not way_of(sum([kind.bit for kind in some])))


def check_cell(name: str, rank: int, cell: Cell, num_stages: int, num_microbatches: int) -> None:
    """Raise :class:`ScheduleError` for a cell that cannot run, whatever else is listed."""
    for action in cell:
        if not (0 <= action.stage < num_stages and 0 <= action.microbatch < num_microbatches):
            raise ScheduleError(
                f"{name}: rank {rank} lists {action}, but stages are 0..{num_stages - 1} "
                f"and microbatches 0..{num_microbatches - 1}"
            )
    if len(cell) != len({action.kind for action in cell}) or not 1 <= len(cell) <= 2:
        raise ScheduleError(
            f"{name}: rank {rank} lists {cell_text(cell)} as one; one action runs at a time, or two of "
            "different kinds"
        )


def _missing(
    num_stages: int, num_microbatches: int, listed: Mapping[tuple[int, int], int]
) -> Iterator[Action]:
    """Yield what the ways need besides the kinds that are listed, by stage and microbatch."""
    for kind in Kind:
        for stage in range(num_stages):
            for microbatch in range(num_microbatches):
                kinds = listed.get((stage, microbatch), 0)
                if kind in way_of(kinds) and not kind.bit & kinds:
                    yield Action(kind, stage, microbatch)


def deadlock(
    name: str,
    ranks: Ranks,
    rank_of: Sequence[int],
    position: Sequence[int],
    inputs: Callable[[Action], tuple[Action, ...]],
) -> ScheduleError:
    """Return the error that names the circle of waits when rank ``r`` is stuck after ``position[r]`` cells.

    It is read from the first stuck rank: each head cell waits for another one.
    """
    finished = {action for cells, at in zip(ranks, position, strict=True) for c in cells[:at] for action in c}
    rank = next(r for r, at in enumerate(position) if at < len(ranks[r]))
    path: list[Cell] = []
    waits: list[str] = []
    head = ranks[rank][position[rank]]
    while head not in path:
        path.append(head)
        wanted = next(need for action in head for need in inputs(action) if need not in finished)
        owner = rank_of[wanted.stage]
        blocker = ranks[owner][position[owner]]
        behind = f", which rank {owner} runs after {cell_text(blocker)}"
        if wanted in blocker:
            behind = ", which runs beside it" if blocker == head else ""
        waits.append(f"{cell_text(head)} waits for {wanted}{behind}")
        head = blocker
    circle = "; ".join(waits[path.index(head) :])
    return ScheduleError(
        f"{name} deadlocks after {count(len(finished), 'action')}: {circle}; reorder one of these ranks"
    )


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def check_sizes(
    name: str, num_ranks: object, num_microbatches: object, chunks: object, only: int | None = None
) -> None:
    """Verify that sizes are integers of at least 1, and chunks ``only`` so many if that is given.

    Raises:
        ScheduleError: one of them is not.
    """
    sizes = (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("chunks", chunks))
    for noun, number in sizes:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"{name}: {noun}={number!r} must be an integer of at least 1")
    if only is not None and chunks != only:
        raise ScheduleError(
            f"{name}: chunks={chunks}, but a rank holds {count(only, 'stage')}; say chunks={only}"
        )


def check_microbatches(
    name: str, num_ranks: int, num_microbatches: int, rule: str, fits: Callable[[int], bool]
) -> None:
    """Verify that ``fits(num_microbatches)``, which ``rule`` says in words.

    Raises:
        ScheduleError: it does not; the message names the nearest numbers of microbatches that do.
    """
    if fits(num_microbatches):
        return
    less = next((m for m in range(num_microbatches - 1, 0, -1) if fits(m)), None)
    more = num_microbatches + 1
    while not fits(more):
        more += 1
    nearest = more if less is None else f"{less} or {more}"
    raise ScheduleError(
        f"{name}: {count(num_microbatches, 'microbatch')} on {count(num_ranks, 'rank')} do not fit: {rule}; "
        f"choose {nearest}"
    )
