"""The rules by which a cost model turns work into seconds, and those that it has by default.

A compute op takes ``launch + max(flops / (peak * flops_efficiency), bytes / (dram_bandwidth *
bytes_efficiency))`` (Williams, Waterman and Patterson, "Roofline", 2009), the shares of peak and bandwidth as
:mod:`distsim.cost.efficiency` has them, what a product needs longer that adds to sums or has groups, and at
least what :mod:`distsim.cost.roofline` says of elements, which adds what sums over rows wait for. The
peak of matrix work (``Work.matrix``) is that of the device for the element type; all other work runs on the
vector units, at ``Device.throughput``. Communication: :mod:`distsim.hardware.collectives`.

How fast multiprocessors go through elements, where that is slower than the memory is.

Kernels that are called bound by memory are so on devices whose memory is slow beside their processors. A
multiprocessor takes some cycles for an element whatever the memory does: to convert it, to find its place
where operands are broadcast, to evaluate an error function, to wait for the sum of its row. What
:data:`CYCLES` has of an op is that, of kernels of torch, one op each: medians over 240 kernels of torch
2.11 alone on H200 (``experiments/element_rates.py``; operands of rotary embeddings and gradients of softmax
in float32 as in training steps there), where kernels that do nothing of this reach 0.89 of the memory's
bandwidth and these 0.2 to 0.9: seconds are within 1 to 20 % of what it says, by bytes alone they would be
wrong by 3 to 68 %. Other GPUs are taken to need as many cycles, and an op that a kernel runs alone to be
torch's, whoever launches it. Kernels that run several ops (those of Megatron-LM, of a compiler) load and
store in ways of their own, and have of it what any kernel evaluates: :data:`EVALUATED`. What was seen in
training steps is in experiments/measured/h200_step_kernels.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from distsim.cost.efficiency import efficiencies, element_type, exposed_bytes
from distsim.errors import CostError
from distsim.hardware import collective_time
from distsim.ir import Device, Topology
from distsim.ir.kernel_rates import NO_RATES
from distsim.ops import Signature, Work, op_label
from distsim.ops.float8 import ANEW
from distsim.ops.kernel import UPDATED
from distsim.ops.operator import AGAIN

Group = tuple[Device, ...]


class CostRules(Protocol):
    """How a :class:`CostModel` turns work into seconds: the same for the same work, each time.

    Rules that are equal (those of a class without ``__eq__``: the same object) share what is kept of them.
    """

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds of a compute op that asks for ``demand`` on a device."""
        ...

    def communicate(self, kind: str, nbytes: float, group: Group, topology: Topology) -> float:
        """Seconds of a collective; kind, size and group as in :func:`collective_time`."""
        ...


@dataclass(frozen=True)
class RooflineRules:
    """The rules of this module's docstring."""

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds by the roofline of the device."""
        dtype = element_type(signature)
        known = dict(device.peaks)
        if demand.matrix and dtype.startswith("float8") and known and dtype not in known:
            raise CostError(
                f"{device} has no rate for {dtype}, in which {signature.op_type} multiplies: it has no units "
                "for 8-bit floats, as H100, L40S and later GPUs have; choose --precision mixed or another "
                "cluster, or give a rate under [device.peaks]"
            )
        peak = device.peak(dtype) if demand.matrix else device.throughput
        flops_share, bytes_share = efficiencies(signature, demand, dtype, device)
        flops = demand.flops / (peak * flops_share) + exposed_bytes(signature) / device.dram_bandwidth
        moved = (demand.bytes_read + demand.bytes_written) / (device.dram_bandwidth * bytes_share)
        if demand.matrix:
            return device.kernel_launch_overhead + max(flops, moved)
        waiting = device.kernel_launch_overhead + waiting_seconds(signature, device)
        return waiting + max(flops, moved, element_seconds(signature, device))

    def communicate(self, kind: str, nbytes: float, group: Group, topology: Topology) -> float:
        """Seconds by the cheapest algorithm for the group."""
        return collective_time(kind, nbytes, group, topology)


@dataclass(frozen=True)
class BestShapeRules(RooflineRules):
    """The same rules where every kernel reaches what its device reaches at best, whatever its shape."""

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds by the roofline of the device, without what is known of its kernels."""
        return super().compute(signature, demand, replace(device, rates=NO_RATES))


ROOFLINE = RooflineRules()
BEST_SHAPE = BestShapeRules()


