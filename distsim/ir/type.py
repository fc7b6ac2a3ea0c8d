"""The types of values: element types, tensors and tuples.

A :class:`Tensor` on a :class:`~distsim.ir.device.Mesh` has the *local* shape: every device of the
mesh holds one tensor of exactly this shape.

>>> Tensor(Float(), (2, 3)).nbytes, Tensor(Int64(), (2, 3)).nbytes, Tensor(Bool(), (2, 3)).nbytes
(24, 48, 6)
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from distsim.errors import TypeRuleError
from distsim.ir.device import Device, Mesh
from distsim.suggestions import did_you_mean


class Type:
    """Base of all types."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes that one value of this type takes on each device that holds it."""
        raise TypeError(f"{type(self).__name__} has no size")

    @property
    def allocated(self) -> int:
        """Bytes of memory that one value takes on each device that holds it: whole blocks."""
        return self.nbytes


class DType(Type):
    """An element type; instances of one class are equal, so ``Float() == Float32()``."""

    __slots__ = ()
    name: ClassVar[str]
    short: ClassVar[str]
    numpy: ClassVar[npt.DTypeLike]
    _itemsize: ClassVar[int]

    def __init_subclass__(cls) -> None:
        cls._itemsize = np.dtype(cls.numpy).itemsize

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def np(self) -> np.dtype[Any]:
        """The NumPy element type."""
        return np.dtype(self.numpy)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._itemsize

    @property
    def is_floating(self) -> bool:
        """Whether elements are real numbers, hence have gradients."""
        return self.short.startswith(("f", "bf"))


def _dtype(class_name: str, short: str, numpy: npt.DTypeLike) -> type[DType]:
    namespace = {"name": class_name.lower(), "short": short, "numpy": numpy, "__slots__": ()}
    return type(class_name, (DType,), {**namespace, "__doc__": f"Element type {class_name.lower()}."})


Bool = _dtype("Bool", "bool", np.bool_)
Int8 = _dtype("Int8", "i8", np.int8)
Int16 = _dtype("Int16", "i16", np.int16)
Int32 = _dtype("Int32", "i32", np.int32)
Int64 = _dtype("Int64", "i64", np.int64)
UInt8 = _dtype("UInt8", "u8", np.uint8)
UInt16 = _dtype("UInt16", "u16", np.uint16)
UInt32 = _dtype("UInt32", "u32", np.uint32)
UInt64 = _dtype("UInt64", "u64", np.uint64)
Float8E4M3FN = _dtype("Float8E4M3FN", "f8e4m3", ml_dtypes.float8_e4m3fn)
Float8E5M2 = _dtype("Float8E5M2", "f8e5m2", ml_dtypes.float8_e5m2)
Float16 = _dtype("Float16", "f16", np.float16)
BFloat16 = _dtype("BFloat16", "bf16", ml_dtypes.bfloat16)
Float32 = _dtype("Float32", "f32", np.float32)
Float64 = _dtype("Float64", "f64", np.float64)
Float = Float32

DTYPES: tuple[DType, ...] = tuple(
    cls()
    for cls in (
        *(Bool, Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64),
        *(Float8E4M3FN, Float8E5M2, Float16, BFloat16, Float32, Float64),
    )
)
_BY_NUMPY = {dtype.np: dtype for dtype in DTYPES}
_BY_NAME = {
    **{dtype.name: dtype for dtype in DTYPES},
    **{dtype.short: dtype for dtype in DTYPES},
    **{"fp64": Float64(), "double": Float64(), "fp32": Float32(), "float": Float32()},
    **{"fp16": Float16(), "half": Float16()},
}


def from_numpy(dtype: npt.DTypeLike) -> DType:
    """Return the element type of a NumPy dtype.

    >>> from_numpy("float32")
    Float32()
    """
    found = _BY_NUMPY.get(np.dtype(dtype))
    if found is None:
        raise TypeRuleError(f"element type {np.dtype(dtype)} is not one of {', '.join(_names())}")
    return found


