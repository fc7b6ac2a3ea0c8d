"""Tensors in ONNX files: their types, and their values wherever these are kept.

The type is read without the values; values in other files are opened only when they are asked for.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
from google.protobuf.message import DecodeError

from distsim.errors import ImportModelError, ModelLimitError, TypeRuleError, wrong_type
from distsim.importer.limits import MAX_FILE_BYTES, check_shape
from distsim.ir.type import DType, Tensor, dtype_named
from distsim.ops.float8 import EIGHT_BITS
from distsim.ops.operator import Array

_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes`` bytes."""
    if not isinstance(path, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong_type("path", path, "the path of a file")
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ImportModelError(f"{path} is not a regular file")
        if status.st_size > max_bytes:
            raise ModelLimitError(
                f"{path} has {status.st_size} bytes, more than max_bytes={max_bytes}; raise max_bytes, or "
                "export with the weights in a file of their own (external data)"
            )
        content = Path(path).read_bytes()
    except OSError as error:
        raise ImportModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ImportModelError:
        raise
    except ValueError as error:  # a path with a null byte
        raise ImportModelError(f"cannot read {path!r}: {error}") from error
    if not content:
        raise ImportModelError(f"{path} is empty")
    return content


def parse_tensor_from_file(path: str | os.PathLike[str], *, max_bytes: int = MAX_FILE_BYTES) -> Array:
    """Return the array in a file that holds one serialized ``TensorProto``, such as ``input_0.pb``.

    Raises :class:`ImportModelError` when the file is not one, or says that its values are elsewhere.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from onnx import numpy_helper
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "input_0.pb"
    ...     _ = path.write_bytes(numpy_helper.from_array(np.arange(3)).SerializeToString())
    ...     parse_tensor_from_file(path).tolist()
    [0, 1, 2]
    """
    content = read_bytes(path, max_bytes)
    tensor: Any = onnx.TensorProto()
    try:
        tensor.ParseFromString(content)
    except DecodeError as error:
        raise ImportModelError(f"{path} is not a serialized ONNX tensor: {error}") from error
    what = f"the tensor in {path}"
    if is_external(tensor):
        raise ImportModelError(f"{what} keeps its values in another file, which is not opened")
    return embedded_array(tensor, what)


def dtype_of(element_type: int, what: str) -> DType:
    """Return the element type that has this number in ONNX; ``what`` names its owner in the error."""
    names: Any = onnx.TensorProto.DataType
    if element_type not in names.values() or element_type == onnx.TensorProto.UNDEFINED:
        raise ImportModelError(f"{what}: there is no element type of number {element_type}")
    name: str = names.Name(element_type)
    try:
        found = dtype_named(_NAMES.get(name, name.lower()))
    except TypeRuleError as error:
        raise ImportModelError(f"{what}: {error}") from error
    if found in EIGHT_BITS:  # their products need scales, which ops of a file do not give
        raise ImportModelError(f"{what} is of {found.name}, which a model cannot be stored in; cast it")
    return found


def stored_type(tensor: Any, what: str) -> Tensor:
    """Return the type of a TensorProto, after checking that its sizes make sense."""
    shape = tuple(tensor.dims)
    if any(size < 0 for size in shape):
        raise ImportModelError(f"{what} has the shape {list(shape)}; a size cannot be negative")
    check_shape(what, shape)
    return Tensor(dtype_of(tensor.data_type, what), shape)


def is_external(tensor: Any) -> bool:
    """Return whether a TensorProto keeps its values in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def check_embedded(tensor: Any, type_: Tensor, what: str) -> None:
    """Raise unless a TensorProto holds as many values as its shape says."""
    if tensor.HasField("raw_data"):
        found, expected, unit = len(tensor.raw_data), type_.nbytes, "bytes"
    else:
        fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
        found, expected, unit = sum(len(getattr(tensor, name)) for name in fields), type_.size, "values"
    if found != expected:
        raise ImportModelError(f"{what} is {type_}, which takes {expected} {unit}, but it holds {found}")


def embedded_array(tensor: Any, what: str) -> Array:
    """Return the values that a TensorProto holds itself."""
    type_ = stored_type(tensor, what)
    check_embedded(tensor, type_, what)
    try:
        array: Array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ImportModelError(f"{what} cannot be read: {error}") from error
    if array.shape != type_.shape or array.dtype != type_.dtype.np:
        raise ImportModelError(f"{what} is {type_}, but its values are {array.dtype}{list(array.shape)}")
    return array


def stored_array(tensor: Any, what: str, folder: Path) -> Array:
    """Return the values of a TensorProto, from the model's ``folder`` when they are not in it."""
    if not is_external(tensor):
        return embedded_array(tensor, what)
    type_ = stored_type(tensor, what)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _inside(entries.get("location", ""), what, folder)
    offset, length = _number(entries, "offset", 0, what), _number(entries, "length", type_.nbytes, what)
    if length != type_.nbytes:
        raise ImportModelError(f"{what} is {type_}, which takes {type_.nbytes} bytes, not length={length}")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImportModelError(f"{what}: {path} is not a regular file")
        if offset + length > status.st_size:
            raise ImportModelError(
                f"{what} is at bytes {offset} to {offset + length} of {path}, which has {status.st_size}"
            )
        flat = np.fromfile(path, np.dtype(np.uint8), length, offset=offset)
    except OSError as error:
        raise ImportModelError(f"{what}: cannot read {path}: {error.strerror or error}") from error
    return flat.view(type_.dtype.np.newbyteorder("<")).astype(type_.dtype.np, copy=False).reshape(type_.shape)


def _inside(location: str, what: str, folder: Path) -> Path:
    """Return the path of a file that lies in the model's folder, links followed."""
    given = PureWindowsPath(location)  # takes both kinds of slashes, and drive letters
    if not location or "\0" in location or given.anchor or ".." in given.parts:
        raise ImportModelError(
            f"{what} keeps its values in {location!r}; only a file in the model's folder is opened"
        )
    root = folder.resolve()
    try:
        path = (root / location).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ImportModelError(
            f"{what} keeps its values in {location!r}, which is not in the model's folder {folder}: "
            "put it there, or import without load_values"
        ) from error
    if not path.is_relative_to(root):
        raise ImportModelError(f"{what}: {location!r} is a link out of the model's folder; it is not opened")
    return path


def _number(entries: dict[str, str], key: str, default: int, what: str) -> int:
    text = entries.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ImportModelError(f"{what}: {key}={text!r} of its external data must be a number of bytes")
    return int(text)
