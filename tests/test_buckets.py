"""Gradient buckets, reduced while backward runs: the collectives of layouts.md, the same step everywhere."""

import itertools
from collections import Counter
from functools import cache

import pytest
from mixed_step import assert_same_mixed_step, computed, joint_of
from schedule_models import copies_to_host
from training_models import (
    F64,
    assert_all_readers_agree,
    laid_out,
    mesh_of,
    np,
    random_inputs,
    tied,
    topology_of,
)

from distsim.compose import build_program, parallelize
from distsim.cost.demand import collective_of
from distsim.errors import PlanError, TypeRuleError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware import collective_time
from distsim.importer import load_model
from distsim.ir import Float, Float32, FunctionMaker, Tensor, all_ops
from distsim.models import gpt
from distsim.ops import operator, signature_of
from distsim.plan import Plan
from distsim.plan.buckets import buckets_of, parse_bucket
from distsim.plan.stacks import STACKS
from distsim.program.program import Program
from distsim.schedule import SCHEDULES, schedule
from distsim.simulation.events import engine as events
from distsim.simulation.tasks import recurrence
from distsim.simulation.tasks.task_table import lower
from distsim.study.choices import Choices
from distsim.transforms import Adam, add_loss, differentiate, precision_named
from distsim.transforms.kernels import KERNELS
from distsim.transforms.kernels.attention import set_attention


def assert_right(program: Program, inputs, expected) -> None:
    """Every rank computes what one device does, and all readers agree."""
    assert_same_mixed_step(program, inputs, expected)
    assert_all_readers_agree(program)


# --- the same numbers on every rank ----------------------------------------------------------------------

PLANS = [Plan(3, 1, 1, 4), Plan(2, 1, 2, 3, "zb_h1"), Plan(2, 2, 1, 2, sp="on")]
TRAINED = [("gpt", "mixed"), ("tied", "mixed_bf16_grads")]
ZERO = [(0, "on"), (0, "off"), (1, "on"), (2, "on"), (2, "off"), (3, "on")]


def every_pair(*choices):
    """Of all that can be chosen together, with one of the models: any two choices are there."""
    every = itertools.product(*map(enumerate, choices))
    return [
        (*TRAINED[sum(places) % 2], *each)
        for places, each in (zip(*numbered, strict=True) for numbered in every)
    ]


@pytest.mark.parametrize(("model", "policy", "plan", "zero"), every_pair(PLANS, ZERO), ids=str)
def test_every_rank_computes_the_same_step(model, policy, plan, zero):
    zero, overlap = zero
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    bucket = "" if zero == 3 else ",bucket=300B"
    fields = f"zero={zero}{bucket},overlap_grads={overlap}"
    program = laid_out(
        joint_of(model, policy), mesh_of(plan.dp, plan.tp, plan.pp), order, zero=fields, sp=plan.sp
    )
    assert_right(program, *computed(model, policy))


@pytest.mark.parametrize(
    ("model", "policy", "plan", "fields"),
    every_pair([*PLANS, Plan(2)], ["zero=1,remat=full", "zero=2,bucket=300B"]),
    ids=str,
)
def test_parameters_gathered_in_the_next_forward_are_those_of_the_same_step(model, policy, plan, fields):
    """Each rank ends with its part of the new ones; of shared ones on both stages."""
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    program = laid_out(
        joint_of(model, policy),
        mesh_of(plan.dp, plan.tp, plan.pp),
        order,
        zero=f"{fields},overlap_params=on".replace("remat=full,", ""),
        remat="full" if "remat" in fields else "none",
        sp=plan.sp,
    )
    assert_right(program, *computed(model, policy))


@cache
def pipelined():
    joint = differentiate(tied(layers=4, batch=16, hidden=6), Adam())
    inputs = random_inputs(joint, 2)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


DIVIDED = ("zero=0,bucket=500B", "zero=1,bucket=500B,overlap_params=on", "zero=3")
FLUSHING = [name for name in SCHEDULES if not name.startswith("pipedream")]
"""Weights that stages share need a flush."""


