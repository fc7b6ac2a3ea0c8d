"""What a caller gets wrong comes back as an error that names it, the numbers and the way out."""

import re
from functools import cache

import numpy as np
import pytest
from said import says

from distsim.compose import build_program, parallelize
from distsim.errors import (
    DistsimError,
    ImportModelError,
    PlanError,
    ScheduleError,
    SimulationError,
    TopologyError,
    TypeRuleError,
)
from distsim.executor import CostModel, SequentialExecutor, Simulator, infer_types
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import Device, Float, Float64, FunctionMaker, Int64, Mesh, Role, Tensor, Topology
from distsim.models import gpt, llama, mlp
from distsim.plan import Plan
from distsim.plan.rank_layout import MAX_DEGREE
from distsim.schedule import schedule
from distsim.transforms import (
    SGD,
    PipeDreamScheduler,
    add_loss,
    differentiate,
    optimizer_named,
    parallel_transform_3d,
    pipeline,
    shard,
    steady_state_transform,
)

BATCH = 12


def gpus(count: int) -> list[Device]:
    return [Device(i, "gpu") for i in range(count)]


@cache
def training():
    return differentiate(mlp(layers=4, width=8, batch=BATCH), SGD(0.1))


# --- degrees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("value", [0, -1, -(2**40)])
def test_degrees_below_one(position, value):
    names = ["dp_degree", "hp_degree", "pp_degree", "num_microbatches"]
    degrees = [1, 1, 1, 1]
    degrees[position] = value
    *three, microbatches = degrees
    with says(PlanError, f"{names[position]}={value}", "at least 1"):
        parallel_transform_3d(training(), *three, gpus(8), microbatches)


@pytest.mark.parametrize(
    ("degrees", "given"), [((2, 2, 2), 7), ((16, 1, 1), 8), ((1, 1, 2), 1), ((1, 1, 1), 0), ((2**20,) * 3, 4)]
)
def test_more_ranks_than_devices(degrees, given):
    needed = degrees[0] * degrees[1] * degrees[2]
    names = [f"{name}={degree}" for name, degree in zip(("dp", "hp", "pp"), degrees, strict=True)]
    with says(PlanError, *names, f"{needed} devices", f"{given} given"):
        parallel_transform_3d(training(), *degrees, gpus(given), 1)


@pytest.mark.parametrize(("dp", "microbatches"), [(5, 1), (1, 7), (4, 2), (3, 8), (24, 1), (1, 1000)])
def test_a_batch_that_does_not_divide(dp, microbatches):
    numbers = (f"dp={dp}", f"microbatches={microbatches}", f"batch of {BATCH}", "1, 2, 3, 4, 6, 12")
    with says(PlanError, *numbers):
        parallel_transform_3d(training(), dp, 1, 1, gpus(dp), microbatches)
    with says(PlanError, *numbers):
        shard(training(), Mesh(gpus(dp), dp=dp, tp=1), microbatches)


def test_the_divisors_named_are_those_that_work():
    with pytest.raises(PlanError) as caught:
        parallel_transform_3d(training(), 5, 1, 1, gpus(5), 1)
    named = [int(number) for number in re.findall(r"\d+", str(caught.value).split("one of")[1])]
    assert named == [1, 2, 3, 4, 6, 12]
    for dp in named:
        assert parallel_transform_3d(training(), dp, 1, 1, gpus(dp), 1).outputs


def test_more_stages_than_the_function_has_ops_and_the_most_that_is_named_works():
    with pytest.raises(PlanError, match=r"pp=64, but mlp_training has only \d+ forward ops") as caught:
        parallel_transform_3d(training(), 1, 1, 64, gpus(64), 1)
    most = int(re.search(r"at most (\d+)", str(caught.value))[1])
    assert parallel_transform_3d(training(), 1, 1, most, gpus(most), 1).outputs


def test_a_function_without_a_batch():
    maker = FunctionMaker("scale")
    x = maker.add_input_value("x", Tensor(Float(), (4,)), Role.PARAMETER)
    maker.set_outputs([maker.add_op("Relu", inputs=[x])])
    function = maker.finalize()
    with says(PlanError, "scale", "dp=2", "microbatches=3", "no input has a batch"):
        shard(function, Mesh(gpus(2), dp=2, tp=1), 3)


# --- plans, schedules, losses, builders -------------------------------------------------------------


def test_a_plan_larger_than_the_cluster():
    with says(PlanError, "dp=4,tp=2,pp=2", "16 devices", "has 8", "larger cluster"):
        parallelize(training(), Plan(dp=4, tp=2, pp=2), load_cluster("dgx-a100"))


