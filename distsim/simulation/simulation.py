"""The result of a simulation; every figure is computed when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any

from distsim.cost.cost_model import CostModel
from distsim.cost.efficiency import matrix_type
from distsim.errors import SimulationError
from distsim.extras import data_frame
from distsim.ir import Device, Function, Op
from distsim.ir.dead import brings_backward
from distsim.ops import op_label
from distsim.program.program import Program
from distsim.schedule.refusals import count
from distsim.simulation.explain.breakdown import breakdown
from distsim.simulation.explain.critical_path import CriticalPath
from distsim.simulation.explain.explain import explain
from distsim.simulation.explain.explanation import Explanation
from distsim.simulation.explain.interval import Interval, correction, interval_of
from distsim.simulation.explain.text import html_table, rate_text, seconds_text
from distsim.simulation.explain.walk import critical_path
from distsim.simulation.memory.host import host_memory, program_host_memory
from distsim.simulation.memory.peak import MemoryUse, fullest_device, peak_memory, saved_on
from distsim.simulation.memory.program_memory import ProgramMemory
from distsim.simulation.quantities import bytes_label
from distsim.simulation.steady_state import memory_of_ranks, microbatch_time, program_notes, step_period
from distsim.simulation.tasks.by_device import ByDevice, device_named
from distsim.simulation.tasks.rank_classes import RankClasses
from distsim.simulation.tasks.spans import Shares, Span, shares_of, spans_of
from distsim.simulation.tasks.timeline import FlatTimeline, Timeline
from distsim.simulation.trained_step import PeakRate, PlannedStep, op_flops


class Simulation:
    """When every task starts and ends, and what follows from it. Times in seconds.

    The step time and the devices' last ends are there at once; ``trace``, ``spans`` and ``shares`` are
    expanded from the timeline when they are asked for.

    >>> import distsim
    >>> step = distsim.simulate("mlp:layers=4,width=64", "dgx-a100", plan="dp=2", batch=16, kernels="ops")
    >>> step
    Simulation(mlp:layers=4,width=64 on dgx-a100, dp=2,tp=1,pp=1,...; 131.9 us a step; 121,274 samples/s ...)
    >>> sorted(step.breakdown("phase"))
    ['backward', 'forward', 'update']
    """

    def __init__(
        self,
        timeline: Timeline,
        simulated: Function | Program,
        cost_model: CostModel,
        again: Callable[[CostModel], Simulation],
        flat: Callable[[], FlatTimeline],
        longer: Callable[[int], Simulation] | None = None,
    ) -> None:
        self.timeline = timeline
        self.simulated = simulated
        self.cost_model = cost_model
        self.again = again
        """Simulate the same with other costs: for what-ifs."""
        self.flat = flat
        """Return the timeline of the tasks one by one; a program is written out for it."""
        self.longer = longer
        """Simulate a program over another number of microbatches; None for a function."""
        self.step: PlannedStep | None = None
        """What it is a step of, if that was said: for throughput and MFU."""
        self.own_runs: Sequence[float] = ()
        """Measured over predicted seconds of other steps on the same machine, if some were told."""

    @property
    def name(self) -> str:
        """The name of the function or program that was simulated."""
        return self.timeline.name

    @cached_property
    def function(self) -> Function:
        """The function that was simulated, with its types; a program written out."""
        simulated = self.simulated
        return simulated.to_function(steady=True) if isinstance(simulated, Program) else simulated

    @cached_property
    def classes(self) -> RankClasses:
        """The rank classes that were simulated, and their devices."""
        return self.timeline.classes

    @cached_property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return self.timeline.step_time

    @cached_property
    def microbatch_time(self) -> float | None:
        """Seconds of each further microbatch once the pipeline is full; None for a step that ends in a flush.

        Without a flush the next step follows at once, and filling and draining the pipeline is not a part of
        it: see :func:`distsim.simulation.steady_state.microbatch_time`, a mean, for how it is found and how
        far off it may be. Raises :class:`ScheduleError` for a table that is not of the catalogue.
        """
        program, run = self.simulated, self.longer
        if not isinstance(program, Program) or run is None:
            return None
        return microbatch_time(program.schedule, lambda count: run(count).step_time)

    @cached_property
    def step_period(self) -> float:
        """Seconds from a step to the next, which each rank begins as it ends its own: see
        :func:`distsim.simulation.steady_state.step_period`. Without a flush that of all microbatches."""
        if not isinstance(self.simulated, Program):
            return self.step_time
        each = self.microbatch_time
        return step_period(self.timeline) if each is None else each * self.simulated.schedule.num_microbatches

    @property
    def corrected_period(self) -> float | None:
        """:attr:`step_period` as :attr:`own_runs` correct it; None without any."""
        return self.step_period * correction(self.own_runs) if self.own_runs else None

    @cached_property
    def timestamps(self) -> Mapping[Device, float]:
        """When each device ends its last task; 0.0 if it has none."""
        ends: list[float] = self.timeline.ends.tolist()
        of = self.classes.of
        return ByDevice({device: ends[of[device]] for device in sorted(of, key=lambda d: d.id)})

    def throughput(self, samples: float) -> float:
        """Samples per second, for a step over this many samples, by :attr:`step_period`."""
        if not samples > 0:
            raise SimulationError(f"samples={samples}: a step processes at least one")
        if not self.step_period > 0:
            raise SimulationError(f"{self.name} takes {self.step_period} s; it has no throughput")
        return samples / self.step_period

    def spans(self) -> Iterator[Span]:
        """Yield the spans of every rank class in the order of issue; a Send is one on each end."""
        return spans_of(self.timeline)

    @cached_property
    def trace(self) -> list[dict[str, Any]]:
        """One event per op and device, a Send one on each end.

        Each has the keys name (of the operator, or of those that a kernel runs), ts and dur (seconds),
        device, stream, path and op.
        """
        members = self.classes.members
        return [
            {
                "name": op_label(span.op),
                "ts": span.start,
                "dur": span.end - span.start,
                "device": device,
                "stream": span.stream.name,
                "path": span.path,
                "op": span.op,
            }
            for span in self.spans()
            for device in members[span.stream.rank_class]
        ]

    def shares(self, device: Device | str) -> Shares:
        """Return how a device spends the step; it may be said by its name, ``"gpu:0"``."""
        return shares_of(self.timeline, self.class_of(device))

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of tasks that takes the whole step."""
        return critical_path(self.timeline, self.simulated)

    def breakdown(self, by: str = "kind") -> Mapping[str, float]:
        """Return what the seconds of the step consist of, most first, along its critical path.

        ``by`` is ``kind`` (of work), ``operator``, ``module``, ``phase`` or ``axis``: see
        :func:`distsim.simulation.explain.breakdown.breakdown`.
        """
        return breakdown(self.timeline, self.simulated, by)

    def interval(self, level: float = 0.9, own: Sequence[float] = ()) -> Interval | None:
        """Return between which seconds a measured :attr:`step_period` lies with a probability of ``level``.

        ``own``: measured over predicted seconds of other steps on the same machine, which correct and narrow
        it (:func:`distsim.simulation.explain.interval.correction`). None where it is not known how far steps
        on such devices are from predicted ones, or where the host's time is not among the costs: a bound
        then, not a prediction.
        """
        devices = list(self.timestamps)
        if not self.cost_model.kernels or not devices or not all(d.rates.spread for d in devices):
            return None
        rates = max([device.rates for device in devices], key=lambda each: each.spread)
        known = dict(rates.uncertainties)
        if (host := known.get(f"host_{self.cost_model.kernels}")) is not None:
            known["host"] = host
        return interval_of(self.step_period, rates.spread, self.breakdown("kind"), level, own, known)

    def explain(self) -> Explanation:
        """Return what bounds the step and what would gain how much; ``print`` it.

        Takes about as long as simulating a dozen times.
        """
        return explain(self)

    @cached_property
    def memory(self) -> Mapping[Device, MemoryUse]:
        """The peak of the memory in use on each device, or by its name, and what it consists of.

        Without a flush it is that of the steady state, as the throughput is: a step that is too short to fill
        the pipeline is looked at with more microbatches, their data included. Counted in the order of calls;
        where a schedule copies to the host beside computation, over time, if that is more. Raises
        :class:`ScheduleError` for a step too short of a table that is not of the catalogue.
        """
        ranks = self.rank_memory
        return ByDevice(peak_memory(self.function) if ranks is None else ranks.devices)

    @cached_property
    def rank_memory(self) -> ProgramMemory | None:
        """:attr:`memory` by pipeline rank; None for a function."""
        return memory_of_ranks(self)

    def saved_by_module(self, device: Device | str) -> Mapping[str, int]:
        """Return what the activations of :attr:`memory` on a device, or by its name, are: bytes by module.

        The modules are those in the names of ops, as ``h.attention``, numbers left out; ``other`` is what ops
        without such a name compute, gradients on their way among it.
        """
        device = device_named(device, self.timestamps)
        ranks = self.rank_memory
        return saved_on(self.function, device) if ranks is None else ranks.saved_by_module(device)

    @property
    def peak_memory(self) -> dict[Device, int]:
        """Bytes in use on each device at its peak: see :attr:`memory`."""
        ranks = self.rank_memory
        return ByDevice(ranks.peak_of_devices() if ranks else {d: use.peak for d, use in self.memory.items()})

    @cached_property
    def host_memory(self) -> Mapping[Device, int]:
        """Bytes of its host's memory that each device takes at its peak, for what is offloaded.

        Of the same step as :attr:`memory`. What a host has is not known here: ``fits`` is of devices.
        """
        ranks = self.rank_memory
        return ByDevice(host_memory(self.function) if ranks is None else program_host_memory(ranks.program))

    @property
    def fits(self) -> bool:
        """Whether no device needs more memory than is usable of it (:attr:`Device.usable`)."""
        return all(use.fits(device) for device, use in self.memory.items())

    @cached_property
    def _of_program(self) -> tuple[str, ...]:
        return program_notes(self.simulated) if isinstance(self.simulated, Program) else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: what was assumed, of the program, its memory, and its costs."""
        step, uncosted = self.step, ", ".join(self.cost_model.uncosted)
        last = [f"costed by their bytes for want of a work rule: {uncosted}"] if uncosted else []
        return (*(step.notes if step else ()), *self._of_program, *last)

    @cached_property
    def flops(self) -> float:
        """FLOPs executed in the step on all devices, with what is recomputed or replicated.

        Ranks of experts do in lock step what the busiest does: their waiting for it counts as its work.
        Over time and peak it gives the hardware utilisation (HFU); MFU wants the model's own FLOPs.
        """
        return float(sum(op_flops(op) * times for op, times in self._counted))

    @cached_property
    def _counted(self) -> list[tuple[Op, int]]:
        return [(op, len(self.classes.members[c]) * times) for op, c, times, _ in self.timeline.op_runs]

    @property
    def peak_rate(self) -> PeakRate:
        """The FLOP/s that utilisation is a share of, in the type of most products of the model, or run."""
        return PeakRate.of((self.step and self.step.dtype) or matrix_type(self._counted), [*self.timestamps])

    @property
    def mfu(self) -> float:
        """The share of :attr:`peak_rate` that the FLOPs of the model itself reach; 0 where there are none.

        Raises :class:`SimulationError` where it is not known what was simulated: see :attr:`known_step`.
        """
        return self.peak_rate.share(self.known_step.flops, self.step_period)

    @property
    def hfu(self) -> float:
        """The share of :attr:`peak_rate` that all that kernels do reaches."""
        return self.peak_rate.share(self.flops, self.step_period)

    @property
    def samples_per_second(self) -> float:
        """Samples per second by :attr:`step_period`; raises as :attr:`mfu`."""
        return self.throughput(self.known_step.samples)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on all devices, samples where there are no tokens; raises as :attr:`mfu`."""
        return self.throughput(self.known_step.tokens)

    @property
    def known_step(self) -> PlannedStep:
        """What it is a step of: :func:`distsim.simulate` knows, a :class:`Simulator` has to be told.

        Raises :class:`SimulationError` where nobody said.
        """
        if self.step is None:
            raise SimulationError(
                f"{self.name}: a Simulator is not told the samples of a step and the model's FLOPs; use "
                "distsim.simulate, or throughput(samples) and distsim.interpret.count_model_flops"
            )
        return self.step

    @property
    def trains(self) -> bool:
        """Whether a backward pass is among what was simulated; else it is a forward pass alone."""
        simulated = self.simulated
        if isinstance(simulated, Program):
            return any(backward.function.ops for _, backward, _ in simulated.parts.blocks)
        ops = [each.op for each in self.timeline.op_runs]
        return any(op.op_type.endswith("Grad") for op in ops) or brings_backward(simulated)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as what JSON has; those of the step and its speed are None where not known."""
        step, interval = self.step, self.interval()
        corrected = self.interval(own=self.own_runs) if self.own_runs else None
        fullest = fullest_device(self.peak_memory)
        use = None if fullest is None else self.memory[fullest]
        return {
            "model": self.name if step is None else step.name,
            "cluster": None if step is None else step.cluster,
            "plan": None if step is None else step.plan,
            "training": self.trains,
            "devices": len(self.timestamps),
            "samples": None if step is None else step.samples,
            "tokens": None if step is None or not step.sequence else step.tokens,
            "step_s": self.step_period,
            "makespan_s": self.step_time,
            "low_s": None if interval is None else interval.low,
            "high_s": None if interval is None else interval.high,
            "own_runs": list(self.own_runs),
            "corrected_step_s": self.corrected_period,
            "corrected_low_s": None if corrected is None else corrected.low,
            "corrected_high_s": None if corrected is None else corrected.high,
            "samples_per_s": None if step is None else self.samples_per_second,
            "tokens_per_s": None if step is None or not step.sequence else self.tokens_per_second,
            "mfu": None if step is None else self.mfu,
            "hfu": self.hfu,
            "peak_flops_per_s": self.peak_rate.total,
            "dtype": self.peak_rate.dtype,
            "fits": self.fits,
            "peak_bytes": None if use is None else use.peak,
            "fullest_device": None if fullest is None else str(fullest),
            "usable_bytes": None if fullest is None or fullest.usable == inf else fullest.usable,
            "memory_bytes": {} if use is None else dict(use.by_kind),
            "host_bytes": max(self.host_memory.values(), default=0),
            "critical_path_s": dict(self.breakdown()),
            "notes": list(self.notes),
        }

    def to_pandas(self) -> Any:
        """Return the figures as a row of a table, without those that are tables themselves.

        Several go below each other with ``pandas.concat``. Raises :class:`MissingExtraError` without pandas.
        """
        return data_frame([{name: v for name, v in self.to_dict().items() if not isinstance(v, dict | list)}])

    def __repr__(self) -> str:
        return f"Simulation({'; '.join(value for _, value in self._headline())})"

    def _repr_html_(self) -> str:
        return html_table(("", ""), self._headline())

    def _headline(self) -> list[tuple[str, str]]:
        """Return the figures that people ask for first, with their names."""
        step = self.step
        what = "" if self.trains else ", a forward pass"
        devices = count(len(self.timestamps), "device")
        if step is None:
            return [("step", f"{self.name}{what}, {devices}"), ("time", seconds_text(self.step_time))]
        rate = self.tokens_per_second if step.sequence else self.samples_per_second
        fullest = fullest_device(peaks := self.peak_memory)
        memory = "no memory" if fullest is None else f"{bytes_label(peaks[fullest])} on {fullest}"
        return [
            ("step", f"{step}{what}"),
            ("time", f"{seconds_text(self.step_period)} a step"),
            ("speed", f"{rate_text(rate)} {step.unit}/s on {devices}"),
            ("utilisation", f"{self.mfu:.1%} MFU of {self.peak_rate}"),
            ("memory", f"{memory}, {'fits' if self.fits else 'OUT OF MEMORY'}"),
        ]

    def class_of(self, device: Device | str) -> int:
        """Return the rank class of a device, or of a name; raise :class:`UnknownDeviceError` for others."""
        of = self.classes.of
        return of[
            device_named(device, self.timestamps) if isinstance(device, str) or device not in of else device
        ]
