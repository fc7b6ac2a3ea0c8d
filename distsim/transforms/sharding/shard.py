"""shard: one function for all ranks of a (dp, tp) mesh, with the collectives that it needs.

The batch is divided over data-parallel ranks and, in the same way, over microbatches: space and time.
What is partial over microbatches is accumulated (a marker op, ``Accumulate``), what is partial over
ranks is all-reduced. Over ``tp`` ranks the parameters' dimensions are divided, whichever way moves
the fewest bytes; the column-then-row pattern of Megatron-LM (Shoeybi et al. 2019) is what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from distsim.buckets import Buckets
from distsim.cache import Cache
from distsim.errors import PlanError
from distsim.ir import Device, Function, Mesh, Role, Value, callees
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.resizing import shared
from distsim.transforms.autodiff.outputs import only_needed
from distsim.transforms.kernels.policies import KERNELS, Kernels
from distsim.transforms.sharding.axes import (
    batch_options,
    check_context,
    context_options,
    decide_batch,
    decide_context,
    decide_tensor,
    tensor_options,
)
from distsim.transforms.sharding.choose_layouts import Decision
from distsim.transforms.sharding.collectives import TENSOR
from distsim.transforms.sharding.constants import as_inputs, as_values
from distsim.transforms.sharding.degrees import (
    BATCH,
    CONTEXT,
    ZIGZAG,
    batch_axis,
    check_batch,
    check_sequence,
    context_axes,
    expert_axes,
    expert_ranks_of_dp,
    sequences,
)
from distsim.transforms.sharding.experts import ByExperts, check_experts, expert_options
from distsim.transforms.sharding.layout import DividedAxis, Placement
from distsim.transforms.sharding.lower import DegreeNeeded, Lowered, lower
from distsim.transforms.sharding.problem_graph import structure_of
from distsim.transforms.sharding.roles import WHOLE_BATCH, Marks, batch_inputs, propagate_both, roles
from distsim.transforms.sharding.strategies import EXPERTS, Options


class BatchParts(NamedTuple):
    """Over what a batch is divided: ranks of dp with the same experts, with others, and microbatches."""

    replicas: int
    experts: int
    microbatches: int


class OverTensor(NamedTuple):
    """How tp ranks divide: also what is between the products; experts not, that lie whole on each."""

    sequence: bool
    experts_apart: bool


Way = OverTensor | str | None
"""How an axis divides: the batch; as a kind of context parallelism, or experts, say; or as tp does."""

REPLICATION_NOTED = 0.95
"""Less than this share of the matrix flops divided over tp is worth a note."""


@dataclass(frozen=True)
class Sharded:
    """A function that every rank of ``mesh`` runs on one microbatch, and where its ends are.

    ``sources`` are the inputs of the function that was sharded, in the order of ``function.inputs``; the
    last of them may be constants that differ along the batch, each made by one of the functions ``made``.
    ``mesh`` may be a pattern on which two data-parallel ranks stand for all ``dp``; ``needs_dp``: it may
    not, because a shape depends on how many there are (see :func:`shard`). ``remarks`` are the
    notes of the function that was sharded. ``kernels``: which of its ops one kernel runs, ``buckets``: which
    gradients are reduced together, once it is cut. ``decisions`` are by axis of the mesh, the batch's first.
    """

    function: Function
    mesh: Mesh
    microbatches: int
    sources: tuple[Value, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    decisions: Mapping[str, Decision]
    dp: int
    needs_dp: bool
    remarks: tuple[str, ...] = ()
    made: tuple[Function, ...] = ()
    kernels: Kernels = KERNELS["ops"]
    buckets: Buckets | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the placement: work that is replicated, a choice not proven best."""
        tp, found = self.mesh.axis_size(TENSOR), list(self.remarks)
        for axis, decision in self.decisions.items():
            if axis not in BATCH and decision.divided < REPLICATION_NOTED:
                share = f"{1 - decision.divided:.0%}"
                found.append(
                    f"{axis}={self.mesh.axis_size(axis)}: {share} of the matrix FLOPs are not divided, every "
                    f"{axis} rank does them all"
                )
        found += [
            f"tp={tp} does not divide the vocabulary of {size}, of which each rank has all rows; pad it to "
            f"{-(-size // tp) * tp}"
            for size in self.decisions[TENSOR].undivided
        ]
        found += [
            f"tp={tp} divides no attention of {heads} heads and {kv_heads} of keys and values: every rank "
            "does all of it; use a tp that divides both, or cp"
            for heads, kv_heads in self._undivided_heads
        ]
        if not self._proven:
            found.append("the placement is not proven to be the least-cost one")
        return tuple(found)

    @property
    def _undivided_heads(self) -> list[tuple[int, int]]:
        """The heads, of queries and of keys, of attention that tp leaves whole."""
        found: dict[tuple[int, int], None] = {}
        for op, strategy in self.decisions[TENSOR].strategies.items():
            if strategy.factor is None and op.op_type == "Attention":
                query, key = (as_tensor(value.type, value.name).shape for value in op.inputs[:2])
                found[query[1], key[1]] = None
        return list(found)

    @property
    def _proven(self) -> bool:
        return all(decision.proven for decision in self.decisions.values())

    def describe(self) -> str:
        """Return what was chosen for every input, and the bytes that each rank sends for it."""
        lines = [f"{self.function.name} on {self.mesh}, {self.microbatches} microbatches"]
        for value, placement in zip(self.sources, self.inputs, strict=True):
            lines.append(f"  {value.name}: {placement}")
        sent = ", ".join(f"{axis} {decision.moved:.3g}" for axis, decision in self.decisions.items())
        lines.append(f"  bytes sent per rank ({'least' if self._proven else 'not proven least'}): {sent}")
        return "\n".join(lines)


