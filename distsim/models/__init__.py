"""Builders of forward Functions: an MLP, a GPT-style and a Llama-style transformer."""

from distsim.models.gpt import gpt
from distsim.models.llama import llama
from distsim.models.mlp import mlp

__all__ = ["gpt", "llama", "mlp"]
