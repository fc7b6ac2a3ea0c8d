"""The joint graph: values of a forward and a backward pass, with what decides saving or recomputing them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cached_property

from distsim.errors import RematerializationError


class Tag(Enum):
    """What a user asks of a value, weakest first: the names of PyTorch's ``CheckpointPolicy``.

    >>> [tag.name for tag in Tag]
    ['PREFER_SAVE', 'PREFER_RECOMPUTE', 'MUST_SAVE', 'MUST_RECOMPUTE']
    """

    PREFER_SAVE = 1
    PREFER_RECOMPUTE = 2
    MUST_SAVE = 3
    MUST_RECOMPUTE = 4


class NodeKind(Enum):
    """What a value is: only tensors weigh, a tuple is never saved, sizes and opaque values cost nothing."""

    TENSOR = "tensor"
    TUPLE = "tuple"
    SIZE = "symbolic size"
    OPAQUE = "opaque"


class NodeRole(Enum):
    """Where a value comes from; ``SEED`` is the state of the random numbers of the forward pass."""

    OP = "op"
    PRIMAL = "primal"
    SEED = "seed"
    TANGENT = "tangent"
    CONSTANT = "constant"


class Phase(Enum):
    """The pass that an op was recorded in; ``MUST_`` pins an op with side effects to it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    MUST_FORWARD = "must be in forward"
    MUST_BACKWARD = "must be in backward"


class Trait(Flag):
    """What the rules that ban recomputation ask of an op."""

    NONE = 0
    VIEW = auto()
    """Free to recompute: the result lies in its input's memory."""
    ALIAS = auto()
    """The result lies in its input's memory, but the rules for views do not apply."""
    FUSIBLE = auto()
    """Runs in one kernel with a fusible producer or consumer."""
    ALLOWED = auto()
    """Cheap enough to recompute: in the allow-list."""
    COMPUTE_INTENSIVE = auto()
    RANDOM = auto()
    COLLECTIVE = auto()
    WAIT = auto()
    """The wait for a collective; a collective, too."""
    CONCATENATION = auto()
    """Any producer is written straight into the result."""
    FREE = auto()
    """Not a cost in the cut: a parameter, in memory anyway."""
    IMPURE = auto()
    """Has side effects: never removed, never recomputed."""
    KEPT = auto()
    """Survives the removal of dead ops though nothing reads it, as a random op does."""
    COPYABLE = auto()
    """Copying a constant into the graph: never banned."""


EVERY_OUTPUT: tuple[int, ...] = (-1,)
"""The replay tag of a value whose outputs are all to be saved."""


