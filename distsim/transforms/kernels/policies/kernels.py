"""What kernels a framework launches, and when its hosts wait, as policies with a name each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from distsim.errors import PlanError
from distsim.ir.kernel_rates import GRAPHS, WAYS_TO_LAUNCH
from distsim.suggestions import choices_for
from distsim.transforms.kernels.policies.joins import (
    Joins,
    alone,
    compiled,
    compiled_blocks,
    flash_attention,
    megatron,
    megatron_of_logits,
    one_loss,
    xla,
    xla_with_te,
)

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

TURNS = ("no", "kernels", "anew", "all")
"""Which kernels cast, or turn, operands of 8 bits for the gradients that read them along their other
dimension: none, as Transformer Engine's casts write both ways; one for an operand, as torchao's
(:mod:`distsim.transforms.pipelining.float8`); those of torch's compiler, which make the scale of a column
anew for each element; one for an operand of any product that does not lie as cuBLASLt's kernels want it, as
XLA adds (xla/service/gpu/transforms/gemm_rewriter.cc, ``TransposeMatrix``): a weight, and both operands of
its gradient."""


@dataclass(frozen=True)
class Kernels:
    """A policy under a name: which ops one kernel runs.

    ``joins``: the pairs that one kernel runs; None: each op is a kernel of its own. ``epilogues``: a bias
    that no such kernel adds is added by the kernel of its product. ``promotes``: a sum or a product reads
    an operand of a narrower type as it is, where nothing else reads the wider one. ``sums_rows``: what runs
    in one kernel with ops before it, such a kernel sums row by row too. ``rotary``: what a
    rotary embedding that is written out is (:mod:`distsim.transforms.kernels.rotary`), of :data:`ROTARY`.
    ``multi_tensor``: optimizers and gradient clipping launch a kernel for many tensors
    (:mod:`distsim.transforms.kernels.fusion`). ``interiors``:
    kernels of the backward pass make again what lies inside of a kernel of the forward pass, where that is
    fewer bytes to save (:mod:`distsim.transforms.recompute.interiors`). ``loss``: which kernels a cross
    entropy is, of :data:`LOSS_KERNELS`, and ``loss_in_place``: its gradient is made where what it saved lies
    (:mod:`distsim.transforms.kernels.losses`). ``gradients_apart``: the
    gradients of the operands of a product are a kernel each, and ``products``, of :data:`PRODUCTS`, how those
    run that a model may have as one (:mod:`distsim.transforms.kernels.products`). ``strided_batches``:
    products of many matrices read these where they lie, and ``copies_heads``: queries, keys and values are
    copied into the order of heads though attention takes strides (:mod:`distsim.transforms.kernels.strides`).
    ``rereads``: by type of op, how often more than once its kernels read the operands that are largest.
    What the gradient of a layer or RMS normalization reads, a kernel for those of scale and
    bias reads again where torch's does (aten/src/ATen/native/cuda/layer_norm_kernel.cu,
    ``LayerNormBackwardKernelImplInternal``; since torch 2.9 ``_fused_rms_norm_backward``, seen in traces of
    2.11) and apex's ``MixedFusedLayerNorm`` (csrc/layer_norm_cuda_kernel.cu, ``HostLayerNormGradient``);
    apex's ``FastLayerNorm`` and Transformer Engine's read it once, as does flash_attn's ``TritonRMSNorm``,
    which nanotron has (nn/layer_norm.py). ``triangles``: over at most so many keys a softmax under a
    causal mask, and its gradient, read nothing that it hides, though they write zeros there:
    Megatron-LM's scaled_upper_triang_masked_softmax.h, whose rows are read up to ``local_seq``, for 2,048
    keys in 6985e58 of 2021 (model/fused_softmax.py), 4,096 in core 0.12 (core/fusions/fused_softmax.py).
    Over more, of float32, or of matrices that do not come in fours, ops of torch's run instead
    (:mod:`distsim.transforms.kernels.unfused_softmax`), in float32 where that is a ``wide_softmax``.
    ``zeroed``: which sums of gradients over microbatches are a buffer that begins as zeros, of
    :data:`ZEROED`, and ``products_add``: to such a buffer products add the gradients that they make
    (:mod:`distsim.transforms.gradient_sums`).
    ``turns``: which kernels bring operands of 8 bits into the order of gradients, of :data:`TURNS`.
    ``split``: products run in chunks beside the collectives that bring their rows together over
    tensor-parallel ranks (:mod:`distsim.transforms.tensor_parallel.split_products`), as a plan says.
    ``dtensors``: these bring rows together as DTensor does, as a plan says
    (:mod:`distsim.transforms.tensor_parallel.dtensors`).
    ``waiting``: where the host waits until its device has done all that it was given, of :data:`WAITING`, and
    ``receiving``: what waits for another stage, of :data:`RECEIVING`
    (:mod:`distsim.transforms.pipelining.received`). ``checks_gradients``: it reads of each gradient in
    float16 whether it overflowed, and ``reads_norm``: by what all gradients are multiplied (the same).
    ``unscales_first``: the loss scale is taken out of gradients by a pass of its own before their norm is
    taken, ``averages``: gradients are divided by the ranks of the data by one before these sum them, and
    ``checks_buckets``: before that the host waits for the norm of each bucket, of which it asks whether it is
    a NaN
    (:mod:`distsim.transforms.gradient_passes`).
    ``exchanges_wait``: the computation waits while ranks of experts exchange rows, also what does not read
    them, such as shared experts (:mod:`distsim.transforms.tensor_parallel.expert_rows`): Megatron-LM's and
    DeepSpeed's ``_AllToAll`` calls ``all_to_all_single`` without ``async_op`` (megatron/core/tensor_parallel/
    mappings.py; deepspeed/moe/sharded_moe.py, from memory).
    ``sends_parts``: what tensor-parallel ranks hold alike they send to the next stage in parts, which are
    gathered there (:mod:`distsim.transforms.tensor_parallel.message_parts`).
    ``validates_later``: no stage waits for the norm of the gradients of others, as a plan says
    (:mod:`distsim.transforms.pipelining.post_validation`).
    ``scans``: layers are turns of one loop, which copies what they save
    (:mod:`distsim.transforms.kernels.scans`).
    ``launched_as``: the policy whose launches take as long, if not these (``Device.rates.launches``).

    >>> kernels_named("fused").multi_tensor, kernels_named("ops").joins
    (True, None)
    """

    name: str
    joins: Joins | None = None
    epilogues: bool = False
    promotes: bool = False
    sums_rows: bool = False
    rotary: str = "ops"
    multi_tensor: bool = False
    interiors: bool = False
    loss: str = "one"
    loss_in_place: bool = False
    gradients_apart: bool = False
    products: str = "apart"
    strided_batches: bool = False
    copies_heads: bool = False
    rereads: tuple[tuple[str, int], ...] = ()
    triangles: int = 0
    wide_softmax: bool = False
    zeroed: str = "no"
    products_add: bool = False
    turns: str = "kernels"
    split: bool = False
    dtensors: bool = False
    waiting: str = "nowhere"
    receiving: str = "stream"
    checks_gradients: bool = False
    reads_norm: bool = False
    unscales_first: bool = False
    averages: bool = False
    checks_buckets: bool = False
    exchanges_wait: bool = False
    sends_parts: bool = False
    validates_later: bool = False
    scans: bool = False
    launched_as: str = ""
    graphs: str = ""

    def with_chunks(self, chunks: int) -> Kernels:
        """Return the policy for ranks of so many stages each: what waits for what these receive."""
        receiving = self.receiving
        if receiving == "single":
            receiving = "device" if chunks == 1 else "stream"
        return self if receiving == self.receiving else replace(self, receiving=receiving)

    @property
    def way(self) -> str:
        """What a cost model is given for the launches of such kernels (``CostModel(kernels=...)``)."""
        way = self.launched_as or self.name.partition(":")[0]
        return f"{way}:{self.graphs}" if self.graphs else way

    @property
    def one_by_one(self) -> Kernels:
        """The policy of a host that issues the same kernels one by one."""
        return replace(self, name=self.name.partition(":")[0], graphs="") if self.graphs else self

    def in_graphs(self, graphs: str) -> Kernels:
        """Return the policy of a host that launches the same kernels as CUDA graphs, of
        :data:`distsim.ir.kernel_rates.GRAPHS`.

        Raises :class:`PlanError` for others, and for kernels for which no host takes time.
        """
        plain = self.one_by_one
        if graphs not in GRAPHS:
            raise PlanError(
                f"cuda_graphs={graphs!r:.40} is unknown; choose one of {choices_for(graphs, GRAPHS)}"
            )
        if plain.way not in WAYS_TO_LAUNCH:
            raise PlanError(
                f"cuda_graphs={graphs} has no effect with kernels={plain.name}, for which no host takes "
                "time: leave it out, or name other kernels"
            )
        return replace(plain, name=f"{plain.name}:{graphs}", graphs=graphs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle a policy that has a name by it: what its kernels join are functions."""
        base, _, graphs = self.name.partition(":")
        named = KERNELS.get(base) == self.one_by_one and graphs == self.graphs
        return (kernels_named, (self.name,)) if named else super().__reduce_ex__(protocol)


