"""Which ops one kernel runs: whether it may run an op and one that reads its result, by framework."""

from __future__ import annotations

from collections.abc import Callable

from distsim.cache import cached
from distsim.ir.function import Op
from distsim.ir.type import Tensor
from distsim.ir.value import Value
from distsim.ops import Signature, operator, sharding_rule, signature_of, work
from distsim.ops.kernel import MULTI_TENSOR

Joins = Callable[[Op, Op], bool]
"""(op, one that reads its result) -> whether one kernel may run both."""


@cached("whether an op is element by element, by signature", 65536)
def is_pointwise(signature: Signature) -> bool:
    """Whether each element of the results needs only the elements in the same place of the operands."""
    rule = sharding_rule(signature)
    if rule is None or not rule.outputs:
        return False
    whole = rule.outputs[0]
    if not whole or any(not isinstance(dim, str) for dim in whole):
        return False
    names = [dim for dim in whole if isinstance(dim, str)]
    for dims in (*rule.inputs, *rule.outputs[1:]):
        own = [dim for dim in dims if dim is not None]
        if any(dim not in names for dim in own):
            return False
        places = [names.index(dim) for dim in own if isinstance(dim, str)]
        if places != sorted(places) or len(places) != len(own):
            return False
    return True


_ALONG_ROWS = frozenset(
    (
        *("Softmax", "LogSoftmax", "SoftmaxGrad", "LogSoftmaxGrad"),
        *("LayerNormalization", "LayerNormalizationGrad", "RMSNormalization", "RMSNormalizationGrad"),
    )
)
"""What reduces along the last dimension, whose rows one thread block holds."""

_REARRANGE = frozenset(("Split", "Concat", "Slice"))
"""What a kernel that writes elements one by one does by reading or writing elsewhere."""


def fusible(op: Op) -> bool:
    """Whether an op is a kernel that can be a part of another."""
    meaning = operator(op.op_type)
    if op.subfunctions or not op.inputs or meaning.communication is not None or meaning.in_place:
        return False
    if op.op_type in MULTI_TENSOR:  # no compiler sees what runs between backward and update
        return False
    if not meaning.computes:
        return False
    if not all(isinstance(value.type, Tensor) for value in (*op.inputs, *op.outputs)):
        return False
    return not meaning.view and work(signature_of(op)) is not None


def _shape(value: Value) -> tuple[int, ...]:
    return value.type.shape if isinstance(value.type, Tensor) else ()


def _adds_bias(op: Op) -> bool:
    """Whether an op adds a vector to the rows of a tensor."""
    if op.op_type != "Add" or len(op.inputs) != 2:
        return False
    wide, narrow = sorted(map(_shape, op.inputs), key=len, reverse=True)
    return len(wide) > len(narrow) == 1 and narrow == wide[-1:]


def _scales(op: Op) -> bool:
    """Whether an op multiplies or divides by one number."""
    return (
        op.op_type in ("Mul", "Div")
        and all(len(_shape(value)) == 0 or _shape(value) == _shape(op.outputs[0]) for value in op.inputs)
        and sum(len(_shape(value)) > 0 for value in op.inputs) == 1
    )


def is_epilogue(first: Op, second: Op) -> bool:
    """Whether an op adds the bias of a product (cuBLAS's epilogue, which ``torch.addmm`` uses)."""
    if first.op_type not in ("MatMul", "Gemm") or not _adds_bias(second):
        return False
    return first.outputs[0] in second.inputs and len(_shape(first.outputs[0])) > 1  # not itself the vector


def _weighs_rows(op: Op) -> bool:
    """Whether an op multiplies each row of a tensor by a number of its own."""
    if op.op_type != "Mul" or len(op.inputs) != 2:
        return False
    wide = _shape(op.outputs[0])
    return len(wide) > 1 and {wide, (*wide[:-1], 1)} == {_shape(value) for value in op.inputs}


def _of_elements(op: Op) -> bool:
    """Whether an op multiplies two tensors of one shape."""
    return op.op_type == "Mul" and all(_shape(value) == _shape(op.outputs[0]) for value in op.inputs)


def sums_rows(op: Op) -> bool:
    """Whether an op sums each row to one number."""
    return op.op_type == "ReduceSum" and _shape(op.outputs[0]) == (*_shape(op.inputs[0])[:-1], 1)


_MEGATRON = {
    # bias_gelu, bias_swiglu: megatron/core/fusions/fused_bias_gelu.py, fused_bias_swiglu.py
    "Gelu": ("bias",),
    "Swish": ("bias",),
    "GeluGrad": ("bias", "Mul"),
    "SwishGrad": ("bias", "Mul"),
    # bias + dropout + residual: fused_bias_dropout.py
    "Dropout": ("bias",),
    # scale + mask + softmax: fused_softmax.py
    "Softmax": ("scale", "Add", "Where", "Cast"),
    # cross entropy with its logits in float32: fused_cross_entropy.py
    "CrossEntropyLoss": ("Cast",),
}
"""What a kernel of Megatron-LM (core 0.12) runs before an op: an op type, an added bias, a scaling."""


