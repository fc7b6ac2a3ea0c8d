"""What layers are written with: parameters, products, norms, rotary positions, gated feed-forwards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from distsim.errors import PlanError
from distsim.ir import Function, FunctionMaker, Role, Tensor, Value, trim
from distsim.models.sizes import check_caps
from distsim.ops.matmul import GROUP
from distsim.suggestions import choices_for

ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gelu": ("Gelu", {}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "silu": ("Swish", {}),
    "relu": ("Relu", {}),
}
"""The op of each activation and its attributes (Hendrycks and Gimpel 2016 for both forms of GELU)."""


def check_activation(activation: str) -> None:
    """Raise :class:`PlanError` for an activation that is not known."""
    if activation not in ACTIVATIONS:
        raise PlanError(f"activation={activation!r} is not one of {choices_for(activation, ACTIVATIONS)}")


@dataclass(frozen=True)
class Norm:
    """A normalization: ``layer`` (Ba et al. 2016), or ``rms`` (Zhang and Sennrich 2019).

    ``bias``: whether ``layer`` has one (Cohere's have none). ``offset`` is added to the weight: 1 in Gemma,
    whose weights begin at zero. ``place``: of the norms of a layer, ``before`` attention and feed-forward;
    ``after`` them, before the residual sum (OLMo 2); or ``around`` them, both (Gemma 2).
    """

    kind: str = "rms"
    epsilon: float = 1e-5
    offset: float = 0.0
    place: str = "before"
    bias: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("layer", "rms"):
            raise PlanError(f"norm {self.kind!r} is neither layer nor rms")
        if self.place not in ("before", "after", "around"):
            raise PlanError(f"norms are before, after or around the parts of a layer, not {self.place!r}")
        check_caps(epsilon=self.epsilon, offset=self.offset)


RMS = Norm()


class PartMaker:
    """Adds the ops of parts of a decoder of one element type and device to a maker."""

    def __init__(self, name: str, like: Tensor) -> None:
        self.maker, self.like = FunctionMaker(name), like

    def __call__(self, op_type: str, *inputs: Value, name: str = "", **attributes: object) -> Value:
        """Add an op with one output, called ``name`` if given."""
        return self.maker.add(op_type, inputs, attributes, output_names=[name] if name else None)[0]

    def within(self, module: str) -> AbstractContextManager[None]:
        """Within it, ops come from this module of the model."""
        return self.maker.within(module)

    def parameter(self, name: str, *shape: int) -> Value:
        """A parameter; parameters are inputs in the order in which they come."""
        return self.maker.add_input_value(name, self.like.with_shape(shape), Role.PARAMETER)

    def linear(
        self, source: Value, name: str, width_in: int, width_out: int, bias: bool = False, group: str = ""
    ) -> Value:
        """Multiply by a weight ``name.w``, and add a bias ``name.b`` if there is one.

        Products of one ``group`` and source are those that frameworks may have as one.
        """
        weight = self.parameter(f"{name}.w", width_in, width_out)
        of = {GROUP: group} if group else {}
        if not bias:
            return self("MatMul", source, weight, name=name, **of)
        made = self("MatMul", source, weight, **of)
        return self("Add", made, self.parameter(f"{name}.b", width_out), name=name)

    def norm(self, source: Value, name: str, width: int, norm: Norm = RMS, output: str = "") -> Value:
        """Normalize the last dimension, of size ``width``; the output is called as the norm by default."""
        attributes = {"axis": -1} | ({} if norm.epsilon == RMS.epsilon else {"epsilon": norm.epsilon})
        scale, output = self.parameter(f"{name}.scale", width), output or name
        with self.within("norm"):
            if norm.offset:
                scale = self("Add", scale, name=f"{name}.weight", B=norm.offset)
            if norm.kind == "rms":
                return self("RMSNormalization", source, scale, name=output, **attributes)
            bias = [self.parameter(f"{name}.bias", width)] if norm.bias else []
            return self("LayerNormalization", source, scale, *bias, name=output, **attributes)

    def capped(self, source: Value, cap: float, name: str) -> Value:
        """``cap`` tanh(source / cap), or the source where the cap is 0 (Bello et al. 2016; Gemma 2)."""
        if not cap:
            return source
        return self("Mul", self("Tanh", self("Mul", source, B=1.0 / cap)), name=name, B=cap)

    def scaled(self, source: Value, scale: float, name: str) -> Value:
        """The source times the scale, or itself where that is 1."""
        return source if scale == 1.0 else self("Mul", source, name=name, B=scale)

    def dropped(self, source: Value, rate: float, name: str) -> Value:
        """Dropout in training at a rate, or the source where the rate is 0."""
        if not rate:
            return source
        seed = len(self.maker.ops)  # each place draws its own mask
        drawn = {"ratio": np.array(rate), "training_mode": np.array(True), "seed": seed}
        return self("Dropout", source, name=name, **drawn)

    def finish(self, *outputs: Value) -> Function:
        """Return the function, without ops that nothing reads."""
        self.maker.set_outputs(outputs)
        return trim(self.maker.finalize()).function


class LayerMaker(PartMaker):
    """Adds the ops of one layer of [batch, seq, hidden] to a maker.

    ``x`` is the layer's input. Where heads turn ``rotary`` of their dimensions the tables ``cos`` and ``sin``
    [seq, rotary] of the angles of the positions are inputs too, and where attention is written out
    (``masked``) the mask ``causal`` [seq, seq]: ``tables``, in this order.
    """

    def __init__(self, name: str, x_type: Tensor, rotary: int = 0, masked: bool = True) -> None:
        super().__init__(name, x_type)
        self.batch, self.seq, self.hidden = x_type.shape
        self.x = self.maker.add_input_value("x", x_type)
        shapes = {"cos": rotary, "sin": rotary} if rotary else {}
        if masked:
            shapes["causal"] = self.seq
        self.tables = {name: self._table(name, size) for name, size in shapes.items()}

    def _table(self, name: str, size: int) -> Value:
        return self.maker.add_input_value(name, self.like.with_shape((self.seq, size)))

    @property
    def turns(self) -> bool:
        """Whether heads carry rotary positions."""
        return "cos" in self.tables

    def rotated(self, source: Value) -> Value:
        """Turn each pair (i, i + half) of the last dimension by its position's angle (Su et al. 2021)."""
        first, second = self.maker.add("Split", [source], {"axis": -1, "num_outputs": 2})
        turned = self("Concat", self("Neg", second), first, axis=-1)
        return self("Add", self("Mul", source, self.tables["cos"]), self("Mul", turned, self.tables["sin"]))

    def activated(self, source: Value, activation: str, name: str) -> Value:
        """Apply an activation of :data:`ACTIVATIONS`."""
        op_type, attributes = ACTIVATIONS[activation]
        return self(op_type, source, name=name, **attributes)
