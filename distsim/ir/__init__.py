"""Types, values, ops and functions; devices, meshes and topologies."""

from distsim.ir.dead import Trimmed, needed_ops, trim
from distsim.ir.device import Device, Mesh
from distsim.ir.function import Function, Op, all_ops, callees, count_ops
from distsim.ir.link import Link
from distsim.ir.maker import FunctionMaker
from distsim.ir.printing import cpprint, pformat
from distsim.ir.rewrite import (
    Environment,
    copy_function,
    copy_op,
    retype,
    retype_op,
    rewire_op,
    rewrite,
    rewrite_all,
    substitute,
)
from distsim.ir.topology import Topology
from distsim.ir.type import (
    BFloat16,
    Bool,
    DType,
    Float,
    Float8E4M3FN,
    Float8E5M2,
    Float16,
    Float32,
    Float64,
    Int32,
    Int64,
    Tensor,
    TupleType,
    Type,
)
from distsim.ir.value import NO_ATTRIBUTES, Attributes, Literal, Role, Value, place_of
from distsim.ir.verify import verify

__all__ = [
    "NO_ATTRIBUTES",
    "Attributes",
    "BFloat16",
    "Bool",
    "DType",
    "Device",
    "Environment",
    "Float",
    "Float8E4M3FN",
    "Float8E5M2",
    "Float16",
    "Float32",
    "Float64",
    "Function",
    "FunctionMaker",
    "Int32",
    "Int64",
    "Link",
    "Literal",
    "Mesh",
    "Op",
    "Role",
    "Tensor",
    "Topology",
    "Trimmed",
    "TupleType",
    "Type",
    "Value",
    "all_ops",
    "callees",
    "copy_function",
    "copy_op",
    "count_ops",
    "cpprint",
    "needed_ops",
    "pformat",
    "place_of",
    "retype",
    "retype_op",
    "rewire_op",
    "rewrite",
    "rewrite_all",
    "substitute",
    "trim",
    "verify",
]
