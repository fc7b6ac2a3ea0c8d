"""Mixtures of experts: token choice against a plain reference, drawn loads, plans."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_models import F64, assert_same_step, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import Float32, Function, Tensor, all_ops, callees
from distsim.models import Routing, deepseek, draw_routing, moe
from distsim.models.decoder import LayerMaker, decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.mixture import Mixture, mixture
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.ops import signature_of, work
from distsim.ops.parts import Groups
from distsim.plan import Plan
from distsim.transforms import Adam, add_loss, differentiate, precision_named

SIZES = {"hidden": 16, "heads": 4, "seq": 6, "vocab": 16, "dtype": F64}
LATENT = {"kv_lora": 4, "nope": 4, "rope": 2, "value": 4}


def small_moe(**options) -> Function:
    return moe(**{**SIZES, "layers": 2, "kv_heads": 2, "ffn": 8, "experts": 4, "batch": 8, **options})


def small_deepseek(**options) -> Function:
    given = {**SIZES, **LATENT, "layers": 3, "ffn": 24, "experts": 4, "top_k": 2, "expert_ffn": 6, "dense": 1}
    return deepseek(**{**given, "batch": 8, **options})


def distinct_inputs(function: Function, seed: int = 0) -> list[np.ndarray]:
    """Random inputs in which no token comes twice in a sequence: equal ones would be dropped as they come."""
    inputs = random_inputs(function, seed)
    batch, seq = inputs[0].shape
    rng = np.random.default_rng(seed)
    inputs[0] = np.stack([rng.permutation(SIZES["vocab"])[:seq] for _ in range(batch)])
    return inputs


# --- loads ----------------------------------------------------------------------------------------

loads = st.builds(
    dict,
    experts=st.integers(1, 40),
    tokens=st.integers(1, 300),
    concentration=st.none() | st.floats(0.01, 100),
    capacity=st.none() | st.floats(0.1, 8),
    pad=st.none() | st.booleans(),
    seed=st.integers(0, 10**6),
)


@given(loads, st.data())
def test_a_drawn_load_is_what_the_tokens_ask_for_within_the_capacity(figures, data):
    experts, tokens, capacity = figures["experts"], figures["tokens"], figures["capacity"]
    figures = figures | ({"pad": None} if capacity is None else {})
    top_k = data.draw(st.integers(1, experts))
    routing = draw_routing(top_k=top_k, **figures)
    assert sum(routing.demand) == tokens * top_k
    assert 0 <= min(routing.demand) <= max(routing.demand) <= tokens
    limit = tokens if capacity is None else min(tokens, math.ceil(capacity * tokens * top_k / experts))
    padded = capacity is not None and figures["pad"] is not False
    assert routing.slots == tuple(limit if padded else min(want, limit) for want in routing.demand)
    assert routing.padding == sum(max(0, limit - want) for want in routing.demand) * padded
    assert routing.dropped == tokens * top_k - routing.rows + routing.padding
    assert routing == draw_routing(top_k=top_k, **figures)
    for ranks in (r for r in range(1, experts + 1) if experts % r == 0):
        parts = Groups(routing.slots)
        assert routing.rows / ranks <= parts.largest(ranks) <= routing.rows
        assert [start for start, _ in parts.spans(ranks)[1:]] == [end for _, end in parts.spans(ranks)[:-1]]
        assert parts.is_even(ranks) == (parts.largest(ranks) * ranks == routing.rows)


def test_a_smaller_concentration_is_a_larger_imbalance():
    """The mean of the busiest expert's share over seeds, from even to one that has nearly all."""

    def share(concentration):
        drawn = [draw_routing(16, 1, 1600, concentration, seed=seed) for seed in range(50)]
        return np.mean([max(routing.demand) / 1600 for routing in drawn])

    shares = [share(concentration) for concentration in (None, 100.0, 10.0, 1.0, 0.1, 0.01)]
    assert shares[0] == 1 / 16
    assert shares == sorted(shares)
    assert shares[-1] > 0.8, shares


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 5}, "top_k=5"),
        ({"concentration": 0.0}, "concentration=0.0"),
        ({"capacity": -1.0}, "capacity=-1.0"),
        ({"capacity": math.nan}, "capacity=nan"),
        ({"pad": False}, "pad=False is about rows up to a capacity, and none is given"),
        ({"capacity": 1.0, "routings": [Routing((3,) * 4, (3,) * 4)] * 2}, "and capacity=1.0 to draw them"),
        ({"seed": -1}, "seed=-1"),
        ({"shared": -1}, "shared=-1"),
        ({"experts": 0}, "experts=0"),
        ({"n_group": 3}, "n_group=3 does not divide the 4 experts"),
        ({"n_group": 2, "topk_group": 3}, "topk_group=3 of only n_group=2 groups"),
        ({"n_group": 4}, "top_k=2 of the 1 experts that topk_group=1 of n_group=4"),
        ({"routings": [Routing((3,) * 4, (3,) * 4)]}, "1 routings for 2 layers"),
        ({"routings": [Routing((9,) * 4, (9,) * 4)] * 2}, "experts and 6 tokens"),
        ({"groups": 4}, "groups=4 does not divide the sequence of 6 tokens"),
        ({"groups": 3, "routings": [Routing((3,) * 4, (3,) * 4)] * 2}, "experts and 2 tokens"),
    ],
)
def test_figures_that_make_no_mixture(options, words):
    with pytest.raises(PlanError, match=words):
        small_moe(**options)


