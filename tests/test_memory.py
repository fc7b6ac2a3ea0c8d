"""Peak memory: liveness in program order, in-place results, views, roles, and composition over calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_models import Machine, functions

from distsim.ir import Device, Float, Function, FunctionMaker, Mesh, Op, Role, Tensor, Value
from distsim.ir.device import devices_of
from distsim.ops import Operator, operator, register
from distsim.simulation.memory.peak import KINDS, peak_memory

GPUS = tuple(Device(i, "gpu") for i in range(4))
A = GPUS[0]
NBYTES = 400  # of each value below, if nothing else is said

register(Operator("MemoryView", types=lambda a, x: (x[0],), view=True))


def f32(*shape, on=A):
    return Tensor(Float(), shape or (100,), on)


def grad(maker, a, b=None):
    return maker.add_op("LossGrad", inputs=[a, b or a], attributes={"N": 1})


def sgd(maker, w, g):
    return maker.add_op("SGDOptimizer", inputs=[w, g], attributes={"lr": 0.1})


def use_of(maker, device=A):
    return peak_memory(maker.finalize())[device]


def test_a_chain_holds_two_values_at_a_time():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    for _ in range(10):
        x = grad(maker, x)
    use = use_of(maker)
    assert (use.peak, use.end) == (2 * NBYTES, NBYTES)
    assert dict(use.by_kind) == dict.fromkeys(KINDS, 0) | {"inputs": NBYTES, "activations": NBYTES}
    assert [op.op_type for op in use.at] == ["LossGrad"]


def test_saved_values_add_up():
    maker = FunctionMaker("f")
    saved = [maker.add_input_value("x", f32())]
    for _ in range(9):
        saved.append(grad(maker, saved[-1]))
    x = saved.pop()
    for value in reversed(saved):
        x = grad(maker, x, value)
    assert use_of(maker).peak == 11 * NBYTES  # ten saved and the first gradient


@pytest.mark.parametrize("role", [Role.PARAMETER, Role.STATE, Role.CONSTANT])
def test_what_training_holds_is_there_all_the_time(role):
    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), role)
    x = grad(maker, w)
    for _ in range(3):
        x = grad(maker, x)
    use = use_of(maker)
    name = {"constant": "constants", "parameter": "parameters"}.get(role.value, role.value)
    assert (use.peak, use.end, use.by_kind[name]) == (3 * NBYTES, 2 * NBYTES, NBYTES)


def test_inputs_are_there_from_the_start_and_gone_after_their_last_use():
    maker = FunctionMaker("f")
    xs = [maker.add_input_value(f"x{i}", f32()) for i in range(5)]
    outs = [grad(maker, x) for x in xs]
    maker.set_outputs(outs[:1])
    use = use_of(maker)
    assert (use.peak, use.end) == (6 * NBYTES, NBYTES)  # results that nothing reads go at once


def test_an_input_that_nothing_reads_counts_at_the_start_only():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    maker.add_input_value("unused", f32(1000))
    maker.set_outputs([grad(maker, x)])
    use = use_of(maker)
    assert (use.peak, use.at, use.end) == (4000 + NBYTES, (), NBYTES)


def test_the_optimizer_writes_where_it_reads():
    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), Role.PARAMETER)
    g = maker.add_input_value("g", f32())
    sgd(maker, w, g)
    use = use_of(maker)
    assert (use.peak, use.end) == (2 * NBYTES, NBYTES)


def test_an_overwritten_value_that_is_read_later_is_kept_beside_the_new_one():
    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), Role.PARAMETER)
    g = maker.add_input_value("g", f32())
    new = sgd(maker, w, g)
    maker.set_outputs([new, grad(maker, w)])
    use = use_of(maker)
    assert (use.peak, use.end) == (3 * NBYTES, 2 * NBYTES)  # the old one is free then
    assert use.by_kind["parameters"] == 2 * NBYTES


def test_a_view_keeps_the_memory_and_takes_none():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    view = maker.add_op("MemoryView", inputs=[x])
    y = grad(maker, view)
    maker.set_outputs([grad(maker, y, view)])
    use = use_of(maker)
    assert (use.peak, use.end) == (3 * NBYTES, NBYTES)


def test_a_send_takes_memory_on_the_target():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    maker.add_op("Send", inputs=[x], attributes={"to": GPUS[1]})
    memory = peak_memory(maker.finalize())
    assert [(memory[gpu].peak, memory[gpu].end) for gpu in GPUS[:2]] == [(NBYTES, 0), (NBYTES, NBYTES)]
    assert memory[GPUS[1]].by_kind["communication"] == NBYTES
    assert set(memory) == set(GPUS[:2])


def test_a_gathered_weight_is_a_communication_buffer_on_every_rank():
    maker, mesh = FunctionMaker("f"), Mesh(GPUS, dp=4)
    w = maker.add_input_value("w", f32(on=mesh), Role.PARAMETER)
    whole = maker.add_op("MPIAllgather", inputs=[w], attributes={"axis": "dp", "dim": 0})
    maker.add_op("MPIReduceScatter", inputs=[whole], attributes={"axis": "dp", "dim": 0})
    memory = peak_memory(maker.finalize())
    assert {memory[gpu].peak for gpu in GPUS} == {6 * NBYTES}
    assert memory[A].by_kind["communication"] == 5 * NBYTES


def test_a_view_of_a_part_keeps_the_whole_unless_it_is_handed_out():
    """What a caller gets is as large as its type says: a part that is returned is memory of its own."""
    for returned in (False, True):
        maker = FunctionMaker("f")
        x = maker.add_input_value("x", f32())
        (part,) = maker.add("Unflatten", [grad(maker, x)], {"shape": (3, 5)})
        grad(maker, x)
        y = grad(maker, part)
        maker.set_outputs([y, part] if returned else [y])
        use = use_of(maker)
        assert (use.peak, use.end) == ((2 * NBYTES + 60, 120) if returned else (3 * NBYTES, 60))


def test_zero_3_state_is_divided_by_dp():
    for dp in (1, 2, 4):
        maker, mesh = FunctionMaker("f"), Mesh(GPUS[:dp], dp=dp)
        w = maker.add_input_value("w", f32(400 // dp, on=mesh), Role.PARAMETER)
        maker.set_outputs([w])
        assert use_of(maker).by_kind["parameters"] == 1600 // dp


# --- calls -------------------------------------------------------------------------------------------


def callee(body, *inputs):
    maker = FunctionMaker("callee")
    values = [maker.add_input_value(f"i{n}", type_) for n, type_ in enumerate(inputs)]
    maker.set_outputs(body(maker, *values))
    return maker.finalize()


def call(maker, function, *values):
    return maker.add("Call", values, subfunctions=[function])


def test_an_argument_dies_inside_the_call_when_it_is_read_no_more():
    def body(maker, x):
        for _ in range(5):
            x = grad(maker, x)
        return [x]

    deep = callee(body, f32())
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    (y,) = call(maker, deep, x)
    (z,) = call(maker, deep, y)
    maker.set_outputs([z, y])
    use = use_of(maker)
    # y is an output: it stays during the second call.
    assert (use.peak, use.end) == (3 * NBYTES, 2 * NBYTES)
    assert [op.op_type for op in use.at] == ["Call", "LossGrad"]


def test_an_update_in_a_callee_is_in_place():
    update = callee(lambda m, w, g: [sgd(m, w, g)], f32(), f32())
    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), Role.PARAMETER)
    g = maker.add_input_value("g", f32())
    call(maker, update, w, g)
    use = use_of(maker)
    assert (use.peak, use.end) == (2 * NBYTES, NBYTES)


def test_what_a_callee_overwrites_is_copied_when_it_is_read_later():
    update = callee(lambda m, w, g: [sgd(m, w, g)], f32(), f32())
    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), Role.PARAMETER)
    g = maker.add_input_value("g", f32())
    (new,) = call(maker, update, w, g)
    maker.set_outputs([grad(maker, w), new])
    use = use_of(maker)
    assert (use.peak, use.end) == (3 * NBYTES, 2 * NBYTES)


def test_what_a_callee_may_not_overwrite_gets_its_own_memory_when_the_op_runs():
    """The peak is earlier in the call, where there is no second w yet."""

    def body(maker, w, g):
        wide = maker.add_op("Concat", inputs=[g, g, g], attributes={"axis": 0})
        maker.add_op("Concat", inputs=[wide, wide], attributes={"axis": 0})
        return [sgd(maker, w, g)]

    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), Role.PARAMETER)
    g = maker.add_input_value("g", f32())
    (new,) = call(maker, callee(body, f32(), f32()), w, g)
    maker.set_outputs([new, w])
    use = use_of(maker)
    assert (use.peak, use.end) == ((2 + 3 + 6) * NBYTES, 2 * NBYTES)
    assert [op.op_type for op in use.at] == ["Call", "Concat"]


def test_what_a_callee_overwrites_for_itself_is_not_overwritten_for_its_caller():
    """The new w is read in the callee only, the old one after it."""
    step = callee(lambda m, w, g: [grad(m, sgd(m, w, g), g)], f32(), f32())
    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), Role.PARAMETER)
    g = maker.add_input_value("g", f32())
    (y,) = call(maker, callee(lambda m, *v: call(m, step, *v), f32(), f32()), w, g)
    maker.set_outputs([grad(maker, y, w)])
    assert use_of(maker).peak == 4 * NBYTES  # w, g, the new w, y


def test_what_a_callee_hands_through_is_not_copied():
    through = callee(lambda m, x: [m.add_op("MemoryView", inputs=[x]), x], f32())
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    view, same = call(maker, through, x)
    maker.set_outputs([grad(maker, view, x), grad(maker, same)])
    use = use_of(maker)
    assert (use.peak, use.end) == (3 * NBYTES, 2 * NBYTES)


def test_what_a_callee_hands_back_is_free_when_nothing_reads_it():
    update = callee(lambda m, w, g: [sgd(m, w, g)], f32(), f32())
    maker = FunctionMaker("f")
    call(maker, update, maker.add_input_value("w", f32()), maker.add_input_value("g", f32()))
    maker.set_outputs([])
    use = use_of(maker)
    assert (use.peak, use.end) == (2 * NBYTES, 0)


def test_one_result_returned_twice_is_held_once():
    def body(maker, x):
        y = grad(maker, x)
        return [y, y]

    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    y, same = call(maker, callee(body, f32()), x)
    z = grad(maker, y)
    maker.set_outputs([grad(maker, z, same)])
    use = use_of(maker)
    assert (use.peak, use.end) == (3 * NBYTES, NBYTES)


def test_an_argument_given_twice_is_freed_once():
    pair = callee(lambda m, a, b: [grad(m, a, b)], f32(), f32())
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32())
    call(maker, pair, x, x)
    use = use_of(maker)
    assert (use.peak, use.end) == (2 * NBYTES, NBYTES)


def test_many_microbatches_of_many_layers_are_cheap_and_exact():
    """1F1B on one stage: the peak is what is in flight."""

    def forward(maker, x, w):
        saved = [x]
        for _ in range(10):
            saved.append(grad(maker, saved[-1], w))
        return saved[1:]

    layer = callee(forward, f32(), f32())
    maker = FunctionMaker("f")
    w = maker.add_input_value("w", f32(), Role.PARAMETER)
    g = maker.add_input_value("g", f32(), Role.CONSTANT)
    flying, outs = [], []
    for i in range(400):
        x = maker.add_input_value(f"x{i}", f32(1))
        x = maker.add_op("Send", inputs=[x], attributes={"to": A})
        flying.append(call(maker, layer, grad(maker, g), w))
        if len(flying) == 4:
            outs.append(flying.pop(0)[0])
            del outs[:-1]
    maker.set_outputs(outs)
    use = use_of(maker)
    # Nothing reads what is saved: only the last result of a call and its argument are ever together.
    assert use.end == 3 * NBYTES
    assert use.peak >= 12 * NBYTES


def brute_force(function):
    """Bytes in use after each step, by the definition, on a function without calls."""
    readers = {v: i for i, op in enumerate(function.ops) for v in op.inputs}
    readers |= dict.fromkeys(function.outputs, len(function.ops))
    resident = {v for v in function.inputs if v.role is not Role.INPUT}
    live = list(function.inputs)
    peaks = {}

    def note():
        for device in {d for v in function.inputs for d in devices_of(v.type.device)} | set(GPUS):
            total = sum(v.type.nbytes for v in live if device in devices_of(v.type.device))
            peaks[device] = max(peaks.get(device, 0), total)

    note()
    live = [v for v in live if v in resident or v in readers]
    for i, op in enumerate(function.ops):
        live += op.outputs
        note()
        live = [v for v in live if v in resident or readers.get(v, -1) > i]
    return peaks


def inline(function, arguments, ops):
    env = dict(zip(function.inputs, arguments, strict=True))
    for op in function.ops:
        given = [env[v] for v in op.inputs]
        if op.is_call:
            results = inline(op.callee, given, ops)
            ops.append(Op("Hold", tuple(results), ()))  # what a callee returns lives until it returns
            env.update(zip(op.outputs, results, strict=True))
        else:
            made = tuple(Value(v.name, v.type) for v in op.outputs)
            ops.append(Op(op.op_type, tuple(given), made, op.attributes))
            env.update(zip(op.outputs, made, strict=True))
    return [env[v] for v in function.outputs]


@given(st.data())
@settings(max_examples=80)
def test_composition_over_calls_is_what_the_ops_written_out_give(data):
    """Without views and in-place ops, so that the definition is a few lines."""
    maker = FunctionMaker("f")
    meshes = [Mesh(GPUS[:2], dp=2), Mesh(GPUS[2:], dp=2), Mesh(GPUS, dp=4)]
    blocks = {}
    for mesh in meshes:

        def body(maker, x, y):
            a = grad(maker, x, y)
            b = maker.add_op("MPIAllreduce", inputs=[a], attributes={"axis": "dp"})
            c = grad(maker, b, x)
            return [grad(maker, c), b]

        inner = callee(body, f32(on=mesh), f32(on=mesh))
        blocks[mesh] = callee(lambda m, x, y, f=inner: call(m, f, *call(m, f, x, y)), *[f32(on=mesh)] * 2)
    values = []
    for i, mesh in enumerate(meshes):
        for role in (Role.INPUT, Role.PARAMETER):
            values.append(maker.add_input_value(f"x{i}", f32(on=mesh), role))
    for _ in range(data.draw(st.integers(1, 15))):
        x = data.draw(st.sampled_from(values))
        y = data.draw(st.sampled_from([v for v in values if v.type == x.type]))
        if data.draw(st.booleans()):
            values.extend(call(maker, blocks[x.type.device], x, y))
        else:
            values.append(grad(maker, x, y))
    maker.set_outputs([v for v in values if v.role is Role.INPUT and data.draw(st.booleans())] or values[-1:])
    function = maker.finalize()
    ops = []
    outputs = inline(function, function.inputs, ops)
    flat = Function("flat", function.inputs, tuple(ops), tuple(outputs))
    expected = brute_force(flat)
    for memory in (peak_memory(function), peak_memory(flat)):
        assert {device: use.peak for device, use in memory.items()} == expected
        for device, use in memory.items():
            assert sum(use.by_kind.values()) == use.peak
            held = {*outputs, *(v for v in function.inputs if v.role is not Role.INPUT)}
            assert use.end == sum(v.type.nbytes for v in held if device in devices_of(v.type.device))


@given(functions(depth=0))
@settings(max_examples=150)
def test_what_is_reported_is_what_buffers_take(function):
    assert {device: use.peak for device, use in peak_memory(function).items()} == Machine(function).peak


def test_the_operators_here_are_what_they_are_taken_for():
    assert operator("SGDOptimizer").in_place == {0: 0, 1: 2}
    assert not operator("LossGrad").in_place
