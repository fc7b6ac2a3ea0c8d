"""Precision: of which element type each kind of value in a training step is, as a named policy.

Models are built in float32, *logically*: ``apply_precision`` gives the forward pass the types of a policy,
``differentiate`` the gradients, their sum and what is kept. Of each policy the bytes that Adam keeps of a
parameter, and where they are from:

========================  =====  ==================================================================
fp32, tf32                16     weight 4, gradient 4, moments 8
bf16                      8      all of it in 2 bytes (torchtitan with dtype bfloat16)
mixed                     18     Megatron-LM, dist_optimizer.md: weight 2, master 4, gradient 4, moments 8
mixed_bf16_grads          16     the same with --grad-reduce-in-bf16
mixed_fp16                20     Megatron-LM, fp16: weight 2, gradient 2, float32 copies of both 8, moments 8
fp8                       18     mixed, with Transformer Engine's linear layers (delayed scaling, its default)
fsdp2                     16     torchtitan, MixedPrecisionPolicy(bfloat16, reduce_dtype=float32)
fsdp                      18     FSDP, MixedPrecision(bfloat16, reduce_dtype=bfloat16)
amp                       16     torch.autocast(bfloat16): weights are cast where a product reads them
========================  =====  ==================================================================
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from distsim.errors import PlanError, TypeRuleError
from distsim.ir import BFloat16, DType, Float8E4M3FN, Float16, Float32
from distsim.ir.type import DTYPES, dtype_named
from distsim.ops.rules import check_op_types
from distsim.suggestions import choices_for, did_you_mean

NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "BatchNormalization",
)
LOSSES = ("CrossEntropyLoss", "Loss", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
SCALINGS = ("delayed", "tensorwise", "rowwise", "blockwise")
"""By what 8-bit operands are scaled, as frameworks name their recipes (Megatron-LM ``--fp8-recipe``, torchao
``Float8LinearRecipeName``): by largest elements of microbatches before, which are reduced over all ranks of
a stage after each pass; by that of the tensor, which a kernel finds before the cast; by those of its rows,
which the cast finds on its way, and once more for the gradient of a weight, which sums over rows; by those of
shorter blocks (MXFP8 too), which one kernel finds along either dimension."""

LINEAR_OPS = ("MatMul", "Gemm", "GroupedMatMul")
"""Products that may have a weight: of linear layers, and of the experts of a mixture."""

AUTOCAST_WIDE = (*NORMS, *LOSSES, "Softmax", "LogSoftmax", "Exp", "Log", "Pow", "ReduceSum", "CumSum")
"""What torch.autocast runs in float32 (torch docs, amp, "CUDA Ops that can autocast to float32")."""


_F32, _BF16, _F16 = Float32(), BFloat16(), Float16()


@dataclass(frozen=True)
class Precision:
    """The element types of a training step.

    ``parameter``: as which a weight is held. ``used``: as which ops read it, and float inputs; where that is
    another type the whole weight is cast before it is read, and gathered as that: once a step, unless it is
    gathered for each pass, as FSDP2 does. ``compute``: what products read and make. ``wide``: in which the
    operators of ``wide_ops`` read and make everything. ``master``: of the copy that is updated in place of
    the weight (None: there is none). ``gradient_sum``: in which gradients are summed over microbatches and
    over ranks. ``update``: as which the optimizer reads their sum. ``states``: of the optimizer's states in
    order, the last one of those that follow as well. ``product_rate`` names the rate at which float32
    products run, where it is not their own (tfloat32). ``linear``: to which the operands of products with a
    weight are cast (None: they stay as they are), weights once a step, as Transformer Engine's
    ``is_first_microbatch`` has it; an 8-bit type, of which the gradient of a result takes the one with the
    larger range. Those that make predictions, or the scores of a router, stay as they are: in Megatron-LM
    (``core/models/gpt/gpt_model.py``, ``core/transformer/moe/router.py``) they are no layers of Transformer
    Engine's. ``scaling``: how those operands are scaled, of :data:`SCALINGS` ("": as the stack does it, else
    delayed). ``linear_ops``: which products these are, of :data:`LINEAR_OPS` (none: those of the stack, else
    all). ``loss_scale``: by what the loss is multiplied before the backward pass, and gradients divided
    before the update (None: not at all); that of a step somewhere in training.

    Types may be given by their names (``"bf16"``). What travels between ranks is of the type
    ``gradient_sum``, and gathered as ``used``. Raises :class:`PlanError` for a type that is none of those
    that a field may have, and for an op that does not exist.

    >>> mixed = precision_named("mixed")
    >>> mixed.compute, mixed.master, mixed.gradient_sum
    (BFloat16(), Float32(), Float32())
    """

    name: str
    parameter: DType
    used: DType
    compute: DType
    gradient_sum: DType
    update: DType
    states: tuple[DType, ...]
    master: DType | None = None
    wide: DType = _F32
    wide_ops: tuple[str, ...] = LOSSES
    product_rate: str = ""
    linear: DType | None = None
    scaling: str = ""
    linear_ops: tuple[str, ...] = ()
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("parameter", "used", "compute", "gradient_sum", "update", "master", "wide", "linear"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, dtype_named(given))
        object.__setattr__(self, "states", tuple(map(dtype_named, self.states)))
        if not self.states:
            raise PlanError(f"precision {self.name}: states lists no type; give that of the first state")
        if self.loss_scale is not None and not 0 < self.loss_scale < float("inf"):
            raise PlanError(f"precision {self.name}: loss_scale={self.loss_scale} must be finite and over 0")
        if self.linear is not None and self.linear != Float8E4M3FN():
            raise PlanError(
                f"precision {self.name}: linear cannot be {self.linear.name}; choose float8e4m3fn, or None"
            )
        other = [op for op in self.linear_ops if op not in LINEAR_OPS]
        if other:
            raise PlanError(
                f"precision {self.name}: linear_ops cannot have {other[0]!r:.40}; choose from "
                f"{choices_for(other[0], LINEAR_OPS)}"
            )
        if self.scaling not in ("", *SCALINGS):
            raise PlanError(
                f"precision {self.name}: scaling cannot be {self.scaling!r}; choose one of "
                f"{choices_for(self.scaling, SCALINGS)}"
            )
        if self.product_rate not in ("", "tfloat32"):
            raise PlanError(
                f"precision {self.name}: product_rate cannot be {self.product_rate!r}; choose tfloat32, or "
                "leave it out"
            )
        check_op_types(f"precision {self.name}: wide_ops", self.wide_ops, "give types, as Softmax")
        for name in ("parameter", "used", "compute", "gradient_sum", "update", "wide"):
            self._check(name, getattr(self, name), (_F16, _BF16, _F32))
        kept = [("states", dtype) for dtype in self.states]
        for name, dtype in [*kept, *([("master", self.master)] if self.master else [])]:
            self._check(name, dtype, tuple([each for each in DTYPES if each.is_floating]))

    def _check(self, what: str, dtype: DType, choices: Sequence[DType]) -> None:
        if dtype not in choices:
            raise PlanError(
                f"precision {self.name}: {what} cannot be {dtype.name}; choose one of "
                f"{', '.join(each.name for each in choices)}"
            )

    @property
    def gradient(self) -> DType:
        """The type in which the backward pass makes the gradient of a parameter: that in which it is used."""
        return self.used

    def of_stack(self, scaling: str, linear_ops: tuple[str, ...]) -> Precision:
        """Return the policy with what a stack does about 8-bit operands where it does not say."""
        if self.linear is None:
            return self
        return replace(
            self, scaling=self.scaling or scaling, linear_ops=self.linear_ops or linear_ops or LINEAR_OPS
        )

    def state(self, place: int) -> DType:
        """Return the type of the optimizer's state at a place."""
        return self.states[min(place, len(self.states) - 1)]

    def __str__(self) -> str:
        master = f", master {self.master.short}" if self.master else ""
        linear = (
            f", linear layers {self.linear.short} ({self.scaling or SCALINGS[0]} scaling)"
            if self.linear
            else ""
        )
        rate = f"{linear}, products at {self.product_rate}" if self.product_rate else linear
        scale = f", loss scaled by {self.loss_scale:g}" if self.loss_scale else ""
        states = "/".join(dict.fromkeys([dtype.short for dtype in self.states]))
        return (
            f"{self.name}: parameters {self.parameter.short}, compute {self.compute.short}{rate}{master}, "
            f"gradients summed in {self.gradient_sum.short}, optimizer state {states}{scale}"
        )


