"""A machine whose figures are being fitted, and what they make of timings.

Quantities are those of the machine, not the shares of a preset: of the peak that kernels of a kind reach
(``device.kernels.linear``: 0.6), seconds, bytes/s. :mod:`distsim.calibration.fitting` divides them by what
the preset says is reached at best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distsim.calibration.regression import LEAST_SHARE, Floats, Quantity, Regression
from distsim.calibration.timings import MAX_RANKS, CollectiveCall, KernelCall, LaunchCall, Timing
from distsim.cost import CostModel
from distsim.errors import CostError, TimingsError
from distsim.hardware import collective_time
from distsim.ir import Device, Link, Topology
from distsim.ir.topology import Level

_SHARES = (0.03, 0.1, 0.3, 0.6, 0.9)
_OVERHEADS = (5e-7, 2e-6, 8e-6)
_LATENCIES = (5e-7, 3e-6, 1.5e-5, 8e-5)
_STARTS = (5e-6, 4e-5)
_SEGMENTS = (3e-7, 5e-6)
_SIZES = 6
"""Sizes of messages that tell what segments take from what bytes take."""
_BANDWIDTHS = (0.02, 0.1, 0.3, 0.6, 1.0, 1.5)
"""Values from which a search starts; bandwidths, of that of the link."""

MEMORY, OVERHEAD = "device.kernels.memory", "device.kernel_launch_overhead"


@dataclass(frozen=True)
class Machine:
    """The first device of a cluster, the levels that join its devices, and how many a node has."""

    device: Device
    levels: tuple[Level, ...]
    devices_per_node: int

    def kernel_regression(
        self, kind: str, timings: Sequence[Timing], fitted: Mapping[str, float]
    ) -> Regression:
        """Return what is fitted to kernels of a kind, given what is fitted already.

        Of ``memory``, also the time that a kernel takes beside its bytes.
        """
        name = f"device.kernels.{kind}"
        if kind == "memory":
            quantities = (
                Quantity(MEMORY, self.share("memory"), _SHARES),
                Quantity(OVERHEAD, self.device.kernel_launch_overhead, _OVERHEADS),
            )
        else:
            quantities = (Quantity(name, self.share(kind), _SHARES),)
        names = [quantity.name for quantity in quantities]

        def predict(values: Sequence[float]) -> Floats:
            known = {**fitted, **dict(zip(names, values, strict=True))}
            return self.with_kernels(known, kind).kernel_seconds(timings)

        return Regression(quantities, timings, predict, self.kernel_seconds(timings))

    def launch_regression(self, mode: str, timings: Sequence[Timing]) -> Regression:
        """Return what is fitted to launches: each timing has many."""
        counts = np.array([t.call.kernels for t in timings if isinstance(t.call, LaunchCall)], np.float64)
        base = self.device.rates.launch(mode)
        quantity = Quantity(f"device.launches.{mode}", base, (1e-5,))
        return Regression((quantity,), timings, lambda values: counts * values[0], counts * base, 1)

    def level_regression(self, number: int, timings: Sequence[Timing]) -> Regression:
        """Return what is fitted to collectives over groups that a level joins: bytes/s and latency of it.

        Of many sizes of messages also what a segment takes; of several sizes of groups, or of all-reduces and
        others, which take half as many steps, what a collective takes to begin.
        """
        level = self.levels[number]
        quantities = (
            Quantity(
                f"levels.{level.name}.bandwidth",
                level.link.achieved,
                tuple([share * level.link.bandwidth for share in _BANDWIDTHS]),
            ),
            Quantity(f"levels.{level.name}.latency", level.link.latency, _LATENCIES),
        )
        calls = [timing.call for timing in timings if isinstance(timing.call, CollectiveCall)]
        if len({(call.ranks, call.kind == "all_reduce") for call in calls}) > 1:
            quantities += (Quantity(f"levels.{level.name}.start", level.start, _STARTS),)
        if len({call.nbytes for call in calls}) >= _SIZES:  # a time depends on its root
            quantities += (
                Quantity(f"levels.{level.name}.segment_time", level.segment_time, _SEGMENTS, LEAST_SHARE / 4),
            )
        names = [quantity.name.rpartition(".")[2] for quantity in quantities]

        def predict(values: Sequence[float]) -> Floats:
            return self.with_link(number, **dict(zip(names, values, strict=True))).collective_seconds(timings)

        return Regression(quantities, timings, predict, self.collective_seconds(timings))

    # --- other figures ----------------------------------------------------------------------------------

    def share(self, kind: str) -> float:
        """The share of a peak, or of the DRAM bandwidth, that large kernels of a kind reach."""
        best = self.device.bytes_efficiency if kind == "memory" else self.device.flops_efficiency
        return best * (self.device.rates.share(kind) or 1.0)

    def with_kernels(self, values: Mapping[str, float], kind: str) -> Machine:
        """Return the machine on which kernels of ``kind``, and what memory bounds, reach these quantities.

        Shares may be more than the peak: it is the peak that is changed.
        """
        device = self.device
        reached = values.get(f"device.kernels.{kind}", self.share(kind))
        moved = values.get(MEMORY, self.share("memory"))
        rates = replace(device.rates, shares=(("memory", 1.0), (kind, 1.0))[: 1 + (kind != "memory")])
        if kind != "memory":
            device = replace(
                device,
                throughput=device.throughput * reached,
                peaks=tuple([(name, peak * reached) for name, peak in device.peaks]),
                flops_efficiency=1.0,
            )
        changed = replace(
            device,
            dram_bandwidth=device.dram_bandwidth * moved,
            bytes_efficiency=1.0,
            kernel_launch_overhead=values.get(OVERHEAD, device.kernel_launch_overhead),
            rates=rates,
        )
        return replace(self, device=changed)

    def with_link(
        self,
        number: int,
        bandwidth: float,
        latency: float,
        start: float | None = None,
        segment_time: float | None = None,
    ) -> Machine:
        """Return the machine whose level has a link of these bytes/s and this latency.

        What a collective takes to begin, if it is not given, changes in proportion to the latency: both are
        what small messages take. What a segment takes stays, if it is not given.
        """
        before = self.levels[number]
        if start is None:
            start = before.start * (latency / before.link.latency if before.link.latency else 1.0)
        segment_time = before.segment_time if segment_time is None else segment_time
        level = replace(before, link=Link(bandwidth, latency), start=start, segment_time=segment_time)
        return replace(self, levels=(*self.levels[:number], level, *self.levels[number + 1 :]))

    # --- seconds ----------------------------------------------------------------------------------------

    def kernel_seconds(self, timings: Sequence[Timing]) -> Floats:
        """Return what kernels take."""
        costs = CostModel(Topology.hierarchical(self.device, 1, ()))
        where = tuple(costs.topology.devices)
        found: list[float] = []
        for timing in timings:
            if isinstance(timing.call, KernelCall):
                try:
                    found.append(costs.seconds(timing.call.signature, where))
                except CostError as error:
                    raise TimingsError(f"{timing.file}, {timing.place}: {error}") from error
        return np.array(found)

    def collective_seconds(self, timings: Sequence[Timing]) -> Floats:
        """Return what collectives take."""
        calls = [timing.call for timing in timings if isinstance(timing.call, CollectiveCall)]
        places = [self.places(call) for call in calls]
        nodes = max(max(place) for place in places) // self.devices_per_node + 1
        topology = Topology.hierarchical(self.device, nodes * self.devices_per_node, self.levels)
        devices = topology.devices
        return np.array(
            [
                collective_time(call.kind, float(call.nbytes), tuple([devices[i] for i in place]), topology)
                for call, place in zip(calls, places, strict=True)
            ]
        )

    def places(self, call: CollectiveCall) -> tuple[int, ...]:
        """Return the devices of the ranks of a collective; :class:`TimingsError` where nodes have too few."""
        if call.places is not None:
            return call.places
        size = self.devices_per_node
        nodes = -(-call.ranks // size) if call.nodes is None else call.nodes
        each = size if call.nodes is None else call.ranks // nodes
        if each > size:
            raise TimingsError(
                f"{call} needs {each} devices a node, and the base has {size}; --set devices_per_node={each}"
            )
        if nodes * size > MAX_RANKS:
            raise TimingsError(f"{call}: {nodes} nodes of {size} devices are more than {MAX_RANKS} devices")
        return tuple([rank // each * size + rank % each for rank in range(call.ranks)])

    def level_of(self, call: CollectiveCall) -> int:
        """Return the number of the smallest level that joins all ranks of a collective.

        Raises :class:`TimingsError` where none does.
        """
        places = self.places(call)
        for number, level in enumerate(self.levels):
            if level.group_size is None or len({place // level.group_size for place in places}) == 1:
                return number
        raise TimingsError(f"{call}: no level of the base joins its ranks; choose one that joins nodes")
