"""The file of a framework in the place of options: what it says stands where no option does."""

from __future__ import annotations

import argparse
from pathlib import Path

from distsim.errors import PlanError
from distsim.importer.configs import TrainingConfig, read_deepspeed, read_megatron_args, read_torchtitan

READERS = {"megatron_args": read_megatron_args, "torchtitan": read_torchtitan, "deepspeed": read_deepspeed}


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the file of a framework."""
    group = parser.add_argument_group("what is there already, in the place of options (which go before it)")
    group.add_argument(
        "--megatron-args",
        type=Path,
        metavar="FILE",
        help="Megatron-LM's arguments: a shell script (read, never run), a list of them, YAML or JSON",
    )
    group.add_argument("--torchtitan", type=Path, metavar="TOML", help="a configuration of torchtitan")
    group.add_argument(
        "--deepspeed", type=Path, metavar="JSON", help="a configuration of DeepSpeed, beside a model"
    )


def take_file(options: argparse.Namespace) -> TrainingConfig | None:
    """Read the file that the options name, if they do, and let it say what no option does, but for the
    layout.

    Afterwards ``options.from_file`` is what was read, ``model`` and ``seq`` are set. Raises
    :class:`PlanError`
    for several files, and where neither a file nor an option names a model.
    """
    named = [name for name in READERS if getattr(options, name, None) is not None]
    if len(named) > 1:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in named)
        raise PlanError(f"{both} each say how a model is trained; give one")
    config = READERS[named[0]](getattr(options, named[0])) if named else None
    options.from_file = config
    if options.model is None:
        if config is None or (config.model is None and config.sizes is None):
            why = "" if config is None else f"{config.source} says no model; "
            if config is not None and config.lacks:
                why = f"{config.source}: {config.lacks}; "
            raise PlanError(f"{why}name a model, as in distsim {options.command} llama3-8b")
        options.model = config.model or Path(config.source).name
    elif config is not None:
        options.from_file = config = config.of_model()
    bound = [
        item.strip() for text in (options.model.partition(":")[2], *options.bind) for item in text.split(",")
    ]
    if config is not None and options.seq is None and not any(item.startswith("seq=") for item in bound):
        options.seq = config.seq
    return config


def take_layout(options: argparse.Namespace, devices: int) -> list[str]:
    """Let the file say the plan and the batch on so many devices where no option does; return notes."""
    config: TrainingConfig | None = options.from_file
    if config is None:
        return []
    options.plan, options.batch = config.laid_out(devices, options.plan or "", options.batch)
    notes = config.describe()
    if config.devices is not None and config.devices != devices:
        notes.append(f"{config.source}: started on {config.devices} GPUs there, on {devices} devices here")
    return notes
