"""What the commands on a model have in common: its options, and how it is trained."""

from __future__ import annotations

import argparse
from typing import Any

from distsim.commands.options.training_file import add_file_options
from distsim.ir.kernel_rates import ATTENTION_KERNELS, GRAPHS
from distsim.plan.stacks import STACKS
from distsim.study.options import ModelOptions, options_of
from distsim.transforms.autodiff.loss import LOSSES
from distsim.transforms.autodiff.optimizers import OPTIMIZERS
from distsim.transforms.autodiff.precision import POLICIES
from distsim.transforms.kernels.policies import KERNELS


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model it is."""
    add_file_options(parser)
    parser.add_argument(
        "model",
        nargs="?",
        help="a name (see `distsim models`) or a Hugging Face config.json, maybe with options as in "
        "llama3-8b:layers=4, an .onnx file, or a builder: mlp:layers=16,width=8192, gpt:..., llama:...",
    )
    parser.add_argument("--batch", type=int, help="global batch: samples per step")
    parser.add_argument("--seq", type=int, help="tokens of a sequence, as --bind seq=TOKENS")
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        help="sizes of symbolic dimensions, seq=128,... (may be repeated)",
    )
    parser.add_argument(
        "--parameters",
        action="append",
        default=[],
        help="patterns of graph inputs that are weights: p_*,... (may be repeated)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        metavar="NAME",
        help="an output to compute that the loss does not need (may be repeated)",
    )
    parser.add_argument("--loss", help=f"the loss to add: {', '.join(LOSSES)} (default auto)")
    parser.add_argument(
        "--stack",
        help=f"whose defaults the options below and remat= have: {', '.join(STACKS)} (default: torch to "
        "train a model with a name or a config.json; plain for what says its types: builders, .onnx files)",
    )
    parser.add_argument(
        "--attention",
        help="math: op by op; flash: one kernel each, the usual one of the device (default for 16 bits), or "
        f"{', '.join(ATTENTION_KERNELS)}",
    )
    parser.add_argument(
        "--kernels",
        help=f"which ops one kernel runs: {', '.join(KERNELS)} (default: the stack's)",
    )
    parser.add_argument(
        "--cuda-graphs",
        choices=("none", *GRAPHS),
        help="what the host launches at once, as a CUDA graph: each layer, forward and backward, or all "
        "passes of a step (default: as the file says, else none: it issues kernels one by one)",
    )
    parser.add_argument(
        "--optimizer",
        help=f"{', '.join(OPTIMIZERS)}, with settings as in adamw:beta2=0.9,mean=bf16 (default: stack's)",
    )
    parser.add_argument(
        "--clip",
        type=float,
        metavar="NORM",
        help="clip gradients to this norm over all (0: not at all, whatever the stack does)",
    )
    parser.add_argument(
        "--precision",
        metavar="POLICY",
        help="the types of weights, gradients and optimizer state (default: the stack's; of plain those in "
        f"which the model is written): {', '.join(POLICIES)}, or the path of a .toml file",
    )


def model_options(options: argparse.Namespace, **given: Any) -> ModelOptions:
    """Return what a command line says of the model and its training; ``given`` is in place of what it says.

    >>> model_options(argparse.Namespace(model="gpt2", batch=8, price=2.0)).batch
    8
    """
    return options_of(ModelOptions, {**vars(options), **given})
