"""What a random function is checked against: its gradients, and a plan of it against one device.

Each check returns a :class:`Verdict`: ``equal``, ``refused`` with the reason, or ``wrong`` with what differs.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.compose import parallelize
from distsim.errors import DistsimError, PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator, count_flops
from distsim.hardware import load_cluster
from distsim.ir import Function, Topology
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import SCHEDULES
from distsim.simulation.memory.peak import peak_memory
from distsim.transforms import SGD, Adam, differentiate

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from training_models import assert_same_step, random_inputs

REMAT = (
    "full",
    "full_early",
    "every:2",
    "every_early:2",
    "attention",
    "ops:MatMul",
    "matmuls",
    "min_cut",
    "budget:0",
    "budget:0.5",
    "budget:1",
)
MOST_DEVICES = 16


@dataclass(frozen=True)
class Verdict:
    """What became of one check, and in words why."""

    outcome: str
    reason: str = ""


EQUAL = Verdict("equal")


# --- gradients ---------------------------------------------------------------------------------------


def check_gradients(function: Function, seed: int) -> Verdict:
    """Compare the gradient along a random direction with a difference quotient, over all parameters.

    The gradient is read off one step of SGD at rate 1. A quotient is off by its rounding and, where a
    function bends within the step, by more: one of three steps has to agree.
    """
    inputs = random_inputs(function, seed)
    try:
        joint = differentiate(function, SGD(lr=1.0))
    except PlanError as error:
        return refused(error)
    compute = SequentialExecutor().compute
    made = dict(
        zip([v.name for v in joint.outputs], compute(joint, given(joint, function, inputs)), strict=True)
    )
    rng = np.random.default_rng(seed + 1)
    total, moves = 0.0, list(inputs)
    for place, value in enumerate(function.inputs):
        if value in function.parameters:
            moves[place] = rng.normal(size=value.type.shape)
            new = made.get(f"{value.name}.new", inputs[place])
            total += float(((inputs[place] - new) * moves[place]).sum())

    def moved(step: float) -> float:
        arrays = [
            array + step * move if value in function.parameters else array
            for value, array, move in zip(function.inputs, inputs, moves, strict=True)
        ]
        return float(compute(function, arrays)[0])

    if not np.isfinite(total) or not np.isfinite(moved(0.0)):
        return Verdict("refused", "the function is not finite there")
    quotients = []
    for step in (1e-5, 1e-6, 1e-7):
        quotients.append((moved(step) - moved(-step)) / (2 * step))
        noise = 4e-16 * (1 + abs(moved(0.0))) / step
        if abs(quotients[-1] - total) <= 1e-5 * abs(total) + 10 * noise + 1e-9:
            return EQUAL
    return Verdict("wrong", f"the gradient gives {total}, difference quotients {quotients}")


def given(joint: Function, function: Function, inputs: list[Any]) -> list[Any]:
    """Return the arrays for the inputs of a joint function; what it dropped needs none."""
    known = {value.name: array for value, array in zip(function.inputs, inputs, strict=True)}
    return [known[value.name] for value in joint.inputs]


# --- plans -------------------------------------------------------------------------------------------


PROGRAMMED = [name for name in SCHEDULES if not name.startswith("pipedream")]
"""The schedules that compute what one device does: those with a flush."""


def random_plan(rng: Random, batch: int) -> Plan:
    """Return a random plan of at most 16 devices, with every field; few do not divide the batch."""
    while True:
        dp, tp, pp = (
            rng.choice((1, 1, 2, 2, 3, 4)),
            rng.choice((1, 1, 2, 2, 3, 4)),
            rng.choice((1, 2, 2, 3, 4, 5)),
        )
        microbatches = rng.choice((1, 1, 2, 2, 3, 4))
        if dp * tp * pp <= MOST_DEVICES and (batch % (dp * microbatches) == 0 or rng.random() < 0.03):
            break
    schedule = rng.choice(("1f1b", "gpipe", rng.choice(PROGRAMMED)))
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        microbatches=microbatches,
        schedule=schedule,
        chunks=SCHEDULES[schedule].stages_a_rank or rng.choice((1, 2, 3)),
        stages=rng.choice(("even",) * 6 + ("default", "auto")),
        remat=rng.choice(REMAT) if rng.random() < 0.6 else "none",
        zero=(zero := rng.choice((0, 0, 1, 2, 3, 3))),
        reshard=rng.choice(("always", "never")) if zero == 3 else "always",
    )
    # Of its own dice: what was wrong once is repeated by its seed.
    return replace(plan, sp="on") if tp > 1 and Random(f"sp {plan}").random() < 1 / 3 else plan


@cache
def cluster() -> tuple[Topology, CostModel]:
    """Return two nodes, and their costs."""
    topology = load_cluster("dgx-a100:2")
    return topology, CostModel(topology)


def check_plan(function: Function, plan: Plan, seed: int, tokens: NDArray[Any] | None = None) -> Verdict:
    """Compare the step of a plan, computed with NumPy over every rank, with one device's.

    ``tokens`` are the first input, which is random otherwise.

    Also: max-plus, one event per op, and the step written out take the same time and the same memory; the
    step runs no fewer FLOPs than the model has; and recomputation that saves no memory is noted.
    """
    rng = Random(seed)
    try:
        keep = [value.name for value in function.outputs[1:] if rng.random() < 0.5]
        joint = differentiate(function, rng.choice((SGD(lr=0.1), Adam(), None)), keep)
        inputs = random_inputs(joint, seed)
        if tokens is not None:
            inputs[0] = tokens
        expected = SequentialExecutor().compute(joint, inputs)
        if not all(np.isfinite(array).all() for array in expected):
            return Verdict("refused", "the function is not finite there")
        program = parallelize(joint, plan, cluster()[0])
    except PlanError as error:
        return refused(error)
    try:
        assert_same_step(joint, program, inputs, expected)
    except AssertionError as error:
        return Verdict("wrong", f"computes something else: {' '.join(str(error).split())[:300]}")
    verdict = compare_engines(program, count_flops(joint))
    if verdict is EQUAL and plan.remat != "none" and plan.stages == "even":
        verdict = compare_memory(program, parallelize(joint, replace(plan, remat="none"), cluster()[0]))
    return verdict


def compare_engines(program: Program, flops: float) -> Verdict:
    """Compare both engines and the step written out, in time and memory; ``flops`` are the model's own."""
    model = cluster()[1]
    whole = Simulator(model).simulate(program)
    if whole.flops < flops * (1 - 1e-9):
        return Verdict("wrong", f"the step runs {whole.flops} FLOPs, the model has {flops}: MFU is too high")
    events = Simulator(model, engine="events", lockstep=False).simulate(program)
    tolerance = 1e-9 * whole.step_time
    for device, end in events.timestamps.items():
        if abs(end - whole.timestamps[device]) > tolerance:
            return Verdict("wrong", f"max-plus ends {device} at {whole.timestamps[device]}, events at {end}")
    flat = program.to_function(steady=True)
    written = {device: use.peak for device, use in peak_memory(flat, program.parts.held).items()}
    different = {
        d: (whole.peak_memory[d], peak) for d, peak in written.items() if whole.peak_memory[d] != peak
    }
    if different:
        return Verdict("wrong", f"peak memory and that of the step written out: {different}")
    return EQUAL


def compare_memory(program: Program, saving_all: Program) -> Verdict:
    """Check that recomputation needs no more memory than none, or says that it does."""
    own, other = (Simulator(cluster()[1]).simulate(each) for each in (program, saving_all))
    more = max(own.peak_memory.values()) - max(other.peak_memory.values())
    if more > 0 and len(own.notes) == len(program.notes):
        return Verdict("wrong", f"recomputation needs {more} more bytes, and no note says so")
    return EQUAL


# --- what both do ------------------------------------------------------------------------------------


def refused(error: DistsimError) -> Verdict:
    """Return the verdict on an error of the library: its kind, without numbers and names."""
    text = re.sub(r"\[[^]]*\]|'[^']*'|\([^)]*\)", "_", str(error).split("; ")[0])
    text = re.sub(r"[-\w.]*\d[-\w.]*", "#", text)
    return Verdict("refused", f"{type(error).__name__}: {text[:140]}")


def checked(check: Callable[[], Verdict]) -> Verdict:
    """Return the verdict of a check; an error that is not the library's own is wrong."""
    try:
        return check()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return Verdict("wrong", f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}")
