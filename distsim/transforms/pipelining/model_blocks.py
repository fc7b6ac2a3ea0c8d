"""The blocks of a model, contiguous forward ops that make sense as a stage, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from distsim.cost.cost_model import CostModel, DeviceCosts
from distsim.errors import PartitionError, PlanError
from distsim.ir import Function, Mesh, Op, Role
from distsim.ops import signature_of, work
from distsim.schedule import gpipe
from distsim.stage_balance import BlockCost, default_split, program_costs
from distsim.transforms.autodiff.loss import only_needed
from distsim.transforms.outlining.lift import lift_weights
from distsim.transforms.outlining.outline import outline
from distsim.transforms.pipelining.pipeline import Starts, cut_stages, to_cut
from distsim.transforms.sharding.degrees import BATCH
from distsim.transforms.sharding.shard import Sharded, shard

MOST_SHOWN = 16
"""How many names of blocks an error shows."""
MOST_BLOCKS = 256
"""How many blocks a function is divided into at most, where splits are searched."""


def default_layers(layers: int, count: int) -> tuple[int, ...]:
    """Return how many layers each stage has under ``stages=default``; raises :class:`PlanError`."""
    try:
        return default_split(layers, count)
    except PartitionError as error:
        raise PlanError(f"stages=default: {error}, or stages=even, which may begin within layers") from error


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

    def counted(self, stages: str, count: int) -> tuple[int, ...]:
        """Return the first blocks of ``count`` stages where ``stages`` of a plan counts layers.

        ``default`` counts them as torchtitan does (:func:`default_split`), ``layers`` gives each stage
        equally many, as Megatron-LM does; what comes before the first layer (the embedding) is on the first
        stage, what follows the last (norm, output head) on the last one.

        Raises :class:`PlanError` without layers, for layers that do not come out even, when
        ``default_split`` refuses, and when a stage without layers would hold nothing else either.
        """
        layers = self.layers.count(True)
        if not layers:
            raise PlanError(
                f"stages={stages} counts layers, but the function repeats no block; use stages=even or auto"
            )
        if stages == "layers":
            return self._by_layers(stages, self._equal(layers, count))
        return self._by_layers(stages, default_layers(layers, count))

    def split(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the first blocks of stages that hold so many each, () if the sizes do not come out.

        Sizes that sum to all layers count those, and what lies around them as ``layers`` of a plan does;
        sizes that sum to all blocks count every block.
        """
        if sum(sizes) == self.layers.count(True):
            return self._by_layers("-".join(map(str, sizes)), sizes)
        return tuple(accumulate(sizes[:-1], initial=0)) if sum(sizes) == len(self) and all(sizes) else ()

    @property
    def described(self) -> str:
        """How many layers and other blocks there are, and their names."""
        shown = [name if layer else f"({name})" for name, layer in zip(self.names, self.layers, strict=True)]
        if len(shown) > MOST_SHOWN:
            shown[MOST_SHOWN // 2 : -MOST_SHOWN // 2] = ["..."]
        layers = self.layers.count(True)
        return f"the model has {layers} layers and {len(self) - layers} other blocks, {', '.join(shown)}"

    def _equal(self, layers: int, count: int) -> tuple[int, ...]:
        if layers % count:
            least, more = divmod(layers, count)
            uneven = "-".join([str(least + (stage < more)) for stage in range(count)])
            other = f"stages={uneven}" if least and count <= MOST_SHOWN else "stages=default or auto"
            most = max(n for n in range(1, min(layers, count) + 1) if layers % n == 0)
            raise PlanError(
                f"stages=layers: {layers} layers do not make {count} equal stages; use {most} stages, or "
                f"{other} ({self.described})"
            )
        return (layers // count,) * count

    def _by_layers(self, stages: str, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the first blocks of stages with so many layers each."""
        layers = [block for block, layer in enumerate(self.layers) if layer]
        after = layers[-1] + 1
        held = 0
        firsts = [0]
        for size in sizes[:-1]:
            held += size
            firsts.append(layers[held] if held < len(layers) else after)
        if firsts[-1] == len(self) or sorted({*firsts}) != firsts:
            raise PlanError(
                f"stages={stages} leaves a stage of {len(sizes)} empty: {len(layers)} layers, {layers[0]} "
                f"blocks before and {len(self) - after} after them; use fewer stages, stages=even or auto"
            )
        return tuple(firsts)


def model_blocks(local: Sharded, costs: DeviceCosts, most: int = MOST_BLOCKS) -> ModelBlocks:
    """Return the blocks of a sharded joint function, whose ops take time by ``costs``.

    Of more than ``most`` the lightest neighbours become one.
    """
    function = to_cut(local)
    timed = [(op, cost) for op, cost in function.seconds(costs).items() if cost > 0]
    starts: list[int] = []
    work: list[float] = []
    for place, (op, cost) in enumerate(timed):
        before = function.ops[timed[place - 1][0]] if place else None
        called = function.ops[op].is_call
        if before is None or called or before.is_call or _multiplies(function.ops[op]):
            starts.append(place)
            work.append(0.0)
        work[-1] += cost
    while len(starts) > most:
        pairs = [a + b for a, b in pairwise(work)]
        lightest = pairs.index(min(pairs))
        work[lightest : lightest + 2] = [pairs[lightest]]
        del starts[lightest + 1]
    ops = [function.ops[timed[place][0]] for place in starts]
    # A layer is called as people call it, what lies around layers by what it makes.
    names = tuple([op.name if op.is_call and op.name else op.outputs[0].name for op in ops])
    return ModelBlocks(tuple(starts), names, tuple([op.is_call for op in ops]))


def _multiplies(op: Op) -> bool:
    """Whether an op is a product with parameters."""
    demand = None if op.is_call else work(signature_of(op))
    return demand is not None and demand.matrix and any(v.role is Role.PARAMETER for v in op.inputs)


def costs_of(
    local: Sharded,
    blocks: ModelBlocks,
    slice_: Mesh,
    cost_model: CostModel,
    halves: bool = False,
) -> tuple[BlockCost, ...]:
    """Return what the blocks cost on a slice (axes dp, tp) of the mesh that runs one stage."""
    count = len(blocks)
    cut = cut_stages(local, count, cost_model.on(slice_.devices[0]), blocks.starts)
    # Each block is a stage on ranks of its own, which lie nowhere; all are timed on the slice.
    devices = [replace(slice_.devices[0], id=number) for number in range(count * len(slice_))]
    program = cut.program(Mesh(devices, slice_.views, pp=count, **dict(slice_.axes)), gpipe(count, 2))
    return program_costs(program, cost_model, blocks.names, slice_, halves)


def block_costs(
    function: Function, cost_model: CostModel, mesh: Mesh | None = None, microbatches: int = 1
) -> tuple[BlockCost, ...]:
    """Return what the blocks of a joint function cost, from its ops: what :func:`auto_split` takes.

    A repeated layer is a block, so are the embedding, the final norm and the output head. Recomputation
    that the function holds is part of its block's backward. ``mesh`` has the axes (:class:`RankAxes`) over
    which the function is sharded: the devices of one stage, by default the first of the cost model's
    topology. Seconds are those of one of ``microbatches``. Raises :class:`PlanError` when the function cannot
    be divided so.

    >>> from distsim.cost import CostModel
    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import gpt
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(gpt(layers=2, hidden=64, heads=4, seq=32, batch=4, vocab=128), SGD())
    >>> blocks = block_costs(step, CostModel(load_cluster("dgx-a100")))
    >>> len(blocks), all(block.forward > 0 for block in blocks)
    (5, True)
    """
    if mesh is None:
        mesh = Mesh(cost_model.topology.devices[:1], dp=1, tp=1)
    function = only_needed(function, function.outputs, "no output needs it")
    if not any(op.is_call for op in function.ops):
        function = outline(function)
    function = lift_weights(function)
    costs = cost_model.on(mesh.devices[0])
    shown = {axis: min(size, 2) for axis, size in mesh.axes if axis in BATCH}
    local = shard(function, mesh.resized(costs.device, shown), microbatches, mesh.axis_size("dp"))
    return costs_of(local, model_blocks(local, costs), mesh, cost_model)
