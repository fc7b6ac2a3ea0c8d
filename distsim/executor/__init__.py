"""The ways to execute a function: types, NumPy, and simulated time and memory."""

from distsim.executor.cost_model import CostModel, UncostedOperatorWarning
from distsim.executor.critical_path import CriticalPath
from distsim.executor.disturbances import Disturbances
from distsim.executor.explanation import Explanation
from distsim.executor.flops import count_flops
from distsim.executor.infer import infer_types
from distsim.executor.sequential import SequentialExecutor
from distsim.executor.simulation import Shares, Simulation
from distsim.executor.simulator import Simulator

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
