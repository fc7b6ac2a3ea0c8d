"""Fixtures that several test files use."""

from __future__ import annotations

import gc
import os

import pytest

# Functions and programs are many small objects that live as long as a test, or a run: to look for cycles
# among all of them again and again took an eighth of the time. It is done once a file, among what that left.
gc.set_threshold(1_000_000, 50, 1000)

# Processes that tests start keep the bytecode of what they import: to compile all of it anew takes a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_runtest_teardown(item, nextitem):
    """Let go with the last test of a file what its tests share: among many models collections are slow."""
    if isinstance(item, pytest.Function) and (nextitem is None or nextitem.path != item.path):
        for each in vars(item.module).values():
            if hasattr(each, "cache_clear") and each.__module__ == item.module.__name__:
                each.cache_clear()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    """Look for cycles once: pytest does ten times, for exceptions that nobody saw, and Python as it ends.

    Among what the last tests left: all that a run made are some ten million objects, five seconds' work.
    """
    gc.collect(1)
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
