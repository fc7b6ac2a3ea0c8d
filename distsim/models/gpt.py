"""GPT-style transformers (Radford et al. 2019; Vaswani et al. 2017), pre-norm, learned positions."""

from __future__ import annotations

import numpy as np

from distsim.errors import PlanError
from distsim.ir import DType, Float32, Function, FunctionMaker, Int64, Literal, Role, Tensor, Value
from distsim.models.sizes import check_sizes


def gpt(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    seq: int = 1024,
    batch: int = 8,
    vocab: int = 50304,
    ffn: int | None = None,
    dtype: DType = Float32(),  # noqa: B008
) -> Function:
    """Return a decoder-only transformer with a cross-entropy loss.

    Inputs: ``tokens`` and ``labels`` [batch, seq] and the parameters; output: the mean loss over the
    positions. The layers are Calls of one callee: LayerNorm, attention with separate query, key and
    value projections under a causal mask, LayerNorm, a GELU feed-forward of width ``ffn`` (4 x hidden).
    The output head has its own weight.
    """
    wide = 4 * hidden if ffn is None else ffn
    check_sizes(layers=layers, hidden=hidden, heads=heads, seq=seq, batch=batch, vocab=vocab, ffn=wide)
    if hidden % heads:
        raise PlanError(f"heads={heads} does not divide hidden={hidden}")
    maker = FunctionMaker("gpt")

    def parameter(name: str, *shape: int) -> Value:
        return maker.add_input_value(name, Tensor(dtype, shape), Role.PARAMETER)

    tokens = maker.add_input_value("tokens", Tensor(Int64(), (batch, seq)))
    labels = maker.add_input_value("labels", Tensor(Int64(), (batch, seq)))
    table, places = parameter("wte", vocab, hidden), parameter("wpe", seq, hidden)
    x = maker.add("Gather", [table, tokens], {"axis": 0}, output_names=["embedded"])[0]
    x = maker.add("Add", [x, places], output_names=["x"])[0]
    future = maker.add(
        "ConstantOfShape", (), {"input": (seq, seq), "value": Literal(np.full(1, -1e4, dtype.np))}
    )
    causal = maker.add("Trilu", future, {"k": 1, "upper": 1}, output_names=["causal"])[0]
    layer = _layer(Tensor(dtype, (batch, seq, hidden)), heads, wide)
    for index in range(layers):
        own = [parameter(f"h{index}.{v.name}", *_shape(v)) for v in layer.parameters]
        x = maker.add("Call", [x, causal, *own], None, (layer,), [f"x{index}"], None, f"h{index}")[0]
    scale, bias = parameter("ln_f.scale", hidden), parameter("ln_f.bias", hidden)
    x = maker.add("LayerNormalization", [x, scale, bias], {"axis": -1}, output_names=["final"])[0]
    logits = maker.add("MatMul", [x, parameter("head", hidden, vocab)], output_names=["logits"])[0]
    loss = maker.add("CrossEntropyLoss", [logits, labels], {"N": batch * seq}, output_names=["loss"])
    maker.set_outputs(loss)
    return maker.finalize()


def _shape(value: Value) -> tuple[int, ...]:
    return value.type.shape if isinstance(value.type, Tensor) else ()


def _layer(x_type: Tensor, heads: int, ffn: int) -> Function:
    hidden = x_type.shape[2]
    maker = FunctionMaker("layer")
    x = maker.add_input_value("x", x_type)
    causal = maker.add_input_value("causal", x_type.with_shape((x_type.shape[1],) * 2))

    def parameter(name: str, *shape: int) -> Value:
        return maker.add_input_value(name, Tensor(x_type.dtype, shape), Role.PARAMETER)

    def linear(source: Value, name: str, width_in: int, width_out: int) -> Value:
        product = maker.add("MatMul", [source, parameter(f"{name}.w", width_in, width_out)])[0]
        return maker.add("Add", [product, parameter(f"{name}.b", width_out)], output_names=[name])[0]

    def norm(source: Value, name: str) -> Value:
        inputs = [source, parameter(f"{name}.scale", hidden), parameter(f"{name}.bias", hidden)]
        return maker.add("LayerNormalization", inputs, {"axis": -1}, output_names=[name])[0]

    normed = norm(x, "ln1")
    query, key, value = (linear(normed, name, hidden, hidden) for name in ("q", "k", "v"))
    mixed = _attention(maker, x_type, heads, (query, key, value), causal)
    x = maker.add("Add", [x, linear(mixed, "proj", hidden, hidden)], output_names=["x1"])[0]
    wide = maker.add("Gelu", [linear(norm(x, "ln2"), "fc", hidden, ffn)], output_names=["gelu"])[0]
    x = maker.add("Add", [x, linear(wide, "out", ffn, hidden)], output_names=["x2"])[0]
    maker.set_outputs([x])
    return maker.finalize()


def _attention(
    maker: FunctionMaker,
    x_type: Tensor,
    heads: int,
    projections: tuple[Value, Value, Value],
    causal: Value,
) -> Value:
    batch, seq, hidden = x_type.shape
    size = hidden // heads

    def split(source: Value, *order: int) -> Value:
        parts = maker.add("Reshape", [source], {"shape": (batch, seq, heads, size)})
        return maker.add("Transpose", parts, {"perm": order})[0]

    orders = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
    query, key, value = (split(v, *order) for v, order in zip(projections, orders, strict=True))
    scores = maker.add("MatMul", [query, key], output_names=["scores"])
    scaled = maker.add("Mul", scores, {"B": 1.0 / float(np.sqrt(size))}, output_names=["scaled"])
    masked = maker.add("Add", [*scaled, causal], output_names=["masked"])
    probabilities = maker.add("Softmax", masked, {"axis": -1}, output_names=["probabilities"])
    mixed = maker.add("MatMul", [*probabilities, value], output_names=["mixed"])
    joined = maker.add("Transpose", mixed, {"perm": (0, 2, 1, 3)})
    return maker.add("Reshape", joined, {"shape": (batch, seq, hidden)}, output_names=["attention"])[0]
