"""Numbers with units, as people write them: ``80 GiB``, ``400Gbit/s``, ``1.5 us``, ``85 %``.

The letters mean what they mean in SI and IEC: B is a byte, b or bit a bit; k, M, G, T, P are powers of 1000,
Ki, Mi, Gi, Ti powers of 1024.
"""

from __future__ import annotations

import math
import re

from distsim.errors import TopologyError

Units = dict[str, float]
"""Units of one kind: what each is worth in SI, by its name."""

FLOPS: Units = {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
RATE: Units = {
    **{"B/s": 1.0, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "GiB/s": 2.0**30},
    **{"Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8},
}
BYTES: Units = {
    **{"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
}
SECONDS: Units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
FREQUENCY: Units = {"Hz": 1.0, "MHz": 1e6, "GHz": 1e9}
POWER: Units = {"W": 1.0, "kW": 1e3}
PRICE: Units = {"$/h": 1.0}
SHARE: Units = {"1": 1.0, "%": 0.01}
NUMBER: Units = {"1": 1.0}

HOUR = 3600.0
"""Seconds."""

_ALIASES = {
    **{f"{prefix}FLOPS": f"{prefix}FLOP/s" for prefix in ("", "G", "T", "P")},
    **{f"{prefix}FLOPs": f"{prefix}FLOP/s" for prefix in ("", "G", "T", "P")},
    **{f"{prefix}bps": f"{prefix}bit/s" for prefix in "MGT"},
    **{"USD/h": "$/h", "\u00b5s": "us", "\u03bcs": "us", "KB": "kB", "": "1"},
}
"""Other spellings of units that can mean nothing else; GBps and Gb/s are not among them: people mean both."""

_QUANTITY = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,3})?)\s*(\S*)\s*", re.ASCII)


def parse_quantity(text: str, units: Units, what: str) -> tuple[float, str]:
    """Return the number in a text and the name of its unit, one of ``units``.

    ``what`` names it in errors. Raises :class:`TopologyError` where the text is no number with such a unit.

    >>> parse_quantity("400Gbit/s", RATE, "infiniband.bandwidth")
    (400.0, 'Gbit/s')
    >>> parse_quantity("0.85", SHARE, "efficiency"), parse_quantity("85 %", SHARE, "efficiency")
    ((0.85, '1'), (85.0, '%'))
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise TopologyError(f"{what}: {text!r:.60} is no number with a unit; write it as {_example(units)}")
    return float(match[1]), unit_named(match[2], units, what, match[1])


def unit_named(unit: str, units: Units, what: str, value: str = "1") -> str:
    """Return the name in ``units`` of a unit as it is written; ``value`` is what stands before it.

    Raises :class:`TopologyError` where there is none.
    """
    name = unit if unit in units else _ALIASES.get(unit, unit)
    if name in units:
        return name
    choices = ", ".join(units)
    if not unit:
        raise TopologyError(
            f"{what}: {value} has no unit; write it as {_example(units, value)}, in one of {choices}"
        )
    near = [each for each in units if each.lower().replace("bit", "b") == unit.lower().replace("ps", "/s")]
    near.sort(key=lambda each: ("bit" in each) == ("B" in unit))  # a small b is more often a bit
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise TopologyError(f"{what}: unit {unit!r:.40} is not one of {choices}{hint}")


_LARGE = 1e4
"""Numbers from which on nobody means the unit of an example."""


def _example(units: Units, value: str = "") -> str:
    """Return what may be written: the value that was, unless so large that it is of another unit."""
    if "1" in units:
        return "0.9 or 90 %" if "%" in units else "2"
    written = {"FLOP/s": "312 TFLOP/s", "B/s": "25 GB/s", "B": "80 GiB", "s": "5 us"}
    written |= {"W": "700 W", "$/h": "2.5 $/h", "Hz": "1980 MHz"}
    usual = written[next(iter(units))]
    number = float(value) if value else math.inf
    return f"{number:g} {usual.split()[1]}" if number < _LARGE else usual
