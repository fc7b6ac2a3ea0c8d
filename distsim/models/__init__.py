"""Builders of forward Functions: an MLP and a GPT-style transformer."""

from distsim.models.gpt import gpt
from distsim.models.mlp import mlp

__all__ = ["gpt", "mlp"]
