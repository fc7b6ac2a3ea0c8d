"""How a model is trained: what was asked for, and for the rest what the stack has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distsim.errors import PlanError
from distsim.importer import is_decoder
from distsim.importer.configs import TrainingConfig
from distsim.ir import Function, Topology
from distsim.ir.kernel_rates import ATTENTION_KERNELS, WAYS_TO_LAUNCH
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
        kernels = kernels_named(kernels) if isinstance(kernels, str) else kernels
        kernels = _launched(kernels, options, stack.kernels.partition(":")[2])
        policy = precision_named(precision) if isinstance(precision, str) else precision
        return Choices(
            None if policy is None else policy.of_stack(stack.scaling, stack.linear_ops),
            attention,
            kernels,
            optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer,
            choice("clip") or None,  # 0, as Megatron-LM's --clip-grad 0: not at all
            stack,
            tuple(assumed),
            options.from_file,
        )

    def device_notes(self, topology: Topology) -> list[str]:
        """Say where devices have no rate for products in the type of the precision, or for the kernel of
        attention that is asked for, and where that is of another type; and what CUDA graphs leave out."""
        graphs = self.kernels.graphs
        said = [
            f"CUDA graphs ({graphs}): layers of experts, for whose rows the host gives their number, are "
            "issued kernel by kernel, passes with some layer by layer; what graphs hold beside what their "
            "kernels save is not in the memory"
        ]
        return [*self._slow_types(topology), *self._unknown_kernel(topology), *(said if graphs else [])]

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
        'dp=8,tp=1,pp=1,microbatches=1,schedule=1f1b,remat=none,zero=0'
        >>> choices.written(choices.plan("dp=8"))
        'dp=8,tp=1,pp=1,microbatches=1,schedule=1f1b,remat=every_early:2,zero=3,reshard=auto,bucket=fsdp2'
        """
        text = str(plan)  # in which is all that is no default
        given, left_open = fields_given(text), [self._alone(plan, plan.sp), self._spread(plan)]
        if self.file is not None:
            left_open.append(self.file.left_open(text))
        names = dict.fromkeys(
            name
            for filled in left_open
            for name, own in filled.items()
            if str(own) != str(getattr(plan, name))
        )
        names |= {"chunks": None} if _asks_for_chunks(plan) else {}
        if self.file is not None and self.file.copies > 1 and plan.zero:
            names["zero_ranks"] = None  # else it is divided as the file has it
        return ",".join([text, *(f"{name}={getattr(plan, name)}" for name in names if name not in given)])

    @property
    def always_written(self) -> frozenset[str]:
        """Fields that the text of a plan has even for one rank: the file says others, where there is one."""
        return frozenset() if self.file is None else frozenset(self.file.fields)

    def _filled(self, plan: Plan, given: Collection[str]) -> Plan:
        """Return a plan with what the stack has for fields that are not given."""
        own = self._alone(plan, plan.sp if "sp" in given else self.stack.sp)
        try:
            alone = replace(plan, **{name: value for name, value in own.items() if name not in given})
        except PlanError as error:
            if own.get("zero") in (None, plan.zero) or "zero" in given:
                raise
            raise PlanError(f"{error} (zero={self.stack.zero}: the stack's; add zero=0 for none)") from None
        return self.spread(alone, given)

    def spread(self, plan: Plan, given: Collection[str]) -> Plan:
        """Return a plan with what the stack has for several ranks of an axis, but for fields given."""
        own = self._spread(plan)
        return replace(plan, **{name: value for name, value in own.items() if name not in given})

    def _alone(self, plan: Plan, sp: str) -> dict[str, Any]:
        """Return what the stack has for a plan whatever its other fields, but for ``sp``."""
        own: dict[str, Any] = {"remat": self.stack.remat}
        own |= {"sp": self.stack.sp, "tp_overlap": self._tp_overlap(sp)} if plan.tp > 1 else {}
        return own | ({"zero": self.stack.zero} if plan.dp * plan.cp > 1 else {})

    def _spread(self, plan: Plan) -> dict[str, Any]:
        """Return what the stack has for a plan with several ranks of an axis, by its other fields."""
        own: dict[str, Any] = self.stack.spread_fields(plan.zero) if plan.dp * plan.cp > 1 else {}
        if plan.num_stages > 1:
            own |= {"stages": self.stack.stages}
        if plan.cp > 1:
            own |= {"cp_kind": self.stack.contexts.get(plan.cp_kind, plan.cp_kind)}
        if plan.tp > 1:
            own |= {"tp_overlap": self._tp_overlap(plan.sp)}
            own |= {"sp": self.stack.sp} if plan.sp == "on" and self.stack.sp != "off" else {}
        return own

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


def _launched(kernels: Kernels, options: ModelOptions, of_stack: str) -> Kernels:
    """Return the policy of a host that launches kernels as options say, else as the stack's does.

    Raises :class:`PlanError` where kernels are named with other graphs than are asked for.
    """
    asked = options.cuda_graphs
    if asked is None:
        carried = of_stack and not kernels.graphs and kernels.way in WAYS_TO_LAUNCH
        return kernels.in_graphs(of_stack) if carried else kernels
    if asked == "none":
        return kernels.one_by_one
    if options.kernels is not None and kernels.graphs not in ("", asked):
        raise PlanError(f"kernels={kernels.name} and cuda_graphs={asked} disagree: leave one of them out")
    return kernels.in_graphs(asked)


def _asks_for_chunks(plan: Plan) -> bool:
    name, _ = parse_schedule(plan.schedule)
    return plan.pp > 1 and name in SCHEDULES and not SCHEDULES[name].stages_a_rank


def _says_no_types(model: Model) -> bool:
    return not isinstance(model, Function) and is_decoder(model)
