"""Keys and values saved as the last step of a ring has them, for backward to begin with.

Backward goes around the ring the other way, from where forward ended, and comes to a rank's own keys last: so
the sums of their gradients arrive in that step, not one message after it (TransformerEngine,
``context_parallel.py``, AttnFuncWithCPAndKVP2P, which saves what it has received last). To whom does not see
ranks these are the same keys and values: ``Attention`` hands them on, and ``AttentionGrad`` reads those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from distsim.cache import Cache
from distsim.ir import Environment, Function, Op, Value, callees, rewrite, rewrite_all
from distsim.ir.value import Attributes

_SAVED = Cache[Function, Function | None]("functions that save keys as a ring ends, by function", 4)

Places = dict[Function, tuple[int, int]]
"""By callee the places of keys and values among what it returns, or is given."""


def save_last_keys(function: Function) -> Function:
    """Return the function whose attentions save keys and values as the last step of a ring has them.

    Where they are saved for something else too, as heads that backward repeats again, they are the rank's
    own, as they were. Made once per function.
    """
    return _SAVED.get(function, None, lambda: _saving(function)) or function


def _saving(function: Function) -> Function | None:
    functions = (*callees(function), function)
    makers, readers = _linked(functions, _places(functions, "Attention"), _places(functions, "AttentionGrad"))

    def change(before: Function, current: Function) -> Function:
        own = {op.inputs[1:3] for op in current.ops if op.op_type == "AttentionGrad"}
        last: dict[Value, Value] = {}
        marked = partial(_marked, saved=before in makers, begins=before in readers, own=own, last=last)
        changed = rewrite(current, marked)
        if before in makers:
            changed = replace(changed, outputs=tuple([last.get(value, value) for value in changed.outputs]))
        return changed

    found = rewrite_all(function, change)
    return None if found is function else found


def _places(functions: tuple[Function, ...], op_type: str) -> Places:
    """Return where callees of one attention hand on, or are given, its keys and values, but the last."""
    found: Places = {}
    for current in functions[:-1]:
        ops = [op for op in current.ops if op.op_type == op_type]
        ends = current.outputs if op_type == "Attention" else current.inputs
        if len(ops) == 1 and all(ends.count(value) == 1 for value in ops[0].inputs[1:3]):
            key, value = ops[0].inputs[1:3]
            others = [v for op in current.ops if op is not ops[0] for v in op.inputs]
            if op_type == "Attention" or not {key, value} & {*others, *current.outputs}:
                found[current] = (ends.index(key), ends.index(value))
    return found


def _linked(functions: tuple[Function, ...], made: Places, read: Places) -> tuple[Places, Places]:
    """Return those callees of which the ones hand on keys and values to the others alone, and these get none
    but theirs."""
    while True:
        bad = set[Function]()
        for current in functions:
            source: dict[Value, tuple[Function, int]] = {}
            for op in current.ops:
                if op.is_call:
                    source |= {op.outputs[p]: (op.callee, n) for n, p in enumerate(made.get(op.callee, ()))}
            for op in current.ops:
                places = read.get(op.callee, ()) if op.is_call else ()
                for index, value in enumerate(op.inputs):
                    wanted = places.index(index) if index in places else None
                    maker, place = source.get(value, (None, None))
                    if wanted != place:
                        bad |= {each for each in (maker, op.callee if wanted is not None else None) if each}
            bad |= {source[value][0] for value in current.outputs if value in source}
        if not bad:
            return made, read
        made = {each: places for each, places in made.items() if each not in bad}
        read = {each: places for each, places in read.items() if each not in bad}


def _marked(
    op: Op,
    _: Environment,
    saved: bool,
    begins: bool,
    own: set[tuple[Value, ...]],
    last: dict[Value, Value],
) -> Iterator[Op]:
    """``saved``: for another function; ``own``: keys and values that gradients of the same function read."""
    ends, marked = op.inputs[1:3], Attributes({**op.attributes, "last": 1})
    if op.op_type == "Attention" and len(op.inputs) == 3 and (saved or ends in own):
        handed_on = [Value(value.name, value.type) for value in ends]
        last.update(zip(ends, handed_on, strict=True))
        yield replace(op, outputs=(*op.outputs, *handed_on), attributes=marked)
    elif op.op_type == "AttentionGrad" and (begins or all(value in last for value in ends)):
        given = [last.get(value, value) for value in ends]
        yield replace(op, inputs=(op.inputs[0], *given, *op.inputs[3:]), attributes=marked)
    else:
        yield op
