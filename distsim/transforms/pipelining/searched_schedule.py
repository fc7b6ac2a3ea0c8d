"""Schedules that are searched for with the times of the stages that they are to run."""

from __future__ import annotations

from distsim.cost.cost_model import CostModel
from distsim.errors import ScheduleError
from distsim.ir import Mesh
from distsim.schedule import Schedule, schedule
from distsim.stage_balance.pricing import action_costs
from distsim.transforms.pipelining.pipeline import Cut


def searched_schedule(
    name: str, memory: float, cut: Cut, mesh: Mesh, order: Schedule, cost_model: CostModel
) -> Schedule:
    """Return the schedule called ``name`` for the stages of a cut, by what their actions take.

    ``memory`` is what a rank may use for activations, as a share of what 1F1B needs: those of as many
    microbatches as there are ranks, of all its stages. ``order`` is any schedule of as many stages, ranks and
    microbatches, in which the stages are looked at. Raises :class:`ScheduleError` for a memory that is too
    small.
    """
    limit = memory * order.num_ranks * order.chunks
    if limit < 1:
        raise ScheduleError(
            f"schedule={name}:{memory:g}: a rank holds at least one activation of one of its stages; give at "
            f"least {1 / (order.num_ranks * order.chunks):.3g}"
        )
    costs = action_costs(cut.program(mesh, order), cost_model)
    return schedule(
        name,
        order.num_ranks,
        order.num_microbatches,
        order.chunks,
        memory_limit=limit,
        seconds=costs.seconds.tolist(),
        send=costs.send,
        weight_share=costs.pending.tolist(),
    )
