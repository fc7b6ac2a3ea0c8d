"""The parser of the command line: what it does not know may have been meant to be something else."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from distsim.suggestions import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors say which command, option or value is near one that there is not."""

    _given: Sequence[str] = ()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            said = f"{value!r} is not one of {', '.join(known)}{did_you_mean(value, known)}"
            raise argparse.ArgumentError(action, said)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does."""
        self._given = tuple(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with what is wrong, and where all options stand: a page of usage would hide it.

        What is required may have been given as an option that there is not, which is said then.
        """
        if message.startswith("the following arguments are required"):
            near = [text.partition("=")[0] for text in self._given if text.startswith("--")]
            known = list(self.option_names())
            wrong = [name for name in near if not any(each.startswith(name) for each in known)]
            message += f"; there is no {wrong[0]}{did_you_mean(wrong[0], known)}" if wrong else ""
        self.exit(2, f"usage: {self.prog} ..., see {self.prog} --help\n{self.prog}: error: {message}\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with what is said of arguments that there are not."""
        hint = did_you_mean(unknown[0].partition("=")[0], self.option_names())
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def option_names(self) -> Iterable[str]:
        """Return the options that there are, as they are written."""
        return [text for action in self.actions() for text in action.option_strings]

    def actions(self) -> list[argparse.Action]:
        """Return the options and arguments, in their order."""
        return list(self._actions)
