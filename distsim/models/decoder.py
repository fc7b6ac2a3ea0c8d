"""What decoders in the manner of Llama share: embedding, tables, layers as Calls, norm, output head, loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from distsim.ir import DType, Function, FunctionMaker, Int64, Literal, Role, Tensor, Value
from distsim.ir.type import as_tensor

THETA = 500_000.0
"""The base of the rotary frequencies (Grattafiori et al. 2024, table 3)."""

Tables = tuple[Value, Value, Value]
"""Cosine and sine [seq, rotary] of the angles of the positions, and the causal mask [seq, seq]."""


class LayerMaker:
    """Adds the ops of one layer of [batch, seq, hidden] to a maker; parameters are named as they come.

    ``x`` is the layer's input; ``tables`` are those of the decoder, for heads that turn ``rotary`` of
    their dimensions.
    """

    def __init__(self, name: str, x_type: Tensor, rotary: int) -> None:
        self.maker = FunctionMaker(name)
        self.x_type = x_type
        self.batch, self.seq, self.hidden = x_type.shape
        self.x = self.maker.add_input_value("x", x_type)
        cos, sin = (self._table(name, self.seq, rotary) for name in ("cos", "sin"))
        self.tables: Tables = (cos, sin, self._table("causal", self.seq, self.seq))

    def _table(self, name: str, *shape: int) -> Value:
        return self.maker.add_input_value(name, self.x_type.with_shape(shape))

    def __call__(self, op_type: str, *inputs: Value, name: str = "", **attributes: object) -> Value:
        """Add an op with one output, called ``name`` if given."""
        return self.maker.add(op_type, inputs, attributes, output_names=[name] if name else None)[0]

    def parameter(self, name: str, *shape: int) -> Value:
        """A parameter of the layer, of its element type."""
        return self.maker.add_input_value(name, self.x_type.with_shape(shape), Role.PARAMETER)

    def linear(self, source: Value, name: str, width_in: int, width_out: int) -> Value:
        """Multiply by a weight of the layer, without a bias."""
        return self("MatMul", source, self.parameter(f"{name}.w", width_in, width_out), name=name)

    def norm(self, source: Value, name: str, width: int) -> Value:
        """RMSNorm over the last dimension, of size ``width`` (Zhang and Sennrich 2019)."""
        return self("RMSNormalization", source, self.parameter(f"{name}.scale", width), name=name, axis=-1)

    def rotated(self, source: Value) -> Value:
        """Turn each pair (i, i + half) of the last dimension by its position's angle (Su et al. 2021)."""
        cos, sin, _ = self.tables
        first, second = self.maker.add("Split", [source], {"axis": -1, "num_outputs": 2})
        turned = self("Concat", self("Neg", second), first, axis=-1)
        return self("Add", self("Mul", source, cos), self("Mul", turned, sin))

    def weights(self, query: Value, key: Value, size: int) -> Value:
        """The causal softmax of the products of [..., seq, size] heads, each times 1/sqrt(size)."""
        rank = len(_shape(key))
        swapped = (*range(rank - 2), rank - 1, rank - 2)
        scores = self("MatMul", query, self("Transpose", key, perm=swapped), name="scores")
        scaled = self("Mul", scores, name="scaled", B=1.0 / float(np.sqrt(size)))
        masked = self("Add", scaled, self.tables[2], name="masked")
        return self("Softmax", masked, name="probabilities", axis=-1)

    def swiglu(self, source: Value, ffn: int, prefix: str = "") -> Value:
        """The SwiGLU feed-forward of width ``ffn`` (Shazeer 2020)."""
        gate = self("Swish", self.linear(source, f"{prefix}gate", self.hidden, ffn), name=f"{prefix}swish")
        up = self.linear(source, f"{prefix}up", self.hidden, ffn)
        return self.linear(self("Mul", gate, up, name=f"{prefix}gated"), f"{prefix}down", ffn, self.hidden)

    def finish(self, output: Value) -> Function:
        """Return the layer."""
        self.maker.set_outputs([output])
        return self.maker.finalize()