@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, DIVIDED[(at + i) % 3]) for at, name in enumerate(FLUSHING) for i in (0, 1)],
)
def test_in_every_schedule(name, fields):
    """Two of three ways to divide; with copies of the model, buckets are reduced after what they sum."""
    if copies_to_host(name):  # asked here, and not where cases are listed: some examples are compiled
        pytest.skip("copies to the host")
    joint, inputs, expected = pipelined()
    options = () if SCHEDULES[name].placement == "two copies" else (SCHEDULES[name].chunks or 2,)
    order = schedule(name, 2, 4, *options)
    program = laid_out_by(joint, order, name, fields)
    assert_right(program, inputs, expected)


def laid_out_by(joint, order, name: str, fields: str) -> Program:
    count = order.num_microbatches * order.copies
    text = f"dp=2,pp=2,microbatches={count},schedule={name},chunks={order.stages_a_rank},{fields}"
    return build_program(joint, mesh_of(2, 1, 2), Plan.parse(text), None, order)


# --- collectives a step: layouts.md, "Data parallelism, ZeRO, FSDP" ----------------------------------------

SIZES = {"layers": 3, "hidden": 16, "heads": 2, "seq": 4, "batch": 16, "vocab": 32}


@cache
def trained(policy: str):
    return differentiate(gpt(**SIZES), Adam(), precision=precision_named(policy))


def sent(program: Program) -> dict[str, tuple[int, int]]:
    """How many messages of tensors a step has over dp, and the bytes of all together, by kind."""
    count, total = Counter[str](), Counter[str]()
    for op in all_ops(program.to_function()):
        if operator(op.op_type).moves and op.attributes.get("axis") == "dp" and op.inputs[0].type.rank:
            kind, nbytes = collective_of(signature_of(op), program.mesh.groups("dp")[0])
            count[kind] += 1
            total[kind] += int(nbytes)
    return {kind: (count[kind], total[kind]) for kind in count}


def step_on(policy: str, fields: str, microbatches: int = 4, dp: int = 2) -> Program:
    return laid_out(trained(policy), mesh_of(dp, 1, 1), schedule("1f1b", 1, microbatches), "none", fields)


def test_ddp():
    """One message of all gradients in their type, once a step; or in buckets that hold so many bytes."""
    size = sum(v.type.size for v in trained("fp32").parameters)
    assert sent(step_on("fp32", "zero=0")) == {"all_reduce": (1, 4 * size)}
    program = step_on("fp32", "zero=0,bucket=10kB")
    assert sent(program)["all_reduce"][1] == 4 * size
    sizes = [
        sum(v.type.nbytes for v in op.inputs)
        for op in all_ops(program.to_function())
        if op.op_type == "MPIAllreduce" and op.inputs[0].type.rank
    ]
    assert len(sizes) > 2 and all(nbytes >= 10_000 for nbytes in sizes[:-1])
    # Backward completes the last layers first.
    names = [op.inputs[-1].name for op in all_ops(program.to_function()) if op.op_type == "MPIAllreduce"]
    assert "head" in names[0] or "h2" in names[0] or "ln_f" in names[0], names


def test_megatron_ddp():
    """All after backward, in float32; else in buckets of 40 million parameters, or a million a rank."""
    size = sum(v.type.size for v in trained("mixed").parameters)
    plain = sent(step_on("mixed", "zero=0,bucket=megatron,overlap_grads=off"))
    assert plain == {"all_reduce": (1, 4 * size)}
    assert buckets_of("megatron", 8, early=True, zero=0).limit == 40_000_000
    assert buckets_of("megatron", 64, early=True, zero=0).limit == 64_000_000


@pytest.mark.parametrize(("policy", "scattered"), [("mixed", 4), ("mixed_bf16_grads", 2)])
def test_distributed_optimizer(policy, scattered):
    """Gradients 4P, or 2P in bf16, scattered once a step; bf16 parameters 2P gathered, bucket by bucket."""
    size = sum(v.type.size for v in trained(policy).parameters)
    found = sent(step_on(policy, "zero=1,bucket=6000p"))
    count = found["reduce_scatter"][0]
    assert 1 < count < len(trained(policy).parameters)
    assert found == {"reduce_scatter": (count, scattered * size), "all_gather": (count, 2 * size)}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero_2(microbatches):
    """Each microbatch's gradients are scattered."""
    size = sum(v.type.size for v in trained("mixed_bf16_grads").parameters)
    found = sent(step_on("mixed_bf16_grads", "zero=2,bucket=deepspeed", microbatches))
    assert found == {"reduce_scatter": (microbatches, microbatches * 2 * size), "all_gather": (1, 2 * size)}


