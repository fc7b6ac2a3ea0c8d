"""The summary, the timeline and the trace."""

import gzip
import json
import tracemalloc
from collections import defaultdict
from itertools import pairwise

import pytest
from executor_models import cluster

import distsim
from distsim.compose import parallelize
from distsim.errors import SimulationError
from distsim.executor import CostModel, Simulator
from distsim.ir import Float, FunctionMaker, Mesh, Op, Role, Tensor, Topology
from distsim.models import gpt
from distsim.plan import Plan
from distsim.report import plot_timeline, summarize, write_trace
from distsim.transforms import SGD, differentiate


def two_stages(microbatches=3, memory=1e9, **options):
    """Two stages of two ranks each, with an all-reduce on each stage; MatMul of 64 x 64."""
    topology = Topology()
    devices = [topology.add_device("gpu", memory=memory) for _ in range(4)]
    for i, a in enumerate(devices):
        for b in devices[i + 1 :]:
            topology.set_bandwidth(a, b, 200)
    meshes = [Mesh(devices[:2], tp=2), Mesh(devices[2:], tp=2)]
    maker = FunctionMaker("step")
    types = [Tensor(Float(), (64, 64), mesh) for mesh in meshes]
    weights = [maker.add_input_value(f"w{i}", t, Role.PARAMETER) for i, t in enumerate(types)]
    layers = []
    for mesh, type_ in zip(meshes, types, strict=True):
        inner = FunctionMaker("layer")
        x, w = inner.add_input_value("x", type_), inner.add_input_value("w", type_)
        inner.add_op(
            "MPIAllreduce", inputs=[inner.add_op("MatMul", inputs=[x, w])], attributes={"axis": "tp"}
        )
        layers.append(inner.finalize())
        del mesh
    for i in range(microbatches):
        x = maker.add_input_value(f"x{i}", types[0])
        x = maker.add_op("Call", f"F{i}@0", [x, weights[0]], subfunctions=[layers[0]])
        x = maker.add_op("Send", inputs=[x], attributes={"to": meshes[1]})
        maker.add_op("Call", f"F{i}@1", [x, weights[1]], subfunctions=[layers[1]])
    function = maker.finalize()
    return Simulator(CostModel(topology), **options).interpret(function, function.inputs)


def events_of(path):
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"lockstep": False}])
def test_trace_is_what_perfetto_and_hta_read(tmp_path, options):
    simulation = two_stages(**options)
    path = tmp_path / "trace.json"
    write_trace(simulation, path)
    events = events_of(path)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(simulation.trace) == 3 * (4 + 4 + 4)
    lanes = defaultdict(list)
    for event in slices:
        assert event["cat"] == "kernel"
        assert event["dur"] >= 0
        assert {"device", "stream", "correlation"} <= set(event["args"])
        assert event["args"]["stream"] == event["tid"]
        lanes[event["pid"], event["tid"]].append(event)
    for events_on_lane in lanes.values():
        for before, after in pairwise(events_on_lane):
            # In whole nanoseconds: a microsecond figure with three decimals is not exact.
            assert round((before["ts"] + before["dur"]) * 1000) <= round(after["ts"] * 1000)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(lanes) <= named
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1, 2, 3}
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(simulation.step_time * 1e6, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"lockstep": False}])
def test_arrows_lead_from_each_send_to_its_receive(tmp_path, options):
    path = tmp_path / "trace.json"
    write_trace(two_stages(**options), path)
    events = events_of(path)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == 3 * 2
    assert set(starts) == set(ends)
    sends = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X" and e["args"]["op"] == "Send"}
    for number, start in starts.items():
        end = ends[number]
        assert end["pid"] == start["pid"] + 2  # rank by rank
        assert end["bp"] == "e"
        assert {(e["pid"], e["tid"], e["ts"]) for e in (start, end)} <= sends


def test_collectives_have_the_names_and_arguments_of_nccl_kernels(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(two_stages(), path)
    events = events_of(path)
    event = next(e for e in events if e["ph"] == "X" and e["args"]["op"] == "MPIAllreduce")
    assert event["name"].startswith("ncclDevKernel_AllReduce_")
    about = {"Collective name": "allreduce", "In msg nelems": 4096, "dtype": "Float", "Group size": 2}
    assert about.items() <= event["args"].items()
    assert event["args"]["path"] == "F0@0"
    send = next(e for e in events if e["ph"] == "X" and e["args"]["op"] == "Send")
    assert (send["args"]["Collective name"], send["args"]["Group size"]) == ("send", 2)
    assert send["name"].startswith("ncclDevKernel_SendRecv")
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"compute", "collective tp", "send to gpu:2, gpu:3", "receive from gpu:0, gpu:1"}


