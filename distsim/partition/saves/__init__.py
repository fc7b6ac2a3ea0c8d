"""Save or recompute: which values of the forward pass the backward pass keeps."""

from distsim.partition.saves.graph import (
    EVERY_OUTPUT,
    JointGraph,
    JointNode,
    Kind,
    Phase,
    Role,
    Saves,
    Tag,
    Trait,
)

__all__ = ["EVERY_OUTPUT", "JointGraph", "JointNode", "Kind", "Phase", "Role", "Saves", "Tag", "Trait"]
