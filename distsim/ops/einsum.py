"""``Einsum``: products and sums named by letters, which are also the factors of its sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distsim.errors import TypeRuleError, UnknownOperatorError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.onnx_bridge import onnx_types
from distsim.ops.operator import Array, GradientContext, Operator, Signature, Work, register, work_of
from distsim.ops.places import shape_of
from distsim.ops.sharding_rule import Dim, ShardingRule


@dataclass(frozen=True, slots=True)
class Equation:
    """The letters of each operand and of the output; every dimension has one, also behind an ellipsis."""

    terms: tuple[str, ...]
    output: str

    def __str__(self) -> str:
        return f"{','.join(self.terms)}->{self.output}"


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""What ONNX and NumPy name dimensions by: an Einsum has at most 52 different ones."""


def parse(equation: str, ranks: Sequence[int]) -> Equation:
    """Return the equation with letters in place of ellipses (aligned at the right, as ONNX has it).

    Raises :class:`TypeRuleError` where it does not fit operands of these ranks.

    >>> str(parse("...ij,jk", (4, 2)))
    'ABij,jk->ABik'
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise TypeRuleError(f"Einsum {equation!r} names {len(terms)} operands, {len(ranks)} are given")
    hidden = [rank - len(term.replace("...", "", 1)) for term, rank in zip(terms, ranks, strict=True)]
    for term, count, rank in zip(terms, hidden, ranks, strict=True):
        if count < 0 or (count and "..." not in term):
            raise TypeRuleError(f"Einsum {equation!r}: {term!r} is for another rank than {rank}")
    free = [c for c in LETTERS if c not in equation]
    most = max((h for t, h in zip(terms, hidden, strict=True) if "..." in t), default=0)
    if most > len(free):
        raise TypeRuleError(
            f"Einsum {equation!r} has {most} dimensions behind its ellipses, for which {len(free)} of the "
            f"{len(LETTERS)} letters are left; reshape its operands to fewer dimensions"
        )
    widest = "".join(free[:most])
    full = tuple(
        term.replace("...", widest[len(widest) - count :], 1)
        for term, count in zip(terms, hidden, strict=True)
    )
    used = "".join(full)
    if arrow:
        output = right.replace("...", widest, 1)
    else:
        once = sorted(c for c in set(used) if used.count(c) == 1 and c not in widest)
        output = widest + "".join(once)
    if not set(output) <= set(used) <= set(LETTERS) or len(set(output)) < len(output):
        raise TypeRuleError(f"Einsum {equation!r}: {output!r} must name different letters of {left!r}")
    return Equation(full, output)


def _parsed(attributes: Attributes, shapes: Sequence[tuple[int, ...]]) -> Equation:
    return parse(attributes["equation"], [len(shape) for shape in shapes])


def _sizes(equation: Equation, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            known = sizes.setdefault(letter, size)
            if 1 not in (known, size) and known != size:
                raise TypeRuleError(
                    f"Einsum {equation}: {letter!r} is {known} in one place and {size} in another"
                )
            sizes[letter] = size if known == 1 else known
    return sizes


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    shapes = [tensor.shape for tensor in inputs]
    _sizes(_parsed(attributes, shapes), shapes)
    return onnx_types("Einsum", attributes, inputs, None)


def _einsum(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    made = np.einsum(str(_parsed(attributes, [a.shape for a in arrays])), *arrays, optimize="greedy")
    return [made.astype(arrays[0].dtype)]


def _work(signature: Signature) -> Work:
    """Operands are contracted from left to right; each contraction is a multiply-add per combination."""
    shapes = [tensor.shape for tensor in signature.inputs]
    equation = _parsed(signature.attributes, shapes)
    sizes = _sizes(equation, shapes)
    held = set(equation.terms[0])
    # One operand: an addition for each element that is summed.
    flops = float(signature.inputs[0].size) if held - set(equation.output) and len(shapes) == 1 else 0.0
    for i, term in enumerate(equation.terms[1:], 1):
        held |= set(term)
        later = set(equation.output).union(*equation.terms[i + 1 :])
        flops += (2.0 if held - later else 1.0) * math.prod(sizes[letter] for letter in sorted(held))
        held &= later
    summed = set("".join(equation.terms)) - set(equation.output)
    matrix = len(shapes) > 1 and bool(summed)
    return work_of(signature, flops, matrix=matrix)


def _rule(signature: Signature) -> ShardingRule:
    shapes = [tensor.shape for tensor in signature.inputs]
    equation = _parsed(signature.attributes, shapes)
    sizes = _sizes(equation, shapes)
    twice = {c for term in equation.terms for c in term if term.count(c) > 1}

    def labels(term: str, shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return tuple(
            c if size == sizes[c] and c not in twice else None for c, size in zip(term, shape, strict=True)
        )

    inputs = tuple(labels(term, shape) for term, shape in zip(equation.terms, shapes, strict=True))
    linear = tuple((i,) for i in range(len(shapes)))
    return ShardingRule(inputs, (labels(equation.output, signature.outputs[0].shape),), linear)


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    shapes = [shape_of(value) for value in ctx.inputs]
    equation = _parsed(ctx.attributes, shapes)
    sizes = _sizes(equation, shapes)
    made: list[Value | None] = [None] * len(shapes)
    for i, (term, shape) in enumerate(zip(equation.terms, shapes, strict=True)):
        if not ctx.wanted[i]:
            continue
        if len(set(term)) < len(term):
            raise UnknownOperatorError(
                f"{ctx.op!r}: there is no gradient for the diagonal {term!r} in {equation}; use another op"
            )
        made[i] = _operand_gradient(ctx, equation, sizes, i, shape)
    return made


def _operand_gradient(
    ctx: GradientContext, equation: Equation, sizes: dict[str, int], i: int, shape: tuple[int, ...]
) -> Value:
    """Contract dy with the other operands; give back what was broadcast or summed in operand i alone."""
    others = [j for j in range(len(equation.terms)) if j != i]
    seen = set(equation.output).union(*(equation.terms[j] for j in others))
    term = equation.terms[i]
    kept = "".join(c for c, n in zip(term, shape, strict=True) if c in seen and n == sizes[c])
    terms = [equation.output, *(equation.terms[j] for j in others)]
    grad = ctx.add(
        "Einsum", ctx.grad, *(ctx.inputs[j] for j in others), equation=f"{','.join(terms)}->{kept}"
    )
    if kept == term:
        return grad
    flat = tuple(n if c in kept else 1 for c, n in zip(term, shape, strict=True))
    grad = ctx.add("Reshape", grad, shape=flat)
    return grad if flat == shape else ctx.add("Expand", grad, shape=shape)


register(Operator("Einsum", types=_types, compute=_einsum, work=_work, gradient=_gradient, sharding=_rule))
