"""What of a plan its bounds depend on: plans of equal keys teach each other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from distsim.plan import Plan, parse_schedule
from distsim.plan.recomputation import parse_remat
from distsim.schedule import SCHEDULES, Kind, Schedule, example
from distsim.transforms.kernels import Kernels


class PlanKeys(NamedTuple):
    """What seconds and bytes of a plan depend on.

    Of its ``work``, the products of a microbatch, as kernels run them in whole layers, and as its own do
    (``own_work``): a stage may begin where one kernel runs two products else. Of those of a plan that divides
    alike and ``saves`` all, and of the layers of that; of its ``layers`` and ``stages``, None where that is
    not known before it is built, and of layers whose backward passes are not in two halves where its own are;
    of what layers have ``saved``; of their ``sums``; and of their ``extras``.
    ``whole``: whether stages begin between layers, as far as that is known before.
    """

    work: Hashable
    own_work: Hashable
    saves: Hashable
    layers_saving: Hashable
    layers_undivided: Hashable
    layers: Hashable
    stages: Hashable
    saved: Hashable
    sums: Hashable
    extras: Hashable
    whole: bool

    @staticmethod
    def of(plan: Plan, batch: int, levels: int | None, kernels: Kernels) -> PlanKeys:
        """Return those of a plan of so many samples a step; its calls are written out ``levels`` deep, None:
        not known."""
        whole, split = levels == 0, splits_backward(plan)
        # Products that add to sums, inside of layers, add to none where gradients are divided at once.
        adds = kernels.products_add and plan.zero < 2
        work = adds, _work_key(plan, batch, whole, split)
        cut = () if whole else (plan.num_stages, plan.stages)
        own = (work, *cut) if cut else work
        saves = adds, _work_key(plan, batch, whole, False, saving=True)
        # Forward passes save as much for two halves of a backward pass, and what is summed is the same.
        passes = adds, _work_key(plan, batch, whole, False)
        if levels is None:
            return PlanKeys(
                work, own, saves, None, None, None, None, _saved_key(plan, passes), None, None, whole
            )
        layers, undivided, saving = (
            _layers_key(plan, (each, *cut), levels) for each in (work, passes, saves)
        )
        return PlanKeys(
            work,
            own,
            saves,
            None if split or plan.offload else saving,
            undivided if split else None,
            layers,
            _stages_key(plan, layers, kernels.interiors),
            _saved_key(plan, passes),
            _sums_key(undivided, plan),
            _extras_key(undivided, plan),
            whole,
        )


def _stages_key(plan: Plan, layers: Hashable, interiors: bool) -> Hashable:
    """Return what the stages of a plan depend on, where it is known what its layers do: also how many
    there are, and whether they are cut of what gathers parameters, or of what is divided as it stands."""
    plain = plan.remat == "none" and not (plan.offload or interiors)
    # What is gathered, and copied, for a pass waits for it: a part of a stage that is no call.
    divided = plan.reshard, plan.bucket, plan.zero_ranks, plan.overlap_params, plan.overlap_grads
    gathers = (plan.pp, *divided) if plan.zero == 3 else ()
    return layers, plan.num_stages, plan.stages, gathers, plain and not plan.zero


_ORDER = Plan().order


def _layers_key(plan: Plan, work: Hashable, levels: int) -> Hashable:
    """Return what the seconds of the layers of a plan depend on, beside the function: of how many levels of
    calls they are written out, how they are divided (``work``), the dp that the choice of layouts over other
    axes sees, and, unless neighbours are along the same axes, where they lie."""
    seen = plan.dp if plan.tp * plan.cp * plan.ep > 1 else plan.dp > 1
    placed = seen if plan.order == _ORDER else (plan.dp, plan.pp)
    return work, levels, plan.tp_overlap, placed


def _sums_key(layers: Hashable, plan: Plan) -> Hashable:
    """Return what the seconds of sums of a layer's gradients depend on, beside ``layers``, what layers do."""
    ranks = plan.dp * plan.cp
    parts = (ranks, plan.zero_ranks) if plan.reduces_each else ()
    return layers, *((plan.bucket, parts) if ranks > 1 else ())


def _extras_key(layers: Hashable, plan: Plan) -> Hashable:
    """Return what the extras of a layer depend on, beside ``layers``: not on how many ranks there are, since
    what these pad counts as nothing, and no bucket changes what is sent all together."""
    gathers = (plan.reshard, plan.resharding) if plan.zero == 3 else ()
    sums = plan.bucket, plan.overlap_grads, plan.overlap_params, plan.microbatches > 1
    return layers, plan.zero if plan.zero > 1 else 0, plan.reduces_each, plan.zero_ranks, gathers, sums


def _saved_key(plan: Plan, work: Hashable) -> Hashable:
    """Return what the bytes depend on that the layers of a plan save of a microbatch."""
    return work, plan.dp > 1, (plan.reshard, plan.resharding) if plan.zero == 3 else ()


def _work_key(plan: Plan, batch: int, whole: bool, halves: bool, saving: bool = False) -> Hashable:
    """Return what the seconds of the products of a microbatch depend on, summed over the stages.

    How ranks divide a microbatch, its samples, and what is computed again. Where that depends on which layers
    a stage has, so does the key, which it does not where stages are ``whole`` layers, each of which repeats
    the same; and whether backward passes are in two ``halves``, which are more kernels. ``saving``: that of a
    plan which divides alike and saves all.
    """
    remat = "none" if saving else plan.remat
    cut = saving or (remat in ("none", "full") and not plan.offload)
    split = plan.tp_overlap == "split"
    divided = plan.tp, plan.sp, split, plan.cp, plan.cp_kind, plan.ep, plan.etp, plan.dp if plan.ep > 1 else 0
    stages: tuple[Hashable, ...] = ()
    if not cut:
        gathers = (plan.zero, plan.reshard) if plan.zero == 3 else ()
        alike = whole and not (halves or plan.offload or parse_remat(remat).counts_layers)
        stages = gathers if alike else (plan.num_stages, plan.stages, plan.offload, plan.zero, plan.reshard)
    elif halves:
        stages = plan.num_stages, plan.stages, plan.offload, plan.zero, plan.reshard
    size = batch // (plan.dp * plan.microbatches)
    return (*divided, size, remat, plan.order, halves, *stages)


def splits_backward(plan: Plan) -> bool:
    """Whether the schedule of a plan may have a backward pass in two halves."""
    return plan.pp > 1 and _has_halves(plan.schedule)


def cuts_layers(plan: Plan) -> bool:
    """Whether the backward pass of every layer is cut into two halves, where a schedule has these.

    Where gradients that are divided are sent before the pass goes on, what they are of waits for that in the
    first half, and keeps the backward passes of layers whole that were before.
    """
    return splits_backward(plan) and not (plan.reduces_each and plan.overlap_grads == "off")


def saves_alike(plan: Plan) -> bool:
    """Whether equal layers of a plan save alike: none is told to recompute, or to offload, by its number."""
    name = parse_remat(plan.remat).name
    return not (plan.offload or name in ("every", "every_early", "block", "uniform"))


def _has_halves(schedule: str) -> bool:
    made = _example_of(schedule)
    return made is None or Kind.BACKWARD_INPUT in made.kinds


def _example_of(schedule: str) -> Schedule | None:
    name = parse_schedule(schedule)[0]
    return example(name) if name in SCHEDULES else None


def runs_alone(plan: Plan) -> bool:
    """Whether the ranks of a plan have one copy of the model each, and run one pass at a time."""
    made = _example_of(plan.schedule)
    return made is not None and made.copies == 1 and not made.pairs_actions
