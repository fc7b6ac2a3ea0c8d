"""The names that DistIR's notebooks import, and those beside them."""

from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.interpret import SequentialExecutor, count_flops, infer_types
from distsim.simulation import CriticalPath, Disturbances, Explanation, Shares, Simulation, Simulator

__all__ = [
    "CostModel",
    "CriticalPath",
    "Disturbances",
    "Explanation",
    "SequentialExecutor",
    "Shares",
    "Simulation",
    "Simulator",
    "UncostedOperatorWarning",
    "count_flops",
    "infer_types",
]
