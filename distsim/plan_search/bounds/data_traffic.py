"""What data-parallel ranks send each other at least in a step, and how long that takes them.

With ``zero=3`` each microbatch gathers all parameters in its forward pass, and those of the layers that its
backward pass reads again in that, unless they are kept; from ``zero=2`` on the gradients of each microbatch
are reduce-scattered (``Plan.reduces_each``), before that their sums, once; with ``zero=1|2`` new parameters
are gathered once. Of a parameter at least the elements that tp and pp leave, in the type in which it is
gathered; of a gradient in the type in which it is summed. All go over one communicator, one after the other,
so the fullest rank takes at least the mean over the ranks of a pipeline. Where gradients are not reduced
while a backward pass runs, what follows, the sum over microbatches or the update, waits for that; not where
buckets are full, or layers complete, earlier, and are scattered within the pass.

Each algorithm of a collective takes a start and so many seconds a byte, so none is faster than what the best
one of them takes for a byte more of very many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from distsim.cache import Cache
from distsim.cost.cost_model import CostModel
from distsim.hardware.collectives import collective_time
from distsim.hardware.plan_mesh import plan_mesh, rank_axes
from distsim.ir import Function, Op, Role, Tensor, Topology, Value
from distsim.plan import Plan
from distsim.plan.buckets import buckets_of
from distsim.plan_search.bounds.layer_figures import LayerExtras, LayerWork
from distsim.transforms.op_graph import numbered


class TrafficSeconds(NamedTuple):
    """Seconds of a step for which a communicator is ``busy``, a mean over the ranks of a pipeline, and those
    of them for which computation waits (``exposed``)."""

    busy: float
    exposed: float


NO_TRAFFIC = TrafficSeconds(0.0, 0.0)


@dataclass(frozen=True)
class DataTraffic:
    """Bytes of all parameters as they are ``gathered``, of those of more than one dimension that Calls of
    backward passes read (``again``), but for what Calls cast, which may be saved, or that read data alone, as
    they are held (``updated``), and of their ``gradients``."""

    gathered: int
    again: int
    updated: int
    gradients: int

    @staticmethod
    def of(function: Function, updated: int, gradients: int) -> DataTraffic:
        """Return that of a joint function, of which parameters and gradients take so many bytes."""
        sizes: dict[Value, int] = {}
        for value in function.inputs:
            if value.role is Role.PARAMETER and isinstance(value.type, Tensor):
                sizes[value] = value.type.nbytes
        original = {value: value for value in sizes}
        read, again, casts = set[Value](), set[Value](), set[Value]()
        grown, first = set[Value](sizes), set[Value]()
        for op, forward in zip(function.ops, numbered(function).forward, strict=True):
            own = [original[value] for value in op.inputs if value in original]
            if not grown.isdisjoint(op.inputs):
                grown.update(op.outputs)
            if op.op_type == "Cast" and own:
                original[op.outputs[0]] = own[0]
                cast = op.outputs[0].type
                if isinstance(cast, Tensor):
                    sizes[own[0]] = min(sizes[own[0]], cast.nbytes)
                continue
            if forward:
                read.update(own)
                # Nobody asks for the gradient of data, for which a backward pass would read them.
                if grown.isdisjoint(v for v in op.inputs if v not in original):
                    first.update(own)
            elif op.is_call:
                again.update(own)
            casts.update(_cast_inside(op, original) if op.is_call else ())
        # Updates read all of them; of biases and scales a backward pass may need nothing.
        again = {v for v in (again & read) - casts - first if isinstance(v.type, Tensor) and v.type.rank > 1}
        return DataTraffic(sum(sizes[v] for v in read), sum(sizes[v] for v in again), updated, gradients)

    def of_layers(self, layer: LayerExtras, layers: int, plan: Plan) -> DataTraffic:
        """Return that of a plan under which it is known what so many layers send."""
        every = layers * plan.tp
        summed = layer.reduced if plan.reduces_each else layer.sums
        again = max(self.again, int(every * layer.gathered) - self.gathered)
        return replace(self, again=again, gradients=max(self.gradients, int(every * summed)))

    def seconds(self, plan: Plan, topology: Topology) -> TrafficSeconds:
        """Return what a plan takes for it at least.

        Nothing is said of ranks that do not lie alike, of groups of ranks that divide parameters, of divided
        experts, and of divided sequences.
        """
        if not _is_told(plan):
            return NO_TRAFFIC
        gather, scatter, reduce = _slownesses(plan, topology)
        count, ranks = plan.microbatches, plan.tp * plan.pp
        sums = scatter * self.gradients if plan.zero else reduce * self.gradients
        sent = sums * (count if plan.reduces_each else 1)
        # Of several microbatches the sum of the second is the first that waits; of one the update alone does,
        # and beside what the last stage of a rank sends, the one before computes.
        waits = count - 1 if count > 1 else int(plan.chunks == 1)
        if plan.reduces_each and not sends_at_once(plan):
            waits = 0  # what fills a bucket goes beside the rest of a layer
        late = sums * (waits if plan.reduces_each else 1)
        updated = gather * self.updated if plan.zero in (1, 2) else 0.0
        gathered = 0.0
        if plan.zero == 3:
            # What backward reads of a parameter no policy of recomputation saves (gathers.gathered).
            keeps = plan.resharding == "never"
            gathered = gather * (self.gathered if keeps else count * (self.gathered + self.again))
        exposed = late + (0.0 if plan.overlap_params == "on" else updated)
        busy = gathered + sent + updated
        if plan.overlap_grads == "on":
            exposed = 0.0
        return TrafficSeconds(busy / ranks, exposed / ranks)

    def seconds_after(self, plan: Plan, topology: Topology) -> float:
        """Return what follows the last backward pass of a rank that has all of this on its ranks of tp."""
        return self.seconds(plan, topology).exposed * plan.pp if plan.zero < 2 else 0.0


def _is_told(plan: Plan) -> bool:
    return plan.dp > 1 and plan.cp * plan.ep == 1 and not plan.zero_ranks


def reduced_late(plan: Plan, topology: Topology, layers: LayerWork, nbytes: float, computed: float) -> float:
    """Return by how much the reductions of so many bytes, a layer's gradients, are longer than its backward
    pass and what else is ``computed`` in it, where those of each microbatch end its pass.

    Products outside of layers may follow the last of these, and run beside what is left to reduce.
    """
    if not _is_told(plan) or not layers.layer or not plan.reduces_each or plan.overlap_grads == "off":
        return 0.0
    backward = layers.layer - (layers.forward + layers.waiting - layers.outside) / layers.layers
    return max(_slownesses(plan, topology)[1] * nbytes - backward - computed, 0.0)


def _cast_inside(call: Op, original: Mapping[Value, Value]) -> Iterator[Value]:
    """Yield the parameters that a Call, or one in it, casts."""
    cast = {value for op in call.callee.ops if op.op_type == "Cast" for value in op.inputs}
    inner = {value: value for value in call.callee.inputs}
    for op in call.callee.ops:
        cast.update(_cast_inside(op, inner) if op.is_call else ())
    for value, formal in zip(call.inputs, call.callee.inputs, strict=True):
        if value in original and formal in cast:
            yield original[value]


def sends_at_once(plan: Plan) -> bool:
    """Whether the gradients of a pass that are divided are sent together, after it."""
    ranks = (plan.zero_ranks or plan.dp) * plan.cp
    buckets = buckets_of(plan.bucket, ranks, plan.overlap_grads == "on", plan.zero)
    return ranks > 1 and not buckets.layers and buckets.limit >= 2**62


_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_LARGE = 2.0**70
_SLOWNESSES = Cache[Topology, tuple[float, ...]]("seconds a byte of collectives, by degrees", 4096)


def _slownesses(plan: Plan, topology: Topology) -> tuple[float, ...]:
    """Return the least seconds a byte that each kind takes over ranks that have the same parameters; 0 where
    these do not lie alike."""
    degrees = plan.pp, plan.dp, plan.tp, plan.order
    return _SLOWNESSES.get(topology, (topology.version, *degrees), lambda: _measured(plan, topology))


def _measured(plan: Plan, topology: Topology) -> tuple[float, ...]:
    groups = plan_mesh(plan, topology).groups(*rank_axes(plan).data)
    if len(CostModel(topology).routes(groups)) > 1:
        return (0.0,) * len(_KINDS)
    slowest = [collective_time(kind, _LARGE, groups[0], topology) / _LARGE for kind in _KINDS]
    return tuple([seconds * (1 - 1e-9) for seconds in slowest])