# --- meaning --------------------------------------------------------------------------------------


def layer_of(sizes: Mixture, slots: tuple[int, ...], tokens: int, batch: int = 2) -> Function:
    """A function that is a mixture alone, of x [batch, tokens, 6]."""
    layer = LayerMaker("mixture", Tensor(F64, (batch, tokens, 6)), 2)
    return layer.finish(mixture(layer, layer.x, sizes, Routing(slots, slots)).tokens)


def usable(row, sizes: Mixture):
    """The scores of a token, zero for experts of groups that are not among the best."""
    groups = row.reshape(sizes.n_group, -1)
    of_groups = np.sort(groups)[:, -2 if sizes.score == "sigmoid" else -1 :].sum(-1)
    return np.where(
        np.isin(np.arange(sizes.n_group), np.argsort(-of_groups)[: sizes.topk_group])[:, None], groups, 0.0
    ).reshape(-1)


def token_choice(x, weights, sizes: Mixture, slots):
    """Token by token: choose, weigh, let each expert keep what gives it the largest gates; count the rest."""
    scores = x @ weights["router.w"]
    scores = (
        np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        if sizes.score == "softmax"
        else 1 / (1 + np.exp(-scores))
    )
    out, dropped = np.zeros_like(x), 0

    def feed(row, gate, up, down):
        hidden = row @ gate
        return (hidden / (1 + np.exp(-hidden)) * (row @ up)) @ down

    for sequence in range(len(x)):
        wishes = {expert: [] for expert in range(sizes.experts)}
        for token, row in enumerate(scores[sequence]):
            chosen = np.argsort(-usable(row, sizes))[: sizes.top_k]
            for expert in chosen:
                total = row[chosen].sum() if sizes.top_k > 1 else 1.0
                wishes[expert].append((row[expert] / total * sizes.scale, token))
        for expert, asked in wishes.items():
            asked.sort(reverse=True)
            dropped += len(asked[slots[expert] :])
            for gate, token in asked[: slots[expert]]:
                parts = (weights[f"experts.{name}.w"][expert] for name in ("gate", "up", "down"))
                out[sequence, token] += gate * feed(x[sequence, token], *parts)
    if sizes.shared:
        out += feed(x, *(weights[f"shared.{name}.w"] for name in ("gate", "up", "down")))
    return out, dropped


@pytest.mark.parametrize(
    "sizes",
    [
        *(Mixture(4, 2, 5), Mixture(5, 3, 4, 2, "sigmoid", 2.5), Mixture(3, 1, 4, 1)),
        *(Mixture(8, 3, 4, n_group=4, topk_group=2), Mixture(6, 2, 4, 0, "sigmoid", n_group=2)),
    ],
)
@pytest.mark.parametrize("slots", [12, 4, 1])
def test_a_mixture_is_token_choice_with_what_is_beyond_the_slots_dropped(sizes, slots):
    counts = tuple(max(slots - i, 0 if i else 1) if slots < 12 else 12 for i in range(sizes.experts))
    function = layer_of(sizes, counts, 12)
    inputs = random_inputs(function, seed=slots)
    given = {value.name: array for value, array in zip(function.inputs, inputs, strict=True)}
    expected, dropped = token_choice(given["x"], given, sizes, counts)
    (made,) = SequentialExecutor().compute(function, inputs)
    np.testing.assert_allclose(made, expected, rtol=1e-10, atol=1e-12)
    assert (dropped == 0) == (slots == 12)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_tokens_are_routed_as_sequences_of_their_own_would_be(groups):
    sizes, slots, tokens = Mixture(4, 2, 5, shared=1), (3, 1, 2, 3), 12
    grouped = layer_of(replace(sizes, groups=groups), slots, tokens)
    alone = layer_of(sizes, slots, tokens // groups, batch=2 * groups)
    inputs = random_inputs(grouped)
    tables = ("cos", "sin", "causal")  # of which a mixture reads none
    own = [
        np.zeros(value.type.shape) if value.name in tables else array.reshape(value.type.shape)
        for value, array in zip(alone.inputs, inputs, strict=True)
    ]
    (made,) = SequentialExecutor().compute(grouped, inputs)
    (expected,) = SequentialExecutor().compute(alone, own)
    np.testing.assert_array_equal(made.reshape(expected.shape), expected)


def test_padding_to_a_capacity_changes_the_work_and_no_number():
    """What nobody takes is a row of weight zero: the loss and all gradients are those without it."""
    sizes, tokens = Mixture(4, 2, 5, shared=1), 12

    def gradients(slots: tuple[int, ...]) -> Function:
        return differentiate(add_loss(layer_of(sizes, slots, tokens), "mse"), None)

    padded = gradients((tokens,) * 4)
    inputs = random_inputs(padded, seed=1)
    given = {value.name: array for value, array in zip(padded.inputs, inputs, strict=True)}
    chosen = np.argsort(-(given["x"] @ given["router.w"]))[..., :2]
    asked = tuple(max(int((row == expert).sum()) for row in chosen) for expert in range(4))
    assert max(asked) < tokens
    made, expected = (SequentialExecutor().compute(f, inputs) for f in (padded, gradients(asked)))
    assert len(made) == 1 + len(padded.parameters)
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "plan", "pad"),  # any two of the three are there together
    [
        (small_moe, Plan(2, 2, 2, 2), True),
        (small_moe, Plan(1, 1, 2, 4), False),
        (small_deepseek, Plan(2, 2, 2, 2), False),
        (small_deepseek, Plan(1, 1, 3, 4), True),
    ],
)
def test_parallel_steps_compute_what_one_device_computes(model, plan, pad):
    joint = differentiate(model(shared=1, concentration=1.0, capacity=1.0, pad=pad), Adam())
    inputs = distinct_inputs(joint)
    program = parallelize(joint, plan, load_cluster("dgx-a100"))
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


