"""What a function computes: its types, its flops, and NumPy over every rank."""

from distsim.interpret.flops import count_flops, count_model_flops
from distsim.interpret.infer import infer_types
from distsim.interpret.sequential import SequentialExecutor

__all__ = ["SequentialExecutor", "count_flops", "count_model_flops", "infer_types"]
