"""Rotary embeddings that are written out in ops, and their gradients, found by what the ops compute.

No spelling is listed: ops that multiply by two tables, move halves of rows and add are followed back from the
last one until they read one value and two tables, and are a rotary embedding if for the cosines and sines of
angles they give the numbers of ``RotaryEmbedding``, or of its gradient. Pairs lie half a row apart or side by
side, tables are as wide as the row or half of that. What reshapes between (pairs that are stacked) is not
followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from distsim.cache import cached
from distsim.ir import Float32, Float64, Op, Tensor, Value, substitute
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes
from distsim.ops import compute
from distsim.ops.onnx_bridge import static_array, type_number
from distsim.ops.operator import Array
from distsim.ops.places import shape_of

_MOVES = frozenset({"Split", "Slice", "SliceGrad", "Concat"})
_PARTS = _MOVES | {"Mul", "Neg", "Add", "Sub", "Cast"}
_LAST = frozenset({"Add", "Sub", "Concat"})

MOST_OPS = 16
"""More are not looked at: the halves of a row, turned on their own, with a cast each take 13."""


def rotations(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """Return the places of the ops of each rotary embedding, in order.

    No other op reads what they make, but for the last one of each. There are none where nothing moves along
    rows.
    """
    if all(op.op_type not in _MOVES for op in ops):
        return []
    maker = {value: place for place, op in enumerate(ops) for value in op.outputs}
    readers: dict[Value, set[int]] = {}
    for place, op in enumerate(ops):
        for value in op.inputs:
            readers.setdefault(value, set()).add(place)
    found: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for place in reversed(range(len(ops))):
        if ops[place].op_type in _LAST and place not in taken and _is_part(ops[place]):
            region = _region(ops, place, maker, readers)
            taken.update(region)
            found += [region] if region else []
    return found[::-1]


def of_whole_heads(ops: Sequence[Op], region: tuple[int, ...]) -> tuple[int, ...]:
    """Return the places of a rotary embedding with those of the ops that split off what does not turn of a
    head, behind it, and put it back: a kernel of rotary embeddings copies the rest (``fused_rope`` of apex,
    csrc/megatron/fused_rotary_positional_embedding.h, and of Transformer Engine: of d dimensions d2 turn).
    """
    inside = {value for place in region for value in ops[place].outputs}
    (result,) = ops[region[-1]].outputs
    reads = {value for place in region for value in ops[place].inputs} - inside
    readers = [place for place, op in enumerate(ops) if result in op.inputs]
    if len(readers) != 1 or ops[readers[0]].op_type != "Concat":
        return region
    (last,) = readers
    makers = [
        place for place, op in enumerate(ops[: region[0]]) if op.op_type == "Split" and op.outputs[0] in reads
    ]
    for first in makers:
        turned, *rest = ops[first].outputs
        alone = {place for place, op in enumerate(ops) if not {turned, *rest}.isdisjoint(op.inputs)}
        along = all(_is_part(ops[place]) for place in (first, last))
        if along and alone <= {*region, last} and ops[last].inputs == (result, *rest):
            return (first, *region, last)
    return region


def in_wide(op: Op) -> bool:
    """Whether an op makes a type that is multiplied as it is: no cast to float32 is a kernel then."""
    (made,) = op.outputs
    return isinstance(as_tensor(made.type, made.name).dtype, Float32 | Float64)


def in_float32(ops: Sequence[Op]) -> list[Op]:
    """Return the ops of a rotary embedding between casts of what turns to float32 and back, outside and in.

    Between the first and the last they are a kernel that reads and writes float32, as multiplying complex
    numbers is, whatever the type in which they compute here.
    """
    made = {value for op in ops for value in op.outputs}
    (result,) = ops[-1].outputs
    read = dict.fromkeys([value for op in ops for value in op.inputs if value not in made])
    (source,) = [value for value in read if shape_of(value) == shape_of(result)]
    narrow, turned = Value(source.name, source.type), Value(result.name, result.type)
    wide = [Value(v.name, replace(as_tensor(v.type, v.name), dtype=Float32())) for v in (source, result)]
    own = {source: narrow, result: turned}
    inside = [
        replace(op, inputs=substitute(op.inputs, own), outputs=substitute(op.outputs, own)) for op in ops
    ]
    return [
        cast_op(source, wide[0]),
        cast_op(wide[0], narrow),
        *inside,
        cast_op(turned, wide[1]),
        cast_op(wide[1], result),
    ]


def cast_op(value: Value, to: Value) -> Op:
    """Return the cast of a value to the type of another, which it makes."""
    return Op("Cast", (value,), (to,), Attributes({"to": type_number(as_tensor(to.type, to.name).dtype)}))


def _is_part(op: Op) -> bool:
    """Whether an op multiplies, adds, or moves numbers along rows; of values only."""
    if op.op_type not in _PARTS or not all(isinstance(v.type, Tensor) for v in (*op.inputs, *op.outputs)):
        return False
    if op.op_type not in _MOVES:
        return len(op.inputs) == (1 if op.op_type in ("Neg", "Cast") else 2)
    last = len(shape_of(op.outputs[0])) - 1
    axes = static_array(op.attributes.get("axes", op.attributes.get("axis", 0)), None).reshape(-1)
    along = axes.size == 1 and axes[0] % (last + 1) == last
    return along and (len(op.inputs) == 1 or op.op_type == "Concat")


def _region(
    ops: Sequence[Op], last: int, maker: dict[Value, int], readers: dict[Value, set[int]]
) -> tuple[int, ...]:
    """Return the places of the fewest ops, up to the last one, that are a rotary embedding; or none."""
    inside, sources, following = {last}, set[Value](), dict.fromkeys(ops[last].inputs)
    while True:
        inputs = [*sources, *following]
        if len(inputs) == 3 and _turns([ops[place] for place in sorted(inside)], inputs):
            return tuple(sorted(inside))
        # The source precedes all that follows from it: latest first.
        value = max(following, key=lambda value: maker.get(value, -1), default=None)
        if value is None or len(inside) == MOST_OPS or len(sources) > 3:
            return ()
        place = maker.get(value, -1)
        made = () if place < 0 else ops[place].outputs
        if place >= 0 and _is_part(ops[place]) and all(readers.get(v, inside) <= inside for v in made):
            inside.add(place)
            for output in made:
                following.pop(output, None)
            following.update(dict.fromkeys([v for v in ops[place].inputs if v not in sources]))
        else:
            following.pop(value)
            sources.add(value)


def _turns(ops: Sequence[Op], inputs: Sequence[Value]) -> bool:
    """Whether ops turn one of their three inputs by angles of which the two others are tables."""
    whole = shape_of(ops[-1].outputs[0])
    if len(whole) < 2 or whole[-1] % 2 or all(op.op_type not in _MOVES for op in ops):
        return False
    for x, cos, sin in permutations(inputs):
        width = shape_of(cos)[-1:]
        alike = shape_of(cos) == shape_of(sin) and width in ((whole[-1],), (whole[-1] // 2,))
        if shape_of(x) == whole and alike and _computes_rotation(_RowOps.of(ops, (x, cos, sin))):
            return True
    return False


@dataclass(frozen=True)
class _RowOps:
    """What ops do to rows, whatever the other dimensions are.

    Values have numbers. ``inputs``: their ranks and widths; ``ops``: of each its type, its attributes, its
    operands and how many results it has.
    """

    inputs: tuple[tuple[int, int], ...]
    ops: tuple[tuple[str, Attributes, tuple[int, ...], int], ...]

    @staticmethod
    def of(ops: Sequence[Op], inputs: Sequence[Value]) -> _RowOps:
        numbers = {value: number for number, value in enumerate(inputs)}
        made: list[tuple[str, Attributes, tuple[int, ...], int]] = []
        for op in ops:
            attributes = op.attributes
            if "shape" in attributes:
                attributes = Attributes({**attributes, "shape": _row(shape_of(op.outputs[0]))})
            operands = tuple([numbers[value] for value in op.inputs])
            made.append((op.op_type, attributes, operands, len(op.outputs)))
            numbers |= {value: len(numbers) + place for place, value in enumerate(op.outputs)}
        sizes = tuple([(len(shape_of(value)), shape_of(value)[-1]) for value in inputs])
        return _RowOps(sizes, tuple(made))

    def compute(self, arrays: Sequence[Array]) -> Array:
        """Return the last result for one row, in float64."""
        ranks = [rank for rank, _ in self.inputs]
        values = [array.reshape(*[1] * (rank - 1), -1) for array, rank in zip(arrays, ranks, strict=True)]
        for op_type, attributes, operands, count in self.ops:
            given = [values[number] for number in operands]
            values += given if op_type == "Cast" else compute(op_type, attributes, None, given, count)
        return values[-1].reshape(-1)


def _row(shape: Sequence[int]) -> tuple[int, ...]:
    return (*[1] * (len(shape) - 1), *shape[-1:])


@cached("whether ops turn rows, by what they do to them", 1024)
def _computes_rotation(rows: _RowOps) -> bool:
    (_, width), (_, table), _ = rows.inputs
    rng = np.random.default_rng(0)
    x, angles = rng.standard_normal(width), rng.uniform(0, np.pi, width // 2)
    for interleaved, name in product((0, 1), ("RotaryEmbedding", "RotaryEmbeddingGrad")):
        cos, sin = np.cos(angles), np.sin(angles)
        given = [x.reshape(1, 1, 1, -1), cos.reshape(1, 1, -1), sin.reshape(1, 1, -1)]
        expected = compute(name, Attributes({"interleaved": interleaved}), None, given, 1)[0].reshape(-1)
        if table == width:
            cos, sin = (np.repeat(each, 2) if interleaved else np.tile(each, 2) for each in (cos, sin))
        made = rows.compute((x, cos, sin))
        if made.shape == expected.shape and np.allclose(made, expected, rtol=0, atol=1e-12):
            return True
    return False
