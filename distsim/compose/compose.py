"""The composition of a model, a Plan and a Topology into a Program."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from distsim.cache import cached
from distsim.compose.division import cut_of
from distsim.cost.cost_model import CostModel, cost_model_of
from distsim.errors import PlanError, ScheduleError, expect
from distsim.hardware.plan_mesh import plan_mesh, rank_axes
from distsim.ir import Function, Mesh, Topology
from distsim.plan import Plan, parse_schedule, parse_stages
from distsim.program.program import Program
from distsim.schedule import FLUSH, SCHEDULES, TABLE, Schedule
from distsim.schedule import schedule as schedule_named
from distsim.schedule.refusals import count as count_of
from distsim.transforms.kernels.policies import KERNELS, Kernels
from distsim.transforms.pipelining.model_blocks import default_layers
from distsim.transforms.pipelining.stage_choice import searched_schedule


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

    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(mlp(layers=4, width=16, batch=8), SGD())
    >>> program = parallelize(step, Plan(dp=2, pp=2, microbatches=2), load_cluster("dgx-a100"))
    >>> len(program.stages), program.mesh
    (2, Mesh(pp=2, dp=2, tp=1)[gpu:0..gpu:3])
    """
    expect("function", function, Function, "a joint function, as differentiate() returns")
    expect("plan", plan, Plan, "a Plan, as Plan.parse() makes of its text")
    expect("kernels", kernels, Kernels, "one of KERNELS, by its name, as KERNELS['eager']")
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
    function or the batch, one that copies from devices without a link to their host, and for ``auto``
    without a cost model.

    >>> from distsim.hardware import load_cluster
    >>> from distsim.hardware.plan_mesh import plan_mesh
    >>> from distsim.models import mlp
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(mlp(layers=4, width=16, batch=8), SGD())
    >>> plan = Plan(dp=2, pp=2, microbatches=2)
    >>> len(build_program(step, plan_mesh(plan, load_cluster("dgx-a100")), plan).stages)
    2
    """
    if mesh.axes != (("pp", plan.pp), *rank_axes(plan).sizes.items()):
        raise PlanError(f"plan {plan} is for a mesh of other degrees than {mesh}; make them agree")
    if plan.offload:
        _check_host_links(mesh, f"offload={plan.offload}", "say offload=0")
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
    notes = _notes_of_copies(schedule, mesh)
    cut = cut_of(function, mesh, plan, kernels, cost_model, schedule)
    saving_all = None
    if plan.remat != "none":
        plain = replace(plan, remat="none")
        saving_all = partial(build_program, function, mesh, plain, cost_model, schedule, kernels)
    program = cut.program(mesh, schedule, saving_all)
    return replace(program, notes=(*program.notes, *notes)) if notes else program


def _notes_of_copies(schedule: Schedule, mesh: Mesh) -> tuple[str, ...]:
    """Return what a user should know of actions that copy to the host; all devices have to be able to."""
    copying = sorted([kind for kind in schedule.kinds if kind.runs.stream])
    if not copying:
        return ()
    _check_host_links(mesh, f"schedule={schedule.name}", "choose another schedule")
    kinds = " and ".join([f"{kind.value} ({kind.phase})" for kind in copying])
    until = "is on the device until it is copied: memory is that over time where it is more"
    return (f"what {kinds} copy beside computation {until}",)


def _check_host_links(mesh: Mesh, what: str, way_out: str) -> None:
    """Check that all devices can copy to their hosts, as ``what`` does."""
    unlinked = next((device for device in mesh.devices if device.host_link is None), None)
    if unlinked is not None:
        raise PlanError(
            f"{what} copies to the host, and {unlinked} has no host_link; give it one, as in "
            f"Device(..., host_link=Link(25e9)) or under [device.host_link] of a cluster's file, or {way_out}"
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
    if plan.post_validation == "on" and schedule.weights != FLUSH:
        raise PlanError(
            "post_validation=on is about what ends a step, and without a flush no step of "
            f"{schedule.name} ends; leave it out"
        )
    if plan.stages == "auto" and schedule.weights != FLUSH:
        raise PlanError(
            f"stages=auto compares steps up to their flush, and {schedule.name} has none; give stages as "
            "counts, as in 3-4-4-3, or by another name"
        )


@cached("schedules of plans, by name and sizes", 4096)
def _made_schedule(name: str, number: float | None, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return a schedule that is made from sizes alone."""
    known = SCHEDULES[name]
    given = chunks if known.stages_a_rank == known.chunks else None
    options = {} if number is None else {"update_every": int(number)}
    return schedule_named(name, ranks, microbatches, given, **options)


def check_sizes(plan: Plan, layers: int) -> None:
    """Check what of a plan of so many equal layers, 0: not known, is refused before anything is divided.

    Raises :class:`PlanError` as :func:`parallelize` does, for a schedule that cannot be of such sizes, and
    for more stages than ``stages=default`` finds layers for.
    """
    name, number = parse_schedule(plan.schedule)
    if name != TABLE and not SCHEDULES[name].searched:
        try:
            _made_schedule(name, number, plan.pp, plan.microbatches, plan.chunks)
        except ScheduleError as error:
            raise PlanError(str(error)) from None
    if layers and plan.stages == "default" and plan.num_stages > 1:
        default_layers(layers, plan.num_stages)


def _schedule(
    function: Function, mesh: Mesh, plan: Plan, kernels: Kernels, cost_model: CostModel
) -> Schedule:
    """Return the schedule that a plan names; one that is searched for is by the times of the even stages."""
    name, number = parse_schedule(plan.schedule)
    if name == TABLE:
        raise PlanError(f"schedule={TABLE} is one that is given beside the plan; give it, or name another")
    known = SCHEDULES[name]
    if not known.searched:
        return _made_schedule(name, number, plan.pp, plan.microbatches, plan.chunks)
    order = schedule_named("1f1b_v" if known.placement == "V" else "1f1b", plan.pp, plan.microbatches)
    even = replace(plan, schedule=order.name, stages="even" if plan.stages == "auto" else plan.stages)
    cut = cut_of(function, mesh, even, kernels, cost_model, order)
    return searched_schedule(name, number or 1.0, cut, mesh, order, cost_model)
