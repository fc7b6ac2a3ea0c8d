"""What the layers of a plan do, found out by building it for a step of few of them."""

from __future__ import annotations

import warnings
from dataclasses import replace

from distsim.compose import parallelize
from distsim.compose.division import layouts_of
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.errors import DistsimError
from distsim.hardware.plan_mesh import plan_mesh
from distsim.ir import Function
from distsim.plan import Plan
from distsim.plan_search.bounds.layer_figures import LayerWork
from distsim.plan_search.bounds.layer_work import half_work, layer_work
from distsim.plan_search.bounds.plan_bounds import PlanBounds
from distsim.plan_search.bounds.saved_bytes import pending_bytes
from distsim.plan_search.bounds.short_step import shortened

LAYERS = 4
"""Of how many layers a step is that is built: two for each of two stages, the one after the other."""


def probe_of(plan: Plan) -> Plan | None:
    """Return the plan of two stages at most under which layers do the same; None where none is like it."""
    if plan.zero_ranks or plan.offload:
        return None
    stages = "layers" if plan.pp > 1 else "even"
    try:
        return replace(plan, pp=min(plan.pp, 2), chunks=1, stages=stages, schedule="1f1b")
    except DistsimError:
        return None


class LayerProbes:
    """The layers of plans of a step, each probed once; ``short`` is the step of few of them, if any."""

    def __init__(self, bounds: PlanBounds, costs: CostModel) -> None:
        self._bounds, self._costs = bounds, costs
        self._known: dict[Plan, LayerWork | None] = {}
        parameters = bounds.layer_parameters
        self.short = shortened(bounds.function, parameters, LAYERS) if parameters else None

    def work(self, probe: Plan) -> LayerWork | None:
        """Return what the layers of a plan do all together, of those of the step; None: it is not known."""
        if probe not in self._known:
            self._known[probe] = self._probed(probe)
        return self._known[probe]

    def _probed(self, probe: Plan) -> LayerWork | None:
        if self.short is None or probe.devices > len(self._bounds.topology.devices):
            return None
        if not self._lie_alike(self.short, probe):
            return None
        topology, kernels = self._bounds.topology, self._bounds.kernels
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncostedOperatorWarning)
            try:
                program = parallelize(self.short, probe, topology, self._costs, None, kernels)
                found = layer_work(program, self._costs)
            except DistsimError:
                return None
        if found is None or not found.layer or found.layers != LAYERS:
            return None
        if program.schedule.num_stages > 1:
            # Nobody waits for the first stage.
            once = {key for key, maker in program.makers().items() if maker.once}
            stages = len(program.stages)
            pending = pending_bytes(program.stages[-1].forward, program.parts.halves[-1], once)
            found = found._replace(pending=pending * stages, halves=half_work(program, self._costs))
        return found.of_layers(self._bounds.layers)

    def _lie_alike(self, short: Function, probe: Plan) -> bool:
        """Whether layers are divided in a step of few as in the whole, beside whose rest they weigh more."""
        if probe.tp * probe.cp * probe.ep == 1:
            return True
        bounds = self._bounds
        try:
            mesh = plan_mesh(probe, bounds.topology)
            costs = self._costs.on(mesh.devices[0])
            few, every = (
                layouts_of(each, mesh, probe, bounds.kernels, costs) for each in (short, bounds.function)
            )
        except DistsimError:
            return False
        return few.of_callees() == every.of_callees()
