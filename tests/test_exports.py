"""Files for other programs, read back: by what their readers take from them."""

import gzip
import json
import pickle
from collections import Counter

import numpy as np
import pytest
from cli_cases import run
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from said import says

from distsim import compose
from distsim.cli import main
from distsim.cost import CostModel
from distsim.errors import SimulationError
from distsim.hardware import load_cluster
from distsim.models import gpt
from distsim.ops import operator
from distsim.plan import Plan
from distsim.report.exports import write_chakra, write_memory_snapshot, write_rank_traces
from distsim.report.exports.chakra import COLLECTIVES
from distsim.simulation import Simulator
from distsim.simulation.memory.timeline import memory_timeline
from distsim.transforms import differentiate, optimizer_named
from distsim.transforms.kernels.policies import kernels_named

PLAN = "dp=2,tp=2,pp=2,microbatches=4,zero=1"


@pytest.fixture(scope="module")
def simulation():
    model = gpt(layers=4, hidden=64, heads=4, seq=32, batch=16, vocab=128)
    topology = load_cluster("dgx-h100")
    kernels = kernels_named("fused")
    costs = CostModel(topology, kernels=kernels.way)
    joint = differentiate(model, optimizer_named("adam"))
    program = compose.parallelize(joint, Plan.parse(PLAN), topology, costs, kernels=kernels)
    return Simulator(costs).simulate(program)


# --- Holistic Trace Analysis -----------------------------------------------------------------------------


def measure(intervals):
    """Seconds covered by intervals, as HTA merges them."""
    total, reached = 0.0, -1.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def test_traces_of_ranks_break_down_as_the_shares_of_devices_do(simulation, tmp_path):
    files = write_rank_traces(simulation, tmp_path / "hta", [0, 5])
    assert [file.name for file in files] == ["rank-0.json.gz", "rank-5.json.gz"]
    devices = {device.id: device for device in simulation.timestamps}
    for rank, file in zip((0, 5), files, strict=True):
        text = gzip.decompress(file.read_bytes()).decode()
        assert f'"distributedInfo": {{"rank": {rank}, "world_size": 8}}' in text
        events = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
        device = [event for event in events if "stream" in event["args"]]
        compute, other = [], []
        for event in device:
            name, cat = event["name"], event["cat"]
            moves = name.startswith(("nccl", "Memcpy", "Memset"))
            assert moves == (cat != "kernel") or name.startswith("nccl")
            (other if moves else compute).append((event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6))
        shares = simulation.shares(devices[rank])
        assert measure(compute) == pytest.approx(shares.busy, rel=1e-3)
        exposed = measure(compute + other) - measure(compute)
        assert exposed == pytest.approx(shares.exposed_communication, rel=1e-2)
        span = max(end for _, end in other) - min(start for start, _ in other)
        assert span == pytest.approx(simulation.step_time, rel=1e-6)
        launches = [event for event in events if event["cat"] == "cuda_runtime"]
        kernels = {event["args"]["correlation"]: event for event in device}
        assert launches
        for launch in launches:
            assert "stream" not in launch["args"]
            assert kernels[launch["args"]["correlation"]]["ts"] >= launch["ts"]


# --- PyTorch's viewer of memory ----------------------------------------------------------------------------


