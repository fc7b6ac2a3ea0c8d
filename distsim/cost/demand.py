"""What an op asks of devices and links, whichever they are: a kernel or none, how many, and what it moves."""

from __future__ import annotations

import math
from numbers import Real

from distsim.errors import CostError
from distsim.ir import Device, Topology
from distsim.ops import Signature, operator
from distsim.ops.cross_entropy import LOSS_STEPS
from distsim.ops.kernel import KERNEL, MULTI_TENSOR
from distsim.ops.optimizers import OPTIMIZER_OPS, launches_of

Group = tuple[Device, ...]


def collective_of(signature: Signature, group: Group) -> tuple[str, float]:
    """Return the kind and the size in bytes of what an op moves over a group, as ``collective_time`` wants.

    What is summed whole for one part of it (``whole=1``) is moved as an all-reduce.

    Raises :class:`CostError` for an op that is no communication; of a copy to or from the host see
    :func:`copied_bytes`.
    """
    meaning = operator(signature.op_type).communication
    if meaning is None or not operator(signature.op_type).moves:
        raise CostError(f"{signature} moves nothing; ask seconds() for its cost")
    if meaning.kind in ("scatter", "gather"):
        # The formula wants the size of which each rank of the group, the root too, has an equal part.
        part = min(signature.inputs[0].nbytes, signature.outputs[0].nbytes)
        return meaning.kind, float(part * len(group))
    if meaning.kind == "reduce_scatter" and signature.attributes.get("whole", 0):
        return "all_reduce", float(meaning.nbytes(signature))
    kind = meaning.kind if meaning.variant is None else meaning.variant(signature.attributes)
    return kind, float(meaning.nbytes(signature))


def links_of(signature: Signature, topology: Topology) -> Topology:
    """Return the links as an op finds them: what kernels write to their peers' memory (``direct=1``) starts
    nothing in NCCL."""
    return topology.of_direct_writes() if signature.attributes.get("direct", 0) else topology


def copied_bytes(signature: Signature) -> float:
    """Return the bytes that an op copies to the host of a device or back, of one device; 0 for any other op.

    A tensor on the host has no bytes on the device (``nbytes`` is 0), whichever end of the copy it is.

    >>> from distsim.ir import Float, Tensor
    >>> from distsim.ir.value import NO_ATTRIBUTES
    >>> x, there = [Tensor(Float(), (1000,), Device(0, "gpu"), on_host=where) for where in (False, True)]
    >>> for op_type, read, made in (("Offload", x, there), ("Fetch", there, x)):
    ...     copied_bytes(Signature(op_type, NO_ATTRIBUTES, (read,), (made,)))
    4000.0
    4000.0
    """
    copies = bool(operator(signature.op_type).host_stream)
    return float(sum(tensor.nbytes + tensor.host_nbytes for tensor in signature.inputs)) if copies else 0.0


def host_copy(signature: Signature, device: Device) -> float:
    """Return the seconds of a copy to or from the host of a device."""
    link = device.host_link
    if link is None:
        raise CostError(
            f"{signature}: {device} has no host_link; give one, as in Device(..., host_link=Link(25e9)), or "
            "under [device.host_link] of a cluster's file"
        )
    return link.latency + copied_bytes(signature) / link.achieved


def kernels_of(signature: Signature) -> int:
    """Return how many kernels an op is."""
    if signature.attributes.get("in_steps", 0):
        return LOSS_STEPS
    if signature.op_type in OPTIMIZER_OPS:
        return launches_of(signature)
    return int(signature.attributes.get("launches", 1)) if signature.op_type == KERNEL else 1


def tensors_of(signature: Signature) -> int:
    """Return on how many tensors a multi-tensor kernel works; one for any other op."""
    if signature.op_type != KERNEL or signature.attributes["ops"] not in MULTI_TENSOR:
        return 1
    made = len(signature.outputs)
    return made if made > 1 else len(signature.inputs)


def runs_kernel(op_type: str) -> bool:
    """Whether an op runs on the device at all: views only rename, constants are there already."""
    return op_type != "Constant" and not operator(op_type).view


def takes_turn(op_type: str) -> bool:
    """Whether an op waits for its turn on a stream: it runs a kernel, or keeps back what follows."""
    return runs_kernel(op_type) or operator(op_type).waits


def usable(op: object, seconds: float) -> float:
    """Return the seconds of an op; rules and cost models of another's making may give anything.

    Raises :class:`CostError` for what is no number, not finite, or negative.
    """
    if not (isinstance(seconds, Real) and math.isfinite(seconds) and seconds >= 0):
        raise CostError(f"{op} costs {seconds!r} s; a cost must be a number, finite and not negative")
    return float(seconds)
