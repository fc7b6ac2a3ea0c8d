"""The loss that balances experts: its closed form, its gradients, over every rank, what is sent for it."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from expert_models import BATCH, DEEPSEEK, MIXTRAL, SEQ, SKEWED, computed_over_ranks, distinct_inputs, sent
from training_models import F64, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.errors import ImportModelError, PlanError
from distsim.executor import SequentialExecutor
from distsim.importer import load_model
from distsim.ir import Function, Tensor, all_ops
from distsim.models.decoder import LayerMaker, decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.mixture import Mixture, mixture
from distsim.models.routing import Routing
from distsim.plan import Plan
from distsim.transforms import SGD, Adam, differentiate

COEFFICIENT = 0.5
SIZES = {"mixtral": MIXTRAL, "deepseek": replace(DEEPSEEK, layers=3)}


def balanced(name: str, over: int = 1, groups: int = 1, coefficient: float = COEFFICIENT) -> DecoderSizes:
    sizes = SIZES[name]
    return replace(sizes, experts=replace(sizes.experts, aux_loss=coefficient, aux_over=over, groups=groups))


def model(name: str, over: int = 1, groups: int = 1) -> Function:
    return decoder(balanced(name, over, groups), BATCH, SEQ, F64, SKEWED)


# --- meaning ----------------------------------------------------------------------------------------------


def closed_form(x: np.ndarray, router: np.ndarray, sizes: Mixture) -> float:
    """Switch Transformers, equations 4 to 6, of ``aux_over`` sequences together; the mean over the batch."""
    scores = x @ router
    scores = np.exp(scores) if sizes.score == "softmax" else 1 / (1 + np.exp(-scores))
    losses = []
    for first in range(0, len(x), sizes.aux_over):
        tokens = scores[first : first + sizes.aux_over].reshape(-1, sizes.experts)
        chosen = np.argsort(-tokens, axis=-1)[:, : sizes.top_k]
        share = tokens / tokens.sum(-1, keepdims=True)
        losses.append(
            sum(
                sizes.experts
                / (sizes.top_k * len(tokens))
                * (chosen == expert).sum()
                * share[:, expert].mean()
                for expert in range(sizes.experts)
            )
        )
    return sizes.aux_loss * float(np.mean(losses))


@pytest.mark.parametrize("over", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sizes", [Mixture(4, 2, 5), Mixture(5, 3, 4, 2, "sigmoid", 2.5), Mixture(3, 1, 4)])
def test_the_loss_is_that_of_the_papers(sizes, groups, over):
    sizes = replace(sizes, aux_loss=0.01, aux_over=over, groups=groups)
    layer = LayerMaker("mixture", Tensor(F64, (4, 12, 6)), 2)
    slots = (12 // groups,) * sizes.experts
    made = mixture(layer, layer.x, sizes, Routing(slots, slots))
    function = layer.finish(made.tokens, made.aux_loss)
    inputs = random_inputs(function, seed=3)
    given = {value.name: array for value, array in zip(function.inputs, inputs, strict=True)}
    _, loss = SequentialExecutor().compute(function, inputs)
    assert loss == pytest.approx(closed_form(given["x"], given["router.w"], sizes), rel=1e-12)


@pytest.mark.parametrize(("name", "over"), [("mixtral", 1), ("mixtral", 4), ("deepseek", 2)])
def test_gradients_are_finite_differences(name, over):
    """Of the whole loss, in a direction of each parameter; no choice changes on so short a way."""
    function = model(name, over)
    joint = differentiate(function, None)
    inputs = distinct_inputs(joint)
    executor, rng = SequentialExecutor(), np.random.default_rng(0)
    _, *gradients = executor.compute(joint, inputs)
    plain = executor.compute(differentiate(decoder(SIZES[name], BATCH, SEQ, F64, SKEWED), None), inputs)[1:]
    places = [place for place, value in enumerate(joint.inputs) if value in joint.parameters]
    routers = [value.name.endswith("router.w") for value in joint.parameters]
    for place, gradient, without, router in zip(places, gradients, plain, routers, strict=True):
        way, step = rng.standard_normal(gradient.shape), 1e-6
        ends = []
        for sign in (1, -1):
            moved = [*inputs]
            moved[place] = inputs[place] + sign * step * way
            ends.append(float(executor.compute(function, moved)[0]))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float((gradient * way).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-8)
        assert not router or np.abs(gradient - without).max() > 1e-4


def test_without_a_coefficient_there_is_none():
    plain = decoder(SIZES["mixtral"], BATCH, SEQ, F64, SKEWED)
    none = decoder(balanced("mixtral", coefficient=0.0), BATCH, SEQ, F64, SKEWED)
    assert [op.op_type for op in all_ops(none)] == [op.op_type for op in all_ops(plain)]
    assert not any("aux" in value.name for op in all_ops(none) for value in op.outputs)


@cache
def trained(name: str, over: int, groups: int) -> Function:
    return differentiate(model(name, over, groups), Adam())


# --- over ranks -------------------------------------------------------------------------------------------

CASES = [
    ("mixtral", "dp=2,ep=2", 1, 1),
    ("mixtral", "dp=4,ep=2,microbatches=2,schedule=gpipe", 1, 1),
    ("mixtral", "dp=2,microbatches=2", 2, 1),
    ("mixtral", "dp=8,ep=4", 4, 1),  # sequences of several ranks
    ("mixtral", "dp=4,ep=4,tp=2", 1, 1),
    ("mixtral", "dp=2,ep=2,cp=2", 1, 4),
    ("mixtral", "dp=2,ep=2,cp=2,cp_kind=ring,tp=2,sp=on,pp=2,microbatches=2", 1, 8),
    ("mixtral", "pp=2,microbatches=4,remat=full", 2, 1),
    ("mixtral", "dp=2,ep=4,tp=2,etp=1,sp=on", 1, 2),
    ("deepseek", "dp=2,ep=2,pp=3,microbatches=4,stages=layers", 1, 1),
    ("deepseek", "dp=2,ep=2,pp=2,microbatches=4,schedule=zb_h1,zero=2", 1, 1),
    ("deepseek", "dp=2,pp=2,microbatches=2,zero=3,remat=min_cut", 2, 1),
    ("deepseek", "pp=2,chunks=2,microbatches=4,schedule=interleaved,stages=auto", 1, 1),
]


@pytest.mark.parametrize(("name", "text", "over", "groups"), CASES, ids=str)
def test_every_rank_computes_the_same_step(name, text, over, groups):
    computed_over_ranks(trained(name, over, groups), Plan.parse(text))


@cache
def trained_by(sizes: DecoderSizes) -> Function:
    return differentiate(decoder(sizes, BATCH, SEQ, F64, SKEWED), SGD())


def added(text: str, over: int = 1, groups: int = 1) -> Counter[tuple[str, str, int]]:
    """The collectives that the loss adds to a step of two layers, without what it does to gradients."""
    plan, found = Plan.parse(text), []
    for coefficient in (COEFFICIENT, 0.0):
        sizes = balanced("mixtral", over if coefficient else 1, groups, coefficient)
        found.append(sent(parallelize(trained_by(sizes), plan, topology_of(plan.devices))))
    with_loss, without = found
    with_loss.subtract(without)
    return Counter({key: n for key, n in with_loss.items() if n})


@pytest.mark.parametrize(
    "text", ["dp=2", "dp=2,microbatches=2", "dp=2,ep=2", "dp=4,ep=2,tp=2", "dp=2,tp=2,microbatches=2"]
)
def test_the_loss_of_all_layers_is_summed_with_that_of_the_model(text):
    """A number that is one with the loss: no message more, over dp, ep or tp."""
    assert added(text) == {}


@pytest.mark.parametrize("groups", [4])
def test_parts_of_a_sequence_bring_the_choices_together(groups):
    """Of each layer the choices of each expert in each sequence, as Megatron-LM does over tp x cp.

    The shares of the scores stay sums that the loss takes.
    """
    experts = MIXTRAL.experts.experts
    assert added("dp=2,cp=2", groups=groups) == {("all_reduce", "cp", 8 * BATCH // 2 * experts): 2}


def test_stages_send_their_loss_once_a_step():
    """A number a layer goes to the stage of the model's loss, once its microbatches are summed."""

    def sends(coefficient: float, microbatches: int) -> list[int]:
        sizes = replace(balanced("mixtral", coefficient=coefficient), layers=4)
        plan = Plan(pp=2, microbatches=microbatches, stages="layers")
        program = parallelize(trained_by(sizes), plan, topology_of(2))
        flat = program.to_function()
        return sorted(op.inputs[0].type.nbytes for op in all_ops(flat) if op.op_type == "Send")

    for microbatches in (1, 4):
        assert sends(COEFFICIENT, microbatches) == [8, 8, *sends(0.0, microbatches)]


