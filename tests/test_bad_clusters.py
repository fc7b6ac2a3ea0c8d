"""Cluster files and names that are wrong come back as an error that says so."""

import pytest
from said import says

from distsim.errors import (
    TopologyError,
)
from distsim.hardware import describe, load_cluster
from distsim.hardware.cluster_table import DEVICE_UNITS

# --- clusters ---------------------------------------------------------------------------------------

FIGURE = '{ value = 1, unit = "%s", source = "none" }'
DEVICE = {
    "throughput": FIGURE % "TFLOP/s",
    "memory": FIGURE % "GiB",
    "dram_bandwidth": FIGURE % "TB/s",
    "kernel_launch_overhead": FIGURE % "us",
    "flops_efficiency": FIGURE % "1",
    "bytes_efficiency": FIGURE % "1",
}
LEVEL = {"bandwidth": FIGURE % "GB/s", "latency": FIGURE % "us", "efficiency": FIGURE % "1"}


def cluster(head: str = "devices_per_node = 4", device=(), level=(), more: str = "") -> str:
    lines = ['name = "mine"', 'description = "a cluster"', head, "[device]", 'model = "none"']
    lines += [f"{key} = {value}" for key, value in (DEVICE | dict(device)).items() if value]
    return "\n".join([*lines, levels(level), more])


def levels(change=()) -> str:
    lines = [f"{key} = {value}" for key, value in (LEVEL | dict(change)).items()]
    return "\n".join(["[[levels]]", 'name = "near"', *lines])


def write(tmp_path, content: str | bytes) -> str:
    path = tmp_path / "mine.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_the_cluster_that_the_others_are_made_from(tmp_path):
    topology = load_cluster(write(tmp_path, cluster()) + ":3")
    assert len(topology.devices) == 12
    assert topology.link(topology.devices[0], topology.devices[11]).bandwidth == 1e9


MALFORMED = {
    "empty": ("", "devices_per_node, device and levels are missing"),
    "no TOML": ("= 3", "not a TOML file"),
    "key twice": (cluster(more="latency = 3\nlatency = 3"), "not a TOML file"),
    "no devices": (cluster("devices_per_node = 0"), "devices_per_node", "1"),
    "devices in words": (cluster('devices_per_node = "8"'), "devices_per_node", "line 3", "whole number"),
    "too many devices": (cluster("devices_per_node = 1048577"), "devices_per_node", "1048576"),
    "missing figure": (cluster(device={"memory": ""}), "memory"),
    "bare number": (
        cluster(device={"throughput": "1e12"}),
        "line 6: device.throughput",
        "no unit",
        "write it as 312 TFLOP/s",
    ),
    "missing unit": (cluster(device={"throughput": "{ value = 1 }"}), "device.throughput.unit", "is missing"),
    "unknown unit": (cluster(device={"throughput": FIGURE % "flop"}), "'flop'", "TFLOP/s"),
    "bits for bytes": (
        cluster(level={"bandwidth": FIGURE % "Gb/s"}),
        "'Gb/s'",
        "did you mean Gbit/s or GB/s",
    ),
    "unit of another": (cluster(device={"memory": FIGURE % "GB/s"}), "'GB/s'", "GiB"),
    "negative": (cluster(device={"memory": (FIGURE % "GB").replace("1", "-1")}), "memory", "0"),
    "zero": (cluster(device={"throughput": (FIGURE % "TFLOP/s").replace("1", "0")}), "throughput=0.0"),
    "infinite": (cluster(level={"bandwidth": (FIGURE % "GB/s").replace("1", "inf")}), "bandwidth=inf"),
    "more than all": (cluster(level={"efficiency": (FIGURE % "%").replace("1", "101")}), "efficiency=1.01"),
    "no links": (cluster().split("[[levels]]")[0], "levels"),
    "level twice": (cluster(level={"group_size": "2"}, more=levels()), "'near'", "already"),
    "group of one": (cluster(level={"group_size": "1"}), "'near'", "groups of 1"),
    "clock of a thousandth": (cluster(device={"clock": '"1.4 MHz"'}), "clock=1.4e+06", "100 MHz to 10 GHz"),
    "limit of no power": (cluster(device={"power_limit": '"500 W"'}), "power_limit=500", "give device.power"),
}


# What only shows when devices and links are made of the figures.
BUILT = (
    *("zero", "infinite", "more than all", "level twice", "group of one"),
    *("clock of a thousandth", "limit of no power"),
)


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_clusters(tmp_path, case):
    content, *parts = MALFORMED[case]
    path = write(tmp_path, content)
    for use in (load_cluster, describe) if case not in BUILT else (load_cluster,):
        with says(TopologyError, "mine.toml", *parts):
            use(path)


@pytest.mark.parametrize("name", ["", "dgx", "../x"])
def test_names_of_clusters(name):
    with says(TopologyError, name, "choose one of a10, a100-pcie, aws-p4d"):
        load_cluster(name)


@pytest.mark.parametrize("count", ["", "two", "-1", "1:1"])
def test_counts_of_nodes(count):
    with says(TopologyError, f"{count!r} is no number of nodes; write dgx-2:4"):
        load_cluster(f"dgx-2:{count}")


def test_cluster_files_that_cannot_be_read(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    with says(TopologyError, "folder.toml is not a file"):
        load_cluster(str(tmp_path / "folder.toml"))
    with says(TopologyError, "larger than 1048576 bytes"):
        load_cluster(write(tmp_path, "#" * (2**20 + 1)))
    with says(TopologyError, "999999999 nodes are 3999999996 devices", "1048576"):
        load_cluster(write(tmp_path, cluster()) + ":999999999")


@pytest.mark.parametrize("key", [key for key, units in DEVICE_UNITS.items() if "1" not in units])
def test_a_number_without_its_unit_is_refused_with_an_example(key):
    with pytest.raises(TopologyError, match=rf"device\.{key}: 3 has no unit; write it as 3 \S+, in one of "):
        load_cluster("dgx-a100", [f"device.{key}=3"])
