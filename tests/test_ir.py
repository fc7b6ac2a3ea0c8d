"""The IR: every rule that a function may break is an error that names the op and the value."""

import dataclasses
import io

import pytest

from distsim.errors import DistsimError, IRError, TypeRuleError, UnknownOperatorError
from distsim.ir import (
    Device,
    Float,
    Float64,
    Function,
    FunctionMaker,
    Mesh,
    Op,
    Role,
    Tensor,
    Value,
    all_ops,
    callees,
    copy_function,
    count_ops,
    cpprint,
    pformat,
    retype_op,
    rewire_op,
    rewrite,
    substitute,
    verify,
)
from distsim.models import mlp

F23 = Tensor(Float(), (2, 3))


def devices(count: int) -> list[Device]:
    return [Device(i, "gpu") for i in range(count)]


def relu(x: Value, name: str = "y") -> Op:
    return Op("Relu", (x,), (Value(name, x.type),))


def function(inputs, ops, outputs) -> Function:
    """A function made by hand, which nothing has checked yet."""
    return Function("f", tuple(inputs), tuple(ops), tuple(outputs))


def test_a_correct_function_passes():
    x = Value("x", F23)
    op = relu(x)
    verify(function([x], [op], op.outputs))


def test_an_op_reads_only_what_is_defined_before_it():
    x = Value("x", F23)
    second = relu((first := relu(x, "first")).outputs[0], "second")
    with pytest.raises(IRError, match=r"f: op 0 \(second = Relu\(first\)\) reads 'first'"):
        verify(function([x], [second, first], second.outputs))


def test_a_value_has_one_producer():
    x, y = Value("x", F23), Value("y", F23)
    ops = [Op("Relu", (x,), (y,)), Op("Neg", (x,), (y,))]
    cases = [
        ([x], ops, r"'y' is produced by op 1 \(y = Neg\(x\)\).*op 0 \(y = Relu\(x\)\)"),
        ([x, y], ops[:1], r"'y' is produced by op 0 \(y = Relu\(x\)\) and before that by an input"),
        ([x, x], [], "'x' is produced by an input and before that by an input"),
    ]
    for inputs, made, words in cases:
        with pytest.raises(IRError, match=words):
            verify(function(inputs, made, [x]))


def test_outputs_are_defined():
    x, y = Value("x", F23), Value("y", F23)
    with pytest.raises(IRError, match="f: output 'y' is defined by no op or input"):
        verify(function([x], [], [y]))


def test_the_number_of_outputs_is_that_of_the_operator():
    x, y, z = (Value(name, F23) for name in "xyz")
    with pytest.raises(IRError, match=r"op 0 \(y, z = Relu\(x\)\) has 2 outputs, Relu makes 1"):
        verify(function([x], [Op("Relu", (x,), (y, z))], [y]))


def test_the_type_of_an_output_is_that_of_the_rule():
    x, y = Value("x", F23), Value("y", Tensor(Float(), (3, 2)))
    op = Op("Relu", (x,), (y,))
    with pytest.raises(IRError, match=r"'y' of type f32\[3, 2\]; the rule of Relu says f32\[2, 3\]"):
        verify(function([x], [op], [y]))


A, B = Value("a", F23), Value("b", F23)
GPU0, GPU1 = devices(2)
BAD_OPS = {
    "too few operands": (Op("MatMul", (A,), (Value("y", F23),)), TypeRuleError, "MatMul"),
    "too many operands": (Op("Relu", (A, B), (Value("y", F23),)), TypeRuleError, "Relu"),
    "shapes do not fit": (Op("MatMul", (A, B), (Value("y", F23),)), TypeRuleError, "MatMul"),
    "element types differ": (
        Op("Add", (A, Value("b", Tensor(Float64(), (2, 3)))), (Value("y", F23),)),
        TypeRuleError,
        "double|float64",
    ),
    "devices differ": (
        Op("Add", (Value("a", F23.on(GPU0)), Value("b", F23.on(GPU1))), (Value("y", F23.on(GPU0)),)),
        TypeRuleError,
        "gpu:0.*gpu:1",
    ),
    "unknown operator": (Op("Frobnicate", (A,), (Value("y", F23),)), UnknownOperatorError, "'Frobnicate'"),
    "a Call without a callee": (Op("Call", (A,), (Value("y", F23),)), IRError, "exactly one callee"),
}


@pytest.mark.parametrize("case", BAD_OPS)
def test_verify_names_the_op_whose_operands_do_not_fit(case):
    op, error, words = BAD_OPS[case]
    with pytest.raises(error, match=words) as caught:
        verify(function(op.inputs, [op], op.outputs))
    assert isinstance(caught.value, DistsimError)
    assert repr(op) in str(caught.value), f"{case}: the op is not named in: {caught.value}"


