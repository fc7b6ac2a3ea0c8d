"""Expert parallelism: computed over every rank, its collectives, its refusals, what overlaps.

Collectives are those of ``layouts.md``: T tokens of a rank, each of which goes to k experts, h width.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from expert_models import (
    BATCH,
    EVEN,
    LARGE,
    MIXTRAL,
    PADDED,
    SENT,
    SEQ,
    SKEWED,
    VOCAB,
    H,
    K,
    computed_over_ranks,
    distinct_inputs,
    model,
    of_two_layers,
    sent,
)
from training_models import F64, topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import BFloat16, Function, Role, all_ops, callees
from distsim.models import Routing, draw_routing
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import Positions
from distsim.models.mixture import Mixture
from distsim.models.parts.attention import GroupedHeads
from distsim.models.routing import Loads
from distsim.ops import signature_of, work
from distsim.ops.parts import Groups
from distsim.plan import Plan
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.kernels.attention import set_attention

# More are those of test_auxiliary_loss.py, of the same layers with one loss more.
CASES = [
    ("mixtral", "dp=4,ep=2,tp=2,sp=on", 2, EVEN),
    ("mixtral", "dp=4,ep=2,tp=2,pp=2,microbatches=2,remat=full", 1, SKEWED),
    ("mixtral", "dp=2,cp=2", 2, SKEWED),  # a group is in parts of both ranks
    ("mixtral", "dp=2,ep=2,cp=2,order=ep-dp-pp-cp-tp", 1, SKEWED),
    ("deepseek", "dp=4,ep=4,microbatches=2,remat=full", 2, EVEN),
    ("mixtral", "dp=2,ep=2,cp=2,cp_kind=ring,tp=2,sp=on,pp=2,microbatches=2", 8, EVEN),
    ("deepseek", "dp=2,ep=2,pp=2,microbatches=4,schedule=zb_h1", 1, SKEWED),
    ("deepseek", "dp=2,ep=2,tp=2,sp=on,pp=2,microbatches=2", 2, PADDED),
    ("mixtral", "dp=2,ep=4,cp=2,microbatches=2", 4, SKEWED),
    ("mixtral", "dp=4,ep=4,cp=2,cp_kind=ring,zero=1", 4, SKEWED),  # two of dp, all of cp
    ("mixtral", "ep=4,cp=4,cp_kind=usp:2,zero=3", 8, EVEN),
    ("mixtral", "dp=2,ep=2,tp=2,etp=1,sp=on,zero=3", 2, SKEWED),
    ("mixtral", "cp=4,ep=2,cp_kind=ring,microbatches=2", 8, SKEWED),  # of a context two have the same
    ("mixtral", "dp=2,cp=4,ep=2,zero=3", 1, SKEWED),
    ("deepseek", "cp=4,ep=2,cp_kind=ulysses,pp=2,microbatches=2,zero=1", 4, PADDED),
    ("mixtral", "cp=4,ep=2,cp_kind=usp:2,remat=full", 8, EVEN),  # those that exchange heads
    ("mixtral", "dp=2,cp=2,ep=4,tp=2,etp=1,sp=on,zero=1", 8, EVEN),
    ("mixtral", "tp=4,ep=2,etp=2,sp=on,microbatches=2", 4, SKEWED),  # an expert on two of four ranks
    ("deepseek", "dp=2,tp=4,ep=2,etp=2,sp=on,pp=2,microbatches=2", 4, PADDED),
    ("mixtral", "dp=2,tp=4,ep=2,etp=2,sp=on,zero=1,order=dp-tp-ep-cp-pp", 1, SKEWED),
]


@cache
def trained(name: str, groups: int, loads: Loads) -> Function:
    return differentiate(model(name, groups, loads), Adam())


@pytest.mark.parametrize(("name", "text", "groups", "loads"), CASES, ids=str)
def test_every_rank_computes_the_same_step(name, text, groups, loads):
    joint, plan = trained(name, groups, loads), Plan.parse(text)
    program = computed_over_ranks(joint, plan)
    experts = [given for given in program.inputs if ".experts." in given.source.name]
    assert experts and all(((0, "ep", None) in given.shards) == (plan.ep > 1) for given in experts)
    within = {axis: plan.etp for given in experts for _, axis, _ in given.shards if axis in ("tp", "etp")}
    assert plan.etp == 0 or within == ({"etp": plan.etp} if plan.etp > 1 else {})
    others = [
        given for given in program.inputs if given.source.role is Role.PARAMETER and given not in experts
    ]
    assert not any(axis == "ep" for given in others for _, axis, _ in given.shards)


def test_what_kernels_and_recomputation_make_again_is_made_once():
    plan = Plan.parse("dp=4,ep=4,remat=full,zero=1")  # which rows a rank has is a constant of both passes
    program = computed_over_ranks(differentiate(model("deepseek", 1, EVEN), SGD()), plan, "compiled")
    backward = program.stages[0].backward.function
    made = [
        [(op.op_type, op.attributes) for op in each.ops if not op.inputs]
        for each in (*callees(backward), backward)
    ]
    assert any(made) and all(len(set(own)) == len(own) for own in made)


@pytest.mark.parametrize(
    "text", ["cp=8,ep=2,cp_kind=usp:4", "cp=8,ep=4,cp_kind=usp:2", "cp=2,tp=4,ep=4,etp=2,sp=on,zero=1"]
)
def test_every_rank_of_eight_computes_the_same_step_of_longer_sequences(text):
    """Of those that exchange heads some; of a ring some, and all that exchange heads; of cp and of tp."""
    sizes = replace(
        MIXTRAL,
        attention=GroupedHeads(4),
        experts=replace(MIXTRAL.experts, groups=16),
        positions=Positions(2 * SEQ),
    )
    joint = differentiate(decoder(sizes, 2, 2 * SEQ, F64, EVEN), Adam())
    computed_over_ranks(joint, Plan.parse(text))


def test_a_sequence_that_ranks_do_not_divide_is_refused_with_the_degrees_that_do():
    """Not for the groups in which its tokens are routed, which nobody gave."""
    small = "mixtral-8x7b:layers=2,hidden=16,heads=4,kv_heads=2,vocab=16,seq=8,experts=4,expert_ffn=8"
    plan = Plan(cp=3)
    function = set_attention(load_model(small, 4, "", (), plan.sequence_parts), "flash")
    with pytest.raises(
        PlanError, match="cp=3 times 2 halves does not divide the sequence of 8 .*cp one of 2, 4"
    ):
        parallelize(differentiate(function, None), plan, topology_of(3))


# --- what is sent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("dp", "e"), [(2, 2), (4, 2), (4, 4)])
def test_collectives_of_two_layers(dp, e, microbatches):
    """Dispatch and combine, T k h elements each, and the same two of their gradients in backward; before the
    dispatch how many rows each rank has for every expert, gathered, a number of 8 bytes each.

    Gradients of experts are summed over the ranks that have the same, all others over dp, once a step.
    """
    found = of_two_layers(Plan(dp=dp, ep=e, microbatches=microbatches))
    tokens = BATCH * SEQ // (dp * microbatches)
    exchanged = {key: n for key, n in found.items() if key[0] == "all_to_all"}
    assert exchanged == {("all_to_all", "ep", 2 * tokens * K * H): 2 * 4 * microbatches}
    counts = {key: n for key, n in found.items() if key[0] == "all_gather"}
    assert counts == {("all_gather", "ep", e * SENT.experts.experts * 8): 2 * microbatches}
    sums = dict.fromkeys(("dp", "ep", "edp"), 0)
    for (kind, axis, nbytes), n in found.items():
        if kind == "all_reduce":
            sums[axis] += n * nbytes
    router, norms, attention = H * 8, 2 * H, 2 * H * H + 2 * H * 2 * (H // 4)
    whole, experts = 2 * (router + norms + attention), 2 * 3 * 8 * H * 16 // e
    assert sums["edp"] == (2 * experts if dp > e else 0)
    assert sums["dp" if dp > e else "ep"] == 2 * whole
    assert {kind for kind, _, _ in found} == {"all_to_all", "all_gather", "all_reduce"}


@pytest.mark.parametrize("e", [2, 4])
def test_gates_are_sent_with_rows_that_experts_weigh(e):
    """Megatron-LM's second all-to-all: T k probabilities forward, their gradients back."""
    sizes = replace(SENT, experts=replace(SENT.experts, weighted="experts"))
    found, plain = of_two_layers(Plan(dp=e, ep=e), sizes), of_two_layers(Plan(dp=e, ep=e))
    gates = ("all_to_all", "ep", 2 * BATCH * SEQ // e * K)
    assert gates not in plain and found == {**plain, gates: 2 * 2}


@pytest.mark.parametrize(
    ("dispatcher", "text", "loads"),
    [
        ("alltoall", "dp=2,ep=2,pp=2,microbatches=2", SKEWED),
        ("allgather", "dp=2,ep=2,pp=2,microbatches=2", SKEWED),
        ("alltoall", "dp=4,ep=4,tp=2,sp=on,zero=1", PADDED),
        ("deepep", "dp=4,ep=4,tp=2,sp=on,zero=1", PADDED),
        ("allgather", "dp=2,ep=2,tp=2,etp=1,sp=on,remat=full", EVEN),
        ("deepep", "dp=2,ep=2,tp=2,etp=1,sp=on,remat=full", EVEN),
    ],
)
def test_rows_that_experts_weigh_are_those_of_the_same_step(dispatcher, text, loads):
    """The function is the same, whoever multiplies; and every rank computes it."""
    experts = replace(MIXTRAL.experts, dispatcher=dispatcher, groups=2)
    made: list[float] = []
    for weighted in ("tokens", "experts"):
        sizes = replace(MIXTRAL, experts=replace(experts, weighted=weighted))
        joint = differentiate(decoder(sizes, BATCH, SEQ, F64, loads), Adam())
        made.append(float(SequentialExecutor().compute(joint, distinct_inputs(joint))[0]))
    assert made[0] == pytest.approx(made[1], rel=1e-12)
    computed_over_ranks(joint, Plan.parse(text))


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("dp=2,ep=4,cp=2,cp_kind=ring", "ep_dp+cp"),
        ("dp=4,ep=4,cp=2,cp_kind=ring", "dp+cp"),
        ("dp=2,ep=2,cp=2,cp_kind=ring", "dp+cp"),
        ("dp=2,ep=4,tp=2,etp=1,sp=on", "ep_dp"),
        ("dp=4,ep=4,tp=2,etp=1,sp=on", "dp"),
        ("dp=2,ep=2,tp=2,etp=1,sp=on", "dp"),
    ],
)
def test_ranks_of_a_context_or_of_tp_exchange_their_own_tokens(text, others):
    """All-to-alls as over dp, of the T tokens of a rank after cp and sp; over tp only attention gathers.

    Gradients of experts are summed over the ranks that have the same: dp cp tp / (ep etp).
    """
    plan = Plan.parse(text)
    sizes = replace(SENT, experts=Mixture(4, K, 16, groups=4 if plan.cp > 1 else 2))
    found = of_two_layers(plan, sizes)
    tokens = BATCH * SEQ // plan.devices
    exchanged = {key: n for key, n in found.items() if key[0] == "all_to_all"}
    assert exchanged == {("all_to_all", "ep", 2 * tokens * K * H): 2 * 4}
    sums: Counter[str] = Counter()
    for (kind, axis, nbytes), n in found.items():
        if kind == "all_reduce" and axis != "tp":
            sums[axis] += n * nbytes
    product = 2 * H * H + 2 * H * 2 * (H // 4)
    whole, experts = 2 * (H * 4 + 2 * H + product // plan.tp), 2 * 3 * 4 * H * 16 // plan.ep
    same = plan.devices // plan.ep
    axis = "edp" if plan.ep > 2 else "dp"
    expected = (
        {others: 2 * whole} if same == 1 else Counter({others: 2 * whole}) + Counter({axis: 2 * experts})
    )
    assert sums == expected
    gathered = [n for (kind, axis, _), n in found.items() if kind == "all_gather" and axis == "tp"]
    if plan.dp == 2:  # of more, the norms of so small a model read whole sequences
        assert sum(gathered) == (2 * 3 if plan.tp > 1 else 0)


def test_some_ranks_of_a_context_exchange_and_the_others_have_the_same_experts():
    """T k h of a rank over ep; gradients of experts over the cp / ep ranks with the same, others over cp."""
    found = of_two_layers(
        Plan.parse("cp=4,ep=2,cp_kind=ring"), replace(SENT, experts=Mixture(4, 4, 16, groups=8))
    )
    tokens = BATCH * SEQ // 4
    assert {key: n for key, n in found.items() if key[0] == "all_to_all"} == {
        ("all_to_all", "ep", 2 * tokens * 4 * H): 8
    }
    sums: Counter[str] = Counter()
    for (kind, axis, nbytes), n in found.items():
        assert kind in ("all_to_all", "all_gather", "all_reduce", "shift") and axis in ("ep", "ecp", "cp")
        sums[axis] += n * nbytes * (kind == "all_reduce")
    product = 2 * H * H + 2 * H * 2 * (H // 4)
    assert +sums == {"ecp": 2 * 2 * 3 * 4 * H * 16 // 2, "cp": 2 * 2 * (H * 4 + 2 * H + product)}


def test_rows_are_gathered_over_the_ranks_of_an_expert():
    """Megatron-LM's dispatcher with etp: an all-to-all of a rank's own T k h over ep, an all-gather of them
    over etp, back a reduce-scatter; mirrored in backward, of what was saved as gathered."""
    found = of_two_layers(
        Plan.parse("dp=2,tp=4,ep=4,etp=2,sp=on"), replace(SENT, experts=Mixture(4, K, 16, groups=4))
    )
    rows = 2 * BATCH * SEQ // 8 * K * H
    exchanged = {key: n for key, n in found.items() if key[1] in ("ep", "etp", "ep_tp")}
    assert exchanged == {
        ("all_to_all", "ep", rows): 8,
        ("all_gather", "ep", 4 * 4 * 8): 2,  # the counts of rows
        ("all_gather", "etp", 2 * rows): 4,
        ("reduce_scatter", "etp", 2 * rows): 4,
    }


def test_a_rank_keeps_its_own_experts_whole_and_divides_their_state_over_those_with_the_same():
    """layouts.md: bytes a parameter, of experts with edp = dp cp tp / (ep etp) for d."""

    sizes = replace(MIXTRAL, attention=GroupedHeads(4), experts=replace(MIXTRAL.experts, groups=4))
    joint = differentiate(decoder(sizes, BATCH, SEQ, F64, EVEN), Adam())

    def kept(text: str) -> dict[str, int]:
        program = parallelize(joint, Plan.parse(text), topology_of(8))
        assert "every tp rank does them all" not in str(program.notes), "a rank's experts are its own"
        return next(iter(program_memory(program).devices.values())).by_kind

    h, layers, size = MIXTRAL.hidden, 2, 8
    experts = layers * 3 * 4 * h * 8 * size
    divided = layers * 4 * h * h + 2 * VOCAB * h  # over tp: attention, embedding and head
    whole = layers * (h * 4 + 2 * h) + h
    for text, parts, same in (
        ("dp=4,tp=2,sp=on,ep=4,etp=1", 4, 2),
        ("dp=4,tp=2,sp=on,ep=2,etp=1", 2, 4),
        ("dp=2,cp=4,ep=4", 4, 2),
        ("dp=2,cp=4,ep=2", 2, 4),
        ("dp=2,tp=4,sp=on,ep=2,etp=2", 4, 2),
        ("dp=2,tp=4,sp=on,ep=4,etp=2", 8, 1),
    ):
        plan = Plan.parse(text)
        rest, found = (divided // plan.tp + whole) * size, kept(text)
        assert found["parameters"] == experts // parts + rest
        assert found["state"] == 2 * found["parameters"]
        found = kept(f"{text},zero=1")
        assert found["parameters"] == experts // parts + rest
        assert found["state"] == 2 * (experts // parts // same + rest // (plan.dp * plan.cp))


def test_with_tp_and_sp_rows_are_exchanged_by_parts_and_gathered_where_experts_read_them():
    """Megatron-LM's dispatcher: an all-to-all of the rank's own T k h, then an all-gather over tp; back, a
    reduce-scatter before the all-to-all. Tokens are in groups as ranks of tp have them."""
    sizes = replace(SENT, experts=replace(SENT.experts, groups=2))
    found = of_two_layers(Plan(dp=2, ep=2, tp=2, sp="on"), sizes)
    rows = 2 * BATCH * SEQ // 2 * K * H  # of a rank of dp: of both tp ranks
    assert {key: n for key, n in found.items() if key[0] == "all_to_all"} == {
        ("all_to_all", "ep", rows // 2): 8
    }
    assert found["reduce_scatter", "tp", rows] == 4
    # What was gathered in forward is again, as its input is saved.
    assert found["all_gather", "tp", rows] == 6


def test_all_wait_for_the_rank_of_the_busiest_experts():
    """Rows are padded to the busiest rank's: exchanged, and multiplied."""
    routing = Routing((8,) * 8, (8, 8, 1, 1, 1, 1, 1, 1))
    joint = differentiate(decoder(SENT, BATCH, SEQ, BFloat16(), Loads(routings=[routing] * 2)), SGD())
    program = parallelize(joint, Plan(dp=2, ep=2), topology_of(2))
    busiest = Groups(routing.slots).largest(2)
    assert busiest == 18
    assert sent(program)["all_to_all", "ep", 2 * BATCH * busiest * H] == 2 * 4
    products = [op for op in all_ops(program.to_function()) if op.op_type.startswith("GroupedMatMul")]
    assert all(work(signature_of(op)).flops == 2 * BATCH * busiest * H * 16 for op in products)


@pytest.mark.parametrize("capacity", [1.0, 1.25, 2.0])
def test_with_a_capacity_each_expert_has_as_many_rows_of_each_sequence(capacity):
    """E x capacity rows are sent and multiplied, whatever is asked for (Megatron-LM's get_capacity)."""
    joint = differentiate(decoder(SENT, BATCH, SEQ, BFloat16(), Loads(0.3, capacity, seed=2)), SGD())
    program = parallelize(joint, Plan(dp=2, ep=2), topology_of(2))
    rows = 8 * math.ceil(capacity * SEQ * K / 8)
    assert sent(program)["all_to_all", "ep", 2 * BATCH // 2 * rows * H] == 2 * 4
    products = [op for op in all_ops(program.to_function()) if op.op_type.startswith("GroupedMatMul")]
    assert all(work(signature_of(op)).flops == 2 * BATCH * rows // 2 * H * 16 for op in products)


def test_padding_takes_the_memory_of_its_rows():
    """A row is saved as it comes [H], its gate, up, activated and gated [ffn] each, and what it is made [H].

    Its gate and place, 2 and 8 bytes, beside.
    """

    def saved_by_a_layer(loads: Loads) -> int:
        def activations(layers: int) -> int:
            function = decoder(replace(LARGE, layers=layers), 8, 1024, BFloat16(), loads)
            program = parallelize(differentiate(function, SGD()), Plan(dp=2, ep=2), topology_of(2))
            return next(iter(program_memory(program).devices.values())).by_kind["activations"]

        return activations(4) - activations(3)

    more = 8 // 2 * (8 * math.ceil(1.5 * 2 * 1024 / 8) - 2 * 1024)
    grown = saved_by_a_layer(Loads(capacity=1.5)) - saved_by_a_layer(EVEN)
    assert grown == more * (2 * (2 * LARGE.hidden + 4 * LARGE.experts.ffn) + 2 + 8)


# --- time -------------------------------------------------------------------------------------------------


def test_shared_experts_run_while_rows_are_on_their_way():
    """The dispatch is issued before them, so a shared feed-forward hides as much of it as it takes."""
    topology = load_cluster("dgx-h100")

    def simulate(shared: int, free: bool) -> float:
        sizes = replace(LARGE, experts=replace(LARGE.experts, shared=shared))
        joint = differentiate(decoder(sizes, 8, 1024, BFloat16()), SGD())
        costs = CostModel(topology)
        seconds = costs.communication_seconds
        costs.communication_seconds = lambda signature, group: (
            0.0 if free or signature.op_type != "MPIAlltoall" else seconds(signature, group)
        )
        return Simulator(costs).simulate(parallelize(joint, Plan(dp=8, ep=8), topology, costs)).step_time

    exposed = [simulate(shared, False) - simulate(shared, True) for shared in (0, 4)]
    assert exposed[1] < 0.75 * exposed[0]


def test_over_cp_rows_are_exchanged_by_parts_and_gathered_over_tp_too():
    """The same where tp divides sequences within cp; what was gathered is saved, as Megatron-LM does."""
    sizes = replace(SENT, experts=Mixture(4, 4, 16, groups=8))
    found = of_two_layers(Plan.parse("dp=2,ep=4,cp=2,cp_kind=ring,tp=2,sp=on"), sizes)
    rows = 2 * BATCH * SEQ // 4 * 4 * H
    assert {key: n for key, n in found.items() if key[0] == "all_to_all"} == {
        ("all_to_all", "ep", rows // 2): 8
    }
    assert found["reduce_scatter", "tp", rows] == found["all_gather", "tp", rows] == 4


def test_an_imbalance_makes_the_step_longer_and_a_capacity_shorter():
    topology = load_cluster("dgx-h100")

    def simulate(loads: Loads) -> float:
        joint = differentiate(decoder(LARGE, 8, 1024, BFloat16(), loads), SGD())
        program = parallelize(joint, Plan(dp=4, ep=4), topology)
        return Simulator(CostModel(topology)).simulate(program).step_time

    skewed, capped = Loads(0.5, seed=2), Loads(0.5, 1.0, seed=2, pad=False)
    assert max(draw_routing(8, 2, 1024, 0.5, seed=2).slots) > 512
    assert simulate(skewed) > 1.1 * simulate(EVEN) > simulate(capped)
