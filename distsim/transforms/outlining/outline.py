"""outline: find the block that a flat function repeats, and make it one callee."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

import numpy as np

from distsim.errors import PlanError
from distsim.ir import NO_ATTRIBUTES, Function, FunctionMaker, Op, Role, Value, callees
from distsim.transforms.outlining.blocks import find_blocks
from distsim.transforms.outlining.wiring import CallWiring, Integers

Block = tuple[int, list[int]]
"""Number of ops, and where the repetitions start, ascending."""


def outline(function: Function, products: int = 2) -> Function:
    """Return ``function`` with each repetition of a block replaced by a Call of one callee.

    A block is a stretch of at least two ops that occurs at least twice with the same operators,
    attributes, versions, callees and types and the same wiring inside; what comes from outside may be
    any value. Of the rotations of a block the one is taken whose boundary the fewest values cross (a
    transformer layer from its layer norm on), then the one that repeats most. Repetitions that differ,
    as the first or last layer may, stay written out.

    ``products``: a block has at least this many matrix products with weights, because all repetitions
    are placed alike by tensor parallelism, and by columns, then by rows takes two. Repeats with fewer are
    joined (64 layers of a product each become 32 Calls) or, where that leaves no two, not outlined.
    Repeats without products, such as updates of parameters, are grouped into as many Calls as there
    are of some block with products, or, in a function without any, outlined as they are.

    What makes scalars only is left as it is: sums over microbatches are taken there.

    Inputs, outputs and all values outside of blocks are those of ``function``, the same objects. An
    input of a callee has the role that all the Calls' operands have, else Role.INPUT. A function in
    which nothing repeats is returned as it is. Raises :class:`PlanError` unless ``products`` is
    positive.

    >>> from distsim.models import mlp
    >>> from distsim.ir.rewrite import inline
    >>> flat = inline(mlp(layers=8, width=4, batch=2))
    >>> flat, outline(flat)
    (Function('mlp', 10 inputs, 17 ops, 1 outputs), Function('mlp', 10 inputs, 5 ops, 1 outputs))
    >>> print(describe_blocks(outline(flat)))
    block0: 4 ops, called 4 times
    """
    if products < 1:
        raise PlanError(f"products={products}: a block has at least 1 matrix product")
    wiring = CallWiring(function)
    found = find_blocks(wiring, products)
    blocks = sorted(((length, starts) for (length, _), starts in found.items()), key=lambda b: b[1])
    return _BlockOutliner(wiring, blocks).run()


def describe_blocks(function: Function) -> str:
    """Return a line for each distinct callee: its ops, and how often it is called."""
    called = [callee for f in (function, *callees(function)) for op in f.ops for callee in op.subfunctions]
    counts = Counter(called)
    lines = [f"{f.name}: {len(f.ops)} ops, called {_times(count)}" for f, count in counts.items()]
    return "\n".join(lines) or "nothing repeats"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


class _BlockOutliner:
    """Writes the Calls in place of the ops."""

    def __init__(self, wiring: CallWiring, blocks: Sequence[Block]) -> None:
        self.wiring, self.blocks = wiring, blocks
        self.escaping = _escaping(wiring, blocks)
        self.calls: dict[int, tuple[int, Op]] = {}  # start -> number of ops, the Call in their place
        self.names = Names(f.name for f in (wiring.function, *callees(wiring.function)))

    def run(self) -> Function:
        wiring = self.wiring
        for block in self.blocks:
            self.outline(block)
        if not self.calls:
            return wiring.function
        maker = FunctionMaker(wiring.function.name, wiring.function.notes)
        maker.adopt_inputs(wiring.function.inputs)
        index = 0
        while index < len(wiring.ops):
            length, op = self.calls.get(index, (1, wiring.ops[index]))
            maker.adopt(op)
            index += length
        maker.set_outputs(wiring.function.outputs)
        return maker.finalize()

    def outline(self, block: Block) -> None:
        """Make the callee of isomorphic stretches of ops, and the Calls of it."""
        wiring, (length, starts) = self.wiring, block
        begin = np.array(starts)
        count = int(wiring.first[starts[0] + length] - wiring.first[starts[0]])
        results = wiring.first[begin][:, None] + np.arange(count)
        returned = np.flatnonzero(self.escaping[results].any(axis=0))
        if not len(returned):
            return  # nobody reads what it computes
        operands = wiring.block_operands(begin, length)
        outside = np.flatnonzero(operands[0] < wiring.first[starts[0]]).tolist()
        # Operands that are one value in every repetition are one input of the callee.
        columns: dict[bytes, int] = {}
        formal = {slot: columns.setdefault(operands[:, slot].tobytes(), slot) for slot in outside}
        used = sorted(columns.values())
        actual, made = self.values(operands[:, used]), self.values(results[:, returned])
        stretches = [wiring.ops[start : start + length] for start in starts]
        name, call_names, prefix = self.names.of(stretches)
        maker = FunctionMaker(name)
        inputs = {slot: _formal(maker, [row[i] for row in actual]) for i, slot in enumerate(used)}
        sources = [inputs[source] for source in map(formal.get, range(operands.shape[1])) if source in inputs]
        callee = _callee(maker, stretches[0], iter(sources), prefix, returned.tolist())
        for start, ins, outs, call_name in zip(starts, actual, made, call_names, strict=True):
            call = Op("Call", tuple(ins), tuple(outs), NO_ATTRIBUTES, (callee,), None, call_name)
            self.calls[start] = (length, call)

    def values(self, numbers: Integers) -> list[list[Value]]:
        """Return the values of a matrix of their numbers."""
        rows: list[list[int]] = numbers.tolist()
        return [[self.wiring.values[number] for number in row] for row in rows]


def _callee(
    maker: FunctionMaker, ops: Sequence[Op], outside: Iterator[Value], prefix: str, returned: Sequence[int]
) -> Function:
    """Copy ``ops``; ``outside`` gives, operand by operand, the inputs that are read."""
    copies: dict[Value, Value] = {}
    results: list[Value] = []
    for op in ops:
        operands = tuple([copies[value] if value in copies else next(outside) for value in op.inputs])
        made = tuple([Value(value.name, value.type) for value in op.outputs])
        copies.update(zip(op.outputs, made, strict=True))
        results.extend(made)
        maker.adopt(replace(op, inputs=operands, outputs=made, name=relative(op.name, prefix)))
    maker.set_outputs([results[index] for index in returned])
    return maker.finalize()


def _formal(maker: FunctionMaker, actual: Sequence[Value]) -> Value:
    roles = {value.role for value in actual}
    role = actual[0].role if len(roles) == 1 else Role.INPUT
    return maker.add_input_value(common_name(actual[0].name, actual[1].name), actual[0].type, role)


def _escaping(wiring: CallWiring, blocks: Sequence[Block]) -> Integers:
    """Return for each value whether something outside of its block reads it."""
    owner = np.arange(len(wiring.ops))  # the first op of the block that an op belongs to
    for length, starts in blocks:
        for start in starts:
            owner[start : start + length] = start
    made = wiring.made[wiring.operands]
    inside = (made >= 0) & (owner[made] == owner[wiring.readers])
    escaping = np.zeros(len(wiring.values), np.bool_)
    escaping[wiring.operands[~inside]] = True
    escaping[wiring.returned] = True
    return escaping


# --- names for blocks, their Calls and their inputs, from the module paths that an exporter noted ----


class Names:
    """Gives each block a name of its own, none of those that are taken."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def of(self, stretches: Sequence[Sequence[Op]]) -> tuple[str, list[str], str]:
        """Return the callee's name, those of the Calls, and the module of the first stretch ("": none).

        Ops named ``model.h.0.attn/node``, ``model.h.1.attn/node`` make Calls ``model.h.0``, ``model.h.1``
        of a callee ``h``; without such names it is Calls ``block0.0``, ``block0.1`` of ``block0``.
        """
        paths = [_module(ops) for ops in stretches]
        if all(paths) and len({".".join(path) for path in paths}) == len(paths):
            shared = [part for part in _common(paths) if not part.isdigit()]
            if shared:
                name = self._first(chain(shared[-1:], (f"{shared[-1]}.{number}" for number in count(1))))
                return name, [".".join(path) for path in paths], ".".join(paths[0])
        name = self._first(f"block{number}" for number in count())
        return name, [f"{name}.{index}" for index in range(len(stretches))], ""

    def _first(self, names: Iterable[str]) -> str:
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name


def relative(name: str, module: str) -> str:
    """Return an op's name within a module; a name of another module stays as it is.

    >>> relative("model.h.0.attn/node", "model.h.0"), relative("model.h.0/node", "model.h.0")
    ('attn/node', 'node')
    """
    inside = bool(module) and name.startswith((f"{module}.", f"{module}/"))
    return name[len(module) + 1 :] if inside else name


def common_name(one: str, other: str) -> str:
    """Return what two names say alike: what follows the part in which they differ, or that part's stem.

    >>> common_name("h.0.attn.weight", "h.1.attn.weight"), common_name("w0", "w2")
    ('attn.weight', 'w')
    """
    if one == other:
        return one
    left, right = one.split("."), other.split(".")
    if len(left) == len(right):
        places = [i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]]
        if rest := left[places[-1] + 1 :]:
            return ".".join(rest)
    stems = {re.sub(r"[_\d]+$", "", part) for part in (left[-1], right[-1])}
    return stems.pop() if len(stems) == 1 and "" not in stems else "x"


def _module(ops: Sequence[Op]) -> list[str]:
    """Return the innermost module that all named ops belong to."""
    return _common([op.name.rpartition("/")[0].split(".") for op in ops if "/" in op.name])


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
