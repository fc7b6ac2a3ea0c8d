"""What is made of a function that a plan divides: sharded, with ZeRO, recomputing, cut; each made once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary, ref

from distsim.cache import Cache, uncollected
from distsim.cost.cost_model import CostModel, DeviceCosts
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Device, Function, Mesh, Op
from distsim.ir.rewrite import inline
from distsim.plan import Plan, parse_stages
from distsim.plan.buckets import Buckets, buckets_of
from distsim.plan.rank_layout import ExpertRanks, parse_cp_kind
from distsim.plan.recomputation import parse_remat
from distsim.resizing import shared
from distsim.schedule import SCHEDULES, Schedule
from distsim.transforms.autodiff.loss import only_needed
from distsim.transforms.data_parallel.gathers import gathered
from distsim.transforms.data_parallel.zero import zero
from distsim.transforms.gradient_passes import checks_gradients, unscale_first
from distsim.transforms.kernels.losses import losses_apart
from distsim.transforms.kernels.policies import Kernels
from distsim.transforms.kernels.products import gradients_apart
from distsim.transforms.key_heads import repeat_key_heads, save_last_keys
from distsim.transforms.op_graph import Numbered, is_sum
from distsim.transforms.outlining.lift import lift_weights
from distsim.transforms.outlining.outline import outline
from distsim.transforms.pipelining.pipeline import Cut, cut_stages
from distsim.transforms.pipelining.stage_choice import counted_cut, fastest_cut, layers_of_stages
from distsim.transforms.pipelining.stages import coarse
from distsim.transforms.recompute import layers_of, offload, rematerialize
from distsim.transforms.recompute.interiors import recompute_interiors
from distsim.transforms.sharding.shard import Layouts, Sharded, layouts, shard


def cut_of(
    function: Function, mesh: Mesh, plan: Plan, kernels: Kernels, cost_model: CostModel, schedule: Schedule
) -> Cut:
    """Return the cut function, as :func:`distsim.compose.build_program` says."""
    function = _as_attended(function, plan)
    memory = _MEMORIES.get(function, None, lambda: _KeptCuts(function))
    costs = cost_model.on(mesh.devices[0])
    asked = plan, schedule.chain, kernels, costs.key
    found = memory.asked.get(asked)
    if found is None:
        key = Division.of(plan, schedule.chain, costs, kernels)
        if plan.stages == "auto":
            return memory.fastest(function, key, mesh, schedule, cost_model)
        found = memory.asked[asked] = memory.cuts.get(key) or memory.cut(function, key, costs)
    return found


def layouts_of(function: Function, mesh: Mesh, plan: Plan, kernels: Kernels, costs: DeviceCosts) -> Layouts:
    """Return how a plan lays out a function on its ranks."""
    function = _as_attended(function, plan)
    memory = _MEMORIES.get(function, None, lambda: _KeptCuts(function))
    return memory.layouts(function, Division.of(plan, plan.num_stages, costs, kernels))


def _as_attended(function: Function, plan: Plan) -> Function:
    """Return a function whose attention has heads of keys for all of tp, and keeps what a ring reads."""
    function = repeat_key_heads(function, plan.tp)
    kind, ulysses = parse_cp_kind(plan.cp_kind)
    return save_last_keys(function) if kind == "ring" and plan.cp > ulysses else function


def levels_written(function: Function, num_stages: int, costs: DeviceCosts) -> int:
    """Return of how many levels Calls are written out so that so many stages may be even."""
    return _MEMORIES.get(function, None, lambda: _KeptCuts(function)).balanced(function, num_stages, costs)


MOST_VALUES = 4_000_000
"""How many inputs and outputs the cuts that are remembered of one function may have together; the oldest
are forgotten first. These are 430 cuts of a GPT of 96 layers under Adam, with what is made of them 6 MB each
where they differ in sizes alone, 27 MB where they do not. A search forgets sooner
(:class:`distsim.cache.MemoryLimit`)."""


class Division(NamedTuple):
    """What of a plan, and of what ops cost, a cut depends on; ``num_stages`` may be several a rank."""

    num_stages: int
    dp: int
    tp: int
    sp: bool
    cp: int
    cp_kind: str
    ep: ExpertRanks
    zero_ranks: int
    tp_overlap: bool
    microbatches: int
    remat: str
    offload: int
    zero: int
    whole_sums: bool
    reshard: str
    buckets: Buckets | None
    stages: str
    kernels: Kernels
    basis: Hashable
    figures: Device

    @staticmethod
    def of(plan: Plan, count: int, costs: DeviceCosts, kernels: Kernels) -> Division:
        """Return the division of a plan into so many stages, on devices that cost so."""
        divided: tuple[int, bool, str, Buckets | None] = (0, False, "always", None)
        if plan.dp * plan.cp > 1:
            after = plan.zero == 3 and not plan.reduces_each
            early, ahead = plan.overlap_grads == "on", plan.overlap_params == "on"
            blocking = plan.reshard == "blocking"
            buckets = buckets_of(plan.bucket, plan.dp * plan.cp, early, plan.zero, ahead, blocking)
            sent = not buckets.layers  # FSDP's are copied, and divided as they are summed
            averaged, checked = kernels.averages and sent, kernels.checks_buckets and sent
            buckets = replace(buckets, averaged=averaged, checked=checked, together=after)
            divided = plan.zero, after, plan.resharding, buckets
        # What auto chooses from, beside others, is the even cut; there is one cut into one stage.
        whole = count == 1 and not parse_stages(plan.stages)
        stages = "even" if plan.stages == "auto" or whole else plan.stages
        kind = plan.cp_kind if plan.cp > 1 else "allgather"
        degrees = (
            count,
            plan.dp,
            plan.tp,
            plan.divides_sequence,
            plan.cp,
            kind,
            plan.expert_ranks,
            plan.zero_ranks,
        )
        dtensors = plan.sp == "dtensor"
        beside = plan.tp == 1 or not (plan.tp_overlap == "off" or dtensors)
        kernels = replace(kernels.one_by_one, split=plan.tp_overlap == "split", dtensors=dtensors)
        kernels = replace(kernels, validates_later=plan.post_validation == "on")
        kernels = replace(kernels.with_chunks(plan.chunks), sends_parts=kernels.sends_parts and _turns(plan))
        return Division(
            *degrees,
            beside,
            plan.microbatches,
            plan.remat,
            plan.offload,
            *divided,
            stages,
            kernels,
            *costs.key,
        )


def _turns(plan: Plan) -> bool:
    """Whether each stage of a plan is on another rank than the one before."""
    named = SCHEDULES.get(plan.schedule.partition(":")[0])
    return plan.pp > 1 and (named is None or named.placement == "loop")


class _KeptCuts:
    """What was made of one function, which it does not refer to: it is forgotten with the function."""

    def __init__(self, function: Function) -> None:
        whole, function = function, only_needed(function, function.outputs, "no output needs it")
        flat = not any(op.is_call for op in function.ops)
        outlined = lift_weights(outline(updates_last(function)) if flat else function)
        self.outlined = None if outlined is whole else outlined
        self.numbered = [Numbered(outlined)]
        self.written: list[Function] = []  # with one level of Calls written out, with two, ...
        self.cuts: dict[Division, Cut] = {}
        self.keys: dict[Cut, list[Division]] = {}  # plans may share a cut
        self.asked: WeakValueDictionary[tuple[object, ...], Cut] = WeakValueDictionary()  # those of plans
        self.size = 0

    def fastest(
        self, function: Function, key: Division, mesh: Mesh, schedule: Schedule, cost_model: CostModel
    ) -> Cut:
        """Return the fastest cut; of blocks as they are, and written out where the even one is."""

        def search() -> Cut:
            costs = cost_model.on(mesh.devices[0])
            even = self.cuts.get(key) or self.cut(function, key, costs)
            levels = sorted({0, self.balanced(function, key.num_stages, costs)})
            functions = [self._local(function, key, costs, level) for level in levels]
            return fastest_cut(functions, even, mesh, schedule, cost_model)

        asked = (key, mesh, schedule, cost_model.topology.version, ref(cost_model))
        return _SEARCHED.get(function, asked, search)

    @uncollected()
    def cut(self, function: Function, key: Division, costs: DeviceCosts) -> Cut:
        """Return ``function`` divided and cut for the devices of the division."""
        if key.stages == "even":
            level = self.balanced(function, key.num_stages, costs)
            found = cut_stages(self._local(function, key, costs, level), key.num_stages, costs)
        else:
            found = counted_cut(self._levels(function, key, costs), key.num_stages, costs, key.stages)
        self._keep(key, found)
        return found

    def _local(self, function: Function, key: Division, costs: DeviceCosts, level: int) -> Sharded:
        """Return what every rank runs, with so many levels of Calls written out."""
        plain = key.remat == "none" and not (key.zero or key.offload or key.kernels.interiors)
        local = self.sharded(function, key, level if plain else 0)
        apart = losses_apart(unscale_first(local.function, key.kernels), key.kernels)
        apart = gradients_apart(apart, key.kernels, key.tp_overlap)
        # Parts of gradients that are divided are summed as they are: no buffer of zeros has all of them.
        kernels = key.kernels if key.zero < 2 else replace(key.kernels, zeroed="no", products_add=False)
        buckets = checks_gradients(function, key.buckets)
        local = replace(local, function=apart, kernels=kernels, buckets=buckets)
        return local if plain else _rematerialized(local, key, costs, level)

    def sharded(self, function: Function, key: Division, level: int = 0) -> Sharded:
        """Return what every rank runs, as it is divided, with so many levels of Calls written out."""
        outlined = function if self.outlined is None else self.outlined
        written = self.written[level - 1] if level else outlined
        return shard(written, *_ranks_of(key))

    def layouts(self, function: Function, key: Division) -> Layouts:
        """Return how it is divided, with no Calls written out."""
        return layouts(function if self.outlined is None else self.outlined, *_ranks_of(key))

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

    def balanced(self, function: Function, num_stages: int, costs: DeviceCosts) -> int:
        """Write out Calls until they make balanced stages; return how many levels."""
        level = 0
        while coarse(self.numbered[level], num_stages, costs):
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


def _ranks_of(key: Division) -> tuple[Mesh, int, int, bool, str]:
    """Return what ranks and microbatches a function is sharded for, as :func:`shard` takes it."""
    shown = key.dp if key.zero else min(key.dp, 2 * key.ep.dp)
    kind, ulysses = parse_cp_kind(key.cp_kind)
    mesh = logical_mesh(key.figures, shown, key.tp, key.cp, ulysses, key.ep, key.zero_ranks)
    return mesh, key.microbatches, key.dp, key.sp, kind


def _rematerialized(local: Sharded, key: Division, costs: DeviceCosts, levels: int) -> Sharded:
    """Return what recomputes by a policy and offloads, made once; so many levels of Calls are written out."""
    counts = parse_remat(key.remat).counts_layers or key.offload
    stages = layers_of_stages(local, key.num_stages, costs, key.stages) if counts else ()

    def rematerialized() -> Sharded:
        fused = replace(local, function=recompute_interiors(local.function, key.kernels))
        divided = _with_zero(fused, key, ahead) if key.zero else fused
        tags = gathered(divided.function, key.reshard != "never", key.reshard == "auto")
        made = rematerialize(divided.function, key.remat, tags, costs=costs, stages=stages)
        if key.offload:
            made = offload(made, key.offload, layers_of(divided.function), stages)
        for _ in range(levels):
            made = inline(made)
        made = sums_at_once(made) if levels else made
        return replace(divided, function=shared(made))

    ahead = key.buckets is not None and key.buckets.ahead
    divided = key.zero, key.whole_sums, ahead, key.reshard
    asked = (key.remat, key.offload, *divided, key.kernels, costs.key, levels, stages)
    found = _REMATERIALIZED.get(local.function, asked, rematerialized)
    alike = {"microbatches": local.microbatches, "dp": local.dp}
    return replace(found, **alike, kernels=local.kernels, buckets=local.buckets)


def _with_zero(local: Sharded, key: Division, ahead: bool) -> Sharded:
    """Return what ZeRO makes of a local function, made once for all policies of recomputation."""

    kept = key.reshard == "never"

    def divided() -> Sharded | None:
        found = zero(local, key.zero, ahead=ahead, kept=kept, whole_sums=key.whole_sums)
        return None if found is local else found

    return _ZEROED.get(local.function, (key.zero, ahead, kept, key.whole_sums), divided) or local


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


_MEMORIES = Cache[Function, _KeptCuts]("what was made of a function", 1)
_SEARCHED = Cache[Function, Cut]("results of searches, by division, schedule and cost model", 64)
_ZEROED = Cache[Function, Sharded | None]("what ZeRO makes, by local function, stage and how", 4)
_REMATERIALIZED = Cache[Function, Sharded]("what recomputes, by local function and policy", 64)
"""Cuts of it are shared as those of the local function are."""
