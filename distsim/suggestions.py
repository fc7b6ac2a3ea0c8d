"""What a name that is not known may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` where known names are near, for the end of an error, or nothing.

    >>> did_you_mean("lama3-8b", ["llama3-8b", "gpt2"]), did_you_mean("x", ["llama3-8b"])
    ('; did you mean llama3-8b?', '')
    """
    near = near_names(name, known)
    if not near:
        return ""
    return f"; did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?"


def choices_for(name: object, known: Iterable[str]) -> str:
    """Return all known names, and which of them one that is not known may be, for the end of an error.

    >>> choices_for("grayy", ["gray", "red"])
    'gray, red; did you mean gray?'
    """
    names = list(known)
    return f"{', '.join(names)}{did_you_mean(name, names)}"


def near_names(name: object, known: Iterable[str]) -> list[str]:
    """Return up to three known names that are near, the nearest first; letters of either case are alike.

    >>> near_names("Megatron", ["plain", "megatron"])
    ['megatron']
    """
    if not isinstance(name, str):
        return []
    lower, asked = {each.lower(): each for each in known}, name.lower()[:100]
    near = get_close_matches(asked, lower, 3, 0.6)
    alike = [SequenceMatcher(None, each, asked).ratio() for each in near]
    return [lower[each] for each, ratio in zip(near, alike, strict=True) if ratio > 0.85 * alike[0]]
