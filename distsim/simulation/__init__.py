"""A Function or a Program -> times and memory, and the reasons for them."""

from distsim.simulation.events.disturbances import Disturbances
from distsim.simulation.explain.bytes_sent import bytes_sent
from distsim.simulation.explain.critical_path import CriticalPath
from distsim.simulation.explain.explanation import Explanation
from distsim.simulation.simulation import Shares, Simulation
from distsim.simulation.simulator import Simulator

__all__ = ["CriticalPath", "Disturbances", "Explanation", "Shares", "Simulation", "Simulator", "bytes_sent"]
