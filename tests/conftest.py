"""Fixtures that several test files use."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

# Functions and programs are many small objects, some of which refer to each other. To look for cycles among
# three million of them took three seconds each time and freed little: it is left to tests that ask for it.
gc.set_threshold(100_000_000, 50, 1000)

# Bytecode of what is imported is kept, by processes that tests start as well: to compile all of it anew takes
# a second in each of them, and with the tests themselves four seconds in each worker.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_modifyitems(items):
    """Begin with the linters, a minute of a process of its own: meanwhile the other worker compiles loops.

    What both workers need at the same time is compiled in both.
    """
    items.sort(key=lambda item: item.path.name != "test_lint.py")


def pytest_collection_finish():
    """Let Hypothesis find NumPy's generator now: it looks for cycles to do so, once, among all there is."""
    given(st.none())(lambda _: None)()


def pytest_runtest_teardown(item, nextitem):
    """Let go with the last test of a file what its tests share."""
    if isinstance(item, pytest.Function) and (nextitem is None or nextitem.path != item.path):
        for each in vars(item.module).values():
            if hasattr(each, "cache_clear") and each.__module__ == item.module.__name__:
                each.cache_clear()
        gc.freeze()  # who collects later looks at nothing older than the file


def pytest_sessionfinish():
    """Look for no cycles in the end: pytest would ten times, for exceptions that nobody saw, and Python."""
    gc.freeze()


@pytest.fixture
def collect():
    """gc.collect, which looks at nothing older than the test: at all that others left takes a second."""
    gc.freeze()
    return gc.collect


@pytest.fixture
def put(tmp_path):
    def write(model):
        path = tmp_path / "m.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        return path

    return write
