"""Operators that compute numbers: every rule against what the operator computes."""

from __future__ import annotations

import op_samples_math as samples
import pytest
from op_checks import Sample, check_all, check_gradient, check_types


@pytest.mark.parametrize("of", samples.SAMPLES, ids=str)
def test_rules(of: Sample) -> None:
    check_all(of)


@pytest.mark.parametrize("of", samples.DRAWN, ids=str)
def test_rules_of_drawn_numbers(of: Sample) -> None:
    check_types(of)
    if not of.grads:
        return
    for emitted in check_gradient(of).samples():
        check_types(emitted)
