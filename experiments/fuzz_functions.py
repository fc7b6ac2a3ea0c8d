"""Random functions to train: what models have, and what breaks transforms, in sizes of any kind.

A function follows from its seed. It is float64, so that two ways to compute a sum agree to 1e-9, and may have
skips, shared weights, layers as Calls (with results that nobody reads), values of the batch's size that are
made from constants, several losses, each scaled, weighted, negated or used twice, targets that are computed,
and ops, outputs and parameters that the loss does not need.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np

from distsim.ir import Function, Literal, Value

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from training_models import Maker

CLASSES = 6
"""Classes of labels, rows of embedding tables."""
SMOOTH = ("Tanh", "Sigmoid", "Gelu", "Softplus", "Sin")


def invent(seed: int) -> Function:
    """Return the random function of a seed: its first output is the loss; others may follow."""
    return _Inventor(Random(seed)).function()


class _Inventor:
    """Adds one thing after the other to a pool of values of one shape, [batch, sequence, width]."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.make = rng, Maker(f"random{rng.randrange(10**6)}")
        self.batch = rng.choice((2, 4, 4, 6, 8, 12))
        self.sequence = rng.choice((1, 2, 3, 4))
        self.width = rng.choice((2, 3, 4, 4, 5, 6, 8))
        self.count = 0
        self.shape = (self.batch, self.sequence, self.width)
        self.pool = [self.make.data("x", *self.shape)]
        self.weights: list[Value] = []
        self.layers: list[tuple[Function, list[Value]]] = []
        self.auxiliary: list[Value] = []

    def function(self) -> Function:
        for _ in range(self.rng.randint(1, 9)):
            self.pool += self._value(self.rng.choice(_STEPS))
        if not self.make.inputs[1:]:
            self.pool += self.linear()
        loss = self.loss()
        outputs = [loss]
        if self.rng.random() < 0.25:  # what training does not need
            outputs += self.rng.sample(self.pool[1:], min(len(self.pool) - 1, self.rng.randint(1, 2)))
        if self.rng.random() < 0.2:
            outputs += self._value("linear")
        if self.rng.random() < 0.1:
            outputs.append(self.rng.choice(self.make.inputs))
        self.make.set_outputs(list(dict.fromkeys(outputs)))
        return self.make.finalize()

    def _value(self, kind: str) -> list[Value]:
        return getattr(self, kind)()

    def pick(self) -> Value:
        """Return an earlier value, the last ones more often than the first: chains with skips."""
        return self.pool[max(self.rng.randrange(len(self.pool)) for _ in range(2))]

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def literal(self, *shape: int) -> Literal:
        return Literal(np.random.default_rng(self.rng.randrange(2**32)).normal(size=shape))

    # --- steps: each returns new values of the pool -----------------------------------------------------

    def linear(self) -> list[Value]:
        make, name, width = self.make, self.name("l"), self.width
        if self.rng.random() < 0.5:
            wide = self.rng.choice((width, 2 * width, 3, 5))
            y = make("MatMul", self.pick(), make.parameter(f"{name}.up", width, wide))
            y = make(self.rng.choice(SMOOTH), make("Add", y, make.parameter(f"{name}.b", wide)))
            return [make("MatMul", y, make.parameter(f"{name}.down", wide, width))]
        weight = make.parameter(f"{name}.w", width, width)
        self.weights.append(weight)
        return [make("MatMul", self.pick(), weight)]

    def shared(self) -> list[Value]:
        if not self.weights:
            return self.linear()
        weight = self.rng.choice(self.weights)
        if self.rng.random() < 0.5:
            weight = self.make("Transpose", weight, perm=(1, 0))
        return [self.make("Tanh", self.make("MatMul", self.pick(), weight))]

    def binary(self) -> list[Value]:
        kind = self.rng.choice(("Add", "Sub", "Mul", "Max"))
        return [self.make("Tanh", self.make(kind, self.pick(), self.pick()))]

    def unary(self) -> list[Value]:
        kind = self.rng.choice((*SMOOTH, "Relu", "Abs", "Neg"))
        return [self.make(kind, self.make("Mul", self.pick(), B=self.rng.choice((0.5, -1.0))))]

    def norm(self) -> list[Value]:
        make, name = self.make, self.name("n")
        scale = make.parameter(f"{name}.scale", self.width)
        if self.rng.random() < 0.5:
            bias = make.parameter(f"{name}.bias", self.width)
            return [make("LayerNormalization", self.pick(), scale, bias, axis=-1, epsilon=0.1)]
        x = self.pick()
        square = make("ReduceMean", make("Mul", x, x), axes=(-1,), keepdims=1)
        return [make("Mul", make("Div", x, make("Sqrt", make("Add", square, B=0.1))), scale)]

    def softmax(self) -> list[Value]:
        return [self.make("Softmax", self.pick(), axis=self.rng.choice((-1, 1)))]

    def split(self) -> list[Value]:
        first = self.rng.randint(1, self.width - 1)
        a, b = self.make.add("Split", [self.pick()], {"axis": 2, "split": (first, self.width - first)})
        if self.rng.random() < 0.3:  # one half is not read
            padded = self.make("Expand", self.make("ReduceSum", a, axes=(2,), keepdims=1), shape=self.shape)
            return [padded]
        return [self.make("Concat", b, a, axis=2)]

    def heads(self) -> list[Value]:
        x = self.make("Reshape", self.pick(), shape=(self.batch, self.sequence, 1, self.width))
        x = self.make("Transpose", x, perm=(0, 2, 1, 3))
        scores = self.make("MatMul", x, self.make("Transpose", x, perm=(0, 1, 3, 2)))
        if self.rng.random() < 0.5:
            mask = np.triu(np.full((self.sequence, self.sequence), -1e3), 1)
            scores = self.make("Add", scores, B=Literal(mask))
        mixed = self.make("MatMul", self.make("Softmax", scores, axis=-1), x)
        return [self.make("Reshape", self.make("Transpose", mixed, perm=(0, 2, 1, 3)), shape=self.shape)]

    def embedding(self) -> list[Value]:
        make, name = self.make, self.name("e")
        tokens = make.tokens(f"{name}.tokens", self.batch, self.sequence)
        table = make.parameter(f"{name}.table", CLASSES, self.width)
        return [make("Add", make("Gather", table, tokens, axis=0), self.pick())]

    def made_from_constants(self) -> list[Value]:
        """Something of the batch's size that no input goes into, as exported masks have it."""
        kind = self.rng.randrange(4)
        if kind == 0:
            made = self.make("ConstantOfShape", input=self.shape, value=Literal(np.full(1, 0.5)))
        elif kind == 1:
            row = self.make("Constant", value=self.literal(1, self.sequence, self.width))
            made = self.make("Expand", row, shape=self.shape)
        elif kind == 2:
            made = self.make("Constant", value=self.literal(*self.shape))
        else:
            return [self.make("Mul", self.pick(), B=self.literal(*self.shape))]
        return [self.make(self.rng.choice(("Add", "Mul")), self.pick(), made)]

    def chosen(self) -> list[Value]:
        mask = Literal(np.array([self.rng.random() < 0.6 for _ in range(self.width)]))
        return [self.make("Where", self.pick(), self.pick(), condition=mask)]

    def reduced(self) -> list[Value]:
        kind = self.rng.choice(("ReduceMean", "ReduceSum", "ReduceMax"))
        part = self.make(kind, self.pick(), axes=(self.rng.choice((1, 2)),), keepdims=1)
        return [self.make("Sub", self.pick(), part)]

    def centred(self) -> list[Value]:
        """Samples are mixed: a mean over the batch."""
        if self.rng.random() < 0.7:
            return self.reduced()
        x = self.pick()
        return [self.make("Sub", x, self.make("ReduceMean", x, axes=(0,), keepdims=1))]

    def layer(self) -> list[Value]:
        """One to three Calls of one callee in a row; one may share the weights of another."""
        if not self.layers or self.rng.random() < 0.5:
            self.layers.append((self._callee(), []))
        callee, own = self.rng.choice(self.layers)
        x = self.pick()
        for _ in range(self.rng.randint(1, 3)):
            if not own or self.rng.random() < 0.8:
                name = self.name("c")
                own[:] = [self.make.parameter(f"{name}.{v.name}", *v.type.shape) for v in callee.parameters]
            x, *rest = self.make.add("Call", [x, *own], None, (callee,))
            self.auxiliary += [value for value in rest if value.type.shape == ()]
            if rest and rest[0].type.shape and self.rng.random() < 0.3:
                x = self.make("Add", x, rest[0])
        return [x]

    def _callee(self) -> Function:
        make, wide = Maker(self.name("layer")), self.rng.choice((self.width, 2 * self.width, 3))
        x = make.data("x", *self.shape)
        y = make("MatMul", x, make.parameter("up", self.width, wide))
        y = make(self.rng.choice(SMOOTH), make("Add", y, make.parameter("bias", wide)))
        y = make("MatMul", y, make.parameter("down", wide, self.width))
        outputs = [make("Add", y, x) if self.rng.random() < 0.7 else y]
        if self.rng.random() < 0.3:
            outputs.append(make("Tanh", make("MatMul", x, make.parameter("side", self.width, self.width))))
        if self.rng.random() < 0.2:  # a loss of the layer's own, as a router has
            square = make("ReduceMean", make("Mul", y, y), axes=(0, 1, 2), keepdims=0)
            learned = self.rng.random() < 0.4
            outputs.append(
                make("Mul", square, make.parameter("weight")) if learned else make("Mul", square, B=0.1)
            )
        make.set_outputs(outputs)
        return make.finalize()

    # --- losses ------------------------------------------------------------------------------------------

    def loss(self) -> Value:
        """Return a scalar: one to three losses put together."""
        losses = [self._changed(self._one_loss()) for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3)))]
        losses += self.rng.sample(self.auxiliary, self.rng.randint(0, len(self.auxiliary)))
        total = losses[0]
        for other in losses[1:]:
            total = self.make(self.rng.choice(("Add", "Add", "Sub")), total, other)
        if len(losses) > 1 and self.rng.random() < 0.3:
            total = self.make("Div", total, B=float(len(losses)))
        return total

    def _one_loss(self) -> Value:
        kind, make = self.rng.choice(("mse", "mse", "mse", "entropy", "entropy", "mean", "sum")), self.make
        prediction = self.pool[-1] if self.rng.random() < 0.8 else self.pick()
        if kind == "mse":
            return make("Loss", prediction, self._target(), N=self.batch)
        if kind == "entropy":
            logits = make("MatMul", prediction, make.parameter(self.name("head"), self.width, CLASSES))
            labels = make.tokens(self.name("labels"), self.batch, self.sequence)
            return make("CrossEntropyLoss", logits, labels, N=self.batch * self.sequence)
        if self.rng.random() < 0.6:
            prediction = make("Mul", prediction, prediction)
        whole = make("ReduceMean" if kind == "mean" else "ReduceSum", prediction, axes=(0, 1, 2), keepdims=0)
        return whole if kind == "mean" else make("Mul", whole, B=0.1)

    def _target(self) -> Value:
        kind = self.rng.random()
        if kind < 0.6:
            return self.make.data(self.name("target"), *self.shape)
        if kind < 0.8:  # a target that is computed, of parameters too
            return self.make("Tanh", self.pick())
        return self.make("ConstantOfShape", input=self.shape, value=Literal(np.full(1, 0.25)))

    def _changed(self, loss: Value) -> Value:
        kind, make = self.rng.randrange(9), self.make
        if kind == 0:
            return make("Mul", loss, B=self.rng.choice((0.5, 2.0, 0.0)))
        if kind == 1:
            return make("Neg", loss)
        if kind == 2:
            return make("Mul", loss, make.parameter(self.name("weight")))
        if kind == 3:
            return make("Mul", make.data(self.name("weight")), loss)
        if kind == 4:  # used twice
            return make("Add", loss, make("Mul", loss, B=0.25))
        return loss


_STEPS = (
    *("linear",) * 5,
    *("layer",) * 4,
    *("binary",) * 3,
    *("unary", "shared", "norm") * 2,
    *("softmax", "split", "heads", "embedding", "made_from_constants", "chosen", "reduced", "centred"),
)
