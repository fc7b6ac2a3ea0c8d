"""Compiled loops: Numba, imported when one of them is first called."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A function that Numba compiles, once per types of its arguments, when it is first called.

    The machine code is cached on disk where Numba finds a place for it (beside the source, else in the
    user's cache directory); on an installation with neither, each process compiles anew. One compiled
    function calls another by its name, also one of another module.
    """

    def __init__(self, function: Callable[P, R], inner: bool = False) -> None:
        self.function: Any = function
        # What is called by address, and for an inner function from Python, takes as long to make as the rest.
        self.options = {"nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": inner}
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the machine code for these arguments; compile it if there is none yet."""
        if self.options["no_cpython_wrapper"]:
            raise TypeError(f"{self.function.__name__} is for compiled functions: Python cannot call it")
        return self.dispatcher(*args, **kwargs)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's own object for the function."""
        numba: Any = import_module("numba")
        _tell_of_compiling()
        stamp = self._stamp()
        if stamp:
            # Numba looks at the file of the function only: by its name, the cache sees the others change.
            self.function.__qualname__ += f"_{stamp}"
        try:
            return numba.njit(cache=True, **self.options)(self.function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(**self.options)(self.function)

    @property
    def _numba_type_(self) -> Any:
        """What the compiler sees where another compiled function names this one."""
        types: Any = import_module("numba.core.types")
        return types.Dispatcher(self.dispatcher)

    def _stamp(self) -> str:
        """Return a digest of the other files whose compiled functions this one calls, "" for none."""
        reached: list[Compiled[..., Any]] = [self]
        for caller in reached:
            named = [caller.function.__globals__.get(name) for name in caller.function.__code__.co_names]
            reached += [each for each in named if isinstance(each, Compiled) and each not in reached]
        names = dict.fromkeys(each.function.__code__.co_filename for each in reached[1:])
        names.pop(self.function.__code__.co_filename, None)
        files = [path for path in map(Path, names) if path.is_file()]
        content = b"".join([path.read_bytes() for path in files])
        return hashlib.sha256(content).hexdigest()[:12] if files else ""


class Anywhere(Compiled[P, R]):
    """A function of a line or two that compiled functions call; Python runs it as it is written."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function itself: also of arrays, and without a compiler."""
        return self.function(*args, **kwargs)


_PARTS = {
    "distsim.stage_balance": "the search for stages",
    "distsim.schedule.greedy": "the search for schedules",
    "distsim.schedule": "the order of schedules",
    "distsim.device_placement": "the search for partitions",
    "distsim.transforms": "the search for what to save",
    "distsim.simulation.memory": "the count of memory",
    "distsim.simulation.explain": "the search for the critical path",
    "distsim.simulation.details": "the times of a trace",
    "distsim": "the engine",
}
"""What compiled functions are of, by the packages that they lie in; the first that holds counts."""

_TOLD: list[Callable[[str], None]] = []
"""What to call when something is compiled."""


def when_compiling(tell: Callable[[str], None]) -> None:
    """Have ``tell`` called with what is compiled, as ``the engine``, when the first function of it is.

    What is compiled is kept on disk, so that happens once per installation.
    """
    _TOLD[:] = [tell]


def _tell_of_compiling() -> None:
    """Listen to Numba, whose events say when it compiles and does not find the machine code."""
    if not _TOLD:
        return
    event: Any = import_module("numba.core.event")
    tell = _TOLD.pop()
    said: set[str] = set()

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            module: str = event.data["dispatcher"].py_func.__module__
            found = [what for package, what in _PARTS.items() if f"{module}.".startswith(f"{package}.")]
            if found and found[0] not in said:
                said.add(found[0])
                tell(found[0])

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Listener())


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile a module-level function of numbers, arrays and named tuples of these when it is called.

    >>> @compiled
    ... def triangle(n: int) -> int:
    ...     total = 0
    ...     for i in range(n + 1):
    ...         total += i
    ...     return total
    >>> triangle(4)
    10
    """
    return Compiled(function)


def inner(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile a function that only compiled functions call: in less time than :func:`compiled` takes."""
    return Compiled(function, inner=True)


def anywhere(function: Callable[P, R]) -> Anywhere[P, R]:
    """Let compiled functions call a function that Python calls too, of numbers or of arrays.

    Constants that it has are seen to change, as those that a caller imports are not.
    """
    return Anywhere(function, inner=True)
