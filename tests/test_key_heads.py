"""More tensor-parallel ranks than heads of keys: each has one of them, which it shares with others."""

import pytest
from training_models import (
    F64,
    VOCAB,
    assert_all_readers_agree,
    assert_same_step,
    random_inputs,
    topology_of,
)

from distsim.compose import parallelize
from distsim.executor import SequentialExecutor, count_flops
from distsim.ir import BFloat16, Function, all_ops
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes, Positions
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.ops import signature_of, work
from distsim.plan import Plan
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.key_heads import repeat_key_heads


def joint(kv_heads: int, heads: int = 4) -> Function:
    attention = GroupedHeads(heads, kv_heads)
    sizes = DecoderSizes(2, 4 * heads, VOCAB, attention, FeedForward(24), positions=Positions(8))
    return differentiate(decoder(sizes, 4, 8, F64), Adam())


@pytest.mark.parametrize(
    ("kv_heads", "text"),
    [
        (2, "tp=4"),
        (1, "tp=4,sp=on,remat=full"),
        (1, "dp=2,tp=2,zero=3"),
        (2, "tp=4,pp=2,microbatches=2,sp=on,schedule=zb_h1"),
        (2, "tp=4,cp=2,cp_kind=ring"),
    ],
)
def test_every_rank_computes_the_same_step(kv_heads, text):
    function = joint(kv_heads)
    inputs, plan = random_inputs(function), Plan.parse(text)
    program = parallelize(function, plan, topology_of(plan.devices))
    assert_same_step(function, program, inputs, SequentialExecutor().compute(function, inputs))
    assert_all_readers_agree(program)


@pytest.mark.parametrize("text", ["tp=8", "tp=8,sp=on", "tp=16,sp=on"])
def test_keys_and_values_are_made_in_parts_and_gathered(text):
    """Every rank has a part of every weight, as Megatron-LM's (which gather the queries with them); gradients
    of keys and values are scattered to whose weights made them."""
    sizes = DecoderSizes(2, 4096, 64, GroupedHeads(32, 4), FeedForward(8192), positions=Positions(8192))
    plan = Plan.parse(text)
    model = decoder(sizes, 1, 8192, BFloat16(), attention="flash")
    program = parallelize(differentiate(model, SGD()), plan, topology_of(plan.devices))
    weights = [given for given in program.inputs if given.source.name.endswith(".w")]
    assert len(weights) == 14 and all(each.shards and each.shards[0][1] == "tp" for each in weights)
    scattered = [op for op in all_ops(program.to_function()) if op.op_type == "MPIReduceScatter"]
    assert sum(op.inputs[0].type.shape[-1] == 4 * 128 for op in scattered) == 2 * 2


def test_each_rank_attends_with_its_own_queries():
    """As many flops as the attention of all heads, divided by the ranks; where none is repeated, none is."""

    def attention(function: Function) -> float:
        ops = [op for op in all_ops(function) if op.op_type.startswith("Attention")]
        return sum(work(signature_of(op)).flops for op in ops)

    function = joint(2)
    program = parallelize(function, Plan(tp=4), topology_of(4))
    assert attention(program.to_function(steady=True)) == attention(function) / 4
    assert not [note for note in program.notes if "attention" in note]
    assert repeat_key_heads(function, 2) is repeat_key_heads(function, 3) is function
    assert count_flops(repeat_key_heads(function, 4)) == pytest.approx(count_flops(function), rel=0.01)


def test_heads_that_ranks_do_not_divide_are_noted():
    function = joint(3, heads=6)
    notes = {tp: " ".join(parallelize(function, Plan(tp=tp), topology_of(tp)).notes) for tp in (2, 3, 6)}
    assert "tp=2 divides no attention of 6 heads and 3 of keys and values" in notes[2]
    assert "divides no attention" not in notes[3] + notes[6]