@dataclass(frozen=True)
class JointNode:
    """One value of a joint graph.

    ``inputs`` are positions of earlier nodes; ``nbytes`` is 0 for a tuple whose elements (nodes with
    ``item``, the index) carry the bytes. ``seconds`` is what recomputing the op costs (any unit, as long
    as it is one). ``replay`` is None, :data:`EVERY_OUTPUT` or the indices of the outputs to save again.
    ``region`` is the activation checkpointing region. ``key`` is what the op is besides its inputs
    (operator, attributes): equal keys and inputs mean equal values; None is equal to nothing.
    ``read_bytes`` are the bytes of the inputs that make a reduction, None for those of all inputs.
    ``op`` is the type of the op, where it is one of this house's.

    >>> JointNode("y", inputs=(0,), nbytes=16).role
    <NodeRole.OP: 'op'>
    """

    name: str
    inputs: tuple[int, ...] = ()
    nbytes: int = 0
    role: NodeRole = NodeRole.OP
    kind: NodeKind = NodeKind.TENSOR
    phase: Phase | None = None
    tag: Tag | None = None
    replay: tuple[int, ...] | None = None
    region: int | None = None
    item: int | None = None
    seconds: float = 1.0
    traits: Trait = Trait.NONE
    key: Hashable = None
    read_bytes: int | None = None
    op: str = ""

    def has(self, trait: Trait) -> bool:
        """Tell whether any of the traits is this op's."""
        return bool(self.traits & trait)

    @property
    def wants_recompute(self) -> bool:
        """Whether the user asks for recomputation, be it a wish or an order."""
        return self.tag in (Tag.MUST_RECOMPUTE, Tag.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class JointGraph:
    """A forward and a backward pass as one graph, nodes in topological order.

    ``outputs`` are positions of nodes (None for a gradient that there is none of), those of the forward
    pass first. Raises :class:`RematerializationError` for a node that reads a later one, an item of no
    tuple, an unknown output, or two nodes of one name.

    >>> x = JointNode("x", role=NodeRole.PRIMAL, nbytes=4)
    >>> dy = JointNode("dy", role=NodeRole.TANGENT, nbytes=4)
    >>> nodes = (x, dy, JointNode("y", (0,), 4), JointNode("dx", (1, 2), 4))
    >>> JointGraph(nodes, outputs=(2, 3), num_forward_outputs=1).users[2]
    (3,)
    """

    nodes: tuple[JointNode, ...]
    outputs: tuple[int | None, ...]
    num_forward_outputs: int

    def __post_init__(self) -> None:
        names: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            if names.setdefault(node.name, position) != position:
                raise RematerializationError(
                    f"two nodes of the joint graph are named {node.name}; rename one"
                )
            wrong = [each for each in node.inputs if not 0 <= each < position]
            if wrong:
                raise RematerializationError(
                    f"{node.name} is node {position} and reads node {wrong[0]}; it reads earlier ones only"
                )
            if node.item is not None and [self.nodes[each].kind for each in node.inputs] != [NodeKind.TUPLE]:
                raise RematerializationError(f"{node.name} is an item of something that is no tuple")
        for position in self.outputs:
            if position is not None and not 0 <= position < len(self.nodes):
                raise RematerializationError(
                    f"output {position} is none of the {len(self.nodes)} nodes of the joint graph"
                )
        if not 0 <= self.num_forward_outputs <= len(self.outputs):
            raise RematerializationError(
                f"{self.num_forward_outputs} forward outputs of {len(self.outputs)} outputs in all"
            )

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes that read it, in order, each once."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for position, node in enumerate(self.nodes):
            for each in dict.fromkeys(node.inputs):
                users[each].append(position)
        return tuple(map(tuple, users))

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each node by its name."""
        return {node.name: position for position, node in enumerate(self.nodes)}

    @property
    def forward_outputs(self) -> tuple[int | None, ...]:
        """The outputs of the forward pass."""
        return self.outputs[: self.num_forward_outputs]

    @property
    def backward_outputs(self) -> tuple[int | None, ...]:
        """The outputs of the backward pass: gradients."""
        return self.outputs[self.num_forward_outputs :]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each node; a tuple weighs what its items that are read weigh."""
        sizes = [node.nbytes for node in self.nodes]
        for node in self.nodes:
            if node.item is not None and not self.nodes[node.inputs[0]].nbytes:
                sizes[node.inputs[0]] += node.nbytes
        return tuple(sizes)

    @cached_property
    def storages(self) -> tuple[int | None, ...]:
        """For each node the node whose memory it lies in (views lie in their input's), None for no tensor."""
        storages: list[int | None] = []
        for position, node in enumerate(self.nodes):
            source: int | None = position
            if node.item is not None:
                parent = self.nodes[node.inputs[0]]
                if parent.inputs and parent.has(Trait.VIEW | Trait.ALIAS):
                    source = storages[parent.inputs[0]]
            elif node.kind is not NodeKind.TENSOR:
                source = None
            elif node.inputs and node.has(Trait.VIEW | Trait.ALIAS):
                source = storages[node.inputs[0]]
            storages.append(source)
        return tuple(storages)

    def ancestors(self, of: Iterable[int | None], stop: Iterable[int] = ()) -> set[int]:
        """Return the nodes that ``of`` follow from and ``of``; those in ``stop`` are not entered."""
        found: set[int] = set()
        blocked = set(stop)
        stack = [each for each in of if each is not None]
        while stack:
            position = stack.pop()
            if position not in found:
                found.add(position)
                if position not in blocked:
                    stack += self.nodes[position].inputs
        return found


@dataclass(frozen=True)
class Saves:
    """What a partitioner decided about ``graph`` (the one given, its tags perhaps made plainer).

    ``saved`` are the values that go from forward to backward, each once: tensors, then opaque values, then
    sizes, in the graph's order (sizes that stand for a tensor in the order of the tensors). ``recomputed``
    are the forward ops that run in backward again, in the graph's order; ``forward`` and ``backward`` are
    the ops of the two passes in the order to run them.
    """

    graph: JointGraph
    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the saved values."""
        return tuple(self.graph.nodes[each].name for each in self.saved)

    @property
    def nbytes(self) -> int:
        """Bytes held from forward to backward, parameters included."""
        return sum(self.graph.sizes[each] for each in self.saved)

    @property
    def seconds(self) -> float:
        """What the recomputation costs, in the unit of the nodes."""
        return sum(self.graph.nodes[each].seconds for each in self.recomputed)
