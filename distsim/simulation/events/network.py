"""The network: which flow a communication task is, over which channels of the topology.

Each device has a port at each level of the hierarchy, in both directions, which several devices may
share; groups may share an uplink; a pair that was set has a link of its own, in both directions. A
collective moves as one fluid process over all channels that its algorithm uses: first its latency, in
which it asks for nothing, then its transfer. Alone it takes exactly what the cost model says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distsim.cache import Cache
from distsim.cost.demand import Group, collective_of, links_of
from distsim.errors import SimulationError
from distsim.hardware import Channel, FluidCollective, collective_transfer, port
from distsim.hardware.routes import Hop
from distsim.ir import Device, Op, Topology
from distsim.ops import signature_of
from distsim.simulation.events.disturbances import Disturbances, LinkName
from distsim.simulation.events.flows import Flow
from distsim.simulation.tasks.rank_classes import communicates
from distsim.simulation.tasks.task_table import Floats, Tasks

_COLLECTIVES = Cache[Topology, FluidCollective](
    "what a collective puts on links, by topology, its version, kind, bytes and group", 2**16
)


class Network:
    """The links of a topology, shared by the flows that cross them at one time.

    What a collective puts on the links is computed once.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def transfer(self, op: Op, group: Group) -> FluidCollective:
        """Return what a communication op moves over one of its groups."""
        signature = signature_of(op)
        (kind, nbytes), topology = collective_of(signature, group), links_of(signature, self.topology)
        key = (self.topology.version, kind, nbytes, group)
        return _COLLECTIVES.get(topology, key, lambda: collective_transfer(kind, nbytes, group, topology))


@dataclass(frozen=True, eq=False, slots=True)
class Flows:
    """The flow of each task that has one, and the capacities, in bytes/s, of the channels they pass."""

    of_task: dict[int, Flow]
    channels: tuple[Channel, ...]

    @property
    def capacity(self) -> list[float]:
        """The bytes/s of each channel."""
        return [channel.capacity for channel in self.channels]


def find_flows(
    tasks: Tasks, durations: Floats, network: Network, disturbances: Disturbances | None = None
) -> Flows:
    """Return the flows of tasks that take these seconds when they are alone.

    Raises :class:`SimulationError` when a rank class stands for several devices, for a link that the
    topology does not have, and for an op that needs a failed link.
    """
    crowd = next((group for group in tasks.classes.members if len(group) > 1), None)
    if crowd is not None:
        raise SimulationError(
            f"{crowd[0]} stands for {len(crowd)} devices of {tasks.function.name}, each with its own "
            "links; to share them simulate each device by itself: lower(..., lockstep=False)"
        )
    if network.topology.has_shared_ports and not tasks.contention:
        raise SimulationError(
            f"the tasks of {tasks.function.name} divide ports already; to share them as they come leave that "
            "to the engine: lower(..., contention=True)"
        )
    return _Finder(tasks, durations, network, disturbances or Disturbances()).find()


class _Finder:
    """Finds the flows of one run."""

    def __init__(self, tasks: Tasks, durations: Floats, network: Network, disturbances: Disturbances) -> None:
        self.tasks = tasks
        self.durations: list[float] = durations.tolist()
        self.network = network
        topology = network.topology
        self.slow: dict[Channel | Hop, float] = {}
        for name, factor in disturbances.slow_links.items():
            for key in links_named(name, topology):
                self.slow[key] = self.slow.get(key, 1.0) * factor
        self.failed = {key: None for name in disturbances.failed_links for key in links_named(name, topology)}
        self.numbers: dict[Channel, int] = {}
        self.flows: dict[tuple[FluidCollective, float], Flow | None] = {}

    def find(self) -> Flows:
        tasks = self.tasks
        groups: dict[int, dict[tuple[int, ...], Group]] = {}
        for number, op in enumerate(tasks.op_table):
            if communicates(op):
                parts = tasks.classes.exchanges(op)
                groups[number] = {tuple(dict.fromkeys((*p.sources, *p.targets))): p.group for p in parts}
        ops: list[int] = tasks.op.tolist()
        of_task: dict[int, Flow] = {}
        for task, number in enumerate(ops):
            if number in groups:
                classes = tuple(dict.fromkeys(stream.rank_class for stream in tasks.streams_of(task)))
                transfer = self.network.transfer(tasks.op_table[number], groups[number][classes])
                flow = self.flow(task, transfer)
                if flow is not None:
                    of_task[task] = flow
        channels = [
            Channel(channel.name, channel.capacity / self.slow.get(channel, 1.0)) for channel in self.numbers
        ]
        return Flows(of_task, tuple(channels))

    def flow(self, task: int, transfer: FluidCollective) -> Flow | None:
        """Return the flow of a task, ``None`` where nothing has to be moved."""
        key = (transfer, self.durations[task])
        if key not in self.flows:
            self.flows[key] = self._flow(task, transfer)
        return self.flows[key]

    def _flow(self, task: int, transfer: FluidCollective) -> Flow | None:
        loads = self._loads(task, transfer)
        seconds = self.durations[task]
        # The cost model may have rules of its own, and ops jitter: latency and transfer in proportion.
        latency = seconds * (transfer.latency / transfer.seconds) if transfer.seconds > 0 else seconds
        moving = seconds - latency
        if not (moving > 0 and loads):
            return None
        demands = {channel: min(size / moving, channel.capacity) for channel, size in loads.items()}
        bound = max(demands, key=lambda channel: demands[channel] / channel.capacity)
        numbered = [(self.numbers.setdefault(c, len(self.numbers)), rate) for c, rate in demands.items()]
        return Flow(latency, moving, demands[bound], tuple(numbered))

    def _loads(self, task: int, transfer: FluidCollective) -> dict[Channel, float]:
        topology = self.network.topology
        loads = transfer.loads(topology)
        for key in (*loads, *(hop for hop, _ in transfer.hops)):
            if key in self.failed:
                name = key.name if isinstance(key, Channel) else f"link {key[0]} to {key[1]}"
                raise SimulationError(
                    f"{self.tasks.describe(task)} uses a link that has failed: {name}; lay the plan out "
                    "on other devices, or set another link between them"
                )
        for hop, size in transfer.hops if self.slow else ():
            if hop in self.slow:
                a, b = hop
                lane = Channel(f"slow link {a} to {b}", topology.link(a, b).achieved)
                self.slow[lane] = self.slow[hop]
                loads[lane] = loads.get(lane, 0.0) + size
        return loads


def links_named(name: LinkName, topology: Topology) -> Iterable[Channel | Hop]:
    """Return what a name of a link stands for: channels of ports, or the two hops between two devices."""
    if isinstance(name, str):
        wanted, devices = name, topology.devices
    else:
        wanted, device = name
        if isinstance(wanted, Device):
            topology.link(wanted, device)
            return (wanted, device), (device, wanted)
        topology.groups_by_level((device,))  # refuses what is no device of the topology
        devices = [device]
    level = next((level for level in topology.levels if level.name == wanted), None)
    if level is None:
        names = ", ".join(level.name for level in topology.levels) or "none"
        raise SimulationError(
            f"no level {wanted!r} in {topology}; its levels: {names}; or name a link by two devices"
        )
    ports = [port(device, topology.level_of(level, device)) for device in devices]
    return tuple(dict.fromkeys(channel for each in ports for channel in each))