def _all(name: str, dtype: DType, product_rate: str = "") -> Precision:
    return Precision(
        name, dtype, dtype, dtype, dtype, dtype, (dtype,), wide_ops=(), product_rate=product_rate
    )


POLICIES: dict[str, Precision] = {
    policy.name: policy
    for policy in (
        _all("fp32", _F32),
        _all("tf32", _F32, "tfloat32"),
        _all("bf16", _BF16),
        Precision("mixed", _BF16, _BF16, _BF16, _F32, _F32, (_F32,), _F32),
        Precision("mixed_bf16_grads", _BF16, _BF16, _BF16, _BF16, _BF16, (_F32,), _F32),
        Precision("mixed_fp16", _F16, _F16, _F16, _F16, _F32, (_F32,), _F32, loss_scale=65536.0),
        Precision(
            *("fp8", _BF16, _BF16, _BF16, _F32, _F32, (_F32,), _F32),
            linear=Float8E4M3FN(),
            scaling="delayed",
            linear_ops=LINEAR_OPS,
        ),
        Precision("fsdp2", _F32, _BF16, _BF16, _F32, _F32, (_F32,)),
        Precision("fsdp", _F32, _BF16, _BF16, _BF16, _F32, (_F32,)),
        Precision("amp", _F32, _F32, _BF16, _F32, _F32, (_F32,), wide_ops=AUTOCAST_WIDE),
    )
}


