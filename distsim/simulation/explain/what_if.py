"""What-ifs: the same simulation with something free of charge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distsim.cost.cost_model import CostModel
from distsim.cost.demand import Group
from distsim.ir import Device
from distsim.ops import Signature, op_label, operator

Frees = Callable[[Signature], bool]
"""Whether an op is free."""


class FreeOps(CostModel):
    """The costs of another model, but for some ops that cost nothing."""

    def __init__(self, base: CostModel, free: Frees) -> None:
        kernels = f"{base.kernels}:{base.graphs}" if base.graphs else base.kernels
        super().__init__(base.topology, base.strict, base.rules, kernels)
        self.base = base
        self.free = free

    def seconds(self, signature: Signature, where: Group) -> float:
        """Seconds of a compute op: 0 if it is free."""
        return 0.0 if self.free(signature) else self.base.seconds(signature, where)

    def communication_seconds(self, signature: Signature, group: Group) -> float:
        """Seconds of a communication op: 0 if it is free."""
        return 0.0 if self.free(signature) else self.base.communication_seconds(signature, group)

    def launch_seconds(self, signature: Signature, device: Device) -> float:
        """Seconds of the host for an op: 0 if it is free."""
        return 0.0 if self.free(signature) else self.base.launch_seconds(signature, device)

    def graph_seconds(self, device: Device) -> float:
        """Seconds of the host for a graph: as in the other model."""
        return self.base.graph_seconds(device)

    def slowdown_seconds(self, signature: Signature, group: Group, device: Device) -> float:
        """Seconds that computation loses to a collective: 0 if that is free."""
        return 0.0 if self.free(signature) else self.base.slowdown_seconds(signature, group, device)

    def spec(self, device: Device) -> int:
        """As in the other model: what is free is free on every device."""
        return self.base.spec(device)


class FreeLaunches(FreeOps):
    """The costs of another model on devices and hosts that launch a kernel in no time."""

    def __init__(self, base: CostModel) -> None:
        super().__init__(base, lambda signature: False)
        self._without: dict[Device, Device] = {}

    def seconds(self, signature: Signature, where: Group) -> float:
        """Seconds of a compute op on the same devices with ``kernel_launch_overhead`` 0."""
        return self.base.seconds(signature, tuple([self._device(device) for device in where]))

    def launch_seconds(self, signature: Signature, device: Device) -> float:
        """No seconds."""
        return 0.0

    def graph_seconds(self, device: Device) -> float:
        """No seconds."""
        return 0.0

    def _device(self, device: Device) -> Device:
        found = self._without.get(device)
        if found is None:
            found = self._without[device] = replace(device, kernel_launch_overhead=0.0)
        return found


class Captured(FreeOps):
    """The costs of another model on hosts that launch each layer at once, as a CUDA graph."""

    def __init__(self, base: CostModel) -> None:
        super().__init__(base, lambda signature: False)
        self.graphs = "layers"


def communication(signature: Signature) -> bool:
    """All communication is free."""
    meaning = operator(signature.op_type).communication
    return meaning is not None and meaning.kind != "local"


def sends(signature: Signature) -> bool:
    """Sends are free."""
    meaning = operator(signature.op_type).communication
    return meaning is not None and meaning.kind == "send"


def collectives(axis: str) -> Frees:
    """The collectives over a mesh axis are free."""
    return lambda signature: communication(signature) and signature.attributes.get("axis") == axis


def operators(name: str) -> Frees:
    """An operator is free."""
    return lambda signature: op_label(signature) == name
