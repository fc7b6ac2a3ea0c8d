"""What no plan can be better than: lower bounds of its seconds and of the bytes that a device holds.

**Seconds** are those from a step to the next (:attr:`Simulation.step_period`). The products of a step are on
the compute streams of its devices, whatever the plan, and a stream does one thing at a time. With W seconds
of products for a microbatch, summed over the stages, M microbatches and p ranks the busiest rank computes at
least M W / p, a stage's mean over its ranks being at most that of the busiest. Nothing is said of what a
pipeline makes ranks wait: what is sent leaves as soon as it is there, so neighbours work on a microbatch at a
time, be it on branches of a layer that is cut, or on gradients of weights.

W is at least the FLOPs of the model's products at the best rate of their kind and type, divided by all ranks;
padding, shapes, recomputation, and what experts have unevenly only add to it. Once a plan was simulated, W is
known for all plans that divide the work of a microbatch in the same way (``plan_keys``), and for those of
the same layers (:mod:`distsim.plan_search.bounds.layer_work`) the whole time for which these take a device,
of how many a rank has a whole number, or, where one of the same stages was built, or a plan counts layers,
what each of these takes (:mod:`distsim.plan_search.bounds.pipeline_bounds`).

**Bytes.** Parameters and state that are read are held all step, divided by no more than the ranks of tp and
pp (with experts also of ep), and by those of dp and cp where ``zero`` divides them. Sums of gradients that
are not divided are held of each stage from its first microbatch until its last one; when, beside how many
microbatches in flight, the schedule says. The fullest rank holds at least the mean.

The layers save of a microbatch at least what no kernel makes again, and no policy of recomputation, divided
by all ranks (:mod:`distsim.plan_search.bounds.saved_bytes`); where a plan of the same layers was built, it is
known what they save. Be it S bytes, over all stages. Rank r has n_r microbatches in flight in each of its
stages at some time, so it holds n_r S_r, and with Q_r of what is held all step Q_r + n_r S_r. A mean of these
with weights in proportion to max(1, n / n_r) is at least (Q + n S) / sum(max(1, n / n_r)), for any n: the
fullest rank holds as much. Equal layers have both in proportion, unless some recompute and others do not:
where stages begin between layers, the fullest holds at least 1 / sum(1 / (Q + n_r S)).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from distsim.cost.efficiency import best_share, element_type, kind_of_work
from distsim.ir import Device, Function, Op, Role, Tensor, Topology, Value, all_ops, trim
from distsim.ops import Signature, Work, signature_of, work
from distsim.plan import Plan, parse_schedule
from distsim.plan.buckets import buckets_of
from distsim.plan_search.bounds.data_traffic import NO_TRAFFIC, DataTraffic, reduced_late, sends_at_once
from distsim.plan_search.bounds.layer_figures import LayerExtras, LayerWork, StageWork
from distsim.plan_search.bounds.pipeline_bounds import (
    HeldParts,
    bytes_of_stages,
    flights,
    layers_counted,
    least_wherever_cut,
    seconds_of_layers,
    seconds_of_stages,
)
from distsim.plan_search.bounds.plan_keys import cuts_layers, runs_alone, saves_alike, splits_backward
from distsim.plan_search.bounds.saved_bytes import layers_saved_bytes
from distsim.schedule import FLUSH, SCHEDULES, example
from distsim.simulation.memory.plan import gradient_values
from distsim.transforms.kernels.policies import Kernels
from distsim.transforms.sharding.problem_graph import written


class PlanKnowledge(NamedTuple):
    """What plans that were built teach of another one.

    Seconds for which a microbatch takes devices, summed over stages: of its ``products``, and of all that is
    ``busy``; of its ``layers``; the bytes that these have ``saved``; and of each of its ``stages``. 0, None
    and nothing: not known. ``whole``: whether stages begin between layers. ``sums`` are the seconds for which
    a microbatch but the first adds the gradients of a layer to sums. ``pending`` are bytes that layers hold
    between halves of a backward pass, ``extras`` are those of a layer.
    """

    products: float = 0.0
    busy: float = 0.0
    layers: LayerWork | None = None
    saved: int = 0
    stages: tuple[StageWork, ...] = ()
    whole: bool = False
    sums: float = 0.0
    pending: int = 0
    extras: LayerExtras = LayerExtras()


class HeldBytes(NamedTuple):
    """The bytes of parameters, of state, and of the gradients of parameters, before a plan divides them."""

    parameters: int
    state: int
    gradients: int


@dataclass(frozen=True, eq=False)
class PlanBounds:
    """Lower bounds for plans of a training step on the devices of a topology, under a policy of kernels."""

    function: Function
    topology: Topology
    kernels: Kernels

    @cached_property
    def products(self) -> float:
        """Seconds of all products of a step, at the best rate, one after the other on one device."""
        return sum(map(self._best_seconds, all_ops(trim(self.function).function)))

    def _best_seconds(self, op: Op) -> float:
        """Return those of one op, 0 if it is no product."""
        signature = signature_of(op)
        demand = work(signature)
        if demand is None or not demand.matrix:
            return 0.0
        return min(_best_seconds(signature, demand, device) for device in self._kinds)

    @cached_property
    def _kinds(self) -> tuple[Device, ...]:
        """A device of each kind."""
        devices = self.topology.devices
        kinds = {(d.flops_efficiency, d.peaks, d.throughput, d.rates): d for d in devices}
        return tuple(kinds.values())

    @cached_property
    def held(self) -> HeldBytes:
        """What all parameters take that are read."""
        read = {value for op in self.function.ops for value in op.inputs}
        return self._held([v for v in self.function.inputs if v in read])

    @cached_property
    def _traffic(self) -> DataTraffic:
        """What ranks that have the same parameters send each other."""
        updated = sum(own.nbytes for own in self._trained_among(self.function.inputs))
        return DataTraffic.of(self.function, updated, self.held.gradients)

    @cached_property
    def _layer_traffic(self) -> DataTraffic | None:
        """The part of it that is of equal layers, of what is not gathered for passes."""
        layered = self.held_in_layers
        if layered is None:
            return None
        updated = sum(own.nbytes for own in self._trained_among([*chain(*self.layer_parameters)]))
        return DataTraffic(0, 0, updated, layered.gradients)

    @cached_property
    def layers(self) -> int:
        """How many layers there are, if all are equal; 0 if not."""
        return 0 if self._layered is None else self._layered[0]

    @property
    def held_in_layers(self) -> HeldBytes | None:
        """What the parameters of the layers take; None where the function does not consist of equal ones."""
        return None if self._layered is None else self._layered[1]

    @cached_property
    def layer_parameters(self) -> tuple[frozenset[Value], ...]:
        """The parameters of each of equal layers; nothing where the function does not consist of these.

        Parameters that one call reads are of one layer: all of them its forward pass, and its update; a bias
        is nothing to its backward pass.
        """
        layers: list[set[Value]] = []
        callees = Counter[Function]()
        for op in self.function.ops:
            read = {v for v in op.inputs if v.role is Role.PARAMETER} if op.is_call else set[Value]()
            if read:
                callees[op.callee] += 1
                joined = [layer for layer in layers if not layer.isdisjoint(read)]
                layers = [layer for layer in layers if layer.isdisjoint(read)]
                layers.append(read.union(*joined))
        # Forward, backward and updates of equal layers are called once for each.
        return tuple(map(frozenset, layers)) if {*callees.values()} == {len(layers)} else ()

    @cached_property
    def _layered(self) -> tuple[int, HeldBytes] | None:
        """How many equal layers there are, and what their parameters take."""
        layers = self.layer_parameters
        if not layers:
            return None
        layered = {value: None for parameters in layers for value in parameters}
        updated = (op.inputs for op in self.function.ops if not layered.keys().isdisjoint(op.inputs))
        state = {v: None for inputs in updated for v in inputs if v.role is Role.STATE}
        return len(layers), self._held([*layered, *state])

    def saved_in_layers(self, remat: str) -> int:
        """Return the bytes that the layers save at least of a step, by what they recompute."""
        if remat not in self._saved_in_layers:
            self._saved_in_layers[remat] = layers_saved_bytes(self.function, self.kernels, remat)
        return self._saved_in_layers[remat]

    @cached_property
    def _saved_in_layers(self) -> dict[str, int]:
        return {}

    def _held(self, given: Collection[Value]) -> HeldBytes:
        tensors = [(v.role, v.type) for v in given if isinstance(v.type, Tensor)]
        parameters = [own for role, own in tensors if role is Role.PARAMETER]
        return HeldBytes(
            sum(own.nbytes for own in parameters),
            sum(own.nbytes for role, own in tensors if role is Role.STATE),
            sum(self._gradient_bytes.get(own.shape, 0) for own in self._trained_among(given)),
        )

    def _trained_among(self, given: Collection[Value]) -> list[Tensor]:
        """Return the types of those parameters that something updates: tables and statistics are not."""
        return [v.type for v in given if v in self._trained and isinstance(v.type, Tensor)]

    @cached_property
    def _trained(self) -> frozenset[Value]:
        """The parameters that something updates."""
        places = [(op, written(op, index)) for op in self.function.ops for index in range(len(op.outputs))]
        found = {op.inputs[place] for op, place in places if place is not None}
        return frozenset([value for value in found if value.role is Role.PARAMETER])

    @cached_property
    def _gradient_bytes(self) -> dict[tuple[int, ...], int]:
        """The bytes of a gradient of a shape, the fewest in which one is held."""
        found: dict[tuple[int, ...], int] = {}
        # Of a parameter of which a part is read, the gradient of the part may be summed, and padded later.
        padded = {v for op in self.function.ops if op.op_type in ("Pad", "SliceGrad") for v in op.outputs}
        # What is cast is handed on, and what is scaled and copied for the update is made of what was summed.
        casts = {v for op in self.function.ops if op.op_type == "GradientCast" for v in op.inputs}
        scaled = {v for op in self.function.ops if op.op_type in _FOR_UPDATE for v in op.outputs}
        # What is cast otherwise may be summed over ranks before that.
        tensors = [v.type for op in all_ops(self.function) if op.op_type == "Cast" for v in op.inputs]
        widths = [own.dtype.itemsize for own in tensors if isinstance(own, Tensor) and own.dtype.is_floating]
        narrow = float("inf") if casts else min(widths, default=float("inf"))
        for value in gradient_values(self.function) - casts - scaled - set(self.function.inputs):
            if isinstance(value.type, Tensor):
                width = min(value.type.dtype.itemsize, narrow)
                shape, size = value.type.shape, 0 if value in padded else int(value.type.size * width)
                found[shape] = min(size, found.get(shape, size))
        return found

    def step_seconds(self, plan: Plan, known: PlanKnowledge | None = None) -> float:
        """Return seconds within which no step follows another; ``known`` is what other plans teach of it."""
        count, known = plan.microbatches, known or PlanKnowledge()
        least = self.products / (plan.dp * plan.tp * plan.cp * count)
        layers, beside, sums = known.layers, 0.0, known.sums
        if layers:
            between = layers.passage.between if layers.passage else 0.0
            # In two halves other calls compute them. What is between layers may be no more than that.
            beside = 0.0 if splits_backward(plan) else max(known.extras.beside - between, 0.0)
            computed = known.sums + beside + between
            sums += reduced_late(plan, self.topology, layers, known.extras.reduced, computed)
        # A mean over microbatches: the first begins the sums.
        sums = beside + (sums * (count - 1) / count if _has_flush(plan.schedule) else 0.0)
        added = sums * layers.layers if layers else 0.0
        passage = layers.passage if layers and known.whole and runs_alone(plan) else None
        if passage and layers:  # of a stage that begins between layers all but the first follow another one
            added += passage.between * max(layers.layers - plan.num_stages, 0)
        busy = max(least, known.products, known.busy, layers.seconds if layers else 0.0)
        traffic = self._traffic.of_layers(known.extras, self.layers, plan)
        sent = traffic.seconds(plan, self.topology) if _has_flush(plan.schedule) else NO_TRAFFIC
        found = max((busy + added) * count / plan.pp + sent.exposed, sent.busy)
        if plan.pp == 1:
            return found
        # Where a rank has several copies of stages, microbatches are divided over these, and so are layers.
        whole = seconds_of_layers(plan, layers, sums) if layers and runs_alone(plan) else 0.0
        stages = [
            stage._replace(seconds=stage.seconds + stage.layers * sums) for stage in self._stages(plan, known)
        ]
        joined = self._takes_factor and plan.post_validation == "off"
        return max(found, whole, seconds_of_stages(plan, stages, passage, self._after(plan, known), joined))

    @cached_property
    def _takes_factor(self) -> bool:
        """Whether updates read a factor of all gradients: their norm, or what is left of the loss's scale."""
        return any(op.op_type == "GradientFactor" for op in all_ops(self.function))

    def _after(self, plan: Plan, known: PlanKnowledge) -> float:
        """Return what follows the last backward pass of a rank for each of its layers."""
        traffic = self._layer_traffic
        if traffic is None or not _has_flush(plan.schedule):
            return 0.0
        traffic = traffic.of_layers(known.extras, self.layers, plan)
        return traffic.seconds_after(plan, self.topology) / self.layers

    def _stages(self, plan: Plan, known: PlanKnowledge) -> tuple[StageWork, ...]:
        """Return the stages that are known, or those of a plan that counts equal layers."""
        counts = () if known.stages else layers_counted(plan, self.layers)
        if not counts:
            return known.stages
        work = known.layers
        layer, head = (work.layer, work.head) if work else (0.0, 0.0)
        passage = work.passage if work and known.whole and runs_alone(plan) else None
        between = passage.between if passage else 0.0
        saved, pending = self._saved(plan, known) / self.layers, known.pending / self.layers
        if not saves_alike(plan):
            saved = pending = 0.0
        heads = [0.0] * (len(counts) - 1) + [head]
        # Nobody may wait for the first stage, whose first half is nothing then: what is saved is there still.
        halves = [min(saved, pending)] + [pending] * (len(counts) - 1)
        times = [n * layer + max(n - 1, 0) * between for n in counts]
        if work and work.halves and cuts_layers(plan):
            apart = work.halves
            # Nobody waits for the first stage: its backward pass is whole.
            later = [n * apart.layer + max(n - 1, 0) * apart.between for n in counts[1:]]
            times[1:] = map(max, times[1:], later)
        return tuple(
            [
                StageWork(seconds + h, n, int(n * saved), int(n * half))
                for seconds, n, h, half in zip(times, counts, heads, halves, strict=True)
            ]
        )

    def device_bytes(self, plan: Plan, known: PlanKnowledge | None = None) -> float:
        """Return bytes that the fullest device of a plan holds at least at its peak."""
        known = known or PlanKnowledge()
        every = self._parts(self.held, plan, known)
        least = (every.held + every.at_once) / plan.pp
        saved, full = self._saved(plan, known), list[float]()
        stages = self._stages(plan, known)
        in_flight = flights(plan) if saved or stages else None
        # Beside parameters that are gathered ahead stages may save what others do not.
        if in_flight is None or (plan.overlap_params == "on" and plan.pp > 1):
            return least
        alike = self.held_in_layers if known.whole and saves_alike(plan) else None
        alike = self.held if plan.pp == 1 else alike
        if stages:
            least = max(
                least, bytes_of_stages(plan, stages, every, alike and self._parts(alike, plan, known))
            )
        least = max(least, least_wherever_cut(every.held, saved, in_flight.least))
        if alike is None:
            return least
        held, gradients, _ = self._parts(alike, plan, known)
        for most, behind in zip(in_flight.least, in_flight.behind_sums, strict=True):
            summed = held + gradients + behind * saved if behind >= 0 else 0.0
            full.append(max(held + most * saved, summed))
        return max(least, 1 / sum(1 / each for each in full))

    def _parts(self, held: HeldBytes, plan: Plan, known: PlanKnowledge) -> HeldParts:
        """Return what a plan leaves on the ranks of a pipeline of what is held, of gradients as much as is
        known to be held of layers."""
        layered = self.layers * plan.tp * plan.ep * known.extras.held if plan.zero < 2 else 0.0
        return _divided(held._replace(gradients=max(held.gradients, int(layered))), plan)

    def _saved(self, plan: Plan, known: PlanKnowledge) -> float:
        """Return the bytes that layers save of a microbatch at least, over all stages, as far as known."""
        if plan.offload:
            return known.saved
        ranks = plan.dp * plan.tp * plan.cp
        return max(known.saved, self.saved_in_layers(plan.remat) / (ranks * plan.microbatches))


