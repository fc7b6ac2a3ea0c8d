"""Communication operators. Each carries the mesh axis it runs over; sizes are per device.

``MPIAllreduce(x; axis)``, ``MPIAllgather(x; axis, dim)``, ``MPIReduceScatter(x; axis, dim)``,
``MPIAlltoall(x; axis, split, concat)`` run inside a mesh, ``pieces`` say how a dimension is divided
(``split_pieces``, ``concat_pieces`` of an all-to-all, by groups only; over several axes together it may split
or join several dimensions, one an axis, the slowest first: (dimension, ranks, pieces) each); ``MPIAllreduce``
with ``reduce="max"`` takes the largest, not the sum. ``MPIAllgatherInto(part, old; axis, shapes)`` writes the
whole of a tensor of the first of ``shapes`` in the place of the old one, of its flat parts. It,
``MPIAllreduce``, ``MPIAllgather`` and ``MPIReduceScatter`` may be given several tensors, and move them as one
message (:mod:`distsim.ops.coalescing`); with ``in_place`` sums over ranks, or their parts, are where the
operands were. ``LocalSlice(x; axis, dim)`` keeps the own part and moves nothing, nor does
``LocalIndices(indices; axis, size)``, which makes indices of all ranks' rows those of the own ``size``, nor
``LocalPart(x, ...; axis)``, the own flat part where it lies, once the further operands are there. ``Send(x;
to, channel)`` goes from a mesh to another of the same axes, rank by rank; Sends between the same two devices
wait for each other on one channel (0 unless given). ``MPIBroadcast(x; to)``, ``MPIScatter(x; to, shards)`` go
from one device to a mesh, ``MPIGather(x; to, shards)`` back. ``shards`` lists
:data:`distsim.ops.parts.Shard`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.device import Device, Mesh
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.coalescing import alike, coalesced, moved_tensors, one_of_shapes
from distsim.ops.operator import (
    Array,
    Communication,
    GradientContext,
    GradientRule,
    Operator,
    Signature,
    TypesRule,
    arity,
    memory_bound,
    register,
)
from distsim.ops.parts import (
    Groups,
    Parts,
    divided_size,
    flat_part,
    gather,
    join_parts,
    joined_size,
    scatter,
    take_part,
)
from distsim.ops.places import view_work


def _required(op_type: str, attributes: Attributes, *names: str) -> None:
    for name in names:
        if name not in attributes:
            raise TypeRuleError(
                f"{op_type} needs the attribute {name!r}; it has {', '.join(attributes) or 'none'}"
            )


def mesh_and_ranks(op_type: str, attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """Return the one input of an op over a mesh axis, and how many ranks the axis has."""
    arity(op_type, inputs, 1)
    _required(op_type, attributes, "axis")
    tensor = inputs[0]
    if not isinstance(tensor.device, Mesh):
        raise TypeRuleError(f"{op_type} runs over a mesh axis; its input is on {tensor.device}")
    return tensor, tensor.device.axis_size(attributes["axis"])


def _dim(op_type: str, tensor: Tensor, attributes: Attributes) -> int:
    _required(op_type, attributes, "dim")
    dim = attributes["dim"]
    if not isinstance(dim, int) or not 0 <= dim < tensor.rank:
        raise TypeRuleError(f"{op_type}: dim={dim} is not a dimension of {tensor}")
    return dim


def resized(tensor: Tensor, dim: int, size: int) -> tuple[Tensor, ...]:
    """Return the one output of an op that makes this dimension of its input this long."""
    return (tensor.with_shape((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])),)


def _allreduce_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, _ = mesh_and_ranks("MPIAllreduce", attributes, inputs)
    if attributes.get("reduce", "sum") not in ("sum", "max"):
        raise TypeRuleError(f"MPIAllreduce: reduce={attributes['reduce']!r} is neither 'sum' nor 'max'")
    return (tensor,)


def _allgather_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, count = mesh_and_ranks("MPIAllgather", attributes, inputs)
    dim = _dim("MPIAllgather", tensor, attributes)
    return resized(tensor, dim, joined_size(tensor, dim, count, attributes.get("pieces")))


def _allgather_into_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (part, old), (shape,) = inputs, attributes["shapes"]
    (own,) = _local_part_types(attributes, (old,))
    if (part.shape, part.dtype, old.shape) != (own.shape, own.dtype, shape):
        raise TypeRuleError(f"MPIAllgatherInto: {part} is no flat part of {old} of shape {shape}")
    return (old,)


def _local_part_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, count = mesh_and_ranks("LocalPart", attributes, inputs[:1])
    return (tensor.with_shape((flat_part(tensor.size, count),)),)


def _slice_types(op_type: str) -> TypesRule:
    def rule(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tensor, count = mesh_and_ranks(op_type, attributes, inputs)
        dim = _dim(op_type, tensor, attributes)
        return resized(tensor, dim, divided_size(op_type, tensor, dim, count, attributes.get("pieces")))

    return rule


def _exchanged(attributes: Attributes, name: str, count: int) -> Sequence[tuple[int, int, Parts]]:
    """Return what an all-to-all of ``count`` ranks splits, or joins: of each axis a dimension, its ranks, and
    pieces."""
    given: int | tuple[tuple[int, int, Parts], ...] = attributes[name]
    return given if isinstance(given, tuple) else [(given, count, attributes.get(f"{name}_pieces"))]


def _alltoall_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, count = mesh_and_ranks("MPIAlltoall", attributes, inputs)
    _required("MPIAlltoall", attributes, "split", "concat")
    split, concat = (_exchanged(attributes, name, count) for name in ("split", "concat"))
    if {math.prod([ranks for _, ranks, _ in each]) for each in (split, concat)} != {count}:
        raise TypeRuleError(f"MPIAlltoall: {count} ranks neither split {split} nor join {concat}")
    for dim, ranks, pieces in split:
        (tensor,) = resized(tensor, dim, divided_size("MPIAlltoall", tensor, dim, ranks, pieces))
    for dim, ranks, pieces in reversed(concat):
        if not 0 <= dim < tensor.rank:
            raise TypeRuleError(f"MPIAlltoall: there is no dimension {dim} in {tensor}")
        (tensor,) = resized(tensor, dim, joined_size(tensor, dim, ranks, pieces))
    return (tensor,)


def _allreduce(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    if attributes.get("reduce") == "max":
        return [np.max(np.stack(ranks), axis=0)] * len(ranks)
    total = np.sum(np.stack(ranks), axis=0, dtype=ranks[0].dtype)
    return [total] * len(ranks)


def _allgather(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return [join_parts(ranks, attributes["dim"], attributes.get("pieces"))] * len(ranks)


def _allgather_into(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return [join_parts(ranks, None, attributes["shapes"][0])] * len(ranks)


def _local_part(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return [take_part(array, None, i, len(ranks), None) for i, array in enumerate(ranks)]


def _reduce_scatter(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return _local_slice(attributes, _allreduce(attributes, ranks))


def _local_slice(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    dim, pieces = attributes["dim"], attributes.get("pieces")
    return [take_part(array, dim, i, len(ranks), pieces) for i, array in enumerate(ranks)]


def _local_indices_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, _ = mesh_and_ranks("LocalIndices", attributes, inputs)
    _required("LocalIndices", attributes, "size")
    return (tensor,)


def _local_indices(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    """Indices of rows, all ranks' in order, as those of the own part; ``size`` for what is no row of it."""
    size: int = attributes["size"]
    found: list[Array] = []
    for i, array in enumerate(ranks):
        row = np.where(array < 0, array + size * len(ranks), array)
        found.append(np.where(row // size == i, row % size, size).astype(array.dtype))
    return found


def _alltoall(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    split, concat = (_exchanged(attributes, name, len(ranks)) for name in ("split", "concat"))

    def part(array: Array, index: int) -> Array:
        left = len(ranks)
        for dim, count, pieces in split:
            left //= count
            array = take_part(array, dim, index // left, count, pieces)
            index %= left
        return array

    def joined(parts: Sequence[Array]) -> Array:
        for dim, count, pieces in reversed(concat):
            inner = range(0, len(parts), count)
            parts = [join_parts(parts[start : start + count], dim, pieces) for start in inner]
        return parts[0]

    return [joined([part(array, i) for array in ranks]) for i in range(len(ranks))]


def _send_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Send", inputs, 1)
    _required("Send", attributes, "to")
    channel = attributes.get("channel", 0)
    if not isinstance(channel, int) or channel < 0:
        raise TypeRuleError(f"Send: channel={channel!r} must count from 0")
    source, target = inputs[0].device, attributes["to"]
    if isinstance(source, Mesh) != isinstance(target, Mesh) or (
        isinstance(source, Mesh) and isinstance(target, Mesh) and source.axes != target.axes
    ):
        raise TypeRuleError(f"Send goes between devices, or meshes of equal axes; not {source} to {target}")
    return (inputs[0].on(target),)


def _to_mesh(op_type: str, attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Mesh]:
    arity(op_type, inputs, 1)
    _required(op_type, attributes, "to")
    target = attributes["to"]
    if isinstance(inputs[0].device, Mesh) or not isinstance(target, Mesh):
        raise TypeRuleError(f"{op_type} goes from one device to a mesh, not {inputs[0].device} to {target}")
    return inputs[0], target


def _broadcast_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, target = _to_mesh("MPIBroadcast", attributes, inputs)
    return (tensor.on(target),)


def _scatter_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, target = _to_mesh("MPIScatter", attributes, inputs)
    _required("MPIScatter", attributes, "shards")
    for dim, axis, pieces in attributes["shards"]:
        count = target.axis_size(axis)
        if dim is None:
            if tensor.shape != pieces:
                raise TypeRuleError(f"MPIScatter: {tensor} is divided flat as a tensor of shape {pieces}")
            tensor = tensor.with_shape((flat_part(tensor.size, count),))
        else:
            (tensor,) = resized(tensor, dim, divided_size("MPIScatter", tensor, dim, count, pieces))
    return (tensor.on(target),)


def _gather_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("MPIGather", inputs, 1)
    _required("MPIGather", attributes, "to", "shards", "from_mesh")
    tensor, target = inputs[0], attributes["to"]
    if not isinstance(tensor.device, Mesh) or not isinstance(target, Device):
        raise TypeRuleError(f"MPIGather goes from a mesh to one device, not {tensor.device} to {target}")
    for dim, axis, pieces in reversed(attributes["shards"]):
        if dim is None:
            tensor = tensor.with_shape(pieces)
        else:
            count = int(inputs[0].device.axis_size(axis))  # pyright: ignore
            (tensor,) = resized(tensor, dim, joined_size(tensor, dim, count, pieces))
    return (tensor.on(target),)


def _input_bytes(signature: Signature) -> int:
    return sum([tensor.nbytes for tensor in signature.inputs])


def _output_bytes(signature: Signature) -> int:
    return sum([tensor.nbytes for tensor in signature.outputs])


def _padded_bytes(signature: Signature) -> int:
    """Return the bytes that a rank exchanges, padding included: all wait for the largest part."""
    return max(signature.inputs[0].nbytes, signature.outputs[0].nbytes)


def _parts_bytes(signature: Signature) -> int:
    """Return the bytes of the parts of all ranks, padding included."""
    _, count = mesh_and_ranks(signature.op_type, signature.attributes, signature.inputs[:1])
    return sum([tensor.nbytes for tensor in moved_tensors(signature)]) * count


def _scatter_group(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return scatter(ranks[0], attributes["to"], attributes.get("shards", ()))


def _gather_group(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return [gather(ranks, attributes["from_mesh"], attributes["shards"])]


def _same(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    return list(ranks)


def _token_exchange(attributes: Attributes) -> str:
    """Return the kind of collective that exchanges rows: an all-to-all, or what their groups say."""
    found = [attributes.get(f"{name}_pieces") for name in ("split", "concat")]
    kinds = [each.kind for each in found if isinstance(each, Groups) and each.kind]
    return kinds[0] if kinds else "all_to_all"


def _alltoall_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """Every part goes back to the rank that it came from."""
    swapped = {"split": "concat", "concat": "split"}
    swapped |= {"split_pieces": "concat_pieces", "concat_pieces": "split_pieces"}
    back = {swapped.get(name, name): item for name, item in ctx.attributes.items()}
    return [ctx.add("MPIAlltoall", ctx.grad, **back)]


def _register(
    name: str, types: TypesRule, meaning: Communication, gradient: GradientRule | None = None
) -> None:
    register(Operator(name, types=types, communication=meaning, gradient=gradient))


_register(
    "MPIAllreduce",
    coalesced("MPIAllreduce", _allreduce_types),
    Communication("all_reduce", _allreduce, _input_bytes, operand=alike),
)
_register(
    "MPIAllgather",
    coalesced("MPIAllgather", _allgather_types),
    Communication("all_gather", _allgather, _output_bytes, operand=alike),
)
register(
    Operator(
        "MPIAllgatherInto",
        types=coalesced("MPIAllgatherInto", _allgather_into_types, 2, one_of_shapes),
        communication=Communication("all_gather", _allgather_into, _parts_bytes, operand=one_of_shapes),
        in_place={0: 1},
    )
)
register(
    Operator(
        "LocalPart",
        types=_local_part_types,
        work=view_work,
        communication=Communication("local", _local_part, lambda _: 0),
        view=True,
    )
)
_register(
    "MPIReduceScatter",
    coalesced("MPIReduceScatter", _slice_types("MPIReduceScatter")),
    Communication("reduce_scatter", _reduce_scatter, _input_bytes, operand=alike),
)
_register(
    "MPIAlltoall",
    _alltoall_types,
    Communication("all_to_all", _alltoall, _padded_bytes, variant=_token_exchange),
    _alltoall_gradient,
)
_register("Send", _send_types, Communication("send", _same, _input_bytes, transfers=True))
_register("MPIBroadcast", _broadcast_types, Communication("broadcast", _scatter_group, _input_bytes, True))
_register("MPIScatter", _scatter_types, Communication("scatter", _scatter_group, _input_bytes, True))
_register("MPIGather", _gather_types, Communication("gather", _gather_group, _output_bytes, True))
_register("LocalIndices", _local_indices_types, Communication("local", _local_indices, lambda _: 0))
register(Operator("LocalIndices", work=memory_bound))
_register("LocalSlice", _slice_types("LocalSlice"), Communication("local", _local_slice, lambda _: 0))
register(
    Operator(
        "LocalSlice",
        work=lambda s: memory_bound(Signature(s.op_type, s.attributes, s.outputs, s.outputs), 0.0),
    )
)
