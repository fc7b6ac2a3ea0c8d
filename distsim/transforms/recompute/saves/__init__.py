"""Save or recompute: which values of the forward pass the backward pass keeps."""

from distsim.transforms.recompute.saves.budget import save_within_budget
from distsim.transforms.recompute.saves.default import (
    checkpointed,
    save_by_region,
    save_for_backward,
)
from distsim.transforms.recompute.saves.graph import (
    EVERY_OUTPUT,
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Phase,
    Saves,
    Tag,
    Trait,
)
from distsim.transforms.recompute.saves.mincut import MinCutOptions, save_min_cut
from distsim.transforms.recompute.saves.replay import save_replayed
from distsim.transforms.recompute.saves.split import Needs, needs, split

__all__ = [
    "EVERY_OUTPUT",
    "JointGraph",
    "JointNode",
    "MinCutOptions",
    "Needs",
    "NodeKind",
    "NodeRole",
    "Phase",
    "Saves",
    "Tag",
    "Trait",
    "checkpointed",
    "needs",
    "save_by_region",
    "save_for_backward",
    "save_min_cut",
    "save_replayed",
    "save_within_budget",
    "split",
]
