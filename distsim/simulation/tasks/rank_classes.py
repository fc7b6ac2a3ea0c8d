"""Rank classes: devices that do the same at the same time, simulated as one.

Devices that hold exactly the same placements run exactly the same ops. Classes are split further until
all devices of one are equally fast and every communication op brings each of them together with the
same classes at the same cost (:mod:`distsim.simulation.tasks.color_refinement`). Then, by induction over
the ops, every member of a class starts and ends every op together with the others: one of them stands for
all, exactly.
One slow device, or one thin link, splits off what it delays in its own way, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.errors import SimulationError
from distsim.hardware.routes import among
from distsim.ir import Device, Function, Mesh, Op, Tensor, callees, place_of
from distsim.ir.device import devices_of
from distsim.ops import Signature, operator, signature_of
from distsim.simulation.tasks.color_refinement import Ints, Relation, refine

Group = tuple[Device, ...]
Classes = tuple[int, ...]
Placement = Device | Mesh


@dataclass(frozen=True, slots=True)
class Exchange:
    """One group's part in a communication op: who gives, who takes, and the group that is costed."""

    sources: Group
    targets: Group
    group: Group


@dataclass(frozen=True, slots=True)
class ClassExchange:
    """An exchange between rank classes, with one of the groups of devices for which it stands.

    ``family`` are all the groups, which begin at once.
    """

    sources: Classes
    targets: Classes
    group: Group
    family: tuple[Group, ...] = ()


@dataclass(frozen=True, eq=False)
class RankClasses:
    """The classes and their devices; every device of the function is in exactly one.

    ``lockstep`` tells whether a class has several members. Classes are numbered from 0.
    """

    members: tuple[Group, ...]
    lockstep: bool
    of: dict[Device, int] = field(init=False)
    _at: dict[Placement, Classes] = field(init=False, default_factory=dict[Placement, Classes])
    _exchanges: dict[tuple[object, ...], tuple[ClassExchange, ...]] = field(
        init=False, default_factory=dict[tuple[object, ...], tuple[ClassExchange, ...]]
    )

    def __post_init__(self) -> None:
        of = {device: number for number, group in enumerate(self.members) for device in group}
        object.__setattr__(self, "of", of)

    def at(self, placement: Placement) -> Classes:
        """Return the classes that a placement consists of."""
        found = self._at.get(placement)
        if found is None:
            found = self._at[placement] = self._distinct(devices_of(placement))
        return found

    def exchanges(self, op: Op) -> tuple[ClassExchange, ...]:
        """Return the exchanges of a communication op, one for each distinct set of classes."""
        key = (op.op_type, op.attributes, place_of(op.inputs[0]), place_of(op.outputs[0]))
        found = self._exchanges.get(key)
        if found is None:
            distinct: dict[tuple[Classes, Classes], Group] = {}
            parts = exchanges(op)
            for part in parts:
                distinct.setdefault((self._distinct(part.sources), self._distinct(part.targets)), part.group)
            family = tuple([part.group for part in parts])
            found = tuple(ClassExchange(*pair, group, family) for pair, group in distinct.items())
            self._exchanges[key] = found
        return found

    def _distinct(self, devices: Iterable[Device]) -> Classes:
        return tuple(sorted({self.of[device] for device in devices}))


def place_of_compute(function: Function, op: Op) -> Placement:
    """Return where a compute op runs: the placement of its operands, or else of its results."""
    for value in (*op.inputs, *op.outputs):
        place = place_of(value)
        if place is not None:
            return place
    raise SimulationError(
        f"{function.name}: {op!r} is on no device; give the inputs of the function types that have one"
    )


def communicates(op: Op) -> bool:
    """Whether an op moves something between devices."""
    return operator(op.op_type).moves


