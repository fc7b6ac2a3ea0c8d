"""Cluster presets: every figure with its unit and source, near measurements, and files of one's own."""

import re
from pathlib import Path

import pytest

import distsim.hardware
from distsim.errors import TopologyError
from distsim.hardware import collective_time, describe, figures, load_cluster, presets

DEVICES = dict.fromkeys(presets(), 8) | {
    **{"dgx-2": 16, "gb200-nvl72": 72, "gb300-nvl72": 72},
    **dict.fromkeys(("a10", "rtx-3090", "rtx-4090", "rtx-a6000"), 4),
}


class TestPresets:
    def test_names(self):
        named = {"dgx-1", "dgx-2", "dgx-a100", "dgx-a100-40gb", "dgx-h100", "dgx-b200"}
        assert named | {"gb200-nvl72", "gb300-nvl72"} < {*presets()}
        assert all("not re-read" in row.source or "given" not in row.source for row in figures("mi300x"))

    @pytest.mark.parametrize("name", presets())
    def test_loads_and_every_figure_has_unit_and_source(self, name: str):
        topology = load_cluster(name)
        assert len(topology.devices) == DEVICES[name]
        rows = figures(name)
        assert len(rows) >= 15
        assert all(row.unit and len(row.source) > 10 and row.si_value > 0 for row in rows)
        text = describe(name)
        assert all(row.name in text and row.source in text for row in rows)
        device = topology.devices[0]
        assert 20e9 < device.memory < 300e9
        assert device.peak("float16") > device.peak("float32") >= device.peak("float64")
        assert device.peak("uint4") == device.throughput

    def test_figures_in_si_units(self):
        topology = load_cluster("dgx-a100:2")
        a100 = topology.devices[9]
        assert (a100.id, a100.peak("bfloat16"), a100.dram_bandwidth) == (9, 312e12, 2e12)
        assert topology.link(topology.devices[0], topology.devices[7]).bandwidth == 300e9
        assert topology.link(topology.devices[0], a100).bandwidth == 200e9 / 8

    @pytest.mark.parametrize(
        ("name", "ranks", "gigabytes_per_second"),
        # Large-message all-reduce bus bandwidth as measured: NVIDIA's GTC 2024 NCCL chart; across nodes,
        # stas00/ml-engineering's table for 4 x 8 B200 on 400 Gbit/s ports.
        [("dgx-2", 8, 122), ("dgx-a100", 8, 232), ("dgx-h100", 8, 370), ("dgx-a100:4", 32, 192),
         ("dgx-h100:4", 32, 380), ("dgx-b200:4", 32, 382)],
    )  # fmt: skip
    def test_bus_bandwidth_near_measurements(self, name: str, ranks: int, gigabytes_per_second: float):
        topology = load_cluster(name)
        size = 16 * 2**30
        seconds = collective_time("all_reduce", size, tuple(topology.devices[:ranks]), topology)
        bus = 2 * (ranks - 1) / ranks * size / seconds
        assert bus == pytest.approx(gigabytes_per_second * 1e9, rel=0.05)

    def test_unknown_names(self):
        with pytest.raises(TopologyError, match=r"'dgx-3'; choose one of a10, a100-pcie"):
            load_cluster("dgx-3")
        for name in ("", "../presets/dgx-2"):
            with pytest.raises(TopologyError, match="choose one of"):
                load_cluster(name)
        with pytest.raises(TopologyError, match="at least one node"):
            load_cluster("dgx-a100:0")
        with pytest.raises(TopologyError, match="at most 1048576"):
            load_cluster("dgx-a100:999999999")


