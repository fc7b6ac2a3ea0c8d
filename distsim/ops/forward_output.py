"""``ForwardOutput``: the place where a result of the forward pass is returned that the loss does not need.

In a joint function the ops that the loss depends on are the forward pass. What is returned besides, a pooled
vector or a cache of keys and values, follows from forward values just as the first gradients do, so that
nothing in it tells that it is no part of the backward pass: the mark does. It is the identity, of no cost.
"""

from __future__ import annotations

from distsim.ir.op import Attributes
from distsim.ir.type import Tensor
from distsim.ops.operator import Operator, ShardingRule, Signature, arity, letters, register
from distsim.ops.places import view_work


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("ForwardOutput", inputs, 1)
    return inputs


def _sharding(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    return ShardingRule((dims,), (dims,), ((0,),))


register(
    Operator(
        "ForwardOutput",
        types=_types,
        compute=lambda attributes, arrays: [arrays[0]],
        work=view_work,
        gradient=lambda ctx: [ctx.grad],
        sharding=_sharding,
        view=True,
    )
)
