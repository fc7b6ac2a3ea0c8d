"""Saved, offloaded and recomputed values: a joint function, and a policy of what it keeps."""

from distsim.transforms.recompute.joint import Joint, Passes, split_joint
from distsim.transforms.recompute.offload import layers_of, offload
from distsim.transforms.recompute.policies import REPLAY, Policy, policy_named
from distsim.transforms.recompute.recompute import recompute
from distsim.transforms.recompute.record import recorded
from distsim.transforms.recompute.transform import rematerialize

__all__ = [
    "REPLAY",
    "Joint",
    "Passes",
    "Policy",
    "layers_of",
    "offload",
    "policy_named",
    "recompute",
    "recorded",
    "rematerialize",
    "split_joint",
]
