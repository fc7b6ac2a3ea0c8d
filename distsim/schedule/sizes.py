"""Sizes of a schedule that do not fit, refused with those that do."""

from __future__ import annotations

from collections.abc import Callable

from distsim.errors import ScheduleError
from distsim.schedule.refusals import count


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
