"""Tensor parallelism as frameworks run it: the vocabulary divided, with sp=on the sequence between products.

Collectives and memory are those of the tables of Megatron-LM (layers.py, mappings.py, cross_entropy.py;
Korthikanti et al. 2022, 2205.05198): s tokens, b samples, h width, t ranks, V vocabulary, 2 bytes an element.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from test_activation_memory import CLUSTER, DROPPING, GROUPS, LLAMA, LOG_SUM_EXP, SBH, A, B, F, S, layer
from training_models import (
    assert_all_readers_agree,
    assert_same_step,
    bert,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    small_llama,
    small_mlp,
    tied,
    topology_of,
)

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import BFloat16, Function, Op, Role, all_ops
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.ops import operator, signature_of
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import SGD, Adam, add_loss, differentiate, set_precision
from distsim.transforms.outlining.outline import outline
from distsim.transforms.sharding.shard import shard

MODELS = {
    "llama": lambda: small_llama(batch=4),
    "gpt": lambda: small_gpt(batch=4),
    "tied": lambda: tied(batch=4),
    "bert": lambda: bert(batch=4),
}
LAYOUTS = [
    ("llama", (1, 2, 1), 1, {}),
    ("llama", (2, 2, 2), 2, {"remat": "full"}),
    ("llama", (2, 2, 1), 1, {"zero": "zero=3"}),
    ("gpt", (1, 4, 1), 2, {}),
    ("gpt", (1, 2, 2), 2, {"zero": "zero=0", "remat": "every:2"}),
    ("tied", (1, 2, 2), 2, {}),
    ("bert", (2, 2, 1), 1, {}),
]


@cache
def case(name: str):
    """A joint function, inputs, and what one device makes of them."""
    joint = differentiate(MODELS[name](), Adam())
    inputs = random_inputs(joint)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


@pytest.mark.parametrize("sp", ["off", "on"])
@pytest.mark.parametrize(("name", "degrees", "microbatches", "options"), LAYOUTS, ids=str)
def test_every_rank_computes_the_same_step(name, degrees, microbatches, options, sp):
    joint, inputs, expected = case(name)
    order = schedule("1f1b", degrees[2], microbatches)
    program = laid_out(joint, mesh_of(*degrees), order, sp=sp, **options)
    assert_same_step(joint, program, inputs, expected)
    table = {"embed", "wte", "table", "words"} & {given.source.name for given in program.inputs}
    divided = [given.shards for given in program.inputs if given.source.name in table]
    assert divided and all((0, "tp", None) in shards for shards in divided), "rows of the vocabulary"


# --- what is sent ---------------------------------------------------------------------------------------


def collectives(sizes: DecoderSizes, plan: Plan) -> Counter[tuple[str, int]]:
    """The collectives of a step over tp: kind and full size in bytes."""
    joint = differentiate(decoder(sizes, B, S, BFloat16()), SGD(lr=0.1))
    function = parallelize(joint, plan, CLUSTER).to_function(steady=True)
    found: Counter[tuple[str, int]] = Counter()

    def count(current: Function) -> None:
        for op in current.ops:
            if op.is_call:
                count(op.callee)
            elif (moved := operator(op.op_type).communication) is not None and operator(op.op_type).moves:
                found[moved.kind, moved.nbytes(signature_of(op))] += 1

    count(function)
    return found


def of_a_layer(sizes: DecoderSizes, plan: Plan) -> dict[tuple[str, int], int]:
    more, fewer = collectives(replace(sizes, layers=4), plan), collectives(sizes, plan)
    return {key: more[key] - fewer[key] for key in more if more[key] != fewer[key]}


@pytest.mark.parametrize("t", [2, 4])
def test_collectives_of_a_layer(t):
    """tp: two all-reduces forward and two backward. With sp: two all-gathers and two reduce-scatters in each
    pass, and the two saved inputs gathered again; gradients of the two norms are summed over the ranks.
    """
    sizes = replace(LLAMA, attention=GroupedHeads(A))  # as many key heads, which four ranks divide as well
    assert of_a_layer(sizes, Plan(tp=t)) == {("all_reduce", 2 * SBH): 4}
    norms = {("all_reduce", 2 * LLAMA.hidden): 2}
    divided = of_a_layer(sizes, Plan(tp=t, sp="on"))
    assert divided == {("all_gather", 2 * SBH): 6, ("reduce_scatter", 2 * SBH): 4} | norms


COLUMNS, ROWS = ((1, "tp", None),), ((0, "tp", None),)


@pytest.mark.parametrize("text", ["tp=8", "tp=8,sp=on", "tp=8,cp=4,sp=on", "tp=4,sp=on,microbatches=2"])
@pytest.mark.parametrize(("hidden", "heads"), [(4096, 32), (16384, 128)])
def test_weights_lie_as_megatron_has_them_however_few_heads_of_keys_there_are(text, hidden, heads):
    """With 8 of them it would be fewer bytes to sum queries, keys and values over ranks that have parts of
    what they are made of, or to bring their weights elsewhere for backward."""
    plan = Plan.parse(text)
    feed, attention = FeedForward(3 * hidden), GroupedHeads(heads, 8)
    sizes = replace(LLAMA, hidden=hidden, attention=attention, feed_forward=feed)
    joint = differentiate(decoder(sizes, 2, 16384, BFloat16(), attention="flash"), SGD(lr=0.1))
    program = parallelize(joint, plan, load_cluster("dgx-a100:4"))
    columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
    for given in program.inputs:
        _, _, name = given.source.name.removesuffix(".w").rpartition(".")
        if given.source.name.startswith("h") and name in (*columns, *rows):
            assert given.shards == (COLUMNS if name in columns else ROWS), given.source.name
    whole = 2 * 16384 * hidden * 2 // plan.cp // plan.microbatches
    ops = [op for op in all_ops(program.to_function()) if operator(op.op_type).moves]
    moved = Counter([op.op_type for op in ops if op.attributes.get("axis") == "tp"])
    assert not moved["MPIAlltoall"]
    if plan.sp == "on":
        gathers = [op for op in ops if op.op_type == "MPIAllgather" and op.attributes["axis"] == "tp"]
        assert {op.outputs[0].type.nbytes for op in gathers} == {whole}
        scatters = [op for op in ops if op.op_type == "MPIReduceScatter"]
        assert {op.inputs[0].type.nbytes for op in scatters if op.attributes["axis"] == "tp"} == {whole}


def test_of_norms_of_all_heads_together_each_rank_takes_its_heads():
    """OLMo 2: queries and keys are gathered for their norms and again, with their gradients, for those of
    backward. What comes out is whole, and nothing of it is summed over ranks or scattered."""
    sizes = replace(LLAMA, attention=GroupedHeads(A, norm="all"))
    found = of_a_layer(sizes, Plan(tp=2, sp="on"))
    assert {(kind, nbytes): n for (kind, nbytes), n in found.items() if nbytes == 2 * SBH} == {
        ("all_gather", 2 * SBH): 6 + 2 + 4,
        ("reduce_scatter", 2 * SBH): 4,
    }


def test_a_norm_behind_a_product_is_divided():
    """Gemma 2 has four norms a layer, two of them behind a product: none runs on the whole sequence."""
    sizes = replace(LLAMA, attention=GroupedHeads(A), norm=replace(LLAMA.norm, place="around"))
    found = of_a_layer(sizes, Plan(tp=2, sp="on"))
    assert {(kind, nbytes): n for (kind, nbytes), n in found.items() if nbytes == 2 * SBH} == {
        ("all_gather", 2 * SBH): 6,
        ("reduce_scatter", 2 * SBH): 4,
    }


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_stays_whole_is_summed_once_a_step(microbatches):
    """With a sum over microbatches all of a rank's in one message."""
    plan = Plan(tp=2, sp="on", microbatches=microbatches)
    found, norms = of_a_layer(LLAMA, plan), 2 * LLAMA.layers + 1
    assert found["reduce_scatter", 2 * SBH // microbatches] == 4 * microbatches
    if microbatches == 1:
        assert found["all_reduce", 2 * LLAMA.hidden] == 2
    else:
        assert collectives(LLAMA, plan)["all_reduce", 2 * LLAMA.hidden * norms] == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [("sp=on", 1), ("sp=on,dp=2", 1), ("sp=on,dp=2,zero=1", 2), ("sp=on,dp=2,zero=2", 2), ("sp=on,pp=2", 1)],
)
def test_gradients_of_norms_are_one_message_of_a_stage(text, parts):
    """Megatron-LM's ``_allreduce_layernorm_grads`` flattens them, with or without data parallelism."""
    plan = Plan.parse(f"tp=2,microbatches=2,{text}")
    joint = differentiate(decoder(LLAMA, B, S, BFloat16()), SGD(lr=0.1))
    counts: dict[str, list[int]] = {}
    for each in (plan, replace(plan, sp="dtensor", tp_overlap="off")):
        function = parallelize(joint, each, topology_of(plan.devices)).to_function()
        found = [
            op for op in all_ops(function) if op.op_type == "MPIAllreduce" and op.attributes["axis"] == "tp"
        ]
        width = LLAMA.hidden // parts
        counts[each.sp] = [len(op.inputs) for op in found if op.inputs[0].type.shape == (width,)]
    norms = 2 * LLAMA.layers + 1
    assert counts["dtensor"] == [1] * norms
    assert sum(counts["on"]) == norms and len(counts["on"]) == plan.pp