# --- work -----------------------------------------------------------------------------------------


def expert_flops(function: Function) -> float:
    return sum(
        work(signature_of(op)).flops
        for op in function.ops
        if op.op_type == "GroupedMatMul" or op.outputs[0].name.startswith("shared.")
        if work(signature_of(op)).matrix
    )


def test_the_work_is_that_of_the_slots_and_of_the_shared_experts():
    sizes = Mixture(4, 2, 5, shared=2)
    slots, tokens, batch, hidden = (6, 1, 2, 4), 9, 2, 6
    routed, shared = sum(slots) * 5, tokens * 2 * 5
    assert expert_flops(layer_of(sizes, slots, tokens)) == 3 * 2 * batch * hidden * (routed + shared)


def test_layers_of_equal_load_are_calls_of_one_callee():
    assert [f.name for f in callees(small_moe(layers=5))] == ["layer"]
    assert [f.name for f in callees(small_deepseek(layers=5))] == ["dense_layer", "expert_layer"]
    assert len(callees(small_moe(layers=3, concentration=0.5))) == 3
    # Padded to a capacity all layers are, whatever is asked of each; the note says what is.
    padded = small_moe(layers=3, concentration=0.5, capacity=1.0)
    assert len(callees(padded)) == 1
    drawn = [draw_routing(4, 2, 6, 0.5, 1.0, seed) for seed in range(3)]
    lost = sum(load.dropped for load in drawn) / 36
    assert padded.notes == (
        f"experts: all serve as many rows, {lost:.1%} of the rows are padding, {lost:.1%} of the choices are "
        "dropped",
    )


def test_the_command_line_knows_it():
    text = (
        "layers=2,hidden=16,heads=4,kv_heads=2,ffn=8,experts=4,seq=6,vocab=16,concentration=0.5,capacity=1.25"
    )
    loads = [draw_routing(4, 2, 6, 0.5, 1.25, seed, False).rows for seed in (4, 5)]
    assert rows_of(load_model(f"moe:{text},seed=4,pad=false", batch=8)) == loads
    function = load_model(f"moe:{text},seed=4", batch=8)
    assert [v.type.shape for v in function.parameters] == [v.type.shape for v in small_moe().parameters]
    assert rows_of(function) == [4 * math.ceil(1.25 * 6 * 2 / 4)] * 2
    named = "mixtral-8x7b:layers=2,hidden=16,heads=4,kv_heads=2,expert_ffn=8,vocab=16,seq=6,concentration=0.5"
    assert rows_of(load_model(f"{named},capacity=1.0", batch=2)) == [8 * 2] * 2
    assert rows_of(load_model(f"{named},capacity=1.0,pad=false", batch=2)) == [
        draw_routing(8, 2, 6, 0.5, 1.0, seed, False).rows for seed in (0, 1)
    ]


def rows_of(function: Function) -> list[int]:
    """The rows of a sequence that the experts of each layer work on."""
    return [
        next(op for op in op.callee.ops if op.op_type == "GroupedMatMul").inputs[0].type.shape[1]
        for op in function.ops
        if op.is_call
    ]


def test_gradients_of_a_wide_router_are_summed_as_those_of_norms():
    """Over tp at once, whole, of 128 experts as of 8 (Megatron-LM's router has a weight on every rank)."""
    experts = Mixture(128, 8, 768, groups=4)
    sizes = DecoderSizes(2, 2048, 512, GroupedHeads(16, 4), FeedForward(64), experts)
    joint = differentiate(decoder(sizes, 8, 512, Float32()), Adam(), precision=precision_named("mixed"))
    plan = Plan.parse("dp=4,tp=4,sp=on,ep=4,microbatches=2")
    program = parallelize(joint, plan, topology_of(plan.devices))
    kinds = Counter[str]()
    for op in all_ops(program.to_function()):
        moved = op.op_type.startswith("MPI") and op.attributes.get("axis") == "tp"
        kinds[op.op_type] += sum(value.type.shape == (2048, 128) for value in op.outputs if moved)
    assert +kinds == {"MPIAllreduce": sizes.layers}
