"""How much of what was made of a model a search keeps: once it takes too much, all of it is made anew."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

from distsim.cache import forget
from distsim.ir import Function

MOST_BLOCKS = 16_000_000
"""How many blocks of CPython's allocator a process may take for what it keeps of plans: 1.4 GB, some 45 plans
of a GPT of 96 layers."""


class MemoryLimit:
    """Forgets what caches keep of functions when the process has taken so many blocks since it began."""

    def __init__(self, blocks: int = MOST_BLOCKS) -> None:
        self.blocks = blocks
        self._begin = sys.getallocatedblocks()

    def exceeded(self) -> bool:
        """Whether more is kept than may be."""
        return sys.getallocatedblocks() - self._begin > self.blocks

    def forget(self, functions: Iterable[Function]) -> None:
        """Forget what is kept of functions."""
        for function in functions:
            forget(function)
        gc.collect()
        self._begin = max(self._begin, sys.getallocatedblocks())  # what stays is no reason to forget again
