"""How an op may be split over ranks: factors that label dimensions (the notation of XLA's Shardy)."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from distsim.ir.function import Op
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.parts import Groups


@dataclass(frozen=True, slots=True)
class Pieces:
    """A dimension that is several pieces side by side, each of which is sharded by ``factor``.

    The input of a ``Split`` is the example: rank 0 of two holds the first half of *each* piece. With
    :class:`Groups` for sizes the dimension consists of as many groups as ``factor`` has places elsewhere.
    """

    factor: str
    sizes: tuple[int, ...] | Groups


Label = str | Pieces
Dim = Label | tuple[Label, ...] | None
"""The factor of a dimension; None: every rank needs (or makes) the whole dimension.

A dimension that merges several has a label for each that can be divided: [batch, heads] merged into one
is ``("batch", Pieces("heads", (heads,) * batch))``.
"""


def labels_of(dim: Dim) -> tuple[Label, ...]:
    """Return the labels of a dimension."""
    if dim is None:
        return ()
    return dim if isinstance(dim, tuple) else (dim,)


def factors_of(dim: Dim) -> tuple[str, ...]:
    """Return the factors that a dimension is labelled with."""
    return tuple(label.factor if isinstance(label, Pieces) else label for label in labels_of(dim))


def label_of(dim: Dim, factor: str) -> Label | None:
    """Return the label by which a dimension carries ``factor``, if it does."""
    for label in labels_of(dim):
        if (label.factor if isinstance(label, Pieces) else label) == factor:
            return label
    return None


Build = Callable[[FunctionMaker, Op, Sequence[Value], str], Sequence[Value]]
"""(maker, op, its inputs, the axis) -> the outputs of the ops that it adds in the place of that op."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """What an op becomes where an axis divides a factor of it and it does not just run on its part.

    ``build(maker, op, inputs, axis)`` adds the ops and returns the outputs, called as those of ``op``, whose
    attributes are local. ``reduced`` are the bytes of what is all-reduced in it, by the types of the inputs:
    outputs without the factor are whole then, not partial.
    """

    build: Build
    reduced: Callable[[Sequence[Tensor]], Sequence[int]] | None = None


Finish = Callable[[FunctionMaker, Value, str, bool], Value]
"""(maker, what a rank makes of its part, the axis, whether ranks of that have experts, who read the parts of
others) -> what stands for the output on all ranks of the axis."""


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """How an op may be split over ranks, in factors (the notation of XLA's Shardy).

    Each dimension of each input and output is labelled with a factor. When a factor is sharded, so
    is every dimension labelled with it; an output that lacks the factor comes out *partial*: a sum
    over the ranks not yet taken. ``MatMul`` of [m, k] and [k, n] is
    ``ShardingRule((("m", "k"), ("k", "n")), (("m", "n"),))``; sharding k makes the output partial.

    ``linear`` lists sets of inputs in which the op is jointly linear: when exactly the inputs of one
    set are partial and the others are not, the outputs are partial. ``Add`` has ``((0, 1),)``,
    ``Mul`` has ``((0,), (1,))``. Every output must be linear in the set.
    ``mean`` names factors over which the op averages: each rank's result is divided by the number of
    ranks to make it partial. ``addends`` are inputs that are added to the result (the bias of a
    ``Gemm``): where dividing a factor makes the outputs partial, they have to be partial as well.
    ``localize`` rewrites the attributes for the local shapes. ``decompositions`` are by factor. ``whole`` are
    factors that are not divided: they say which dimensions are of the same. ``context``: by kind of context
    parallelism the factor, maybe one of those, that its ranks divide where others divide the sequence.
    ``experts``: the factor, one of those, that ranks of expert parallelism divide; ``rows``: the one that
    they divide, rather than the batch, of an op that takes rows to experts or brings them back. ``finish``,
    by factor: where an axis divides it, outputs without it are what each rank makes of its part, then what
    that returns, and whole.
    """

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    linear: tuple[tuple[int, ...], ...] = ()
    mean: tuple[str, ...] = ()
    addends: tuple[int, ...] = ()
    localize: Callable[[Attributes, tuple[tuple[int, ...], ...]], Attributes] | None = None
    """(attributes, local output shapes) -> local attributes."""
    decompositions: Mapping[str, Decomposition] = field(default_factory=dict[str, Decomposition])
    whole: tuple[str, ...] = ()
    context: Mapping[str, str] = field(default_factory=dict[str, str])
    experts: str = ""
    rows: str = ""
    finish: Mapping[str, Finish] = field(default_factory=dict[str, Finish])


def letters(rank: int, prefix: str = "d") -> tuple[str, ...]:
    """Return ``rank`` distinct factor names."""
    return tuple(f"{prefix}{i}" for i in range(rank))


def letters_but(rank: int, axes: Container[int]) -> tuple[Dim, ...]:
    """Return ``rank`` distinct factor names, None for the dimensions that are whole."""
    return tuple(None if i in axes else name for i, name in enumerate(letters(rank)))
