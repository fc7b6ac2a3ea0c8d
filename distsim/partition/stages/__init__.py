"""Balanced pipeline stages: contiguous blocks of a model, split for the schedule that runs them."""

from distsim.partition.stages.calls import call_costs
from distsim.partition.stages.cost import BlockCost, Communication, free_communication, linear_communication
from distsim.partition.stages.default import default_split
from distsim.partition.stages.links import mesh_communication
from distsim.partition.stages.pricing import program_costs
from distsim.partition.stages.split import Split, StageProblem, auto_split, split_time

__all__ = [
    "BlockCost",
    "Communication",
    "Split",
    "StageProblem",
    "auto_split",
    "call_costs",
    "default_split",
    "free_communication",
    "linear_communication",
    "mesh_communication",
    "program_costs",
    "split_time",
]
