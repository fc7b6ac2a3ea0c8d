"""Sums over microbatches that work within a microbatch waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distsim.errors import PlanError
from distsim.ir import Environment, Function, Op, rewire_op, rewrite, substitute
from distsim.ir.rewrite import inline
from distsim.transforms.op_graph import Numbered, numbered


def without_early_sums(local: Function, microbatches: int) -> Numbered:
    """Return the function without marks of sums that a microbatch waits for: with one they are there already.

    A Call waits as a whole for all that it reads, and hides what is the same for every microbatch. One in the
    way is written out: of a callee with a loss and its trained weight, the gradient of that weight waits for
    the loss, the rest of the backward pass does not.
    """
    function = numbered(local)
    early = _early_sums(function)
    if not early:
        return function
    calls = _calls_at(function, early.values()) if microbatches > 1 else ()
    if calls:
        return without_early_sums(inline(local, calls), microbatches)
    dropped = {function.ops[number] for number in early}
    if microbatches > 1:
        mark, reader = next((function.ops[a], function.ops[b]) for a, b in early.items())
        raise PlanError(
            f"{reader!r} needs {mark.outputs[0].name!r} of the whole batch, so the batch cannot be divided "
            f"into {microbatches} microbatches; use microbatches=1"
        )

    def change(op: Op, env: Environment) -> tuple[Op, ...]:
        if op not in dropped:
            return (rewire_op(op, env),)
        (env[op.outputs[0]],) = substitute(op.inputs[:1], env)
        return ()

    return Numbered(rewrite(local, change))


def _calls_at(function: Numbered, readers: Iterable[int]) -> set[Op]:
    """Return those of the readers that are Calls, and the Calls that make what the others read."""
    found: set[int] = set()
    for op in readers:
        called = function.ops[op].is_call
        found.update([op] if called else [function.producer[value] for value in function.reads[op]])
    return {function.ops[op] for op in found if op >= 0 and function.ops[op].is_call}


def _early_sums(function: Numbered) -> dict[int, int]:
    """Return the sums over microbatches on which work within a microbatch depends, and one such op each.

    A loss that is divided by the number of tokens in the batch, before its backward pass, is an example.
    What comes after a sum may read sums and what is the same for every microbatch, nothing else.
    """
    sums: list[frozenset[int]] = [frozenset()] * len(function.values)
    fixed = list(function.held)
    early: dict[int, int] = {}
    for index, read in enumerate(function.reads):
        before = _union([sums[v] for v in read if sums[v]])
        if early:
            before -= early.keys()
        if function.sums[index]:
            before = frozenset((index,))
        elif before and any(
            not fixed[v] and not (sums[v] - early.keys() if early else sums[v]) for v in read
        ):
            early |= dict.fromkeys(sorted(before), index)
            before = frozenset[int]()
        elif not before and all(fixed[v] for v in read):
            for value in function.makes[index]:
                fixed[value] = True
        if before:
            for value in function.makes[index]:
                sums[value] = before
    return early


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """Return the union of sets: one of them where it has all, as that of a norm over all gradients has."""
    largest = max(sets, key=len, default=frozenset[int]())
    return largest if all(each <= largest for each in sets) else largest.union(*sets)
