"""Clusters as people write them: --set, files over a preset, refusals."""

import re
from pathlib import Path

import pytest
from cluster_files import write
from hypothesis import given, settings
from hypothesis import strategies as st
from said import says

import distsim.hardware
from distsim.cli import main
from distsim.errors import TopologyError
from distsim.hardware import collective_time, describe, figures, load_cluster, presets
from distsim.hardware.cluster_file import line_of
from distsim.hardware.cluster_table import setting_keys

# --- single figures -----------------------------------------------------------------------------------


def test_settings_change_figures():
    topology = load_cluster("dgx-a100:4", ["device.memory=40GiB", "infiniband.bandwidth=100Gbit/s"])
    assert len(topology.devices) == 32
    assert topology.devices[0].memory == 40 * 2**30
    assert topology.levels[1].link.bandwidth == 12.5e9
    found = {row.name: row for row in figures("dgx-a100", ["levels.nvlink.efficiency=50%"])}
    efficiency = found["levels.nvlink.efficiency"]
    assert (efficiency.si_value, efficiency.source) == (0.5, "given by --set")


UNIT = {
    **{
        "bandwidth": "GB/s",
        "latency": "us",
        "start": "us",
        "segment_time": "us",
        "memory": "GiB",
        "throughput": "TFLOP/s",
        "context": "GiB",
    },
    **{"block": "B", "segment": "B", "dram_bandwidth": "GB/s", "kernel_launch_overhead": "us"},
    **{"power": "W", "power_limit": "W", "host_power": "W", "price": "$/h", "clock": "Hz"},
}


def test_every_key_can_be_set():
    for key in setting_keys({"levels": [{"name": "nvlink"}, {"name": "infiniband"}]}):
        if not key.endswith(("devices_per_node", "group_size")):
            table, _, name = key.rpartition(".")
            named = {"device.peaks": "TFLOP/s", "device.launches": "us"}
            named |= dict.fromkeys(("device.kernels", "device.uncertainty"), "")
            unit = named.get(table, UNIT.get(name, ""))
            found = {row.name: row.value for row in figures("dgx-a100", [f"{key}=1{unit}"])}
            assert [found[name] for name in found if name.removeprefix("levels.") == key] == [1.0]


def test_fewer_devices_a_node():
    """Groups that were a node follow; ports may be shared."""
    topology = load_cluster("dgx-a100:2", ["devices_per_node=4", "infiniband.devices_per_port=4"])
    assert [(level.group_size, level.devices_per_port) for level in topology.levels] == [(4, 1), (None, 4)]
    inside, across = (
        collective_time("send", 1e9, pair, topology)
        for pair in (tuple(topology.devices[:2]), tuple(topology.devices[3:5]))
    )
    assert inside < across
    assert load_cluster("dgx-a100", ["devices_per_node=4", "nvlink.group_size=2"]).levels[0].group_size == 2


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("device.memry=1GiB", "did you mean device.memory"),
        ("ethernet.throughput=1GB/s", "choose from devices_per_node, device.throughput"),
        (
            "ib.bandwidth=1GB/s",
            "choose from device.host_link.bandwidth, nvlink.bandwidth, infiniband.bandwidth",
        ),
        ("device.memory", "is not KEY=VALUE; write for example device.memory=40GiB"),
        ("device.memory=", "is not KEY=VALUE"),
        ("device.memory=40", "--set device.memory: 40 has no unit"),
        ("nvlink.bandwidth=40 GiB", "unit 'GiB' is not one of B/s"),
        ("devices_per_node=0", "devices_per_node: expected a whole number >= 1"),
        ("devices_per_node=many", "write a whole number"),
        ("device.flops_efficiency=120%", "flops_efficiency=1.2"),
        ("device.model=mine", "no figure has this name"),
        ("infiniband.devices_per_port=3", "straddle"),
        ("nvlink.bandwidth=0GB/s", "bandwidth=0.0"),
    ],
)
def test_settings_that_are_none(setting, said):
    with says(TopologyError, said):
        load_cluster("dgx-a100:2", [setting])


def test_the_commands_take_settings(capsys):
    assert main(["clusters", "dgx-a100", "--set", "device.memory=40GiB"]) == 0
    assert re.search(r"device.memory +40 GiB  given by --set", capsys.readouterr().out)
    run = ["simulate", "mlp:layers=2,width=64", "--batch", "8", "--cluster", "dgx-a100", "--plan", "dp=2"]
    times: list[str] = []
    for rate in ("300GB/s", "1MB/s"):
        assert main([*run, "--set", f"nvlink.bandwidth={rate}"]) == 0
        times += re.findall(r"step time +(.*)", capsys.readouterr().out)
    assert len(set(times)) == 2
    assert main([*run, "--set", "x=1"]) == 2
    assert main(["clusters", "--set", "x=1"]) == 2
    assert main(["show", "mlp", "--set", "x=1"]) == 2
    assert "--set" in capsys.readouterr().err


# --- files --------------------------------------------------------------------------------------------


