"""What a limit of its power does to a device."""

from __future__ import annotations

from distsim.errors import TopologyError

POWER_EXPONENT = 0.243
"""The speed of products goes with the power that a device may draw to this exponent: the best bfloat16
product of A100 reaches 252.9 TFLOP/s at 300 W (PCIe) and 271.2 at 400 W (SXM; MAMF table of
stas00/ml-engineering)."""


def speed_under_limit(power: float | None, limit: float | None) -> float:
    """Return what share of their speed products keep on a device that may draw ``limit`` of ``power`` watts.

    1 without a limit. Raises :class:`TopologyError` for one that is not lower, or lower than half, of which
    the measurements say nothing, and for a device whose usual power is not known.

    >>> round(speed_under_limit(700.0, 500.0), 3)
    0.921
    """
    if limit is None:
        return 1.0
    if power is None or not power / 2 <= limit <= power:
        usual = "give device.power, what it may draw without" if power is None else f"it may draw {power:g} W"
        raise TopologyError(
            f"device.power_limit={limit:g} W must be lower than the device's power, by half at most: {usual}"
        )
    return (limit / power) ** POWER_EXPONENT