# --- options ----------------------------------------------------------------------------------------------


def test_options_of_models():
    small = "layers=2,hidden=16,heads=4,kv_heads=2,vocab=16,seq=8"
    for text in (
        f"moe:{small},ffn=8,experts=4,aux_loss=0.01,aux_over=2",
        f"mixtral-8x7b:{small},expert_ffn=8,experts=4,aux_loss=0.01,aux_over=2",
        "deepseek:layers=2,dense=1,hidden=16,heads=4,kv_lora=4,nope=4,rope=2,value=4,ffn=8,vocab=16,seq=8,"
        "experts=4,top_k=2,expert_ffn=8,aux_loss=0.01",
    ):
        function = load_model(text, batch=4)
        layers = [op for op in function.ops if op.is_call and len(op.outputs) == 2]
        assert len(layers) == (1 if text.startswith("deepseek") else 2), text
        assert function.ops[-1].op_type == "Sum"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aux_loss=-1", "aux_loss=-1 must be a decimal number from 0"),
        ("aux_over=2", "aux_over=2 sequences are balanced together by aux_loss, which is 0"),
        ("aux_loss=0.1,aux_over=3", "aux_over=3 does not divide the batch of 4"),
        ("aux_loss=0.1,aux_over=0", "aux_over=0 must be a whole number"),
    ],
)
def test_options_that_cannot_be(text, words):
    with pytest.raises((PlanError, ImportModelError), match=words):
        load_model(f"mixtral-8x7b:layers=2,hidden=16,heads=4,kv_heads=2,expert_ffn=8,seq=8,{text}", batch=4)
    with pytest.raises(PlanError, match="aux_loss=-0.1"):
        Mixture(4, 2, 8, aux_loss=-0.1)


def test_sequences_balanced_together_are_of_one_microbatch():
    joint = differentiate(model("mixtral", over=4), SGD())
    with pytest.raises(PlanError, match="aux_loss.choices: an op needs the whole batch at once, .* into 4"):
        parallelize(joint, Plan(microbatches=4), topology_of(1))
