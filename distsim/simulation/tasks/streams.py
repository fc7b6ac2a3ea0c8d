"""Streams, which run tasks in order, and the rank classes that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distsim.ir import Op
from distsim.simulation.tasks.rank_classes import Classes, ClassExchange, Group, Placement


@dataclass(frozen=True, slots=True)
class Stream:
    """What runs one task after the other, in order: one lane of one rank class.

    ``name`` is ``compute``, ``host`` (which issues kernels), ``collective <axis>``, ``transfer`` (between one
    device and a mesh), ``offload`` and ``fetch`` (to and from the host), ``send <class>``, ``receive
    <class>`` (further channels: ``send <class>.<channel>``). When nothing overlaps all but the host's is one,
    ``all``.
    """

    rank_class: int
    name: str


class MemoryRanks(Protocol):
    """Rank classes, as far as memory asks for them."""

    @property
    def members(self) -> Sequence[Group]:
        """The devices of each class."""
        ...

    def at(self, placement: Placement, /) -> Classes:
        """Return the classes that a placement consists of."""
        ...


class Ranks(MemoryRanks, Protocol):
    """The rank classes on which ops are placed; :class:`RankClasses` is one."""

    def exchanges(self, op: Op, /) -> Sequence[ClassExchange]:
        """Return the exchanges of a communication op."""
        ...
