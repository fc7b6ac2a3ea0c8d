"""Operators that compute numbers: every rule against what the operator computes."""

from __future__ import annotations

import op_samples_math as samples
import pytest
from op_checks import Sample, check_all


@pytest.mark.parametrize("of", samples.SAMPLES, ids=str)
def test_rules(of: Sample) -> None:
    check_all(of)