@pytest.mark.parametrize("sp", ["off", "on"])
def test_collectives_outside_the_layers(sp):
    """Of the embedding one sum, of the loss three of a number a position in float32, of the head one more.

    With sp the input of the head is gathered in both passes, as the gradient of the embedding is in backward.
    """
    plan = Plan(tp=2, sp=sp)
    every, each = collectives(LLAMA, plan), of_a_layer(LLAMA, plan)
    outside = {key: n - LLAMA.layers * each.get(key, 0) for key, n in every.items()}
    loss = {("all_reduce", 4 * S * B): 3}
    if sp == "off":
        expected = {("all_reduce", 2 * SBH): 2} | loss
    else:
        norm = {("all_reduce", 2 * LLAMA.hidden): 1}
        expected = {("reduce_scatter", 2 * SBH): 2, ("all_gather", 2 * SBH): 3} | loss | norm
    assert {key: n for key, n in outside.items() if n} == expected


def test_logits_are_never_whole():
    sizes = replace(LLAMA, vocab=96)
    joint = differentiate(decoder(sizes, B, S, BFloat16()), SGD(lr=0.1))
    program = parallelize(joint, Plan(tp=4), CLUSTER)
    widths = [v.type.shape[-1] for op in all_ops(program.to_function()) for v in op.outputs if v.type.shape]
    assert 96 // 4 in widths and 96 not in widths


