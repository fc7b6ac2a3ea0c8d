"""What a user asks of rematerialisation: tags, regions, replays, blocks that are shared; what is refused."""

import numpy as np
import pytest
from remat_models import LISTED, POLICIES, WHOLE, case, cluster, names
from training_models import (
    F64,
    flat_mlp,
    laid_out,
    mesh_of,
    random_inputs,
    small_mlp,
)

from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.ir import Function, FunctionMaker, Mesh, Tensor, all_ops, callees, count_ops, verify
from distsim.schedule import schedule
from distsim.simulation.memory.peak import peak_memory
from distsim.transforms import (
    differentiate,
    inline,
    policy_named,
    rematerialize,
    shard,
)
from distsim.transforms.recompute import REPLAY, Joint, recorded
from distsim.transforms.recompute.saves import Tag


def test_tags_override_the_policy() -> None:
    joint, _, _ = case("llama")
    layer = next(f for f in callees(joint) if f.name == "layer")
    of = {v.name: v for op in layer.ops for v in op.outputs}
    plain, full = rematerialize(joint, "none"), rematerialize(joint, "full")
    dropped = rematerialize(joint, "none", tags={of["swish"]: Tag.MUST_RECOMPUTE})
    assert names(plain).count("swish") == 3 and "swish" not in names(dropped)
    assert len(names(dropped)) == len(names(plain)) - 3
    kept = rematerialize(joint, "full", tags={of["gate"]: Tag.MUST_SAVE})
    assert names(kept).count("gate") == 3 and "gate" not in names(full)
    assert "swish" in names(rematerialize(joint, "none", tags={of["swish"]: Tag.PREFER_SAVE}))
    assert "swish" not in names(rematerialize(joint, "none", tags={of["swish"]: Tag.PREFER_RECOMPUTE}))


def test_regions_save_what_crosses_their_boundaries() -> None:
    """Two regions of a flat MLP of two layers each: one value goes from the first to the second, one out."""
    joint = inline(differentiate(small_mlp(layers=4), None))
    regions = {v: i // 4 for i, v in enumerate(Joint.of(joint).made) if v.name[0] in "ya"}
    again = rematerialize(joint, "none", regions=regions)
    verify(again)
    assert names(again) == ["a1", "a3"] and len(names(joint)) == 8
    inputs = random_inputs(joint, 0)
    pairs = zip(*(SequentialExecutor().compute(f, inputs) for f in (joint, again)), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)


def test_replay_saves_on_a_second_graph_what_the_first_saved() -> None:
    """The first partition saw Calls, the second graph is written out; its own min-cut decides otherwise."""
    joint, inputs, expected = case("gpt")
    flat = inline(joint)
    for policy in ("budget:0.5", "full", "min_cut"):
        first = rematerialize(joint, policy)
        again = rematerialize(flat, REPLAY, replay=recorded(first, flat))
        assert sorted(names(again)) == sorted(names(first))
        assert policy == "min_cut" or set(names(again)) != set(names(rematerialize(flat, "min_cut")))
        for made, array in zip(SequentialExecutor().compute(again, inputs), expected, strict=True):
            np.testing.assert_array_equal(made, array)
    back = rematerialize(joint, REPLAY, replay=recorded(again, joint))
    assert sorted(names(back)) == sorted(names(again))


def test_a_collective_runs_again_in_a_block_that_runs_again_or_where_it_is_tagged() -> None:
    joint, _, _ = case("gpt")
    local = shard(joint, Mesh(mesh_of(1, 2, 1).devices, dp=1, tp=2)).function

    def collectives(function: Function) -> int:
        return sum(op.op_type.startswith("MPI") for op in all_ops(function))

    for policy in {*POLICIES, "attention"} - {*WHOLE, *LISTED}:
        assert collectives(rematerialize(local, policy)) == collectives(local)
    layer = next(f for f in callees(local) if any(op.op_type == "MPIAllreduce" for op in f.ops))
    reduced = next(op.outputs[0] for op in layer.ops if op.op_type == "MPIAllreduce")
    tagged = rematerialize(local, "matmuls", tags={reduced: Tag.MUST_RECOMPUTE})
    assert collectives(tagged) == collectives(local) + 2  # of each of the two layers
    kept = rematerialize(local, "full", tags={reduced: Tag.MUST_SAVE})
    assert collectives(kept) == collectives(rematerialize(local, "full")) - 2


def test_equal_blocks_share_their_callees() -> None:
    joint, _, _ = case("llama")
    again = rematerialize(joint, "full")
    assert [f.name for f in callees(again)] == [f.name for f in callees(joint)]
    every = rematerialize(joint, "every:2")
    assert len([f for f in callees(every) if f.name == "layer"]) == 2
    assert count_ops(every) < count_ops(again)
    assert rematerialize(joint, "none") is joint


def test_a_barrier_is_a_view_that_waits() -> None:
    maker = FunctionMaker("f")
    gpu = cluster(1, 1).devices[0]
    x, y = (maker.add_input_value(name, Tensor(F64, (1000,), gpu)) for name in "xy")
    late = maker.add_op("Exp", inputs=[y])
    maker.add_op("Exp", inputs=[maker.add_op("OptimizationBarrier", inputs=[x, late])])
    function = maker.finalize()
    inputs = [np.ones(1000), np.zeros(1000)]
    np.testing.assert_array_equal(SequentialExecutor().compute(function, inputs)[0], np.exp(inputs[0]))
    assert peak_memory(function)[gpu].peak == 3 * 8000  # x, its exponential, and y or late


@pytest.mark.parametrize(
    "text",
    [
        "",
        "all",
        "every:0",
        "every",
        "budget:1.5",
        "budget:-1",
        "budget:nan",
        "full:1",
        "full_early:2",
        "every_early",
        "attention:1",
        "ops",
        "ops:",
        "ops:MatMul,Gelu",
    ],
)
def test_unknown_policies_are_refused(text: str) -> None:
    with pytest.raises(
        PlanError, match=r"is unknown; choose one of none, full, full_early, every:N|takes (an?|the types) "
    ):
        policy_named(text)
    with pytest.raises(PlanError, match="there is no op Matmul; did you mean MatMul"):
        policy_named("ops:Gelu+Matmul")
    with pytest.raises(PlanError, match="names Gelu twice; name each type once"):
        policy_named("ops:Gelu+Gelu")


def test_a_policy_for_blocks_is_refused_where_none_repeat() -> None:
    joint = flat_mlp()
    with pytest.raises(PlanError, match="mlp has 0 blocks that repeat"):
        rematerialize(joint, "full")
    with pytest.raises(PlanError, match="use at most every:3; or min_cut"):
        rematerialize(case("mlp")[0], "every:4")
    with pytest.raises(
        PlanError, match="have no Conv or Tan, so nothing would be saved; name some of .*MatMul"
    ):
        rematerialize(case("mlp")[0], "ops:Conv+Tan/2")
    assert len(names(rematerialize(joint, "budget:0"))) < len(names(joint))
    with pytest.raises(PlanError, match="remat='most' is unknown"):
        laid_out(joint, mesh_of(1, 1, 1), schedule("1f1b", 1, 1), "most")
    with pytest.raises(PlanError, match="was rematerialized before it is sharded"):
        laid_out(rematerialize(joint, "budget:0"), mesh_of(2, 1, 1), schedule("1f1b", 1, 1))
