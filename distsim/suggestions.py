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


_WHOLE = 3
"""Letters from which on a name that others have whole stands for these."""


def near_names(name: object, known: Iterable[str]) -> list[str]:
    """Return up to three known names that are near, the nearest first; letters of either case are alike.

    Near are those of which a third of the letters at most is otherwise, and those of which one is a part of
    the other.

    >>> near_names("Megatron", ["plain", "megatron"]), near_names("a100", ["a10", "dgx-a100"])
    (['megatron'], ['dgx-a100'])
    >>> near_names("tokens", ["kernels"])
    []
    """
    if not isinstance(name, str):
        return []
    lower, asked = {each.lower(): each for each in known}, name.lower()[:100]
    close = [each for each in get_close_matches(asked, lower, 9, 0.6) if _is_near(asked, each)]
    alike = {each: SequenceMatcher(None, each, asked).ratio() for each in close}
    # What has all of it is nearer than what has some of it: dgx-a100 than a10, of a100.
    alike |= {each: 1 + len(asked) / len(each) for each in lower if len(asked) >= _WHOLE and asked in each}
    best = max(alike.values(), default=0.0)
    near = sorted([each for each in alike if alike[each] > 0.85 * best], key=lambda each: -alike[each])
    return [lower[each] for each in near[:3]]


def _is_near(asked: str, known: str) -> bool:
    short, long = sorted((asked, known), key=len)
    return short in long or slips(asked, known) <= max(1, len(long) // 3)


def slips(asked: str, known: str) -> int:
    """Return how many letters are to be put in, left out, exchanged or swapped to make one name the other.

    The distance of optimal string alignment (Damerau 1964).

    >>> slips("adma", "adam"), slips("tokens", "kernels")
    (1, 5)
    """
    rows = [list(range(len(known) + 1))]
    for place, letter in enumerate(asked, 1):
        row = [place]
        for other, there in enumerate(known, 1):
            least = min(row[-1] + 1, rows[-1][other] + 1, rows[-1][other - 1] + (letter != there))
            if place > 1 and other > 1 and letter == known[other - 2] and there == asked[place - 2]:
                least = min(least, rows[-2][other - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]
