"""pipeline: cut a joint function into the stages of a Program."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple
from weakref import WeakValueDictionary

from distsim.cache import Cache, uncollected
from distsim.cost.cost_model import CostModel, DeviceCosts
from distsim.errors import PlanError
from distsim.hardware.rank_axes import EXPERT
from distsim.ir import (
    Function,
    Mesh,
    Topology,
    Value,
)
from distsim.program.block import StageBlocks
from distsim.program.parts import Parts, ProgramInput, ProgramOutput, Stage
from distsim.program.program import Program
from distsim.resizing import Likeness, Unlike, likeness_of
from distsim.schedule import Schedule
from distsim.transforms.data_parallel.buckets import bucketed
from distsim.transforms.data_parallel.gradient_buckets import held_gradients
from distsim.transforms.data_parallel.prefetch import prefetch
from distsim.transforms.gradient_sums import sum_gradients
from distsim.transforms.kernels import fuse_stages
from distsim.transforms.kernels.scans import copy_saved
from distsim.transforms.op_graph import Numbered, StageMap
from distsim.transforms.pipelining.awaited import wait_for_own
from distsim.transforms.pipelining.cut_blocks import CutBlocks, cut_blocks
from distsim.transforms.pipelining.early_sums import without_early_sums
from distsim.transforms.pipelining.ends import Ends
from distsim.transforms.pipelining.float8 import keep_scales, turn_operands
from distsim.transforms.pipelining.post_validation import validate_later
from distsim.transforms.pipelining.received import await_received
from distsim.transforms.pipelining.shared_weights import copy_weights, untie
from distsim.transforms.pipelining.sized import Sized
from distsim.transforms.pipelining.stage_inputs import keep_received
from distsim.transforms.pipelining.stages import assign_stages
from distsim.transforms.sharding.shard import Sharded
from distsim.transforms.tensor_parallel.dtensors import copy_rows, gather_once
from distsim.transforms.tensor_parallel.expert_rows import sort_rows, wait_for_rows
from distsim.transforms.tensor_parallel.message_parts import MessageKeys, carried_keys, send_parts
from distsim.transforms.tensor_parallel.split_products import split_products

Starts = tuple[int, ...]
"""Where stages begin: places among the forward ops that take time; the first is 0."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A local function cut into stages, whatever the schedule and wherever they run.

    ``like`` is the cut of a function that differs in sizes alone, if that is known, and the values that it
    has of other sizes, each with what stands for it in this one. ``held``: see :class:`Parts`. ``messages``:
    the keys of their parts, where they are sent so.
    """

    name: str
    pattern: Mesh
    stages: tuple[StageBlocks, ...]
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]
    notes: tuple[str, ...]
    like: tuple[Cut, Mapping[Value, Value]] | None = None
    held: float = 0.0
    messages: MessageKeys = field(default_factory=dict[tuple[Value, int], Value])
    _placed: dict[tuple[Mesh, tuple[int, ...]], tuple[Stage, ...]] = field(
        default_factory=dict[tuple[Mesh, tuple[int, ...]], tuple[Stage, ...]], init=False, repr=False
    )

    def program(
        self, mesh: Mesh, schedule: Schedule, saving_all: Callable[[], Program] | None = None
    ) -> Program:
        """Return the program that runs the stages on the slices of ``mesh`` in this order.

        ``saving_all`` makes the one that recomputes nothing, if this one recomputes.
        """
        slices, count = mesh.slices("pp"), len(self.stages)
        if schedule.num_ranks != len(slices) or schedule.chain != count:
            raise PlanError(
                f"the schedule has {schedule.chain} stages on {schedule.num_ranks} ranks, the mesh has "
                f"pp={len(slices)}, the function was cut into {count} stages; make them agree"
            )
        placed = self._placed.get((mesh, schedule.rank_of))
        if placed is None:
            places = [slices[schedule.rank_of[stage]] for stage in range(count)]
            placed = tuple([Stage(own, *blocks) for own, blocks in zip(places, self.stages, strict=True)])
            self._placed[mesh, schedule.rank_of] = placed
        return Program(
            self.name,
            mesh,
            self.pattern,
            placed,
            schedule,
            self.inputs,
            self.outputs,
            self.notes,
            saving_all,
            self.parts,
        )

    @cached_property
    @uncollected()
    def parts(self) -> Parts:
        """What the programs of this cut have in common, verified once."""
        like = None if self.like is None else (self.like[0].parts, self.like[1])
        return Parts(self.name, self.stages, self.inputs, self.outputs, like=like, held=self.held)


def pipeline(local: Sharded, mesh: Mesh, schedule: Schedule, cost_model: CostModel | None = None) -> Program:
    """Cut what :func:`shard` made into stages on the slices of ``mesh`` (axes pp, dp, tp).

    Stages are of even time by ``cost_model``, by default on the devices of the mesh. Each becomes a forward
    and a backward function of one microbatch (with a variant that adds to the sums of earlier microbatches)
    and the functions that run once per step. Raises :class:`PlanError` when the function has fewer forward
    ops than there are stages.
    """
    count = schedule.num_microbatches * schedule.copies
    if count != local.microbatches:
        raise PlanError(
            f"the schedule has {count} microbatches, the function was sharded for "
            f"{local.microbatches}; make them agree"
        )
    costs = (cost_model or CostModel(Topology())).on(mesh.devices[0])
    return cut_stages(local, schedule.chain, costs).program(mesh, schedule)


def cut_stages(local: Sharded, num_stages: int, costs: DeviceCosts, starts: Starts | None = None) -> Cut:
    """Cut what :func:`shard` made into ``num_stages`` stages of even time by ``costs``, or at ``starts``.

    What was cut already is not cut again while someone holds it: plans that differ in their schedule, or
    divide the batch into as many parts, share it.
    """
    source = _Source.of(local)
    key = num_stages, costs.key, starts, local.kernels, local.buckets
    found = source.cuts.get(key)
    if found is None:
        stages = _Stages(local, num_stages, costs, starts)
        try:
            found = stages.cut(source, source.sized)
        except Unlike:
            found = stages.cut(source, source.sized.alone())
        source.cuts[key] = found
    return found


class _Stages(NamedTuple):
    """Into how many stages a local function is cut, and where: evenly by ``costs``, or at ``starts``."""

    local: Sharded
    number: int
    costs: DeviceCosts
    starts: Starts | None

    def cut(self, source: _Source, sized: Sized) -> Cut:
        """Return the function cut; what follows from ops alone is done for the first one of other sizes.

        Raises :class:`Unlike` where that is not to be carried over.
        """
        local, assigned = self.local, self._assign(sized)
        # Untied, a function may have its stages elsewhere: what each of them keeps is decided after that.
        changes = (
            wait_for_own,
            copy_weights,
            untie,
            *((validate_later,) if local.kernels.validates_later else ()),
        )
        for change in changes:
            changed = sized.changed((change, assigned), partial(change, assigned=assigned))
            if changed is not sized:
                sized, assigned = changed, self._assign(changed)
        likeness, first = sized.likeness, source
        if likeness is not None:
            if source.first is None or sized.own.copies != sized.first.copies:
                raise Unlike
            first = source.first
        blocks = self._blocks(sized.first, assigned)
        if likeness is not None and not likeness.values.keys().isdisjoint(blocks.sized):
            raise Unlike
        source.ends.check(blocks, local.microbatches)
        found = _LIKE.get(blocks, (local.mesh, local.kernels), lambda: first.cut(blocks, local))
        if likeness is not None:
            own = source.cut(blocks.resized(sized), local, found)
            sent = carried_keys(likeness.values, found.messages, own.messages)
            found = replace(own, like=(found, {**likeness.values, **sent}))
        held = held_gradients(local.function, local.buckets)
        if (found.notes, found.held) == (local.notes, held):
            return found
        return replace(found, notes=local.notes, held=held)

    def _assign(self, sized: Sized) -> StageMap:
        return assign_stages(sized.own, self.number, self.costs, self.starts)

    def _blocks(self, function: Numbered, assigned: StageMap) -> CutBlocks:
        """Return the blocks of the stages that are assigned."""
        local, count = self.local, self.number

        def cut() -> CutBlocks:
            kept, stages = keep_received(function, assigned)
            made = bucketed(*prefetch(kept, stages, local.buckets), local.buckets, local.kernels.dtensors)
            return cut_blocks(made, count, local.buckets is None or local.buckets.early)

        return _BLOCKS.get(function, (assigned, count, local.buckets, local.kernels.dtensors), cut)


_BLOCKS = Cache[Numbered, CutBlocks]("the blocks of stages, by function, stages and buckets", 64)
_LIKE = Cache[CutBlocks, Cut]("cuts that others are like, by blocks", 4)


def to_cut(local: Sharded) -> Numbered:
    """Return the function whose forward ops the starts of :func:`cut_stages` count."""
    return _Source.of(local).function


class _Source:
    """What is known of a local function before it is cut, and how it was cut."""

    def __init__(self, local: Sharded) -> None:
        likeness = likeness_of(local.function)
        self.first = None if likeness is None else _known(likeness.like, local.microbatches > 1)
        self.sized = _sized(local, None if self.first is None else self.first.function, likeness)
        self.function = function = self.sized.own
        self.plain = function.ops == local.function.ops
        self.ends = Ends(local, function.inputs, None if self.first is None else self.first.ends)
        # No cache: the cuts that are in use.
        self.cuts: WeakValueDictionary[Hashable, Cut] = WeakValueDictionary()

    @staticmethod
    def of(local: Sharded) -> _Source:
        return _known(local.function, local.microbatches > 1) or _SOURCES.get(
            local.function, local.microbatches > 1, lambda: _Source(local)
        )

    def cut(self, blocks: CutBlocks, local: Sharded, like: Cut | None = None) -> Cut:
        """Return the cut of these blocks; ``like`` is that of the first function of other sizes."""
        experts = EXPERT in {**local.mesh.views, **dict(local.mesh.axes)}
        stages, ranks, messages = blocks.stages, local.mesh.axis_size("tp"), dict[tuple[Value, int], Value]()
        if local.kernels.sends_parts and ranks > 1 and len(stages) > 1:
            places = dict(zip(blocks.inputs, local.inputs, strict=True))
            stages, messages = send_parts(stages, places, blocks.outputs, ranks)
        stages = split_products(gather_once(stages, local.kernels), local.kernels)
        stages = turn_operands(copy_rows(stages, local.kernels), local.kernels)
        stages = sort_rows(stages) if experts else stages
        stages = fuse_stages(sum_gradients(stages, local.kernels), local.kernels)
        stages = copy_saved(stages, local.kernels.scans)
        stages = wait_for_rows(stages, local.kernels) if experts else stages
        stages = keep_scales(await_received(stages, local.kernels))
        inputs = self.ends.cut_inputs(blocks, None if like is None else like.inputs)
        outputs = self.ends.cut_outputs(blocks, None if like is None else like.outputs)
        return Cut(blocks.name, local.mesh, stages, inputs, outputs, local.notes, messages=messages)


_SOURCES = Cache[Function, _Source]("what is cut, by local function and whether it has microbatches", 2)


def _known(function: Function, microbatched: bool) -> _Source | None:
    """Return what is known of a function; where no sum is early microbatches do not matter."""
    found = _SOURCES.find(function, microbatched)
    if found is None:
        other = _SOURCES.find(function, not microbatched)
        found = other if other is not None and other.plain else None
    return found


def _sized(local: Sharded, first: Numbered | None, likeness: Likeness | None) -> Sized:
    """Return a local function as it is cut, as that of ``likeness`` if possible, which is ``first``."""
    if first is not None:
        found = Sized(first, likeness)
        with suppress(Unlike):
            _ = found.own
            return found
    return Sized(without_early_sums(local.function, local.microbatches))
