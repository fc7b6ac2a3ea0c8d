"""shard: one function for all ranks of a (dp, tp) mesh, with the collectives that it needs.

The batch is divided over data-parallel ranks and, in the same way, over microbatches: space and time.
What is partial over microbatches is accumulated (a marker op, ``Accumulate``), what is partial over
ranks is all-reduced. Over ``tp`` ranks the parameters' dimensions are divided, whichever way moves
the fewest bytes; the column-then-row pattern of Megatron-LM (Shoeybi et al. 2019) is what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from distsim.errors import PlanError
from distsim.ir import Function, FunctionMaker, Literal, Mesh, Op, Role, Tensor, Value
from distsim.ir.device import logical_mesh
from distsim.ops import signature_of
from distsim.transforms.axes import batch_axis, tensor_decision
from distsim.transforms.decide import Decision, decide
from distsim.transforms.placement import (
    PARTIAL,
    REPLICATED,
    Placement,
    State,
    exchangeable,
    local_shape,
    sharded,
)
from distsim.transforms.roles import WHOLE_BATCH, batch_inputs, propagate, roles
from distsim.transforms.strategies import Strategy, rule_of

REPLICATION_NOTED = 0.95
"""Less than this share of the matrix flops divided over tp is worth a note."""


@dataclass(frozen=True)
class Sharded:
    """A function that every rank of ``mesh`` runs on one microbatch, and where its ends are.

    ``sources`` are the inputs of the function that was sharded, in the order of ``function.inputs``.
    """

    function: Function
    mesh: Mesh
    microbatches: int
    sources: tuple[Value, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    batch: Decision
    tp: Decision

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the placement: work that is replicated, a choice not proven best."""
        tp, found = self.mesh.axis_size("tp"), list[str]()
        if self.tp.divided < REPLICATION_NOTED:
            share = f"{1 - self.tp.divided:.0%}"
            found.append(f"tp={tp}: {share} of the matrix FLOPs are not divided, every tp rank does them all")
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


def shard(function: Function, mesh: Mesh, microbatches: int = 1, dp: int | None = None) -> Sharded:
    """Divide ``function`` over ``mesh`` (axes dp and tp) and over ``microbatches``.

    ``function`` may be any function: forward, or joint with its backward pass and optimizer. Data
    inputs carry the batch in dimension 0. With ``dp``, the mesh is a pattern: it stands for ``dp``
    data-parallel replicas, however many it has. Where local shapes inside depend on their number
    (something is gathered or divided again over dp), the result is on a pattern that has them all.
    Raises :class:`PlanError` naming the numbers when the batch is not divisible or an op needs the
    whole batch at once.
    """
    known = roles(function)
    dp = mesh.axis_size("dp") if dp is None else dp
    data = batch_inputs(function, known)
    _check_batch(function, data, dp, microbatches)
    batch_marks = propagate(function, dict.fromkeys(data, WHOLE_BATCH))
    batch = decide(function, batch_axis(function, data, batch_marks, dp * microbatches, mesh.devices[0]))
    tensor = tensor_decision(function, known, batch_marks, mesh, dp, microbatches, batch)
    try:
        return _Lowering(function, mesh, dp, microbatches, known, batch, tensor).result()
    except _ReplicasCountError:
        whole = logical_mesh(mesh.devices[0], dp, mesh.axis_size("tp"))
        return _Lowering(function, whole, dp, microbatches, known, batch, tensor).result()


class _ReplicasCountError(PlanError):
    """Local shapes depend on the number of replicas, which the pattern does not have."""


def _check_batch(function: Function, data: tuple[Value, ...], dp: int, microbatches: int) -> None:
    parts = dp * microbatches
    if not data and parts > 1:
        raise PlanError(f"{function.name}: dp={dp}, microbatches={microbatches}, but no input has a batch")
    for value in data[:1]:
        size = _type(value).shape[0]
        if size % parts or size == 0:
            raise PlanError(
                f"dp={dp} times microbatches={microbatches} does not divide the batch of {size} "
                f"(input {value.name!r}); their product must be one of {_divisors(size)}"
            )


def _divisors(n: int) -> str:
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found)) or "none (the batch is empty)"


