"""Which ops one kernel runs, as policies with a name each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from distsim.cache import cached
from distsim.errors import PlanError
from distsim.ir.function import Op
from distsim.ir.type import Tensor
from distsim.ir.value import Value
from distsim.ops import Signature, operator, sharding_rule, signature_of, work
from distsim.suggestions import choices_for

LOSS_KERNELS = ("one", "torch", "megatron")
"""Which kernels a cross entropy is: one; the two of torch; those that Megatron-LM's Python runs, one after
the other in the place of the logits."""

WAITING = ("nowhere", "everywhere", "passes", "reading")
"""Where hosts wait for their devices: nowhere; before each forward pass of all stages; before each pass,
forward or backward, and each update; before each forward pass that reads the batch."""

RECEIVING = ("stream", "device", "single")
"""What waits for what a stage receives: the stream of its computation; the host, for that and all that its
device was given; the same where a rank has a single stage, else the stream."""

ROTARY = ("ops", "one", "complex")
"""Which kernels a rotary embedding is: those of its ops; one, as Megatron-LM's fused_rope; three, of which
the second multiplies complex numbers, between casts to and from float32 (torchtitan, models/llama/model.py,
``apply_rotary_emb``), which torch's compiler leaves to eager kernels (inductor's warning: it "does not
support code generation for complex operators")."""

PRODUCTS = ("apart", "joined", "copied")
"""How the products of one group run (queries, keys and values; a gate and what it gates): a kernel each; as
one; as one, of which the gradients of the parts are copied side by side first."""

ZEROED = ("no", "wide", "all")
"""Which sums of gradients begin as zeros: none, whose first gradient is kept, or cast; those in another type
than gradients are made in; all."""

Joins = Callable[[Op, Op], bool]
"""(op, one that reads its result) -> whether one kernel may run both."""


