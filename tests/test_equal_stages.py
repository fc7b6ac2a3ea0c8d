"""The space of a stack that cuts equal stages, of models whose layers divide and of those whose do not."""

import re
from functools import partial

import pytest

from distsim.errors import PlanError
from distsim.plan_search import parse_sets
from distsim.plan_search.absent_values import undivided
from distsim.plan_search.space import ModelTraits, PlanSpace
from distsim.study.choices import Choices
from distsim.study.options import ModelOptions


def megatron(layers: int, devices: int, sets: str) -> PlanSpace:
    traits = ModelTraits(devices, layers=layers, every_layer=layers)
    given = parse_sets(sets)
    complete = partial(Choices.of(ModelOptions("gpt", stack="megatron")).spread, given=given)
    return PlanSpace(traits, devices, 1, given, complete=complete)


@pytest.mark.parametrize(
    ("layers", "devices", "sets", "pipelines"),
    [
        (32, 96, "", {"layers": {2, 4, 8, 16, 32}}),  # most divide: the others are no part of the space
        (32, 96, "pp=3|4", {"default": {3}, "layers": {4}}),  # asked for
        (32, 96, "dp=32", {"default": {3}}),
        (61, 64, "", {"default": {2, 4, 8, 16, 32}}),
        (94, 64, "", {"layers": {2}, "default": {2, 4, 8, 16, 32, 64}}),  # 2 ranks that interleave too
        (61, 64, "stages=layers", {"layers": {2, 4, 8, 16, 32}}),  # asked for; each says why it is refused
    ],
)
def test_equal_stages_are_all_there_are_only_where_layers_divide(layers, devices, sets, pipelines):
    found: dict[str, set[int]] = {}
    for plan in megatron(layers, devices, sets).plans:
        if plan.pp > 1:
            found.setdefault(plan.stages, set()).add(plan.pp)
            assert plan.stages == "default" or sets == "stages=layers" or layers % plan.num_stages == 0
    assert found == pipelines


@pytest.mark.parametrize(
    ("layers", "devices", "sets", "said"),
    [
        (32, 96, "", "without pp=3, 6, 12, 24, whose equal stages do not divide 32 layers: stages="),
        (32, 96, "pp=3|4", ""),
        (32, 64, "", ""),
        (61, 64, "", ""),
        (32, 96, "stages=layers", ""),
    ],
)
def test_pipelines_that_are_not_tried_are_said(layers, devices, sets, said):
    space = megatron(layers, devices, sets)
    found = undivided(space, space.traits.every_layer * space.stages_divide)
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_value_that_equal_stages_leave_out_has_the_reason():
    said = "chunks='3': 32 layers do not make 6|12|24 equal stages, as the stack has them: add stages=default"
    with pytest.raises(PlanError, match=re.escape(said)):
        _ = megatron(32, 8, "schedule=interleaved,chunks=1|2|3").plans
