"""The command line: ``distsim simulate``, ``show``, ``schedule``, ``models``, ``clusters``, ``calibrate``,
``validate``, ``search``, ``compare``, ``explain``, ``completion``.
"""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from distsim import __version__
from distsim.commands.attempt import attempt
from distsim.commands.parser import CommandParser

EPILOG = """exit status:
  0 when all is well, 2 for bad input or a file that cannot be written, with the reason, 3 when the step is
  simulated and reported but does not fit in the memory of the devices, 130 for Ctrl-C, 143 for SIGTERM

examples:
  distsim simulate gpt2 --cluster dgx-a100:2 --plan dp=2,tp=4,pp=2,microbatches=8 --batch 64 --seq 1024
  distsim simulate llama3-8b --cluster dgx-h100 --plan tp=8,microbatches=8 --batch 8 --seq 4096
  distsim show gpt:layers=2,hidden=64,heads=4,seq=16,vocab=100 --batch 8 --cluster dgx-a100 --plan tp=2,pp=2

with files of your own:
    distsim simulate --megatron-args train_llama3_8b.sh --cluster dgx-h100:2 --plan tp=4
    distsim simulate --torchtitan llama3_8b.toml --cluster dgx-a100:8 --trace-dir traces --trace-ranks 0,8
    distsim simulate llama3-8b --deepspeed zero3.json --cluster dgx-h100 --batch 64
"""

SCHEDULE_EPILOG = """examples:
  distsim schedule 1f1b --pp 4 --microbatches 8
  distsim schedule interleaved --pp 4 --chunks 2 --microbatches 8 --plot schedule.png --csv schedule.csv
  distsim schedule zb_h1 --pp 8 --microbatches 24 --forward 18.5 --backward-weight 9.3 --send 0.6
  distsim schedule --schedule-csv table.csv
"""

MODELS_EPILOG = """examples:
  distsim models
  distsim models llama3-8b mixtral-8x7b:layers=4 path/config.json --json
"""


CALIBRATE_EPILOG = """examples:
  distsim calibrate kernels.csv all_reduce_perf.txt --base dgx-h100 --out ours.toml
  distsim calibrate trace.json.gz --base dgx-a100 --set device.memory=40GiB --out ours.toml
  distsim simulate llama3-8b --cluster ours.toml:2 --plan tp=8,dp=2,microbatches=8 --batch 16

experiments/measure_machine.py makes the table on a machine with GPUs; distsim/calibration/timings_csv.py has
its columns.
"""

SEARCH_EPILOG = """what a plan leaves open:
  tp          divisors of the devices, up to a node, or --max-tp
  cp          divisors that leave each rank 4,096 tokens of a sequence or more
  pp          divisors, up to the layers of the model; dp: the devices that are left
  ep          divisors of the experts
  microbatch_size  1, 2, 4, ... up to 32,768 tokens a rank, with at least pp microbatches
  zero        0, 1, and 2 and 3 without a pipeline
  sp          on where tp > 1 divides sequences of tokens
  remat       none, full, and what the stack has; attention, unless it is one kernel
  schedule    1f1b; interleaved with 2 or 4 chunks
  others      as `distsim simulate` has them
Plans are discarded without being simulated when their FLOPs, bubble or bytes prove that they are slower than
the best --top, or too large. The exit status is 3 if no plan fits.

examples:
  distsim search llama3-8b --cluster dgx-h100:2 --batch 128 --seq 8192 --stack megatron --workers 2
  distsim search gpt2 --cluster dgx-a100 --batch 64 --plan 'tp=1|2,pp=1,zero=*,remat=*' --csv plans.csv
  distsim search gpt2 --cluster dgx-a100 --batch 64 --against dp=2,tp=4     # and how yours differs
  distsim search llama3-8b --cluster dgx-h100 --gpus 8,16,32 --batch 256 --tokens 1e12 --price 2.5
  distsim search llama3-8b --cluster aws-p4de:4,aws-p5:2 --batch 256 --tokens 1e12 --objective cost
"""

COMPARE_EPILOG = """Each plan is simulated on each cluster. How each other step differs from the first is said
part by part, in seconds that sum to the difference. The exit status is 3 if none fits in memory.

examples:
  distsim compare llama3-8b --cluster dgx-h100:2 --batch 128 --seq 8192 --stack megatron \\
    --plan dp=8,tp=2,microbatches=8,zero=1 --plan dp=8,pp=2,microbatches=16,zero=1
  distsim compare gpt2 --cluster dgx-a100 --cluster dgx-h100 --batch 64 --plan dp=8 --json compared.json
"""

