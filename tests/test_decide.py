"""Deciding per distinct value: the same least cost as per value, whose price does not grow with layers."""

import sys
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_models import Maker, bert, flat_mlp, fused_attention, mesh_of, small_gpt, small_mlp, tied

from distsim.errors import PlanError
from distsim.ir import Device, Function, Role, callees, verify
from distsim.transforms import SGD, Adam, differentiate, shard
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.sharding.axes import batch_options, decide_batch, decide_tensor, tensor_options
from distsim.transforms.sharding.problem_graph import Structure, structure_of, written
from distsim.transforms.sharding.roles import WHOLE_BATCH, batch_inputs, propagate_both, roles

GPU = Device(0, "gpu")


def structure(function: Function, merged: bool = True) -> Structure:
    return structure_of(function, roles(function), merged)


def decisions(function: Function, tp: int, dp: int, microbatches: int, merged: bool):
    """The choice over the batch and over tp, values merged into groups or each on its own."""
    known = roles(function)
    data, found = batch_inputs(function, known), structure(function, merged)
    marks = propagate_both(function, dict.fromkeys(data, WHOLE_BATCH))
    batch = decide_batch(
        found, batch_options(function, found, dict.fromkeys(data, 0), marks), dp * microbatches, GPU
    )
    options = tensor_options(function, found, known, marks)
    return batch, decide_tensor(found, options, (tp, dp, microbatches), batch, GPU)


def assert_merging_costs_nothing(
    function: Function, tp: int, dp: int, microbatches: int, proven: bool = False
) -> None:
    """Whether each choice is proven to be the cheapest, as it need not be, is asked with ``proven``."""
    pairs = zip(
        decisions(function, tp, dp, microbatches, True),
        decisions(function, tp, dp, microbatches, False),
        strict=True,
    )
    for merged, single in pairs:
        assert merged.proven or not proven
        if merged.proven:
            assert merged.cost <= single.cost * (1 + 1e-9)
        if merged.proven and single.proven:
            assert merged.cost == pytest.approx(single.cost, rel=1e-9)
            assert merged.divided == pytest.approx(single.divided, rel=1e-12)


# --- groups ---------------------------------------------------------------------------------------


MODELS = {
    "gpt, SGD": lambda: differentiate(small_gpt(layers=3), SGD()),
    "gpt, Adam": lambda: differentiate(small_gpt(layers=2), Adam()),
    "mlp": lambda: differentiate(small_mlp(layers=6), Adam()),
    "tied": lambda: differentiate(tied(layers=3), SGD()),
    "fused attention": lambda: differentiate(fused_attention(), Adam()),
    "bert": lambda: differentiate(bert(), SGD()),
    "flat": lambda: flat_mlp(layers=4, optimizer=True),
    "forward": lambda: small_gpt(layers=3),
    "gradients cast": lambda: cast_gpt(layers=2),
}


def cast_gpt(layers: int) -> Function:
    """Each gradient is cast once a layer has made it, and an update by layer reads it."""
    return differentiate(small_gpt(layers=layers), Adam(), precision=precision_named("mixed"), clip=1.0)


DEGREES = [(2, 1, 1), (4, 2, 1), (2, 2, 2), (1, 1, 4)]


@pytest.mark.parametrize(  # each model with every other
    ("name", "tp", "dp", "microbatches"),
    [(name, *each) for at, name in enumerate(MODELS) for each in DEGREES[at % 2 :: 2]],
)
def test_one_choice_for_values_that_are_alike_costs_what_one_choice_each_costs(name, tp, dp, microbatches):
    function, tp = MODELS[name](), 2 if name in ("bert", "forward") else tp
    assert_merging_costs_nothing(function, tp, dp, microbatches, proven=True)


KINDS = st.tuples(st.lists(st.booleans(), min_size=1, max_size=3), st.booleans())
"""(per step whether it is a wide pair of layers, whether the kind adds its input)."""


