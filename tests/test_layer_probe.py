"""A step of few of its layers tells what layers do: it is the step of a model that has no more."""

import re
from dataclasses import replace

import pytest
from decoder_models import small
from training_models import topology_of

from distsim.compose import parallelize
from distsim.compose.division import layouts_of
from distsim.cost import CostModel
from distsim.hardware.plan_mesh import plan_mesh
from distsim.importer import load_model
from distsim.ir import Device, Link, Topology, pformat
from distsim.ir.topology import Level
from distsim.models import mlp
from distsim.plan import Plan
from distsim.plan_search import search
from distsim.plan_search.bounds import layer_probe
from distsim.plan_search.bounds.layer_probe import probe_of
from distsim.plan_search.bounds.plan_bounds import PlanBounds
from distsim.plan_search.bounds.short_step import shortened
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.ordering import PlanQueue
from distsim.plan_search.run import FixedModel
from distsim.plan_search.trial import LATER, SLOWER, TOO_LARGE
from distsim.transforms import SGD, Adam, add_loss, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels.policies import KERNELS

GPT = "gpt:layers={},hidden=32,heads=4,vocab=32,seq=8"
LLAMA = "llama:layers={},hidden=32,heads=4,kv_heads=2,vocab=32,seq=16"
MIXTRAL = "mixtral-8x7b:layers={},seq=16"


def step_of(name, layers, **options):
    return differentiate(add_loss(load_model(name.format(layers), 16)), Adam(), **options)


def layers_of(function):
    return PlanBounds(function, Topology(), KERNELS["eager"]).layer_parameters


def text(function):
    """Return the text of a function without the numbers that names were given to tell them apart."""
    return re.sub(r"\b([a-z]{3,})\d+", r"\1", pformat(function))


@pytest.mark.parametrize("name", [GPT, LLAMA, MIXTRAL])
@pytest.mark.parametrize(
    "options", [{}, {"clip": 1.0, "precision": "mixed"}, {"clip": 1.0, "precision": "amp"}]
)
@pytest.mark.parametrize("kept", [1, 2])
def test_a_step_of_few_layers_is_that_of_a_model_of_no_more(name, options, kept):
    options = {key: precision_named(value) if key == "precision" else value for key, value in options.items()}
    whole = step_of(name, 5, **options)
    assert text(shortened(whole, layers_of(whole), kept)) == text(step_of(name, kept, **options))


def test_layers_that_are_no_chain_or_too_few_are_left_as_they_are():
    whole = step_of(LLAMA, 3)
    assert shortened(whole, layers_of(whole), 3) is None
    assert not layers_of(differentiate(mlp(layers=4, width=8, batch=4), SGD()))


def evaluator_of(**options):
    step = step_of("llama:layers=12,hidden=64,heads=4,kv_heads=2,vocab=64,seq=64", 12, **options)
    return PlanEvaluator(SearchProblem(FixedModel(step), topology_of(8), KERNELS["eager"], top=1))


@pytest.fixture(scope="module")
def evaluator():
    return evaluator_of()


@pytest.fixture(scope="module")
def clipped():
    return evaluator_of(clip=1.0)


@pytest.mark.parametrize(
    "fields",
    [
        "dp=2,tp=2,pp=2,microbatches=4,stages=layers",
        "dp=2,pp=2,microbatches=8,schedule=interleaved,chunks=3,stages=layers,remat=full,zero=1",
        "dp=4,pp=2,microbatches=4,stages=layers,remat=min_cut,zero=3",
        "dp=4,tp=2,microbatches=2,sp=on,remat=attention",
    ],
)
def test_what_a_probe_tells_is_what_building_the_plan_tells(evaluator, fields):
    plan = Plan.parse(fields)
    told, built = evaluator.probed(plan, Standing()), evaluator.trial(plan).layers
    assert told.passage == (built.passage and pytest.approx(built.passage))
    for name in ("seconds", "computing", "forward", "products", "waiting", "layer", "head", "sums", "work"):
        assert getattr(told, name) == pytest.approx(getattr(built, name), rel=1e-9), name
    assert (told.saved, told.layers) == (built.saved, built.layers)


