"""Interiors: what lies inside of forward kernels, made again by the kernels of the backward pass.

A kernel that runs several ops writes what crosses it. What its backward pass reads of the inside would have
to be written only to be read again much later: a kernel of the backward pass that can run the same ops makes
it from what the forward kernel read, in registers. So Megatron-LM's bias-GELU and bias-SwiGLU save their
inputs (core/fusions/fused_bias_gelu.py, fused_bias_swiglu.py: ``ctx.save_for_backward(input, bias)``), and a
compiler cuts each fused region where fewest bytes cross from forward to backward
(torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from distsim.ir import Function, Op, Value
from distsim.ir.function import readers_of
from distsim.ir.rewrite import KeptRewrites
from distsim.ops import operator, signature_of
from distsim.transforms.kernels.fusion import kernel_groups
from distsim.transforms.kernels.known import draws
from distsim.transforms.kernels.policies import Joins, Kernels, fusible, is_pointwise
from distsim.transforms.recompute.joint import ChangedPair, Joint, changed_pair, find_pairs, with_calls
from distsim.transforms.recompute.recompute import recompute
from distsim.transforms.recompute.saves.flow import Edge, minimum_cut

HELD = 1000
"""What a byte that is held costs in the cut, where one that only saving makes a kernel write costs 1."""

_REWRITTEN = KeptRewrites("functions whose backward kernels make interiors again, by function and policy", 4)


def recompute_interiors(function: Function, kernels: Kernels) -> Function:
    """Return the joint function in which backward makes again what lies inside of forward kernels.

    Of each kernel that joins several ops (``kernels.joins``) a minimum cut is saved: of the values that it
    reads and makes the fewest bytes from which all that backward reads of it follows. What is made again
    is element by element, and each op of the backward pass that reads it has to be one that a kernel may run
    with it; all else is saved as it was. Of cuts of equally many bytes the one is taken for which the
    kernel has fewest to write. It is the function itself where nothing is gained, and for policies without
    ``interiors``. Made once per function and policy.
    """
    if not kernels.interiors or kernels.joins is None:
        return function
    joins = kernels.joins
    return _REWRITTEN.of(function, kernels.name, lambda: _rewritten(function, kernels, joins))


def _rewritten(function: Function, kernels: Kernels, joins: Joins) -> Function:
    change = partial(_without_interiors, kernels=kernels, joins=joins)
    calls = dict[Op, Op]()
    for pair in find_pairs(Joint.of(function)):
        calls |= changed_pair(pair, (_rewritten, kernels.name), change).calls
    return change(Joint.of(with_calls(function, calls))).joint.function


def _without_interiors(joint: Joint, kernels: Kernels, joins: Joins) -> ChangedPair:
    """Return the joint function whose backward ops read of the forward kernels what a minimum cut saves."""
    cuts = _KernelCuts(joint, joins)
    ops = [op for op in joint.function.ops if op in joint.forward]
    for group in reversed(kernel_groups(ops, kernels, joins)):
        if len(group) > 1:
            cuts.cut([ops[place] for place in group])
    return ChangedPair(recompute(joint, cuts.saved) if cuts.dropped else joint)


def runs_again(op: Op) -> bool:
    """Whether an op of a kernel can run in a kernel of the backward pass as well."""
    return fusible(op) and not draws(op) and is_pointwise(signature_of(op))


def run_with(op: Op, readers: Iterable[Op], joins: Joins) -> bool:
    """Whether one kernel may run an op with each of its readers."""
    return all(fusible(reader) and joins(op, reader) for reader in readers)


class _KernelCuts:
    """What is saved: at first all that backward reads, then what the cuts of kernels, last first, leave."""

    def __init__(self, joint: Joint, joins: Joins) -> None:
        self.joint, self.joins = joint, joins
        self.makers = joint.made
        ahead = [op for op in joint.function.ops if op in joint.forward]
        behind = [op for op in joint.function.ops if op not in joint.forward and joint.behind(op)]
        self.ahead, self.behind = readers_of(ahead), readers_of(behind)
        once = {*joint.function.ops} - {*ahead, *behind}
        self.fixed = {*joint.function.outputs, *joint.free, *(v for op in once for v in op.inputs)}
        self.saved = {value for value in self.makers if value in self.behind or value in self.fixed}
        self.dropped = False

    def cut(self, ops: Sequence[Op]) -> None:
        """Decide what of a kernel is saved, with all kernels after it decided."""
        made = {value for op in ops for value in op.outputs}
        again = {v for op in ops if runs_again(op) for v in op.outputs}
        wanted = [v for v in made & again if v in self.saved and self.may_drop(v)]
        if not wanted:
            return
        values = list(dict.fromkeys([v for op in ops for v in (*op.inputs, *op.outputs)]))
        number = {value: place for place, value in enumerate(values)}
        source, sink = 2 * len(values), 2 * len(values) + 1
        edges: list[Edge] = [(2 * number[v] + 1, sink, None) for v in wanted]
        for place, value in enumerate(values):
            weight = self.weight(value, wanted, made, ops)
            edges.append((2 * place, 2 * place + 1, weight))
            if value not in again:
                edges.append((source, 2 * place, None))
                continue
            op = self.makers[value]
            for operand in op.inputs:
                edges.append((2 * number[operand] + 1, 2 * place, None))
                if operand in again and not self.joins(self.makers[operand], op):
                    edges.append((source, 2 * number[operand], None))
        found = minimum_cut(edges, len(values) * 2 + 2, source, sink)
        if found is None:  # all weights are finite, and each way from source to sink passes one
            raise AssertionError(f"{ops[-1]!r} has no cut")
        at_sink = found.at_sink.tolist()
        chosen = {v for place, v in enumerate(values) if at_sink[2 * place + 1] and not at_sink[2 * place]}
        self.dropped = self.dropped or not chosen.issuperset(wanted)
        self.saved -= set(wanted) - chosen
        self.saved |= {value for value in chosen if value in self.makers}

    def may_drop(self, value: Value) -> bool:
        """Whether all that reads a value in the backward pass may run in one kernel with what makes it."""
        op, readers = self.makers[value], self.behind.get(value, ())
        return value not in self.fixed and bool(readers) and run_with(op, readers, self.joins)

    def weight(
        self, value: Value, wanted: Sequence[Value], made: AbstractSet[Value], ops: Sequence[Op]
    ) -> int:
        """Return what saving a value costs: nothing where it, or what it is a view of, is saved anyway."""
        if value not in wanted and self.home(value) in self.homes(wanted):
            return 0
        inside = value in made and all(reader in ops for reader in self.ahead.get(value, ()))
        return value.type.nbytes * (HELD + inside)

    def homes(self, wanted: Sequence[Value]) -> set[Value]:
        """Return in whose memory what is that backward has at hand, whatever becomes of the ``wanted``."""
        given = [v for v in self.behind if v not in self.makers]
        return {self.home(v) for v in (*self.saved, *given, *self.joint.free) if v not in wanted}

    def home(self, value: Value) -> Value:
        """Return what a value is a view of, itself if of nothing."""
        op = self.makers.get(value)
        while op is not None and not op.is_call and op.inputs and operator(op.op_type).view:
            value = op.inputs[0]
            op = self.makers.get(value)
        return value
