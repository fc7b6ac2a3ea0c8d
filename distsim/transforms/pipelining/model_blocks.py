"""The blocks of a model, contiguous forward ops that make sense as a stage, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from distsim.cost.cost_model import CostModel, DeviceCosts
from distsim.errors import PartitionError, PlanError
from distsim.ir import Function, Mesh, Op, Role
from distsim.ir.device import logical_mesh
from distsim.ops import signature_of, work
from distsim.schedule import gpipe
from distsim.stage_balance import BlockCost, default_split, program_costs
from distsim.transforms.autodiff.outputs import only_needed
from distsim.transforms.outlining.outline import outline
from distsim.transforms.pipelining.pipeline import Starts, cut_stages, to_cut
from distsim.transforms.sharding.shard import Sharded, shard

MOST_BLOCKS = 256
"""How many blocks a function is divided into at most; the lightest neighbours become one."""


@dataclass(frozen=True)
class ModelBlocks:
    """Where the blocks of a function begin, among its forward ops that take time, and what they are.

    A Call is a layer, a block of its own. Other ops follow the one before, unless that is a Call or they
    multiply by parameters: the embedding, the final norm and the output head become a block each.
    """

    starts: Starts
    names: tuple[str, ...]
    layers: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.starts)

    def stages(self, firsts: tuple[int, ...]) -> Starts:
        """Return where stages begin that begin with these blocks."""
        return tuple([self.starts[block] for block in firsts])

    def default(self, stages: int) -> Starts:
        """Return where stages begin by torchtitan's counting of layers; see :func:`default_split`.

        What comes before the first layer is on the first stage, what follows the last on the last one.
        Raises :class:`PlanError` without layers, when ``default_split`` refuses, and when a stage without
        layers would hold nothing else either.
        """
        layers = [block for block, layer in enumerate(self.layers) if layer]
        if not layers:
            raise PlanError(
                "stages=default counts layers, but the function repeats no block; use stages=even or auto"
            )
        after = layers[-1] + 1
        held = 0
        firsts = [0]
        try:
            sizes = default_split(len(layers), stages)
        except PartitionError as error:
            raise PlanError(f"stages=default: {error}") from error
        for size in sizes[:-1]:
            held += size
            firsts.append(layers[held] if held < len(layers) else after)
        if firsts[-1] == len(self) or sorted({*firsts}) != firsts:
            raise PlanError(
                f"stages=default leaves a stage of {stages} empty: {len(layers)} layers, {layers[0]} blocks "
                f"before and {len(self) - after} after them; use fewer stages, stages=even or stages=auto"
            )
        return self.stages(tuple(firsts))


def model_blocks(local: Sharded, costs: DeviceCosts) -> ModelBlocks:
    """Return the blocks of a sharded joint function, whose ops take time by ``costs``."""
    function = to_cut(local)
    timed = [(op, cost) for op, cost in function.seconds(costs).items() if cost > 0]
    starts: list[int] = []
    work: list[float] = []
    for place, (op, cost) in enumerate(timed):
        before = function.ops[timed[place - 1][0]] if place else None
        called = function.ops[op].op_type == "Call"
        if before is None or called or before.op_type == "Call" or _multiplies(function.ops[op]):
            starts.append(place)
            work.append(0.0)
        work[-1] += cost
    while len(starts) > MOST_BLOCKS:
        pairs = [a + b for a, b in pairwise(work)]
        lightest = pairs.index(min(pairs))
        work[lightest : lightest + 2] = [pairs[lightest]]
        del starts[lightest + 1]
    ops = [function.ops[timed[place][0]] for place in starts]
    names = tuple([op.name or op.outputs[0].name for op in ops])
    return ModelBlocks(tuple(starts), names, tuple([op.op_type == "Call" for op in ops]))


def _multiplies(op: Op) -> bool:
    """Whether an op is a product with parameters."""
    demand = None if op.op_type == "Call" else work(signature_of(op))
    return demand is not None and demand.matrix and any(v.role is Role.PARAMETER for v in op.inputs)


def costs_of(
    local: Sharded, blocks: ModelBlocks, slice_: Mesh, cost_model: CostModel
) -> tuple[BlockCost, ...]:
    """Return what the blocks cost on a slice (axes dp, tp) of the mesh that runs one stage."""
    count = len(blocks)
    cut = cut_stages(local, count, cost_model.on(slice_.devices[0]), blocks.starts)
    # Each block is a stage on ranks of its own, which lie nowhere; all are timed on the slice.
    devices = [replace(slice_.devices[0], id=number) for number in range(count * len(slice_))]
    program = cut.program(Mesh(devices, pp=count, **dict(slice_.axes)), gpipe(count, 2))
    return program_costs(program, cost_model, blocks.names, slice_)


def block_costs(
    function: Function, cost_model: CostModel, mesh: Mesh | None = None, microbatches: int = 1
) -> tuple[BlockCost, ...]:
    """Return what the blocks of a joint function cost, from its ops: what :func:`auto_split` takes.

    A repeated layer is a block, so are the embedding, the final norm and the output head. Recomputation
    that the function holds is part of its block's backward. ``mesh`` has the axes dp and tp, over which the
    function is sharded: the devices of one stage, by default the first of the cost model's topology. Seconds
    are those of one of ``microbatches``. Raises :class:`PlanError` when the function cannot be divided so.
    """
    if mesh is None:
        mesh = Mesh(cost_model.topology.devices[:1], dp=1, tp=1)
    function = only_needed(function, function.outputs, "no output needs it")
    if not any(op.op_type == "Call" for op in function.ops):
        function = outline(function)
    dp, tp = mesh.axis_size("dp"), mesh.axis_size("tp")
    costs = cost_model.on(mesh.devices[0])
    local = shard(function, logical_mesh(costs.device, min(dp, 2), tp), microbatches, dp)
    return costs_of(local, model_blocks(local, costs), mesh, cost_model)