def test_halves_of_backward_passes_take_no_less_than_the_whole_ones_that_a_probe_tells_of(evaluator):
    plan, standing = Plan.parse("dp=2,pp=4,microbatches=8,schedule=zb_h1,stages=layers"), Standing()
    before = evaluator.bound(plan, standing), evaluator.least_bytes(plan, standing)
    assert evaluator.probed(plan, standing) is not None
    trial = evaluator.trial(plan)
    assert before[0] < evaluator.bound(plan, standing) <= trial.seconds
    assert before[1] < evaluator.least_bytes(plan, standing) <= trial.peak


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ("schedule=1f1b,sp=on", 0.9),  # 0.83 without what layers of a stage wait for each other
        ("schedule=zb_h1,sp=on", 0.89),  # 0.85 with what whole backward passes compute
        ("schedule=zb_h1,remat=full", 0.87),
    ],
)
def test_layers_of_a_stage_wait_for_each_other_and_halves_of_passes_for_more(clipped, fields, share):
    """Where updates wait for the norm of all gradients, ranks wait for those ahead in each step."""
    evaluator = clipped
    plan, standing = Plan.parse(f"tp=2,pp=4,microbatches=16,stages=layers,{fields}"), Standing()
    assert evaluator.probed(plan, standing) is not None
    seconds = evaluator.trial(plan).seconds
    assert share * seconds < evaluator.bound(plan, standing) <= seconds


@pytest.mark.parametrize("reason", [SLOWER, TOO_LARGE])
def test_what_is_discarded_after_a_probe_was_not_built_and_teaches_others(evaluator, monkeypatch, reason):
    plan, probed = Plan.parse("dp=2,pp=4,microbatches=8,stages=layers"), Standing()
    least = evaluator.bound if reason == SLOWER else evaluator.least_bytes
    before = least(plan, probed)
    evaluator.probed(plan, probed)
    limit = (before + least(plan, probed)) / 2
    monkeypatch.setattr(evaluator, "usable", limit if reason == TOO_LARGE else 2.0**60)
    monkeypatch.setattr(evaluator, "trial", lambda plan, limit: pytest.fail("it was built"))
    standing, other = Standing([limit] if reason == SLOWER else []), Standing()
    (trial,) = evaluator.trials(iter([plan]), standing, {})
    assert trial.discarded == reason
    evaluator.learn(trial, other)
    assert other.layers == standing.layers == probed.layers != {}


@pytest.mark.parametrize(
    ("fields", "probe"),
    [
        ("dp=4,pp=4,microbatches=2,chunks=2,schedule=interleaved", "dp=4,pp=2,microbatches=2,stages=layers"),
        ("dp=2,tp=4,sp=on,microbatches=16,remat=full", "dp=2,tp=4,sp=on,microbatches=16,remat=full"),
    ],
)
def test_a_probe_has_as_many_samples_on_the_ranks_of_a_stage(fields, probe):
    assert probe_of(Plan.parse(fields)) == Plan.parse(probe)


def test_there_is_no_probe_where_groups_of_ranks_or_hosts_matter():
    assert probe_of(Plan.parse("dp=4,zero=1,zero_ranks=2")) is None
    assert probe_of(Plan.parse("dp=4,remat=none,offload=2")) is None


def test_plans_are_put_off_while_others_are_expected_to_be_better(evaluator):
    fast = Plan.parse("dp=8,microbatches=2")
    slow = replace(fast, remat="full")
    queue, found = PlanQueue([slow, fast], evaluator, Standing()), {}
    units, until = queue.round(1, Standing(), found)
    assert [*units.values()] == [[fast, slow]] and until > 0 and not queue and not found
    standing = Standing()
    (first,) = evaluator.trials([fast], standing, {})
    (second,) = evaluator.trials([slow], standing, {}, evaluator.expected(fast, standing))
    assert first.simulated and second.discarded == LATER and second.layers is not None
    for trial in (first, second):
        evaluator.learn(trial, standing)
    queue.put_back([slow], standing)
    units, until = queue.round(1, standing, found)
    assert [*units.values()] == [[slow]] and until == evaluator.expected(slow, standing)
    queue.put_back([slow], standing)
    assert queue.round(1, Standing([0.0]), found).units == {} and found[str(slow)].discarded == SLOWER


