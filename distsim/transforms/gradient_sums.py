"""Sums of gradients over microbatches as frameworks take them: onto zeros, and within the products.

Autograd keeps the first gradient of a weight and adds the others to it, and so does a block of a stage as it
is cut. Where a framework sums gradients in a buffer of its own (``Kernels.zeroed``), one kernel fills that
with zeros once a step, and the first gradient is added to it as the others are: Megatron-LM's local DDP
(megatron/model/distributed.py: ``zero_grad_buffer``, ``param.main_grad.add_(param.grad.data)``) where sums
have another type (b4bc51b1 of March 2021), and by default whatever their type since e8fb052f of August 2021,
core 0.12 too (core/distributed/param_and_grad_buffer.py: ``reset``); nanotron's sums in float32 (c2528430,
optim/gradient_accumulator.py: ``_accumulate_grad``, ``_contiguous_fp32_grad_buffer.zero_()``); DeepSpeed's in
float32 (b005db86, runtime/bf16_optimizer.py: ``flat_gradients.zero_()``, ``hp_grad.data.add_``), whose casts
before that are not counted.

With ``--gradient-accumulation-fusion``, Megatron-LM's default, the product that makes the gradient of a
weight adds it to its sum (``Kernels.products_add``; core/tensor_parallel/layers.py:
``fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(total_input, grad_output, weight.main_grad)``, a GEMM
whose beta is 1 in apex, csrc/megatron/fused_weight_gradient_dense_cuda.cu; Transformer Engine's layers with
``fuse_wgrad_accumulation``): since 83b1e42f of February 2022 where sums are in float32, since 07916bf2 of
September 2022 in 16 bits. What no product makes, biases, norms and embeddings, is added by a kernel for each,
as soon as it is made. Layers are callees: these are given their sums then, and return them with their part
added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.cache import Cache
from distsim.ir import Attributes, Function, Op, Value
from distsim.ir.type import as_tensor
from distsim.ops.training import ZERO_SUMS
from distsim.program.block import Block, StageBlocks
from distsim.transforms.kernels import Kernels


@dataclass(frozen=True)
class _Sums:
    """A backward pass that adds to sums, with the place of each op among those before (of a new one -1); and
    the first one of a step, which begins with zeros."""

    later: Function
    places: tuple[int, ...]
    first: Function


_SUMS = Cache[Function, _Sums | None]("backward passes that add to buffers, by function and policy", 4)
_ADDING = Cache[Function, Function]("callees that add to sums, by function and places of gradients", 8)


def sum_gradients(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, whose backward passes sum gradients as the kernels of a policy do.

    Those that share Functions share them still.
    """
    if kernels.zeroed == "no":
        return tuple(stages)
    return tuple([(forward, _summing(backward, kernels), updates) for forward, backward, updates in stages])


def _summing(block: Block, kernels: Kernels) -> Block:
    more, count = block.accumulating, len(block.accumulated)
    if more is None or not count:
        return block
    asked = count, kernels.zeroed, kernels.products_add, block.function.name
    found = _SUMS.get(more, asked, lambda: _onto_zeros(more, count, kernels, block.function.name))
    if found is None:
        return block
    old = block.accumulating_names
    names = tuple([old[place] if place >= 0 else "" for place in found.places]) if old else ()
    return replace(
        block,
        function=found.first,
        accumulating=found.later,
        names=("", *names) if names else (),
        accumulating_names=names,
    )


def _onto_zeros(more: Function, count: int, kernels: Kernels, name: str) -> _Sums | None:
    """Return the passes of a step that add to ``count`` sums, the last inputs; None if they begin without."""
    given = more.inputs[len(more.inputs) - count :]
    added = [op for op in more.ops if op.op_type == "AccumulateInto" and op.inputs[0] in given]
    if kernels.zeroed == "wide" and all(_dtype(op.inputs[0]) == _dtype(op.inputs[1]) for op in added):
        return None
    later, places = _taken_inside(more) if kernels.products_add else (more, tuple(range(len(more.ops))))
    types = [as_tensor(value.type, value.name) for value in given]
    zeros = Op(
        ZERO_SUMS,
        (),
        given,
        Attributes(
            {
                "shapes": tuple([type_.shape for type_ in types]),
                "dtypes": tuple([type_.dtype.name for type_ in types]),
            }
        ),
    )
    first = Function(name, later.inputs[: len(later.inputs) - count], (zeros, *later.ops), later.outputs)
    return _Sums(later, places, first)


def _dtype(value: Value) -> object:
    return as_tensor(value.type, value.name).dtype


def _taken_inside(function: Function) -> tuple[Function, tuple[int, ...]]:
    """Return the function whose callees add the gradients that they make, and nothing else reads, to their
    sums; and the place of each of its ops before."""
    readers = Counter([*function.outputs * 2, *(value for op in function.ops for value in op.inputs)])
    made = {value for op in function.ops if op.is_call for value in op.outputs}
    inside = {
        op.inputs[1]: op
        for op in function.ops
        if op.op_type == "AccumulateInto" and op.inputs[1] in made and readers[op.inputs[1]] == 1
    }
    if not inside:
        return function, tuple(range(len(function.ops)))
    gone = set(inside.values())
    kept = [(place, op) for place, op in enumerate(function.ops) if op not in gone]
    ops = tuple([_adding_call(op, inside) if op.is_call else op for _, op in kept])
    return replace(function, ops=ops), tuple([place for place, _ in kept])


def _adding_call(call: Op, inside: Mapping[Value, Op]) -> Op:
    """Return a Call whose callee adds those of its results that ``inside`` has a sum for."""
    places = tuple([place for place, value in enumerate(call.outputs) if value in inside])
    if not places:
        return call
    added = [inside[call.outputs[place]] for place in places]
    sums = tuple([op.inputs[0] for op in added])
    types = tuple([value.type for value in sums])
    callee = _ADDING.get(call.callee, (places, types), lambda: _adding(call.callee, places, sums))
    outputs = tuple([inside[value].outputs[0] if value in inside else value for value in call.outputs])
    return replace(call, inputs=(*call.inputs, *sums), outputs=outputs, subfunctions=(callee,))


def _adding(callee: Function, places: Sequence[int], sums: Sequence[Value]) -> Function:
    """Return a callee that is given sums, too, and returns them in these places, with its part added."""
    outputs, given = list(callee.outputs), list[Value]()
    follows: dict[Value, list[Op]] = {}
    for place, total in zip(places, sums, strict=True):
        part = outputs[place]
        so_far, made = Value(f"{part.name}.sum", total.type), Value(part.name, total.type)
        given.append(so_far)
        outputs[place] = made
        follows.setdefault(part, []).append(Op("AccumulateInto", (so_far, part), (made,)))
    ops = [op for value in callee.inputs for op in follows.get(value, ())]
    for op in callee.ops:
        after = [each for value in op.outputs for each in follows.get(value, ())]
        ops += [op, *[replace(each, name=op.name) for each in after]]
    whole = Function(callee.name, (*callee.inputs, *given), tuple(ops), tuple(outputs))
    return _taken_inside(whole)[0]
