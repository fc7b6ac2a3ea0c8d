"""Weights without a flush: when a stage updates them, and which of their versions its actions read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.errors import ScheduleError
from distsim.schedule.action import SUMS_GRADIENTS, Action, Kind
from distsim.schedule.codes import code_of, kind_of, number_of
from distsim.schedule.refusals import count

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class Weights:
    """When each stage updates its weights, and which version a microbatch reads there.

    ``update_every`` so many microbatches, right after the stage's last backward of them, on its own; 0: once,
    when all has run (a flush). Forward reads the newest version that the stage has (weight stashing,
    Narayanan et al. 2019, "PipeDream", section 3.3), or ``delayed`` the one before that of its batch of
    ``update_every``, so that W(t + 1) = W(t) - lr grad(W(t - 1)) on every stage alike (Narayanan et al. 2021,
    "Memory-efficient pipeline-parallel DNN training", section 3.1). Backward reads what its forward read.

    >>> Weights(update_every=1) == Weights(), Weights() == FLUSH
    (False, True)
    """

    update_every: int = 0
    delayed: bool = False


FLUSH = Weights()
"""One update, after the last backward: all microbatches read the same weights."""


class VersionsRead(NamedTuple):
    """Of each cell: which version of the weights it reads, and whether the stage updates them after it.

    A version has the number of the last microbatch of the batch whose update made it, -1 for the weights at
    the start. ``read`` is the version that the cell reads, ``update`` the one that the update after it makes,
    -1 where there is none. ``first`` and ``last`` tell of what adds to sums (B or W) whether it is the first,
    or last, of its batch.
    """

    read: Ints
    update: Ints
    first: Bools
    last: Bools


def check_weights(name: str, weights: Weights, num_microbatches: int, copies: int, pairs: bool) -> None:
    """Verify that a schedule can update its weights so; raise :class:`ScheduleError`."""
    every = weights.update_every
    if weights == FLUSH:
        return
    if every < 1 or num_microbatches % every:
        raise ScheduleError(
            f"{name}: update_every={every} does not divide {count(num_microbatches, 'microbatch')}; what "
            "remained would never be updated: choose a divisor"
        )
    if copies > 1:
        raise ScheduleError(
            f"{name}: {copies} copies of the model add their gradients when all has run; without a flush "
            "there is one copy"
        )
    if pairs:
        raise ScheduleError(
            f"{name}: actions that overlap read one version of the weights; without a flush list them one "
            "after the other"
        )


def versions_read(name: str, weights: Weights, code: Ints, num_stages: int) -> VersionsRead:
    """Return what cells of one action each, with these codes [cells], read, in an order that agrees with
    every rank's.

    Raises :class:`ScheduleError` where a stage ends a later batch before an earlier one, and for a forward
    before the update that makes its weights.
    """
    found = VersionsRead(
        np.full(len(code), -1, np.int64),
        np.full(len(code), -1, np.int64),
        np.zeros(len(code), np.bool_),
        np.zeros(len(code), np.bool_),
    )
    stage = number_of(code) % max(num_stages, 1)
    order = np.argsort(stage, kind="stable")
    ends = np.searchsorted(stage[order], np.arange(num_stages + 1))
    for number in range(num_stages):
        cells = order[ends[number] : ends[number + 1]]
        own = _of_stage(name, weights, code[cells], number, num_stages)
        for column, part in zip(found, own, strict=True):
            column[cells] = part
    return found


def versions_held(name: str, weights: Weights, code: Ints, num_stages: int) -> int:
    """Return the most versions of its weights that a stage holds at once, of its codes [cells] in order.

    A version is there from the update that makes it until its last reader has run and the next update has
    begun: what nobody reads any longer is overwritten by that.
    """
    found = versions_read(name, weights, code, num_stages)
    place = np.arange(len(code))
    made = np.append(-1, np.flatnonzero(found.update >= 0))
    ends = np.append(made[1:], len(code) - 1)
    np.maximum.at(ends, (found.read + 1) // weights.update_every, place)
    change = np.bincount(made + 1, minlength=len(code) + 2) - np.bincount(ends + 1, minlength=len(code) + 2)
    return int(change.cumsum().max())


def _of_stage(name: str, weights: Weights, code: Ints, stage: int, num_stages: int) -> VersionsRead:
    """Return what the cells of one stage read, in its order."""
    every = weights.update_every
    kind, microbatch = kind_of(code), code // code_of(num_stages, 0)
    batch = microbatch // every
    adds = np.flatnonzero(SUMS_GRADIENTS[kind])
    step = np.diff(batch[adds])
    if (step < 0).any():
        early = adds[int(np.flatnonzero(step < 0)[0]) + 1]
        raise ScheduleError(
            f"{name}: stage {stage} runs {_text(kind, microbatch, stage, early)} after backwards of a later "
            f"batch; updated every {every} microbatches, it ends them batch by batch"
        )
    first, last = np.zeros(len(code), np.bool_), np.zeros(len(code), np.bool_)
    first[adds], last[adds] = np.append(True, step > 0), np.append(step > 0, True)
    newest = np.cumsum(last) - last  # updates before each cell
    forward = kind == Kind.FORWARD.code
    version = np.maximum(batch - 1, 0) if weights.delayed else newest
    late = np.flatnonzero(forward & (version > newest))
    if len(late):
        raise ScheduleError(
            f"{name}: {_text(kind, microbatch, stage, late[0])} reads weights that its stage makes later, "
            f"with the update of microbatch {int(version[late[0]]) * every - 1}; update after more than "
            f"{every} microbatches, or run fewer forwards ahead"
        )
    of = np.zeros(int(microbatch.max(initial=-1)) + 1, np.int64)
    of[microbatch[forward]] = version[forward]
    update = np.where(last, (batch + 1) * every - 1, -1)
    return VersionsRead(of[microbatch] * every - 1, update, first, last)


def _text(kind: Ints, microbatch: Ints, stage: int, cell: int) -> Action:
    return Action(_KINDS[int(kind[cell])], stage, int(microbatch[cell]))
