"""Operands that are arrays among the attributes of an op: divided as values, or whole on every rank."""

import numpy as np
import op_samples_math
import op_samples_shape
import pytest
from op_checks import Sample, assert_close, check_gradient, check_sharding, run

from distsim.errors import DistsimError
from distsim.executor import SequentialExecutor
from distsim.ir import Function, FunctionMaker, Literal
from distsim.ir.value import Attributes
from distsim.ops import operator
from distsim.ops.onnx_bridge import schema_of
from distsim.ops.places import places
from distsim.transforms.sharding.constants import as_values

LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
"""Their labels and weights are values."""


def formals_of(of: Sample) -> tuple[str, ...]:
    known = operator(of.op_type).formals
    if known:
        return known(of.attributes) if callable(known) else known
    schema = schema_of(of.op_type, of.version)
    return () if schema is None else tuple(formal.name for formal in schema.inputs)


def with_static(of: Sample) -> list[Sample]:
    """The sample with one operand of several numbers as an attribute, and with all but the first."""
    formals = formals_of(of)
    if len(of.arrays) < 2 or len(formals) < len(of.arrays) or of.op_type in LOSSES:
        return []
    index = places(formals, of.attributes, len(of.arrays))
    large = [name for name, i in index.items() if of.arrays[i].size > 1]
    found = []
    for chosen in {(name,) for name in large} | {tuple(large[1:])}:
        arrays = tuple(of.arrays[i] for name, i in index.items() if name not in chosen)
        static = {name: Literal(of.arrays[index[name]]) for name in chosen}
        variant = Sample(of.op_type, arrays, Attributes({**of.attributes, **static}), of.version, of.grads)
        if not chosen or max(array.size for array in arrays) == 1:
            continue  # an op of constants only: it is computed when a model is imported
        try:
            results = run(variant)
        except (DistsimError, ValueError, TypeError, IndexError):
            continue  # an operand that has to be a value
        for ours, whole in zip(results, run(of), strict=True):
            assert_close(ours, whole, str(variant))
        found.append(variant)
    return found


def one_op(of: Sample) -> Function:
    maker = FunctionMaker(of.op_type)
    inputs = [maker.add_input_value(f"x{i}", type_) for i, type_ in enumerate(of.types)]
    maker.set_outputs(maker.add(of.op_type, inputs, of.attributes, version=of.version))
    return maker.finalize()


def check(of: Sample) -> Sample:
    """Return what the op becomes: with its arrays as values, or as it is, and then by a rule that holds."""
    function = one_op(of)
    changed = as_values(function)
    constants = [op.attributes["value"].array for op in changed.ops[:-1]]
    if not constants:
        check_sharding(of)
        return of
    executor = SequentialExecutor()
    expected = executor.compute(function, of.arrays)
    for ours, whole in zip(executor.compute(changed, of.arrays), expected, strict=True):
        assert_close(np.asarray(ours), np.asarray(whole), str(of))
    arrays = dict(zip(changed.inputs, of.arrays, strict=True))
    arrays |= {op.outputs[0]: array for op, array in zip(changed.ops, constants, strict=False)}
    last = changed.ops[-1]
    made = Sample(of.op_type, tuple(arrays[v] for v in last.inputs), last.attributes, of.version)
    check_sharding(made)
    return made


STATIC = [
    variant for of in (*op_samples_math.SAMPLES, *op_samples_shape.SAMPLES) for variant in with_static(of)
]


@pytest.mark.parametrize("op_type", sorted({of.op_type for of in STATIC}))
def test_an_array_among_the_attributes_is_divided_as_a_value_is(op_type):
    for of in [of for of in STATIC if of.op_type == op_type]:
        check(of)
        if of.grads and operator(op_type).gradient is not None:
            try:
                emitted = check_gradient(of).samples()
            except DistsimError:  # which says that the gradient takes a value, or that there is none
                continue
            for one in emitted:
                check(one)
