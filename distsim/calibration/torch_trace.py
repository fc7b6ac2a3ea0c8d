"""A trace of torch's profiler (Kineto): what its kernels did, as far as the ops that launched them tell.

A kernel names the op that launched it (``External id``, or ``correlation`` with a launch that does), and an
op its operands where the profiler was asked to (``record_shapes=True``). The kernels of one op are one call;
of equal calls the median counts, of collectives, whose kernels wait for the last rank, the least. Places of
arguments: the schemas of torch 2.13; those of flash-attn's ops are from memory.

The host's time for a launch is the mean time from one launch to the next on a thread, of those between which
it waits for nothing: no synchronisation, no launch of unusual length (a full queue), no pause of more than 20
times the usual. Profiling itself lengthens it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from distsim.calibration.files import MAX_TRACE_BYTES, read_bytes
from distsim.calibration.timings import (
    MAX_BYTES,
    MAX_SECONDS,
    Call,
    CollectiveCall,
    LaunchCall,
    Readings,
    Timing,
    memory,
)
from distsim.calibration.torch_ops import OpArgs, UnreadableCallError, collective_call, known_ops, op_call
from distsim.errors import TimingsError

MOST_EVENTS = 1 << 23
_HOST = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"(cuda|cu|hip)(Ext)?(Module)?LaunchKernel(Ex|ExC)?$")
_FEWEST_LAUNCHES, _PAUSE, _BLOCKED = 50, 20.0, 10.0


class _TraceEvent(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: Any = None
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _TraceFile(msgspec.Struct):
    events: list[_TraceEvent] = msgspec.field(name="traceEvents")


class _OpEvent(NamedTuple):
    """An op of the trace, and the place among its ops of that which called it; -1 for none."""

    name: str
    args: OpArgs
    caller: int


def read_torch_trace(path: Path) -> Readings:
    """Return the timings of a trace; raises :class:`TimingsError` for what is none, with the event."""
    try:
        events = msgspec.json.decode(read_bytes(path, MAX_TRACE_BYTES), type=_TraceFile).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TimingsError(
            f"{path} is no trace of torch's profiler: {error}; give what export_chrome_trace wrote"
        ) from error
    if len(events) > MOST_EVENTS:
        raise TimingsError(f"{path} has {len(events)} events, more than {MOST_EVENTS}; trace fewer steps")
    return _Trace(path, events).read()


class _Trace:
    """The events of a trace by what they are, and the calls that they time."""

    def __init__(self, path: Path, events: Sequence[_TraceEvent]) -> None:
        self.path = path
        self.events = events
        self.calls: dict[Call, list[float]] = {}
        self.skipped: Counter[str] = Counter()

    def read(self) -> Readings:
        """Return what is timed; raises :class:`TimingsError` where no kernel of a GPU is."""
        kernels = [i for i, event in enumerate(self.events) if event.cat == "kernel"]
        if not kernels:
            raise TimingsError(
                f"{self.path} has no kernels of a GPU; profile with activities=[ProfilerActivity.CPU, "
                "ProfilerActivity.CUDA]"
            )
        self._kernels(kernels)
        for i, event in enumerate(self.events):
            if event.cat == "gpu_memcpy" and event.name.startswith("Memcpy DtoD"):
                nbytes = self._args(i).nbytes
                if nbytes is not None and 0 < nbytes <= MAX_BYTES:
                    self._add(memory(2 * nbytes), self._seconds(i))
        timings = [
            Timing(call, (min if isinstance(call, CollectiveCall) else median)(times), *self._where(times))
            for call, times in self.calls.items()
        ]
        launches = self._launches([self.events[i].name for i in kernels])
        if launches is not None:
            timings.append(launches)
        if not timings:
            raise TimingsError(f"{self.path}: {'; '.join(self._notes()) or 'no kernel is one that is known'}")
        return Readings(timings, self._notes())

    def _where(self, times: Sequence[float]) -> tuple[str, str]:
        return self.path.name, f"{len(times)} calls" if len(times) > 1 else "1 call"

    def _notes(self) -> list[str]:
        return [f"{self.path.name}: {count} x {why}" for why, count in self.skipped.most_common(5)]

    def _add(self, call: Call, seconds: float) -> None:
        if 0 < seconds <= MAX_SECONDS:
            self.calls.setdefault(call, []).append(seconds)

    def _seconds(self, place: int) -> float:
        return self.events[place].dur * 1e-6

    def _args(self, place: int) -> OpArgs:
        event = self.events[place]
        try:
            return msgspec.json.decode(event.args, type=OpArgs, strict=False)
        except msgspec.DecodeError as error:
            raise TimingsError(f"{self.path}, event {place} ({event.name:.60}), args: {error}") from error

    # --- kernels and the ops that launched them ---------------------------------------------------------

    def _kernels(self, kernels: Sequence[int]) -> None:
        ops, of_id = self._ops()
        launches = [self._args(i) for i, event in enumerate(self.events) if event.cat in _HOST]
        launched = {args.correlation: args.launched_by for args in launches}
        of_op: dict[int, float] = {}
        for i in kernels:
            args, seconds = self._args(i), self._seconds(i)
            if args.collective is not None:
                self._try(partial(collective_call, args), seconds)
                continue
            by = args.launched_by if args.launched_by is not None else launched.get(args.correlation)
            place = self._known(ops, of_id.get(by, -1) if by is not None else -1)
            if place >= 0:
                of_op[place] = of_op.get(place, 0.0) + seconds
        for place, seconds in of_op.items():
            self._try(partial(op_call, ops[place].name, ops[place].args), seconds)

    def _try(self, call: Callable[[], Call], seconds: float) -> None:
        try:
            self._add(call(), seconds)
        except UnreadableCallError as error:
            self.skipped[str(error)] += 1

    def _ops(self) -> tuple[list[_OpEvent], dict[int, int]]:
        """Return the ops, each with its caller, and their places by their ids."""
        threads: dict[tuple[str, str], list[int]] = {}
        for i, event in enumerate(self.events):
            if event.cat == "cpu_op":
                threads.setdefault((str(event.pid), str(event.tid)), []).append(i)
        ops: list[_OpEvent] = []
        of_id: dict[int, int] = {}
        for places in threads.values():
            places.sort(key=lambda i: (self.events[i].ts, -self.events[i].dur))
            open_ops: list[tuple[float, int]] = []
            for i in places:
                event, args = self.events[i], self._args(i)
                while open_ops and open_ops[-1][0] <= event.ts:
                    open_ops.pop()
                ops.append(_OpEvent(event.name, args, open_ops[-1][1] if open_ops else -1))
                open_ops.append((event.ts + event.dur, len(ops) - 1))
                if args.launched_by is not None:
                    of_id[args.launched_by] = len(ops) - 1
        return ops, of_id

    @staticmethod
    def _known(ops: Sequence[_OpEvent], place: int) -> int:
        """Return the outermost op that is known among one and its callers, -1 if none is."""
        found = -1
        while place >= 0:
            found = place if ops[place].name in known_ops() else found
            place = ops[place].caller
        return found

    # --- launches ---------------------------------------------------------------------------------------

    def _launches(self, kernels: Iterable[str]) -> Timing | None:
        """Return the time of the host for its launches, None where there are too few."""
        threads: dict[tuple[str, str], list[_TraceEvent]] = {}
        for event in self.events:
            if event.cat in _HOST and (_LAUNCH.match(event.name) or "Synchronize" in event.name):
                threads.setdefault((str(event.pid), str(event.tid)), []).append(event)
        gaps: list[float] = []
        issued = [event for events in threads.values() for event in events]
        durations = [event.dur for event in issued if _LAUNCH.match(event.name)]
        if len(durations) < _FEWEST_LAUNCHES:
            return None
        longest = _BLOCKED * median(durations)
        for events in threads.values():
            events.sort(key=lambda event: event.ts)
            gaps += [
                after.ts - before.ts
                for before, after in pairwise(events)
                if _LAUNCH.match(before.name) and _LAUNCH.match(after.name) and before.dur <= longest
            ]
        usual = [gap for gap in gaps if 0 < gap <= _PAUSE * median(gaps)]
        if len(usual) < _FEWEST_LAUNCHES:
            return None
        compiled = any(name.startswith("triton_") for name in kernels)
        call = LaunchCall(len(usual), "compiled" if compiled else "eager")
        return Timing(call, sum(usual) * 1e-6, self.path.name, f"{len(usual)} launches, while profiled")
