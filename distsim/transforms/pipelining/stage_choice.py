"""What a plan leaves to be found: where stages of uneven work begin, and a schedule that is searched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from distsim.cost.cost_model import CostModel, DeviceCosts
from distsim.errors import PartitionError, PlanError, ScheduleError
from distsim.ir import Mesh
from distsim.plan import parse_stages
from distsim.schedule import Kind, Schedule, schedule
from distsim.simulation.maxplus.engine import run_program
from distsim.simulation.memory.program_memory import program_memory
from distsim.stage_balance import Split, StageProblem, mesh_communication
from distsim.stage_balance.pricing import action_costs
from distsim.transforms.pipelining.model_blocks import ModelBlocks, costs_of, model_blocks
from distsim.transforms.pipelining.pipeline import Cut, cut_stages
from distsim.transforms.sharding.shard import Sharded

EFFORT = 20_000
"""Simulations of the search for one plan."""
ROOM = 1.25
"""How much more than the memory of a device its blocks may need by their figures, which are estimates, before
what they need in fact is looked at."""
MOST_TRIES = 12
"""How often a search is repeated when a split turns out to need too much memory."""


def counted_cut(functions: Iterable[Sharded], num_stages: int, costs: DeviceCosts, stages: str) -> Cut:
    """Cut where a plan counts layers or blocks: see :meth:`ModelBlocks.counted`, :meth:`ModelBlocks.split`.

    ``functions`` are the same function with ever more Calls written out. Layers are those of the first;
    numbers are of the first whose layers, or blocks, they sum to. Raises :class:`PlanError` where layers
    cannot be counted so, and for numbers that sum to none of these.
    """
    sizes = parse_stages(stages)
    seen: list[ModelBlocks] = []
    for local in functions:
        blocks = model_blocks(local, costs, most=len(local.function.ops))
        firsts = blocks.split(sizes) if sizes else blocks.counted(stages, num_stages)
        if firsts:
            cut = cut_stages(local, num_stages, costs, blocks.stages(firsts))
            return _noted(cut, f"stages={stages}: {_sizes(firsts, len(blocks))} blocks")
        seen.append(blocks)
    first, *finer = seen
    sums = [f"{first.layers.count(True)}, the layers"]
    if all(sizes):  # which a stage without layers counts alone
        sums += [f"{len(first)}, all blocks"]
        counts = [len(blocks) for blocks in finer if len(blocks) >= len(sizes)]
        sums += [f"{found}, the blocks with layers written out" for found in counts]
    raise PlanError(
        f"stages={stages} sums to {sum(sizes)}, but {first.described}; give numbers that sum to "
        f"{', or to '.join(sums)}"
    )


def layers_of_stages(local: Sharded, num_stages: int, costs: DeviceCosts, stages: str) -> tuple[int, ...]:
    """Return how many layers each stage has where a plan counts layers, or blocks, of this function.

    Raises :class:`PlanError` for stages that may begin within a layer: those of even work or least time,
    and numbers that count what layers consist of.
    """
    sizes = parse_stages(stages)
    if num_stages == 1 and not sizes:
        return ()
    blocks = model_blocks(local, costs, most=len(local.function.ops))
    counted = sizes or stages in ("layers", "default")
    firsts = () if not counted else blocks.split(sizes) if sizes else blocks.counted(stages, num_stages)
    if not firsts:
        raise PlanError(
            f"stages={stages} may begin within a layer, so a stage has no number of layers to recompute or "
            f"to offload; use stages=layers, stages=default or layers as in 3-4-4-3 ({blocks.described}), or "
            "remat=full or every:N and offload=0"
        )
    ends = (*firsts[1:], len(blocks))
    return tuple([blocks.layers[first:end].count(True) for first, end in zip(firsts, ends, strict=True)])


@dataclass(frozen=True)
class _SimulatedCut:
    """A cut, how long its step takes, and the most bytes by which a device is over."""

    cut: Cut
    step_time: float
    missing: float


def fastest_cut(
    functions: Sequence[Sharded], even: Cut, mesh: Mesh, schedule: Schedule, cost_model: CostModel
) -> Cut:
    """Return the cut of the fastest simulated step that fits in memory.

    ``functions`` are the same function with ever more Calls written out: the blocks of each are split
    (:func:`distsim.stage_balance.auto_split`), and what comes out is simulated in full. So are ``even``,
    the cut by work, and that of ``stages=default``, where there is one: the fastest is returned. Raises
    :class:`PartitionError` when nothing fits.
    """
    found: list[_SimulatedCut] = []
    refused: list[PartitionError] = []
    for local in functions:
        try:
            found += _searched(local, mesh, schedule, cost_model)
        except PartitionError as error:
            refused.append(error)
    found += _counted(functions[0], mesh, schedule, cost_model)
    why = f"; none was split by its blocks: {refused[0]}" if len(refused) == len(functions) else ""
    even = _noted(even, f"stages=auto: the cut of even work is the fastest of those simulated{why}")
    found.append(_simulated(even, mesh, schedule, cost_model))
    fitting = [each for each in found if each.missing <= 0]
    if fitting:
        return min(fitting, key=lambda each: each.step_time).cut
    if refused:
        raise refused[0]
    least = min(each.missing for each in found)
    raise PartitionError(
        f"stages=auto: no split into {schedule.chain} stages fits in memory; the best is over by "
        f"{least / 2**20:,.1f} MiB; use more stages, smaller microbatches, or recompute more"
    )


def _searched(local: Sharded, mesh: Mesh, schedule: Schedule, cost_model: CostModel) -> list[_SimulatedCut]:
    """Return the best splits of a function's blocks, the last of which fits in memory if any does."""
    stages, ranks = schedule.chain, schedule.num_ranks
    on_device = cost_model.on(mesh.devices[0])
    blocks = model_blocks(local, on_device)
    if len(blocks) < stages:
        return []
    costs = costs_of(local, blocks, mesh.at(pp=0), cost_model, Kind.BACKWARD_INPUT in schedule.kinds)
    limits = [min(d.usable for d in own.devices) for own in mesh.slices("pp")]
    problem = StageProblem(costs, schedule, mesh_communication(mesh, cost_model), limits)
    found: list[_SimulatedCut] = []
    room = [ROOM * limit for limit in limits]
    for _ in range(MOST_TRIES):
        try:
            split = problem.within(room).best(EFFORT)
        except PartitionError:
            break
        cut = cut_stages(local, stages, on_device, blocks.stages(split.starts))
        note = _described(split, blocks, problem.order.plain)
        cut = _noted(cut, note + _on_one_kind(mesh, cost_model))
        found.append(_simulated(cut, mesh, schedule, cost_model))
        if found[-1].missing <= 0:
            return found
        peaks = program_memory(cut.program(mesh, schedule)).peaks
        estimated = [0.0] * ranks
        for stage, rank in enumerate(schedule.rank_of):
            estimated[rank] += split.memory[stage % stages]
        for rank, (peak, limit, memory) in enumerate(zip(peaks, limits, estimated, strict=True)):
            if peak > limit:  # so much by the blocks' figures is too much
                room[rank] = limit - (peak - memory)
    if not found:
        problem.within(limits).best(1)  # says what is missing
    return found


