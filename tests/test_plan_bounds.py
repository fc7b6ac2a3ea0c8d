"""Bounds of plans of which nothing was built: what is sent, what is held."""

from dataclasses import replace
from functools import cache

import pytest

from distsim.importer import load_model
from distsim.ir import Device, Float32, FunctionMaker, Link, Role, Tensor, Topology
from distsim.ir.topology import Level
from distsim.models import mlp
from distsim.plan import Plan
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.run import FixedModel
from distsim.transforms import SGD, Adam, add_loss, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels.policies import KERNELS

LLAMA = "llama:layers=8,hidden=64,heads=4,kv_heads=2,vocab=256,seq=16"


@cache
def step(policy="mixed", name=LLAMA):
    return differentiate(add_loss(load_model(name, 32)), Adam(), precision=precision_named(policy), clip=1.0)


def evaluator(bytes_per_second, policy="mixed", kernels="eager"):
    """What evaluates plans on eight devices of two nodes, which send so many bytes a second to each other."""
    device = Device(0, "gpu", throughput=1e11, dram_bandwidth=1e12, memory=float("inf"))
    levels = [Level("node", Link(4 * bytes_per_second), 4), Level("link", Link(bytes_per_second))]
    topology = Topology.hierarchical(device, 8, levels)
    return PlanEvaluator(SearchProblem(FixedModel(step(policy)), topology, KERNELS[kernels]))


def bound_and_trial(found, text):
    plan = Plan.parse(text)
    trial = found.trial(plan)
    assert not trial.refused
    return found.bound(plan, Standing()), found.least_bytes(plan, Standing()), trial


SENT = [
    "dp=8,zero=0",
    "dp=8,zero=1,microbatches=2",
    "dp=8,zero=2,microbatches=4",
    "dp=8,zero=2,microbatches=4,overlap_grads=off,bucket=megatron",
    "dp=8,zero=3,microbatches=2",
    "dp=8,zero=3,microbatches=2,remat=full",
    "dp=8,zero=3,microbatches=2,reshard=never",
    "dp=4,tp=2,zero=1,microbatches=4,overlap_grads=off",
    "dp=4,pp=2,zero=1,microbatches=4,stages=layers,overlap_grads=off,bucket=megatron",
]


@pytest.mark.parametrize("text", SENT)
def test_on_slow_links_a_step_takes_what_is_sent(text):
    least, _, trial = bound_and_trial(evaluator(1e6), text)
    assert 0.8 * trial.seconds < least <= trial.seconds


@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_what_reads_the_data_is_not_gathered_again_for_its_gradient(kernels):
    joint = differentiate(mlp(layers=6, width=64, batch=32), Adam(), precision=precision_named("mixed"))
    topology = evaluator(1e6).problem.topology
    found = PlanEvaluator(SearchProblem(FixedModel(joint), topology, KERNELS[kernels]))
    for text in ("dp=8,zero=3", "dp=4,tp=2,zero=3", "dp=8,zero=3,bucket=fsdp2", "dp=8,zero=3,remat=full"):
        least, _, trial = bound_and_trial(found, text)
        assert 0.6 * trial.seconds < least <= trial.seconds


def test_biases_need_not_be_gathered_again():
    training = differentiate(add_loss(load_model("gpt:layers=8,hidden=32,heads=4,vocab=32,seq=8", 16)), SGD())
    device = Device(0, "gpu", throughput=1e11, dram_bandwidth=1e11, memory=float("inf"))
    topology = Topology.hierarchical(device, 8, [Level("link", Link(1e7))])
    found = PlanEvaluator(SearchProblem(FixedModel(training), topology, KERNELS["fused_2022"]))
    least, _, trial = bound_and_trial(found, "dp=8,zero=3")
    assert 0.9 * trial.seconds < least <= trial.seconds


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_statistics_that_nobody_updates_are_not_sent(zero):
    maker = FunctionMaker("normed")
    taken = maker.add_input_value("x", Tensor(Float32(), (32, 8)))
    weight = maker.add_input_value("w", Tensor(Float32(), (8, 4096)), Role.PARAMETER)
    each = [
        maker.add_input_value(name, Tensor(Float32(), (4096,)), Role.PARAMETER)
        for name in ("scale", "bias", "mean", "variance")
    ]
    product = maker.add("MatMul", [taken, weight])[0]
    maker.set_outputs([maker.add("BatchNormalization", [product, *each])[0]])
    training = differentiate(add_loss(maker.finalize()), Adam())
    found = evaluator(1e6)
    found = PlanEvaluator(SearchProblem(FixedModel(training), found.problem.topology, KERNELS["eager"]))
    least, _, trial = bound_and_trial(found, f"dp=8,zero={zero}")
    assert 0.8 * trial.seconds < least <= trial.seconds


