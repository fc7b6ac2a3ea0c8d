"""Numbers with units, as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import says

from distsim.errors import TopologyError
from distsim.hardware.units import BYTES, FLOPS, RATE, SECONDS, SHARE, parse_quantity


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("40GiB", BYTES, 40 * 2**30),
        (" 80 GB ", BYTES, 80e9),
        ("100Gbit/s", RATE, 12.5e9),
        ("100 Gbps", RATE, 12.5e9),
        ("1.5e3 MB/s", RATE, 1.5e9),
        ("312 TFLOPS", FLOPS, 312e12),
        ("5us", SECONDS, 5e-6),
        ("5 \u00b5s", SECONDS, 5e-6),
        ("85 %", SHARE, 0.85),
        ("0.85", SHARE, 0.85),
    ],
)
def test_numbers_with_units(text, units, value):
    number, unit = parse_quantity(text, units, "it")
    assert number * units[unit] == pytest.approx(value)


@given(st.floats(1e-3, 1e6), st.sampled_from([*BYTES]), st.sampled_from(["", " ", "  "]))
def test_a_quantity_reads_back(value, unit, space):
    assert parse_quantity(f"{value:.6f}{space}{unit}", BYTES, "it") == (float(f"{value:.6f}"), unit)


@pytest.mark.parametrize(
    ("text", "units", "said"),
    [
        ("40", BYTES, "40 has no unit; write it as 40 GiB"),
        ("40 gib", BYTES, "did you mean GiB?"),
        ("100 Gb/s", RATE, "did you mean Gbit/s or GB/s?"),
        ("100 GBps", RATE, "did you mean GB/s or Gbit/s?"),
        ("5 us", BYTES, "unit 'us' is not one of B"),
        ("-5 us", SECONDS, "no number with a unit"),
        ("nan s", SECONDS, "no number with a unit"),
        ("1_0 s", SECONDS, "no number with a unit"),
        ("9" * 30 + " s", SECONDS, "no number with a unit"),
        ("", SECONDS, "no number with a unit"),
    ],
)
def test_what_is_no_quantity(text, units, said):
    with says(TopologyError, "it: ", said):
        parse_quantity(text, units, "it")
