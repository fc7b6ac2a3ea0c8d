"""What an op costs, in seconds, on the devices and links of a topology.

Compute and collectives cost what the rules of a model say (:mod:`distsim.cost.roofline`). A copy to or from
the host takes ``latency + bytes / (bandwidth * efficiency)`` of ``Device.host_link``, each way at full speed.
The host of a device takes time to issue a kernel, and a collective slows the computation beside it, as
``Device.rates`` say.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from functools import lru_cache
from weakref import ref

import numpy as np
import numpy.typing as npt

from distsim.cost.demand import (
    Group,
    collective_of,
    host_copy,
    kernels_of,
    links_of,
    runs_kernel,
    tensors_of,
    usable,
)
from distsim.cost.distir_costs import DistIRRules
from distsim.cost.roofline import ROOFLINE, CostRules
from distsim.errors import CostError, expect, shortened
from distsim.hardware.rank_axes import logical_mesh
from distsim.hardware.routes import GroupOfMany
from distsim.ir import Device, Op, Topology, all_ops
from distsim.ir.kernel_rates import GRAPHS, WAYS_TO_LAUNCH
from distsim.ops import Signature, Work, operator, signature_of, work
from distsim.ops.operator import memory_bound


class UncostedOperatorWarning(UserWarning):
    """An operator without a work rule is costed by the bytes that it reads and writes."""


class CostModel:
    """Turns an op and its types into seconds, on the devices and links of ``topology``.

    Views and constants run no kernel. An op without a work rule is costed by its bytes, with one
    :class:`UncostedOperatorWarning` per operator name, and listed in :attr:`uncosted`; ``strict``
    refuses it with a :class:`CostError`. ``kernels`` names how kernels are run: the host takes the time that
    its device says for it to issue each of them (``Device.rates.launches``), none if no name is given. With
    ``kernels="fused:layers"``, or ``:step``, those of a layer, or of all passes, are a CUDA graph, which it
    launches at once (:data:`distsim.ir.kernel_rates.GRAPHS`).
    Everything is cached by signature, so share one cost model between simulations.

    >>> from distsim.ir import Attributes, Float, Tensor
    >>> topology = Topology()
    >>> gpu = topology.add_device("gpu", dram_bandwidth=1e12, kernel_launch_overhead=0)
    >>> x = Tensor(Float(), (1000, 1000), gpu)
    >>> CostModel(topology).seconds(Signature("LossGrad", Attributes(), (x, x), (x,)), (gpu,))
    1.2e-05
    """

    def __init__(
        self,
        topology: Topology,
        strict: bool = False,
        rules: CostRules | None = None,
        kernels: str = "",
    ) -> None:
        expect("topology", topology, Topology, "a Topology, as load_cluster() makes of a cluster's name")
        missing = [name for name in ("compute", "communicate") if not callable(getattr(rules, name, None))]
        if rules is not None and (missing or isinstance(rules, type)):
            what = f"it has no {missing[0]}" if missing else "it is a class"
            raise CostError(f"rules={shortened(rules)}: {what}; give an object with compute and communicate")
        self.topology = topology
        self.strict = strict
        way, _, graphs = kernels.partition(":")
        known = way in WAYS_TO_LAUNCH if graphs else way in ("", "ops", *WAYS_TO_LAUNCH)
        if not known or graphs not in ("", *GRAPHS):
            ways = ", ".join(WAYS_TO_LAUNCH)
            raise CostError(
                f"kernels={kernels!r:.40}: choose {ways}, or ops, with a host that takes no time; with "
                f"{' or '.join([f':{each}' for each in GRAPHS])} after it they are CUDA graphs"
            )
        self.kernels = way if way in WAYS_TO_LAUNCH else ""
        self.graphs = graphs if self.kernels else ""
        self.rules: CostRules = ROOFLINE if rules is None else rules
        self._uncosted: dict[str, None] = {}
        self._specs: dict[Device, int] = {}
        self._spec_ids: dict[tuple[object, ...], int] = {}
        self._compute: dict[tuple[Signature, int], float] = {}
        self._communication: dict[tuple[str, float, Group, Topology], float] = {}
        self._version = topology.version

    @classmethod
    def distir(cls, topology: Topology, strict: bool = False) -> CostModel:
        """The cost model of the DistIR notebooks: see :class:`DistIRRules`."""
        return cls(topology, strict, DistIRRules())

    @property
    def uncosted(self) -> tuple[str, ...]:
        """The operators that were costed by their bytes for want of a work rule, in order of appearance."""
        return tuple(self._uncosted)

    def seconds(self, signature: Signature, where: Group) -> float:
        """Seconds of a compute op that runs on each of these devices: those of the slowest.

        0 for what runs no kernel (:func:`runs_kernel`). Raises :class:`CostError` for an op without a
        work rule under ``strict``, and for a cost that is negative, infinite or not a number.
        """
        if not where:
            raise CostError(f"{signature} runs on no device; place its inputs")
        return max([self._on_device(signature, device) for device in where])

    def communication_seconds(self, signature: Signature, group: Group) -> float:
        """Seconds of a communication op over one group; for a transfer, the group's first is the root.

        One that has a family (:class:`GroupOfMany`) divides with it what they share.

        Raises :class:`CostError` for an op that is no communication, or for an unusable cost, and
        ``TopologyError`` when nothing links two devices of the group. What is gathered into a list
        (``listed=1``) takes the host, for which the others wait, the time of a tensor for each rank besides;
        what kernels write to their peers' memory (``direct=1``) has no start.
        """
        kind, nbytes = collective_of(signature, group)
        self._forget_old_topology()
        topology = links_of(signature, self.topology)
        key = (kind, nbytes, group, topology)
        found = self._communication.get(key)
        if found is None:
            cost = self.rules.communicate(kind, nbytes, group, topology) if len(group) > 1 else 0.0
            found = self._communication[key] = usable(signature, cost)
        if self.kernels and signature.attributes.get("listed", 0) and len(group) > 1:
            tensors = len(group) * len(signature.outputs)
            found += tensors * max([device.rates.tensor for device in group])
        return found

    def launch_seconds(self, signature: Signature, device: Device) -> float:
        """Seconds in which the host of a device issues the kernel of an op; 0 for what runs none, and for a
        message from device to device, whose latency has it.

        A multi-tensor kernel is issued once, but the host gathers its tensors one by one. A loss in steps is
        several kernels, and so are some updates.
        """
        kernel = device.rates.launch(self.kernels) if self.kernels else 0.0
        meaning = operator(signature.op_type)
        sends = meaning.communication is not None and meaning.communication.transfers
        if not kernel or sends or meaning.host_stream or not runs_kernel(signature.op_type):
            return 0.0
        count = kernels_of(signature)
        return kernel * count + device.rates.tensor * (tensors_of(signature) - 1)

    def graph_seconds(self, device: Device) -> float:
        """Seconds in which the host of a device launches a CUDA graph, however many kernels it has.

        Assumed to be those of one kernel: the framework is called once, as for that. The driver alone takes
        3.5 us for 80 kernels (CUDA.jl's documentation, usage/graphs), and 2.5 us and a nanosecond a kernel in
        a row (NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024; from memory, not re-read).
        """
        return device.rates.launch(self.kernels) if self.kernels else 0.0

    def slowdown_seconds(self, signature: Signature, group: Group, device: Device) -> float:
        """Seconds that computation on a device of a group loses while a collective runs beside it.

        Both take ``max(computation + slowdown, collective)``, as far as one does not wait for the other. 0
        without ``kernels``, and for a message from device to device.
        """
        slowdown = device.rates.slowdown if self.kernels else 0.0
        meaning = operator(signature.op_type).communication
        if not slowdown or meaning is None or meaning.transfers:
            return 0.0
        return slowdown * self.communication_seconds(signature, group)

    def latencies(self, signature: Signature, device: Device) -> tuple[float, float]:
        """Return the seconds of an op's bytes alone and of its flops alone, by the rules of the model.

        Neither is longer than :meth:`seconds`, and the longer one is as long.
        """
        whole = self.seconds(signature, (device,))
        if whole == 0 or operator(signature.op_type).host_stream:
            return whole, 0.0
        demand = self._demand(signature)
        moved = Work(0.0, demand.bytes_read, demand.bytes_written)
        memory = min(whole, usable(signature, self.rules.compute(signature, moved, device)))
        if memory < whole:
            return memory, whole
        flops = Work(demand.flops, 0, 0, demand.matrix)
        return memory, min(whole, usable(signature, self.rules.compute(signature, flops, device)))

    def on(self, device: Device) -> DeviceCosts:
        """Return what ops cost on a device."""
        return DeviceCosts(self, device)

    @property
    def basis(self) -> Hashable:
        """What the seconds of compute depend on beside op and device: models of equal basis agree on them.

        The rules, and whether the model is strict. A model that finds seconds in a way of its own, or by
        rules without a hash, agrees with itself only; a key that holds this does not keep it.
        """
        own = type(self).seconds is not CostModel.seconds or type(self.rules).__hash__ is None
        return ref(self) if own else (self.strict, self.rules, self.kernels)

    def spec(self, device: Device) -> int:
        """A number that two devices share when every op takes equally long on both."""
        found = self._specs.get(device)
        if found is None:
            key = (
                device.throughput,
                device.dram_bandwidth,
                device.kernel_launch_overhead,
                device.peaks,
                device.flops_efficiency,
                device.bytes_efficiency,
                device.host_link,
                device.rates,
            )
            found = self._specs[device] = self._spec_ids.setdefault(key, len(self._spec_ids))
        return found

    def alike(self, ids: npt.NDArray[np.int64]) -> bool:
        """Whether groups are known to lie alike: then every communication op takes equally long over each.

        ``ids[g]`` are the ids of the devices of group ``g``. Sufficient, not necessary: every level of the
        hierarchy cuts all groups alike, the first moved by whole groups of the level, all have the same
        levels where some have their own, and no pair of devices has a link of its own.
        """
        if self.topology.has_pair_links:
            return len(ids) == 1
        kinds = self._kinds_of_links(ids)
        if not (kinds == kinds[:1]).all():
            return False
        for size in (1, *self.topology.cuts):
            cut = ids // size
            cut = cut - cut[:, :1] if size > 1 else cut == cut[:, :1]
            if not (cut == cut[:1]).all():
                return False
        return True

    def routes(self, groups: Sequence[Group]) -> tuple[Hashable, ...]:
        """Return how each group lies on the topology; a single entry where all lie alike.

        Groups with equal entries, of one call or another, take equally long over every collective: each
        level cuts them alike and is as fast, the links of pairs that were set are the same, and where ports
        are shared all that do the same at once lie alike: the family of a group, or all that are asked for.
        """
        if self.topology.has_shared_ports:
            family = groups[0].family if isinstance(groups[0], GroupOfMany) else groups
            every = np.array([device.id for group in family for device in group], np.int64)
            moved = every - every[0] // max(self.topology.cuts) * max(self.topology.cuts)
            about = moved.tobytes(), self._kinds_of_links(every).tobytes()
            return tuple([(*about, *own) for own in self._routes(groups)])
        return self._routes(groups)

    def _kinds_of_links(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the kind of levels that each device has, by ids."""
        kinds = self.topology.kinds_of_links
        return np.array(kinds, np.int64)[ids] if kinds else np.zeros_like(ids)

    def _routes(self, groups: Sequence[Group]) -> tuple[tuple[Hashable, ...], ...]:
        ids = np.array([[device.id for device in group] for group in groups], np.int64)
        cuts = [ids // size for size in self.topology.cuts]
        cuts = [cut - cut[:, :1] for cut in cuts]
        cuts += [self._kinds_of_links(ids)] if self.topology.kinds_of_links else []
        links = [self.topology.pair_links(group) for group in groups]
        if not any(links) and all((cut == cut[:1]).all() for cut in cuts):
            return ((ids.shape[1], (), *[cut[0].tobytes() for cut in cuts]),)
        found = [
            (len(group), own, *[cut[i].tobytes() for cut in cuts])
            for i, (group, own) in enumerate(zip(groups, links, strict=True))
        ]
        return tuple(found[:1]) if len(set(found)) == 1 else tuple(found)

    def _on_device(self, signature: Signature, device: Device) -> float:
        key = (signature, self.spec(device))
        found = self._compute.get(key)
        if found is None:
            cost = 0.0
            if operator(signature.op_type).host_stream:
                cost = host_copy(signature, device)
            elif runs_kernel(signature.op_type):
                cost = self.rules.compute(signature, self._demand(signature), device)
            found = self._compute[key] = usable(signature, cost)
        return found

    def _demand(self, signature: Signature) -> Work:
        demand = work(signature)
        if demand is not None:
            # Checked before the rules: a maximum would hide a negative or undefined part.
            for part in (demand.flops, demand.bytes_read, demand.bytes_written):
                if not (math.isfinite(part) and part >= 0):
                    raise CostError(
                        f"{signature} has {demand}; its work rule must give finite figures, none negative"
                    )
            return demand
        name = signature.op_type
        if self.strict:
            raise CostError(f"{signature} has no work rule; register one, or allow strict=False")
        if name not in self._uncosted:
            self._uncosted[name] = None
            warnings.warn(
                f"operator {name} has no work rule: it is costed by the bytes it reads and writes",
                UncostedOperatorWarning,
                stacklevel=2,
            )
        return memory_bound(signature, 0.0)

    def _forget_old_topology(self) -> None:
        if self._version != self.topology.version:
            self._communication.clear()
            self._version = self.topology.version


@lru_cache(8)
def _default(topology: Topology) -> CostModel:
    return CostModel(topology)


def cost_model_of(topology: Topology, given: CostModel | None = None) -> CostModel:
    """Return the cost model of a call: the one that it was given, or else the default one of a topology.

    The default one is made once. Raises :class:`CostError` when what is given is of another topology.
    """
    if given is None:
        return _default(topology)
    if given.topology is not topology:
        raise CostError(
            f"the cost model is of another topology, of {len(given.topology.devices)} devices, than the one "
            f"given, of {len(topology.devices)}; make it of the same: CostModel(topology)"
        )
    return given


class DeviceCosts:
    """What ops cost on one device by a cost model: all that cutting a function, or saving values, asks.

    Equal ``key``, equal seconds: the basis of the model, and the figures of the device. Which of equal
    devices it is does not matter, so ``device`` has the number 0.
    """

    def __init__(self, cost_model: CostModel, device: Device) -> None:
        self.cost_model = cost_model
        self.device = logical_mesh(device, 1, 1).devices[0]

    @property
    def key(self) -> tuple[Hashable, Device]:
        """What is kept by, of what depends on these costs."""
        return self.cost_model.basis, self.device

    def seconds(self, op: Op) -> float:
        """Return how long an op, or all ops of a Call, keep the device busy.

        Communication and copies to or from the host do not.

        Raises what :meth:`CostModel.seconds` raises, and :class:`CostError` for what is no cost.
        """
        total, where = 0.0, (self.device,)
        for inner in all_ops(op.callee) if op.is_call else (op,):
            known = operator(inner.op_type)
            if known.communication is None and known.computes and runs_kernel(inner.op_type):
                signature = signature_of(inner)
                total += usable(signature, self.cost_model.seconds(signature, where))
        return total
