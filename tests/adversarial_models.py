"""What the adversarial tests share: building models that are wrong."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from distsim.errors import ImportModelError
from distsim.importer import import_from_onnx

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def info(name, shape, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model_of(nodes, inputs=None, outputs=None, stored=(), opset=20, functions=(), domains=()):
    inputs = [info("x", [2, 3])] if inputs is None else inputs
    outputs = [info("y", None)] if outputs is None else outputs
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(stored))
    opsets = [helper.make_opsetid("", opset), *[helper.make_opsetid(domain, 1) for domain in domains]]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def refused(path, *words, **arguments):
    """Import must fail with an ImportModelError whose text has all the words."""
    with pytest.raises(ImportModelError) as caught:
        import_from_onnx(path, **arguments)
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text


# Graphs


def node(op_type, inputs, outputs, name="bad", **attributes):
    return helper.make_node(op_type, inputs, outputs, name, **attributes)


# Local functions


def function(name, nodes, inputs=("a",), outputs=("b",)):
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("loc", 1)]
    return helper.make_function("loc", name, list(inputs), list(outputs), nodes, opsets)
