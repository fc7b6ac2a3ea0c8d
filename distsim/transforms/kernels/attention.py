"""set_attention: attention as one op ("flash"), or written out in ops ("math"), throughout a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distsim.errors import PlanError
from distsim.ir import Attributes, DType, Function, Op, all_ops
from distsim.ir.dead import brings_backward
from distsim.ir.kernel_rates import ATTENTION_KERNELS
from distsim.ops.attention_options import ATTENTION_CHOICES, ATTENTION_FORMALS, AttentionOptions
from distsim.ops.places import places, shape_of
from distsim.ops.written_attention import write_attention
from distsim.suggestions import choices_for
from distsim.transforms.kernels.fused_attention import OpWriter, as_options, fused_attention, joined
from distsim.transforms.kernels.known import Changes, FunctionScope, rewrite_scopes
from distsim.transforms.kernels.recognition import NoAttentionError, attention_around


def set_attention(function: Function, kind: str) -> Function:
    """Return the function with its attention as one op each (``flash``) or written out (``math``).

    One of ``ATTENTION_KERNELS`` does what ``flash`` does, and says by which kernel each op runs.

    ``flash`` finds softmax(QK')V in any spelling, in callees too, and puts the op ``Attention`` in its place:
    the same numbers, up to the order of sums, for every query that sees a key. A mask becomes
    ``is_causal`` and ``window`` only where its numbers are known to say that. ``math`` writes each such op
    out. What was done, or why nothing was, is in the notes of the result; a function that brings its
    backward pass is left as it is. Raises :class:`PlanError` for another ``kind``, and for ``math`` of a
    function that is differentiated already.
    """
    if kind not in ATTENTION_CHOICES:
        raise PlanError(f"attention={kind!r:.40} is not one of {choices_for(kind, ATTENTION_CHOICES)}")
    others = [note for note in function.notes if not note.startswith("attention: ")]
    if brings_backward(function):
        text = "attention: left as it is, with the backward pass that the function brings"
        return replace(function, notes=(*others, text))
    reasons: list[NoAttentionError] = []
    whole = rewrite_scopes(function, lambda scope: _math(scope) if kind == "math" else _flash(scope, reasons))
    if kind in ATTENTION_KERNELS:
        whole = rewrite_scopes(whole, lambda scope: _run_by(scope, kind))
    return replace(whole, notes=(*others, *_notes(kind, function, _count(whole), reasons)))


def default_attention(dtype: DType) -> str:
    """Return how attention runs in an element type unless asked: kernels for it take 16 bits and fewer."""
    return "flash" if dtype.itemsize <= 2 else "math"


def _count(function: Function) -> int:
    return sum(op.op_type == "Attention" for op in all_ops(function))


def _notes(kind: str, function: Function, after: int, reasons: Sequence[NoAttentionError]) -> list[str]:
    before = _count(function)
    if kind == "math":
        written = any(op.op_type == "Softmax" for op in all_ops(function))
        rest = ["attention: as the model writes it (math)"] if written else []
        return [f"attention: {before} written out (math)"] if before else rest
    first = f"{after} as one kernel each ({kind})" if after else f"none recognised ({kind})"
    told = Counter([str(error) for error in reasons if error.is_close or not after])
    return [f"attention: {first}", *(f"attention: {n} left as written, {why}" for why, n in told.items())]


def _math(scope: FunctionScope) -> Changes:
    """Return what each op Attention is written as."""
    found: Changes = {}
    for op in scope.function.ops:
        if op.op_type == "Attention":
            if op.outputs[1] in scope.readers or op.outputs[1] in scope.function.outputs:
                raise PlanError(
                    f"{scope.function.name}: {op!r} has its logarithms read, by its backward pass: write "
                    "attention out before differentiating"
                )
            writer = OpWriter(op.inputs, op.name)
            made = write_attention(writer, op.inputs, op.attributes, op.outputs[0].name, op.name)
            found[op] = writer.standing_for(op.outputs[0], made)
    return found


def _flash(scope: FunctionScope, reasons: list[NoAttentionError]) -> Changes:
    """Return what stands for the last op of each attention, and for ops Attention with a known mask."""
    changes: Changes = {}
    for op in scope.function.ops:
        if op.op_type == "Attention":
            changes |= _with_known_mask(scope, op)
        elif op.op_type == "Softmax":
            try:
                found = attention_around(scope, op)
                changes |= fused_attention(scope, found)
            except NoAttentionError as error:
                reasons.append(error)
    return changes


def _run_by(scope: FunctionScope, kernel: str) -> Changes:
    """Return each op Attention as one that runs by a kernel."""
    return {
        op: (replace(op, attributes=Attributes({**op.attributes, "kernel": kernel})),)
        for op in scope.function.ops
        if op.op_type == "Attention"
    }


def _with_known_mask(scope: FunctionScope, op: Op) -> Changes:
    """Return the op with what its mask is known to say as attributes instead, if it is."""
    index = places(ATTENTION_FORMALS, op.attributes, len(op.inputs))
    array = scope.known(op.inputs[index["attn_mask"]]) if "attn_mask" in index else None
    sizes = shape_of(op.outputs[0])[2], shape_of(op.inputs[1])[2]
    options = None if array is None else as_options(array, sizes)
    if options is None:
        return {}
    writer = OpWriter(op.inputs[:3], op.name)
    options = joined(AttentionOptions.of_attributes(op.attributes), options)
    writer.add("Attention", op.inputs[:3], options.attributes(), name=op.name)
    return {op: (replace(writer.ops[0], outputs=op.outputs),)}
