"""shard: one function for all ranks of a (dp, tp) mesh, with the collectives that it needs.

The batch is divided over data-parallel ranks and, in the same way, over microbatches: space and time.
What is partial over microbatches is accumulated (a marker op, ``Accumulate``), what is partial over
ranks is all-reduced. Over ``tp`` ranks the parameters' dimensions are divided, whichever way moves
the fewest bytes; the column-then-row pattern of Megatron-LM (Shoeybi et al. 2019) is what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distsim.buckets import Buckets
from distsim.cache import Cache
from distsim.errors import PlanError
from distsim.ir import Device, Function, Mesh, Role, Value, callees
from distsim.ir.device import logical_mesh
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.transforms.autodiff.outputs import only_needed
from distsim.transforms.kernels.policies import KERNELS, Kernels
from distsim.transforms.sharding.axes import (
    batch_options,
    decide_batch,
    decide_tensor,
    tensor_options,
)
from distsim.transforms.sharding.choose_layouts import Decision
from distsim.transforms.sharding.constants import as_inputs, as_values
from distsim.transforms.sharding.layout import Placement
from distsim.transforms.sharding.lower import DegreeNeeded, Lowered, lower
from distsim.transforms.sharding.problem_graph import structure_of
from distsim.transforms.sharding.roles import WHOLE_BATCH, Marks, batch_inputs, propagate_both, roles

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
    gradients are reduced together, once it is cut.
    """

    function: Function
    mesh: Mesh
    microbatches: int
    sources: tuple[Value, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    batch: Decision
    tp: Decision
    dp: int
    needs_dp: bool
    remarks: tuple[str, ...] = ()
    made: tuple[Function, ...] = ()
    kernels: Kernels = KERNELS["ops"]
    buckets: Buckets | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the placement: work that is replicated, a choice not proven best."""
        tp, found = self.mesh.axis_size("tp"), list(self.remarks)
        if self.tp.divided < REPLICATION_NOTED:
            share = f"{1 - self.tp.divided:.0%}"
            found.append(f"tp={tp}: {share} of the matrix FLOPs are not divided, every tp rank does them all")
        found += [
            f"tp={tp} does not divide the vocabulary of {size}, of which each rank has all rows; pad it to "
            f"{-(-size // tp) * tp}"
            for size in self.tp.undivided
        ]
        if not (self.batch.proven and self.tp.proven):
            found.append("the placement is not proven to be the least-cost one")
        return tuple(found)

    def describe(self) -> str:
        """Return what was chosen for every input, and the bytes that each rank sends for it."""
        lines = [f"{self.function.name} on {self.mesh}, {self.microbatches} microbatches"]
        for value, placement in zip(self.sources, self.inputs, strict=True):
            lines.append(f"  {value.name}: {placement}")
        proof = "least" if self.batch.proven and self.tp.proven else "not proven least"
        lines.append(f"  bytes sent per rank ({proof}): dp {self.batch.moved:.3g}, tp {self.tp.moved:.3g}")
        return "\n".join(lines)


def shard(
    function: Function, mesh: Mesh, microbatches: int = 1, dp: int | None = None, sp: bool = False
) -> Sharded:
    """Divide ``function`` over ``mesh`` (axes dp and tp) and over ``microbatches``.

    ``function`` may be any function: forward, or joint with its backward pass and optimizer. Data
    inputs carry the batch in dimension 0. Ops that no output needs are left out, which is noted. Raises
    :class:`PlanError` naming the numbers when the batch is not divisible or an op needs the whole batch at
    once, and for a function that recomputes already.

    ``sp``: activations between the products are divided over tp in the sequence (:func:`tensor_options`).

    With ``dp``, the real number of replicas, the mesh is a pattern whose two data-parallel ranks stand
    for any number: all do the same on parts of the same shape. Everything is decided for the real
    number, only the types name the pattern. Where a collective over dp changes shapes, the pattern must
    have all replicas: the result is then on a mesh like it that has (``needs_dp``).

    What was divided before is known: a second call with equal degrees on an equal mesh costs a look-up,
    and functions that come out alike for other degrees are the same function.
    """
    memory = _KNOWN.get(function, (), lambda: _FunctionSharding(function))
    key = (mesh, microbatches, dp, sp)
    found = memory.results.get(key)
    if found is None:
        found = memory.shard(function, mesh, microbatches, mesh.axis_size("dp") if dp is None else dp, sp)
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


def _check_batch(function: Function, data: tuple[Value, ...], dp: int, microbatches: int) -> None:
    parts = dp * microbatches
    if not data and parts > 1:
        raise PlanError(f"{function.name}: dp={dp}, microbatches={microbatches}, but no input has a batch")
    for value in data[:1]:
        size = as_tensor(value.type, value.name).shape[0]
        if size % parts or size == 0:
            raise PlanError(
                f"dp={dp} times microbatches={microbatches} does not divide the batch of {size} "
                f"(input {value.name!r}); their product must be one of {_divisors(size)}"
            )


SEQUENCES = {False: (2,), True: (3,)}
"""How many dimensions data with a sequence have: integers [batch, sequence]; numbers, features behind it."""


def _check_sequence(function: Function, data: tuple[Value, ...], tp: int) -> None:
    types = [(value, as_tensor(value.type, value.name)) for value in data]
    along = [(v, t.shape[1]) for v, t in types if t.rank in SEQUENCES[t.dtype.is_floating]]
    if not along:
        raise PlanError(f"sp=on, but no input of {function.name} has a sequence (dimension 1); use sp=off")
    for value, size in along:
        if size % tp:
            raise PlanError(
                f"sp=on: tp={tp} does not divide the sequence of {size} (input {value.name!r}); use sp=off, "
                f"or tp one of {_divisors(size, 2)}"
            )


def _divisors(n: int, least: int = 1) -> str:
    found = [d for d in range(least, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found)) + (" ..." if n > 4096 else "") or "none (there is nothing to divide)"


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
        self.batch_options = batch_options(function, self.structure, divided, marks)
        self.marks, self.roles = marks, known
        self.tensor_options = {False: tensor_options(function, self.structure, known, marks)}
        self.batch: dict[tuple[int, Balance], Decision] = {}
        self.tensor: dict[tuple[int, int, int, Balance, bool], Decision] = {}
        self.lowered: dict[tuple[object, ...], Lowered] = {}
        self.results: dict[tuple[Mesh, int, int | None, bool], Sharded] = {}

    def shard(self, function: Function, mesh: Mesh, microbatches: int, dp: int, sp: bool) -> Sharded:
        function = self.rewritten or function
        tp, shown = mesh.axis_size("tp"), mesh.axis_size("dp")
        if shown not in (dp, min(dp, 2)):
            raise PlanError(f"dp={dp} on a mesh of dp={shown}; give one of dp={min(dp, 2)} or of dp={dp}")
        _check_batch(function, self.data, dp, microbatches)
        if sp:
            _check_sequence(function, self.data, tp)
            if True not in self.tensor_options:
                self.tensor_options[True] = tensor_options(
                    function, self.structure, self.roles, self.marks, sequence=True
                )
        if len(self.results) >= MOST_RESULTS:
            for known in (self.results, self.batch, self.tensor):
                known.clear()
        batch, tensor = self._decide(tp, dp, microbatches, mesh.devices[0], sp)
        try:
            lowered = self._lower(function, mesh, dp, microbatches, batch, tensor, sp)
        except DegreeNeeded:
            mesh = logical_mesh(mesh.devices[0], dp, tp)
            lowered = self._lower(function, mesh, dp, microbatches, batch, tensor, sp)
        return Sharded(
            lowered.function,
            mesh,
            microbatches,
            function.inputs,
            lowered.inputs,
            lowered.outputs,
            batch,
            tensor,
            dp,
            lowered.needs_dp,
            function.notes,
            self.made,
        )

    def _decide(
        self, tp: int, dp: int, microbatches: int, device: Device, sp: bool
    ) -> tuple[Decision, Decision]:
        balance = (device.throughput, device.peaks, device.dram_bandwidth)
        parts = dp * microbatches
        batch = self.batch.get((parts, balance))
        if batch is None:
            batch = decide_batch(self.structure, self.batch_options, parts, device)
            self.batch[parts, balance] = batch
        tensor = self.tensor.get((tp, dp, microbatches, balance, sp))
        if tensor is None:
            degrees = (tp, dp, microbatches)
            tensor = decide_tensor(self.structure, self.tensor_options[sp], degrees, batch, device)
            self.tensor[tp, dp, microbatches, balance, sp] = tensor
        return batch, tensor

    def _lower(
        self,
        function: Function,
        mesh: Mesh,
        dp: int,
        microbatches: int,
        batch: Decision,
        tensor: Decision,
        sp: bool,
    ) -> Lowered:
        """Return the local function; one whose parts and choices are the same is the same function."""
        key = (mesh, dp * microbatches, batch.choices, tensor.choices, sp)
        found = self.lowered.get(key)
        if found is None or (found.refusal and microbatches > 1):
            found = lower(function, self.known, mesh, dp, microbatches, batch, tensor, sp)
            if len(self.lowered) >= MOST_FUNCTIONS:
                oldest = self.lowered.pop(next(iter(self.lowered))).function
                self.results = {k: known for k, known in self.results.items() if known.function is not oldest}
            self.lowered[key] = found
        return found


Balance = tuple[float, tuple[tuple[str, float], ...], float]
"""The figures of a device on which the choice depends."""

_KNOWN = Cache[Function, _FunctionSharding]("what is known of the division of a function", 1)
