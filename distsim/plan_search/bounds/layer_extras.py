"""What ranks send each other for a layer, and the sums of its gradients, as a step has them.

In which type gradients are summed over ranks, and how often parameters are gathered, is chosen when a step is
built. What ranks pad, and what a message has besides, counts as nothing, so it is the same for any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from distsim.ir import Function, Op, Tensor, Value
from distsim.ops import operator
from distsim.ops.coalescing import moved_values
from distsim.plan_search.bounds.layer_figures import LayerExtras
from distsim.program.parts import Stage
from distsim.transforms.data_parallel.gathers import gathers
from distsim.transforms.data_parallel.gradient_buckets import is_data_reduction
from distsim.transforms.op_graph import hands_on_gradient


def layer_extras(stages: Iterable[tuple[Stage, int]], beside: float) -> LayerExtras:
    """Return that of a layer of stages that have so many each, the least of any; ``beside`` is known."""
    found = [_of_stage(stage, layers) for stage, layers in stages if layers]
    if not found:
        return LayerExtras()
    gathered, reduced, held, sums = map(min, zip(*found, strict=True))
    return LayerExtras(gathered, reduced, held, sums, beside)


def _of_stage(stage: Stage, layers: int) -> tuple[float, float, float, float]:
    backward = stage.backward
    function, summed = backward.function, set(backward.accumulated)
    elements, reduced = _sent(function, {})
    handed = zip(function.outputs, backward.outputs, strict=True)
    keys = {key: value for value, key in handed if value in elements}
    held = sum(elements[value] * _width(value) for key, value in keys.items() if key in summed)
    given = {key: elements[value] for key, value in keys.items()}
    sums = 0.0
    for _, block in stage.updates:
        inner, keyed = block.function, zip(block.function.inputs, block.inputs, strict=True)
        sums += _sent(inner, {value: given[key] for value, key in keyed if key in given})[1]
    gathered = _gathered(stage.forward.function) + _gathered(function)
    return gathered / layers, reduced / layers, held / layers, sums / layers


def _sent(function: Function, known: dict[Value, int]) -> tuple[dict[Value, int], float]:
    """Return the elements of gradients that calls make, besides those that are ``known``, by each value that
    is one of them, moved or cast; and the bytes of them that data-parallel ranks sum."""
    elements, sent = dict(known), 0.0
    for op in function.ops:
        if op.is_call:
            elements.update((value, _size(value)) for value in op.outputs)
        elif hands_on_gradient(op):
            for value, made in _moved(op):
                if value in elements:
                    elements[made] = elements[value]
                    if is_data_reduction(op):
                        sent += elements[value] * _width(value)
    return elements, sent


def _gathered(function: Function) -> float:
    """Return the bytes of parameters that a function gathers for its calls."""
    elements, total = dict[Value, int](), 0.0
    for op in reversed(function.ops):
        if op.is_call:
            elements.update((value, _size(value)) for value in op.inputs)
        elif hands_on_gradient(op):
            for value, made in _moved(op):
                if made in elements and gathers(op):
                    total += elements[made] * _width(made)
                elif made in elements:
                    elements.setdefault(value, elements[made])
    return total


def _moved(op: Op) -> Iterable[tuple[Value, Value]]:
    """Return what an op is given with what it makes of each."""
    if operator(op.op_type).communication is not None:
        return zip(moved_values(op), op.outputs, strict=True)
    alike = len(op.inputs) == len(op.outputs)
    return zip(op.inputs if alike else op.inputs[:1], op.outputs if alike else op.outputs[:1], strict=True)


def _size(value: Value) -> int:
    return int(value.type.size) if isinstance(value.type, Tensor) else 0


def _width(value: Value) -> float:
    return float(value.type.dtype.itemsize) if isinstance(value.type, Tensor) else 0.0
