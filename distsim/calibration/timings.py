"""What was timed on a machine: kernels, launches and collectives, each with its seconds and its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from distsim.cost.efficiency import element_type, kind_of_work
from distsim.errors import TimingsError, shortened
from distsim.hardware.cluster_table import DTYPES
from distsim.ir import Attributes, Float32, Tensor
from distsim.ir.type import dtype_named
from distsim.ops import Signature, Work, work

MAX_SIZE = 2**31
"""Of a dimension of a product or an attention: more is a slip, or another unit."""
MAX_BYTES = 2**44
MAX_RANKS = 2**12
MAX_SECONDS = 1e4


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel: the op that it runs, and what that is in words."""

    text: str
    signature: Signature

    @property
    def demand(self) -> Work:
        """The flops and bytes of the op; raises :class:`TimingsError` for one without a work rule."""
        demand = work(self.signature)
        if demand is None:
            raise TimingsError(f"{self.text}: {self.signature} has no work rule")
        return demand

    @property
    def kind(self) -> str:
        """Its kind of work, one of ``distsim.ir.device.KINDS_OF_WORK``."""
        return kind_of_work(self.signature, self.demand, element_type(self.signature))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """Kernels that the host issues one after the other, none waited for; ``mode``: how they are run."""

    kernels: int
    mode: str = "eager"

    def __str__(self) -> str:
        return f"{self.kernels} launches ({self.mode})"


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective: its kind and size as :func:`distsim.hardware.collective_time` takes them, and its ranks.

    ``places`` are the devices of its ranks, where that is known; else there are as many on each of ``nodes``
    nodes, or, where that is not known (None), as many as the nodes of the cluster have, node by node.
    """

    kind: str
    nbytes: int
    ranks: int
    nodes: int | None = 1
    places: tuple[int, ...] | None = None

    def __str__(self) -> str:
        where = "" if self.nodes is None else f" on {self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{self.kind} of {self.nbytes} bytes over {self.ranks} ranks{where}"


Call = KernelCall | LaunchCall | CollectiveCall


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a call, the name of the file that has them, and the place in it (``line 12``)."""

    call: Call
    seconds: float
    file: str
    place: str


class Readings(NamedTuple):
    """What a file says: its timings, and in words what of it could not be used."""

    timings: list[Timing]
    notes: list[str]


class AttentionShape(NamedTuple):
    """The sizes of an attention over as many keys as queries."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int
    causal: bool


def product(m: int, n: int, k: int, dtype: str, batch: int = 1) -> KernelCall:
    """Return the product of [m, k] and [k, n], or of ``batch`` such pairs.

    >>> product(4096, 1024, 512, "bfloat16")
    KernelCall(text='product 4096 x 1024 x 512 bfloat16', signature=Signature(op_type='MatMul', ...))
    """
    left, right, made = (m, k), (k, n), (m, n)
    if batch > 1:
        left, right, made = (batch, *left), (batch, *right), (batch, *made)
    a, b = _tensor(dtype, left), _tensor(dtype, right)
    c = _tensor("bfloat16" if dtype.startswith("float8") else dtype, made)
    name = f"product {f'{batch} x ' if batch > 1 else ''}{m} x {n} x {k} {dtype}"
    return KernelCall(name, Signature("MatMul", _attributes(dtype), (a, b), (c,)))


def attention(shape: AttentionShape, dtype: str, backward: bool = False) -> KernelCall:
    """Return attention as one kernel; raises :class:`TimingsError` where heads do not share keys evenly."""
    batch, heads, kv_heads, seq, size, causal = shape
    if heads % kv_heads:
        raise TimingsError(f"kv_heads={kv_heads} does not divide heads={heads}")
    query = _tensor(dtype, (batch, heads, seq, size))
    keys = _tensor(dtype, (batch, kv_heads, seq, size))
    sums = Tensor(Float32(), (batch, heads, seq))
    attributes = _attributes(dtype, is_causal=1) if causal else _attributes(dtype)
    name = f"{'attention_grad' if backward else 'attention'} {batch} x {heads} ({kv_heads}) x {seq} x {size}"
    name += f"{' causal' * causal} {dtype}"
    if not backward:
        return KernelCall(name, Signature("Attention", attributes, (query, keys, keys), (query, sums)))
    inputs = (query, keys, keys, query, sums, query)
    return KernelCall(name, Signature("AttentionGrad", attributes, inputs, (query, keys, keys)))


def memory(nbytes: int) -> KernelCall:
    """Return a kernel that reads and writes so many bytes together, as a copy or element-wise ops do.

    It is an element-wise op over half of them; what is over a multiple of 8 is left out.
    """
    row = Tensor(Float32(), (max(nbytes // 8, 1),))
    return KernelCall(f"{nbytes} bytes", Signature("Relu", Attributes(), (row,), (row,)))


def check_seconds(seconds: float) -> float:
    """Return seconds as they are; raises :class:`TimingsError` for what no kernel takes."""
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
        raise TimingsError(f"{seconds:g} s is no time of a kernel: more than 0 and at most {MAX_SECONDS:g}")
    return seconds


def check_dtype(name: str) -> str:
    """Return the name of a type that products have; raises :class:`TimingsError` for another."""
    if name not in FLOATS:
        raise TimingsError(f"{shortened(name)} is not one of {', '.join(FLOATS)}")
    return name


FLOATS = tuple(name for name in DTYPES if name != "int8")
"""The types of products: those that a device may have a peak for."""


def _tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(dtype_named("float32" if dtype == "tfloat32" else dtype), shape)


def _attributes(dtype: str, **attributes: int) -> Attributes:
    """Return attributes; single precision that is read as TF32 says so, as in a model's products."""
    return Attributes({**attributes, **({"rate": dtype} if dtype == "tfloat32" else {})})
