"""What torch's ops and collectives in a trace did, by the arguments that the profiler recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from distsim.calibration.timings import (
    MAX_BYTES,
    MAX_RANKS,
    MAX_SIZE,
    AttentionShape,
    CollectiveCall,
    KernelCall,
    attention,
    memory,
    product,
)
from distsim.errors import TimingsError
from distsim.ir.type import dtype_named


class UnreadableCallError(TimingsError):
    """What an op did cannot be read off its arguments; the text says why, alike for alike cases."""


class OpArgs(msgspec.Struct):
    """The arguments of an event that are read, by their names in the trace; others are passed over."""

    external_id: int | None = msgspec.field(name="External id", default=None)
    old_external_id: int | None = msgspec.field(name="external id", default=None)
    correlation: int | None = None
    dims: list[Any] | None = msgspec.field(name="Input Dims", default=None)
    types: list[Any] | None = msgspec.field(name="Input type", default=None)
    strides: list[Any] | None = msgspec.field(name="Input Strides", default=None)
    values: list[Any] | None = msgspec.field(name="Concrete Inputs", default=None)
    nbytes: int | None = msgspec.field(name="bytes", default=None)
    collective: str | None = msgspec.field(name="Collective name", default=None)
    elements_in: int | None = msgspec.field(name="In msg nelems", default=None)
    elements_out: int | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    ranks: Any = msgspec.field(name="Process Group Ranks", default="")
    split: Any = msgspec.field(name="In split size", default="")

    @property
    def launched_by(self) -> int | None:
        """The id of an op: its own, or that of the op that launched a kernel."""
        return self.old_external_id if self.external_id is None else self.external_id


_DTYPES = {
    **{"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64"},
    **{"c10::Float8_e4m3fn": "float8e4m3fn", "c10::Float8_e5m2": "float8e5m2"},
    **{"BFloat16": "bfloat16", "Half": "float16", "Float": "float32", "Double": "float64"},
    **{"Float8_e4m3fn": "float8e4m3fn", "Float8_e5m2": "float8e5m2"},
}
"""The profiler's names of types, of operands and of what collectives move."""