@pytest.mark.parametrize("value", [0, -1, MAX_DEGREE + 1, 2.0, True])
@pytest.mark.parametrize("name", ["dp", "tp", "pp", "microbatches"])
def test_plans_of_other_than_counts(name, value):
    with says(PlanError, f"{name}={value}", f"1..{MAX_DEGREE}"):
        Plan(**{name: value})


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 4), (2, -2)])
def test_a_schedule_of_nothing(stages, microbatches):
    wrong = f"={stages}" if stages < 1 else f"={microbatches}"
    for name in ("1f1b", "gpipe"):
        with says(ScheduleError, name, wrong, "at least 1"):
            schedule(name, stages, microbatches)
    with says(ScheduleError, wrong):
        PipeDreamScheduler(microbatches).schedule(stages)


def test_names_that_are_not_known_come_with_those_that_are():
    with says(ScheduleError, "'zb'", "1f1b, gpipe"):
        schedule("zb", 2, 2)
    with says(PlanError, "'hinge'", "auto, cross_entropy, mse"):
        add_loss(training(), "hinge")
    with says(PlanError, "'lion'", "adam, adamw, momentum, sgd"):
        optimizer_named("lion")
    with says(ImportModelError, "'bert'", "gpt2-onnx, gpt:..., llama:..., mlp:..."):
        load_model("bert")


@pytest.mark.parametrize(("pp", "stages"), [(2, 3), (2, 1), (1, 2)])
def test_a_schedule_for_another_number_of_stages(pp, stages):
    mesh = Mesh(gpus(pp), pp=pp, dp=1, tp=1)
    with pytest.raises((PlanError, ScheduleError), match=rf"(?=.*{stages})(?=.*pp={pp})"):
        build_program(training(), mesh, Plan(pp=pp, microbatches=2), schedule=schedule("1f1b", stages, 2))


def test_a_schedule_for_another_number_of_microbatches():
    mesh = Mesh(gpus(2), pp=2, dp=1, tp=1)
    local = shard(training(), mesh.at(pp=0), 2)
    with pytest.raises((PlanError, ScheduleError), match=r"(?=.*\b3\b)(?=.*\b2\b)"):
        pipeline(local, mesh, schedule("1f1b", 2, 3))


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["layers", "width", "batch"])
def test_sizes_that_make_no_mlp(name, value):
    with says(DistsimError, f"{name}={value}", "at least 1"):
        mlp(**{"layers": 2, "width": 8, "batch": 4, name: value})


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "seq", "batch", "vocab"])
def test_sizes_that_make_no_gpt(name, value):
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "seq": 4, "batch": 4, "vocab": 16, name: value}
    with says(DistsimError, f"{name}={value}", "at least 1"):
        gpt(**sizes)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "kv_heads", "ffn", "seq", "batch", "vocab"])
def test_sizes_that_make_no_llama(name, value):
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 8, "seq": 4, "batch": 4, "vocab": 16}
    with says(DistsimError, f"{name}={value}", "at least 1"):
        llama(**{**sizes, name: value})


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden": 10}, ("heads=4", "hidden=10")),
        ({"hidden": 12}, ("heads=4", "hidden=12", "even")),  # heads of width 3 have no halves
        ({"kv_heads": 3}, ("kv_heads=3", "heads=4")),
        ({"kv_heads": 8}, ("kv_heads=8", "heads=4")),
    ],
)
def test_sizes_of_a_llama_that_do_not_divide(sizes, words):
    given = {
        "layers": 1,
        "hidden": 16,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 8,
        "seq": 4,
        "batch": 4,
        "vocab": 16,
    }
    with says(DistsimError, *words):
        llama(**{**given, **sizes})


# --- links ------------------------------------------------------------------------------------------


def pair_topology(*pairs: tuple[int, int], count: int = 4) -> Topology:
    topology = Topology()
    devices = [topology.add_device("gpu") for _ in range(count)]
    for a, b in pairs:
        topology.set_bandwidth(devices[a], devices[b], gbps=100)
    return topology


def simulate(topology: Topology, dp: int, hp: int, pp: int):
    flat = parallel_transform_3d(training(), dp, hp, pp, topology.devices, 2)
    step, inputs = steady_state_transform(flat)
    return Simulator(CostModel(topology)).interpret(step, inputs)


