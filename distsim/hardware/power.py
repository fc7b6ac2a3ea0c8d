"""What a limit of its power does to a device."""

from __future__ import annotations

import numpy as np

from distsim.errors import TopologyError

SPEED_BY_POWER = ((0.5, 0.674), (0.6, 0.794), (0.7, 0.881), (0.8, 0.927), (0.9, 0.967), (1.0, 1.0))
"""Shares of power, and what share of their speed stages of GPT-3 175B and BLOOM keep at these: the fastest
clock that draws no more, mean of two models on A100 (SXM) and two on A40 (of 0.6 one model on A40, of 0.5
none). Below three fifths voltage falls no more, so speed falls with power. From the stage profiles of Perseus
(Chung et al., SOSP 2024; ml-energy/zeus at 38cb3f90, sosp24_data/emulation/stage_profile): seconds and joules
of forward and backward at clocks of 855 to 1,410 MHz."""


def speed_under_limit(power: float | None, limit: float | None) -> float:
    """Return what share of their speed products keep on a device that may draw ``limit`` of ``power`` watts.

    Interpolated between measurements (:data:`SPEED_BY_POWER`); 1 without a limit. Raises
    :class:`TopologyError` for one that is not lower, or lower than half, of which the measurements say
    nothing, and for a device whose usual power is not known.

    >>> round(speed_under_limit(700.0, 500.0), 3)
    0.888
    """
    if limit is None:
        return 1.0
    if power is None or not power / 2 <= limit <= power:
        usual = "give device.power, what it may draw without" if power is None else f"it may draw {power:g} W"
        raise TopologyError(
            f"device.power_limit={limit:g} W must be lower than the device's power, by half at most: {usual}"
        )
    shares, speeds = zip(*SPEED_BY_POWER, strict=True)
    return float(np.interp(limit / power, shares, speeds))
