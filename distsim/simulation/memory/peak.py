"""Peak memory: what is alive when, in the order of the function.

Parameters, state and constants among the inputs are there all the time, but for one of which an op makes a
new value in other memory; that one and any other input is there from the start, and every result from its op,
until after its last use; outputs of the function stay. What a callee returns stays until it has returned.
Views and in-place results take no memory of their own, but an in-place result
does, from its op on, when what it would overwrite is read again later or is an output: of the function
itself or of one that calls it. What is on no device takes none. The order is that of the function, in which
an allocator sees the ops issued, not that of simulated time: how far ops overlap does not change the peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distsim.ir import Device, Function, Op
from distsim.ops.replaced import replacements
from distsim.simulation.memory.origins import origins
from distsim.simulation.memory.plan import gradient_copies, gradient_values
from distsim.simulation.memory.walk import (
    ACTIVATIONS,
    GRADIENTS,
    KIND_OF_ROLE,
    KINDS,
    RESIDENT,
    WORKSPACE,
    Argument,
    Frame,
    Use,
    Walk,
)
from distsim.simulation.tasks.rank_classes import placement_classes
from distsim.simulation.tasks.streams import MemoryRanks

__all__ = ["KINDS", "MemoryUse", "peak_memory"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use on a device: at the peak, by kind (:data:`KINDS`) at the peak, and after the step.

    ``at`` is the op during which the peak is reached first, after the calls that lead to it; empty when
    it is reached before the first op.
    """

    peak: int
    by_kind: Mapping[str, int]
    at: tuple[Op, ...]
    end: int

    def fits(self, device: Device) -> bool:
        """Whether the peak is within what is usable of a device."""
        return self.peak <= device.usable

    def missing(self, device: Device) -> float:
        """Bytes by which the peak exceeds what is usable of a device; 0 if it fits."""
        return max(self.peak - device.usable, 0)


def fullest_device(peaks: Mapping[Device, int]) -> Device | None:
    """Return the device that has the least left of what is usable of it, or needs the most besides.

    Of several, or where nothing limits, the first of those with the most bytes in use; None of none.

    >>> large, small = Device(0, "gpu", memory=80e9), Device(1, "gpu", memory=40e9)
    >>> fullest_device({large: 50_000_000_000, small: 39_000_000_000}) == small
    True
    """
    return min(peaks, key=lambda device: (device.usable - peaks[device], -peaks[device]), default=None)


def peak_memory(function: Function, held: float = 0.0) -> dict[Device, MemoryUse]:
    """Return the memory in use on each device of the function.

    ``held``: the bytes of buffers that hold gradients all the time, by byte of the parameters of a device; 0
    where gradients take memory as they come.

    >>> from distsim.ir import Float, FunctionMaker, Role, Tensor
    >>> gpu = Device(0, "gpu")
    >>> maker = FunctionMaker("f")
    >>> w = maker.add_input_value("w", Tensor(Float(), (100,), gpu), Role.PARAMETER)
    >>> x = maker.add_input_value("x", Tensor(Float(), (100,), gpu))
    >>> y = maker.add_op("LossGrad", inputs=[w, x], attributes={"N": 1})
    >>> peak_memory(maker.finalize())[gpu].peak
    1200
    """
    classes = placement_classes(function)
    first = _from_start(function, whole(function), classes, held=held)
    found: dict[Device, MemoryUse] = {}
    for use, group in zip(memory_uses(first), classes.members, strict=True):
        found.update(dict.fromkeys(group, use))
    return dict(sorted(found.items(), key=lambda item: item[0].id))


def saved_by_module(
    function: Function, classes: MemoryRanks, held: float = 0.0
) -> tuple[dict[str, int], ...]:
    """Return what the activations at the peak of each rank class consist of, by the module they come from.

    They sum to the kind ``activations`` of :func:`peak_memory`. Modules are those that :func:`origins` tells.
    """
    frame = whole(function)
    made = origins(function)
    number: dict[str, int] = {}
    kinds = dict(frame.known)
    for op in function.ops:
        for value in op.outputs:
            if frame.plan.home[value] is value and frame.made(op, value) == ACTIVATIONS:
                kinds[value] = len(KINDS) + number.setdefault(made[value], len(number))
    frame.known = kinds
    use = _from_start(function, frame, classes, len(KINDS) + len(number), held)
    each = [[(module, row[len(KINDS) + n]) for module, n in number.items()] for row in use.peak_by_kind]
    return tuple([{module: nbytes for module, nbytes in row if nbytes} for row in each])


def saved_on(function: Function, device: Device) -> dict[str, int]:
    """Return the same of one device."""
    classes = placement_classes(function)
    found = saved_by_module(function, classes)
    return next(own for own, members in zip(found, classes.members, strict=True) if device in members)


def _from_start(
    function: Function, frame: Frame, classes: MemoryRanks, kinds: int = len(KINDS), held: float = 0.0
) -> Use:
    """Return the use of memory of a function that nothing calls, what it is given included."""
    use = Use(classes, kinds, held > 0)
    for value in function.inputs:
        use.change(value, KIND_OF_ROLE[value.role], +1, ())
    if held:
        use.hold(held)
    use.append(Walk(classes, kinds, held > 0).walk(function, frame), ())
    return use


def whole(function: Function) -> Frame:
    """Return the frame in which a function runs that nothing calls."""
    arguments = [
        Argument(KIND_OF_ROLE[value.role], value.role not in RESIDENT, place)
        for place, value in enumerate(function.inputs)
    ]
    frame = Frame(function, arguments, {}, ACTIVATIONS)
    home = frame.plan.home
    gradients = gradient_values(function)
    known = {home[value]: GRADIENTS for value in gradients}
    known |= {home[value]: WORKSPACE for value in gradient_copies(function, gradients)}
    kinds = {value: KIND_OF_ROLE[value.role] for value in function.inputs if value.role in RESIDENT}
    for value, old in replacements(function).items():  # in the order in which they are made
        if old in kinds:
            kinds[value] = known[home[value]] = kinds[old]
            if home[value] is not home[old]:
                frame.kept.discard(home[old])
    frame.known = known
    return frame


def memory_uses(use: Use) -> tuple[MemoryUse, ...]:
    """Return what ``use`` says of each rank class."""
    return tuple(
        [
            MemoryUse(peak, dict(zip(KINDS, by_kind, strict=True)), at, end)
            for peak, by_kind, at, end in zip(use.peak, use.peak_by_kind, use.at, use.total, strict=True)
        ]
    )
