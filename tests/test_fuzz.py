"""A part of experiments/fuzz.py, seconds long: random functions and plans have no wrong result."""

import importlib
from collections.abc import Iterable
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(Path(__file__).parents[1] / "experiments"))
    fuzz = importlib.import_module("fuzz")


def outcomes(kind: str, seeds: Iterable[int]) -> list[str]:
    cases = [fuzz.CHECKS[kind](seed) for seed in seeds]
    wrong = [f"seed {case.seed}: {case.verdict.reason}" for case in cases if case.verdict.outcome == "wrong"]
    assert not wrong
    return [case.verdict.outcome for case in cases]


@pytest.mark.parametrize("seeds", [range(0, 20), range(20, 40)], ids=str)
def test_a_plan_computes_what_one_device_computes_and_the_engines_agree(seeds):
    assert outcomes("pairs", seeds).count("equal") > len(seeds) / 3


@pytest.mark.parametrize("seeds", [range(0, 7), range(7, 14)], ids=str)
def test_a_layout_of_every_axis_computes_what_one_device_computes(seeds):
    assert outcomes("layouts", seeds).count("equal") > len(seeds) / 3


def test_gradients_are_difference_quotients():
    assert outcomes("gradients", range(100)).count("equal") == 100


def test_what_went_wrong_once():
    """Gathers of a learned weight of a loss (88, 254), and copies that a second cut put on other stages."""
    assert outcomes("pairs", [88, 146, 254, 610]).count("equal") == 4
    # A copy of what is reduced once a step waited for the reduction of a microbatch.
    assert outcomes("layouts", [304]) == ["equal"]


def test_an_exchange_within_what_other_ranks_divide():
    """Ulysses brought cp to heads that tp was to divide outside of it."""
    assert outcomes("layouts", [30215]) == ["equal"]
