"""The meaning of a function: NumPy over every rank of every mesh, one op after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.errors import DistsimError, SimulationError, TypeRuleError
from distsim.ir import Function, Mesh, Op, Tensor, Value, place_of
from distsim.ir.type import from_numpy
from distsim.ir.value import Attributes
from distsim.ops import compute, operator
from distsim.ops.operator import Communication

Array = npt.NDArray[Any]
Ranks = Array | list[Array]
"""One array, or for a value on a mesh one array per device, in the order of ``mesh.devices``."""


class SequentialExecutor:
    """Computes functions with NumPy, to say what they mean and to check what transforms made of them."""

    def compute(self, function: Function, inputs: Iterable[Any]) -> list[Ranks]:
        """Return the outputs of ``function`` for these inputs.

        A value on a mesh is a list of arrays in the order of ``mesh.devices``, every other value one
        array; one array given for a value on a mesh is what every rank holds. Arrays may be wider than
        the type says (float64 for float32): their kind must agree. Do not write to the results: ranks
        that hold the same may share one array. Raises :class:`SimulationError` naming the input or the
        op, what was expected and what is there.

        >>> from distsim.ir import Float, FunctionMaker, Tensor
        >>> maker = FunctionMaker("f")
        >>> x = maker.add_input_value("x", Tensor(Float(), (2,)))
        >>> y = maker.add_op("Add", inputs=[x, x])
        >>> SequentialExecutor().compute(maker.finalize(), [np.array([1.0, 2.0], np.float32)])
        [array([2., 4.], dtype=float32)]
        """
        given = list(inputs)
        if len(given) != len(function.inputs):
            names = ", ".join(value.name for value in function.inputs)
            raise SimulationError(
                f"{function.name} takes {len(function.inputs)} inputs ({names}), {len(given)} given"
            )
        checked = [_check_input(function, *pair) for pair in zip(function.inputs, given, strict=True)]
        return _run(function, checked, {})


@dataclass(frozen=True, slots=True)
class _Last:
    """For each op, the values that nothing reads after it; and the inputs that nothing reads at all."""

    after: tuple[tuple[Value, ...], ...]
    unread: tuple[Value, ...]


def _last_uses(function: Function) -> _Last:
    seen = set(function.outputs)
    after: list[tuple[Value, ...]] = []
    for op in reversed(function.ops):
        dying = tuple(dict.fromkeys(v for v in (*op.inputs, *op.outputs) if v not in seen))
        seen.update(dying)
        after.append(dying)
    return _Last(tuple(reversed(after)), tuple(v for v in function.inputs if v not in seen))


def _run(function: Function, arguments: list[Ranks], memo: dict[Function, _Last]) -> list[Ranks]:
    last = memo.get(function)
    if last is None:
        last = memo[function] = _last_uses(function)
    env = dict(zip(function.inputs, arguments, strict=True))
    arguments.clear()  # so that the caller's list keeps nothing alive
    for value in last.unread:
        env.pop(value, None)
    for op, dying in zip(function.ops, last.after, strict=True):
        operands = [env[value] for value in op.inputs]
        if op.subfunctions:
            for value in dying:
                env.pop(value, None)
            results = _run(op.callee, operands, memo)
        else:
            results = _compute(function, op, operands)
        env.update(zip(op.outputs, results, strict=True))
        del operands, results
        for value in dying:
            env.pop(value, None)
    return [env[value] for value in function.outputs]


def _compute(function: Function, op: Op, operands: Sequence[Ranks]) -> list[Ranks]:
    try:
        if operator(op.op_type).communication is not None:
            results = _communicate(op, operands)
        else:
            results = _compute_ranks(op, operands)
    except DistsimError as error:
        raise type(error)(f"{function.name}: {op!r}: {error}") from error
    except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, RuntimeError) as error:
        raise SimulationError(f"{function.name}: {op!r} cannot be computed: {error!r}") from error
    for index, value in enumerate(op.outputs):
        place = place_of(value)
        if isinstance(place, Mesh) and not isinstance(results[index], list):  # made from nothing: a constant
            results[index] = [np.asarray(results[index])] * len(place.devices)
    for value, result in zip(op.outputs, results, strict=True):
        _check_result(function, op, value, result)
    return results


def _compute_ranks(op: Op, operands: Sequence[Ranks]) -> list[Ranks]:
    """Run a compute op on every rank, once for ranks that hold the very same arrays."""
    count = next((len(operand) for operand in operands if isinstance(operand, list)), None)
    if count is None:
        return list(compute(op.op_type, op.attributes, op.version, _arrays(operands, 0), len(op.outputs)))
    done: dict[tuple[int, ...], tuple[Array, ...]] = {}
    ranks: list[tuple[Array, ...]] = []
    for rank in range(count):
        arrays = _arrays(operands, rank)
        key = tuple([id(array) for array in arrays])
        if key not in done:
            done[key] = compute(op.op_type, op.attributes, op.version, arrays, len(op.outputs))
        ranks.append(done[key])
    return [[results[index] for results in ranks] for index in range(len(op.outputs))]


def _arrays(operands: Sequence[Ranks], rank: int) -> list[Array]:
    return [operand[rank] if isinstance(operand, list) else operand for operand in operands]


def _communicate(op: Op, operands: Sequence[Ranks]) -> list[Ranks]:
    meaning = operator(op.op_type).communication
    if meaning is None:
        raise SimulationError(f"{op.op_type} moves nothing")
    if meaning.transfers:
        operand = operands[0]
        made = meaning.compute(op.attributes, operand if isinstance(operand, list) else [operand])
        return [list(made) if isinstance(place_of(op.outputs[0]), Mesh) else np.asarray(made[0])]
    if meaning.operand is None:
        return [_over_axis(op, meaning, op.attributes, operands[0])]
    moved = operands[:: len(operands) // len(op.outputs)]
    own = [meaning.operand(op.attributes, place) for place in range(len(moved))]
    return [_over_axis(op, meaning, each, operand) for each, operand in zip(own, moved, strict=True)]


def _over_axis(op: Op, meaning: Communication, attributes: Attributes, operand: Ranks) -> Ranks:
    """Return what the groups of an axis make of a value."""
    mesh = place_of(op.inputs[0])
    if not isinstance(mesh, Mesh) or not isinstance(operand, list):
        raise SimulationError(f"{op.op_type} runs over a mesh axis; its input is on {mesh}")
    index = {device: rank for rank, device in enumerate(mesh.devices)}
    result: list[Array] = list(operand)
    for group in mesh.groups(attributes["axis"]):
        members = [index[device] for device in group]
        made = meaning.compute(attributes, [operand[rank] for rank in members])
        for rank, array in zip(members, made, strict=True):
            result[rank] = array
    return result


# --- checks ------------------------------------------------------------------------------------------


def _check_input(function: Function, value: Value, given: Any) -> Ranks:
    where = f"{function.name}: input {value.name}"
    if not isinstance(value.type, Tensor):
        raise SimulationError(f"{where} has type {value.type}; only tensors can be computed")
    mesh = value.type.device
    if not isinstance(mesh, Mesh):
        if isinstance(given, (list, tuple)) and any(isinstance(item, np.ndarray) for item in _listed(given)):
            raise SimulationError(
                f"{where} is on {mesh}, which takes one array, not a list of {len(given)}"  # pyright: ignore
            )
        return _check_array(where, value.type, given)
    if not isinstance(given, (list, tuple)):
        return [_check_array(where, value.type, given)] * len(mesh)
    ranks = _listed(given)
    if len(ranks) != len(mesh):
        raise SimulationError(
            f"{where} is on {mesh}: give one array for all, or {len(mesh)}, not {len(ranks)}"
        )
    return [
        _check_array(f"{where} on {device}", value.type, item)
        for device, item in zip(mesh.devices, ranks, strict=True)
    ]


def _listed(given: Any) -> list[Any]:
    return list(given)


def _check_array(where: str, expected: Tensor, given: Any) -> Array:
    array: Array = np.asarray(given)
    if array.shape != expected.shape:
        raise SimulationError(f"{where}: expected shape {expected.shape} ({expected}), got {array.shape}")
    if _kind(array) != _kind(np.empty((), expected.dtype.np)):
        raise SimulationError(f"{where}: expected {expected.dtype.name} elements, got {array.dtype}")
    return array


def _check_result(function: Function, op: Op, value: Value, result: Ranks) -> None:
    expected = value.type
    if not isinstance(expected, Tensor):
        return
    for array in result if isinstance(result, list) else [result]:
        if array.shape != expected.shape:
            raise SimulationError(
                f"{function.name}: {op!r} computes {value.name} of shape {array.shape}, "
                f"its type says {expected}"
            )


def _kind(array: Array) -> str:
    """Real, integer or boolean: what must agree between an array and its type."""
    try:
        floating = from_numpy(array.dtype).is_floating
    except TypeRuleError:
        return str(array.dtype)
    return "real" if floating else "boolean" if array.dtype.kind == "b" else "integer"
