"""Passes over all gradients before the update: looked through for NaNs, divided by the ranks of the data,
unscaled, clipped.

Gradients are averaged over data-parallel ranks. NCCL does so as it sums (``ReduceOp.AVG``) for torch's FSDP2
(010ae4a8, distributed/fsdp/_fully_shard/_fsdp_collectives.py: ``_get_gradient_divide_factors``, but for
float16) and nanotron (4796d2d9, optim/gradient_accumulator.py: ``reduce_op``). Others divide by a kernel of
their own, which reads and writes the buffer that is sent, on the stream of the computation:

- Megatron-LM before it is sent, one kernel a buffer (6985e58 of April 2021, megatron/model/distributed.py:
  ``buffer_.data /= mpu.get_data_parallel_world_size()``, or ``coalesced /=``; its distributed optimizer since
  March 2022, optimizer/distrib_optimizer.py: ``gbuf /= data_parallel_world_size``), or a bucket (25c7eb28 of
  October 2023, core/distributed/grad_buffer.py; core 0.12, param_and_grad_buffer.py, ``start_grad_sync``:
  ``bucket.grad_data *= bucket.gradient_scaling_factor``, unless ``--ddp-average-in-collective`` is given);
- DeepSpeed one a bucket: with ZeRO 1 and 2 before it is sent (fbece50b of April 2021, runtime/zero/stage2.py,
  and v0.9.5, stage_1_and_2.py, ``average_tensor``: ``tensor.div_``), without it and in its pipelines after
  that (b005db86 and v0.9.5, runtime/engine.py, ``allreduce_bucket``: ``tensor_to_allreduce.mul_``), which is
  taken as before here.

torch's DDP divides as it copies gradients into its buckets; FSDP1 (00ae0bc9, _runtime_utils.py, stream
``post_backward``; 07b3040a, algorithms/_comm_hooks/default_hooks.py: ``grad.div_``) and DeepSpeed's ZeRO-3
(fbece50b, stage3.py: ``reduction_stream``) do so on a stream beside the computation. None of these is
counted, nor are divisions by a single rank, which Megatron-LM did until May 2024 (795b45cc).

Before that Megatron-LM takes the norm of each bucket, by one kernel that reads it, and its host waits for the
number, of which it asks whether it is a NaN, before it goes on to divide and send the bucket, whether or not
buckets are sent while backward runs (d66807759c of December 2023, core/distributed/grad_buffer.py,
``start_grad_sync``: ``norm = self.data.norm(p=2)``, ``assert not norm.isnan()``; core 0.12 and 0.15,
param_and_grad_buffer.py, ``check_grads``, called by ``start_grad_sync``: ``grad_data.norm(p=2)``;
rerun_state_machine.py, ``validate_result``: ``if result_rejected``). It does so by default, but not where a
loss in float16 has a dynamic scale, "where NaNs in grads / loss are signal to the loss scaler"
(megatron/arguments.py of that commit and megatron/training/arguments.py of core 0.12:
``check_for_nan_in_loss_and_grad = False`` if ``not args.loss_scale``): **a loss that is scaled is taken to
have one**. Kernels of a single number, and a second question of the same one in core 0.12 (whether it is
infinite), are not counted, nor is the norm of gradients that one rank alone has, which Megatron-LM takes too.

A loss in float16 is scaled, so its gradients are (:mod:`distsim.ops.training`). What takes that out reads and
writes all of them, and so does what clips them to a norm. Frameworks differ in whether these are one pass:

- Megatron-LM unscales all gradients, and looks for what is not finite, by one multi-tensor kernel; then it
  takes their norm, and multiplies them by another one if the norm is over the limit (6985e58 of April 2021
  and core 0.12, optimizer/optimizer.py: ``_unscale_main_grads_and_check_for_nan``,
  ``torch._amp_foreach_non_finite_check_and_unscale_``; optimizer/clip_grads.py: ``multi_tensor_l2norm``,
  ``if clip_coeff < 1.0``, ``multi_tensor_scale``). So does torch's ``GradScaler``, whose ``unscale_`` comes
  before ``clip_grad_norm_`` (0202916b, torch/amp/grad_scaler.py: ``_unscale_grads_``).
- DeepSpeed takes the norm of scaled gradients and multiplies once, by a factor that has both (fbece50b of
  April 2021, runtime/zero/stage2.py and stage3.py, and v0.9.5, stage_1_and_2.py: ``unscale_and_clip_grads``,
  ``combined_scale``).

Whether Megatron-LM multiplies depends on the step: **the norm is assumed to be over the limit**, with and
without a loss scale, as nothing here says what gradients are. What torch and nanotron run multiplies whatever
the norm is (4796d2d9, optim/clip_grads.py: ``clip_coef_clamped``). Without clipping there is one pass in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distsim.ir import Attributes, Environment, Function, Op, Value, rewire_op, rewrite
from distsim.ir.rewrite import KeptRewrites
from distsim.ir.type import as_tensor
from distsim.ops.onnx_bridge import type_number
from distsim.ops.training import AVERAGE, NORM, sums_squares
from distsim.plan.buckets import Buckets
from distsim.transforms.kernels import Kernels

_FACTOR, _SCALE = "GradientFactor", "ScaleGradient"
_UNSCALED = KeptRewrites("functions whose gradients are unscaled before their norm, by function", 2)


def checks_gradients(function: Function, buckets: Buckets | None) -> Buckets | None:
    """Return the buckets of a joint function, which are looked through for NaNs only if no loss is scaled."""
    if buckets is None or not buckets.checked:
        return buckets
    scaled = any(op.op_type == _FACTOR and "loss_scale" in op.attributes for op in function.ops)
    return replace(buckets, checked=False) if scaled else buckets


def passed(reduction: Op, buckets: Buckets) -> list[Op]:
    """Return what is done to a bucket before it is summed over the ranks, and the op that sums it."""
    ops = [reduction]
    if buckets.checked:
        ops = _checked(reduction)
    if buckets.averaged:
        ops[-1:] = _averaged(ops[-1])
    return ops


def _checked(reduction: Op) -> list[Op]:
    """Return the op that takes the norm of a bucket, what the host waits for, and what sums the bucket."""
    first, *others = reduction.inputs
    type_ = as_tensor(first.type, first.name)
    norm, there = Value(f"{first.name}.norm", type_.with_shape(())), Value(first.name, first.type)
    ops = [Op(NORM, reduction.inputs, (norm,)), Op("Await", (first, norm), (there,))]
    return [*ops, replace(reduction, inputs=(there, *others))]


def _averaged(reduction: Op) -> list[Op]:
    """Return the op that divides a bucket by the ranks, where it lies, and the op that sums it over them."""
    divided = tuple([Value(value.name, value.type) for value in reduction.inputs])
    pass_ = Op(AVERAGE, reduction.inputs, divided, Attributes({"in_place": True}))
    return [pass_, replace(reduction, inputs=divided)]


def unscale_first(function: Function, kernels: Kernels) -> Function:
    """Return the joint function in which gradients are unscaled, by a pass of its own, before their norm.

    It is the function itself for policies that unscale and clip at once, and where gradients are not scaled,
    or not clipped. Made once per function, of what a rank runs: pipelines cut it after that.
    """
    if not kernels.unscales_first:
        return function
    return _UNSCALED.of(function, None, lambda: _unscaled(function))


def _unscaled(function: Function) -> Function:
    factor = next((op for op in function.ops if op.op_type == _FACTOR), None)
    if factor is None or not {"clip", "loss_scale"} <= factor.attributes.keys():
        return function
    return rewrite(function, _Unscaling(function, factor).change)


class _Unscaling:
    """Writes a function in which each gradient is unscaled before the first op that reads it for its norm,
    or for the update."""

    def __init__(self, function: Function, factor: Op) -> None:
        self.factor = factor
        self.by = 1.0 / factor.attributes["loss_scale"]
        self.gradients = {value for op in function.ops for value in self._read_by(op)}
        self.unscaled: dict[Value, Value] = {}

    def _read_by(self, op: Op) -> tuple[Value, ...]:
        """Return the gradients whose squares an op sums, or that it multiplies by the factor."""
        if op.op_type == "SquareSum" or sums_squares(op):
            return op.inputs
        if self.factor.outputs[0] not in op.inputs:
            return ()
        if not op.is_call:
            return op.inputs[:1] if op.op_type == _SCALE else ()
        scaled = {part.inputs[0] for part in op.callee.ops if part.op_type == _SCALE}
        return tuple([value for value, own in zip(op.inputs, op.callee.inputs, strict=True) if own in scaled])

    def change(self, op: Op, env: Environment) -> Iterator[Op]:
        for value in dict.fromkeys(self._read_by(op)):
            if value not in self.unscaled:
                type_ = as_tensor(value.type, value.name)
                made = self.unscaled[value] = Value(value.name, type_)
                given = Attributes({"to": type_number(type_.dtype), "factor": self.by})
                yield Op(_SCALE, (env.get(value, value),), (made,), given)
        if op is self.factor:
            left = {name: number for name, number in op.attributes.items() if name != "loss_scale"}
            op = replace(op, attributes=Attributes(left))
        yield rewire_op(op, {**env, **{v: self.unscaled[v] for v in self._read_by(op)}})
