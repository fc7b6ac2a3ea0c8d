"""Progress of long work: what runs now and how long it took, on a terminal or a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Writes one line per step of work to ``file``: its name when it starts, its time when it ends.

    Without a file nothing is written. One that cannot be written to, say a log on a full disk, is no reason
    to stop the work.
    """

    file: TextIO | None = None

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Return ``work()``; the line is finished also when it fails."""
        self._write(f"{what} ... ")
        start = time.perf_counter()
        done = "stopped"  # by Ctrl-C
        try:
            result = work()
            done = "done"
        except Exception:
            done = "failed"
            raise
        finally:
            self._write(f"{done}, {time.perf_counter() - start:.2f} s\n")
        return result

    def _write(self, text: str) -> None:
        if self.file is None:
            return
        with contextlib.suppress(OSError):
            self.file.write(text)
            self.file.flush()