def dtype_named(name: str | DType) -> DType:
    """Return the element type with a name such as ``bfloat16`` or ``bf16``; one that is no name is as it is.

    >>> dtype_named("bf16"), dtype_named("fp32") == dtype_named(Float32())
    (BFloat16(), True)
    """
    if isinstance(name, DType):
        return name
    found = _BY_NAME.get(str(name).lower())
    if found is None:
        raise TypeRuleError(
            f"element type {name!r} is not one of {', '.join(_names())}{did_you_mean(name, _BY_NAME)}"
        )
    return found


def _names() -> list[str]:
    return [dtype.name for dtype in DTYPES]


@dataclass(frozen=True, eq=False, slots=True)
class Tensor(Type):
    """An array of ``shape`` elements of ``dtype`` on ``device`` (None: not placed yet).

    ``dtype`` may be given by its name. ``on_host``: it is in the memory of the device's host, and takes none
    of the device.

    >>> Tensor(Float(), (2, 3)).nbytes, Tensor("bf16", (2, 3)).nbytes
    (24, 12)
    """

    dtype: DType
    shape: tuple[int, ...]
    device: Device | Mesh | None = None
    on_host: bool = False
    _hash: int = field(default=0, repr=False)
    _bytes: tuple[int, int] = field(default=(0, 0), repr=False)  # as on_host says, and in whole blocks

    if TYPE_CHECKING:

        def __init__(
            self,
            dtype: DType | str,
            shape: tuple[int, ...],
            device: Device | Mesh | None = None,
            on_host: bool = False,
            _hash: int = 0,
            _bytes: tuple[int, int] = (0, 0),
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "dtype", dtype_named(self.dtype))
        if isinstance(self.shape, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeRuleError(f"shape {self.shape} must be a tuple of sizes, as ({self.shape},)")
        shape: tuple[Any, ...] = tuple(self.shape)
        if not all(type(n) is int and n >= 0 for n in shape):
            try:
                shape = tuple(operator.index(n) for n in shape)  # NumPy's integers
            except TypeError:
                shape = (-1,)
            if any(n < 0 for n in shape):
                raise TypeRuleError(f"shape {self.shape} must be non-negative integers")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "_hash", hash((self.dtype, shape, self.device, self.on_host)))
        nbytes = 0 if self.on_host else math.prod(shape) * self.dtype.itemsize
        block = 1 if self.device is None else self.device.block
        whole = nbytes if block == 1 else -(-nbytes // block) * block
        object.__setattr__(self, "_bytes", (nbytes, whole))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Made anew where it is read: hashes of strings, and of None, differ between processes.
        return Tensor, (self.dtype, self.shape, self.device, self.on_host)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Tensor):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.shape == other.shape
            and (self.dtype is other.dtype or self.dtype == other.dtype)
            and (self.device is other.device or self.device == other.device)
            and self.on_host == other.on_host
        )

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on each device that holds it: 0 if it is on the host."""
        return self._bytes[0]

    @property
    def host_nbytes(self) -> int:
        """Bytes that each device that holds it takes of its host's memory."""
        return math.prod(self.shape) * self.dtype.itemsize if self.on_host else 0

    @property
    def allocated(self) -> int:
        """Bytes of memory that one value takes on each device that holds it: whole blocks."""
        return self._bytes[1]

    def on(self, device: Device | Mesh | None) -> Tensor:
        """Return this type on another device or mesh."""
        return self if device is self.device else Tensor(self.dtype, self.shape, device, self.on_host)

    def with_shape(self, shape: tuple[int, ...]) -> Tensor:
        """Return this type with another shape."""
        return Tensor(self.dtype, shape, self.device, self.on_host)

    def __str__(self) -> str:
        where = "" if self.device is None else f" @ {self.device}"
        where += " host" if self.on_host else ""
        return f"{self.dtype.short}[{', '.join(map(str, self.shape))}]{where}"


@dataclass(frozen=True, slots=True)
class TupleType(Type):
    """A tuple of values, one type each."""

    types: tuple[Type, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(member.nbytes for member in self.types)

    @property
    def allocated(self) -> int:
        """Bytes of memory that all members take."""
        return sum(member.allocated for member in self.types)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.types))})"


def as_tensor(type_: Type | None, what: str) -> Tensor:
    """Return ``type_`` when it is a tensor type; ``what`` names the value in the error."""
    if not isinstance(type_, Tensor):
        raise TypeRuleError(f"{what} must be a tensor, not {type_}")
    return type_