@pytest.mark.parametrize("case", BAD_OPS)
def test_the_maker_names_the_op_whose_operands_do_not_fit(case):
    op, error, words = BAD_OPS[case]
    maker = FunctionMaker("f")
    inputs = [maker.add_input_value(value.name, value.type) for value in op.inputs]
    with pytest.raises(error, match=words) as caught:
        maker.add_op(op.op_type, inputs=inputs)
    message = str(caught.value)
    assert message.startswith(f"f: {op.op_type}("), message
    assert all(repr(value) in message for value in op.inputs), message


def callee(type_: Tensor = F23) -> Function:
    maker = FunctionMaker("inner")
    x = maker.add_input_value("x", type_)
    maker.add_op("Relu", inputs=[x], output_names=["y"])
    return maker.finalize()


def test_a_call_gives_what_its_callee_takes():
    turned = Value("x", Tensor(Float(), (3, 2)))
    for inputs, words in (
        ((A, B), "'inner' takes 1 inputs, this call gives 2"),
        ((), "'inner' takes 1 inputs, this call gives 0"),
        ((turned,), r"'inner' takes x: f32\[2, 3\], this call gives f32\[3, 2\]"),
    ):
        op = Op("Call", inputs, (Value("y", F23),), subfunctions=(callee(),))
        with pytest.raises(TypeRuleError, match=words):
            verify(function(inputs, [op], op.outputs))


def test_verify_looks_into_callees():
    y = Value("y", Tensor(Float(), (3, 2)))
    inner = Function("inner", (A,), (Op("Relu", (A,), (y,)),), (y,))
    op = Op("Call", (B,), (Value("z", y.type),), subfunctions=(inner,))
    with pytest.raises(IRError, match="inner: op 0"):
        verify(function([B], [op], op.outputs))


def test_the_maker_takes_its_own_values_and_a_name_for_each_output():
    maker, other = FunctionMaker("f"), FunctionMaker("g")
    x, foreign = maker.add_input_value("x", F23), other.add_input_value("foreign", F23)
    with pytest.raises(IRError, match=r"f: Relu .* reads foreign: f32\[2, 3\], which is not a value"):
        maker.add_op("Relu", inputs=[foreign])
    with pytest.raises(IRError, match=r"Relu makes 1 outputs, 2 names given"):
        maker.add_op("Relu", inputs=[x], output_names=["a", "b"])


def test_add_op_returns_one_value_or_a_tuple():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (2, 4)))
    assert isinstance(maker.add_op("Relu", inputs=[x]), Value)
    parts = maker.add_op("Split", inputs=[x], attributes={"axis": 1, "num_outputs": 2})
    assert [part.type.shape for part in parts] == [(2, 2), (2, 2)]


def test_without_set_outputs_what_nobody_reads_is_returned():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", F23)
    y = maker.add_op("Relu", inputs=[x])
    z, w = maker.add_op("Neg", inputs=[y]), maker.add_op("Abs", inputs=[y])
    assert maker.finalize().outputs == (z, w)
    maker.set_outputs([y, x])
    assert maker.finalize().outputs == (y, x)


def test_functions_values_and_ops_are_frozen():
    f = callee()
    for thing, name in ((f, "ops"), (f.ops[0], "inputs"), (f.inputs[0], "type"), (F23, "shape")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, ())
    assert isinstance(f.ops, tuple) and isinstance(f.inputs, tuple) and isinstance(f.outputs, tuple)


def test_a_finalized_function_does_not_change_with_its_maker():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", F23)
    y = maker.add_op("Relu", inputs=[x])
    f = maker.finalize()
    maker.add_op("Neg", inputs=[y])
    assert (len(f.ops), f.outputs) == (1, (y,))


def test_roles_select_inputs():
    maker = FunctionMaker("f")
    made = {role: maker.add_input_value(role.value, F23, role) for role in Role}
    maker.set_outputs(list(made.values()))
    f = maker.finalize()
    assert f.parameters == (made[Role.PARAMETER],)
    assert f.inputs_with(Role.STATE, Role.INPUT) == (made[Role.INPUT], made[Role.STATE])


def nested() -> Function:
    """top calls outer twice, outer calls inner twice and has an op of its own: 2 * (2 * 1 + 1) ops."""
    inner = callee()
    outer = FunctionMaker("outer")
    x = outer.add_input_value("x", F23)
    for _ in range(2):
        x = outer.add_op("Call", inputs=[x], subfunctions=[inner])
    outer.add_op("Neg", inputs=[x])
    middle, top = outer.finalize(), FunctionMaker("top")
    x = top.add_input_value("x", F23)
    for _ in range(2):
        x = top.add_op("Call", inputs=[x], subfunctions=[middle])
    return top.finalize()


