"""What the names of a model stand for while it is evaluated."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from distsim.errors import ImportModelError
from distsim.importer.values.operands import Entry
from distsim.importer.values.sequences import Pieces


@dataclass
class Scope:
    """The names of one graph or one call of a local function."""

    nodes: Sequence[Any]
    opsets: Mapping[str, int]
    used: Mapping[str, int]
    entries: ChainMap[str, Entry] = field(default_factory=lambda: ChainMap[str, Entry]())
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    attributes: Mapping[str, Any] | None = None
    sequences: ChainMap[str, Pieces] = field(default_factory=lambda: ChainMap[str, Pieces]())

    def get(self, name: str) -> Entry | None:
        """Return what a name stands for; None for an operand left out."""
        if not name:
            return None
        entry = self.entries.get(name)
        if name in self.sequences:
            raise ImportModelError(f"reads {name!r}, a sequence, of which only SequenceAt takes elements")
        if entry is None:
            later = any(name in node.output for node in self.nodes)
            how = (
                "a later node makes; the nodes form a cycle or are not in order" if later else "nothing makes"
            )
            raise ImportModelError(f"reads {name!r}, which {how}")
        return entry

    def define(self, name: str, entry: Entry) -> None:
        """Give a name its meaning; each name has one."""
        self._check_new(name)
        self.entries[name] = entry

    def define_sequence(self, name: str, pieces: Pieces) -> None:
        """Give the name of a sequence its meaning."""
        self._check_new(name)
        self.sequences[name] = pieces

    def _check_new(self, name: str) -> None:
        if name in self.entries or name in self.sequences:
            raise ImportModelError(f"makes {name!r}, which is already the name of another value")

    def name(self, name: str) -> str:
        """Return what to call a value: as the caller does, or under the prefix of the call."""
        return self.names.get(name) or self.prefix + name


def used_names(nodes: Sequence[Any], outputs: Sequence[str]) -> dict[str, int]:
    """Return the names that nodes read, in their subgraphs too, or that are outputs."""
    found = dict.fromkeys(outputs, 1)
    for node in nodes:
        found.update(dict.fromkeys(node.input, 1))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = [info.name for info in attribute.g.output]
                found.update(used_names(attribute.g.node, inner))
    return found
