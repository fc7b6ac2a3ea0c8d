"""What share of a peak a kernel reaches, by the kind of its work and its shape.

A device says what each kind reaches in large shapes of what is reached at best (``Device.rates``, with its
source in the preset); here is how shape lowers it.

- ``linear``, ``linear_float8``: products with a weight. An output [m, n] is made in tiles of 128 x 256, one
  a multiprocessor at a time, and a tile needs some depth k before its pipeline is full: the share is
  (tiles in use / tiles of whole waves) ** 0.72 k / (k + 148). Where tiles are few, the depth is divided among
  s multiprocessors, up to 16, that sum a part each (split-K): s times the tiles, of depth k / s, each with
  150 more of it to add its part; of all s the best one. Exponent and depth: least squares over 183
  bfloat16 products of at least 8.6e9 multiplications measured on A100 (SimuMax, a100_pcie.json); what adding
  takes: over 120 of those, 282 on B200, and on H200 60 alone and 253 in training steps (the last two from
  experiments/measured/h200_other.csv and h200_step_kernels.csv), with mean errors of 3.0, 9.1, 3.1 and 6.3 %,
  where undivided they are 2.8, 9.7, 4.3 and 11.0 %. Operands of 8 bits need twice the depth, as many bytes.
  Types of 8 and 16 bits alone: kernels of others have smaller tiles. Convolutions have the share without the
  rule. Chunks of a product that run on several streams (``beside``) fill waves together. Operands of 8 bits
  with scales of blocks leave 0.951: the twelve products of a layer, kernels alone on B300, took 6.812 ms with
  scales of tensors and 7.161 ms as MXFP8 (Transformer Engine, docs/examples/gemm_profiling); taken over to
  Hopper, where such kernels were not measured alone.
  One that adds what it makes to sums of gradients takes 0.45 of the time, at the DRAM's bandwidth, in which
  these are read and written, beside that: least squares over 60 products on A100 that add to float32
  (SimuMax, a100_pcie.json, ``accumulate=True, out_dtype=fp32``, depths of 4,096 but for four), the share
  fitted to those of the same shapes that do not: 0.45, standard error 0.06, mean error 2.6 %, 6.1 % without;
  141 on B200 would have 0.25, standard error 0.14.
- ``grouped``: those of experts, by the same rule and the same share, the tiles of all groups in the waves of
  one product; each group's matrix is read, or written, or added to, beside it, at the DRAM's bandwidth, as no
  other rows need it. Nothing is fitted: 12 on A100, 108 on B200 (SimuMax, as above, 128 to 9,832 rows a
  group; of two figures of one product that adds to sums the slower one is taken to be of float32) and 12 on
  H200 (experiments/measured/h200_other.csv), predicted by the median share of linear ones alone, have mean
  errors of 6.8, 11.7 and 6.8 %, where one share for each machine has 7.0, 33 and 11.5 %. Small groups are
  slower yet on B200, where none takes less than 9 us. One group is a product like others, sums and all, so
  what is read and added to besides begins with the second.
- ``batched``: products of many small matrices, as in attention that is written out.
- ``attention``, ``attention_grad``: attention as one kernel, forward and backward, at a head size of 128.
  Over s keys the share is s / (s + 70), under a causal mask s / (s + 410), and 0.8 of it for heads of at
  most 64; backward 230, 630 and 0.86. Heads of a size that a kernel is not made for are filled up to the
  next (``_HEAD_SIZES``: 80 to 128 by cuDNN, as measured/h200_steps.csv shows it). A block takes so many
  queries of a head (``Device.rates.query_block``), backward 128 keys; b blocks on p multiprocessors leave
  b / (b + 1.7 p), backward b / (b + 0.66 p). All eight by least squares, with a share for each machine,
  kernel and direction: 48 figures that FlashAttention-2 prints for A100 and H100, both directions in one
  (Dao 2023), 24 kernels on A100 and 64 on B200 (SimuMax), 42 of cuDNN and 42 of FlashAttention-2 on H200
  (experiments/measured/h200_kernels.csv, h200_kernels_flash2.csv): mean error 5.2 %, of cuDNN's 5.0 and
  7.3 %, of B200's forward 11 %, whose longest kernels, of tenths of a second, are slower than shorter ones.
  An op that says which kernel runs it is as much faster or slower as the device says
  (``Device.rates.attentions``).
- ``memory``: everything else, by the bytes that it reads and writes; ``embedding``: rows picked or added by
  index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from distsim.ir import Device, Op
from distsim.ir.kernel_rates import KernelRates
from distsim.ops import Signature, Work, op_label, signature_of, work
from distsim.ops.grouped import group_matrix
from distsim.ops.kernel import KERNEL

_TILED_TYPES = ("bfloat16", "float16")
_TILE = (128, 256)
_WAVE, _DEPTH = 0.72, 148.0
_ADDING, _MOST_PARTS = 150.0, 16
_ADDED = 0.45
_BLOCKS = 0.951


class _AttentionFill(NamedTuple):
    """What leaves half of a share: keys, without and under a causal mask, and blocks a multiprocessor; and
    what small heads leave."""

    half: float
    causal_half: float
    small_head: float
    blocks: float


_ATTENTION = {
    "attention": _AttentionFill(70.0, 410.0, 0.8, 1.7),
    "attention_grad": _AttentionFill(230.0, 630.0, 0.86, 0.66),
}
_KEY_BLOCK = 128
_HEAD_SIZES = {
    "": (32, 64, 96, 128, 192, 256),
    "triton": (16, 32, 64, 128, 256),
    "flash3": (64, 96, 128, 192, 256),
    "cudnn": (64, 128, 192, 256),
}
"""Sizes of heads that kernels are made for: flash-attn, csrc/flash_attn/src/static_switch.h, and hopper's;
flash_attn_triton.py, ``BLOCK_HEADDIM``, a power of 2; those of cuDNN: its fused kernels' multiples of 64."""


