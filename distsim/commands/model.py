"""What the commands on a model have in common: its options, reading it, its training step."""

from __future__ import annotations

import argparse

from distsim.errors import PlanError
from distsim.importer import load_model
from distsim.ir import Function
from distsim.ir.type import dtype_named
from distsim.report.progress import Progress
from distsim.streams import say
from distsim.transforms import (
    add_loss,
    describe_blocks,
    differentiate,
    optimizer_named,
    outline,
    set_precision,
)
from distsim.transforms.autodiff.loss import LOSSES
from distsim.transforms.autodiff.optimizers import OPTIMIZERS
from distsim.transforms.kernels.attention import ATTENTIONS, default_attention, set_attention
from distsim.transforms.sharding.roles import brings_backward


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model it is."""
    parser.add_argument(
        "model",
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
    parser.add_argument("--optimizer", help=f"{' or '.join(sorted(OPTIMIZERS))} (default adam)")
    parser.add_argument(
        "--attention",
        help=f"{' or '.join(ATTENTIONS)}: one kernel each, or op by op (default flash for 16 bits and fewer)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        help="what float32 tensors become, e.g. bfloat16: parameters and optimizer state too, without a "
        "float32 copy of either",
    )


def _forward(options: argparse.Namespace) -> Function:
    patterns = tuple(p for text in options.parameters for p in text.split(",") if p)
    dtype = dtype_named(options.dtype)
    if not dtype.is_floating:
        raise PlanError(f"--dtype {options.dtype}: float32 tensors can become a floating-point type only")
    seq = [] if options.seq is None else [f"seq={options.seq}"]
    bindings = ",".join(filter(None, [*options.bind, *seq]))
    function = load_model(options.model, options.batch, bindings, patterns)
    return set_attention(set_precision(function, dtype), options.attention or default_attention(dtype))


def read_model(options: argparse.Namespace, progress: Progress) -> Function:
    """Return the forward pass of the model, outlined if that is asked for."""
    function = progress.run(f"reading {options.model}", lambda: _forward(options))
    if not getattr(options, "outline", False):
        return function
    outlined = progress.run("outlining", lambda: outline(function))
    for line in describe_blocks(outlined).splitlines():
        say(f"# {line}")
    return outlined


def training_step(options: argparse.Namespace, progress: Progress) -> Function:
    """Return the training step of the model."""
    optimizer = optimizer_named(options.optimizer or "adam")
    loss = options.loss or "auto"
    if loss not in LOSSES:
        raise PlanError(f"loss {loss!r} is not one of {', '.join(LOSSES)}")
    function = read_model(options, progress)
    if brings_backward(function):
        if options.loss or options.optimizer or options.keep:
            raise PlanError(f"{function.name} brings its own backward pass: no --loss, --optimizer, --keep")
        return function
    keep = options.keep or ()
    return progress.run(
        "differentiating", lambda: differentiate(add_loss(function, loss, keep), optimizer, keep)
    )