MAX_FILE_BYTES = 65536
"""A policy's file is a few lines."""


def precision_named(name: str) -> Precision:
    """Return the policy of that name, or that of a ``.toml`` file; behind a colon, fields that differ.

    A file gives the fields of :class:`Precision`, types by name; what it leaves out is as in the policy that
    it names as ``base`` (by default mixed), and ``master = "none"`` takes away a master copy. Raises
    :class:`PlanError` for an unknown name, and for a file that cannot be read or has a field that is unknown
    or of another kind.

    >>> print(precision_named("fsdp2:linear=float8e4m3fn,states=bfloat16+float32").states)
    (BFloat16(), Float32())
    """
    if name.endswith(".toml"):
        return _read(Path(name))
    policy, colon, changes = name.partition(":")
    if policy not in POLICIES:
        known = choices_for(policy, POLICIES)
        raise PlanError(f"precision {name!r:.60} is not the path of a .toml file, nor one of {known}")
    return _changed(POLICIES[policy], name, changes) if colon else POLICIES[policy]


def _changed(policy: Precision, name: str, changes: str) -> Precision:
    """Return a policy with the fields of ``key=value,...``; types of several states stand between +."""
    given: dict[str, Any] = {"name": name}
    for item in changes.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in {field.name for field in fields(Precision)} - {"name"} or key in given:
            raise PlanError(
                f"precision {name!r:.60}: {item.strip()!r:.40} is no field that differs; write for example "
                "mixed:gradient_sum=bfloat16,states=bfloat16+float32"
            )
        whole = value.split("+") if key in _LISTS else value
        if key == "loss_scale":
            whole = _number(name, value)
        given[key] = _field(Path(f"precision {name}"), key, whole)
    return replace(policy, **given)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PlanError(f"precision {name!r:.60}: {text[:40]!r} is no number") from None


def _read(path: Path) -> Precision:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise PlanError(f"{path} is larger than {MAX_FILE_BYTES} bytes; a precision is a few lines")
        table = tomllib.loads(data.decode())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested too deeply
        raise PlanError(f"{path} is not a TOML file: {error}") from error
    base = table.pop("base", "mixed")
    if base not in POLICIES:
        raise PlanError(f"{path}: base {base!r} is not one of {choices_for(base, POLICIES)}")
    given: dict[str, Any] = {"name": path.stem}
    known = {field.name for field in fields(Precision)}
    for key, value in table.items():
        if key not in known:
            raise PlanError(
                f"{path}: {key!r} is not a field of a precision; choose from base, {', '.join(sorted(known))}"
                f"{did_you_mean(key, ('base', *known))}"
            )
        given[key] = _field(path, key, value)
    return replace(POLICIES[base], **given)


_WORDS = ("name", "product_rate", "scaling")
_LISTS = ("states", "wide_ops", "linear_ops")


def _field(path: Path, key: str, value: Any) -> Any:
    """Return the value of a field from what a file gives; types are given by name."""
    if key in _WORDS and isinstance(value, str):
        return value
    if key == "loss_scale" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if key in _LISTS and isinstance(value, list):
        items = cast(list[Any], value)
        if all(isinstance(item, str) for item in items):
            return tuple([_dtype(path, key, item) if key == "states" else item for item in items])
    elif key not in (*_WORDS, *_LISTS, "loss_scale") and isinstance(value, str):
        return None if key in ("master", "linear") and value == "none" else _dtype(path, key, value)
    raise PlanError(f"{path}: {key} cannot be {value!r:.40}; see the fields of Precision")


def _dtype(path: Path, key: str, name: str) -> DType:
    try:
        return dtype_named(name)
    except TypeRuleError as error:
        raise PlanError(f"{path}: {key}: {error}") from None
