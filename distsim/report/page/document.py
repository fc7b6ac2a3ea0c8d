"""The page as a file: what it shows as JSON beside the styles and scripts that show it.

Whatever a name or a text contains, it is data: it stands in the page as JSON in which no ``<`` is left, and
scripts put it there as text. A policy in the page's head lets nothing run but its own script, by its digest,
and nothing be fetched.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from distsim.report.figures import StepFigures
from distsim.report.output import finite, replacing
from distsim.report.page.sources import NamedCluster, accuracy_part, assumptions_part
from distsim.report.page.step import step_part
from distsim.simulation import Simulation

SCRIPTS = ("elements", "tables", "plans", "memory", "timeline", "page")
"""The parts of the script, each of which uses those before it."""


@dataclass(frozen=True, eq=False)
class PageCase:
    """What a page shows of one cluster: a step that was simulated, the plans of a search, or both.

    ``about`` says what it is, a text for each name; ``plans`` is what
    :func:`distsim.plan_search.views.page.plans_part` returns; ``step`` is None where no plan fits.
    """

    name: str
    about: Mapping[str, str]
    cluster: NamedCluster
    step: tuple[Simulation, StepFigures] | None
    notes: Sequence[str] = ()
    plans: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as what JSON has."""
        return {
            "name": self.name,
            "about": dict(self.about),
            "step": None if self.step is None else step_part(*self.step),
            "plans": self.plans,
            "notes": list(self.notes),
            "assumptions": assumptions_part(self.cluster),
            "accuracy": None if self.step is None else accuracy_part(self.cluster, self.step[0]),
        }


def write_page(
    path: str | os.PathLike[str],
    title: str,
    cases: Sequence[PageCase],
    clusters: Mapping[str, Any] | None = None,
) -> None:
    """Write a page of one or more cases; raise :class:`SimulationError` for a path that cannot be one.

    ``clusters``, of several cases or of what a training takes, is what
    :func:`distsim.plan_search.views.page.clusters_part` returns.
    """
    shown = [case.to_dict() for case in cases]
    text = page_text({"title": title, "cases": shown, "clusters": clusters})
    with replacing(path) as file:
        file.write(text.encode())


def page_text(document: Mapping[str, Any]) -> str:
    """Return the HTML that shows a document: what JSON has, with a ``title``."""
    style = _asset("page.css")
    script = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    parts = {
        "title": escape(str(document["title"])),
        "policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}",
        "style": style,
        "data": embedded(document),
        "script": script,
    }
    page = _asset("page.html")
    before, *places = page.split("{{")
    return before + "".join(parts[name] + rest for name, rest in (p.split("}}", 1) for p in places))


def embedded(document: object) -> str:
    """Return JSON that may stand in a script element; infinite numbers and those that are none are null.

    >>> embedded({"</script>": float("inf")})
    '{"\\\\u003c/script\\\\u003e":null}'
    """
    text = json.dumps(finite(document), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _asset(name: str) -> str:
    return files("distsim.report.page").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
