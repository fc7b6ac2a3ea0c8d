"""A plan: its fields, and how they are read from text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from distsim.errors import PlanError, shortened, wrong_type
from distsim.plan.buckets import LAYERS, parse_bucket
from distsim.plan.rank_layout import (
    MAX_DEGREE,
    ORDER,
    Degrees,
    ExpertRanks,
    check_experts_apart,
    check_experts_of_context,
    check_order,
    check_zero_ranks,
    expert_ranks,
    parse_cp_kind,
)
from distsim.plan.recomputation import parse_remat
from distsim.schedule import SCHEDULES, TABLE
from distsim.suggestions import choices_for, did_you_mean

STAGES = ("even", "default", "layers", "auto", "N-N-...")
"""How a model is cut into pipeline stages: at any op for even work and few bytes sent; in whole layers as
torchtitan counts them, embedding and output head being layers too; in equally many whole layers, as
Megatron-LM counts them, embedding and head going with the first and the last; in whole blocks, for the least
simulated step; or so many layers each, or blocks, a number per stage in their order, as in 3-4-4-3: none
where the first stage has the embedding alone, or the last the head."""

_NAMED_STAGES = STAGES[:-1]

ZERO = (0, 1, 2, 3)
"""What is divided over dp (Rajbhandari et al. 2020): nothing; the optimizer's state with master copies;
gradients too; parameters too, which are gathered where they are used."""

RESHARD = ("always", "never", "auto", "blocking")
"""What becomes of a parameter that forward gathered: it is gathered again for backward, or kept; or, as
torchtitan's fsdp_reshard_after_forward "default", kept with several pipeline ranks, else gathered again but
for those of the last unit, with which backward begins; or gathered again, each when a layer waits for it."""


SWITCH = ("off", "on")

SP = (*SWITCH, "dtensor")
"""Whether tensor-parallel ranks divide sequences between their products; as DTensor does, with the second
dimension divided, what is gathered and scattered copied, and each pass gathering once
(:mod:`distsim.transforms.tensor_parallel.dtensors`)."""

TP_OVERLAP = (*SWITCH, "split")
"""How tensor-parallel ranks compute while they communicate: not at all; the gradient of an input travels
beside that of the weight; besides, products run in chunks, beside the parts of the sequence that they read or
make."""


@dataclass(frozen=True)
class Plan:
    """Degrees of parallelism, microbatches per step, the pipeline's schedule and stages, what is kept.

    `dp` data parallel, `tp` tensor parallel, `cp` context parallel (the sequence is divided, by one of
    `CP_KINDS`) and `pp` pipeline parallel ranks; each of `ep` ranks of dp and cp
    (:func:`distsim.plan.rank_layout.expert_ranks`) has its part of the experts, each of which `etp`
    neighbouring ranks of tp divide further (0: all), when of those of tp others are among the `ep`;
    `microbatches` per data-parallel replica and step; `schedule` is a name in `distsim.schedule.SCHEDULES`,
    for one that is searched for with the activations that a rank may hold, 1 being `pp` as in 1F1B
    (`zb_auto:2`), for `pipedream_2bw` with the microbatches of an update (`pipedream_2bw:8`), or `table`:
    one that is given beside the plan, by which `chunks` and `stages` are verified then;
    `stages` one of `STAGES`, `remat` of `recomputation.REMAT`, `zero` of `ZERO`, `reshard` of `RESHARD`;
    of `zero`, `zero_ranks` neighbouring ranks of dp, with their cp, have a part each, and others the same
    (0: all ranks of dp have a part); of experts, those of these neighbours have that have the same ones;
    `chunks` are the stages of each pipeline rank; of the layers of each stage, the first `offload` keep what
    they save for backward on the host; with `sp=on`, sequence parallelism, activations between the products
    of tensor-parallel ranks are divided over these in the sequence, with `sp=dtensor` as torch's DTensor has
    them; with `tp_overlap=on` what these bring
    together of the gradient of a product's input travels beside the gradient of its weight, and with
    `split` products run in chunks, too, beside the parts of the sequence that they read or make; with
    `post_validation=on` no stage waits with its update for the gradients of others; `order` says
    which axis changes fastest over the devices. A plan is verified when made, and its text, in which the
    fields after `schedule` stand only when they are not the default, parses back to it.

    Raises:
        PlanError: a count is not an integer in 1..MAX_DEGREE (`offload`, `zero_ranks`, `etp`: from 0; `zero`:
            0..3), `zero_ranks`, `ep` or `etp` do not divide what they are of, a name is unknown, `stages` are
            not as many as pp * chunks, `offload` meets `remat=uniform`, or a field is of ranks that there are
            not (`sp` and `tp_overlap` with tp=1, `cp_kind` with cp=1, `post_validation` with pp=1).

    >>> plan = Plan.parse("dp=2,tp=4,pp=2,microbatches=8")
    >>> print(plan, plan.devices)
    dp=2,tp=4,pp=2,microbatches=8,schedule=1f1b 16
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    stages: str = "even"
    remat: str = "none"
    zero: int = 0
    reshard: str = "always"
    chunks: int = 1
    offload: int = 0
    sp: str = "off"
    cp: int = 1
    cp_kind: str = "allgather"
    order: str = ORDER
    bucket: str = "auto"
    overlap_grads: str = "on"
    ep: int = 1
    overlap_params: str = "off"
    zero_ranks: int = 0
    etp: int = 0
    tp_overlap: str = "on"
    post_validation: str = "off"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        name = parse_schedule(self.schedule)[0]
        if name != TABLE:
            self._check_chunks(name)
        sizes = parse_stages(self.stages)
        if sizes and name != TABLE and len(sizes) != self.num_stages:
            raise PlanError(
                f"stages={shortened(self.stages)} has {len(sizes)} numbers, and pp={self.pp} with "
                f"chunks={self.chunks} makes {self.num_stages} stages; give one number for each"
            )
        if parse_remat(self.remat).name == "uniform" and self.offload:
            raise PlanError(
                f"offload={self.offload} copies what each layer saves, and with remat={self.remat} only "
                "groups of layers save anything; use remat=full or block:N, or offload=0"
            )
        for name, known in _SWITCHES.items():
            if getattr(self, name) not in known:
                raise PlanError(f"{name}={shortened(getattr(self, name))} is not one of {', '.join(known)}")
        self._check_tensor_ranks()
        check_order(self.order)
        kind, ulysses = parse_cp_kind(self.cp_kind)
        if self.cp % ulysses:
            raise PlanError(
                f"cp_kind={self.cp_kind}: {ulysses} ranks that exchange heads do not divide cp={self.cp}; "
                "use usp:U with a U that does"
            )
        if self.cp == 1 and kind != Plan.cp_kind:
            raise PlanError(
                f"cp_kind={self.cp_kind} is how ranks that divide a sequence attend, and cp=1; use cp=2, or "
                "leave it out"
            )
        parse_bucket(self.bucket)
        if self.zero == 3 and self.bucket not in LAYERS:
            raise PlanError(
                f"bucket={self.bucket} is what a bucket of gradients holds, and with zero=3 those of a layer "
                "are reduced together; use bucket=auto, or zero=2 (or fsdp2, which copies them into a buffer)"
            )
        if self.bucket == "fsdp2" and self.zero != 3:
            raise PlanError(
                "bucket=fsdp2 copies parameters out of the buffer into which those of a layer are gathered, "
                f"and zero={self.zero} gathers none; use zero=3, or bucket=auto"
            )
        if self.overlap_params == "on" and self.zero not in (1, 2):
            raise PlanError(
                "overlap_params=on gathers parameters after their update during the next forward pass, and "
                f"zero={self.zero} gathers none after it; use zero=1 or 2, or overlap_params=off"
            )
        if self.post_validation == "on" and self.pp == 1:
            raise PlanError(
                "post_validation=on lets no stage wait for the norm of the gradients of others, and pp=1 has "
                "no others; leave it out, or use pp=2"
            )
        if self.ep > 1 or self.etp:
            check_experts_apart(self.degrees, self.divides_sequence)
            check_experts_of_context(expert_ranks(self.degrees, self.order), self.cp, ulysses)
        if self.zero_ranks:
            check_zero_ranks(self.zero, self.zero_ranks, self.dp, self.expert_ranks)
        if self.reshard not in RESHARD:
            raise PlanError(
                f"reshard={shortened(self.reshard)} is unknown; choose one of "
                f"{choices_for(self.reshard, RESHARD)}"
            )
        if self.reshard != "always" and self.zero != 3:
            raise PlanError(
                f"reshard={self.reshard} keeps parameters that forward gathered, and zero={self.zero} "
                "gathers none; use zero=3, or reshard=always"
            )

    def _check_chunks(self, schedule: str) -> None:
        """Check that a schedule runs so many stages a rank."""
        takes = SCHEDULES[schedule].stages_a_rank
        if takes is not None and self.chunks != takes:
            raise PlanError(
                f"schedule={self.schedule} runs {takes} stage{'s' if takes > 1 else ''} a rank, not "
                f"chunks={self.chunks}; use chunks={takes}, or another schedule"
            )

    @property
    def devices(self) -> int:
        """Number of devices that the plan occupies: dp * tp * pp * cp."""
        return math.prod((self.dp, self.tp, self.pp, self.cp))

    def _check_tensor_ranks(self) -> None:
        if self.divides_sequence and self.tp == 1:
            raise PlanError(f"sp={self.sp} divides activations over tp ranks, and tp=1; use sp=off, or tp=2")
        if self.tp_overlap != "on" and self.tp == 1:
            raise PlanError(
                f"tp_overlap={self.tp_overlap} is about what tp ranks bring together, and tp=1; leave it out"
            )
        if self.tp_overlap == "split" and self.sp == "off":
            raise PlanError(
                "tp_overlap=split has products run on parts of the sequence as they come, and with sp=off no "
                "rank has a part; use sp=on, or tp_overlap=on"
            )
        if self.sp == "dtensor" and self.tp_overlap == "on":
            raise PlanError(
                "tp_overlap=on has the gradient of an input travel beside that of the weight, and with "
                "sp=dtensor both are made before; use tp_overlap=off or split, or sp=on"
            )

    @property
    def degrees(self) -> Degrees:
        """What the ranks that have experts each depend on."""
        return Degrees(self.dp, self.cp, self.tp, self.ep, self.etp)

    @property
    def expert_ranks(self) -> ExpertRanks:
        """The ranks that have experts each: `ep` of them, along dp, cp and tp."""
        return expert_ranks(self.degrees, self.order) if self.ep > 1 else ExpertRanks()

    @property
    def divides_sequence(self) -> bool:
        """Whether tensor-parallel ranks divide sequences between their products."""
        return self.sp != "off"

    @property
    def sequence_parts(self) -> int:
        """Number of parts in which ranks hold a sequence: but for Ulysses a rank of cp has two."""
        halves = 2 if self.cp > 1 and self.cp_kind != "ulysses" else 1
        return self.cp * halves * (self.tp if self.divides_sequence else 1)

    @property
    def resharding(self) -> str:
        """What `reshard` says for so many pipeline ranks: "auto" for one only."""
        return "never" if self.reshard == "auto" and self.pp > 1 else self.reshard

    @property
    def reduces_each(self) -> bool:
        """Whether the gradients of each microbatch are reduced over the ranks of the data, not their sums.

        With `zero=2` and 3; but torch's pipeline stages let FSDP reduce none before the last backward pass of
        a stage, and all after it (torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`).
        """
        return self.zero > 1 and not (self.zero == 3 and self.num_stages > 1)

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline: pp * chunks."""
        return self.pp * self.chunks

    def __str__(self) -> str:
        given = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        shown = {name: own for name, (own, usual) in given.items() if name in _ALWAYS or own != usual}
        return ",".join(f"{name}={own}" for name, own in shown.items())

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan from `key=value` items between commas; a key left out has its default.

        Raises:
            PlanError: an item is not `key=value`, a key is unknown or repeated, or a value does
                not fit its field; the message names the field, the value and the choices.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("plan", text, "text as dp=2,tp=4; of fields there is distsim.Plan(dp=2, tp=4)")
        given: dict[str, Any] = {}
        for item in text.split(","):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                raise PlanError(
                    f"plan {shortened(text)}: {shortened(item)} is not key=value; write for example {cls()}"
                )
            if key not in _FIELDS:
                instead = _REPLACED.get(key, f"try {choices_for(key, _FIELDS)}")
                raise PlanError(f"unknown field {shortened(key, 20)}; {instead}")
            if key in given:
                raise PlanError(
                    f"{key} is given twice ({given[key]} and {shortened(value)}); give each field once"
                )
            given[key] = _parse_count(key, value) if key in _COUNTS else value
        return cls(**given)


_FIELDS = tuple(field.name for field in fields(Plan))
_COUNTS = ("dp", "tp", "pp", "microbatches", "chunks", "offload", "zero", "cp", "ep", "zero_ranks", "etp")
_BOUNDS = {"zero": (0, 3)} | dict.fromkeys(("offload", "zero_ranks", "etp"), (0, MAX_DEGREE))
_SWITCHES = {
    **dict.fromkeys(("overlap_grads", "overlap_params", "post_validation"), SWITCH),
    **{"sp": SP, "tp_overlap": TP_OVERLAP},
}
_REPLACED = {
    "fsdp": "write zero=3 for fsdp=reshard, zero=3,reshard=never for fsdp=keep, zero=0 for fsdp=none",
}
"""What to write in place of a field that there was, or is elsewhere."""
_ALWAYS = ("dp", "tp", "pp", "microbatches", "schedule")


def parse_schedule(text: object) -> tuple[str, float | None]:
    """Return the name of a schedule, and the number that it takes, if one is given; else None.

    That is, of a schedule that is searched for, the memory that it may use, 1 being as much as 1F1B needs,
    and of one that updates weights every so many microbatches, how many. Raises :class:`PlanError` for an
    unknown name, and for a number that is out of range or of a schedule that takes none.

    >>> parse_schedule("zb_auto:1.5"), parse_schedule("pipedream_2bw:8"), parse_schedule("1f1b")
    (('zb_auto', 1.5), ('pipedream_2bw', 8.0), ('1f1b', None))
    """
    name, colon, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text == TABLE:
        return TABLE, None
    if name not in SCHEDULES:
        few = f"choose one of {', '.join([*SCHEDULES][:4])} ... (distsim schedule --help)"
        raise PlanError(f"schedule={shortened(text)} is unknown; {few}{did_you_mean(name, SCHEDULES)}")
    if not colon:
        return name, None
    known = SCHEDULES[name]
    if not (known.searched or known.takes_updates):
        raise PlanError(f"schedule={shortened(text)}: {name} takes no number; use schedule={name}")
    pattern = r"[0-9]{1,7}(\.[0-9]{1,12})?" if known.searched else r"[0-9]{1,7}"
    if not re.fullmatch(pattern, number, re.ASCII) or not 0 < float(number) <= MAX_DEGREE:
        what = (
            f"a share of the memory of 1F1B over 0, as in {name}:2"
            if known.searched
            else f"the microbatches of an update, as in {name}:8"
        )
        raise PlanError(f"schedule={shortened(text)}: {name} takes {what}")
    return name, float(number)


def parse_stages(text: object) -> tuple[int, ...]:
    """Return how many layers or blocks each stage holds, if `stages` says so; nothing for a name of STAGES.

    Raises :class:`PlanError` for an unknown name, and for numbers that are none.

    >>> parse_stages("3-4-4-3"), parse_stages("auto")
    ((3, 4, 4, 3), ())
    """
    if text in _NAMED_STAGES:
        return ()
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]+(-[0-9]+)*", text, re.ASCII):
        known = f"choose one of {', '.join(STAGES)}, as in 3-4-4-3{did_you_mean(text, _NAMED_STAGES)}"
        raise PlanError(f"stages={shortened(text)} is unknown; {known}")
    # Each is written in one way, so that equal plans have equal texts.
    count = "[1-9][0-9]{0,6}"
    if not re.fullmatch(rf"{count}|(0|{count})(-{count})*-(0|{count})", text, re.ASCII):
        raise PlanError(
            f"stages={shortened(text)}: each stage holds 1 to 9999999 blocks, as in 3-4-4-3, or none where "
            "the first has the embedding alone, the last the head"
        )
    sizes = tuple([int(number) for number in text.split("-")])
    if not any(sizes):
        raise PlanError(f"stages={text} has no layer on any stage; give each its number, as in 3-4-4-3")
    return sizes


def _parse_count(name: str, text: str) -> int:
    # int() also reads "1_0", "+1", other scripts' digits, and refuses over 4300 digits with its own error.
    least, most = _bounds(name)
    choices = "separate fields by commas" if "=" in text else f"choose one of {least}..{most}"
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        raise PlanError(f"{name}={shortened(text)} is not an integer; {choices}")
    if len(text) > 20:
        raise PlanError(f"{name}={shortened(text)} is out of range; {choices}")
    return int(text)


def _bounds(name: str) -> tuple[int, int]:
    return _BOUNDS.get(name, (1, MAX_DEGREE))


def _check_count(name: str, value: object) -> None:
    least, most = _bounds(name)
    choices = f"choose one of {least}..{most}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{name}={shortened(value)} is not an integer; {choices}")
    if not least <= value <= most:
        shown = value if abs(value) < 10**20 else "an integer of more than 20 digits"
        raise PlanError(f"{name}={shown} is out of range; {choices}")
