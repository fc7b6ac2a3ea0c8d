"""Absurd numbers, texts and tensors, to put in place of sound ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from onnx import AttributeProto, TensorProto, numpy_helper

WHOLE = (-1, 0, 1, 2, 3, 5, 63, 64, 65, 1000, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1)
NEGATIVE = (-2, -3, -7, -100, -(2**31), -(2**62), -(2**63))
INTEGERS = WHOLE + NEGATIVE
REALS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 1e-45, 1e38, -1e38, 0.5, 2**31, 2**62)
RANKS = (0, 1, 7, 26, 27, 33, 40, 53, 64, 65, 100, 1000)
TEXTS = (
    "",
    " ",
    "x",
    "y",
    "SAME_UPPER",
    "bilinear",
    "i,j->k",
    "...",
    "...->",
    "\n",
    "é",
    "a" * 3000,
    "\0",
    "loc",
    "batch",
)
KINDS = tuple(range(-1, 26))
FIELDS = {AttributeProto.INT: "i", AttributeProto.FLOAT: "f", AttributeProto.STRING: "s"}
LISTS = {AttributeProto.INTS: "ints", AttributeProto.FLOATS: "floats", AttributeProto.STRINGS: "strings"}

Rng = random.Random


def integer(rng: Rng) -> int:
    """Return an absurd number, or a small one."""
    return rng.choice(INTEGERS if rng.random() < 0.6 else (*range(-3, 10),))


def fitting(value: int, kind: Any) -> int:
    """Return the number that is nearest in an integer type."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    return min(max(value, int(low)), int(high))


def real(rng: Rng) -> float:
    """Return an absurd number that float32 has."""
    return float(np.float32(rng.choice(REALS)))


def item(kind: int, rng: Rng) -> Any:
    """Return an item of a list attribute."""
    if kind == AttributeProto.INTS:
        return integer(rng)
    return real(rng) if kind == AttributeProto.FLOATS else rng.choice(TEXTS).encode()


def damage_list(items: Any, kind: int, rng: Rng) -> None:
    """Change, drop, add or replace items of a list attribute."""
    how = rng.randrange(7)
    if how <= 2 and items:
        items[rng.randrange(len(items))] = item(kind, rng)
    elif how == 3 and items:
        del items[rng.randrange(len(items))]
    elif how == 4:
        items.append(item(kind, rng))
    elif how == 5:
        made = [item(kind, rng)] * rng.choice((0, *RANKS, 70_000))
        del items[:]
        items.extend(made)
    else:
        made = [item(kind, rng) for _ in items]
        del items[:]
        items.extend(made)


def fill(made: Any, kind: int, rng: Rng) -> None:
    """Give an attribute of a kind an absurd value."""
    if kind in FIELDS:
        value = {"i": integer(rng), "f": real(rng), "s": rng.choice(TEXTS).encode()}[FIELDS[kind]]
        setattr(made, FIELDS[kind], value)
    elif kind in LISTS:
        items = [item(kind, rng) for _ in range(rng.choice((0, 1, 2, 3, 4, 8, 40)))]
        getattr(made, LISTS[kind]).extend(items)
    elif kind == AttributeProto.TENSOR:
        made.t.CopyFrom(numpy_helper.from_array(np.array([fitting(integer(rng), np.int64)]), "t"))
        damage_tensor(made.t, rng)


# Tensors


def damage_tensor(tensor: Any, rng: Rng) -> None:
    """Change the numbers, dims, type or place of a tensor."""
    how = rng.randrange(9)
    if how <= 3:
        _numbers(tensor, rng)
    elif how == 4 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = integer(rng)
    elif how == 5:
        size = rng.choice((1, 1, 0, 2, -1, 2**40))
        del tensor.dims[:]
        tensor.dims.extend([size] * rng.choice(RANKS))
    elif how == 6:
        tensor.data_type = fitting(rng.choice((*KINDS, 2**31 - 1)), np.int32)
    elif how == 7:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    else:
        tensor.data_location = TensorProto.EXTERNAL
        for key in ("location", "offset", "length"):
            if rng.random() < 0.7:
                values = ("case.bin", "../x", "/etc/passwd", "", str(integer(rng)), "1e9", "\0")
                tensor.external_data.add(key=key, value=rng.choice(values))


def _numbers(tensor: Any, rng: Rng) -> None:
    """Other numbers, or another number of them, in a tensor that stays sound."""
    try:
        array = np.array(numpy_helper.to_array(tensor))
    except Exception:  # it was damaged before
        return
    if array.dtype.kind == "i":
        values = [fitting(integer(rng), array.dtype) for _ in range(array.size)]
    elif array.dtype.kind == "f":
        values = [float(np.float32(rng.choice(REALS))) for _ in range(min(array.size, 500))]
    else:
        return
    how = rng.randrange(4)
    made = array.reshape(-1)[:500].copy()
    with np.errstate(all="ignore"):
        if how <= 1 and made.size:
            place = rng.randrange(len(made))
            made[place] = values[place]
            made = made.reshape(array.shape) if made.size == array.size else made
        elif how == 2:
            made = np.array(values, array.dtype)
            made = made.reshape(array.shape) if made.size == array.size else made
        else:
            made = np.full(rng.choice((*RANKS, 70_000)), values[0] if values else 1, array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(made, tensor.name))