@pytest.mark.parametrize(
    ("pairs", "degrees", "missing"),
    [
        ((), (2, 1, 1), (0, 1)),
        ((), (1, 2, 1), (0, 1)),
        ((), (1, 1, 2), (0, 1)),
        (((0, 1),), (2, 2, 1), (2, 3)),
        (((0, 1), (2, 3)), (2, 2, 1), (0, 2)),
        (((0, 1), (2, 3), (0, 2)), (1, 2, 2), (1, 3)),
        (((0, 1), (1, 2)), (1, 1, 4), (2, 3)),
    ],
    ids=str,
)
def test_a_pair_without_a_link_is_named_with_the_call_that_sets_it(pairs, degrees, missing):
    topology = pair_topology(*pairs)
    a, b = missing
    with pytest.raises(TopologyError) as caught:
        simulate(topology, *degrees)
    found = re.search(r"no link between gpu:(\d) and gpu:(\d): call set_bandwidth\(", str(caught.value))
    assert {int(found[1]), int(found[2])} == {a, b}
    assert "add_level" in str(caught.value)


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (1, 1, 4)])
def test_doing_what_the_messages_say_leads_to_a_simulation(degrees):
    topology = pair_topology()
    for _ in range(7):  # six pairs at most
        try:
            simulation = simulate(topology, *degrees)
        except TopologyError as error:
            a, b = (int(text) for text in re.findall(r"gpu:(\d)", str(error))[:2])
            topology.set_bandwidth(topology.devices[a], topology.devices[b], gbps=100)
        else:
            break
    else:
        pytest.fail("still a link is missing")
    assert simulation.step_time > 0


def test_devices_of_another_topology():
    small = pair_topology((0, 1), count=2)
    flat = parallel_transform_3d(training(), 4, 1, 1, gpus(4), 1)
    step, inputs = steady_state_transform(flat)
    with says(TopologyError, "gpu:", "not one of the 2 devices"):
        Simulator(CostModel(small)).interpret(step, inputs)
    with says(TopologyError, "cpu:1", "not one of the 2 devices"):
        small.set_bandwidth(small.devices[0], Device(1, "cpu"), gbps=1)


# --- inputs of the executor and of the simulator ----------------------------------------------------


def adder(mesh: Mesh | None = None):
    maker = FunctionMaker("adder")
    x = maker.add_input_value("x", Tensor(Float64(), (2, 3), mesh))
    ids = maker.add_input_value("ids", Tensor(Int64(), (4,), mesh))
    maker.set_outputs([maker.add_op("Add", inputs=[x, x]), maker.add_op("Add", inputs=[ids, ids])])
    return maker.finalize()


X, IDS = np.ones((2, 3)), np.arange(4)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ([], ("2 inputs (x, ids)", "0 given")),
        ([X], ("2 inputs", "1 given")),
        ([X, IDS, IDS], ("2 inputs", "3 given")),
        ([X.T, IDS], ("input x", "(2, 3)", "(3, 2)")),
        ([X, IDS[:3]], ("input ids", "(4,)", "(3,)")),
        ([1.0, IDS], ("input x", "(2, 3)", "()")),
        ([X.astype(int), IDS], ("input x", "float64", "int64")),
        ([X, IDS * 1.0], ("input ids", "int64", "float64")),
        ([X, IDS > 1], ("input ids", "int64", "bool")),
        ([X, np.array(["a"] * 4)], ("input ids", "int64", "<U1")),
        ([[X, X], IDS], ("input x", "one array", "list of 2")),
    ],
    ids=lambda item: None,
)
def test_arrays_that_are_not_what_the_function_takes(given, parts):
    with says(SimulationError, "adder", *parts):
        SequentialExecutor().compute(adder(), given)


def test_arrays_for_the_ranks_of_a_mesh():
    mesh = Mesh(gpus(2), dp=2)
    assert len(SequentialExecutor().compute(adder(mesh), [[X, X], IDS])[0]) == 2
    with says(SimulationError, "input x", "Mesh(dp=2)", "or 2, not 3"):
        SequentialExecutor().compute(adder(mesh), [[X, X, X], IDS])
    with says(SimulationError, "input x on gpu:1", "(2, 3)", "(3, 2)"):
        SequentialExecutor().compute(adder(mesh), [[X, X.T], IDS])


@pytest.mark.parametrize("use", [infer_types, Simulator(CostModel(Topology())).interpret])
def test_types_that_are_not_what_the_function_takes(use):
    function = adder()
    with says(TypeRuleError, "adder", "2 inputs (x, ids)", "1 types given"):
        use(function, function.inputs[:1])
    maker = FunctionMaker("product")
    a, b = (maker.add_input_value(name, Tensor(Float(), (4, 4))) for name in "ab")
    maker.set_outputs([maker.add_op("MatMul", inputs=[a, b])])
    with pytest.raises(TypeRuleError, match=r"(?s)product: .*MatMul.*4, 4.*5, 4"):
        use(maker.finalize(), [a, Tensor(Float(), (5, 4))])


def test_types_without_a_device_cannot_be_simulated():
    function = adder()
    with says(SimulationError, "adder", "no device"):
        Simulator(CostModel(pair_topology())).interpret(function, function.inputs)