_TORCH = Kernels("torch", epilogues=True, multi_tensor=True, gradients_apart=True, unscales_first=True)
_COMPILED = replace(_TORCH, name="compiled", joins=compiled, interiors=True, turns="anew")
_NORMS_TWICE = (("LayerNormalizationGrad", 1), ("RMSNormalizationGrad", 1))
_XLA_BACKWARD = (
    *(("LayerNormalizationGrad", 2), ("RMSNormalizationGrad", 2)),
    *(("SoftmaxGrad", 1), ("LogSoftmaxGrad", 1), ("Float8Cast", 1)),
)
"""What XLA's kernels read again. A kernel that sums rows ends with the sums (xla/service/gpu/fusions,
``reduction``): what is made with them reads all rows again. Of the gradient of a normalization one sums rows,
one makes that of the input and one sums columns; a cast to 8 bits and its largest element are a kernel each
(openxla/xla issue 7432)."""
_XLA_FORWARD = (
    *(("LayerNormalization", 1), ("RMSNormalization", 1)),
    *(("Softmax", 2), ("LogSoftmax", 2), ("CrossEntropyLoss", 2)),
)
"""The same forward, until Triton's kernels kept rows (``xla_gpu_enable_triton_softmax_fusion``, off in
831e9cef of February 2024): statistics of a norm first; of a softmax the maximum, then the sum."""
_EAGER = replace(_TORCH, joins=alone, promotes=True, rereads=_NORMS_TWICE, loss="torch")
_MEGATRON_LM = replace(
    _TORCH,
    name="fused",
    joins=megatron,
    sums_rows=True,
    rotary="one",
    interiors=True,
    loss="megatron",
    loss_in_place=True,
    products="joined",
    strided_batches=True,
    triangles=4096,
    zeroed="all",
    products_add=True,
    turns="no",
    receiving="single",
    reads_norm=True,
    averages=True,
    checks_buckets=True,
    exchanges_wait=True,
    launched_as="fused",
)
_MEGATRON_OF_2023 = replace(
    _MEGATRON_LM,
    name="fused_waiting",
    wide_softmax=True,
    waiting="everywhere",
    receiving="device",
    checks_buckets=False,
)
_MEGATRON_OF_2022 = replace(
    _MEGATRON_OF_2023, name="fused_2022", products_add=False, waiting="passes", sends_parts=True
)
_MEGATRON_OF_2021 = replace(
    _MEGATRON_OF_2022, name="fused_2021_epilogues", rereads=_NORMS_TWICE, triangles=2048, zeroed="wide"
)

