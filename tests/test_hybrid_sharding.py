"""zero_ranks: what ZeRO divides, over some neighbouring ranks of dp; replicated over the rest.

Collectives are those of the row "HSDP" of ``layouts.md`` (torch's FSDP2): within a group of d ranks what ZeRO
sends over d, then an all-reduce of each gradient's part over the g groups.
"""

from collections import Counter
from functools import cache

import pytest
from expert_models import BATCH, EVEN, SENT, SEQ, SKEWED, computed_over_ranks, model
from training_models import (
    assert_all_readers_agree,
    assert_same_step,
    random_inputs,
    small_gpt,
    small_llama,
    tied,
    topology_of,
)

from distsim.compose import parallelize
from distsim.cost.demand import collective_of
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware.plan_mesh import plan_mesh
from distsim.ir import BFloat16, Role, all_ops
from distsim.models import gpt
from distsim.models.decoder import decoder
from distsim.ops import operator, signature_of
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, differentiate, precision_named
from distsim.transforms.kernels.attention import set_attention

MODELS = {
    "llama": lambda: set_attention(small_llama(layers=2, batch=8, seq=8), "flash"),
    "odd gpt": lambda: small_gpt(hidden=6, heads=2, batch=12),
    "tied": lambda: tied(layers=4, batch=16, hidden=6),
}
LAYOUTS = [
    ("llama", "dp=4,zero=1,zero_ranks=2"),
    ("llama", "dp=8,zero=3,zero_ranks=4,bucket=auto"),
    ("llama", "dp=4,zero=1,zero_ranks=2,microbatches=2,bucket=400B"),
    ("llama", "dp=4,zero=1,zero_ranks=2,microbatches=2,overlap_grads=off,overlap_params=on"),
    ("llama", "dp=4,zero=2,zero_ranks=2,microbatches=2,bucket=400B,overlap_params=on"),
    ("llama", "dp=4,zero=2,zero_ranks=2,microbatches=2,overlap_grads=off,cp=2,cp_kind=ring"),
    ("llama", "dp=4,zero=3,zero_ranks=2,microbatches=2,remat=full"),
    ("llama", "dp=4,zero=3,zero_ranks=2,tp=2,sp=on,pp=2,microbatches=2,reshard=auto"),
    ("llama", "dp=4,zero=3,zero_ranks=2,cp=4,cp_kind=usp:2,overlap_grads=off"),
    ("llama", "dp=4,zero=1,zero_ranks=2,cp=2,tp=2,microbatches=2,order=dp-cp-tp-ep-pp"),
    ("odd gpt", "dp=12,zero=3,zero_ranks=6"),  # some ranks have only padding of a bias
    ("odd gpt", "dp=4,zero=2,zero_ranks=2,tp=2,pp=2,microbatches=3"),
    ("tied", "dp=4,zero=1,zero_ranks=2,pp=2,microbatches=4,schedule=zb_h1"),
    ("tied", "dp=4,zero=2,zero_ranks=2,pp=2,microbatches=2,chunks=2,schedule=interleaved"),
    ("tied", "dp=4,zero=3,zero_ranks=2,pp=2,microbatches=2,chunks=2,schedule=looped_bfs"),
]


@cache
def case(name: str):
    joint = differentiate(MODELS[name](), Adam(), clip=0.05)
    inputs = random_inputs(joint, 0)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


@pytest.mark.parametrize(("name", "text"), LAYOUTS)
def test_every_rank_computes_the_same_step(name, text):
    joint, inputs, expected = case(name)
    plan = Plan.parse(text)
    program = parallelize(joint, plan, topology_of(plan.devices))
    assert_same_step(joint, program, inputs, expected)
    assert_all_readers_agree(program)
    divided = (Role.STATE, Role.PARAMETER) if plan.zero == 3 else (Role.STATE,)
    axis = {1: "dp_inner", 2: "dp_inner+cp", 4: "dp_inner+cp_ring+cp_heads"}[plan.cp]
    for given in program.inputs:
        if given.source.role in (Role.STATE, Role.PARAMETER):
            flat = given.source.role in divided
            assert ((None, axis) in [shard[:2] for shard in given.shards]) == flat


