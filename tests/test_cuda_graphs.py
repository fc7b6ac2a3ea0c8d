"""Layers, or all passes of a step, that a host launches at once: CUDA graphs, in both engines."""

import pickle
from collections import Counter

import pytest
from expert_models import model
from said import says
from test_launches import LAUNCH, PLANS, cluster, trained
from training_models import assert_all_readers_agree, small_gpt

import distsim
from distsim.compose import parallelize
from distsim.errors import CostError, ImportModelError, PlanError
from distsim.executor import CostModel, Simulator
from distsim.importer.configs import read_megatron_args
from distsim.ir import Float, Function, FunctionMaker, Tensor, Topology
from distsim.ir.value import NO_ATTRIBUTES
from distsim.plan import Plan
from distsim.simulation.explain import what_if
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.kernels.policies import KERNELS, kernels_named

LAYERS, KERNELS_A_LAYER = 4, 10
FEW = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 1 --vocab-size 128"
)


def layers(topology: Topology, size: int) -> Function:
    """Return a function that calls one of ten kernels four times, and has a kernel of its own behind."""
    x = Tensor(Float(), (size,), topology.devices[0])
    layer, maker = FunctionMaker("layer"), FunctionMaker("layers")
    inner, outer = layer.add_input_value("x", x), maker.add_input_value("x", x)
    for _ in range(KERNELS_A_LAYER):
        (inner,) = layer.add("Relu", [inner])
    layer.set_outputs([inner])
    callee = layer.finalize()
    for _ in range(LAYERS):
        (outer,) = maker.add("Call", [outer], NO_ATTRIBUTES, (callee,))
    maker.set_outputs(maker.add("Relu", [outer]))
    return maker.finalize()


@pytest.mark.parametrize("engine", ["maxplus", "events"])
def test_a_graph_is_launched_once_whatever_its_kernels(engine):
    """Of a host that is slower than its device, and of one that is faster."""
    topology = cluster(1)
    for size in (1, 2**22):
        function = layers(topology, size)
        bare = Simulator(CostModel(topology)).interpret(function, function.inputs).step_time
        kernel = bare / (LAYERS * KERNELS_A_LAYER + 1)
        found = {
            graphs: Simulator(CostModel(topology, kernels="eager" + graphs), engine=engine)
            .interpret(function, function.inputs)
            .step_time
            for graphs in ("", ":layers", ":step")
        }
        launches = {"": LAYERS * KERNELS_A_LAYER + 1, ":layers": LAYERS + 1, ":step": 0}
        for graphs, count in launches.items():
            last = count * LAUNCH + kernel  # the kernel behind the layers, if the host is slower
            expected = max(last, bare + min(count, 1) * LAUNCH)
            assert found[graphs] == pytest.approx(expected, rel=1e-3), graphs


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("graphs", ["layers", "step"])
def test_all_readers_agree_on_steps_of_graphs(text, graphs):
    plan, joint = Plan.parse(text), trained(4, "flash" if "cp=" in text else "")
    topology, kernels = cluster(plan.devices), KERNELS["fused"].in_graphs(graphs)
    costs = CostModel(topology, kernels=kernels.way)
    program = parallelize(joint, plan, topology, costs, kernels=kernels)
    assert_all_readers_agree(program, costs)
    eager = Simulator(CostModel(topology, kernels="fused")).simulate(program)
    free = Simulator(CostModel(topology)).simulate(program)
    captured = Simulator(costs).simulate(program)
    assert free.step_time < captured.step_time < eager.step_time
    issued = [simulation.breakdown("kind").get("host", 0.0) for simulation in (captured, eager)]
    assert issued[0] < issued[1] / 2
    without = captured.again(what_if.FreeLaunches(costs)).step_time
    assert without == pytest.approx(free.step_time, rel=0.01)  # hosts wait for what they receive still


def test_a_division_is_the_same_whoever_launches_it():
    topology, plan, joint = cluster(4), Plan.parse("dp=2,pp=2,microbatches=2"), trained(4)
    programs = [
        parallelize(joint, plan, topology, kernels=kernels_named(name)) for name in ("fused", "fused:layers")
    ]
    assert programs[0].parts is programs[1].parts


@pytest.mark.parametrize(("name", "dense"), [("mixtral", 0), ("deepseek", 1)])
def test_layers_of_experts_are_issued_kernel_by_kernel(name, dense):
    """Of those with experts nothing is left of graphs; one without is one, of a step's as of layers'."""
    joint, plan = differentiate(model(name), SGD(lr=0.1)), Plan.parse("dp=2,ep=2")
    topology = cluster(2)
    launches = []
    for kernels in ("eager", "eager:layers", "eager:step"):
        costs = CostModel(topology, kernels=kernels)
        program = parallelize(joint, plan, topology, costs, kernels=kernels_named(kernels))
        assert_all_readers_agree(program, costs)
        launches.append(launched(Simulator(costs).simulate(program)))
    assert launches[1] == launches[2] and (launches[0] > launches[1]) == bool(dense)