def shard(
    function: Function,
    mesh: Mesh,
    microbatches: int = 1,
    dp: int | None = None,
    sp: bool = False,
    context: str = "allgather",
) -> Sharded:
    """Divide ``function`` over ``mesh`` (axes dp and tp, maybe others of :class:`RankAxes`) and over
    ``microbatches``.

    ``function`` may be any function: forward, or joint with its backward pass and optimizer. Data
    inputs carry the batch in dimension 0. Ops that no output needs are left out, which is noted. Raises
    :class:`PlanError` naming the numbers when the batch is not divisible or an op needs the whole batch at
    once, and for a function that recomputes already.

    ``sp``: activations between the products are divided over tp in the sequence (:func:`tensor_options`).
    ``context``: the kind of context parallelism of the axis cp (:mod:`distsim.ops.attention_sharding`); of
    cp_ring and cp_heads it is ring and ulysses.

    With ``dp``, the real number of replicas, the mesh is a pattern whose two data-parallel ranks stand
    for any number: all do the same on parts of the same shape. Everything is decided for the real
    number, only the types name the pattern. Where a collective over dp changes shapes, the pattern must
    have all replicas: the result is then on a mesh like it that has (``needs_dp``).

    What was divided before is known: a second call with equal degrees on an equal mesh costs a look-up,
    and functions that come out alike for other degrees are the same function.
    """
    memory = _KNOWN.get(function, (), lambda: _FunctionSharding(function))
    key = (mesh, microbatches, dp, sp, context)
    found = memory.results.get(key)
    if found is None:
        count = mesh.axis_size("dp") if dp is None else dp
        found = memory.shard(function, mesh, microbatches, count, sp, context)
        memory.results[key] = found
    return found


def _check_order(function: Function) -> None:
    """Raise for a function that recomputes already: a barrier would ask for values to be brought together."""
    for each in (*callees(function), function):
        if any(operator(op.op_type).waits for op in each.ops):
            raise PlanError(
                f"{each.name} was rematerialized before it is sharded; shard it first, which remat= of "
                "build_program and parallelize does, so that no collective is recomputed"
            )


MOST_FUNCTIONS = 256
"""How many local functions of one function are remembered: the last ones made. One of a GPT of 96 layers
under Adam takes 2 MB."""
MOST_RESULTS = 8192
"""How many results and decisions, which share those functions; then they are looked up anew."""


def _constants_divided(
    function: Function, data: tuple[Value, ...]
) -> tuple[Function, Marks, tuple[Function, ...]]:
    """Return the function with its constants as they can be divided, the dimensions that carry the batch,
    and what makes its last inputs."""
    seeds = dict.fromkeys(data, WHOLE_BATCH)
    function = as_values(function)
    marks = propagate_both(function, seeds)
    found, made = as_inputs(function, marks)
    return (found, propagate_both(found, seeds), made) if made else (function, marks, made)


