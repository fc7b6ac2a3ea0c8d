"""model + Plan + Topology -> Program, the one composition; each piece of it is made once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from distsim.cost.cost_model import CostModel, DeviceCosts, cost_model_of
from distsim.errors import PlanError, ScheduleError
from distsim.hardware.plan_mesh import plan_mesh, rank_axes
from distsim.ir import Device, Function, Mesh, Op, Topology
from distsim.ir.device import logical_mesh
from distsim.ir.rewrite import inline
from distsim.plan import Plan, parse_cp_kind, parse_remat, parse_schedule, parse_stages
from distsim.program.program import Program
from distsim.schedule import FLUSH, SCHEDULES, TABLE, Schedule
from distsim.schedule import schedule as schedule_named
from distsim.schedule.refusals import count as count_of
from distsim.transforms.autodiff.outputs import only_needed
from distsim.transforms.data_parallel.gathers import gathered
from distsim.transforms.data_parallel.zero import zero
from distsim.transforms.kernels.gradients import gradients_apart
from distsim.transforms.kernels.losses import losses_apart
from distsim.transforms.kernels.policies import KERNELS, Kernels
from distsim.transforms.op_graph import Numbered, is_sum
from distsim.transforms.outlining.outline import outline
from distsim.transforms.pipelining.pipeline import Cut, cut_stages
from distsim.transforms.pipelining.stage_choice import (
    counted_cut,
    fastest_cut,
    layers_of_stages,
    searched_schedule,
)
from distsim.transforms.pipelining.stages import coarse
from distsim.transforms.recompute import layers_of, offload, rematerialize
from distsim.transforms.recompute.interiors import recompute_interiors
from distsim.transforms.sharding.shard import Sharded, shard


def parallelize(
    function: Function,
    plan: Plan,
    topology: Topology,
    cost_model: CostModel | None = None,
    schedule: Schedule | None = None,
    kernels: Kernels = KERNELS["ops"],
) -> Program:
    """Return the scheduled training step of a joint function under ``plan``.

    The first ``plan.devices`` devices of ``topology`` are used: tensor-parallel ranks next to each
    other, where links are fastest, then data-parallel ones, then pipeline stages. Where stages begin and
    what is computed again depends on ``cost_model``, by default ``CostModel(topology)``. ``schedule``, such
    as a table of one's own, runs in place of the one that the plan names. ``kernels`` says which ops one
    kernel runs (:mod:`distsim.transforms.kernels`): by default each op of the function as it stands, where
    the command line has ``eager``. Raises :class:`PlanError` when the plan does not fit the
    topology, the batch or the function, and :class:`CostError` for a cost model of another topology.
    """
    costs = cost_model_of(topology, cost_model)
    return build_program(function, plan_mesh(plan, topology), plan, costs, schedule, kernels)


def build_program(
    function: Function,
    mesh: Mesh,
    plan: Plan,
    cost_model: CostModel | None = None,
    schedule: Schedule | None = None,
    kernels: Kernels = KERNELS["ops"],
) -> Program:
    """Shard a joint function over ``mesh`` (axes pp, dp, tp) and cut it into stages, as ``plan`` says.

    The composition behind :func:`parallel_transform_3d` and :func:`distsim.compose.parallelize`.
    Blocks that a flat function repeats become Calls first, and Calls that are too large to make
    balanced stages are written out. What was made of the function before, for other degrees or another
    order, is used again: a known division costs a look-up. Ops that no output needs are left out before; the
    notes of the program say so, after those of the function.

    ``plan.remat`` (:func:`distsim.transforms.recompute.policy_named`) says what backward computes again
    in place of saving it. It is applied to what every rank runs, so that collectives are seen, and before
    Calls are written out, so that blocks are; so is ``plan.offload``, which copies what is saved to the host
    (:func:`distsim.transforms.recompute.offload`). ``plan.zero`` divides them over dp (:mod:`zero`); with
    ``reshard=always`` parameters are gathered again for backward. ``plan.stages``
    says where stages begin: so that their work is even; after counting layers or blocks
    (:meth:`ModelBlocks.counted`); or, with ``auto``, so that the simulated step is the fastest that fits in
    memory.

    ``cost_model`` is the one cost model of the run: work, what a recomputation costs and simulated steps are
    by it. By default ops cost what they do on the devices of the mesh (:class:`CostModel`), which knows no
    links, as ``auto`` has to. ``schedule`` runs in place of the one that the plan names. ``kernels`` says
    which ops of what the stages run one kernel runs; what backward reads of a kernel's inside it still makes.

    Raises :class:`PlanError` for a plan of other degrees than mesh or schedule, one that does not fit the
    function or the batch, one that offloads from devices without a link to their host, and for ``auto``
    without a cost model.
    """
    if mesh.axes != (("pp", plan.pp), *rank_axes(plan).sizes.items()):
        raise PlanError(f"plan {plan} is for a mesh of other degrees than {mesh}; make them agree")
    if plan.zero and plan.ep > 1:
        raise PlanError(
            f"zero={plan.zero} divides what all dp ranks have, and with ep={plan.ep} these are not experts; "
            "use zero=0, or ep=1"
        )
    if plan.offload:
        _check_host_links(plan, mesh)
    if cost_model is None:
        if plan.stages == "auto":
            raise PlanError("stages=auto simulates splits; give build_program a cost_model")
        cost_model = CostModel(Topology())
    if schedule is None:
        try:
            named = _schedule(function, mesh, plan, kernels, cost_model)
            return build_program(function, mesh, plan, cost_model, named, kernels)
        except ScheduleError as error:
            raise PlanError(str(error)) from None
    _check_schedule(plan, schedule)
    cut = _cut(function, mesh, plan, kernels, cost_model, schedule)
    if plan.remat == "none":
        return cut.program(mesh, schedule)
    plain = replace(plan, remat="none")
    saving_all = partial(build_program, function, mesh, plain, cost_model, schedule, kernels)
    return cut.program(mesh, schedule, saving_all)


def _check_host_links(plan: Plan, mesh: Mesh) -> None:
    """Check that all devices can offload."""
    unlinked = next((device for device in mesh.devices if device.host_link is None), None)
    if unlinked is not None:
        raise PlanError(
            f"offload={plan.offload} copies to the host, and {unlinked} has no host_link; give it one, as in "
            "Device(..., host_link=Link(25e9)) or under [device.host_link] of a cluster's file, or say "
            "offload=0"
        )


def _check_schedule(plan: Plan, schedule: Schedule) -> None:
    """Check that a schedule is of the sizes of a plan, and can run in its stages."""
    count = schedule.num_microbatches * schedule.copies
    if (schedule.num_ranks, count) != (plan.pp, plan.microbatches):
        raise PlanError(
            f"the schedule is for {schedule.num_ranks} ranks and {count} microbatches, "
            f"plan {plan} has pp={plan.pp} and microbatches={plan.microbatches}; make them agree"
        )
    if plan.schedule == TABLE and plan.chunks != schedule.stages_a_rank:
        raise PlanError(
            f"chunks={plan.chunks}, but a rank of the table {schedule.name} holds "
            f"{count_of(schedule.stages_a_rank, 'stage')}; say chunks={schedule.stages_a_rank}"
        )
    sizes = parse_stages(plan.stages)
    if sizes and len(sizes) != schedule.chain:
        raise PlanError(
            f"stages={plan.stages} has {len(sizes)} numbers, the schedule {schedule.name} {schedule.chain} "
            "stages; give one number for each"
        )
    if plan.stages == "auto" and schedule.weights != FLUSH:
        raise PlanError(
            f"stages=auto compares steps up to their flush, and {schedule.name} has none; give stages as "
            "counts, as in 3-4-4-3, or by another name"
        )


def _schedule(
    function: Function, mesh: Mesh, plan: Plan, kernels: Kernels, cost_model: CostModel
) -> Schedule:
    """Return the schedule that a plan names; one that is searched for is by the times of the even stages."""
    name, number = parse_schedule(plan.schedule)
    if name == TABLE:
        raise PlanError(f"schedule={TABLE} is one that is given beside the plan; give it, or name another")
    known = SCHEDULES[name]
    if not known.searched:
        chunks = plan.chunks if known.stages_a_rank == known.chunks else None
        options = {} if number is None else {"update_every": int(number)}
        return schedule_named(name, plan.pp, plan.microbatches, chunks, **options)
    order = schedule_named("1f1b_v" if known.placement == "V" else "1f1b", plan.pp, plan.microbatches)
    even = replace(plan, schedule=order.name, stages="even" if plan.stages == "auto" else plan.stages)
    cut = _cut(function, mesh, even, kernels, cost_model, order)
    return searched_schedule(name, number or 1.0, cut, mesh, order, cost_model)


def _cut(
    function: Function, mesh: Mesh, plan: Plan, kernels: Kernels, cost_model: CostModel, schedule: Schedule
) -> Cut:
    """Return the cut function, as :func:`build_program` says."""
    memory = _MEMORIES.get(function)
    if memory is None:
        memory = _MEMORIES[function] = _KeptCuts(function)
    costs = cost_model.on(mesh.devices[0])
    key = Division.of(plan, schedule.chain, costs, kernels)
    if plan.stages == "auto":
        return memory.fastest(function, key, mesh, schedule, cost_model)
    return memory.cuts.get(key) or memory.cut(function, key, costs)


MOST_VALUES = 12_000_000
"""How many inputs and outputs the cuts that are remembered of one function may have together; the oldest
are forgotten first. These are 1,300 cuts of a GPT of 96 layers under Adam, 1.5 MB each."""
MOST_SEARCHED = 64
"""How many results of searches are remembered of one function and cost model."""


class Division(NamedTuple):
    """What of a plan, and of what ops cost, a cut depends on; ``num_stages`` may be several a rank."""

    num_stages: int
    dp: int
    tp: int
    sp: bool
    cp: int
    cp_kind: str
    ep: int
    microbatches: int
    remat: str
    offload: int
    zero: int
    reshard: str
    stages: str
    kernels: Kernels
    basis: Hashable
    figures: Device

    @staticmethod
    def of(plan: Plan, count: int, costs: DeviceCosts, kernels: Kernels) -> Division:
        """Return the division of a plan into so many stages, on devices that cost so."""
        divided = (0, "always") if plan.dp * plan.cp == 1 else (plan.zero, plan.reshard)
        # What auto chooses from, beside others, is the even cut; there is one cut into one stage.
        whole = count == 1 and not parse_stages(plan.stages)
        stages = "even" if plan.stages == "auto" or whole else plan.stages
        kind = plan.cp_kind if plan.cp > 1 else "allgather"
        degrees = count, plan.dp, plan.tp, plan.sp == "on", plan.cp, kind, plan.ep, plan.microbatches
        return Division(*degrees, plan.remat, plan.offload, *divided, stages, kernels, *costs.key)


class _KeptCuts:
    """What was made of one function, which it does not refer to: it is forgotten with the function."""

    def __init__(self, function: Function) -> None:
        whole, function = function, only_needed(function, function.outputs, "no output needs it")
        flat = not any(op.is_call for op in function.ops)
        outlined = outline(updates_last(function)) if flat else function
        self.outlined = None if outlined is whole else outlined
        self.numbered = [Numbered(outlined)]
        self.written: list[Function] = []  # with one level of Calls written out, with two, ...
        self.cuts: dict[Division, Cut] = {}
        self.keys: dict[Cut, list[Division]] = {}  # plans may share a cut
        self.size = 0
        self.searched: WeakKeyDictionary[CostModel, dict[Hashable, Cut]] = WeakKeyDictionary()

    def fastest(
        self, function: Function, key: Division, mesh: Mesh, schedule: Schedule, cost_model: CostModel
    ) -> Cut:
        """Return the fastest cut; of blocks as they are, and written out where the even one is."""
        known = self.searched.setdefault(cost_model, {})
        asked = (key, mesh, schedule, cost_model.topology.version)
        if asked not in known:
            costs = cost_model.on(mesh.devices[0])
            even = self.cuts.get(key) or self.cut(function, key, costs)
            levels = sorted({0, self._balanced(function, key, costs)})
            functions = [self._local(function, key, costs, level) for level in levels]
            known[asked] = fastest_cut(functions, even, mesh, schedule, cost_model)
            while len(known) > MOST_SEARCHED:
                del known[next(iter(known))]
        return known[asked]

    def cut(self, function: Function, key: Division, costs: DeviceCosts) -> Cut:
        """Return ``function`` divided and cut for the devices of the division."""
        if key.stages == "even":
            level = self._balanced(function, key, costs)
            found = cut_stages(self._local(function, key, costs, level), key.num_stages, costs)
        else:
            found = counted_cut(self._levels(function, key, costs), key.num_stages, costs, key.stages)
        self._keep(key, found)
        return found

    def _local(self, function: Function, key: Division, costs: DeviceCosts, level: int) -> Sharded:
        """Return what every rank runs, with so many levels of Calls written out."""
        plain = key.remat == "none" and not (key.zero or key.offload or key.kernels.interiors)
        outlined = function if self.outlined is None else self.outlined
        written = self.written[level - 1] if level and plain else outlined
        shown = key.dp if key.zero else min(key.dp, 2 * key.ep)
        kind, ulysses = parse_cp_kind(key.cp_kind)
        mesh = logical_mesh(key.figures, shown, key.tp, key.cp, ulysses, key.ep)
        local = shard(written, mesh, key.microbatches, key.dp, key.sp, kind)
        apart = gradients_apart(losses_apart(local.function, key.kernels), key.kernels)
        local = replace(local, function=apart, kernels=key.kernels)
        return local if plain else _rematerialized(local, key, costs, level)

    def _keep(self, key: Division, cut: Cut) -> None:
        self.cuts[key] = cut
        if cut not in self.keys:
            self.size += _size(cut)
        self.keys.setdefault(cut, []).append(key)
        while self.size > MOST_VALUES and len(self.keys) > 1:
            oldest = next(iter(self.keys))
            self.size -= _size(oldest)
            for known in self.keys.pop(oldest):
                del self.cuts[known]

    def _balanced(self, function: Function, key: Division, costs: DeviceCosts) -> int:
        """Write out Calls until they make balanced stages; return how many levels."""
        level = 0
        while coarse(self.numbered[level], key.num_stages, costs):
            self._write_out(function, level)
            level += 1
        return level

    def _levels(self, function: Function, key: Division, costs: DeviceCosts) -> Iterator[Sharded]:
        """Yield what every rank runs, with ever more levels of Calls written out."""
        level = 0
        yield self._local(function, key, costs, level)
        while any(op.is_call for op in self.numbered[level].ops):
            self._write_out(function, level)
            level += 1
            yield self._local(function, key, costs, level)

    def _write_out(self, function: Function, level: int) -> None:
        """Write out the Calls of a level, if they are not."""
        if level == len(self.written):
            outlined = function if self.outlined is None else self.outlined
            self.written.append(inline(self.written[-1] if level else outlined))
            self.numbered.append(Numbered(self.written[level]))


def _rematerialized(local: Sharded, key: Division, costs: DeviceCosts, levels: int) -> Sharded:
    """Return what recomputes by a policy and offloads, made once; so many levels of Calls are written out."""
    counts = parse_remat(key.remat).counts_layers or key.offload
    stages = layers_of_stages(local, key.num_stages, costs, key.stages) if counts else ()
    known = _REMATERIALIZED.setdefault(local.function, {})
    asked = (key.remat, key.offload, key.zero, key.reshard, key.kernels, costs.key, levels, stages)
    found = known.get(asked)
    if found is None:
        fused = replace(local, function=recompute_interiors(local.function, key.kernels))
        divided = zero(fused, key.zero) if key.zero else fused
        tags = gathered(divided.function, key.reshard == "always")
        made = rematerialize(divided.function, key.remat, tags, costs=costs, stages=stages)
        if key.offload:
            made = offload(made, key.offload, layers_of(divided.function), stages)
        for _ in range(levels):
            made = inline(made)
        made = sums_at_once(made) if levels else made
        found = known[asked] = replace(divided, function=made)
    return replace(found, microbatches=local.microbatches, dp=local.dp, kernels=local.kernels)


def updates_last(function: Function) -> Function:
    """Return the function with the ops that only make outputs, as updates do, after all others.

    Updates that follow each gradient at once would be of one block with it, and a sum over microbatches
    lies between the two.
    """
    read = {value for op in function.ops for value in op.inputs}
    last = [op for op in function.ops if op.inputs and not any(value in read for value in op.outputs)]
    if len(last) < 2:
        return function
    held = set(last)
    ops = (*[op for op in function.ops if op not in held], *last)
    return replace(function, ops=ops)


def sums_at_once(function: Function) -> Function:
    """Return the function with each sum over microbatches right after what makes the operand.

    Sums stand after the Call that returns their operands; once it is written out, one op after the other may
    make room for the next.
    """
    producer = {value: op for op in function.ops for value in op.outputs}
    after: dict[Op, list[Op]] = {}
    for op in function.ops:
        if is_sum(op) and len(op.inputs) == 1 and op.inputs[0] in producer:
            after.setdefault(producer[op.inputs[0]], []).append(op)
    moved = {op for sums in after.values() for op in sums}
    ops = [each for op in function.ops if op not in moved for each in (op, *after.get(op, ()))]
    return replace(function, ops=tuple(ops)) if len(ops) == len(function.ops) else function


def _size(cut: Cut) -> int:
    return len(cut.inputs) + len(cut.outputs)


_MEMORIES: WeakKeyDictionary[Function, _KeptCuts] = WeakKeyDictionary()

_REMATERIALIZED: WeakKeyDictionary[Function, dict[tuple[object, ...], Sharded]] = WeakKeyDictionary()
"""By local function what recomputes: cuts of it are shared as those of the local function are."""
