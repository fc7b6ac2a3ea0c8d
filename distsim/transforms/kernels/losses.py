"""Cross entropy as frameworks run it.

Eager torch: log_softmax, whose result is saved for backward, then nll_loss.

One kernel that makes the loss of the logits reads them again for backward, where it makes their gradient:
two tensors. Of torch's two the first saves its result, and in backward there are that, the gradient of
nll_loss and the one that log_softmax makes of it: three (torch/nn/functional.py, ``cross_entropy``;
tools/autograd/derivatives.yaml, ``_log_softmax``, ``nll_loss_forward``). Logits are the widest tensor of a
model: of Llama 3 8B at 8,192 tokens each takes 3.9 GiB in float32.

Megatron-LM, unless it is asked for a fused one: Python that finds the largest logit, subtracts it, takes
exponentials, sums them and divides by the sum, each in a kernel of its own, in the place of the logits in
float32 (megatron/core/tensor_parallel/cross_entropy.py, ``VocabParallelCrossEntropy``). nanotron has the same
(e24d2483, parallel/tensor_parallel/functional.py, ``_ShardedCrossEntropy``, on one rank too), but subtracts
into a copy, beside which the logits stay until forward returns: no less than with the gradient beside them,
which stands for it here.

Where the gradient is made in the place of what forward saved for it (``loss_in_place``) there is one tensor.
So Megatron-LM makes it of the quotients (``prepare_gradient_calculation_operands``: ``grad_input =
softmax``), fused or not (megatron/core/fusions/fused_cross_entropy.py), and FlashAttention's kernel if asked
to, of logits in 16 bits (flash_attn/losses/cross_entropy.py, ``inplace_backward``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from distsim.ir import Attributes, Environment, Function, Op, Value, rewrite, rewrite_all
from distsim.ir.dead import needed_ops
from distsim.ir.rewrite import KeptRewrites
from distsim.ir.type import as_tensor
from distsim.transforms.kernels.policies import Kernels

_APART = KeptRewrites("functions whose losses are several kernels each, by function", 2)


def losses_apart(function: Function, kernels: Kernels) -> Function:
    """Return the joint function in which each cross entropy is what a framework launches for it.

    It is the function itself where there is none, and for policies that run a loss as one kernel, with its
    gradient beside what it saved. Made once per function, of what a rank runs: torch's two ops are not
    divided, and a loss that is divided over classes is left as it is for them.
    """
    if kernels.loss == "one" and not kernels.loss_in_place:
        return function
    key = kernels.loss, kernels.loss_in_place
    return _APART.of(function, key, lambda: _rewritten(function, *key))


def _rewritten(function: Function, loss: str, in_place: bool) -> Function:
    marks = {
        **({"CrossEntropyLoss": "in_steps", "SumOfExponentials": "in_steps"} if loss == "megatron" else {}),
        **({"CrossEntropyLossGrad": "in_place"} if in_place else {}),
    }

    def change(_: Function, current: Function) -> Function:
        made = rewrite(current, _LossWriter().change if loss == "torch" else partial(_marked, marks=marks))
        # What moves a loss's second output to where its gradient lies has nothing to move any longer.
        needed = needed_ops(made.ops, made.outputs)
        return made if len(needed) == len(made.ops) else replace(made, ops=tuple(needed))

    return rewrite_all(function, change)


def _marked(op: Op, _: Environment, marks: Mapping[str, str]) -> Iterator[Op]:
    """Mark what is computed step by step in the place of the logits, and gradients that are made there."""
    if op.op_type in marks:
        op = replace(op, attributes=Attributes({**op.attributes, marks[op.op_type]: 1}))
    yield op


class _LossWriter:
    """Writes the losses of one function; backward reads the logarithms that forward made."""

    def __init__(self) -> None:
        self.logs: dict[Value, Value] = {}

    def change(self, op: Op, _: Environment) -> Iterator[Op]:
        if op.op_type not in ("CrossEntropyLoss", "CrossEntropyLossGrad") or "own_classes" in op.attributes:
            yield op
            return
        logits, *others = op.inputs
        if logits not in self.logs:
            self.logs[logits] = logs = Value(f"{logits.name}.logs", logits.type)
            yield Op("LogSoftmax", (logits,), (logs,), Attributes({"axis": -1}), name=op.name)
        logs = self.logs[logits]
        attributes = Attributes({key: op.attributes[key] for key in op.attributes if key in ("N", "dy")})
        if op.op_type == "CrossEntropyLoss":
            yield Op("LogLikelihoodLoss", (logs, *others), op.outputs[:1], attributes, name=op.name)
            return
        if op.attributes.get("lse", 0):  # which the logarithms are less of already
            del others[1]
        picked = Value(f"d{logs.name}", logs.type)
        axes = Attributes({"axes": (as_tensor(logs.type, logs.name).rank - 1,)})
        yield Op("LogLikelihoodLossGrad", (logs, *others), (picked,), attributes, name=op.name)
        yield Op("LogSoftmaxGrad", (logs, picked), op.outputs, axes, name=op.name)
