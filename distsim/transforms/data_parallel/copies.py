"""Copies out of the buffer that a collective filled, and into the one that the next reads.

Rows of sequences and of experts are copied so (:mod:`distsim.transforms.tensor_parallel.dtensors`,
:mod:`distsim.transforms.tensor_parallel.expert_rows`), and parameters and gradients by torch's FSDP2:
``foreach_all_gather_copy_out`` and ``foreach_reduce`` of ``torch/distributed/fsdp/_fully_shard/
_fsdp_collectives.py``, both on the current stream, that of the computation, as one kernel of a layer:

- parameters are copied when their layer begins, in the type in which they were gathered; what was gathered
  is free after that, and in backward the next layer is gathered only then (``pre_backward``: copied, then
  prefetched, by streams that wait for the copy);
- gradients are copied when backward of a layer is done, and cast to the type in which they are summed. The
  copy waits for the reduction before (``reduce_scatter_state`` of ``_fsdp_param_group.py``): one buffer of
  gradients is in use at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx.helper

from distsim.ir import Attributes, Op, Value
from distsim.ir.type import as_tensor
from distsim.ops.conversion import ONCE
from distsim.transforms.data_parallel.gradient_buckets import grouped


def copied_out(gather: Op) -> tuple[Op, Op]:
    """Return an op that brings what it does into a buffer, and the op that copies that out of it.

    That is done once a step where the gather is. What it copies has the places of what was gathered.
    """
    buffer = tuple([Value(made.name, made.type) for made in gather.outputs])
    marks = Attributes({ONCE: True} if gather.attributes.get(ONCE) else {})
    return replace(gather, outputs=buffer), Op("CopyOut", buffer, gather.outputs, marks)


def copied_in(reduction: Op, sources: Sequence[Value], awaited: Value | None = None) -> list[Op]:
    """Return ops that copy gradients, or rows, into a buffer, and the op that reduces or sends it.

    ``sources`` has for each operand of that what is copied, of its shape and of any type. ``awaited`` is what
    the copy waits for, if anything.
    """
    (to,) = {as_tensor(value.type, value.name).dtype for value in reduction.inputs}
    found = grouped(range(len(sources)), lambda place: as_tensor(sources[place].type, "gradient").dtype)
    ops, buffer = list[Op](), list(reduction.inputs)
    for places in found:
        read = [sources[place] for place in places]
        if awaited is not None:
            late = Value(read[0].name, read[0].type)
            ops.append(Op("OptimizationBarrier", (read[0], awaited), (late,)))
            read[0] = late
        for place in places:
            buffer[place] = Value(buffer[place].name, buffer[place].type)
        casts = as_tensor(read[0].type, "gradient").dtype != to
        attributes = {"to": int(onnx.helper.np_dtype_to_tensor_dtype(to.np))} if casts else {}
        copies = tuple([buffer[place] for place in places])
        ops.append(Op("CopyIn", tuple(read), copies, Attributes(attributes)))
    return [*ops, replace(reduction, inputs=tuple(buffer))]
