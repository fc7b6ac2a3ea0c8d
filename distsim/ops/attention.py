"""``Attention``: softmax(scale Q K' + mask) V as one kernel, after ONNX (operator set 23), and its gradient.

Q [batch, heads, seq, size], K [batch, kv_heads, kv_seq, size], V [batch, kv_heads, kv_seq, v_size] and maybe
attn_mask, broadcast to [batch, heads, seq, kv_seq], give Y [batch, heads, seq, v_size] and the logarithm of
each softmax's sum, [batch, heads, seq] in float32 at least. That is all that backward needs to make the
probabilities again: no tensor of seq x kv_seq is read or written (FlashAttention-2, Dao 2023, algorithms 1
and 2). Query head h reads key and value head h * kv_heads / heads (Ainslie et al. 2023).

A boolean mask says what may be seen, another one is added. Of queries and keys of unlike number the first
ones are aligned. A query that sees nothing gets zeros. Under dropout the kernel draws its numbers again in
backward, from the seed. ``AttentionGrad`` reads Y, or, ``joined``, what the output projection reads of it:
[batch, seq, heads x v_size].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.function import Op
from distsim.ir.type import Bool, Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.attention_options import (
    ATTENTION_FORMALS,
    OPTION_NAMES,
    AttentionOptions,
    AttentionSizes,
    pairs_seen,
    seen,
)
from distsim.ops.broadcast import sum_to
from distsim.ops.matmul import operand_shapes
from distsim.ops.normalization import widened, wider
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    Work,
    bytes_of,
    common_device,
    register,
)
from distsim.ops.places import by_place, operands, picked, shape_of, wanted

_SAVED = (*ATTENTION_FORMALS, "Y", "lse", "dY")


# --- types and meaning -------------------------------------------------------------------------------


def sizes_of(
    formals: Sequence[str], attributes: Mapping[str, Any], inputs: Sequence[Tensor]
) -> AttentionSizes:
    """Return the sizes of the operands, by ``formals``; such as do not fit each other are refused."""
    shapes = operand_shapes(formals, attributes, [tensor.shape for tensor in inputs])
    missing = [name for name in formals if name not in shapes and name != "attn_mask"]
    if missing:
        raise TypeRuleError(f"Attention lacks its operand {missing[0]}; {len(inputs)} values given")
    sizes = AttentionSizes.of_shapes(shapes["Q"], shapes["K"], shapes["V"])
    mask = shapes.get("attn_mask", ())
    whole = sizes.scores[max(4 - len(mask), 0) :]
    if len(mask) > 4 or any(n not in (1, full) for n, full in zip(mask, whole, strict=False)):
        raise TypeRuleError(f"Attention: attn_mask {mask} does not broadcast to {sizes.scores}")
    return sizes


def formals_of(attributes: Mapping[str, Any], count: int, others: int) -> tuple[str, ...]:
    """Return the formals of an op whose mask is left out when there are too few values for one."""
    given = count == others + 4 or "attn_mask" in attributes
    formals = _SAVED if others else ATTENTION_FORMALS
    return tuple(name for name in formals if given or name != "attn_mask")


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) + ("attn_mask" in attributes) not in (3, 4):
        raise TypeRuleError(f"Attention takes Q, K, V and maybe attn_mask, {len(inputs)} values given")
    AttentionOptions.of_attributes(attributes)
    sizes = sizes_of(ATTENTION_FORMALS, attributes, inputs)
    query = inputs[0]
    if not query.dtype.is_floating or any(tensor.dtype != query.dtype for tensor in inputs[1:3]):
        raise TypeRuleError(f"Attention: {', '.join(map(str, inputs[:3]))} must be real and of one type")
    for mask in inputs[3:]:
        if not (mask.dtype.is_floating or mask.dtype == Bool()):
            raise TypeRuleError(f"Attention: attn_mask {mask} must be boolean or real; cast it first")
    device = common_device("Attention", inputs)
    wide = wider(query.dtype)
    made = Tensor(query.dtype, sizes.output, device), Tensor(wide, sizes.output[:3], device)
    return (*made, *inputs[1:3]) if "last" in attributes else made


def _repeated(x: Array, sizes: AttentionSizes) -> Array:
    return np.repeat(widened(x), sizes.group, axis=1)


def _array_sizes(given: Mapping[str, Array]) -> AttentionSizes:
    return AttentionSizes.of_shapes(given["Q"].shape, given["K"].shape, given["V"].shape)


def _capped(given: Mapping[str, Array], sizes: AttentionSizes, options: AttentionOptions) -> Array:
    """Return the products of queries and keys, scaled and capped."""
    query, key = widened(given["Q"]), _repeated(given["K"], sizes)
    scale = 1 / math.sqrt(sizes.size) if options.scale is None else options.scale
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(scale)
    cap = query.dtype.type(options.softcap)
    return cap * np.tanh(scores / cap) if options.softcap else scores


def _masked(
    capped: Array, given: Mapping[str, Array], sizes: AttentionSizes, options: AttentionOptions
) -> Array:
    """Return the scores, -inf where a key is not seen."""
    queries = given["q_places"] if "q_places" in given else np.arange(sizes.seq)
    keys = given["k_places"] if "k_places" in given else np.arange(sizes.kv_seq)
    visible, mask = seen(queries, keys, options), given.get("attn_mask")
    if mask is not None and mask.dtype == np.bool_:
        visible = mask if visible is None else visible & mask
    elif mask is not None:
        capped = capped + mask.astype(capped.dtype)
    return capped if visible is None else np.where(visible, capped, capped.dtype.type(-np.inf))


def _kept(sizes: AttentionSizes, options: AttentionOptions, like: Array) -> Array | None:
    """Return what dropout multiplies the probabilities by: those of ``Dropout`` with that seed."""
    if not options.dropout:
        return None
    drawn = np.random.default_rng(options.seed).uniform(size=sizes.scores)
    return ((drawn >= options.dropout) / (1.0 - options.dropout)).astype(like.dtype)


def attend(given: Mapping[str, Array], options: AttentionOptions) -> Sequence[Array]:
    """Return Y and lse of the operands, by name; ``q_places`` and ``k_places`` are places in the sequence."""
    sizes = _array_sizes(given)
    scores = _masked(_capped(given, sizes, options), given, sizes, options)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0).astype(scores.dtype)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    blind = total == 0
    weights = weights / np.where(blind, 1, total)
    # exp(score - lse) is zero everywhere where nothing is seen.
    lse = np.where(blind, np.inf, np.log(np.where(blind, 1, total)) + top)[..., 0]
    kept = _kept(sizes, options, weights)
    mixed = (weights if kept is None else weights * kept) @ _repeated(given["V"], sizes)
    return [mixed.astype(given["Q"].dtype, copy=False), lse.astype(scores.dtype, copy=False)]


def _grouped_sum(x: Array, sizes: AttentionSizes) -> Array:
    """Return the sum over the query heads that share a head."""
    return x.reshape(sizes.batch, sizes.kv_heads, sizes.group, *x.shape[2:]).sum(axis=2)


def _compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    options = AttentionOptions.of_attributes(attributes)
    made = attend(operands(ATTENTION_FORMALS, attributes, arrays), options)
    return [*made, *arrays[1:3]] if "last" in attributes else made


def _grad_compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    formals = formals_of(attributes, len(arrays), 3)
    return attend_backward(operands(formals, attributes, arrays), attributes)


def joined_shape(sizes: AttentionSizes) -> tuple[int, ...]:
    """The shape of Y as kernels write it and output projections read it: [batch, seq, heads x v_size]."""
    return (sizes.batch, sizes.seq, sizes.heads * sizes.v_size)


def attend_backward(given: Mapping[str, Array], attributes: Attributes) -> Sequence[Array]:
    """Return the gradients of Q, K, V and maybe of the mask: FlashAttention-2's backward (Dao 2023,
    algorithm 2), all blocks at once."""
    options, sizes = AttentionOptions.of_attributes(attributes), _array_sizes(given)
    query, key, value = widened(given["Q"]), _repeated(given["K"], sizes), _repeated(given["V"], sizes)
    y, dy = widened(given["Y"]), widened(given["dY"])
    if attributes.get("joined", 0):
        y = np.swapaxes(y.reshape(sizes.batch, sizes.seq, sizes.heads, sizes.v_size), 1, 2)
    capped = _capped(given, sizes, options)
    weights = np.exp(_masked(capped, given, sizes, options) - widened(given["lse"])[..., None])
    kept = _kept(sizes, options, weights)
    dropped = weights if kept is None else weights * kept
    d_value = np.swapaxes(dropped, -1, -2) @ dy
    d_weights = dy @ np.swapaxes(value, -1, -2)
    d_weights = d_weights if kept is None else d_weights * kept
    d_scores = weights * (d_weights - (dy * y).sum(axis=-1, keepdims=True))
    made: list[Array] = []
    if attributes.get("bias", 0):
        made = [sum_to(d_scores, given["attn_mask"].shape).astype(given["attn_mask"].dtype, copy=False)]
    if options.softcap:
        d_scores = d_scores * (1 - (capped / options.softcap) ** 2)
    scale = 1 / math.sqrt(sizes.size) if options.scale is None else options.scale
    d_scores = d_scores * query.dtype.type(scale)
    d_key = np.swapaxes(d_scores, -1, -2) @ query
    grads = (d_scores @ key, _grouped_sum(d_key, sizes), _grouped_sum(d_value, sizes))
    return [*(grad.astype(given["Q"].dtype, copy=False) for grad in grads), *made]


def _grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    formals = formals_of(attributes, len(inputs), 3)
    count = len(formals) - ("attn_mask" in attributes)
    if len(inputs) != count:
        raise TypeRuleError(f"AttentionGrad takes {', '.join(formals)}, {len(inputs)} values given")
    AttentionOptions.of_attributes(attributes)
    sizes = sizes_of(formals, attributes, inputs)
    y, lse, dy = inputs[-3:]
    whole = joined_shape(sizes) if attributes.get("joined", 0) else sizes.output
    if (y.shape, lse.shape, dy.shape) != (whole, sizes.output[:3], sizes.output):
        raise TypeRuleError(f"AttentionGrad: Y {y}, lse {lse} and dY {dy} are not of {sizes.output}")
    device = common_device("AttentionGrad", inputs)
    made = inputs[: 4 if attributes.get("bias", 0) else 3]
    return tuple(tensor.on(device) for tensor in made)


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    if ctx.grads[1] is not None:
        raise TypeRuleError("Attention: only its first output may influence the loss")
    options = picked(ctx.attributes, *OPTION_NAMES, "attn_mask")
    biased = wanted(ATTENTION_FORMALS, ctx, "attn_mask")
    if biased:
        options["bias"] = 1
    y, lse = ctx.outputs
    joined = _joined_output(ctx)
    if joined is not None:
        y, options["joined"] = joined, 1
    made = ctx.add_many("AttentionGrad", *ctx.inputs, y, lse, ctx.grad, **options)
    names = ATTENTION_FORMALS if biased else ATTENTION_FORMALS[:3]
    return by_place(ATTENTION_FORMALS, ctx, dict(zip(names, made, strict=True)))


def _joined_output(ctx: GradientContext) -> Value | None:
    """Return [batch, seq, heads x v_size] of Y if forward makes that of it, and nothing else.

    A kernel writes its output in that order, and what reads it sees the one tensor under other strides: so
    that one is saved, not Y beside it, which the output projection does not read.
    """
    value, found = ctx.op.outputs[0], list[Op]()
    for op_type in ("Transpose", "Reshape"):
        readers = ctx.readers.get(value, ())
        if len(readers) != 1 or readers[0].op_type != op_type:
            return None
        found.append(readers[0])
        value = readers[0].outputs[0]
    shape = shape_of(ctx.op.outputs[0])
    if tuple(found[0].attributes.get("perm", ())) != (0, 2, 1, 3):
        return None
    if shape_of(value) != (shape[0], shape[2], shape[1] * shape[3]):
        return None
    return ctx.copies[value]


# --- work -------------------------------------------------------------------------------


def attention_work(signature: Signature, products: int, again: int, formals: Sequence[str]) -> Work:
    """Two flops for each pair seen, each number of a head, and each product over it.

    There are as many ``products`` over the size of keys as over that of values, and those of queries and
    keys ``again``. The model is taken to multiply all pairs, also those that a causal mask hides, and none
    again; of a window, whose keys beyond it no model has, those as far behind a query and ahead of it.
    """
    sizes = sizes_of(formals, signature.attributes, signature.inputs)
    options, pairs = AttentionOptions.of_attributes(signature.attributes), signature.attributes.get("pairs")
    every = float(sizes.seq * sizes.kv_seq)
    if options.window is not None:
        within = pairs_seen(sizes.seq, sizes.kv_seq, options)
        every = min(every, 2 * within if options.is_causal else within)
    if pairs is None:
        pairs = pairs_seen(sizes.seq, sizes.kv_seq, options)
    each, heads = products * (sizes.size + sizes.v_size), 2.0 * sizes.batch * sizes.heads
    return Work(
        heads * pairs * (each + again * sizes.size),
        bytes_of(signature.inputs),
        bytes_of(signature.outputs),
        matrix=True,
        model_flops=heads * every * each,
    )


def _grad_work(signature: Signature) -> Work:
    """Q K' again, then dV, dP, dQ and dK: five products to the two of forward."""
    return attention_work(signature, 2, 1, formals_of(signature.attributes, len(signature.inputs), 3))


register(
    Operator(
        "Attention",
        types=_types,
        compute=_compute,
        work=lambda s: attention_work(s, 1, 0, ATTENTION_FORMALS),
        gradient=_gradient,
        formals=ATTENTION_FORMALS,
        exact=lambda attributes, count: range(3, count),
    )
)
register(
    Operator(
        "AttentionGrad",
        types=_grad_types,
        compute=_grad_compute,
        work=_grad_work,
        exact=lambda attributes, count: range(3, count - 1),  # mask, Y and lse
    )
)
