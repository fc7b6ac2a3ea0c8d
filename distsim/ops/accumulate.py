"""``Accumulate``: the place where a sum over microbatches is taken.

Sharding the batch over time leaves values that are a sum over microbatches not yet taken; ``shard``
marks where the sum is needed and the pipeline turns the mark into additions. On one microbatch,
hence for NumPy on the whole batch, it is the identity.
"""

from __future__ import annotations

from distsim.ir.op import Attributes
from distsim.ir.type import Tensor
from distsim.ops.operator import Operator, ShardingRule, Signature, arity, letters, register
from distsim.ops.places import view_work


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Accumulate", inputs, 1)
    return inputs


def _sharding(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    return ShardingRule((dims,), (dims,), ((0,),))


register(
    Operator(
        "Accumulate",
        types=_types,
        compute=lambda attributes, arrays: [arrays[0]],
        work=view_work,
        sharding=_sharding,
        view=True,
    )
)
