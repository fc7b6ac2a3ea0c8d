"""Timings as a file of a name."""

from distsim.calibration import read_timings


def read(tmp_path, name: str, content: str | bytes):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_timings([path])
