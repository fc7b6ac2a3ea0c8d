"""``ScatterND`` and ``ScatterElements``: a copy of the data in which some places are replaced or added to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distsim.errors import UnknownOperatorError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.bounds import require
from distsim.ops.indexing import Where, element_places, elements_bounds, elements_labels, linear_in, nd_places
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import (
    Array,
    Bounds,
    GradientContext,
    Operator,
    Shapes,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    register,
)
from distsim.ops.places import by_place, operands, picked, places, select, wanted
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

_SCATTER = ("data", "indices", "updates")
_GRAD = ("indices", "dy")

Labels = Callable[[Signature, tuple[str, ...]], dict[str, tuple[Dim, ...]]]
"""(signature, formal names) -> the labels of operands by name; those of ``data`` are the output's."""


def _work(signature: Signature) -> Work:
    """Copy the data, then read the updates and write them (in a reduction, read the places too)."""
    index = places(_SCATTER, signature.attributes, len(signature.inputs))
    updates = signature.inputs[index["updates"]] if "updates" in index else None
    added = float(updates.nbytes) if updates is not None else 0.0
    reduces = signature.attributes.get("reduction", "none") != "none"
    flops = float(updates.size) if updates is not None and reduces else 0.0
    read = bytes_of(signature.inputs) + (added if reduces else 0.0)
    return Work(flops, read, bytes_of(signature.outputs) + added)


def _gradient(ctx: GradientContext, gather: str) -> Sequence[Value | None]:
    """The data's gradient is zero where it was replaced; the updates' is gathered from there."""
    reduction = ctx.attributes.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise UnknownOperatorError(
            f"{ctx.op!r}: there is no gradient for reduction={reduction!r}, only for none and add"
        )
    index = places(_SCATTER, ctx.attributes, len(ctx.inputs))
    indices = (ctx.inputs[index["indices"]],) if "indices" in index else ()
    kept = picked(ctx.attributes, "axis", "indices")
    grads: dict[str, Value | None] = {}
    if wanted(_SCATTER, ctx, "data"):
        replaced = reduction == "none"
        grads["data"] = ctx.add(f"{ctx.op.op_type}Grad", *indices, ctx.grad, **kept) if replaced else ctx.grad
    if wanted(_SCATTER, ctx, "updates"):
        grads["updates"] = ctx.add(gather, ctx.grad, *indices, **kept)
    return by_place(_SCATTER, ctx, grads)


def _grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("the gradient of a scatter", inputs, 2 - ("indices" in attributes))
    return (inputs[-1].on(common_device("the gradient of a scatter", inputs)),)


def _grad_work(signature: Signature) -> Work:
    index = places(_GRAD, signature.attributes, len(signature.inputs))
    indices = float(signature.inputs[index["indices"]].nbytes) if "indices" in index else 0.0
    moved = bytes_of(signature.outputs)
    return Work(0.0, moved + indices, moved)


def _linear(signature: Signature) -> tuple[tuple[int, ...], ...]:
    if signature.attributes.get("reduction", "none") not in ("none", "add"):
        return ()
    return linear_in(_SCATTER, signature, "data", "updates")


# ScatterND: the dimensions of the data that an index tuple does not reach may be divided.


def _nd_labels(signature: Signature, names: tuple[str, ...]) -> dict[str, tuple[Dim, ...]]:
    index = places(names, signature.attributes, len(signature.inputs))
    ranks = {name: signature.inputs[i].rank for name, i in index.items()}
    if "updates" in signature.attributes:  # one number has one shape: nothing can be divided
        return {name: (None,) * rank for name, rank in ({"data": signature.outputs[0].rank} | ranks).items()}
    if "indices" in index:
        depth = signature.inputs[index["indices"]].shape[-1]
    else:
        depth = static_array(signature.attributes["indices"], None).shape[-1]
    rest = letters(signature.outputs[0].rank - depth)
    whole: tuple[Dim, ...] = (*((None,) * depth), *rest)
    made: dict[str, tuple[Dim, ...]] = dict.fromkeys(("data", "dy"), whole)
    made["indices"] = (None,) * ranks.get("indices", 0)
    made["updates"] = (*(None,) * (ranks.get("updates", len(rest)) - len(rest)), *rest)
    return made


def _nd_bounds(attributes: Attributes, shapes: Shapes) -> None:
    data, indices, updates = shapes["data"], shapes.get("indices", ()), shapes.get("updates", ())
    depth = indices[-1] if indices else 0
    require(1 <= depth <= len(data), f"ScatterND: indices {list(indices)} do not fit {list(data)}")
    wanted = (*indices[:-1], *data[depth:])
    require(updates == wanted, f"ScatterND: updates {list(updates)} must be {list(wanted)}")


# ScatterElements: every dimension may be divided but the axis.


def _elements(signature: Signature, names: tuple[str, ...]) -> dict[str, tuple[Dim, ...]]:
    index = places(names, signature.attributes, len(signature.inputs))
    data = signature.outputs[0].shape
    whole: tuple[Dim, ...] = (None,) * len(data)
    if len(index) < len(names):
        return dict.fromkeys(("data", "dy", "indices", "updates"), whole)
    shape = signature.inputs[index["indices"]].shape
    axis = signature.attributes.get("axis", 0) % len(data)
    source, small = elements_labels(signature.attributes, data, shape)
    small = (*small[:axis], None, *small[axis + 1 :])
    return {"data": source, "dy": source, "indices": small, "updates": small}


def _register(
    name: str,
    gather: str,
    labels: Labels,
    where: Where,
    bounds: Bounds,
) -> None:
    """Register a scatter and the gradient of its data, given the labels of operands and where it writes."""

    def sharding(signature: Signature) -> ShardingRule:
        found = labels(signature, _SCATTER)
        return ShardingRule(select(_SCATTER, signature, **found), (found["data"],), _linear(signature))

    def grad_sharding(signature: Signature) -> ShardingRule:
        found = labels(signature, _GRAD)
        linear = linear_in(_GRAD, signature, "dy")
        return ShardingRule(select(_GRAD, signature, **found), (found["dy"],), linear)

    def compute_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(_GRAD, attributes, arrays)
        made = given["dy"].copy()
        made[where(given["indices"], attributes, made.ndim)] = 0
        return [made]

    register(
        Operator(
            name,
            work=_work,
            gradient=lambda ctx: _gradient(ctx, gather),
            sharding=sharding,
            formals=_SCATTER,
            bounds=bounds,
        )
    )
    register(
        Operator(
            f"{name}Grad",
            types=_grad_types,
            compute=compute_grad,
            work=_grad_work,
            sharding=grad_sharding,
            formals=_GRAD,
        )
    )


_register(
    "ScatterND",
    "GatherND",
    _nd_labels,
    nd_places,
    Bounds(_SCATTER, _nd_bounds),
)
_register(
    "ScatterElements",
    "GatherElements",
    _elements,
    element_places,
    elements_bounds("ScatterElements", _SCATTER),
)
register(Operator("Scatter", bounds=elements_bounds("Scatter", _SCATTER)))
