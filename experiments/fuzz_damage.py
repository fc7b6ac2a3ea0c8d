"""Damage to ONNX files: of bytes, and of what the bytes mean."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from fuzz_values import (
    INTEGERS,
    KINDS,
    LISTS,
    RANKS,
    TEXTS,
    damage_list,
    damage_tensor,
    fill,
    fitting,
    integer,
    real,
)
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

SCHEMAS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
Rng = random.Random


def damaged(model: ModelProto, rng: Rng) -> bytes:
    """Return the bytes of a model with damage: one time in four of the bytes, else of one to three parts."""
    if rng.random() < 0.25:
        return _bytes(model.SerializeToString(), rng)
    made = ModelProto()
    made.CopyFrom(model)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        rng.choices(tuple(DAMAGES), weights=tuple(DAMAGES.values()))[0](made, rng)
    return made.SerializeToString()


def _bytes(content: bytes, rng: Rng) -> bytes:
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place, length = rng.randrange(len(made) + 1), rng.choice((1, 1, 2, 8, 40, 300))
        kind = rng.choice((0, 0, 0, 1, 1, 1, 2, 3, 4, 5))  # the first two leave lengths as they are
        if kind == 0 and place < len(made):
            made[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(made):
            made[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del made[place : place + length]
        elif kind == 3:
            made[place:place] = rng.randbytes(length)
        elif kind == 4:
            made[place:place] = made[place : place + length]
        else:
            made = made[: max(1, place)] if rng.random() < 0.3 else made
    return bytes(made)


# What is damaged


def _graphs(model: ModelProto) -> list[Any]:
    found = [model.graph]
    for graph in found:
        found += [a.g for n in graph.node for a in n.attribute if a.type == AttributeProto.GRAPH]
    return found


def _bodies(model: ModelProto) -> list[Any]:
    return [*_graphs(model), *model.functions]


def _node(model: ModelProto, rng: Rng) -> Any:
    """One of the nodes; the last one, which most models are about, half of the time."""
    body = model.graph if rng.random() < 0.8 else rng.choice(_bodies(model))
    nodes = body.node or model.graph.node
    if not nodes:
        return NodeProto()
    return nodes[-1] if rng.random() < 0.5 else rng.choice(nodes)


def _names(model: ModelProto) -> list[str]:
    names = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return [*names, *(i.name for i in model.graph.input), *(t.name for t in model.graph.initializer), ""]


# Attributes


def _attribute_value(model: ModelProto, rng: Rng) -> None:
    node = _node(model, rng)
    if not node.attribute:
        return _attribute_added(model, rng)
    attribute = rng.choice(node.attribute)
    if attribute.type == AttributeProto.INT:
        attribute.i = integer(rng)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = real(rng)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = rng.choice((*(text.encode() for text in TEXTS), b"\xff\xfe"))
    elif attribute.type in LISTS:
        damage_list(getattr(attribute, LISTS[attribute.type]), attribute.type, rng)
    elif attribute.type == AttributeProto.TENSOR:
        damage_tensor(attribute.t, rng)
    return None


def _attribute_added(model: ModelProto, rng: Rng) -> None:
    """An attribute that the operator has, or one of another operator."""
    node = _node(model, rng)
    name = node.op_type if rng.random() < 0.8 and node.op_type in SCHEMAS else rng.choice(SCHEMAS)
    schema = rng.choice([s for s in onnx.defs.get_all_schemas_with_history() if s.name == name])
    if not schema.attributes:
        return
    attribute = rng.choice(sorted(schema.attributes))
    kind = schema.attributes[attribute].type.value if rng.random() < 0.8 else rng.randrange(1, 9)
    for known in [a for a in node.attribute if a.name == attribute]:
        if rng.random() < 0.8:
            node.attribute.remove(known)
    fill(node.attribute.add(name=attribute, type=kind), kind, rng)


def _attribute_kind(model: ModelProto, rng: Rng) -> None:
    node = _node(model, rng)
    if node.attribute:
        attribute = rng.choice(node.attribute)
        if rng.random() < 0.5:
            attribute.type = rng.randrange(0, 15)
        else:
            name = attribute.name
            attribute.Clear()
            kind = rng.randrange(1, 9)
            attribute.name, attribute.type = name, kind
            fill(attribute, kind, rng)


def _attribute_name(model: ModelProto, rng: Rng) -> None:
    node = _node(model, rng)
    if not node.attribute:
        return
    attribute = rng.choice(node.attribute)
    how = rng.randrange(4)
    if how == 0:
        node.attribute.remove(attribute)
    elif how == 1:
        node.attribute.add().CopyFrom(attribute)
    elif how == 2:
        attribute.name = rng.choice(TEXTS)
    else:
        attribute.ref_attr_name = rng.choice(("slope", "nothing", ""))


def _stored(model: ModelProto, rng: Rng) -> None:
    tensors = [t for graph in _graphs(model) for t in graph.initializer]
    small = [t for t in tensors if t.data_type == TensorProto.INT64]
    if tensors:
        damage_tensor(rng.choice(small if small and rng.random() < 0.6 else tensors), rng)


def _stored_name(model: ModelProto, rng: Rng) -> None:
    if model.graph.initializer:
        tensor = rng.choice(model.graph.initializer)
        how = rng.randrange(4)
        if how == 0:
            model.graph.initializer.remove(tensor)
        elif how == 1:
            model.graph.initializer.add().CopyFrom(tensor)
        else:
            tensor.name = rng.choice((*TEXTS, *_names(model)))


# Inputs and outputs of the graph


def _declared(model: ModelProto, rng: Rng) -> None:
    infos = [*model.graph.input, *(model.graph.output if rng.random() < 0.3 else ())]
    if not infos:
        return
    info = rng.choice(infos)
    tensor = info.type.tensor_type
    how = rng.randrange(8)
    if how == 0:
        tensor.elem_type = fitting(rng.choice((*KINDS, 2**31 - 1)), np.int32)
    elif how <= 3 and tensor.shape.dim:
        dim = rng.choice(tensor.shape.dim)
        if rng.random() < 0.3:
            dim.dim_param = rng.choice((*TEXTS, "path", "name", "parameters"))
        else:
            dim.dim_value = integer(rng)
    elif how == 4:
        size = rng.choice((1, 1, 1, 0, 2, 2**20))
        tensor.ClearField("shape")
        for _ in range(rng.choice(RANKS)):
            tensor.shape.dim.add(dim_value=size)
    elif how == 5:
        tensor.ClearField("shape")
    elif how == 6:
        info.type.Clear()
        if rng.random() < 0.5:
            info.type.sequence_type.elem_type.tensor_type.elem_type = 1
    else:
        info.name = rng.choice((*TEXTS, *_names(model)))


def _outputs(model: ModelProto, rng: Rng) -> None:
    outputs, how = model.graph.output, rng.randrange(4)
    if how == 0 and outputs:
        del outputs[rng.randrange(len(outputs))]
    elif how == 1 and outputs:
        outputs.add().CopyFrom(rng.choice(outputs))
    elif how == 2:
        outputs.add(name=rng.choice((*TEXTS, *_names(model))))
    elif model.graph.input:
        outputs.add().CopyFrom(rng.choice(model.graph.input))


# Nodes


def _operands(model: ModelProto, rng: Rng) -> None:
    node = _node(model, rng)
    places = node.input if rng.random() < 0.7 else node.output
    how = rng.randrange(7)
    if how == 0 and places:
        del places[rng.randrange(len(places))]
    elif how <= 3 and places:
        places[rng.randrange(len(places))] = rng.choice((*_names(model), *node.output, rng.choice(TEXTS)))
    elif how == 4:
        places.extend([rng.choice((*_names(model), rng.choice(TEXTS)))] * rng.choice((1, 1, 2, 5, 300)))
    elif how == 5:
        shuffled = rng.sample(list(places), len(places))
        del places[:]
        places.extend(shuffled)
    elif places:
        del places[:]


def _operator(model: ModelProto, rng: Rng) -> None:
    node, how = _node(model, rng), rng.randrange(6)
    if how <= 3:
        node.op_type = rng.choice(SCHEMAS)
    elif how == 4:
        node.op_type = rng.choice(
            ("", "Call", "MPIAllreduce", "Send", "Loss", "MatMulGrad", "SGDOptimizer", "\0")
        )
    else:
        node.domain = rng.choice(
            ("ai.onnx", "ai.onnx.ml", "loc", "com.microsoft", "a" * 2000, "ai.onnx.preview.training")
        )


def _order(model: ModelProto, rng: Rng) -> None:
    nodes, how = rng.choice(_bodies(model)).node, rng.randrange(4)
    if how == 0 and nodes:
        del nodes[rng.randrange(len(nodes))]
    elif how == 1 and nodes:
        nodes.add().CopyFrom(rng.choice(nodes))
    elif how == 2 and nodes:  # the output is read by the first node
        nodes[0].input.extend(nodes[-1].output)
    else:
        shuffled = [helper.make_node("Identity", ["x0"], ["z"]), *nodes]
        rng.shuffle(shuffled)
        copies = [NodeProto.FromString(node.SerializeToString()) for node in shuffled]
        del nodes[:]
        nodes.extend(copies)


def _node_name(model: ModelProto, rng: Rng) -> None:
    node = _node(model, rng)
    if rng.random() < 0.5:
        node.name = rng.choice((*TEXTS, "a/" * 500))
    else:
        node.metadata_props.add(key="namespace", value=rng.choice((*TEXTS, "/", ": /", "a: b/" * 200)))


# The model


def _opsets(model: ModelProto, rng: Rng) -> None:
    how = rng.randrange(5)
    if how <= 1 and model.opset_import:
        model.opset_import[0].version = rng.choice((*range(1, 28), *INTEGERS))
    elif how == 2:
        model.opset_import.add(domain=rng.choice((*TEXTS, "ai.onnx.ml")), version=integer(rng))
    elif how == 3:
        del model.opset_import[:]
    else:
        model.ir_version = integer(rng)


def _functions(model: ModelProto, rng: Rng) -> None:
    """A local function under the name of an operator, or one that calls itself or many others."""
    node, how = _node(model, rng), rng.randrange(4)
    opsets = [helper.make_opsetid("", rng.choice((20, 20, 7, 2**31))), helper.make_opsetid("loc", 1)]
    name = node.op_type if how else "F"
    body = [
        helper.make_node(name if how == 1 else rng.choice(("Relu", "F0")), ["a"], ["b"], domain=node.domain)
    ]
    model.functions.append(helper.make_function(node.domain, name or "F", ["a"], ["b"], body, opsets))
    if how == 3:
        for level in range(rng.choice((3, 40, 70, 200))):
            calls = [
                helper.make_node(f"F{level + 1}", ["a"], [f"b{i}"], domain=node.domain) for i in range(2)
            ]
            made = helper.make_function(node.domain, f"F{level}", ["a"], ["b0"], calls, opsets)
            model.functions.append(made)


def _nesting(model: ModelProto, rng: Rng) -> None:
    """Branches in branches, as deep as a file can have them, or a loop."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x0"], ["q"])], "g", [], [onnx.ValueInfoProto(name="q")]
    )
    kind = rng.choice(("If", "If", "Loop", "Scan"))
    names = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}[kind]
    for _ in range(rng.choice((1, 2, 10, 30))):
        inner = graph if rng.random() < 0.8 else helper.make_graph([], "empty", [], [])
        node = helper.make_node(kind, ["cond"], ["q"], **dict.fromkeys(names[:1], inner))
        graph = helper.make_graph([node], "g", [], [onnx.ValueInfoProto(name="q")])
    model.graph.node.extend(graph.node)
    model.graph.initializer.append(numpy_helper.from_array(np.array(rng.random() < 0.7), "cond"))
    model.graph.output.add(name="q")


DAMAGES: dict[Callable[[ModelProto, Rng], None], int] = {
    _attribute_value: 22,
    _attribute_added: 8,
    _attribute_kind: 4,
    _attribute_name: 4,
    _stored: 20,
    _stored_name: 3,
    _declared: 14,
    _outputs: 3,
    _operands: 10,
    _operator: 7,
    _order: 4,
    _node_name: 2,
    _opsets: 7,
    _functions: 2,
    _nesting: 2,
}
"""The kinds of damage, each with its share."""
