"""Function -> Function: differentiate, shard, pipeline, and the calls of the DistIR notebooks.

This is where notebooks import from; the library imports the modules.
"""

from distsim.compose.parallel_3d import (
    PipeDreamScheduler,
    parallel_transform_3d,
    steady_state_transform,
)
from distsim.ir.rewrite import inline
from distsim.transforms.autodiff.differentiate import differentiate
from distsim.transforms.autodiff.loss import add_loss
from distsim.transforms.autodiff.optimizers import SGD, Adam, AdamW, optimizer_named
from distsim.transforms.autodiff.precision import Precision, precision_named
from distsim.transforms.autodiff.set_precision import set_precision
from distsim.transforms.data_parallel.gathers import gathered
from distsim.transforms.data_parallel.zero import zero
from distsim.transforms.kernels.attention import set_attention
from distsim.transforms.kernels.composites import merge_composites
from distsim.transforms.outlining.outline import describe_blocks, outline
from distsim.transforms.pipelining.model_blocks import block_costs
from distsim.transforms.pipelining.pipeline import pipeline
from distsim.transforms.recompute import policy_named, rematerialize, split_joint
from distsim.transforms.sharding.shard import Sharded, shard

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "PipeDreamScheduler",
    "Precision",
    "Sharded",
    "add_loss",
    "block_costs",
    "describe_blocks",
    "differentiate",
    "gathered",
    "inline",
    "merge_composites",
    "optimizer_named",
    "outline",
    "parallel_transform_3d",
    "pipeline",
    "policy_named",
    "precision_named",
    "rematerialize",
    "set_attention",
    "set_precision",
    "shard",
    "split_joint",
    "steady_state_transform",
    "zero",
]
