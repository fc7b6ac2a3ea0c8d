"""Writing a file whole or not at all, and numbers as JSON has them."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from gzip import GzipFile
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from distsim.errors import SimulationError

FORMATS = ("pdf", "png", "svg")
"""What pictures are written as."""

PAGE = "a page", (".html", ".htm")
TRACE = "a trace", (".json", ".gz")
"""What other files are called, and how their names end."""

_LEVEL = 6
"""Of compression, as of gzip: a trace becomes 19 times smaller (level 3: 14, in half the time)."""

_PIECE = 2**18
"""Bytes that are compressed at a time."""


def check_format(path: str | os.PathLike[str], what: str) -> str:
    """Return the format that the suffix of ``path`` names; raise :class:`SimulationError` for another."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise SimulationError(f"{path}: {what} is written as one of {', '.join(FORMATS)}")
    return suffix


def check_ending(path: str | os.PathLike[str], what: str, endings: tuple[str, ...]) -> None:
    """Raise :class:`SimulationError` where the name of ``path`` ends as that of another kind of file."""
    suffix = Path(path).suffix.lower()
    if suffix and suffix not in endings:
        raise SimulationError(f"{path}: {what} is written as {' or '.join(endings)}, not {suffix}")


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return ``path``; raise :class:`SimulationError` where no file can be written so, its folder tried."""
    target = Path(path)
    if target.is_dir() or (target.exists() and not target.is_file()):
        raise SimulationError(f"{target} is not a file; name a file to write")
    if not target.parent.is_dir():
        raise SimulationError(f"{target}: there is no folder {target.parent}; make it first")
    check_writable(target.parent, target)
    return target


def check_writable(folder: Path, target: Path) -> None:
    """Raise :class:`SimulationError` naming ``target`` where ``folder`` takes no files: one is put there."""
    draft = _draft(folder / target.name)
    try:
        with draft.open("xb"):
            pass
        draft.unlink()
    except OSError as error:
        raise SimulationError(
            f"{target} cannot be written, as {folder} takes no files ({error.strerror}); name another folder"
        ) from error


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")


def finite(value: Any) -> Any:
    """Return what JSON (RFC 8259) has of a value: infinite numbers and those that are none are null.

    >>> finite({"hours": float("inf"), "parts": (1, np.float32(2.5))})
    {'hours': None, 'parts': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in cast("Sequence[Any]", value)]
    value = cast("Any", value.item() if isinstance(value, np.generic) else value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[BinaryIO, None, None]:
    """Yield a file that takes the place of ``path`` when the block ends well, and goes away otherwise.

    Raises :class:`SimulationError` as :func:`check_target`.
    """
    target = check_target(path)
    draft = _draft(target)
    try:
        with draft.open("xb") as file:
            yield file
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def packed(file: BinaryIO, path: str | os.PathLike[str]) -> Generator[IO[bytes], None, None]:
    """Yield what to write to: ``file``, or where the name of ``path`` ends in .gz, what compresses into it.

    The same content makes the same bytes: neither a name nor a time is in them.
    """
    if Path(path).suffix.lower() != ".gz":
        yield file
        return
    with GzipFile("", "wb", _LEVEL, file, mtime=0) as whole, BufferedWriter(whole, _PIECE) as pieces:
        yield pieces
