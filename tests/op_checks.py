"""Checks that hold for every operator, given samples of it.

The checks compare the operator's rules with what the operator computes: types with results, gradients
with finite differences, sharding rules with the result put together from parts. The ops that a gradient
rule emits are samples too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from op_samples import Sample, normal

from distsim.errors import TypeRuleError, UnknownOperatorError
from distsim.hardware.rank_axes import logical_mesh
from distsim.interpret import SequentialExecutor
from distsim.ir import Attributes, Device, FunctionMaker, Op, Tensor, Value
from distsim.ops import (
    GradientContext,
    Pieces,
    ShardingRule,
    Signature,
    compute,
    operator,
    sharding_rule,
    work,
)
from distsim.ops.parts import join_parts, take_part
from distsim.ops.sharding_rule import Label, factors_of, label_of

RANKS = 2
REFUSALS = (UnknownOperatorError, TypeRuleError)
RTOL = 1e-6
"""Relative error of a central difference against the gradient; float64, step 1e-6."""


def run(of: Sample, arrays: Sequence[np.ndarray] | None = None) -> tuple[np.ndarray, ...]:
    """Compute the op on the sample's arrays, or on others."""
    given = of.arrays if arrays is None else arrays
    return compute(of.op_type, of.attributes, of.version, given, len(of.signature.outputs))


def assert_close(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12, err_msg=what)
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=what)


# --- types and work ----------------------------------------------------------------------------------


def check_types(of: Sample) -> None:
    """What is computed has the types that the type rule says; the work is known and not negative."""
    signature = of.signature
    results = run(of)
    assert len(results) == len(signature.outputs)
    for result, type_ in zip(results, signature.outputs, strict=True):
        assert (result.shape, result.dtype) == (type_.shape, type_.dtype.np), f"{of}: {result.dtype}, {type_}"
    asked = work(signature)
    assert asked is not None, f"{of.op_type} has no work rule"
    assert min(asked.flops, asked.bytes_read, asked.bytes_written) >= 0
    if operator(of.op_type).view:
        assert (asked.flops, asked.bytes_read, asked.bytes_written) == (0, 0, 0)
        seen = of.arrays[0].reshape(-1)[: results[0].size]  # what is behind it may be left out
        assert_close(results[0].reshape(-1), seen, f"{of} is no view")
    check_parts(of, results)


def check_parts(of: Sample, results: Sequence[np.ndarray]) -> None:
    """What makes one output by itself makes the same, of the same type; all together take as many flops."""
    rule, signature = operator(of.op_type).part, of.signature
    if rule is None:
        return
    flops = 0.0
    for place, result in enumerate(results):
        part = rule(signature, place)
        alone = Sample(part.op_type, tuple(of.arrays[i] for i in part.inputs), part.attributes, of.version)
        assert alone.signature.outputs == signature.outputs[place : place + 1]
        assert_close(run(alone)[0], result, f"output {place} of {of} by itself")
        flops += work(alone.signature).flops
    assert flops == work(signature).flops


# --- gradients ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backward:
    """What a gradient rule emitted, with all values computed."""

    inputs: tuple[Value, ...]
    grads: tuple[Value | None, ...]
    env: dict[Value, np.ndarray]
    ops: tuple[Op, ...]

    def samples(self) -> tuple[Sample, ...]:
        """Every op that was emitted, as a sample of its own."""
        return tuple(
            Sample(op.op_type, tuple(self.env[v] for v in op.inputs), op.attributes, op.version, ())
            for op in self.ops
        )


def _seeds(of: Sample) -> list[np.ndarray | None]:
    outputs = of.signature.outputs
    return [normal(*t.shape, seed=100 + i) if i in of.grads else None for i, t in enumerate(outputs)]


