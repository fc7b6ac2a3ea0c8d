"""What a shell script would start: its commands, with variables filled in; nothing is run.

A script is read, not executed: assignments, arrays, ``if`` and ``case`` on what they hold, arithmetic and
here-documents are followed; what a command would print, what the environment holds and what other files say
is empty. Loops are read once.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from distsim.errors import ModelLimitError
from distsim.importer.configs.arithmetic import integer_of
from distsim.importer.configs.shell_words import Token, group_end, quote_end, tokens_of

MAX_CHARACTERS = 2**22
"""Of all words together once variables are filled in: arrays may hold each other."""

MAX_DEPTH = 8
"""Here-documents inside of here-documents."""

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(\[[^\]]*\])?(\+?)=", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9@*#?$!-]", re.ASCII)
_BEFORE = ("export", "local", "readonly", "declare", "typeset", "then", "do", "else", "{", "}", "!", "time")
_REDIRECTIONS = ("<", ">", ">>", ">&", "&>", "<<", "<<-", "<<<")
_QUIET = (
    "echo",
    "printf",
    "mkdir",
    "cd",
    "rm",
    "cp",
    "mv",
    "ls",
    "set",
    "unset",
    "pip",
    "git",
    "wget",
    "apt",
)


@dataclass
class _Branch:
    """An ``if`` or ``case``: whether what stands here is read, and whether some branch was."""

    reads: bool
    taken: bool
    value: str | None = None


@dataclass
class Script:
    """What a script does, as far as it can be told: its commands in order and its variables at the end."""

    commands: list[list[str]] = field(default_factory=list[list[str]])
    variables: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    sourced: list[str] = field(default_factory=list[str])
    _characters: int = 0

    @staticmethod
    def of(text: str) -> Script:
        """Return what a script does; raises :class:`ModelLimitError` for one that grows without bounds."""
        script = Script()
        script.read(text, 0)
        return script

    def read(self, text: str, depth: int) -> None:
        """Read a text, here-documents of which are read like it."""
        if depth > MAX_DEPTH:
            raise ModelLimitError(f"a script with here-documents more than {MAX_DEPTH} deep")
        branches: list[_Branch] = []
        statement: list[Token] = []
        for token in _with_arrays(tokens_of(text)):
            if token.kind == "here":
                if all(branch.reads for branch in branches):
                    self.read(token.text, depth + 1)
            elif token.kind == "operator" and token.text in ("\n", ";", ";;", "&"):
                self._statement(statement, branches)
                statement = []
                if token.text == ";;" and branches:
                    branches[-1].reads = False
            elif _opens_pattern(token, statement, branches):
                self._pattern([each.text for each in statement if each.text != "("], branches[-1])
                statement = []
            else:
                statement.append(token)
        self._statement(statement, branches)

    # --- statements -------------------------------------------------------------------------------------

    def _statement(self, tokens: list[Token], branches: list[_Branch]) -> None:
        while tokens and tokens[0].kind == "word" and tokens[0].text in ("then", "do", "{", "}", "!", "time"):
            tokens = tokens[1:]
        if not tokens:
            return
        first = tokens[0].text if tokens[0].kind == "word" else ""
        active = all(branch.reads for branch in branches)
        outer = all(branch.reads for branch in branches[:-1])
        if first == "if":
            holds = active and self._holds(tokens[1:])
            branches.append(_Branch(holds, holds))
        elif first == "elif" and branches:
            reads = outer and not branches[-1].taken and self._holds(tokens[1:])
            branches[-1] = _Branch(reads, branches[-1].taken or reads)
        elif first == "else" and branches:
            branches[-1] = _Branch(not branches[-1].taken, True)
            self._statement(tokens[1:], branches)
        elif first in ("while", "until"):
            branches.append(_Branch(False, True))
        elif first == "for":
            branches.append(_Branch(True, True))
            if active and len(tokens) > 3 and (words := self._words(tokens[3:])):
                self.variables[tokens[1].text] = words[:1]
        elif first == "case" and len(tokens) > 1:
            branches.append(_Branch(False, False, " ".join(self.expand(tokens[1].text))))
        elif first in ("fi", "esac", "done"):
            if branches:
                branches.pop()
        elif active:
            self._command(tokens)

    def _pattern(self, patterns: Sequence[str], branch: _Branch) -> None:
        if patterns[:1] == ["case"]:
            patterns = patterns[3:]
        plain = [" ".join(self.expand(each)) for each in patterns if each not in ("|", ")")]
        matches = any(fnmatch.fnmatchcase(branch.value or "", each) for each in plain)
        branch.reads = matches and not branch.taken
        branch.taken = branch.taken or branch.reads

    def _command(self, tokens: list[Token]) -> None:
        """Take assignments, and keep the words of commands; pipes and the like separate them."""
        part: list[Token] = []
        redirects = False
        for token in [*tokens, Token("operator", ";")]:
            if token.kind != "operator":
                if not redirects:
                    part.append(token)
                redirects = False
            elif token.text in _REDIRECTIONS:
                redirects = True  # what follows is a file, and a number right before it a descriptor
                if token.joined and part and part[-1].text in ("0", "1", "2"):
                    part.pop()
            else:
                self._simple(part)
                part = []

    def _simple(self, tokens: list[Token]) -> None:
        while tokens and (tokens[0].text in _BEFORE or self._assigns(tokens[0])):
            tokens = tokens[1:]
        if not tokens:
            return
        words = self._words(tokens)
        if words[:1] and words[0] in ("source", "."):
            self.sourced += words[1:2]
        elif words and words[0] not in _QUIET:
            self.commands.append(words)

    def _assigns(self, token: Token) -> bool:
        match = _ASSIGNMENT.match(token.text)
        if match is None:
            return False
        value = token.text[match.end() :]
        words = self._words(tokens_of(value[1:-1])) if token.kind == "array" else [self._joined(value)]
        if not match[3]:
            self.variables[match[1]] = words
        elif token.kind == "array":
            self.variables[match[1]] = [*self.variables.get(match[1], []), *words]
        else:
            before = self.variables.get(match[1]) or [""]
            self.variables[match[1]] = [before[0] + words[0], *before[1:]]
        return True

    def _words(self, tokens: Sequence[Token]) -> list[str]:
        return [word for token in tokens if token.kind == "word" for word in self.expand(token.text)]

    # --- tests ------------------------------------------------------------------------------------------

    def _holds(self, tokens: Sequence[Token]) -> bool:
        """Whether a condition holds: tests of what variables hold; a command and a file are taken to fail."""
        groups: list[list[list[str]]] = [[[]]]
        for token in tokens:
            if token.text == "||":
                groups.append([[]])
            elif token.text == "&&":
                groups[-1].append([])
            elif token.kind == "word":
                groups[-1][-1].append(
                    token.text if token.text in ("[", "]", "[[", "]]", "!") else self._joined(token.text)
                )
            elif token.text in ("<", ">"):
                groups[-1][-1].append(token.text)
        return any(all(_passes(test) for test in group) for group in groups)

    # --- expansion --------------------------------------------------------------------------------------

    def _joined(self, raw: str) -> str:
        return " ".join(self.expand(raw, split=False))

    def expand(self, raw: str, split: bool = True) -> list[str]:
        """Return the words that one as it is written becomes."""
        made = _Words(split)
        at = 0
        while at < len(raw):
            if raw[at] == "\\":
                made.add(raw[at + 1 : at + 2])
                at += 2
            elif raw[at] == "'":
                after = quote_end(raw, at)
                made.add(raw[at + 1 : after - 1])
                at = after
            elif raw[at] == '"':
                after = quote_end(raw, at)
                self._quoted(raw[at + 1 : after - 1], made)
                at = after
            elif raw[at] in "$`":
                values, at = self._value(raw, at)
                made.spread(values)
            else:
                made.add(raw[at])
                at += 1
        words = made.words()
        self._characters += sum(len(word) + 1 for word in words)
        if self._characters > MAX_CHARACTERS:
            raise ModelLimitError(f"a script whose words are more than {MAX_CHARACTERS} characters long")
        return words

    def _quoted(self, text: str, made: _Words) -> None:
        at = 0
        made.add("")
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`"):
                made.add(text[at + 1])
                at += 2
            elif text[at] in "$`":
                values, at = self._value(text, at)
                made.add(values[0] if values else "")
                for value in values[1:]:
                    made.next()
                    made.add(value)
            else:
                made.add(text[at])
                at += 1

    def _value(self, text: str, at: int) -> tuple[list[str], int]:
        """Return the words that a ``$`` or a backquote stands for, and the place behind it."""
        if text[at] == "`":
            return [], group_end(text, at)
        if text.startswith("$((", at):
            after = group_end(text, at + 1)
            number = integer_of(text[at + 3 : after - 2], self._number)
            return [] if number is None else [str(number)], after
        if text.startswith("$(", at):
            return [], group_end(text, at + 1)
        if text.startswith("${", at):
            after = group_end(text, at + 1)
            return self._parameter(text[at + 2 : after - 1]), after
        match = _NAME.match(text, at + 1)
        if match is None:
            return ["$"], at + 1
        return self.variables.get(match[0], [])[:1], match.end()

    def _number(self, name: str) -> str:
        return " ".join(self.variables.get(name, [])[:1])

    def _parameter(self, inside: str) -> list[str]:
        """Return what ``${...}`` stands for."""
        match = re.match(r"(#?)([A-Za-z_0-9]+|[@*])(\[[@*]\]|\[[0-9]+\])?(.*)", inside, re.ASCII | re.DOTALL)
        if match is None:
            return []
        count, name, index, rest = match.groups()
        values = self.variables.get(name, [])
        if count:
            return [str(len(values))]
        if index and index[1] not in "@*":
            place = int(index[1:-1][:6])
            values = values[place : place + 1]
        elif not index:
            values = values[:1]
        empty = not any(values)
        if rest.startswith((":-", "-", ":=", "=")):
            return self.expand(re.sub("^:?[-=]", "", rest), False) if empty else values
        if rest.startswith((":+", "+")):
            return [] if empty else self.expand(rest.lstrip(":")[1:], False)
        if rest in (",,", ","):
            return [value.lower() for value in values]
        return values


class _Words:
    """Words while they are made: what unquoted variables hold is split at blanks."""

    def __init__(self, split: bool) -> None:
        self._split = split
        self._done: list[str] = []
        self._open: list[str] | None = None

    def add(self, text: str) -> None:
        """Add to the word that is open, or open one."""
        self._open = [*(self._open or ()), text]

    def next(self) -> None:
        """End the word that is open."""
        if self._open is not None:
            self._done.append("".join(self._open))
        self._open = None

    def spread(self, values: Sequence[str]) -> None:
        """Add what a variable without quotes holds."""
        parts = [part for value in values for part in (value.split() if self._split else [value])]
        for number, part in enumerate(parts):
            if number:
                self.next()
            self.add(part)

    def words(self) -> list[str]:
        """Return the words."""
        self.next()
        return self._done


def _with_arrays(tokens: Sequence[Token]) -> list[Token]:
    """Return tokens in which an assignment of an array is one, of the kind array."""
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        opens = at + 1 < len(tokens) and tokens[at + 1].text == "(" and tokens[at + 1].joined
        if token.kind == "word" and opens and _ASSIGNMENT.fullmatch(token.text):
            parts: list[str] = []
            at += 2
            while at < len(tokens) and not (tokens[at].kind == "operator" and tokens[at].text == ")"):
                blank = "" if tokens[at].joined else " "
                parts.append(blank + tokens[at].text)
                at += 1
            found.append(Token("array", f"{token.text}({''.join(parts)})"))
        else:
            found.append(token)
        at += 1
    return found


def _opens_pattern(token: Token, statement: Sequence[Token], branches: Sequence[_Branch]) -> bool:
    """Whether a bracket closes the pattern of a ``case``."""
    if token.kind != "operator" or token.text != ")" or not branches or branches[-1].value is None:
        return False
    return bool(statement) and not any(each.text == "(" for each in statement[1:])


def _passes(words: Sequence[str]) -> bool:
    words = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
    if words[:1] == ["!"]:
        return not _passes(words[1:])
    if len(words) == 1:
        return bool(words[0]) and words[0] != "false"
    if len(words) == 2:
        return {"-z": not words[1], "-n": bool(words[1])}.get(words[0], False)
    if len(words) != 3:
        return False
    left, relation, right = words
    if relation in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if relation == "!=":
        return not fnmatch.fnmatchcase(left, right)
    try:
        a, b = int(left[:18]), int(right[:18])
    except ValueError:
        return False
    return {
        **{"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b},
        **{"<": a < b, ">": a > b},
    }.get(relation, False)
