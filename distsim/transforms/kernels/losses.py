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
into a copy, which is not held here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distsim.cache import Cache
from distsim.ir import Attributes, Environment, Function, Op, Value, callees, rewire_op, rewrite
from distsim.ir.dead import needed_ops
from distsim.ir.type import as_tensor
from distsim.transforms.kernels.policies import Kernels

_APART = Cache[Function, Function | None]("functions whose losses are several kernels each, by function", 2)


def losses_apart(function: Function, kernels: Kernels) -> Function:
    """Return the joint function in which each cross entropy is what a framework launches for it.

    It is the function itself where there is none, and for policies that run a loss as one kernel. Made once
    per function, of what a rank runs: torch's two ops are not divided, and a loss that is divided over
    classes is left as it is for them.
    """
    if kernels.loss == "one":
        return function
    return _APART.get(function, kernels.loss, lambda: _rewritten(function, kernels.loss)) or function


def _rewritten(function: Function, loss: str) -> Function | None:
    """Return the function with its losses apart, or None: what is kept does not hold its key."""
    done: dict[Function, Function] = {}
    for current in (*callees(function), function):
        writer = _LossWriter(done) if loss == "torch" else _LossSteps(done)
        made = rewrite(current, writer.change)
        # What moves a loss's second output to where its gradient lies has nothing to move any longer.
        needed = needed_ops(made.ops, made.outputs)
        done[current] = made if len(needed) == len(made.ops) else replace(made, ops=tuple(needed))
    return None if done[function] is function else done[function]


def _calling(op: Op, done: dict[Function, Function]) -> Op:
    """Return an op that calls what its callees have become."""
    called = tuple([done[each] for each in op.subfunctions])
    return op if called == op.subfunctions else replace(op, subfunctions=called)


class _LossSteps:
    """Marks what is computed step by step in the place of the logits."""

    def __init__(self, done: dict[Function, Function]) -> None:
        self.done = done

    def change(self, op: Op, env: Environment) -> Iterator[Op]:
        op = _calling(rewire_op(op, env), self.done)
        if op.op_type in ("CrossEntropyLoss", "SumOfExponentials"):
            op = replace(op, attributes=Attributes({**op.attributes, "in_steps": 1}))
        yield op


class _LossWriter:
    """Writes the losses of one function; backward reads the logarithms that forward made."""

    def __init__(self, done: dict[Function, Function]) -> None:
        self.done = done
        self.logs: dict[Value, Value] = {}

    def change(self, op: Op, env: Environment) -> Iterator[Op]:
        op = rewire_op(op, env)
        if op.op_type not in ("CrossEntropyLoss", "CrossEntropyLossGrad") or "own_classes" in op.attributes:
            yield _calling(op, self.done)
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
