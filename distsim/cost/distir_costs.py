"""The cost rules of Microsoft's DistIR (January 2022 version), to set its figures beside ours.

Read off its behaviour: element-wise ops cost launch + bytes + flops (a sum, not a maximum, without the
output's bytes), a bandwidth is the mean over the pairs of a group, and nothing has a latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from distsim.hardware import collective_time
from distsim.ir import Device, Topology
from distsim.ops import Signature, Work

Group = tuple[Device, ...]


@dataclass(frozen=True)
class DistIRRules:
    """DistIR's rules; S is bytes, n ranks, B the mean bytes/s over the pairs of the group.

    - element-wise: ``launch + S_in / dram + n_out / flops`` (S_in counts both operands of a binary op);
    - ``MatMul`` of [m, k] and [k, n]: ``launch + itemsize (mk + kn) / dram + 2mkn / flops``;
      ``MatMulGrad`` is two of them, and any other product costs as much for its own flops;
    - all-reduce ``2 S (n-1)/n / B``; ``Send`` ``S / B``; all-gather and reduce-scatter ``S (n-1)/n / B``
      (DistIR charges half of this for an all-gather, which no ring can reach).

    The sum of a gradient over microbatches counts one operand: DistIR's own figures say so (for dp=8,
    pp=2 going from 2 to 8 microbatches leaves 75 ms for 7 x 32 sums of 268 MB; one operand is 67 ms,
    two are 134 ms).

    Collectives that DistIR does not have cost what they do elsewhere in this library.
    """

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds of a compute op."""
        if signature.op_type == "MatMul":
            return self._matmul(signature, device)
        if signature.op_type == "MatMulGrad":
            return 2 * self._matmul(signature, device)
        if demand.matrix:  # products that DistIR does not have: one gradient of a MatMul, Gemm, Conv
            moved = sum(tensor.nbytes for tensor in signature.inputs) / device.dram_bandwidth
            return device.kernel_launch_overhead + moved + demand.flops / device.throughput
        operands = signature.inputs[:1] if signature.op_type == "AccumulateInto" else signature.inputs
        moved = sum(tensor.nbytes for tensor in operands) / device.dram_bandwidth
        elements = max((tensor.size for tensor in signature.inputs), default=0)
        return device.kernel_launch_overhead + moved + elements / device.throughput

    def communicate(self, kind: str, nbytes: float, group: Group, topology: Topology) -> float:
        """Seconds of a collective over a group."""
        moved = nbytes * (len(group) - 1) / len(group)
        if kind == "all_reduce":
            return 2 * moved / _mean_bandwidth(group, topology)
        if kind in ("all_gather", "reduce_scatter"):
            return moved / _mean_bandwidth(group, topology)
        if kind == "send":
            return nbytes / _mean_bandwidth(group, topology)
        return collective_time(kind, nbytes, group, topology)

    def _matmul(self, signature: Signature, device: Device) -> float:
        a, b = signature.inputs[:2]
        flops = 2 * a.size * (b.shape[-1] if b.rank > 1 else 1)
        moved = (a.nbytes + b.nbytes) / device.dram_bandwidth
        return device.kernel_launch_overhead + moved + flops / device.throughput


def _mean_bandwidth(group: Group, topology: Topology) -> float:
    return float(np.mean([topology.link(a, b).bandwidth for a, b in permutations(group, 2)]))
