"""Models of families that are not among the exports, in operator sets 18 and 23: one model, one step."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from training_models import assert_same_step, laid_out, mesh_of

from distsim.importer import import_from_onnx
from distsim.interpret import SequentialExecutor
from distsim.ir import Function, all_ops
from distsim.schedule import schedule
from distsim.transforms import SGD, add_loss, differentiate, merge_composites, set_attention

BATCH, SEQ, HIDDEN, HEADS, VOCAB, LAYERS, BUCKETS = 4, 6, 8, 2, 12, 2, 5
CAUSAL = np.tri(SEQ, dtype=bool)


class Writer:
    """Writes the nodes of a decoder in double precision, in the words of an operator set."""

    def __init__(self, opset: int) -> None:
        self.opset, self.rng = opset, np.random.default_rng(0)
        self.nodes: list[Any] = []
        self.stored: dict[str, np.ndarray] = {}

    def weight(self, name: str, *shape: int) -> str:
        self.stored[name] = self.rng.standard_normal(shape) * 0.3
        return name

    def known(self, array: Any, dtype: Any = np.float64) -> str:
        name = f"known{len(self.stored)}"
        self.stored[name] = np.array(array, dtype)
        return name

    def __call__(self, op_type: str, *given: str, **attributes: Any) -> str:
        name = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, given, [name], name=name, **attributes))
        return name

    def norm(self, x: str, name: str) -> str:
        scale = self.weight(name, HIDDEN)
        if self.opset >= 23:
            return self("RMSNormalization", x, scale, epsilon=1e-6, axis=-1)
        mean = self("ReduceMean", self("Pow", x, self.known(2.0)), self.known([-1], np.int64))
        root = self("Sqrt", self("Add", mean, self.known(1e-6)))
        return self("Mul", scale, self("Mul", x, self("Reciprocal", root)))

    def bias(self) -> str:
        """T5's: a number for each head and bucket of distances, the same in all layers; no scale."""
        distance = np.clip(np.arange(SEQ)[:, None] - np.arange(SEQ), 0, BUCKETS - 1)
        table = self("Gather", self.weight("relative", BUCKETS, HEADS), self.known(distance, np.int64))
        heads = self("Unsqueeze", self("Transpose", table, perm=[2, 0, 1]), self.known([0], np.int64))
        return self("Add", heads, self.known(np.where(CAUSAL, 0, -1e9)[None, None]))

    def attention(self, y: str, layer: str, bias: str | None) -> str:
        whole = self("MatMul", y, self.weight(f"{layer}.qkv", HIDDEN, 3 * HIDDEN))
        self.nodes.append(
            helper.make_node("SplitToSequence", [whole, self.known(HIDDEN, np.int64)], [f"{layer}.s"], axis=2)
        )
        apart = self.known([0, 0, HEADS, HIDDEN // HEADS], np.int64)
        q, k, v = (
            self("Transpose", self("Reshape", part, apart), perm=[0, 2, 1, 3])
            for part in [self("SequenceAt", f"{layer}.s", self.known(i, np.int64)) for i in range(3)]
        )
        if self.opset >= 23:
            mixed = self("Attention", q, k, v, *filter(None, [bias]), scale=1.0, is_causal=int(not bias))
        else:
            scores = self("MatMul", q, self("Transpose", k, perm=[0, 1, 3, 2]))
            if bias:
                scores = self("Add", scores, bias)
            else:
                scores = self("Where", self.known(CAUSAL[None, None], bool), scores, self.known(-1e9))
            mixed = self("MatMul", self("Softmax", scores, axis=-1), v)
        back = self("Transpose", mixed, perm=[0, 2, 1, 3])
        return self("Reshape", back, self.known([0, 0, HIDDEN], np.int64))

    def gated(self, y: str, layer: str) -> str:
        gate = self("MatMul", y, self.weight(f"{layer}.gate", HIDDEN, 16))
        cubed = self("Mul", self("Pow", gate, self.known(3.0)), self.known(0.044715))
        inner = self("Mul", self("Add", gate, cubed), self.known(np.sqrt(2 / np.pi)))
        one = self("Add", self("Tanh", inner), self.known(1.0))
        gate = self("Mul", self("Mul", gate, self.known(0.5)), one)
        up = self("MatMul", y, self.weight(f"{layer}.up", HIDDEN, 16))
        return self("MatMul", self("Mul", gate, up), self.weight(f"{layer}.down", 16, HIDDEN))

    def decoder(self, relative: bool) -> Any:
        x = self("Gather", self.weight("embedding", VOCAB, HIDDEN), "ids")
        bias = self.bias() if relative else None
        for layer in map("layer{}".format, range(LAYERS)):
            mixed = self.attention(self.norm(x, f"{layer}.first"), layer, bias)
            x = self("Add", x, self("MatMul", mixed, self.weight(f"{layer}.out", HIDDEN, HIDDEN)))
            x = self("Add", x, self.gated(self.norm(x, f"{layer}.second"), layer))
        logits = self("MatMul", self.norm(x, "last"), self.weight("head", HIDDEN, VOCAB))
        graph = helper.make_graph(
            self.nodes,
            "decoder",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", SEQ])],
            [helper.make_tensor_value_info(logits, TensorProto.DOUBLE, ["batch", SEQ, VOCAB])],
            [numpy_helper.from_array(array, name) for name, array in self.stored.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)


@cache
def imported(opset: int, relative: bool) -> tuple[Function, dict[str, np.ndarray]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "decoder.onnx"
        onnx.save(Writer(opset).decoder(relative), path)
        return import_from_onnx(path, load_values=True, name="decoder", batch=BATCH)


def step(opset: int, relative: bool, kind: str) -> tuple[Function, list[np.ndarray]]:
    """The training step as the command line makes it, and its inputs."""
    function, values = imported(opset, relative)
    joint = differentiate(add_loss(set_attention(merge_composites(function), kind)), SGD(0.1))
    rng = np.random.default_rng(1)
    given = [
        values[v.name] if v.name in values else rng.integers(0, VOCAB, v.type.shape) for v in joint.inputs
    ]
    return joint, given


@pytest.mark.parametrize("kind", ["flash", "math"])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "causal"])
def test_one_model_in_two_operator_sets_is_one_step(relative: bool, kind: str) -> None:
    found: list[list[np.ndarray]] = []
    kinds: list[Counter[str]] = []
    for opset in (18, 23):
        joint, inputs = step(opset, relative, kind)
        expected = SequentialExecutor().compute(joint, inputs)
        program = laid_out(joint, mesh_of(tp=2, pp=2), schedule("1f1b", 2, 2))
        assert_same_step(joint, program, inputs, expected)
        found.append(expected)
        kinds.append(Counter(op.op_type for op in all_ops(joint)))
        assert kinds[-1]["Attention"] == (LAYERS if kind == "flash" else 0)
        assert kinds[-1]["RMSNormalization"] == 2 * LAYERS + 1 and kinds[-1]["Gelu"] == LAYERS
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    if kind == "flash":  # written out in another order, but the same kernels
        assert kinds[0] == kinds[1]