def test_of_plans_that_share_a_division_a_unit_is_made(evaluator):
    texts = ["dp=2,pp=4,microbatches=4", "dp=4,pp=2,microbatches=2", "dp=2,tp=2,pp=2,microbatches=4"]
    plans = [Plan.parse(text) for text in texts]
    units, _ = PlanQueue(plans, evaluator, Standing()).round(24, Standing(), {})
    assert sorted(map(len, units.values())) == [1, 2]


def test_nothing_is_told_of_layers_that_are_divided_otherwise_than_in_the_whole(monkeypatch):
    step = step_of("llama:layers=12,hidden=64,heads=4,kv_heads=2,vocab=64,seq=64", 12)
    problem = SearchProblem(FixedModel(step), topology_of(8), KERNELS["eager"])
    whole, other = Plan.parse("dp=2,tp=2,pp=2,microbatches=4,stages=layers"), Plan.parse("dp=4,tp=2,sp=on")
    mesh, costs = plan_mesh(other, problem.topology), PlanEvaluator(problem).costs

    def otherwise(function, mesh_, plan, kernels, costs_):
        if function is not step:
            mesh_, plan = mesh, other
        return layouts_of(function, mesh_, plan, kernels, costs.on(mesh_.devices[0]))

    monkeypatch.setattr(layer_probe, "layouts_of", otherwise)
    assert PlanEvaluator(problem).probed(whole, Standing()) is None
    assert PlanEvaluator(problem).probed(other, Standing()) is not None


@pytest.mark.parametrize("name", [GPT, LLAMA, MIXTRAL])
def test_layers_that_are_laid_out_alike_are_the_same_functions(name):
    whole = step_of(name, 9)
    few = shortened(whole, layers_of(whole), 4)
    topology = topology_of(8)
    costs, told = CostModel(topology), set()
    for text in ("dp=8", "tp=2", "dp=2,tp=4", "dp=4,tp=2,sp=on", "tp=4,microbatches=4", "dp=2,tp=2"):
        plan = Plan.parse(text)
        mesh = plan_mesh(plan, topology)
        given = mesh, plan, KERNELS["ops"], costs.on(mesh.devices[0])
        alike = layouts_of(few, *given).of_callees() == layouts_of(whole, *given).of_callees()
        programs = [parallelize(each, plan, topology) for each in (few, whole)]
        passes = [
            [op for s in p.stages for b in (s.forward, s.backward) for op in b.function.ops] for p in programs
        ]
        called = [{pformat(op.callee) for op in ops if op.is_call} for ops in passes]
        assert alike == (called[0] == called[1])
        told.add(alike)
    assert told == ({True, False} if name == MIXTRAL else {True})


def test_layers_take_no_less_in_other_pipelines_where_parameters_are_gathered():
    """The first of a stage casts what is gathered for any microbatch; in others that waits for one."""
    step = step_of(
        "llama:layers=8,hidden=64,heads=4,kv_heads=2,vocab=64,seq=16", 8, precision=precision_named("amp")
    )
    evaluator = PlanEvaluator(SearchProblem(FixedModel(step), topology_of(8), KERNELS["eager_waiting"]))
    fields = ["schedule=1f1b", "schedule=1f1b_v,chunks=2", "schedule=interleaved,chunks=4"]
    plans = [Plan.parse(f"dp=2,tp=2,pp=2,microbatches=2,stages=layers,zero=3,{each}") for each in fields]
    works = [evaluator.probed(plans[0], Standing()), *[evaluator.trial(plan).layers for plan in plans]]
    assert [work.seconds for work in works] == pytest.approx([works[0].seconds] * 4, rel=1e-12)
    assert [work.forward for work in works] == pytest.approx([works[0].forward] * 4, rel=1e-12)


def test_the_first_stage_holds_no_more_between_halves_than_it_saved(evaluator):
    plan, standing = Plan.parse("dp=2,pp=4,microbatches=8,schedule=zb_h1,stages=layers"), Standing()
    evaluator.probed(plan, standing)
    known = evaluator.known(plan, standing)
    assert known.pending > 0
    known = known._replace(pending=2 * known.saved)  # gradients too
    stages = evaluator.bounds(plan)._stages(plan, known)
    assert [stage.pending for stage in stages] == [stages[0].saved, *[2 * stages[0].saved] * 3]


