"""Marks: identities of no cost that say of a value what nothing else in a function does.

``Accumulate`` is the place where a sum over microbatches is taken. Sharding the batch over time leaves values
that are a sum over microbatches not yet taken; ``shard`` marks where the sum is needed and the pipeline turns
the mark into additions. On one microbatch, hence for NumPy on the whole batch, it is the identity.

``ForwardOutput`` is the place where a result of the forward pass is returned that the loss does not need. In
a joint function the ops that the loss depends on are the forward pass. What is returned besides, a pooled
vector or a cache of keys and values, follows from forward values just as the first gradients do, so that
nothing in it tells that it is no part of the backward pass: the mark does.
"""

from __future__ import annotations

from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.operator import (
    GradientRule,
    Operator,
    ShardingRule,
    Signature,
    arity,
    letters,
    register,
)
from distsim.ops.places import view_work


def _sharding(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    return ShardingRule((dims,), (dims,), ((0,),))


def _register(name: str, gradient: GradientRule | None) -> None:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(name, inputs, 1)
        return inputs

    register(
        Operator(
            name,
            types=types,
            compute=lambda attributes, arrays: [arrays[0]],
            work=view_work,
            gradient=gradient,
            sharding=_sharding,
            view=True,
        )
    )


_register("Accumulate", gradient=None)
_register("ForwardOutput", gradient=lambda ctx: [ctx.grad])
