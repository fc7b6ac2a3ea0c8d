"""merge_composites: what a model spells in several ops, and frameworks run as one, as that one op.

An exported GELU is five to nine ops of ONNX, a normalization six to thirteen, with casts to float32 and back
inside. Differentiated like that they save every intermediate; the one op saves what its kernel does. No
spelling is listed: a region of ops (:mod:`distsim.transforms.kernels.composites`) is computed in float64, on
numbers that tell the candidates apart, and is the operator whose numbers it makes.

Regions: the ops by which one value follows from one other, element by element or along its rows.

A region is grown backwards from its last op. An op joins it when nothing else reads what the op makes, so
that one kernel can stand for all of them. Of what comes in, numbers that are known and vectors along the
rows (a scale, a bias) are operands; the rest has to be one value, of the shape of what comes out. Casts
between real types change nothing here: a region is computed in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np

from distsim.cache import cached
from distsim.errors import DistsimError
from distsim.ir import DType, Function, Literal, Op, Role, Tensor, Value
from distsim.ir.dead import brings_backward
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes
from distsim.ops import compute, operator, signature_of
from distsim.ops.operator import Array
from distsim.ops.places import shape_of
from distsim.transforms.kernels.fused_attention import OpWriter
from distsim.transforms.kernels.known import Changes, FunctionScope, draws, rewrite_scopes
from distsim.transforms.kernels.policies import fusible, is_pointwise

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


MOST_OPS = 16
"""Larger regions are not looked at: a LayerNormalization between casts has 13 ops, a GELU 10."""

MOST_IN_CHAIN = 6
"""Nor are longer ones of which each op has one operand: a Softplus has 3 ops, a Sigmoid 4."""


@dataclass(frozen=True)
class OpRegion:
    """Ops in order, from ``source`` [..., n] and ``vectors`` (n elements each) to the result of the last op.

    ``numbers`` are the known operands, among them the ``scalars`` that may be settings of a function.
    """

    source: Value
    vectors: tuple[Value, ...]
    ops: tuple[Op, ...]
    numbers: dict[Value, Array]

    @property
    def last(self) -> Op:
        """The op that makes the result."""
        return self.ops[-1]

    @property
    def along_rows(self) -> bool:
        """Whether elements depend on others of their row."""
        return bool(self.vectors) or any(_reduces(op) for op in self.ops)

    @property
    def scalars(self) -> tuple[float, ...]:
        """The known numbers, those among the attributes included."""
        found = [array for array in self.numbers.values() if array.size == 1 and array.dtype.kind == "f"]
        for op in self.ops:
            for item in op.attributes.values():
                array = np.asarray(getattr(item, "array", item))
                if array.size == 1 and array.dtype.kind == "f":
                    found.append(array)
        return tuple(dict.fromkeys([float(array.reshape(-1)[0]) for array in found]))

    @property
    def structure(self) -> Hashable:
        """All that :meth:`compute` depends on: regions that have this in common compute the same."""
        names: dict[Value, Hashable] = {self.source: str(self.source.type)}
        names |= {value: (place, shape_of(value)) for place, value in enumerate(self.vectors)}
        names |= {value: Literal(array) for value, array in self.numbers.items()}
        made: list[Hashable] = []
        for op in self.ops:
            operands = tuple([names[value] for value in op.inputs])
            made.append((op.op_type, op.attributes, op.version, operands))
            names[op.outputs[0]] = len(made)
        return tuple(made)

    def compute(self, source: Array, vectors: Sequence[Array]) -> Array:
        """Return the result for other numbers of the source, with any leading dimensions, in float64."""
        env: dict[Value, Array] = {self.source: source, **self.numbers}
        env |= dict(zip(self.vectors, vectors, strict=True))
        for op in self.ops:
            given = [env[value] for value in op.inputs]
            made = [given[0]] if op.op_type == "Cast" else _computed(op, given)
            env |= dict(zip(op.outputs, made, strict=True))
        return env[self.last.outputs[0]]


def _computed(op: Op, given: Sequence[Array]) -> Sequence[Array]:
    return compute(op.op_type, op.attributes, op.version, given, len(op.outputs))


def _reduces(op: Op) -> bool:
    return op.op_type.startswith("Reduce")


def _is_real(value: Value) -> bool:
    return isinstance(value.type, Tensor) and value.type.dtype.is_floating


def regions_of(scope: FunctionScope, last: Op) -> Iterator[OpRegion]:
    """Yield the regions of at least two ops that end with an op, the smallest first.

    The source and the result have one shape, of at least one dimension, and one real type.
    """
    if len(last.outputs) != 1 or not shape_of(last.outputs[0]) or not _is_real(last.outputs[0]):
        return
    growth = _Growth(scope, shape_of(last.outputs[0]))
    if not growth.absorb(last):
        return
    returned = set(scope.function.outputs)
    while len(growth.ops) <= (MOST_IN_CHAIN if growth.is_chain else MOST_OPS):
        if len(growth.frontier) == 1:
            (source,) = growth.frontier
            enough = sum(op.op_type != "Cast" for op in growth.ops) > 1
            if enough and source.type == last.outputs[0].type:
                yield growth.region(source)
        # The source precedes all that follows from it: the latest value is never the source of the others.
        made = [(scope.numbers[op], op) for value in growth.frontier if (op := scope.makers.get(value))]
        _, op = max(made, key=lambda pair: pair[0], default=(0, None))
        if op is None or not returned.isdisjoint(op.outputs) or not growth.absorb(op):
            return


@dataclass
class _Growth:
    """The ops so far, and the values that they read which may be made by more of them."""

    scope: FunctionScope
    whole: tuple[int, ...]
    ops: list[Op] = field(default_factory=list[Op])
    frontier: dict[Value, None] = field(default_factory=dict[Value, None])
    vectors: dict[Value, None] = field(default_factory=dict[Value, None])
    numbers: dict[Value, Array] = field(default_factory=dict[Value, Array])
    is_chain: bool = True

    def region(self, source: Value) -> OpRegion:
        return OpRegion(source, tuple(self.vectors), tuple(reversed(self.ops)), dict(self.numbers))

    def absorb(self, op: Op) -> bool:
        """Take an op in, if it can be part of a region and nothing outside reads what it makes."""
        if len(op.outputs) != 1 or not self._computes_rows(op):
            return False
        mine = {*self.ops, op}
        if self.ops and not mine.issuperset(self.scope.readers.get(op.outputs[0], ())):
            return False
        wide: list[Value] = []
        vectors: list[Value] = []
        numbers: dict[Value, Array] = {}
        for value in op.inputs:
            known = self.scope.known(value) if _size(value) == 1 or _reduces(op) else None
            if known is not None:
                numbers[value] = known.astype(np.float64) if known.dtype.kind not in "iub" else known
            elif self._is_vector(value):
                vectors.append(value)
            elif shape_of(value) in (self.whole, (*self.whole[:-1], 1)):
                wide.append(value)
            else:
                return False
        if not wide:
            return False
        self.ops.append(op)
        self.is_chain &= len(wide) == 1
        self.frontier.pop(op.outputs[0], None)
        self.frontier.update(dict.fromkeys(wide))
        self.vectors.update(dict.fromkeys(vectors))
        self.numbers |= numbers
        return True

    def _computes_rows(self, op: Op) -> bool:
        """Whether an op computes elements from those in their place, or numbers along the rows."""
        if op.op_type == "Cast":
            return _is_real(op.inputs[0]) and _is_real(op.outputs[0])
        if draws(op) or not fusible(op) or operator(op.op_type).compute is None:
            return False
        if _reduces(op):
            rows = self.whole[-1] > 1 and shape_of(op.inputs[0]) == self.whole
            return rows and shape_of(op.outputs[0]) == (*self.whole[:-1], 1)
        return is_pointwise(signature_of(op)) and all(_is_small(item) for item in op.attributes.values())

    def _is_vector(self, value: Value) -> bool:
        shape, n = shape_of(value), self.whole[-1]
        if n == 1 or _size(value) != n or shape[-1:] != (n,):
            return False
        return len(shape) < len(self.whole) or shape != self.whole or value.role is Role.PARAMETER


def _size(value: Value) -> int:
    return value.type.size if isinstance(value.type, Tensor) else 0


def _is_small(item: Any) -> bool:
    return np.asarray(getattr(item, "array", item)).size <= 1
