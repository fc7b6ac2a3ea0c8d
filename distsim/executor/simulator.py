"""Simulating a function: types, tasks, events."""

from __future__ import annotations

from collections.abc import Iterable

from distsim.executor.cost_model import CostModel
from distsim.executor.events import run
from distsim.executor.infer import infer_types
from distsim.executor.simulation import Simulation
from distsim.executor.tasks import lower
from distsim.ir import Function, Type, Value


class Simulator:
    """Simulates one run of a function on the devices that its types name.

    ``overlap``: communication runs beside compute, each on its own streams; without it each rank does
    one thing at a time. ``lockstep``: ranks that provably do the same are simulated as one.

    >>> from distsim.ir import Float, FunctionMaker, Tensor, Topology
    >>> topology = Topology()
    >>> gpu = topology.add_device("gpu", dram_bandwidth=1e12, kernel_launch_overhead=1e-5)
    >>> maker = FunctionMaker("f")
    >>> x = maker.add_input_value("x", Tensor(Float(), (1000, 1000), gpu))
    >>> y = maker.add_op("LossGrad", inputs=[x, x], attributes={"N": 1})
    >>> function = maker.finalize()
    >>> Simulator(CostModel(topology)).interpret(function, function.inputs).step_time
    2.2e-05
    """

    def __init__(self, cost_model: CostModel, overlap: bool = True, lockstep: bool = True) -> None:
        self.cost_model = cost_model
        self.overlap = overlap
        self.lockstep = lockstep

    def interpret(self, function: Function, types: Iterable[Value | Type]) -> Simulation:
        """Return the simulation of ``function`` with inputs of these types (a value stands for its type).

        Raises what :func:`infer_types` and :func:`lower` raise.
        """
        typed = infer_types(function, types)
        tasks = lower(typed, self.cost_model, self.overlap, self.lockstep)
        start, end = run(tasks)
        return Simulation(tasks, start, end)