_COLLECTIVES = {
    **dict.fromkeys(("allreduce", "all_reduce"), "all_reduce"),
    **dict.fromkeys(("allgather", "all_gather", "_allgather_base"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base"), "reduce_scatter"),
    **dict.fromkeys(("all_to_all", "alltoall", "all_to_allv", "alltoall_base"), "all_to_all"),
    "broadcast": "broadcast",
}


def collective_call(args: OpArgs) -> CollectiveCall:
    """Return the collective of a kernel; raises :class:`UnreadableCallError`."""
    kind = _COLLECTIVES.get((args.collective or "").strip('"'))
    if kind is None:
        raise UnreadableCallError(f"collective {args.collective!r:.40}, which is not fitted")
    if str(args.split) not in ("", "[]"):
        raise UnreadableCallError(f"{kind} in unequal parts")
    elements = args.elements_out if kind == "all_gather" else args.elements_in
    dtype = _DTYPES.get((args.dtype or "").strip('"'))
    if elements is None or args.group_size is None or dtype is None:
        raise UnreadableCallError(f"{kind} without a size, a type or a group that is known")
    nbytes = elements * dtype_named(dtype).itemsize
    if not 0 < nbytes <= MAX_BYTES or not 2 <= args.group_size <= MAX_RANKS:
        raise UnreadableCallError(f"{kind} of {nbytes} bytes over {args.group_size} ranks")
    text = str(args.ranks).strip('"[] ')
    if not text:
        return CollectiveCall(kind, nbytes, args.group_size, None)
    if not re.fullmatch(r"[0-9]{1,7}(, ?[0-9]{1,7})*", text):
        raise UnreadableCallError(f"{kind} whose list of ranks is cut short")
    places = tuple([int(rank) for rank in text.split(",")])
    if len(set(places)) != args.group_size or max(places) >= MAX_RANKS:
        raise UnreadableCallError(f"{kind} over ranks that are not {args.group_size}, or beyond {MAX_RANKS}")
    return CollectiveCall(kind, nbytes, args.group_size, None, places)


def op_call(name: str, args: OpArgs) -> KernelCall:
    """Return what an op of :func:`known_ops` did; raises :class:`UnreadableCallError`."""
    if not args.dims or not args.types:
        raise UnreadableCallError(f"{name} without shapes; profile with record_shapes=True")
    try:
        return _READERS[name](args)
    except UnreadableCallError as error:
        raise UnreadableCallError(f"{name}: {error}") from error
    except TimingsError as error:
        raise UnreadableCallError(f"{name}: {error}") from error


def known_ops() -> dict[str, Callable[[OpArgs], KernelCall]]:
    """Return the ops whose kernels are read, by name."""
    return _READERS


def _shape(args: OpArgs, place: int, rank: int | None = None) -> tuple[int, ...]:
    """Return the shape of an operand, of so many dimensions."""
    dims = args.dims or []
    found = cast(list[Any], dims[place]) if place < len(dims) and isinstance(dims[place], list) else []
    shape = tuple([n for n in found if isinstance(n, int) and 0 < n <= MAX_SIZE])
    if not shape or len(shape) < len(found) or (rank is not None and len(shape) != rank):
        raise UnreadableCallError(f"operand {place} has no shape that fits")
    return shape


def _dtype(args: OpArgs, place: int) -> str:
    types = args.types or []
    found = _DTYPES.get(str(types[place])) if place < len(types) else None
    if found is None:
        raise UnreadableCallError(f"operand {place} has a type that is not fitted")
    return found


def _product(args: OpArgs, first: int, rank: int) -> KernelCall:
    """Return the product of operands ``first`` and the next."""
    *batch, m, k = _shape(args, first, rank)
    other = _shape(args, first + 1, rank)
    if other[-2] != k or list(other[:-2]) != batch:
        raise UnreadableCallError("shapes that do not fit each other")
    return product(m, other[-1], k, _dtype(args, first), math.prod(batch))


def _attention(args: OpArgs, query: int, causal: int, heads_first: bool) -> KernelCall:
    """Return the attention whose operands begin at ``query``: backward where a gradient comes before it."""
    values = args.values or []
    if causal >= len(values) or str(values[causal]).lower() not in ("true", "false"):
        raise UnreadableCallError("whether it is causal is not recorded (Concrete Inputs)")
    if heads_first:
        batch, heads, seq, size = _shape(args, query, 4)
        _, kv_heads, kv_seq, _ = _shape(args, query + 1, 4)
    else:
        batch, seq, heads, size = _shape(args, query, 4)
        _, kv_seq, kv_heads, _ = _shape(args, query + 1, 4)
    if seq != kv_seq:
        raise UnreadableCallError("as many keys as queries are needed")
    shape = AttentionShape(batch, heads, kv_heads, seq, size, str(values[causal]).lower() == "true")
    return attention(shape, _dtype(args, query), backward=query > 0)


def _elementwise(args: OpArgs, operands: int) -> KernelCall:
    """Return an op that reads operands of one shape, or a number, and writes a result like the first."""
    dims = args.dims or []
    places = [place for place in range(operands) if place == 0 or dims[place : place + 1] != [[]]]
    shapes = [_shape(args, place) for place in places]
    if len(set(shapes)) > 1:
        raise UnreadableCallError("operands of several shapes")
    for place, shape in zip(places, shapes, strict=True):
        if not _contiguous(shape, args.strides, place):
            raise UnreadableCallError("operands that are not contiguous")
    sizes = [dtype_named(_dtype(args, place)).itemsize for place in places]
    if sizes[0] > min(sizes):
        raise UnreadableCallError("operands of several types, which multiprocessors convert")
    return memory(math.prod(shapes[0]) * (sum(sizes) + sizes[0]))


def _copy(args: OpArgs) -> KernelCall:
    """Return a copy of the second operand into the first, also to another type."""
    _shape(args, 1)
    call = _elementwise(args, 2)
    own = math.prod(_shape(args, 0)) * dtype_named(_dtype(args, 0)).itemsize
    return memory(int(call.demand.bytes_read + call.demand.bytes_written) - own)


def _contiguous(shape: Sequence[int], strides: Sequence[Any] | None, place: int) -> bool:
    if strides is None or place >= len(strides):
        return True
    expected = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return strides[place] == expected


_READERS: dict[str, Callable[[OpArgs], KernelCall]] = {
    "aten::mm": partial(_product, first=0, rank=2),
    "aten::addmm": partial(_product, first=1, rank=2),
    "aten::bmm": partial(_product, first=0, rank=3),
    "aten::baddbmm": partial(_product, first=1, rank=3),
    "aten::_scaled_mm": partial(_product, first=0, rank=2),
    **{
        f"aten::_scaled_dot_product_{name}": partial(_attention, query=query, causal=causal, heads_first=True)
        for name, query, causal in (
            ("flash_attention", 0, 4),
            ("flash_attention_backward", 1, 11),
            ("cudnn_attention", 0, 6),
            ("cudnn_attention_backward", 1, 14),
            ("efficient_attention", 0, 6),
            ("efficient_attention_backward", 1, 11),
        )
    },
    **{
        name: partial(_attention, query=query, causal=causal, heads_first=False)
        for name, query, causal in (
            ("aten::_flash_attention_forward", 0, 8),
            ("aten::_flash_attention_backward", 1, 11),
            ("flash_attn::_flash_attn_forward", 0, 5),
            ("flash_attn::_flash_attn_backward", 1, 11),
        )
    },
    **{f"aten::{name}": partial(_elementwise, operands=2) for name in ("add", "add_", "mul", "mul_")},
    "aten::relu": partial(_elementwise, operands=1),
    "aten::copy_": _copy,
}
