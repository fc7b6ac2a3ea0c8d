"""What of the data degrees divide: the batch over dp and time, sequences over cp, and over tp (sp=on)."""

from __future__ import annotations

import math

from distsim.errors import PlanError
from distsim.hardware.rank_axes import EXPERT, TENSOR
from distsim.ir import Function, Mesh, Value
from distsim.ir.type import as_tensor
from distsim.ops.attention_sharding import TORCH_ROTATES


def check_batch(function: Function, data: tuple[Value, ...], dp: int, microbatches: int) -> None:
    """Check that ranks and microbatches divide the batch, dimension 0 of ``data``."""
    parts = dp * microbatches
    if not data and parts > 1:
        raise PlanError(f"{function.name}: dp={dp}, microbatches={microbatches}, but no input has a batch")
    for value in data[:1]:
        size = as_tensor(value.type, value.name).shape[0]
        if size % parts or size == 0:
            raise PlanError(
                f"dp={dp} times microbatches={microbatches} does not divide the batch of {size} "
                f"(input {value.name!r}); their product must be one of {_divisors(size)}"
            )


BATCH = ("edp", "dp")
"""The axis, or view, that divides the batch: among those that have the same experts, if there are, or all."""
CONTEXT = {"cp": "", "cp_ring": "ring", "cp_heads": "ulysses"}
"""The axes that divide sequences, and of which kind each is, where that is not given."""
ZIGZAG = ("allgather", "ring", *TORCH_ROTATES)
"""The kinds of context parallelism whose ranks have two parts of a sequence each."""

SEQUENCES = {False: (2,), True: (3,)}
"""How many dimensions data with a sequence have: integers [batch, sequence]; numbers, features behind it."""


def sequences(data: tuple[Value, ...]) -> dict[Value, int]:
    """Return the data that have a sequence, and how long it is; it is their dimension 1."""
    types = [(value, as_tensor(value.type, value.name)) for value in data]
    return {
        value: type_.shape[1] for value, type_ in types if type_.rank in SEQUENCES[type_.dtype.is_floating]
    }


def check_sequence(function: Function, data: tuple[Value, ...], mesh: Mesh, sp: bool, halves: bool) -> None:
    """Check that cp ranks, each of which has ``halves``, and with ``sp`` tp ranks divide the sequence."""
    tp, cp = mesh.axis_size(TENSOR), math.prod([mesh.axis_size(axis) for axis in context_axes(mesh)])
    if not sp and cp == 1:
        return
    asked, without = ("sp=on", "sp=off") if cp == 1 else (f"cp={cp}", "cp=1")
    along = sequences(data)
    if not along:
        raise PlanError(
            f"{asked}, but no input of {function.name} has a sequence (dimension 1); use {without}"
        )
    parts = [f"tp={tp}"] * sp + [f"cp={cp}"] * (cp > 1) + ["2 halves"] * halves
    count = (tp if sp else 1) * cp * (2 if halves else 1)
    for value, size in along.items():
        if size % count:
            rest = size * (tp if cp == 1 else cp) // count
            usable = f"or {'tp' if cp == 1 else 'cp'} one of {_divisors(rest, 2)}"
            raise PlanError(
                f"{asked}: {' times '.join(parts)} does not divide the sequence of {size} (input "
                f"{value.name!r}); use {without}, {usable}"
            )


def batch_axis(mesh: Mesh) -> str:
    """Return the axis of a mesh that divides the batch, or the view of several that do."""
    return next(axis for axis in BATCH if axis in dict(mesh.axes) or axis in mesh.views)


def expert_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which experts are divided, that of dp first."""
    every = (*dict(mesh.axes), *mesh.views)
    return mesh.axes_of(EXPERT) if EXPERT in every else ()


def expert_axes_of_dp(mesh: Mesh) -> tuple[str, ...]:
    """Return those of the axes of dp along which experts are divided."""
    return tuple([axis for axis in expert_axes(mesh) if axis in mesh.axes_of("dp")])


def context_axes(mesh: Mesh) -> list[str]:
    """Return the axes, or views, of context parallelism that a mesh has."""
    return [axis for axis in CONTEXT if axis in dict(mesh.axes) or axis in mesh.views]


def _divisors(n: int, least: int = 1) -> str:
    found = [d for d in range(least, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found)) + (" ..." if n > 4096 else "") or "none (there is nothing to divide)"
