"""Builders of forward Functions: an MLP, GPT- and Llama-style transformers, mixtures of experts, DeepSeek."""

from distsim.models.deepseek import deepseek
from distsim.models.gpt import gpt
from distsim.models.llama import llama
from distsim.models.mlp import mlp
from distsim.models.moe import moe
from distsim.models.routing import Routing, draw_routing

__all__ = ["Routing", "deepseek", "draw_routing", "gpt", "llama", "mlp", "moe"]
