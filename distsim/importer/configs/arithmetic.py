"""Whole numbers from what a file says them as: ``$((8 * NODES))`` of a shell, ``([0]*3+[1]*58)`` of Python.

Both are read by grammars of their own that know numbers and a few signs; nothing is evaluated by Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_TEXT = 2000
MAX_NUMBER = 2**62
MAX_LIST = 10_000
"""Layers of a pattern: as many as a model may have."""


def integer_of(text: str, value: Callable[[str], str]) -> int | None:
    """Return the number of an arithmetic expression in which ``value`` gives that of a name, or None.

    >>> integer_of("(8 * $N + 1) / 3", {"N": "4"}.get)
    11
    """
    if len(text) > MAX_TEXT:
        return None
    tokens = re.findall(r"[0-9]+|\$?\{?[A-Za-z_][A-Za-z_0-9]*\}?|[-+*/%()]|\S", text, re.ASCII)
    reader = _Sum(tokens, value)
    try:
        number = reader.sum(0)
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    return number if not reader.tokens and abs(number) < MAX_NUMBER else None


class _Sum:
    """Reads sums of products of numbers, names and sums in brackets."""

    def __init__(self, tokens: list[str], value: Callable[[str], str]) -> None:
        self.tokens, self._value = tokens, value

    def sum(self, depth: int) -> int:
        total = self._product(depth)
        while self.tokens[:1] in (["+"], ["-"]):
            sign = 1 if self.tokens.pop(0) == "+" else -1
            total += sign * self._product(depth)
        return total

    def _product(self, depth: int) -> int:
        total = self._atom(depth)
        while self.tokens[:1] in (["*"], ["/"], ["%"]):
            sign, other = self.tokens.pop(0), self._atom(depth)
            total = total * other if sign == "*" else total // other if sign == "/" else total % other
            if abs(total) >= MAX_NUMBER:
                raise ValueError
        return total

    def _atom(self, depth: int) -> int:
        token = self.tokens.pop(0)
        if token == "(" and depth < 50:
            total = self.sum(depth + 1)
            if self.tokens.pop(0) != ")":
                raise ValueError
            return total
        if token == "-":
            return -self._atom(depth)
        text = token if token.isdigit() else self._value(token.strip("${}")) or ""
        if not re.fullmatch(r"-?[0-9]{1,18}", text.strip(), re.ASCII):
            raise ValueError
        return int(text)


def flags_of(text: str) -> list[int] | None:
    """Return the list of zeros and ones of an expression as Megatron-LM takes it, or None for anything else.

    >>> flags_of("([0]*2+[1]*3)"), flags_of("[1, 0]*2")
    ([0, 0, 1, 1, 1], [1, 0, 1, 0])
    """
    plain = re.sub(r"[\s()]", "", text[:MAX_TEXT])
    found: list[int] = []
    for part in plain.split("+"):
        match = re.fullmatch(r"(?:([0-9]{1,5})\*)?\[([01](?:,[01])*),?\](?:\*([0-9]{1,5}))?", part, re.ASCII)
        if match is None:
            return None
        times = int(match[1] or match[3] or 1)
        flags = [int(flag) for flag in match[2].split(",")]
        if len(found) + times * len(flags) > MAX_LIST:
            return None
        found += times * flags
    return found
