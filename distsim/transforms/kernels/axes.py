"""Axes followed through ops that only rearrange: which dimension of one value is which of another.

An *atom* is a dimension, or a factor of one; a dimension of size 1 has none. Reshaping [batch * heads, ...]
to [batch, heads, ...] splits an atom into two, for every value that has it: dimensions are resolved into the
least atoms (:meth:`Atoms.leaves`) when all is followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from distsim.ir import Op
from distsim.ops.places import shape_of

Dims = tuple[tuple[int, ...], ...]
"""For each dimension of a value its atoms, the slowest first."""

Step = tuple[str, tuple[int, ...]]
"""An op: ("Reshape", shape) or ("Transpose", permutation)."""

_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
"""The numbers and their order stay."""


class Atoms:
    """The atoms of some values, each with a size of at least 2."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def fresh(self, shape: Sequence[int]) -> Dims:
        """Return an atom of its own for each dimension."""
        return tuple([() if size == 1 else (self._new(size),) for size in shape])

    def leaves(self, atoms: Iterable[int]) -> tuple[int, ...]:
        """Return the atoms in their least parts, in order."""
        found: list[int] = []
        for atom in atoms:
            found += self.leaves(self._parts[atom]) if atom in self._parts else [atom]
        return tuple(found)

    def size(self, atoms: Iterable[int]) -> int:
        """Return how many elements the atoms have together."""
        return math.prod([self._sizes[atom] for atom in atoms])

    def regrouped(self, dims: Dims, shape: Sequence[int]) -> Dims | None:
        """Return the dimensions of the same numbers in the same order under another shape.

        None where the sizes of one are not those of the other, in part or together.
        """
        rest = list(self.leaves(atom for dim in dims for atom in dim))
        made: list[tuple[int, ...]] = []
        for size in shape:
            dim: list[int] = []
            while size > 1 and rest:
                atom = rest.pop(0)
                if self._sizes[atom] > size:
                    if self._sizes[atom] % size:
                        return None
                    self._parts[atom] = self._new(size), self._new(self._sizes[atom] // size)
                    atom, after = self._parts[atom]
                    rest.insert(0, after)
                if size % self._sizes[atom]:
                    return None
                size //= self._sizes[atom]
                dim.append(atom)
            if size != 1:
                return None
            made.append(tuple(dim))
        return None if rest else tuple(made)

    def before(self, op: Op, dims: Dims) -> Dims | None:
        """Return the dimensions of the first input of an op that rearranges; None: it does not, or unlike."""
        shape = shape_of(op.inputs[0]) if op.inputs else ()
        if op.op_type in _RESHAPES:
            return self.regrouped(dims, shape)
        if op.op_type == "Transpose":
            perm: tuple[int, ...] = op.attributes.get("perm") or tuple(reversed(range(len(shape))))
            places = {axis: place for place, axis in enumerate(perm)}
            return tuple([dims[places[axis]] for axis in range(len(shape))])
        if op.op_type == "Expand":
            return repeated_from(dims, shape, shape_of(op.outputs[0]))
        return None

    def after(self, op: Op, dims: Dims) -> Dims | None:
        """Return the dimensions of the output of an op that gives its first input another shape."""
        return self.regrouped(dims, shape_of(op.outputs[0])) if op.op_type in _RESHAPES else None

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1


def repeated_from(dims: Dims, shape: Sequence[int], whole: Sequence[int]) -> Dims:
    """Return the dimensions of an operand of ``shape`` that is broadcast to ``whole``, which has ``dims``."""
    lead = len(whole) - len(shape)
    own = zip(shape, whole[lead:], dims[lead:], strict=True)
    return tuple([dim if size == full else () for size, full, dim in own])


def steps_to(atoms: Atoms, source: Dims, target: Dims) -> tuple[Step, ...] | None:
    """Return the ops from dimensions ``source`` to ``target``, both in leaves; None: they have others."""
    old, new = [leaf for dim in source for leaf in dim], [leaf for dim in target for leaf in dim]
    if sorted(old) != sorted(new):
        return None
    shape, wanted = ([atoms.size(dim) for dim in dims] for dims in (source, target))
    if old == new:
        return () if shape == wanted else (("Reshape", tuple(wanted)),)
    if len(source) == len(target) and sorted(source) == sorted(target):
        left = list(range(len(source)))
        perm: list[int] = []
        for dim in target:
            place = next(i for i in left if source[i] == dim)
            left.remove(place)
            perm.append(place)
        return (("Transpose", tuple(perm)),)
    apart = tuple([atoms.size((leaf,)) for leaf in old])
    turned = ("Transpose", tuple([old.index(leaf) for leaf in new]))
    return ("Reshape", apart), turned, ("Reshape", tuple(wanted))
