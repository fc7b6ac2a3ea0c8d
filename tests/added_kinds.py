"""Kinds of actions that distsim has in one process: for scripts that add some before they import it.

Kinds that distsim has besides those of torch are left out there: what is added may have their letters.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

ACTION = "distsim.schedule.action"


class AddedLines(SourceFileLoader):
    """Loads the file of kinds with others, and ways, in the place of those that torch does not have."""

    kinds = ""
    ways: tuple[str, ...] = ()

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        source, last = re.subn(
            r"(    BACKWARD_WEIGHT = [^\n]*\n).*?(\n    _value_: str\n)",
            lambda found: f"{found[1]}{self.kinds}\n{found[2]}",
            source,
            flags=re.DOTALL,
        )
        source, known = re.subn(r"^WAYS = (\([^)]*\))", self._ways, source, flags=re.MULTILINE)
        assert last == known == 1
        return compile(source, self.path, "exec", dont_inherit=True)

    def _ways(self, found: re.Match[str]) -> str:
        """Return the ways that are added ahead of those that are there, whose order tells nothing."""
        there = [way for way in ast.literal_eval(found[1]) if {*way} <= {*"FBIW"}]
        return f"WAYS = {(*self.ways, *[way for way in there if way not in self.ways])}"


class AddedKinds:
    """Finds the file of kinds."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != ACTION:
            return None
        sys.meta_path.remove(AddedKinds)
        found = importlib.util.find_spec(name)
        origin = str(found.origin)
        return importlib.util.spec_from_file_location(name, origin, loader=AddedLines(name, origin))


def add_kinds(kinds: str, ways: Sequence[str], folder: Path) -> None:
    """Have this process, which has not imported distsim yet, know more kinds, made of what is in a folder."""
    AddedLines.kinds, AddedLines.ways = kinds, tuple(ways)
    sys.meta_path.insert(0, AddedKinds)
    importlib.import_module("distsim.program.passes").__path__.insert(0, str(folder))
