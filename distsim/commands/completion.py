"""The command ``distsim completion``: what makes a shell complete commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from distsim.commands.parser import CommandParser
from distsim.console.terminal import say
from distsim.device_placement.partitioned import HOST_MODES
from distsim.hardware import presets
from distsim.importer import model_names
from distsim.importer.source import BUILDERS, BUNDLED
from distsim.ops.attention_options import ATTENTION_CHOICES
from distsim.plan.stacks import STACKS
from distsim.schedule import SCHEDULES
from distsim.transforms.autodiff.loss import LOSSES
from distsim.transforms.autodiff.optimizers import OPTIMIZERS
from distsim.transforms.autodiff.precision import POLICIES
from distsim.transforms.kernels.policies import KERNELS

SHELLS = ("bash", "zsh", "fish")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> int:
    """Print the script of a shell."""
    words = {name: _Offers(parser) for name, parser in options.parsers().items()}
    say({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](words))
    return 0


def _named() -> Mapping[str, Sequence[str]]:
    """Return the names that options and arguments take, by what these are called."""
    models = [*model_names(), *BUNDLED, *(f"{builder}:" for builder in BUILDERS)]
    return {
        **{"--cluster": presets(), "--base": presets(), "--stack": [*STACKS], "--kernels": [*KERNELS]},
        **{"--precision": [*POLICIES], "--optimizer": [*OPTIMIZERS], "--loss": LOSSES},
        **{"--attention": ATTENTION_CHOICES, "--partition": HOST_MODES},
        **{"clusters name": presets(), "schedule name": [*SCHEDULES]},
        **{f"{command} model": models for command in ("simulate", "search", "show", "models")},
    }


class _Offers:
    """What may follow a command: options, the names that each of them takes, and those of its argument."""

    def __init__(self, parser: CommandParser) -> None:
        named, command = _named(), parser.prog.rpartition(" ")[2]
        self.help = parser.description or ""
        self.options: dict[str, str] = {}
        self.values: dict[str, Sequence[str]] = {}
        self.arguments: Sequence[str] = ()
        for action in parser.actions():
            key = action.option_strings[0] if action.option_strings else f"{command} {action.dest}"
            words = [*map(str, action.choices)] if action.choices else named.get(key, ())
            for text in action.option_strings:
                self.options[text] = " ".join((action.help or "").split()).partition(":")[0]
                if words:
                    self.values[text] = words
            if not action.option_strings:
                self.arguments = words


def _bash(commands: Mapping[str, _Offers]) -> str:
    """Return a function for ``complete``; files are completed where no names are known."""
    cases: list[str] = []
    for name, words in commands.items():
        taken = [(option, " ".join(names)) for option, names in words.values.items()]
        values = [f'            {name}:{option}) words="{names}" ;;' for option, names in taken]
        own = " ".join([*words.options, *words.arguments])
        cases += [*values, f'            {name}:*) words="{own}" ;;']
    return "\n".join(
        [
            "_distsim() {",
            '    local word="${COMP_WORDS[COMP_CWORD]}" words=""',
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f'        words="{" ".join(commands)} --help --version"',
            "    else",
            '        case "${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]}" in',
            *cases,
            "        esac",
            "    fi",
            '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o default -F _distsim distsim",
        ]
    )


def _zsh(commands: Mapping[str, _Offers]) -> str:
    """Return the function of bash, which zsh runs."""
    return f"autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n{_bash(commands)}"


def _fish(commands: Mapping[str, _Offers]) -> str:
    lines = ["complete -c distsim -n __fish_use_subcommand -l version"]
    for name, words in commands.items():
        seen = f"complete -c distsim -n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c distsim -n __fish_use_subcommand -f -a {name} -d {_quoted(words.help)}")
        lines += [f"{seen} -a '{' '.join(words.arguments)}'"] if words.arguments else []
        for option, help_text in words.options.items():
            way = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            taken = f" -x -a '{' '.join(words.values[option])}'" if option in words.values else ""
            lines.append(f"{seen} {way}{taken} -d {_quoted(help_text)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