# --- what is kept ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(
    ("remat", "divided", "scores"), [("none", 34, 5), ("attention", 34, 0), ("full", 2, 0)]
)
def test_activations_of_a_layer_are_divided(remat, divided, scores, t):
    """sbh/t (34 + 5as/h); 34sbh/t if selective; the input alone if full."""
    expected = (divided * SBH + scores * A * S * S * B) // t
    assert layer(DROPPING, "math", Plan(tp=t, remat=remat, sp="on")) == expected


def test_activations_of_a_layer_of_llama_are_divided():
    heads = (12 + 4 * GROUPS // A) * SBH
    expected = (heads + 6 * S * B * F + LOG_SUM_EXP) // 2
    assert layer(LLAMA, "flash", Plan(tp=2, sp="on"), "fused") == expected


# --- as any other program --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,pp=2,microbatches=4,sp=on",
        "dp=2,tp=2,microbatches=2,sp=on,zero=3,remat=full",
        "tp=2,pp=2,microbatches=4,sp=on,schedule=zb_h1",
    ],
)
def test_engines_and_memories_agree(text):
    joint = differentiate(small_llama(batch=8), Adam())
    assert_all_readers_agree(parallelize(joint, Plan.parse(text), CLUSTER), CostModel(CLUSTER))


def test_pipelines_send_the_part_of_a_rank():
    joint = differentiate(small_llama(batch=8), None)
    sent = {}
    for sp in ("off", "on"):
        program = parallelize(joint, Plan(tp=2, pp=2, microbatches=2, sp=sp), CLUSTER)
        sends: list[Op] = [op for op in all_ops(program.to_function(steady=True)) if op.op_type == "Send"]
        sent[sp] = sorted({op.inputs[0].type.nbytes for op in sends})
    assert [2 * nbytes for nbytes in sent["on"]] == sent["off"]


# --- what does not go ------------------------------------------------------------------------------------


def test_what_cannot_be_divided_is_refused_with_the_numbers():
    with pytest.raises(
        PlanError, match="sp=on divides activations over tp ranks, and tp=1; use sp=off, or tp=2"
    ):
        Plan(sp="on")
    with pytest.raises(PlanError, match="sp='yes' is not one of off, on"):
        Plan(tp=2, sp="yes")
    odd = differentiate(small_gpt(seq=3), None)
    with pytest.raises(PlanError, match=r"tp=2 does not divide the sequence of 3 \(input 'tokens'\)"):
        parallelize(odd, Plan(tp=2, sp="on"), CLUSTER)
    flat = differentiate(small_mlp(), None)
    with pytest.raises(PlanError, match="no input of mlp.* has a sequence"):
        parallelize(flat, Plan(tp=2, sp="on"), CLUSTER)


@pytest.mark.parametrize("tie", [False, True])
def test_a_vocabulary_that_does_not_divide_is_noted_and_its_logits_are_divided_otherwise(tie):
    """The loss is taken of parts of the sequence; of logits only the gradient is gathered, for the head's."""
    sizes = replace(LLAMA, vocab=1023, tied=tie)
    joint = differentiate(decoder(sizes, B, S, BFloat16()), SGD(lr=0.1))
    program = parallelize(joint, Plan(tp=2, sp="on"), CLUSTER)
    logits, sent = 2 * S * B * 1023, collectives(sizes, Plan(tp=2, sp="on"))
    assert not sent["all_reduce", logits] and sent["all_gather", logits] == 1
    shards = {
        given.source.name: given.shards for given in program.inputs if given.source.role is Role.PARAMETER
    }
    assert (0, "tp", None) not in shards["embed"]
    assert any("tp=2 does not divide the vocabulary of 1023" in note for note in program.notes)


def test_heads_of_an_export_that_ranks_do_not_divide():
    """Queries and keys of 12 heads, whose parts follow from weights, gain no option over 8 ranks: attention
    stays whole, where 133 GB of parts of its gradients would be sent."""
    model = set_precision(load_model("gpt2-onnx", 128, "seq=1024"), BFloat16())
    joint = outline(differentiate(add_loss(model), Adam()))
    found = shard(joint, mesh_of(1, 8, 1)).decisions["tp"]
    assert found.moved == pytest.approx(63.7e9, rel=0.01) and found.divided == pytest.approx(0.912, abs=0.001)