def decoder(name: str, layers: Sequence[Function], vocab: int, rotary: int) -> Function:
    """Return a decoder with a cross-entropy loss: embedding, ``layers`` as Calls, RMSNorm and output head.

    Each layer takes x [batch, seq, hidden], the :data:`Tables` for ``rotary`` dimensions and its own
    parameters, and returns its x; equal layers should be one Function. Where the layers are typed for a
    mesh, so is the decoder.
    """
    x_type = as_tensor(layers[0].inputs[0].type, "x")
    batch, seq, hidden = x_type.shape
    dtype, device = x_type.dtype, x_type.device
    maker = FunctionMaker(name)

    def parameter(label: str, *shape: int) -> Value:
        return maker.add_input_value(label, Tensor(dtype, shape, device), Role.PARAMETER)

    tokens = maker.add_input_value("tokens", Tensor(Int64(), (batch, seq), device))
    labels = maker.add_input_value("labels", Tensor(Int64(), (batch, seq), device))
    x = maker.add("Gather", [parameter("embed", vocab, hidden), tokens], {"axis": 0}, output_names=["x"])[0]
    tables = (*_rotations(maker, seq, rotary, dtype, device), _future(maker, seq, dtype, device))
    for index, layer in enumerate(layers):
        own = [parameter(f"h{index}.{v.name}", *_shape(v)) for v in layer.parameters]
        x = maker.add("Call", [x, *tables, *own], None, (layer,), [f"x{index}"], None, f"h{index}")[0]
    normed = [x, parameter("norm.scale", hidden)]
    x = maker.add("RMSNormalization", normed, {"axis": -1}, output_names=["final"])[0]
    logits = maker.add("MatMul", [x, parameter("head", hidden, vocab)], output_names=["logits"])[0]
    loss = maker.add("CrossEntropyLoss", [logits, labels], {"N": batch * seq}, output_names=["loss"])
    maker.set_outputs(loss)
    return maker.finalize()


def _shape(value: Value) -> tuple[int, ...]:
    return as_tensor(value.type, value.name).shape


def _on(device: object) -> dict[str, object]:
    return {} if device is None else {"device": device}


def _rotations(
    maker: FunctionMaker, seq: int, size: int, dtype: DType, device: object
) -> tuple[Value, Value]:
    """Return cosine and sine [seq, size] of the angles: position times THETA^(-2i / size), for both halves.

    Worked out in float32 at least: bfloat16 does not tell positions beyond 256 apart.
    """
    wide = dtype.np if dtype.np.itemsize >= 4 else np.dtype(np.float32)
    frequencies = THETA ** (-2.0 * np.arange(size // 2) / size)
    positions = Literal(np.arange(seq, dtype=wide).reshape(seq, 1))
    places = maker.add("Constant", (), {"value": positions, **_on(device)}, output_names=["positions"])
    rates = {"B": Literal(np.concatenate([frequencies, frequencies]).astype(wide))}
    angles = maker.add("Mul", places, rates, output_names=["angles"])

    def table(op_type: str, name: str) -> Value:
        if wide == dtype.np:
            return maker.add(op_type, angles, output_names=[name])[0]
        number = int(onnx.helper.np_dtype_to_tensor_dtype(dtype.np))
        return maker.add("Cast", maker.add(op_type, angles), {"to": number}, output_names=[name])[0]

    return table("Cos", "cos"), table("Sin", "sin")


def _future(maker: FunctionMaker, seq: int, dtype: DType, device: object) -> Value:
    """Return the causal mask [seq, seq]: -1e4 above the diagonal."""
    fill = {"input": (seq, seq), "value": Literal(np.full(1, -1e4, dtype.np)), **_on(device)}
    future = maker.add("ConstantOfShape", (), fill)
    return maker.add("Trilu", future, {"k": 1, "upper": 1}, output_names=["causal"])[0]