def test_where_reductions_do_not_overlap_computation_waits_for_them():
    found = evaluator(2e9)
    fields = "dp=8,zero=2,microbatches=4,bucket=megatron,overlap_grads="
    apart, _, trial = bound_and_trial(found, f"{fields}off")
    beside, _, _ = bound_and_trial(found, f"{fields}on")
    sent = found.bounds(trial.plan)._traffic.seconds(trial.plan, found.problem.topology)
    # Of four microbatches the sum of the second is the first that waits.
    assert apart == pytest.approx(beside + sent.exposed, rel=1e-6) and apart <= trial.seconds
    assert 0.7 * sent.busy < sent.exposed < sent.busy


def test_what_fills_a_bucket_within_a_layer_may_go_beside_the_rest_of_it():
    training = differentiate(
        add_loss(load_model("llama:layers=9,hidden=32,heads=4,kv_heads=2,vocab=512,seq=16", 16)), SGD()
    )
    device = Device(0, "gpu", throughput=3e10, dram_bandwidth=6e10, memory=float("inf"))
    topology = Topology.hierarchical(device, 8, [Level("link", Link(1.86e9))])
    found = PlanEvaluator(SearchProblem(FixedModel(training), topology, KERNELS["compiled"]))
    plan, standing = Plan.parse("dp=8,zero=2,remat=full,overlap_grads=off"), Standing()
    trial = found.trial(plan)
    found.learn(trial, standing)
    assert 0.8 * trial.seconds < found.bound(plan, standing) <= trial.seconds


def test_what_one_stage_of_a_rank_sends_may_go_beside_what_another_computes():
    fields = "dp=8,zero=2,chunks=2,schedule=1f1b_v,stages=default,overlap_grads=off"
    for bucket in ("megatron", "100p"):
        least, _, trial = bound_and_trial(evaluator(1e6), f"{fields},bucket={bucket}")
        assert 0.4 * trial.seconds < least <= trial.seconds


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,tp=2,microbatches=8,zero=3,remat=min_cut",
        "dp=8,microbatches=2,zero=3,chunks=2,schedule=v_half",
        "dp=4,tp=2,microbatches=8,chunks=2,schedule=dualpipe_v,bucket=deepspeed",
    ],
)
def test_autocast_may_save_what_is_cast_of_a_parameter_and_reduce_gradients_before_they_are(text):
    least, _, trial = bound_and_trial(evaluator(1e6, "amp"), text)
    assert 0.4 * trial.seconds < least <= trial.seconds


@pytest.mark.parametrize("fields", ["zero=1", "schedule=interleaved,chunks=2", "schedule=zb_h1"])
def test_a_short_step_tells_in_which_type_gradients_are_summed(fields):
    found, standing = evaluator(1e9, "amp"), Standing()
    before, least, trial = bound_and_trial(found, f"dp=4,pp=2,microbatches=4,stages=layers,{fields}")
    found.probed(trial.plan, standing)
    after, learnt = found.bound(trial.plan, standing), found.least_bytes(trial.plan, standing)
    assert 1.1 * before < after <= trial.seconds
    assert least < 0.9 * trial.peak and 0.8 * trial.peak < learnt <= trial.peak


def test_a_short_step_tells_how_often_parameters_are_gathered():
    found, standing = evaluator(1e6, "amp"), Standing()
    before, _, trial = bound_and_trial(found, "dp=4,tp=2,zero=3,microbatches=4,remat=full")
    found.probed(trial.plan, standing)
    assert before < 0.7 * trial.seconds
    assert 0.95 * trial.seconds < found.bound(trial.plan, standing) <= trial.seconds