@dataclass(frozen=True)
class Kernels:
    """A policy under a name: which ops one kernel runs.

    ``joins``: the pairs that one kernel runs; None: each op is a kernel of its own. ``epilogues``: a bias
    that no such kernel adds is added by the kernel of its product. ``rotary``: what a rotary embedding
    that is written out is (:mod:`distsim.transforms.kernels.rotary`), of :data:`ROTARY`.
    ``multi_tensor``: optimizers and gradient clipping launch a kernel for many tensors
    (:mod:`distsim.transforms.kernels.multi_tensor`). ``interiors``:
    kernels of the backward pass make again what lies inside of a kernel of the forward pass, where that is
    fewer bytes to save (:mod:`distsim.transforms.recompute.interiors`). ``loss``: which kernels a cross
    entropy is, of :data:`LOSS_KERNELS` (:mod:`distsim.transforms.kernels.losses`). ``gradients_apart``: the
    gradients of the operands of a product are a kernel each, and ``products``, of :data:`PRODUCTS`, how those
    run that a model may have as one (:mod:`distsim.transforms.kernels.products`). ``strided_batches``:
    products of many matrices read these where they lie (:mod:`distsim.transforms.kernels.strides`).
    ``norms_twice``: what the gradient of a layer normalization reads, a kernel for those of scale and bias
    reads again, as torch's does (aten/src/ATen/native/cuda/layer_norm_kernel.cu,
    ``LayerNormBackwardKernelImplInternal``) and apex's ``MixedFusedLayerNorm``
    (csrc/layer_norm_cuda_kernel.cu, ``HostLayerNormGradient``); apex's ``FastLayerNorm`` and Transformer
    Engine's read it once. ``triangles``: over at most so many keys a softmax under a causal mask, and its
    gradient, read nothing that it hides, though they write zeros there: Megatron-LM's
    scaled_upper_triang_masked_softmax.h, whose rows are read up to ``local_seq``, for 2,048 keys in 6985e58
    of 2021 (model/fused_softmax.py), 4,096 in core 0.12 (core/fusions/fused_softmax.py).
    ``zeroed``: which sums of gradients over microbatches are a buffer that begins as zeros, of
    :data:`ZEROED`, and ``products_add``: to such a buffer products add the gradients that they make
    (:mod:`distsim.transforms.gradient_sums`).
    ``turns``: operands of 8 bits are cast, or turned, for gradients of weights by a kernel of their own, as
    torchao's are (:mod:`distsim.transforms.pipelining.turned_operands`); Transformer Engine's casts write
    both ways.
    ``split``: products run in chunks beside the collectives that bring their rows together over
    tensor-parallel ranks (:mod:`distsim.transforms.tensor_parallel.split_products`), as a plan says.
    ``dtensors``: these bring rows together as DTensor does, as a plan says
    (:mod:`distsim.transforms.tensor_parallel.dtensors`).
    ``waiting``: where the host waits until its device has done all that it was given, of :data:`WAITING`, and
    ``receiving``: what waits for another stage, of :data:`RECEIVING`
    (:mod:`distsim.transforms.pipelining.received`). ``checks_gradients``: it reads of each gradient in
    float16 whether it overflowed, and ``reads_norm``: by what all gradients are multiplied (the same).
    ``launched_as``: the policy whose launches take as long, if not these (``Device.rates.launches``).

    >>> kernels_named("fused").multi_tensor, kernels_named("ops").joins
    (True, None)
    """

    name: str
    joins: Joins | None = None
    epilogues: bool = False
    rotary: str = "ops"
    multi_tensor: bool = False
    interiors: bool = False
    loss: str = "one"
    gradients_apart: bool = False
    products: str = "apart"
    strided_batches: bool = False
    norms_twice: bool = False
    triangles: int = 0
    zeroed: str = "no"
    products_add: bool = False
    turns: bool = True
    split: bool = False
    dtensors: bool = False
    waiting: str = "nowhere"
    receiving: str = "stream"
    checks_gradients: bool = False
    reads_norm: bool = False
    launched_as: str = ""

    def with_chunks(self, chunks: int) -> Kernels:
        """Return the policy for ranks of so many stages each: what waits for what these receive."""
        receiving = self.receiving
        if receiving == "single":
            receiving = "device" if chunks == 1 else "stream"
        return self if receiving == self.receiving else replace(self, receiving=receiving)

    @property
    def way(self) -> str:
        """What a cost model is given for the launches of such kernels (``CostModel(kernels=...)``)."""
        return self.launched_as or self.name

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle a policy that has a name by it: what its kernels join are functions."""
        named = KERNELS.get(self.name) is self
        return (kernels_named, (self.name,)) if named else super().__reduce_ex__(protocol)


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


def _megatron(first: Op, second: Op) -> bool:
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
    if first.op_type == "SoftmaxGrad" and _scales(second):
        return True  # scaled_masked_softmax_backward takes the scale, too
    return first.op_type == "Softmax" and second.op_type == "Cast"


def _alone(first: Op, second: Op) -> bool:
    """Each op is a kernel of its own."""
    return False


def _one_loss(first: Op, second: Op) -> bool:
    """Logits in the type of the model, and their gradient: flash_attn/losses/cross_entropy.py."""
    return (first.op_type, second.op_type) in (("Cast", "CrossEntropyLoss"), ("CrossEntropyLossGrad", "Cast"))


def _compiled(first: Op, second: Op) -> bool:
    """Chains of element by element ops and reductions along rows, over equally many elements.

    As torch's inductor joins them (torch/_inductor/scheduler.py: ``can_fuse``).
    """
    if second.op_type == "Float8Amax":  # the first stage of its reduction joins what makes its operand
        return is_pointwise(signature_of(first)) and _elements(first) == _elements(second)
    for op in (first, second):
        if not (op.op_type in _ALONG_ROWS or op.op_type in _REARRANGE or is_pointwise(signature_of(op))):
            return False
    if first.op_type in _REARRANGE or second.op_type in _REARRANGE:
        return True
    return _elements(first) == _elements(second)


def _compiled_blocks(first: Op, second: Op) -> bool:
    """The same but for the loss, which torchtitan did not compile with the blocks (train.py, 9dec370)."""
    return not {first.op_type, second.op_type} & _OF_LOSSES and _compiled(first, second)


_OF_LOSSES = {
    *("LogSoftmax", "LogSoftmaxGrad", "LogLikelihoodLoss", "LogLikelihoodLossGrad"),
    *("CrossEntropyLoss", "CrossEntropyLossGrad"),
}


def _elements(op: Op) -> int:
    values = (*op.inputs, *op.outputs)
    return max([value.type.size for value in values if isinstance(value.type, Tensor)], default=0)


_TORCH = Kernels("torch", epilogues=True, multi_tensor=True, gradients_apart=True)
_EAGER = replace(_TORCH, joins=_alone, norms_twice=True, loss="torch")
_MEGATRON_LM = replace(
    _TORCH,
    name="fused",
    joins=_megatron,
    rotary="one",
    interiors=True,
    loss="megatron",
    products="joined",
    strided_batches=True,
    triangles=4096,
    zeroed="all",
    products_add=True,
    turns=False,
    receiving="single",
    reads_norm=True,
    launched_as="fused",
)
_MEGATRON_OF_2023 = replace(_MEGATRON_LM, name="fused_waiting", waiting="everywhere", receiving="device")
_MEGATRON_OF_2022 = replace(_MEGATRON_OF_2023, name="fused_2022", products_add=False, waiting="passes")
_MEGATRON_OF_2021 = replace(
    _MEGATRON_OF_2022, name="fused_2021_epilogues", norms_twice=True, triangles=2048, zeroed="wide"
)

KERNELS = {
    each.name: each
    for each in (
        Kernels("ops"),
        replace(_EAGER, name="eager"),
        _MEGATRON_LM,
        replace(_MEGATRON_LM, name="fused_loss", loss="one"),
        replace(_MEGATRON_OF_2023, name="fused_loss_waiting", loss="one"),
        _MEGATRON_OF_2023,
        replace(_MEGATRON_OF_2021, name="fused_2021", epilogues=False),
        _MEGATRON_OF_2021,
        _MEGATRON_OF_2022,
        replace(
            _MEGATRON_OF_2021,
            name="fused_deepspeed",
            waiting="everywhere",
            receiving="stream",
            checks_gradients=True,
        ),
        replace(_EAGER, name="eager_complex", rotary="complex", launched_as="eager"),
        replace(
            _EAGER,
            name="eager_waiting",
            products="copied",
            zeroed="wide",
            waiting="reading",
            receiving="device",
            launched_as="eager",
        ),
        replace(
            _EAGER,
            name="eager_loss",
            joins=_one_loss,
            loss="one",
            interiors=True,
            products="copied",
            launched_as="eager",
        ),
        replace(_TORCH, name="compiled", joins=_compiled, interiors=True),
        replace(
            _TORCH,
            name="compiled_complex",
            joins=_compiled,
            interiors=True,
            rotary="complex",
            launched_as="compiled",
        ),
        replace(
            _TORCH,
            name="compiled_blocks",
            joins=_compiled_blocks,
            interiors=True,
            loss="torch",
            rotary="complex",
            launched_as="compiled",
        ),
    )
}
"""The policies by name. ``ops``: each op of the function is a kernel; ``eager``: as torch launches them op by
op; ``eager_complex``: the same, but rotary embeddings multiply complex numbers in float32 (torchtitan);
``eager_waiting``: as ``eager``, with a host that waits for its device before each microbatch of which it
reads the batch, and sums of gradients that begin as zeros (nanotron); ``fused``: with the fusions that
Megatron-LM has by default, products that add to sums of gradients among them; ``fused_loss``: with that of
the cross entropy too (``--cross-entropy-loss-fusion``); ``fused_waiting``, ``fused_loss_waiting``: as these,
with a host that waits for its device before each microbatch, as until 2023; ``fused_2022``: before each pass
and update, whose timers did until 77efcccb of August 2022, and with kernels of their own that add to sums;
``fused_2021``: as that, but sums in the type of gradients begin as the first one, as until August 2021, with
layer normalizations that are read twice, as until a2fdcdf0 of October 2021, which brought apex's
FastLayerNorm, and biases that no fused kernel adds added by kernels of their own, as torch 1.8 does (its
README names that version; ``at::linear`` of operands of three dimensions is ``matmul`` and ``add_`` until
torch 1.12); ``fused_2021_epilogues``: the same
of a later torch, as Megatron-DeepSpeed until July 2023; ``fused_deepspeed``: as that, with a host that reads
of each gradient in float16 whether it overflowed, where DeepSpeed's engine runs it; ``eager_loss``: as
``eager``, but a cross entropy is one kernel, of logits as they are; ``compiled``: as a compiler joins them;
``compiled_complex``: the same, but rotary embeddings multiply complex numbers (torchtitan);
``compiled_blocks``: the same as that, but the loss is torch's (torchtitan in 2024). All but the first have
multi-tensor kernels. One weight for queries, keys and values, and one for a gate and what it gates, have
Megatron-LM (6985e58 of 2021, megatron/model/transformer.py: ``query_key_value``; core 0.12: ``linear_qkv``,
``linear_fc1``), llm-foundry (v0.1.0 to v0.4.0, models/layers/attention.py: ``Wqkv``, and ``chunk`` or
``split`` of its result) and nanotron (4796d2d9, models/llama.py: ``qkv_proj``, ``gate_up_proj``, split);
torchtitan and Hugging Face's Llama have them apart."""


def kernels_named(name: str) -> Kernels:
    """Return the policy of a name.

    Raises :class:`PlanError` for another name.
    """
    if name not in KERNELS:
        raise PlanError(f"kernels={name!r} is unknown; choose one of {choices_for(name, KERNELS)}")
    return KERNELS[name]
