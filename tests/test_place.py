"""place: partitions compute what the function computes, and run as long as their timetable says."""

import json

import numpy as np
import pytest

from distsim.cli import main
from distsim.device_placement import Item, PartitionDevice, Problem, make_partition, partition, problem_of
from distsim.device_placement.optimal import optimal_partition
from distsim.device_placement.optimal.timetable import timetable
from distsim.device_placement.partitioned import (
    HOST_MODES,
    partition_devices,
    partition_model,
    place,
    transfer_seconds,
)
from distsim.errors import PartitionError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.importer import load_model
from distsim.ir import Float, FunctionMaker, Role, Tensor, Topology, all_ops
from distsim.ir.rewrite import flatten
from distsim.models import gpt, llama, mlp
from distsim.transforms.inference import as_inference

RATE = 25e9


def rounding(function):
    """The most by which a step may differ from its timetable, in seconds: each task is rounded to 2^-40 s."""
    return len(flatten(function).ops) * 2.0**-41


def machine(count, gbps=200):
    topology = Topology()
    devices = [topology.add_device("gpu", memory=2e9) for _ in range(count)]
    for a in range(count):
        for b in range(a):
            topology.set_bandwidth(devices[a], devices[b], gbps)
    return topology


def random_function(seed, count=16):
    """Element-wise ops and matrix products over values that are read once or often."""
    draw = np.random.default_rng(seed)
    maker = FunctionMaker(f"random_{seed}")
    values = [maker.add_input_value(n, Tensor(Float(), (64, 64))) for n in ("x", "y")]
    values.append(maker.add_input_value("w", Tensor(Float(), (64, 64)), Role.PARAMETER))
    for _ in range(count):
        a, b = (values[int(draw.integers(max(0, len(values) - 6), len(values)))] for _ in range(2))
        values.append(maker.add_op(("Add", "Mul", "MatMul")[int(draw.integers(3))], inputs=[a, b]))
    return maker.finalize()


def arrays(function):
    draw = np.random.default_rng(0)
    return [
        draw.integers(0, 7, v.type.shape).astype(v.type.dtype.np)
        if not v.type.dtype.is_floating
        else draw.normal(0, 0.1, v.type.shape).astype(v.type.dtype.np)
        for v in function.inputs
    ]


