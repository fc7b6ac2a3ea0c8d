"""What may be said of a search: the options of ``distsim search`` and of :func:`distsim.search`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

from distsim.errors import OptionError, PlanError
from distsim.hardware.cluster_table import Settings
from distsim.plan import Plan
from distsim.plan.fields import PlanFields
from distsim.plan_search.training.estimate import OBJECTIVES, PUE, Training
from distsim.plan_search.training.goodput import FAILURES, RESTART, STORAGE, Reliability
from distsim.plan_search.workers import RemoteWorkers
from distsim.study.clusters import Cluster
from distsim.study.options import TrainingKeywords
from distsim.suggestions import choices_for

Price = float | str | Sequence[float]
"""Dollars of a GPU for an hour: of all clusters, or one for each in their order, maybe as a text."""


@dataclass(frozen=True)
class SearchOptions:
    """On which clusters plans are searched, which, how, and what is to be trained.

    ``clusters``, or ``gpus`` of each; ``set`` changes figures of all. ``plan`` are sets of values of fields;
    ``against`` a plan of one's own. ``tokens`` to train on, also as ``"300B"``, at a ``price`` (by default
    the preset's); ``pue``, ``failures`` of a GPU-hour, ``storage`` in GB/s that a GPU writes, ``restart`` in
    minutes.

    Raises :class:`PlanError` for a number that makes no sense and for options that are without effect, and
    :class:`OptionError` for an unknown objective.
    """

    clusters: Sequence[Cluster]
    plan: str = ""
    set: Sequence[str] = ()
    gpus: int | str | Sequence[int] | None = None
    max_tp: int | None = None
    against: str | Plan | None = None
    objective: str = "time"
    top: int = 10
    workers: int | RemoteWorkers | None = 1
    dask: str | None = None
    journal: str | os.PathLike[str] | None = None
    resume: bool = False
    tokens: float | str | None = None
    price: Price | None = None
    pue: float = PUE
    failures: float = FAILURES
    storage: float = STORAGE / 1e9
    restart: float = RESTART / 60

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str):
            object.__setattr__(self, "tokens", amount(self.tokens, "tokens"))
        for name in ("top", "workers", "max_tp"):
            given = getattr(self, name)
            if isinstance(given, int) and given < 1:
                raise PlanError(f"--{name.replace('_', '-')} {given}: at least 1")
        for name in ("tokens", "storage"):
            _check_positive(name, getattr(self, name))
        for name, least in (("pue", 1.0), ("failures", 0.0), ("restart", 0.0)):
            given = getattr(self, name)
            if not least <= given < math.inf:
                raise PlanError(f"--{name} {given:g}: a number of {least:g} or more")
        self._check_costs()
        if self.objective not in OBJECTIVES:
            raise OptionError(
                f"objective {self.objective!r:.40} is not one of {choices_for(self.objective, OBJECTIVES)}"
            )
        if self.dask is not None and self.workers not in (None, 1):
            raise PlanError(
                "--workers are processes of this machine, --dask those of a cluster: give one of them"
            )
        if self.resume and self.journal is None:
            raise PlanError("--resume goes on with a --journal: name its file")
        if not self.clusters:
            raise PlanError("name a cluster to search on")
        _ = self.prices

    def _check_costs(self) -> None:
        """Check that what a training takes is asked for where it is said how it is counted."""
        usual = {own.name: own.default for own in fields(self)}
        told = [name for name in _OF_COSTS if getattr(self, name) != usual[name]]
        if told and not self.asks_costs:
            raise PlanError(
                f"--{told[0]} {getattr(self, told[0]):g} has no effect where no cost is asked for: "
                "add --tokens, --price or an --objective of costs"
            )

    @property
    def prices(self) -> list[float | None]:
        """The price of each cluster, None for those of which it is not given."""
        distinct, price = len(self.clusters), self.price
        if price is None:
            return [None] * distinct
        parts: Sequence[float | str] = [price] if isinstance(price, int | float) else price
        if isinstance(price, str):
            parts = price.split(",")
        given: list[float | None] = []
        for part in parts:
            try:
                given.append(float(part))
            except (TypeError, ValueError):
                raise PlanError(f"--price {part!r:.40}: a number of dollars, as 2.5") from None
            _check_positive("price", given[-1])
        if len(given) not in (1, distinct):
            raise PlanError(
                f"--price {price!s:.60}: {len(given)} prices for {distinct} clusters; give one for all, or "
                "one each"
            )
        return given * distinct if len(given) == 1 else given

    @property
    def training(self) -> Training:
        """What is to be trained, and how it fails."""
        reliability = Reliability(self.failures, self.storage * 1e9, self.restart * 60)
        tokens = None if self.tokens is None else float(self.tokens)
        return Training(tokens, self.pue, reliability)

    @property
    def asks_costs(self) -> bool:
        """Whether it is asked what a training takes."""
        return bool(self.tokens or self.price or self.objective not in ("time", "memory"))


_OF_COSTS = ("pue", "failures", "storage", "restart")

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def amount(text: str, name: str) -> float:
    """Return a number as people write large ones; raises :class:`PlanError` for what is none.

    >>> amount("300B", "tokens"), amount("1.5 T", "tokens"), amount("1e12", "tokens")
    (300000000000.0, 1500000000000.0, 1000000000000.0)
    """
    number, letter = text.strip(), ""
    if number[-1:].lower() in _SCALES:
        number, letter = number[:-1], number[-1:].lower()
    try:
        return float(number) * _SCALES[letter]
    except ValueError:
        raise PlanError(f"--{name} {text!r:.40}: a number, as 1e12, 300B or 1.5T") from None


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise PlanError(f"--{name} {value:g}: a number more than 0")


class SearchPlaces(TypedDict, total=False):
    """What a search is given by place, where the types say all of it."""

    batch: int | None
    seq: int | None
    objective: str
    top: int
    gpus: int | str | Sequence[int] | None


class SearchKeywords(TrainingKeywords, total=False):
    """How a model is trained, and those of :class:`SearchOptions` that a call gives by name."""

    set: Settings
    max_tp: int | None
    against: str | PlanFields | Plan | None
    workers: int | RemoteWorkers | None
    dask: str | None
    journal: str | os.PathLike[str] | None
    resume: bool
    tokens: float | str | None
    price: Price | None
    pue: float
    failures: float
    storage: float
    restart: float
