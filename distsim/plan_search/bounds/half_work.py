"""What a layer takes whose backward pass is in two halves: it bounds plans whose schedules run these apart.

In the first half nothing but products for gradients of inputs is there to be computed while collectives run,
so it waits for more of them than the same products do in a whole backward pass.
"""

from __future__ import annotations

from collections import Counter

from distsim.cost.cost_model import CostModel
from distsim.plan_search.bounds.layer_figures import HalfWork
from distsim.plan_search.bounds.layer_work import BlockWork, block_work, least_of_calls, waits_between
from distsim.plan_search.bounds.spans import Spans
from distsim.program.program import Program
from distsim.simulation.maxplus.block_links import block_links
from distsim.simulation.tasks.program_ranks import program_ranks


def half_work(program: Program, cost_model: CostModel) -> HalfWork | None:
    """Return that of the last stage of a program; None where layers are not told apart or ranks differ."""
    ranks = program_ranks(program.mesh, block_links(program.table()).communication, cost_model)
    if len(program.stages) < 2 or any(len(part.members) > 1 for part in ranks.slices):
        return None
    spans, once = Spans(ranks, cost_model), {key for key, maker in program.makers().items() if maker.once}
    first, second = program.parts.halves[-1]
    passes: list[BlockWork] = []
    for block, ahead in ((program.stages[-1].forward, True), (first, False), (second, False)):
        made = block_work(block, once, spans, ahead)
        if made is None:
            return None
        passes.append(made)
    layers = passes[0].layers
    if not layers or any({*Counter(f for f, _ in one.calls).values()} != {layers} for one in passes):
        return None
    layer = sum(least_of_calls([one]).seconds for one in passes) / layers
    return HalfWork(layer, waits_between(passes[0]) + waits_between(passes[1]))