def test_snapshots_of_memory_replay_to_the_memory_in_use(simulation, tmp_path):
    path = tmp_path / "memory.pickle"
    write_memory_snapshot(simulation, path)
    snapshot = pickle.loads(path.read_bytes())
    assert path.read_bytes()[1] <= 4  # the protocol that the viewer reads
    timelines = memory_timeline(simulation)
    assert len(snapshot["segments"]) == len(snapshot["device_traces"]) == len(timelines)
    both = zip(snapshot["segments"], snapshot["device_traces"], timelines, strict=True)
    for number, (segment, trace, timeline) in enumerate(both):
        assert segment["device"] == number
        end = segment["address"] + segment["total_size"]
        live, most, used = {}, 0, 0
        assert trace[0]["action"] == "segment_alloc"
        for entry in trace[1:]:
            if entry["action"] == "alloc":
                assert segment["address"] <= entry["addr"] <= end - entry["size"]
                assert entry["addr"] not in live
                live[entry["addr"]] = entry["size"]
                used += entry["size"]
                most = max(most, used)
            elif entry["action"] == "free_completed":
                used -= live.pop(entry["addr"])
        pieces = np.array(sorted(live.items()))
        assert (pieces[1:, 0] >= pieces[:-1, 0] + pieces[:-1, 1]).all()  # nothing lies over anything
        rounding = 512 * len(trace)
        assert timeline.peak <= most <= timeline.peak + rounding
        blocks = segment["blocks"]
        assert sum(block["size"] for block in blocks) == segment["total_size"]
        active = {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
        assert active == live
        assert {entry["category"] for entry in trace} >= {"unknown", "parameter", "activation"}


# --- Chakra ------------------------------------------------------------------------------------------------


def chakra_node():
    """The class of a Node, made here from the numbers of et_def.proto (mlcommons/chakra at 21585d8f)."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    one, many, kinds = 1, 3, {"uint64": 4, "int32": 5, "bool": 8, "string": 9, "int64": 3, "message": 11}

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for field, number, kind, label in fields:
            added = made.field.add(name=field, number=number, type=kinds[kind], label=label)
            if kind == "message":
                added.type_name = ".et.Attribute"

    message("Metadata", ("version", 1, "string", one))
    message(
        "Attribute",
        *(("name", 1, "string", one), ("int32_val", 7, "int32", one), ("int64_val", 9, "int64", one)),
        *(
            ("uint64_val", 13, "uint64", one),
            ("bool_val", 27, "bool", one),
            ("string_val", 29, "string", one),
        ),
    )
    message(
        "Node",
        *(("id", 1, "uint64", one), ("name", 2, "string", one), ("type", 3, "int32", one)),
        *(("ctrl_deps", 4, "uint64", many), ("data_deps", 5, "uint64", many)),
        *(("start_time_micros", 6, "uint64", one), ("duration_micros", 7, "uint64", one)),
        ("attr", 10, "message", many),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"et.{n}")) for n in ("Metadata", "Node")
    ]


def messages(data):
    """The messages of a file, each behind its length."""
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            at, size, shift = at + 1, size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        yield data[at : at + size]
        at += size


def test_chakra_traces_are_the_tasks_of_the_program(simulation, tmp_path):
    files = write_chakra(simulation, tmp_path / "chakra")
    assert [file.name for file in files] == [*(f"step.{rank}.et" for rank in range(8)), "comm_groups.json"]
    groups = json.loads(files[-1].read_text())
    assert groups["0"] == list(range(8))
    metadata, node = chakra_node()
    flat = simulation.flat()
    tasks, of = flat.tasks, flat.classes.of
    sent, received = Counter(), Counter()
    for device, file in zip(simulation.timestamps, files, strict=False):
        head, *rest = messages(file.read_bytes())
        assert metadata.FromString(head).version
        nodes = [node.FromString(each) for each in rest]
        own = [
            task
            for task in range(len(tasks))
            if any(stream.rank_class == of[device] for stream in tasks.streams_of(task))
        ]
        assert len(nodes) == len(own)
        number = {task: place for place, task in enumerate(own)}
        for place, (made, task) in enumerate(zip(nodes, own, strict=True)):
            op, kind = tasks.op_of(task), operator(tasks.op_of(task).op_type)
            about = {each.name: each for each in made.attr}
            assert made.id == place
            deps = tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]].tolist()
            assert set(made.data_deps) == {number[dep] for dep in deps if dep in number}
            assert all(dep < made.id for dep in (*made.data_deps, *made.ctrl_deps))
            seconds = float(flat.end[task] - flat.start[task])
            assert about["runtime_ns"].uint64_val == round(seconds * 1e9)
            assert made.duration_micros == round(seconds * 1e6)
            assert about["is_cpu_op"].bool_val == kind.issues
            if not kind.moves:
                assert made.type == 4
            elif kind.communication.kind == "send":
                ends = about["comm_src"].int32_val, about["comm_dst"].int32_val
                message = *ends, about["comm_tag"].int32_val, about["comm_size"].int64_val
                assert made.type == (5 if ends[0] == device.id else 6)
                (sent if made.type == 5 else received)[message] += 1
                assert message[-1] == op.inputs[0].type.nbytes
            else:
                assert made.type == 7
                assert about["comm_type"].int64_val == COLLECTIVES[kind.communication.kind]
                moved = op.inputs[:: len(op.inputs) // len(op.outputs)]  # beside each, what it goes into
                assert about["comm_size"].int64_val == sum(value.type.nbytes for value in moved)
                group = groups[about["pg_name"].string_val]
                assert device.id in group
                assert len(group) == 2
    assert sent == received != Counter()


# --- paths and options ------------------------------------------------------------------------------------


def test_nothing_that_is_there_is_written_over(simulation, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for write in (write_rank_traces, write_chakra):
        with says(SimulationError, "full is not empty", "mine.txt", "new or empty"):
            write(simulation, tmp_path / "full")
        with says(SimulationError, "no folder"):
            write(simulation, tmp_path / "a" / "b")
        with says(SimulationError, "rank 9", "0 to 7"):
            write(simulation, tmp_path / "other", [9])
        assert not (tmp_path / "other").exists()
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_options_write_what_they_name(tmp_path, capsys):
    step = ("gpt:layers=2,hidden=64,heads=4,seq=16,vocab=100", "--batch", 8, "--cluster", "dgx-a100")
    step = ("simulate", *step, "--plan", "dp=2,pp=2,microbatches=2")
    paths = [tmp_path / name for name in ("trace.json", "hta", "memory.pickle", "chakra")]
    names = ("--trace", "--trace-dir", "--memory-snapshot", "--chakra")
    files = [item for pair in zip(names, paths, strict=True) for item in pair]
    out, _ = run(capsys, *step, *files, "--trace-ranks", "0,2-3")
    assert "with 3 ranks" in out
    assert "3 in" in out
    events = json.loads(paths[0].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2, 3}
    assert sorted(path.name for path in paths[1].iterdir()) == [f"rank-{n}.json.gz" for n in (0, 2, 3)]
    assert len(pickle.loads(paths[2].read_bytes())["segments"]) == 3
    assert len(list(paths[3].iterdir())) == 4
    for wrong in (["--trace-ranks", "0"], ["--trace-dir", paths[1]], ["--trace-ranks", "x", "--trace", "t"]):
        assert main([str(item) for item in (*step, *wrong)]) == 2
        assert "distsim: " in capsys.readouterr().err
