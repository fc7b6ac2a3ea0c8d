"""What a whole training takes on a cluster: hours, dollars and energy of its tokens, by the step of a plan.

Energy: all devices at the power that they may draw (``device.power``, or its limit) and their hosts at
``device.host_power``, all the time, times the PUE of the building. An upper bound of what these draw;
switches, storage and what was tried before are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.errors import PlanError
from distsim.hardware.presets import Figure
from distsim.hardware.units import HOUR
from distsim.plan_search.training.goodput import Goodput, Reliability
from distsim.plan_search.trial import PlanTrial
from distsim.simulation.trained_step import SearchedStep

PUE = 1.1
"""What a building draws of what its computers do: as the authors of LLaMA took it (Touvron et al. 2023,
section 6); the mean of the industry is 1.56 (Uptime Institute, survey of 2024)."""


@dataclass(frozen=True)
class DeviceRates:
    """Dollars of a device for an hour, and the watts of a device and of its share of the host.

    None where they are not known. ``price_source`` says whose price it is. Where there are several ``kinds``
    of devices they are means over all of them, None where they are not known of each.
    """

    price: float | None = None
    price_source: str = ""
    watts: float | None = None
    host_watts: float | None = None
    kinds: int = 1

    @staticmethod
    def mean(parts: Sequence[tuple[int, DeviceRates]]) -> DeviceRates:
        """Return the means over kinds of devices, so many of each.

        >>> DeviceRates.mean([(3, DeviceRates(watts=400.0)), (1, DeviceRates(2.0, watts=800.0))])
        DeviceRates(price=None, price_source='', watts=500.0, host_watts=None, kinds=2)
        """
        every = [own for _, own in parts]
        price = _mean([(count, own.price) for count, own in parts])
        sources = dict.fromkeys(own.price_source for own in every)
        return DeviceRates(
            price,
            "" if price is None else " and ".join(sources),
            _mean([(count, own.watts) for count, own in parts]),
            _mean([(count, own.host_watts) for count, own in parts]),
            len(dict.fromkeys(every)),
        )

    @staticmethod
    def of(figures: Sequence[Figure], price: float | None = None) -> DeviceRates:
        """Return those of a cluster's figures; ``price`` goes before the cluster's own."""
        known = {figure.name: figure for figure in figures}
        own = known.get("device.price")
        power, limit, host = (
            known[name].si_value if name in known else None
            for name in ("device.power", "device.power_limit", "device.host_power")
        )
        source = "given" if price is not None else own.source if own else ""
        value = price if price is not None else own.si_value if own else None
        return DeviceRates(value, source, power if limit is None else limit, host)


def _mean(parts: Sequence[tuple[int, float | None]]) -> float | None:
    known = [(count, value) for count, value in parts if value is not None]
    if len(known) < len(parts):
        return None
    return sum(count * value for count, value in known) / sum(count for count, _ in known)


@dataclass(frozen=True)
class Training:
    """What is to be trained: so many tokens (of a model without any, samples), if it is said how many."""

    tokens: float | None = None
    pue: float = PUE
    reliability: Reliability = field(default_factory=Reliability)


@dataclass(frozen=True)
class TrainingCosts:
    """What is to be trained, at which rates of the devices; ``shown``: whether tables of plans have it."""

    training: Training = field(default_factory=Training)
    rates: DeviceRates = field(default_factory=DeviceRates)
    shown: bool = False

    def by(self, step: SearchedStep, trial: PlanTrial) -> TrainingEstimate:
        """Return what it takes by a plan that was simulated, of a step on a topology."""
        return TrainingEstimate(self.training, self.rates, step, trial)


@dataclass(frozen=True, eq=False)
class TrainingEstimate:
    """What a training takes on the cluster of a search, by a plan."""

    training: Training
    rates: DeviceRates
    step: SearchedStep
    trial: PlanTrial

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.step.topology.devices)

    @property
    def goodput(self) -> Goodput:
        """What failures and checkpoints cost."""
        return self.training.reliability.goodput(self.devices, self.step.state_bytes)

    @property
    def token_seconds(self) -> float:
        """Seconds of a token, or sample, with what failures and checkpoints cost."""
        share = self.goodput.share
        return self.trial.seconds / self.step.tokens / share if share else float("inf")

    @property
    def token_dollars(self) -> float | None:
        """Dollars of a token; None without a price."""
        price = self.rates.price
        return None if price is None else self.token_seconds / HOUR * self.devices * price

    @property
    def token_kwh(self) -> float | None:
        """Energy of a token in kWh; None where the power of the devices is not known."""
        return None if self.kilowatts is None else self.token_seconds / HOUR * self.kilowatts

    @property
    def kilowatts(self) -> float | None:
        """What devices, hosts and building draw at most; without hosts where they are not known."""
        if self.rates.watts is None:
            return None
        return (self.rates.watts + (self.rates.host_watts or 0.0)) * self.devices * self.training.pue / 1e3

    @property
    def step_kwh(self) -> float | None:
        """Energy of a step in kWh, in which nothing fails."""
        return None if self.kilowatts is None else self.trial.seconds / HOUR * self.kilowatts

    @property
    def hours(self) -> float | None:
        """Hours of all tokens, with what failures and checkpoints cost."""
        tokens = self.training.tokens
        return None if tokens is None else tokens * self.token_seconds / HOUR

    @property
    def hours_interval(self) -> tuple[float, float] | None:
        """Between which hours all tokens take with 90 %, as far as the step is not known better; None where
        either is not known."""
        hours, trial = self.hours, self.trial
        if hours is None or not trial.high:
            return None
        return hours * trial.low / trial.seconds, hours * trial.high / trial.seconds

    def of_all(self, token: float | None) -> float | None:
        """Return what all tokens take of which one takes ``token``; None where either is not known."""
        tokens = self.training.tokens
        return None if tokens is None or token is None else tokens * token

    def of_training(self) -> dict[str, float | None]:
        """Return :data:`OF_TRAINING`, None for what is not known."""
        dollars = self.token_dollars
        return {
            "hours": self.hours,
            "device_hours": None if self.hours is None else self.hours * self.devices,
            "dollars": self.of_all(dollars),
            "tokens_per_dollar": 1 / dollars if dollars else None,
            "kwh": self.of_all(self.token_kwh),
            "step_kwh": self.step_kwh,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return what is known as what JSON has; seconds, dollars, kWh, bytes."""
        goodput = self.goodput
        fails = goodput.share < 1
        low, high = self.hours_interval or (None, None)
        found = {
            "tokens": self.training.tokens,
            "price": self.rates.price,
            "price_source": self.rates.price_source or None,
            **self.of_training(),
            "hours_low": low,
            "hours_high": high,
            "goodput": goodput.share,
            "checkpoint_bytes": goodput.checkpoint,
            "checkpoint_s": goodput.write,
            "between_failures_s": goodput.between if fails else None,
            "interval_young_s": goodput.young if fails else None,
            "interval_daly_s": goodput.interval if fails else None,
        }
        return {name: value for name, value in found.items() if value is not None}


