"""Where DistIR's notebooks import the cost model from."""

from distsim.cost.cost_model import CostModel

__all__ = ["CostModel"]
