"""What a simulation says, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from distsim.hardware.rank_axes import EXPERT
from distsim.ir import Device, Op
from distsim.ops import op_label, operator
from distsim.report.labels import ranks_label
from distsim.schedule.refusals import count
from distsim.simulation import Simulation
from distsim.simulation.explain.interval import Interval, clash, correction
from distsim.simulation.explain.text import rate_text, seconds_text, table
from distsim.simulation.memory.origins import grouped
from distsim.simulation.memory.peak import fullest_device
from distsim.simulation.quantities import bytes_label
from distsim.simulation.tasks.rank_classes import communicates

_MOST_ROWS = 32
_MOST_OPS = 10
_MOST_MODULES = 8


def summarize(
    simulation: Simulation,
    samples: float | None = None,
    model_flops: float | None = None,
    own: Sequence[float] = (),
) -> str:
    """Return a text: step time, speed, how each device spends the step, memory, and the top operators.

    ``samples`` is what one step processes; ``model_flops`` the FLOPs that the model itself needs for them
    (:func:`distsim.interpret.count_model_flops`), for the model utilisation (MFU). Both may be left out, and
    so are then the lines that need them. The hardware utilisation (HFU) is of all that kernels do: where they
    skip the pairs of query and key that a mask hides, it may be the lesser one. Throughput and utilisation
    are those of steps that follow each other (:attr:`Simulation.step_period`), in the steady state where
    there is no flush; all else, as the shares of the devices, is of a single step, in which the pipeline
    fills and drains. Where that takes longer, both are said. ``own`` are
    measured over predicted seconds of other steps on the same machine (by default
    :attr:`Simulation.own_runs`): lines say what these make of it, the others are without.
    """
    what = "" if simulation.trains else ", a forward pass: nothing is differentiated"
    lines = [f"{simulation.name}: {count(len(simulation.timestamps), 'device')}{what}"]
    lines += _step_time(simulation)
    if own := own or simulation.own_runs:
        lines += _corrected(simulation, own, samples, model_flops)
    if samples is not None and simulation.step_period > 0:
        steady = "" if simulation.microbatch_time is None else " in the steady state"
        lines.append(f"throughput    {simulation.throughput(samples):.6g} samples/s{steady}")
        lines += _tokens(simulation)
    lines += _utilisation(simulation, model_flops)
    lines += [
        *memory_lines(simulation),
        *_host_line(simulation),
        "",
        *_device_table(simulation),
        "",
        *_operator_table(simulation),
    ]
    return "\n".join(lines) + "\n"


def _step_time(simulation: Simulation) -> list[str]:
    """Say how long a step takes, and how soon the next one follows where that is sooner by half a percent."""
    each, interval = simulation.microbatch_time, simulation.interval()
    trust = "" if interval is None else _trust(interval)
    alone, period = seconds_text(simulation.step_time), seconds_text(simulation.step_period)
    if each is None and simulation.step_period > 0.995 * simulation.step_time:
        return [f"step time     {alone}{trust}"]
    if each is None:
        run, how = "the first start to the last end", "each rank begins the next one as it ends its part"
    else:
        run, how = "an empty pipeline to an empty one", "no flush between steps"
    rate = "" if each is None else f"{seconds_text(each)} a microbatch, "
    return [f"step time     {alone} from {run}", f"steady        {rate}{period}{trust} a step: {how}"]


def _tokens(simulation: Simulation) -> list[str]:
    """Say how many tokens a second that is, of a step that is known to have some."""
    step = simulation.step
    if step is None or not step.sequence:
        return []
    rate = simulation.tokens_per_second
    a_device = rate_text(rate / len(simulation.timestamps))
    return [f"tokens        {rate_text(rate)} tokens/s, {a_device} tokens/s a device"]


def _trust(interval: Interval) -> str:
    """Say between which seconds a measured step is to be expected."""
    return f" ({seconds_text(interval.low)} to {seconds_text(interval.high)}, {interval.level:.0%})"


def _corrected(
    simulation: Simulation, own: Sequence[float], samples: float | None, model_flops: float | None
) -> list[str]:
    """Say how long the step takes by what one's own steps took, and its speed then."""
    interval = simulation.interval(own=own)
    trust = "" if interval is None else _trust(interval)
    seconds = simulation.step_period * correction(own)
    runs = (
        f"{count(len(own), 'run')} took {math.exp(median(map(math.log, own))):.4g} times as long as predicted"
    )
    taken = f"{correction(own):.4g} times is taken, the nearer to it the more runs"
    lines = [f"own runs      {seconds_text(seconds)}{trust}: {runs}; {taken}"]
    if clash(own):
        lines[0] += (
            ". They do not fit what was predicted: look for what differs (plan, batch, kernels, cluster)"
        )
    speeds: list[str] = []
    if samples is not None and seconds > 0:
        speeds.append(f"{samples / seconds:.6g} samples/s")
        if simulation.step is not None and simulation.step.sequence:
            speeds.append(f"{rate_text(simulation.step.tokens / seconds)} tokens/s")
        if model_flops is not None and simulation.peak_rate.total:
            speeds.append(f"MFU {simulation.peak_rate.share(model_flops, seconds):.1%}")
    if speeds:
        lines.append(f"              that is {', '.join(speeds)}; what follows is not corrected")
    return lines


