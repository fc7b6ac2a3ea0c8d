"""What nccl-tests (and rccl-tests) print: sizes and times of a collective, of the ranks that they list.

Read are the lines of ranks (``#  Rank  0 Group  0 Pid 12 on host device 0 ...``), the line that names the
columns, and the rows under it: size in bytes, and of the out-of-place run time in microseconds, algbw and
busbw in GB/s. Sizes are as :mod:`distsim.hardware.collectives` has them (nccl-tests, doc/PERFORMANCE.md).
Other lines (NCCL INFO, warnings of mpirun) are passed over. Which collective it is says the line ``Collective
test starting`` (from 2.17 on), or else the command or the name of the file: ``all_reduce_perf`` in either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from distsim.calibration.files import read_text
from distsim.calibration.timings import MAX_BYTES, CollectiveCall, Timing, check_seconds
from distsim.calibration.timings_csv import check_ranks
from distsim.errors import TimingsError, shortened

_KINDS = {
    "all_?reduce": "all_reduce",
    "all_?gather": "all_gather",
    "reduce_?scatter": "reduce_scatter",
    "all_?to_?all": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "send_?recv": "shift",  # each rank sends to the next
}
"""Patterns of their names of collectives, and the names of distsim."""

_PREFIX = re.compile(r"^\s*(?:\[[0-9]+,[0-9]+\](?:<std(?:out|err)>)?:|[0-9]{1,5}:)")
"""What mpirun (--tag-output) and srun (--label) put before a line."""
_RANK = re.compile(
    r"#\s*Rank\s+([0-9]+)\s+(?:Group\s+([0-9]+)\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device\s+[0-9]+"
)
_TEST = re.compile(rf"(?<![a-z])(?:{'|'.join(f'({name})' for name in _KINDS)})(?:_perf)?(?![a-z])")
_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{0,9})?(e[+-]?[0-9]{1,2})?", re.ASCII | re.IGNORECASE)

_HALF_DIGIT = 0.006
"""GB/s that algbw, printed as 0.01, may be off."""


def read_nccl_tests(path: Path) -> list[Timing]:
    """Return the timings of one run or of several; raises :class:`TimingsError` with the line."""
    run = _Printout(path)
    found = [timing for number, line in _lines(path) if (timing := run.read(number, line)) is not None]
    if not found:
        raise TimingsError(
            f"{path} has no rows of nccl-tests; give all that all_reduce_perf or another of them prints, a "
            "table (.csv) or a torch trace (.json, .json.gz)"
        )
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_text(path).splitlines(), 1):
        yield number, _PREFIX.sub("", line).strip()


class _Printout:
    """What the lines have said so far of the run that prints the next rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = self._named(path.name)
        self.hosts: dict[int, str] = {}
        self.columns: list[str] = []
        self.rows = 0

    def read(self, number: int, line: str) -> Timing | None:
        """Return the timing of a line that has one."""
        where = f"{self.path}, line {number}"
        rank = _RANK.match(line)
        if rank:
            if self.rows:  # the next run begins
                self.hosts, self.columns, self.rows = {}, [], 0
            if rank[2] not in (None, "0"):
                raise TimingsError(f"{where}: ranks are split into groups; run without NCCL_TESTS_SPLIT")
            if int(rank[1]) in self.hosts:
                raise TimingsError(
                    f"{where}: rank {rank[1]} is listed twice, as by nccl-tests without MPI: build with MPI=1"
                )
            self.hosts[int(rank[1])] = rank[3]
        elif "Collective test starting" in line or ("_perf" in line and self._named(line)):
            self.kind = self._named(line)
        elif re.match(r"#\s+size\s+count\s", line):
            names = line.lstrip("#").split()
            self.columns = names[names.index("time") :] if "time" in names else []
            if self.columns[:3] != ["time", "algbw", "busbw"]:
                raise TimingsError(f"{where}: the columns are not size, count, ..., time, algbw, busbw, ...")
        elif self.columns and re.match(r"[0-9]+\s+[0-9]+\s", line):
            self.rows += 1
            return self._timing(line.split(), where, f"line {number}")
        return None

    @staticmethod
    def _named(text: str) -> str:
        found = _TEST.search(text.replace("-", "_"))
        return [*_KINDS.values()][(found.lastindex or 1) - 1] if found else ""

    def _timing(self, cells: list[str], where: str, place: str) -> Timing | None:
        size, ranks = int(cells[0][:16]), len(self.hosts)
        if size == 0:
            return None  # they also print sizes that round to nothing
        if not self.kind:
            raise TimingsError(
                f"{where}: nothing says which collective this is; name the file so, as all_gather_perf.txt"
            )
        if ranks < 2:
            raise TimingsError(f"{where}: {ranks} lines of ranks (# Rank ...) stand before it; keep them all")
        if len(cells) < len(self.columns) + 3 or size > MAX_BYTES:
            raise TimingsError(f"{where}: {shortened(' '.join(cells))} is no row of the columns above")
        time, algbw, busbw = cells[-len(self.columns) :][:3]
        seconds = self._number(time, f"{where}, column time") * 1e-6
        self._check_ratio(self._number(algbw, where), self._number(busbw, where), ranks, where)
        try:
            nodes = len(set(self.hosts.values()))
            call = check_ranks(CollectiveCall(self.kind, size, ranks, nodes))
            timing = Timing(call, check_seconds(seconds), self.path.name, place)
        except TimingsError as error:
            raise TimingsError(f"{where}: {error}") from error
        self._check_time(size, seconds, self._number(algbw, where), where)
        return timing

    @staticmethod
    def _check_time(size: int, seconds: float, algbw: float, where: str) -> None:
        """Refuse a time that is not the size over algbw, but for the two digits to which this is rounded."""
        moved = algbw * 1e9 * seconds
        if abs(moved - size) > 0.03 * size + _HALF_DIGIT * 1e9 * seconds:
            raise TimingsError(
                f"{where}: in {seconds * 1e6:.4g} us, algbw {algbw:.4g} GB/s moves {moved:.3g} bytes, and "
                f"the size is {size}; is time in microseconds, and algbw in GB/s, as nccl-tests print them?"
            )

    @staticmethod
    def _number(text: str, where: str) -> float:
        if not _NUMBER.fullmatch(text):
            raise TimingsError(f"{where}: {shortened(text)} is no number")
        return float(text)

    def _check_ratio(self, algbw: float, busbw: float, ranks: int, where: str) -> None:
        """Refuse bandwidths that another collective, or another number of ranks, would have."""
        factor = _bus_factor(self.kind, ranks)
        if algbw >= 1 and abs(busbw / algbw / factor - 1) > 0.03:
            raise TimingsError(
                f"{where}: busbw / algbw is {busbw / algbw:.3g}, and {factor:.3g} for {self.kind} over "
                f"{ranks} ranks; are the ranks above those of this run, and is the file named for its kind?"
            )


def _bus_factor(kind: str, ranks: int) -> float:
    """Return busbw / algbw (PERFORMANCE.md)."""
    if kind in ("broadcast", "shift"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks
