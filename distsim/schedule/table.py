"""Schedule: the order in which each rank runs its actions, as integers; no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from distsim.errors import ScheduleError
from distsim.schedule.action import HELD, Action, Cell, Kind, cell_text, freed_at_once, way_of
from distsim.schedule.cells import cells_of, codes_of, frozen_codes
from distsim.schedule.codes import code_of, kind_of, number_of
from distsim.schedule.refusals import Ranks, check_complete, check_placement, count, deadlock
from distsim.schedule.steps import RULES, SUM_OF_KINDS, Listing, run_steps
from distsim.schedule.weights import FLUSH, Weights, check_weights, versions_held

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# What each kind adds to the number of pairs of a stage and a microbatch that are held.
_UNTIL_I, _PENDING_W = HELD
_IN_FLIGHT = _UNTIL_I + _PENDING_W
_NO_CELLS = np.zeros((0, 2), np.int64)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Schedule:
    """The order in which each pipeline rank runs its actions: per rank a list of cells.

    ``rank_of[s]`` is the rank of stage ``s``, by default ``s`` modulo the number of ranks. ``copies`` are
    how many copies of the model the stages are (DualPipe: 2): each is a chain of ``num_stages // copies``
    stages that runs ``num_microbatches`` microbatches of its own, and its first stage waits for nobody.
    ``weights`` say when they are updated, and which of their versions a microbatch reads.

    A cell is an action, or a pair of two that overlap: they start when both can and end together. Where
    ranks are given, a cell of one action may be given as the action. Making a Schedule verifies nothing,
    so that a hand-made one can be looked at; :meth:`check` and :meth:`order` verify it.
    Schedules are compared by value. One made :meth:`from_codes` is kept as integers and has its
    :class:`Action` objects made when they are read.

    >>> F, B = Kind.FORWARD, Kind.BACKWARD
    >>> print(Schedule("one", 1, 2, [[Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]]))
    one: 1 stage, 2 microbatches
    rank 0: F0 B0 F1 B1
    """

    name: str
    num_stages: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    copies: int
    weights: Weights
    num_ranks: int
    _codes: tuple[Ints, ...] | None = field(repr=False)

    def __init__(
        self,
        name: str,
        num_stages: int,
        num_microbatches: int,
        ranks: Sequence[Sequence[Action | Cell]],
        rank_of: Sequence[int] | None = None,
        copies: int = 1,
        weights: Weights = FLUSH,
    ) -> None:
        cells = tuple(tuple([(c,) if isinstance(c, Action) else tuple(c) for c in row]) for row in ranks)
        self._set(name, num_stages, num_microbatches, len(cells), rank_of, copies, weights)
        object.__setattr__(self, "_codes", None)
        object.__setattr__(self, "ranks", cells)

    @classmethod
    def from_codes(
        cls,
        name: str,
        num_stages: int,
        num_microbatches: int,
        codes: Sequence[Ints],
        rank_of: Sequence[int] | None = None,
        copies: int = 1,
        weights: Weights = FLUSH,
    ) -> Schedule:
        """Make a schedule of integers, [cells, 2] per rank: a cell's first action and its second, or -1.

        The code of an action is ``code_of(microbatch * num_stages + stage, kind.code)``, with
        :func:`distsim.schedule.codes.code_of`. One of no kind is refused once the schedule is looked at.

        Raises:
            ScheduleError: what is given for a rank is not integers that 64 bits hold.

        >>> print(Schedule.from_codes("one", 1, 1, [np.array([[0, -1], [2, -1], [3, -1]])]))
               one: 1 stage, 1 microbatch
               rank 0: F0 I0 W0
        """
        rows = [frozen_codes(name, rank, row) for rank, row in enumerate(codes)]
        made = cls.__new__(cls)
        made._set(name, num_stages, num_microbatches, len(rows), rank_of, copies, weights)
        object.__setattr__(made, "_codes", tuple(rows))
        return made

    def _set(
        self,
        name: str,
        num_stages: int,
        num_microbatches: int,
        num_ranks: int,
        rank_of: Sequence[int] | None,
        copies: int,
        weights: Weights,
    ) -> None:
        if rank_of is None:
            rank_of = [stage % num_ranks for stage in range(num_stages)] if num_ranks else []
        values = (name, num_stages, num_microbatches, tuple(rank_of), copies, weights, num_ranks)
        names = ("name", "num_stages", "num_microbatches", "rank_of", "copies", "weights", "num_ranks")
        for key, value in zip(names, values, strict=True):
            object.__setattr__(self, key, value)

    @cached_property
    def ranks(self) -> Ranks:
        """The cells of each rank, in its order; raises :class:`ScheduleError` for a code of no kind."""
        return tuple(
            cells_of(self.name, rank, row, self.num_stages) for rank, row in enumerate(self._codes or ())
        )

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, in its order, those of a pair one after the other."""
        return tuple(tuple(action for cell in cells for action in cell) for cells in self.ranks)

    @cached_property
    def codes(self) -> tuple[Ints, ...]:
        """The cells of each rank as integers: see :meth:`from_codes`.

        Raises:
            ScheduleError: an action is of no stage or microbatch, or a cell cannot run.
        """
        if self._codes is not None:
            return self._codes
        sizes = self.num_stages, self.num_microbatches
        return tuple(codes_of(self.name, rank, cells, *sizes) for rank, cells in enumerate(self.ranks))

    def with_weights(self, weights: Weights) -> Schedule:
        """Return the same order with weights that are updated so."""
        if weights == self.weights:
            return self
        sizes = self.name, self.num_stages, self.num_microbatches
        return Schedule.from_codes(*sizes, self.codes, self.rank_of, self.copies, weights)

    @property
    def chunks(self) -> int:
        """The most stages that a rank holds."""
        return int(np.bincount(self.rank_of, minlength=1).max())

    @property
    def stages_a_rank(self) -> int:
        """The most stages of one copy of the model that a rank holds."""
        return int(np.bincount(self.rank_of[: self.chain], minlength=1).max())

    @property
    def pairs_actions(self) -> bool:
        """Whether some cell is a pair of actions that overlap."""
        return any(bool((row[:, 1] >= 0).any()) for row in self.codes)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        listed = np.bincount(np.concatenate([kind_of(row).ravel() for row in (_NO_CELLS, *self.codes)]))
        return frozenset([kind for kind in Kind if listed[kind.code : kind.code + 1].any()])

    @property
    def chain(self) -> int:
        """The number of stages of one copy of the model."""
        return self.num_stages // self.copies

    def __str__(self) -> str:
        rows = (f"rank {rank}: " + " ".join(map(self._text, cells)) for rank, cells in enumerate(self.ranks))
        return "\n".join([f"{self.name}: {self._sizes}", *rows])

    def _text(self, cell: Cell) -> str:
        """Return a cell as text, without its stage where each rank has one."""
        if len(self.rank_of) > self.num_ranks or len(cell) != 1:
            return cell_text(cell)
        return f"{cell[0].kind.value}{cell[0].microbatch}"

    def __repr__(self) -> str:
        return f"Schedule({self.name}: {self._sizes})"

    @property
    def _sizes(self) -> str:
        ranks = "" if self.num_ranks == self.num_stages else f" on {count(self.num_ranks, 'rank')}"
        return f"{count(self.num_stages, 'stage')}{ranks}, {count(self.num_microbatches, 'microbatch')}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self is other or (self._key == other._key and self._same_order(other))

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[object, ...]:
        name, stages, microbatches, *rest = self._key
        if self._codes is None:
            return Schedule, (name, stages, microbatches, self.ranks, *rest)
        return Schedule.from_codes, (name, stages, microbatches, self._codes, *rest)

    @property
    def _key(self) -> tuple[str, int, int, tuple[int, ...], int, Weights]:
        return self.name, self.num_stages, self.num_microbatches, self.rank_of, self.copies, self.weights

    def _same_order(self, other: Schedule) -> bool:
        if self._codes is None or other._codes is None:
            return self.ranks == other.ranks
        pairs = zip(self._codes, other._codes, strict=False)
        return self.num_ranks == other.num_ranks and all(np.array_equal(one, two) for one, two in pairs)

    def inputs(self, action: Action) -> tuple[Action, ...]:
        """Actions that must finish before `action` starts, whatever the order on its rank.

        As its line of :class:`Kind` says: a forward needs the forward of the same microbatch on the stage
        before; B and I need the forward on their own stage, and B or I, whichever is listed, on the stage
        after; W needs the I of its own stage. The first stage of a copy has none before, its last none after.
        """
        stage, waits, found = action.stage, action.kind.waits, list[Action]()
        for letters, other in ((waits.before, stage - 1), (waits.own, stage), (waits.after, stage + 1)):
            if letters and other // self.chain == stage // self.chain:
                kinds = self._listed.get((other, action.microbatch), 0)
                kinds |= action.kind.bit if other == stage else 0
                found += [Action(k, other, action.microbatch) for k in way_of(kinds) if k.value in letters]
        return tuple(found)

    @cached_property
    def _listed(self) -> dict[tuple[int, int], int]:
        """By stage and microbatch the kinds that are listed, as of :func:`way_of`."""
        found: dict[tuple[int, int], int] = {}
        for actions in self.actions:
            for action in actions:
                place = action.stage, action.microbatch
                found[place] = found.get(place, 0) | action.kind.bit
        return found

    def in_flight(self, rank: int) -> int:
        """Most pairs of a stage and a microbatch that are past F and not past B, or W, at once on `rank`.

        Those whose saved values other kinds free, as their lines say, count while these are there. GPipe
        holds `m`, 1F1B `min(m, p - rank)` (Narayanan et al. 2021, section 2.2). Read off the order on the
        rank, a pair of actions one after the other.

        Raises:
            ScheduleError: there is no such rank.
        """
        return self._peak(rank, _IN_FLIGHT)

    def in_flight_of(self, stage: int) -> int:
        """Most microbatches that are past F and not past B, or W, at once on one `stage`.

        Raises:
            ScheduleError: there is no such stage.
        """
        return _most(self._codes_of(stage), _IN_FLIGHT)

    def _codes_of(self, stage: int) -> Ints:
        """Return the codes of the actions of a stage in its order."""
        if not 0 <= stage < self.num_stages:
            raise ScheduleError(f"{self.name}: no stage {stage}; choose one of 0..{self.num_stages - 1}")
        codes = self.codes[self.rank_of[stage]].ravel()
        codes = codes[codes >= 0]
        return codes[number_of(codes) % self.num_stages == stage]

    def versions_of(self, stage: int) -> int:
        """Most versions of its weights that a `stage` holds at once: 1 with a flush, else what is stashed.

        In steps of enough microbatches, PipeDream holds `p - stage` (Narayanan et al. 2019, section 3.3),
        PipeDream-2BW two.

        Raises:
            ScheduleError: there is no such stage, or as :meth:`order`.
        """
        own = self._codes_of(stage)
        if self.weights == FLUSH:
            return 1
        self.check()
        return versions_held(self.name, self.weights, own, self.num_stages)

    def until_i(self, rank: int) -> int:
        """Most pairs of a stage and a microbatch past F and not past B or I: as :meth:`in_flight`."""
        return self._peak(rank, _UNTIL_I)

    def pending_w(self, rank: int) -> int:
        """Most pairs of a stage and a microbatch that are past I and not past W: as :meth:`in_flight`."""
        return self._peak(rank, _PENDING_W)

    def _peak(self, rank: int, adds: Ints) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError(f"{self.name}: no rank {rank}; choose one of 0..{self.num_ranks - 1}")
        if self._codes is None:
            codes = np.array([self._code(action) for action in self.actions[rank]], np.int64)
        else:
            codes = self._codes[rank].ravel()
            codes = codes[codes >= 0]
        return _most(codes, adds)

    def _code(self, action: Action) -> int:
        return code_of(action.microbatch * self.num_stages + action.stage, action.kind.code)

    def order(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of all ranks in global steps: what one step holds is independent of each other.

        In each step every rank runs its next cell if the inputs of its actions finished in an *earlier*
        step, so a step is one unit of time when all cells last equally long. Read step by step, this is
        one linear order that agrees with every rank's own; the actions of a pair stand side by side.

        Raises:
            ScheduleError: an action is missing, repeated, foreign or on the wrong rank, or the ranks wait
                for each other; the message names the actions.
        """
        return self._order

    def merged(self) -> tuple[Ints, Bools]:
        """The order as integers: the rank of each cell, and whether the cell is the last of its step.

        Raises:
            ScheduleError: as :meth:`order`.
        """
        cells, ends_step = self._merged
        return np.repeat(np.arange(self.num_ranks), [len(row) for row in self.codes])[cells], ends_step

    @property
    def codes_in_order(self) -> Ints:
        """The codes of the cells, [cells, 2], in the order of :meth:`merged`; raises what that raises."""
        return self.listed[0][self._merged[0]]

    @cached_property
    def listed(self) -> tuple[Ints, Ints]:
        """The codes of the cells of all ranks, [cells, 2], rank by rank, and where those of each start."""
        cells = np.concatenate([_NO_CELLS, *self.codes])
        cells.setflags(write=False)
        return cells, np.array([0, *map(len, self.codes)], np.int64).cumsum()

    def check(self) -> None:
        """Verify that every action is there once, on its rank, and that the ranks never wait in a circle.

        Raises:
            ScheduleError: as :meth:`order`.
        """
        _ = self._merged

    @cached_property
    def _order(self) -> tuple[tuple[Action, ...], ...]:
        rest = [iter(actions) for actions in self.ranks]
        ranks, ends_step = self.merged()
        where: list[int] = ranks.tolist()
        ends: list[bool] = ends_step.tolist()
        steps: list[list[Action]] = [[]]
        for rank, end in zip(where, ends, strict=True):
            steps[-1] += next(rest[rank])
            if end:
                steps.append([])
        return tuple(map(tuple, steps[:-1]))

    @cached_property
    def _merged(self) -> tuple[Ints, Bools]:
        """The numbers of the cells, counted through all ranks, in the order of the steps; :meth:`merged`."""
        sizes = self.name, self.num_stages
        check_placement(*sizes, self.num_ranks, self.rank_of, self.copies)
        listed = sum(len(row) for row in (self.ranks if self._codes is None else self._codes))
        # Counted first: what the sizes ask for may be more than memory holds, and what is listed is not.
        if self._codes is None or self.num_stages * self.num_microbatches > listed:
            check_complete(*sizes, self.num_microbatches, self.rank_of, self.ranks)
        cells, start = self.listed
        order, ends_step = np.zeros(listed, np.int64), np.zeros(listed, np.bool_)
        position, rank_of = np.zeros(self.num_ranks, np.int64), np.array(self.rank_of, np.int64)
        left = np.zeros(self.num_stages * self.num_microbatches + 1, SUM_OF_KINDS)
        rows = Listing(cells, start, rank_of, max(self.chain, 1))
        ran = run_steps(rows, RULES, left, order, ends_step, position)
        if ran < 0:
            check_complete(*sizes, self.num_microbatches, self.rank_of, self.ranks)
        if ran < listed:
            raise deadlock(self.name, self.ranks, self.rank_of, position.tolist(), self.inputs)
        check_weights(self.name, self.weights, self.num_microbatches, self.copies, self.pairs_actions)
        for column in (order, ends_step):
            column.setflags(write=False)
        return order, ends_step


def _most(codes: Ints, adds: Ints) -> int:
    """Return the most that actions hold at once, where kinds add so much; what is gone as one ends counts."""
    change, freed = adds[kind_of(codes)], freed_at_once(codes)
    if freed is None:
        return int(change.cumsum().max(initial=0))
    left = np.where(freed, 0, change)
    return int((left.cumsum() + change - left).max(initial=0))
