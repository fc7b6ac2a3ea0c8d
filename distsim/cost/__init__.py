"""What an op costs, in seconds."""

from distsim.cost.cost_model import CostModel, UncostedOperatorWarning

__all__ = ["CostModel", "UncostedOperatorWarning"]
