"""Function -> Function: differentiate, shard, pipeline, and the calls of the DistIR notebooks."""

from distsim.transforms.build import build_program
from distsim.transforms.differentiate import differentiate
from distsim.transforms.fsdp import fsdp, gathered
from distsim.transforms.inline import inline
from distsim.transforms.loss import add_loss
from distsim.transforms.model_blocks import block_costs
from distsim.transforms.optimizers import SGD, Adam, optimizer_named
from distsim.transforms.outline import describe_blocks, outline
from distsim.transforms.parallel_3d import (
    PipeDreamScheduler,
    parallel_transform_3d,
    steady_state_transform,
)
from distsim.transforms.pipeline import pipeline
from distsim.transforms.place import Placed, partition_devices, place, transfer_seconds
from distsim.transforms.precision import set_precision
from distsim.transforms.rematerialize import policy_named, rematerialize, split_joint
from distsim.transforms.shard import Sharded, shard

__all__ = [
    "SGD",
    "Adam",
    "PipeDreamScheduler",
    "Placed",
    "Sharded",
    "add_loss",
    "block_costs",
    "build_program",
    "describe_blocks",
    "differentiate",
    "fsdp",
    "gathered",
    "inline",
    "optimizer_named",
    "outline",
    "parallel_transform_3d",
    "partition_devices",
    "pipeline",
    "place",
    "policy_named",
    "rematerialize",
    "set_precision",
    "shard",
    "split_joint",
    "steady_state_transform",
    "transfer_seconds",
]
