"""Joint functions: forward and backward in one."""

from __future__ import annotations

from distsim.ir.dead import trim
from distsim.ir.function import Function
from distsim.ir.type import Tensor


def brings_backward(function: Function) -> bool:
    """Whether a function is joint: it returns a scalar loss and the gradient, or new value, of a parameter.

    Such an output has the type of a parameter and follows, as the prediction does in the gradient of a loss,
    from every input that the loss follows from, but is nothing that the loss is made of. The type alone says
    little: running statistics are like the scale of their normalization, predictions may be like a weight.
    """
    tensors = {value: value.type for value in function.outputs if isinstance(value.type, Tensor)}
    losses = [v for v, type_ in tensors.items() if type_.rank == 0 and type_.dtype.is_floating]
    if not losses:
        return False
    forward = trim(function, losses[:1], ()).function
    held = {*forward.inputs, *(value for op in forward.ops for value in op.outputs)}
    trained = {value.type for value in function.parameters}
    likely = [v for v, type_ in tensors.items() if v not in held and type_.rank and type_ in trained]
    return any(set(forward.inputs).issubset(trim(function, [v], ()).function.inputs) for v in likely)