def backward(of: Sample, wanted: Sequence[bool] | None = None) -> Backward:
    """Build the op and its gradient, and compute both."""
    maker = FunctionMaker("sample")
    inputs = tuple(maker.add_input_value(f"x{i}", type_) for i, type_ in enumerate(of.types))
    count, attributes = len(of.signature.outputs), of.attributes
    saved = operator(of.op_type).saved
    more = len(saved(attributes, len(inputs), count)) if saved else 0
    if more:
        attributes = Attributes({**attributes, "outputs": count + more})
    outputs = maker.add(of.op_type, inputs, attributes, version=of.version)
    env = dict(zip(inputs, of.arrays, strict=True))
    seeds: list[Value | None] = []
    for value, seed in zip(outputs[:count], _seeds(of), strict=True):
        seeds.append(None if seed is None else maker.add_input_value(f"d{value.name}", value.type))
        if seed is not None:
            env[seeds[-1]] = seed.astype(value.type.dtype.np)
    op = maker.ops[-1]
    if wanted is None:
        wanted = of.wanted
    rule = operator(of.op_type).gradient
    assert rule is not None, f"{of.op_type} has no gradient rule"
    made = tuple(rule(GradientContext(maker, op, inputs, outputs, tuple(seeds), tuple(wanted))))
    maker.finalize()
    for step in maker.ops:
        arrays = [env[value] for value in step.inputs]
        results = compute(step.op_type, step.attributes, step.version, arrays, len(step.outputs))
        for value, result in zip(step.outputs, results, strict=True):
            assert result.shape == value.type.shape, f"{of}: {step!r} computes {result.shape}"
        env.update(zip(step.outputs, results, strict=True))
    return Backward(inputs, made, env, tuple(maker.ops[1:]))


def check_gradient(of: Sample, rtol: float = RTOL) -> Backward:
    """The gradients of the outputs, together and each alone, are right; the rest is refused."""
    whole = _check_gradients(of, rtol)
    for place in of.refused:
        with pytest.raises(REFUSALS):
            backward(of, [i == place for i in range(len(of.arrays))])
    outputs = floating_outputs(of)
    for output in outputs if len(outputs) > 1 else ():
        alone = replace(of, grads=(output,))
        if output not in of.unused:
            _check_gradients(alone, rtol)
        else:
            with pytest.raises(REFUSALS):
                backward(alone)
    return whole


def floating_outputs(of: Sample) -> list[int]:
    """The outputs that can carry a gradient."""
    return [i for i, type_ in enumerate(of.signature.outputs) if type_.dtype.is_floating]


def check_no_gradient(of: Sample) -> None:
    """The rule refuses a sample without ``grads``, unless there is nothing to differentiate."""
    outputs = floating_outputs(of)
    if outputs and any(of.wanted):
        with pytest.raises(REFUSALS):
            backward(replace(of, grads=tuple(outputs)))


def _check_gradients(of: Sample, rtol: float) -> Backward:
    """The gradients equal central differences, and do not depend on which others are wanted."""
    floating = [type_.dtype.is_floating for type_ in of.types]
    whole = backward(of)
    assert len(whole.grads) == len(of.arrays)
    for place, grad in enumerate(whole.grads):
        assert grad is None or floating[place], f"{of}: a gradient of integers"
        if place in of.refused:
            continue
        if grad is None:
            if floating[place]:
                _check_difference(of, place, None, rtol)
            continue
        assert grad.type == whole.inputs[place].type, f"{of}: {grad!r} for {whole.inputs[place]!r}"
        _check_difference(of, place, whole.env[grad], rtol)
        alone = backward(of, [i == place for i in range(len(of.arrays))])
        assert alone.grads[place] is not None, f"{of}: no gradient when only input {place} wants one"
        assert_close(alone.env[alone.grads[place]], whole.env[grad], f"{of}: input {place} alone")
    return whole


def _check_difference(of: Sample, place: int, grad: np.ndarray | None, rtol: float) -> None:
    array, step = of.arrays[place], 1e-6
    direction = np.random.default_rng(7).normal(size=array.shape)

    def moved(by: float) -> float:
        arrays = list(of.arrays)
        arrays[place] = array + by * direction
        pairs = zip(run(of, arrays), _seeds(of), strict=True)
        return float(sum((result * seed).sum() for result, seed in pairs if seed is not None))

    expected = (moved(step) - moved(-step)) / (2 * step)
    actual = 0.0 if grad is None else float((grad * direction).sum())
    # Central differences lose about eps |f| / step of absolute precision.
    noise = 1e-9 * (1 + abs(moved(0.0)))
    assert abs(actual - expected) <= rtol * abs(expected) + noise, (
        f"{of}: input {place}: gradient rule {actual}, central difference {expected}"
    )


