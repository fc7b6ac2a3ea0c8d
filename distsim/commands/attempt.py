"""Exit statuses, and the one place where an error becomes one."""

from __future__ import annotations

from collections.abc import Callable

from distsim.console.terminal import complain
from distsim.errors import DistsimError

BAD_INPUT, OUT_OF_MEMORY = 2, 3
"""Exit statuses."""


def attempt(work: Callable[[], int]) -> int:
    """Return the exit status of some work: what it returns, or ``BAD_INPUT`` after saying why."""
    try:
        return work()
    except MemoryError:
        complain("distsim: not enough memory on this machine for a model of this size")
    except (DistsimError, OSError) as error:  # OSError: a full disk, a name that is too long, no permission
        complain(f"distsim: {error}")
    return BAD_INPUT