def test_a_file_over_a_preset_says_what_differs(tmp_path):
    text = 'device = { memory = "40 GiB" }\n[[levels]]\nname = "infiniband"\nbandwidth = "100 Gbit/s"\n'
    path = write(tmp_path, text)
    same = load_cluster("dgx-a100:2", ["device.memory=40GiB", "infiniband.bandwidth=100Gbit/s"])
    found = load_cluster(f"{path}:2")
    assert (found.devices, found.levels) == (same.devices, same.levels)
    assert "given in" in describe(path)


OWN = """
devices_per_node = 4
[device]
throughput = "20 TFLOP/s"
memory = "80 GiB"
dram_bandwidth = "2 TB/s"
kernel_launch_overhead = "4 us"
flops_efficiency = 0.8
bytes_efficiency = "90 %"
peaks = { bfloat16 = "312 TFLOP/s" }
[[levels]]
name = "all"
bandwidth = "25 GB/s"
latency = "5 us"
efficiency = 1
"""


def test_a_file_of_its_own_with_bare_numbers(tmp_path):
    device = load_cluster(write(tmp_path, OWN, "")).devices[3]
    assert (device.peak("bfloat16"), device.flops_efficiency, device.bytes_efficiency) == (312e12, 0.8, 0.9)


LEVELS = """
[[levels]]
name = "pcie"
group_size = 8
bandwidth = "32 GB/s"
latency = "5 us"
efficiency = 1
[[levels]]
name = "infiniband"
devices_per_port = 4
"""


def test_the_file_of_the_page(tmp_path):
    page = (Path(__file__).parents[1] / "docs/how-to/cluster.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(base.*?)^```", page, re.DOTALL | re.MULTILINE)
    topology = load_cluster(write(tmp_path, text, ""))
    kinds = {(device.memory, device.throughput) for device in topology.devices}
    assert len(topology.devices) == 32 and len(kinds) == 3
    assert (topology.levels[1].link.bandwidth, topology.levels[1].devices_per_port) == (12.5e9, 4)


def test_levels_of_a_file_replace_those_of_its_base_where_one_is_new(tmp_path):
    levels = load_cluster(write(tmp_path, LEVELS)).levels
    assert [(level.name, level.devices_per_port) for level in levels] == [("pcie", 1), ("infiniband", 4)]
    assert levels[1].link == load_cluster("dgx-a100").levels[1].link


def test_ethernet_in_place_of_infiniband(tmp_path):
    page = (Path(__file__).parents[1] / "docs/how-to/cluster.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(# Ethernet.*?)^```", page, re.DOTALL | re.MULTILINE)
    nvlink, ethernet = load_cluster(path := write(tmp_path, text, "")).levels
    assert nvlink == load_cluster("dgx-h200").levels[0]
    assert (ethernet.name, ethernet.link.bandwidth) == ("ethernet", 50e9)
    assert "InfiniBand" not in describe(path)


WRONG = [
    (
        '[device]\nmemroy = "1 GiB"',
        "mine.toml, line 3: device.memroy: there is no field",
        "did you mean memory",
    ),
    ('[device]\nmemory = "1 Gib"', "mine.toml, line 3: device.memory: unit 'Gib'"),
    ("[device]\nmemory = 80", "line 3: device.memory: 80.0 has no unit"),
    ("[device]\nmemory = true", "line 3: device.memory: expected"),
    ('[device.peaks]\nbf16 = "1 TFLOP/s"', "line 3: device.peaks.bf16: 'bf16' is not one of"),
    ('device = "fast"', "line 2: device: expected a table"),
    ("devices_per_node = 1000000000000", "line 2: devices_per_node: expected a whole number <= 1048576"),
    ("[[slow]]\nnodes = [0]\nfactor = 0.5", "line 4: slow[0].factor: expected a number >= 1.0"),
    ("[[slow]]\nnodes = [0]", "slow[0].factor: is missing"),
    ("[[slow]]\nfactor = 2.0", "give nodes or devices"),
    ("[[slow]]\nfactor = 2.0\nnodes = [1]", "there is no node 1 among 1 nodes of 8"),
    ("[[slow]]\nfactor = 2.0\ndevices = [8]", "there is no device 8"),
    ("[[slow]]\nfactor = 2.0\ndevices = [1]\nnodes = [0]", "device 1 is named twice"),
    ("[[slow]]\nfactor = 2.0\nnodes = [-1]", "expected a whole number >= 0"),
    ("[[nodes]]\ncount = 1000000", "1000000 nodes are 8000000 devices"),
    ("[[nodes]]\ncount = 0", "nodes[0].count"),
    ('[[nodes]]\ncount = 1\nbase = "dgx-z"', "no preset is named 'dgx-z'"),
    ('[[nodes]]\ncount = 1\nbase = "../x.toml"', "no preset is named"),
    ('[[nodes]]\ncount = 1\ndevice = { block = "1 KiB" }', "must be the same on all nodes"),
    ("[[nodes]]\ncount = 1\ndevice = { colour = 1 }", "there is no field 'colour'"),
    ("[[nodes]]\ncount = 1\nlevels = []", "there is no field 'levels'"),
    ('[device]\nmemory = "1e300 TiB"', "line 3: device.memory: 1e+300 TiB is more than a number can be"),
    ('[[levels]]\nname = "infiniband"\nbandwidth = "1 GiB"', "line 4: levels.infiniband.bandwidth: unit"),
    ('[[levels]]\nname = "infiniband"\nlatency = []', "line 4: levels.infiniband.latency: expected"),
    (
        '[[levels]]\nname = "nvlink"\n[[levels]]\nname = "far"\nlatency = "1 us"',
        "line 4: levels.far: bandwidth and efficiency are missing",
    ),
    (
        '[[levels]]\nname = "far"\nbandwidth = "50 GB/s"\nlatency = "1 us"\nefficiency = 1',
        "levels: where one is new to dgx-a100",
        "its nvlink and infiniband would be left out",
        'add [[levels]] name = "nvlink"',
    ),
    ("[[nodes]]\ncount = 1\ndevice = { memory = 3 }", "mine.toml: nodes: device.memory: 3.0 has no unit"),
    ("levels = 3", "line 2: levels: expected a list"),
    ("levels = [3]", "levels[0]"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[1])
def test_errors_are_in_the_words_of_the_file(tmp_path, case):
    text, *said = case
    with says(TopologyError, "mine.toml", *said):
        load_cluster(write(tmp_path, text))


@pytest.mark.parametrize("more", [[], ["--toml"]])
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[1])
def test_the_command_refuses_what_cannot_be_simulated(tmp_path, capsys, case, more):
    text, *said = case
    assert main(["clusters", write(tmp_path, text), *more]) == 2
    found = capsys.readouterr()
    assert all(part in found.err for part in ("mine.toml", *said))
    assert not found.out