def test_the_ranks_of_a_group_are_neighbours():
    mesh = plan_mesh(Plan(dp=8, tp=2, pp=2, zero=3, zero_ranks=4), topology_of(32))
    assert mesh.axes == (("pp", 2), ("dp_outer", 2), ("dp_inner", 4), ("tp", 2))
    assert [device.id for device in mesh.groups("dp_inner")[0]] == [0, 2, 4, 6]
    assert [device.id for device in mesh.groups("dp_outer")[0]] == [0, 8]
    assert [device.id for device in mesh.groups("dp")[0]] == [*range(0, 16, 2)]


WITH_EXPERTS = [
    ("dp=8,ep=2,zero=1,zero_ranks=4", 1, "edp_inner", "dp_inner"),
    ("dp=8,ep=2,zero=3,zero_ranks=4", 1, "edp_inner", "dp_inner"),
    ("dp=4,ep=2,zero=3,zero_ranks=2", 1, "", "ep"),  # of a group each has experts of its own
    ("dp=8,ep=4,zero=2,zero_ranks=2", 1, "", "ep_inner"),
    ("dp=4,ep=4,zero=2,zero_ranks=2,microbatches=2", 1, "", "ep_inner"),
    ("dp=4,ep=2,zero=3,zero_ranks=2,microbatches=2,bucket=fsdp2", 1, "", "ep"),
    ("dp=4,ep=2,zero=3,zero_ranks=2,microbatches=2,pp=2", 1, "", "ep"),
    ("dp=4,ep=4,cp=2,zero=1,zero_ranks=2,microbatches=2", 4, "", "ep_dp+cp"),
    ("dp=4,ep=4,cp=2,zero=3,zero_ranks=2,order=tp-ep-dp-cp-pp", 4, "cp", "ep_inner+cp"),
    ("dp=4,ep=2,tp=2,etp=1,sp=on,zero=3,zero_ranks=2", 2, "dp_inner", "dp_inner"),
    ("dp=4,ep=2,zero=1,zero_ranks=2,pp=2,microbatches=2,overlap_params=on", 1, "", "ep"),
]


@cache
def with_experts(groups: int):
    return differentiate(model("mixtral", groups, SKEWED), Adam(), clip=0.05)


@pytest.mark.parametrize(("text", "groups", "experts", "rest"), WITH_EXPERTS, ids=str)
def test_experts_are_divided_over_those_of_a_group_that_have_the_same(text, groups, experts, rest):
    plan, joint = Plan.parse(text), with_experts(groups)
    program = computed_over_ranks(joint, plan)
    divided = (Role.STATE, Role.PARAMETER) if plan.zero == 3 else (Role.STATE,)
    for given in program.inputs:
        if given.source.role in divided:
            flat = [axis for dim, axis, _ in given.shards if dim is None]
            own = experts if ".experts." in given.source.name else rest
            assert flat == [own] * bool(own)


@pytest.mark.parametrize(
    "text", ["dp=8,zero=1", "dp=4,zero=3,microbatches=2", "dp=8,zero=1,zero_ranks=4", "dp=8,zero=3,pp=2"]
)
def test_squares_of_experts_gradients_go_with_those_of_others(text):
    """Over the ranks of the data, and once over those with other experts; no message for each weight."""
    program = computed_over_ranks(with_experts(1), Plan.parse(f"{text},ep=2"))
    axes = Counter[str]()
    for op in all_ops(program.to_function()):
        if op.op_type == "MPIAllreduce" and not op.inputs[0].type.shape:
            axes[op.attributes["axis"]] += 1
    assert "edp" not in axes and "edp_inner" not in axes
    assert axes["ep"] == 1, axes


def test_all_ranks_are_one_group():
    topology, joint = topology_of(4), case("llama")[0]
    some = parallelize(joint, Plan(dp=4, zero=3, zero_ranks=4), topology)
    assert some.mesh == parallelize(joint, Plan(dp=4, zero=3), topology).mesh


# --- what is sent, and what is held ----------------------------------------------------------------------

SIZES = {"layers": 2, "hidden": 16, "heads": 2, "seq": 4, "batch": 16, "vocab": 32}
"""Whose parameters 2 and 4 ranks divide."""


