"""What passes between the blocks of a Program: every value is made once, and before it is read.

Whatever the schedule, a microbatch runs forward from the first stage to the last and backward from the
last to the first, and what runs once per step follows, in the order in which it is issued. So the blocks
have one order, and a read is in time when its maker comes before its reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distsim.errors import IRError
from distsim.ir import Value
from distsim.schedule import Action, Kind
from distsim.schedule.action import WAYS

_NAMED = 8
"""A longer cycle is shortened in the middle."""


def shortened(lines: Sequence[str]) -> str:
    """Return what waits for what in a cycle, as one text.

    >>> shortened([str(number) for number in range(12)])
    '0; 1; 2; 3; 4; 5; 6; ... 4 more ...; 11'
    """
    if len(lines) > _NAMED:
        lines = [*lines[: _NAMED - 1], f"... {len(lines) - _NAMED} more ...", lines[-1]]
    return "; ".join(lines)


class Row(NamedTuple):
    """A block as others see it: where it runs, what it reads and makes.

    ``phase`` is None for what runs once per step, in ``round``: before all else if that is negative. ``sums``
    are the outputs that are summed over microbatches.
    """

    stage: int
    phase: Kind | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    sums: tuple[Value, ...] = ()
    round: int = 0

    def __str__(self) -> str:
        if self.phase is None:
            return f"U@{self.stage} (round {self.round})"
        return str(Action(self.phase, self.stage, 0))


class Maker(NamedTuple):
    """Who makes a key: row ``place`` of the order, on ``stage``. ``once``: there is one value per step.

    ``place`` is -1 for an input of the program; ``stage`` is the first that holds it then, -1 if none does.
    """

    place: int
    stage: int
    phase: Kind | None
    once: bool


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return blocks in the order in which they run for a microbatch, and after the last one."""
    last = 1 + max([row.stage for row in rows], default=0)

    def place(row: Row) -> tuple[int, int, int]:
        if row.phase is None:
            return 2 * last if row.round >= 0 else -1, row.round, row.stage
        return (row.stage if row.phase is Kind.FORWARD else 2 * last - 1 - row.stage), 0, 0

    return sorted(rows, key=place)


def makers_of(
    name: str, rows: Sequence[Row], inputs: Mapping[Value, tuple[Sequence[int], bool]]
) -> dict[Value, Maker]:
    """Return who makes each key; ``inputs`` tell who holds each, and whether there is one value per step.

    ``rows`` are as :func:`in_order` returns them. Raises :class:`IRError` for a key that is made twice.
    """
    found: dict[Value, Maker] = {}
    given: dict[tuple[int, bool], Maker] = {}  # one record of all that the same row makes, or stage holds
    for key, (stages, once) in inputs.items():
        first = stages[0] if stages else -1
        found[key] = given.setdefault((first, once), Maker(-1, first, None, once))
    for place, row in enumerate(rows):
        sums = set(row.sums)
        once = Maker(place, row.stage, row.phase, True)
        each = once if row.phase is None else once._replace(once=False)
        for key in row.outputs:
            before = found.get(key)
            if before is not None:
                made = "an input of the program" if before.place < 0 else f"made by {rows[before.place]}"
                raise IRError(f"{name}: {row} makes {key.name!r}, which is {made}; make a value once")
            found[key] = once if key in sums else each
    return found


def verify_reads(
    name: str, rows: Sequence[Row], inputs: Mapping[Value, Sequence[int]], makers: Mapping[Value, Maker]
) -> None:
    """Check that whatever a block reads is there when it runs; raise :class:`IRError` if not.

    The message names who reads what of whom, and the whole cycle where blocks wait for each other.
    """
    late: list[tuple[int, Value]] = []
    for place, row in enumerate(rows):
        for key in row.inputs:
            maker = makers.get(key)
            if maker is None:
                raise IRError(
                    f"{name}: {row} reads {key.name!r}, which no block makes and which is no input; make it "
                    "in a block, or add it to the inputs of the program"
                )
            if maker.place >= place:
                late.append((place, key))
            elif maker.place < 0:
                _verify_held(name, row, key, inputs[key])
            elif maker.once and row.phase is not None and maker.stage != row.stage:
                raise IRError(
                    f"{name}: {row} reads {key.name!r}, the sum over microbatches of {rows[maker.place]} on "
                    "another stage, of which a microbatch has no value; read it in an update block"
                )
    if late:
        raise _late_error(name, rows, makers, late)


def verify_actions(
    name: str, rows: Sequence[Row], whole: Sequence[Value], makers: Mapping[Value, Maker]
) -> None:
    """Check what actions of a stage read and make, whose blocks something made of the passes of the stages.

    What a row reads is made by a row before it, or by what its kind waits for; what it makes is new, or made
    again of what the passes of its stage make before it, as the line of its kind says. If the rows stand for
    the backward pass, they make ``whole``, which are the outputs of that. Raises :class:`IRError` that names
    who reads or makes what.
    """
    there = set[Value]()
    for row in rows:
        before = [] if row.phase is None else awaited(row.phase)
        for key in row.inputs:
            maker = makers.get(key)
            if key not in there and (maker is None or not _is_made(maker, row.stage, before)):
                raise IRError(
                    f"{name}: {row} reads {key.name!r}, which nothing that it waits for makes; let its "
                    "kind wait for what does"
                )
        for key in row.outputs:
            maker = makers.get(key)
            if maker is not None and (maker.stage != row.stage or maker.phase is None):
                raise IRError(f"{name}: {row} makes {key.name!r}, which is made elsewhere; make a value once")
            if maker is not None and maker.phase is not None and row.phase is not None:
                _verify_made_again(name, row, key, maker, row.phase, maker.phase)
        there.update(row.outputs)
    kinds = [row.phase for row in rows if row.phase is not None]
    left = [key for key in whole if key not in there]
    if left and {Kind.FORWARD.value, *[kind.value for kind in kinds]} in map(set, WAYS):
        raise IRError(
            f"{name}: {' and '.join(map(str, rows))} make no {left[0].name!r}, which the backward "
            "pass makes that they stand for"
        )