# --- sharding ----------------------------------------------------------------------------------------


def factors(rule: ShardingRule) -> tuple[str, ...]:
    """The factors of a rule, in order of appearance."""
    dims = (dim for dims in (*rule.inputs, *rule.outputs) for dim in dims)
    found = dict.fromkeys(factor for dim in dims for factor in factors_of(dim))
    return tuple(factor for factor in found if factor not in rule.whole)


def _split(array: np.ndarray, dims: Sequence[Any], factor: str, rank: int) -> np.ndarray:
    for axis, dim in enumerate(dims):
        label = label_of(dim, factor)
        if label is not None:
            array = take_part(array, axis, rank, RANKS, _pieces(label))
    return array


def _local(shape: tuple[int, ...], dims: Sequence[Any], factor: str) -> tuple[int, ...]:
    return tuple(n // RANKS if label_of(dim, factor) else n for n, dim in zip(shape, dims, strict=True))


def _join(parts: Sequence[np.ndarray], dims: Sequence[Any], factor: str, mean: bool) -> np.ndarray:
    axes = [axis for axis, dim in enumerate(dims) if label_of(dim, factor)]
    assert len(axes) <= 1, f"factor {factor} labels two dimensions of one value: {dims}"
    if not axes:
        return np.sum(parts, axis=0) / (RANKS if mean else 1)
    label = label_of(dims[axes[0]], factor)
    assert label is not None
    return join_parts(parts, axes[0], _pieces(label))


def _pieces(label: Label) -> tuple[int, ...] | None:
    return label.sizes if isinstance(label, Pieces) else None


def _fits(signature: Signature, rule: ShardingRule, factor: str) -> bool:
    """Whether the solver may divide the factor (the rule of distsim.transforms)."""
    groups = [
        *zip(signature.inputs, rule.inputs, strict=True),
        *zip(signature.outputs, rule.outputs, strict=True),
    ]
    for tensor, dims in groups:
        for size, dim in zip(tensor.shape, dims, strict=True):
            label = label_of(dim, factor)
            sizes = (label and _pieces(label)) or (size,)
            if label and (sum(sizes) != size or any(n % RANKS or not n for n in sizes)):
                return False
    for tensor, dims in zip(signature.outputs, rule.outputs, strict=True):
        if not any(label_of(dim, factor) for dim in dims) and not tensor.dtype.is_floating:
            return False
    return True


def check_sharding(of: Sample, numbers: bool = True) -> tuple[str, ...]:
    """Dividing any one factor over two ranks gives the same result; return the factors that were divided.

    Without ``numbers`` only the shapes are compared.
    """
    signature = of.signature
    rule = sharding_rule(signature)
    if rule is None:
        return ()
    _check_labels(of, signature, rule)
    whole = run(of)
    done = [factor for factor in factors(rule) if _fits(signature, rule, factor)]
    for factor in done:
        shapes = tuple(
            _local(t.shape, d, factor) for t, d in zip(signature.outputs, rule.outputs, strict=True)
        )
        attributes = of.attributes if rule.localize is None else rule.localize(of.attributes, shapes)
        ranks: list[tuple[np.ndarray, ...]] = []
        if factor in rule.decompositions:
            check_decomposition(of, replace(of, attributes=attributes), rule, factor)
            continue
        for rank in range(RANKS):
            arrays = tuple(_part(of, rule, place, factor, rank) for place in range(len(of.arrays)))
            local = Sample(of.op_type, arrays, attributes, of.version)
            assert tuple(t.shape for t in local.signature.outputs) == shapes, f"{of}: local types, {factor}"
            ranks.append(run(local))
        for index, dims in enumerate(rule.outputs):
            parts = [results[index] for results in ranks]
            joined = _join(parts, dims, factor, factor in rule.mean)
            assert joined.shape == whole[index].shape
            if numbers:
                assert_close(joined, whole[index], f"{of}: output {index}, factor {factor}, rule {rule}")
    return tuple(done)


def check_decomposition(of: Sample, local: Sample, rule: ShardingRule, factor: str) -> None:
    """What an op becomes on ranks that divide a factor computes the same on them."""
    mesh = logical_mesh(Device(0, "gpu"), 1, RANKS)
    maker = FunctionMaker("ranks")
    op = Op(of.op_type, (), tuple([Value("y", t) for t in of.signature.outputs]), local.attributes)
    inputs = [
        maker.add_input_value(f"x{i}", Tensor(t.dtype, _local(t.shape, dims, factor), mesh))
        for i, (t, dims) in enumerate(zip(of.types, rule.inputs, strict=True))
    ]
    decomposition = rule.decompositions[factor]
    maker.set_outputs(decomposition.build(maker, op, inputs, "tp"))
    arrays = [[_part(of, rule, place, factor, rank) for rank in range(RANKS)] for place in range(len(inputs))]
    made = SequentialExecutor().compute(maker.finalize(), arrays)
    for ranks, dims, expected in zip(made, rule.outputs, run(of), strict=True):
        whole = any(label_of(dim, factor) for dim in dims) or decomposition.reduced is None
        assert_close(_join(ranks, dims, factor, False) if whole else ranks[1], expected, f"{of}: {factor}")


def _part(of: Sample, rule: ShardingRule, place: int, factor: str, rank: int) -> np.ndarray:
    """What a rank holds of an input; an addend of a partial result is split into two summands."""
    array, dims = of.arrays[place], rule.inputs[place]
    partial = any(not any(label_of(dim, factor) for dim in group) for group in rule.outputs)
    if partial and place in rule.addends and not any(label_of(dim, factor) for dim in dims):
        summand = normal(*array.shape, seed=60 + place)
        return summand if rank else array - summand
    return _split(array, dims, factor, rank)


def _check_labels(of: Sample, signature: Signature, rule: ShardingRule) -> None:
    for tensors, groups in ((signature.inputs, rule.inputs), (signature.outputs, rule.outputs)):
        assert len(tensors) == len(groups), f"{of}: {rule}"
        for tensor, dims in zip(tensors, groups, strict=True):
            assert tensor.rank == len(dims), f"{of}: {tensor} has labels {dims}"
    assert set(rule.mean) <= set(factors(rule)), f"{of}: {rule}"


def check_linear(of: Sample) -> int:
    """The op maps a sum in each of its linear sets to the sum of the results; return how many there are."""
    signature = of.signature
    rule = sharding_rule(signature)
    if rule is None or not all(tensor.dtype.is_floating for tensor in signature.outputs):
        return 0
    for members in rule.linear:
        assert all(signature.inputs[i].dtype.is_floating for i in members), f"{of}: a sum of integers"
        first, second = list(of.arrays), list(of.arrays)
        for i in members:
            part = normal(*of.arrays[i].shape, seed=50 + i).astype(of.arrays[i].dtype)
            first[i], second[i] = of.arrays[i] - part, part
        for a, b, both in zip(run(of, first), run(of, second), run(of), strict=True):
            assert_close(a + b, both, f"{of}: linear in {members}")
    return len(rule.linear)


def check_all(of: Sample) -> None:
    """Check every rule of a sample's operator, and of the ops that its gradient rule emits."""
    check_types(of)
    check_sharding(of)
    check_linear(of)
    if operator(of.op_type).gradient is None:
        return
    if not of.grads:
        return check_no_gradient(of)
    for emitted in check_gradient(of).samples():
        check_types(emitted)
        check_sharding(emitted)
        check_linear(emitted)


def divided(samples: Iterable[Sample]) -> dict[str, set[str]]:
    """Return, by operator, the factors that some sample can divide (also of emitted ops)."""
    found: dict[str, set[str]] = {}
    for of in samples:
        group = [of]
        if operator(of.op_type).gradient is not None and of.grads:
            group.extend(backward(of).samples())
        for one in group:
            rule = sharding_rule(one.signature)
            names = () if rule is None else (f for f in factors(rule) if _fits(one.signature, rule, f))
            found.setdefault(one.op_type, set()).update(names)
    return found
