"""What all plans of a search do."""

from __future__ import annotations

from dataclasses import dataclass, field

from distsim.ir import Topology
from distsim.simulation.trained_step import TrainedStep


@dataclass(frozen=True)
class SearchedStep(TrainedStep):
    """What all plans of a search do, on a topology.

    ``peak``: the FLOP/s of a device in the type of most FLOPs; 0 where there are none. ``state_bytes`` are
    those of parameters and optimizer state, of which a checkpoint has one copy.
    """

    peak: float = 0.0
    state_bytes: int = 0
    topology: Topology = field(default_factory=Topology, repr=False)

    def mfu(self, seconds: float) -> float:
        """Return the share of the peak of all devices that the model's own FLOPs reach in so many seconds."""
        peak = self.peak * len(self.topology.devices)
        return self.flops / (seconds * peak) if peak and seconds else 0.0

    def rate(self, seconds: float) -> float:
        """Return the tokens, or samples where there are none, of a second and a device."""
        return self.tokens / seconds / len(self.topology.devices) if seconds else 0.0
