"""Attention of ranks that have parts of a sequence: of their queries over all keys, or in steps of a ring.

``AttentionPart`` is ``Attention`` of queries and keys that lie at given places of the sequence, q_places
[seq] and k_places [kv_seq]. ``pairs`` is how many pairs of query and key it multiplies for each head: the
mean over the ranks, which is that of each rank where the sequence is divided in zigzag.

Around a ring of c ranks each has a part of queries, keys and values. In step i it attends to the keys of the
rank i places before it, which pass on while it computes (Liu et al. 2023, Ring Attention); what the steps
make is joined by the logarithms of the softmax's sums (``MergeAttention``). Backward goes around the other
way, from where forward ended: keys and values of the next rank first, of the rank itself last; the sums of
their gradients follow in the same messages, each while the next step computes, and are home with the last.
Both are sent c-1 times in c messages, as in TransformerEngine (``context_parallel.py``), if what came last is
saved (:mod:`distsim.transforms.key_heads`, the attribute ``last``); else the rank's own are sent back first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.cache import cached
from distsim.errors import TypeRuleError
from distsim.ir.device import Mesh
from distsim.ir.function import Op
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import Int64, Tensor, as_tensor
from distsim.ir.value import Attributes, Literal, Value
from distsim.ops.attention import attend, attend_backward, attention_work, joined_shape, sizes_of
from distsim.ops.attention_options import OPTION_NAMES, AttentionOptions, pairs_seen, seen
from distsim.ops.coalescing import alike, coalesced
from distsim.ops.communication import mesh_and_ranks, resized
from distsim.ops.normalization import widened, wider
from distsim.ops.operator import (
    Array,
    Communication,
    Operator,
    arity,
    common_device,
    memory_bound,
    register,
)
from distsim.ops.parts import divided_size, take_part
from distsim.ops.places import operands, picked, view_work

_PART = ("Q", "K", "V", "q_places", "k_places")
_PART_GRAD = (*_PART, "Y", "lse", "dY")


# --- what ranks do ------------------------------------------------------------------------------------


def _places_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, count = mesh_and_ranks("LocalPlaces", attributes, inputs)
    dim = attributes.get("dim", 0)
    size = divided_size("LocalPlaces", tensor, dim, count, attributes["pieces"])
    return resized(tensor, dim, size)


def _local_places(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    count, back, dim = len(ranks), attributes["back"], attributes.get("dim", 0)
    pieces = attributes["pieces"]
    return [take_part(array, dim, (i - back) % count, count, pieces) for i, array in enumerate(ranks)]


def _shifted(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return [*ranks[1:], ranks[0]] if "back" in attributes else [ranks[-1], *ranks[:-1]]


def _shift_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    mesh_and_ranks("MPIShift", attributes, inputs)
    return inputs


register(
    Operator(
        "MPIShift",  # from each rank to the next, with ``back`` to the one before
        types=coalesced("MPIShift", _shift_types),
        communication=Communication(
            "shift", _shifted, lambda s: sum([t.nbytes for t in s.inputs]), operand=alike
        ),
    )
)
register(
    Operator(
        "LocalPlaces",  # those of the rank ``back`` places before: a kernel has them as arguments
        types=_places_types,
        work=view_work,
        communication=Communication("local", _local_places, lambda _: 0),
        view=True,
    )
)


def _check_places(op_type: str, inputs: Sequence[Tensor]) -> None:
    for tensor, size in ((inputs[3], inputs[0].shape[2]), (inputs[4], inputs[1].shape[2])):
        if (tensor.dtype, tensor.shape) != (Int64(), (size,)):
            raise TypeRuleError(f"{op_type}: {tensor} does not say where {size} of a sequence are")


def _part_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("AttentionPart", inputs, 5)
    sizes = sizes_of(_PART, attributes, inputs)
    _check_places("AttentionPart", inputs)
    device = common_device("AttentionPart", inputs)
    wide = wider(inputs[0].dtype)
    return Tensor(inputs[0].dtype, sizes.output, device), Tensor(wide, sizes.output[:3], device)


def _part_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("AttentionPartGrad", inputs, 8)
    sizes = sizes_of(_PART_GRAD, attributes, inputs)
    _check_places("AttentionPartGrad", inputs)
    whole = joined_shape(sizes) if attributes.get("joined", 0) else sizes.output
    if tuple(t.shape for t in inputs[5:]) != (whole, sizes.output[:3], sizes.output):
        raise TypeRuleError(f"AttentionPartGrad: {inputs[5:]} are not of {sizes.output}")
    return inputs[:3]


def _part(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return attend(operands(_PART, attributes, arrays), AttentionOptions.of_attributes(attributes))


register(
    Operator(
        "AttentionPart",
        types=_part_types,
        compute=_part,
        work=lambda s: attention_work(s, 1, 0, _PART),
        formals=_PART,
        exact=lambda attributes, count: range(3, count),
    )
)
register(
    Operator(
        "AttentionPartGrad",
        types=_part_grad_types,
        compute=lambda attributes, arrays: attend_backward(
            operands(_PART_GRAD, attributes, arrays), attributes
        ),
        work=lambda s: attention_work(s, 2, 1, _PART_GRAD),
        formals=_PART_GRAD,
        exact=lambda attributes, count: range(3, count - 1),  # places, Y and lse
    )
)


def _merge_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("MergeAttention", inputs, 4)
    y, lse = inputs[:2]
    if inputs[2:] != inputs[:2] or lse.shape != y.shape[:3]:
        raise TypeRuleError(f"MergeAttention joins two pairs of Y and lse, not {', '.join(map(str, inputs))}")
    return y, lse


def merged(arrays: Sequence[Array]) -> tuple[Array, Array]:
    """Return Y, in float32 at least, and lse of two results of attention to different keys.

    Where nothing is seen, lse is infinite: that part weighs nothing.
    """
    (one, of_one), (other, of_other) = arrays[:2], arrays[2:]
    top = np.maximum(
        np.where(of_one == np.inf, -np.inf, of_one), np.where(of_other == np.inf, -np.inf, of_other)
    )
    top = np.where(np.isfinite(top), top, 0)
    weights = [np.where(lse == np.inf, 0, np.exp(lse - top)) for lse in (of_one, of_other)]
    total = weights[0] + weights[1]
    blind = total == 0
    share = [(weight / np.where(blind, 1, total))[..., None] for weight in weights]
    lse = np.where(blind, np.inf, top + np.log(np.where(blind, 1, total)))
    return widened(one) * share[0] + widened(other) * share[1], lse.astype(of_one.dtype, copy=False)


def _merge(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    y, lse = merged(arrays)
    return [y.astype(arrays[0].dtype, copy=False), lse]


register(
    Operator(
        "MergeAttention",
        types=_merge_types,
        compute=_merge,
        work=lambda s: memory_bound(s, 3.0),
        overwrites={0: 0, 1: 1},
    )
)


# --- what an attention becomes ------------------------------------------------------------------------


@cached("pairs of query and key of the ranks of a sequence", 4096)
def _pairs(seq: int, parts: int, ring: bool, step: int, options: AttentionOptions) -> float:
    """Return the pairs that a rank multiplies for each head, in a step or at once: the mean of the ranks."""
    if not ring:
        return pairs_seen(seq, seq, options) / parts
    if options.window is None:
        return (0.5 if options.is_causal else 1.0) * (seq // parts) ** 2
    own = [(take_part(np.arange(seq), 0, rank, parts, _pieces(seq))) for rank in range(parts)]
    found = [seen(own[rank], own[(rank - step) % parts], options) for rank in range(parts)]
    whole = float(np.mean([np.sum(visible) for visible in found if visible is not None]))
    return whole - (0.5 * seq / parts if options.is_causal and step == 0 else 0.0)  # as pairs_seen counts


def _pieces(seq: int) -> tuple[int, int]:
    return (seq // 2, -(seq // 2))


class Ring:
    """Writes attention of the ranks of one axis."""

    def __init__(self, maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> None:
        self.maker, self.op, self.axis = maker, op, axis
        query = as_tensor(inputs[0].type, inputs[0].name)
        if not isinstance(query.device, Mesh):
            raise TypeRuleError(f"{op!r} is divided over a mesh axis; its input is on {query.device}")
        self.mesh, self.ranks = query.device, query.device.axis_size(axis)
        self.seq = query.shape[2] * self.ranks
        self.options = AttentionOptions.of_attributes(op.attributes)
        self.shared = picked(op.attributes, *OPTION_NAMES, "joined")

    def all_places(self) -> Value:
        """Return the places of all ranks' queries, in the order of the sequence."""
        value = Literal(np.arange(self.seq))
        return self.maker.add("Constant", (), {"value": value, "device": self.mesh})[0]

    def places(self, back: int = 0) -> Value:
        """Return those of the rank ``back`` places before."""
        attributes = {"axis": self.axis, "pieces": _pieces(self.seq), "back": back}
        return self.maker.add("LocalPlaces", (self.all_places(),), attributes)[0]

    def gather(self, values: Sequence[Value]) -> Sequence[Value]:
        """Return of values along a sequence those of all ranks, one rank behind the other, as one message."""
        return self.maker.add("MPIAllgather", values, {"axis": self.axis, "dim": 2})

    def gathered_part(self, value: Value, back: int) -> Value:
        """Return the part of the rank so many places before: what was gathered, seen from there."""
        shape = as_tensor(value.type, value.name).shape
        attributes = {"axis": self.axis, "pieces": (shape[2],), "back": back, "dim": 2}
        return self.maker.add("LocalPlaces", (value,), attributes)[0]

    def shift(self, values: Sequence[Value], back: bool = False) -> Sequence[Value]:
        """Send values on to the next rank, or ``back`` to the one before, as one message."""
        return self.maker.add("MPIShift", values, {"axis": self.axis, **({"back": 1} if back else {})})

    def add(self, *values: Value) -> Value:
        """Return the sum of a value or two."""
        return values[0] if len(values) == 1 else self.maker.add("Add", values)[0]

    def attend(self, op_type: str, operands: Sequence[Value], ring: bool, step: int = 0) -> tuple[Value, ...]:
        """Attend, by an op, to keys that some rank has (``ring``: that ``step`` before), or to all."""
        pairs = _pairs(self.seq, self.ranks, ring, step, self.options)
        return self.maker.add(op_type, operands, {**self.shared, "pairs": pairs}, name=self.op.name)