EXPLAIN_EPILOG = """Every what-if is simulated, so it takes about as long as a dozen steps.

example:
  distsim explain gpt2 --cluster dgx-a100:2 --plan dp=2,tp=4,pp=2,microbatches=8 --batch 64 --plot why.png
"""

VALIDATE_EPILOG = """examples:
  distsim validate
  distsim validate measured.csv --csv predictions.csv --plot predictions.png
  distsim validate measured.csv --regret

Each row is laid out by its columns alone: framework, hw_gpu, seq, model or n_layers, two of global_batch,
micro_batch and n_microbatches, n_gpus or dp, and what else it says (docs/accuracy.md). Without a table it is
distsim/truth/published.csv: published steps, each with its source and where that is. Rows that cannot be
expressed are listed; the exit status is 1 if distsim fails on a row.
"""


SHOW_EPILOG = """examples:
  distsim show mlp:layers=2,width=8 --batch 4
  distsim show llama3-8b --training --outline | less
  distsim show gpt:layers=2,hidden=64,heads=4,seq=16,vocab=100 --batch 8 --cluster dgx-a100 --plan tp=2,pp=2
"""

CLUSTERS_EPILOG = """examples:
  distsim clusters
  distsim clusters dgx-h100 --set device.memory=94GiB
  distsim clusters dgx-h100 --toml > ours.toml   # change it, then: distsim simulate ... --cluster ours.toml:4
"""

COMPLETION_EPILOG = """examples:
  eval "$(distsim completion bash)"        # in ~/.bashrc
  eval "$(distsim completion zsh)"         # in ~/.zshrc
  distsim completion fish > ~/.config/fish/completions/distsim.fish
"""


class Command(NamedTuple):
    """What the list of commands says of one; the rest is in its module of :mod:`distsim.commands`."""

    help: str
    epilog: str = ""


COMMANDS = {
    "simulate": Command("simulate one training step", EPILOG),
    "search": Command("find the best plans of a model on a cluster", SEARCH_EPILOG),
    "compare": Command("plans or clusters side by side, and what makes the difference", COMPARE_EPILOG),
    "explain": Command("say what holds a step back, and what would gain how much", EXPLAIN_EPILOG),
    "show": Command("print the function, also after a transform", SHOW_EPILOG),
    "schedule": Command("print and draw a pipeline schedule", SCHEDULE_EPILOG),
    "models": Command("list the models that have a name, or count the parameters of some", MODELS_EPILOG),
    "clusters": Command("list the presets, or the figures of one", CLUSTERS_EPILOG),
    "calibrate": Command("fit a cluster's figures to timings of a machine", CALIBRATE_EPILOG),
    "validate": Command("predict measured steps, and say how true that is", VALIDATE_EPILOG),
    "completion": Command("print what makes a shell complete commands and names", COMPLETION_EPILOG),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (see ``EPILOG``). Why input is refused goes to stderr."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    chosen = given[0] if given else ""
    parser, own = _parser([chosen])
    options, unknown = parser.parse_known_args(given)
    if unknown:
        own.get(chosen, parser).refuse(unknown)
    return attempt(lambda: options.run(options))


def parsers() -> dict[str, CommandParser]:
    """Return the parsers of all commands, by name."""
    return _parser([*COMMANDS])[1]


def _parser(chosen: Sequence[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser and those of its commands; only chosen commands are imported, which takes a while."""
    parser = CommandParser(
        prog="distsim",
        description="How fast a model trains on a cluster, whether it fits, and what holds it back.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distsim {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    own: dict[str, CommandParser] = {}
    for name, command in COMMANDS.items():
        own[name] = commands.add_parser(name, help=command.help, epilog=command.epilog)
        own[name].formatter_class = RawDescriptionHelpFormatter
        own[name].description = f"{command.help[0].upper()}{command.help[1:]}."
        if name in chosen:
            module = import_module(f"distsim.commands.{name}")
            module.add_options(own[name])
            own[name].set_defaults(run=module.run, parsers=parsers)
    return parser, own