def _constants_with_batch(known: Mapping[Value, Role], marks: Marks) -> dict[Value, int]:
    """Return the inputs that are constants with a dimension of the batch, and that dimension."""
    found: dict[Value, int] = {}
    for value, role in known.items():
        dims = [dim for dim, pieces in marks.get(value, ()) if pieces is None]
        if role is Role.CONSTANT and dims:
            found[value] = min(dims)
    return found


class _FunctionSharding:
    """What is known of one function: what may be divided, what was decided, what came out.

    ``rewritten`` is what is divided in its place, if that is another function.
    """

    def __init__(self, given: Function) -> None:
        _check_order(given)
        needed = only_needed(given, given.outputs, "no output needs it")
        known = roles(needed)
        self.data = batch_inputs(needed, known)
        function, marks, self.made = _constants_divided(needed, self.data)
        self.rewritten = None if function is given else function  # not to refer to what it is known by
        known |= dict.fromkeys(function.inputs[len(needed.inputs) :], Role.CONSTANT)
        divided = self.divided = dict.fromkeys(self.data, 0) | _constants_with_batch(known, marks)
        scalars = [v for v in function.inputs if known[v] is Role.INPUT and v not in divided]
        # What has no batch is the same for every microbatch: the weight of a loss that is given, say.
        self.known = known | dict.fromkeys(scalars, Role.CONSTANT) | dict.fromkeys(divided, Role.INPUT)
        self.structure = structure_of(function, self.known)
        self.batch_options = batch_options(function, self.structure, divided, marks)
        self.marks, self.roles = marks, known
        self.options: dict[OverTensor | str, Options] = {}
        self.by_experts: dict[tuple[int, BatchParts, Balance], ByExperts] = {}
        self.decided: dict[tuple[object, ...], Decision] = {}
        self.lowered: dict[tuple[object, ...], Lowered] = {}
        self.results: dict[tuple[Mesh, int, int | None, bool, str], Sharded] = {}

    def shard(
        self, function: Function, mesh: Mesh, microbatches: int, dp: int, sp: bool, context: str
    ) -> Sharded:
        function = self.rewritten or function
        batch = batch_axis(mesh)
        shown, ep = mesh.axis_size(batch), expert_ranks_of_dp(mesh)
        replicas, apart = dp // ep, expert_axes(mesh)
        if dp % ep or shown not in (replicas, min(replicas, 2)):
            raise PlanError(
                f"dp={dp} on a mesh of {batch}={shown}; give one of {batch}={min(replicas, 2)} or of "
                f"{batch}={replicas}"
            )
        kinds = {axis: CONTEXT[axis] or context for axis in context_axes(mesh)}
        check_batch(function, self.data, dp, microbatches)
        check_sequence(function, self.data, mesh, sp, any(kind in ZIGZAG for kind in kinds.values()))
        if len(self.results) >= MOST_RESULTS:
            self.results.clear()
            self.decided.clear()
            self.by_experts.clear()
        axes = [DividedAxis(batch, replicas * microbatches)]
        axes += [DividedAxis(apart[0], ep, experts=True)] if ep > 1 else []
        axes += [
            DividedAxis(axis, mesh.axis_size(axis), kind in ZIGZAG, axis in apart)
            for axis, kind in kinds.items()
        ]
        axes.append(DividedAxis(TENSOR, mesh.axis_size(TENSOR), experts=TENSOR in apart))
        way = OverTensor(sp, TENSOR in apart)
        ways = dict(zip(axes, [None, *[EXPERTS] * (ep > 1), *kinds.values(), way], strict=True))
        parts = BatchParts(replicas, ep, microbatches)
        decided = self._decide(function, ways, parts, mesh.devices[0])
        for axis in axes:
            if axis.name in kinds:
                own = kinds[axis.name]
                check_context(self.structure, decided[axis], axis, own, mesh.axis_size(TENSOR))
        try:
            lowered = self._lower(function, mesh, microbatches, decided, sp or bool(kinds))
        except DegreeNeeded:
            mesh = mesh.resized(mesh.devices[0], {batch: replicas})
            lowered = self._lower(function, mesh, microbatches, decided, sp or bool(kinds))
        return Sharded(
            lowered.function,
            mesh,
            microbatches,
            function.inputs,
            lowered.inputs,
            lowered.outputs,
            {axis.name: decision for axis, decision in decided.items()},
            dp,
            lowered.needs_dp,
            function.notes,
            self.made,
        )

    def _decide(
        self, function: Function, ways: Mapping[DividedAxis, Way], parts: BatchParts, device: Device
    ) -> dict[DividedAxis, Decision]:
        """Return what is decided along each axis: the batch's first, for the others depend on it.

        What is decided of experts holds along all axes that have ranks of them.
        """
        balance = (device.throughput, device.peaks, device.dram_bandwidth)
        ranks = math.prod([axis.parts for axis in ways if axis.experts])
        found, outer, experts = dict[DividedAxis, Decision](), list[Decision](), None
        for axis, way in ways.items():
            # Along the batch ranks and microbatches are all the same.
            key = (axis.parts, balance) if way is None else (axis.parts, ranks, parts, balance, way)
            decision = experts.choice if experts and way == EXPERTS else self.decided.get(key)
            if decision is None:
                degrees = (axis.parts, parts.replicas * parts.experts, parts.microbatches)
                if way is None:
                    decision = decide_batch(self.structure, self.batch_options, axis.parts, device)
                elif isinstance(way, str):
                    batch, options = next(iter(found.values())), self._options(function, way)
                    divisor = axis.parts * (2 if axis.zigzag else 1)
                    decision = decide_context(self.structure, options, degrees, batch, device, divisor)
                else:
                    batch, options = next(iter(found.values())), self._options(function, way)
                    beside = {n: ranks * sent for n, sent in experts.choice.sent.items()} if experts else {}
                    decision = decide_tensor(self.structure, options, degrees, batch, device, beside)
                self.decided[key] = decision
            if way is None and ranks > 1:
                experts = self._by_experts(function, decision, (ranks, parts, balance), device)
            found[axis] = decision
            if experts and axis.experts:
                found[axis] = experts.along(decision)
                outer += [] if way == EXPERTS else [decision]
            elif experts:
                found[axis] = experts.beside(decision, outer)
        return found

    def _by_experts(
        self, function: Function, batch: Decision, key: tuple[int, BatchParts, Balance], device: Device
    ) -> ByExperts:
        """Return what so many ranks divide by experts; of these some are along dp, which divide the batch."""
        found = self.by_experts.get(key)
        if found is None:
            ranks, parts, _ = key
            options, degrees = self._options(function, EXPERTS), (ranks, parts.replicas, parts.microbatches)
            choice = decide_context(self.structure, options, degrees, batch, device, parts.experts)
            check_experts(self.structure, choice, ranks)
            found = ByExperts(self.structure, choice, self.marks)
            self.by_experts[key] = found
        return found

    def _options(self, function: Function, way: OverTensor | str) -> Options:
        """Return what may be chosen over experts, a context, or tp."""
        found = self.options.get(way)
        if found is None:
            if way == EXPERTS:
                found = expert_options(function, self.structure, self.known, self.divided, self.marks)
            elif isinstance(way, str):
                along = dict.fromkeys(sequences(self.data), 1)
                found = context_options(function, self.structure, along, self.marks, way)
            else:
                found = tensor_options(function, self.structure, self.roles, self.marks, *way)
            self.options[way] = found
        return found

    def _lower(
        self,
        function: Function,
        mesh: Mesh,
        microbatches: int,
        decided: Mapping[DividedAxis, Decision],
        again: bool,
    ) -> Lowered:
        """Return the local function; one whose parts and choices are the same is the same function."""
        key = (mesh, *[(axis, decision.choices) for axis, decision in decided.items()], again)
        found = self.lowered.get(key)
        if found is None or (found.refusal and microbatches > 1):
            found = lower(function, self.known, mesh, microbatches, decided, again)
            found = replace(found, function=shared(found.function))
            if len(self.lowered) >= MOST_FUNCTIONS:
                oldest = self.lowered.pop(next(iter(self.lowered))).function
                self.results = {k: known for k, known in self.results.items() if known.function is not oldest}
            self.lowered[key] = found
        return found


Balance = tuple[float, tuple[tuple[str, float], ...], float]
"""The figures of a device on which the choice depends."""

_KNOWN = Cache[Function, _FunctionSharding]("what is known of the division of a function", 1)
