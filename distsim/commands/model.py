"""What the commands on a model have in common: its options, reading it, its training step."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from distsim.commands.files.training_file import add_file_options
from distsim.errors import PlanError
from distsim.importer import load_model
from distsim.importer.configs import TrainingConfig
from distsim.ir import DType, Float32, Function, Tensor
from distsim.ir.dead import brings_backward
from distsim.ir.kernel_rates import ATTENTION_KERNELS
from distsim.plan import Plan
from distsim.report.progress import Progress
from distsim.schedule import TABLE
from distsim.stacks import STACKS, Stack, stack_named
from distsim.streams import say
from distsim.transforms import (
    add_loss,
    describe_blocks,
    differentiate,
    optimizer_named,
    outline,
)
from distsim.transforms.autodiff.loss import LOSSES
from distsim.transforms.autodiff.optimizers import OPTIMIZERS
from distsim.transforms.autodiff.precision import POLICIES, Precision, precision_named
from distsim.transforms.autodiff.set_precision import apply_precision
from distsim.transforms.kernels.attention import default_attention, set_attention
from distsim.transforms.kernels.composites import merge_composites
from distsim.transforms.kernels.policies import KERNELS, Kernels, kernels_named


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
        help=f"whose defaults the options below and remat= have: {', '.join(STACKS)} (default plain)",
    )
    parser.add_argument(
        "--attention",
        help="math: op by op; flash: one kernel each, the usual one of the device (default for 16 bits), or "
        f"{', '.join(ATTENTION_KERNELS)}",
    )
    parser.add_argument(
        "--kernels",
        help=f"which ops one kernel runs: {', '.join(KERNELS)} (default eager)",
    )
    parser.add_argument(
        "--optimizer",
        help=f"{', '.join(OPTIMIZERS)}, with settings as in adamw:beta2=0.95,mean=bf16 (default adam)",
    )
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients to this norm over all")
    parser.add_argument(
        "--precision",
        metavar="POLICY",
        help="the types of weights, gradients and optimizer state (default: as the model is written): "
        f"{', '.join(POLICIES)}, or the path of a .toml file",
    )


@dataclass(frozen=True)
class Choices:
    """How a model is trained: what was asked for, and for the rest what the stack has.

    ``stack`` has what a plan does not say. ``assumed`` lists what was not asked for, as text.
    """

    precision: Precision | None
    attention: str | None
    kernels: Kernels
    optimizer: str
    clip: float | None
    stack: Stack
    assumed: tuple[str, ...]

    @staticmethod
    def of(options: argparse.Namespace) -> Choices:
        """Return the choices of a command line; raise :class:`PlanError` for an unknown one."""
        training: TrainingConfig | None = getattr(options, "from_file", None)
        by_file = training is not None and options.stack is None
        stack = stack_named("plain" if options.stack is None else options.stack)
        if training is not None and options.stack is None:
            stack = training.stack
        assumed: list[str] = []

        def choice(name: str) -> Any:
            given, default = getattr(options, name), getattr(stack, name)
            if given is None and default is not None and not by_file:
                assumed.append(f"{name} {default}")
            return default if given is None else given

        precision = choice("precision")
        return Choices(
            None if precision is None else precision_named(precision),
            choice("attention"),
            kernels_named(choice("kernels")),
            choice("optimizer"),
            choice("clip"),
            stack,
            tuple(assumed),
        )

    def plan(self, text: str) -> Plan:
        """Return the plan of a text; what it leaves open the stack says."""
        plan = Plan.parse(text if "remat=" in text else f"{text},remat={self.stack.remat}")
        sp = {"sp": "on"} if self.stack.sp and plan.tp > 1 and "sp=" not in text else {}
        return self.spread(replace(plan, **sp), [part.partition("=")[0].strip() for part in text.split(",")])

    def spread(self, plan: Plan, given: Collection[str]) -> Plan:
        """Return a plan with what the stack has for several ranks of the data or tp, but for fields given."""
        fields = self.stack.spread_fields(plan.zero) if plan.dp * plan.cp > 1 else {}
        if plan.tp > 1:
            fields |= {"tp_overlap": self.stack.tp_overlap}
        return replace(plan, **{name: own for name, own in fields.items() if name not in given})


def plan_text(options: argparse.Namespace) -> str:
    """Return the text of the plan that is asked for; with a table its schedule is that."""
    asked = getattr(options, "plan", None)
    text: str = "dp=1" if asked is None else asked
    given = getattr(options, "schedule_csv", None) is not None and "schedule=" not in text
    return f"{text},schedule={TABLE}" if given else text


def _forward(options: argparse.Namespace, choices: Choices, plan: Plan) -> Function:
    patterns = tuple(p for text in options.parameters for p in text.split(",") if p)
    seq = [] if options.seq is None else [f"seq={options.seq}"]
    bindings = ",".join(filter(None, [*options.bind, *seq]))
    multiple = max(1, choices.stack.vocabulary_multiple * plan.tp)
    training: TrainingConfig | None = getattr(options, "from_file", None)
    if training is not None and training.sizes is not None:
        model = training.function(options.batch, options.seq, plan.sequence_parts, multiple)
    else:
        model = load_model(options.model, options.batch, bindings, patterns, plan.sequence_parts, multiple)
    function = merge_composites(model)
    dtype = _widest(function) if choices.precision is None else choices.precision.compute
    return set_attention(function, choices.attention or default_attention(dtype))


def _widest(function: Function) -> DType:
    """Return the widest floating-point type among the inputs, as which a model is written."""
    types = [value.type.dtype for value in function.inputs if isinstance(value.type, Tensor)]
    return max([t for t in types if t.is_floating], key=lambda t: t.itemsize, default=Float32())


def read_model(options: argparse.Namespace, progress: Progress) -> Function:
    """Return the forward pass of the model in its precision, outlined if that is asked for."""
    choices = Choices.of(options)
    function = _logical_model(options, choices, progress, choices.plan(plan_text(options)))
    return function if choices.precision is None else apply_precision(function, choices.precision)


def _logical_model(options: argparse.Namespace, choices: Choices, progress: Progress, plan: Plan) -> Function:
    """Return the forward pass of the model, as a plan divides it, in the types that it is written in."""
    function = progress.run(f"reading {options.model}", lambda: _forward(options, choices, plan))
    if not getattr(options, "outline", False):
        return function
    outlined = progress.run("outlining", lambda: outline(function))
    for line in describe_blocks(outlined).splitlines():
        say(f"# {line}")
    return outlined


BROUGHT = ("loss", "optimizer", "keep", "precision", "clip", "stack")
"""Options that say what a model that brings its own backward pass has decided."""


def training_step(
    options: argparse.Namespace, progress: Progress, plan: Plan | None = None
) -> tuple[Function, Choices]:
    """Return the training step of the model, as the plan (by default that asked for) divides it, and how it
    is trained.
    """
    choices = Choices.of(options)
    optimizer, loss = optimizer_named(choices.optimizer), options.loss or "auto"
    if loss not in LOSSES:
        raise PlanError(f"loss {loss!r} is not one of {', '.join(LOSSES)}")
    divided = choices.plan(plan_text(options)) if plan is None else plan
    function = _logical_model(options, choices, progress, divided)
    if brings_backward(function):
        if any(getattr(options, name) for name in BROUGHT):
            refused = ", ".join(f"--{name}" for name in BROUGHT)
            raise PlanError(f"{function.name} brings its own backward pass: no {refused}")
        return function, replace(choices, assumed=())
    keep = options.keep or ()
    function = progress.run(
        "differentiating",
        lambda: differentiate(
            add_loss(function, loss, keep), optimizer, keep, choices.precision, choices.clip
        ),
    )
    return function, choices
