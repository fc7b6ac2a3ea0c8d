"""What bounds a step and what would help, as data that prints itself in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.ops.marks import LAUNCH
from distsim.schedule.refusals import count
from distsim.simulation.explain.critical_path import CriticalPath
from distsim.simulation.explain.text import seconds_text, table

_MOST_KINDS = 10
_MOST_STAGES = 32


@dataclass(frozen=True, slots=True)
class StageLoad:
    """How the devices of a stage spend the step, in seconds, as a mean over them.

    Where a pipeline rank holds several stages they count as one, numbered by the rank.
    ``busy``: compute runs. ``exposed_communication``: communication and no compute. ``bubble``: neither.
    """

    stage: int
    devices: int
    busy: float
    exposed_communication: float
    bubble: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The step time, in seconds, with ``change``; ``gain`` is by how much the step is shorter."""

    change: str
    step_time: float
    gain: float


@dataclass(frozen=True)
class Explanation:
    """Why a step takes as long as it does, and what would make it shorter. Times in seconds.

    ``what_ifs`` were each simulated; they are sorted by what they gain, most first. Gains do not add up.

    >>> import distsim
    >>> step = distsim.simulate("gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100", "dgx-a100", "dp=2", 4)
    >>> found = step.explain()
    >>> found.step_time == step.step_time, found.what_ifs[0].step_time < found.step_time
    (True, True)
    """

    name: str
    step_time: float
    critical_path: CriticalPath
    stages: tuple[StageLoad, ...]
    what_ifs: tuple[WhatIf, ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return sum(load.devices for load in self.stages)

    @property
    def bubble(self) -> float:
        """Seconds in which neither compute nor communication runs, as a mean over the devices."""
        return self._mean([load.bubble for load in self.stages])

    @property
    def exposed_communication(self) -> float:
        """Seconds in which communication runs and no compute, as a mean over the devices."""
        return self._mean([load.exposed_communication for load in self.stages])

    @property
    def busy(self) -> float:
        """Seconds in which compute runs, as a mean over the devices."""
        return self._mean([load.busy for load in self.stages])

    @property
    def most_loaded(self) -> StageLoad:
        """The stage that computes longest (the first one, of several)."""
        return max(self.stages, key=lambda load: load.busy)

    @property
    def imbalance(self) -> float:
        """By which share the most loaded stage computes longer than the mean of the stages."""
        mean = sum(load.busy for load in self.stages) / len(self.stages)
        return self.most_loaded.busy / mean - 1 if mean > 0 else 0.0

    def _mean(self, seconds: Sequence[float]) -> float:
        pairs = zip(self.stages, seconds, strict=True)
        return sum(load.devices * each for load, each in pairs) / max(self.devices, 1)

    def __str__(self) -> str:
        head = f"{self.name}: {seconds_text(self.step_time)} a step on {count(self.devices, 'device')}"
        if not self.step_time > 0:
            return f"{head}; nothing in it takes time\n"
        sections = [[head], self._bound(), self._stages(), self._what_ifs()]
        return "\n\n".join(["\n".join(lines) for lines in sections]) + "\n"

    def _share(self, seconds: float) -> str:
        return f"{seconds / self.step_time:.1%}"

    def _bound(self) -> list[str]:
        path = self.critical_path
        moves = sum(part.seconds for part in path.parts if part.communicates)
        issues = path.by_kind.get(LAUNCH.op_type, 0.0)
        launching = f", {self._share(issues)} launching kernels" if issues else ""
        tasks = sum(part.tasks for part in path.parts)
        runs = {kind: sum(part.tasks for part in path.parts if part.kind == kind) for kind in path.by_kind}
        rows = [
            (kind, str(runs[kind]), seconds_text(seconds), self._share(seconds))
            for kind, seconds in path.by_kind.items()
        ]
        lines = [
            f"What bounds it is the critical path: {count(tasks, 'task')}, each starting when the one before "
            f"ends; {self._share(self.step_time - moves - issues)} computing, {self._share(moves)} "
            f"communicating{launching}.",
            *table(("on the critical path", "tasks", "time", "share"), rows[:_MOST_KINDS]),
        ]
        rest = sum(list(path.by_kind.values())[_MOST_KINDS:])
        return [*lines, f"... and {len(rows) - _MOST_KINDS} more, {self._share(rest)}"] if rest else lines

    def _stages(self) -> list[str]:
        on_path = self.critical_path.by_stage
        rows = [
            (
                str(load.stage),
                str(load.devices),
                self._share(on_path.get(load.stage, 0.0)),
                *map(self._share, (load.busy, load.exposed_communication, load.bubble)),
            )
            for load in self.stages
        ]
        mean = map(self._share, (self.busy, self.exposed_communication, self.bubble))
        rows = [*rows[:_MOST_STAGES], ("all", str(self.devices), self._share(self.step_time), *mean)]
        lines = table(("stage", "devices", "critical path", "busy", "exposed", "bubble"), rows)
        if len(self.stages) > _MOST_STAGES:
            lines.append(f"(the first {_MOST_STAGES} of {len(self.stages)} stages)")
        if len(self.stages) > 1:
            lines.append(
                f"Stage {self.most_loaded.stage} computes longest: {seconds_text(self.most_loaded.busy)}, "
                f"{self.imbalance:.1%} more than the mean of the stages."
            )
        return lines

    def _what_ifs(self) -> list[str]:
        if not self.what_ifs:
            return ["No what-if was simulated."]
        rows = [
            (what.change, seconds_text(what.step_time), seconds_text(what.gain), self._share(what.gain))
            for what in self.what_ifs
        ]
        most = self._share(self.what_ifs[0].gain)
        best = [what.change for what in self.what_ifs if self._share(what.gain) == most]
        others = self.what_ifs[len(best) :]
        each = "" if len(best) == 1 else ", each"
        last = f"{best[0][:1].upper()}{', or '.join(best)[1:]} would gain most{each}, {most}"
        if others:
            last += f"; nothing else in this table would gain more than {self._share(others[0].gain)}"
        return [*table(("what if (each simulated)", "step", "gain", "share"), rows), f"{last}."]
