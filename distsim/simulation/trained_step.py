"""What a simulated step is a step of: how much it trains on, what the model itself computes for that, and the
peak that utilisation (MFU, HFU) is a share of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distsim.cost.efficiency import matrix_type
from distsim.ir import Device, Function, Op, Topology, all_ops
from distsim.ops import signature_of, work
from distsim.plan import Plan
from distsim.schedule.refusals import count
from distsim.simulation.tasks.rank_classes import communicates


@dataclass(frozen=True)
class TrainedStep:
    """A step over so many ``samples`` of ``sequence`` tokens each (0: of none).

    ``flops`` are those of the model itself (:func:`distsim.interpret.count_model_flops`), MFU's numerator,
    and ``dtype`` the element type in which most of its products are, whose peak MFU is a share of (None: not
    said). ``trains`` is False for a forward pass alone.
    """

    name: str
    samples: int
    sequence: int
    flops: float
    trains: bool = True
    dtype: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step, or its samples where it has none."""
        return self.samples * (self.sequence or 1)

    @property
    def unit(self) -> str:
        """What of a step is counted."""
        return "tokens" if self.sequence else "samples"


def model_type(function: Function) -> str | None:
    """Return the element type in which most products of a model are; None where there are none."""
    return matrix_type((op, 1) for op in all_ops(function))


@dataclass(frozen=True)
class PlannedStep(TrainedStep):
    """One on a cluster under a plan, both as text; ``notes`` say what was assumed of it and its layout."""

    cluster: str = ""
    plan: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} on {self.cluster}, {self.plan}, batch {self.samples}"


@dataclass(frozen=True)
class SearchedStep(TrainedStep):
    """What all plans of a search do, on a topology.

    ``peak``: the FLOP/s of a device in the type of most FLOPs, the mean where these differ; 0 where there are
    none. ``state_bytes`` are
    those of parameters and optimizer state, of which a checkpoint has one copy. ``label`` and ``cluster`` are
    what people call the model and the topology, where that is known. ``flops_of`` a plan are the FLOPs of the
    model as it divides it, where plans differ in that: a stack may pad the vocabulary for ranks of tp.
    ``written`` is the text of a plan for people, who may ask for it by that.
    """

    peak: float = 0.0
    state_bytes: int = 0
    topology: Topology = field(default_factory=Topology, repr=False)
    label: str = ""
    cluster: str = ""
    flops_of: Callable[[Plan], float] | None = field(default=None, repr=False, compare=False)
    written: Callable[[Plan], str] = field(default=str, repr=False, compare=False)

    def by(self, plan: Plan) -> PlannedStep:
        """Return it under a plan."""
        about = self.samples, self.sequence, self.flops_by(plan), self.trains, self.dtype
        cluster = self.cluster or str(self.topology)
        return PlannedStep(self.label or self.name, *about, cluster, self.written(plan))

    def flops_by(self, plan: Plan | None) -> float:
        """Return the FLOPs of the model under a plan."""
        return self.flops if plan is None or self.flops_of is None else self.flops_of(plan)

    def mfu(self, seconds: float, plan: Plan | None = None) -> float:
        """Return the share of the peak of all devices that the model's own FLOPs reach in so many seconds."""
        peak = self.peak * len(self.topology.devices)
        return self.flops_by(plan) / (seconds * peak) if peak and seconds else 0.0

    def rate(self, seconds: float) -> float:
        """Return the tokens, or samples where there are none, of a second and a device."""
        return self.tokens / seconds / len(self.topology.devices) if seconds else 0.0


@dataclass(frozen=True)
class PeakRate:
    """FLOP/s of each of some devices, in the element type of most products; None where there are none."""

    dtype: str | None
    each: tuple[float, ...]

    @staticmethod
    def of(dtype: str | None, devices: Sequence[Device]) -> PeakRate:
        """Return that of devices for products in an element type; of slow ones that of their kind."""
        each = [0.0 if dtype is None else device.peak(dtype) * device.slow_factor for device in devices]
        return PeakRate(dtype, tuple(each))

    @property
    def total(self) -> float:
        """FLOP/s of all devices together."""
        return sum(self.each)

    def share(self, flops: float, seconds: float) -> float:
        """Return the share of it that so many FLOPs in a time are; 0 where there are none."""
        most = self.total * seconds
        return flops / most if most else 0.0

    def __str__(self) -> str:
        """Of a device where all have the same, else of all together.

        >>> print(PeakRate("bfloat16", (989.4e12,) * 2))
        989.4 TFLOP/s each (bfloat16, 2 devices)
        """
        if self.dtype is None:
            return "no products' peak"
        one = len(set(self.each)) == 1
        figure = f"{(self.each[0] if one else self.total) / 1e12:.4g} TFLOP/s"
        way = " each" if one and len(self.each) > 1 else ""
        return f"{figure}{way} ({self.dtype}, {count(len(self.each), 'device')})"


def op_flops(op: Op) -> float:
    """Return the FLOPs that a device executes for an op: none to communicate."""
    demand = None if communicates(op) else work(signature_of(op))
    return 0.0 if demand is None else demand.flops
