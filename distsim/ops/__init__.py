"""The operators, one definition each; importing this installs their type rule in the IR."""

from distsim.ir.registry import set_type_rule
from distsim.ops import communication, matmul, training
from distsim.ops.onnx_bridge import OPSET
from distsim.ops.operator import (
    Communication,
    GradientContext,
    Operator,
    Pieces,
    ShardingRule,
    Signature,
    Work,
    operator,
    register,
    registered,
    sharding_rule,
    signature_of,
)
from distsim.ops.rules import compute, types, work

set_type_rule(types)

__all__ = [
    "OPSET",
    "Communication",
    "GradientContext",
    "Operator",
    "Pieces",
    "ShardingRule",
    "Signature",
    "Work",
    "communication",
    "compute",
    "operator",
    "register",
    "registered",
    "sharding_rule",
    "signature_of",
    "training",
    "types",
    "work",
]
