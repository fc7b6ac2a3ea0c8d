"""Blocks for the tests of backward halves, and what is true of all halves."""

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from random import Random

import numpy as np
from program_models import Inventor
from topology_models import invent_topology

from distsim.cost.demand import runs_kernel
from distsim.executor import SequentialExecutor
from distsim.ir import Function, FunctionMaker, Mesh, Value, all_ops, needed_ops, verify
from distsim.ir.rewrite import flatten
from distsim.ops import signature_of, work
from distsim.program.block import Block

Halves = tuple[Block, Block]


def flops(*functions: Function, products: bool = False) -> float:
    """The FLOPs of functions, in whatever order; of their matrix products only, if asked for."""
    demands = [work(signature_of(op)) for function in functions for op in all_ops(function)]
    return fsum(each.flops for each in demands if each is not None and (each.matrix or not products))


def random_blocks(seed: int) -> list[Block]:
    rng = Random(seed)
    pp, dp, tp = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 2)
    mesh = Mesh(invent_topology(rng, pp * dp * tp).devices, pp=pp, dp=dp, tp=tp)
    return [block for blocks in Inventor(rng, mesh).per_microbatch() for block in blocks]


def block_of(maker: FunctionMaker, *outputs: Value) -> Block:
    maker.set_outputs(outputs)
    function = maker.finalize()
    keys = [[Value(v.name, v.type) for v in values] for values in (function.inputs, function.outputs)]
    return Block(function, tuple(keys[0]), tuple(keys[1]))


def needs_a_sum(block: Block, waited: Sequence[Value]) -> bool:
    """Whether in any microbatch but the first what is waited for follows from a sum, Calls written out."""
    if not block.accumulated:
        return False
    whole = flatten(block.accumulating)
    places = [block.outputs.index(key) for key in waited]
    outputs = [whole.outputs[place] for place in places]
    needed = {*outputs, *(v for op in needed_ops(whole.ops, outputs) for v in op.inputs)}
    return bool(needed & {*whole.inputs[len(block.inputs) :]})


def joined(block: Block, halves: Halves) -> Block:
    """Return a block that calls I, then W, and reads and makes what the whole block does."""
    first, second = halves

    def function(whole: Function, last: Function) -> Function:
        maker = FunctionMaker(whole.name)
        maker.adopt_inputs([Value(value.name, value.type, value.role) for value in whole.inputs])
        there = dict(zip(block.inputs, maker.inputs, strict=False))
        sums = maker.inputs[len(block.inputs) :]
        for half, called, more in ((first, first.function, []), (second, last, sums)):
            made = maker.add("Call", [there[key] for key in half.inputs] + more, subfunctions=[called])
            there.update(zip(half.outputs, made, strict=True))
        maker.set_outputs([there[key] for key in block.outputs])
        return maker.finalize()

    more = function(block.accumulating, second.accumulating) if block.accumulated else None
    return replace(
        block,
        function=function(block.function, second.function),
        accumulating=more,
        names=(),
        accumulating_names=(),
    )


def local_inputs(function: Function, seed: int) -> list:
    """Random values for the inputs, of each rank its own."""
    rng = np.random.default_rng(seed)

    def draw(value: Value) -> np.ndarray:
        if not value.type.dtype.is_floating:
            return rng.integers(0, 2, value.type.shape).astype(value.type.dtype.np)
        return rng.standard_normal(value.type.shape)

    return [
        [draw(value) for _ in value.type.device.devices]
        if isinstance(value.type.device, Mesh)
        else draw(value)
        for value in function.inputs
    ]


def assert_equal_functions(made: Function, expected: Function) -> None:
    inputs = local_inputs(expected, 0)
    compute = SequentialExecutor().compute
    for value, a, b in zip(
        expected.outputs, compute(made, list(inputs)), compute(expected, list(inputs)), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=value.name)


def assert_halves(block: Block, halves: Halves, waited: Sequence[Value]) -> Block:
    """Check what is true of all halves; return the block that runs them one after the other."""
    first, second = halves
    whole = joined(block, halves)
    for function in (
        first.function,
        second.function,
        second.accumulating,
        whole.function,
        whole.accumulating,
    ):
        if function is not None:
            verify(function)
    assert_equal_functions(whole.function, block.function)
    assert flops(first.function, second.function) == flops(block.function)
    if block.accumulated:
        assert_equal_functions(whole.accumulating, block.accumulating)
        assert flops(first.function, second.accumulating) == flops(block.accumulating)
    assert {*waited} <= {*first.outputs} and second.accumulated == block.accumulated
    assert not {*first.outputs} & {*second.outputs}
    own = [key for key in first.outputs if key not in block.outputs]
    assert {*own} <= {*second.inputs} and {*first.inputs, *second.inputs} <= {*block.inputs, *first.outputs}
    # What only passes takes time to make and is in nobody else's memory, and each op of I has a reader.
    maker = {value: op for op in first.function.ops for value in op.outputs}
    passing = [maker[v] for key, v in zip(first.outputs, first.function.outputs, strict=True) if key in own]
    assert all(op.is_call or runs_kernel(op.op_type) for op in passing)
    needed = needed_ops(first.function.ops, first.function.outputs[: len(first.outputs) - len(own)])
    assert first is block or needed == list(first.function.ops)
    if first is not block and second is not block:
        for half, kept in ((first, first.names), (second, second.names)):
            assert len(kept) == len(half.function.ops) or not block.names
            assert {*kept} <= {*block.names}
        assert (
            len(second.accumulating_names) == len(second.accumulating.ops)
            if second.accumulating_names
            else True
        )
    return whole