def test_forward_passes_do_not_wait_where_another_pass_computes_beside_them(evaluator):
    texts = ("schedule=zb_v,chunks=2", "schedule=dualpipe_v,chunks=2")
    alone, beside = (Plan.parse(f"tp=4,pp=2,microbatches=8,stages=layers,{text}") for text in texts)
    for plan, waits in ((alone, True), (beside, False)):
        standing = Standing()
        told = evaluator.probed(plan, standing)
        seconds = evaluator.known(plan, standing).layers.seconds
        assert told.waiting > 0 and seconds == told.computing + waits * told.waiting


@pytest.mark.parametrize("fields", ["schedule=gpipe", "schedule=interleaved,chunks=1", "schedule=zb_h1"])
def test_stages_may_begin_where_a_view_alone_reads_what_is_saved(fields):
    step = differentiate(add_loss(small("llama", 8, num_hidden_layers=6)), Adam())
    device = Device(0, "gpu", throughput=1e10, dram_bandwidth=1e10, kernel_launch_overhead=1e-6)
    devices = Topology.hierarchical(device, 4, [Level("link", Link(1e9))])
    plan = Plan.parse(f"pp=4,microbatches=4,{fields}")
    (trial,) = search(step, devices, [plan]).trials
    assert trial.simulated


def test_copies_of_stages_divide_layers_that_ranks_do_not():
    step = step_of("llama:layers=9,hidden=64,heads=4,kv_heads=2,vocab=64,seq=64", 9)
    evaluator = PlanEvaluator(SearchProblem(FixedModel(step), topology_of(8), KERNELS["ops"]))
    plan, standing = Plan.parse("dp=4,pp=2,microbatches=4,schedule=dualpipe,remat=full"), Standing()
    evaluator.learn(evaluator.trial(replace(plan, schedule="gpipe")), standing)
    assert evaluator.knows_layers(plan, standing)
    assert evaluator.bound(plan, standing) <= evaluator.trial(plan).seconds


@pytest.mark.parametrize(
    ("taught", "fields"),
    [
        # Of the stages 2-4 the second has two of the four layers that recompute, and one in flight.
        ("stages=3-3,schedule=gpipe,remat=every:3", "stages=2-4,schedule=gpipe,remat=every:3"),
        ("stages=2-4,remat=block:1", "stages=2-4,remat=block:1"),
    ],
)
def test_what_layers_save_says_nothing_of_others_that_save_less(taught, fields):
    step = step_of("llama:layers=6,hidden=64,heads=4,kv_heads=2,vocab=16,seq=64", 6)
    evaluator = PlanEvaluator(SearchProblem(FixedModel(step), topology_of(8), KERNELS["eager"]))
    known, plan = (Plan.parse(f"dp=2,pp=2,microbatches=8,{text}") for text in (taught, fields))
    standing = Standing()
    evaluator.probed(known, standing)
    evaluator.learn(evaluator.trial(known), standing)
    trial = evaluator.trial(plan)
    assert 0 < evaluator.least_bytes(plan, standing) <= trial.peak
    assert evaluator.bound(plan, standing) <= trial.seconds


def test_gradients_that_are_sent_before_a_pass_goes_on_keep_layers_whole():
    step = differentiate(add_loss(load_model("gpt:layers=12,hidden=32,heads=4,vocab=256,seq=16", 16)), SGD())
    evaluator = PlanEvaluator(SearchProblem(FixedModel(step), topology_of(8), KERNELS["ops"]))
    fields = "dp=2,pp=4,microbatches=4,schedule=zb_h1,remat=full,zero=2"
    standing, plan = Standing(), Plan.parse(f"{fields},stages=1-1-2-8,overlap_grads=off")
    told = evaluator.probed(Plan.parse(f"{fields},stages=layers"), standing)
    assert told.pending > 0 and told.halves is not None
    # All but the last layer of each stage run whole backward passes, and hold nothing between two halves.
    known, trial = evaluator.known(plan, standing), evaluator.trial(plan)
    assert known.layers is not None and known.pending == 0
    assert evaluator.least_bytes(plan, standing) <= trial.peak
    assert evaluator.bound(plan, standing) <= trial.seconds
