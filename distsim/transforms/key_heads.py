"""Heads of keys and values: repeated for ranks, or as a framework does, and saved as a ring ends.

Key heads are repeated where tensor-parallel ranks are more than there are heads of keys and values.

Of grouped queries a rank has some heads and the one head of keys that they share, which other ranks have as
well (Megatron-LM, ``core/transformer/attention.py``): tp / groups ranks each. So ``Attention`` of as many
key heads as there are ranks, each taken from the one that its queries read, divides over them.

Keys and values saved as the last step of a ring has them, for backward to begin with.

Backward goes around the ring the other way, from where forward ended, and comes to a rank's own keys last: so
the sums of their gradients arrive in that step, not one message after it (TransformerEngine,
``context_parallel.py``, AttnFuncWithCPAndKVP2P, which saves what it has received last). To whom does not see
ranks these are the same keys and values: ``Attention`` hands them on, and ``AttentionGrad`` reads those.

Key heads repeated before attention, as torchtitan did until it handed grouped heads to its kernels.

Its models wrote every head of keys and values out once for each query head that shares it (torchtitan 9dec370
of December 2024, torchtitan/models/llama/model.py, and 2887250b of June 2025,
torchtitan/models/llama3/model/model.py: ``repeat_kv``, an ``expand`` and a ``reshape``, which copies; since
ff0829c1 of January 2026 ``enable_gqa``). So attention reads, saves and, around a ring, sends as many heads of
keys as of queries, and the gradients of those that are alike are summed by a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from distsim.ir import Environment, Function, Literal, Op, Value, callees, rewrite, rewrite_all
from distsim.ir.rewrite import KeptRewrites
from distsim.ir.type import Int64, Tensor, as_tensor
from distsim.ir.value import Attributes
from distsim.ops.attention_options import ATTENTION_FORMALS
from distsim.ops.places import places, shape_of
from distsim.transforms.kernels.fused_attention import OpWriter
from distsim.transforms.kernels.known import Changes, FunctionScope, rewrite_scopes

_REPEATED = KeptRewrites("functions with repeated key heads, by function and ranks", 4)


def repeat_key_heads(function: Function, ranks: int) -> Function:
    """Return the function in which attention has ``ranks`` heads of keys and values where it has fewer.

    That is where ranks divide the heads of queries and are a multiple of those of keys; else, and where
    attention is written out, it is as it was. Made once per function.
    """
    if ranks == 1:
        return function
    change = partial(_change, ranks=ranks)
    return _REPEATED.of(
        function, ranks, lambda: rewrite_all(function, lambda _, current: rewrite(current, change))
    )


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


_SAVED = KeptRewrites("functions that save keys as a ring ends, by function", 4)

Places = dict[Function, tuple[int, int]]
"""By callee the places of keys and values among what it returns, or is given."""


def save_last_keys(function: Function) -> Function:
    """Return the function whose attentions save keys and values as the last step of a ring has them.

    Where they are saved for something else too, as heads that backward repeats again, they are the rank's
    own, as they were. Made once per function.
    """
    return _SAVED.of(function, None, lambda: _saving(function))


def _saving(function: Function) -> Function:
    functions = (*callees(function), function)
    makers, readers = _linked(functions, _places(functions, "Attention"), _places(functions, "AttentionGrad"))

    def change(before: Function, current: Function) -> Function:
        own = {op.inputs[1:3] for op in current.ops if op.op_type == "AttentionGrad"}
        last: dict[Value, Value] = {}
        marked = partial(_marked, saved=before in makers, begins=before in readers, own=own, last=last)
        changed = rewrite(current, marked)
        if before in makers:
            changed = replace(changed, outputs=tuple([last.get(value, value) for value in changed.outputs]))
        return changed

    return rewrite_all(function, change)


def _places(functions: tuple[Function, ...], op_type: str) -> Places:
    """Return where callees of one attention hand on, or are given, its keys and values, but the last."""
    found: Places = {}
    for current in functions[:-1]:
        ops = [op for op in current.ops if op.op_type == op_type]
        ends = current.outputs if op_type == "Attention" else current.inputs
        if len(ops) == 1 and all(ends.count(value) == 1 for value in ops[0].inputs[1:3]):
            key, value = ops[0].inputs[1:3]
            others = [v for op in current.ops if op is not ops[0] for v in op.inputs]
            if op_type == "Attention" or not {key, value} & {*others, *current.outputs}:
                found[current] = (ends.index(key), ends.index(value))
    return found


def _linked(functions: tuple[Function, ...], made: Places, read: Places) -> tuple[Places, Places]:
    """Return those callees of which the ones hand on keys and values to the others alone, and these get none
    but theirs."""
    while True:
        bad = set[Function]()
        for current in functions:
            source: dict[Value, tuple[Function, int]] = {}
            for op in current.ops:
                if op.is_call:
                    source |= {op.outputs[p]: (op.callee, n) for n, p in enumerate(made.get(op.callee, ()))}
            for op in current.ops:
                places = read.get(op.callee, ()) if op.is_call else ()
                for index, value in enumerate(op.inputs):
                    wanted = places.index(index) if index in places else None
                    maker, place = source.get(value, (None, None))
                    if wanted != place:
                        bad |= {each for each in (maker, op.callee if wanted is not None else None) if each}
            bad |= {source[value][0] for value in current.outputs if value in source}
        if not bad:
            return made, read
        made = {each: places for each, places in made.items() if each not in bad}
        read = {each: places for each, places in read.items() if each not in bad}


def _marked(
    op: Op,
    _: Environment,
    saved: bool,
    begins: bool,
    own: set[tuple[Value, ...]],
    last: dict[Value, Value],
) -> Iterator[Op]:
    """``saved``: for another function; ``own``: keys and values that gradients of the same function read."""
    ends, marked = op.inputs[1:3], Attributes({**op.attributes, "last": 1})
    if op.op_type == "Attention" and len(op.inputs) == 3 and (saved or ends in own):
        handed_on = [Value(value.name, value.type) for value in ends]
        last.update(zip(ends, handed_on, strict=True))
        yield replace(op, outputs=(*op.outputs, *handed_on), attributes=marked)
    elif op.op_type == "AttentionGrad" and (begins or all(value in last for value in ends)):
        given = [last.get(value, value) for value in ends]
        yield replace(op, inputs=(op.inputs[0], *given, *op.inputs[3:]), attributes=marked)
    else:
        yield op


def repeat_keys(function: Function) -> Function:
    """Return the forward pass with the op ``Attention`` given as many heads of keys as of queries.

    Attention that is written out, or has as many, is as it was.
    """
    return rewrite_scopes(function, _with_wide_heads)


def _with_wide_heads(scope: FunctionScope) -> Changes:
    found = {op: _wide(op) for op in scope.function.ops if op.op_type == "Attention"}
    return {op: made for op, made in found.items() if made}


def _wide(op: Op) -> tuple[Op, ...]:
    """Return the ops in the place of an attention of grouped heads; none for another."""
    index = places(ATTENTION_FORMALS, op.attributes, len(op.inputs))
    heads, groups = (shape_of(op.inputs[index[name]])[1] for name in "QK")
    if heads == groups:
        return ()
    writer = OpWriter(tuple(dict.fromkeys(op.inputs)), op.name)
    narrow = dict.fromkeys([op.inputs[index[name]] for name in "KV"])
    wide = {value: _of_each_query(writer, value, heads // groups) for value in narrow}
    operands = [wide.get(value, value) for value in op.inputs]
    writer.add("Attention", operands, op.attributes, (), [v.name for v in op.outputs], name=op.name)
    return (*writer.ops[:-1], replace(writer.ops[-1], outputs=op.outputs))


def _of_each_query(writer: OpWriter, value: Value, times: int) -> Value:
    """Return [batch, heads x times, seq, size] of [batch, heads, seq, size]."""
    batch, heads, seq, size = shape_of(value)
    apart = writer.one("Reshape", value, shape=(batch, heads, 1, seq, size))
    repeated = writer.one("Expand", apart, shape=(batch, heads, times, seq, size))
    return writer.one("Reshape", repeated, shape=(batch, heads * times, seq, size))
