"""The ways in which one op can run on the ranks of an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from distsim.cache import Cache, cached
from distsim.errors import PlanError
from distsim.ir import Device, Op, Value
from distsim.ops import Pieces, ShardingRule, Signature, sharding_rule
from distsim.ops.parts import Groups, Parts
from distsim.ops.sharding_rule import Dim, factors_of, label_of, labels_of
from distsim.transforms.sharding.layout import PARTIAL, REPLICATED, Ids, State, divisor, sharded
from distsim.transforms.sharding.problem_graph import Node, Structure

PiecesBySize = Mapping[int, tuple[tuple[int, ...] | Groups, ...]]
"""By size of a dimension, the pieces that some op makes of it."""

Allowed = Callable[[str, Parts], int | None]
"""(factor, pieces): may this factor be divided, the whole dimension or each of its pieces?

None: no. Otherwise what the parts of the batch must divide for it, 0 when any number of them may be."""

EXPERTS = "experts"
"""The kind of ranks that have experts each, beside the kinds of context parallelism."""


class Strategy(NamedTuple):
    """The states of an op's inputs and outputs; ``factor`` is what is divided, None: nothing is."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    factor: str | None = None
    mean: bool = False


class Candidate(NamedTuple):
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
    pieces: PiecesBySize,
    decomposed: bool = True,
    context: str = "",
) -> tuple[Candidate, ...]:
    """Return the ways to run an op on some number of ranks: replicated, by factor, and on partial sums.

    ``allowed`` tells which factors may be divided, and into which pieces; ``pieces`` lists, by size of
    a dimension, the pieces that some op makes of such a dimension. ``decomposed``: also by factors by which
    an op becomes several, which know the rank they run on. ``context``: the ranks are of this kind of context
    parallelism, or of expert parallelism (see :class:`ShardingRule`).
    """
    found = [Candidate(replicated(signature))]
    rule = rule_of(signature)
    if rule is None:
        return tuple(found)
    required = _required(rule, context)
    if required is not None and required == rule.rows:
        allowed = _any
    for factor, cut in _labels(signature).cuts:
        if required is not None:
            if factor != required:
                continue
        elif factor in rule.whole or (factor in rule.decompositions and not decomposed):
            continue
        found.extend(_by_factor(signature, factor, allowed, pieces.get(cut, ()) if cut else ()))
    if all(tensor.dtype.is_floating for tensor in signature.outputs):
        for members in rule.linear:
            inputs = tuple(PARTIAL if i in members else REPLICATED for i in range(len(signature.inputs)))
            found.append(Candidate(Strategy(inputs, (PARTIAL,) * len(signature.outputs))))
    return tuple(found)


def _any(factor: str, pieces: Parts) -> int | None:
    return 0


def _required(rule: ShardingRule, context: str) -> str | None:
    """Return the one factor that ranks of a context or of experts may divide; None: any."""
    if context == EXPERTS:
        return rule.experts or rule.rows or None
    return rule.context.get(context, "") if context and rule.context else None


def _by_factor(
    signature: Signature, factor: str, allowed: Allowed, pieces: Sequence[tuple[int, ...] | Groups]
) -> Iterable[Candidate]:
    for choice in (None, *pieces):
        parts = allowed(factor, choice)
        divided = _divided(signature, factor, choice) if parts is not None else None
        if parts is not None and divided is not None:
            yield Candidate(divided[0], divided[1], parts)


@dataclass(frozen=True, slots=True)
class _Labels:
    """The factors of an op in order, each with its :func:`_cut_size`; those that no input has."""

    cuts: tuple[tuple[str, int], ...] = ()
    own: frozenset[str] = frozenset()


@cached("factors, by signature", 65536)
def _labels(signature: Signature) -> _Labels:
    rule = rule_of(signature)
    if rule is None:
        return _Labels()
    found = factors(rule)
    inputs = {factor for dims in rule.inputs for dim in dims for factor in factors_of(dim)}
    own = frozenset([factor for factor in found if factor not in inputs])
    return _Labels(tuple([(factor, _cut_size(signature, rule, factor)) for factor in found]), own)


def _cut_size(signature: Signature, rule: ShardingRule, factor: str) -> int:
    """Return the size of what a factor labels if it may be divided in pieces as well, else 0."""
    labels = [label_of(dim, factor) for group in (*rule.inputs, *rule.outputs) for dim in group]
    whole = factor in rule.decompositions or any(isinstance(label, Pieces) for label in labels)
    return 0 if whole else size_of(signature, rule, factor)


