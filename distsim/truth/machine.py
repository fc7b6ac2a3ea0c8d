"""The cluster of a row."""

from __future__ import annotations

from distsim.hardware import load_cluster
from distsim.truth.row import MissingFeatureError, Row, cell

GPUS = {
    "A100-SXM4-80GB": "dgx-a100",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "V100": "dgx-2",
}
"""The preset for a GPU whose column begins so."""


def cluster_of(row: Row, devices: int) -> str:
    """Return a cluster of the GPUs of the row that is large enough for so many devices."""
    gpu = next((preset for name, preset in GPUS.items() if cell(row, "hw_gpu").startswith(name)), None)
    if gpu is None:
        raise MissingFeatureError(f"a preset for {cell(row, 'hw_gpu')}")
    return f"{gpu}:{-(-devices // len(load_cluster(gpu).devices))}"
