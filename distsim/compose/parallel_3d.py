"""The calls of the DistIR notebooks: parallel_transform_3d, steady_state_transform, PipeDreamScheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distsim.cost.cost_model import CostModel
from distsim.errors import PlanError
from distsim.hardware.rank_axes import RankAxes
from distsim.ir import Device, Function, Op, Value, rewire_op, substitute
from distsim.ir.device import devices_of
from distsim.ir.type import Tensor
from distsim.models.sizes import check_sizes
from distsim.plan import Plan
from distsim.program.write_out import WrittenOut
from distsim.schedule import Schedule, one_f_one_b


@dataclass(frozen=True)
class PipeDreamScheduler:
    """1F1B with a flush (PipeDream-flush, Narayanan et al. 2021) over ``num_microbatches``.

    >>> PipeDreamScheduler(num_microbatches=4)
    PipeDreamScheduler(num_microbatches=4)
    """

    num_microbatches: int

    def schedule(self, num_stages: int) -> Schedule:
        """Return the order in which each of ``num_stages`` pipeline ranks runs its tasks."""
        return one_f_one_b(num_stages, self.num_microbatches)


def parallel_transform_3d(
    function: Function,
    dp_degree: int,
    hp_degree: int,
    pp_degree: int,
    devices: Sequence[Device],
    num_microbatches: int,
    cost_model: CostModel | None = None,
) -> Function:
    """Rewrite a joint function for data, horizontal (tensor) and pipeline parallelism, under 1F1B.

    ``devices`` are the workers, and before them may stand the device that holds the inputs (as in the
    notebooks); the first dp*hp*pp of those that hold no input are used, or, when there are too few of
    them, of all. Tensor-parallel neighbours come first, then data-parallel ones, then stages.
    ``cost_model`` says what work is even, by default that of the devices.

    Returns a flat Function that starts by distributing the inputs. Raises :class:`PlanError` naming
    the numbers when the degrees do not fit the devices, the batch or the function.

    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(mlp(layers=4, width=16, batch=8), SGD())
    >>> devices = load_cluster("dgx-a100").devices
    >>> parallel = parallel_transform_3d(step, 2, 1, 2, devices, num_microbatches=2)
    >>> sum(op.op_type == "Send" for op in parallel.ops) > 0
    True
    """
    from distsim.compose import build_program  # not before it is called: notebooks import both

    degrees = {"dp_degree": dp_degree, "hp_degree": hp_degree, "pp_degree": pp_degree}
    check_sizes(**degrees, num_microbatches=num_microbatches)
    for device in devices:
        if not isinstance(device, Device):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"{device!r} is not a Device; give devices of a Topology")
    needed = dp_degree * hp_degree * pp_degree
    holders = {d for v in function.inputs if isinstance(v.type, Tensor) for d in devices_of(v.type.device)}
    free = [device for device in devices if device not in holders]
    workers = (free if len(free) >= needed else list(devices))[:needed]
    if len(workers) < needed:
        raise PlanError(
            f"dp={dp_degree} x hp={hp_degree} x pp={pp_degree} needs {needed} devices, {len(devices)} given"
        )
    mesh = RankAxes.of(dp_degree, hp_degree).mesh(workers, pp_degree)
    # DistIR reduces each gradient by itself, after the backward pass.
    plan = Plan(dp_degree, hp_degree, pp_degree, num_microbatches, bucket="1B", overlap_grads="off")
    return build_program(function, mesh, plan, cost_model).to_function()


DISTRIBUTES = ("MPIBroadcast", "MPIScatter")


def steady_state_transform(function: Function) -> tuple[Function, tuple[Value, ...]]:
    """Return the function without its first distribution of inputs, and its inputs.

    In steady state parameters and data are where they are used: the scatters, broadcasts and splits
    that only bring function inputs there are dropped, and what they made becomes an input, of the
    same role. The function may be of any origin; one that distributes nothing is returned as it is.

    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(mlp(layers=4, width=16, batch=8), SGD())
    >>> parallel = parallel_transform_3d(step, 2, 1, 2, load_cluster("dgx-a100").devices, num_microbatches=2)
    >>> steady, inputs = steady_state_transform(parallel)
    >>> len(steady.ops) <= len(parallel.ops), len(inputs) == len(steady.inputs)
    (True, True)
    """
    if isinstance(function, WrittenOut):
        steady = function.program.to_function(steady=True)
        return steady, steady.inputs
    moved: dict[Value, Value] = {value: value for value in function.inputs}
    arrived: set[Value] = set()
    rest: list[Op] = []
    for op in function.ops:
        first = op.inputs[0] if op.inputs else None
        starts = op.op_type in DISTRIBUTES and first in moved
        if first is not None and (starts or ("microbatches" in op.attributes and first in arrived)):
            moved.update(dict.fromkeys(op.outputs, moved[first]))
            arrived.update(op.outputs)
        else:
            rest.append(op)
    if len(rest) == len(function.ops):
        return function, function.inputs
    made = {value for op in rest for value in op.outputs}
    read = dict.fromkeys([*(v for op in rest for v in op.inputs), *function.outputs])
    inputs = {v: replace(v, role=moved[v].role) for v in read if v not in made}
    ops = [rewire_op(op, inputs) for op in rest]
    outputs = substitute(function.outputs, inputs)
    steady = Function(function.name, tuple(inputs.values()), tuple(ops), outputs, function.notes)
    return steady, steady.inputs
