"""Composites: whatever a model spells in several ops is the one op that computes the same numbers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from training_models import Maker, random_inputs

from distsim.importer import import_from_onnx
from distsim.interpret import SequentialExecutor
from distsim.ir import BFloat16, Float32, Function, Literal, Role, Tensor, Value, all_ops, trim, verify
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels.composites import merge_composites

REFERENCE = Path(os.environ.get("DISTSIM_REFERENCE", "/nonexistent")) / "onnx"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
N = 6


class Spelling:
    """Writes a function op by op; operands that may be swapped are, by chance."""

    def __init__(self, seed: int = 0, dtype: Any = None) -> None:
        self.make, self.rng = Maker("spelled"), Random(seed)
        self.dtype = self.make.data("x", 1).type.dtype if dtype is None else dtype
        self.make = Maker("spelled")

    def value(self, name: str, *shape: int, role: Role = Role.INPUT) -> Value:
        return self.make.add_input_value(name, Tensor(self.dtype, shape), role)

    def number(self, number: float) -> Value:
        return self.make("Constant", value=Literal(np.array(number, self.dtype.np)))

    def __call__(self, op_type: str, *given: Any, **attributes: Any) -> Value:
        values = [self.number(each) if isinstance(each, (int, float)) else each for each in given]
        if op_type in ("Add", "Mul"):
            self.rng.shuffle(values)
        return self.make(op_type, *values, **attributes)

    def mean(self, x: Value) -> Value:
        return self("ReduceMean", x, axes=(-1,), keepdims=1)


def gelu_erf(s: Spelling, x: Value) -> Value:
    inner = s("Add", s("Erf", s("Div", x, math.sqrt(2))), 1.0)
    return s("Mul", s("Mul", x, inner), 0.5)


def gelu_halved_first(s: Spelling, x: Value) -> Value:
    return s("Mul", s("Mul", x, 0.5), s("Add", 1.0, s("Erf", s("Mul", x, math.sqrt(0.5)))))


def gelu_tanh(s: Spelling, x: Value) -> Value:
    cubed = s("Pow", x, 3.0) if s.rng.random() < 0.5 else s("Mul", x, s("Mul", x, x))
    inner = s("Mul", s("Add", x, s("Mul", cubed, 0.044715)), math.sqrt(2 / math.pi))
    return s("Mul", s("Mul", 0.5, x), s("Add", s("Tanh", inner), 1.0))


def gelu_by_sigmoid(s: Spelling, x: Value) -> Value:
    return s("Mul", x, s("Sigmoid", s("Mul", x, 1.702)))


def silu(s: Spelling, x: Value) -> Value:
    return s("Mul", x, s("Sigmoid", x))


def silu_divided(s: Spelling, x: Value) -> Value:
    return s("Div", x, s("Add", s("Exp", s("Neg", x)), 1.0))


def softplus(s: Spelling, x: Value) -> Value:
    return s("Log", s("Add", s("Exp", x), 1.0))


def mish(s: Spelling, x: Value) -> Value:
    return s("Mul", x, s("Tanh", s("Softplus", x)))


def hard_swish(s: Spelling, x: Value) -> Value:
    return s("Div", s("Mul", x, s("Clip", s("Add", x, 3.0), min=0.0, max=6.0)), 6.0)


def layer_norm(s: Spelling, x: Value) -> Value:
    middle = s("Sub", x, s.mean(x))
    square = s("Mul", middle, middle) if s.rng.random() < 0.5 else s("Pow", middle, 2.0)
    y = s("Div", middle, s("Sqrt", s("Add", s.mean(square), 1e-5)))
    scale, bias = (s.value(name, N, role=Role.PARAMETER) for name in ("w", "b"))
    return s("Add", s("Mul", y, scale), bias)


def layer_norm_of_moments(s: Spelling, x: Value) -> Value:
    """E[x^2] - E[x]^2, and the scale before the bias of three dimensions."""
    mean = s.mean(x)
    variance = s("Sub", s.mean(s("Mul", x, x)), s("Mul", mean, mean))
    rate = s("Reciprocal", s("Sqrt", s("Add", variance, 0.1)))
    scale, bias = (s.value(name, 1, 1, N, role=Role.PARAMETER) for name in ("w", "b"))
    return s("Add", s("Mul", s("Sub", x, mean), s("Mul", rate, scale)), bias)


def plain_layer_norm(s: Spelling, x: Value) -> Value:
    middle = s("Sub", x, s.mean(x))
    return s("Div", middle, s("Sqrt", s("Add", s.mean(s("Mul", middle, middle)), 1e-6)))


def rms_norm(s: Spelling, x: Value) -> Value:
    rate = s("Reciprocal", s("Sqrt", s("Add", s.mean(s("Pow", x, 2.0)), 1e-6)))
    return s("Mul", s.value("w", N, role=Role.PARAMETER), s("Mul", x, rate))


def rms_norm_of_gemma(s: Spelling, x: Value) -> Value:
    """By 1 + w, and the mean of squares as a sum."""
    square = s("Div", s("ReduceSumSquare", x, axes=(2,), keepdims=1), float(N))
    normed = s("Div", x, s("Sqrt", s("Add", square, 1e-6)))
    return s("Mul", normed, s("Add", s.value("w", N, role=Role.PARAMETER), 1.0))


def softmax(s: Spelling, x: Value) -> Value:
    raised = s("Exp", s("Sub", x, s("ReduceMax", x, axes=(-1,), keepdims=1)))
    return s("Div", raised, s("ReduceSum", raised, axes=(-1,), keepdims=1))


def log_softmax(s: Spelling, x: Value) -> Value:
    return s("Sub", x, s("ReduceLogSumExp", x, axes=(-1,), keepdims=1))


SPELLINGS: dict[Callable[[Spelling, Value], Value], tuple[str, dict[str, Any]]] = {
    gelu_erf: ("Gelu", {}),
    gelu_halved_first: ("Gelu", {}),
    gelu_tanh: ("Gelu", {"approximate": "tanh"}),
    gelu_by_sigmoid: ("Swish", {"alpha": 1.702}),
    silu: ("Swish", {}),
    silu_divided: ("Swish", {}),
    softplus: ("Softplus", {}),
    mish: ("Mish", {}),
    hard_swish: ("HardSwish", {}),
    layer_norm: ("LayerNormalization", {"axis": -1, "epsilon": 1e-5}),
    layer_norm_of_moments: ("LayerNormalization", {"axis": -1, "epsilon": 0.1}),
    plain_layer_norm: ("LayerNormalization", {"axis": -1, "epsilon": 1e-6, "Scale": Literal(np.ones(N))}),
    rms_norm: ("RMSNormalization", {"axis": -1, "epsilon": 1e-6}),
    rms_norm_of_gemma: ("RMSNormalization", {"axis": -1, "epsilon": 1e-6}),
    softmax: ("Softmax", {"axis": -1}),
    log_softmax: ("LogSoftmax", {"axis": -1}),
}


def in_a_block(spelled: Callable[[Spelling, Value], Value], s: Spelling) -> Function:
    """A residual block around a spelling: what it reads is read by others, its result is scaled."""
    x = s("Add", s.value("x", 2, 3, N), s.value("b0", N))
    return s.make.end(s("Add", x, s("Mul", spelled(s, x), 0.7)))


def assert_same(one: Function, other: Function, tolerance: float = 1e-9) -> None:
    inputs = random_inputs(one)
    assert [value.type for value in one.outputs] == [value.type for value in other.outputs]
    results = (SequentialExecutor().compute(function, inputs) for function in (one, other))
    for a, b in zip(*results, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spelled", SPELLINGS, ids=lambda each: each.__name__)
def test_a_spelling_is_one_op_that_computes_the_same(spelled: Any, seed: int) -> None:
    function = in_a_block(spelled, Spelling(seed))
    made = merge_composites(function)
    verify(made)
    op_type, attributes = SPELLINGS[spelled]
    assert made.notes == (f"composites: 1 {op_type}, spelled out, as one op each",)
    assert_same(function, made)
    (op,) = [op for op in made.ops if op.op_type == op_type]
    found = dict(op.attributes)
    assert found.pop("epsilon", 0) == pytest.approx(attributes.get("epsilon", 0))
    assert found == {name: value for name, value in attributes.items() if name != "epsilon"}
    assert merge_composites(made) is made


def test_casts_to_float32_inside_are_part_of_it() -> None:
    s = Spelling(dtype=BFloat16())
    x = s.value("x", 4, 3, N)
    wide = s.make("Cast", x, to=TensorProto.FLOAT)
    s.dtype = Float32()
    rate = s("Reciprocal", s("Sqrt", s("Add", s.mean(s("Mul", wide, wide)), 1e-6)))
    narrow = s.make("Cast", s("Mul", wide, rate), to=TensorProto.BFLOAT16)
    s.dtype = BFloat16()
    function = s.make.end(s("Mul", narrow, s.value("w", N, role=Role.PARAMETER)))
    made = merge_composites(function)
    (op,) = made.ops
    assert op.op_type == "RMSNormalization" and op.inputs == function.inputs
    assert_same(function, made, 0.02)


def test_callees_are_entered_once() -> None:
    s = Spelling()
    layer = in_a_block(rms_norm, s)
    make = Maker("stack")
    x = make.data("x", 2, 3, N)
    own = [make.data(v.name, *v.type.shape) for v in layer.inputs[1:]]
    function = make.end(make.call(layer, make.call(layer, x, *own), *own))
    made = merge_composites(function)
    assert len({op.callee for op in made.ops}) == 1
    kinds = [op.op_type for op in made.ops[0].callee.ops if op.op_type != "Constant"]
    assert kinds == ["Add", "RMSNormalization", "Mul", "Add"]
    assert_same(function, made)


def test_one_op_saves_what_its_kernel_saves() -> None:
    function = in_a_block(gelu_tanh, Spelling())
    saved: list[int] = []
    for each in (function, merge_composites(function)):
        make = Maker("loss")
        inputs = [make.parameter(v.name, *v.type.shape) for v in each.inputs]
        joint = differentiate(make.end(make("ReduceSum", make.call(each, *inputs), keepdims=0)), SGD())
        forward = next(op for op in joint.ops if op.is_call)
        saved.append(sum(value.type.size == 2 * 3 * N for value in forward.outputs[1:]))
    assert saved[1] == 1 < saved[0]


def other(changed: str) -> Function:
    s = Spelling()
    x = s.value("x", 2, 3, N)
    if changed == "constant":  # another cube than that of GELU
        inner = s("Mul", s("Add", x, s("Mul", s("Pow", x, 3.0), 0.05)), math.sqrt(2 / math.pi))
        return s.make.end(s("Mul", s("Mul", 0.5, x), s("Add", s("Tanh", inner), 1.0)))
    if changed == "read":  # what would be inside is read outside
        gate = s("Sigmoid", x)
        return s.make.end(s("Add", s("Mul", x, gate), s("Exp", gate)))
    if changed == "returned":
        gate = s("Sigmoid", x)
        s.make.set_outputs([s("Mul", x, gate), gate])
        return s.make.finalize()
    if changed == "epsilon":  # outside of the root
        root = s("Add", s("Sqrt", s.mean(s("Mul", x, x))), 1e-3)
        return s.make.end(s("Div", x, root))
    if changed == "axis":
        raised = s("Exp", x)
        return s.make.end(s("Div", raised, s("ReduceSum", raised, axes=(1,), keepdims=1)))
    return s.make.end(s("Mul", s.value("y", 2, 3, N), s("Sigmoid", x)))  # two sources


@pytest.mark.parametrize("changed", ["constant", "read", "returned", "epsilon", "axis", "source"])
def test_what_computes_something_else_stays(changed: str) -> None:
    function = other(changed)
    assert merge_composites(function) is function


def test_a_function_that_brings_its_backward_is_left() -> None:
    make = Maker("loss")
    x = make.parameter("x", 2, N)
    joint = differentiate(make.end(make("ReduceSum", make("Mul", x, make("Sigmoid", x)), keepdims=0)), SGD())
    assert merge_composites(joint) is joint


def test_long_chains_take_no_time() -> None:
    s = Spelling()
    x = s.value("x", 4)
    for place in range(200):
        x = s("Mul", s("Sin", x), 1.0 + place / 1000)
    function = s.make.end(x)
    assert merge_composites(function) is function


EXPORTS = {
    "bert-base": {},
    "gpt2-dynamic": {"Gelu": 12},
    "gpt2-forward-backward": {},
    "gptneox-op23": {},
    "llama-56m": {"RMSNormalization": 17, "Swish": 8},
    "mixer-dynamic-op18": {"Gelu": 8},
    "mlp": {},
    "qwen3-op18": {"RMSNormalization": 17, "Swish": 4},
    "resnet50": {},
}


@pytest.mark.parametrize("name", EXPORTS)
def test_reference_exports_compute_the_same(name: str) -> None:
    path = REFERENCE / f"{name}.onnx"
    if not path.exists():
        pytest.skip("set DISTSIM_REFERENCE to the folder of reference exports")
    sizes = {"batch": 1, "seq": 4} if name == "gpt2-dynamic" else {"batch": 1} if "dynamic" in name else {}
    function = import_from_onnx(path, **sizes)
    made = merge_composites(function)
    before, after = (Counter(op.op_type for op in all_ops(each)) for each in (function, made))
    assert {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]} == EXPORTS[name]
    changed = [op for op in made.ops if op not in set(function.ops)]
    assert bool(changed) == bool(EXPORTS[name])
    for op in changed[:1] + changed[-1:]:  # the ops around are the same objects
        wanted = next(o for o in function.ops if o.outputs == op.outputs)
        region = trim(function, wanted.outputs, ()).function
        cut = [o for o in region.ops if op.inputs[0] not in o.outputs]
        part = Function("part", op.inputs, tuple(_from(cut, op)), wanted.outputs)
        alone = Function("alone", op.inputs, (op,), op.outputs)
        small = random_inputs(alone)
        results = [SequentialExecutor().compute(each, small)[0] for each in (part, alone)]
        np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


def _from(ops: list[Any], op: Any) -> list[Any]:
    """The ops that lead from what an op reads to what it makes, and constants on the way."""
    makers = {value: each for each in ops for value in each.outputs}
    found: dict[Any, None] = {}

    def visit(value: Value) -> None:
        if value not in op.inputs and value in makers and makers[value] not in found:
            for operand in makers[value].inputs:
                visit(operand)
            found[makers[value]] = None

    visit(op.outputs[0])
    return list(found)


@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda path: path.stem)
def test_light_models_spell_nothing_out(path: Path) -> None:
    """Convolutional networks with Relu and Softmax: all are one op each already."""
    function = import_from_onnx(path)
    assert merge_composites(function) is function
