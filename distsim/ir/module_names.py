"""Modules of the model that ops come from, by their names as exporters write them: ``layers.3.attention/q``.

What precedes the last slash is the module; a Call is named like one itself. Transforms hand names on. What
one adds for an op, its gradients, a cast of what it reads, the collectives that move it, has the module of
that op: ``layers.3.attention/added``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from distsim.cache import cached
from distsim.ir.function import Op

_ADDED = "/added"


def module_of(op: Op) -> str:
    """Return the module that an op comes from, or that a Call is, without numbers; "" if its name says none.

    Layers that are alike have one module so. A Call that is named like an action, ``F3@1``, is none.

    >>> module_of(Op("Add", (), (), name="model.layers.3.attention/q"))
    'model.layers.attention'
    >>> module_of(Op("Add", (), (), name="/h.0/mlp/Add_1")), module_of(Op("Call", (), (), name="h3"))
    ('h.mlp', 'h')
    """
    return _without_numbers(op.name if op.is_call and "@" not in op.name else op.name.rpartition("/")[0])


def layer_of(op: Op, added: bool = False) -> str:
    """Return the layer that an op comes from: its name up to the first number; "" if its name says none.

    An op that a transform added comes from none, unless these count (``added``); Calls do.

    >>> layer_of(Op("Add", (), (), name="model.layers.3.attention/q")), layer_of(Op("Add", (), ()))
    ('model.layers.3', '')
    """
    if is_added(op) and not added:
        return ""
    found = re.match(r"\D*\d+(?=[./]|$)", op.name if op.is_call else op.name.rpartition("/")[0])
    return found[0] if found else ""


@cached("modules without numbers, by path", 65536)
def _without_numbers(path: str) -> str:
    parts = [re.sub(r"[_\d]+$", "", part) for part in re.split(r"[./]", path)]
    return ".".join([part for part in parts if part])


def added_name(op: Op) -> str:
    """Return the name of what a transform adds for an op: of its module, "" if it has none.

    >>> added_name(Op("Add", (), (), name="layers.3.attention/q"))
    'layers.3.attention/added'
    """
    module = op.name if op.is_call else op.name.rpartition("/")[0]
    return module + _ADDED if module else ""


def is_added(op: Op) -> bool:
    """Whether :func:`added_name` named an op."""
    return op.name.endswith(_ADDED)


def joined_name(names: Iterable[str]) -> str:
    """Return the name of ops that run as one: the first there is, of what a transform added the last.

    >>> joined_name(["", "head/added", "norm/y", "head/z"])
    'norm/y'
    """
    named = [name for name in names if name]
    return next((name for name in named if not name.endswith(_ADDED)), named[0] if named else "")


def shared_name(op: Op) -> str:
    """Return the name of an op where layers that are alike share it: of its module alone."""
    module = module_of(op)
    if op.is_call or not module:
        return module
    return module + _ADDED if is_added(op) else f"{module}/"
