"""Context parallelism of torch: attention in parts, joined in float32, gradients passed on in float32.

torch.distributed.tensor.experimental (pytorch 0123248a, ``_attention.py``: ``_templated_ring_attention`` and
its backward, which DTensor's dispatcher has for ``scaled_dot_product_attention``) copies a rank's keys and
values into one buffer, and gathers those of all ranks (its rotate method ``allgather``) or sends them around
(``alltoall``) while it attends to its own. It then attends to those of the rank before, and so on, as a ring
does (:mod:`distsim.ops.ring_attention`), and joins each result to what came before in float32
(``_SDPAMerger``, ``convert_to_f32``). Backward begins with a rank's own keys again. Gradients are summed in
float32; those of keys and values pass on, in float32, after each part: as many messages as ranks, of which
the last, with which they are home, has nothing beside it.

``WideMergeAttention`` is one kernel, as inductor makes one of what joins two results (out of it torch runs
several): what it makes is in float32 at least, or with ``narrow`` in the type of the second one. ``WideAdd``
adds a gradient to such a sum. Gradients are not copied into the buffers of their messages, as inductor writes
sums where they are joined (``ConcatKernel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.errors import TypeRuleError
from distsim.ir.function import Op
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import DType, Tensor, as_tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.normalization import widened, wider
from distsim.ops.onnx_bridge import type_number
from distsim.ops.operator import Array, Operator, arity, memory_bound, register
from distsim.ops.ring_attention import Ring, merged
from distsim.ops.sharding_rule import Build


def _merge_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("WideMergeAttention", inputs, 4)
    (y, lse), (other, other_lse) = inputs[:2], inputs[2:]
    if y.shape != other.shape or lse != other_lse or lse.shape != y.shape[:3]:
        given = ", ".join(map(str, inputs))
        raise TypeRuleError(f"WideMergeAttention joins two pairs of Y and lse, not {given}")
    return replace(y, dtype=other.dtype if "narrow" in attributes else wider(y.dtype)), lse


def _merge(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    y, lse = merged(arrays)
    return [y.astype(arrays[2].dtype if "narrow" in attributes else widened(arrays[0]).dtype), lse]


register(
    Operator("WideMergeAttention", types=_merge_types, compute=_merge, work=lambda s: memory_bound(s, 3.0))
)


def _sum_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("WideAdd", inputs, 2)
    if inputs[0].shape != inputs[1].shape:
        raise TypeRuleError(f"WideAdd: shapes {inputs[0].shape} and {inputs[1].shape} must agree")
    return inputs[:1]


register(
    Operator(
        "WideAdd",
        types=_sum_types,
        compute=lambda attributes, arrays: [arrays[0] + arrays[1].astype(arrays[0].dtype, copy=False)],
        work=lambda s: memory_bound(s, 1.0),
        overwrites={0: 0},
    )
)


class _Passing:
    """Keys and values as a rank has them, step by step: gathered at once, or sent around."""

    def __init__(self, ring: Ring, values: Sequence[Value], rotate: str) -> None:
        self.ring, self.gathers = ring, rotate == "allgather"
        self.current: Sequence[Value] = values
        own = ring.maker.add("CopyIn", values)
        self.moved = ring.gather(own) if self.gathers else ring.shift(own)

    def step_on(self, step: int) -> None:
        """Go on to those of the rank ``step`` places before, and send them on where they go around."""
        if self.gathers:
            self.current = [self.ring.gathered_part(value, step) for value in self.moved]
            return
        self.current = self.moved
        if step + 1 < self.ring.ranks:
            self.moved = self.ring.shift(self.current)


def _cast(ring: Ring, value: Value, dtype: DType) -> Value:
    if as_tensor(value.type, value.name).dtype == dtype:
        return value
    return ring.maker.add("Cast", (value,), {"to": type_number(dtype)})[0]


def _sums(ring: Ring, so_far: Sequence[Value], parts: Sequence[Value], dtype: DType) -> list[Value]:
    """Return the sums of gradients, in a type; of the first ones the gradients."""
    if not so_far:
        return [_cast(ring, part, dtype) for part in parts]
    return [ring.maker.add("WideAdd", pair)[0] for pair in zip(so_far, parts, strict=True)]


def attend_by(rotate: str) -> Build:
    """Return what writes attention in parts, whose keys come by a rotate method of torch."""

    def build(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
        ring = Ring(maker, op, inputs, axis)
        query, own = inputs[0], ring.places()
        keys = _Passing(ring, inputs[1:3], rotate)
        made: tuple[Value, ...] = ()
        for step in range(ring.ranks):
            if step:
                keys.step_on(step)
            operands = (query, *keys.current, own, ring.places(step))
            found = ring.attend("AttentionPart", operands, True, step)
            narrow = {"narrow": 1} if step + 1 == ring.ranks else {}
            made = maker.add("WideMergeAttention", (*made, *found), narrow) if made else found
        return made

    return build


def attend_backward_by(rotate: str) -> Build:
    """Return what writes its gradients."""

    def build(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
        ring = Ring(maker, op, inputs, axis)
        query, own = inputs[0], ring.places()
        dtype = as_tensor(query.type, query.name).dtype
        keys = _Passing(ring, inputs[1:3], rotate)
        of_query, behind = list[Value](), list[Value]()
        for step in range(ring.ranks):
            if step:
                keys.step_on(step)
            operands = (query, *keys.current, own, ring.places(step), *inputs[3:])
            grad, *grads = ring.attend("AttentionPartGrad", operands, True, step)
            behind = list(ring.shift(_sums(ring, behind, grads, wider(dtype))))
            of_query = _sums(ring, of_query, [grad], wider(dtype))
        return [_cast(ring, value, dtype) for value in (*of_query, *behind)]

    return build