class _Lowering:
    """Writes out the local function: what both decisions say, op by op."""

    def __init__(
        self,
        function: Function,
        mesh: Mesh,
        dp: int,
        microbatches: int,
        known: Mapping[Value, Role],
        batch: Decision,
        tp: Decision,
    ) -> None:
        self.function, self.mesh, self.microbatches = function, mesh, microbatches
        self.known, self.batch, self.tp = known, batch, tp
        self.dp, self.parts = dp, dp * microbatches
        self.ranks = mesh.axis_size("tp")
        self.done: dict[int, Function] = {}

    def result(self) -> Sharded:
        local = self.lower(self.function)
        return Sharded(
            local,
            self.mesh,
            self.microbatches,
            self.function.inputs,
            tuple(self.placement(value) for value in self.function.inputs),
            tuple(self.placement(value) for value in self.function.outputs),
            self.batch,
            self.tp,
        )

    def placement(self, value: Value) -> Placement:
        return Placement(self.batch.state(value), self.tp.state(value))

    def local_type(self, value: Value, placement: Placement) -> Tensor:
        shape = local_shape(_type(value).shape, placement.batch, self.parts)
        return Tensor(_type(value).dtype, local_shape(shape, placement.tp, self.ranks), self.mesh)

    def lower(self, function: Function) -> Function:
        if id(function) not in self.done:
            self.done[id(function)] = _Body(self, function).build()
        return self.done[id(function)]


class _Body:
    """Lowers one function."""

    def __init__(self, lowering: _Lowering, function: Function) -> None:
        self.lowering, self.function = lowering, function
        self.maker = FunctionMaker(function.name)
        self.made: dict[tuple[Value, Placement], Value] = {}
        self.home: dict[Value, Placement] = {}

    def build(self) -> Function:
        lowering = self.lowering
        for value in self.function.inputs:
            placement = lowering.placement(value)
            role = lowering.known.get(value, value.role)
            local = self.maker.add_input_value(value.name, lowering.local_type(value, placement), role)
            self.define(value, placement, local)
        for op in self.function.ops:
            if op.op_type == "Call":
                self.call(op)
            else:
                self.op(op)
        self.maker.set_outputs([self.read(v, lowering.placement(v)) for v in self.function.outputs])
        return self.maker.finalize()

    def define(self, value: Value, raw: Placement, local: Value) -> None:
        """Record a new value, and bring it at once to the placement in which it is handed on."""
        self.made[value, raw] = local
        self.home[value] = raw
        home = self.lowering.placement(value)
        self.made[value, home] = self.read(value, home)
        self.home[value] = home

    def read(self, value: Value, wanted: Placement) -> Value:
        """Return ``value`` in the placement that is wanted, with the collectives that this takes."""
        found = self.made.get((value, wanted))
        if found is None:
            home = self.home[value]
            found = _move(self, value, self.made[value, home], home, wanted)
            self.made[value, wanted] = found
        return found

    def op(self, op: Op) -> None:
        lowering = self.lowering
        count = len(op.inputs)
        batch, tp = lowering.batch.strategies.get(op), lowering.tp.strategies.get(op)
        ins_b = batch.inputs if batch else (REPLICATED,) * count
        ins_t = tp.inputs if tp else (REPLICATED,) * count
        inputs = [self.read(v, Placement(b, t)) for v, b, t in zip(op.inputs, ins_b, ins_t, strict=True)]
        outs_b = batch.outputs if batch else (REPLICATED,) * len(op.outputs)
        outs_t = tp.outputs if tp else (REPLICATED,) * len(op.outputs)
        raw = [Placement(b, t) for b, t in zip(outs_b, outs_t, strict=True)]
        expected = [lowering.local_type(v, p) for v, p in zip(op.outputs, raw, strict=True)]
        attributes = op.attributes
        rule = rule_of(signature_of(op))
        if rule is not None and rule.localize is not None:
            attributes = rule.localize(attributes, tuple(t.shape for t in expected))
        if not op.inputs:
            attributes = {**attributes, "device": lowering.mesh}
        names = [value.name for value in op.outputs]
        made = self.maker.add(op.op_type, inputs, attributes, (), names, op.version, op.name)
        for value, local, type_, place in zip(op.outputs, made, expected, raw, strict=True):
            if local.type != type_:
                raise PlanError(
                    f"sharding {op!r} made {local.type} where {type_} was expected: the sharding rule of "
                    f"{op.op_type} is wrong for these shapes"
                )
            self.define(value, place, self.averaged(local, batch, tp))

    def averaged(self, local: Value, batch: Strategy | None, tp: Strategy | None) -> Value:
        """A mean over one rank's part is divided by the ranks, so that the parts sum to the mean."""
        ranks = self.lowering.parts if batch and batch.mean else 1
        ranks *= self.lowering.ranks if tp and tp.mean else 1
        return share(self.maker, local, ranks)

    def call(self, op: Op) -> None:
        lowering = self.lowering
        callee = lowering.lower(op.callee)
        inputs = [
            self.read(v, lowering.placement(inner))
            for v, inner in zip(op.inputs, op.callee.inputs, strict=True)
        ]
        names = [value.name for value in op.outputs]
        made = self.maker.add("Call", inputs, op.attributes, (callee,), names, None, op.name)
        for value, inner, local in zip(op.outputs, op.callee.outputs, made, strict=True):
            self.define(value, lowering.placement(inner), local)