def exchanges(op: Op) -> tuple[Exchange, ...]:
    """Return what a communication op moves between which devices.

    A collective has one exchange per group of its mesh axis, a Send one per pair of devices. A
    broadcast, scatter or gather is one exchange between a device and all of a mesh; a gather costs
    the parts of those ranks only that hold distinct ones.
    """
    source, target = _ends(op)
    meaning = operator(op.op_type).communication
    if meaning is None or not meaning.transfers:
        if not isinstance(source, Mesh):
            raise _off_mesh(op, source)
        return tuple(Exchange(group, group, group) for group in source.groups(op.attributes["axis"]))
    givers, takers = devices_of(source), devices_of(target)
    if meaning.kind == "send":
        pairs = zip(givers, takers, strict=True)
        return tuple(Exchange((a,), (b,), (a,) if a == b else (a, b)) for a, b in pairs)
    if isinstance(source, Mesh):
        parts = _distinct_parts(source, op)
        return (Exchange(givers, takers, (*takers, *(d for d in parts if d not in takers))),)
    return (Exchange(givers, takers, (*givers, *(d for d in takers if d not in givers))),)


def _ends(op: Op) -> tuple[Placement, Placement]:
    source, target = place_of(op.inputs[0]), place_of(op.outputs[0])
    if source is None or target is None:
        raise SimulationError(
            f"{op!r} moves from {source} to {target}; place its input on a device or a mesh"
        )
    return source, target


def _off_mesh(op: Op, place: Placement) -> SimulationError:
    return SimulationError(f"{op!r} runs over a mesh axis; its input is on {place}")


def _distinct_parts(mesh: Mesh, op: Op) -> Group:
    sharded = {axis for _, name, _ in op.attributes.get("shards", ()) for axis in mesh.axes_of(name)}
    along = [name for name, _ in mesh.axes if name in sharded]
    return mesh.groups(*along)[0]


def placements(functions: Sequence[Function]) -> tuple[Placement, ...]:
    """Return the distinct placements of the values of these functions, in order of appearance."""
    found: dict[Placement, None] = {}
    for function in functions:
        # Values are many, types few: most values share theirs.
        types = list(map(_TYPE, chain(function.inputs, chain.from_iterable(map(_OUTPUTS, function.ops)))))
        for type_ in dict(zip(map(id, types), types, strict=True)).values():
            if isinstance(type_, Tensor) and type_.device is not None:
                found[type_.device] = None
    return tuple(found)


_TYPE, _OUTPUTS, _OP_TYPE = attrgetter("type"), attrgetter("outputs"), attrgetter("op_type")


def placement_classes(function: Function) -> RankClasses:
    """Return the classes of devices that hold exactly the same placements."""
    held: dict[Device, list[int]] = {}
    for number, place in enumerate(placements((function, *callees(function)))):
        for device in devices_of(place):
            held.setdefault(device, []).append(number)
    classes: dict[tuple[int, ...], list[Device]] = {}
    for device, numbers in held.items():
        classes.setdefault(tuple(numbers), []).append(device)
    return RankClasses(tuple(map(tuple, classes.values())), lockstep=True)


def rank_classes(function: Function, cost_model: CostModel, lockstep: bool = True) -> RankClasses:
    """Return the classes to simulate: the fewest that are exact, or, not in ``lockstep``, each device."""
    held = placement_classes(function)
    devices = tuple(device for group in held.members for device in group)
    if not lockstep:
        return RankClasses(tuple((device,) for device in devices), lockstep=False)
    colours = np.repeat(np.arange(len(held.members)), [len(group) for group in held.members])
    specs = np.array([cost_model.spec(device) for device in devices], np.int64)
    meetings = _Meetings(devices, cost_model)
    for current in (*callees(function), function):
        moving = {name for name in set(map(_OP_TYPE, current.ops)) if operator(name).moves}
        for op in current.ops if moving else ():
            if op.op_type in moving:
                meetings.add(op)
    members: dict[int, list[Device]] = {}
    colours = meetings.refine(colours * (specs.max(initial=0) + 1) + specs)
    for colour, device in zip(colours.tolist(), devices, strict=True):
        members.setdefault(colour, []).append(device)
    return RankClasses(tuple(map(tuple, members.values())), lockstep=len(members) < len(devices))


@dataclass(slots=True)
class _Meeting:
    """The groups of one communication op, or of several over the same groups, by device numbers.

    ``cost`` numbers the kinds of groups: over two of a kind each of the ops takes equally long. ``groups``
    is empty when all lie alike, so that there is one kind only.
    """

    members: Ints
    ordered: bool
    groups: Sequence[Group]
    cost: Ints


