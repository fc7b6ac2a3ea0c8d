"""Schedules as torch's pipelining writes and reads them: a line per rank, a cell per action.

A cell is `<stage><F|B|I|W><microbatch>`, or, for a forward and a backward that overlap,
`(<action>;<action>)OVERLAP_F_B`. An empty cell is a gap in torch's drawing and means nothing.
This is the format "compute_only" of torch.distributed.pipelining.schedules (2.14). What "compute_comms" adds,
sends, gathers and reductions, follows from the order and the placement, and is refused.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

from distsim.errors import ScheduleError
from distsim.schedule.action import Action, Cell, Kind, cell_text
from distsim.schedule.table import Schedule
from distsim.schedule.weights import FLUSH, Weights

MAX_BYTES = 2**24
"""The largest table that is read."""

MAX_WORK = 2**28
"""The most cells times ranks: in each step every rank is looked at, which takes a second for so many."""
MAX_CELLS = 2**20
"""The most cells that a table may have, empty ones among them."""

_LETTERS = "FIBW"
"""The kinds that torch's ``_Action.from_str`` reads as computation (``_action_regex`` of its file, commit
00722e648b); :class:`Kind` has torch's letters."""

_ACTION = re.compile(rf"([0-9]{{1,7}})([{_LETTERS}])([0-9]{{1,7}})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"[0-9]+(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_KINDS = {kind.value: kind for kind in Kind}
_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a cell stands in the table called ``name``: line and column, from 1."""

    name: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"

    def error(self, text: str) -> ScheduleError:
        """Return the error of what is wrong with the cell."""
        return ScheduleError(f"{self.name}: {self}: {text}")


def read_csv(
    source: str | Path, name: str | None = None, copies: int = 1, weights: Weights = FLUSH
) -> Schedule:
    """Read a table, of the file if ``source`` is a Path, and verify it.

    A line is a rank, and a stage is on the rank that lists it. ``name`` is what the schedule is called, by
    default as the file is; ``copies`` and ``weights`` are those of :class:`Schedule`: no table says them.

    Raises:
        ScheduleError: the file cannot be read or is too large, a cell is no action, a stage is on two ranks,
            an action is listed twice or missing, or ranks wait for each other.

    >>> print(read_csv("0F0,0F1,,0B0,0B1\\n1F0,1B0,1F1,1B1", "mine"))
    mine: 2 stages, 2 microbatches
    rank 0: F0 F1 B0 B1
    rank 1: F0 B0 F1 B1
    """
    if name is None:
        name = source.stem if isinstance(source, Path) else "table"
    shown = source.name if isinstance(source, Path) else name
    ranks = _ranks(_text(source, shown), shown)
    listed = [action for cells in ranks for cell in cells for action in cell]
    if not listed:
        raise ScheduleError(f"{name}: no actions; write a line per rank, with cells as 0F0 for stage 0, F, 0")
    rank_of = {action.stage: rank for rank, cells in enumerate(ranks) for cell in cells for action in cell}
    stages = max(rank_of) + 1
    if len(rank_of) < stages:
        absent = next(stage for stage in range(stages) if stage not in rank_of)
        raise ScheduleError(
            f"{name}: stage {absent} is on no rank, but stage {stages - 1} is; number stages without a gap"
        )
    microbatches = max(action.microbatch for action in listed) + 1
    places = [rank_of[stage] for stage in range(stages)]
    made = Schedule(name, stages, microbatches, ranks, places, copies, weights)
    try:
        made.check()
    except ScheduleError as error:
        if copies == 1 and _runs_as_copies(made):
            raise ScheduleError(
                f"{error}; as two copies of the model it runs, which no table says: say copies=2 (--copies 2)"
            ) from None
        raise
    return made


def _runs_as_copies(order: Schedule) -> bool:
    """Whether a table that is wrong for one copy of the model is right for two."""
    sizes = order.name, order.num_stages, order.num_microbatches
    try:
        Schedule(*sizes, order.ranks, order.rank_of, 2, order.weights).check()
    except ScheduleError:
        return False
    return True


def write_csv(schedule: Schedule) -> str:
    """Return a schedule as a table: see :func:`read_csv`, which reads it back.

    Raises:
        ScheduleError: two actions overlap that are not a forward and a B or I, or one is of a kind that torch
            does not have.

    >>> from distsim.schedule import one_f_one_b
    >>> print(write_csv(one_f_one_b(2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    return "".join(",".join([_written(schedule, cell) for cell in cells]) + "\n" for cells in schedule.ranks)


def _written(schedule: Schedule, cell: Cell) -> str:
    for action in cell:
        if action.kind.value not in _LETTERS:
            raise ScheduleError(
                f"{schedule.name}: torch's tables have no {action.kind.value} ({action.kind.phase}), as of "
                f"{action}; leave it out, or keep the schedule as Python that makes it"
            )
    texts = [f"{action.stage}{action.kind.value}{action.microbatch}" for action in cell]
    if len(cell) == 1:
        return texts[0]
    if not _overlap(cell):
        raise ScheduleError(
            f"{schedule.name}: torch's tables have no {cell_text(cell)}; overlap one F with one B or I"
        )
    return f"({';'.join(texts)})OVERLAP_F_B"


def _overlap(cell: Cell) -> bool:
    """Whether these are what torch calls OVERLAP_F_B."""
    kinds = {action.kind for action in cell}
    return len(cell) == len(kinds) == 2 and Kind.FORWARD in kinds and not kinds.isdisjoint(_BACKWARD)


def _text(source: str | Path, name: str) -> str:
    """Return the table, of which nothing is known but that it is ASCII and not too large."""
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ScheduleError(f"{name}: cannot read {source}: {error.strerror or error}") from None
    else:
        raw = source[: MAX_BYTES + 1].encode("utf-8", "replace")
    if len(raw) > MAX_BYTES:
        raise ScheduleError(f"{name}: over {MAX_BYTES} bytes; give a table of fewer microbatches")
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode("ascii")  # spreadsheets write that mark
    except UnicodeDecodeError as error:
        before = raw[: error.start].rsplit(b"\n", 1)
        place = _Place(name, raw.count(b"\n", 0, error.start) + 1, before[-1].count(b",") + 1)
        raise place.error(
            f"byte {raw[error.start]:#04x} is no text; give a table of actions as 0F0"
        ) from None


def _ranks(text: str, name: str) -> list[list[Cell]]:
    """Return the cells of each line that are not empty, each action once and each stage on one line."""
    lines = text.rstrip("\r\n").split("\n")
    cells = sum(line.count(",") + 1 for line in lines)
    if cells * len(lines) > MAX_WORK:
        raise ScheduleError(
            f"{name}: {cells} cells of {len(lines)} ranks take too long to order; give a table of fewer"
        )
    if cells > MAX_CELLS:
        raise ScheduleError(f"{name}: {cells} cells, over {MAX_CELLS}; give a table of fewer microbatches")
    ranks: list[list[Cell]] = []
    seen: dict[Action, _Place] = {}
    home: dict[int, _Place] = {}
    for line, row in enumerate(lines, 1):
        ranks.append([])
        for column, written in enumerate(row.removesuffix("\r").split(","), 1):
            place = _Place(name, line, column)
            cell = _cell(written.strip(" "), place)
            for action in cell:
                first = seen.setdefault(action, place)
                if first is not place or cell.count(action) > 1:
                    raise place.error(f"{action} stands in {first} already; run each action once")
                first = home.setdefault(action.stage, place)
                if first.line != line:
                    raise place.error(
                        f"{action} is of stage {action.stage}, which {first} has; a stage is on one rank"
                    )
            if cell:
                ranks[-1].append(cell)
    return ranks


def _cell(text: str, place: _Place) -> Cell:
    """Return the actions of a cell, none of an empty one."""
    if not text:
        return ()
    pair = _PAIR.fullmatch(text)
    cell = tuple([_action(each, place) for each in (pair.groups() if pair else (text,))])
    if pair and not _overlap(cell):
        raise place.error(f"{cell_text(cell)} do not overlap in torch's tables; one F and one B or I do")
    return cell


def _action(text: str, place: _Place) -> Action:
    found = _ACTION.fullmatch(text)
    if found:
        stage, kind, microbatch = found.groups()
        return Action(_KINDS[kind], int(stage), int(microbatch))
    shown = repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
    if _COMMUNICATION.fullmatch(text[:80]):
        raise place.error(
            f"{shown} is communication, which follows from the actions; leave it out, or write with "
            'torch\'s _dump_csv(file, format="compute_only")'
        )
    raise place.error(
        f"{shown} is no action; write stage, F, B, I or W, and microbatch, as in 0F0, with up to 7 digits"
    )
