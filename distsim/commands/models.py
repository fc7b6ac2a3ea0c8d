"""The command ``distsim models``: the models that have a name, with their parameters."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from distsim.commands.attempt import attempt
from distsim.commands.options.json_output import PRINTED, add_json, check_json, write_json
from distsim.console.terminal import for_terminal, say
from distsim.errors import ImportModelError
from distsim.importer.decoders import decoder_sizes, model_names
from distsim.importer.source import BUILDERS, chosen_experts, load_model
from distsim.models.decoder import ParameterCount, count_parameters, count_parameters_of
from distsim.simulation.explain.text import table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model",
        nargs="*",
        help="a name, a Hugging Face config.json or its folder, with options (llama3-8b:layers=4), or a "
        "builder (gpt:layers=2); by default all names",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the models; one that is refused costs no other."""
    check_json(options.json)
    names: list[str] = options.model or list(model_names())
    counts, status = dict[str, ParameterCount](), 0
    for name in names:
        status |= attempt(lambda name=name: _note(counts, name))
    if not counts:
        return status
    if options.json:
        write_json(options.json, [{"name": name, **asdict(count)} for name, count in counts.items()])
    if options.json != PRINTED:
        say(for_terminal(_table(counts)))
    return status


def _note(counts: dict[str, ParameterCount], name: str) -> int:
    counts[name] = _count(name)
    return 0


def _count(name: str) -> ParameterCount:
    """Count the parameters of a model; an option that is no size of it would have no effect here."""
    if name.partition(":")[0] in BUILDERS:
        return count_parameters_of(load_model(name), *chosen_experts(name))
    sizes, given = decoder_sizes(name)
    if given:
        raise ImportModelError(f"{name}: parameters do not depend on {', '.join(given)}; leave it out")
    return count_parameters(sizes)


def _table(counts: dict[str, ParameterCount]) -> str:
    rows = [[name, *(f"{n:,}" for n in asdict(count).values())] for name, count in counts.items()]
    return "\n".join(table(["name", "params", "active_params", "embedding_params"], rows))
