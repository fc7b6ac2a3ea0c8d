"""What the tests of the network share: clusters whose devices share ports, and functions that only move."""

from functools import cache

from distsim.compose import parallelize
from distsim.executor import CostModel, infer_types
from distsim.ir import Device, Float, FunctionMaker, Tensor, Topology
from distsim.ir.link import Link
from distsim.ir.topology import Level
from distsim.models import mlp
from distsim.plan import Plan
from distsim.simulation.events.engine import run
from distsim.simulation.events.network import Network
from distsim.simulation.tasks.task_table import lower
from distsim.transforms import differentiate, steady_state_transform

GB = 10**9
INSIDE, ACROSS = 1e11, 1e10
"""Bytes/s of a port inside a node, and of a NIC."""


def nodes(count, per_node=2, per_port=2, latency=0.0, scale=1.0, oversubscription=1.0):
    """Nodes of devices that share NICs; ids count through the nodes."""
    levels = [
        Level("nvlink", Link(INSIDE * scale, latency), per_node),
        Level("nic", Link(ACROSS * scale, latency), None, per_port, oversubscription),
    ]
    return Topology.hierarchical(Device(0, "gpu", 1e13, 1e12, 1e-6), count * per_node, levels)


def array(nbytes, on):
    return Tensor(Float(), (nbytes // 4,), on)


def moves(topology, *wanted):
    """One op for each (kind, bytes, from, to or axis), all ready at the start."""
    maker = FunctionMaker("moves")
    for number, (kind, nbytes, place, to) in enumerate(wanted):
        x = maker.add_input_value(f"x{number}", array(nbytes, place))
        maker.add_op(kind, inputs=[x], attributes={"to": to} if kind == "Send" else {"axis": to})
    return lower(maker.finalize(), CostModel(topology), lockstep=False, contention=True)


def sends(topology, *wanted):
    """One Send for each (bytes, source id, target id)."""
    devices = topology.devices
    return moves(topology, *[("Send", nbytes, devices[a], devices[b]) for nbytes, a, b in wanted])


def seconds(tasks, topology, disturbances=None):
    """How long each task takes on the network."""
    start, end = run(tasks, Network(topology), disturbances)
    return (end - start).tolist()


@cache
def step(per_port, **sizes):
    """A training step over four nodes of two devices: dp all-reduces and pipeline sends on the NICs."""
    topology = nodes(4, per_port=per_port)
    joint = differentiate(mlp(**(sizes or {"layers": 8, "width": 512, "batch": 64})))
    function = parallelize(joint, Plan(dp=4, tp=1, pp=2, microbatches=4), topology).to_function()
    types = [v.type.on(topology.devices[0]) if v.type.device is None else v.type for v in function.inputs]
    function, inputs = steady_state_transform(infer_types(function, types))
    return lower(
        infer_types(function, inputs), CostModel(topology), lockstep=False, contention=True
    ), topology
