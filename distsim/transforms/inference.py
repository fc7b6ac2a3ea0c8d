"""as_inference: a forward pass as it runs where nothing is trained: nothing is dropped, no loss is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distsim.ir import Attributes, Environment, Function, Op, Value, rewire_op, rewrite, rewrite_all, trim
from distsim.transforms.autodiff.precision import LOSSES


def as_inference(function: Function) -> Function:
    """Return a forward pass that drops nothing, and returns what its loss is taken of in place of that.

    A loss is one that an operator for it takes, as a cross entropy, and what is added to it; another stays,
    with what it reads.

    >>> from distsim.models import gpt
    >>> made = as_inference(gpt(layers=1, hidden=16, heads=2, seq=4, batch=2, vocab=8))
    >>> [value.type.shape for value in made.outputs], [value.name for value in made.inputs[:3]]
    ([(2, 4, 8)], ['tokens', 'wte', 'wpe'])
    """
    function = rewrite_all(function, lambda _, current: rewrite(current, _Inference(current)))
    makers = {value: op for op in function.ops for value in op.outputs}
    outputs = tuple([_predicted(value, makers) or value for value in function.outputs])
    if outputs == function.outputs:
        return function
    read = trim(replace(function, outputs=outputs)).function
    used = {value for op in read.ops for value in op.inputs}
    return replace(read, inputs=tuple([value for value in read.inputs if value in used]))


def _predicted(value: Value, makers: Mapping[Value, Op]) -> Value | None:
    """Return what a loss is taken of, also of one that another is added to; None of what is no loss."""
    op = makers.get(value)
    if op is None or op.op_type not in (*LOSSES, "Add", "Sum"):
        return None
    if op.op_type in LOSSES:
        return op.inputs[0]
    return next((found for each in op.inputs if (found := _predicted(each, makers)) is not None), None)


class _Inference:
    """Rewrites the ops of one function."""

    def __init__(self, function: Function) -> None:
        self.read = {*function.outputs, *(value for op in function.ops for value in op.inputs)}

    def __call__(self, op: Op, env: Environment) -> tuple[Op, ...]:
        made = rewire_op(op, env)
        if op.op_type == "Dropout" and self.read.isdisjoint(op.outputs[1:]):
            env[op.outputs[0]] = made.inputs[0]
            return ()
        if op.op_type != "Attention" or not op.attributes.get("dropout"):
            return (made,)
        kept = {name: value for name, value in op.attributes.items() if name not in ("dropout", "seed")}
        return (replace(made, attributes=Attributes(kept)),)
