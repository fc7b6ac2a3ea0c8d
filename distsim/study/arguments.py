"""What calls in Python are given, as their options take it: one value where a list may be, and values of the
types that they may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from distsim.errors import OptionError, wrong_type
from distsim.plan import Plan
from distsim.plan.fields import PlanFields, PlanSets, plan_text, sets_text, several
from distsim.study.options import Model
from distsim.suggestions import did_you_mean

_SAID = {
    "model": "a name or a path, a config.json as a mapping (transformers: config.to_dict()), or a Function",
    "cluster": "one: a preset's name, the path of a .toml file, or a Topology; distsim.search takes a list",
    **dict.fromkeys(("plan", "against"), "text as dp=2,tp=4, a mapping as {'dp': 2, 'tp': 4}, or a Plan"),
}
"""What arguments may be whose types say it less well."""

_WORDS = {
    **{"str": "text", "int": "a whole number", "float": "a number", "bool": "True or False"},
    **{"NoneType": "None", "PathLike": "a path", "Sequence": "a list", "Mapping": "a mapping"},
}


def taken(call: str, given: Mapping[str, Any], known: type[Any]) -> dict[str, Any]:
    """Return the keywords of a call as its options take them: of the types that a TypedDict says, one text
    where several may be as a tuple of it, numbers of NumPy as Python's.

    Raises :class:`OptionError` for a keyword that is none of those, and for a value of another type.

    >>> from distsim.study.options import SimulationKeywords
    >>> taken("simulate", {"optimzer": "sgd"}, SimulationKeywords)
    Traceback (most recent call last):
    distsim.errors.OptionError: simulate has no option 'optimzer'; did you mean optimizer?
    >>> taken("simulate", {"seed": "3"}, SimulationKeywords)
    Traceback (most recent call last):
    distsim.errors.OptionError: seed='3' is of type str; it may be a whole number
    >>> taken("simulate", {"bind": "seq=128"}, SimulationKeywords)
    {'bind': ('seq=128',)}
    """
    hints = get_type_hints(known)
    for name in given:
        if name not in hints:
            hint = did_you_mean(name, hints) or f"; choose from {', '.join(hints)}"
            raise OptionError(f"{call} has no option {name!r}{hint}")
    return {name: argument(name, value, hints[name]) for name, value in given.items()}


def argument(name: str, value: Any, hint: Any) -> Any:
    """Return a value as one of the types of a hint; raises :class:`OptionError` for one that is of none."""
    of_union: tuple[Any, ...] = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kinds: list[type[Any]] = [get_origin(kind) or kind for kind in of_union]
    for kind in kinds:
        if _is_of(value, kind):
            return _plain(value, kind)
    words = [_WORDS.get(kind.__name__, kind.__name__) for kind in kinds]
    said = ", ".join(words[:-1]) + (" or " if words[1:] else "") + words[-1]
    raise wrong_type(name, value, _SAID.get(name, said))


def _is_of(value: Any, kind: type[Any]) -> bool:
    """Whether a value is of a type: a number of NumPy is one, True is none, and a text is a list of one."""
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if kind is Sequence:
        return isinstance(value, str) or several(value)
    return isinstance(value, kind)


def _plain(value: Any, kind: type[Any]) -> Any:
    if kind is Sequence:
        return (value,) if isinstance(value, str) else tuple(value)
    return value if kind not in _NUMBERS or isinstance(value, int) else kind(value)


_NUMBERS: Mapping[type[Any], type[Any]] = {int: Integral, float: Real}


def model_given(model: Model) -> Model:
    """Return a model; of a mapping a copy, as a table that can be sent to workers."""
    found: Model = argument("model", model, Model)
    return dict(found) if isinstance(found, Mapping) else found


def plan_given(plan: str | PlanFields | Plan | None, name: str = "plan") -> str | Plan | None:
    """Return a plan as text, None where it says nothing, or as it is."""
    argument(name, plan, str | Plan | PlanFields | None)
    return plan_text(plan) or None if isinstance(plan, Mapping) else plan


def sets_given(sets: str | PlanSets | None) -> str:
    """Return sets of values for fields of a plan as text."""
    if isinstance(sets, str | None):
        return sets or ""
    if not isinstance(sets, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong_type("plan", sets, "text as tp=1|2,remat=*, or a mapping as {'tp': [1, 2], 'remat': '*'}")
    return sets_text(sets)
