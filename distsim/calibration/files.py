"""The text of a file of timings, which is a stranger's: it must be a file, of a size that can be."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from distsim.errors import TimingsError

MAX_TEXT_BYTES = 1 << 26
"""Of a table, or of what nccl-tests print: far more than any has."""
MAX_TRACE_BYTES = 1 << 29
"""Of a trace as it is when unpacked: some ten steps of a large model."""


def read_bytes(path: Path, limit: int) -> bytes:
    """Return what is in a file, unpacked if its name ends in .gz; raises :class:`TimingsError`.

    At most ``limit`` bytes and one are unpacked, so that a small file cannot fill the memory.
    """
    if not path.is_file():
        raise TimingsError(f"{path} is not a file; give the path of a file of timings")
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TimingsError(f"{path} cannot be read: {said}") from error
    if len(data) > limit:
        raise TimingsError(f"{path} has more than {limit >> 20} MiB; time fewer calls, or trace fewer steps")
    return data


def read_text(path: Path) -> str:
    """Return the text of a file; raises :class:`TimingsError` for what is none in UTF-8."""
    try:
        return read_bytes(path, MAX_TEXT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TimingsError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
