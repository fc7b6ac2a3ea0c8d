"""The figures that calibrate.py fits, what they make of a device, and the presets that have them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distsim.hardware import load_cluster
from distsim.hardware import presets as preset_names
from distsim.ir import Device
from distsim.ir.kernel_rates import KernelRates

PRESETS = Path(__file__).parents[1] / "distsim" / "hardware" / "presets"
ROWS_OF_MACHINES = Path(__file__).parents[1] / "distsim" / "truth" / "machine.py"
SPREAD_SOURCE = "standard deviation of the logarithm of rows over what those of other sources say: "
UNCERTAINTY_SOURCE = "standard deviation of the logarithm that the rows leave open, or sources disagree by, "

FAMILIES = {
    "dgx-a100": "a100",
    "dgx-a100-40gb": "a100",
    "a100-pcie": "a100",
    "dgx-h100": "h100",
    "hgx-h100-96gb": "h100",
    "h100-nvl": "h100",
    "h100-pcie": "h100",
    "dgx-h200": "h200",
    "dgx-b200": "b200",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "dgx-2": "v100",
    "dgx-1": "v100",
    "aws-p4d": "a100",
    "aws-p4de": "a100",
    "aws-p5": "h100",
    "aws-p5en": "h200",
}
"""The presets whose GPUs are of one kind, and share figures."""

WRITTEN = {
    **{"dgx-a100": "a100", "dgx-h100": "h100", "dgx-h200": "h200", "dgx-b200": "b200", "dgx-2": "v100"},
    **{"gb200-nvl72": "gb200", "gb300-nvl72": "gb300"},
}
"""The presets that give figures; others are based on them."""


@dataclass(frozen=True)
class FittedFigure:
    """A figure that is fitted: its prior, how far the logarithm may be from that, where that is from, and the
    most that it can be: 1 of a share of what is reached at best."""

    prior: float
    spread: float
    source: str
    most: float = math.inf


_ALONE = "of {} kernels alone over the shape rule, median (SimuMax, {})"
MEASURED = "experiments/measured/h200_kernels.csv"
_ALONE_HERE = f"of {{}} kernels alone over the shape rule, median ({MEASURED})"
FIGURES: dict[str, FittedFigure] = {
    "linear.a100": FittedFigure(0.96, 0.1, _ALONE.format(120, "a100_pcie.json"), most=1.0),
    "linear.h100": FittedFigure(
        0.89, 0.15, _ALONE_HERE.format(27) + ", on H200, the same processor", most=1.0
    ),
    "linear.h200": FittedFigure(
        1.0, 0.05, f"of the FLOP/s of linear.h100: the same processor, and power; 0.95 alone ({MEASURED})"
    ),
    "linear.b200": FittedFigure(
        0.73,
        0.2,
        "of kernels alone over the shape rule, medians of three machines, 0.66 (282 kernels, SimuMax, "
        "b200_bf16_ceperm.json), 0.93 (4 of 512 to 16,384 rows, vllm pull request 19566) and 0.64 (3 at 750 "
        "W, facebookexperimental/triton pull request 854): geometric mean",
        most=1.0,
    ),
    "linear.gb200": FittedFigure(0.73, 0.2, "as B200; its power, 1,200 W, allows a higher clock", most=1.0),
    "linear.gb300": FittedFigure(
        0.96,
        0.15,
        "of 6 kernels alone over the shape rule, median (facebookexperimental/triton pull request 740)",
        most=1.0,
    ),
    "linear.v100": FittedFigure(0.96, 0.2, "as A100; not measured", most=1.0),
    "libraries.2023": FittedFigure(
        0.9,
        0.1,
        "of linear.h100: products of CUDA 12.1 and before (torch up to 2.4), tuned for Hopper since then",
    ),
    "float8": FittedFigure(1.0, 0.08, "in a step, of what kernels alone are faster by than those of 16 bits"),
    "float8.b200": FittedFigure(
        1.0,
        0.08,
        "the same on Blackwell; 1.92 times kernels alone on B300 (Transformer Engine, gemm_profiling)",
    ),
    "batched": FittedFigure(0.8, 0.2, "of linear: thin products of heads"),
    "attention": FittedFigure(0.9, 0.1, "of the kernel alone, in a step"),
    "attention.b200": FittedFigure(
        1.0, 0.2, "of the kernel alone, in a step; alone on a machine whose products are slower than others'"
    ),
    "attention.gb300": FittedFigure(
        1.2,
        0.2,
        "of the same kernels: units for exponentials are twice as fast (Inside NVIDIA Blackwell Ultra)",
    ),
    "memory": FittedFigure(0.95, 0.08, "of a large copy", most=1.0),
    "launch.a100": FittedFigure(32e-6, 0.4, "25 to 40 us an op in eager mode (40: SimuMax, a100_pcie.json)"),
    "launch.h100": FittedFigure(0.75, 0.15, "of launch.a100: a host of a later generation"),
    "launch.h200": FittedFigure(
        0.75,
        0.15,
        "of launch.a100: a host of a later generation; four kernels in a loop take 12 to 20 us each there "
        "(measured/h200_kernels.csv), without a framework, autocast and a backward pass around them",
    ),
    "launch.b200": FittedFigure(0.65, 0.15, "of launch.a100: a host of a later generation"),
    "compiled": FittedFigure(0.5, 0.3, "of an eager launch: no dispatcher between kernels"),
    "eager_waiting": FittedFigure(
        32e-6,
        0.4,
        "of nanotron's, beside an H100: as an eager one, but its linear layers are functions of Python, both "
        "ways, which issue their collectives, its norms and rotary embeddings kernels of Triton, and some "
        "nine kernels of a layer are not counted",
    ),
    "tensor": FittedFigure(5e-6, 0.7, "a few calls of Python for each tensor"),
}
"""What is fitted. Shares are of what the device reaches at best (``Device.rates``)."""

_DAO = "24 figures, median, 26 % of the time forward (Dao 2023)"
ATTENTION = {
    "a100": (0.874, 0.768, f"FlashAttention-2: 216 TFLOP/s both ways, {_DAO}"),
    "h100": (
        0.469,
        0.412,
        "FlashAttention-2: 373 and 327 TFLOP/s, 21 kernels alone each way, median, on H200, the same "
        "processor (experiments/measured/h200_kernels_flash2.csv)",
    ),
    "h200": (0.820, 0.652, f"cuDNN: 683 and 543 TFLOP/s, 21 kernels alone each way, median ({MEASURED})"),
    "b200": (
        0.769,
        0.577,
        "cuDNN: 1,342 and 1,007 TFLOP/s, 32 kernels alone each way, median (SimuMax, b200_bf16_ceperm.json)",
    ),
    "v100": (0.450, 0.400, "assumption: no FlashAttention-2 on V100, xformers"),
}
"""Forward and backward, of the best product, at head size 128, endless sequences and many heads: what was
measured, over what shape leaves. H100 had 363 TFLOP/s both ways, 26 % of the time forward (Dao 2023); in a
step on one its kernels took 1.06 of what that and the fit said, forward 0.95 and backward 1.09
(measured/h100_step_kernels.csv)."""

ATTENTION |= dict.fromkeys(("gb200", "gb300"), ATTENTION["b200"])
_OLDER = {
    "flash1": (0.44, "FlashAttention-2 is 1.7 to 3.0 times as fast (Dao 2023, section 4.1): geometric mean"),
    "triton": (0.55, "FlashAttention-2 is 1.3 to 2.5 times as fast (Dao 2023, section 4.1): geometric mean"),
    "flash2": (1.0, "what the shares of attention are of"),
}
_FLASH2 = 0.573
_FLASH2_SOURCE = (
    "373 and 327 TFLOP/s of cuDNN's 683 and 543, 21 kernels alone each way, geometric mean "
    "(experiments/measured/h200_kernels_flash2.csv)"
)
_FLASH3_SOURCE = "1.5 to 2.0 times forward, 1.5 to 1.75 backward (Shah et al. 2024): geometric means"
KERNELS: dict[str, dict[str, tuple[float, str]]] = {
    "a100": {**_OLDER, "cudnn": (1.0, "assumption: as FlashAttention-2; not measured")},
    "h100": {
        **{name: (share, f"{source}, on A100") for name, (share, source) in _OLDER.items()},
        "flash3": (1.65, _FLASH3_SOURCE),
        "cudnn": (round(1 / _FLASH2, 2), "as on H200, the same processor"),
    },
    "h200": {
        **{
            name: (round(_FLASH2 * share, 3), f"{share:g} of flash2: {source}, on A100")
            for name, (share, source) in _OLDER.items()
        },
        "flash2": (_FLASH2, _FLASH2_SOURCE),
        "flash3": (round(1.65 * _FLASH2, 3), f"1.65 of flash2: {_FLASH3_SOURCE}"),
        "cudnn": (1.0, "what the shares of attention are of"),
    },
    "b200": {"cudnn": (1.0, "what the shares of attention are of")},
    "v100": {},
}
"""How fast kernels of attention are, 1 being what ATTENTION gives."""
KERNELS |= dict.fromkeys(("gb200", "gb300"), KERNELS["b200"])

MEASURED8 = "of kernels alone, the best shapes of the MAMF table (stas00/ml-engineering)"
FLOAT8 = {
    "h100": (1402.6 / 794.5, f"1,402.6 and 794.5 TFLOP/s {MEASURED8}"),
    "h200": (1.93, f"1,365 and 707 TFLOP/s over the shape rule, 27 kernels alone of each ({MEASURED})"),
    "b200": (3432.5 / 1745.0, f"3,432.5 and 1,745 TFLOP/s {MEASURED8}"),
    "a100": (1402.6 / 794.5, "taken over from H100; not measured"),
    "v100": (1402.6 / 794.5, "taken over from H100; not measured"),
}
"""How many times as fast as those of 16 bits products of 8 bits are, whose peak is twice as high; casts are
kernels of their own. On H100 at 500 W products of 8,192 and 65,536 rows with scales of rows were 1.88, 1.92
and 2.09 times as fast (pytorch/FBGEMM, pull request 2546)."""
FLOAT8 |= dict.fromkeys(("gb200", "gb300"), FLOAT8["b200"])
SAME_PROCESSOR = {"h200": "h100"}
"""Kinds of GPU whose linear products have the speed of those of another, but for a factor near 1."""
EMBEDDING = 0.5
"""Rows picked by index, of a large copy: assumption, not measured."""


ALIKE = {"gb200": "b200", "gb300": "b200"}
"""Kinds of GPU that have the figures of another where they have none of their own."""


def figure(name: str, family: str) -> str:
    """Return which figure of a name a kind of GPU has: one of its own, or that of all."""
    own = (f"{name}.{each}" for each in (family, ALIKE.get(family, family)))
    return next((each for each in own if each in FIGURES), name)


@cache
def best_product(family: str) -> float:
    """Return what share of the peak the best product of a kind of GPU reaches, of which ``linear`` is one."""
    (preset,) = [name for name, written in WRITTEN.items() if written == family]
    return load_cluster(preset).devices[0].flops_efficiency


def rates_of(
    values: Mapping[str, float], family: str, device: Device, old_libraries: bool = False
) -> KernelRates:
    """Return the figures of a kind of GPU; ``old_libraries``: before its products were tuned."""
    linear = values[f"linear.{family}"] * (values["libraries.2023"] if old_libraries else 1.0)
    if family in SAME_PROCESSOR:
        other = SAME_PROCESSOR[family]
        linear *= values[f"linear.{other}"] * best_product(other) / best_product(family)
    forward, backward, _ = ATTENTION[family]
    host = values.get(figure("launch", family), 1.0) if family != "a100" else 1.0
    launch = values["launch.a100"] * host
    attention, float8 = values[figure("attention", family)], values[figure("float8", family)]
    shares = {
        "linear": linear,
        "linear_float8": linear * FLOAT8[family][0] * float8 / 2,
        "batched": linear * values["batched"],
        "attention": forward * attention,
        "attention_grad": backward * attention,
        "memory": values["memory"],
        "embedding": values["memory"] * EMBEDDING,
    }
    return replace(
        device.rates,
        shares=tuple([(kind, min(share, 1.0)) for kind, share in shares.items()]),
        launches=(
            *(("eager", launch), ("fused", launch)),
            ("compiled", launch * values["compiled"]),
            ("eager_waiting", values["eager_waiting"] * host / values["launch.h100"]),
        ),
        tensor=values["tensor"],
        attentions=tuple([(kernel, factor) for kernel, (factor, _) in KERNELS[family].items()]),
        uncertainties=(),
    )


@dataclass(frozen=True)
class FittedFigures:
    """Figures that were fitted to ``tables``, and how well they are known.

    ``covariance`` [figures, figures] is that of their logarithms, in the order of ``values``;
    ``spread`` is by how much steps differ beside that, a standard deviation of the logarithm.
    """

    values: Mapping[str, float]
    covariance: npt.NDArray[np.float64]
    spread: float
    tables: str

    def uncertainty(self, *names: str) -> float:
        """Return the standard deviation of the logarithm of a product of figures."""
        chosen = [place for place, name in enumerate(self.values) if name in names]
        return math.sqrt(self.covariance[np.ix_(chosen, chosen)].sum())

    def uncertainties(self, family: str) -> dict[str, float]:
        """Return how well the seconds of each kind of work are known on a kind of GPU."""
        products = [f"linear.{name}" for name in (family, SAME_PROCESSOR.get(family)) if name]
        linear = self.uncertainty(*products)
        attention, memory = self.uncertainty(figure("attention", family)), self.uncertainty("memory")
        launch = "launch.a100", figure("launch", family)
        return {
            **dict.fromkeys(("linear", "grouped"), linear),
            "linear_float8": self.uncertainty(*products, figure("float8", family)),
            "batched": self.uncertainty(*products, "batched"),
            **dict.fromkeys(("attention", "attention_grad"), attention),
            **dict.fromkeys(("memory", "embedding"), memory),
            "host": self.uncertainty(*launch),
            "host_compiled": self.uncertainty(*launch, "compiled"),
            "host_eager_waiting": self.uncertainty("eager_waiting"),
        }


def write_presets(fitted: FittedFigures) -> None:
    """Put the figures into the presets that give them, and what old libraries keep, in place of the old."""
    unknown = [name for name in WRITTEN if name not in preset_names()]
    assert not unknown, unknown
    about = f"fitted to {fitted.tables} by experiments/calibrate.py, {date.today().isoformat()}"
    spread = f'spread = {{ value = {fitted.spread:.3g}, unit = "1", source = "{SPREAD_SOURCE}{about}" }}'
    for name, family in WRITTEN.items():
        path = PRESETS / f"{name}.toml"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\n*# What kernels reach.*", "", text, flags=re.DOTALL)
        text = re.sub(r"^spread = .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^(processors = .*\n)", rf"\1{spread}\n", text, flags=re.MULTILINE)
        lines = "\n".join(
            [*preset_lines(fitted.values, family, about), *uncertainty_lines(fitted, family, about)]
        )
        path.write_text(f"{text.rstrip()}\n\n{lines}\n", encoding="utf-8")
        print(f"written: {path}")
    text = ROWS_OF_MACHINES.read_text(encoding="utf-8")
    share = f"OLD_LIBRARIES = {fitted.values['libraries.2023']:.3f}"
    ROWS_OF_MACHINES.write_text(
        re.sub(r"^OLD_LIBRARIES = [0-9.]+", share, text, flags=re.M), encoding="utf-8"
    )
    print(f"written: {ROWS_OF_MACHINES}")


def uncertainty_lines(fitted: FittedFigures, family: str, about: str) -> Iterable[str]:
    """Yield the lines of a preset that say how well its figures are known."""
    yield ""
    yield "# How far the seconds of each kind of work, and of launches, may be from these figures."
    yield "[device.uncertainty]"
    for kind, deviation in fitted.uncertainties(family).items():
        yield f'{kind} = {{ value = {deviation:.3g}, unit = "1", source = "{UNCERTAINTY_SOURCE}{about}" }}'


def preset_lines(values: Mapping[str, float], family: str, about: str) -> Iterable[str]:
    """Yield the lines of a preset that give the figures of a kind of GPU."""
    rates = rates_of(values, family, Device(0, "gpu"))
    attention, float8 = values[figure("attention", family)], values[figure("float8", family)]
    sources = {
        "linear": about,
        "linear_float8": f"{FLOAT8[family][0] * float8:.2f} times the speed of linear: "
        f"{FLOAT8[family][1]}, times {float8:.3g}, {about}",
        "batched": about,
        "attention": f"{ATTENTION[family][2]}, times {attention:.3g}, {about}",
        "attention_grad": f"{ATTENTION[family][2]}, times {attention:.3g}, {about}",
        "memory": about,
        "embedding": f"assumption: memory times {EMBEDDING}; not measured",
    }
    yield "# What kernels reach in a step, of what is reached at best; the host's time to issue one."
    yield "[device.kernels]"
    for kind, share in rates.shares:
        yield f'{kind} = {{ value = {share:.3g}, unit = "1", source = "{sources[kind]}" }}'
    yield ""
    if KERNELS[family]:
        yield "# How fast kernels of attention are, of what the shares above say."
        yield "[device.attention]"
        for kernel, (factor, source) in KERNELS[family].items():
            yield f'{kernel} = {{ value = {factor}, unit = "1", source = "{source}" }}'
        yield ""
    yield "[device.launches]"
    for way, seconds in (*rates.launches, ("tensor", rates.tensor)):
        yield f'{way} = {{ value = {seconds * 1e6:.3g}, unit = "us", source = "{about}" }}'
