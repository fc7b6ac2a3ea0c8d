"""outline: closed forms first, then the same function before and after, of models and of what is invented."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_cases import running_statistics
from outline_models import (
    BINARY,
    UNARY,
    Recipe,
    calls,
    distinct,
    flat,
    layers,
    masked_layers,
    meaning,
)
from test_onnx_models import FILES, forward
from training_models import (
    Maker,
    flat_mlp,
    random_inputs,
    small_gpt,
)

from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.ir import Function, Role, callees, count_ops, verify
from distsim.models import gpt, mlp
from distsim.transforms import (
    SGD,
    Adam,
    add_loss,
    describe_blocks,
    differentiate,
    inline,
    outline,
)
from distsim.transforms.outlining.blocks import Repeat, tandem_repeats
from distsim.transforms.sharding.roles import roles


def assert_same_function(function: Function, outlined: Function) -> None:
    """The same inputs and outputs, and written out the same expression for every output."""
    verify(outlined)
    assert outlined.inputs == function.inputs and outlined.outputs == function.outputs
    assert count_ops(outlined) == count_ops(function)
    assert meaning(flat(outlined)) == meaning(flat(function))


# --- tandem repeats -------------------------------------------------------------------------------

words = st.lists(st.integers(0, 3), max_size=40)


@given(words)
def test_what_is_found_repeats_and_cannot_be_extended(word):
    for repeat in tandem_repeats(np.array(word, np.int64)):
        start, stop, period = repeat.start, repeat.stop, repeat.period
        assert start >= 0 and stop <= len(word) and stop - start >= 2 * period
        assert word[start : stop - period] == word[start + period : stop]
        assert start == 0 or word[start - 1] != word[start - 1 + period]
        assert stop == len(word) or word[stop] != word[stop - period]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(3, 6), words, words)
def test_a_word_that_stands_there_three_times_is_found(word, times, before, after):
    period = next(p for p in range(1, len(word) + 1) if word == (word * 2)[p : p + len(word)])
    period = period if len(word) % period == 0 else len(word)  # the primitive word
    sequence = [*before, 8, *word * times, 9, *after]
    expected = Repeat(len(before) + 1, len(before) + 1 + len(word) * times, period)
    assert expected in tandem_repeats(np.array(sequence, np.int64))


# --- closed forms ---------------------------------------------------------------------------------


def test_64_layers_are_32_calls_of_two():
    function = layers(64)
    found = outline(function)
    assert calls(found) == {"block0": 32}
    (block,) = callees(found)
    assert [op.op_type for op in block.ops] == ["MatMul", "Relu", "MatMul", "Relu"]
    assert [value.role for value in block.inputs] == [Role.INPUT, Role.PARAMETER, Role.PARAMETER]
    assert [op.op_type for op in found.ops] == ["Call"] * 32 + ["Loss"]
    assert [op.name for op in found.ops[:32]] == [f"block0.{i}" for i in range(32)]
    assert len({id(op.callee) for op in found.ops[:32]}) == 1
    assert len(block.outputs) == 1, "only what the next layer reads leaves a block"
    assert_same_function(function, found)


def test_what_is_left_over_stays_outside():
    found = outline(layers(7))
    assert [op.op_type for op in found.ops] == ["Call"] * 3 + ["MatMul", "Relu", "Loss"]


def test_too_few_products_to_be_joined_are_left_as_they_are():
    function = layers(3)
    assert outline(function) is function
    assert calls(outline(function, products=1)) == {"block0": 3}
    assert calls(outline(layers(64), products=1)) == {"block0": 64}
    assert calls(outline(layers(64), products=8)) == {"block0": 8}


@pytest.mark.parametrize("products", [0, -1])
def test_a_block_has_at_least_one_product(products):
    with pytest.raises(PlanError, match=f"products={products}: a block has at least 1"):
        outline(layers(4), products)


def test_the_joint_function_of_the_notebook_is_three_callees():
    """Forward, backward and updates are cut alike: each backward block belongs to one forward block."""
    function = flat_mlp(64, optimizer=True)
    found = outline(function)
    assert calls(found) == {"block0": 32, "block1": 32, "block2": 32}
    kinds = ["Call"] * 32 + ["Loss", "LossGrad"] + ["Call"] * 64
    assert [op.op_type for op in found.ops] == kinds
    weights = set(function.inputs[2:])
    ahead, behind, update = (
        [weights.intersection(op.inputs) for op in found.ops[start : start + 32]] for start in (0, 34, 66)
    )
    assert ahead == behind[::-1] == update
    assert_same_function(function, found)


@pytest.mark.parametrize(
    "function", [layers(64), layers(63), layers(64, input_width=4)], ids=["64", "63", "1 + 63"]
)
def test_a_last_layer_without_a_gradient_of_its_input_is_aligned_too(function):
    joint = differentiate(function, SGD())
    found = outline(joint)
    owner = {}
    for op in found.ops:
        if op.is_call:
            owned = frozenset(v for v in op.inputs if v.role is Role.PARAMETER)
            assert all(owner.setdefault(value, owned) == owned for value in owned)
    assert len(owner) >= 62 and max(calls(found).values()) in (31, 32)
    assert_same_function(joint, found)


def test_updates_are_grouped_like_the_layers():
    joint = differentiate(flat(small_gpt(layers=4)), Adam())
    found = outline(joint)
    assert set(calls(found).values()) == {4}
    update = next(f for f in callees(found) if {op.op_type for op in f.ops} == {"AdamOptimizer"})
    assert len(update.ops) == 16
    assert {value.role for value in update.inputs} == {Role.INPUT, Role.PARAMETER, Role.STATE}
    assert_same_function(joint, found)


def test_a_block_is_cut_where_fewest_values_cross():
    """A transformer layer begins at its norm, with the stream that the residuals are added to."""
    found = outline(flat(small_gpt(layers=6)))
    (layer,) = callees(found)
    assert layer.ops[0].op_type == "LayerNormalization" and layer.ops[-1].op_type == "Add"
    assert len(layer.ops) == len(gpt(1, 8, 2, 4, 1, 16).ops[4].callee.ops)
    assert len(layer.outputs) == 1 and len(layer.inputs) == 2 + 16


def test_a_mask_that_the_first_layer_makes_is_made_before_it():
    function = masked_layers(5)
    found = outline(function)
    assert [op.op_type for op in found.ops] == ["Mul"] + ["Call"] * 5
    assert calls(found) == {"h": 5}
    assert [op.name for op in found.ops[1:]] == [f"m.h.{i}" for i in range(5)]
    (layer,) = callees(found)
    assert [value.name for value in layer.inputs][1:] == ["up.weight", "mul1", "down.weight"]
    assert [op.name for op in layer.ops] == ["up/mm", "add", "down/mm"]
    assert_same_function(function, found)


def test_a_repetition_apart_from_the_others_is_a_call_too():
    recipe = Recipe()
    block = [("weight", 1, 1), ("Relu", 1, 1), ("weight", 1, 1), ("Add", 1, 3)]
    recipe.block(block, 3)
    recipe.step(("Tanh", 1, 1))
    recipe.block(block, 1)
    function = recipe.end()
    found = outline(function)
    assert calls(found) == {"block0": 4}
    assert [op.op_type for op in found.ops][:5] == ["Call", "Call", "Call", "Tanh", "Call"]
    assert_same_function(function, found)


def test_repetitions_that_are_wired_differently_are_not_one_block():
    """The same ops, but every other layer has its residual from elsewhere."""
    recipe = Recipe()
    for index in range(8):
        source = 3 if index % 2 else 2
        recipe.block([("weight", 1, 1), ("Relu", 1, 1), ("weight", 1, 1), ("Add", 1, source)], 1)
    function = recipe.end()
    found = outline(function)
    assert set(calls(found).values()) == {4}
    assert_same_function(function, found)


def test_calls_are_ops_of_a_block():
    """A Call and what follows it repeat; a Call that repeats alone is outlined already."""
    (layer,) = callees(outline(layers(4)))
    make = Maker("calls")
    x = make.data("x", 8, 8)
    for index in range(6):
        x = make("Add", x, make("Tanh", make.layer(layer, x, f"h{index}")))
    function = make.end(make("Loss", x, make.data("target", 8, 8), N=8))
    found = outline(function)
    assert calls(found) == {"block0": 1, "block1": 6}, "each callee has a name of its own"
    assert [op.op_type for op in found.ops] == ["Call"] * 6 + ["Loss"]
    assert [op.op_type for op in found.ops[0].callee.ops] == ["Call", "Tanh", "Add"]
    assert_same_function(function, found)
    forward_ = mlp(16, 8, 8)
    assert outline(forward_) is forward_


def test_what_is_made_of_losses_is_left_as_it_is():
    """Weights of two losses that are trained: sums over microbatches are taken between these scalars."""
    make = Maker("weighted")
    losses = [make("Loss", make.data(f"x{i}", 8, 8), make.data(f"t{i}", 8, 8), N=8) for i in range(2)]
    for i, loss in enumerate(losses):
        losses[i] = make("Mul", loss, make("Exp", make("Neg", make.parameter(f"s{i}"))))
    function = make.end(make("Add", *losses))
    assert outline(function) is function


def test_roles_of_a_function_without_marks_stay_what_they_are():
    function = flat_mlp(8, optimizer=True)
    assert roles(outline(function)) == roles(function)


# --- models ---------------------------------------------------------------------------------------


def test_gpt2_is_twelve_calls_of_one_layer():
    found = outline(forward("gpt2"))
    assert calls(found) == {"h": 12}
    assert describe_blocks(found) == "h: 43 ops, called 12 times"
    (layer,) = callees(found)
    assert layer.ops[0].op_type == "LayerNormalization" and len(layer.outputs) == 1
    names = [op.name for op in found.ops if op.is_call]
    assert names == [f"model.transformer.h.{i}" for i in range(12)]
    assert layer.inputs[1].name == "ln_1.weight"


def test_gpt2_with_its_backward_pass_is_twelve_calls_of_three_blocks():
    joint = differentiate(add_loss(forward("gpt2")), Adam())
    found = outline(joint)
    assert calls(found) == {"h": 12, "h.1": 12, "block0": 12}  # backward is of the modules of forward
    assert_same_function(joint, found)


# Ops written out, and ops when each callee counts once. Growing or shrinking nets repeat nothing.
SIZES_OF = {
    "bvlc_alexnet": (24, 24),
    "densenet121": (910, 910),
    "inception_v1": (144, 144),
    "inception_v2": (509, 460),
    "resnet50": (176, 108),
    "shufflenet": (203, 96),
    "squeezenet": (66, 66),
    "vgg19": (46, 44),
    "zfnet512": (22, 22),
    "gpt2": (526, 65),
    "mlp": (16, 8),
    "reference bert-base": (440, 56),
    "reference gpt2-dynamic": (526, 65),
    "reference gpt2-forward-backward": (1842, 249),
    "reference llama-56m": (524, 84),
    "reference mlp": (16, 8),
    "reference resnet50": (122, 78),
}


@pytest.mark.parametrize("name", FILES)
def test_distinct_ops_of_the_models(name):
    function = forward(name)
    found = outline(function)
    assert (len(function.ops), distinct(found)) == SIZES_OF[name]
    assert_same_function(function, found)
    assert outline(found) is found, "what is outlined once has nothing left to outline"


@pytest.mark.parametrize("name", ["shufflenet", "mlp"])
def test_models_compute_the_same(name):
    function = forward(name)
    positive = running_statistics(function)
    pairs = zip(function.inputs, random_inputs(function), strict=True)
    inputs = [np.abs(array) if value in positive else array for value, array in pairs]
    expected = SequentialExecutor().compute(function, inputs)
    for array, other in zip(expected, SequentialExecutor().compute(outline(function), inputs), strict=True):
        np.testing.assert_array_equal(array, other)


# --- invented functions ---------------------------------------------------------------------------

steps = st.tuples(
    st.sampled_from(["weight", "weight", "shared", "split", *UNARY, *BINARY]),
    st.integers(1, 4),
    st.integers(1, 6),
)
parts = st.tuples(st.lists(steps, min_size=1, max_size=6), st.integers(1, 6))


def invented(recipes, unread=False) -> Function:
    recipe = Recipe()
    for block, times in recipes:
        recipe.block(block, times)
    return recipe.end(unread)


@settings(max_examples=150)
@given(st.lists(parts, min_size=1, max_size=4), st.integers(1, 3))
def test_an_invented_function_stays_the_same(recipes, products):
    function = invented(recipes)
    found = outline(function, products)
    assert_same_function(function, found)
    assert len(inline(found).ops) == len(function.ops)
    assert distinct(found) <= len(function.ops)
    for callee in callees(found):
        assert len(callee.ops) > 1 and calls(found)[callee.name] > 1
    again = outline(found, products)
    assert meaning(flat(again)) == meaning(function)
    inputs = random_inputs(function)
    (expected,) = SequentialExecutor().compute(function, inputs)
    (array,) = SequentialExecutor().compute(found, inputs)
    np.testing.assert_array_equal(array, expected)


@settings(max_examples=100)
@given(st.lists(parts, min_size=1, max_size=3))
def test_the_gradients_of_an_invented_function_stay_the_same(recipes):
    function = invented([([("weight", 1, 1)], 1), *recipes], unread=True)
    inputs = random_inputs(function)
    joint = differentiate(function, None)
    expected = SequentialExecutor().compute(joint, inputs)
    for other in (differentiate(outline(function), None), outline(joint)):
        assert len(other.outputs) == len(joint.outputs)
        for array, wanted in zip(SequentialExecutor().compute(other, inputs), expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=1e-9, atol=1e-9)


@settings(max_examples=100)
@given(st.lists(steps, min_size=2, max_size=8), st.integers(2, 8))
def test_whole_repetitions_of_a_block_with_products_are_found(block, times):
    """However it is wired, a block of two products or more is written once or twice (a first one differs)."""
    block = [("weight", 1, 1), *block, ("weight", 1, 1)]
    function = invented([([("Relu", 1, 1)] * 7, 1), (block, times + 2)])
    found = outline(function)
    assert_same_function(function, found)
    assert max(calls(found).values(), default=0) >= times
