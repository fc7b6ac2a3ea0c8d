"""Delay: an op that takes a given time and makes a value of a given size.

It stands for whatever a stage does with a microbatch where only its time is known: in programs of a schedule
alone (:mod:`distsim.simulate.action_times`). ``seconds`` is read by cost rules that know the op; by others it
costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.operator import Array, Operator, Signature, Work, register


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].with_shape((attributes["size"],)),)


def _compute(attributes: Attributes, arrays: Sequence[Array]) -> list[Array]:
    return [np.zeros(attributes["size"], arrays[0].dtype)]


def _work(signature: Signature) -> Work:
    return Work(0.0, 0.0, 0.0)


register(Operator("Delay", types=_types, compute=_compute, work=_work))
