"""How rows get to the ranks of their experts: sent by all-to-alls, or taken from the tokens of all ranks.

Megatron-LM's all-gather dispatcher (token_dispatcher.py, MoEAllGatherTokenDispatcher): an all-gather of the
tokens of all ranks, a reduce-scatter of what experts make of them; backward the same two mirrored.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from expert_models import (
    BATCH,
    DEEPSEEK,
    EVEN,
    LARGE,
    MIXTRAL,
    PADDED,
    SENT,
    SEQ,
    SKEWED,
    H,
    K,
    computed_over_ranks,
    of_two_layers,
)
from training_models import F64, topology_of

from distsim.compose import parallelize
from distsim.cost.demand import collective_of
from distsim.errors import ImportModelError, PlanError
from distsim.executor import CostModel, Simulator
from distsim.hardware import collective_time, collective_transfer, load_cluster
from distsim.importer import load_model
from distsim.ir import BFloat16, all_ops
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.mixture import Mixture
from distsim.models.routing import Loads
from distsim.ops import signature_of, work
from distsim.plan import Plan
from distsim.token_choice import TokenChoice
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.kernels.policies import KERNELS


def gathering(sizes: DecoderSizes, **changes: object) -> DecoderSizes:
    return replace(sizes, experts=replace(sizes.experts, dispatcher="allgather", **changes))


CASES = [
    ("mixtral", "dp=2,ep=2", 1, SKEWED),
    ("mixtral", "dp=4,ep=2,microbatches=2,schedule=gpipe", 1, PADDED),
    ("mixtral", "dp=2,tp=2", 1, SKEWED),  # no ranks of experts: nothing to bring together
    ("mixtral", "dp=4,ep=2,tp=2,sp=on,pp=2,microbatches=2", 2, SKEWED),
    ("mixtral", "dp=2,ep=2,cp=2", 4, SKEWED),
    ("deepseek", "dp=2,ep=2,pp=2,microbatches=4,schedule=zb_h1,zero=2,remat=full", 1, SKEWED),
    ("deepseek", "dp=4,ep=2,microbatches=2,zero=3", 1, EVEN),
    ("mixtral", "dp=2,ep=4,cp=2,microbatches=2", 4, SKEWED),  # over ranks of dp and cp
    ("mixtral", "ep=4,cp=2,tp=2,etp=1,sp=on", 8, PADDED),  # of cp and tp
    ("mixtral", "tp=4,ep=2,etp=2,sp=on", 2, SKEWED),  # groups are in parts of all ranks of tp
    ("mixtral", "cp=4,ep=2,cp_kind=ring", 8, PADDED),
]


@pytest.mark.parametrize(("name", "text", "groups", "loads"), CASES, ids=str)
def test_every_rank_computes_the_same_step(name, text, groups, loads):
    sizes = {"mixtral": MIXTRAL, "deepseek": replace(DEEPSEEK, layers=3)}[name]
    joint = differentiate(decoder(gathering(sizes, groups=groups), BATCH, SEQ, F64, loads), Adam())
    plan = Plan.parse(text)
    computed_over_ranks(joint, plan)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("dp", "e"), [(2, 2), (4, 2), (4, 4)])
def test_collectives_of_two_layers(dp, e, microbatches):
    """All tokens of the ranks gathered, what is made of them reduce-scattered, and mirrored in backward.

    Beside, each rank sends where the rows of others' experts lie and their gates, and gets their gradients:
    a number of 8 and of 2 bytes a row.
    """
    found = of_two_layers(Plan(dp=dp, ep=e, microbatches=microbatches), gathering(SENT))
    tokens = BATCH * SEQ // (dp * microbatches)
    moved = Counter({key: n for key, n in found.items() if key[0] != "all_reduce"})
    assert moved == {
        ("all_gather", "ep", 2 * e * tokens * H): 2 * 2 * microbatches,
        ("reduce_scatter", "ep", 2 * e * tokens * H): 2 * 2 * microbatches,
        ("all_to_all", "ep", 8 * tokens * K): 2 * microbatches,
        ("all_to_all", "ep", 2 * tokens * K): 2 * 2 * microbatches,
    }


def test_the_dispatcher_is_pinned_whatever_it_costs():
    """Rows are sent where tokens would be fewer bytes, and tokens are where rows would."""
    many, few = Mixture(8, 6, 16), Mixture(8, 1, 16)
    for experts, e in ((many, 2), (few, 4)):
        for dispatcher in ("alltoall", "allgather"):
            sizes = replace(SENT, experts=replace(experts, dispatcher=dispatcher))
            found = of_two_layers(Plan(dp=e, ep=e), sizes)
            rows = 2 * BATCH * SEQ // e * experts.top_k * H
            counts = ("all_gather", "ep", e * 8 * 8)  # of rows, before they are sent
            assert (counts in found) == (dispatcher == "alltoall")
            moved = ("all_gather", "reduce_scatter")
            gathers = {key: n for key, n in found.items() if key[0] in moved and key != counts}
            assert bool(gathers) == (dispatcher == "allgather")
            assert (("all_to_all", "ep", rows) in found) == (dispatcher == "alltoall")


def test_experts_do_the_same_work():
    def flops(sizes: DecoderSizes, loads: Loads) -> list[float]:
        joint = differentiate(decoder(sizes, BATCH, SEQ, BFloat16(), loads), SGD())
        program = parallelize(joint, Plan(dp=4, ep=4), topology_of(4))
        products = [op for op in all_ops(program.to_function()) if op.op_type.startswith("GroupedMatMul")]
        return sorted(work(signature_of(op)).flops for op in products)

    for loads in (EVEN, Loads(0.3, seed=2), Loads(0.3, 1.25, seed=2)):
        assert flops(gathering(SENT), loads) == flops(SENT, loads)


def test_tokens_are_brought_together_where_many_experts_want_them():
    """(e - 1) T h against (e - 1) / e T k h elements of each rank: many choices over few ranks, and back."""
    topology = load_cluster("dgx-h100")

    def step(dispatcher: str, top_k: int, ranks: int) -> float:
        experts = Mixture(16, top_k, 256, dispatcher=dispatcher)
        joint = differentiate(decoder(replace(LARGE, experts=experts), 8, 1024, BFloat16()), SGD())
        program = parallelize(joint, Plan(dp=ranks, ep=ranks), topology)
        return Simulator(CostModel(topology)).simulate(program).step_time

    assert step("allgather", 8, 2) < step("alltoall", 8, 2)
    assert step("allgather", 1, 8) > step("alltoall", 1, 8)


def test_options_of_models():
    small = "layers=2,hidden=16,heads=4,kv_heads=2,vocab=16,seq=8,experts=4"
    for name in ("mixtral-8x7b:expert_ffn=8", "moe:ffn=8"):
        function = load_model(f"{name},{small},dispatcher=allgather", batch=4)
        assert [op.attributes["groups"] for op in all_ops(function) if op.op_type == "GatherND"]
        weighted = [
            op
            for op in all_ops(load_model(f"{name},{small},weighted=experts", batch=4))
            if "weighted" in op.outputs[0].name
        ]
        assert {op.outputs[0].type.shape[-1] for op in weighted} == {8}
        with pytest.raises(
            (PlanError, ImportModelError), match="weighted='rows' is not one of tokens, experts"
        ):
            load_model(f"{name},{small},weighted=rows", batch=4)
        with pytest.raises(
            (PlanError, ImportModelError), match="dispatcher='flex' is not one of alltoall, allgather, deepep"
        ):
            load_model(f"{name},{small},dispatcher=flex", batch=4)


# --- once to each node ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [TokenChoice(8, 64, 8, 3), TokenChoice(4, 32), TokenChoice(2, 16, 4, 2)])
def test_how_many_parts_a_token_reaches(choice):
    """As counted over many random choices, of parts of several groups, of one, and within one."""
    rng = np.random.default_rng(0)
    size, tokens = choice.experts // choice.groups, 20_000
    groups = rng.permuted(np.tile(np.arange(choice.groups), (tokens, 1)), axis=1)[:, : choice.limit]
    usable = (groups[:, :, None] * size + np.arange(size)).reshape(tokens, -1)
    chosen = rng.permuted(usable, axis=1)[:, : choice.top_k]
    for parts in (1, 2, choice.groups, 16):
        held = np.sort(chosen // (choice.experts // parts), axis=1)
        counted = 1 + np.mean((np.diff(held, axis=1) > 0).sum(axis=1))
        assert choice.reached(parts) == pytest.approx(counted, rel=0.01)
    assert choice.reached(1) == pytest.approx(1.0)
    assert choice.reached(choice.experts) == pytest.approx(choice.top_k)
    assert TokenChoice.of(str(choice)) == choice and TokenChoice.of("all_to_all") is None


def test_bytes_and_seconds_of_an_exchange():
    """64 ranks on 8 nodes: tokens of 4 of 8 groups leave for (m-1)/m of 3.63 nodes, not for all 8 experts."""
    topology = load_cluster("dgx-h100:8")
    group, choice, nbytes = tuple(topology.devices), TokenChoice(8, 256, 8, 4), 8 * 1e9
    found = collective_transfer(str(choice), nbytes, group, topology)
    level = {hop: topology.level(*hop).name for hop, _ in found.hops}
    names = list(dict.fromkeys(level.values()))
    assert len(names) == 2
    sent = {name: {size for hop, size in found.hops if level[hop] == name} for name in names}
    between = [7 / 8 * choice.reached(8) * 1e9, 7 / 8 * choice.reached(64) * 1e9]
    assert sorted(size for sizes in sent.values() for size in sizes) == pytest.approx(between)
    seconds = collective_time(str(choice), nbytes, group, topology)
    nic = topology.level(group[0], group[8]).link.achieved
    assert seconds == found.seconds == pytest.approx(found.latency + between[0] / nic, rel=1e-9)
    assert seconds < 0.6 * collective_time("all_to_all", nbytes, group, topology)
    within = collective_time(str(choice), nbytes, group[:8], topology)  # of a node: once to each rank
    assert within == pytest.approx(
        collective_time("all_to_all", choice.reached(8) * 1e9, group[:8], topology), rel=1e-9
    )


@pytest.mark.parametrize(
    ("text", "loads"),
    [("dp=2,ep=2", EVEN), ("dp=4,ep=4,tp=2,sp=on", SKEWED), ("dp=2,ep=2,pp=2,microbatches=2", SKEWED)],
)
def test_steps_with_tokens_once_to_each_node(text, loads):
    """The same numbers, over both engines, whichever way rows take; backward goes as forward does."""
    experts = replace(DEEPSEEK.experts, dispatcher="deepep", n_group=2, topk_group=1)
    groups = 2 if "sp=on" in text else 1
    sizes = replace(DEEPSEEK, layers=3, experts=replace(experts, groups=groups))
    joint = differentiate(decoder(sizes, BATCH, SEQ, F64, loads), Adam())
    program = computed_over_ranks(joint, Plan.parse(text))
    exchanges = [
        op
        for op in all_ops(program.to_function())
        if op.op_type == "MPIAlltoall" and op.attributes["axis"] == "ep"
    ]
    kinds = {collective_of(signature_of(op), ())[0] for op in exchanges}
    assert kinds == {"tokens to 2 of 4 in 1 of 2"}


@pytest.mark.parametrize(("loads", "told"), [(EVEN, 1), (SKEWED, 1), (PADDED, 0)])
@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
def test_ranks_tell_each_other_how_many_rows_come_and_their_hosts_wait(dispatcher, loads, told):
    """Once for a layer and a microbatch, and again where it runs again; not with slots that are all sent."""
    sizes = replace(SENT, experts=replace(SENT.experts, dispatcher=dispatcher))
    joint = differentiate(decoder(sizes, BATCH, SEQ, BFloat16(), loads), SGD())
    for text, times in (("dp=2,ep=2", 1), ("dp=2,ep=2,microbatches=2", 2), ("dp=2,ep=2,remat=full", 2)):
        program = parallelize(joint, Plan.parse(text), topology_of(2), kernels=KERNELS["eager"])
        ops = [*all_ops(program.to_function(steady=True))]
        waits = [op for op in ops if op.op_type == "Await"]
        gathers = [op for op in ops if op.op_type == "MPIAllgather"]
        assert len(waits) == len(gathers) == 2 * times * told
        assert all(op.outputs[0] in wait.inputs for op, wait in zip(gathers, waits, strict=True))
        assert all(op.outputs[0].type.shape == (2 * 8,) for op in gathers)


def test_nothing_is_issued_before_the_counts_are_there():
    """The device idles while the host issues what it could not before: the step is longer by more than the
    kernel that counts and the message; without a host by these."""
    topology = load_cluster("dgx-h100")

    def step(loads: Loads, kernels: str) -> float:
        joint = differentiate(decoder(LARGE, 8, 1024, BFloat16(), loads), SGD())
        program = parallelize(joint, Plan(dp=2, ep=2), topology, kernels=KERNELS[kernels])
        return Simulator(CostModel(topology, kernels=kernels)).simulate(program).step_time

    slots = Loads(capacity=1.0)  # as many rows, and all ranks know that
    alone = step(EVEN, "ops") - step(slots, "ops")
    assert alone > 0
    assert step(EVEN, "eager") - step(slots, "eager") > 1.5 * alone
