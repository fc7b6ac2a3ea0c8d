"""Key heads repeated, where tensor-parallel ranks are more than there are heads of keys and values.

Of grouped queries a rank has some heads and the one head of keys that they share, which other ranks have as
well (Megatron-LM, ``core/transformer/attention.py``): tp / groups ranks each. So ``Attention`` of as many
key heads as there are ranks, each taken from the one that its queries read, divides over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from distsim.cache import Cache
from distsim.ir import Environment, Function, Literal, Op, Value, rewrite, rewrite_all
from distsim.ir.type import Int64, Tensor, as_tensor
from distsim.ir.value import Attributes

_REPEATED = Cache[Function, Function | None]("functions with repeated key heads, by function and ranks", 4)


def repeat_key_heads(function: Function, ranks: int) -> Function:
    """Return the function in which attention has ``ranks`` heads of keys and values where it has fewer.

    That is where ranks divide the heads of queries and are a multiple of those of keys; else, and where
    attention is written out, it is as it was. Made once per function.
    """
    if ranks == 1:
        return function
    return _REPEATED.get(function, ranks, lambda: _repeated(function, ranks)) or function


def _repeated(function: Function, ranks: int) -> Function | None:
    change = partial(_change, ranks=ranks)
    found = rewrite_all(function, lambda _, current: rewrite(current, change))
    return None if found is function else found


def _change(op: Op, env: Environment, ranks: int) -> Iterator[Op]:
    if op.op_type not in ("Attention", "AttentionGrad") or not _is_repeated(op.inputs, ranks):
        yield op
        return
    first = as_tensor(op.inputs[1].type, op.inputs[1].name)
    order = np.arange(ranks) // (ranks // first.shape[1])
    index = Value("key_heads", Tensor(Int64(), (ranks,), first.device))
    yield Op("Constant", (), (index,), Attributes({"value": Literal(order), "device": first.device}))
    taken: list[Value] = []
    for value in op.inputs[1:3]:
        type_ = as_tensor(value.type, value.name)
        taken.append(Value(value.name, _with_heads(type_, ranks)))
        yield Op("Gather", (value, index), (taken[-1],), Attributes({"axis": 1}), name=op.name)
    query, _, _, *rest = op.inputs
    if op.op_type == "Attention":
        yield replace(op, inputs=(query, *taken, *rest))
        return
    grads = [Value(value.name, own.type) for value, own in zip(op.outputs[1:], taken, strict=True)]
    yield replace(op, inputs=(query, *taken, *rest), outputs=(op.outputs[0], *grads))
    for grad, value in zip(grads, op.outputs[1:], strict=True):
        where = Attributes({"axis": 1, "shape": as_tensor(value.type, value.name).shape})
        yield Op("GatherGrad", (index, grad), (value,), where, name=op.name)


def _is_repeated(inputs: Sequence[Value], ranks: int) -> bool:
    """Whether an attention has fewer heads of keys than ranks that divide its queries."""
    heads, groups = (as_tensor(value.type, value.name).shape[1] for value in inputs[:2])
    return groups < ranks and heads % ranks == 0 and ranks % groups == 0


def _with_heads(type_: Tensor, count: int) -> Tensor:
    return type_.with_shape((type_.shape[0], count, *type_.shape[2:]))
