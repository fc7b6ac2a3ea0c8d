"""What may be divided along each axis of ranks: the batch over dp and time, features over tp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from distsim.errors import PlanError
from distsim.ir import Device, Function, Int32, Int64, Op, Role, Tensor, Value
from distsim.ir.type import as_tensor
from distsim.ops.attention_sharding import TORCH_ROTATES
from distsim.ops.parts import Parts
from distsim.ops.sharding_rule import factors_of
from distsim.transforms.sharding.choose_layouts import decide
from distsim.transforms.sharding.layout import PARTIAL, REPLICATED, DividedAxis, State, sharded
from distsim.transforms.sharding.problem_graph import Node, Structure
from distsim.transforms.sharding.roles import (
    Mark,
    Marks,
    marked,
    met_in_products,
    propagate,
    propagate_back,
)
from distsim.transforms.sharding.strategies import (
    Allowed,
    Axis,
    Decision,
    Options,
    PiecesBySize,
    pieces_of,
    rule_of,
)


def batch_options(
    function: Function, structure: Structure, divided: Mapping[Value, int], marks: Marks
) -> Options:
    """Return the choice over the batch: these inputs are ``divided``, everything else starts out whole.

    ``marks`` are the dimensions that carry the batch.
    """
    number = structure.number
    given = {number[v]: REPLICATED for v in function.inputs}
    given |= {number[v]: sharded(dim) for v, dim in divided.items()}

    def allowed(node: Node) -> Allowed:
        of_batch = marked(node.op, marks)
        return lambda factor, pieces: 0 if of_batch(factor, pieces) else None

    return Options(structure, allowed, given, decomposed=False)


def tensor_options(
    function: Function,
    structure: Structure,
    known: Mapping[Value, Role],
    batch: Marks,
    sequence: bool = False,
    experts: bool = False,
) -> Options:
    """Return the choice over tp: what derives from parameters and does not carry the batch.

    ``batch`` are the dimensions that do. A vocabulary is divided wherever it can be, by rows of the
    embedding, whatever it costs: whoever asks for ranks wants the weights divided (Megatron-LM, torchtitan).
    ``sequence``: what is between the products is divided too, in the dimensions that data have beside the
    batch, and handed on so (Korthikanti et al. 2022): what has a product divided over ranks to sum is
    reduce-scattered, and gathered where the next product reads it, in each pass anew; but not where it only
    chooses, as Megatron-LM's router does (router.py), which has a rank's own part; nor where a table is added
    of which a parameter has the rows, as learned positions are: that is whole on each rank, and what it is
    added to is scattered after that (language_model_embedding.py). ``experts``: those are
    whole on their ranks, so that their products are divided as what is between the others is, if at all.
    """
    pieces = pieces_of(structure)
    trained = [v for v in function.inputs if known[v] in (Role.PARAMETER, Role.STATE)]
    seeds: Marks = {v: _dimensions(v, as_tensor(v.type, v.name).rank, pieces) for v in trained}
    marks = propagate(function, seeds)
    kept = data_marks(function, structure, known)
    vocabulary = _over_vocabulary(structure, marks, kept)
    # Of an embedding's gradient the rows follow from none of what it is made of.
    made = [op.outputs[0] for op in vocabulary if op.op_type == "GatherGrad"]
    seeds |= {v: _dimensions(v, as_tensor(v.type, v.name).rank, pieces) for v in made}
    marks = propagate(function, seeds)
    met = met_in_products([op for node in structure.nodes if node.flops for op in node.ops], marks, kept)
    if met:
        marks = propagate(function, propagate_back(function, met) | seeds)
    routers = _choosing(structure, kept) if sequence else frozenset[Node]()
    added = _adding_tables(structure, marks, kept) if sequence else {}

    def allowed(node: Node) -> Allowed:
        of_parameter, of_data, of_batch = (marked(node.op, m) for m in (marks, kept, batch))
        own, rule = vocabulary.get(node.op), rule_of(node.signature)
        apart = experts and rule is not None and bool(rule.experts)
        along = sequence and (apart or not node.flops or node in routers) and node not in added

        def test(factor: str, part: Parts) -> int | None:
            if factor == own:
                return 0
            if not (of_data(factor, part) and along) and (
                apart or not of_parameter(factor, part) or of_data(factor, part)
            ):
                return None
            if not of_batch(factor, None):
                return 0
            # In a dimension that merges the batch with another, behind the batch: heads of attention.
            return len(part) if isinstance(part, tuple) else None

        return test

    tables = {value for values in added.values() for value in values}
    whole = (v for v in function.inputs if known[v] in (Role.INPUT, Role.CONSTANT) or v in tables)
    given = {structure.number[v]: REPLICATED for v in whole}
    spread = _activations(structure, kept, batch) if sequence else frozenset[int]()
    return Options(structure, allowed, given, divided=vocabulary, spread=spread)


def _adding_tables(structure: Structure, trained: Marks, data: Marks) -> dict[Node, list[Value]]:
    """Return the ops that read what is made of parameters alone in a dimension that data have, and that."""
    found: dict[Node, list[Value]] = {}
    for node in structure.nodes:
        alone = [n for n, v in enumerate(node.op.inputs) if trained.get(v) and not data.get(v)]
        rule = rule_of(node.signature) if alone else None
        if rule is None or rule.experts:
            continue
        of_data = marked(node.op, data)
        read = [n for n in alone if any(of_data(f, None) for dim in rule.inputs[n] for f in factors_of(dim))]
        if read:
            found[node] = [node.op.inputs[n] for n in read]
    return found


def data_marks(function: Function, structure: Structure, known: Mapping[Value, Role]) -> Marks:
    """Return the dimensions that follow from those of data which are no features."""
    pieces, fed = pieces_of(structure), [v for v in function.inputs if known[v] is Role.INPUT]
    own = {v: _dimensions(v, kept_whole(as_tensor(v.type, v.name)), pieces) for v in fed}
    # The batch is divided as a whole only, also where it is as large as what some op has in pieces.
    return propagate(function, {v: frozenset([m for m in own[v] if m[0] or m[1] is None]) for v in fed})


def _dimensions(value: Value, count: int, pieces: PiecesBySize) -> frozenset[Mark]:
    """Return the first dimensions of a value, and in which pieces these may be divided."""
    sizes = as_tensor(value.type, value.name).shape[:count]
    return frozenset((i, p) for i, n in enumerate(sizes) if n > 1 for p in (None, *pieces.get(n, ())))


def context_options(
    function: Function, structure: Structure, divided: Mapping[Value, int], batch: Marks, kind: str
) -> Options:
    """Return the choice over the ranks of a context: these inputs are ``divided`` in their sequence.

    ``batch`` are the dimensions that carry the batch. All that has a sequence is divided in it, and handed on
    so, attention as the ``kind`` says (:class:`distsim.ops.sharding_rule.ShardingRule`).
    """
    number = structure.number
    given = {number[v]: REPLICATED for v in function.inputs}
    given |= {number[v]: sharded(dim) for v, dim in divided.items()}
    marks = propagate(function, {v: frozenset({(dim, None)}) for v, dim in divided.items()})

    def allowed(node: Node) -> Allowed:
        rule = rule_of(node.signature)
        if rule is not None and rule.context:
            return lambda factor, pieces: 0
        of_sequence, of_batch = marked(node.op, marks), marked(node.op, batch)

        def test(factor: str, part: Parts) -> int | None:
            if not of_sequence(factor, part):
                return None
            if not of_batch(factor, None):
                return 0
            # Behind the batch, in a dimension that merges both.
            return len(part) if isinstance(part, tuple) else None

        return test

    groups = structure.groups
    spread = frozenset([n for v, n in number.items() if v in marks and groups[n].role is None])
    own = {value: frozenset([dim for dim, _ in dims]) for value, dims in marks.items()}
    return Options(structure, allowed, given, decomposed=False, context=kind, spread=spread, own=own)


def _activations(structure: Structure, data: Marks, batch: Marks) -> frozenset[int]:
    """Return the groups of what is computed of parameters and has a sequence."""
    computed = {n for n, group in enumerate(structure.groups) if group.role is Role.PARAMETER}
    before = 0
    while len(computed) > before:
        before = len(computed)
        for node in structure.nodes:
            if not computed.isdisjoint(node.inputs):
                computed.update(node.outputs)
        computed.update([tie.target for tie in structure.ties if tie.source in computed])
    found: set[int] = set()
    for value, number in structure.number.items():
        along = data.get(value, frozenset()) - batch.get(value, frozenset())
        if along and number in computed and as_tensor(value.type, value.name).dtype.is_floating:
            found.add(number)
    return frozenset(found)


def _choosing(structure: Structure, data: Marks) -> frozenset[Node]:
    """Return the products of which, before any other, places are chosen, and those of the same weights.

    Places are whole numbers: a mask, as dropout makes of a scale, is none. ``data`` are the dimensions that
    follow from data.
    """
    read: set[int] = set()
    weights: set[int] = set()
    for node in reversed(structure.nodes):
        places = any(type_.dtype in (Int32(), Int64()) for type_ in node.signature.outputs)
        if node.flops and not read.isdisjoint(node.outputs):
            weights.update([n for v, n in zip(node.op.inputs, node.inputs, strict=True) if v not in data])
        elif not node.flops and (places or not read.isdisjoint(node.outputs)):
            read.update(node.inputs)
    weights |= {tie.source for tie in structure.ties if tie.target in weights}
    weights |= {tie.target for tie in structure.ties if tie.source in weights}
    return frozenset([node for node in structure.nodes if node.flops and not weights.isdisjoint(node.inputs)])


def _over_vocabulary(structure: Structure, trained: Marks, data: Marks) -> dict[Op, str]:
    """Return the ops over a vocabulary, each with the factor of the vocabulary.

    They take rows of a table of parameters where data say which, or make the gradient of one, or take a loss
    over classes that follow from parameters. ``trained`` and ``data`` are the dimensions that follow from
    parameters and from data.
    """
    found: dict[Op, str] = {}
    tables: set[tuple[int, ...]] = set()
    for gradient in (False, True):
        for node in structure.nodes:
            rule = rule_of(node.signature)
            factors = [*rule.decompositions] if rule and not rule.context else []
            if rule is None or not factors or (node.op.op_type == "GatherGrad") != gradient:
                continue
            (factor,), of_trained, of_data = factors, marked(node.op, trained), marked(node.op, data)
            indices = [of_data(each, None) for dim in rule.inputs[not gradient] for each in factors_of(dim)]
            if gradient and any(indices) and node.signature.attributes["shape"] in tables:
                found[node.op] = factor
            elif not gradient and any(indices) and of_trained(factor, None) and not of_data(factor, None):
                found[node.op] = factor
                tables.add(node.signature.inputs[0].shape)
    return found


def decide_batch(structure: Structure, options: Options, parts: int, device: Device) -> Decision:
    """Return how the batch is divided into ``parts``, over dp ranks and microbatches."""
    return decide(structure, Axis(parts, device, options, parts, over_time=True))


def decide_context(
    structure: Structure,
    options: Options,
    degrees: tuple[int, int, int],
    batch: Decision,
    device: Device,
    divisor: int,
) -> Decision:
    """Return how the ranks of a context, or of experts, divide the work.

    ``degrees`` are (ranks, dp, microbatches). ``divisor``: in how many parts what is divided has to divide.
    """
    ranks, dp, microbatches = degrees
    repeats = _repeats(structure, batch, dp, microbatches, LATE)
    parts = dp * microbatches
    return decide(
        structure, Axis(ranks, device, options, parts, all_ops=True, divisor=divisor, repeats=repeats)
    )


LATE = 1e-6
"""So much dearer is a sum within a callee than one of the whole function, which it costs as much as: together
with the sum over the batch, of what is partial over both."""

_TAKES = {
    "ulysses": "ulysses takes ranks that divide the heads of both",
    **dict.fromkeys(("ring", *TORCH_ROTATES), "a ring takes as many keys as queries, and no mask"),
    "allgather": "allgather takes no mask beside a causal one",
}


def check_context(structure: Structure, decision: Decision, axis: DividedAxis, kind: str, tp: int) -> None:
    """Raise for attention that a kind of context parallelism does not divide, beside ``tp`` ranks."""
    divided = False
    for node in structure.nodes:
        rule = rule_of(node.signature)
        if rule is None or not rule.context:
            continue
        divided = True
        query, key = node.signature.inputs[:2]
        heads = math.gcd(query.shape[1], key.shape[1])
        if kind == "ulysses" and heads % (axis.parts * (1 if heads % tp else tp)):
            left = heads if heads % tp else heads // tp
            usable = ", ".join([str(n) for n in range(2, left + 1) if left % n == 0])
            raise PlanError(
                f"{axis.name}={axis.parts} by ulysses does not divide, beside tp={tp}, the {query.shape[1]} "
                f"heads of queries and {key.shape[1]} of keys; use one of {usable or 'no ranks'}, or another "
                "cp_kind, which needs no heads"
            )
        if decision.strategies[node.op].factor is None:
            raise PlanError(
                f"{axis.name}={axis.parts} does not divide {node.op!r} by {kind}: its queries are {query}, "
                f"its keys {key} ([batch, heads, sequence, size]); {_TAKES[kind]}"
            )
    if not divided:
        raise PlanError(
            f"{axis.name}={axis.parts}, but {structure.name} has no attention that is one op; say "
            "--attention flash, or cp=1"
        )


def decide_tensor(
    structure: Structure,
    options: Options,
    degrees: tuple[int, int, int],
    batch: Decision,
    device: Device,
    beside: Mapping[int, float] = MappingProxyType({}),
) -> Decision:
    """Return how ``tp`` ranks divide the work; ``degrees`` are (tp, dp, microbatches).

    ``beside`` are the bytes of each group that all dp ranks send for experts.

    Raises :class:`PlanError` when they would divide no matrix product at all.
    """
    tp, dp, microbatches = degrees
    if tp == 1:
        return Decision()
    parts = dp * microbatches
    repeats = _repeats(structure, batch, dp, microbatches)
    found = decide(structure, Axis(tp, device, options, parts, beside=beside, repeats=repeats))
    if found.divided == 0:
        usable = [n for n in range(2, MOST_SUGGESTED + 1) if _can_divide(structure, options, n, parts)]
        raise PlanError(
            f"tp={tp} divides no matrix product of {structure.name}: every rank would do all of the work; "
            f"degrees that divide some: {', '.join(map(str, usable)) or 'none, use tp=1'}"
        )
    return found


MOST_SUGGESTED = 64


def _can_divide(structure: Structure, options: Options, ranks: int, parts: int) -> bool:
    """Return whether any matrix product can be divided over the ranks."""
    return any(
        option.strategy.factor is not None and option.candidate.fits(ranks, parts)
        for node, choices in zip(structure.nodes, options.of, strict=True)
        if node.flops > 0
        for option in choices
    )


def kept_whole(data: Tensor) -> int:
    """Return how many leading dimensions of a data input tp does not divide: all that are not features.

    Dividing the sequence is another kind of parallelism; a table of positions has that dimension too.
    """
    return data.rank if not data.dtype.is_floating else max(data.rank - 1, 1)


def _repeats(
    structure: Structure, batch: Decision, dp: int, microbatches: int, late: float = 0.0
) -> list[tuple[float, float]]:
    """Return how often the whole of each group's values is moved in a step, over all dp ranks.

    That is within a callee, and in the whole function.
    What is divided over the batch is moved once, a part at a time; a gradient once per rank, after it is
    summed over microbatches, which is not done within a callee; a weight once per rank and microbatch.
    ``late``: how much dearer a gradient is within a callee in any case.
    """
    raw: list[State] = list(batch.groups)
    for node in structure.nodes:
        for number, state in zip(node.outputs, batch.strategies[node.op].outputs, strict=True):
            if structure.groups[number].role is None:
                raw[number] = state
    found: list[tuple[float, float]] = []
    for state in raw:
        once = 1.0 if state.sharded else float(dp)
        every = once if state.sharded else once * microbatches
        found.append((every * (1.0 + late), once) if state is PARTIAL else (every, every))
    return found
