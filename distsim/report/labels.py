"""How ranks and streams are named for people."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.ir import Device
from distsim.simulation import Simulation


def ranks_label(devices: Sequence[Device]) -> str:
    """Return a short name of some devices.

    >>> ranks_label([Device(4, "gpu"), Device(5, "gpu"), Device(6, "gpu")])
    'gpu:4..gpu:6'
    """
    if len(devices) <= 2:
        return ", ".join(map(str, devices))
    if all(device.id == devices[0].id + i for i, device in enumerate(devices)):
        return f"{devices[0]}..{devices[-1]}"
    return f"{devices[0]}, {devices[1]} and {len(devices) - 2} more"


def stream_label(simulation: Simulation, name: str) -> str:
    """Return the name of a stream with its peer's devices instead of the number of their rank class."""
    kind, _, peer = name.rpartition(" ")
    if kind not in ("send", "receive"):
        return name
    number, _, channel = peer.partition(".")
    devices = simulation.classes.members[int(number)]
    lane = f", channel {channel}" if channel else ""
    return f"{kind} {'to' if kind == 'send' else 'from'} {ranks_label(devices)}{lane}"
