"""How many tokens each expert of a mixture serves: drawn from a seeded distribution, never equal by luck.

A mixture routes each token of a sequence to ``top_k`` of its ``experts``. Which, is known when it runs; how
many it has to be built for, is known before: the shapes of the experts' products. :func:`draw_routing` draws
the popularity of the experts from a symmetric Dirichlet distribution, as measured loads are skewed (Switch
Transformers, Fedus et al. 2022, section 2.2; Tutel, Hwang et al. 2023, figure 1). With a capacity each expert
has ``capacity * tokens * top_k / experts`` rows, whoever chooses it (GShard, Lepikhin et al. 2021); without
padding to it, it is only what an expert serves at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distsim.errors import PlanError
from distsim.models.sizes import check_sizes


@dataclass(frozen=True)
class Routing:
    """The load of a mixture for a sequence, or a group of its tokens.

    Per expert: how many tokens choose it and how many it serves. ``padded``: that many whoever chooses it, so
    that no rank has to be told how many rows others have for its experts.

    >>> routing = Routing((6, 2), (5, 3))
    >>> routing.dropped, routing.rows
    (1, 8)
    """

    demand: tuple[int, ...]
    slots: tuple[int, ...]
    padded: bool = field(default=False, repr=False)

    @property
    def dropped(self) -> int:
        """How many of the choices are not served."""
        return sum(max(0, want - have) for want, have in zip(self.demand, self.slots, strict=True))

    @property
    def padding(self) -> int:
        """How many of the slots nobody takes."""
        return sum(max(0, have - want) for want, have in zip(self.demand, self.slots, strict=True))

    @property
    def rows(self) -> int:
        """How many rows the experts work on together, those of padding too."""
        return sum(self.slots)


def draw_routing(
    experts: int,
    top_k: int,
    tokens: int,
    concentration: float | None = None,
    capacity: float | None = None,
    seed: int = 0,
    pad: bool | None = None,
) -> Routing:
    """Draw the load of each expert for ``tokens`` tokens of which each chooses ``top_k`` experts.

    ``concentration``: that of the Dirichlet distribution of the experts' popularity; 100 is nearly even,
    below 1 a few experts are chosen by most; None is even. No expert is chosen by more than all tokens: what
    is beyond goes to the others. ``capacity``: the share of its even load that an expert serves at most,
    None being all that choose it (dropless). ``pad``: whether experts have that many slots even where fewer
    tokens choose them, as in GShard, Switch Transformers and DeepSpeed, which is the default; False is
    Megatron-LM's capacity factor without ``--moe-pad-expert-input-to-capacity``. Raises :class:`PlanError`
    for figures that are none, and for ``pad`` without a capacity.

    >>> draw_routing(4, 2, 100)
    Routing(demand=(50, 50, 50, 50), slots=(50, 50, 50, 50))
    >>> draw_routing(4, 2, 100, concentration=1.0, capacity=1.25, seed=3)
    Routing(demand=(6, 20, 74, 100), slots=(63, 63, 63, 63))
    >>> draw_routing(4, 2, 100, concentration=1.0, capacity=1.25, seed=3, pad=False).slots
    (6, 20, 63, 63)
    """
    check_sizes(experts=experts, top_k=top_k, tokens=tokens)
    if top_k > experts:
        raise PlanError(f"top_k={top_k} of only {experts} experts; use top_k of at most {experts}")
    for name, figure in (("concentration", concentration), ("capacity", capacity)):
        if figure is not None and not (math.isfinite(figure) and figure > 0):
            raise PlanError(f"{name}={figure} must be a positive number")
    if type(seed) is not int or seed < 0:
        raise PlanError(f"seed={seed!r} must be a whole number of at least 0")
    _check_pad(capacity, pad)
    popularity = np.full(experts, 1.0 / experts)
    if concentration is not None:
        popularity = np.random.default_rng(seed).dirichlet(np.full(experts, concentration))
    demand = _whole(_shares(popularity, tokens, tokens * top_k), tokens, tokens * top_k)
    if capacity is None:
        return Routing(demand, demand)
    most = min(tokens, math.ceil(capacity * tokens * top_k / experts))
    if pad is False:
        return Routing(demand, tuple(min(want, most) for want in demand))
    return Routing(demand, (most,) * experts, padded=True)


def _check_pad(capacity: float | None, pad: bool | None) -> None:
    if pad is not None and capacity is None:
        raise PlanError(f"pad={pad} is about rows up to a capacity, and none is given; give capacity=1.25")


@dataclass(frozen=True)
class Loads:
    """The loads of the layers of experts: ``routings``, one a layer, or drawn ones.

    The load of the i-th layer of experts is drawn with ``seed + i``, ``concentration``, ``capacity`` and
    ``pad`` (:func:`draw_routing`). Raises :class:`PlanError` for routings beside figures to draw others by.
    """

    concentration: float | None = None
    capacity: float | None = None
    seed: int = 0
    routings: Sequence[Routing] | None = None
    pad: bool | None = None

    def __post_init__(self) -> None:
        _check_pad(self.capacity, self.pad)
        drawn = {"concentration": self.concentration, "capacity": self.capacity}
        beside = [f"{name}={figure}" for name, figure in drawn.items() if figure is not None]
        if self.routings is not None and beside:
            raise PlanError(f"routings are given, and {beside[0]} to draw them by; give one of the two")

    def of_layers(self, experts: int, top_k: int, layers: int, seq: int) -> tuple[Routing, ...]:
        """Return the load of each layer. Raises :class:`PlanError` when as many are not given."""
        if self.routings is None:
            chances = self.concentration, self.capacity
            seeds = range(self.seed, self.seed + layers) if self.concentration else [self.seed] * layers
            made = {seed: draw_routing(experts, top_k, seq, *chances, seed, self.pad) for seed in set(seeds)}
            return tuple(made[seed] for seed in seeds)
        if len(self.routings) != layers:
            raise PlanError(f"{len(self.routings)} routings for {layers} layers of experts; give one a layer")
        return tuple(self.routings)


def describe_loads(routings: Sequence[Routing], groups: int = 1) -> str:
    """Return what was assumed of the loads of layers of experts, routed in so many groups a sequence.

    >>> describe_loads([Routing((6, 2), (5, 2))], 2)
    'experts: the busiest serves 1.43 times the mean, 12.5% of the choices are dropped; 2 groups a sequence'
    >>> describe_loads([Routing((6, 2), (5, 5))])
    'experts: all serve as many rows, 30.0% of the rows are padding, 12.5% of the choices are dropped'
    """
    busiest = max([max(load.slots) * len(load.slots) / max(load.rows, 1) for load in routings])
    dropped = sum([load.dropped for load in routings]) / sum([sum(load.demand) for load in routings])
    rows = sum([load.rows for load in routings])
    padding = sum([load.padding for load in routings]) / max(rows, 1)
    load = "all serve as many rows" if busiest == 1 else f"the busiest serves {busiest:.2f} times the mean"
    load += f", {padding:.1%} of the rows are padding" if padding else ""
    lost = f"{dropped:.1%} of the choices are dropped" if dropped else "none is dropped"
    routed = f"; {groups} groups a sequence" if groups > 1 else ""
    return f"experts: {load}, {lost}{routed}"


def _shares(popularity: np.ndarray, most: int, total: int) -> np.ndarray:
    """Divide ``total`` in proportion to the popularity, at most ``most`` to each."""
    weights = np.maximum(popularity, 1e-12)  # an expert may be drawn with a popularity of zero
    full = np.zeros(len(weights), bool)
    while True:
        rest = total - most * int(full.sum())
        shares = np.where(full, most, weights * (rest / max(float(weights[~full].sum()), 1e-300)))
        over = ~full & (shares > most)
        if not over.any():
            return shares
        full |= over


def _whole(shares: np.ndarray, most: int, total: int) -> tuple[int, ...]:
    """Round to whole numbers of the same sum, the largest remainders up, the first of equal ones first."""
    floors = np.floor(shares + 1e-9).astype(np.int64)
    order = np.argsort(-(shares - floors), kind="stable")
    missing = total - int(floors.sum())
    for expert in order.tolist():
        if missing and floors[expert] < most:
            floors[expert] += 1
            missing -= 1
    return tuple(floors.tolist())
