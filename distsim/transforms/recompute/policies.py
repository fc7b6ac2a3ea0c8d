"""What is saved and what is recomputed, as policies with a text each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import partial

from distsim.cache import cached
from distsim.ops.rules import check_op_types
from distsim.plan.recomputation import parse_remat
from distsim.transforms.recompute.cheap_parts import inside_parts
from distsim.transforms.recompute.core_attention import core_attention
from distsim.transforms.recompute.saved_names import named_values
from distsim.transforms.recompute.saves import (
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Phase,
    Saves,
    Tag,
    Trait,
    save_by_region,
    save_min_cut,
    save_replayed,
    save_within_budget,
    split,
)

Rule = Callable[[JointGraph], Iterable[int]]
"""A joint graph -> the nodes whose values are saved."""

Parts = Callable[[JointGraph], Iterable[AbstractSet[int]]]
"""A joint graph -> the nodes inside each part of the forward pass that runs again as a whole."""


class Run(Enum):
    """How much of a block runs again: what backward needs, op by op when it does; or, before its backward
    pass begins, all ops up to the last whose result it needs; or all."""

    NEEDED = "what is needed"
    EARLY = "until the last that is needed"
    WHOLE = "all of it"


@dataclass(frozen=True)
class Policy:
    """What is saved of the blocks of a function and of the rest; None: all that backward reads.

    A block is a forward Call with its backward Call, ``run`` how much of it runs again. ``every``: of the
    blocks every so-many-th has the rule, the last of each so many, as torchtitan counts them. ``first``: of
    the blocks of each stage so many have it. ``group``: so many consecutive blocks of a stage run again one
    after the other, and of all that they make only what comes out of the last is saved. ``parts`` are
    values that are not saved: all ops that make or read those of a part run again together, right before
    the first op of backward that reads one. ``named``: what there must be, for any to run again. ``types``:
    those of ops of which blocks must have some, for any to be saved.
    """

    text: str
    blocks: Rule | None = None
    rest: Rule | None = None
    every: int = 1
    run: Run = Run.NEEDED
    parts: Parts | None = None
    named: str = ""
    types: tuple[str, ...] = ()
    first: int | None = None
    group: int = 0

    def rule(self, block: int, place: int) -> Rule | None:
        """Return the rule for a block by its number, and by its place in its stage."""
        if (block + 1) % self.every or (self.first is not None and place >= self.first):
            return None
        return self.blocks

    @property
    def fewest(self) -> int:
        """How many blocks there must be in all, or in the largest stage, for any to run again."""
        return max(self.every, self.first or 1, self.group)

    def __str__(self) -> str:
        return self.text


@cached("policies of recomputation, by name", 256)
def policy_named(text: str) -> Policy:
    """Return the policy of a text.

    ``none`` saves what backward reads. ``full`` saves nothing of a block but its inputs (activation
    checkpointing; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): all its ops run again,
    its collectives too, before its backward pass, as Megatron-LM's full recomputation and
    ``torch.utils.checkpoint`` with ``use_reentrant=True`` run them. ``full_early`` stops at the last op whose
    result backward needs, as the early stop of ``use_reentrant=False`` does (it counts saved tensors, and
    stops when the last of them is there again): what is before it runs, needed or not. ``every:N`` and
    ``every_early:N`` do the one or the other for every N-th block. ``block:N`` does the first for the first N
    layers of each stage (of each chunk, where a rank has several), and ``uniform:N`` for all layers of a
    stage in groups of N, the last perhaps smaller, of which only the input is saved: Megatron-LM's
    ``--recompute-method`` with ``--recompute-num-layers N`` (``transformer_block.py``,
    ``_checkpointed_forward``).

    ``attention`` runs core attention again (:func:`core_attention`), of blocks and of what is in none, as
    Megatron-LM's selective recomputation: whole, its last product too, right before its backward pass. What
    it becomes is saved, since the output projection reads it. As one op it runs again as well, though only
    its statistics are saved less: Megatron-LM checkpoints ``core_attention`` whichever kernel it is
    (``transformer/attention.py``, ``_checkpointed_attention_forward``).

    ``ops:LIST`` saves of a block its inputs and the results of the ops of the types listed, as torchtitan's
    selective ``op`` does (``activation_checkpoint.py``: torch's policy function over a list of ops to save):
    all others run again, collectives too, up to the last that backward needs. ``TYPE/N`` saves of the ops of
    a type in a block all but each N-th, as torchtitan's policy counts ``mm`` (``mm_count % 2``). (Torch
    holds all results of listed ops until the block has run again; here one that nothing reads again is not
    kept.)

    ``parts:LIST`` runs parts of a layer again that are cheap for what they take (:func:`inside_parts`), as
    Megatron-LM's selective recomputation does with ``--recompute-modules layernorm moe_act mla_up_proj``, and
    DeepSeek-V3's training did with its norms and up-projections, and with its activations.

    ``names:LIST`` saves of a block its inputs and the values named (:func:`named_values`), as JAX's
    ``save_only_these_names`` does: of all else what backward needs runs again, collectives too, and no more
    (XLA compiles nothing that is not read).
    MaxText's ``save_qkv_proj`` is ``names:qkv_proj``, its ``save_dot_except_mlpwi``
    ``names:qkv_proj+out_proj+mlpwo``; Praxis' ``SAVE_QKV_OUT_PROJ`` comes near ``names:qkv_proj+out_proj``,
    but for biases and rotations, which follow what it saves.

    ``matmuls`` saves the results of matrix
    products only; ``min_cut`` the least bytes from which all that is cheap follows; ``budget:X`` at most the
    share X of what is between the inputs alone and the min-cut, recomputing what takes least time. These
    three run again only what backward needs, and no collective.

    Raises :class:`PlanError` for another text, and for ops that do not exist.

    >>> str(policy_named("every:2"))
    'every:2'
    """
    name, figure, ops, parts = parse_remat(text)
    if name == "budget":
        share = partial(_within_budget, share=figure)
        return Policy(text, share, share)
    if name == "ops":
        types = tuple([name for name, _ in ops])
        check_op_types(f"remat={text}", types, "give types as in ops:MatMul+Attention")
        return Policy(text, partial(only_ops, types=ops), run=Run.EARLY, types=types)
    if name == "parts":
        rule = partial(outside_parts, names=parts)
        return Policy(text, rule, rule, named=" or ".join(each.replace("_", " ") for each in parts))
    if name == "names":
        return Policy(text, partial(only_names, names=parts))
    if name == "block":
        return Policy(text, checkpoint, run=Run.WHOLE, first=int(figure))
    if name == "uniform":
        return Policy(text, run=Run.WHOLE, group=int(figure))
    if name in ("every", "every_early"):
        return Policy(text, checkpoint, every=int(figure), run=Run.WHOLE if name == "every" else Run.EARLY)
    return _NAMED[name]


def checkpoint(graph: JointGraph) -> list[int]:
    """Save nothing of the forward pass but what is tagged to be."""
    return _kept(graph, lambda node: False, collectives=False)


def only_ops(graph: JointGraph, types: Sequence[tuple[str, int]]) -> list[int]:
    """Save the results of ops of these types, but each so many-th, and what is tagged to be.

    With 0, the results of all ops of a type are saved.
    """
    among = dict(types)
    places: dict[str, list[int]] = {name: [] for name in among}
    for position, node in enumerate(graph.nodes):
        if node.role is NodeRole.OP and node.phase is Phase.FORWARD and node.op in among:
            places[node.op].append(position)
    again = {at for name, every in types if every for at in places[name][every - 1 :: every]}
    return [
        position
        for position in _kept(
            graph, lambda node: node.op in among and not node.wants_recompute, collectives=False
        )
        if _op_of(graph, position) not in again
    ]


def only_names(graph: JointGraph, names: Sequence[str]) -> list[int]:
    """Save the values of these names, and what is tagged to be."""
    named = [each for each in named_values(graph, names) if not graph.nodes[each].wants_recompute]
    return sorted({*checkpoint(graph), *named})


def matmuls(graph: JointGraph) -> list[int]:
    """Save the results of what runs on the matrix units, as selective checkpointing does."""
    return _kept(
        graph, lambda node: node.has(Trait.COMPUTE_INTENSIVE) and node.tag is not Tag.PREFER_RECOMPUTE
    )


def outside_attention(graph: JointGraph) -> list[int]:
    """Save what backward reads, but for what is inside of core attention or tagged to be recomputed."""
    inside = frozenset[int]().union(*core_attention(graph))
    return [position for position in as_read(graph) if position not in inside]


def outside_parts(graph: JointGraph, names: Sequence[str]) -> list[int]:
    """Save what backward reads, but for the values of the named parts."""
    inside = inside_parts(graph, names)
    return [position for position in as_read(graph) if position not in inside]


def as_read(graph: JointGraph) -> list[int]:
    """Save what backward reads, but for what is tagged to be recomputed."""
    return _kept(graph, lambda node: not node.wants_recompute)


def min_cut(graph: JointGraph) -> Sequence[int]:
    """Save a minimum cut (:func:`distsim.transforms.recompute.saves.save_min_cut`), if that saves bytes.

    The cut weighs bytes by what saving them costs in time, so it may be as many bytes as backward reads.
    """
    return _fewer_bytes(save_min_cut(graph))


def replayed(graph: JointGraph) -> Sequence[int]:
    """Save what a first partition saved (:func:`distsim.transforms.recompute.saves.save_replayed`)."""
    return save_replayed(graph).saved


def _within_budget(graph: JointGraph, share: float) -> Sequence[int]:
    return _fewer_bytes(save_within_budget(graph, share))


def _fewer_bytes(saves: Saves) -> Sequence[int]:
    """Return what is saved; or, where that is no fewer bytes, what is if nothing is recomputed unasked."""
    given = [place for place, node in enumerate(saves.graph.nodes) if node.role is NodeRole.PRIMAL]
    plain = split(saves.graph, [*given, *as_read(saves.graph)])
    return saves.saved if _held(saves) < _held(plain) else plain.saved


def _held(saves: Saves) -> int:
    """Return the bytes in memory from forward to backward that saving takes: parameters are there anyway."""
    graph = saves.graph
    storages = {graph.storages[position] for position in saves.saved} - {None}
    free = {position for position, node in enumerate(graph.nodes) if node.has(Trait.FREE)}
    return sum(graph.sizes[position] for position in storages - free if position is not None)


def by_region(graph: JointGraph) -> Sequence[int]:
    """Save what crosses regions' boundaries (:func:`distsim.transforms.recompute.saves.save_by_region`)."""
    return save_by_region(graph).saved