_FOR_UPDATE = ("GradientCopy", "ScaleGradient")


def _divided(held: HeldBytes, plan: Plan) -> HeldParts:
    """Return what a plan leaves on the ranks of a pipeline of parameters and state, and of gradients.

    Gradients count where they are held undivided, in full, from the first microbatch on: of a single one,
    those that are whole may be reduced before the next are made. What is reduced after the backward pass is
    there at its end: with ``zero=2`` what a stage makes of one microbatch, else the sums of all stages.
    """
    ranks = (plan.zero_ranks or plan.dp) * plan.cp
    # What is gathered in the first forward pass goes with its last reader.
    parts = plan.zero == 3 or plan.overlap_params == "on"
    kept = held.parameters / (ranks if parts else 1) + held.state / (ranks if plan.zero else 1)
    every = held.gradients / (plan.tp * plan.ep)
    kept /= plan.tp * plan.ep
    if plan.zero == 3 or not _has_flush(plan.schedule) or not runs_alone(plan):
        return HeldParts(kept, 0.0, 0.0)
    divides = plan.dp * plan.cp > 1
    buckets = buckets_of(plan.bucket, ranks, plan.overlap_grads == "on", plan.zero) if divides else None
    if plan.zero == 2:
        return HeldParts(kept, 0.0, every / plan.chunks if sends_at_once(plan) else 0.0)
    if buckets is not None and buckets.held:
        return HeldParts(kept + every, 0.0, 0.0)
    late = buckets is not None and not buckets.early
    in_flight = flights(plan)
    together = in_flight is not None and min(in_flight.behind_sums) >= 0
    return HeldParts(kept, every, every if together or late else 0.0)


def _best_seconds(signature: Signature, demand: Work, device: Device) -> float:
    """Return the seconds of a product at what large shapes of its kind reach."""
    dtype = element_type(signature)
    share = best_share(signature, kind_of_work(signature, demand, dtype), device.rates)
    return demand.flops / (device.peak(dtype) * device.flops_efficiency * (1.0 if share is None else share))


def _has_flush(schedule: str) -> bool:
    name = parse_schedule(schedule)[0]
    if name not in SCHEDULES:
        return False
    made = example(name)
    return SCHEDULES[name].searched or (made is not None and made.weights == FLUSH)
