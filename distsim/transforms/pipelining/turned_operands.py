"""Operands of 8 bits as gradients of weights read them: along their rows, which those products sum over.

A product reads its operands along the dimension that it sums over; the gradient of its weight sums over rows,
of what it multiplied and of the gradient of what it made. With scales of rows, or of a tensor, torchao casts
or turns both by kernels of their own (``Float8Turn``), each once however many products read it. A weight,
along whose other dimension the gradient of an input sums, is gathered and cast anew for backward by FSDP, the
one way that is read. Transformer Engine's casts write both ways at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distsim.cache import Cache
from distsim.ir import Attributes, Function, Op, Value, substitute
from distsim.ops.float8 import MARKS
from distsim.program.block import RewrittenOps, StageBlocks, called, rewritten_stages
from distsim.transforms.kernels.policies import Kernels

_TURNED = Cache[Function, RewrittenOps | None]("functions whose operands of 8 bits are turned", 2)


def turn_operands(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, with the operands of gradients of weights turned.

    Those that share Functions share them still; policies of one kernel for both gradients turn nothing, nor
    do those whose casts write both ways.
    """
    turns = kernels.gradients_apart and kernels.turns
    return rewritten_stages(stages, _turned) if turns else tuple(stages)


def _turned(function: Function) -> RewrittenOps | None:
    def make() -> RewrittenOps | None:
        ops = called(function, _turned)
        return RewrittenOps.of(function, ops, [*_with_turns(ops)])

    return _TURNED.get(function, None, make)


def _with_turns(ops: Sequence[Op]) -> Iterator[tuple[Op, int]]:
    turned: dict[Value, Value] = {}
    for place, op in enumerate(ops):
        if op.op_type != "Float8MatMulGradB" or not op.attributes.keys().isdisjoint(MARKS):
            yield op, place
            continue
        for value in op.inputs[:2]:
            if value not in turned:
                turned[value] = Value(value.name, value.type)
                rows = {"rows": 1} if len(op.inputs) == 2 else {}
                yield Op("Float8Turn", (value,), (turned[value],), Attributes(rows)), place
        yield replace(op, inputs=(*substitute(op.inputs[:2], turned), *op.inputs[2:])), place
