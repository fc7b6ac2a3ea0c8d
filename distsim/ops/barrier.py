"""``OptimizationBarrier``: a value that is there once others are, too.

The identity on its first operand, which waits for all of them. It is what XLA's and JAX's operator of this
name is for in rematerialisation: what reads the barrier is another computation than what reads the value
itself, hence is not merged with it, and does not start before what the barrier waits for, the gradient
with which the backward pass of a block begins (Chen et al. 2016; ``jax.checkpoint``, prevent_cse). No kernel
runs and no memory is taken.
"""

from __future__ import annotations

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.operator import Operator, register
from distsim.ops.places import view_work


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not inputs:
        raise TypeRuleError("OptimizationBarrier takes a value, and values to wait for; none given")
    return inputs[:1]


register(
    Operator(
        "OptimizationBarrier",
        types=_types,
        compute=lambda attributes, arrays: [arrays[0]],
        work=view_work,
        gradient=lambda ctx: [ctx.grad, *[None] * (len(ctx.inputs) - 1)],
        view=True,
        waits=True,
    )
)
