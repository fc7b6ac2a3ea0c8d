"""Progress of long work: what runs now and how long it took, on a terminal or a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Writes one line per step of work to ``file``: its name when it starts, its time when it ends."""

    file: TextIO

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Return ``work()``; the line is finished also when it fails."""
        self.file.write(f"{what} ... ")
        self.file.flush()
        start = time.perf_counter()
        done = "stopped"  # by Ctrl-C
        try:
            result = work()
            done = "done"
        except Exception:
            done = "failed"
            raise
        finally:
            self.file.write(f"{done}, {time.perf_counter() - start:.2f} s\n")
            self.file.flush()
        return result
