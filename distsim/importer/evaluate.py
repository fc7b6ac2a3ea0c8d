"""One pass over a model: what is known is computed, what is not becomes an op.

All sizes are known, so the shape of every value is a constant, and the arithmetic that exporters
write around shapes is computed here and never becomes an op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from distsim.errors import BoundsError, DistsimError, ImportModelError, ModelLimitError, TypeRuleError
from distsim.importer.folding import (
    Folder,
    repeated_axes,
    shape_constant,
    without_repeats,
)
from distsim.importer.fused import FUSED, RESULTS, add_fused, house_attributes
from distsim.importer.limits import FOLD_ELEMENTS, MAX_NAMES
from distsim.importer.nodes import (
    FunctionKey,
    check_indices,
    check_legacy,
    check_node,
    check_size,
    describe,
    key_of,
    main_domain,
    op_name,
    operator_name,
    resolved,
)
from distsim.importer.tensors import check_embedded, is_external, stored_array, stored_type
from distsim.importer.values.operands import (
    NEEDED,
    Entry,
    attributes_of,
    constant_array,
    formals_of,
    function_body,
    output_count,
    split_operands,
)
from distsim.importer.values.scope import Scope, used_names
from distsim.importer.values.sequences import SequenceSplitter, element_of
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import Tensor, as_tensor, from_numpy
from distsim.ir.value import Attributes, Literal, Role, Value
from distsim.ops.onnx_bridge import house_version
from distsim.ops.operator import Array, operator


class PartialEvaluator:
    """Runs the nodes of a model on known arrays and on values of the function being made."""

    def __init__(
        self, maker: FunctionMaker, functions: Mapping[FunctionKey, Any], folder: Path, open_external: bool
    ) -> None:
        self.maker = maker
        self.functions = functions
        self.folder = folder
        self.open_external = open_external
        self.stored: dict[Value, Callable[[], Array]] = {}
        """How to get the values of the function's inputs that the file has values for."""
        self._embedded: set[Value] = set()
        self._folder = Folder()
        self._splitter = SequenceSplitter(maker)
        self._literals: dict[Literal, Value] = {}
        self._constants: dict[int, Value] = {}  # by id of an array that _kept keeps alive
        self._kept: list[Array] = []
        self._names = 0  # characters of prefixes, see MAX_NAMES
        self._written: dict[int, Array] = {}  # by id: constants that the file holds, not computed ones

    def add_stored(self, name: str, tensor: Any, scope: Scope, limit: int = 1) -> None:
        """Define an initializer: an input of the function, or a constant when small.

        ``limit``: a floating-point tensor of rank 1 or more with more elements is a parameter.
        """
        what = f"initializer {name!r}"
        type_ = stored_type(tensor, what)
        external = is_external(tensor)
        if not external:
            check_embedded(tensor, type_, what)
        weight = type_.dtype.is_floating and type_.rank > 0 and type_.size > limit
        if not weight and not external and type_.size <= FOLD_ELEMENTS:
            array = stored_array(tensor, what, self.folder)
            self._written[id(array)] = array
            scope.define(name, array)
            return
        role = Role.PARAMETER if weight else Role.CONSTANT
        value = self.maker.add_input_value(scope.name(name), type_, role)
        self.stored[value] = partial(stored_array, tensor, what, self.folder)
        if not external:
            self._embedded.add(value)
        scope.define(name, value)

    def run(self, scope: Scope) -> None:
        """Evaluate the nodes of a scope in order."""
        for node in scope.nodes:
            try:
                self._run_node(resolved(node, scope.attributes), scope)
            except ImportModelError as error:
                if str(error).startswith("node "):
                    raise
                raise type(error)(f"{describe(node, scope.prefix)} {error}") from error
            except DistsimError as error:
                raise ImportModelError(f"{describe(node, scope.prefix)}: {error}") from error
            except MemoryError:
                raise
            except Exception as error:  # whatever a malformed node provokes in onnx or NumPy
                text = f"{type(error).__name__}: {error}"
                raise ImportModelError(f"{describe(node, scope.prefix)}: {text}") from error

    def value_of(self, entry: Entry, name: str) -> Value:
        """Return a value that holds the entry; a constant gets a ``Constant`` op, made once."""
        if isinstance(entry, Value):
            return entry
        value = self._constants.get(id(entry))
        if value is None:
            axes = repeated_axes(entry) if entry.size > FOLD_ELEMENTS else ()
            literal = Literal(without_repeats(entry) if axes else entry)
            value = self._literals.get(literal) or self._constant_op(literal, name)
            if axes:
                attributes = {"shape": Literal(np.asarray(entry.shape, np.int64))}
                value = self.maker.add(
                    "Expand", [value], attributes, output_names=[name], name=f"Expand_{name}"
                )[0]
            self._constants[id(entry)] = value
            self._kept.append(entry)
        return value

    def _constant_op(self, literal: Literal, name: str) -> Value:
        attributes = {"value": literal}
        made = self.maker.add("Constant", (), attributes, output_names=[name], name=f"Constant_{name}")
        self._literals[literal] = made[0]
        return made[0]

    def _run_node(self, node: Any, scope: Scope) -> None:
        function = self.functions.get(key_of(node))
        if function is not None:
            return self._call(function, node, scope)
        op_type = operator_name(node)
        if op_type == "If":
            return self._branch(node, scope)
        opset = scope.opsets.get("", 0)
        check_node(node, scope.opsets)
        attributes = attributes_of(node)
        if op_type == "Constant":
            return self._constant(node, attributes, scope)
        if op_type == "SequenceAt" and node.input[0] in scope.sequences:
            pieces = scope.sequences[node.input[0]]
            return scope.define(node.output[0], element_of(pieces, scope.get(node.input[1])))
        inputs = [scope.get(name) for name in node.input]
        if op_type == "SplitToSequence":
            pieces = self._splitter.pieces(inputs, attributes, scope.name(node.output[0]))
            return scope.define_sequence(node.output[0], pieces)
        if op_type == "Identity" and inputs[0] is not None:
            return scope.define(node.output[0], inputs[0])
        if op_type in ("Shape", "Size") and inputs[0] is not None:
            return scope.define(node.output[0], shape_constant(op_type, inputs[0], attributes))
        if op_type == "ConstantOfShape" and self._is_weight(inputs, attributes):
            return self._weight(node, attributes, inputs, scope)
        if op_type in ("Gather", "GatherElements"):
            check_indices(inputs, attributes, self._folder)
        if attributes.get("broadcast") and "axis" in attributes:
            check_legacy(inputs, attributes["axis"])
        if op_type == "PRelu" and opset < 7:
            inputs = self._with_slope_per_channel(inputs)
        if op_type in FUSED:
            return self._fused(node, op_type, inputs, attributes, scope)
        try:
            return self._apply(node, op_type, house_version(op_type, opset), inputs, attributes, scope)
        except TypeRuleError as error:
            body = function_body(node, op_type, opset, inputs)
            if body is None or operator(op_type).types is not None or isinstance(error, BoundsError):
                raise
            try:
                return self._call(body, node, scope)
            except ImportModelError:
                raise error from None  # of the node that the model has

    def _apply(
        self,
        node: Any,
        op_type: str,
        version: int | None,
        inputs: Sequence[Entry | None],
        attributes: dict[str, Any],
        scope: Scope,
    ) -> None:
        formals = formals_of(op_type, version)
        if op_type == "Range":  # exporters write vectors of one element where ONNX wants scalars
            inputs = [e.reshape(()) if isinstance(e, np.ndarray) and e.size == 1 else e for e in inputs]
        for index, entry in enumerate(inputs):
            name = formals.name(index) if formals is not None and index < len(formals.names) else None
            if name in NEEDED.get(op_type, ()) and isinstance(entry, Value) and entry in self.stored:
                inputs = [*inputs[:index], self._read_needed(entry, str(name)), *inputs[index + 1 :]]
        operands, static = split_operands(op_type, formals, self._folder.shrink(op_type, inputs))
        count = output_count(formals, node.output, scope.used)
        attributes |= static
        if attributes.get("num_outputs", len(node.output)) != len(node.output):
            raise ImportModelError(
                f"has num_outputs={attributes['num_outputs']} and {len(node.output)} outputs; they must agree"
            )
        if (
            count > (1 if formals is None else max(1, formals.min_outputs))
            and "num_outputs" not in attributes
        ):
            attributes["outputs"] = count
        frozen = Attributes(attributes)
        made: Sequence[Entry] | None = self._folder.fold(op_type, frozen, version, operands, count)
        if made is None:
            names = [scope.name(name) for name in node.input if name]
            stems = [*names, *[node.name or op_type] * len(operands)]
            values = [self.value_of(entry, stem) for entry, stem in zip(operands, stems, strict=False)]
            outputs = self._output_names(node, count, scope)
            made = self.maker.add(
                op_type,
                values,
                frozen,
                output_names=outputs,
                version=version,
                name=op_name(node, scope.prefix),
            )
            for value in made:
                check_size(as_tensor(value.type, value.name))
        for name, entry in zip(node.output, made, strict=False):
            if name:
                scope.define(name, entry)

    def _fused(
        self,
        node: Any,
        op_type: str,
        inputs: Sequence[Entry | None],
        attributes: dict[str, Any],
        scope: Scope,
    ) -> None:
        house = house_attributes(op_type, attributes, inputs)
        written = node if house is None else _without_results(node, RESULTS)
        if any(name in scope.used for name in written.output):
            self._call(function_body(node, op_type, scope.opsets.get("", 0), inputs), written, scope)
        if house is None:
            return
        entries = [entry for entry in self._folder.shrink(op_type, inputs) if entry is not None]
        given = [name for name in node.input if name]
        values = [self.value_of(e, scope.name(n)) for e, n in zip(entries, given, strict=True)]
        names = (op_name(node, scope.prefix), scope.name(node.output[0]))
        made = add_fused(self.maker, op_type, values, house, attributes, names)
        for name, value in zip(node.output, made, strict=False):
            check_size(as_tensor(value.type, value.name))
            if name:
                scope.define(name, value)

    def _with_slope_per_channel(self, inputs: Sequence[Entry | None]) -> Sequence[Entry | None]:
        """Return the operands of a PRelu with its slopes along the channels, as before operator set 7.

        A vector there has a slope for each channel; today it is aligned at the last dimension.
        """
        x, slope = inputs if len(inputs) == 2 else (None, None)
        if x is None or slope is None:
            return inputs
        rank, shape = shape_constant("Shape", x, {}).size, shape_constant("Shape", slope, {})
        if rank < 3 or shape.size != 1 or shape[0] == 1:
            return inputs
        axes = tuple(range(1, rank - 1))
        if isinstance(slope, np.ndarray):
            return [x, np.expand_dims(slope, axes)]
        return [x, *self.maker.add("Unsqueeze", [slope], {"axes": axes})]

    def _output_names(self, node: Any, count: int, scope: Scope) -> list[str]:
        stem = node.name or node.op_type
        given = [*node.output[:count], *[""] * (count - len(node.output))]
        return [scope.name(name) if name else f"{stem}_output_{i}" for i, name in enumerate(given)]

    def _read_needed(self, value: Value, formal: str) -> Array:
        if value not in self._embedded and not self.open_external:
            raise ImportModelError(
                f"needs the numbers of its operand {formal} ({value.name}), which are in another file: "
                "import with load_values=True"
            )
        return self.stored[value]()

    def _constant(self, node: Any, attributes: dict[str, Any], scope: Scope) -> None:
        array = constant_array(attributes)
        if array.size > FOLD_ELEMENTS:  # too large to be written into an op: an input, as an initializer
            tensor = next(a.t for a in node.attribute)
            return self.add_stored(node.output[0], tensor, scope, FOLD_ELEMENTS)
        self._written[id(array)] = array
        return scope.define(node.output[0], array)

    def _is_weight(self, inputs: Sequence[Entry | None], attributes: Mapping[str, Any]) -> bool:
        """Whether a ConstantOfShape stands for weights left out of the file.

        ``onnx``'s light models fill theirs with 0.02. The fills that programs compute with are told
        apart by their value: 0, 1, -1, and the large or infinite ones of masks.
        """
        shape, value = inputs[0], attributes.get("value")
        if (
            not isinstance(shape, np.ndarray)
            or shape.ndim != 1
            or id(shape) not in self._written
            or value is None
        ):
            return False
        fill = value.array
        if shape.size == 0 or fill.size != 1 or not from_numpy(fill.dtype).is_floating:
            return False
        return 0 < abs(float(fill.reshape(-1)[0])) < 1 and math.prod(map(int, shape)) > 1

    def _weight(
        self, node: Any, attributes: Mapping[str, Any], inputs: Sequence[Entry | None], scope: Scope
    ) -> None:
        fill: Array = attributes["value"].array.reshape(-1)[0]
        shape = tuple(int(size) for size in np.asarray(inputs[0]).reshape(-1))
        type_ = Tensor(from_numpy(fill.dtype), shape)
        check_size(type_)
        name = node.output[0]
        value = self.maker.add_input_value(scope.name(name), type_, Role.PARAMETER)
        self.stored[value] = partial(np.broadcast_to, fill, shape)  # takes no memory
        self._embedded.add(value)
        scope.define(name, value)

    def _call(self, function: Any, node: Any, scope: Scope) -> None:
        if len(node.input) > len(function.input) or len(node.output) > len(function.output):
            raise ImportModelError(
                f"calls {function.name!r} with {len(node.input)} operands for {len(node.output)} outputs; "
                f"it takes {len(function.input)} and makes {len(function.output)}"
            )
        opsets = {main_domain(o.domain): o.version for o in function.opset_import}
        prefix = self._prefix(scope, node.name or next(iter(node.output), node.op_type), function.node)
        given = {a.name: a for a in function.attribute_proto} | {a.name: a for a in node.attribute}
        names = {i: scope.name(o) for i, o in zip(function.output, node.output, strict=False) if o}
        used = used_names(function.node, function.output)
        inner = Scope(
            function.node, opsets or scope.opsets, used, prefix=prefix, names=names, attributes=given
        )
        for formal, name in zip(function.input, node.input, strict=False):
            entry = scope.get(name)
            if entry is not None:
                inner.define(formal, entry)
        self.run(inner)
        self._hand_out(node, inner, function.output, scope)

    def _prefix(self, scope: Scope, name: str, nodes: Sequence[Any]) -> str:
        """Return what stands before the names of a function's nodes and values."""
        prefix = f"{scope.prefix}{name}/"
        self._names += len(prefix) * sum(1 + len(node.output) for node in nodes)
        if self._names > MAX_NAMES:
            raise ModelLimitError(
                f"takes more than {MAX_NAMES} characters to write out the local functions with the names of "
                f"their calls: {prefix[:80]!r}..."
            )
        return prefix

    def _branch(self, node: Any, scope: Scope) -> None:
        condition = scope.get(node.input[0]) if node.input else None
        if not isinstance(condition, np.ndarray) or condition.size != 1:
            raise ImportModelError(
                "chooses its branch by data; distsim needs to know every op before the model runs: export "
                "the model with the branch decided"
            )
        wanted = "then_branch" if condition.reshape(-1)[0] else "else_branch"
        graphs = [a.g for a in node.attribute if a.name == wanted and a.type == onnx.AttributeProto.GRAPH]
        if len(graphs) != 1:
            raise ImportModelError(f"has {len(graphs)} graphs named {wanted}")
        graph, outputs = graphs[0], [info.name for info in graphs[0].output]
        names = {i: scope.name(o) for i, o in zip(outputs, node.output, strict=False) if o}
        prefix = self._prefix(scope, node.name or "If", graph.node)
        used = used_names(graph.node, outputs)
        entries = scope.entries.new_child()
        inner = Scope(graph.node, scope.opsets, used, entries, prefix, names, scope.attributes)
        inner.sequences = scope.sequences.new_child()
        for tensor in graph.initializer:
            self.add_stored(tensor.name, tensor, inner)
        self.run(inner)
        self._hand_out(node, inner, outputs, scope)

    def _hand_out(self, node: Any, inner: Scope, outputs: Sequence[str], scope: Scope) -> None:
        if len(node.output) > len(outputs):
            raise ImportModelError(f"has {len(node.output)} outputs, its body makes {len(outputs)}")
        for formal, name in zip(outputs, node.output, strict=False):
            entry = inner.get(formal) if name else None  # a body need not make what nobody asks for
            if entry is not None:
                scope.define(name, entry)


def _without_results(node: Any, count: int) -> Any:
    """Return the node without its first results, which something else makes."""
    rest = onnx.NodeProto()
    rest.CopyFrom(node)
    rest.output[:count] = [""] * min(count, len(node.output))
    return rest