@cached("strategies, by signature, factor and pieces", 65536)
def _divided(signature: Signature, factor: str, choice: Parts) -> tuple[Strategy, int] | None:
    """Return the strategy that divides a factor, and what the number of ranks must divide; None: none can."""
    rule = rule_of(signature)
    if rule is None:
        return None
    decomposition = rule.decompositions.get(factor)
    finished = factor in rule.finish or (decomposition is not None and decomposition.reduced is not None)
    whole = REPLICATED if finished else PARTIAL
    outputs = tuple(_state(group, factor, choice) or whole for group in rule.outputs)
    addends = rule.addends if PARTIAL in outputs else ()
    inputs = tuple(
        _state(group, factor, choice) or (PARTIAL if i in addends else REPLICATED)
        for i, group in enumerate(rule.inputs)
    )
    ranks = _degrees(signature, inputs, outputs)
    return None if ranks is None else (Strategy(inputs, outputs, factor, factor in rule.mean), ranks)


def size_of(signature: Signature, rule: ShardingRule, factor: str) -> int:
    """Return the size of a dimension that a factor labels, 0 if it labels none."""
    for tensors, groups in ((signature.inputs, rule.inputs), (signature.outputs, rule.outputs)):
        for tensor, dims in zip(tensors, groups, strict=True):
            for size, dim in zip(tensor.shape, dims, strict=True):
                if label_of(dim, factor) is not None:
                    return size
    return 0


def _state(dims: tuple[Dim, ...], factor: str, choice: Parts) -> State | None:
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


# --- the strategies of all ops of a function, along one axis ------------------------------------------


class Option(NamedTuple):
    """A strategy of an op, with the numbers of its states."""

    strategy: Strategy
    candidate: Candidate
    inputs: Ids
    outputs: Ids


