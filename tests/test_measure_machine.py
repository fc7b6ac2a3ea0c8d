"""The script that takes measurements, with a machine and a clock that are made up."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

from distsim.calibration import calibrate, read_timings
from distsim.calibration.timings import CollectiveCall, attention, memory, product
from distsim.cost import CostModel
from distsim.hardware import collective_time, load_cluster

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "experiments"))
    script = importlib.import_module("measure_machine")

TRUTH = """base = "dgx-h100"
[device]
kernel_launch_overhead = "1.5 us"
[device.kernels]
linear = 0.78
linear_float8 = 0.71
batched = 0.6
memory = 0.81
attention = 0.44
attention_grad = 0.39
[device.launches]
eager = "6 us"
[[levels]]
name = "nvlink"
efficiency = 0.7
latency = "4 us"
"""


ALONE = ["device.variation=0"]  # what is timed is one device, not the slowest of a node


class FakeMachine:
    """A device that works off what the host issues, while a clock that only it moves goes on."""

    def __init__(self, cluster: str, ranks: int = 1, leader: bool = True) -> None:
        self.topology = load_cluster(cluster, ALONE)
        self.costs = CostModel(self.topology)
        self.ranks, self.nodes, self.leader, self.description = ranks, 1, leader, "made up"
        self.now = self.done = 0.0
        self.issued = 0

    def clock(self) -> float:
        return self.now

    def issue(self, seconds: float, kernels: int = 1) -> None:
        self.issued += 1
        self.now += kernels * self.topology.devices[0].rates.launch("eager")
        self.done = max(self.done, self.now) + kernels * seconds

    def kernel(self, call):
        seconds = self.costs.seconds(call.signature, (self.topology.devices[0],))
        return lambda: self.issue(seconds)

    float8 = True

    def product(self, m, n, k, dtype):
        return self.kernel(product(m, n, k, dtype))

    def batched(self, batch, m, n, k, dtype):
        return self.kernel(product(m, n, k, dtype, batch))

    def attention(self, shape, dtype):
        return tuple(self.kernel(attention(shape, dtype, backward)) for backward in (False, True))

    def copy(self, nbytes):
        return self.kernel(memory(nbytes))

    def small_kernels(self):
        return lambda: self.issue(1e-6, 4), 4

    def collective(self, kind, nbytes):
        group = tuple(self.topology.devices[: self.ranks])
        seconds = collective_time(kind, nbytes, group, self.topology)
        return lambda: self.issue(seconds)

    def synchronize(self):
        self.now = max(self.now, self.done)

    def barrier(self):
        self.synchronize()


@pytest.fixture
def cluster(tmp_path) -> str:
    (tmp_path / "truth.toml").write_text(TRUTH)
    return str(tmp_path / "truth.toml")


def test_what_is_measured_gives_the_machine(tmp_path, cluster):
    """The table is read as it is written, and the figures of the machine come out of it."""
    machine = FakeMachine(cluster, ranks=8)
    path = tmp_path / "mine.csv"
    count = script.write(path, machine.description, script.measure(machine, machine.clock))
    timings = read_timings([path]).timings
    assert len(timings) == count > 80
    made = calibrate(timings, "dgx-h100", name="mine", date="today")
    (tmp_path / "mine.toml").write_text(made.text)
    found, truth = load_cluster(str(tmp_path / "mine.toml"), ALONE), load_cluster(cluster, ALONE)
    for kind in ("linear", "linear_float8", "batched", "memory", "attention", "attention_grad"):
        expected = truth.devices[0].rates.share(kind)
        assert found.devices[0].rates.share(kind) == pytest.approx(expected, rel=0.02), kind
    assert found.devices[0].rates.launch("eager") == pytest.approx(6e-6, rel=0.01)
    assert found.levels[0].link.achieved == pytest.approx(truth.levels[0].link.achieved, rel=0.02)
    assert found.levels[0].link.latency == pytest.approx(4e-6, rel=0.1)
    assert found.levels[0].start == pytest.approx(29e-6, rel=0.1)


def test_times_of_device_and_host(cluster):
    """The device is timed without the host, and the host without the device."""
    machine = FakeMachine(cluster)
    assert script.device_seconds(lambda: machine.issue(1e-3), machine, machine.clock) == pytest.approx(
        1e-3, rel=0.01
    )
    assert machine.issued == 2 + script.ROUNDS * 20  # of 1 ms each, until it is long enough
    run, count = machine.small_kernels()
    seconds = script.host_seconds(run, machine, machine.clock)
    assert seconds == pytest.approx(script.LAUNCHES * count * 6e-6)


def test_small_copies_that_time_the_host_are_left_out(cluster):
    machine = FakeMachine(cluster)
    rows = [row for row in script.measure(machine, machine.clock) if row["op"] == "memory"]
    assert 0 < len(rows) < len(script.COPIES)
    assert all(row["seconds"] > 12e-6 for row in rows)


def test_every_rank_runs_the_same_collectives(cluster):
    first, other = FakeMachine(cluster, 4), FakeMachine(cluster, 4, leader=False)
    of_first = [row for row in script.measure(first, first.clock) if "ranks" in row]
    before = first.issued
    rows = list(script.measure(other, other.clock))
    assert [(row["op"], row["bytes"]) for row in rows] == [(row["op"], row["bytes"]) for row in of_first]
    again = FakeMachine(cluster, 4, leader=False)
    again.now = 5.0  # another clock, as every rank has
    list(script.measure(again, again.clock))
    assert again.issued == other.issued < before
    assert all(row["bytes"] % 16 == 0 for row in rows)
    assert CollectiveCall(rows[0]["op"], rows[0]["bytes"], 4)


def test_the_table_keeps_what_was_timed_before_an_error(tmp_path, cluster):
    def rows():
        yield {"op": "memory", "seconds": 1e-5, "bytes": 8}
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        script.write(tmp_path / "mine.csv", "made up", rows())
    lines = (tmp_path / "mine.csv").read_text().splitlines()
    assert lines[0] == "# made up"
    assert [row["bytes"] for row in csv.DictReader(lines[1:])] == ["8"]


def test_without_torch_or_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert script.main([]) == 2
    assert "torch is not installed" in capsys.readouterr().err

    class Torch:
        class cuda:
            @staticmethod
            def is_available() -> bool:
                return False

    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert script.main([]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
    assert not (tmp_path / "machine.csv").exists()
