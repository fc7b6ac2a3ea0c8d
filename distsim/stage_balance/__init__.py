"""Balanced pipeline stages: contiguous blocks of a model, split for the schedule that runs them."""

from distsim.stage_balance.cost import (
    BlockCost,
    Communication,
    free_communication,
    linear_communication,
    mesh_communication,
)
from distsim.stage_balance.pricing import program_costs
from distsim.stage_balance.split import Split, StageProblem, auto_split, default_split, split_time

__all__ = [
    "BlockCost",
    "Communication",
    "Split",
    "StageProblem",
    "auto_split",
    "default_split",
    "free_communication",
    "linear_communication",
    "mesh_communication",
    "program_costs",
    "split_time",
]