def attend_part(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
    """Add the attention of a rank's queries over the keys of all ranks, which are in their order."""
    ring = Ring(maker, op, inputs, axis)
    return ring.attend("AttentionPart", (*inputs[:3], ring.places(), ring.all_places()), False)


def attend_part_backward(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
    """Add its gradients: those of keys and values are sums over the ranks."""
    ring = Ring(maker, op, inputs, axis)
    operands = (*inputs[:3], ring.places(), ring.all_places(), *inputs[3:])
    return ring.attend("AttentionPartGrad", operands, False)


def attend_ring(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
    """Add the steps of a ring: each attends to what the one before has sent, and sends it on."""
    ring = Ring(maker, op, inputs, axis)
    (query, *passing), own = inputs[:3], ring.places()
    made: tuple[Value, ...] = ()
    for step in range(ring.ranks):
        following = ring.shift(passing) if step + 1 < ring.ranks else passing
        found = ring.attend("AttentionPart", (query, *passing, own, ring.places(step)), True, step)
        made = maker.add("MergeAttention", (*made, *found)) if made else found
        passing = following
    return (*made, *passing) if "last" in op.attributes else made


def attend_ring_backward(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
    """Add the steps of its gradients: those of keys and values follow these back to whose they are."""
    ring = Ring(maker, op, inputs, axis)
    (query, *passing), own = inputs[:3], ring.places()
    if "last" not in op.attributes:
        passing = list(ring.shift(passing, back=True))
    of_query, behind = list[Value](), list[Value]()  # gradients of what passes, of the steps that are done
    for step in reversed(range(ring.ranks)):
        count = len(passing) if step else 0
        moved = ring.shift((*passing[:count], *behind), back=True) if count or behind else ()
        operands = (query, *passing, own, ring.places(step), *inputs[3:])
        grad, *grads = ring.attend("AttentionPartGrad", operands, True, step)
        of_query = [ring.add(*of_query, grad)]
        arrived = moved[count:]
        behind = [ring.add(*each) for each in zip(arrived, grads, strict=True)] if arrived else grads
        passing = list(moved[:count])
    return [*of_query, *behind]
