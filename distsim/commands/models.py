"""The command ``distsim models``: the models that have a name, with their parameters."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from distsim.commands.options.json_output import PRINTED, add_json, check_json, write_json
from distsim.console.terminal import for_terminal, say
from distsim.errors import ImportModelError
from distsim.importer.decoders import decoder_sizes, model_names
from distsim.models.decoder import ParameterCount, count_parameters
from distsim.models.decoder_sizes import DecoderSizes
from distsim.simulation.explain.text import table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model",
        nargs="*",
        help="a name or a Hugging Face config.json, with options (llama3-8b:layers=4); by default all names",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the models."""
    check_json(options.json)
    names: list[str] = options.model or list(model_names())
    counts = {name: count_parameters(_sizes(name)) for name in names}
    if options.json:
        write_json(options.json, [{"name": name, **asdict(count)} for name, count in counts.items()])
    if options.json != PRINTED:
        say(for_terminal(_table(counts)))
    return 0


def _sizes(name: str) -> DecoderSizes:
    """Return the sizes of a model; an option that is none of them would have no effect here."""
    sizes, given = decoder_sizes(name)
    if given:
        raise ImportModelError(f"{name}: parameters do not depend on {', '.join(given)}; leave it out")
    return sizes


def _table(counts: dict[str, ParameterCount]) -> str:
    rows = [[name, *(f"{n:,}" for n in asdict(count).values())] for name, count in counts.items()]
    return "\n".join(table(["name", "params", "active_params", "embedding_params"], rows))
