"""Key heads repeated before attention, as torchtitan did until it handed grouped heads to its kernels.

Its models wrote every head of keys and values out once for each query head that shares it (torchtitan 9dec370
of December 2024, torchtitan/models/llama/model.py, and 2887250b of June 2025,
torchtitan/models/llama3/model/model.py: ``repeat_kv``, an ``expand`` and a ``reshape``, which copies; since
ff0829c1 of January 2026 ``enable_gqa``). So attention reads, saves and, around a ring, sends as many heads of
keys as of queries, and the gradients of those that are alike are summed by a kernel of their own.
"""

from __future__ import annotations

from dataclasses import replace

from distsim.ir import Function, Op, Value
from distsim.ops.attention_options import ATTENTION_FORMALS
from distsim.ops.places import places, shape_of
from distsim.transforms.kernels.fused_attention import OpWriter
from distsim.transforms.kernels.known import Changes, FunctionScope, rewrite_scopes


def repeat_keys(function: Function) -> Function:
    """Return the forward pass with the op ``Attention`` given as many heads of keys as of queries.

    Attention that is written out, or has as many, is as it was.
    """
    return rewrite_scopes(function, _repeated)


def _repeated(scope: FunctionScope) -> Changes:
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
