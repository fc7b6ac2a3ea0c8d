"""Stages by count: equal layers, as Megatron-LM has them, and so many layers or blocks each."""

from functools import cache

import pytest
from training_models import (
    assert_same_step,
    flat_mlp,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    tied,
    topology_of,
)

from distsim.compose import parallelize
from distsim.compose.division import Division
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor
from distsim.models import gpt, mlp
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import SGD, Adam, differentiate, shard
from distsim.transforms.kernels import KERNELS
from distsim.transforms.pipelining.model_blocks import model_blocks
from distsim.transforms.pipelining.stage_choice import counted_cut

LAYERS = 6
TOPOLOGY = topology_of(8)


@cache
def model():
    return differentiate(gpt(layers=LAYERS, hidden=16, heads=2, seq=8, vocab=50, batch=8), SGD(lr=0.1))


def program(text, function=None):
    return parallelize(function or model(), Plan.parse(f"microbatches=2,{text}"), TOPOLOGY)


def forward_ops(made):
    return [[op.op_type for op in stage.forward.function.ops] for stage in made.stages]


def layers(made):
    return [ops.count("Call") for ops in forward_ops(made)]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("pp=1,stages=layers", [6]),
        ("pp=2,stages=layers", [3, 3]),
        ("pp=3,stages=layers", [2, 2, 2]),
        ("pp=6,stages=layers", [1] * 6),
        ("pp=2,stages=default", [3, 3]),
        ("pp=1,stages=6", [6]),
        ("pp=2,stages=1-5", [1, 5]),
        ("pp=3,stages=1-3-2", [1, 3, 2]),
        ("pp=4,stages=2-2-1-1", [2, 2, 1, 1]),
        ("pp=3,stages=0-4-2", [0, 4, 2]),  # the embedding alone
        ("pp=4,stages=0-3-3-0", [0, 3, 3, 0]),
    ],
)
def test_layers_are_counted_with_the_embedding_first_and_the_head_last(text, held):
    made = program(text)
    assert layers(made) == held
    ops = forward_ops(made)
    assert "Gather" in ops[0] and not any("Gather" in each for each in ops[1:])
    assert "CrossEntropyLoss" in ops[-1] and not any("CrossEntropyLoss" in each for each in ops[:-1])


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("pp=1,stages=9", [6]),
        ("pp=3,stages=1-6-2", [0, 6, 0]),  # embedding; layers; norm and head
        ("pp=3,stages=3-4-2", [2, 4, 0]),
        ("pp=2,stages=8-1", [6, 0]),  # the head alone
    ],
)
def test_numbers_that_sum_to_all_blocks_count_embedding_norm_and_head_too(text, held):
    made = program(text)
    assert layers(made) == held
    assert made.notes[-1].startswith(f"stages={text.partition('stages=')[2]}: ")


def test_more_layers_than_a_search_looks_at_are_counted_all():
    function = differentiate(mlp(layers=600, width=4, batch=2), SGD(lr=0.1))
    assert layers(program("pp=3,stages=layers", function)) == [100] * 3  # of two products each


def test_numbers_may_count_blocks_with_the_layers_written_out():
    function = differentiate(mlp(layers=14, width=4, batch=2), SGD(lr=0.1))
    assert layers(program("pp=2,stages=3-4", function)) == [3, 4]
    made = program("pp=4,stages=3-4-4-3", function)
    assert [ops.count("MatMul") for ops in forward_ops(made)] == [3, 4, 4, 3]
    said = "give numbers that sum to 7, the layers, or to 8, all blocks, or to 14, the blocks with layers"
    with pytest.raises(PlanError, match=said):
        program("pp=2,stages=3-6", function)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: differentiate(small_gpt(layers=4), Adam()), "dp=2,pp=2,stages=layers,schedule=gpipe"),
        (lambda: differentiate(small_gpt(layers=4), Adam()), "pp=3,stages=1-4-2,remat=full"),
        (lambda: differentiate(small_gpt(layers=4), Adam()), "pp=3,stages=0-4-0,remat=full"),
        (lambda: differentiate(tied(layers=3), Adam()), "pp=3,stages=0-3-0"),
        (lambda: differentiate(tied(layers=3), Adam()), "pp=3,stages=layers,tp=2"),
    ],
)
def test_the_step_computes_the_same(make, text):
    joint = make()
    inputs = random_inputs(joint, 0)
    made = program(text, joint)
    assert_same_step(joint, made, inputs, SequentialExecutor().compute(joint, inputs))


# --- several stages a rank ------------------------------------------------------------------------------


def test_a_cut_is_into_the_stages_of_all_chunks():
    costs = CostModel(TOPOLOGY).on(TOPOLOGY.devices[0])
    for stages in ("even", "layers", "2-2-1-1"):
        chunked, flat = (
            Plan.parse(f"{degrees},microbatches=2,stages={stages}")
            for degrees in ("pp=2,chunks=2,schedule=interleaved", "pp=4")
        )
        one, other = (Division.of(plan, 4, costs, KERNELS["ops"]) for plan in (chunked, flat))
        assert one == other
    local = shard(model(), mesh_of(1, 1), 2, 1)
    cut = counted_cut([local], Plan(pp=3, chunks=2, schedule="interleaved").num_stages, costs, "layers")
    calls = [sum(op.is_call for op in forward.function.ops) for forward, *_ in cut.stages]
    assert calls == [1] * 6


def test_several_stages_a_rank_take_a_schedule_that_runs_them():
    assert program("pp=2,chunks=2,schedule=interleaved").schedule.chunks == 2
    with pytest.raises(PlanError, match="schedule=1f1b runs 1 stage a rank, not chunks=2; use chunks=1"):
        program("pp=2,chunks=2")


# --- what is refused ------------------------------------------------------------------------------------

NAMES = r"6 layers and 3 other blocks, \(embedded\), h0, h1, h2, h3, h4, h5, \(final\), \(logits\)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "pp=4,stages=layers",
            rf"6 layers do not make 4 equal stages; use 3 stages, or stages=2-2-1-1 \(the model has {NAMES}",
        ),
        ("pp=8,stages=layers", r"8 equal stages; use 6 stages, or stages=default or auto"),
        (
            "pp=2,stages=3-4",
            rf"stages=3-4 sums to 7, but the model has {NAMES}; give .* 6, the layers, or to 9, all",
        ),
        ("pp=1,stages=8", "stages=8 sums to 8"),
    ],
)
def test_counts_that_do_not_come_out_are_refused_with_the_blocks(text, said):
    with pytest.raises(PlanError, match=said):
        program(text)


@pytest.mark.parametrize("stages", ["layers", "default"])
def test_layers_are_not_counted_where_nothing_repeats(stages):
    with pytest.raises(PlanError, match=f"stages={stages} counts layers, but the function repeats no block"):
        laid_out(flat_mlp(layers=1), mesh_of(1, 1, 2), schedule("1f1b", 2, 1), stages=stages)


def test_many_blocks_are_not_all_named():
    function = differentiate(mlp(layers=40, width=4, batch=2), SGD(lr=0.1))
    blocks = model_blocks(shard(function, mesh_of(1, 1), 1, 1), CostModel(TOPOLOGY).on(TOPOLOGY.devices[0]))
    assert blocks.described.count(", ") < 20 and "..." in blocks.described
