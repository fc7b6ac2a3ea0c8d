"""Context parallelism: every rank computes the step, sends what is published, keeps its part of a sequence.

Rules: TransformerEngine, ``context_parallel.py`` (ring "p2p", "all_gather", "a2a"); DeepSpeed-Ulysses, blogs/
deepspeed-ulysses; Llama 3 (Dubey et al. 2024), section 3.3.2. s tokens, b samples, h width, a heads, g key
heads of d numbers, c ranks, 2 bytes an element.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from decoder_models import small
from test_activation_memory import GROUPS, LLAMA, LOG_SUM_EXP, SBH, A, B, F, H, S, layer
from test_moe import small_deepseek
from test_sequence_parallel import collectives
from training_models import (
    Maker,
    assert_all_readers_agree,
    assert_same_step,
    bert,
    random_inputs,
    small_gpt,
    small_llama,
    topology_of,
)

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.ir import Literal, all_ops
from distsim.models.parts.attention import GroupedHeads
from distsim.ops import signature_of, work
from distsim.ops.places import shape_of
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate
from distsim.transforms.kernels.attention import set_attention
from distsim.transforms.key_heads import repeat_keys

D = H // A
KV = 2 * GROUPS * D * S * B
"""Bytes of the keys, or the values, of a sequence."""


def attending(masked: bool = False, **attributes):
    """Attention of 4 query and 2 key heads to 8 tokens of 16 numbers, and a loss."""
    make = Maker("attending")
    x, target = make.data("x", 4, 8, 16), make.data("target", 4, 8, 16)
    heads = []
    for name, count in (("q", 4), ("k", 2), ("v", 2)):
        y = make.linear(x, name, 16, 4 * count)
        heads.append(make("Transpose", make("Reshape", y, shape=(4, 8, count, 4)), perm=(0, 2, 1, 3)))
    if masked:
        heads.append(make("Constant", value=Literal(np.random.default_rng(0).standard_normal((1, 1, 8, 8)))))
    y, _ = make.add("Attention", heads, attributes)
    y = make("Reshape", make("Transpose", y, perm=(0, 2, 1, 3)), shape=(4, 8, 16))
    return make.end(make("Loss", y, target, N=4))


MODELS = {
    "llama": lambda: set_attention(small_llama(batch=4, seq=8), "flash"),
    "gpt": lambda: set_attention(small_gpt(batch=4, seq=8), "flash"),
    "latent": lambda: set_attention(small_deepseek(batch=4, seq=8, dense=3), "flash"),
    "repeated": lambda: repeat_keys(set_attention(small_llama(batch=4, seq=8), "flash")),
    "all pairs": attending,
    "window": lambda: attending(is_causal=1, window=3, softcap=5.0),
    "band": lambda: attending(window=5, scale=0.3),
    "mask": lambda: attending(masked=True),
}
LAYOUTS = [
    ("llama", "cp=2"),
    ("llama", "cp=4,cp_kind=ring"),
    ("llama", "cp=4,cp_kind=usp:2"),
    ("llama", "cp=2,tp=2,sp=on"),
    ("llama", "dp=2,cp=2,tp=2,pp=2,microbatches=2,cp_kind=ring,sp=on,remat=full"),
    ("llama", "cp=2,remat=attention,cp_kind=ring,pp=2,microbatches=4"),
    ("llama", "cp=4,tp=2,remat=attention,pp=2,microbatches=2"),
    ("window", "cp=2,remat=attention"),
    ("llama", "cp=4,remat=attention,cp_kind=torch_allgather"),
    ("gpt", "cp=2,dp=2,remat=attention,cp_kind=torch_alltoall"),
    ("gpt", "dp=2,cp=2,microbatches=2,cp_kind=ulysses"),
    ("gpt", "cp=2,tp=2,cp_kind=ulysses,remat=attention"),
    ("gpt", "cp=2,pp=2,microbatches=2,schedule=zb_h1,cp_kind=ring"),
    ("llama", "cp=2,dp=2,zero=1,pp=2,microbatches=2"),
    ("llama", "cp=2,dp=2,zero=2,microbatches=2,cp_kind=ring"),
    ("llama", "cp=4,zero=3,cp_kind=usp:2,pp=2,microbatches=2"),
    ("latent", "cp=2,pp=2,microbatches=2,cp_kind=ring"),
    ("llama", "cp=2,tp=4,cp_kind=ring"),  # more ranks than heads of keys: backward repeats its own
    ("llama", "cp=4,cp_kind=usp:2,remat=full"),
    ("llama", "cp=4,cp_kind=torch_allgather"),
    ("llama", "dp=2,cp=2,tp=2,zero=3,cp_kind=torch_alltoall,sp=on,remat=full"),
    ("gpt", "cp=2,pp=2,microbatches=2,schedule=zb_h1,cp_kind=torch_allgather"),
    ("repeated", "cp=4,tp=2,cp_kind=torch_alltoall"),
    ("all pairs", "cp=4,cp_kind=torch_alltoall"),
    ("window", "cp=4,cp_kind=torch_allgather"),
    ("all pairs", "cp=4,cp_kind=ring"),
    ("window", "cp=4,cp_kind=ring,microbatches=2"),
    ("window", "cp=2"),
    ("band", "cp=4,cp_kind=ring"),
    ("band", "cp=2,dp=2"),
    ("mask", "cp=4"),
    ("mask", "cp=2,cp_kind=ulysses"),
]


@cache
def trained(name):
    """A joint function, inputs, and what one device makes of them."""
    joint = differentiate(MODELS[name](), Adam())
    inputs = random_inputs(joint)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


@pytest.mark.parametrize(("name", "text"), LAYOUTS)
def test_every_rank_computes_the_same_step(name, text):
    (joint, *known), plan = trained(name), Plan.parse(text)
    program = parallelize(joint, plan, topology_of(plan.devices))
    assert_same_step(joint, program, *known)
    assert_all_readers_agree(program)


# --- what is sent and done -------------------------------------------------------------------------------


def exchanged(sizes, plan):
    """The collectives of a layer but the sums of its gradients, whose bytes are those of its parameters."""
    more, fewer = collectives(replace(sizes, layers=4), plan), collectives(sizes, plan)
    more.subtract(fewer)
    weights = 2 * H * H + 2 * H * sizes.attention.groups * D + 3 * H * F + 2 * H
    assert sum(n * size for (kind, size), n in more.items() if kind == "all_reduce") == 2 * weights
    return {key: n for key, n in more.items() if n and key[0] != "all_reduce"}


@pytest.mark.parametrize(("c", "alone", "together"), [(2, 3, 0), (4, 5, 2)])
def test_a_ring_passes_keys_and_values_and_brings_their_gradients_home(c, alone, together):
    """K and V c-1 times in forward, in one message; in backward again, and c-1 times their gradients, in c
    messages: the first of K and V, the last of gradients, both in those between."""
    found = exchanged(LLAMA, Plan(cp=c, cp_kind="ring"))
    sizes = {("shift", 2 * KV // c): alone, ("shift", 4 * KV // c): together}
    assert found == {key: count for key, count in sizes.items() if count}
    assert sum(size * count for (_, size), count in found.items()) == 3 * (c - 1) * 2 * KV // c


@pytest.mark.parametrize("c", [2, 4])
def test_keys_and_values_are_gathered_in_both_passes_and_their_gradients_scattered(c):
    assert exchanged(LLAMA, Plan(cp=c)) == {("all_gather", KV): 4, ("reduce_scatter", KV): 2}
    again = exchanged(LLAMA, Plan(cp=c, remat="attention"))
    assert again == {("all_gather", KV): 6, ("reduce_scatter", KV): 2}


@pytest.mark.parametrize("c", [2, 4])
def test_torch_gathers_keys_once_a_pass_and_sends_gradients_on_in_float32(c):
    """In 16 bits: K and V together once a pass, all-gathered, or c-1 times those of a rank; their gradients
    in four bytes c times, of which the last brings them home."""
    found = exchanged(LLAMA, Plan(cp=c, cp_kind="torch_allgather"))
    assert found == {("all_gather", 2 * KV): 2, ("shift", 2 * 2 * KV // c): c}
    around = exchanged(LLAMA, Plan(cp=c, cp_kind="torch_alltoall"))
    assert around == {("shift", 2 * KV // c): 2 * (c - 1), ("shift", 2 * 2 * KV // c): c}


def test_repeated_keys_are_as_many_as_queries_wherever_they_go():
    """torchtitan's ``repeat_kv``: what is gathered, and saved, is of every query head."""
    model = repeat_keys(small("llama", batch=2, attention="flash"))
    found = [op for op in all_ops(model) if op.op_type == "Attention"]
    assert {shape_of(value)[1] for op in found for value in op.inputs} == {4}
    assert [op.op_type for op in all_ops(model)].count("Expand") == 2 * len(found)
    assert repeat_keys(model) is model
    sent = {}
    for name, function in (("grouped", small("llama", batch=2)), ("repeated", model)):
        program = parallelize(differentiate(function, None), Plan(cp=3, cp_kind="ring"), topology_of(3))
        shifts = [op for op in all_ops(program.to_function()) if op.op_type == "MPIShift"]
        sent[name] = sum(signature_of(op).inputs[0].nbytes for op in shifts)
    assert sent["repeated"] == 2 * sent["grouped"] > 0


