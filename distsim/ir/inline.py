"""inline: write out the Calls of a function."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from distsim.ir import Environment, Function, Op, copy_op, rewire_op, rewrite, substitute


def inline(function: Function, calls: Collection[Op] | None = None) -> Function:
    """Return ``function`` with its Calls, or those given, replaced by the ops of the callee (one level).

    What a Call returns keeps the names that the Call gives it.
    """

    def change(op: Op, env: Environment) -> Iterator[Op]:
        if not op.is_call or (calls is not None and op not in calls):
            yield rewire_op(op, env)
            return
        inner = dict(zip(op.callee.inputs, substitute(op.inputs, env), strict=True))
        named = {v: outer.name for v, outer in zip(op.callee.outputs, op.outputs, strict=True)}
        for part in op.callee.ops:
            name = f"{op.name}.{part.name}" if op.name and part.name else op.name or part.name
            yield copy_op(part, inner, name, [named.get(value, value.name) for value in part.outputs])
        env.update(zip(op.outputs, substitute(op.callee.outputs, inner), strict=True))

    return rewrite(function, change)
