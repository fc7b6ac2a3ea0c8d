"""How integers code the actions of a schedule: by microbatch, stage and kind.

The code of an action is ``code_of(microbatch * stages + stage, kind)``. Bit operations, of numbers, of NumPy
arrays, and in compiled loops. -1 is no action: its kind is :data:`NO_KIND`, of which there is none, and its
number is -1.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from distsim.compile import anywhere

Code = TypeVar("Code", int, npt.NDArray[np.int64])

BITS = 4
"""How many bits of a code tell its kind: all else that depends on it is derived from here."""
CODES = 1 << BITS
"""How many codes there are to a number."""
NO_KIND = CODES - 1
"""The kind of -1: what is left for no action, so that a table by kind may have a line for it."""


@anywhere
def kind_of(code: Code) -> Code:
    """Return the kind that a code tells, as :attr:`Kind.code`.

    >>> kind_of(code_of(5, 2)), number_of(code_of(5, 2)), kind_of(-1) == NO_KIND, number_of(-1)
    (2, 5, True, -1)
    """
    return code & NO_KIND


@anywhere
def number_of(code: Code) -> Code:
    """Return what a code has beside its kind: of what a schedule lists, microbatch * stages + stage."""
    return code >> BITS


@anywhere
def code_of(number: Code, kind: Any) -> Code:
    """Return the code of a number and a kind: with ``stages`` and 0, how far apart microbatches are."""
    return (number << BITS) | kind
