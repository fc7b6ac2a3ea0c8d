"""How amounts of memory and time are written for people, in the unit that suits them."""

from __future__ import annotations


def bytes_label(number: float) -> str:
    """Return an amount of memory in the unit that suits it.

    >>> bytes_label(3 * 2**29)
    '1.50 GiB'
    """
    scale, unit = bytes_scale(number)
    return f"{number:.0f} B" if unit == "B" else f"{number / scale:.2f} {unit}"


def bytes_scale(number: float) -> tuple[float, str]:
    """Return the bytes of the unit in which to show such an amount of memory, and its name."""
    for scale, unit in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if number >= scale:
            return scale, unit
    return 1.0, "B"


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the seconds of the unit in which to show a time axis of this length, and its name."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return scale, unit
    return 1e-6, "us"
