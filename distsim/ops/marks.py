"""Ops that compute nothing: marks, a barrier, and a delay in the place of a computation.

Marks are identities of no cost that say of a value what nothing else in a function does. ``Accumulate`` is
the place where a sum over microbatches is taken. Sharding the batch over time leaves values that are a sum
over microbatches not yet taken; ``shard`` marks where the sum is needed and the pipeline turns the mark into
additions. On one microbatch, hence for NumPy on the whole batch, it is the identity.

``ForwardOutput`` is the place where a result of the forward pass is returned that the loss does not need. In
a joint function the ops that the loss depends on are the forward pass. What is returned besides, a pooled
vector or a cache of keys and values, follows from forward values just as the first gradients do, so that
nothing in it tells that it is no part of the backward pass: the mark does.

``OptimizationBarrier`` is the identity on its first operand, which waits for all of them. It is what XLA's
and JAX's operator of this name is for in rematerialisation: what reads the barrier is another computation
than what reads the value itself, hence is not merged with it, and does not start before what the barrier
waits for, the gradient with which the backward pass of a block begins (Chen et al. 2016; ``jax.checkpoint``,
prevent_cse).

``Delay`` takes a given time and makes a value of a given size. It stands for whatever a stage does with a
microbatch where only its time is known: in programs of a schedule alone
(:mod:`distsim.simulation.action_times`). ``seconds`` is read by cost rules that know the op; by others it
costs nothing.

What else a device and its host do: ``Launch``, ``Slowdown`` and ``Await``.

``Launch`` has the device run a kernel. It is no op of a model: tasks have it, on the stream ``host``, before
the kernel that waits for it. ``Slowdown`` is none either: what computation loses while a collective runs
beside it, on the stream ``compute`` where the collective is issued; where computation waits for the
collective anyway, it is lost in that. ``Await`` hands its first operand on; the host issues what follows in
its function only when all of them are there; with ``all=1`` when the device has done all computation that it
was given before. With ``device=1`` the device computes nothing of what follows before they are there, and no
host waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.function import Op
from distsim.ir.type import Tensor
from distsim.ir.value import NO_ATTRIBUTES, Attributes
from distsim.ops.operator import (
    Array,
    GradientRule,
    Operator,
    Work,
    arity,
    register,
)
from distsim.ops.places import same_shape_rule, view_work


def _register_mark(name: str, gradient: GradientRule | None) -> None:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(name, inputs, 1)
        return inputs

    register(
        Operator(
            name,
            types=types,
            compute=lambda attributes, arrays: [arrays[0]],
            work=view_work,
            gradient=gradient,
            sharding=lambda s: same_shape_rule(s, ((0,),)),
            view=True,
        )
    )


_register_mark("Accumulate", gradient=None)
_register_mark("ForwardOutput", gradient=lambda ctx: [ctx.grad])


def _barrier_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not inputs:
        raise TypeRuleError("OptimizationBarrier takes a value, and values to wait for; none given")
    return inputs[:1]


register(
    Operator(
        "OptimizationBarrier",
        types=_barrier_types,
        compute=lambda attributes, arrays: [arrays[0]],
        work=view_work,
        gradient=lambda ctx: [ctx.grad, *[None] * (len(ctx.inputs) - 1)],
        view=True,
        waits=True,
    )
)


def _delay_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].with_shape((attributes["size"],)),)


def _delay(attributes: Attributes, arrays: Sequence[Array]) -> list[Array]:
    return [np.zeros(attributes["size"], arrays[0].dtype)]


register(Operator("Delay", types=_delay_types, compute=_delay, work=view_work))


def _await_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not inputs:
        raise TypeRuleError("Await takes a value, and values that the host waits for; none given")
    return inputs[:1]


register(Operator("Launch", work=lambda signature: Work(0.0, 0.0, 0.0), issues=True))
register(Operator("Slowdown", work=lambda signature: Work(0.0, 0.0, 0.0), stalls=True))
register(
    Operator(
        "Await",
        types=_await_types,
        compute=lambda attributes, arrays: [arrays[0]],
        work=view_work,
        view=True,
        host_waits=True,
    )
)

LAUNCH = Op("Launch", (), (), NO_ATTRIBUTES)
"""The launch of some kernel, or the host's waiting for something."""

SLOWDOWN = Op("Slowdown", (), (), NO_ATTRIBUTES)
"""What computation loses to some collective."""

HOST = "host"
"""The stream on which the host of a device issues its kernels."""
