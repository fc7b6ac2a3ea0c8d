"""What is kept of what was made before: the caches of the library, each with what it keeps, by what key."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Sized
from contextlib import contextmanager
from functools import lru_cache
from typing import Generic, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

Owner = TypeVar("Owner")
Made = TypeVar("Made")
Given = ParamSpec("Given")


_NOTHING = object()


class Cache(Generic[Owner, Made]):
    """Results that belong to an object, their owner, and are forgotten with it; by value of a key within it.

    Owners are held weakly, by identity (a Function, a Topology): a result must not refer to its owner. Of
    each owner the ``size`` results used last are kept. ``what`` says what is kept and by what key.

    >>> class Table: pass
    >>> squares, table = Cache[Table, int]("squares, by table and number", 2), Table()
    >>> [squares.get(table, number, lambda: made) for number, made in ((3, 9), (4, 16), (3, 0), (5, 25))]
    [9, 16, 9, 25]
    >>> len(squares), squares.get(table, 4, lambda: 0)
    (2, 0)
    >>> del table
    >>> len(squares)
    0
    """

    def __init__(self, what: str, size: int) -> None:
        self.what, self.size = what, size
        self._made: WeakKeyDictionary[Owner, OrderedDict[Hashable, Made]] = WeakKeyDictionary()
        _CACHES[what] = self

    def get(self, owner: Owner, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what an owner has under a key, or else what ``make`` returns, which is kept then."""
        kept = self._made.get(owner)
        if kept is None:
            kept = self._made[owner] = OrderedDict()
        found = kept.get(key, _NOTHING)
        if found is not _NOTHING:
            kept.move_to_end(key)
            return cast(Made, found)
        made = kept[key] = make()
        if len(kept) > self.size:
            kept.popitem(last=False)
        return made

    def find(self, owner: Owner, key: Hashable) -> Made | None:
        """Return what an owner has under a key, None if it has nothing."""
        kept = self._made.get(owner)
        return None if kept is None else kept.get(key)

    def forget(self, owner: Owner) -> None:
        """Forget what an owner has."""
        self._made.pop(owner, None)

    def __len__(self) -> int:
        return sum(map(len, self._made.values()))


@contextmanager
def uncollected() -> Generator[None]:
    """Do not look for cycles of garbage while what is kept is made, or in the body of a decorated function.

    What is made for a plan are some ten thousand small objects that stay. CPython looks through the young
    ones each time that 700 more are there, and through all of them each time that there are a quarter more
    (``gc.set_threshold``): of the CPU seconds of a first search that was a quarter. Afterwards all goes on as
    the caller had it.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    if not gc.isenabled():  # within another one, or by the caller's choice
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def fewer_collections() -> Generator[None]:
    """Look for cycles of garbage each 200,000 small objects, not each 700, where many are made that stay.

    That took an eighth of the CPU seconds of a search. Afterwards all goes on as the caller had it.

    >>> with fewer_collections():
    ...     gc.get_threshold()[0] >= 200_000
    True
    """
    before = gc.get_threshold()
    if before[0]:  # else the caller has none at all
        gc.set_threshold(max(before[0], 200_000), max(before[1], 20), max(before[2], 20))
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Arguments:
    """How many results :func:`cached` keeps of a function."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count()


def cached(what: str, size: int) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Keep the ``size`` results of a function used last, by the value of its arguments, in compiled code."""

    def decorate(function: Callable[Given, Made]) -> Callable[Given, Made]:
        wrapped = lru_cache(size)(function)
        _CACHES[what] = _Arguments(lambda: wrapped.cache_info().currsize)
        return cast(Callable[Given, Made], wrapped)

    return decorate


_CACHES: dict[str, Sized] = {}


def forget(owner: object) -> None:
    """Forget what any cache keeps of an object, and with it what was made of that."""
    for cache in _CACHES.values():
        if isinstance(cache, Cache):
            cast(Cache[object, object], cache).forget(owner)


def kept() -> dict[str, int]:
    """Return how many results each cache keeps now, by what they are."""
    return {what: len(cache) for what, cache in _CACHES.items()}


MOST_BLOCKS = 16_000_000
"""How many blocks of CPython's allocator a process may take for what it keeps of plans: 1.4 GB, some 45 plans
of a GPT of 96 layers."""


class MemoryLimit:
    """Forgets what caches keep of functions when a process took so many blocks since it began, or forgot.

    Blocks are of Python objects (``sys.getallocatedblocks``), by far the most of what is kept; not of arrays.
    """

    def __init__(self, blocks: int = MOST_BLOCKS) -> None:
        self.blocks = blocks
        self._begin = sys.getallocatedblocks()

    def exceeded(self) -> bool:
        """Whether more is kept than may be."""
        return sys.getallocatedblocks() - self._begin > self.blocks

    def forget(self, functions: Iterable[object]) -> None:
        """Forget what is kept of functions."""
        for function in functions:
            forget(function)
        gc.collect()
        self._begin = max(self._begin, sys.getallocatedblocks())  # what stays is no reason to forget again
