"""Attention found by the flow of data around a Softmax, however it is spelled.

From a Softmax over the last dimension backwards: masks (added, or chosen by Where), a cap (c tanh(x / c)),
scales, and the product of queries and keys; forwards: the guard against a softmax of nothing, Dropout, and
the product with the values. Casts between real types and other shapes of the same numbers may stand
anywhere between. Queries, keys and values are then followed back through scales, other shapes, transpositions
and repetitions to the least tensor that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distsim.ir import Op, Role, Tensor, Value
from distsim.ops.attention_options import AttentionOptions
from distsim.ops.onnx_bridge import static_array
from distsim.ops.places import places, shape_of
from distsim.ops.softmax import softmax_axes
from distsim.transforms.kernels.axes import Atoms, Dims, repeated_from
from distsim.transforms.kernels.known import FunctionScope

HIDDEN = -1e4
"""What is added to a score, or stands for it, hides the key from here on: fills of GPT-2 and of all later
models are as large. Scores would have to be of that size themselves to show through."""


class NoAttentionError(Exception):
    """Why the ops around a Softmax are not attention, or (``is_close``) not one that the operator has."""

    is_close = False


@dataclass(frozen=True)
class Mask:
    """What is added to the scores times ``factor``, or (``hides``, boolean) shows or hides them.

    ``dims`` are those of the scores to which it is broadcast.
    """

    value: Value
    dims: Dims
    factor: float = 1.0
    is_boolean: bool = False
    shows: bool = True


@dataclass(frozen=True)
class Operand:
    """A tensor that holds queries, keys or values, nearest first, in each of its arrangements."""

    arrangements: tuple[tuple[Value, Dims], ...]
    scale: float = 1.0


@dataclass(frozen=True)
class FoundAttention:
    """An attention: its operands in atoms, what replaces it, and the ops that are its own.

    The scores are [*lead, seq, kv_seq]; ``result`` [*lead, seq, v_size] is the output of the last op.
    """

    atoms: Atoms
    scores: Dims
    result: Dims
    query: Operand
    key: Operand
    value: Operand
    masks: tuple[Mask, ...]
    options: AttentionOptions
    last: Op


def attention_around(scope: FunctionScope, softmax: Op) -> FoundAttention:
    """Return the attention that a Softmax is of, or raise :class:`NoAttentionError` with the reason."""
    shape = shape_of(softmax.inputs[0])
    if len(shape) < 2 or 0 in shape:
        raise NoAttentionError("its Softmax is not over scores of queries and keys")
    if softmax_axes(softmax.attributes, softmax.version, len(shape)) != (len(shape) - 1,):
        raise NoAttentionError("its Softmax is not over the last dimension")
    walk = _SoftmaxWalk(scope, softmax)
    try:
        return walk.found()
    except NoAttentionError as error:
        error.is_close = walk.is_close
        raise


@dataclass
class _SoftmaxWalk:
    """The walk from one Softmax."""

    scope: FunctionScope
    softmax: Op
    atoms: Atoms = field(default_factory=Atoms)
    own: set[Value] = field(default_factory=set[Value])
    masks: list[Mask] = field(default_factory=list[Mask])
    factor: float = 1.0
    cap: float = 0.0
    is_close: bool = False

    def found(self) -> FoundAttention:
        whole = self.atoms.fresh(shape_of(self.softmax.inputs[0]))
        product, dims = self._product(self.softmax.inputs[0], whole)
        last, weights, options = self._mixing(whole)
        self.is_close = True
        left, right = product.inputs
        scores = shape_of(product.outputs[0])
        lead = dims[:-2]
        size = self.atoms.fresh(shape_of(left)[-1:])[0]
        query = self._operand(left, (*self._lead(left, lead, scores), dims[-2], size))
        key = self._operand(right, (*self._lead(right, lead, scores), size, dims[-1]))
        made = shape_of(last.outputs[0])
        v_size = self.atoms.fresh(made[-1:])[0]
        values = last.inputs[1]
        value = self._operand(values, (*self._lead(values, weights[:-2], made), weights[-1], v_size))
        self._check_readers(last)
        if value.scale != 1:
            raise NoAttentionError("its values are scaled")
        sources = [operand.arrangements[-1][0] for operand in (key, value)]
        if any(source.role is Role.PARAMETER for source in sources):
            raise NoAttentionError("its keys or values are weights")
        cap = abs(self.cap)
        options = AttentionOptions(
            scale=self.factor * query.scale * key.scale * (cap or 1.0),
            softcap=cap,
            dropout=options.dropout,
            seed=options.seed,
        )
        result = (*weights[:-1], v_size)
        return FoundAttention(self.atoms, dims, result, query, key, value, tuple(self.masks), options, last)

    # --- from the Softmax back to the product ---------------------------------------------------------

    def _product(self, value: Value, dims: Dims) -> tuple[Op, Dims]:
        """Follow the scores back; return the product that makes them, and its dimensions."""
        while True:
            self.own.add(value)
            op = self.scope.makers.get(value)
            if op is None:
                raise NoAttentionError("its scores are made elsewhere")
            if op.op_type == "MatMul" and len(op.inputs) == 2 and len(shape_of(value)) == len(dims) >= 2:
                if len(shape_of(op.inputs[0])) < 2 or len(shape_of(op.inputs[1])) < 2:
                    raise NoAttentionError("its scores are a product of vectors")
                return op, dims
            value, dims = self._step(op, dims)

    def _step(self, op: Op, dims: Dims) -> tuple[Value, Dims]:
        """Return the operand of one op through which the scores come, and its dimensions."""
        scaled = scaling(self.scope, op)
        if scaled is not None:
            self.factor *= scaled[1]
            return scaled[0], dims
        if op.op_type == "Cast" and _real(op.inputs[0]):
            return op.inputs[0], dims
        if op.op_type == "Tanh":
            if self.cap or self.factor <= 0:
                raise NoAttentionError("its scores are capped twice, or by a negative number")
            self.cap, self.factor = self.factor, 1.0
            return op.inputs[0], dims
        if op.op_type in ("Add", "Where") and not self.cap:
            return self._masked(op, dims) if op.op_type == "Add" else self._chosen(op, dims)
        if op.op_type == "Max" and len(op.inputs) == 2:  # no lower than a fill
            for scores, least in (op.inputs, op.inputs[::-1]):
                number = self.scope.number(least)
                if number is not None and number * self.factor <= HIDDEN:
                    return scores, dims
        before = self.atoms.before(op, dims) if op.op_type not in ("Transpose", "Expand") else None
        if before is None or before[-2:] != tuple(map(self.atoms.leaves, dims[-2:])):
            raise NoAttentionError(f"its scores come from an op {op.op_type}")
        return op.inputs[0], before

    def _masked(self, op: Op, dims: Dims) -> tuple[Value, Dims]:
        """Take note of what is added to the scores; return them."""
        whole = shape_of(op.outputs[0])
        for scores, mask in (op.inputs, op.inputs[::-1]) if len(op.inputs) == 2 else ():
            if shape_of(scores) == whole and self._leads_to_product(scores):
                self.masks.append(Mask(mask, repeated_from(dims, shape_of(mask), whole), self.factor))
                return scores, dims
        raise NoAttentionError(f"what its op {op.op_type} adds to the scores is no mask")

    def _leads_to_product(self, value: Value) -> bool:
        """Whether a value comes from a product by what may stand before a softmax."""
        for _ in range(64):
            op = self.scope.makers.get(value)
            if op is None or not op.inputs:
                return False
            if op.op_type == "MatMul":
                return len(op.inputs) == 2
            full = [
                v for v in op.inputs if _real(v) and len(shape_of(v)) >= 2 and self.scope.known(v) is None
            ]
            if op.op_type not in _BEFORE or not full:
                return False
            value = next((v for v in full if shape_of(v) == shape_of(op.outputs[0])), full[0])
        return False

    def _chosen(self, op: Op, dims: Dims) -> tuple[Value, Dims]:
        """A Where between scores and a number that hides."""
        index = places(("condition", "X", "Y"), op.attributes, len(op.inputs))
        given = {name: op.inputs[place] for name, place in index.items()}
        if "condition" not in given:
            raise NoAttentionError("its scores are chosen by a constant among the attributes")
        for scores, fill, shows in (("X", "Y", True), ("Y", "X", False)):
            number = _static(op, fill) if fill not in given else self.scope.number(given[fill])
            if number is None or number * self.factor > HIDDEN or scores not in given:
                continue
            if shape_of(given[scores]) == shape_of(op.outputs[0]):
                condition = given["condition"]
                aligned = repeated_from(dims, shape_of(condition), shape_of(op.outputs[0]))
                self.masks.append(Mask(condition, aligned, is_boolean=True, shows=shows))
                return given[scores], dims
        raise NoAttentionError("its scores are chosen by a Where that hides none of them")

    # --- from the Softmax forward ---------------------------------------------------------------------

    def _mixing(self, dims: Dims) -> tuple[Op, Dims, AttentionOptions]:
        """Follow the probabilities; return their product with the values, and their dimensions there."""
        value, options = self.softmax.outputs[0], AttentionOptions()
        while True:
            self.own.add(value)
            readers = list(dict.fromkeys(self.scope.readers.get(value, ())))
            guard = self._guard(value, readers)
            if guard is not None:
                value = guard
                continue
            if len(readers) != 1:
                raise NoAttentionError("its probabilities are read by several ops")
            (op,) = readers
            if op.op_type == "MatMul" and len(op.inputs) == 2:
                if op.inputs[0] is not value or len(shape_of(op.inputs[1])) < 2:
                    raise NoAttentionError("its probabilities are no left operand of a product")
                return op, dims, options
            if op.op_type == "Dropout":
                if options.dropout:
                    raise NoAttentionError("it drops probabilities twice")
                options = self._dropped(op)
            elif op.op_type != "Cast" or not _real(op.outputs[0]):
                after = self.atoms.after(op, dims)
                if after is None or tuple(map(self.atoms.leaves, dims[-2:])) != after[-2:]:
                    raise NoAttentionError(f"its probabilities go to an op {op.op_type}")
                dims = after
            value = op.outputs[0]

    def _guard(self, value: Value, readers: Sequence[Op]) -> Value | None:
        """Return what a Where makes that puts zero where the probabilities are no number, if that is all."""
        checks = [op for op in readers if op.op_type == "IsNaN"]
        chosen = [op for op in readers if op.op_type == "Where"]
        if len(readers) != 2 or len(checks) != 1 or len(chosen) != 1:
            return None
        (check,), (where,) = checks, chosen
        given = where.inputs[:1] == check.outputs and where.inputs[-1] is value
        zero = _static(where, "X") if len(where.inputs) == 2 else self.scope.number(where.inputs[1])
        if not given or zero != 0 or "Y" in where.attributes:
            return None
        self.own.update(check.outputs)
        return where.outputs[0]

    def _dropped(self, op: Op) -> AttentionOptions:
        if op.version is not None and op.version < 12:
            raise NoAttentionError("it drops probabilities as operator sets before 12 say")
        index = places(("data", "ratio", "training_mode"), op.attributes, len(op.inputs))
        found: list[float] = []
        for name, usual in (("ratio", 0.5), ("training_mode", 0.0)):
            number = float(static_array(op.attributes.get(name, usual), None).reshape(-1)[0])
            if name in index:
                number = self.scope.number(op.inputs[index[name]])
            if number is None:
                raise NoAttentionError("it drops a share of its probabilities that is not known")
            found.append(number)
        ratio, training = found
        return AttentionOptions(dropout=ratio if training else 0.0, seed=int(op.attributes.get("seed", 0)))

    # --- operands -------------------------------------------------------------------------------------

    def _lead(self, operand: Value, lead: Dims, made: Sequence[int]) -> Dims:
        """Return the leading dimensions of an operand of a product with leading dimensions ``lead``."""
        return repeated_from(lead, shape_of(operand)[:-2], made[:-2])

    def _operand(self, value: Value, dims: Dims) -> Operand:
        """Follow an operand back as far as ops only scale, rearrange and repeat it."""
        nearest, scale = [(value, dims)], 1.0
        while True:
            op = self.scope.makers.get(value)
            if op is None:
                break
            scaled = scaling(self.scope, op)
            if scaled is not None:
                value, scale = scaled[0], scale * scaled[1]
                nearest = [(value, dims)]
                continue
            before = self.atoms.before(op, dims)
            if before is None:
                break
            value, dims = op.inputs[0], before
            nearest = [*([] if op.op_type == "Expand" else nearest), (value, dims)]
        return Operand(tuple(nearest), scale)

    def _check_readers(self, last: Op) -> None:
        """What a kernel does not write must not be read by others."""
        inside = {op for value in self.own for op in self.scope.readers.get(value, ())} - {last}
        returned = set(self.scope.function.outputs)
        for value in self.own:
            if value in returned:
                raise NoAttentionError("its scores or probabilities are returned")
        for op in inside:
            if not self.own.intersection(op.outputs):
                raise NoAttentionError(f"its scores or probabilities are read by an op {op.op_type} as well")


_BEFORE = frozenset(
    {"Add", "Max", "Mul", "Div", "Where", "Cast", "Tanh", "Reshape", "Squeeze", "Unsqueeze", "Identity"}
)


def scaling(scope: FunctionScope, op: Op) -> tuple[Value, float] | None:
    """Return the operand that an op multiplies by a known number, and the number; None for other ops."""
    if op.op_type not in ("Mul", "Div"):
        return None
    whole = shape_of(op.outputs[0])
    index = places(("A", "B"), op.attributes, len(op.inputs))
    for name, other in (("A", "B"), ("B", "A"))[: 1 if op.op_type == "Div" else 2]:
        if name not in index or shape_of(op.inputs[index[name]]) != whole:
            continue
        number = scope.number(op.inputs[index[other]]) if other in index else _static(op, other)
        if number is not None and np.isfinite(number) and number != 0:
            return op.inputs[index[name]], number if op.op_type == "Mul" else 1 / number
    return None


def _static(op: Op, name: str) -> float | None:
    """Return the number that stands among the attributes, if there is one."""
    if name not in op.attributes:
        return None
    if isinstance(op.attributes[name], (int, float)):
        return float(op.attributes[name])
    array = static_array(op.attributes[name], None)
    return float(array.reshape(-1)[0]) if array.size == 1 else None


def _real(value: Value) -> bool:
    return isinstance(value.type, Tensor) and value.type.dtype.is_floating
