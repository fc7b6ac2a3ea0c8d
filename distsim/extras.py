"""Packages that distsim does without: imported where they are used, and named with their extra if missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from distsim.errors import MissingExtraError


def extra(module: str, name: str, what: str) -> Any:
    """Return a module of an extra of that name.

    Raises :class:`MissingExtraError` where it is not installed, which says how to install it for ``what``.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise MissingExtraError(f"{what} needs {module}: pip install 'distsim[{name}]'") from None


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return records as a table of pandas; raises :class:`MissingExtraError` without it."""
    return extra("pandas", "pandas", "to_pandas()").DataFrame(list(rows))
