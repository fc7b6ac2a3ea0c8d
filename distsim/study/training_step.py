"""Reading a model and making its training step, as options say."""

from __future__ import annotations

from dataclasses import replace

from distsim.cache import Cache, MemoryLimit
from distsim.console.terminal import say
from distsim.errors import PlanError
from distsim.importer import is_named, load_model
from distsim.ir import DType, Float32, Function, Tensor
from distsim.ir.dead import brings_backward
from distsim.plan import Plan
from distsim.report.progress import Progress
from distsim.study.choices import Choices
from distsim.study.layout import plan_asked
from distsim.study.options import BACKWARD, SIZES, ModelOptions, option_of
from distsim.transforms import add_loss, describe_blocks, differentiate, outline
from distsim.transforms.autodiff.loss import check_loss
from distsim.transforms.autodiff.optimizers import OPTIMIZERS
from distsim.transforms.autodiff.set_precision import apply_precision
from distsim.transforms.inference import as_inference
from distsim.transforms.kernels.attention import default_attention, set_attention
from distsim.transforms.kernels.composites import merge_composites
from distsim.transforms.key_heads import repeat_keys

MOST_KEPT = 8
"""How many training steps of models read by name are kept: of one model several, where a stack pads its
vocabulary for tensor-parallel ranks. All are forgotten when what is kept of plans takes too much."""


class _Named:
    """Owns the steps that are kept."""


_NAMED, _LIMIT = _Named(), MemoryLimit()
_STEPS = Cache[_Named, Function]("training steps of models read by name, by how they are trained", MOST_KEPT)


def forward_pass(options: ModelOptions, progress: Progress, inference: bool = False) -> Function:
    """Return the forward pass of the model in its precision, outlined if that is asked for.

    For ``inference`` nothing is dropped and no loss taken (:func:`as_inference`).
    """
    choices = Choices.of(options, trains=False)
    function = _logical_model(options, choices, progress, choices.plan(plan_asked(options.plan)))
    function = as_inference(function) if inference else function
    return function if choices.precision is None else apply_precision(function, choices.precision)


def training_step(
    options: ModelOptions, progress: Progress, plan: Plan | None = None
) -> tuple[Function, Choices]:
    """Return the training step of the model, as the plan (by default that asked for) divides it, and how it
    is trained.

    Raises what reading the model raises, and :class:`PlanError` for an unknown name, and for options that say
    what the model has decided itself.
    """
    choices = Choices.of(options)
    divided = choices.plan(plan_asked(options.plan)) if plan is None else plan
    return _training_step(options, choices, divided, progress)


def kept_training_step(options: ModelOptions, progress: Progress) -> tuple[Function, Choices]:
    """Return what :func:`training_step` does: the same object for a model read by name, of the same sizes and
    trained the same way, if it was one of the :data:`MOST_KEPT` last. So its plans share what is derived.
    """
    choices = Choices.of(options)
    divided = choices.plan(plan_asked(options.plan))

    def made() -> tuple[Function, Choices]:
        return _training_step(options, choices, divided, progress)

    named = isinstance(options.model, str) and is_named(options.model)
    # An optimizer of the user's may be equal to another and do other things.
    own = type(choices.optimizer) not in OPTIMIZERS.values()
    if not named or own or options.from_file is not None or options.outline:
        return made()
    if _LIMIT.exceeded():
        _LIMIT.forget([_NAMED])
    lists = (options.bind, options.parameters, options.keep or ())
    key = (
        *(options.model, options.batch, options.seq, options.loss, *map(tuple, lists)),
        *(choices.optimizer, choices.precision, choices.clip, choices.attention, choices.stack),
        *(choices.stack.vocabulary_multiple * divided.tp, divided.sequence_parts),
    )
    try:
        hash(key)
    except TypeError:  # a precision, a stack or an optimizer of the user's holds a list or an array
        return made()
    return _STEPS.get(_NAMED, key, lambda: made()[0]), choices


def _training_step(
    options: ModelOptions, choices: Choices, divided: Plan, progress: Progress
) -> tuple[Function, Choices]:
    loss = options.loss or "auto"
    check_loss(loss)
    function = _logical_model(options, choices, progress, divided)
    if brings_backward(function):
        decided = options.given(BACKWARD)
        if decided:
            refused = ", ".join(map(option_of, decided))
            raise PlanError(f"{function.name} brings its own backward pass, which decides that: no {refused}")
        return function, replace(choices, assumed=())
    keep = tuple(options.keep or ())
    function = progress.run(
        "differentiating",
        lambda: differentiate(
            add_loss(function, loss, keep), choices.optimizer, keep, choices.precision, choices.clip
        ),
    )
    return function, choices


def _logical_model(options: ModelOptions, choices: Choices, progress: Progress, plan: Plan) -> Function:
    """Return the forward pass of the model, as a plan divides it, in the types that it is written in."""
    function = progress.run(f"reading {options.label}", lambda: _forward(options, choices, plan))
    if not options.outline:
        return function
    outlined = progress.run("outlining", lambda: outline(function))
    for line in describe_blocks(outlined).splitlines():
        say(f"# {line}")
    return outlined


def _forward(options: ModelOptions, choices: Choices, plan: Plan) -> Function:
    function = merge_composites(_read(options, choices, plan))
    dtype = _widest(function) if choices.precision is None else choices.precision.compute
    function = set_attention(function, choices.attention or default_attention(dtype))
    return repeat_keys(function) if choices.stack.repeated_keys else function


def _read(options: ModelOptions, choices: Choices, plan: Plan) -> Function:
    """Return the model as it is written."""
    if isinstance(options.model, Function):
        given = options.given(SIZES)
        if given:
            raise PlanError(f"{options.label} is a function, which has its sizes: leave out {given[0]}")
        return options.model
    patterns = tuple(p for text in options.parameters for p in text.split(",") if p)
    seq = [] if options.seq is None else [f"seq={options.seq}"]
    bindings = ",".join(filter(None, [*options.bind, *seq]))
    multiple = max(1, choices.stack.vocabulary_multiple * plan.tp)
    config = options.from_file
    if config is not None and config.sizes is not None:
        return config.function(options.batch, options.seq, plan.sequence_parts, multiple)
    parts, weighted = plan.sequence_parts, choices.stack.weighted
    return load_model(options.model, options.batch, bindings, patterns, parts, multiple, weighted)


def _widest(function: Function) -> DType:
    """Return the widest floating-point type among the inputs, as which a model is written."""
    types = [value.type.dtype for value in function.inputs if isinstance(value.type, Tensor)]
    return max([t for t in types if t.is_floating], key=lambda t: t.itemsize, default=Float32())
