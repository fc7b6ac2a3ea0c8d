"""The figures that calibrate.py fits, what they make of a device, and the presets that have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from distsim.hardware import presets as preset_names
from distsim.ir import Device
from distsim.ir.device import KernelRates

PRESETS = Path(__file__).parents[1] / "distsim" / "hardware" / "presets"
SPREAD_OF_STEPS = 0.115
"""Standard deviation of the logarithm of measured over predicted steps: 19 % either way held 90 % of the rows
in a study of both tables with as many figures in closed formulas. It is no residual of this fit, whose errors
with sources left out calibrate.py prints."""
SPREAD_LINE = (
    f'spread = {{ value = {SPREAD_OF_STEPS}, unit = "1", source = "19 % either way held 90 % of the '
    'published steps of sources left out, in an analytic study of the same rows" }'
)

FAMILIES = {
    "dgx-a100": "a100",
    "dgx-a100-40gb": "a100",
    "a100-pcie": "a100",
    "dgx-h100": "h100",
    "hgx-h100-96gb": "h100",
    "h100-nvl": "h100",
    "h100-pcie": "h100",
    "dgx-h200": "h100",
    "dgx-b200": "b200",
    "gb200-nvl72": "b200",
    "dgx-2": "v100",
    "dgx-1": "v100",
}
"""The presets whose GPUs are of one kind, and share figures."""

WRITTEN = {"dgx-a100": "a100", "dgx-h100": "h100", "dgx-h200": "h100", "dgx-b200": "b200", "dgx-2": "v100"}
"""The presets that give figures; others are based on them."""


@dataclass(frozen=True)
class FittedFigure:
    """A figure that is fitted: its prior, how far the logarithm may be from that, and where that is from."""

    prior: float
    spread: float
    source: str


_IN_SITU = "a step reaches less than a sweep's best shape: power, caches, shapes"
FIGURES: dict[str, FittedFigure] = {
    **{f"linear.{gpu}": FittedFigure(0.85, 0.2, _IN_SITU) for gpu in ("a100", "h100", "b200", "v100")},
    "batched": FittedFigure(0.8, 0.2, "of linear: thin products of heads"),
    "attention": FittedFigure(0.9, 0.1, "of the kernel alone, in a step"),
    "memory": FittedFigure(0.95, 0.08, "of a large copy"),
    "launch.a100": FittedFigure(25e-6, 0.4, "5 to 40 us an op in eager mode: Python, dispatcher, allocator"),
    "launch.h100": FittedFigure(0.75, 0.15, "of launch.a100: a host of a later generation"),
    "launch.b200": FittedFigure(0.65, 0.15, "of launch.a100: a host of a later generation"),
    "compiled": FittedFigure(0.5, 0.3, "of an eager launch: no dispatcher between kernels"),
    "tensor": FittedFigure(5e-6, 0.7, "a few calls of Python for each tensor"),
}
"""What is fitted. Shares are of what the device reaches at best (``Device.rates``)."""

ATTENTION = {
    "a100": (0.771, 0.676, "FlashAttention-2: 190 TFLOP/s both ways, 26 % of the time forward (Dao 2023)"),
    "h100": (0.460, 0.403, "FlashAttention-2: 332 TFLOP/s both ways, 26 % of the time forward (Dao 2023)"),
    "b200": (0.677, 0.516, "cuDNN: 1,181 and 900 TFLOP/s (SimuMax, b200_bf16_ceperm.json)"),
    "v100": (0.450, 0.400, "assumption: no FlashAttention-2 on V100, xformers"),
}
"""Forward and backward, of the best product, at head size 128 and endless sequences."""

FLOAT8 = 0.725
"""1.45 times the speed of 16 bits where the peak is twice as high: an assumption, casts and thin products
included; the best shapes alone reach 1.77 times on H100 (1,402.6 and 794.5 TFLOP/s, MAMF table)."""
GROUPED = 0.85
"""Grouped products, of linear ones: an assumption. Kernels alone reach 0.82 by the shape rule, over 12
products on A100 (SimuMax, a100_pcie.json), and 0.55 over 108 on B200."""
EMBEDDING = 0.5
"""Rows picked by index, of a large copy: assumption, not measured."""


def rates_of(values: Mapping[str, float], family: str, device: Device) -> KernelRates:
    """Return the figures of a kind of GPU."""
    linear = values[f"linear.{family}"]
    forward, backward, _ = ATTENTION[family]
    launch = values["launch.a100"] * values.get(f"launch.{family}", 1.0) ** (family != "a100")
    shares = {
        "linear": linear,
        "linear_float8": linear * FLOAT8,
        "batched": linear * values["batched"],
        "grouped": linear * GROUPED,
        "attention": forward * values["attention"],
        "attention_grad": backward * values["attention"],
        "memory": values["memory"],
        "embedding": values["memory"] * EMBEDDING,
    }
    return KernelRates(
        tuple([(kind, min(share, 1.0)) for kind, share in shares.items()]),
        (("eager", launch), ("fused", launch), ("compiled", launch * values["compiled"])),
        values["tensor"],
        device.rates.processors,
        SPREAD_OF_STEPS,
        device.rates.slowdown,
    )


def write_presets(values: Mapping[str, float], tables: str) -> None:
    """Put the figures into the presets that give them, in place of those that were there."""
    unknown = [name for name in WRITTEN if name not in preset_names()]
    assert not unknown, unknown
    about = f"fitted to {tables} by experiments/calibrate.py, {date.today().isoformat()}"
    for name, family in WRITTEN.items():
        path = PRESETS / f"{name}.toml"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\n*# What kernels reach.*", "", text, flags=re.DOTALL)
        text = re.sub(r"^spread = .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^(processors = .*\n)", rf"\1{SPREAD_LINE}\n", text, flags=re.MULTILINE)
        lines = "\n".join(preset_lines(values, family, about))
        path.write_text(f"{text.rstrip()}\n\n{lines}\n", encoding="utf-8")
        print(f"written: {path}")


def preset_lines(values: Mapping[str, float], family: str, about: str) -> Iterable[str]:
    """Yield the lines of a preset that give the figures of a kind of GPU."""
    rates = rates_of(values, family, Device(0, "gpu"))
    sources = {
        "linear": about,
        "linear_float8": f"assumption: linear times {FLOAT8}, 1.45 times the speed of 16 bits; not measured",
        "batched": about,
        "grouped": f"assumption: linear times {GROUPED}; kernels alone 0.82 on A100, 0.55 on B200 (SimuMax)",
        "attention": f"{ATTENTION[family][2]}, times {values['attention']:.3g}, {about}",
        "attention_grad": f"{ATTENTION[family][2]}, times {values['attention']:.3g}, {about}",
        "memory": about,
        "embedding": f"assumption: memory times {EMBEDDING}; not measured",
    }
    yield "# What kernels reach in a step, of what is reached at best; the host's time to issue one."
    yield "[device.kernels]"
    for kind, share in rates.shares:
        yield f'{kind} = {{ value = {share:.3g}, unit = "1", source = "{sources[kind]}" }}'
    yield ""
    yield "[device.launches]"
    for way, seconds in (*rates.launches, ("tensor", rates.tensor)):
        yield f'{way} = {{ value = {seconds * 1e6:.3g}, unit = "us", source = "{about}" }}'
