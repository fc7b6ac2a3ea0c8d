"""What the experiments share: the grid of DistIR's notebook, one simulated plan, tables and figures."""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distsim.compose import parallelize
from distsim.executor import Simulation, Simulator, infer_types
from distsim.executor.cost_model import CostModel
from distsim.ir import Device, Function, FunctionMaker, Topology
from distsim.ir.type import Float, Tensor
from distsim.models import gpt
from distsim.plan import Plan
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, differentiate, parallel_transform_3d, steady_state_transform

RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parents[1] / "tests" / "data"
T = TypeVar("T")


def options(description: str | None) -> argparse.Namespace:
    """Parse ``--small`` and ``--out``; small results go to a folder of their own."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, done in seconds")
    parser.add_argument("--out", type=Path, help="folder for what is written (default: results)")
    given = parser.parse_args()
    given.out = given.out or (RESULTS / "small" if given.small else RESULTS)
    given.out.mkdir(parents=True, exist_ok=True)
    return given


def progress(items: Sequence[T]) -> Iterator[T]:
    """Yield the items, and say on stderr which of them runs now."""
    start = time.perf_counter()
    for number, item in enumerate(items, 1):
        print(f"[{number}/{len(items)}, {time.perf_counter() - start:.1f} s] {item}", file=sys.stderr)
        yield item
    print(f"done, {time.perf_counter() - start:.1f} s", file=sys.stderr)


def cpu_seconds(work: Callable[[], T]) -> tuple[T, float]:
    """Return ``work()`` and the CPU seconds that it took in this process."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def warm_up(topology: Topology) -> None:
    """Load and compile the kernels: a tiny model, its plans simulated all the way and op by op."""
    cost_model = CostModel(topology)
    function = differentiate(gpt(4, 16, 2, 4, 32, 8), Adam())
    for schedule in ("1f1b", "gpipe"):
        program = parallelize(function, Plan(1, 1, 2, 16, schedule), topology)
        simulation = Simulator(cost_model).simulate(program)
        next(simulation.timeline.pieces())
        max(program_memory(program).peaks)
        step = program.to_function(steady=True)
        max(Simulator(cost_model).interpret(step, step.inputs).peak_memory.values())


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, all with the keys of the first, and name the file on stdout."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _text(value) for key, value in row.items()} for row in rows)
    print(f"table: {path}")


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def read_csv(path: Path) -> list[dict[str, float | str]]:
    """Read a table; a cell that is a number becomes one. Lines that start with # are skipped."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = (line for line in file if not line.startswith("#"))
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(lines)]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def panels(columns: int, width: float, height: float, **shared: Any) -> tuple[Any, list[Any]]:
    """Return a figure and its row of axes, with a light grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **shared)[0].tolist()
    for axis in axes:
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG and name the file on stdout."""
    figure.savefig(path, dpi=130, metadata={"Software": None})
    print(f"figure: {path}")


# What DistIR's notebook lays out, and how.


@dataclass(frozen=True)
class Layout:
    """Degrees of data, horizontal (tensor) and pipeline parallelism, and microbatches per replica."""

    dp: int
    hp: int
    pp: int
    microbatches: int


def layouts(num_devices: int, layers: int, batch: int) -> list[Layout]:
    """Return the grid: all powers of two with dp * hp * pp = ``num_devices`` where pp divides ``layers``.

    Without a pipeline there is one microbatch; with one there are 2, 4, ... microbatches, up to about
    the root of a replica's batch: 2^k for 1 <= k < floor(log2(batch / dp) / 2).
    """
    powers = [2**i for i in range(num_devices.bit_length())]
    found: list[Layout] = []
    for dp, hp in itertools.product(powers, powers):
        pp, rest = divmod(num_devices, dp * hp)
        if rest == 0 and pp in powers and layers % pp == 0:
            limit = (max(batch // dp, 1).bit_length() - 1) // 2
            choices = [1] if pp == 1 else [2**k for k in range(1, limit)]
            found += [Layout(dp, hp, pp, microbatches) for microbatches in choices]
    return found


def uniform_topology(num_workers: int, gbps: float = 200) -> Topology:
    """Return a device that holds the inputs and ``num_workers`` more, all pairs linked alike."""
    topology = Topology()
    for _ in range(num_workers + 1):
        topology.add_device("gpu")
    devices = topology.devices
    for i, first in enumerate(devices):
        for second in devices[i + 1 :]:
            topology.set_bandwidth(first, second, gbps)
    return topology


def joint_mlp(
    layers: int, width: int, batch: int, device: Device | None, learning_rate: float | None = None
) -> Function:
    """Return an MLP's forward and backward pass as one flat function, op by op: 4 * layers + 2 ops.

    With a learning rate, one SGD update per layer comes after them.
    """
    maker = FunctionMaker("mlp")
    square, rows = Tensor(Float(), (width, width), device), Tensor(Float(), (batch, width), device)
    x, target = maker.add_input_value("x", rows), maker.add_input_value("z", rows)
    weights = [maker.add_input_value(f"w{i}", square) for i in range(layers)]
    activations, products, changes = [x], [], []
    for weight in weights:
        products.append(maker.add_op("MatMul", inputs=[activations[-1], weight]))
        activations.append(maker.add_op("Relu", inputs=[products[-1]]))
    scale = {"N": batch}
    maker.add_op("Loss", inputs=[activations[-1], target], attributes=scale)
    gradient = maker.add_op("LossGrad", inputs=[activations[-1], target], attributes=scale)
    for activation, weight, product in reversed(list(zip(activations, weights, products, strict=False))):
        gradient = maker.add_op("ReluGrad", inputs=[product, gradient])
        gradient, change = maker.add_op("MatMulGrad", inputs=[activation, weight, gradient])
        changes.append(change)
    if learning_rate is not None:
        for weight, change in zip(weights, reversed(changes), strict=True):
            maker.add_op("SGDOptimizer", inputs=[weight, change], attributes={"lr": learning_rate})
    return maker.finalize()


def steady_step(function: Function, layout: Layout, devices: Sequence[Device]) -> Function:
    """Return one training step of ``layout`` in steady state, typed: the notebook's four calls."""
    step = parallel_transform_3d(function, layout.dp, layout.hp, layout.pp, devices, layout.microbatches)
    step, inputs = steady_state_transform(infer_types(step, step.inputs))
    return infer_types(step, inputs)


def simulate(step: Function, cost_model: CostModel, overlap: bool) -> Simulation:
    """Simulate a typed step."""
    return Simulator(cost_model, overlap=overlap).interpret(step, [value.type for value in step.inputs])


def communication_share(simulation: Simulation) -> float:
    """Return the notebook's measure: seconds of Sends and collectives over those of all ops."""
    moving = total = 0.0
    for event in simulation.trace:
        total += event["dur"]
        if event["name"] == "Send" or event["name"].startswith("MPI"):
            moving += event["dur"]
    return moving / total if total else 0.0
