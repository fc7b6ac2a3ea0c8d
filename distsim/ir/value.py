"""Values, and the attributes of ops."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from distsim.ir.device import Device, Mesh
from distsim.ir.type import Tensor, Type


class Role(enum.Enum):
    """What a function's input is to training; memory and parallelism ask for it."""

    INPUT = "input"
    PARAMETER = "parameter"
    STATE = "state"
    CONSTANT = "constant"

    # There is one of each; Enum's own hash, that of the name, is a call in Python, millions of them a search.
    __hash__ = object.__hash__


def setters(kind: type) -> list[Callable[[Any, Any], None]]:
    """Return what sets the slots of a frozen class, in their order."""
    return [getattr(kind, name).__set__ for name in kind.__dict__["__slots__"]]


@dataclass(frozen=True, eq=False, slots=True, init=False)
class Value:
    """One typed value. Identity matters; the name is for people and need not be unique.

    >>> from distsim.ir.type import Float, Tensor
    >>> x, y = (Value("x", Tensor(Float(), (2, 3))) for _ in range(2))
    >>> x == y, x.type.nbytes
    (False, 24)
    """

    name: str
    type: Type
    role: Role = Role.INPUT

    def __init__(self, name: str, type: Type, role: Role = Role.INPUT) -> None:
        _SET_NAME(self, name)
        _SET_TYPE(self, type)
        _SET_ROLE(self, role)

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


# Millions are made in a search: what dataclasses write sets each field of a frozen one by its name.
_SET_NAME, _SET_TYPE, _SET_ROLE = setters(Value)


def place_of(value: Value) -> Device | Mesh | None:
    """Return where a value is."""
    return value.type.device if isinstance(value.type, Tensor) else None


class Literal:
    """A constant array that can be compared, hashed and printed, hence be an attribute."""

    __slots__ = ("_key", "array")

    def __init__(self, array: npt.ArrayLike) -> None:
        self.array: npt.NDArray[Any] = np.array(array)
        self.array.flags.writeable = False
        self._key = (str(self.array.dtype), self.array.shape, self.array.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        if self.array.size > 8:
            return f"<{self.array.dtype}{list(self.array.shape)}>"
        return str(self.array.tolist())


def _freeze(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Literal(cast(npt.NDArray[Any], value))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in cast(Sequence[Any], value))
    return cast(Any, value).item() if isinstance(value, np.generic) else value


def _exact(value: Any) -> Any:
    """A key in which 1, 1.0 and True differ."""
    if isinstance(value, tuple):
        return tuple(_exact(item) for item in cast(Sequence[Any], value))
    return (type(value).__name__, value)


class Attributes(Mapping[str, Any]):
    """The attributes of an op: an immutable, hashable mapping; lists become tuples, arrays Literals."""

    __slots__ = ("_hash", "_items", "_key")

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items: dict[str, Any] = {k: _freeze(v) for k, v in sorted((items or {}).items())}
        self._key = tuple((k, _exact(v)) for k, v in self._items.items())
        self._hash = hash(self._key)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or else the default."""
        return self._items.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Attributes) and self._hash == other._hash and self._key == other._key

    def __reduce__(self) -> tuple[object, ...]:
        # Made anew where it is read: hashes of strings differ between processes.
        return Attributes, (self._items,)

    def __repr__(self) -> str:
        return f"Attributes({self._items})"


NO_ATTRIBUTES = Attributes()
"""The attributes of an op that has none."""
