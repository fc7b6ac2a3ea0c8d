"""What a search has found so far, in a file that is appended to: a line of JSON for each plan that was tried.

The first line says which search it is, the model, the cluster and the kernels, and which distsim wrote it:
versions may find other figures of a plan, which are not to be compared. Plans may be added, and more of the
best asked for: what is there is not tried again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_type_hints

import msgspec

from distsim.errors import SimulationError
from distsim.ir import Function, Topology, pformat
from distsim.plan_search.trial import PlanTrial
from distsim.report.output import check_target, replacing
from distsim.transforms.kernels.policies import Kernels

MOST_NAMED = 4
"""As how many options and figures in which a journal is of another search are named at most."""

Raw = dict[Any, Any]

_CHECK = "crc"
_SYNC_SECONDS = 2.0
_NAMES = {own.name for own in fields(PlanTrial)}


def format_of(kind: type) -> str:
    """Return what is equal for records of the same fields, in their order, and of the same records in these.

    >>> format_of(PlanTrial) == format_of(PlanTrial) != format_of(TrialJournal)
    True
    """
    return f"{zlib.crc32(json.dumps(_fields_of(kind)).encode()):08x}"


def _fields_of(hint: Any) -> Any:
    """Return the fields of a record with what is in each, and of another type what its arguments have."""
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return {name: _fields_of(own) for name, own in get_type_hints(hint).items()}
    return [own for argument in get_args(hint) if (own := _fields_of(argument))]


def distsim_version() -> str:
    """Return the version of this distsim."""
    return str(import_module("distsim").__version__)


@dataclass(frozen=True)
class TrialJournal:
    """A journal in a file: ``subject`` is what people call the search, ``digest`` tells it from others.

    ``asked`` are the options that were asked for and the figures of the cluster, by name, as text: where
    digests differ they say in what.
    """

    path: Path
    subject: str
    digest: str
    asked: Mapping[str, str] = field(default_factory=dict[str, str])

    def begin(self) -> None:
        """Write the first line of a new file; raise :class:`SimulationError` where there is one already."""
        check_new(self.path)
        head = {"format": format_of(PlanTrial), "version": distsim_version()}
        about = {"subject": self.subject, "digest": self.digest, "asked": dict(self.asked)}
        line = json.dumps({**head, **about})
        with replacing(self.path) as file:  # there is no moment at which it is there without its first line
            file.write(f"{line}\n".encode())

    def read(self) -> JournalContent:
        """Return what is in the file; what follows its last whole line is cut off.

        A line that is damaged, was changed, or is no record of a plan that was tried counts for nothing.
        Raises :class:`SimulationError` for a file that is no journal, one of a distsim of another version or
        whose trials have other fields, or one of another search, and leaves it as it is.
        """
        check_target(self.path)
        if not self.path.exists():
            raise SimulationError(f"{self.path}: there is no journal to resume; leave --resume out")
        *lines, rest = self.path.read_bytes().split(b"\n")
        head = _record(lines[0]) if lines else None
        if head is None or not head.keys() >= {"format", "digest"}:
            raise SimulationError(f"{self.path} is no journal of a search; name another file")
        version = head.get("version", "without a version")  # as those were before it was written down
        if version != distsim_version():
            raise SimulationError(
                f"{self.path} is a journal of distsim {version!s:.20}, and this is distsim "
                f"{distsim_version()}, which may find other figures of a plan; name another file without "
                "--resume, or resume it with the distsim that wrote it"
            )
        if head["format"] != format_of(PlanTrial):
            raise SimulationError(
                f"{self.path} is a journal of another version of distsim, which knew other figures of a plan "
                f"(format {head['format']!s:.20}, not {format_of(PlanTrial)}); name another file without "
                "--resume"
            )
        if head["digest"] != self.digest:
            raise SimulationError(
                f"{self.path} is the journal of another search: {head.get('subject', 'unknown')}, not "
                f"{self.subject}: {self._differences(head.get('asked'))}; name its own, or another file "
                "without --resume"
            )
        if rest:
            os.truncate(self.path, self.path.stat().st_size - len(rest))
        # A line that was torn in the middle, by a machine that went down, is one plan that is tried again.
        trials = [trial for line in lines[1:] if (trial := _trial(line)) is not None]
        return JournalContent(
            {trial.text: trial for trial in trials}, len(lines) - 1 - len(trials) + bool(rest)
        )

    def _differences(self, was: object) -> str:
        """Say which options and figures were others, those that were asked for first, with both values."""
        told = (
            {str(name): str(each) for name, each in cast(Raw, was).items()} if isinstance(was, dict) else {}
        )
        names = [
            name for name in dict.fromkeys((*self.asked, *told)) if told.get(name) != self.asked.get(name)
        ]
        if "cluster" in names:  # another one has other figures
            names = [name for name in names if name != "devices" and "." not in name]
        if not told or not names:
            same = "options and figures" if told else "its options"
            return f"{same} that it names are the same, but not the file of the model, or the devices"
        said = [
            f"{name} is {_shown(self.asked.get(name))}, and was {_shown(told.get(name))}" for name in names
        ]
        more = f"; {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
        return "; ".join(said[:MOST_NAMED]) + more


def _shown(value: str | None) -> str:
    return "not given" if value is None else f"{value:.200}"


def check_new(path: Path) -> None:
    """Raise :class:`SimulationError` for a file with something in it: a journal is hours of work."""
    if path.exists() and (size := path.stat().st_size):
        raise SimulationError(
            f"{path} has {size} bytes already, which a new journal would replace; add --resume to go on with "
            "it, or name another file"
        )


class JournalContent(NamedTuple):
    """The trials of a journal by the text of their plan, and how many of its lines are damaged."""

    trials: dict[str, PlanTrial]
    damaged: int


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def _trial(line: bytes) -> PlanTrial | None:
    """Return the trial of a line; None for one that is not as a journal has it.

    A checksum tells that a line was torn or edited, not that its values are of the types that they are read
    as. Plans that were discarded are in no journal: that they were depends on what else a search has found.
    """
    own = _record(line) or {}
    if own.pop(_CHECK, None) != _checksum(own) or not own.keys() <= _NAMES:
        return None
    try:
        trial = msgspec.convert(own, PlanTrial)
    except msgspec.ValidationError:
        return None
    return None if trial.discarded else trial


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())


class JournalWriter:
    """Appends trials to a journal; several processes may do so at a time, each line being written at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._synced = time.monotonic()

    def append(self, trial: PlanTrial) -> None:
        """Write a trial; now and then wait until what was written is on the disk."""
        record = trial.to_dict()
        line = json.dumps({**record, _CHECK: _checksum(record)})
        os.write(self._file, f"{line}\n".encode())
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Wait until all is on the disk, and close the file."""
        os.fsync(self._file)
        os.close(self._file)


def digest_of(function: Function, topology: Topology, kernels: Kernels) -> str:
    """Return what is equal for searches of equal training steps, devices, links and kernels."""
    hashed = hashlib.sha256(pformat(function).encode())
    devices = [[getattr(d, name.name) for name in fields(d) if name.compare] for d in topology.devices]
    every = [[topology.level_of(level, device) for level in topology.levels] for device in topology.devices]
    inside = every if topology.kinds_of_links else []
    links = topology.pair_links(topology.devices), topology.levels, inside
    hashed.update(repr((devices, links, kernels.name)).encode())
    return hashed.hexdigest()


def figures_of(topology: Topology) -> dict[str, str]:
    """Return the figures of the first device and of the levels by name, and how many devices there are.

    >>> from distsim.hardware import load_cluster
    >>> found = figures_of(load_cluster("dgx-a100"))
    >>> found["devices"], found["device.memory"], found["nvlink.link.bandwidth"]
    ('8', '85899345920.0', '300000000000.0')
    """
    found = {"devices": str(len(topology.devices))}
    for device in topology.devices[:1]:
        found |= dict(_leaves("device", device))
    for level in topology.levels:
        found |= dict(_leaves(level.name, level))
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what is in a record of records and of pairs of a name and a value, by its path, as text."""
    if is_dataclass(value):
        for own in fields(value):
            if own.compare:
                yield from _leaves(f"{name}.{own.name}", getattr(value, own.name))
    elif isinstance(value, tuple):
        for key, each in cast(tuple[tuple[str, Any], ...], value):
            yield from _leaves(f"{name}.{key}", each)
    else:
        yield name, str(value)
