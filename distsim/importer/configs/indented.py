"""Tables as YAML writes them, of names, scalars and lists: the part of it that training files use."""

from __future__ import annotations

import re

from distsim.errors import ImportModelError

MAX_LINES, MAX_NESTED = 20_000, 20


def scalar_of(text: str) -> object:
    """Return a word as what it stands for: a number, true, false, nothing, a list in brackets, or text.

    >>> scalar_of("1e-5"), scalar_of("True"), scalar_of("[1, a]"), scalar_of("null")
    (1e-05, True, [1, 'a'], None)
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]") and "[" not in text[1:]:
        return [scalar_of(item) for item in text[1:-1].split(",") if item.strip()]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "none", "~", ""):
        return None
    return number_of(text)


def number_of(text: str) -> object:
    """Return a text as the number that it is, or as it is."""
    if re.fullmatch(r"[+-]?[0-9]{1,30}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(e[+-]?[0-9]{1,3})?", text, re.I | re.A):
        return float(text)
    return text


def read_indented(text: str, origin: str) -> dict[str, object]:
    """Return the table of a text in YAML, in which the last of several values counts.

    Raises :class:`ImportModelError` that names the line.
    """
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise ImportModelError(f"{origin} has more than {MAX_LINES} lines; a training's file is a page")
    whole: dict[str, object] = {}
    stack: list[tuple[int, dict[str, object]]] = [(-1, whole)]
    last: tuple[int, dict[str, object], str] | None = None  # a name that what is indented below belongs to
    before = 0
    for number, line in enumerate(lines, 1):
        plain = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if not plain.strip() or plain.strip() == "---":
            continue
        indent = len(plain) - len(plain.lstrip(" "))
        item = re.match(r"\s*-(?:\s+(.*)|)$", plain)
        if item and last is not None and indent >= last[0]:
            held = last[1][last[2]]
            last[1][last[2]] = [*(held if isinstance(held, list) else []), scalar_of(item[1] or "")]
            continue
        match = re.match(r"\s*(\"[^\"]+\"|'[^']+'|[^\s:][^:]*):(?:\s+(.*)|)$", plain)
        if match is None and indent > before:
            continue  # of a text of several lines
        if match is None:
            raise ImportModelError(f"{origin}: line {number}, {plain.strip()[:60]!r}, is not name: value")
        if last is not None and indent > last[0] and last[1][last[2]] is None:
            inner: dict[str, object] = {}
            last[1][last[2]] = inner
            stack.append((last[0], inner))
        while stack[-1][0] >= indent:
            stack.pop()
        if len(stack) > MAX_NESTED:
            raise ImportModelError(f"{origin}: line {number} is nested more than {MAX_NESTED} deep")
        name = match[1].strip("\"'")
        table = stack[-1][1]
        before = indent
        table[name] = scalar_of(match[2] or "")
        last = (indent, table, name) if match[2] is None or not match[2].strip() else None
    return whole
