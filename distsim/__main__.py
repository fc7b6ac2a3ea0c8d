"""The command line as a process, ``distsim`` or ``python -m distsim``: its signals and its streams."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from distsim.compile import when_compiling
from distsim.console.terminal import close_output, complain, open_missing

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
"""What stops a command: Ctrl-C, ``kill``, a terminal that goes away (not on every system)."""


class Stopped(KeyboardInterrupt):
    """A signal came. Not an error: it passes what handles errors, and on its way drafts are removed."""


class _Stop:
    """Raises :class:`Stopped` in the main thread when a signal comes; ``number`` is the signal, 0 before."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)  # the second time ends it at once
        raise Stopped

    def again(self, lost: sys.UnraisableHookArgs) -> None:
        """Stop what a callback from compiled code, or a finalizer, could not be stopped by."""
        if not issubclass(lost.exc_type, Stopped):
            sys.__unraisablehook__(lost)
            return
        signal.signal(self.number, self)
        threading.Timer(0.01, os.kill, (os.getpid(), self.number)).start()


def main() -> int:
    """Run the command line; return its exit status, or 128 and the number of the signal that stopped it."""
    open_missing()
    stop = _Stop()
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    status = 0
    try:
        sys.unraisablehook = stop.again
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, stop)
        from distsim.cli import main as command  # in here, as importing it takes a while

        when_compiling(lambda part: complain(f"compiling {part}, once per installation (1 to 10 s)"))
        status = command()
    except BaseException:
        if not stop.number:
            raise
        # Also another error: that of a library in which Stopped was lost.
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
        close_output()
    if stop.number:
        complain(f"distsim: stopped by {signal.Signals(stop.number).name}")
        return 128 + stop.number
    return status


if __name__ == "__main__":
    sys.exit(main())
