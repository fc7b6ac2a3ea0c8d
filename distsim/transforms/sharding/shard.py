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

from distsim.cache import Cache
from distsim.errors import PlanError
from distsim.hardware.rank_axes import TENSOR
from distsim.ir import Function, Mesh, Role, Value, callees
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.plan.buckets import Buckets
from distsim.resizing import shared
from distsim.transforms.autodiff.loss import only_needed
from distsim.transforms.kernels.policies import KERNELS, Kernels
from distsim.transforms.sharding.axes import check_context
from distsim.transforms.sharding.constants import as_inputs, as_values
from distsim.transforms.sharding.decisions import (
    BatchParts,
    Decisions,
    Dimensions,
    OverTensor,
    Way,
    axis_parts,
)
from distsim.transforms.sharding.degrees import (
    BATCH,
    CONTEXT,
    ZIGZAG,
    batch_axis,
    check_batch,
    check_sequence,
    context_axes,
    expert_axes,
    expert_axes_of_dp,
    sequences,
)
from distsim.transforms.sharding.layout import DividedAxis, Placement
from distsim.transforms.sharding.lower import DegreeNeeded, Lowered, lower
from distsim.transforms.sharding.problem_graph import structure_of
from distsim.transforms.sharding.roles import WHOLE_BATCH, Marks, batch_inputs, propagate_both, roles
from distsim.transforms.sharding.strategies import EXPERTS, Decision

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


def layouts(function: Function, mesh: Mesh, microbatches: int, dp: int, sp: bool, context: str) -> Layouts:
    """Return how :func:`shard` lays out what it is given; nothing is written. Raises what that raises."""
    memory = _KNOWN.get(function, (), lambda: _FunctionSharding(function))
    return memory.layouts(function, mesh, microbatches, dp, sp, context)


class Layouts(NamedTuple):
    """What is decided of a ``function``, as it is divided, along each axis, the batch's first; ``parts`` are
    the axes of the mesh into which each is cut. ``again``: see :func:`lower`."""

    function: Function
    decided: Mapping[DividedAxis, Decision]
    parts: Mapping[DividedAxis, tuple[DividedAxis, ...]]
    again: bool

    def of_callees(self) -> list[tuple[object, ...]]:
        """Return how all that the function calls is laid out: equal lists, of equal callees, make these the
        same local functions."""
        found: list[tuple[object, ...]] = []
        for callee in callees(self.function):
            found.append((callee.name, *map(self._of, callee.inputs)))
            for op in callee.ops:
                strategies = [decision.strategies.get(op) for decision in self.decided.values()]
                found.append((op.op_type, *strategies, *map(self._of, op.outputs)))
        return found

    def _of(self, value: Value) -> tuple[object, ...]:
        return tuple([(each.state(value), each.own.get(value)) for each in self.decided.values()])


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
        divided = dict.fromkeys(self.data, 0) | _constants_with_batch(known, marks)
        scalars = [v for v in function.inputs if known[v] is Role.INPUT and v not in divided]
        # What has no batch is the same for every microbatch: the weight of a loss that is given, say.
        self.known = known | dict.fromkeys(scalars, Role.CONSTANT) | dict.fromkeys(divided, Role.INPUT)
        self.structure = structure_of(function, self.known)
        every = Dimensions(self.known, known, divided, dict.fromkeys(sequences(self.data), 1), marks)
        self.decisions = Decisions(function, self.structure, every)
        self.lowered: dict[tuple[object, ...], Lowered] = {}
        self.like: dict[tuple[object, ...], Lowered] = {}  # the first of those that differ in parts
        self.results: dict[tuple[Mesh, int, int | None, bool, str], Sharded] = {}

    def layouts(
        self, function: Function, mesh: Mesh, microbatches: int, dp: int, sp: bool, context: str
    ) -> Layouts:
        """Return what is decided along every axis."""
        function = self.rewritten or function
        batch = batch_axis(mesh)
        shown, apart, of_dp = mesh.axis_size(batch), expert_axes(mesh), expert_axes_of_dp(mesh)
        ep = math.prod([mesh.axis_size(axis) for axis in of_dp])
        replicas = dp // ep
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
            self.decisions.forget()
        axes = [DividedAxis(batch, replicas * microbatches)]
        axes += [DividedAxis(axis, mesh.axis_size(axis), experts=True) for axis in of_dp]
        axes += [DividedAxis(axis, mesh.axis_size(axis), kind in ZIGZAG) for axis, kind in kinds.items()]
        axes.append(DividedAxis(TENSOR, mesh.axis_size(TENSOR)))
        ways: list[Way] = [None, *[EXPERTS] * len(of_dp), *kinds.values(), OverTensor(sp, TENSOR in apart)]
        cut = {axis: axis_parts(axis, mesh, apart) for axis in axes}
        parts = BatchParts(replicas, ep, microbatches)
        decided = self.decisions.decide(
            function, dict(zip(axes, ways, strict=True)), cut, parts, mesh.devices[0]
        )
        for axis in axes:
            if axis.name in kinds:
                own, choice = kinds[axis.name], decided[cut[axis][0]]
                check_context(self.structure, choice, axis, own, mesh.axis_size(TENSOR))
        return Layouts(function, decided, cut, sp or bool(kinds))

    def shard(
        self, function: Function, mesh: Mesh, microbatches: int, dp: int, sp: bool, context: str
    ) -> Sharded:
        function, decided, cut, again = self.layouts(function, mesh, microbatches, dp, sp, context)
        try:
            lowered = self._lower(function, mesh, microbatches, decided, again)
        except DegreeNeeded:
            replicas = dp // math.prod([mesh.axis_size(axis) for axis in expert_axes_of_dp(mesh)])
            mesh = mesh.resized(mesh.devices[0], {batch_axis(mesh): replicas})
            lowered = self._lower(function, mesh, microbatches, decided, again)
        return Sharded(
            lowered.function,
            mesh,
            microbatches,
            function.inputs,
            lowered.inputs,
            lowered.outputs,
            {axis.name: decided[parts[0]] for axis, parts in cut.items()},
            dp,
            lowered.needs_dp,
            function.notes,
            self.made,
        )

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
            choices = (mesh, *[decision.choices for decision in decided.values()], again)
            like = self.like.get(choices)
            found = lower(function, self.known, mesh, microbatches, decided, again, like)
            found = replace(found, function=shared(found.function))
            self.like[choices] = like or found
            if len(self.lowered) >= MOST_FUNCTIONS:
                oldest = self.lowered.pop(next(iter(self.lowered))).function
                self.results = {k: known for k, known in self.results.items() if known.function is not oldest}
                self.like = {k: known for k, known in self.like.items() if known.function is not oldest}
            self.lowered[key] = found
        return found


_KNOWN = Cache[Function, _FunctionSharding]("what is known of the division of a function", 1)
