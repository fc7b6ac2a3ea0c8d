"""The pipeline schedules by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from distsim.cache import cached
from distsim.errors import ScheduleError, shortened
from distsim.schedule.greedy.controllable_memory import one_f_one_b_v, v_half, v_min
from distsim.schedule.greedy.zero_bubble import zb_auto, zb_v_greedy
from distsim.schedule.table import Schedule
from distsim.schedule.v_shaped import dualpipe, dualpipe_v, zb_v
from distsim.schedule.warm_up import (
    combined_1f1b,
    gpipe,
    interleaved,
    interleaved_torch,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    zb_h1,
    zb_h2,
)
from distsim.suggestions import choices_for

_SEARCH = ("memory_limit", "seconds", "send", "weight_share")
_UPDATES = ("update_every",)


@dataclass(frozen=True)
class Generator:
    """A schedule that is known by name.

    ``make(num_ranks, num_microbatches, chunks)`` returns it, or raises :class:`ScheduleError`, and takes by
    keyword what ``options`` names. ``chunks`` is the number of stages a rank that it takes, None: any.
    ``placement``: stage s on rank s modulo p (loop), down the ranks and up again (V), or two copies of the
    model in opposite directions.

    >>> SCHEDULES["1f1b"].chunks, SCHEDULES["1f1b"].placement
    (1, 'loop')
    """

    make: Callable[..., Schedule]
    chunks: int | None
    placement: Literal["loop", "V", "two copies"]
    description: str
    source: str
    options: tuple[str, ...] = ()

    @property
    def searched(self) -> bool:
        """Whether it is searched for, from times and a limit of memory."""
        return "memory_limit" in self.options

    @property
    def takes_updates(self) -> bool:
        """Whether it takes how many microbatches there are to an update."""
        return "update_every" in self.options

    @property
    def stages_a_rank(self) -> int | None:
        """The stages of the model that a rank holds, None: any number; two copies hold one each."""
        return 1 if self.placement == "two copies" else self.chunks


_SCHEDULES: dict[str, Generator] = {
    "1f1b": Generator(one_f_one_b, 1, "loop", "one forward, one backward", "Narayanan et al. 2021"),
    "gpipe": Generator(gpipe, 1, "loop", "all forwards, then all backwards", "Huang et al. 2019"),
    "interleaved": Generator(
        interleaved, None, "loop", "1F1B over several stages a rank, Megatron's", "Narayanan et al. 2021"
    ),
    "combined_1f1b": Generator(
        combined_1f1b,
        None,
        "loop",
        "interleaved, forward and backward overlap",
        "Megatron-LM, combined_1f1b.py",
    ),
    "interleaved_torch": Generator(
        interleaved_torch,
        None,
        "loop",
        "1F1B over several stages a rank, torch's",
        "torch, Interleaved1F1B",
    ),
    "looped_bfs": Generator(
        looped_bfs, None, "loop", "all microbatches on a stage, then on the next", "Lamy-Poirier 2022"
    ),
    "zb_h1": Generator(zb_h1, 1, "loop", "1F1B with W late, in 1F1B's memory", "Qi et al. 2023"),
    "zb_h2": Generator(zb_h2, 1, "loop", "W late, no bubble, twice 1F1B's memory", "Qi et al. 2023"),
    "zb_auto": Generator(
        zb_auto, 1, "loop", "searched for given times and memory", "Qi et al. 2023; sail-sg", _SEARCH
    ),
    "interleaved_zb": Generator(
        interleaved_zb, None, "loop", "interleaved, with W late", "torch, InterleavedZeroBubble"
    ),
    "zb_v": Generator(zb_v, 2, "V", "no bubble, 1F1B's memory, two stages a rank", "Qi et al. 2023; torch"),
    "zb_v_greedy": Generator(
        zb_v_greedy,
        2,
        "V",
        "ZB-V searched for given times and memory",
        "Qi et al. 2023; sail-sg",
        _SEARCH,
    ),
    "v_half": Generator(
        v_half, 2, "V", "half of 1F1B's memory, half of its bubble", "Qi et al. 2024; sail-sg"
    ),
    "v_min": Generator(v_min, 2, "V", "a third of 1F1B's memory", "Qi et al. 2024; sail-sg"),
    "1f1b_v": Generator(
        one_f_one_b_v, 2, "V", "two thirds of 1F1B's memory, whole backwards", "Qi et al. 2024; sail-sg"
    ),
    "dualpipe_v": Generator(
        dualpipe_v, 2, "V", "forward and backward overlap, two stages a rank", "DeepSeek-AI; torch"
    ),
    "dualpipe": Generator(
        dualpipe, 2, "two copies", "forward and backward of two copies overlap", "DeepSeek-AI 2024"
    ),
    "pipedream": Generator(
        pipedream,
        1,
        "loop",
        "1F1B without a flush, weights stashed",
        "Narayanan et al. 2019",
    ),
    "pipedream_2bw": Generator(
        pipedream_2bw,
        1,
        "loop",
        "1F1B without a flush, two versions of weights",
        "Narayanan et al. 2021",
        _UPDATES,
    ),
}

_CATALOGUE = frozenset(_SCHEDULES)

TABLE = "table"
"""What a plan calls a schedule that has no name: one that is given beside the plan."""

SCHEDULES: Mapping[str, Generator] = MappingProxyType(_SCHEDULES)
"""Schedules by the name that a plan uses; :func:`register_schedule` adds one."""


def register_schedule(name: str, generator: Generator) -> Generator:
    """Have plans, :func:`schedule` and ``distsim schedule`` know a schedule by a name.

    The generator keeps what it made, if that is to be fast (:func:`distsim.cache.cached`).

    Raises:
        ScheduleError: another schedule has the name, or ``TABLE`` is it, or it is not of lower-case letters,
            digits and ``_``, or there is nothing to call.

    >>> register_schedule("gpipe", SCHEDULES["1f1b"])
    Traceback (most recent call last):
    ...
    distsim.errors.ScheduleError: ...
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_]*", name):
        raise ScheduleError(f"schedule name {name!r}: use lower-case letters, digits and _")
    if not isinstance(generator, Generator) or not callable(generator.make):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            f"schedule {name!r}: {shortened(generator)} is no Generator of a function that makes it"
        )
    if name == TABLE or _SCHEDULES.setdefault(name, generator) is not generator:
        raise ScheduleError(f"there is a schedule {name!r} already; give it another name")
    return generator


