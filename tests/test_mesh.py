"""Meshes: named axes of devices, and several of them together."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsim.errors import TopologyError
from distsim.ir.device import Device, Mesh, devices_of


def gpus(count: int) -> list[Device]:
    return [Device(i, "gpu") for i in range(count)]


class TestMesh:
    def test_a_view_is_several_axes_together(self):
        mesh = Mesh(gpus(16), {"dp": ("outer", "ep"), "all": ("ep", "tp")}, outer=2, pp=2, ep=2, tp=2)
        assert (mesh.axis_size("dp"), mesh.axis_size("all"), mesh.axes_of("tp")) == (4, 4, ("tp",))
        assert mesh.groups("dp") == mesh.groups("outer", "ep")
        assert mesh.at(pp=1).groups("dp") == mesh.groups("dp")[2:]
        assert mesh.at(dp=3) == mesh.at(outer=1, ep=1) and not mesh.at(dp=3).views
        assert [mesh.coordinate(device, "dp") for device in mesh.groups("dp")[0]] == [0, 1, 2, 3]
        assert pickle.loads(pickle.dumps(mesh)) == mesh != Mesh(gpus(16), outer=2, pp=2, ep=2, tp=2)

    @pytest.mark.parametrize("members", [(), ("cp",), ("dp", "dp")])
    def test_a_view_is_of_axes_of_the_mesh(self, members):
        with pytest.raises(TopologyError, match="view both of axes"):
            Mesh(gpus(4), {"both": members}, dp=2, tp=2)

    def test_row_major_last_axis_fastest(self):
        mesh = Mesh(gpus(16), dp=2, pp=2, tp=4)
        assert mesh.coordinates(mesh.devices[13]) == {"dp": 1, "pp": 1, "tp": 1}
        assert mesh.axes == (("dp", 2), ("pp", 2), ("tp", 4))
        assert mesh.axis_size("tp") == 4
        assert len(mesh) == 16
        assert list(mesh) == gpus(16)

    def test_slice_drops_the_axis(self):
        mesh = Mesh(gpus(16), dp=2, pp=2, tp=4)
        stage = mesh.at(pp=1)
        assert stage.axes == (("dp", 2), ("tp", 4))
        assert [d.id for d in stage] == [4, 5, 6, 7, 12, 13, 14, 15]
        assert stage.at(dp=1) == mesh.at(dp=1, pp=1) == mesh.at(pp=1).at(dp=1)
        assert "pp" not in dict(stage.axes)
        assert mesh.at(dp=0, pp=0, tp=2).devices == (Device(2, "gpu"),)

    def test_groups(self):
        mesh = Mesh(gpus(8), dp=2, pp=2, tp=2)
        ids = [[d.id for d in group] for group in mesh.groups("dp")]
        assert ids == [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert [[d.id for d in g] for g in mesh.groups("dp", "tp")] == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert [[d.id for d in g] for g in mesh.groups("tp", "dp")] == [[0, 4, 1, 5], [2, 6, 3, 7]]
        assert mesh.groups() == tuple((d,) for d in mesh)
        assert mesh.groups("dp") is mesh.groups("dp")

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
    def test_groups_partition_the_mesh(self, sizes: list[int], data: st.DataObject):
        axes = {f"a{i}": size for i, size in enumerate(sizes)}
        mesh = Mesh(gpus(math.prod(sizes)), **axes)
        names = data.draw(st.lists(st.sampled_from(list(axes)), unique=True))
        groups = mesh.groups(*names)
        assert sorted(d.id for group in groups for d in group) == list(range(len(mesh)))
        rest = [name for name in axes if name not in names]
        for group in groups:
            assert len(group) == math.prod(axes[name] for name in names)
            assert len({tuple(mesh.coordinates(d)[name] for name in rest) for d in group}) == 1

    def test_value_semantics(self):
        a, b = Mesh(gpus(4), dp=2, tp=2), Mesh(gpus(4), dp=2, tp=2)
        assert a == b == pickle.loads(pickle.dumps(a))
        assert hash(a) == hash(b)
        assert a != Mesh(gpus(4), tp=2, dp=2)
        assert a != Mesh(gpus(4), dp=4)

    def test_repr(self):
        mesh = Mesh(gpus(8), dp=2, tp=4)
        assert repr(mesh) == "Mesh(dp=2, tp=4)[gpu:0..gpu:7]"
        assert repr(mesh.at(tp=0)) == "Mesh(dp=2)[gpu:0, gpu:4]"
        assert repr(Mesh(gpus(16), dp=8, tp=2).at(tp=1)) == "Mesh(dp=8)[gpu:1, gpu:3, ..., gpu:15]"

    def test_errors(self):
        with pytest.raises(TopologyError, match="dp=2, tp=4 needs 8 devices, not 6"):
            Mesh(gpus(6), dp=2, tp=4)
        with pytest.raises(TopologyError, match="gpu:1 occurs twice"):
            Mesh([Device(1, "gpu"), Device(1, "gpu")], dp=2)
        with pytest.raises(TopologyError, match="tp=0 must be at least 1"):
            Mesh([], tp=0)
        mesh = Mesh(gpus(4), dp=2, tp=2)
        with pytest.raises(TopologyError, match=r"no axis 'pp'; its axes: dp, tp"):
            mesh.axis_size("pp")
        with pytest.raises(TopologyError, match="tp=2 lies outside"):
            mesh.at(tp=2)
        with pytest.raises(TopologyError, match="gpu:9 is not in"):
            mesh.coordinates(Device(9, "gpu"))
        with pytest.raises(TopologyError, match="twice"):
            mesh.groups("dp", "dp")

    def test_devices_of(self):
        assert devices_of(None) == ()
        assert devices_of(Device(1, "gpu")) == (Device(1, "gpu"),)
        assert devices_of(Mesh(gpus(2), dp=2)) == tuple(gpus(2))