def _counted(local: Sharded, mesh: Mesh, schedule: Schedule, cost_model: CostModel) -> list[_SimulatedCut]:
    """Return the cut by counting layers, if these can be counted: costs of blocks are estimates."""
    try:
        cut = counted_cut([local], schedule.chain, cost_model.on(mesh.devices[0]), "default")
    except PlanError:
        return []
    note = "stages=auto: the cut by counting layers is the fastest of those simulated"
    return [_simulated(_noted(cut, note), mesh, schedule, cost_model)]


def _simulated(cut: Cut, mesh: Mesh, schedule: Schedule, cost_model: CostModel) -> _SimulatedCut:
    program = cut.program(mesh, schedule)
    return _SimulatedCut(cut, run_program(program, cost_model).step_time, program_memory(program).missing)


def _described(split: Split, blocks: ModelBlocks, bounded: bool) -> str:
    proof = "proven the fastest by them"
    if not split.proven and bounded:
        proof = f"at most {split.gap:.2%} from the fastest by them"
    elif not split.proven:
        proof = "not proven the fastest: no block moved makes it faster, of too many splits to try"
    firsts = ", ".join(blocks.names[first] for first in split.starts)
    return (
        f"stages=auto: {_sizes(split.starts, len(blocks))} blocks, beginning with {firsts}; "
        f"{split.step_time * 1e3:.3f} ms by their costs, {proof}"
    )


def _on_one_kind(mesh: Mesh, cost_model: CostModel) -> str:
    """Say that costs are those of the first device, where others of a mesh are of other kinds."""
    kinds = len({cost_model.spec(device) for device in mesh.devices})
    if kinds == 1:
        return ""
    return (
        f", as if all ran on {mesh.devices[0]}: of the step on these {kinds} kinds of devices, some of them "
        "slower or faster, nothing is proven; give a stage on slower ones fewer layers, as in 5-5-3-3"
    )


def _sizes(firsts: Sequence[int], count: int) -> str:
    ends = [*firsts[1:], count]
    return ", ".join(str(end - first) for first, end in zip(firsts, ends, strict=True))


def _noted(cut: Cut, note: str) -> Cut:
    return replace(cut, notes=(*cut.notes, note))


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
