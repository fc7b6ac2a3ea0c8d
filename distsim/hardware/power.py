"""What a limit of its power does to a device."""

from __future__ import annotations

import numpy as np

from distsim.errors import TopologyError

SPEED_BY_POWER = ((0.5, 0.674), (0.6, 0.794), (0.7, 0.867), (0.8, 0.927), (0.9, 0.967), (1.0, 1.0))
"""Shares of the power that they draw without a limit, and what share of their speed products keep at these.

Of Ampere, stages of GPT-3 175B and BLOOM at clocks of 855 to 1,410 MHz, two on A100 (SXM, 467 and 478 W at
the highest) and two on A40 (293): the fastest clock that draws no more, their mean (of 0.6 one of the A40's,
of 0.5 none), 0.881 at 0.7 (Perseus, Chung et al., SOSP 2024: ml-energy/zeus at 38cb3f90,
sosp24_data/emulation/stage_profile). Below three fifths voltage falls no more, so speed falls with power. Of
Hopper, products of 8,192 x 8,192 x 8,192 alone: on H100 at 500 W 585.2 TFLOP/s in bfloat16 and 1,125.5 in 8
bits (pytorch/FBGEMM pull request 2546 of April 2024, of a library that it does not name), on H200 at 700 W
678.9 and 1,309 (``experiments/measured/h200_kernels.csv``): 0.861, or 0.853 at 0.7, which counts as much
there as Ampere does. On four A100 of 300 W (PCIe; sosp24_data/zeus/csv/A100/zeus_global.csv) whole steps keep
0.75 to 0.80 at 0.71: what GPUs keep differs by a tenth."""


def speed_under_limit(power: float | None, limit: float | None) -> float:
    """Return what share of their speed products keep on a device that may draw ``limit`` of ``power`` watts.

    Interpolated between measurements (:data:`SPEED_BY_POWER`); 1 without a limit. Raises
    :class:`TopologyError` for one that is higher, or lower than half, of which the measurements say
    nothing, and for a device whose usual power is not known.

    >>> round(speed_under_limit(700.0, 500.0), 3)
    0.876
    """
    if limit is None:
        return 1.0
    if power is None or not power / 2 <= limit <= power:
        usual = "give device.power, what it may draw without" if power is None else f"it may draw {power:g} W"
        raise TopologyError(
            f"device.power_limit={limit:g} W must be no more than the device's power, nor below half: {usual}"
        )
    shares, speeds = zip(*SPEED_BY_POWER, strict=True)
    return float(np.interp(limit / power, shares, speeds))