def _op_of(graph: JointGraph, position: int) -> int:
    """Return the place of the op of which a node is a result."""
    node = graph.nodes[position]
    return position if node.item is None else node.inputs[0]


def _kept(graph: JointGraph, wanted: Callable[[JointNode], bool], collectives: bool = True) -> list[int]:
    """Return the forward values to save: those wanted or tagged, and ``collectives`` that are not tagged."""
    found: list[int] = []
    for position, node in enumerate(graph.nodes):
        op = graph.nodes[_op_of(graph, position)]
        if op.role is not NodeRole.OP or op.phase is not Phase.FORWARD or node.kind is NodeKind.TUPLE:
            continue
        collective = collectives and op.has(Trait.COLLECTIVE) and not node.wants_recompute
        ordered = node.tag in (Tag.MUST_SAVE, Tag.PREFER_SAVE)
        if node.tag is not Tag.MUST_RECOMPUTE and (
            ordered or collective or wanted(op if node.tag is None else node)
        ):
            found.append(position)
    return found


REPLAY = Policy("replay", replayed, replayed)
"""Save what is marked as saved by a first partition, and nothing else that can be recomputed."""

_NAMED = {
    "none": Policy("none"),
    "full": Policy("full", checkpoint, run=Run.WHOLE),
    "full_early": Policy("full_early", checkpoint, run=Run.EARLY),
    "attention": Policy("attention", outside_attention, outside_attention, parts=core_attention),
    "matmuls": Policy("matmuls", matmuls),
    "min_cut": Policy("min_cut", min_cut, min_cut),
}
