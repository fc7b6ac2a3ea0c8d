"""Rows of sequences as DTensor brings them together: with ``sp=dtensor`` in place of ``on``.

torchtitan's activations are [batch, sequence, width], divided in the second dimension, where Megatron-LM's
have the sequence first. What DTensor does otherwise, and what is done here to the functions of a rank:

- NCCL gathers and scatters along the first dimension. Along another one torch cuts what was gathered into
  the parts of ranks and puts these together (``torch.cat``), and does so before it scatters
  (``torch/distributed/_functional_collectives.py``, ``all_gather_tensor`` and ``reduce_scatter_tensor``):
  each is a kernel that reads and writes all rows. Products that run in chunks (``tp_overlap=split``) read
  their rows where they are and have none.
- A product's gradients read the rows that its forward pass gathered (autograd saves a DTensor as the product
  read it), where Megatron-LM gathers once more. Of rows that one pass gathers twice, as where it computes
  them again, the second is the first here; what one pass saves for another is still a rank's part, and
  gathered there.
- Operands of 8 bits with scales of their rows are cast where they are gathered, of 16 bits: torchtitan casts
  before only with one scale a tensor (``infra/parallelize.py``, ``Float8ColwiseParallel``; of ``rowwise``
  it says that gathers happen in high precision). Each rank casts all rows. Products that wait for such a
  cast do not run in chunks: torch's pass looks for products that read a gather
  (``torch/_inductor/fx_passes/micro_pipeline_tp.py``, ``_find_consumer_matmuls``).

Sums of gradients do not travel beside gradients of weights: ``MmBackward0`` returns both before a DTensor is
redistributed (:mod:`distsim.compose.division` has these first).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distsim.ir import Attributes, Op, Value, substitute
from distsim.ir.registry import output_types
from distsim.ir.rewrite import rewire_op
from distsim.ops.float8 import MARKS
from distsim.program.block import StageBlocks, kept_rewrite, rewritten_stages
from distsim.transforms.data_parallel.gathers import copied_in, copied_out, over_tensor_ranks
from distsim.transforms.kernels.policies import Kernels

GATHER, SCATTER = "MPIAllgather", "MPIReduceScatter"


def gather_once(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, in which rows are gathered before they are cast, and once.

    What ``kernels`` does not ask for changes nothing.
    """
    return rewritten_stages(stages, _gather_once) if kernels.dtensors else tuple(stages)


def copy_rows(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, with the copies of rows that are gathered and scattered.

    What ``kernels`` does not ask for changes nothing.
    """
    return rewritten_stages(stages, _with_copies) if kernels.dtensors else tuple(stages)


def _casts_rows(op: Op) -> bool:
    """Whether an op casts an operand to 8 bits with scales of its rows, which it finds on its way."""
    return (
        op.op_type == "Float8Cast"
        and len(op.inputs) == 1 == len(op.outputs)
        and op.attributes.keys().isdisjoint(MARKS)
    )


@kept_rewrite("functions that gather rows once, as DTensor does")
def _gather_once(given: Sequence[Op], outputs: Sequence[Value]) -> Iterator[tuple[Op, int]]:
    casts = {op.outputs[0]: op for op in given if _casts_rows(op)}
    read = {value for op in given if not over_tensor_ranks(op, GATHER) for value in op.inputs} | {*outputs}
    made: dict[tuple[str, Value, Attributes], Value] = {}
    instead: dict[Value, Value] = {}
    for place, op in enumerate(given):
        if op.outputs and op.outputs[0] in casts and op.outputs[0] not in read:
            continue  # each that gathers it casts after
        if not over_tensor_ranks(op, GATHER):
            yield rewire_op(op, instead), place
            continue
        cast = casts.get(op.inputs[0])
        for step in (op,) if cast is None else _cast_after(op, cast):
            (value,) = substitute(step.inputs, instead)
            key, (result,) = (step.op_type, value, step.attributes), step.outputs
            if key in made and result not in outputs:
                instead[result] = made[key]
            else:
                made[key] = result
                yield replace(step, inputs=(value,)), place


def _cast_after(gather: Op, cast: Op) -> tuple[Op, Op]:
    """Return the gather of what a cast reads, and the cast of what that makes."""
    types = output_types(GATHER, gather.attributes, (cast.inputs[0].type,), (), gather.version)
    whole = Value(cast.inputs[0].name, types[0])
    return (
        replace(gather, inputs=cast.inputs, outputs=(whole,)),
        replace(cast, inputs=(whole,), outputs=gather.outputs),
    )


@kept_rewrite("functions that copy the rows that they gather and scatter")
def _with_copies(given: Sequence[Op], outputs: Sequence[Value]) -> Iterator[tuple[Op, int]]:
    for place, op in enumerate(given):
        along = (over_tensor_ranks(op, GATHER) or over_tensor_ranks(op, SCATTER)) and op.attributes["dim"] > 0
        out = op.op_type == GATHER
        steps = (op,) if not along else copied_out(op) if out else copied_in(op, op.inputs)
        yield from ((step, place) for step in steps)