_XLA = replace(
    _COMPILED,
    name="xla",
    joins=xla,
    epilogues=False,
    rereads=_XLA_BACKWARD,
    turns="all",
    scans=True,
    launched_as="compiled",
)

KERNELS = {
    each.name: each
    for each in (
        Kernels("ops"),
        replace(_EAGER, name="eager"),
        _MEGATRON_LM,
        replace(_MEGATRON_LM, name="fused_loss", loss="one"),
        replace(_MEGATRON_LM, name="fused_logits", joins=megatron_of_logits, loss="one"),
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
            unscales_first=False,
        ),
        replace(
            _EAGER,
            name="eager_deepspeed",
            zeroed="wide",
            unscales_first=False,
            averages=True,
            exchanges_wait=True,
            launched_as="eager",
        ),
        replace(_EAGER, name="eager_complex", rotary="complex", launched_as="eager"),
        replace(
            _EAGER,
            name="eager_waiting",
            rereads=(),
            rotary="one",
            loss="megatron",
            products="copied",
            copies_heads=True,
            zeroed="wide",
            waiting="reading",
            receiving="device",
            launched_as="eager_waiting",
        ),
        replace(
            _EAGER,
            name="eager_loss",
            joins=one_loss,
            loss="one",
            interiors=True,
            products="copied",
            launched_as="eager",
        ),
        replace(
            _EAGER,
            name="flash_attention",
            joins=flash_attention,
            rotary="one",
            loss="one",
            loss_in_place=True,
            interiors=True,
            products="joined",
            rereads=(),
            launched_as="eager",
        ),
        _COMPILED,
        replace(_COMPILED, name="compiled_complex", rotary="complex", launched_as="compiled"),
        replace(
            _COMPILED,
            name="compiled_blocks",
            joins=compiled_blocks,
            loss="torch",
            rotary="complex",
            launched_as="compiled",
        ),
        _XLA,
        replace(_XLA, name="xla_2021", rereads=(*_XLA_FORWARD, *_XLA_BACKWARD), scans=False),
        replace(_XLA, name="xla_te", joins=xla_with_te, rereads=()),
    )
}
"""The policies by name. ``ops``: each op of the function is a kernel; ``eager``: as torch launches them op by
op; ``eager_deepspeed``: the same, but gradients are unscaled and clipped at once, and
divided by the ranks by a pass of its own, and their sums in another type begin as zeros (DeepSpeed);
``eager_complex``: as ``eager``, but rotary embeddings multiply complex numbers in float32 (torchtitan);
``eager_waiting``: as ``eager``, with a host that waits for its device before each microbatch of which it
reads the batch, sums of gradients that begin as zeros, the kernels of Megatron-LM's cross entropy, and
FlashAttention's of rotary embeddings (nanotron, models/llama.py: ``flash_rotary_embedding``; that it packs
keys and values for it, and makes lengths of sequences, some nine kernels of a layer, is not counted);
``fused``: with the fusions that Megatron-LM has by default, products that add to sums of gradients among
them, and a host that looks for NaNs in each bucket before it is sent, as since December 2023;
``fused_loss``: with that of the cross entropy too (``--cross-entropy-loss-fusion``), which saves float32;
``fused_logits``: with one of logits in 16 bits, whose gradient takes their place (llm.c,
llmc/fused_classifier.cuh); ``flash_attention``: as ``eager``, with such a loss, biases that kernels add
with GELU and residuals, and one for each rotary embedding (its training scripts; modules/mha.py);
``fused_waiting``, ``fused_loss_waiting``: as ``fused`` and ``fused_loss``,
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
``compiled_blocks``: the same as that, but the loss is torch's (torchtitan in 2024); ``xla``: as XLA joins
them on GPUs since 2024 (MaxText): sums of rows end a kernel, casts to 8 bits are of no other, and biases are
added with what follows, not by a product (``set_xla_gpu_enable_cublaslt(false)``; its rewriter adds those of
products that nothing else reads); ``xla_2021``: the same forward too, as until early 2024 (Parax);
``xla_te``: the same, beside kernels of Transformer Engine for norms, activations and their casts (Pax), with
which XLA joins nothing. All but the first have multi-tensor kernels. One weight for queries, keys and values,
and one for a gate and what it gates, have Megatron-LM (6985e58 of 2021, megatron/model/transformer.py:
``query_key_value``; core 0.12: ``linear_qkv``, ``linear_fc1``, also as layers of Transformer Engine's in 8
bits, and of experts ``weight1``), llm-foundry (v0.1.0 to v0.4.0, models/layers/attention.py: ``Wqkv``, and
``chunk`` or ``split`` of its result) and nanotron (4796d2d9, models/llama.py: ``qkv_proj``, ``gate_up_proj``,
split); torchtitan and Hugging Face's Llama have them apart."""


def kernels_named(name: str) -> Kernels:
    """Return the policy of a name; ``fused:layers`` is ``fused`` in graphs (:meth:`Kernels.in_graphs`).

    Raises :class:`PlanError` for another name.

    >>> kernels_named("fused_loss:layers").way
    'fused:layers'
    """
    base, colon, graphs = name.partition(":")
    if base not in KERNELS:
        raise PlanError(f"kernels={name!r} is unknown; choose one of {choices_for(name, KERNELS)}")
    return KERNELS[base].in_graphs(graphs) if colon else KERNELS[base]
