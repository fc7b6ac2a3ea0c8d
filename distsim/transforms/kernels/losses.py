"""Cross entropy as eager torch runs it: log_softmax, whose result is saved for backward, then nll_loss.

One kernel that makes the loss of the logits reads them again for backward, where it makes their gradient:
two tensors. Of torch's two the first saves its result, and in backward there are that, the gradient of
nll_loss and the one that log_softmax makes of it: three (torch/nn/functional.py, ``cross_entropy``;
tools/autograd/derivatives.yaml, ``_log_softmax``, ``nll_loss_forward``). Logits are the widest tensor of a
model: of Llama 3 8B at 8,192 tokens each takes 3.9 GiB in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distsim.cache import Cache
from distsim.ir import Attributes, Environment, Function, Op, Value, callees, rewire_op, rewrite
from distsim.ir.type import as_tensor
from distsim.transforms.kernels.policies import Kernels

_APART = Cache[Function, Function | None]("functions whose losses are two kernels each, by function", 1)


def losses_apart(function: Function, kernels: Kernels) -> Function:
    """Return the joint function in which each cross entropy is the ops that torch launches for it.

    It is the function itself where there is none, and for policies that run a loss as one kernel. Made once
    per function, of what a rank runs: the two ops are not divided, and a loss that is divided over classes is
    left as it is.
    """
    if not kernels.apart:
        return function
    return _APART.get(function, None, lambda: _rewritten(function)) or function


def _rewritten(function: Function) -> Function | None:
    """Return the function with its losses apart, or None: what is kept does not hold its key."""
    done: dict[Function, Function] = {}
    for current in (*callees(function), function):
        done[current] = _LossWriter(done).run(current)
    return None if done[function] is function else done[function]


class _LossWriter:
    """Writes the losses of one function; backward reads the logarithms that forward made."""

    def __init__(self, done: dict[Function, Function]) -> None:
        self.done = done
        self.logs: dict[Value, Value] = {}

    def run(self, function: Function) -> Function:
        return rewrite(function, self.change)

    def change(self, op: Op, env: Environment) -> Iterator[Op]:
        op = rewire_op(op, env)
        if op.op_type not in ("CrossEntropyLoss", "CrossEntropyLossGrad") or "own_classes" in op.attributes:
            called = tuple([self.done[each] for each in op.subfunctions])
            yield op if called == op.subfunctions else replace(op, subfunctions=called)
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