def test_the_trace_of_one_rank_says_whose_it_is(tmp_path):
    simulation = two_stages()
    path = tmp_path / "rank.json"
    device = list(simulation.timestamps)[3]
    write_trace(simulation, path, [device])
    text = path.read_text()
    assert '"rank": 3' in text  # with the space: Holistic Trace Analysis looks for it
    assert json.loads(text)["distributedInfo"] == {"rank": 3, "world_size": 4}
    assert {event["pid"] for event in json.loads(text)["traceEvents"]} == {3}
    assert not [event for event in json.loads(text)["traceEvents"] if event["ph"] in "sf"]


def test_a_trace_of_nothing_is_still_json(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(two_stages(), path, [])
    assert events_of(path) == []


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch, name):
    simulation = two_stages()
    with pytest.raises(SimulationError, match="is not a file"):
        write_trace(simulation, tmp_path)
    with pytest.raises(SimulationError, match="there is no folder"):
        write_trace(simulation, tmp_path / "missing" / "trace.json")
    with pytest.raises(SimulationError, match="is not a file"):
        plot_timeline(simulation, _folder(tmp_path / "folder.png"))
    path = tmp_path / name
    path.write_text("old")
    other = Topology()
    devices = [other.add_device("gpu") for _ in range(9)]
    with pytest.raises(SimulationError, match="gpu:8 does not occur in step"):
        write_trace(simulation, path, [devices[8]])
    assert path.read_text() == "old"

    def broken(timeline):
        raise RuntimeError("no pieces")
        yield

    monkeypatch.setattr(type(simulation.timeline), "pieces", broken)
    with pytest.raises(RuntimeError, match="no pieces"):
        write_trace(simulation, path)
    assert path.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder.png", name]


def test_a_trace_whose_name_ends_in_gz_is_compressed(tmp_path, monkeypatch):
    simulation = two_stages()
    plain, first, second = (tmp_path / name for name in ("t.json", "t.json.gz", "other.JSON.GZ"))
    for path in (plain, first, second):
        write_trace(simulation, path)
        monkeypatch.setattr("time.time", lambda: 1e9)  # the second is made at another time
    assert gzip.decompress(first.read_bytes()) == plain.read_bytes()
    assert first.read_bytes() == second.read_bytes(), "neither a name nor a time is in it"
    assert len(first.read_bytes()) < len(plain.read_bytes()) / 5


def _folder(path):
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_timeline_is_drawn_in_the_format_of_its_suffix(tmp_path, suffix, magic):
    path = tmp_path / f"timeline.{suffix}"
    plot_timeline(two_stages(), path)
    assert path.read_bytes().startswith(magic)


def test_timeline_names_its_rows_and_says_what_is_left_out(tmp_path):
    path = tmp_path / "timeline.svg"
    plot_timeline(two_stages(), path)
    text = path.read_text()
    for label in ("gpu:0, gpu:1  compute", "gpu:2, gpu:3  receive from gpu:0, gpu:1", "time ("):
        assert label in text
    plot_timeline(two_stages(), path, rows=2)
    assert "4 more rows not shown" in path.read_text()
    with pytest.raises(SimulationError, match="written as one of pdf, png, svg"):
        plot_timeline(two_stages(), tmp_path / "timeline.txt")
    with pytest.raises(SimulationError, match="draw at least one row"):
        plot_timeline(two_stages(), path, rows=0)


def test_summary_says_what_the_simulation_says():
    simulation = two_stages()
    text = summarize(simulation, samples=192, model_flops=1e6)
    lines = text.splitlines()
    assert lines[0] == "step: 4 devices, a forward pass: nothing is differentiated"
    assert f"{simulation.throughput(192):.6g} samples/s" in text
    shares = simulation.shares(next(iter(simulation.timestamps)))
    row = next(line for line in lines if line.startswith("gpu:0, gpu:1 "))
    parts = (shares.busy, shares.exposed_communication, shares.bubble)
    assert row.split()[2:5] == [f"{part / simulation.step_time:.1%}" for part in parts]
    assert any(line.startswith("gpu:2, gpu:3 ") for line in lines)
    peak = 4 * 1.4e13
    counted = "the model's products, with pairs that a causal mask hides"
    share = f"{1e6 / (simulation.step_time * peak):.1%}"
    assert f"MFU           {share} of 14 TFLOP/s each (float32, 4 devices): {counted}" in lines
    assert f"HFU           {simulation.flops / (simulation.step_time * peak):.1%} of" in text
    assert simulation.flops == 12 * 2 * 64**3
    assert "memory        fits; the most is" in text
    operators = [line.split()[0] for line in lines[-4:]]
    assert operators[:2] == ["operator", "MatMul"]
    assert set(operators[2:]) == {"MPIAllreduce", "Send"}
    assert "MFU" not in summarize(simulation)
    assert "samples/s" not in summarize(simulation)


def test_summary_says_what_does_not_fit():
    text = summarize(two_stages(memory=64 * 64 * 4 * 2))
    assert "OUT OF MEMORY on 4 devices: gpu:0 needs" in text
    assert "parameters 16.00 KiB" in text
    assert text.count("32.00 KiB OUT OF MEMORY") == 2


