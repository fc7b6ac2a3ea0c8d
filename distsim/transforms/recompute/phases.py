"""The forward and the backward pass of a joint function, told apart and taken apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from distsim.ir import Function, Op, Value, needed_ops
from distsim.transforms.op_graph import Numbered


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint function and its passes.

    ``forward`` are the ops that the loss depends on, ``constants`` those that only follow from constants
    (each pass makes them itself), ``steps`` those that run once per step, after a sum over microbatches.
    All other ops are backward: gradients and what is made of them. ``tangents`` are the inputs that are
    gradients. ``free`` are values that are in memory anyway, in both passes: parameters, optimizer state,
    constants. ``outputs`` are the places of the outputs that the forward pass returns. ``copies`` are the
    ops that compute a forward op again, where that is known, with that op, and the barriers that they read.
    """

    function: Function
    forward: AbstractSet[Op]
    constants: AbstractSet[Op]
    steps: AbstractSet[Op]
    tangents: AbstractSet[Value]
    free: AbstractSet[Value]
    outputs: tuple[int, ...]
    copies: Mapping[Op, Op] = field(default_factory=dict[Op, Op])

    @staticmethod
    def of(function: Function) -> Joint:
        """Return the passes of a function whose loss is its first scalar output."""
        numbered = Numbered(function)
        held = [v for v, stays in zip(function.inputs, numbered.held, strict=False) if stays]
        constants = [op for op, loose in zip(function.ops, numbered.loose, strict=True) if loose]
        forward = [op for op, ahead in zip(function.ops, numbered.forward, strict=True) if ahead]
        steps = [op for op, once in zip(function.ops, numbered.steps, strict=True) if once]
        made = [v for op in constants for v in op.outputs]
        ahead = {v for op in forward for v in op.outputs}
        outputs = tuple([i for i, v in enumerate(function.outputs) if v in ahead])
        return Joint(function, set(forward), set(constants), set(steps), set(), {*held, *made}, outputs)

    def behind(self, op: Op) -> bool:
        """Whether an op is of the backward pass."""
        return op not in self.forward and op not in self.constants and op not in self.steps

    @property
    def made(self) -> dict[Value, Op]:
        """The values that the forward pass makes, in order, and the op that makes each."""
        return {v: op for op in self.function.ops if op in self.forward for v in op.outputs}


@dataclass(frozen=True, eq=False)
class Passes:
    """A joint function taken apart: ``backward`` reads ``saved``, which ``forward`` returns last.

    Both are over the values of the joint function: an input that both passes read is an input of both.
    """

    forward: Function
    backward: Function
    saved: tuple[Value, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the saved values."""
        return sum(value.type.nbytes for value in self.saved)


def split_joint(joint: Function | Joint) -> Passes:
    """Take a joint function apart into its forward and its backward pass.

    The forward function returns the outputs that the forward pass makes, then what backward reads of the
    others, each once, in the order in which it is made; the backward function makes the other outputs. Ops
    that nobody needs are left out.

    >>> from distsim.models import mlp
    >>> from distsim.transforms import differentiate, inline
    >>> split = split_joint(inline(differentiate(mlp(layers=2, width=4, batch=2), None)))
    >>> [value.name for value in split.saved]
    ['y0', 'a0', 'y1', 'a1']
    """
    joint = joint if isinstance(joint, Joint) else Joint.of(joint)
    function, made = joint.function, joint.made
    own = [function.outputs[i] for i in joint.outputs]
    rest = [v for i, v in enumerate(function.outputs) if i not in joint.outputs]
    behind = [op for op in function.ops if op not in joint.forward and op not in joint.constants]
    ops = _needed(function, {*behind, *joint.constants}, rest)
    read = dict.fromkeys([*(v for op in ops for v in op.inputs), *rest])
    saved = tuple([v for v in made if v in read and v not in own])
    given = [v for v in made if v in read]
    inputs = [v for v in function.inputs if v in read or v in joint.tangents]
    ahead = [v for v in function.inputs if v not in joint.tangents]
    back = Function(f"{function.name}_backward", (*inputs, *given), tuple(ops), tuple(rest))
    outputs = (*own, *saved)
    needed = _needed(function, joint.forward | joint.constants, outputs)
    front = Function(f"{function.name}_forward", tuple(ahead), tuple(needed), outputs)
    return Passes(front, back, saved)


def _needed(function: Function, own: AbstractSet[Op], outputs: Iterable[Value]) -> list[Op]:
    """Return those of a pass's ops, constants included, that the outputs need, in order."""
    return needed_ops([op for op in function.ops if op in own], outputs)
