"""The words of a shell script, as the shell's grammar has them; nothing is run.

Words keep their quotes and what is to be expanded; :mod:`.shell` gives them their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from distsim.errors import ModelLimitError

MAX_TOKENS = 200_000
"""Far more than any script that starts a training has."""

_OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", ">>", ">&", "&>", "|&", "(", ")", ";", "&", "|", "<", ">")
_CLOSING = {"(": ")", "{": "}", "`": "`"}


class Token(NamedTuple):
    """A word as it is written, an operator, the end of a line, or the text of a here-document.

    ``kind``: word, operator, here. ``joined``: whether it follows the token before without a blank.
    """

    kind: str
    text: str
    joined: bool = False


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a script; comments are left out.

    Raises :class:`ModelLimitError` for more than ``MAX_TOKENS``.
    """
    found: list[Token] = []
    for token in _tokens(text.replace("\r\n", "\n").replace("\\\n", " ")):
        found.append(token)
        if len(found) > MAX_TOKENS:
            raise ModelLimitError(f"a script of more than {MAX_TOKENS} words; give the arguments alone")
    return found


def _tokens(text: str) -> Iterator[Token]:
    at, end, joined = 0, len(text), False
    delimiters: list[str] = []
    awaits = False  # the delimiter of a here-document
    while at < end:
        here = text[at]
        if here in " \t\r":
            at, joined = at + 1, False
        elif here == "\n":
            yield Token("operator", "\n")
            at, joined = at + 1, False
            while delimiters:
                body, at = _here_document(text, at, delimiters.pop(0))
                yield Token("here", body)
        elif here == "#" and not joined:
            at = text.find("\n", at) if "\n" in text[at:] else end
        elif operator := next((each for each in _OPERATORS if text.startswith(each, at)), None):
            awaits = operator in ("<<", "<<-")
            yield Token("operator", operator, joined)
            at, joined = at + len(operator), True
        else:
            after = word_end(text, at)
            word = text[at:after]
            if awaits:
                delimiters.append(word.strip("'\"\\"))
                awaits = False
            yield Token("word", word, joined)
            at, joined = after, True


def _here_document(text: str, at: int, delimiter: str) -> tuple[str, int]:
    match = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(text, at)
    return (text[at:], len(text)) if match is None else (text[at : match.start()], match.end())


def word_end(text: str, at: int) -> int:
    """Return where the word that begins at a place ends."""
    while at < len(text) and text[at] not in " \t\n;&|<>()":
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"":
            at = quote_end(text, at)
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = group_end(text, at + 1)
        elif text[at] == "`":
            at = group_end(text, at)
        else:
            at += 1
    return min(at, len(text))


def quote_end(text: str, at: int) -> int:
    """Return the place behind the quotes that open at one; the end where they do not close."""
    mark, at = text[at], at + 1
    while at < len(text) and text[at] != mark:
        if mark == '"' and text[at] == "\\":
            at += 2
        elif mark == '"' and text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = group_end(text, at + 1)
        else:
            at += 1
    return at + 1


def group_end(text: str, at: int) -> int:
    """Return the place behind the bracket, brace or backquote that opens at one, others inside it closed."""
    opening, closing = text[at], _CLOSING[text[at]]
    depth, at = 1, at + 1
    while at < len(text) and depth:
        if text[at] == closing:
            depth -= 1
        elif text[at] == opening:
            depth += 1
        at += 2 if text[at] == "\\" else 1
    return at