@cache
def trained(policy: str):
    return differentiate(gpt(**SIZES), Adam(), precision=precision_named(policy))


def step_on(policy: str, text: str) -> Program:
    plan = Plan.parse(text)
    return parallelize(trained(policy), plan, topology_of(plan.devices))


def sent(program: Program) -> dict[tuple[str, str], int]:
    """The bytes of the collectives of tensors of a step, by kind and axis."""
    total = Counter[tuple[str, str]]()
    for op in all_ops(program.to_function()):
        if operator(op.op_type).moves and "axis" in op.attributes and op.inputs[0].type.rank:
            axis = op.attributes["axis"]
            kind, nbytes = collective_of(signature_of(op), program.mesh.groups(axis)[0])
            total[kind, axis] += int(nbytes)
    return dict(total)


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_are_those_of_hsdp(ranks):
    """Gathered and scattered within a group as ZeRO does, then 1 / d of each gradient between groups."""
    inner, outer = "dp_inner", "dp_outer"
    count = sum(v.type.size for v in trained("mixed").parameters)
    for microbatches in (1, 2):
        text = f"dp=8,zero_ranks={ranks},microbatches={microbatches}"
        assert sent(step_on("mixed", f"{text},zero=1")) == {  # float32 sums, once a step
            ("reduce_scatter", inner): 4 * count,
            ("all_reduce", outer): 4 * count // ranks,
            ("all_gather", inner): 2 * count,
        }
        each = microbatches * count
        assert sent(step_on("mixed_bf16_grads", f"{text},zero=2")) == {
            ("reduce_scatter", inner): 2 * each,
            ("all_reduce", outer): 2 * each // ranks,
            ("all_gather", inner): 2 * count,
        }
        assert sent(step_on("fsdp2", f"{text},zero=3,reshard=never")) == {
            ("reduce_scatter", inner): 4 * each,
            ("all_reduce", outer): 4 * each // ranks,
            ("all_gather", inner): 2 * count,  # held for all microbatches
        }