CYCLES: dict[str, tuple[float, float]] = {
    "Cast": (0.77, 0.77),
    "Cast+Add": (0.96, 0.96),
    "broadcast": (0.8, 0.83),
    "Concat": (0.8, 0.77),
    "Neg": (0.63, 0.76),
    "Gelu": (0.34, 0.34),
    "GeluGrad": (0.47, 0.47),
    "Swish": (0.27, 0.27),
    "SwishGrad": (0.39, 0.39),
    "LayerNormalization": (0.5, 0.8),
    "LayerNormalizationGrad": (1.12, 1.8),
    "RMSNormalization": (0.33, 0.62),
    "RMSNormalizationGrad": (1.0, 1.7),
    "LogSoftmax": (0.43, 1.0),
    "LogSoftmaxGrad": (0.5, 1.08),
    "Softmax": (0.49, 0.53),
    "SoftmaxGrad": (0.8, 0.72),
    "AdamOptimizer": (1.45, 2.05),
    "CrossEntropyLoss": (0.37, 0.37),
    "CrossEntropyLossGrad": (0.32, 0.32),
    "Float8Turn": (2.2, 2.2),
}
"""Cycles of one multiprocessor for one element of the largest tensor of an op, of 16 and of 32 bits; of
updates of many tensors, for one of all parameters, as torch's fused AdamW took in 24 training steps; of casts
to 8 bits along columns in kernels of torch's compiler (``Float8Turn`` with ``anew``), by how much longer all
kernels of elements of a step take with scales of rows than in bfloat16, over what is cast along columns:
1.9 to 2.4 in five steps on H100 (experiments/measured/h100_columns.csv, ``experiments/measure_steps.py --only
titan``). They divide in float64, take logarithms to round scales, and multiply gradients of weights by both
scales; where a GPU's float64 is a 64th of its float32, as on L40S, they take longer than this says."""

EVALUATED = ("Gelu", "GeluGrad", "CrossEntropyLoss", "CrossEntropyLossGrad")
"""Ops whose cycles go into error functions and exponentials, in whatever kernel. Of inductor's kernels of
compiled steps (``experiments/measure_steps.py``) those with a GELU took 0.42 and 0.56 to 0.6 cycles, those of
a cross entropy, which are one kernel there alone, 0.36 and 0.32."""

COLUMN_SUM, ROWS, GROWTH = 33_000.0, 8192.0, 0.3
"""Cycles that a sum over so many rows takes beside its bytes, as gradients of biases are, or over more, and
with which power of the rows over fewer: 9 to 20 us in training steps on H200, of 1,024 to 32,768 rows and 3
to 134 million elements in 18 sizes (``experiments/measure_steps.py``); 33 us of 32,768 rows of 768."""

_CASTS = ("Cast", "GradientCast", "GradientCopy")
_BINARY = frozenset(("Add", "Sub", "Mul", "Div"))
_MIXED = frozenset([f"Cast+{name}" for name in _BINARY])


def element_seconds(signature: Signature, device: Device) -> float:
    """Return the seconds in which the multiprocessors of a device go through the elements of an op, at least.

    0 where nothing is known of the op, or of the device.
    """
    cycles_a_second = device.rates.processors * device.rates.clock
    if not cycles_a_second:
        return 0.0
    names = _names(signature)
    if not names:
        return 0.0
    largest = max((*signature.inputs, *signature.outputs), key=lambda tensor: tensor.size)
    cycles = max([CYCLES[name][largest.dtype.itemsize > 2] for name in names])
    return signature.attributes.get(UPDATED, largest.size) * cycles / cycles_a_second


def waiting_seconds(signature: Signature, device: Device) -> float:
    """Return the seconds that an op takes beside what it reads and writes, whatever its size."""
    if not device.rates.clock or op_label(signature) != "ReduceSum":
        return 0.0
    read, made = signature.inputs[0].shape, signature.outputs[0].shape
    if not made or not 1 < made[-1] == read[-1] == prod(made) < prod(read):
        return 0.0
    rows = prod(read) / prod(made)
    return COLUMN_SUM * min(rows / ROWS, 1.0) ** GROWTH / device.rates.clock


def _names(signature: Signature) -> list[str]:
    """Return under which names :data:`CYCLES` has an op, or of what a kernel runs what counts in any."""
    name = op_label(signature)
    if name == "Float8Turn" and not signature.attributes.get(ANEW, 0):
        return []
    if name in _CASTS:
        widens = signature.inputs[0].dtype.itemsize < signature.outputs[0].dtype.itemsize
        return ["Cast"] if widens else []  # numbers that become narrower are loaded several at once
    mixed = name == "AccumulateInto" and len({operand.dtype for operand in signature.inputs}) > 1
    if mixed or name in _MIXED:
        return ["Cast+Add"]
    if name in _BINARY and _broadcasts(signature):
        return ["broadcast"]
    if name.endswith("NormalizationGrad") and not signature.attributes.get(AGAIN, 0):
        return []  # of one kernel
    return [name] if name in CYCLES else [part for part in name.split("+") if part in EVALUATED]


def _broadcasts(signature: Signature) -> bool:
    """Whether elements of an operand, unless it is a number, are read for several of the result."""
    made = signature.outputs[0].size
    return any(1 < operand.size < made for operand in signature.inputs)
