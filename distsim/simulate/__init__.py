"""A Function or a Program -> times and memory, and the reasons for them."""

from distsim.simulate.events.disturbances import Disturbances
from distsim.simulate.explain.critical_path import CriticalPath
from distsim.simulate.explain.explanation import Explanation
from distsim.simulate.simulation import Shares, Simulation
from distsim.simulate.simulator import Simulator

__all__ = ["CriticalPath", "Disturbances", "Explanation", "Shares", "Simulation", "Simulator"]