def launched(simulation) -> int:
    """How many launches there are that take time."""
    return sum(span.op.op_type == "Launch" and span.end > span.start for span in simulation.spans())


@pytest.mark.parametrize("graphs", ["layers", "step"])
def test_a_step_that_was_copied_is_the_same(graphs):
    topology, plan, kernels = cluster(4), Plan.parse("dp=2,pp=2,microbatches=2"), f"fused:{graphs}"
    costs = CostModel(topology, kernels=kernels)
    program = parallelize(trained(4), plan, topology, costs, kernels=kernels_named(kernels))
    flat = program.to_function(steady=True)
    times = [
        Simulator(costs).interpret(each, each.inputs).step_time
        for each in (flat, pickle.loads(pickle.dumps(flat)))
    ]
    assert times == [Simulator(costs).simulate(program).step_time] * 2


def test_what_updates_is_issued_kernel_by_kernel():
    """All that takes the norm of gradients, too: of a step's graph launches are left there alone."""
    topology, plan = cluster(4), Plan.parse("dp=2,pp=2,microbatches=2")
    joint = differentiate(small_gpt(layers=4, batch=16), Adam(), clip=1.0)
    counts = []
    for kernels in ("fused", "fused:step"):
        costs = CostModel(topology, kernels=kernels)
        program = parallelize(joint, plan, topology, costs, kernels=kernels_named(kernels))
        spans = [s for s in Simulator(costs).simulate(program).spans() if s.op.op_type == "Launch"]
        issued = [span for span in spans if span.end > span.start]
        counts.append(Counter(span.path[0] for span in issued))
    assert counts[1] == Counter(U=counts[0]["U"]) and counts[0]["U"] > 4


def test_names_of_graphs():
    fused = KERNELS["fused_loss"].in_graphs("step")
    assert (fused.name, fused.way, fused.one_by_one) == (
        "fused_loss:step",
        "fused:step",
        KERNELS["fused_loss"],
    )
    assert pickle.loads(pickle.dumps(fused)) == fused == kernels_named("fused_loss:step")
    assert fused.in_graphs("layers") == kernels_named("fused_loss:layers")
    with says(PlanError, "cuda_graphs='layer'", "layers"):
        kernels_named("fused:layer")
    with says(PlanError, "cuda_graphs=step", "kernels=ops", "leave it out"):
        KERNELS["ops"].in_graphs("step")
    for wrong in ("fused:layer", "ops:layers", ":step"):
        with says(CostError, f"kernels='{wrong}'", ":layers or :step"):
            CostModel(cluster(1), kernels=wrong)


def test_graphs_are_an_option_of_a_step():
    given = {"cluster": "dgx-h100", "plan": "dp=8", "batch": 8, "seq": 128, "stack": "megatron"}
    steps = [
        distsim.simulate("gpt2:layers=2", **given, cuda_graphs=graphs) for graphs in (None, "layers", "step")
    ]
    times = [step.step_time for step in steps]
    assert times[0] > times[1] > times[2]
    tried = [{what.change: what.step_time for what in step.explain().what_ifs} for step in steps[:2]]
    assert [each.get("CUDA graphs of layers") for each in tried] == [times[1], None]
    said = [any("CUDA graphs" in note for note in step.notes) for step in steps]
    assert said == [False, True, True]
    one_by_one = distsim.simulate("gpt2:layers=2", **given, kernels="fused:layers", cuda_graphs="none")
    assert one_by_one.step_time == times[0]
    with says(PlanError, "kernels=fused:layers", "cuda_graphs=step", "leave one"):
        distsim.simulate("gpt2:layers=2", **given, kernels="fused:layers", cuda_graphs="step")
    with says(PlanError, "cuda_graphs=layers", "kernels=ops"):
        distsim.simulate("gpt2:layers=2", **given, cuda_graphs="layers", kernels="ops")


@pytest.mark.parametrize(
    ("more", "graphs", "partly"),
    [
        ("", "", False),
        ("--cuda-graph-impl none --cuda-graph-modules attn", "", False),
        ("--enable-cuda-graph", "layers", False),
        ("--cuda-graph-impl local --cuda-graph-modules attn mlp", "layers", False),
        ("--cuda-graph-impl local --cuda-graph-modules attn mlp moe_router", "layers", True),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope moe_router moe_preprocess", "layers", True),
        ("--cuda-graph-impl full_iteration", "step", False),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "step", False),
    ],
)
def test_graphs_of_megatron(tmp_path, more, graphs, partly):
    path = tmp_path / "args.txt"
    path.write_text(f"{FEW} {more}", encoding="utf-8")
    read = read_megatron_args(path)
    assert kernels_named(read.stack.kernels).graphs == graphs
    assert any("CUDA graphs" in note for note in read.notes) == partly
    assert not [name for name in read.unknown if "graph" in name]


def test_megatron_has_no_other_graphs(tmp_path):
    path = tmp_path / "args.txt"
    path.write_text(f"{FEW} --cuda-graph-impl jit", encoding="utf-8")
    with says(ImportModelError, "--cuda-graph-impl", "full_iteration"):
        read_megatron_args(path)
