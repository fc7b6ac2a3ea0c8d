"""Fixtures that several test files use."""

from __future__ import annotations

import pytest


@pytest.fixture
def put(tmp_path):
    def write(model):
        path = tmp_path / "m.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        return path

    return write
