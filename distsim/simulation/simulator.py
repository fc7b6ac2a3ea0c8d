"""Simulating a function or a program: types, tasks, an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from distsim.cost.cost_model import CostModel
from distsim.errors import SimulationError, expect
from distsim.interpret.infer import infer_types
from distsim.ir import Function, Type, Value
from distsim.program.program import Program
from distsim.program.write_out import WrittenOut
from distsim.schedule import longer
from distsim.simulation.details import ProgramTimeline
from distsim.simulation.events.disturbances import Disturbances
from distsim.simulation.events.engine import run as run_events
from distsim.simulation.events.network import Network
from distsim.simulation.maxplus.engine import run_program
from distsim.simulation.simulation import Simulation
from distsim.simulation.tasks.recurrence import run as run_tasks
from distsim.simulation.tasks.task_table import lower
from distsim.simulation.tasks.timeline import FlatTimeline

ENGINES = ("maxplus", "events")
"""``maxplus``: exact for fixed durations and in-order streams; ``events``: one event per op (SimPy)."""


class Simulator:
    """Simulates one run of a function, or a training step, on the devices that it names.

    ``overlap``: communication runs beside compute, each on its own streams; without it each rank does
    one thing at a time. ``lockstep``: ranks that provably do the same are simulated as one. ``engine`` is one
    of :data:`ENGINES`; the event engine takes ``contention``, in which concurrent transfers share the links
    that they cross, and :class:`Disturbances`: every device is then simulated on its own.

    >>> from distsim.ir import Float, FunctionMaker, Tensor, Topology
    >>> topology = Topology()
    >>> gpu = topology.add_device("gpu", dram_bandwidth=1e12, kernel_launch_overhead=1e-5)
    >>> maker = FunctionMaker("f")
    >>> x = maker.add_input_value("x", Tensor(Float(), (1000, 1000), gpu))
    >>> y = maker.add_op("LossGrad", inputs=[x, x], attributes={"N": 1})
    >>> function = maker.finalize()
    >>> Simulator(CostModel(topology)).interpret(function, function.inputs).step_time  # to 0.9 ps
    2.2000...e-05
    """

    def __init__(
        self,
        cost_model: CostModel,
        overlap: bool = True,
        lockstep: bool = True,
        engine: str = "maxplus",
        contention: bool = False,
        disturbances: Disturbances | None = None,
    ) -> None:
        if engine not in ENGINES:
            raise SimulationError(f"engine={engine!r} is unknown; choose one of {', '.join(ENGINES)}")
        if engine != "events" and (contention or disturbances is not None):
            raise SimulationError(
                "contention and disturbances are not linear, so the max-plus engine has none; use "
                'engine="events"'
            )
        links = disturbances is not None and (disturbances.slow_links or disturbances.failed_links)
        if links and not contention:
            raise SimulationError("slow and failed links need contention=True: without it no link is shared")
        expect("cost_model", cost_model, CostModel, "a CostModel, as CostModel(topology)")
        self.cost_model = cost_model
        self.overlap = overlap
        self.lockstep = lockstep and not contention and disturbances is None
        self.engine = engine
        self.disturbances = disturbances
        self.network = Network(cost_model.topology) if contention else None

    def interpret(self, function: Function, types: Iterable[Value | Type]) -> Simulation:
        """Return the simulation of ``function`` with inputs of these types (a value stands for its type).

        Raises what :func:`infer_types` and :func:`lower` raise.
        """
        typed = infer_types(function, types)
        if isinstance(typed, WrittenOut) and typed.steady:
            return self.simulate(typed.program)
        timeline = self._flat(typed)
        again = partial(self._interpret_with, typed)
        return Simulation(timeline, typed, self.cost_model, again, partial(_as_it_is, timeline))

    def simulate(self, program: Program) -> Simulation:
        """Return the simulation of a program, in steady state: parameters and data are where they are used.

        The max-plus engine runs each distinct block once; the event engine runs the program written out.
        """
        expect("program", program, Program, "a Program, as parallelize() returns; of a function: interpret()")
        if self.engine == "maxplus" and self.lockstep:
            timeline = ProgramTimeline(run_program(program, self.cost_model, self.overlap))
        else:
            timeline = self._written_out(program)
        return Simulation(
            timeline,
            program,
            self.cost_model,
            partial(self._simulate_with, program),
            partial(self._written_out, program),
            partial(self._simulate_longer, program),
        )

    # What a simulation calls again is bound, not local, so that it can be pickled.

    def _interpret_with(self, function: Function, cost_model: CostModel) -> Simulation:
        return self._with(cost_model).interpret(function, function.inputs)

    def _simulate_with(self, program: Program, cost_model: CostModel) -> Simulation:
        return self._with(cost_model).simulate(program)

    def _simulate_longer(self, program: Program, num_microbatches: int) -> Simulation:
        return self.simulate(replace(program, schedule=longer(program.schedule, num_microbatches)))

    def _written_out(self, program: Program) -> FlatTimeline:
        return self._flat(program.to_function(steady=True))

    def _with(self, cost_model: CostModel) -> Simulator:
        contention = self.network is not None
        return Simulator(cost_model, self.overlap, self.lockstep, self.engine, contention, self.disturbances)

    def _flat(self, function: Function) -> FlatTimeline:
        tasks = lower(function, self.cost_model, self.overlap, self.lockstep, self.network is not None)
        if self.engine == "maxplus":
            start, end = run_tasks(tasks)
        else:
            start, end = run_events(tasks, self.network, self.disturbances)
        return FlatTimeline(tasks, start, end)


def _as_it_is(timeline: FlatTimeline) -> FlatTimeline:
    return timeline
