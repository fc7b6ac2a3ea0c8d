"""Llama-style transformers (Touvron et al. 2023; Grattafiori et al. 2024, "The Llama 3 Herd of Models").

Pre-norm with RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention
(Ainslie et al. 2023) and a SwiGLU feed-forward (Shazeer 2020); no biases.
"""

from __future__ import annotations

import numpy as np
import onnx

from distsim.errors import PlanError
from distsim.ir import DType, Float32, Function, FunctionMaker, Int64, Literal, Role, Tensor, Value
from distsim.models.sizes import check_sizes

THETA = 500_000.0
"""The base of the rotary frequencies (Grattafiori et al. 2024, table 3)."""


def llama(
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    seq: int = 8192,
    batch: int = 8,
    vocab: int = 128256,
    dtype: DType = Float32(),  # noqa: B008
) -> Function:
    """Return a Llama-style decoder with a cross-entropy loss; the sizes are those of Llama 3 8B.

    Inputs: ``tokens`` and ``labels`` [batch, seq] and the parameters; output: the mean loss over the
    positions. The layers are Calls of one callee: RMSNorm, causal attention of ``heads`` query heads in
    ``kv_heads`` groups that share a key and a value head, RMSNorm, and a SwiGLU feed-forward of width
    ``ffn``. The output head has its own weight. Raises :class:`PlanError` naming the sizes when
    ``kv_heads`` does not divide ``heads``, ``heads`` not ``hidden``, or a head has no even width.

    >>> function = llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=8, batch=2, vocab=32)
    >>> sum(value.type.size for value in function.parameters)
    4944
    """
    check_sizes(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads)
    check_sizes(ffn=ffn, seq=seq, batch=batch, vocab=vocab)
    if hidden % heads or hidden // heads % 2:
        raise PlanError(f"heads={heads} does not divide hidden={hidden} into heads of an even width")
    if heads % kv_heads:
        raise PlanError(f"kv_heads={kv_heads} does not divide heads={heads}")
    maker = FunctionMaker("llama")

    def parameter(name: str, *shape: int) -> Value:
        return maker.add_input_value(name, Tensor(dtype, shape), Role.PARAMETER)

    tokens = maker.add_input_value("tokens", Tensor(Int64(), (batch, seq)))
    labels = maker.add_input_value("labels", Tensor(Int64(), (batch, seq)))
    x = maker.add("Gather", [parameter("embed", vocab, hidden), tokens], {"axis": 0}, output_names=["x"])[0]
    tables = (*_rotations(maker, seq, hidden // heads, dtype), _future(maker, seq, dtype))
    layer = _layer(Tensor(dtype, (batch, seq, hidden)), heads, kv_heads, ffn)
    for index in range(layers):
        own = [
            parameter(f"h{index}.{v.name}", *v.type.shape)
            for v in layer.parameters
            if isinstance(v.type, Tensor)
        ]
        x = maker.add("Call", [x, *tables, *own], None, (layer,), [f"x{index}"], None, f"h{index}")[0]
    normed = [x, parameter("norm.scale", hidden)]
    x = maker.add("RMSNormalization", normed, {"axis": -1}, output_names=["final"])[0]
    logits = maker.add("MatMul", [x, parameter("head", hidden, vocab)], output_names=["logits"])[0]
    loss = maker.add("CrossEntropyLoss", [logits, labels], {"N": batch * seq}, output_names=["loss"])
    maker.set_outputs(loss)
    return maker.finalize()


def _rotations(maker: FunctionMaker, seq: int, size: int, dtype: DType) -> tuple[Value, Value]:
    """Return cosine and sine [seq, size] of the angles: position times THETA^(-2i / size), for both halves.

    Worked out in float32 at least: bfloat16 does not tell positions beyond 256 apart.
    """
    wide = dtype.np if dtype.np.itemsize >= 4 else np.dtype(np.float32)
    frequencies = THETA ** (-2.0 * np.arange(size // 2) / size)
    positions = Literal(np.arange(seq, dtype=wide).reshape(seq, 1))
    places = maker.add("Constant", (), {"value": positions}, output_names=["positions"])
    rates = {"B": Literal(np.concatenate([frequencies, frequencies]).astype(wide))}
    angles = maker.add("Mul", places, rates, output_names=["angles"])

    def table(op_type: str, name: str) -> Value:
        if wide == dtype.np:
            return maker.add(op_type, angles, output_names=[name])[0]
        number = int(onnx.helper.np_dtype_to_tensor_dtype(dtype.np))
        return maker.add("Cast", maker.add(op_type, angles), {"to": number}, output_names=[name])[0]

    return table("Cos", "cos"), table("Sin", "sin")


def _future(maker: FunctionMaker, seq: int, dtype: DType) -> Value:
    """Return the causal mask [seq, seq]: -1e4 above the diagonal."""
    fill = {"input": (seq, seq), "value": Literal(np.full(1, -1e4, dtype.np))}
    future = maker.add("ConstantOfShape", (), fill)
    return maker.add("Trilu", future, {"k": 1, "upper": 1}, output_names=["causal"])[0]


def _layer(x_type: Tensor, heads: int, kv_heads: int, ffn: int) -> Function:
    _, seq, hidden = x_type.shape
    size = hidden // heads
    maker = FunctionMaker("layer")
    x = maker.add_input_value("x", x_type)
    cos, sin = (maker.add_input_value(name, x_type.with_shape((seq, size))) for name in ("cos", "sin"))
    causal = maker.add_input_value("causal", x_type.with_shape((seq, seq)))

    def parameter(name: str, *shape: int) -> Value:
        return maker.add_input_value(name, Tensor(x_type.dtype, shape), Role.PARAMETER)

    def linear(source: Value, name: str, width_in: int, width_out: int) -> Value:
        inputs = [source, parameter(f"{name}.w", width_in, width_out)]
        return maker.add("MatMul", inputs, output_names=[name])[0]

    def norm(source: Value, name: str) -> Value:
        inputs = [source, parameter(f"{name}.scale", hidden)]
        return maker.add("RMSNormalization", inputs, {"axis": -1}, output_names=[name])[0]

    normed = norm(x, "norm1")
    query = linear(normed, "q", hidden, hidden)
    key, value = (linear(normed, name, hidden, kv_heads * size) for name in ("k", "v"))
    mixed = _attention(maker, x_type, (heads, kv_heads), (query, key, value), (cos, sin, causal))
    x = maker.add("Add", [x, linear(mixed, "o", hidden, hidden)], output_names=["x1"])[0]
    normed = norm(x, "norm2")
    gate = maker.add("Swish", [linear(normed, "gate", hidden, ffn)], output_names=["swish"])
    wide = maker.add("Mul", [*gate, linear(normed, "up", hidden, ffn)], output_names=["gated"])[0]
    x = maker.add("Add", [x, linear(wide, "down", ffn, hidden)], output_names=["x2"])[0]
    maker.set_outputs([x])
    return maker.finalize()


def _attention(
    maker: FunctionMaker,
    x_type: Tensor,
    counts: tuple[int, int],
    projections: tuple[Value, Value, Value],
    tables: tuple[Value, Value, Value],
) -> Value:
    """Return the attention of the projections [batch, seq, width], in groups that share keys and values.

    Queries are [batch, kv_heads, group, seq, size], keys and values [batch, kv_heads, 1, seq, size]: each
    product is broadcast over a group, so that nothing is repeated in memory and what divides the
    dimension kv_heads divides queries, keys and values alike.
    """
    batch, seq, hidden = x_type.shape
    heads, kv_heads = counts
    size = hidden // heads
    cos, sin, causal = tables

    def split(source: Value, group: int) -> Value:
        parts = maker.add("Reshape", [source], {"shape": (batch, seq, kv_heads, group, size)})
        return maker.add("Transpose", parts, {"perm": (0, 2, 3, 1, 4)})[0]

    def rotated(source: Value) -> Value:
        """Turn each pair (i, i + size/2) of a head by the angle of its position."""
        first, second = maker.add("Split", [source], {"axis": -1, "num_outputs": 2})
        turned = maker.add("Concat", [*maker.add("Neg", [second]), first], {"axis": -1})
        along, across = maker.add("Mul", [source, cos]), maker.add("Mul", [*turned, sin])
        return maker.add("Add", [*along, *across])[0]

    group = heads // kv_heads
    query, key = rotated(split(projections[0], group)), rotated(split(projections[1], 1))
    across = maker.add("Transpose", [key], {"perm": (0, 1, 2, 4, 3)})
    scores = maker.add("MatMul", [query, *across], output_names=["scores"])
    scaled = maker.add("Mul", scores, {"B": 1.0 / float(np.sqrt(size))}, output_names=["scaled"])
    masked = maker.add("Add", [*scaled, causal], output_names=["masked"])
    probabilities = maker.add("Softmax", masked, {"axis": -1}, output_names=["probabilities"])
    mixed = maker.add("MatMul", [*probabilities, split(projections[2], 1)], output_names=["mixed"])
    joined = maker.add("Transpose", mixed, {"perm": (0, 3, 1, 2, 4)})
    return maker.add("Reshape", joined, {"shape": (batch, seq, hidden)}, output_names=["attention"])[0]