@pytest.mark.parametrize(("reshard", "gathers"), [("always", 9), ("never", 5), ("auto", 8)])
def test_zero_3_by_layers(reshard, gathers):
    """Units: embedding, three layers, norm and output; backward of the embedding reads no weight.

    As torchtitan has it, ``auto`` keeps norm and output. What is never dropped is gathered once a step.
    """
    size = sum(v.type.size for v in trained("fsdp2").parameters)
    for microbatches in (1, 4):
        found = sent(step_on("fsdp2", f"zero=3,reshard={reshard}", microbatches))
        assert found["reduce_scatter"] == (5 * microbatches, 4 * size * microbatches)
        assert found["all_gather"][0] == gathers * (1 if reshard == "never" else microbatches)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero_3_that_waits_gathers_one_by_one(microbatches):
    """Each parameter by itself, again for backward where that reads it; nothing is computed meanwhile."""
    parameters = trained("fsdp2").parameters
    program = step_on("fsdp2", "zero=3,reshard=blocking", microbatches)
    count, nbytes = sent(program)["all_gather"]
    together = sent(step_on("fsdp2", "zero=3", microbatches))["all_gather"]
    assert count >= len(parameters) * microbatches > together[0] and nbytes == together[1]
    # What a layer computes waits for the last gather before it.
    ops = program.stages[0].forward.function.ops
    gathered = {v for op in ops if op.op_type == "MPIAllgather" for v in op.outputs}
    for op in ops:
        if op.inputs and gathered.issuperset(op.inputs):
            gathered.update(op.outputs)
    waits = [
        op for op in ops if op.op_type == "OptimizationBarrier" and not gathered.isdisjoint(op.inputs[1:])
    ]
    assert len(waits) >= 4


def test_with_several_stages_nothing_is_gathered_again_by_default():
    assert [Plan(2, 1, pp, zero=3, reshard="auto").resharding for pp in (1, 2)] == ["auto", "never"]


@pytest.mark.parametrize(
    ("stack", "plan", "fields"),
    [
        ("plain", "dp=2,zero=1", ("auto", "on", "always")),
        ("megatron", "dp=2,zero=1", ("megatron", "off", "always")),
        ("megatron", "dp=2,zero=1,overlap_grads=on", ("megatron", "on", "always")),
        ("megatron", "dp=1", ("auto", "on", "always")),
        ("torchtitan", "dp=2,zero=3", ("fsdp2", "on", "auto")),
        ("deepspeed", "dp=2,zero=2", ("deepspeed", "off", "always")),
        ("deepspeed", "dp=2,zero=3", ("auto", "on", "always")),
        ("deepspeed_2021", "dp=2,zero=3", ("auto", "on", "blocking")),
        ("nanotron", "dp=2", ("nanotron", "on", "always")),
        ("nanotron", "dp=2,zero=1", ("nanotron", "off", "always")),
    ],
)
def test_stacks_reduce_as_their_framework_does(stack, plan, fields):
    chosen = Choices(None, None, KERNELS["eager"], Adam(), None, STACKS[stack], ()).plan(plan)
    assert (chosen.bucket, chosen.overlap_grads, chosen.reshard) == fields


# --- when ----------------------------------------------------------------------------------------------


def reduced(fields: str, microbatches: int = 2) -> tuple[float, float, float, list[str]]:
    """When the first bucket starts, when compute of the last backward pass ends, the step; who reduces."""
    joint = differentiate(gpt(layers=4, hidden=64, heads=2, seq=16, batch=16, vocab=64), Adam())
    program = laid_out(joint, mesh_of(4, 1, 1), schedule("1f1b", 1, microbatches), "none", fields)
    simulation = Simulator(CostModel(topology_of(4, gbps=4000.0))).simulate(program)
    start, end, paths = np.inf, 0.0, list[str]()
    for span in simulation.spans():
        path = span.path.split("/")[0]
        if span.op.op_type in ("MPIAllreduce", "MPIReduceScatter") and span.op.inputs[0].type.rank:
            start = min(start, span.start)
            paths.append(path)
        elif path.startswith(f"B{microbatches - 1}") and operator(span.op.op_type).computes:
            end = max(end, span.end)
    return start, end, simulation.step_time, paths