@pytest.mark.parametrize("base", ["none-such", "mine.toml", "../presets/dgx-2", " "])
def test_a_base_is_a_preset(tmp_path, base):
    with says(TopologyError, "mine.toml", "choose one of"):
        load_cluster(write(tmp_path, "", base))


def test_a_base_that_is_no_text(tmp_path):
    with says(TopologyError, "mine.toml, line 1: base", "must name a preset"):
        load_cluster(write(tmp_path, "base = 3", ""))


def test_nodes_that_are_listed_take_no_count(tmp_path):
    with says(TopologyError, "give no :count"):
        load_cluster(write(tmp_path, "[[nodes]]\ncount = 2") + ":3")


def test_lines_of_keys():
    text = "a = 1\n[device]\nx.y = 2\n[[levels]]\nb = 3\n[[levels]]\n\nb = 4\n[device.peaks]\nc = 5"
    found = [line_of(text, path) for path in ("a", "device.x.y", "levels[1].b", "device.peaks.c", "z")]
    assert found == [1, 3, 8, 10, None]
    assert line_of(text, "levels[0].missing") == 4
    named = "[[levels]]\nb = 3\n[[levels]]\nname = 'far'\nb = 4"
    assert [line_of(named, f"levels.far.{key}") for key in ("b", "c")] == [5, 3]


# --- presets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_every_preset_takes_nodes_and_settings(name):
    topology = load_cluster(f"{name}:2", ["device.memory=10GiB"])
    first, last = topology.devices[0], topology.devices[-1]
    assert first.memory == 10 * 2**30
    assert topology.link(first, topology.devices[1]).achieved >= 0.9 * topology.link(first, last).achieved > 0


@pytest.mark.parametrize(
    ("name", "base", "same", "other"),
    [
        ("dgx-a100-40gb", "dgx-a100", "throughput", "dram_bandwidth"),
        ("hgx-h100-96gb", "dgx-h100", "throughput", "memory"),
        ("dgx-1", "dgx-2", "memory", "id"),
        ("gb200-nvl72", "dgx-b200", "throughput", "memory"),
        ("gb300-nvl72", "gb200-nvl72", "dram_bandwidth", "peaks"),
    ],
)
def test_presets_over_another(name, base, same, other):
    one, two = (load_cluster(each).devices[-1] for each in (name, base))
    assert getattr(one, same) == getattr(two, same)
    assert getattr(one, other) != getattr(two, other)


@given(
    st.integers(0, 10**9),
    st.integers(0, 40),
    st.sampled_from(["{}", "[]", "-1", "nan", "1e400", "'x'", "]]", "="]),
)
@settings(max_examples=60)
def test_damaged_files_are_refused_by_name(tmp_path_factory, place, length, piece):
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    text = (Path(distsim.hardware.__file__).parent / "presets" / "dgx-1.toml").read_text()
    at = place % len(text)
    path.write_text(text[:at] + piece + text[at + length :])
    try:
        load_cluster(str(path))
    except TopologyError as error:
        assert "damaged.toml" in str(error) and "\n" not in str(error)