def megatron(first: Op, second: Op) -> bool:
    """Whether a kernel of Megatron-LM runs both."""
    before = _MEGATRON.get(second.op_type, ())
    if "bias" in before and _adds_bias(first):
        return True
    if "scale" in before and _scales(first):
        return True
    if first.op_type in before and "in_steps" not in second.attributes:
        return True
    if second.op_type in ("Add", "Where"):
        residual = _shape(second.outputs[0]) == _shape(second.inputs[0]) == _shape(second.inputs[-1])
        if _scales(first) and not residual:
            return True  # towards the mask of a softmax
        if residual and (first.op_type == "Dropout" or _adds_bias(first)):
            return True
    if first.op_type in ("Swish", "Gelu") and second.op_type == "Mul":
        return True
    # weighted_swiglu and weighted_swiglu_back: fused_bias_swiglu.py
    if _of_elements(first) and (_weighs_rows(second) or _of_elements(second)):
        return True
    if _weighs_rows(first) and _of_elements(second):
        return True
    if first.op_type == "SoftmaxGrad" and _scales(second):
        return True  # scaled_masked_softmax_backward takes the scale, too
    return first.op_type == "Softmax" and second.op_type == "Cast"


def alone(first: Op, second: Op) -> bool:
    """Each op is a kernel of its own."""
    return False


def one_loss(first: Op, second: Op) -> bool:
    """Logits in the type of the model, and their gradient: flash_attn/losses/cross_entropy.py."""
    return (first.op_type, second.op_type) in (("Cast", "CrossEntropyLoss"), ("CrossEntropyLossGrad", "Cast"))


def of_logits(first: Op, second: Op) -> bool:
    """Logits in the type of the model, whose gradient is made of them: flash_attn/losses/cross_entropy.py."""
    return one_loss(first, second) or (first.op_type, second.op_type) == ("Cast", "CrossEntropyLossGrad")


def megatron_of_logits(first: Op, second: Op) -> bool:
    """As Megatron-LM's, but a cross entropy, and its gradient, are one kernel each, of logits as they are."""
    return of_logits(first, second) or megatron(first, second)


def flash_attention(first: Op, second: Op) -> bool:
    """Biases with GELU (flash_attn/ops/fused_dense.py) and residuals (ops/layer_norm.py), and the loss."""
    if first.op_type in ("Softmax", "SoftmaxGrad") or second.op_type in ("Softmax", "Where"):
        return False  # modules/mha.py, SelfAttention: a kernel each
    if second.op_type == "Add" and not (first.op_type == "Dropout" or _adds_bias(first)):
        return False
    return megatron_of_logits(first, second)


_PROMOTE = frozenset(("Add", "Sub", "Mul", "Div"))


def promotes(first: Op, second: Op) -> bool:
    """Whether an op reads what a cast makes together with something else, and could read what it is made of.

    torch promotes operands of sums and products where it loads them (aten/src/ATen/native/cuda/Loops.cuh,
    ``gpu_kernel``: ``unrolled_elementwise_kernel`` with ``LoadWithCast``).
    """
    if first.op_type != "Cast" or second.op_type not in _PROMOTE:
        return False
    (read,), (made,) = first.inputs, first.outputs
    return read.type.nbytes < made.type.nbytes and any(value is not made for value in second.inputs)


def compiled(first: Op, second: Op) -> bool:
    """Chains of element by element ops and reductions along rows, over equally many elements; a cross entropy
    with the cast of its logits.

    As torch's inductor joins them (torch/_inductor/scheduler.py: ``can_fuse``).
    """
    if second.op_type == "CrossEntropyLoss":
        return first.op_type == "Cast"
    if second.op_type == "Float8Amax":  # the first stage of its reduction joins what makes its operand
        return is_pointwise(signature_of(first)) and _elements(first) == _elements(second)
    for op in (first, second):
        if not (op.op_type in _ALONG_ROWS or op.op_type in _REARRANGE or is_pointwise(signature_of(op))):
            return False
    if first.op_type in _REARRANGE or second.op_type in _REARRANGE:
        return True
    return _elements(first) == _elements(second)


def compiled_blocks(first: Op, second: Op) -> bool:
    """The same but for the loss, which torchtitan did not compile with the blocks (train.py, 9dec370)."""
    return not {first.op_type, second.op_type} & _OF_LOSSES and compiled(first, second)


_EIGHT_BITS = {"Float8Amax", "Float8Cast"}


def xla(first: Op, second: Op) -> bool:
    """As :func:`compiled`, but for casts to 8 bits and their largest elements (openxla/xla issue 7432)."""
    return not {first.op_type, second.op_type} & _EIGHT_BITS and compiled(first, second)


_ACTIVATIONS = {"Gelu", "GeluGrad", "Swish", "SwishGrad"}
_TRANSFORMER_ENGINE = {
    *("LayerNormalization", "LayerNormalizationGrad", "RMSNormalization", "RMSNormalizationGrad"),
    *_ACTIVATIONS,
}


def xla_with_te(first: Op, second: Op) -> bool:
    """As :func:`xla`, but norms and activations are calls of Transformer Engine, with what they gate and the
    cast of what they make to 8 bits alone (transformer_engine/jax: ``layernorm_fwd_fp8``, ``act_lu_fp8``)."""
    if second.op_type == "Float8Cast":
        return first.op_type in _TRANSFORMER_ENGINE
    gated = {first.op_type, second.op_type} & _ACTIVATIONS
    if gated and (_of_elements(first) or _of_elements(second)):
        return True
    return not {first.op_type, second.op_type} & _TRANSFORMER_ENGINE and xla(first, second)


_OF_LOSSES = {
    *("LogSoftmax", "LogSoftmaxGrad", "LogLikelihoodLoss", "LogLikelihoodLossGrad"),
    *("CrossEntropyLoss", "CrossEntropyLossGrad"),
}


def _elements(op: Op) -> int:
    values = (*op.inputs, *op.outputs)
    return max([value.type.size for value in values if isinstance(value.type, Tensor)], default=0)
