"""Functions as text that a person can read."""

from __future__ import annotations

import sys
from typing import TextIO

from distsim.ir.function import Function, Op, callees
from distsim.ir.value import Role, Value

_BOLD, _BLUE, _RESET = "\033[1m", "\033[34m", "\033[0m"


class _ValueNames:
    """Gives every value of one function a name of its own: the second ``y`` is ``y.1``."""

    def __init__(self, function: Function) -> None:
        self._names: dict[Value, str] = {}
        self._taken: dict[str, int] = {}
        for value in function.inputs:
            self._add(value)
        for op in function.ops:
            for value in op.outputs:
                self._add(value)

    def _add(self, value: Value) -> None:
        count = self._taken.get(value.name, 0)
        self._taken[value.name] = count + 1
        self._names[value] = f"{value.name}.{count}" if count else value.name

    def __getitem__(self, value: Value) -> str:
        return self._names[value]


def pformat(function: Function, *, colour: bool = False) -> str:
    """Return the text of ``function`` and, once each, of the functions it calls.

    >>> from distsim.ir import Float, FunctionMaker, Tensor
    >>> maker = FunctionMaker("f")
    >>> x = maker.add_input_value("x", Tensor(Float(), (2, 3)))
    >>> y = maker.add_op("Relu", inputs=[x], output_names=["y"])
    >>> print(pformat(maker.finalize()))
    function f(
      x: f32[2, 3],
    ) {
      y: f32[2, 3] = Relu(x)
      return y
    }
    """
    return "\n\n".join(_format_one(f, colour) for f in (function, *reversed(callees(function))))


def cpprint(function: Function, file: TextIO | None = None) -> None:
    """Write the text of ``function`` to ``file`` (standard output), in colour on a terminal.

    >>> from distsim.models import mlp
    >>> cpprint(mlp(layers=1, width=4, batch=2))
    function mlp(
      x: f32[2, 4],
      target: f32[2, 4],
      w0: f32[4, 4],  # parameter
    ) {
      a0: f32[2, 4] = Call block_4x4(x, w0)
      loss: f32[] = Loss(a0, target, N=2)
      return loss
    }
    <BLANKLINE>
    function block_4x4(
      x: f32[2, 4],
      w0: f32[4, 4],  # parameter
    ) {
      y0: f32[2, 4] = MatMul(x, w0)
      a0: f32[2, 4] = Relu(y0)
      return a0
    }
    """
    out = file or sys.stdout
    out.write(pformat(function, colour=out.isatty()) + "\n")


def _format_one(function: Function, colour: bool) -> str:
    names = _ValueNames(function)
    lines = [*[f"# {note}" for note in function.notes], f"function {function.name}("]
    for value in function.inputs:
        role = "" if value.role is Role.INPUT else f"  # {value.role.value}"
        lines.append(f"  {names[value]}: {value.type},{role}")
    lines.append(") {")
    lines.extend(f"  {_format_op(op, names, colour)}" for op in function.ops)
    lines.append(f"  return {', '.join(names[value] for value in function.outputs)}")
    lines.append("}")
    return "\n".join(lines)


def _format_op(op: Op, names: _ValueNames, colour: bool) -> str:
    outputs = ", ".join(f"{names[value]}: {value.type}" for value in op.outputs)
    head = op.op_type if op.version is None else f"{op.op_type}.{op.version}"
    if op.subfunctions:
        head = f"{head} {op.callee.name}"
    if colour:
        head = f"{_BOLD}{_BLUE}{head}{_RESET}"
    arguments = [names[value] for value in op.inputs]
    arguments += [f"{key}={value}" for key, value in op.attributes.items()]
    return f"{outputs} = {head}({', '.join(arguments)})"
