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
fp8                       18     mixed, with Transformer Engine's linear layers (delayed scaling)
fsdp2                     16     torchtitan, MixedPrecisionPolicy(bfloat16, reduce_dtype=float32)
amp                       16     torch.autocast(bfloat16): weights are cast where a product reads them
========================  =====  ==================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.errors import PlanError
from distsim.ir import BFloat16, DType, Float8E4M3FN, Float16, Float32

NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "BatchNormalization",
)
LOSSES = ("CrossEntropyLoss", "Loss", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
AUTOCAST_WIDE = (*NORMS, *LOSSES, "Softmax", "LogSoftmax", "Exp", "Log", "Pow", "ReduceSum", "CumSum")
"""What torch.autocast runs in float32 (torch docs, amp, "CUDA Ops that can autocast to float32")."""


_F32, _BF16, _F16 = Float32(), BFloat16(), Float16()


@dataclass(frozen=True)
class Precision:
    """The element types of a training step.

    ``parameter``: as which a weight is held. ``used``: as which ops read it, and float inputs; where that is
    another type the whole weight is cast before it is read, and gathered as that. ``compute``: what products
    read and make. ``wide``: in which the operators of ``wide_ops`` read and make everything. ``master``: of
    the copy that is updated in place of the weight (None: there is none). ``gradient_sum``: in which
    gradients are summed over microbatches and over ranks. ``update``: as which the optimizer reads their
    sum. ``states``: of the optimizer's states in order, the last one of those that follow as well.
    ``product_rate`` names the rate at which float32 products run, where it is not their own (tfloat32).
    ``linear``: to which the operands of products with a weight are cast, but for that which makes the
    predictions (None: they stay as they are); an 8-bit type, of which the gradient of a result takes the one
    with the larger range. ``loss_scale``: by what the loss is multiplied before the backward pass, and
    gradients divided before the update (None: not at all); that of a step somewhere in training.

    Raises :class:`PlanError` for a type that is not a floating-point one.
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
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        if not self.states:
            raise PlanError(f"precision {self.name}: states lists no type; give that of the first state")
        if self.loss_scale is not None and not 0 < self.loss_scale < float("inf"):
            raise PlanError(f"precision {self.name}: loss_scale={self.loss_scale} must be finite and over 0")
        if self.linear is not None and self.linear != Float8E4M3FN():
            raise PlanError(
                f"precision {self.name}: linear cannot be {self.linear.name}; choose float8e4m3fn, or None"
            )
        for what, dtype in self._types():
            if not dtype.is_floating:
                raise PlanError(
                    f"precision {self.name}: {what} cannot be {dtype.name}; choose a floating-point type"
                )

    def _types(self) -> Sequence[tuple[str, DType]]:
        fields = ("parameter", "used", "compute", "gradient_sum", "update", "wide")
        named: list[tuple[str, DType]] = [(name, getattr(self, name)) for name in fields]
        named += [("master", self.master)] if self.master else []
        return [*named, *[("states", dtype) for dtype in self.states]]

    @property
    def gradient(self) -> DType:
        """The type in which the backward pass makes the gradient of a parameter: that in which it is used."""
        return self.used

    def state(self, place: int) -> DType:
        """Return the type of the optimizer's state at a place."""
        return self.states[min(place, len(self.states) - 1)]

    def __str__(self) -> str:
        master = f", master {self.master.short}" if self.master else ""
        linear = f", linear layers {self.linear.short}" if self.linear else ""
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
        Precision("fp8", _BF16, _BF16, _BF16, _F32, _F32, (_F32,), _F32, linear=Float8E4M3FN()),
        Precision("fsdp2", _F32, _BF16, _BF16, _F32, _F32, (_F32,)),
        Precision("amp", _F32, _F32, _BF16, _F32, _F32, (_F32,), wide_ops=AUTOCAST_WIDE),
    )
}


def precision_named(name: str) -> Precision:
    """Return the policy of that name; raises :class:`PlanError` for an unknown one."""
    if name not in POLICIES:
        raise PlanError(f"precision {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]
