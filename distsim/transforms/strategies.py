"""The ways in which one op can run on the ranks of an axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from distsim.ops import Pieces, ShardingRule, Signature, sharding_rule
from distsim.ops.operator import Dim, factors_of, label_of
from distsim.transforms.placement import PARTIAL, REPLICATED, State, divisible, sharded

Allowed = Callable[[str, tuple[int, ...] | None], bool]
"""(factor, pieces): may this factor be divided, the whole dimension or each of its pieces?"""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The states of an op's inputs and outputs; ``factor`` is what is divided, None: nothing is."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    factor: str | None = None
    mean: bool = False


def replicated(signature: Signature) -> Strategy:
    """Return the strategy in which every rank does all of the work."""
    return Strategy((REPLICATED,) * len(signature.inputs), (REPLICATED,) * len(signature.outputs))


@lru_cache(maxsize=65536)
def rule_of(signature: Signature) -> ShardingRule | None:
    """Return the op's sharding rule (cached: rules are asked for once per signature)."""
    return sharding_rule(signature)


def factors(rule: ShardingRule) -> tuple[str, ...]:
    """Return the factors of a rule in order of appearance."""
    dims = (dim for dims in (*rule.inputs, *rule.outputs) for dim in dims)
    return tuple(dict.fromkeys(factor for dim in dims for factor in factors_of(dim)))


def strategies(
    signature: Signature,
    ranks: int,
    allowed: Allowed,
    pieces: dict[int, tuple[tuple[int, ...], ...]],
) -> tuple[Strategy, ...]:
    """Return the ways to run an op on ``ranks`` ranks: replicated, by factor, and on partial sums.

    ``allowed`` tells which factors may be divided, and into which pieces; ``pieces`` lists, by size of
    a dimension, the pieces that some op makes of such a dimension.
    """
    found = [replicated(signature)]
    rule = rule_of(signature)
    if rule is None:
        return tuple(found)
    for factor in factors(rule):
        found.extend(_by_factor(signature, rule, factor, ranks, allowed, pieces))
    if all(tensor.dtype.is_floating for tensor in signature.outputs):
        for members in rule.linear:
            inputs = tuple(PARTIAL if i in members else REPLICATED for i in range(len(signature.inputs)))
            found.append(Strategy(inputs, (PARTIAL,) * len(signature.outputs)))
    return tuple(found)


def _by_factor(
    signature: Signature,
    rule: ShardingRule,
    factor: str,
    ranks: int,
    allowed: Allowed,
    pieces: dict[int, tuple[tuple[int, ...], ...]],
) -> Iterable[Strategy]:
    labels = [label_of(dim, factor) for group in (*rule.inputs, *rule.outputs) for dim in group]
    choices: list[tuple[int, ...] | None] = [None]
    if not any(isinstance(label, Pieces) for label in labels):
        size = _size_of(signature, rule, factor)
        choices += pieces.get(size, ())
    for choice in choices:
        if not allowed(factor, choice):
            continue
        outputs = tuple(_state(group, factor, choice) or PARTIAL for group in rule.outputs)
        addends = rule.addends if PARTIAL in outputs else ()
        inputs = tuple(
            _state(group, factor, choice) or (PARTIAL if i in addends else REPLICATED)
            for i, group in enumerate(rule.inputs)
        )
        strategy = Strategy(inputs, outputs, factor, factor in rule.mean)
        if _fits(signature, strategy, ranks):
            yield strategy


def _size_of(signature: Signature, rule: ShardingRule, factor: str) -> int:
    for tensors, groups in ((signature.inputs, rule.inputs), (signature.outputs, rule.outputs)):
        for tensor, dims in zip(tensors, groups, strict=True):
            for size, dim in zip(tensor.shape, dims, strict=True):
                if label_of(dim, factor) is not None:
                    return size
    return 0


def _state(dims: tuple[Dim, ...], factor: str, choice: tuple[int, ...] | None) -> State | None:
    for index, dim in enumerate(dims):
        label = label_of(dim, factor)
        if label is not None:
            return sharded(index, label.sizes if isinstance(label, Pieces) else choice)
    return None


def _fits(signature: Signature, strategy: Strategy, ranks: int) -> bool:
    tensors = (*signature.inputs, *signature.outputs)
    states = (*strategy.inputs, *strategy.outputs)
    for tensor, state in zip(tensors, states, strict=True):
        if not divisible(tensor.shape, state, ranks):
            return False
        if state.kind == "P" and not tensor.dtype.is_floating:
            return False
    return True
