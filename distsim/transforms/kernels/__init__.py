"""What one kernel runs: attention as one op, and ops that a framework launches together."""

from distsim.transforms.kernels.fusion import fuse, fuse_stages
from distsim.transforms.kernels.policies import KERNELS, Kernels, kernels_named

__all__ = ["KERNELS", "Kernels", "fuse", "fuse_stages", "kernels_named"]
