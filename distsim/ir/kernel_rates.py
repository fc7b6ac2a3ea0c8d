"""What kernels reach on a device in a step, and what its host takes to issue them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distsim.errors import TopologyError

KINDS_OF_WORK = (
    *("linear", "linear_float8", "batched", "grouped"),
    *("attention", "attention_grad", "memory", "embedding"),
)
"""The kinds of work of which a device may say what share of its peak kernels reach
(:mod:`distsim.cost.efficiency`)."""

KINDS_OF_UNCERTAINTY = (*KINDS_OF_WORK, "host", "host_compiled", "host_eager_waiting")
"""What a device may say of how well its figures are known: the kinds of work, and the host's launches, those
of compiled kernels, and of nanotron's, apart."""

WAYS_TO_LAUNCH = ("eager", "fused", "compiled", "eager_waiting")
"""The ways to run kernels of which a device may say what its host takes to issue one."""

GRAPHS = ("layers", "step")
"""What a host launches at once, as a CUDA graph that it captured before: each layer, forward and backward;
all passes of a step."""

_LIKE = {"eager_waiting": "eager"}
"""As which other way a host issues kernels where the device does not say."""


ATTENTION_KERNELS = ("flash1", "triton", "flash2", "flash3", "cudnn")
"""The kernels of attention of which a device may say how fast they are: FlashAttention of 2022, its form in
Triton of that time, FlashAttention-2 and 3, and cuDNN's."""


@dataclass(frozen=True, slots=True)
class KernelRates:
    """What kernels of a kind reach on a device, as measured: nothing is known unless it is given.

    ``shares`` are, by :data:`KINDS_OF_WORK`, what kernels of large shapes reach in a training step of what
    the device reaches at best: of ``peak * flops_efficiency``, or of ``dram_bandwidth * bytes_efficiency``
    for what is bound by memory. ``launches`` are the seconds in which the host issues a kernel, by
    :data:`WAYS_TO_LAUNCH`, and ``tensor`` those for each further tensor of a kernel that works on many.
    ``slowdown`` is the share of the seconds of a collective by which computation beside it takes longer.
    ``attentions`` are how fast :data:`ATTENTION_KERNELS` are, 1 being what ``shares`` say of attention.
    ``processors`` are the multiprocessors among which a product divides its tiles, and ``clock`` the cycles a
    second of these, beside what is bound by memory; 0 where that is not known. ``query_block`` are the
    queries of a head that a block of a forward kernel of attention takes.
    ``spread`` is how far measured steps are taken to be from predicted ones if all figures are right: the
    standard deviation of the logarithm; 0 where that is not known. ``uncertainties`` are, by
    :data:`KINDS_OF_UNCERTAINTY`, how far the seconds of a kind of work may be from what these figures say:
    standard deviations of the logarithm, beside ``spread``.

    Raises :class:`TopologyError` for a share outside of (0, 1], and a time, spread or uncertainty that is
    negative or not finite.
    """

    shares: tuple[tuple[str, float], ...] = ()
    launches: tuple[tuple[str, float], ...] = ()
    tensor: float = 0.0
    processors: int = 0
    spread: float = 0.0
    slowdown: float = 0.0
    attentions: tuple[tuple[str, float], ...] = ()
    uncertainties: tuple[tuple[str, float], ...] = ()
    clock: float = 0.0
    query_block: int = 128

    def __post_init__(self) -> None:
        for given, known in (
            (self.shares, KINDS_OF_WORK),
            (self.launches, WAYS_TO_LAUNCH),
            (self.attentions, ATTENTION_KERNELS),
            (self.uncertainties, KINDS_OF_UNCERTAINTY),
        ):
            if unknown := [name for name, _ in given if name not in known]:
                raise TopologyError(f"rates of {unknown[0]!r:.40}: choose from {', '.join(known)}")
        for kind, share in self.shares:
            if not 0 < share <= 1:
                raise TopologyError(f"kernels.{kind}={share} must be a share of what is reached, in (0, 1]")
        for name, factor in self.attentions:
            if not 0 < factor < math.inf:
                raise TopologyError(f"attention.{name}={factor} must be positive and finite")
        for name, seconds in (*self.launches, ("tensor", self.tensor)):
            if not 0 <= seconds < math.inf:
                raise TopologyError(f"launches.{name}={seconds} must be seconds, at least 0 and finite")
        uncertain = [(f"uncertainty.{name}", value) for name, value in self.uncertainties]
        known_to = (("spread", self.spread), ("slowdown", self.slowdown), ("clock", self.clock))
        for name, value in (*known_to, *uncertain):
            if not 0 <= value < math.inf:
                raise TopologyError(f"{name}={value} must be at least 0 and finite")
        if self.processors < 0:
            raise TopologyError(f"processors={self.processors} must be at least 0")
        if self.query_block < 1:
            raise TopologyError(f"query_block={self.query_block} must be at least 1")

    def share(self, kind: str) -> float | None:
        """Return the share that kernels of a kind reach, None where that is not given."""
        return next((share for name, share in self.shares if name == kind), None)

    def launch(self, kernels: str) -> float:
        """Return the seconds of the host for a kernel that is run so, or as what is like it; else 0."""
        given = dict(self.launches)
        return given.get(kernels, given.get(_LIKE.get(kernels, ""), 0.0))

    def attention(self, kernel: str) -> float | None:
        """Return how fast a kernel of attention is, 1 being what ``shares`` say; None where not given."""
        return next((factor for name, factor in self.attentions if name == kernel), None)


NO_RATES = KernelRates()