def kind_of_work(signature: Signature, demand: Work, dtype: str) -> str:
    """Return which of :data:`distsim.ir.kernel_rates.KINDS_OF_WORK` an op is."""
    name = signature.op_type
    if not demand.matrix:
        return "embedding" if name in ("Gather", "GatherGrad") else "memory"
    if name.startswith("Attention"):
        return "attention_grad" if name.endswith("Grad") else "attention"
    if "GroupedMatMul" in op_label(signature):
        return "grouped"
    if not is_convolution(signature) and min(map(len, _matrices(signature)), default=2) > 2:
        return "batched"
    return "linear_float8" if dtype.startswith("float8") else "linear"


def is_convolution(signature: Signature) -> bool:
    """Whether an op, or one of a kernel, is a convolution: a product whose tiles are not a matrix's."""
    return "Conv" in op_label(signature)


def _matrices(signature: Signature) -> list[tuple[int, ...]]:
    """Return the shapes that can be factors or results of a product: biases and scales are none."""
    return [tensor.shape for tensor in (*signature.inputs, *signature.outputs) if len(tensor.shape) > 1]


def efficiencies(signature: Signature, demand: Work, dtype: str, device: Device) -> tuple[float, float]:
    """Return the shares of the peak FLOP/s and of the DRAM bandwidth that an op reaches on a device."""
    kind = kind_of_work(signature, demand, dtype)
    flops, moved = device.flops_efficiency, device.bytes_efficiency
    memory = device.rates.share(kind if kind == "embedding" else "memory")
    if memory is not None:
        moved *= memory
    share = best_share(signature, kind, device.rates) if demand.matrix else None
    if share is not None:
        known = dtype in _TILED_TYPES or dtype.startswith("float8")
        flops *= min(share * _of_shape(kind, signature, demand, device.rates, known), 1.0)
    return flops, moved


def exposed_bytes(signature: Signature) -> float:
    """Return the bytes that a product moves while it does nothing else: those of sums that it adds to, and
    of the matrices of groups."""
    groups, matrices = _groups(signature)
    return matrices if groups > 1 else _ADDED * signature.attributes.get("added", 0.0)


def _groups(signature: Signature) -> tuple[int, float]:
    """Return into how many groups the rows of a product fall, and the bytes of the matrices of these."""
    if signature.op_type == KERNEL:
        return int(signature.attributes.get("groups", 1)), signature.attributes.get("matrices", 0.0)
    matrix = group_matrix(signature)
    return (1, 0.0) if matrix is None else (matrix.shape[0], float(matrix.nbytes))


def best_share(signature: Signature, kind: str, rates: KernelRates) -> float | None:
    """Return the share that an op of a kind reaches whatever its shape; None where that is not known."""
    share = rates.share(kind)
    if kind == "grouped":
        narrow, plain = rates.share("linear_float8"), rates.share("linear")
        share = plain if share is None else share
        if share is not None and element_type(signature).startswith("float8"):
            share *= narrow / plain if narrow and plain else 1.0
    if share is not None and signature.attributes.get("both", 0) and kind in ("grouped", "linear_float8"):
        share *= _BLOCKS
    kernel = signature.attributes.get("kernel", "") if kind.startswith("attention") else ""
    return share if share is None else share * (rates.attention(kernel) or 1.0)


