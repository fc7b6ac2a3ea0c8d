"""Rank classes: devices that do the same at the same time, simulated as one.

Devices that hold exactly the same placements run exactly the same ops. When, besides, all devices of a
class are equally fast, all groups of a collective cost the same and involve the same classes, and all
sends pair the classes off one to one, then by induction over the ops every member of a class starts and
ends every op together with the others: one of them stands for all. Otherwise each device is a class of
its own: slower to simulate, and exact as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distsim.errors import SimulationError
from distsim.executor.cost_model import CostModel
from distsim.ir import Device, Function, Mesh, Op, Tensor, Value, callees
from distsim.ir.device import devices_of
from distsim.ops import Signature, operator, signature_of

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
    """An exchange between rank classes, with one of the groups of devices for which it stands."""

    sources: Classes
    targets: Classes
    group: Group


@dataclass(frozen=True, eq=False)
class RankClasses:
    """The classes and their devices; every device of the function is in exactly one.

    ``lockstep`` tells whether a class may have several members. Classes are numbered from 0.
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
            for part in exchanges(op):
                distinct.setdefault((self._distinct(part.sources), self._distinct(part.targets)), part.group)
            found = tuple(ClassExchange(*pair, group) for pair, group in distinct.items())
            self._exchanges[key] = found
        return found

    def _distinct(self, devices: Iterable[Device]) -> Classes:
        return tuple(sorted({self.of[device] for device in devices}))


def place_of(value: Value) -> Placement | None:
    """Return where a value is."""
    return value.type.device if isinstance(value.type, Tensor) else None


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
    meaning = operator(op.op_type).communication
    return meaning is not None and meaning.kind != "local"


def exchanges(op: Op) -> tuple[Exchange, ...]:
    """Return what a communication op moves between which devices.

    A collective has one exchange per group of its mesh axis, a Send one per pair of devices. A
    broadcast, scatter or gather is one exchange between a device and all of a mesh; a gather costs
    the parts of those ranks only that hold distinct ones.
    """
    source, target = place_of(op.inputs[0]), place_of(op.outputs[0])
    meaning = operator(op.op_type).communication
    if source is None or target is None or meaning is None:
        raise SimulationError(
            f"{op!r} moves from {source} to {target}; place its input on a device or a mesh"
        )
    if not meaning.transfers:
        if not isinstance(source, Mesh):
            raise SimulationError(f"{op!r} runs over a mesh axis; its input is on {source}")
        return tuple(Exchange(group, group, group) for group in source.groups(op.attributes["axis"]))
    givers, takers = devices_of(source), devices_of(target)
    if meaning.kind == "send":
        pairs = zip(givers, takers, strict=True)
        return tuple(Exchange((a,), (b,), (a,) if a == b else (a, b)) for a, b in pairs)
    if isinstance(source, Mesh):
        parts = _distinct_parts(source, op)
        return (Exchange(givers, takers, (*takers, *(d for d in parts if d not in takers))),)
    return (Exchange(givers, takers, (*givers, *(d for d in takers if d not in givers))),)


def _distinct_parts(mesh: Mesh, op: Op) -> Group:
    sharded = {axis for _, axis, _ in op.attributes.get("shards", ())}
    along = [name for name, _ in mesh.axes if name in sharded]
    return mesh.groups(*along)[0]


def placements(functions: Sequence[Function]) -> tuple[Placement, ...]:
    """Return the distinct placements of the values of these functions, in order of appearance."""
    found: dict[Placement, None] = {}
    for function in functions:
        values = [*function.inputs, *(value for op in function.ops for value in op.outputs)]
        for value in values:
            place = place_of(value)
            if place is not None:
                found[place] = None
    return tuple(found)


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
    """Return the classes to simulate: in lock step if that is allowed and exact, else device by device."""
    classes = placement_classes(function)
    if lockstep and _in_step(function, classes, cost_model):
        return classes
    return RankClasses(tuple((device,) for group in classes.members for device in group), lockstep=False)


def _in_step(function: Function, classes: RankClasses, cost_model: CostModel) -> bool:
    if any(len({cost_model.spec(device) for device in group}) > 1 for group in classes.members):
        return False
    if all(len(group) == 1 for group in classes.members):
        return True
    pairs: dict[tuple[int, int], tuple[Group, ...]] = {}
    seen: set[Signature] = set()
    for current in (*callees(function), function):
        for op in current.ops:
            if not communicates(op):
                continue
            signature = signature_of(op)
            if signature not in seen:
                seen.add(signature)
                if not _op_in_step(op, signature, classes, cost_model, pairs):
                    return False
    return True


def _op_in_step(
    op: Op,
    signature: Signature,
    classes: RankClasses,
    cost_model: CostModel,
    pairs: dict[tuple[int, int], tuple[Group, ...]],
) -> bool:
    buckets: dict[tuple[Classes, Classes], list[Group]] = {}
    parts = exchanges(op)
    of = classes.of
    for part in parts:
        key = tuple(sorted({of[d] for d in part.sources})), tuple(sorted({of[d] for d in part.targets}))
        buckets.setdefault(key, []).append(part.group)
    for side in (0, 1):  # a class that is in two buckets has members that wait for different ranks
        involved = [number for key in buckets for number in key[side]]
        if len(involved) != len(set(involved)):
            return False
    for (sources, targets), groups in buckets.items():
        if not cost_model.same_seconds(signature, groups):
            return False
        if signature.op_type == "Send":
            # Streams go by the class of the peer: each device needs the same peer every time.
            known = pairs.setdefault((sources[0], targets[0]), tuple(sorted(groups, key=_ids)))
            if known != tuple(sorted(groups, key=_ids)):
                return False
    return True


def _ids(group: Group) -> tuple[int, ...]:
    return tuple([device.id for device in group])
