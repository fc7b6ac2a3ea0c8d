"""Copies between tensors and the buffer of a message: ``CopyOut`` of one that was gathered, ``CopyIn`` of one
that is scattered.

Several tensors are one message where they lie side by side in a buffer (:mod:`distsim.ops.coalescing`).
Where a framework keeps them elsewhere, one kernel copies all of them on the stream of the computation:
torch's FSDP2 gathers parameters into a buffer out of which it splits them, and gradients into one that it
scatters, casting on the way (``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``:
``split_with_sizes_copy``, ``chunk_cat``). FSDP1's parameters and gradients are views of such buffers.

Each reads its operands once and writes as many results; ``to`` is the element type of these, if it is
another. Neither is an op of a model: :mod:`distsim.transforms.data_parallel.gathers` and
:mod:`distsim.transforms.tensor_parallel.expert_rows`, for one, write them.

Copies between the memory of devices and that of their hosts: ``Offload`` and ``Fetch``.

``Offload`` copies its operands to the host, ``Fetch`` back, all of them one after the other, over
``Device.host_link`` and on a stream of its own (``offload``, ``fetch``): both directions run at full speed at
once. What is on the host (``Tensor.on_host``) takes no memory of the device, so that a value that is only
read after a ``Fetch`` of it is free on the device once it was copied; ``Fetch`` gives the memory of the host
back (:mod:`distsim.simulation.memory.host`), so a value is fetched once. A ``Fetch`` begins when the
computation has ended that was issued before it, in whose memory its results may lie, as streams of copies
are made to wait (Transformer Engine's ``self.h2d_stream.wait_stream(torch.cuda.current_stream())``), and so
as late as it stands; an ``Offload`` as soon as its operands are there. Neither is an op of a model: saved
activations are offloaded by :mod:`distsim.transforms.recompute.offload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.onnx_bridge import made_type
from distsim.ops.operator import Array, Operator, Work, common_device, register
from distsim.ops.places import move_work


def _register_copy(name: str) -> None:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not inputs:
            raise TypeRuleError(f"{name} copies at least one tensor; none given")
        common_device(name, inputs)
        if len({tensor.dtype for tensor in inputs}) > 1:
            raise TypeRuleError(f"{name} copies tensors of one element type, not {[*map(str, inputs)]}")
        if "to" not in attributes:
            return inputs
        to = made_type(attributes)
        return tuple([replace(tensor, dtype=to) for tensor in inputs])

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        if "to" not in attributes:
            return list(arrays)
        to = made_type(attributes).np
        return [array.astype(to, copy=False) for array in arrays]

    register(Operator(name, types=types, compute=compute, work=move_work))


_register_copy("CopyOut")
_register_copy("CopyIn")


def _register_host_copy(name: str, stream: str, to_host: bool) -> None:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not inputs:
            raise TypeRuleError(f"{name} takes at least one value; none given")
        common_device(name, inputs)
        for tensor in inputs:
            if tensor.on_host == to_host:
                raise TypeRuleError(f"{name}: {tensor} is {'on' if to_host else 'not on'} the host already")
        return tuple([replace(tensor, on_host=to_host) for tensor in inputs])

    register(
        Operator(
            name,
            types=types,
            compute=lambda attributes, arrays: list(arrays),
            work=lambda signature: Work(0.0, 0.0, 0.0),
            host_stream=stream,
            follows="" if to_host else "compute",
        )
    )


_register_host_copy("Offload", "offload", to_host=True)
_register_host_copy("Fetch", "fetch", to_host=False)