class Options:
    """What every op may do, and the states of groups that are given; both also in numbers of states.

    The ops ``divided`` are divided in a factor of theirs where they can be, and the groups ``spread`` are
    handed on divided. ``own`` are the dimensions of values that the axis divides of itself.
    ``decomposed`` and ``context`` are as of :func:`candidates`.
    """

    def __init__(
        self,
        structure: Structure,
        allowed: Callable[[Node], Allowed],
        given: Mapping[int, State],
        decomposed: bool = True,
        context: str = "",
        divided: Mapping[Op, str] = MappingProxyType({}),
        spread: frozenset[int] = frozenset(),
        own: Mapping[Value, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        self._structure, pieces = structure, pieces_of(structure, context == EXPERTS)
        self._numbers: dict[State, int] = {REPLICATED: 0, PARTIAL: 1}
        how = pieces, decomposed, context
        each = [(node.signature, _where_made(node, allowed(node), context)) for node in structure.nodes]
        self.of: tuple[tuple[Option, ...], ...] = tuple(
            [tuple(map(self._option, candidates(signature, own, *how))) for signature, own in each]
        )
        """The options of each op, in the order of the structure."""
        self.given: dict[int, int] = {group: self._number(state) for group, state in given.items()}
        self.states: tuple[State, ...] = tuple(self._numbers)
        rows = {node.op: _rows(node) for node in structure.nodes} if context == EXPERTS else {}
        self.divided = {**divided, **{op: factor for op, factor in rows.items() if factor}}
        self.spread, self.own = spread, own

    def that_fit(self, ranks: int, parts: int) -> list[Ids]:
        """Return per op the options that there are on so many ranks, the batch in so many parts."""
        found: list[Ids] = []
        for node, options in zip(self._structure.nodes, self.of, strict=True):
            fitting = [i for i, option in enumerate(options) if option.candidate.fits(ranks, parts)]
            own = self.divided.get(node.op)
            divided = [i for i in fitting if own is not None and options[i].strategy.factor == own]
            found.append(tuple(divided or fitting))
        return found

    def reachable(self, fitting: Sequence[Ids]) -> list[Ids]:
        """Return per group the states that something makes or asks for, through Calls as well."""
        wanted = [1] * len(self._structure.groups)  # sets of states as bits; all may be replicated
        made = list(wanted)
        for node, options, chosen in zip(self._structure.nodes, self.of, fitting, strict=True):
            for index in chosen:
                for number, state in zip(node.inputs, options[index].inputs, strict=True):
                    wanted[number] |= 1 << state
                for number, state in zip(node.outputs, options[index].outputs, strict=True):
                    made[number] |= 1 << state
        changed = True
        while changed:
            changed = False
            for tie in self._structure.ties:
                forth, back = made[tie.source] | made[tie.target], wanted[tie.source] | wanted[tie.target]
                if forth != made[tie.target] or back != wanted[tie.source]:
                    made[tie.target], wanted[tie.source] = forth, back
                    changed = True
        both = [m | w for m, w in zip(made, wanted, strict=True)]
        ids = {bits: tuple([i for i in range(len(self.states)) if bits >> i & 1]) for bits in set(both)}
        return [ids[bits] for bits in both]

    def _option(self, candidate: Candidate) -> Option:
        strategy = candidate.strategy
        inputs = tuple([self._number(state) for state in strategy.inputs])
        outputs = tuple([self._number(state) for state in strategy.outputs])
        return Option(strategy, candidate, inputs, outputs)

    def _number(self, state: State) -> int:
        return self._numbers.setdefault(state, len(self._numbers))


def _rows(node: Node) -> str:
    """Return the factor of an op that ranks of experts divide rather than the batch."""
    rule = rule_of(node.signature)
    return rule.rows if rule else ""


def pieces_of(structure: Structure, groups: bool = False) -> PiecesBySize:
    """Return, by size of a dimension, the pieces that some op makes of such a dimension; with ``groups``."""
    return _PIECES.get(structure, groups, lambda: _pieces(structure, groups))


_PIECES = Cache[Structure, PiecesBySize]("pieces of dimensions, by whether with groups", 2)


def _pieces(structure: Structure, groups: bool) -> PiecesBySize:
    found: dict[int, dict[tuple[int, ...] | Groups, None]] = {}
    for node in structure.nodes:
        rule = rule_of(node.signature)
        for dim in (dim for dims in (*rule.inputs, *rule.outputs) for dim in dims) if rule else ():
            for label in labels_of(dim):
                if isinstance(label, Pieces):
                    sizes = label.sizes
                    if not isinstance(sizes, Groups):
                        found.setdefault(sum(sizes), {})[sizes] = None
                    elif groups:
                        found.setdefault(sum(sizes.sizes), {})[sizes] = None
    return {size: tuple(pieces) for size, pieces in found.items()}


def _where_made(node: Node, allowed: Allowed, context: str) -> Allowed:
    """Allow also the factors that no input has: the op makes the same on every rank, so may make less.

    Ranks of experts divide nothing but the batch and what is of experts.
    """
    own = frozenset[str]() if context == EXPERTS else _labels(node.signature).own
    return (lambda factor, pieces: 0 if factor in own else allowed(factor, pieces)) if own else allowed


@dataclass(frozen=True)
class Decision:
    """How ops and values are placed along one axis.

    ``strategies`` are those of the ops, ``groups`` the states in which the values of each group are
    handed on, ``number`` the group of each value. ``moved`` is the bytes sent per rank and step,
    ``divided`` the share of the matrix flops that is divided over the ranks, ``proven`` whether no
    placement costs less than ``cost``. Decisions of one function with the same ``choices`` are the same.
    ``sent`` are the bytes of the values of each group that are moved, ``undivided`` the sizes of the
    vocabularies that the ranks do not divide. ``own`` are the dimensions of values that the axis divides of
    itself, as a context does those of the sequence.
    """

    strategies: Mapping[Op, Strategy] = field(default_factory=dict[Op, Strategy])
    groups: tuple[State, ...] = ()
    number: Mapping[Value, int] = field(default_factory=dict[Value, int])
    moved: float = 0.0
    proven: bool = True
    divided: float = 1.0
    cost: float = 0.0
    choices: tuple[int, ...] = ()
    undivided: tuple[int, ...] = ()
    sent: Mapping[int, float] = field(default_factory=dict[int, float])
    own: Mapping[Value, frozenset[int]] = field(default_factory=dict[Value, frozenset[int]])

    def state(self, value: Value) -> State:
        """Return the state in which a value is handed on."""
        return self.groups[self.number[value]] if self.groups else REPLICATED


def divided_share(nodes: Sequence[Node], strategies: Mapping[Op, Strategy]) -> float:
    """Return the share of the matrix flops that these strategies divide over the ranks."""
    flops = [(node.times * node.flops, strategies[node.op].factor) for node in nodes if node.flops]
    return sum(n for n, factor in flops if factor is not None) / sum(n for n, _ in flops) if flops else 1.0


@dataclass(frozen=True)
class Axis:
    """What the choice may do: ``options`` on ``ranks`` ranks, the batch in ``parts`` parts."""

    ranks: int
    device: Device
    options: Options
    parts: int
    over_time: bool = False
    """The axis is the batch, which is divided over microbatches as well."""
    all_ops: bool = False
    """Every op is divided if at all possible, whatever the others are."""
    divisor: int = 0
    """In how many parts a dimension that is divided has to divide, if not as many as ranks: where these lie
    in zigzag, twice as many; of ranks of experts only those along which data are divided."""
    beside: Mapping[int, float] = field(default_factory=dict[int, float])
    """Bytes that other axes send of each group, where the values of a rank are whole."""
    repeats: Sequence[tuple[float, float]] | None = None
    """How often a group's value is moved, within a callee and in the whole function: in parts of the batch
    once in all, a weight every time anew."""
