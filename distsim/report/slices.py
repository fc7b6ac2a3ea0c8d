"""Slices of a trace as text: what is the same in every run of a piece is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from distsim.ir import Device, Op
from distsim.simulate.tasks.templates import Ints
from distsim.simulate.tasks.timeline import Piece

Lanes = dict[tuple[int, str], int]
"""(rank class, name of the stream) -> its number among those of its class."""

MOST_SLICES = 4096
"""So many slices are made at a time."""

MOST_KEPT = 32768
"""Longer pieces (a whole function) come once: what is the same in them is not kept."""

_FIELDS = 8
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, eq=False, slots=True)
class _Sheet:
    """The slices of some tasks of a piece on one rank class, with a gap for whatever differs."""

    tasks: Ints
    text: bytes


class SliceWriter:
    """Encodes the slices of pieces; ``describe`` gives the name and the arguments of an op.

    Times are whole nanoseconds, written in microseconds with three decimals.
    """

    def __init__(self, lanes: Lanes, describe: Callable[[Op], tuple[str, dict[str, Any]]]) -> None:
        self._lanes = lanes
        self._describe = describe
        self._heads: dict[tuple[Op, int], tuple[bytes, bytes]] = {}
        self._sheets: dict[object, tuple[tuple[object, ...], list[tuple[int, _Sheet]]]] = {}

    def write(self, piece: Piece, members: dict[int, list[Device]]) -> Iterator[bytes]:
        """Yield the slices of a piece on the devices of ``members``, by rank class, joined by commas."""
        path = _encode(piece.path)[1:-1]
        for rank_class, sheet in self._sheets_of(piece, members):
            start = np.rint(piece.start[sheet.tasks] * 1e9).astype(np.int64)
            length = np.rint(piece.end[sheet.tasks] * 1e9).astype(np.int64) - start
            count = len(sheet.tasks)
            values: list[Any] = [path] * (_FIELDS * count)
            values[1::_FIELDS] = (piece.first + sheet.tasks).tolist()
            for place, numbers in ((2, start), (4, length)):
                values[place + 2 :: _FIELDS] = (numbers // 1000).tolist()
                values[place + 3 :: _FIELDS] = (numbers % 1000).tolist()
            for device in members[rank_class]:
                values[2::_FIELDS] = values[3::_FIELDS] = [device.id] * count
                yield sheet.text % tuple(values)

    def _sheets_of(self, piece: Piece, members: dict[int, list[Device]]) -> Iterable[tuple[int, _Sheet]]:
        """Return the sheets of a piece: kept where it may be one of many alike."""
        if len(piece) > MOST_KEPT:
            return self._made(piece, members)
        # A key names its parts by their ids; what is named is kept along, so that the id stays its own.
        named = (piece.call, *piece.op_table, *piece.stream_table)
        key = (id(piece.call), tuple(piece.op_table), tuple(piece.stream_table), tuple(piece.call_names))
        found = self._sheets.get(key)
        if found is None:
            found = self._sheets[key] = (named, list(self._made(piece, members)))
        return found[1]

    def _made(self, piece: Piece, members: dict[int, list[Device]]) -> Iterator[tuple[int, _Sheet]]:
        class_of = np.array([stream.rank_class for stream in piece.stream_table], np.int64)
        tasks = np.repeat(np.arange(len(piece)), np.diff(piece.stream_start))
        if not len(tasks):
            return
        classes = class_of[piece.streams]
        inside = [_text(path[len(piece.path) :]) for path in piece.paths()]
        lanes = [self._lanes[stream.rank_class, stream.name] for stream in piece.stream_table]
        for first in range(0, len(tasks), MOST_SLICES):
            part = slice(first, first + MOST_SLICES)
            for rank_class in members:
                uses = first + np.flatnonzero(classes[part] == rank_class)
                if len(uses):
                    own = tasks[uses]
                    calls: Sequence[int] = piece.call[own].tolist()
                    ops: Sequence[int] = piece.op[own].tolist()
                    streams: Sequence[int] = piece.streams[uses].tolist()
                    rows = [
                        self._row(piece.op_table[op], lanes[stream], inside[call])
                        for op, stream, call in zip(ops, streams, calls, strict=True)
                    ]
                    yield rank_class, _Sheet(own, b",\n".join(rows))

    def _row(self, op: Op, lane: int, inside: bytes) -> bytes:
        found = self._heads.get((op, lane))
        if found is None:
            name, about = self._describe(op)
            head = {"ph": "X", "cat": "kernel", "name": name, "tid": lane}
            arguments = _encode({"stream": lane, **about})[:-1].replace(b"%", b"%%")
            before = _encode(head)[:-1].replace(b"%", b"%%") + b',"args":' + arguments + b',"path":"%b'
            after = b'","correlation":%d,"device":%d},"pid":%d,"ts":%d.%03d,"dur":%d.%03d}'
            found = self._heads[op, lane] = (before, after)
        return found[0] + inside + found[1]


def _text(text: str) -> bytes:
    """Return a text as it stands inside a JSON string that is then filled in with ``%``."""
    return _encode(text)[1:-1].replace(b"%", b"%%")