def registered(names: Iterable[str]) -> dict[str, Generator]:
    """Return the schedules of these names that were registered in this process: another one lacks them."""
    own = _SCHEDULES.keys() - _CATALOGUE
    return {name: _SCHEDULES[name] for name in sorted(own.intersection(names))}


def check_named(name: str) -> None:
    """Raise :class:`ScheduleError` where there is no schedule of a name."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; choose one of {choices_for(name, SCHEDULES)}")


def schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None, **options: object
) -> Schedule:
    """Return the schedule called `name` (a key of `SCHEDULES`); asked for again, the same object.

    `chunks` are the stages a rank, by default what the schedule takes, or 1.

    Raises:
        ScheduleError: there is no such schedule, it has no such option, or sizes do not fit it.

    >>> schedule("1f1b", 4, 8).in_flight(0)
    4
    """
    check_named(name)
    known = SCHEDULES[name]
    foreign = [option for option in options if option not in known.options]
    if foreign:
        takes = f"choose from {', '.join(known.options)}" if known.options else "it takes none"
        raise ScheduleError(f"{name}: unknown option {foreign[0]}; {takes}")
    if chunks is None:
        chunks = known.chunks or 1
    made = known.make(num_ranks, num_microbatches, chunks, **options)
    if not isinstance(made, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            f"{name}: its generator makes {shortened(made)}, no Schedule; return Schedule(name, stages, "
            "microbatches, actions by rank)"
        )
    if made.chunks != chunks:
        raise ScheduleError(
            f"{name} has {made.chunks} stages a rank, whatever is asked for, here chunks={chunks}: let its "
            f"Generator say chunks={made.chunks}, or refuse others"
        )
    return made


@cached("examples of schedules, by name", 256)
def example(name: str) -> Schedule | None:
    """Return a small schedule of a name, which shows how all of them end and what their actions are.

    None for one that is searched for, from times, and for one that takes none of the sizes that are tried.

    >>> sorted([kind.value for kind in example("zb_h1").kinds]), example("zb_auto")
    (['F', 'I', 'W'], None)
    """
    check_named(name)
    known = SCHEDULES[name]
    for ranks in () if known.searched else (2, 4, 8, 16):
        with suppress(ScheduleError):
            return schedule(name, ranks, 2 * ranks, known.chunks or 2)
    return None


def longer(order: Schedule, num_microbatches: int) -> Schedule:
    """Return the schedule that runs on over so many microbatches as one of the catalogue does over its own.

    Raises:
        ScheduleError: it is no schedule of one copy of the model that the catalogue makes from sizes alone,
            such as a table of one's own, or the sizes do not fit it.

    >>> longer(schedule("pipedream", 4, 8), 1000)
    Schedule(pipedream: 4 stages, 1000 microbatches)
    """
    known = _SCHEDULES.get(order.name)
    if known is not None and not known.searched and order.copies == 1:
        options = {"update_every": order.weights.update_every} if known.takes_updates else {}
        sizes = order.num_ranks, order.num_microbatches, order.num_stages // order.num_ranks
        if schedule(order.name, *sizes, **options) == order:
            return schedule(order.name, sizes[0], num_microbatches, sizes[2], **options)
    raise ScheduleError(
        f"{order.name}: how it runs on over {num_microbatches} microbatches is not known of a table; use a "
        "schedule by its name"
    )
