"""How a model is trained: what was asked for, and for the rest what the stack has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from distsim.errors import PlanError
from distsim.importer import is_decoder
from distsim.importer.configs import TrainingConfig
from distsim.ir import Function, Topology
from distsim.ir.kernel_rates import ATTENTION_KERNELS
from distsim.plan import Plan, parse_schedule
from distsim.plan.stacks import Stack, stack_named
from distsim.schedule import SCHEDULES
from distsim.study.options import Model, ModelOptions
from distsim.transforms.autodiff.optimizers import Named, optimizer_named
from distsim.transforms.autodiff.precision import Precision, precision_named
from distsim.transforms.kernels.policies import Kernels, kernels_named


@dataclass(frozen=True)
class Choices:
    """What is decided of a training but its loss, its model and its plan.

    ``stack`` has what a plan does not say, and before it ``file``, if a framework's file says how it is
    trained. ``assumed`` lists what was not asked for, as text.
    """

    precision: Precision | None
    attention: str | None
    kernels: Kernels
    optimizer: Named
    clip: float | None
    stack: Stack
    assumed: tuple[str, ...]
    file: TrainingConfig | None = None

    @staticmethod
    def of(options: ModelOptions, trains: bool = True) -> Choices:
        """Return the choices that options make, of a model that is trained or of its forward pass alone.

        Raises :class:`PlanError` for an unknown name.

        Where no stack is named it is ``torch`` for a training of what says nothing of its types
        (:func:`distsim.importer.is_decoder`), else ``plain``: a function, an export and what a builder makes
        are in the types in which they are written.
        """
        by_file = options.from_file is not None and options.stack is None
        assumed: list[str] = []
        asked = options.stack
        if options.from_file is not None and by_file:
            asked = options.from_file.stack
        elif asked is None and trains and _says_no_types(options.model):
            asked = "torch"
            assumed.append("stack torch")
        elif asked is None:
            asked = "plain"
        stack = asked if isinstance(asked, Stack) else stack_named(asked)

        def choice(name: str) -> Any:
            given, default = getattr(options, name), getattr(stack, name)
            if given is None and default is not None and not by_file:
                assumed.append(f"{name} {default}")
            return default if given is None else given

        precision, attention = choice("precision"), choice("attention")
        kernels, optimizer = choice("kernels"), choice("optimizer")
        policy = precision_named(precision) if isinstance(precision, str) else precision
        return Choices(
            None if policy is None else policy.of_stack(stack.scaling, stack.linear_ops),
            attention,
            kernels_named(kernels) if isinstance(kernels, str) else kernels,
            optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer,
            choice("clip") or None,  # 0, as Megatron-LM's --clip-grad 0: not at all
            stack,
            tuple(assumed),
            options.from_file,
        )

    def device_notes(self, topology: Topology) -> list[str]:
        """Say where devices have no rate for products in the type of the precision, or for the kernel of
        attention that is asked for, and where that is of another type."""
        return [*self._slow_types(topology), *self._unknown_kernel(topology)]

    def _slow_types(self, topology: Topology) -> list[str]:
        dtype = None if self.precision is None else self.precision.compute
        if dtype is None or dtype.itemsize > 2:
            return []
        without = [device for device in topology.devices if dtype.name not in dict(device.peaks)]
        if not without:
            return []
        rate, has = without[0].throughput / 1e12, dict(without[0].peaks)
        way = "; --precision mixed_fp16 is of a type for which it has one" if "float16" in has else ""
        return [f"{without[0]} has no rate for products in {dtype.name}, which run at {rate:g} TFLOP/s{way}"]

    def _unknown_kernel(self, topology: Topology) -> list[str]:
        kernel, notes = self.attention, list[str]()
        if kernel in ATTENTION_KERNELS and topology.devices[0].rates.attention(kernel) is None:
            notes.append(
                f"attention {kernel}: the cluster has no figure for it ([device.attention] of its file), so "
                "it takes as long as the usual kernel"
            )
        policy = self.precision
        if kernel in ("flash", *ATTENTION_KERNELS) and policy is not None and policy.compute.itemsize > 2:
            notes.append(f"attention {kernel}: such kernels take 16 bits; {policy.name} computes in more")
        return notes

    def plan(self, asked: str | Plan) -> Plan:
        """Return the plan of a text; what it leaves open the stack says. A plan is as it is.

        Raises :class:`PlanError` for a text that is none, and for a schedule of several stages a rank without
        ``chunks``, which would run as another.
        """
        if isinstance(asked, Plan):
            return asked
        plan, given = Plan.parse(asked), fields_given(asked)
        if "chunks" not in given and _asks_for_chunks(plan):
            raise PlanError(
                f"schedule={parse_schedule(plan.schedule)[0]} is of several stages a rank, and the plan does "
                "not say how many: add chunks=2, or chunks=1 for its order with one"
            )
        return self._filled(plan, given)

    def changed(self, asked: str | Plan, change: Mapping[str, str | int]) -> Plan:
        """Return the plan of a text in which some fields are others; of a plan, all others stay.

        Raises :class:`PlanError` as :meth:`plan` and :class:`Plan` do.
        """
        if isinstance(asked, Plan):
            return replace(asked, **change)  # pyright: ignore[reportArgumentType]
        kept = [part for part in asked.split(",") if part.partition("=")[0].strip() not in change]
        return self.plan(",".join([*kept, *(f"{name}={value}" for name, value in change.items())]))

    def written(self, plan: Plan) -> str:
        """Return the text of which :meth:`plan` makes this plan: it says where the plan is not as the stack.

        >>> choices = Choices.of(ModelOptions("gpt2", stack="torchtitan"))
        >>> choices.written(Plan(dp=8))
        'dp=8,tp=1,pp=1,microbatches=1,schedule=1f1b,zero=0,remat=none'
        >>> choices.written(choices.plan("dp=8"))
        'dp=8,tp=1,pp=1,microbatches=1,schedule=1f1b,remat=every_early:2,zero=3,reshard=auto,bucket=fsdp2'
        """
        text = str(plan)
        if "chunks=" not in text and _asks_for_chunks(plan):
            text += f",chunks={plan.chunks}"
        if self.file is not None and self.file.copies > 1:  # what is divided as the file has it may not be
            name = "zero_ranks" if plan.zero else "zero"
            text += "" if f"{name}=" in text else f",{name}={getattr(plan, name)}"
        while (read := self._read(text, plan.devices)) != plan:
            names = [own.name for own in fields(plan) if getattr(read, own.name) != getattr(plan, own.name)]
            names = ["zero"] if "zero" in names else names  # others may follow from it: bucket
            text += "".join(f",{name}={getattr(plan, name)}" for name in names)
        return text

    def _read(self, text: str, devices: int) -> Plan:
        """Return the plan that a text asks for, beside the file if there is one."""
        if self.file is not None:
            text, _ = self.file.laid_out(devices, text, self.file.batch.total or devices)
        return self._filled(Plan.parse(text), fields_given(text))

    def _filled(self, plan: Plan, given: Collection[str]) -> Plan:
        """Return a plan with what the stack has for fields that are not given."""
        own: dict[str, str | int] = {"remat": self.stack.remat}
        if plan.tp > 1:
            sp = plan.sp if "sp" in given else self.stack.sp
            own |= {"sp": sp, "tp_overlap": self._tp_overlap(sp)}
        own |= {"zero": self.stack.zero} if plan.dp * plan.cp > 1 else {}
        return self.spread(replace(plan, **{k: v for k, v in own.items() if k not in given}), given)

    def spread(self, plan: Plan, given: Collection[str]) -> Plan:
        """Return a plan with what the stack has for several ranks of an axis, but for fields given."""
        fields = self.stack.spread_fields(plan.zero) if plan.dp * plan.cp > 1 else {}
        if plan.num_stages > 1:
            fields |= {"stages": self.stack.stages}
        if plan.cp > 1:
            fields |= {"cp_kind": self.stack.contexts.get(plan.cp_kind, plan.cp_kind)}
        if plan.tp > 1:
            fields |= {"tp_overlap": self._tp_overlap(plan.sp)}
            fields |= {"sp": self.stack.sp} if plan.sp == "on" and self.stack.sp != "off" else {}
        return replace(plan, **{name: own for name, own in fields.items() if name not in given})

    def _tp_overlap(self, sp: str) -> str:
        """Return how products and collectives of tp overlap: undivided sequences have no parts."""
        own = self.stack.tp_overlap
        return "on" if own == "split" and sp == "off" else own


def fields_given(text: str) -> list[str]:
    """Return the fields that the text of a plan has.

    >>> fields_given("dp=2, tp=4")
    ['dp', 'tp']
    """
    return [part.partition("=")[0].strip() for part in text.split(",")]


def _asks_for_chunks(plan: Plan) -> bool:
    name, _ = parse_schedule(plan.schedule)
    return plan.pp > 1 and name in SCHEDULES and not SCHEDULES[name].stages_a_rank


def _says_no_types(model: Model) -> bool:
    return not isinstance(model, Function) and is_decoder(model)