def layered(kinds, layers: list[int]) -> Function:
    """Layers of these kinds, whose parameters differ in number and shape."""
    made: list[Function] = []
    for index, (steps, adds) in enumerate(kinds):
        make = Maker(f"kind{index}")
        x = y = make.data("x", 8, 8)
        for place, wide in enumerate(steps):
            if wide:
                y = make("Gelu", make.linear(y, f"up{place}", 8, 16))
                y = make.linear(y, f"down{place}", 16, 8)
            else:
                y = make("MatMul", y, make.parameter(f"w{place}", 8, 8))
        make.set_outputs([make("Add", x, y) if adds else make("Tanh", y)])
        made.append(make.finalize())
    make = Maker("layered")
    x, target = make.data("x", 8, 8), make.data("target", 8, 8)
    for index, layer in enumerate(layers):
        x = make.layer(made[layer % len(made)], x, f"h{index}")
    return make.end(make("Loss", x, target, N=8))


@given(
    st.lists(KINDS, min_size=1, max_size=2),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
    st.sampled_from([SGD(), Adam()]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([(1, 1), (2, 1), (2, 4)]),
)
@settings(max_examples=16, deadline=None)
def test_merging_costs_nothing_whatever_the_layers(kinds, layers, optimizer, tp, degrees):
    assert_merging_costs_nothing(differentiate(layered(kinds, layers), optimizer), tp, *degrees)


def test_what_is_distinct_does_not_grow_with_the_layers():
    sizes = {
        layers: (len(found.nodes), len(found.groups), len(found.ties))
        for layers in (4, 8, 32)
        for found in [structure(differentiate(small_gpt(layers=layers), Adam()))]
    }
    assert len(set(sizes.values())) == 1, sizes


def test_casts_between_calls_are_one_for_all_layers():
    four, eight = (
        sorted(
            [node.times for node in structure(cast_gpt(layers)).nodes if node.op.op_type == "GradientCast"]
        )
        for layers in (4, 8)
    )
    assert 4 in four
    assert eight == sorted([8 if times == 4 else times for times in four])


def test_groups_hold_what_is_made_and_read_in_the_same_places():
    joint = differentiate(small_gpt(layers=4), Adam())
    found = structure(joint)
    by_name = {value.name: found.number[value] for value in (*joint.inputs, *joint.outputs)}
    assert len({by_name[f"h{i}.q.w"] for i in range(4)}) == 1
    assert len({by_name[n] for n in ("h0.q.w", "h0.k.w", "h0.q.w.m", "h0.q.w.v", "wte")}) == 5
    assert by_name["h1.q.w.new"] == by_name["h1.q.w"], "written in place: one value"
    group = found.groups[by_name["h0.q.w"]]
    assert (group.count, group.role, group.returned) == (4, Role.PARAMETER, True)


def test_in_place_is_seen_through_a_call():
    joint = differentiate(small_mlp(layers=4), Adam())
    update = joint.ops[-1]
    assert update.callee.name == "update"
    places = [update.callee.inputs[written(update, i)].name for i in range(len(update.outputs))]
    assert places == ["w0", "w0.m", "w0.v", "w1", "w1.m", "w1.v"]
    assert written(joint.ops[0], 0) is None


# --- a pattern of two replicas stands for any number ---------------------------------------------------


def text(function: Function) -> list[object]:
    """All that a function says, but where it runs."""
    found: list[object] = []
    for current in (*callees(function), function):
        number = {value: i for i, value in enumerate(current.inputs)}
        found.append([(v.name, v.role, v.type.shape, v.type.dtype) for v in current.inputs])
        for op in current.ops:
            number.update((value, len(number) + i) for i, value in enumerate(op.outputs))
            attributes = {k: v for k, v in op.attributes.items() if k != "device"}
            ends = [tuple(number[v] for v in values) for values in (op.inputs, op.outputs)]
            shapes = [(v.name, v.type.shape) for v in op.outputs]
            found.append((op.op_type, op.name, attributes, ends, shapes))
        found.append([number[value] for value in current.outputs])
    return found


@pytest.mark.parametrize("dp", [4, 8])
@pytest.mark.parametrize("build", [small_gpt, small_mlp, tied], ids=lambda f: f.__name__)
def test_a_pattern_says_what_the_whole_mesh_says(build, dp):
    joint = differentiate(build(batch=16), Adam())
    whole = shard(joint, mesh_of(dp=dp, tp=2), 2)
    pattern = shard(joint, mesh_of(dp=2, tp=2), 2, dp=dp)
    assert pattern.mesh == mesh_of(dp=2, tp=2) and (pattern.dp, pattern.needs_dp) == (dp, False)
    verify(pattern.function)
    assert text(pattern.function) == text(whole.function)
    assert (pattern.inputs, pattern.outputs) == (whole.inputs, whole.outputs)
    assert (pattern.decisions["tp"].cost, pattern.decisions["dp"].cost) == (
        whole.decisions["tp"].cost,
        whole.decisions["dp"].cost,
    )


def needs_the_whole_batch() -> Function:
    make = Maker("whole")
    x, target = make.data("x", 8, 8), make.data("target", 8, 8)
    y = make("Softmax", make("MatMul", x, make.parameter("w", 8, 8)), axis=0)
    return differentiate(make.end(make("Loss", y, target, N=8)))


def test_a_shape_that_depends_on_the_replicas_takes_all_of_them():
    joint = needs_the_whole_batch()
    found, whole = shard(joint, mesh_of(dp=2), 1, dp=4), shard(joint, mesh_of(dp=4), 1)
    assert found.needs_dp and whole.needs_dp
    assert dict(found.mesh.axes)["dp"] == 4
    verify(found.function)
    assert text(found.function) == text(whole.function)
    with pytest.raises(PlanError, match="needs the whole batch at once.*2 microbatches"):
        shard(joint, mesh_of(dp=2), 2, dp=4)


def test_a_mesh_that_stands_for_nothing_is_refused():
    with pytest.raises(PlanError, match="dp=8 on a mesh of dp=4; give one of dp=2 or of dp=8"):
        shard(differentiate(small_mlp()), mesh_of(dp=4), 1, dp=8)
    with pytest.raises(PlanError, match="dp=1 on a mesh of dp=2"):
        shard(differentiate(small_mlp()), mesh_of(dp=2), 1, dp=1)


# --- what was divided before is known -----------------------------------------------------------------


def test_equal_parts_and_equal_choices_are_one_function():
    joint = differentiate(small_gpt(batch=16), Adam())
    first = shard(joint, mesh_of(dp=2, tp=2), 4, dp=2)
    assert shard(joint, mesh_of(dp=2, tp=2), 4, dp=2) is first
    assert shard(joint, mesh_of(dp=2, tp=2), 2, dp=4).function is first.function
    assert shard(joint, mesh_of(dp=2, tp=2), 1, dp=8).function is first.function
    assert shard(joint, mesh_of(dp=1, tp=2), 8).function is not first.function, "nothing to all-reduce"
    assert shard(joint, mesh_of(dp=2, tp=2), 2).function is not first.function, "other shapes"


def test_what_one_microbatch_allows_is_not_remembered_for_more():
    joint = needs_the_whole_batch()
    assert shard(joint, mesh_of(dp=4), 1).needs_dp
    with pytest.raises(PlanError, match="use microbatches=1"):
        shard(joint, mesh_of(dp=2), 2)
    with pytest.raises(PlanError, match="use microbatches=1"):
        shard(joint, mesh_of(dp=4), 2, dp=4)


def test_another_device_is_another_question():
    joint = differentiate(small_mlp())
    slow = mesh_of(tp=2)
    fast = type(slow)([Device(i, "gpu", dram_bandwidth=9e12) for i in range(2)], dp=1, tp=2)
    assert shard(joint, slow).decisions["tp"].cost != shard(joint, fast).decisions["tp"].cost


def test_only_the_last_functions_are_remembered(monkeypatch):
    monkeypatch.setattr(sys.modules["distsim.transforms.sharding.shard"], "MOST_FUNCTIONS", 2)
    joint, meshes = differentiate(small_mlp(batch=16)), [mesh_of(dp=dp) for dp in (1, 2, 4)]
    first, second, third = (shard(joint, mesh) for mesh in meshes)
    assert shard(joint, meshes[1]) is second and shard(joint, meshes[2]) is third
    again = shard(joint, meshes[0])
    assert again.function is not first.function
    assert text(again.function) == text(first.function)


def test_a_function_that_nobody_holds_is_forgotten(collect):
    joint = differentiate(small_gpt(), Adam())
    shard(joint, mesh_of(dp=2, tp=2), 2)
    gone = weakref.ref(joint)
    del joint
    collect()
    assert gone() is None
