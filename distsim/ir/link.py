"""A link: how fast bytes go from one place to another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distsim.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Link:
    """What one device can send to another: bytes/s one way, and seconds before the first byte arrives.

    ``efficiency``, in (0, 1], is the achieved share of ``bandwidth``; see :attr:`achieved`.
    """

    bandwidth: float
    latency: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise TopologyError(f"a link's bandwidth={self.bandwidth} must be positive and finite (bytes/s)")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise TopologyError(f"a link's latency={self.latency} must be finite and not negative (seconds)")
        if not 0 < self.efficiency <= 1:
            raise TopologyError(f"a link's efficiency={self.efficiency} must lie in (0, 1]")

    @property
    def achieved(self) -> float:
        """The bytes/s that large messages reach."""
        return self.bandwidth * self.efficiency
