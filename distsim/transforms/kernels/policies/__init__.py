"""What kernels a framework launches, as policies with a name each."""

from distsim.transforms.kernels.policies.joins import (
    Joins,
    fusible,
    is_epilogue,
    is_pointwise,
    promotes,
    sums_rows,
)
from distsim.transforms.kernels.policies.kernels import KERNELS, Kernels, kernels_named

__all__ = [
    "KERNELS",
    "Joins",
    "Kernels",
    "fusible",
    "is_epilogue",
    "is_pointwise",
    "kernels_named",
    "promotes",
    "sums_rows",
]
