"""What no plan can be better than: lower bounds of its seconds and of the bytes that a device holds.

**Seconds.** The products of a step are on the compute streams of its devices, whatever the plan, and a stream
does one thing at a time. A stage's mean over its ranks is at most that of the busiest. With W seconds of
products for a microbatch, summed over the stages of which a rank has one each, M microbatches and p ranks,

- the busiest of p ranks computes at least M W / p;
- under 1F1B and GPipe (one stage a rank, whole backward passes), rank r waits until a microbatch went through
  the stages before it and has one left to come back through them: M W_r + sum(W_q, q < r) <= T. The cut for
  which the largest of these is least makes them equal, so W_r = T / M (1 - 1/M)^r, which sum to W where
  T = W / (1 - (1 - 1/M)^p). For one microbatch that is W: nothing overlaps.

W is at least the FLOPs of the model's products at the best rate of their kind and type, divided by all ranks;
padding, shapes, recomputation, and what experts have unevenly only add to it. Once a plan was simulated, W is
known for all plans that divide the work of a microbatch in the same way (:func:`work_key`).

**Bytes.** Parameters and state that are read are held all step, divided by no more than the ranks of tp and
pp (with experts also of ep), and by those of dp and cp where ``zero`` divides them. With several
microbatches, one stage a rank and undivided gradients, the sums of the gradients of a rank are all held when
its last microbatch begins backward. The fullest rank holds at least the mean.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from distsim.cost.efficiency import best_share, element_type, kind_of_work
from distsim.ir import Device, Function, Role, Tensor, Topology, all_ops, trim
from distsim.ops import Signature, Work, signature_of, work
from distsim.plan import Plan, parse_schedule
from distsim.schedule import FLUSH, SCHEDULES
from distsim.schedule import schedule as schedule_named
from distsim.simulation.memory.plan import gradient_values


@dataclass(frozen=True, eq=False)
class PlanBounds:
    """Lower bounds for plans of a training step on the devices of a topology."""

    function: Function
    topology: Topology

    @cached_property
    def products(self) -> float:
        """Seconds of all products of a step, at the best rate, one after the other on one device."""
        kinds = {(d.flops_efficiency, d.peaks, d.throughput, d.rates): d for d in self.topology.devices}
        seconds = 0.0
        for op in all_ops(trim(self.function).function):
            signature = signature_of(op)
            demand = work(signature)
            if demand is not None and demand.matrix:
                seconds += min(_best_seconds(signature, demand, device) for device in kinds.values())
        return seconds

    @cached_property
    def held(self) -> tuple[int, int, int]:
        """The bytes of parameters, of state, and of the gradients of parameters."""
        function = self.function
        read = {value for op in function.ops for value in op.inputs}
        given = [v for v in function.inputs if v in read and isinstance(v.type, Tensor)]
        parameters = [v.type for v in given if v.role is Role.PARAMETER]
        state = sum(v.type.nbytes for v in given if v.role is Role.STATE)
        smallest: dict[tuple[int, ...], int] = {}
        for value in gradient_values(function) - set(function.inputs):
            if isinstance(value.type, Tensor):
                shape, size = value.type.shape, value.type.nbytes
                smallest[shape] = min(size, smallest.get(shape, size))
        gradients = sum(smallest.get(t.shape, 0) for t in parameters if isinstance(t, Tensor))
        return sum(t.nbytes for t in parameters), state, gradients

    def step_seconds(self, plan: Plan, seconds: float | None = None) -> float:
        """Return seconds that no step under a plan falls below.

        ``seconds`` are those of the products of a microbatch, summed over stages (W), where they are known.
        """
        count = plan.microbatches
        if seconds is None:
            seconds = self.products / (plan.dp * plan.tp * plan.cp * count)
        if plan.pp > 1 and _is_plain(plan):
            return seconds / (1 - (1 - 1 / count) ** plan.pp)
        return seconds * count / plan.pp

    def device_bytes(self, plan: Plan) -> float:
        """Return bytes that the fullest device of a plan holds at least at its peak."""
        parameters, state, gradients = self.held
        ranks = (plan.zero_ranks or plan.dp) * plan.cp
        held = parameters / (ranks if plan.zero == 3 else 1) + state / (ranks if plan.zero else 1)
        if plan.microbatches > 1 and plan.zero < 2 and _is_plain(plan):
            held += gradients
        return held / (plan.tp * plan.pp * plan.ep)


def work_key(plan: Plan, batch: int) -> Hashable:
    """Return what the seconds of the products of a microbatch depend on, summed over the stages.

    How ranks divide a microbatch, its samples, and what is computed again. Where that depends on which layers
    a stage has, so does the key, and where backward passes are in two halves, which are more kernels.
    """
    whole = plan.remat in ("none", "full") and not plan.offload and not _splits_backward(plan)
    divided = plan.tp, plan.sp, plan.cp, plan.cp_kind, plan.ep, plan.etp, plan.dp if plan.ep > 1 else 0
    stages = () if whole else (plan.num_stages, plan.stages, plan.offload, plan.zero, plan.reshard)
    size = batch // (plan.dp * plan.microbatches)
    return (*divided, size, plan.remat, plan.order, *stages)


def _best_seconds(signature: Signature, demand: Work, device: Device) -> float:
    """Return the seconds of a product at what large shapes of its kind reach."""
    dtype = element_type(signature)
    share = best_share(signature, kind_of_work(signature, demand, dtype), device.rates)
    return demand.flops / (device.peak(dtype) * device.flops_efficiency * (1.0 if share is None else share))


def _splits_backward(plan: Plan) -> bool:
    """Whether the schedule of a plan may have a backward pass in two halves."""
    name = parse_schedule(plan.schedule)[0]
    known = SCHEDULES.get(name)
    return plan.pp > 1 and (
        known is None or known.searched or schedule_named(name, 2, 4, known.chunks or 2).splits_backward
    )


def _is_plain(plan: Plan) -> bool:
    """Whether ranks have one stage of one copy, whole backward passes, and a flush: 1F1B and GPipe."""
    known = SCHEDULES.get(parse_schedule(plan.schedule)[0])
    if known is None or known.chunks != 1 or known.placement != "loop" or _splits_backward(plan):
        return False
    return schedule_named(plan.schedule, 2, 4).weights == FLUSH
