"""merge_composites: what a model spells in several ops, and frameworks run as one, as that one op.

An exported GELU is five to nine ops of ONNX, a normalization six to thirteen, with casts to float32 and back
inside. Differentiated like that they save every intermediate; the one op saves what its kernel does. No
spelling is listed: a region of ops (:mod:`distsim.transforms.kernels.regions`) is computed in float64, on
numbers that tell the candidates apart, and is the operator whose numbers it makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from distsim.cache import cached
from distsim.errors import DistsimError
from distsim.ir import DType, Function, Op, Value
from distsim.ir.dead import brings_backward
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes
from distsim.ops import compute
from distsim.ops.operator import Array
from distsim.ops.places import shape_of
from distsim.transforms.kernels.fused_attention import OpWriter
from distsim.transforms.kernels.known import Changes, FunctionScope, rewrite_scopes
from distsim.transforms.kernels.regions import OpRegion, regions_of

_NOTE = "composites: "

_PLAIN = (
    *("Gelu", "Swish", "Mish", "HardSwish", "Softplus", "Sigmoid", "Softsign", "Tanh", "Relu"),
    *("Elu", "Selu"),
)
_POINTWISE: tuple[tuple[str, dict[str, Any]], ...] = (
    *[(name, dict[str, Any]()) for name in _PLAIN],
    ("Gelu", {"approximate": "tanh"}),
    ("HardSigmoid", {"alpha": 1 / 6}),
)
"""Functions of one number, and settings in which models have them."""

_WITH_ALPHA = ("Swish", "LeakyRelu", "Elu", "Celu")
"""Those of which any number of a region may be the setting ``alpha``: the sigmoid form of GELU is a Swish."""


def merge_composites(function: Function) -> Function:
    """Return the function with activations, normalizations and softmaxes that it spells out as one op each.

    The result computes what the original did, within the rounding of its numbers: 1e-9 in float64, of a
    narrower type what the constants that are written in it leave open. Its notes say how many were found;
    a function that brings its backward pass is left as it is.
    """
    if brings_backward(function):
        return function
    merger = _CompositeMerger()
    whole = rewrite_scopes(function, merger.changes)
    if whole is function:
        return function
    others = [note for note in function.notes if not note.startswith(_NOTE)]
    counts = ", ".join(f"{count} {name}" for name, count in sorted(merger.found.items()))
    return replace(whole, notes=(*others, f"{_NOTE}{counts}, spelled out, as one op each"))


@dataclass(frozen=True)
class _Match:
    """An operator, its settings, and which vectors of the region it reads, in order."""

    op_type: str
    attributes: Attributes
    vectors: tuple[int, ...] = ()


class _CompositeMerger:
    """What was found so far; regions of one structure are computed once."""

    def __init__(self) -> None:
        self.found = Counter[str]()
        self._matches: dict[Hashable, _Match | None] = {}

    def changes(self, scope: FunctionScope) -> Changes:
        """Return what stands for the last ops of regions: of each the largest, later ones first."""
        changes: Changes = {}
        inside: set[Op] = set()
        for op in reversed(scope.function.ops):
            if op in inside:
                continue
            for region in reversed(list(regions_of(scope, op))):
                key = region.structure
                if key not in self._matches:
                    self._matches[key] = _matching(region)
                match = self._matches[key]
                made = None if match is None else _written(scope, region, match)
                if match is not None and made is not None:
                    changes[op] = made
                    inside.update(region.ops)
                    self.found[match.op_type] += 1
                    break
        return changes


def _written(scope: FunctionScope, region: OpRegion, match: _Match) -> tuple[Op, ...] | None:
    """Return the ops that stand for the last one of a region; None where that needs other types."""
    last, wanted = region.last, as_tensor(region.source.type, region.source.name)
    given = [_of_type(scope, region.vectors[place], wanted.dtype) for place in match.vectors]
    if any(_dtype(value) != wanted.dtype for value in given):
        return None
    writer = OpWriter(list(dict.fromkeys([region.source, *given])), last.name)
    flat = wanted.shape[-1:]
    vectors = [v if shape_of(v) == flat else writer.one("Reshape", v, shape=flat) for v in given]
    try:
        made = writer.one(match.op_type, region.source, *vectors, **match.attributes)
    except DistsimError:  # an element type that the operator does not take
        return None
    return writer.standing_for(last.outputs[0], made) if made.type == last.outputs[0].type else None


def _dtype(value: Value) -> DType:
    return as_tensor(value.type, value.name).dtype


def _of_type(scope: FunctionScope, value: Value, dtype: DType) -> Value:
    """Return a value, or where it was cast from another type that one."""
    op = scope.makers.get(value)
    cast = _dtype(value) != dtype and op is not None and op.op_type == "Cast"
    return op.inputs[0] if cast and op is not None else value


# --- computing ---------------------------------------------------------------------------------------


def _matching(region: OpRegion) -> _Match | None:
    """Return the operator that makes the same numbers as a region; of several the nearest."""
    # Constants are written in the model's own type, sqrt(2 / pi) in three or in sixteen digits.
    spacing = float(np.spacing(np.ones((), _dtype(region.source).np)))
    best, least = None, max(1e-9, 4 * spacing)
    with np.errstate(all="ignore"):
        for match, difference in _along_rows(region) if region.along_rows else _pointwise(region):
            if difference < least:
                best, least = match, difference
    return best


_SAMPLES = np.concatenate([np.linspace(-12, 12, 193), [-60.0, -1e-3, 1e-3, 60.0]])


@cached("functions of one number on the samples that tell them apart, by operator and attributes", 256)
def _sampled(op_type: str, attributes: Attributes) -> Array:
    return compute(op_type, attributes, None, [_SAMPLES], 1)[0]


def _pointwise(region: OpRegion) -> Iterator[tuple[_Match, float]]:
    """Yield functions of one number, with how far each is from a region."""
    lead = (1,) * (len(shape_of(region.source)) - 1)
    wanted = region.compute(_SAMPLES.reshape(*lead, -1), ()).reshape(-1)
    with_alpha = [(name, {"alpha": number}) for number in region.scalars if number for name in _WITH_ALPHA]
    for name, settings in (*_POINTWISE, *with_alpha):
        match = _Match(name, Attributes(settings))
        yield match, _difference(_sampled(name, match.attributes), wanted)


def _rows(shape: Sequence[int], vectors: tuple[tuple[int, ...], ...]) -> tuple[Array, ...]:
    """Return numbers for a source of this shape and for vectors.

    The rows are of several sizes: what is added to a variance shows where that is small.
    """
    rng = np.random.default_rng(0)
    sizes = np.array([1.0, 1e-3, 30.0])[:, None] if len(shape) > 1 else np.array(1e-1)
    rows = (rng.standard_normal((3, shape[-1]) if len(shape) > 1 else shape) + 0.5) * sizes
    lead = (1,) * (len(shape) - rows.ndim)
    return (rows.reshape(*lead, *rows.shape), *[rng.standard_normal(own) for own in vectors])


def _difference(one: Array, other: Array) -> float:
    """Return the largest difference, relative to numbers over 1; infinite where one is no number."""
    if one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return np.inf
    return float((np.abs(one - other) / np.maximum(np.abs(one), 1)).max())


def _along_rows(region: OpRegion) -> Iterator[tuple[_Match, float]]:
    """Yield functions of a row, with how far each is from a region."""
    rows, *vectors = _rows(shape_of(region.source), tuple(map(shape_of, region.vectors)))
    wanted = region.compute(rows, vectors)
    for match in _functions_of_rows(region):
        given = [rows, *[vectors[place].reshape(-1) for place in match.vectors]]
        yield match, _difference(compute(match.op_type, match.attributes, None, given, 1)[0], wanted)


def _functions_of_rows(region: OpRegion) -> Iterator[_Match]:
    """Yield softmaxes and normalizations over the last dimension, with what a region has for settings."""
    count, n = len(region.vectors), shape_of(region.source)[-1]
    if not count:
        for name in ("Softmax", "LogSoftmax"):
            yield _Match(name, Attributes({"axis": -1}))
    for epsilon in (0.0, *[number for number in region.scalars if 0 < number < 1]):
        options: dict[str, Any] = {"axis": -1, "epsilon": epsilon}
        if count == 0:
            yield _Match("RMSNormalization", Attributes({**options, "scale": np.ones(n)}))
            yield _Match("LayerNormalization", Attributes({**options, "Scale": np.ones(n)}))
        if count == 1:
            yield _Match("RMSNormalization", Attributes(options), (0,))
            yield _Match("LayerNormalization", Attributes(options), (0,))
        if count == 2:
            for order in permutations(range(2)):
                yield _Match("LayerNormalization", Attributes(options), order)
