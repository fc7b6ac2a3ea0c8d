"""Messages between stages in parts, as Megatron-LM of 2021 and DeepSpeed's pipeline send them."""

from collections import Counter

import pytest
from training_models import computed_over_ranks, small_gpt, small_llama, tied, topology_of

import distsim
from distsim.compose import parallelize
from distsim.executor import CostModel, Simulator
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate
from distsim.transforms.kernels import KERNELS

MODEL = "gpt:layers=4,hidden=512,heads=8,seq=128,vocab=1024"


@pytest.mark.parametrize("stack", ["megatron_2021", "deepspeed_pipeline", "megatron"])
def test_each_rank_sends_its_part_and_gathers_all(stack):
    """2 b s h / t bytes a rank, 2 b s h gathered by the t that receive; core sends all of it from each."""
    plan = "dp=1,tp=4,pp=2,microbatches=4,remat=none"
    counts = distsim.simulate(MODEL, "dgx-a100", plan, 8, stack=stack).timeline.op_runs
    whole = 2 * 2 * 128 * 512
    moved = Counter[tuple[str, int]]()
    for op, rank, times, _ in counts:
        if rank == 0 and op.op_type in ("Send", "MPIAllgather") and op.inputs[0].type.rank:
            moved[op.op_type, op.inputs[0].type.nbytes] += times
    if stack == "megatron":
        assert moved == {("Send", whole): 8}
    else:
        assert moved == {("Send", whole // 4): 8, ("MPIAllgather", whole // 4): 4}


@pytest.mark.parametrize(
    ("plan", "sent", "gathered"),
    [
        ("dp=2,tp=2,pp=2,microbatches=4,zero=1,overlap_params=on", 8, 4),
        ("dp=1,tp=4,pp=2,microbatches=4,sp=on", 0, 0),
        ("dp=1,tp=8,pp=1,chunks=2,microbatches=4,schedule=looped_bfs", 0, 0),
        ("dp=1,tp=4,pp=2,microbatches=4,schedule=zb_v,chunks=2", 0, 0),
    ],
)
def test_parts_are_sent_between_ranks_that_have_the_same(plan, sent, gathered):
    """Also of weights that were gathered before; not beside sp=on, nor to the rank itself."""
    runs = distsim.simulate(
        MODEL, "dgx-a100", f"{plan},remat=none", 8, stack="megatron_2021"
    ).timeline.op_runs
    found = Counter[str]()
    for op, rank, times, _ in runs:
        flat = bool(op.inputs) and op.inputs[0].type.rank == 1 and op.attributes.get("axis", "tp") == "tp"
        if rank == 0 and flat:
            found[op.op_type] += times
    assert (found["Send"], found["MPIAllgather"]) == (sent, gathered)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", "tp=2,pp=2,microbatches=4"),
        ("gpt", "tp=2,pp=2,microbatches=4,remat=full"),
        ("gpt", "dp=2,tp=2,pp=2,microbatches=2,zero=1,schedule=gpipe"),
        ("llama", "tp=2,pp=2,chunks=2,schedule=interleaved,microbatches=4"),
        ("llama", "tp=2,pp=2,microbatches=4,schedule=zb_h1"),
        ("tied", "tp=2,pp=2,microbatches=2"),
        ("llama", "tp=2,pp=2,microbatches=2,sp=on"),
    ],
)
def test_every_rank_computes_the_same_step(model, plan):
    """Over every rank with NumPy; all readers agree on time and memory."""
    made = {"gpt": small_gpt, "llama": small_llama, "tied": tied}[model]
    layers = 4 if "chunks" in plan else 2
    joint = differentiate(made(layers=layers), Adam())
    program = computed_over_ranks(joint, Plan.parse(plan), "fused_2022")
    flat = program.to_function()
    gathers = [op for op in flat.ops if op.op_type == "Unflatten"] or [
        op for stage in program.stages for op in stage.forward.function.ops if op.op_type == "Unflatten"
    ]
    assert bool(gathers) == ("sp=on" not in plan)


def test_what_was_made_for_other_sizes_is_carried_over():
    """As if it had been the first: the parts of messages are among what differs in sizes."""
    topology, kernels = topology_of(4), KERNELS["fused_2022"]
    steps: dict[bool, list[float]] = {}
    for fresh in (True, False):
        joint = differentiate(small_gpt(batch=16), Adam())
        steps[fresh] = []
        for microbatches in (8, 4, 2):
            joint = differentiate(small_gpt(batch=16), Adam()) if fresh else joint
            plan = Plan(1, 2, 2, microbatches)
            program = parallelize(joint, plan, topology, kernels=kernels)
            steps[fresh].append(Simulator(CostModel(topology)).simulate(program).step_time)
    assert steps[True] == steps[False]