OF_TRAINING = ("hours", "device_hours", "dollars", "tokens_per_dollar", "kwh", "step_kwh")
"""What rows of plans have where it was asked what a training takes; a step's energy, the rest of all tokens
but for tokens per dollar."""


@dataclass(frozen=True)
class Objective:
    """What is asked for: by what the plans of a cluster are ranked, and by what of the best one clusters are.

    On a given cluster a dollar and a kWh are so many seconds. ``cluster`` is less for better ones, and None
    where the rates of the cluster lack ``rate``.
    """

    plan: str
    cluster: Callable[[TrainingEstimate], float | None]
    rate: str = ""

    def check(self, name: str, rates: DeviceRates) -> None:
        """Raise :class:`PlanError` where a cluster of that name does not know by what it is ranked."""
        if self.rate and getattr(rates, self.rate) is None:
            raise PlanError(f"{name} does not say {_WAYS[self.rate]}")


_WAYS = {
    "price": "its price: give --price, as 2.5",
    "watts": "what each of its GPUs draws: give --set device.power=700W, or power in [device] and [[nodes]]",
}
_DOLLARS = Objective("time", lambda estimate: estimate.token_dollars, "price")

OBJECTIVES = {
    "time": Objective("time", lambda estimate: estimate.token_seconds),
    "memory": Objective("memory", lambda estimate: estimate.trial.peak),
    "cost": _DOLLARS,
    "tokens-per-dollar": _DOLLARS,
    "energy": Objective("time", lambda estimate: estimate.token_kwh, "watts"),
}
"""By what plans and clusters may be ranked."""
