"""The ways in which one op can run on the ranks of an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distsim.cache import cached
from distsim.errors import PlanError
from distsim.ops import Pieces, ShardingRule, Signature, sharding_rule
from distsim.ops.operator import Dim, factors_of, label_of
from distsim.transforms.sharding.layout import PARTIAL, REPLICATED, State, divisor, sharded

Allowed = Callable[[str, tuple[int, ...] | None], int | None]
"""(factor, pieces): may this factor be divided, the whole dimension or each of its pieces?

None: no. Otherwise what the parts of the batch must divide for it, 0 when any number of them may be."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The states of an op's inputs and outputs; ``factor`` is what is divided, None: nothing is."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    factor: str | None = None
    mean: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, and for which degrees it is one.

    ``ranks`` is what the number of ranks must divide, ``parts`` what the number of parts of the batch
    must divide; 0 is divided by any number.
    """

    strategy: Strategy
    ranks: int = 0
    parts: int = 0

    def fits(self, ranks: int, parts: int) -> bool:
        """Return whether the op can run so on this many ranks, the batch in this many parts."""
        return self.ranks % ranks == 0 and self.parts % parts == 0


def replicated(signature: Signature) -> Strategy:
    """Return the strategy in which every rank does all of the work."""
    return Strategy((REPLICATED,) * len(signature.inputs), (REPLICATED,) * len(signature.outputs))


@cached("sharding rules, by signature", 65536)
def rule_of(signature: Signature) -> ShardingRule | None:
    """Return the op's sharding rule (cached: rules are asked for once per signature).

    Raises :class:`PlanError` for one that does not label every dimension of every operand and result.
    """
    rule = sharding_rule(signature)
    if rule is not None:
        ranks = tuple([tensor.rank for tensor in (*signature.inputs, *signature.outputs)])
        labels = tuple([len(dims) for dims in (*rule.inputs, *rule.outputs)])
        if labels != ranks:
            raise PlanError(
                f"the sharding rule of {signature.op_type} is wrong for {signature.inputs} -> "
                f"{signature.outputs}: it labels {labels} dimensions, there are {ranks}"
            )
    return rule


def factors(rule: ShardingRule) -> tuple[str, ...]:
    """Return the factors of a rule in order of appearance."""
    dims = (dim for dims in (*rule.inputs, *rule.outputs) for dim in dims)
    return tuple(dict.fromkeys(factor for dim in dims for factor in factors_of(dim)))


def candidates(
    signature: Signature,
    allowed: Allowed,
    pieces: dict[int, tuple[tuple[int, ...], ...]],
) -> tuple[Candidate, ...]:
    """Return the ways to run an op on some number of ranks: replicated, by factor, and on partial sums.

    ``allowed`` tells which factors may be divided, and into which pieces; ``pieces`` lists, by size of
    a dimension, the pieces that some op makes of such a dimension.
    """
    found = [Candidate(replicated(signature))]
    rule = rule_of(signature)
    if rule is None:
        return tuple(found)
    for factor in factors(rule):
        found.extend(_by_factor(signature, rule, factor, allowed, pieces))
    if all(tensor.dtype.is_floating for tensor in signature.outputs):
        for members in rule.linear:
            inputs = tuple(PARTIAL if i in members else REPLICATED for i in range(len(signature.inputs)))
            found.append(Candidate(Strategy(inputs, (PARTIAL,) * len(signature.outputs))))
    return tuple(found)


def _by_factor(
    signature: Signature,
    rule: ShardingRule,
    factor: str,
    allowed: Allowed,
    pieces: dict[int, tuple[tuple[int, ...], ...]],
) -> Iterable[Candidate]:
    labels = [label_of(dim, factor) for group in (*rule.inputs, *rule.outputs) for dim in group]
    choices: list[tuple[int, ...] | None] = [None]
    if not any(isinstance(label, Pieces) for label in labels):
        size = _size_of(signature, rule, factor)
        choices += pieces.get(size, ())
    for choice in choices:
        parts = allowed(factor, choice)
        if parts is None:
            continue
        outputs = tuple(_state(group, factor, choice) or PARTIAL for group in rule.outputs)
        addends = rule.addends if PARTIAL in outputs else ()
        inputs = tuple(
            _state(group, factor, choice) or (PARTIAL if i in addends else REPLICATED)
            for i, group in enumerate(rule.inputs)
        )
        ranks = _degrees(signature, inputs, outputs)
        if ranks is not None:
            yield Candidate(Strategy(inputs, outputs, factor, factor in rule.mean), ranks, parts)


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


def _degrees(signature: Signature, inputs: tuple[State, ...], outputs: tuple[State, ...]) -> int | None:
    """Return what the number of ranks must divide, None when no number of ranks can run it."""
    found = 0
    for tensor, state in zip((*signature.inputs, *signature.outputs), (*inputs, *outputs), strict=True):
        own = divisor(tensor.shape, state)
        if own is None or (state.kind == "P" and not tensor.dtype.is_floating):
            return None
        found = math.gcd(found, own)
    return found
