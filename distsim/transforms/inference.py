"""as_inference: a forward pass as it runs where nothing is trained: nothing is dropped, no loss is taken."""

from __future__ import annotations

from dataclasses import replace

from distsim.ir import Attributes, Environment, Function, Op, rewire_op, rewrite, rewrite_all, trim
from distsim.transforms.autodiff.precision import LOSSES


def as_inference(function: Function) -> Function:
    """Return a forward pass that drops nothing, and returns what its loss is taken of in place of that.

    A loss is one that an operator for it takes, as a cross entropy; another stays, with what it reads.

    >>> from distsim.models import gpt
    >>> made = as_inference(gpt(layers=1, hidden=16, heads=2, seq=4, batch=2, vocab=8))
    >>> [value.type.shape for value in made.outputs], [value.name for value in made.inputs[:3]]
    ([(2, 4, 8)], ['tokens', 'wte', 'wpe'])
    """
    function = rewrite_all(function, lambda _, current: rewrite(current, _without_training))
    losses = {value: op for op in function.ops if op.op_type in LOSSES for value in op.outputs}
    outputs = tuple([losses[v].inputs[0] if v in losses else v for v in function.outputs])
    if outputs == function.outputs:
        return function
    read = trim(replace(function, outputs=outputs)).function
    used = {value for op in read.ops for value in op.inputs}
    return replace(read, inputs=tuple([value for value in read.inputs if value in used]))


def _without_training(op: Op, env: Environment) -> tuple[Op, ...]:
    made = rewire_op(op, env)
    if op.op_type == "Dropout" and len(op.outputs) == 1:
        env[op.outputs[0]] = made.inputs[0]
        return ()
    if op.op_type != "Attention" or not op.attributes.get("dropout"):
        return (made,)
    kept = {name: value for name, value in op.attributes.items() if name not in ("dropout", "seed")}
    return (replace(made, attributes=Attributes(kept)),)