class TestOwnFile:
    @pytest.fixture
    def text(self) -> str:
        folder = Path(distsim.hardware.__file__).parent / "presets"
        return (folder / "dgx-a100.toml").read_text()

    def write(self, folder: Path, text: str | bytes) -> str:
        path = folder / "mine.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    def test_same_as_the_preset(self, tmp_path: Path, text: str):
        path = self.write(tmp_path, text)
        assert load_cluster(f"{path}:3").devices == load_cluster("dgx-a100:3").devices

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("devices_per_node = 8", "devices_per_node = 8\ncolour = 1", "colour"),
            ("devices_per_node = 8", "", "devices_per_node"),
            (
                "devices_per_node = 8",
                "devices_per_node = true",
                "line 3: devices_per_node: expected a whole number",
            ),
            ("value = 81920", 'value = "many"', "device.memory.value: expected"),
            ("value = 81920", "value = nan", "device.memory.value: expected"),
            ("value = 2.0", "value = inf", "dram_bandwidth=inf"),
            ("value = 81920", "value = -1", "device.memory.value: expected"),
            ('unit = "MiB"', 'unit = "furlong"', "device.memory: unit 'furlong'"),
            ("value = 0.869", "value = 86.9", "flops_efficiency=86.9"),
            ("bfloat16 =", "bfloat61 =", "'bfloat61' is not one of"),
            ("group_size = 8", "group_size = 0", r"line \d+: levels.nvlink.group_size"),
            ("[device]", "[device", "not a TOML file"),
        ],
    )
    def test_errors_name_the_place(self, tmp_path: Path, text: str, old: str, new: str, message: str):
        assert old in text
        path = self.write(tmp_path, text.replace(old, new, 1))
        with pytest.raises(TopologyError, match=f"mine.toml.*{message}"):
            load_cluster(path)

    @pytest.mark.parametrize(
        "data", [b"\xff\xfe", b"a = " + b"[" * 5000, b"a = 1" + b"0" * 5000, b"#" * (1 << 21)]
    )
    def test_hostile_bytes(self, tmp_path: Path, data: bytes):
        with pytest.raises(TopologyError, match="mine.toml"):
            load_cluster(self.write(tmp_path, data))

    def test_missing_file(self, tmp_path: Path):
        with pytest.raises(TopologyError, match="is not a file"):
            load_cluster(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("value", ["inf", "0", "0.3", "1e300"])
@pytest.mark.parametrize("name", ["block", "segment"])
def test_blocks_and_segments_are_whole_bytes(tmp_path, name, value):
    text = (Path(distsim.hardware.__file__).parent / "presets" / "dgx-a100.toml").read_text()
    path = tmp_path / "odd.toml"
    path.write_text(re.sub(rf"^{name} = {{ value = \d+", f"{name} = {{ value = {value}", text, flags=re.M))
    with pytest.raises(TopologyError, match=rf"^[^:]*: device.{name}=.* must be whole bytes"):
        load_cluster(str(path))


def test_a_level_that_straddles_nodes_is_refused(tmp_path):
    text = (Path(distsim.hardware.__file__).parent / "presets" / "dgx-a100.toml").read_text()
    path = tmp_path / "odd.toml"
    path.write_text(text.replace("devices_per_node = 8", "devices_per_node = 12"))
    with pytest.raises(
        TopologyError, match=r"groups of 8 devices at level 'nvlink' would straddle nodes of 12"
    ):
        load_cluster(str(path))


def test_uneven_parts_of_a_group_use_as_many_links_as_the_smallest_has():
    """8 ranks of one node and 4 of another: four rings, not one; never as fast as 8 and 8."""
    topology = load_cluster("dgx-a100:2")
    devices, size = topology.devices, 100 * 2**20
    even, uneven = (collective_time("all_reduce", size, tuple(devices[:n]), topology) for n in (16, 12))
    across = topology.link(devices[0], devices[8]).achieved
    assert even < uneven
    assert uneven == pytest.approx(2 * 11 / 12 * size / (4 * across), rel=0.2)
    one = collective_time("all_reduce", size, tuple(devices[:9]), topology)
    assert one == pytest.approx(2 * 8 / 9 * size / across, rel=0.2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('devices_per_port = { value = 1.5, unit = "1", source = "x" }', "devices_per_port=1.5 is no count"),
        ('devices_per_port = { value = 3, unit = "1", source = "x" }', "ports of 3 devices would straddle"),
        ('devices_per_port = { value = 2, unit = "GB", source = "x" }', "devices_per_port: unit 'GB'"),
        ('oversubscription = { value = 0.5, unit = "1", source = "x" }', "oversubscription=0.5 must be"),
        ("oversubscription = { value = 2 }", "levels.infiniband.oversubscription.unit: is missing"),
    ],
)
def test_shared_ports_of_a_file(tmp_path, line, message):
    text = (Path(distsim.hardware.__file__).parent / "presets" / "dgx-a100.toml").read_text()
    path = tmp_path / "shared.toml"
    between = 'name = "infiniband"\n'
    path.write_text(text.replace(between, f"{between}{line}\n"))
    with pytest.raises(TopologyError, match=f"shared.toml.*{message}"):
        load_cluster(f"{path}:2")
    shared = "devices_per_port = { value = 4, unit = '1', source = 'x' }"
    path.write_text(text.replace(between, f"{between}{shared}\n"))
    assert load_cluster(f"{path}:2").levels[-1].devices_per_port == 4
    assert "infiniband.devices_per_port  " in describe(str(path))


def test_nodes_of_one_device_have_no_level_within():
    alone = load_cluster("dgx-a100", ["devices_per_node=1"])
    assert len(alone.devices) == 1
    four = load_cluster("dgx-a100:4", ["devices_per_node=1"])
    assert [level.name for level in four.levels] == ["infiniband"] and len(four.devices) == 4


def test_a_node_as_large_as_the_level_inside_it_is_one_level():
    """Four V100 a node, as of many machines: the cube of two fours joins nothing."""
    for node in (2, 4):
        found = load_cluster("dgx-1:2", [f"devices_per_node={node}"])
        levels = [(level.name, level.group_size) for level in found.levels]
        assert levels == [("nvlink", node), ("infiniband", None)]
    assert [level.name for level in load_cluster("dgx-1:4", ["devices_per_node=1"]).levels] == ["infiniband"]
