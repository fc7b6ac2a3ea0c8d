"""When a search ends: its time, and how near is near enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from threading import Event
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Clock:
    """When to stop, and how near is near enough; all times are multiples of ``step``, unless it is 0."""

    deadline: float
    tolerance: float
    step: float
    stopped: Event = field(default_factory=Event)

    @property
    def over(self) -> bool:
        """Whether the time is up, or the search was stopped."""
        return self.stopped.is_set() or perf_counter() >= self.deadline

    def margin(self, upper: float) -> float:
        """Return by how much a schedule must be better than one that takes ``upper`` to be looked for."""
        return max(self.tolerance * upper, self.step * (1 - 1e-6))

    def rounded(self, bound: float) -> float:
        """Return a lower bound, raised to a multiple of the step."""
        return math.ceil(bound / self.step - 5e-7) * self.step if self.step else bound

    def close(self, lower: float, upper: float) -> bool:
        """Return whether these bounds prove a schedule."""
        return upper < math.inf and upper - lower <= self.tolerance * upper + 1e-12 * upper
