"""Saved and recomputed values: a joint function, and a policy of what it keeps."""

from distsim.transforms.rematerialize.phases import Joint, Split, split_joint
from distsim.transforms.rematerialize.policies import REPLAY, Policy, policy_named
from distsim.transforms.rematerialize.recompute import recompute
from distsim.transforms.rematerialize.record import recorded
from distsim.transforms.rematerialize.transform import rematerialize

__all__ = [
    "REPLAY",
    "Joint",
    "Policy",
    "Split",
    "policy_named",
    "recompute",
    "recorded",
    "rematerialize",
    "split_joint",
]