@pytest.mark.parametrize("zero", ["zero=0", "zero=1"])
def test_buckets_are_reduced_while_the_last_backward_pass_runs(zero):
    start, end, on, paths = reduced(f"{zero},bucket=20kB")
    assert start < end and {*paths} == {"B1@0"}
    start, end, off, paths = reduced(f"{zero},bucket=20kB,overlap_grads=off")
    assert start >= end and {*paths} == {"U@0"}
    assert on < off


def test_backward_waits_for_buckets_of_each_microbatch_without_overlap():
    *_, on, _ = reduced("zero=2,bucket=20kB")
    *_, off, paths = reduced("zero=2,bucket=20kB,overlap_grads=off")
    assert on < off and {path[0] for path in paths} == {"B"}


@pytest.mark.parametrize("fields", ["zero=2,bucket=20kB", "zero=3", "zero=3,bucket=fsdp2"])
def test_the_next_layer_computes_while_what_a_microbatch_has_made_is_reduced(fields):
    joint = differentiate(gpt(layers=6, hidden=64, heads=2, seq=16, batch=32, vocab=64), Adam())
    program = laid_out(joint, mesh_of(4, 1, 1), schedule("1f1b", 1, 8), "none", fields)
    letters = {"MPIReduceScatter": "R", "AccumulateInto": "+", "Call": "C"}
    order = "".join(letters.get(op.op_type, "") for op in program.stages[0].backward.accumulating.ops)
    # Sums of a layer follow the next one, and those of the last one end the pass.
    assert order.count("C") == 6 and "+C" not in order and order.endswith("+")
    at_once, slow = (
        Simulator(CostModel(topology_of(4, gbps=each))).simulate(program) for each in (1e7, 20.0)
    )
    reduced = [span for span in slow.spans() if span.op.op_type == "MPIReduceScatter"]
    assert slow.step_time - at_once.step_time < 0.5 * sum(span.end - span.start for span in reduced)


def test_sums_of_what_ranks_have_not_reduced_wait_for_nothing():
    """Where layers are cut, gradients of keys and values are reduced over cp beside those of weights."""
    llama = load_model("llama:layers=2,hidden=64,heads=4,kv_heads=4,vocab=64,seq=16", 8)
    joint = differentiate(add_loss(set_attention(llama, "flash")), Adam())
    orders: list[list[str]] = []
    for overlap in ("on", "off"):
        plan = Plan.parse(f"cp=2,pp=3,microbatches=8,stages=even,overlap_grads={overlap}")
        program = parallelize(joint, plan, topology_of(plan.devices))
        orders.append([op.op_type for op in program.stages[0].backward.accumulating.ops])
    assert "AccumulateInto" in orders[0][orders[0].index("MPIReduceScatter") :] and orders[0] == orders[1]


def test_parameters_are_gathered_while_the_first_forward_pass_runs():
    """As many bytes in as many messages as after the update, in the first forward call of each stage."""
    joint = differentiate(gpt(layers=4, hidden=64, heads=2, seq=16, batch=16, vocab=64), Adam())
    steps: dict[str, float] = {}
    for overlap, where in (("on", "F0@0"), ("off", "U@0")):
        fields = f"zero=1,bucket=20kB,overlap_params={overlap}"
        program = laid_out(joint, mesh_of(4, 1, 1), schedule("1f1b", 1, 2), "none", fields)
        simulation = Simulator(CostModel(topology_of(4, gbps=4000.0))).simulate(program)
        spans = [span for span in simulation.spans() if span.op.op_type == "MPIAllgatherInto"]
        assert {span.path.split("/")[0] for span in spans} == {where}
        size = sum(v.type.size for v in joint.parameters)
        assert sent(program)["all_gather"] == (len(spans), 4 * size)
        steps[overlap] = simulation.step_time
    assert steps["on"] < steps["off"]