def _verify_made_again(name: str, row: Row, key: Value, maker: Maker, kind: Kind, first: Kind) -> None:
    """Check that a kind makes again what it waits for, and that this is in flight then by its line."""
    if first not in awaited(kind):
        if any({first.value, kind.value} <= {*letters} for letters in WAYS):
            raise IRError(
                f"{name}: {row} makes {key.name!r}, and so does {first.value} ({first.phase}) of its stage, "
                "before or after it; let its kind wait for that"
            )
    elif maker.once:
        raise IRError(
            f"{name}: {row} makes {key.name!r} again, the sum over microbatches to which {first.value} "
            f"({first.phase}) adds; leave it out of what it makes"
        )
    elif kind.in_flight.until_i + kind.in_flight.pending_w <= 0:
        raise IRError(
            f"{name}: {row} makes {key.name!r} again, of which nothing is left since {first.value} "
            f"({first.phase}), and adds nothing to what is in flight; say in its line what it adds and, if "
            f"no other kind does, whose it frees, as InFlight(1, frees={first.value!r})"
        )


def awaited(kind: Kind) -> list[Kind]:
    """Return a kind, those of its stage that it waits for, those for which these wait, and so on."""
    found = [kind]
    for each in found:
        found += [other for other in map(Kind, each.waits.own) if other not in found]
    return found


def _is_made(maker: Maker, stage: int, before: Sequence[Kind]) -> bool:
    """Whether what the passes of a stage make is there once kinds have run that another stage lists."""
    if maker.phase is None or maker.phase in before:
        return True
    back = any(kind.waits.after for kind in before)
    return back and maker.phase is Kind.BACKWARD and maker.stage != stage


def _verify_held(name: str, row: Row, key: Value, stages: Sequence[int]) -> None:
    if row.stage not in stages:
        held = f"which only {_stages(stages)}" if stages else "which no stage"
        raise IRError(
            f"{name}: {row} reads the input {key.name!r}, {held} holds; list stage {row.stage} among its "
            "stages"
        )


def _stages(numbers: Sequence[int]) -> str:
    return ("stage " if len(numbers) == 1 else "stages ") + ", ".join(map(str, numbers))


def _late_error(
    name: str, rows: Sequence[Row], makers: Mapping[Value, Maker], late: Sequence[tuple[int, Value]]
) -> IRError:
    """Return the error of reads whose makers do not run before: a cycle of values if there is one."""
    for reader, key in late:
        path = _path(rows, makers, makers[key].place, reader)
        if path is not None:
            return _cycle_error(name, rows, [(reader, key), *path])
    reader, key = late[0]
    maker = rows[makers[key].place]
    return IRError(
        f"{name}: {rows[reader]} reads {key.name!r} of {maker}, which runs after it in every schedule: a "
        "microbatch runs forward from stage 0 on and backward to stage 0, updates follow the last one by "
        "round and stage; make the value in a block that runs before"
    )


def _cycle_error(name: str, rows: Sequence[Row], waits: Sequence[tuple[int, Value]]) -> IRError:
    """Return the error of blocks each of which waits for a value of the next, the last for the first's."""
    places = [place for place, _ in waits]
    lines = [
        f"{rows[place]} waits for {rows[after]} (for its {key.name!r})"
        for (place, key), after in zip(waits, [*places[1:], places[0]], strict=True)
    ]
    each = "in every microbatch " if any(rows[place].phase is not None for place in places) else ""
    return IRError(
        f"{name} deadlocks {each}under any schedule: blocks wait for each other in a cycle: "
        f"{shortened(lines)}; cut the function elsewhere, or make one of these values where it is read"
    )


def _path(
    rows: Sequence[Row], makers: Mapping[Value, Maker], start: int, end: int
) -> list[tuple[int, Value]] | None:
    """Return the fewest reads by which a block waits for another one, none if they are the same block."""
    came: dict[int, tuple[int, Value] | None] = {start: None}
    left = deque([start])
    while left:
        place = left.popleft()
        if place == end:
            return list(_back(came, end))[::-1]
        for key in rows[place].inputs:
            maker = makers.get(key)
            if maker is not None and maker.place >= 0 and maker.place not in came:
                came[maker.place] = place, key
                left.append(maker.place)
    return None


def _back(came: Mapping[int, tuple[int, Value] | None], end: int) -> Iterator[tuple[int, Value]]:
    step = came[end]
    while step is not None:
        yield step
        step = came[step[0]]
