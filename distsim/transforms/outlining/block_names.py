"""Names for blocks, their Calls and their inputs, from the module paths that an exporter noted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, count

from distsim.ir import Op


class Names:
    """Gives each block a name of its own, none of those that are taken."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def of(self, stretches: Sequence[Sequence[Op]]) -> tuple[str, list[str], str]:
        """Return the callee's name, those of the Calls, and the module of the first stretch ("": none).

        Ops named ``model.h.0.attn/node``, ``model.h.1.attn/node`` make Calls ``model.h.0``, ``model.h.1``
        of a callee ``h``; without such names it is Calls ``block0.0``, ``block0.1`` of ``block0``.
        """
        paths = [_module(ops) for ops in stretches]
        if all(paths) and len({".".join(path) for path in paths}) == len(paths):
            shared = [part for part in _common(paths) if not part.isdigit()]
            if shared:
                name = self._first(chain(shared[-1:], (f"{shared[-1]}.{number}" for number in count(1))))
                return name, [".".join(path) for path in paths], ".".join(paths[0])
        name = self._first(f"block{number}" for number in count())
        return name, [f"{name}.{index}" for index in range(len(stretches))], ""

    def _first(self, names: Iterable[str]) -> str:
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name


def relative(name: str, module: str) -> str:
    """Return an op's name within a module; a name of another module stays as it is.

    >>> relative("model.h.0.attn/node", "model.h.0"), relative("model.h.0/node", "model.h.0")
    ('attn/node', 'node')
    """
    inside = bool(module) and name.startswith((f"{module}.", f"{module}/"))
    return name[len(module) + 1 :] if inside else name


def common_name(one: str, other: str) -> str:
    """Return what two names say alike: what follows the part in which they differ, or that part's stem.

    >>> common_name("h.0.attn.weight", "h.1.attn.weight"), common_name("w0", "w2")
    ('attn.weight', 'w')
    """
    if one == other:
        return one
    left, right = one.split("."), other.split(".")
    if len(left) == len(right):
        places = [i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]]
        if rest := left[places[-1] + 1 :]:
            return ".".join(rest)
    stems = {re.sub(r"[_\d]+$", "", part) for part in (left[-1], right[-1])}
    return stems.pop() if len(stems) == 1 and "" not in stems else "x"


def _module(ops: Sequence[Op]) -> list[str]:
    """Return the innermost module that all named ops belong to."""
    return _common([op.name.rpartition("/")[0].split(".") for op in ops if "/" in op.name])


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