def share(maker: FunctionMaker, local: Value, ranks: int) -> Value:
    """Divide a value by the number of ranks, so that over them it sums to what it was."""
    if ranks == 1:
        return local
    scale = Literal(np.asarray(1.0 / ranks, _type(local).dtype.np))
    return maker.add("Mul", [local], {"B": scale}, output_names=[f"{local.name}.share"])[0]


def _move(body: _Body, value: Value, local: Value, source: Placement, target: Placement) -> Value:
    """Sum over microbatches first, so that what crosses the ranks does so once per step."""
    lowering = body.lowering
    if target.batch is PARTIAL and source.batch is not PARTIAL:
        local = share(body.maker, local, lowering.parts)
        source = Placement(PARTIAL, source.tp)
    if source.batch != target.batch:
        local = _in_time(body, value, local, source.batch)
    within = [_within(state, source.batch, lowering.parts) for state in (source.tp, target.tp)]
    local = _collective(body.maker, local, within[0], within[1], "tp")
    if lowering.dp == 1 or source.batch == target.batch:
        return local
    if (source.batch, target.batch) != (PARTIAL, REPLICATED) and lowering.mesh.axis_size("dp") != lowering.dp:
        raise _ReplicasCountError(f"{value.name}: {source.batch} to {target.batch} over dp={lowering.dp}")
    return _collective(body.maker, local, source.batch, target.batch, "dp")


def _within(state: State, batch: State, parts: int) -> State:
    """Return the state of one rank's part of the batch: of a merged dimension it has fewer pieces."""
    if not (state.pieces and batch.sharded and batch.dim == state.dim):
        return state
    return sharded(state.dim, state.pieces[: len(state.pieces) // parts])


def _in_time(body: _Body, value: Value, local: Value, source: State) -> Value:
    """Bring a value together over microbatches: mark the sum of what is partial, refuse the rest."""
    microbatches = body.lowering.microbatches
    top = body.function is body.lowering.function
    if source is PARTIAL and top:
        return body.maker.add("Accumulate", [local], output_names=[local.name])[0]
    if microbatches > 1:
        raise PlanError(
            f"{value.name}: {_WHOLE[source.kind]}, so the batch cannot be divided into {microbatches} "
            "microbatches; use microbatches=1"
        )
    return local


_WHOLE = {
    "S": "an op needs the whole batch at once",
    "R": "an op reads a part of the batch of a value that is made once for all of it",
    "P": "an op inside a layer needs a sum over the whole batch",
}


def _collective(maker: FunctionMaker, local: Value, source: State, target: State, axis: str) -> Value:
    """Add what brings a value from one state to another along a mesh axis."""
    if source == target:
        return local

    def add(op_type: str, value: Value, **attributes: object) -> Value:
        attributes = {key: item for key, item in attributes.items() if item is not None}
        return maker.add(op_type, [value], {"axis": axis, **attributes}, output_names=[local.name])[0]

    if target is PARTIAL:
        ranks = _type(local).device
        return share(maker, local, ranks.axis_size(axis) if isinstance(ranks, Mesh) else 1)
    if source is PARTIAL:
        if not target.sharded:
            return add("MPIAllreduce", local)
        return add("MPIReduceScatter", local, dim=target.dim, pieces=target.pieces)
    if source.sharded and target.sharded and exchangeable(source, target):
        return add("MPIAlltoall", local, split=target.dim, concat=source.dim)
    if source.sharded:
        local = add("MPIAllgather", local, dim=source.dim, pieces=source.pieces)
    if target.sharded:
        local = add("LocalSlice", local, dim=target.dim, pieces=target.pieces)
    return local


def _type(value: Value) -> Tensor:
    if not isinstance(value.type, Tensor):
        raise PlanError(f"{value.name} must be a tensor, not {value.type}")
    return value.type
