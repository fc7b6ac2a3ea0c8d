"""A schedule as text: a row for each rank, time to the right, as the papers' figures draw it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distsim.report.schedule_picture import chunk_of
from distsim.schedule import FLUSH, Cell, Kind, Schedule
from distsim.schedule.action import HALVES
from distsim.schedule.refusals import count
from distsim.simulation.explain.text import table
from distsim.simulation.schedule_times import CellTime, ScheduleTimes
from distsim.simulation.steady_state import short_step_note

_MOST_COLUMNS = 4000
"""Columns of time that are drawn where no terminal says how many fit."""

_FINER = 4
"""The unit of time is the shortest action, or up to this part of it if all times are multiples of that."""


def describe_schedule(found: ScheduleTimes, width: int | None = None) -> str:
    """Return a text: the schedule over time, makespan and bubble, and what each rank holds and waits for.

    Of a schedule without a flush the rate of the steady state comes first, as its steps follow at once.

    ``width``: characters of a line; of the schedule what is beyond is cut, and a note says from when.
    """
    schedule, times = found.schedule, found.times
    plural = "es" if schedule.num_microbatches > 1 else ""
    sizes = [count(schedule.num_ranks, "rank"), f"{schedule.num_microbatches} microbatch{plural}"]
    if schedule.chunks > 1:
        sizes.insert(1, f"{schedule.chunks} stages a rank")
    if schedule.copies > 1:
        sizes[-1] += f" for each of {schedule.copies} copies of the model"
    forward, first, rest = map(times.of_kind, (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
    taken = [f"forward {forward:g}, backward {first:g} + {rest:g}"]
    others = sorted(kind for kind in schedule.kinds if not _is_pass(kind))
    taken += [f"{kind.phase} {times.of_kind(kind):g}" for kind in others]
    lines = [f"{schedule.name}: {', '.join(sizes)}; {', '.join(taken)}, send {times.send:g}", ""]
    lines += [*_drawing(found, width), "", *_figures(found), "", *_rank_table(found)]
    return "\n".join(lines)


def _figures(found: ScheduleTimes) -> list[str]:
    lines = [
        f"makespan   {found.makespan:.6g}",
        f"rank span  {found.rank_span:.6g}, the longest from a rank's first start to its last end",
        f"bubble     {found.bubble:.2%}, the share of it in which ranks do nothing",
    ]
    each = found.microbatch_time
    if each is None:
        return lines
    schedule = found.schedule
    work = sum(found.busy) / schedule.num_microbatches / schedule.num_ranks
    steady = f"steady     {each:.6g} a microbatch once it runs on without a flush, of which ranks do nothing "
    lines = [
        f"{steady}{max(1 - work / each, 0.0):.2%}",
        f"{lines[0]}, from an empty pipeline to an empty one",
        *lines[1:],
    ]
    short = short_step_note(schedule)
    return [*lines, f"note: {short}"] if short else lines


def _rank_table(found: ScheduleTimes) -> list[str]:
    schedule = found.schedule
    halved = any(schedule.pending_w(rank) for rank in range(schedule.num_ranks))
    header = ["rank", "stages", "busy", "in flight"]
    header += ["until I", "pending W"] if halved else []
    versions = schedule.weights != FLUSH
    header += ["versions"] if versions else []
    header += ["in memory"] if found.held else []
    rows: list[list[str]] = []
    for rank, busy in enumerate(found.busy):
        stages = [str(stage) for stage, own in enumerate(schedule.rank_of) if own == rank]
        row = [str(rank), " ".join(stages), f"{busy / found.makespan:.1%}", str(schedule.in_flight(rank))]
        if halved:
            row += [str(schedule.until_i(rank)), str(schedule.pending_w(rank))]
        if versions:
            row.append(str(max(schedule.versions_of(int(stage)) for stage in stages)))
        row += [str(number) for number in found.held[rank : rank + 1]]
        rows.append(row)
    names = [f"{kind.value} ({kind.phase})" for kind in sorted(schedule.kinds) if _frees(kind)]
    notes = [
        "busy: of the makespan, while the bubble is of the rank span",
        "in flight: the most pairs of a stage and a microbatch past F and not past B or W"
        + (f", but where {', '.join(names)} freed it" if names else ""),
    ]
    notes += ["until I: past F and not past B or I; pending W: past I and not past W"] if halved else []
    if versions:
        every = schedule.weights.update_every
        notes.append(f"versions: of the weights, the most; microbatches an update: {every}, in no time here")
    notes += ["in memory: the most at a time, with those that are being copied"] if found.held else []
    return [*table(header, rows), *notes]


def _frees(kind: Kind) -> bool:
    """Whether of what is held something is free before its backward pass where this kind runs."""
    held = kind.in_flight
    return bool(held.frees) or (not _is_pass(kind) and min(held.until_i, held.pending_w) < 0)


def _is_pass(kind: Kind) -> bool:
    return kind.runs in (HALVES, Kind.FORWARD.runs)


# --- drawing ----------------------------------------------------------------------------------------


def _drawing(found: ScheduleTimes, width: int | None) -> list[str]:
    """Return a line of times and a line per rank; an action begins where its name does."""
    unit, exact = _unit(found)
    lanes = list(_lanes(found))
    boxes = [[(_column(b.start, unit), _column(b.end, unit), b.cell) for b in cells] for _, cells in lanes]
    names = _CellNames(found.schedule)
    last = _column(found.makespan, unit)
    longest = [
        (len(names.text(cell)) + 1) / (end - start)
        for row in boxes
        for start, end, cell in row
        if end > start
    ]
    cell_width = max(1, math.ceil(max(longest)))
    margin = max(len(label) for label, _ in lanes) + 2
    room = _MOST_COLUMNS if width is None else max((width - margin) // cell_width, 1)
    shown = min(last, room)
    lines = [" " * margin + _ruler(shown, cell_width, unit)]
    for (label, _), row in zip(lanes, boxes, strict=True):
        line = ""
        for start, end, cell in row:
            if end <= shown:
                size = (end - start) * cell_width - 1
                line = line.ljust(start * cell_width) + names.text(cell).ljust(size, "-") + " "
        lines.append(label.ljust(margin) + line.rstrip())
    notes = [names.note] if names.note else []
    if not exact:
        notes.append(f"times are rounded to columns of {unit:g}")
    if shown < last:
        notes.append(f"cut at {shown * unit:g} of {found.makespan:g}: --plot draws all of it")
    return [*lines, *notes]


def _lanes(found: ScheduleTimes) -> Iterator[tuple[str, Sequence[CellTime]]]:
    """Yield the label and the cells of each line: a rank, and what it does on other streams meanwhile."""
    for rank, (cells, beside) in enumerate(zip(found.ranks, found.beside, strict=True)):
        yield f"rank {rank}", cells
        yield from ((f"  {stream}", own) for stream, own in beside.items())


def _unit(found: ScheduleTimes) -> tuple[float, bool]:
    """Return the time of a column, and whether every action begins and ends with one."""
    boxes = [box for _, cells in _lanes(found) for box in cells]
    shortest = min(box.end - box.start for box in boxes)
    moments = {moment for box in boxes for moment in (box.start, box.end)}
    for part in range(1, _FINER + 1):
        unit = shortest / part
        if all(math.isclose(moment, unit * round(moment / unit), abs_tol=1e-6 * unit) for moment in moments):
            return unit, True
    return shortest, False


def _column(moment: float, unit: float) -> int:
    """Return the column in which a moment is; of actions in turn, each at least a unit, none share one."""
    return math.floor(moment / unit + 0.5 + 1e-6)


def _ruler(columns: int, cell_width: int, unit: float) -> str:
    """Return the times of some columns, each above where it begins."""
    times = [f"{column * unit:g}" for column in range(columns + 1)]
    step = next(n for n in _STEPS if n * cell_width > max(map(len, times[::n])))
    line = ""
    for column in range(0, columns + 1, step):
        line = line.ljust(column * cell_width) + times[column]
    return line


_STEPS: Sequence[int] = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]


class _CellNames:
    """How cells are called in a row of their rank: ``F3``, or ``F3b`` on the second of its stages."""

    def __init__(self, schedule: Schedule) -> None:
        self._chunks = chunk_of(schedule)
        self.note = ""
        if schedule.chunks > 1:
            letters = ", ".join(map(_letter, range(schedule.chunks)))
            self.note = f"{letters}: a rank's stages in order"

    def text(self, cell: Cell) -> str:
        """Return the name of a cell, of a pair with a plus."""
        return "+".join([f"{a.kind.value}{a.microbatch}{self._chunk(a.stage)}" for a in cell])

    def _chunk(self, stage: int) -> str:
        return _letter(self._chunks[stage]) if self.note else ""


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"
