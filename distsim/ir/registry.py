"""Where the IR asks for an operator's type rule, and for the attributes that it has.

The operators live one floor up (``distsim.ops``); they hand their rules down through
:func:`set_rules` when they are imported, at the latest when the first op is made. Importing distsim
does not: it takes as long as ONNX takes, and a command hears no signal meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from distsim.errors import IRError, TypeRuleError
from distsim.ir.function import Function
from distsim.ir.type import Type
from distsim.ir.value import Attributes

TypeRule = Callable[[str, Attributes, tuple[Type, ...], int | None], tuple[Type, ...]]

AttributeRule = Callable[[str, Attributes, int | None], None]

_rules: list[tuple[TypeRule, AttributeRule]] = []


def set_rules(types: TypeRule, attributes: AttributeRule) -> None:
    """Install the rule ``(op_type, attributes, input types, version) -> output types``, and the one that
    raises for attributes ``(op_type, attributes, version)`` that the operator has not."""
    _rules[:] = [(types, attributes)]


def _known() -> tuple[TypeRule, AttributeRule]:
    if not _rules:
        import_module("distsim.ops")
    return _rules[0]


def check_attributes(op_type: str, attributes: Attributes, version: int | None) -> None:
    """Raise :class:`TypeRuleError` for an attribute that an operator has not, which would change nothing."""
    _known()[1](op_type, attributes, version)


def output_types(
    op_type: str,
    attributes: Attributes,
    inputs: tuple[Type, ...],
    subfunctions: tuple[Function, ...] = (),
    version: int | None = None,
) -> tuple[Type, ...]:
    """Return the types of an op's outputs.

    Raises :class:`TypeRuleError` when the inputs do not fit and :class:`distsim.errors.UnknownOperatorError`
    when there is no such operator.
    """
    if op_type == "Call" or subfunctions:
        return _call_types(inputs, subfunctions)
    return _known()[0](op_type, attributes, inputs, version)


def _call_types(inputs: tuple[Type, ...], subfunctions: tuple[Function, ...]) -> tuple[Type, ...]:
    if len(subfunctions) != 1:
        raise IRError(f"a Call has exactly one callee, this one has {len(subfunctions)}")
    callee = subfunctions[0]
    if len(inputs) != len(callee.inputs):
        raise TypeRuleError(
            f"callee {callee.name!r} takes {len(callee.inputs)} inputs, this call gives {len(inputs)}"
        )
    for given, formal in zip(inputs, callee.inputs, strict=True):
        if given != formal.type:
            raise TypeRuleError(
                f"callee {callee.name!r} takes {formal.name}: {formal.type}, this call gives {given}"
            )
    return tuple(value.type for value in callee.outputs)
