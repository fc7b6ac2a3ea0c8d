"""What a simulated step comes to, in the figures by which steps are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distsim.simulation import Simulation
from distsim.simulation.calls import device_parts
from distsim.simulation.memory.peak import fullest_device

DEVICE = "device"
"""What the parts of a step are taken from, where it is not its critical path."""


@dataclass(frozen=True)
class StepFigures:
    """A step on ``devices`` devices, those that take part.

    ``seconds`` from a step to the next, a measured one to be expected from ``low`` to ``high`` (0: not
    known); ``rate``: tokens, or ``unit``, of a second and a device; ``mfu`` a share (0: of no products).
    ``peak``: bytes on the device that has the least left, of ``usable`` (infinite: no limit). ``busy``,
    ``exposed`` and ``bubble``: seconds of the mean device, which sum to a single step
    (:class:`distsim.simulation.Shares`), as do ``parts``. ``cluster`` and ``plan``: where they are known.
    """

    name: str
    devices: int
    seconds: float
    low: float
    high: float
    rate: float
    unit: str
    mfu: float
    peak: int
    usable: float
    fits: bool
    busy: float
    exposed: float
    bubble: float
    parts: Mapping[str, float] = field(repr=False)
    cluster: str = ""
    plan: str = ""

    @staticmethod
    def of(
        name: str, simulation: Simulation, counted: tuple[float, str], flops: float, by: str = DEVICE
    ) -> StepFigures:
        """Return the figures of a simulation.

        ``counted``: the tokens, or what else there is, of a step, and what they are called; ``flops`` those
        of the model itself (:func:`distsim.interpret.count_model_flops`); ``by``: what the parts are, those
        of the mean device (:func:`device_parts`), or of the critical path (:meth:`Simulation.breakdown`).
        """
        seconds, interval = simulation.step_period, simulation.interval()
        devices = len(simulation.timestamps)
        fullest = fullest_device(simulation.peak_memory)
        step = simulation.step
        groups = [(simulation.shares(own[0]), len(own) / devices) for own in simulation.classes.members]
        return StepFigures(
            name,
            devices,
            seconds,
            interval.low if interval else 0.0,
            interval.high if interval else 0.0,
            counted[0] / seconds / devices if seconds else 0.0,
            counted[1],
            simulation.peak_rate.share(flops, seconds),
            simulation.memory[fullest].peak if fullest else 0,
            fullest.usable if fullest else math.inf,
            simulation.fits,
            sum(shares.busy * part for shares, part in groups),
            sum(shares.exposed_communication * part for shares, part in groups),
            sum(shares.bubble * part for shares, part in groups),
            device_parts(simulation) if by == DEVICE else simulation.breakdown(by),
            cluster=step.cluster if step else "",
            plan=step.plan if step else "",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return them as what JSON has, by the names that simulations and searches have: None where there is
        no limit, or nothing is known."""
        return {
            "name": self.name,
            "cluster": self.cluster or None,
            "plan": self.plan or None,
            "devices": self.devices,
            "step_s": self.seconds,
            "low_s": self.low or None,
            "high_s": self.high or None,
            f"{self.unit}_per_s_per_device": self.rate,
            "mfu": self.mfu,
            "fits": self.fits,
            "peak_bytes": self.peak,
            "usable_bytes": None if self.usable == math.inf else self.usable,
            "busy_s": self.busy,
            "exposed_s": self.exposed,
            "bubble_s": self.bubble,
            "parts_s": dict(self.parts),
        }
