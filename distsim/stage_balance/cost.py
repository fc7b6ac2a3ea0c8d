"""What the blocks of a model cost, and what sending between stages costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral

from distsim.cost.cost_model import CostModel
from distsim.cost.demand import Group
from distsim.errors import PartitionError
from distsim.hardware.routes import among
from distsim.ir import NO_ATTRIBUTES, Mesh, Tensor
from distsim.ir.type import UInt8
from distsim.ops import Signature

Communication = Callable[[int, int, float], float]
"""(source stage, target stage, bytes) -> seconds of one transfer between neighbouring stages."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What a block (an embedding, a layer, an output head) costs the stage that holds it.

    Seconds per microbatch, on the device of one rank:

    - ``forward``, and before it, when nothing need be received, ``shared``: making a causal mask, say.
      Blocks on one stage make them once, so the most of its blocks counts. Likewise
      ``shared_backward``;
    - ``recompute``, what is computed again before ``backward``;
    - ``backward``, of which the last ``after`` come after the gradient that the block before waits for
      (weight gradients, say);
    - ``backward_input`` and ``weight``, of I and W, where a schedule runs backward in two halves: together
      they may be more, as where one kernel that makes two gradients becomes two. ``backward_input`` is the
      rest of ``backward`` if None, and of 0 says that nobody waits for a gradient of this block or of those
      after it on its stage, so that W is all of their backward;
    - ``accumulate``, adding the parameter gradients to their sums, at the very end, for every microbatch
      but the first.

    Once per step, when the last microbatch is done: ``reduce``, the gradients' collectives, then ``update``,
    the optimizer. Collectives run beside the backward of the blocks before; ``overlap`` of the update runs
    beside the block's own collectives.

    Bytes on each device: ``sent``, the output that the next block reads, per microbatch; ``returned``, its
    gradient (as many if None); ``state``: parameters, sums of gradients, optimizer state; ``saved``: what
    is kept of a microbatch from its forward to its backward; ``workspace``: the most needed beside, for as
    long as the block runs.

    Raises :class:`PartitionError` for a figure that is negative or not finite, for ``after``, or
    ``weight`` without ``backward_input``, over ``backward``, and for ``overlap`` over ``reduce`` or
    ``update``.

    >>> BlockCost("layer", forward=1.0, backward=2.0).sent
    0.0
    """

    name: str
    forward: float
    backward: float
    sent: float = 0.0
    returned: float | None = None
    state: float = 0.0
    saved: float = 0.0
    workspace: float = 0.0
    recompute: float = 0.0
    after: float = 0.0
    accumulate: float = 0.0
    shared: float = 0.0
    shared_backward: float = 0.0
    reduce: float = 0.0
    update: float = 0.0
    overlap: float = 0.0
    weight: float = 0.0
    backward_input: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            figure = getattr(self, field.name)
            if field.name in ("returned", "backward_input") and figure is None:
                continue
            if not (math.isfinite(figure) and figure >= 0):
                raise PartitionError(
                    f"block {self.name}: {field.name}={figure}; give a finite figure of at least 0"
                )
        for part, whole in _PARTS:
            if part == "weight" and self.backward_input is not None:
                continue
            if getattr(self, part) > getattr(self, whole) * (1 + 1e-9):
                raise PartitionError(
                    f"block {self.name}: {part}={getattr(self, part)} s is part of {whole}="
                    f"{getattr(self, whole)} s; give at most that"
                )

    @property
    def work(self) -> float:
        """Seconds of one microbatch, forward, recomputation and backward."""
        return self.forward + self.recompute + self.backward

    @property
    def half(self) -> float:
        """Seconds of I for one microbatch, where backward is in two halves."""
        return self.backward - self.weight if self.backward_input is None else self.backward_input

    @property
    def gradient(self) -> float:
        """Bytes of the gradient of the output."""
        return self.sent if self.returned is None else self.returned


_PARTS = (("after", "backward"), ("weight", "backward"), ("overlap", "reduce"), ("overlap", "update"))


def linear_communication(bandwidth: float, latency: float = 0.0) -> Communication:
    """Return sends that take ``latency`` seconds and the bytes over ``bandwidth``, between any two stages.

    >>> linear_communication(bandwidth=1e9, latency=5e-6)(0, 1, 1e6)
    0.001005
    """
    if not (bandwidth > 0 and math.isfinite(latency) and latency >= 0):
        raise PartitionError(
            f"bandwidth={bandwidth} bytes/s, latency={latency} s; give a positive bandwidth and a finite "
            "latency of at least 0"
        )
    return lambda source, target, nbytes: latency + nbytes / bandwidth


def free_communication(source: int, target: int, nbytes: float) -> float:
    """Sends that take no time."""
    return 0.0


def check_count(name: str, number: object, least: int = 1) -> None:
    """Raise :class:`PartitionError` unless this is a whole number of at least ``least``."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
        raise PartitionError(f"{name}={number!r}; give a whole number of at least {least}")


def check_sizes(sizes: Sequence[int], blocks: int) -> None:
    """Raise :class:`PartitionError` unless ``sizes`` are positive and sum to the number of blocks."""
    if not sizes or min(sizes) < 1 or sum(sizes) != blocks:
        raise PartitionError(
            f"a split of {blocks} blocks into sizes {tuple(sizes)}, which sum to {sum(sizes)}; give every "
            "stage at least one block, and each block to one stage"
        )


def mesh_communication(mesh: Mesh, cost_model: CostModel) -> Communication:
    """Return what a send between stages of ``mesh`` (axes pp, dp, tp) takes, on its slowest pair.

    Raises ``TopologyError``, when asked, where nothing links two devices.
    """
    pairs: dict[tuple[int, int], list[Group]] = {}
    known: dict[tuple[int, int, int], float] = {}

    def seconds(source: int, target: int, nbytes: float) -> float:
        key = (source, target, round(nbytes))
        if key not in known:
            if key[:2] not in pairs:
                pairs[key[:2]] = _distinct(mesh, source, target, cost_model)
            type_ = Tensor(UInt8(), (key[2],))
            signature = Signature("Send", NO_ATTRIBUTES, (type_,), (type_,))
            known[key] = max(cost_model.communication_seconds(signature, pair) for pair in pairs[key[:2]])
        return known[key]

    return seconds


def _distinct(mesh: Mesh, source: int, target: int, cost_model: CostModel) -> list[Group]:
    """Return a pair of ranks of each kind of route from one stage to another."""
    ends = (mesh.at(pp=stage).devices for stage in (source, target))
    groups: list[Group] = list(zip(*ends, strict=True))
    routes = cost_model.routes(groups)
    found = groups[:1] if len(routes) == 1 else dict(zip(routes, groups, strict=True)).values()
    return [among(pair, tuple(groups), cost_model.topology) for pair in found]