def _utilisation(simulation: Simulation, model_flops: float | None) -> list[str]:
    peak = simulation.peak_rate
    if not (peak.total and simulation.step_period > 0):
        return []
    shares = (
        ("MFU", model_flops, "the model's products, with pairs that a causal mask hides"),
        ("HFU", simulation.flops, f"all that kernels do{_as_the_busiest(simulation)}"),
    )
    return [
        f"{name}           {peak.share(flops, simulation.step_period):.1%} of {peak}: {counted}"
        for name, flops, counted in shares
        if flops is not None
    ]


def _as_the_busiest(simulation: Simulation) -> str:
    """Say of a step with experts on several ranks that all count as the busiest, for which they wait."""
    axes = {str(op.attributes.get("axis", "")) for op, *_ in simulation.timeline.op_runs if communicates(op)}
    return ", experts of each rank as those of the busiest" if EXPERT in axes else ""


def memory_lines(simulation: Simulation) -> list[str]:
    """Say whether a step fits in memory, and what takes it of the fullest device; then of which modules."""
    over = {d: use.missing(d) for d, use in simulation.memory.items() if not use.fits(d)}
    worst = fullest_device(simulation.peak_memory)
    if worst is None:
        return ["memory        none in use"]
    use = simulation.memory[worst]
    parts = ", ".join(f"{name} {bytes_label(n)}" for name, n in use.by_kind.items() if n)
    if over:
        memory = (
            f"memory        OUT OF MEMORY on {count(len(over), 'device')}: {worst} needs "
            f"{bytes_label(use.peak)}, {bytes_label(over[worst])} more than {_usable(worst)} ({parts})"
        )
    else:
        most = f"{bytes_label(use.peak)} on {worst}, of {_usable(worst)}"
        memory = f"memory        fits; the most is {most} ({parts})"
    return [memory, *_saved_lines(simulation, worst)]


def _saved_lines(simulation: Simulation, device: Device) -> list[str]:
    """Say from which modules the activations at the peak of a device are, if there are any."""
    total = simulation.memory[device].by_kind["activations"]
    if not total:
        return []
    modules = grouped(simulation.saved_by_module(device), _MOST_MODULES)
    parts = [f"{name} {bytes_label(nbytes)} ({nbytes / total:.0%})" for name, nbytes in modules.items()]
    return [f"activations   {', '.join(parts)}"]


def _host_line(simulation: Simulation) -> list[str]:
    """Say what is offloaded; nothing if nothing is."""
    most = max(simulation.host_memory.items(), key=lambda item: item[1], default=None)
    if most is None or not most[1]:
        return []
    return [f"host memory   the most is {bytes_label(most[1])} for {most[0]}, of activations"]


def _usable(device: Device) -> str:
    """Say what tensors can take of a device, and why it is less than there is."""
    if device.memory == math.inf:
        return "unlimited"
    usable = f"{bytes_label(device.usable)} usable"
    if device.usable == device.memory:
        return usable
    taken = f"{bytes_label(device.context)} for driver and libraries"
    return (
        f"{usable} ({bytes_label(device.memory)} less {taken}, {device.fragmentation:.0%} for fragmentation)"
    )


def _device_table(simulation: Simulation) -> list[str]:
    groups: list[tuple[list[Device], tuple[str, ...]]] = []
    for members in simulation.classes.members:
        row = _device_row(simulation, members[0])
        if groups and len(members) == 1 and groups[-1][1] == row:
            groups[-1][0].extend(members)  # each device on its own: neighbours that do the same share a row
        else:
            groups.append((list(members), row))
    header = ("devices", "busy", "exposed", "bubble", "peak memory", "usable")
    rows = [(ranks_label(devices), *row) for devices, row in groups]
    lines = table(header, rows[:_MOST_ROWS])
    return [*lines, f"... and {len(rows) - _MOST_ROWS} more rows"] if len(rows) > _MOST_ROWS else lines


def _device_row(simulation: Simulation, device: Device) -> tuple[str, ...]:
    shares = simulation.shares(device)
    total = simulation.step_time or 1.0
    use = simulation.memory.get(device)
    capacity = "unlimited" if device.memory == math.inf else bytes_label(device.usable)
    if use is not None and not use.fits(device):
        capacity += " OUT OF MEMORY"
    parts = (shares.busy, shares.exposed_communication, shares.bubble)
    return (*(f"{part / total:.1%}" for part in parts), bytes_label(use.peak if use else 0), capacity)


def _kind(op: Op) -> str:
    if communicates(op) or operator(op.op_type).stalls:
        return "communication"
    if operator(op.op_type).issues:
        return "launch"
    return "compute" if operator(op.op_type).computes else "host copy"


def _operator_table(simulation: Simulation) -> list[str]:
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    members = simulation.classes.members
    kinds: dict[str, str] = {}
    for op, rank_class, times, taken in simulation.timeline.op_runs:
        name, devices = op_label(op), len(members[rank_class])
        seconds[name] = seconds.get(name, 0.0) + taken * devices
        counts[name] = counts.get(name, 0) + times * devices
        kinds[name] = _kind(op)
    # Streams run beside each other: all shares are more than a whole together.
    total = simulation.step_time * sum(map(len, members)) or 1.0
    names = sorted(seconds, key=lambda name: -seconds[name])
    rows = [
        (
            name,
            kinds[name],
            str(counts[name]),
            seconds_text(seconds[name]),
            f"{seconds[name] / total:.1%}",
        )
        for name in names[:_MOST_OPS]
    ]
    lines = table(("operator", "kind", "runs", "device time", "of the step"), rows)
    return [*lines, f"... and {len(names) - _MOST_OPS} more"] if len(names) > _MOST_OPS else lines
