"""Published steps as what calibrate.py fits to: laid out once, over processes that simulate them again."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Self

import numpy as np
import numpy.typing as npt
from calibrated_figures import FAMILIES, FIGURES, rates_of

from distsim.cost import CostModel
from distsim.cost.demand import Group
from distsim.errors import DistsimError
from distsim.ir import Device
from distsim.ops import Signature
from distsim.program.program import Program
from distsim.simulation import Simulator
from distsim.simulation.explain.interval import deviations
from distsim.transforms.kernels.policies import kernels_named
from distsim.truth import Row, case_of
from distsim.truth.case import Case
from distsim.truth.prediction import program_of
from distsim.truth.score import measured, source_of

Floats = npt.NDArray[np.float64]
ROWS_A_SOURCE = 12
"""As how many rows those of a source count at most."""


class TrialCosts(CostModel):
    """The costs on devices with other figures."""

    def __init__(self, case: Case, values: Mapping[str, float]) -> None:
        super().__init__(case.topology(), kernels=kernels_named(case.kernels).way)
        self._values, self._family = values, FAMILIES[case.cluster.name.partition(":")[0]]
        self._old_libraries = case.cluster.old_libraries
        self._devices: dict[Device, Device] = {}

    def seconds(self, signature: Signature, where: Group) -> float:
        """Seconds of a compute op on the devices as they are tried."""
        return super().seconds(signature, tuple([self._device(device) for device in where]))

    def launch_seconds(self, signature: Signature, device: Device) -> float:
        """Seconds of the host on the device as it is tried."""
        return super().launch_seconds(signature, self._device(device))

    def slowdown_seconds(self, signature: Signature, group: Group, device: Device) -> float:
        """Seconds that computation loses on the device as it is tried."""
        return super().slowdown_seconds(signature, group, self._device(device))

    def _device(self, device: Device) -> Device:
        found = self._devices.get(device)
        if found is None:
            rates = rates_of(self._values, self._family, device, self._old_libraries)
            found = self._devices[device] = replace(device, rates=rates)
        return found


Laid = tuple[Case, Program]


def lay_out(row: Row) -> Laid | str:
    """Return a row laid out, or why it cannot be."""
    try:
        case = case_of(row)
        if case.cluster.name.partition(":")[0] not in FAMILIES:
            return f"no figures are fitted for {case.cluster}"
        return case, program_of(case, CostModel(case.topology(), kernels=kernels_named(case.kernels).way))
    except DistsimError as error:
        return str(error)


def serve(rows: Sequence[Row], end: Connection) -> None:
    """Lay rows out, tell what is assumed of them, then answer figures with seconds until there are none."""
    warnings.simplefilter("ignore")
    laid = [lay_out(row) for row in rows]
    end.send([each if isinstance(each, str) else "" for each in laid])
    end.send([assumed_variance(each) for each in laid if not isinstance(each, str)])
    while (values := end.recv()) is not None:
        end.send([seconds_of(each, values) for each in laid if not isinstance(each, str)])
    end.close()


def assumed_variance(laid: Laid) -> float:
    """Return the variance of the logarithm of a step that kinds of work add to which nothing is fitted."""
    case, program = laid
    costs = CostModel(case.topology(), kernels=kernels_named(case.kernels).way)
    parts = Simulator(costs).simulate(program).breakdown("kind")
    return sum([each**2 for each in deviations(parts, {}).values()])


def seconds_of(laid: Laid, values: Mapping[str, float]) -> float:
    """Return the seconds of a step with these figures."""
    case, program = laid
    return Simulator(TrialCosts(case, values)).simulate(program).step_period


class Rows:
    """Rows, laid out over processes: those that can be, what was measured, and what figures predict.

    A context, at whose end the processes end. Without it they end with an error, EOFError, when this process
    does: daemons are ended only after the connections on which they wait.
    """

    def __init__(self, rows: Sequence[Row], workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        order = sorted(rows, key=lambda row: [row.get(column, "") for column in ("model", "batch")])
        size = -(-len(order) // workers)
        parts = [order[first : first + size] for first in range(0, len(order), size)]
        self._ends: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for part in parts:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(part, there), daemon=True)
            process.start()
            there.close()  # a process that dies is the end of what it sends then
            self._ends.append(here)
            self._processes.append(process)
        missing = [why for end in self._ends for why in end.recv()]
        self.left_out = [(row["id"], why) for row, why in zip(order, missing, strict=True) if why]
        self.rows = [row for row, why in zip(order, missing, strict=True) if not why]
        self.assumed = np.array([each for end in self._ends for each in end.recv()])
        self.measured = np.array([measured(row, "iter_time_s") or math.nan for row in self.rows])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for end in self._ends:
            with suppress(BrokenPipeError):  # of one that has died
                end.send(None)
            end.close()
        for process in self._processes:
            process.join()

    def predict(self, logs: Floats) -> Floats:
        """Return the seconds of each row for the logarithms of all figures over their priors."""
        values = figures_of(logs)
        for end in self._ends:
            end.send(values)
        return np.array([seconds for end in self._ends for seconds in end.recv()])


def figures_of(logs: Floats) -> dict[str, float]:
    """Return the figures whose logarithms over the priors these are."""
    return {name: each.prior * math.exp(log) for (name, each), log in zip(FIGURES.items(), logs, strict=True)}


def row_weights(rows: Rows) -> Floats:
    """Return how much each row counts: those of a source together as :data:`ROWS_A_SOURCE` at most."""
    counts = Counter(source_of(row) for row in rows.rows)
    return np.array([1 / max(1.0, counts[source_of(row)] / ROWS_A_SOURCE) for row in rows.rows])
