"""Which devices play which rank of a plan."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_models import topology_of

from distsim.errors import PlanError
from distsim.hardware.plan_mesh import plan_mesh
from distsim.plan import Plan
from distsim.plan.rank_layout import ORDER

TOPOLOGY = topology_of(36)
AXES = {"tp": 2, "cp": 3, "ep": 1, "dp": 2, "pp": 3}


@given(st.permutations([*AXES]))
def test_ranks_of_the_axis_that_is_named_first_are_next_to_each_other(names):
    sizes = {axis: size for axis, size in AXES.items() if axis != "ep"}
    mesh = plan_mesh(Plan(**sizes, order="-".join(names)), TOPOLOGY)
    assert mesh.axes == (("pp", 3), ("dp", 2), ("cp", 3), ("tp", 2)), "whatever the order"
    for place, axis in enumerate(names):
        if axis in sizes:
            step = math.prod([AXES[before] for before in names[:place]])
            for group in mesh.groups(axis):
                assert {b.id - a.id for a, b in pairwise(group)} == {step}


def test_the_default_is_megatron_lms():
    mesh = plan_mesh(Plan(tp=2, cp=3, dp=2, pp=3), TOPOLOGY)
    assert [mesh.groups(axis)[0][1].id for axis in ("tp", "cp", "dp", "pp")] == [1, 2, 6, 12]
    assert str(Plan(order=ORDER)) == str(Plan())


@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-cp-ep-dp-pp-sp", "tp-tp-ep-dp-pp", "", "tp,cp"])
def test_an_order_names_each_axis_once(order):
    with pytest.raises(PlanError, match="does not name each axis once"):
        Plan(order=order)