def test_heads_are_exchanged_for_sequence():
    """Queries, keys, values and what comes out, a rank's part of each; backward the same of their gradients,
    and what came out once more, which is saved as the output projection reads it: TransformerEngine's
    AttnFuncWithCPAndQKVOA2A saves ``out`` after its exchange and in backward exchanges ``[out, dout]``."""
    found = exchanged(LLAMA, Plan(cp=2, cp_kind="ulysses"))
    assert found == {("all_to_all", SBH): 2 * 2 + 1, ("all_to_all", KV // 2): 2 * 2}


def test_heads_are_exchanged_within_rings_of_others():
    """Both: what a ring of c/u ranks passes has 1/u of the heads of u times as much of a sequence."""
    found = exchanged(LLAMA, Plan(cp=4, cp_kind="usp:2"))
    heads = {("all_to_all", 2 * SBH // 4): 2 * 2 + 1, ("all_to_all", KV // 4): 2 * 2}
    assert found == heads | {("shift", 2 * KV // 4): 3}


def product_flops(program):
    """Those of the matrix products of a rank."""
    demands = [work(signature_of(op)) for op in all_ops(program.to_function())]
    return sum(demand.flops for demand in demands if demand and demand.matrix)


@pytest.mark.parametrize("kind", ["allgather", "ring", "torch_allgather", "torch_alltoall", "ulysses"])
@pytest.mark.parametrize("name", ["llama", "window"])
def test_ranks_do_equal_parts_of_the_work(name, kind):
    """No pair of query and key is multiplied twice: matrix flops of two ranks are those of one."""
    joint = differentiate(MODELS[name](), None)
    plan = Plan(cp=2, cp_kind=kind)
    program = parallelize(joint, plan, topology_of(2))
    whole = parallelize(joint, Plan(), topology_of(1))
    assert 2 * product_flops(program) == pytest.approx(product_flops(whole), rel=1e-12)


# --- what is kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["allgather", "ring", "torch_allgather", "ulysses"])
@pytest.mark.parametrize("c", [2, 4])
def test_activations_of_a_layer_are_those_of_a_part_of_the_sequence(kind, c):
    """s becomes s/c everywhere; with two heads of keys four ranks exchange none."""
    sizes = LLAMA if kind != "ulysses" else replace(LLAMA, attention=GroupedHeads(A))
    heads = (12 + 4 * (GROUPS if kind != "ulysses" else A) // A) * SBH
    expected = (heads + 6 * S * B * F + LOG_SUM_EXP) // c
    assert layer(sizes, "flash", Plan(cp=c, cp_kind=kind), "fused") == expected
    # Of attention that is computed again its statistics are not saved, nor keys and values of other ranks.
    again = Plan(cp=c, cp_kind=kind, remat="attention")
    assert layer(sizes, "flash", again, "fused") == expected - LOG_SUM_EXP // c


# --- what does not go ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "text", "message"),
    [
        (MODELS["llama"], "cp=8", "cp=8 times 2 halves does not divide the sequence of 8 .*cp one of 2, 4"),
        (
            MODELS["llama"],
            "cp=4,cp_kind=ulysses",
            "cp=4 by ulysses does not divide, beside tp=1, the 4 .* 2 of keys; use one of 2,",
        ),
        (
            MODELS["llama"],
            "cp=2,tp=2,cp_kind=ulysses",
            "by ulysses does not divide, beside tp=2, .*; use one of no ranks",
        ),
        (
            MODELS["mask"],
            "cp=2,cp_kind=ring",
            "by ring: .* a ring takes as many keys as queries, and no mask",
        ),
        (lambda: attending(masked=True, is_causal=1), "cp=2", "allgather takes no mask beside a causal one"),
        (small_llama, "cp=2", "has no attention that is one op; say --attention flash, or cp=1"),
        (bert, "cp=3", "cp=3 times 2 halves does not divide the sequence of 4"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(build, text, message):
    plan = Plan.parse(text)
    with pytest.raises(PlanError, match=message):
        parallelize(differentiate(build(), None), plan, topology_of(plan.devices))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp=0", "cp=0 is out of range"),
        ("cp=2,cp_kind=star", "cp_kind='star' is unknown; choose one of allgather, ring, torch_allgather, "),
        ("cp=4,cp_kind=usp:3", "3 ranks that exchange heads do not divide cp=4"),
        ("dp=2,cp_kind=ring", "cp_kind=ring is how ranks that divide a sequence attend, and cp=1"),
    ],
)
def test_plans_of_no_context_are_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)
