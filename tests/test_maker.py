"""What :class:`FunctionMaker` refuses, and what to give instead."""

import numpy as np
import pytest

from distsim.errors import IRError, TypeRuleError
from distsim.importer import load_model
from distsim.ir import Float, FunctionMaker, Literal, Tensor, callees
from distsim.transforms import SGD, differentiate

F23 = Tensor(Float(), (2, 3))


@pytest.mark.parametrize(
    ("op_type", "attributes", "message"),
    [
        ("ReduceMean", {"axis": 1}, "ReduceMean has no attribute 'axis'; .*; did you mean axes?"),
        ("Softmax", {"dim": 0}, "Softmax has no attribute 'dim'; it has axis, and its operands input where"),
        (
            "Reshape",
            {"size": (6,)},
            "Reshape has no attribute 'size'; it has allowzero, and its operands data, ",
        ),
        ("Dropout", {"p": 0.1}, "Dropout has no attribute 'p'; it has seed, and its operands data, ratio, "),
    ],
)
def test_an_attribute_that_an_operator_has_not_is_refused(op_type, attributes, message):
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", F23)
    with pytest.raises(TypeRuleError, match=f"f: {message}"):
        maker.add_op(op_type, inputs=[x], attributes=attributes)


@pytest.mark.parametrize("model", ["gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gemma2-9b"])
def test_what_models_and_their_gradients_have_is_not_refused(model):
    """Every op of theirs may be added by hand, with the attributes of the house too."""
    forward = load_model(f"{model}:layers=2,vocab=64,seq=16", 2)
    for function in (forward, differentiate(forward, SGD())):
        for each in (*callees(function), function):
            maker = FunctionMaker(each.name)
            maker.adopt_inputs(list(dict.fromkeys(v for op in each.ops for v in (*op.inputs, *op.outputs))))
            for op in each.ops:
                maker.add_op(op.op_type, "", op.inputs, op.attributes, op.subfunctions, None, op.version)
            assert [op.op_type for op in maker.ops] == [op.op_type for op in each.ops]


def test_what_is_no_value_is_said_with_what_to_give():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", F23)
    shape = maker.add_op("Constant", attributes={"value": Literal(np.array([6]))})
    for op_type, inputs, message in (
        ("Add", [x, 1.0], r"f: Add reads 1\.0, no value; a constant operand is an attribute of its name"),
        ("Relu", x, r"f: Relu reads x: .*; give inputs=\[\.\.\.\], a list of values"),
        ("Reshape", [x, shape], "; if its shape is a constant, give it as the attribute shape"),
        ("ReduceL2", [x, shape], "; if its axes is a constant, give it as the attribute axes"),
    ):
        with pytest.raises((IRError, TypeRuleError), match=message):
            maker.add_op(op_type, inputs=inputs)
    for outputs in (x, ["x"], "x", [x, 3]):
        with pytest.raises(IRError, match=r"f cannot return .*; give a list of its values"):
            maker.set_outputs(outputs)
    with pytest.raises(IRError, match="the role of w is 'parameter'; give a Role, as Role.PARAMETER"):
        maker.add_input_value("w", F23, "parameter")
    with pytest.raises(TypeRuleError, match=r"shape 4 must be a tuple of sizes, as \(4,\)"):
        Tensor(Float(), 4)