def test_summary_merges_neighbours_that_do_the_same():
    lines = summarize(two_stages(lockstep=False)).splitlines()
    rows = [line for line in lines if line.startswith("gpu:")]
    assert [row.split()[0] for row in rows] == ["gpu:0..gpu:3"]
    assert len([line for line in summarize(two_stages()).splitlines() if line.startswith("gpu:")]) == 2


def test_a_large_trace_is_written_without_holding_it(tmp_path):
    """Some 200,000 events: what is held while they are written is a small part of them."""
    topology, _ = cluster(8)
    joint = differentiate(gpt(layers=12, hidden=8, heads=2, seq=4, batch=256, vocab=16), SGD(lr=0.1))
    program = parallelize(joint, Plan.parse("dp=2,pp=4,microbatches=128"), topology)
    simulation = Simulator(CostModel(topology)).simulate(program)
    path = tmp_path / "trace.json"
    write_trace(simulation, path, [topology.devices[0]])  # compiled loops are in memory from here on
    simulation = Simulator(CostModel(topology)).simulate(program)
    tracemalloc.start()
    try:
        write_trace(simulation, path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with path.open("rb") as file:
        events = sum(line.startswith(b'{"ph":"X"') for line in file)
    expected = sum(
        len(topology.devices) // len(simulation.classes.members) * len(piece.streams)
        for piece in simulation.timeline.pieces()
    )
    assert events == expected > 200_000
    assert peak < 25e6 < path.stat().st_size / 2
    assert events_of(path)[-1]["name"]  # it is JSON


def test_a_long_function_is_traced_in_parts(tmp_path):
    """More tasks than are kept as a template, and a name that needs escaping: equal to the spans."""
    topology = Topology()
    gpu = topology.add_device("gpu")
    inner = FunctionMaker('50% of "it"')
    y = inner.add_input_value("x", Tensor(Float(), (2,), gpu))
    for _ in range(20_000):
        y = inner.add_op("Relu", inputs=[y])
    callee = inner.finalize()
    maker = FunctionMaker("long")
    x = maker.add_input_value("x", Tensor(Float(), (2,), gpu))
    for name in ("a%d", "b"):
        x = maker.add_op("Call", name, [x], subfunctions=[callee])
    function = maker.finalize()
    simulation = Simulator(CostModel(topology)).interpret(function, function.inputs)
    path = tmp_path / "trace.json"
    write_trace(simulation, path)
    slices = [event for event in events_of(path) if event["ph"] == "X"]
    spans = list(simulation.spans())
    assert [event["args"]["path"] for event in slices] == [span.path for span in spans]
    assert {span.path for span in spans} == {"a%d", "b"}
    assert [event["args"]["correlation"] for event in slices] == list(range(40_000))
    assert [round(event["ts"] * 1000) for event in slices] == [round(span.start * 1e9) for span in spans]


@pytest.mark.parametrize("plan", ["pp=2,microbatches=6", "pp=2,chunks=2,microbatches=4,schedule=interleaved"])
@pytest.mark.parametrize("kernels", ["ops", "eager"])
def test_the_table_of_operators_counts_calls_of_blocks_and_is_that_of_the_spans(monkeypatch, plan, kernels):
    """Spans grow with the microbatches: a thousand of them were walked for many seconds."""
    model = "gpt:layers=4,hidden=32,heads=2,seq=8,vocab=32"
    simulation = distsim.simulate(model, "dgx-a100", plan=f"dp=2,tp=2,{plan}", batch=48, kernels=kernels)
    found: dict[tuple[Op, int], tuple[int, float]] = {}
    for span in simulation.spans():
        key = span.op, span.stream.rank_class
        times, seconds = found.get(key, (0, 0.0))
        found[key] = times + 1, seconds + span.end - span.start
    counted: dict[tuple[Op, int], tuple[int, float]] = {}
    for op, rank_class, times, seconds in simulation.timeline.op_runs:
        before = counted.get((op, rank_class), (0, 0.0))
        counted[op, rank_class] = before[0] + times, before[1] + seconds
    assert counted == found  # exactly: durations are on a grid
    monkeypatch.setattr(distsim.Simulation, "spans", None)
    assert "operator" in summarize(simulation)


@pytest.mark.parametrize("ep", [1, 2])
def test_of_experts_on_several_ranks_it_is_said_what_hfu_counts(ep):
    """It rose with the imbalance, as ranks that wait for the busiest count as if they worked."""
    model = "moe:layers=2,hidden=64,heads=8,seq=8,vocab=32,experts=4,concentration=0.5"
    summary = summarize(distsim.simulate(model, "dgx-a100", plan=f"dp=2,ep={ep}", batch=8))
    (hfu,) = [line for line in summary.splitlines() if line.startswith("HFU")]
    assert ("experts of each rank as those of the busiest" in hfu) == (ep > 1)
