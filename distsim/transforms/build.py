"""build_program: what a joint function becomes on a mesh, each piece of it made once."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from distsim.errors import PlanError
from distsim.executor.program import Program
from distsim.ir import Device, Function, Mesh
from distsim.ir.device import logical_mesh
from distsim.schedule import Schedule
from distsim.transforms.balance import coarse
from distsim.transforms.fsdp import fsdp as divide_parameters
from distsim.transforms.fsdp import gathered
from distsim.transforms.inline import inline
from distsim.transforms.numbered import Numbered
from distsim.transforms.outline import outline
from distsim.transforms.pipeline import Cut, cut_stages
from distsim.transforms.rematerialize import rematerialize
from distsim.transforms.shard import Sharded, shard


def build_program(
    function: Function, mesh: Mesh, schedule: Schedule, remat: str = "none", fsdp: str = "none"
) -> Program:
    """Shard a joint function over ``mesh`` (axes pp, dp, tp) and cut it into the stages of ``schedule``.

    The composition behind :func:`parallel_transform_3d` and :func:`distsim.parallelize.parallelize`.
    Blocks that a flat function repeats become Calls first, and Calls that are too large to make
    balanced stages are written out. What was made of the function before, for other degrees or another
    order, is used again: a known division costs a look-up.

    ``remat`` is the text of a policy (:func:`distsim.transforms.rematerialize.policy_named`): what backward
    computes again in place of saving it. It is applied to what every rank runs, so that collectives are
    seen, and before Calls are written out, so that blocks are. ``fsdp`` divides parameters over dp:
    ``reshard`` gathers them again for backward, ``keep`` keeps what forward gathered (:mod:`fsdp`).
    """
    if fsdp not in FSDP:
        raise PlanError(f"fsdp={fsdp!r} is not one of {', '.join(FSDP)}")
    memory = _MEMORIES.get(function)
    if memory is None:
        memory = _MEMORIES[function] = _Memory(function)
    pp, dp, tp = (mesh.axis_size(axis) for axis in ("pp", "dp", "tp"))
    figures = logical_mesh(mesh.devices[0], 1, 1).devices[0]  # which of equal devices it is does not matter
    key = (pp, dp, tp, schedule.num_microbatches, figures, remat, "none" if dp == 1 else fsdp)
    found = memory.cuts.get(key)
    if found is None:
        found = memory.cut(function, key)
    return found.program(mesh, schedule)


MOST_VALUES = 12_000_000
"""How many inputs and outputs the cuts that are remembered of one function may have together; the oldest
are forgotten first. These are 1,300 cuts of a GPT of 96 layers under Adam, 1.5 MB each."""


Division = tuple[int, int, int, int, Device, str, str]
"""pp, dp, tp, microbatches, a device with the figures of those that run it, remat and fsdp."""

FSDP = ("none", "reshard", "keep")
"""Whether parameters are divided over dp, and what becomes of what forward gathered."""


class _Memory:
    """What was made of one function, which it does not refer to: it is forgotten with the function."""

    def __init__(self, function: Function) -> None:
        flat = not any(op.op_type == "Call" for op in function.ops)
        outlined = outline(updates_last(function)) if flat else function
        self.outlined = None if outlined is function else outlined
        self.numbered = [Numbered(outlined)]
        self.written: list[Function] = []  # with one level of Calls written out, with two, ...
        self.cuts: dict[Division, Cut] = {}
        self.keys: dict[Cut, list[Division]] = {}  # plans may share a cut
        self.size = 0

    def cut(self, function: Function, division: Division) -> Cut:
        """Return ``function`` divided and cut for the devices of the division."""
        pp, dp, tp, microbatches, figures, remat, fsdp = division
        level, written = self._balanced(function, pp, figures)
        plain = remat == "none" and fsdp == "none"
        outlined = function if self.outlined is None else self.outlined
        shown = min(dp, 2) if fsdp == "none" else dp
        local = shard(written if plain else outlined, logical_mesh(figures, shown, tp), microbatches, dp)
        if not plain:
            local = _rematerialized(local, remat, fsdp, figures, level)
        found = cut_stages(local, pp, figures)
        self._keep(division, found)
        return found

    def _keep(self, key: Division, cut: Cut) -> None:
        self.cuts[key] = cut
        if cut not in self.keys:
            self.size += _size(cut)
        self.keys.setdefault(cut, []).append(key)
        while self.size > MOST_VALUES and len(self.keys) > 1:
            oldest = next(iter(self.keys))
            self.size -= _size(oldest)
            for known in self.keys.pop(oldest):
                del self.cuts[known]

    def _balanced(self, function: Function, pp: int, figures: Device) -> tuple[int, Function]:
        """Write out Calls until they make ``pp`` balanced stages; return how many levels, and the result."""
        current = function if self.outlined is None else self.outlined
        level = 0
        while coarse(self.numbered[level], pp, figures):
            if level == len(self.written):
                self.written.append(inline(current))
                self.numbered.append(Numbered(self.written[level]))
            current = self.written[level]
            level += 1
        return level, current


def _rematerialized(local: Sharded, remat: str, fsdp: str, figures: Device, levels: int) -> Sharded:
    """Return what recomputes by a policy, with so many levels of Calls written out then; made once."""
    known = _REMATERIALIZED.setdefault(local.function, {})
    key = (remat, fsdp, figures, levels)
    found = known.get(key)
    if found is None:
        divided = local if fsdp == "none" else divide_parameters(local)
        tags = gathered(divided.function, fsdp == "reshard")
        made = rematerialize(divided.function, remat, tags, device=figures)
        for _ in range(levels):
            made = inline(made)
        found = known[key] = replace(divided, function=made)
    return replace(found, microbatches=local.microbatches, dp=local.dp)


def updates_last(function: Function) -> Function:
    """Return the function with the ops that only make outputs, as updates do, after all others.

    Updates that follow each gradient at once would be of one block with it, and a sum over microbatches
    lies between the two.
    """
    read = {value for op in function.ops for value in op.inputs}
    last = [op for op in function.ops if op.inputs and not any(value in read for value in op.outputs)]
    if len(last) < 2:
        return function
    held = set(last)
    ops = (*[op for op in function.ops if op not in held], *last)
    return replace(function, ops=ops)


def _size(cut: Cut) -> int:
    return len(cut.inputs) + len(cut.outputs)


_MEMORIES: WeakKeyDictionary[Function, _Memory] = WeakKeyDictionary()

_REMATERIALIZED: WeakKeyDictionary[Function, dict[tuple[object, ...], Sharded]] = WeakKeyDictionary()
"""By local function what recomputes: cuts of it are shared as those of the local function are."""