def check(function, placed):
    given = arrays(function)
    expected = SequentialExecutor().compute(function, given)
    made = SequentialExecutor().compute(placed.function, placed.arguments(given))
    for one, other in zip(expected, made, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("gbps", [200, 2])
def test_the_makespan_is_what_the_simulator_says(seed, gbps):
    topology = machine(3, gbps)
    function = random_function(seed)
    cost_model = CostModel(topology)
    problem = problem_of(function, cost_model)
    transfers = transfer_seconds(problem, cost_model)
    rate = gbps * 1e9 / 8
    assert transfers == pytest.approx([i.output_bytes / rate if i.is_op else 0.0 for i in problem.items])
    found = optimal_partition(problem, partition_devices(topology), rate, 0.3)
    placed = place(found, topology.devices)
    for engine in ("maxplus", "events"):
        simulation = Simulator(cost_model, engine=engine).interpret(placed.function, placed.function.inputs)
        assert simulation.step_time == pytest.approx(found.makespan, rel=1e-12, abs=rounding(placed.function))
    check(function, placed)


@pytest.mark.parametrize("mode", ["size_based", "cost_aware", "kernighan_lin"])
@pytest.mark.parametrize("seed", range(4))
def test_the_heuristic_modes_run_as_their_timetable_says(mode, seed):
    topology = machine(4)
    function = random_function(seed, 24)
    cost_model = CostModel(topology)
    problem = problem_of(function, cost_model)
    devices = [PartitionDevice(d.name, problem.total_bytes // 2, d.id) for d in partition_devices(topology)]
    found = partition(problem, devices, mode, RATE)
    placed = place(found, topology.devices)
    simulation = Simulator(cost_model).interpret(placed.function, placed.function.inputs)
    assert simulation.step_time == pytest.approx(
        timetable(found).makespan, rel=1e-12, abs=rounding(placed.function)
    )
    assert simulation.step_time >= (
        optimal_partition(problem, devices, RATE, 0.2).lower_bound - rounding(placed.function)
    )
    check(function, placed)


@pytest.mark.parametrize(
    "function",
    [
        mlp(layers=3, width=16, batch=4),
        gpt(layers=2, hidden=32, heads=4, seq=8, vocab=50, batch=2),
        llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=6, vocab=20, batch=2),  # ops on constants
    ],
)
@pytest.mark.parametrize("inlined", [False, True])
def test_models_with_calls_and_views(function, inlined):
    topology = machine(2)
    function = flatten(function) if inlined else function
    cost_model = CostModel(topology)
    problem = problem_of(function, cost_model)
    found = optimal_partition(
        problem, partition_devices(topology), RATE, 0.3, transfers=transfer_seconds(problem, cost_model)
    )
    # Any placing will do, and one that moves often shows more than the best.
    groups = [[op] for op in problem.ops]
    often = make_partition(problem, found.devices, groups, [[k % 2] for k in range(len(groups))], RATE)
    for each in (found, often):
        placed = place(each, topology.devices, transfer_seconds(problem, cost_model))
        simulation = Simulator(cost_model).interpret(placed.function, placed.function.inputs)
        assert simulation.step_time <= timetable(each).makespan * (1 + 1e-12) + rounding(placed.function)
        check(function, placed)


@pytest.mark.parametrize("mode", HOST_MODES)
def test_a_constant_is_on_each_device_that_reads_it_and_is_not_sent(mode):
    function = llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=6, vocab=20, batch=2)
    topology = machine(3)
    placed = partition_model(function, topology, mode, time_limit=0.3).placed
    ops = placed.function.ops
    made = {value: op.attributes["device"] for op in ops if op.op_type == "Constant" for value in op.outputs}
    for op in ops:
        assert op.op_type != "Send" or op.inputs[0] not in made
        on = op.outputs[0].type.device
        assert op.op_type == "Send" or all(made.get(value, on) == on for value in op.inputs)
    check(function, placed)


def test_what_cannot_be_placed_is_refused():
    problem = Problem((Item("a", (), 4, 4, 1.0),))
    device = PartitionDevice("d0", 100, 0)
    with pytest.raises(PartitionError, match="not made from a function"):
        place(make_partition(problem, [device], [[0]], [[0]]), machine(1).devices)
    topology = machine(2)
    found = optimal_partition(
        problem_of(random_function(0), CostModel(topology)), partition_devices(topology), RATE, 0.1
    )
    with pytest.raises(PartitionError, match="on 2 devices, 1 given"):
        place(found, topology.devices[:1])


@pytest.mark.parametrize("mode", HOST_MODES)
def test_the_command_line_simulates_a_partition(mode, capsys, tmp_path):
    memory = "1e9" if mode in ("single", "optimal") else "3e7"
    command = ["simulate", "mlp:layers=4,width=1024", "--cluster", "dgx-a100", "--batch", "64"]
    command += ["--partition", mode, "--device-memory", memory, "--trace", str(tmp_path / "t.json")]
    if mode == "optimal":
        command += ["--time-limit", "0.5"]
    status = main(command)
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "makespan" in out and "part_0" in out and (tmp_path / "t.json").exists()
    assert ("no schedule takes less than" in out) == (mode == "optimal")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "mlp:layers=4,width=1024" and found["plan"] == f"{mode}, inference"
    assert found["samples_per_s"] == pytest.approx(64 / found["step_s"]) and 0 < found["mfu"] < 1
    assert f"part_{len(found['partition']['parts']) - 1} " in out


@pytest.mark.parametrize(
    ("slow", "cluster", "words"),
    [
        ("", "dgx-a100", "(proven optimal: no schedule takes less than "),
        ("", "dgx-a100:2", "(not proven; proven optimal if all links as from gpu:0 to gpu:15: "),
        ("devices = [3]", "dgx-a100", "(not proven; proven optimal if all devices were as gpu:0: "),
    ],
)
def test_a_proof_is_of_what_was_searched(slow, cluster, words, tmp_path, capsys):
    """That is for devices and links that are all alike: of others nothing is proven, and it says so."""
    if slow:
        path = tmp_path / "slow.toml"
        path.write_text(f'base = "{cluster}"\n[[slow]]\n{slow}\nfactor = 2')
        cluster = str(path)
    command = ["simulate", "mlp:layers=8,width=256", "--cluster", cluster, "--batch", "64"]
    assert main([*command, "--partition", "optimal", "--device-memory", "1.5MiB"]) == 0
    out = capsys.readouterr().out
    assert words in out and "limit         1.50 MiB a device" in out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--partition", "optimal", "--plan", "dp=2"], "--plan is for training"),
        (["--partition", "best"], "there is no mode 'best'; choose one of single"),
        (["--partition", "single", "--time-limit", "3"], "other modes do not search"),
        (["--partition", "size_based", "--device-memory", "1000"], "bytes"),
        (["--saturate-host"], "--saturate-host goes with --partition"),
        (["--time-limit", "0"], "--time-limit goes with --partition"),
        (["--device-memory", "0"], "--device-memory goes with --partition"),
        (["--partition", "single", "--device-memory", "1KiB"], "gpu:0 has 1024: "),
        (["--partition", "single", "--device-memory", "1kB"], "gpu:0 has 1000: "),
        (["--partition", "single", "--device-memory", "-5"], "--device-memory: '-5 B' is no number"),
        (["--partition", "single", "--device-memory", "1 GFLOP/s"], "'GFLOP/s' is not one of B, kB"),
    ],
)
def test_the_command_line_says_what_is_wrong(extra, message, capsys):
    assert main(["simulate", "mlp:layers=2,width=64", "--cluster", "dgx-a100", "--batch", "8", *extra]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_proven_of_links_that_the_search_did_not_know():
    """Two of three pairs are slow, among them the one that all are taken to be like; the third is not."""
    topology = Topology()
    devices = [topology.add_device("gpu", memory=1.2e6) for _ in range(3)]
    for (a, b), gbps in zip([(0, 1), (0, 2), (1, 2)], (1, 1, 1000), strict=True):
        topology.set_bandwidth(devices[a], devices[b], gbps=gbps)
    model = mlp(layers=8, width=256, batch=64)
    found = partition_model(model, topology, "optimal", memory=1.2e6, time_limit=2.0)
    run = found.placed.function
    said = found.describe(Simulator(CostModel(topology)).interpret(run, run.inputs))
    assert "(not proven; " in said and " if all links as from gpu:0 to gpu:2: " in said


def test_a_partition_is_of_inference(capsys):
    """Nothing is dropped, which takes no time and no memory for masks, and no loss is taken."""
    rates = ",".join([f"{what}_dropout=0" for what in ("residual", "attention", "embedding")])
    found: list[dict[str, object]] = []
    for model in ("gpt2:layers=2", f"gpt2:layers=2,{rates}"):
        options = ["--cluster", "dgx-a100", "--batch", "2", "--seq", "64", "--partition", "single", "--json"]
        assert main(["simulate", model, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["step_s"] == found[1]["step_s"] and found[0]["peak_bytes"] == found[1]["peak_bytes"]
    made = as_inference(load_model("gpt2:layers=2,seq=8", 2))
    kinds = {op.op_type for op in all_ops(made)}
    assert not {"CrossEntropyLoss", "Dropout"} & kinds and made.outputs[0].type.shape == (2, 8, 50257)
    balanced = as_inference(load_model("moe:layers=2,seq=16,vocab=64,aux_loss=0.01", 2))
    assert balanced.outputs[0].type.shape == (2, 16, 64) and "labels" not in [v.name for v in balanced.inputs]


def test_replicas_are_stated():
    topology = machine(4)
    found = partition_model(mlp(layers=2, width=16, batch=4), topology, "size_based", saturate_host=True)
    run = found.placed.function
    simulation = Simulator(CostModel(topology)).interpret(run, run.inputs)
    assert "replicas      up to 4 of a part" in found.describe(simulation)