@pytest.mark.parametrize("layers", [24, 48])
def test_reductions_longer_than_backward_passes_hold_these_up(layers):
    """Where each layer is reduced for 1.6 times as long as it computes backward, what is between layers, and
    what they compute of parameters, goes on beside that, and counts once."""
    training = differentiate(
        add_loss(load_model(f"gpt:layers={layers},hidden=32,heads=4,vocab=16,seq=32", 128)), SGD()
    )
    device = Device(0, "gpu", throughput=1e13, dram_bandwidth=1e10, memory=float("inf"))
    plan = Plan.parse("dp=2,microbatches=64,zero=2,bucket=52kB")

    def probed(bandwidth):
        topology = Topology.hierarchical(device, 2, [Level("link", Link(bandwidth))])
        found = PlanEvaluator(SearchProblem(FixedModel(training), topology, KERNELS["ops"]))
        standing = Standing()
        found.probed(plan, standing)
        return found, standing

    known = probed(1e9)[0].known(plan, probed(1e9)[1])
    work = known.layers
    computed = work.layer - (work.forward + work.waiting) / layers + known.sums + known.extras.beside
    found, standing = probed(known.extras.reduced / 2 / (1.6 * computed))
    fast, unhindered = probed(1e12)
    bound, trial = found.bound(plan, standing), found.trial(plan)
    assert 1.2 * fast.bound(plan, unhindered) < bound <= trial.seconds and bound > 0.93 * trial.seconds


def test_plans_are_refused_before_they_are_built_as_they_are_when_they_are():
    found = evaluator(1e9)
    for sizes in ("dp=2,pp=4,microbatches=2", "pp=8,microbatches=8,stages=default"):
        plan = Plan.parse(f"{sizes},schedule=interleaved,chunks=2")
        settled = found.settled(plan, Standing())
        assert settled is not None and settled.refused and settled == found.trial(plan)
    assert found.settled(Plan.parse("pp=4,dp=2,microbatches=4"), Standing()) is None


@pytest.mark.parametrize("stages", ["layers", "even"])
def test_layers_teach_those_whose_backward_passes_are_in_two_halves(stages):
    found, standing = evaluator(1e10), Standing()
    fields = f"dp=2,pp=4,microbatches=8,stages={stages},schedule="
    found.learn(found.trial(Plan.parse(f"{fields}1f1b")), standing)
    plan = Plan.parse(f"{fields}zb_h1")
    before, after = found.bound(plan, Standing()), found.bound(plan, standing)
    assert 1.1 * before < after <= found.trial(plan).seconds


@pytest.mark.parametrize("more", ["", ",post_validation=on"])
@pytest.mark.parametrize("fields", ["zb_h2", "zb_v,chunks=2", "zb_h1", "1f1b", "interleaved,chunks=2"])
def test_bounds_are_of_steps_that_follow_each_other(fields, more):
    found, standing = evaluator(1e10, kernels="ops"), Standing()
    plan = Plan.parse(f"dp=2,pp=4,microbatches=8,stages=default,schedule={fields}{more}")
    trial = found.trial(plan)
    assert not trial.refused
    found.learn(found.trial(replace(plan, schedule="1f1b", chunks=1, post_validation="off")), standing)
    found.learn(trial, standing)
    assert found.bound(plan, standing) <= trial.seconds


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,pp=2,chunks=2,schedule=interleaved,microbatches=4,zero=1,bucket=megatron,overlap_grads=off",
        "dp=4,pp=2,schedule=zb_h1,microbatches=4,zero=1,bucket=megatron,overlap_grads=off",
        "dp=4,pp=2,schedule=zb_h1,microbatches=4",
        "dp=4,pp=2,microbatches=4,zero=2,bucket=megatron,overlap_grads=off",
        "dp=4,pp=2,chunks=2,schedule=looped_bfs,microbatches=4,overlap_grads=off",
    ],
)
def test_gradients_that_are_reduced_after_backward_are_held_until_then(text):
    found = evaluator(1e9)
    plan = Plan.parse(f"{text},stages=layers")
    _, least, trial = bound_and_trial(found, str(plan))
    held = found.bounds(plan).held
    kept = held.parameters + held.state / (plan.dp if plan.zero else 1)
    made = held.gradients / (plan.chunks if plan.zero == 2 else 1)
    assert (kept + made) / plan.pp <= least <= trial.peak


def test_parameters_that_are_gathered_when_a_step_begins_need_not_be_held_all_of_it():
    joint = step(
        "mixed_bf16_grads", LLAMA.replace("layers=8,hidden=64", "layers=4,hidden=128").replace("=16", "=64")
    )
    topology = evaluator(1e6).problem.topology
    found = PlanEvaluator(SearchProblem(FixedModel(joint), topology, KERNELS["fused"]))
    text = "dp=2,pp=4,microbatches=4,schedule=gpipe,stages=default,zero=2,overlap_params=on"
    _, least, trial = bound_and_trial(found, text)
    assert 0 < least <= trial.peak
