"""What the tests of the importer share: writing and comparing small models."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from distsim.importer import import_from_onnx
from distsim.interpret.sequential import SequentialExecutor
from distsim.ir import verify


def rng():
    return np.random.default_rng(0)


def f32(*shape):
    return rng().standard_normal(shape).astype(np.float32)


def info(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def save(path, nodes, inputs, outputs, stored=None, opset=20, functions=(), extra_opsets=()):
    """Write a model; `stored` maps names of initializers to arrays."""
    stored = [numpy_helper.from_array(array, name) for name, array in (stored or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", opset), *extra_opsets]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    onnx.save(model, path)
    return path


def run(function, values):
    return SequentialExecutor().compute(function, [values[value.name] for value in function.inputs])


def assert_same(path, feeds, **bindings):
    """The imported function gives what onnx.reference gives, and of the types it says."""
    function, values = import_from_onnx(path, load_values=True, **bindings)
    verify(function)
    model = onnx.load(path)
    flat = inline_local_functions(model) if model.functions else str(path)
    expected = ReferenceEvaluator(flat).run(None, feeds)
    found = run(function, values | feeds)
    assert [value.name for value in function.outputs] == [o.name for o in model.graph.output]
    for value, want, have in zip(function.outputs, expected, found, strict=True):
        assert value.type.shape == want.shape == have.shape
        assert value.type.dtype.np == want.dtype == have.dtype
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    return function