class _Meetings:
    """Which devices meet in the communication ops of a function, and at what cost.

    A broadcast, scatter or gather is left out: all that hold the placement take part in one exchange.
    """

    def __init__(self, devices: Sequence[Device], cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self._numbers = {device: number for number, device in enumerate(devices)}
        self._ids = np.array([device.id for device in devices], np.int64)
        self._at: dict[Placement, Ints] = {}
        self._met: dict[tuple[Placement, Placement | str], _Meeting] = {}
        self._seen: set[Signature] = set()

    def add(self, op: Op) -> None:
        """Take a communication op into account."""
        signature = signature_of(op)
        meaning = operator(op.op_type).communication
        if signature in self._seen or meaning is None or (meaning.transfers and meaning.kind != "send"):
            return
        self._seen.add(signature)
        source, target = _ends(op)
        key = (source, target if meaning.transfers else str(op.attributes["axis"]))
        meeting = self._met.get(key)
        if meeting is None:
            meeting = self._met[key] = self._meeting(op, *key)
        if meeting.groups:
            family, topology = tuple(meeting.groups), self.cost_model.topology
            asked = [among(group, family, topology) for group in family]
            seconds = [self.cost_model.communication_seconds(signature, group) for group in asked]
            cost = np.unique(seconds, return_inverse=True)[1]
            both = meeting.cost * len(cost) + cost
            meeting.cost = np.unique(both, return_inverse=True)[1]

    def refine(self, colours: Ints) -> Ints:
        """Return the classes, at least as fine as ``colours``, that are simulated as one each."""
        met = self._met.values()
        relations = [Relation(meeting.members, meeting.cost, meeting.ordered) for meeting in met]
        sends = [meeting.members for meeting in met if meeting.ordered]
        apart = _chained(sends)
        while True:
            colours = colours.copy()
            colours[apart] = colours.max(initial=0) + 1 + np.arange(len(apart))
            colours = refine(colours, relations)
            apart = _crossed(sends, colours)
            if not len(apart):
                return colours

    def _meeting(self, op: Op, source: Placement, other: Placement | str) -> _Meeting:
        if not isinstance(other, str):
            members = np.column_stack([self._of(source), self._of(other)])
        elif isinstance(source, Mesh):
            names, sizes = [name for name, _ in source.axes], [size for _, size in source.axes]
            along = [names.index(axis) for axis in source.axes_of(other)]
            grid = np.moveaxis(self._of(source).reshape(sizes), along, range(-len(along), 0))
            members = grid.reshape(-1, source.axis_size(other))
        else:
            raise _off_mesh(op, source)
        groups = ()
        if not self.cost_model.alike(self._ids[members]):
            groups = tuple(part.group for part in exchanges(op))
        return _Meeting(members, not isinstance(other, str), groups, np.zeros(len(members), np.int64))

    def _of(self, placement: Placement) -> Ints:
        found = self._at.get(placement)
        if found is None:
            numbers = [self._numbers[device] for device in devices_of(placement)]
            found = self._at[placement] = np.array(numbers, np.int64)
        return found


def _chained(sends: Sequence[Ints]) -> Ints:
    """Return the devices that receive from one device and send to another in the same Send.

    Where nothing overlaps, the one waits for the other, so not all of a class do the same at a time.
    """
    chained = [np.zeros(0, np.int64)]
    for pairs in sends:
        givers, takers = pairs[pairs[:, 0] != pairs[:, 1]].T
        chained.append(np.intersect1d(givers, takers))
    return np.unique(np.concatenate(chained))


def _crossed(sends: Sequence[Ints], colours: Ints) -> Ints:
    """Return the devices of classes of which a member sends to, or receives from, two of one class.

    Streams go by the class of the peer, so a device needs the same peer every time.
    """
    count = len(colours)
    numbers = [pairs[:, 0] * count + pairs[:, 1] for pairs in sends]
    giver, taker = np.divmod(np.unique(np.concatenate([np.zeros(0, np.int64), *numbers])), count)
    crossed = np.zeros(count, np.bool_)  # by class
    for own, peer in ((giver, colours[taker]), (taker, colours[giver])):
        meets, times = np.unique(own * count + peer, return_counts=True)
        device, peer_class = np.divmod(meets[times > 1], count)
        crossed[colours[device]] = crossed[peer_class] = True
    return np.flatnonzero(crossed[colours])
