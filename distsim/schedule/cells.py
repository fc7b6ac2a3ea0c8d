"""The cells of a rank as integers, [cells, 2]: the codes of its first action and of its second, or -1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.errors import ScheduleError
from distsim.schedule.action import Action, Cell, Kind
from distsim.schedule.codes import CODES, code_of, kind_of, number_of
from distsim.schedule.refusals import check_cell

Ints = npt.NDArray[np.int64]

_KINDS = tuple(Kind)


def codes_of(name: str, rank: int, cells: Sequence[Cell], num_stages: int, num_microbatches: int) -> Ints:
    """Return the codes, read only; raises :class:`ScheduleError` for a cell that cannot run."""
    row = np.full((len(cells), 2), -1, np.int64)
    for cell, codes in zip(cells, row, strict=True):
        check_cell(name, rank, cell, num_stages, num_microbatches)
        for place, action in enumerate(cell):
            codes[place] = code_of(action.microbatch * num_stages + action.stage, action.kind.code)
    row.setflags(write=False)
    return row


def frozen_codes(name: str, rank: int, row: npt.NDArray[Any]) -> Ints:
    """Return the codes given for a rank, [cells, 2], to which nobody writes: a copy if somebody could.

    Raises :class:`ScheduleError` for what is not integers; ``np.array([])``, of floats by default, has none.
    """
    if row.dtype == np.int64 and row.ndim == 2 and row.shape[1] == 2 and not row.flags.writeable:
        return row
    if row.size and (row.dtype.kind not in "iu" or not np.can_cast(row.dtype, np.int64)):
        raise ScheduleError(
            f"{name}: the codes of rank {rank} are {row.dtype}, not integers that int64 holds; "
            f"give (microbatch * num_stages + stage) * {CODES} + kind, or -1 for no second action"
        )
    made = np.array(row, np.int64).reshape(-1, 2)
    made.setflags(write=False)
    return made


def _check_codes(name: str, rank: int, row: Ints) -> None:
    unknown = kind_of(row) >= len(_KINDS)
    unknown[:, 1] &= row[:, 1] != -1
    if not unknown.any():
        return
    code = int(row[unknown][0])
    kinds = ", ".join([f"{kind.value} {kind.code}" for kind in _KINDS])
    raise ScheduleError(
        f"{name}: rank {rank} lists the code {code}, of kind {kind_of(code)}; kinds are {kinds}, and -1 "
        "stands beside an action that is alone"
    )


def cells_of(name: str, rank: int, row: Ints, num_stages: int) -> tuple[Cell, ...]:
    """Return the cells of codes; raises :class:`ScheduleError` for one of no kind."""
    _check_codes(name, rank, row)
    stages = max(num_stages, 1)
    there = row.ravel() != -1
    kinds: list[int] = kind_of(row.ravel()[there]).tolist()
    numbers: list[int] = number_of(row.ravel()[there]).tolist()
    pairs = zip(kinds, numbers, strict=True)
    actions = iter([Action(_KINDS[kind], number % stages, number // stages) for kind, number in pairs])
    alone: list[bool] = (row[:, 1] == -1).tolist()
    return tuple([(next(actions),) if single else (next(actions), next(actions)) for single in alone])