def _of_shape(kind: str, signature: Signature, demand: Work, rates: KernelRates, known: bool) -> float:
    """Return what the shape of an op leaves of the share of its kind.

    ``known``: whether its type is one whose tiles are known.
    """
    if kind in ("attention", "attention_grad"):
        return _of_attention(signature, kind, rates)
    tiled = kind in ("linear", "linear_float8", "grouped") and not is_convolution(signature)
    return _of_product(signature, demand, rates.processors if known else 0) if tiled else 1.0


def _of_product(signature: Signature, demand: Work, processors: int) -> float:
    """Return the share that shapes of products leave: of one for each result, all of as many flops.

    Results that are columns of one (``columns``) are one.
    """
    sizes = [(tensor.size, tensor.shape[-1]) for tensor in signature.outputs if tensor.shape]
    if signature.attributes.get("columns", 0):
        sizes = [(sum([size for size, _ in sizes]), sum([n for _, n in sizes]))]
    if not processors or not demand.flops or not sizes or not all(size for size, _ in sizes):
        return 1.0
    slowness, (groups, _) = 0.0, _groups(signature)
    at_once = groups * int(signature.attributes.get("beside", 1))
    halved = 2.0 if element_type(signature).startswith("float8") else 1.0
    for size, n in sizes:
        k = demand.flops / (2.0 * size * len(sizes))
        slowness += _slowness(math.ceil(size / n / groups), n, k / halved, processors, at_once)
    return len(sizes) / slowness


def _slowness(m: int, n: int, k: float, processors: int, at_once: int) -> float:
    """Return how many times as long products of [m, k] and [k, n], of 16 bits, take as ones that fill all
    tiles, so many at once: the least for any number of parts into which their depth may be divided."""
    slowness = (k + _DEPTH) / k / _waves(m, n, processors, at_once) ** _WAVE
    for parts in range(2, _MOST_PARTS + 1):
        longer = 1.0 + (_DEPTH + _ADDING) * parts / k
        if longer >= slowness:
            break
        slowness = min(slowness, longer / _waves(m, n, processors, at_once * parts) ** _WAVE)
    return slowness


def _waves(m: int, n: int, processors: int, parts: int) -> float:
    """Return the share of the tiles of whole waves that results of [m, n] fill, so many of them made at once,
    the tiles lying either way."""
    found = 0.0
    for rows, columns in (_TILE, _TILE[::-1]):
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * parts
        found = max(found, m * n * parts / (rows * columns) / (math.ceil(tiles / processors) * processors))
    return found


def _of_attention(signature: Signature, kind: str, rates: KernelRates) -> float:
    """Return the share that the length of the sequence, the size of heads and their number leave."""
    query, key = signature.inputs[:2]
    keys, size = key.shape[-2], query.shape[-1]
    shape = _ATTENTION[kind]
    half = shape.causal_half if signature.attributes.get("is_causal", 0) else shape.half
    share = keys / (keys + half) * (shape.small_head if size <= 64 else 1.0)
    made_for = _HEAD_SIZES.get(signature.attributes.get("kernel", ""), _HEAD_SIZES[""])
    share *= size / next((each for each in made_for if each >= size), size)
    rows, block = (query.shape[-2], rates.query_block) if kind == "attention" else (keys, _KEY_BLOCK)
    blocks = math.prod(query.shape[:-2]) * math.ceil(rows / block)
    return share * blocks / (blocks + shape.blocks * rates.processors) if blocks else share


def element_type(signature: Signature) -> str:
    """The element type that decides which matrix unit is used: that of the first real operand, if no
    attribute ``rate`` says as which it is read.
    """
    rate = signature.attributes.get("rate")
    if rate is not None:
        return rate
    for tensor in (*signature.inputs, *signature.outputs):
        if tensor.dtype.is_floating:
            return tensor.dtype.name
    return signature.outputs[0].dtype.name


def matrix_type(ops: Iterable[tuple[Op, int]]) -> str | None:
    """Return the element type in which most FLOPs of products are done; None where there are none.

    ``ops``: each with how often it runs.
    """
    flops: dict[str, float] = {}
    for op, times in ops:
        signature = signature_of(op)
        demand = work(signature)
        if demand is not None and demand.matrix:
            name = element_type(signature)
            flops[name] = flops.get(name, 0.0) + demand.flops * times
    return max(flops, key=lambda name: flops[name]) if flops else None
