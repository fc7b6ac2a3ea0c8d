"""The ops that gather parameters over data-parallel ranks, and what becomes of their results.

Copies out of the buffer that a collective filled, and into the one that the next reads.

Rows of sequences and of experts are copied so (:mod:`distsim.transforms.tensor_parallel.dtensors`,
:mod:`distsim.transforms.tensor_parallel.expert_rows`), and parameters and gradients by torch's FSDP2:
``foreach_all_gather_copy_out`` and ``foreach_reduce`` of ``torch/distributed/fsdp/_fully_shard/
_fsdp_collectives.py``, both on the current stream, that of the computation, as one kernel of a layer:

- parameters are copied when their layer begins, in the type in which they were gathered; what was gathered
  is free after that, and in backward the next layer is gathered only then (``pre_backward``: copied, then
  prefetched, by streams that wait for the copy);
- gradients are copied when backward of a layer is done, and cast to the type in which they are summed. The
  copy waits for the reduction before (``reduce_scatter_state`` of ``_fsdp_param_group.py``): one buffer of
  gradients is in use at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from functools import partial

from distsim.hardware.rank_axes import OUTER, joined_axes, over_tensor
from distsim.ir import Attributes, Function, Mesh, Op, Value, needed_ops, rewire_op, rewrite
from distsim.ir.module_names import added_name
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.ops.conversion import ONCE
from distsim.ops.onnx_bridge import type_number
from distsim.ops.places import shape_of
from distsim.transforms.data_parallel.gradient_buckets import grouped
from distsim.transforms.op_graph import is_sum, numbered
from distsim.transforms.recompute.joint import ChangedPair, Joint, changed_pair, find_pairs, with_calls
from distsim.transforms.recompute.saves import Tag
from distsim.transforms.sharding.layout import Placement


def replicating_axis(mesh: Mesh, place: Placement | None = None) -> str:
    """Return the name of all axes together over which ZeRO divides what lies at a place, or a batch.

    These divide the data, and all their ranks have a parameter there; where ranks of an outer axis are to
    have the same parts it is not among them. Empty if there are none; axes of a single rank do not count.
    """
    return joined_axes(_having(mesh, place, outer=False))


def outer_axis(mesh: Mesh, place: Placement) -> str:
    """Return the axis whose ranks have the same parts of what ZeRO divides there; empty if there is none."""
    return joined_axes(_having(mesh, place, outer=True))


def _having(mesh: Mesh, place: Placement | None, outer: bool) -> list[str]:
    """Return the axes of the data, outer ones or others, whose ranks all have what lies at a place."""
    apart = mesh.axes_of(OUTER) if OUTER in (*dict(mesh.axes), *mesh.views) else ()
    data = [
        axis for axis, size in mesh.axes if size > 1 and not over_tensor(axis) and (axis in apart) == outer
    ]
    return [axis for axis in data if place is None or not place.along(axis).sharded]


def sums_over(mesh: Mesh, axis: str, names: Sequence[str]) -> bool:
    """Whether what sums along an axis does so over all ranks along those axes together, and no others.

    >>> from distsim.ir.device import Device
    >>> from distsim.hardware.rank_axes import RankAxes
    >>> mesh = RankAxes.of(dp=4, tp=1, cp=2, inner=2).mesh([Device(i, "gpu") for i in range(8)])
    >>> sums_over(mesh, "dp+cp", ["dp_outer", "dp_inner+cp"]), sums_over(mesh, "dp", ["dp_inner+cp"])
    (True, False)
    """
    summed, own = ({each for name in some for each in mesh.axes_of(name)} for some in ([axis], names))
    return all(mesh.axis_size(each) == 1 for each in summed ^ own)


def gathered(function: Function, reshard: bool = True, keep_last: bool = False) -> dict[Value, Tag]:
    """Return tags that say what becomes of gathered parameters between forward and backward.

    The chain of each parameter is followed through casts, gathers over dp and views. ``reshard``: all of a
    chain is recomputed, so no gathered weight is held as an activation. Otherwise the last value that is no
    view is saved, and the rest is recomputed from it or from the parameter: of views, which need what they
    are views of, those that backward reads. ``keep_last``: so it is with what the last unit reads, after the
    last Call of forward: backward begins with it, and torch's FSDP2 keeps norm and output head. What is made
    once a step (:data:`ONCE`) of a weight that is gathered again is made again as well.
    """
    tags: dict[Value, Tag] = {}
    dropped = set[Value]()
    forward = numbered(function).forward
    ahead = zip(function.ops, forward, strict=True)
    late = {value for op, forward in ahead if not forward for value in op.inputs}
    layers = [place for place, op in enumerate(function.ops) if op.is_call and forward[place]]
    body = {value for op in function.ops[: 1 + max(layers, default=len(function.ops))] for value in op.inputs}
    for chain in chains(function):
        kept = not reshard or (keep_last and chain[-1].outputs[0] not in body)
        tags |= dict.fromkeys([v for op in chain for v in op.outputs], Tag.MUST_RECOMPUTE)
        if kept:
            last = max(i for i, op in enumerate(chain) if not operator(op.op_type).view)
            tags[chain[last].outputs[0]] = Tag.MUST_SAVE
            if chain[-1].outputs[0] not in late:
                for op in chain[last + 1 :]:
                    del tags[op.outputs[0]]
        else:
            dropped.update([v for op in chain for v in op.outputs])
    return tags | _follow(function, dropped)


def _follow(function: Function, dropped: set[Value]) -> dict[Value, Tag]:
    """Return tags that say of what is made once a step of dropped values that it is recomputed."""
    after: list[Op] = []
    for op in function.ops:
        if op.inputs and not op.is_call and dropped.issuperset(op.inputs) and dropped.isdisjoint(op.outputs):
            dropped.update(op.outputs)
            after.append(op)
    once = [value for op in after if op.attributes.get(ONCE) for value in op.outputs]
    made = [value for op in needed_ops(after, once) for value in op.outputs]
    return dict.fromkeys(made, Tag.MUST_RECOMPUTE)


def gathered_behind(function: Function, parameters: Container[Value]) -> Function:
    """Return the joint function whose backward pass of a layer reads what copies that it reads were cast of.

    A layer casts a weight for both passes, as torch.autocast has it, and its backward pass reads the copy
    alone, which is saved. Frameworks gather the weight for it all the same (torch's FSDP2, ``pre_backward``
    of ``_fsdp_param_group.py``; DeepSpeed, ``pre_sub_module_backward_function`` of ``parameter_offload.py``):
    what reads the copy first waits for it.
    """
    calls = dict[Op, Op]()
    for pair in find_pairs(Joint.of(function)):
        places = frozenset([place for place, v in enumerate(pair.forward.inputs) if v in parameters])
        calls |= changed_pair(pair, (gathered_behind, places), partial(_behind, places=places)).calls
    return with_calls(function, calls)


def _behind(joint: Joint, places: frozenset[int]) -> ChangedPair:
    """Return a layer in which what backward reads of casts of some inputs waits for these."""
    function = joint.function
    source = {value: value for place, value in enumerate(function.inputs) if place in places}
    cast = set[Value]()
    for op in function.ops:
        if len(op.inputs) == 1 and op in joint.forward and op.inputs[0] in source and _passes(op):
            source[op.outputs[0]] = source[op.inputs[0]]
            if op.op_type == "Cast" or op.inputs[0] in cast:
                cast.add(op.outputs[0])

    def waiting(op: Op, env: dict[Value, Value]) -> Iterator[Op]:
        for value in dict.fromkeys(op.inputs) if joint.behind(op) else ():
            if value in cast and value not in env:
                env[value] = Value(value.name, value.type)
                yield Op("OptimizationBarrier", (value, source[value]), (env[value],), name=added_name(op))
        yield rewire_op(op, env if joint.behind(op) else {})

    changed = replace(rewrite(function, waiting), outputs=function.outputs)
    return ChangedPair(joint if len(changed.ops) == len(function.ops) else replace(joint, function=changed))


def chains(function: Function) -> list[tuple[Op, ...]]:
    """Return the ops that gather each parameter over dp: casts, the gather, views, in order."""
    known: dict[Value, tuple[Op, ...]] = dict.fromkeys(function.parameters, ())
    last: dict[Value, None] = {}
    for op in function.ops:
        if len(op.inputs) == 1 and op.inputs[0] in known and _passes(op):
            before = known[op.inputs[0]]
            known[op.outputs[0]] = (*before, op)
            last.pop(op.inputs[0], None)
            last[op.outputs[0]] = None
    return [known[value] for value in last if any(gathers(op) for op in known[value])]


def gathers(op: Op) -> bool:
    """Whether an op gathers something flat over ranks that have other parts of the data: a parameter."""
    flat = op.op_type == "MPIAllgather" and len(shape_of(op.inputs[0])) == 1
    return flat and not over_tensor(op.attributes["axis"])


def over_tensor_ranks(op: Op, op_type: str) -> bool:
    """Whether an op is a collective of this type, of one tensor, over tensor-parallel ranks."""
    return op.op_type == op_type and len(op.inputs) == 1 and over_tensor(op.attributes["axis"])


def listed(op: Op) -> Op:
    """Return an op that gathers as one that gathers into a list, of a tensor of each rank."""
    return replace(op, attributes=Attributes({**op.attributes, "listed": 1}))


def _passes(op: Op) -> bool:
    return gathers(op) or op.op_type == "Cast" or (operator(op.op_type).view and not is_sum(op))


def copied_out(gather: Op) -> tuple[Op, Op]:
    """Return an op that brings what it does into a buffer, and the op that copies that out of it.

    That is done once a step where the gather is. What it copies has the places of what was gathered.
    """
    buffer = tuple([Value(made.name, made.type) for made in gather.outputs])
    marks = Attributes({ONCE: True} if gather.attributes.get(ONCE) else {})
    return replace(gather, outputs=buffer), Op("CopyOut", buffer, gather.outputs, marks)


def copied_in(reduction: Op, sources: Sequence[Value], awaited: Value | None = None) -> list[Op]:
    """Return ops that copy gradients, or rows, into a buffer, and the op that reduces or sends it.

    ``sources`` has for each operand of that what is copied, of its shape and of any type. ``awaited`` is what
    the copy waits for, if anything.
    """
    (to,) = {as_tensor(value.type, value.name).dtype for value in reduction.inputs}
    found = grouped(range(len(sources)), lambda place: as_tensor(sources[place].type, "gradient").dtype)
    ops, buffer = list[Op](), list(reduction.inputs)
    for places in found:
        read = [sources[place] for place in places]
        if awaited is not None:
            late = Value(read[0].name, read[0].type)
            ops.append(Op("OptimizationBarrier", (read[0], awaited), (late,)))
            read[0] = late
        for place in places:
            buffer[place] = Value(buffer[place].name, buffer[place].type)
        casts = as_tensor(read[0].type, "gradient").dtype != to
        attributes = {"to": type_number(to)} if casts else {}
        copies = tuple([buffer[place] for place in places])
        ops.append(Op("CopyIn", tuple(read), copies, Attributes(attributes)))
    return [*ops, replace(reduction, inputs=tuple(buffer))]