@pytest.mark.parametrize(
    ("text", "experts", "rest"),
    [
        ("dp=8,ep=2,zero_ranks=4", ("edp_inner", 2, "dp_outer"), ("dp_inner", 4, "dp_outer")),
        ("dp=8,ep=4,zero_ranks=4", ("", 1, "edp"), ("ep", 4, "dp_outer")),
        ("dp=8,ep=4,zero_ranks=2", ("", 1, "edp"), ("ep_inner", 2, "dp_outer")),
    ],
)
def test_gradients_of_experts_are_scattered_over_those_of_a_group_with_the_same(text, experts, rest):
    """Once a step, each over d of its own ranks and then 1 / d between groups; torchtitan's experts lie along
    dp_shard_mod_ep, Megatron-LM's over the expert-data-parallel ranks of an optimizer instance."""
    joint = differentiate(
        decoder(SENT, BATCH, SEQ, BFloat16(), EVEN), Adam(), precision=precision_named("mixed")
    )
    plan = Plan.parse(f"{text},zero=1")
    sizes = [0, 0]
    for value in joint.parameters:
        sizes[".experts." in value.name] += value.type.size
    expected = Counter[tuple[str, str]]()
    for (within, ranks, between), count in ((rest, sizes[0]), (experts, sizes[1] // plan.ep)):
        expected["all_reduce", between] += 4 * count // ranks
        if within:
            expected["reduce_scatter", within] += 4 * count
            expected["all_gather", within] += 2 * count
    found = sent(parallelize(joint, plan, topology_of(plan.devices)))
    layers = SENT.layers
    expected["all_gather", "ep"] += layers * plan.ep * SENT.experts.experts * 8  # counts of rows
    assert {key: n for key, n in found.items() if key[0] != "all_to_all"} == expected


@pytest.mark.parametrize(
    ("text", "times"),
    [("zero=1", 1), ("zero=2", 2), ("zero=3,bucket=fsdp2", 2), ("zero=3,pp=2", 1)],  # stages' once, as others
)
def test_experts_that_a_group_has_once_are_reduced_between_groups_when_others_are(text, times):
    """FSDP2's fully_shard over one rank of each group: all-reduced over the groups in each backward pass."""
    plan = Plan.parse(f"dp=4,ep=2,zero_ranks=2,microbatches=2,{text}")
    joint = with_experts(1)
    program = parallelize(joint, plan, topology_of(plan.devices))
    elements = Counter[bool]()
    for op in [op for op in all_ops(program.to_function()) if op.op_type == "MPIAllreduce"]:
        axes = [
            axis for axis in program.mesh.axes_of(op.attributes["axis"]) if program.mesh.axis_size(axis) > 1
        ]
        for value in op.inputs if axes == ["dp_outer"] else ():
            elements[len(value.type.shape) == 3] += value.type.size
    experts = sum(v.type.size for v in joint.parameters if len(v.type.shape) == 3)
    assert elements[True] == times * experts // plan.ep
    assert elements[False] >= times * sum(v.type.size for v in joint.parameters if len(v.type.shape) < 3) // 2


def test_a_part_is_reduced_between_groups_with_its_bucket():
    """As many messages as within groups."""
    for text in ("zero=1,bucket=400B", "zero=2,bucket=400B,microbatches=2", "zero=3,microbatches=2"):
        program = step_on("fsdp2", f"dp=4,zero_ranks=2,{text}")
        moved = Counter[str]()
        for op in all_ops(program.to_function()):
            if op.op_type in ("MPIReduceScatter", "MPIAllreduce") and op.inputs[0].type.rank:
                moved[op.attributes["axis"]] += 1
        assert moved["dp_inner"] == moved["dp_outer"] > 1


def test_one_bucket_goes_between_groups_while_another_is_scattered_within_them():
    """On a stream of its own, as FSDP2's: wires here are so slow that both wait for them."""
    topology, plan = topology_of(4, gbps=0.01), Plan.parse("dp=4,zero=1,zero_ranks=2,bucket=1B")
    costs = CostModel(topology)
    simulation = Simulator(costs).simulate(parallelize(trained("mixed"), plan, topology))
    within, between = (
        [span for span in simulation.spans() if span.stream.name == f"collective {axis}"]
        for axis in ("dp_inner", "dp_outer")
    )
    assert any(a.start < b.end and b.start < a.end for a in within for b in between)


BYTES = [
    ("mixed", 1, 6, 12),  # Megatron-LM, bf16, distributed optimizer
    ("mixed_bf16_grads", 2, 2, 14),  # the ZeRO paper's stages
    ("mixed_bf16_grads", 3, 0, 16),
    ("fsdp2", 3, 0, 16),  # torchtitan
]


@pytest.mark.parametrize(("policy", "stage", "whole", "divided"), BYTES, ids=str)
def test_bytes_a_parameter_are_those_of_the_ranks_of_a_group(policy, stage, whole, divided):
    """At the peak of a step of many microbatches all gradients are there, and the sum of the losses."""
    bucket = "" if stage == 3 else ",bucket=1B"  # each parameter is a bucket
    program = step_on(policy, f"dp=4,zero={stage},zero_ranks=2,microbatches=4{bucket}")
    (memory,) = program_memory(program).ranks
    kept = sum(memory.by_kind[kind] for kind in ("parameters", "state", "gradients"))
    size = sum(v.type.size for v in trained(policy).parameters)
    assert kept - trained(policy).outputs[0].type.nbytes == (whole + divided / 2) * size


# --- what does not go ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=8,zero=3,zero_ranks=3", "do not divide dp=8; choose one of 0, 2, 4, 8"),
        ("dp=4,zero=1,zero_ranks=1", "zero_ranks=1 .*choose one of 0, 2, 4"),
        ("dp=4,zero_ranks=2", "zero=0 divides nothing; use zero=1, 2 or 3"),
        (
            "dp=12,zero=1,zero_ranks=4,ep=6",
            "experts over 6 .*neither divides .*choose one of 0, 2, 3, 6, 12$",
        ),
        ("zero=1,zero_ranks=-1", "zero_ranks=-1 is out of range"),
    ],
)
def test_what_no_group_can_be_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


def test_it_stands_in_the_text_where_it_is_not_all():
    assert "zero_ranks" not in str(Plan(dp=4, zero=1))
    assert Plan.parse(text := str(Plan(dp=4, zero=1, zero_ranks=2))) == Plan(dp=4, zero=1, zero_ranks=2), text
