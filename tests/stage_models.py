"""Pipelines for the tests of stages: random blocks, and Programs whose ops take exactly that."""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
from program_models import ROWS  # registers ModelWork, an op that takes as long as it says

from distsim.executor import CostModel
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Float64, FunctionMaker, Literal, Mesh, Tensor, Topology, Value
from distsim.program.block import Block
from distsim.program.parts import ProgramInput, ProgramOutput, Stage
from distsim.program.program import Program
from distsim.stage_balance import BlockCost, free_communication

FIGURES = ("shared", "shared_backward", "recompute", "accumulate", "reduce", "update")


def random_blocks(rng: Random, count: int) -> list[BlockCost]:
    """Return blocks that are equal, whole or any numbers, with or without what comes beside the work."""
    kind, rich = rng.choice(["equal", "whole", "any"]), rng.random() < 0.7
    blocks: list[BlockCost] = []
    for number in range(count):
        work = {"equal": 1.0, "whole": float(rng.randint(1, 3)), "any": rng.uniform(0.2, 3)}[kind]
        extra = {name: rng.uniform(0, 0.4) for name in FIGURES if rich and rng.random() < 0.5}
        extra["overlap"] = rng.random() * min(extra.get("reduce", 0.0), extra.get("update", 0.0))
        after = rng.uniform(0, 2 * work) if rich and rng.random() < 0.5 else 0.0
        sent, returned = float(rng.randint(0, 3)), rng.choice([None, 0.0, 2.0])
        memory = {name: float(rng.randint(0, 5)) for name in ("state", "saved", "workspace")}
        blocks.append(BlockCost(f"b{number}", work, 2 * work, sent, returned, after=after, **memory, **extra))
    return blocks


def random_communication(rng: Random):
    """Return sends that take no time, or other times between every two stages."""
    if rng.random() < 0.3:
        return free_communication
    scale, latency = rng.uniform(0.02, 0.5), rng.uniform(0, 0.2)
    return lambda source, target, nbytes: (latency + scale * nbytes) * (1 + (3 * source + target) % 4 / 4)


def splits(count: int, stages: int):
    """Yield every way to cut blocks into contiguous, non-empty stages."""
    for cuts in combinations(range(1, count), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, count), strict=True))


def program_of(costs, schedule, communication):
    """Return a Program of one stage per cost, and a cost model in which its ops take these seconds.

    Widths of values tell gradients of one stage from those of another. There are no collectives.
    """
    count = schedule.num_stages
    topology = Topology()
    devices = tuple(topology.add_device("gpu") for _ in range(count))
    mesh, pattern = Mesh(devices, pp=count, dp=1, tp=1), logical_mesh(devices[0], 1, 1)
    types = [Tensor(Float64(), (ROWS, width), pattern) for width in range(1, count + 2)]
    data = Value("data", types[0])
    given = ProgramInput(data, data, (), True, (0,))
    passed = [Value(f"x{s}", types[0]) for s in range(count)]
    gradients = [Value(f"g{s}", types[0]) for s in range(count)]
    sums = [Value(f"dw{s}", types[s + 1]) for s in range(count)]
    updated = [Value(f"w{s}", types[s + 1]) for s in range(count)]

    def work(maker, seconds, *values):
        return maker.add_op("ModelWork", inputs=values, attributes={"flops": seconds})

    def constant(maker, width):
        zeros = Literal(np.zeros((ROWS, width)))
        return maker.add_op("Constant", attributes={"value": zeros, "device": pattern})

    def forward(stage):
        maker, cost = FunctionMaker(f"forward{stage}"), costs[stage]
        read = [passed[stage - 1] if stage else given.key]
        values = [maker.add_input_value("x", types[0]) for _ in read]
        made = work(maker, cost.shared, constant(maker, 1))
        maker.set_outputs([work(maker, cost.forward, made, *values)])
        return Block(maker.finalize(), tuple(read), (passed[stage],))

    def backward(stage, accumulating):
        maker, cost = FunctionMaker(f"backward{stage}"), costs[stage]
        read = [passed[stage], *gradients[stage + 1 : stage + 2]]
        values = [maker.add_input_value("x", types[0]) for _ in read]
        so_far = [maker.add_input_value("s", types[stage + 1])] if accumulating else []
        made = work(maker, cost.shared_backward, constant(maker, 1))
        gradient = work(maker, cost.recompute + cost.backward - cost.after, made, *values)
        weight = work(maker, cost.after, constant(maker, stage + 2), gradient)
        if accumulating:
            weight = maker.add_op("AccumulateInto", inputs=[*so_far, weight])
        maker.set_outputs([gradient, weight])
        return tuple(read), maker.finalize()

    def update(stage):
        maker = FunctionMaker(f"update{stage}")
        read = maker.add_input_value("dw", types[stage + 1])
        maker.set_outputs([work(maker, costs[stage].update, read)])
        return Block(maker.finalize(), (sums[stage],), (updated[stage],))

    stages = []
    for stage in range(count):
        read, first = backward(stage, accumulating=False)
        _, more = backward(stage, accumulating=True)
        block = Block(first, read, (gradients[stage], sums[stage]), (sums[stage],), more)
        stages.append(Stage(mesh.at(pp=stage), forward(stage), block, ((0, update(stage)),)))
    outputs = tuple(ProgramOutput(key, (), False, stage) for stage, key in enumerate(updated))
    program = Program("given", mesh, pattern, tuple(stages), schedule, (given,), outputs)
    return program, CostModel(topology, rules=_Given(costs, communication))


class _Given:
    """Ops take the seconds that they say, accumulation what the stage of its width does."""

    def __init__(self, costs, communication):
        self.costs, self.communication = costs, communication

    def compute(self, signature, demand, device):
        if signature.op_type == "AccumulateInto":
            return self.costs[signature.inputs[0].shape[1] - 2].accumulate
        return signature.attributes["flops"]

    def communicate(self, kind, nbytes, group, topology):
        source, target = (device.id for device in group)
        made = self.costs[source]
        sent = made.sent if target > source else self.costs[target].gradient
        return self.communication(source, target, sent) if sent > 0 else 0.0