def test_calls_are_counted_written_out_and_callees_listed_once():
    f = nested()
    assert count_ops(f) == 6
    assert [op.op_type for op in all_ops(f)] == ["Relu", "Relu", "Neg"] * 2
    assert [g.name for g in callees(f)] == ["inner", "outer"]


def test_the_text_of_a_small_function():
    maker = FunctionMaker("small")
    x = maker.add_input_value("x", F23)
    w = maker.add_input_value("w", Tensor(Float(), (3, 4)), Role.PARAMETER)
    y = maker.add_op("MatMul", inputs=[x, w], output_names=["y"])
    y = maker.add_op("Softmax", inputs=[y], attributes={"axis": -1}, output_names=["y"])
    maker.add_op("Split", inputs=[y], attributes={"axis": 1, "split": [1, 3]}, output_names=["a", "b"])
    expected = """\
function small(
  x: f32[2, 3],
  w: f32[3, 4],  # parameter
) {
  y: f32[2, 4] = MatMul(x, w)
  y.1: f32[2, 4] = Softmax(y, axis=-1)
  a: f32[2, 1], b: f32[2, 3] = Split(y.1, axis=1, split=(1, 3))
  return a, b
}"""
    assert pformat(maker.finalize()) == expected


def test_the_text_of_a_function_with_calls_prints_each_callee_once():
    expected = """\
function top(
  x: f32[2, 3],
) {
  call0: f32[2, 3] = Call outer(x)
  call1: f32[2, 3] = Call outer(call0)
  return call1
}

function outer(
  x: f32[2, 3],
) {
  call0: f32[2, 3] = Call inner(x)
  call1: f32[2, 3] = Call inner(call0)
  neg2: f32[2, 3] = Neg(call1)
  return neg2
}

function inner(
  x: f32[2, 3],
) {
  y: f32[2, 3] = Relu(x)
  return y
}"""
    assert pformat(nested()) == expected


def test_the_text_of_a_function_on_a_mesh():
    mesh = Mesh(devices(4), dp=2, tp=2)
    maker = FunctionMaker("sharded")
    x = maker.add_input_value("x", F23.on(mesh))
    w = maker.add_input_value("w", Tensor(Float(), (3, 4), mesh), Role.PARAMETER)
    y = maker.add_op("MatMul", inputs=[x, w], output_names=["y"])
    maker.add_op("MPIAllgather", inputs=[y], attributes={"axis": "tp", "dim": 1}, output_names=["z"])
    expected = """\
function sharded(
  x: f32[2, 3] @ Mesh(dp=2, tp=2)[gpu:0..gpu:3],
  w: f32[3, 4] @ Mesh(dp=2, tp=2)[gpu:0..gpu:3],  # parameter
) {
  y: f32[2, 4] @ Mesh(dp=2, tp=2)[gpu:0..gpu:3] = MatMul(x, w)
  z: f32[2, 8] @ Mesh(dp=2, tp=2)[gpu:0..gpu:3] = MPIAllgather(y, axis=tp, dim=1)
  return z
}"""
    assert pformat(maker.finalize()) == expected


def test_cpprint_writes_the_text_and_no_colour_to_a_file():
    out = io.StringIO()
    cpprint(callee(), out)
    assert out.getvalue() == pformat(callee()) + "\n"
    assert "\033" in pformat(callee(), colour=True)


def test_rewrite_shares_what_does_not_change():
    function = mlp(layers=2, width=4, batch=2)
    assert rewrite(function, lambda op, env: (rewire_op(op, env),)) is function
    copy = copy_function(function)
    assert pformat(copy) == pformat(function)
    own = {value for op in function.ops for value in (*op.inputs, *op.outputs)}
    assert own.isdisjoint(value for op in copy.ops for value in (*op.inputs, *op.outputs))


def test_what_stands_for_a_dropped_value_is_read_in_its_place():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (2,)))
    y = maker.add_op("Relu", inputs=[x])
    maker.set_outputs([maker.add_op("Exp", inputs=[y]), y])

    def without_relu(op, env):
        if op.op_type != "Relu":
            return (rewire_op(op, env),)
        (env[op.outputs[0]],) = substitute(op.inputs, env)
        return ()

    made = rewrite(maker.finalize(), without_relu)
    assert [(op.op_type, op.inputs) for op in made.ops] == [("Exp", (x,))]
    assert made.outputs == (made.ops[0].outputs[0], x)


def test_an_op_that_does_not_fit_its_new_types_is_named():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (2, 3)))
    y = maker.add_input_value("y", Tensor(Float(), (3, 4)))
    maker.add_op("MatMul", inputs=[x, y], output_names=["xy"])
    (op,) = maker.finalize().ops
    with pytest.raises(TypeRuleError, match=r"f: xy = MatMul\(.*does not fit its new input types"):
        retype_op(op, {x: Value("x", Tensor(Float(), (2, 5)))}, "f")
