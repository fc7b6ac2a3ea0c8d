"""What distsim predicts for a row: seconds of a step, the peak of memory as it is measured, what fits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from distsim.compose import parallelize
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.cost.roofline import BEST_SHAPE
from distsim.ir import Device
from distsim.program.program import Program
from distsim.simulation import Simulator
from distsim.simulation.explain.interval import Interval
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.steady_state import full_program, step_memory
from distsim.transforms.kernels.policies import kernels_named
from distsim.truth.case import Case
from distsim.truth.row import MissingFeatureError, Row, cell, plain

UNITS = {"gib": 2**30, "gb": 10**9}

FIRST_RANK = ("nanotron",)
"""Stacks that print the peak of the first rank alone (nanotron: helpers.py, ``log_throughput``)."""

PRINTS_RESERVED = ("nanotron",)
"""Frameworks whose tables of peaks have what torch has reserved, in GiB: of nanotron's best layouts
(docs/benchmark_summary.svg) those that are in its table of all runs have there ``Mem Res (GB)``, which is
``torch.cuda.max_memory_reserved() / 1024**3`` (helpers.py, ``log_throughput``)."""


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of a step, bytes in use on the device that is measured, and whether all of it fits.

    ``interval`` is where the measured seconds lie with 90 %; None where that is not known. ``best_shape`` are
    the seconds by the preset without its tables: kernels that all reach what their device reaches at best,
    and a host that takes no time.
    """

    seconds: float
    best_shape: float
    interval: Interval | None
    peak: int
    device: Device
    fits: bool


def program_of(case: Case, costs: CostModel) -> Program:
    """Return the step of a case, laid out and scheduled."""
    kernels = kernels_named(case.kernels)
    return parallelize(case.joint(), case.plan, case.topology(), costs, kernels=kernels)


def predict(case: Case) -> PredictedStep:
    """Return what a case takes, op by op in max-plus algebra: about a second, however many devices."""
    topology = case.topology()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)
        costs = CostModel(topology, kernels=kernels_named(case.kernels).way)
        program = program_of(case, costs)
        simulation = Simulator(costs).simulate(program)
        bare = Simulator(CostModel(topology, rules=BEST_SHAPE)).simulate(program)
    memory = step_memory(program_memory(full_program(program)), simulation)
    return PredictedStep(
        *(simulation.step_period, bare.step_period, simulation.interval()),
        *(memory.peaks[measured_rank(case, memory.peaks)], topology.devices[0], not memory.missing),
    )


def measured_rank(case: Case, peaks: Sequence[int]) -> int:
    """Return the pipeline rank whose peak a case measures: that of the highest, unless a stack prints one."""
    return 0 if case.stack.family in FIRST_RANK else peaks.index(max(peaks))


def measure_of(row: Row) -> tuple[str, int]:
    """Return what a peak is of, allocated, reserved or nvidia-smi, and the bytes of its unit.

    Of a row that does not say it is what is allocated, in GiB, or what is reserved, where a framework prints
    that (:data:`PRINTS_RESERVED`); so it is where GB or GiB is left open of what torch counts, whose tools
    divide by 2^30. Raises :class:`MissingFeatureError` for a unit that is neither.
    """
    text = re.sub(r"^gb(?=.*\btorch\b.*\bgb vs gib not stated)", "gib", cell(row, "mem_kind").lower())
    unit = re.match(r"gi?b\b", text) or re.search(r"\bgi?b\b", text)
    if text and not unit:
        raise MissingFeatureError(f"the unit of a peak {text!r:.60}")
    kind = "nvidia-smi" if "nvidia" in text else "reserved" if "reserved" in text else "allocated"
    framework = plain(row, "framework")
    if kind == "allocated" and "alloc" not in text and any(name in framework for name in PRINTS_RESERVED):
        kind = "reserved"
    return kind, UNITS[unit[0]] if unit else UNITS["gib"]


def shown_peak(peak: int, kind: str, device: Device) -> float:
    """Return the bytes that a measurement of a kind shows where ``peak`` bytes are in use.

    The allocator of a framework reserves what fragments on top; nvidia-smi shows the context of the driver
    and of the communication library as well.
    """
    if kind == "allocated":
        return peak
    reserved = peak * (1 + device.fragmentation)
    return reserved if kind == "reserved" else reserved + device.context