def test_parameters_of_later_stages_are_gathered_beside_the_stage_before():
    """Of two stages a rank the second one's travel while the first one computes, after its own."""
    joint = differentiate(gpt(layers=4, hidden=64, heads=2, seq=16, batch=16, vocab=64), Adam())
    steps: dict[str, float] = {}
    for overlap in ("on", "off"):
        fields = f"dp=2,pp=2,microbatches=4,schedule=interleaved,chunks=2,zero=1,overlap_params={overlap}"
        program = build_program(joint, mesh_of(2, 1, 2), Plan.parse(fields))
        simulation = Simulator(CostModel(topology_of(4, gbps=0.5))).simulate(program)
        spans = [span for span in simulation.spans() if span.op.op_type == "MPIAllgatherInto"]
        places = {span.path.split("/")[0] for span in spans}
        assert places == ({"F0@0", "F0@1"} if overlap == "on" else {"U@0", "U@1", "U@2", "U@3"})
        if overlap == "on":  # whenever they receive (Megatron-LM's align_param_gather)
            first = [min(s.start for s in spans if s.path.startswith(f"F0@{stage}")) for stage in (0, 1)]
            assert first == [0.0, 0.0]
        steps[overlap] = simulation.step_time
    assert steps["on"] < steps["off"]


def test_a_bucket_is_one_message():
    """As long as one of all its bytes; the step of one op agrees in both engines."""
    mesh = mesh_of(4)
    maker = FunctionMaker("message")
    values = [
        maker.add_input_value(name, Tensor(Float(), (size,), mesh)) for name, size in (("a", 5), ("b", 70))
    ]
    made = maker.add("MPIAllreduce", values, {"axis": "dp"})
    maker.set_outputs(made)
    function = maker.finalize()
    topology = topology_of(4)
    expected = collective_time("all_reduce", 4 * 75, tuple(topology.devices), topology)
    tasks = lower(function, CostModel(topology))
    for _, end in (recurrence.run(tasks), events.run(tasks)):
        assert max(end) == pytest.approx(expected, rel=1e-6)
    ranks = [[np.full(size, rank, np.float32) for rank in range(4)] for size in (5, 70)]
    for array, size in zip(SequentialExecutor().compute(function, ranks), (5, 70), strict=True):
        assert all((each == np.full(size, 6)).all() for each in array)


# --- what is refused -----------------------------------------------------------------------------------


def test_bad_buckets_are_refused():
    assert parse_bucket("25MiB").limit == 25 * 2**20 and parse_bucket("7B").limit == 7
    assert parse_bucket("1024").limit == 1024
    for text in ("25", "1023"):
        with pytest.raises(PlanError, match=f"write bucket={text}MiB, or bucket={text}B for bytes"):
            Plan.parse(f"dp=2,bucket={text}")
    for text in ("0", "25 MiB", "1.5MiB", "-3", "x", "", "5q"):
        with pytest.raises(PlanError, match=r"bucket=.* is unknown; choose one of auto, torch"):
            Plan.parse(f"dp=2,bucket={text or 'none'}")
    with pytest.raises(PlanError, match="bucket=1MiB .* with zero=3 .* use bucket=auto, or zero=2"):
        Plan(2, zero=3, bucket="1MiB")
    for zero in (0, 3):
        with pytest.raises(PlanError, match=f"zero={zero} gathers none after it; use zero=1 or 2"):
            Plan(2, zero=zero, overlap_params="on")
    with pytest.raises(PlanError, match="overlap_grads='yes' is not one of off, on"):
        Plan(2, overlap_grads="yes")


def test_tensors_of_two_types_are_no_message():
    maker, mesh = FunctionMaker("two"), mesh_of(2)
    one = maker.add_input_value("one", Tensor(Float32(), (4,), mesh))
    two = maker.add_input_value("two", Tensor(F64, (4,), mesh))
    with pytest.raises(TypeRuleError, match="tensors of one element type"):
        maker.add("MPIAllreduce", [one, two], {"axis": "dp"})
    with pytest.raises(TypeRuleError, match="takes 2 inputs for each tensor, 1 given"):
        maker.add("MPIAllgatherInto", [one], {"axis": "dp", "shapes": ((4,),)})
