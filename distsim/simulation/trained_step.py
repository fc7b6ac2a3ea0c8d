"""What a simulated step is a step of: how much it trains on, and what the model itself computes for that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainedStep:
    """A step over so many ``samples`` of ``sequence`` tokens each (0: of none).

    ``flops`` are those of the model itself (:func:`distsim.interpret.count_model_flops`), MFU's numerator;
    ``trains`` is False for a forward pass alone.
    """

    name: str
    samples: int
    sequence: int
    flops: float
    trains: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a step, or its samples where it has none."""
        return self.samples * (self.sequence or 1)

    @property
    def unit(self) -> str:
        """What of a step is counted."""
        return "tokens" if self.sequence else "samples"


@dataclass(frozen=True)
class PlannedStep(TrainedStep):
    """One on a cluster under a plan, both as text; ``notes`` say what was assumed of it and its layout."""

    cluster: str = ""
    plan: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} on {self.cluster}, {self.plan}, batch {self.samples}"
