"""A training as a framework's file describes it: the model, how it is laid out, and what trains it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distsim.errors import PlanError
from distsim.importer.decoders import decoder_of
from distsim.importer.decoders.huggingface import DEFAULT_BATCH
from distsim.ir import Function
from distsim.models.decoder_sizes import DecoderSizes
from distsim.plan import Plan
from distsim.plan.rank_layout import MAX_DEGREE
from distsim.plan.stacks import Stack

_WITH_TP = ("sp", "tp_overlap")
_WITH_PP = ("schedule", "chunks", "stages")
PAIRED = "combined_1f1b"
"""A schedule that a single rank has, too: its microbatches overlap."""
_OF_ZERO = ("reshard", "bucket", "overlap_grads", "overlap_params")
_WITH_DATA = ("zero", "reshard", "bucket", "overlap_grads", "overlap_params", "zero_ranks")


def with_layout(stack: Stack, fields: Mapping[str, str | int]) -> Stack:
    """Return a stack that has for all plans what a file says of buckets, overlap and gathering.

    ``fields`` are those of the file's plan: with its stage of ZeRO what they leave open is as a plan has it,
    with others as the framework has it.

    >>> from distsim.plan.stacks import STACKS
    >>> own = with_layout(STACKS["megatron"], {"zero": 1, "bucket": "9p", "overlap_grads": "on"})
    >>> own.zero, own.spread_fields(0), own.spread_fields(3)
    (1, {'bucket': '9p', 'overlap_grads': 'on'}, {})
    """
    zero = int(fields.get("zero", 0))
    own = {name: fields[name] for name in _OF_ZERO if name in fields}
    plan = {other: {**stack.spread_fields(other), **_of_zero(own, zero, other)} for other in range(4)}
    overlap = {"tp_overlap": str(fields["tp_overlap"])} if "tp_overlap" in fields else {}
    return replace(stack, remat="none", zero=zero, plan=plan | {zero: own}, **overlap)


def _of_zero(own: Mapping[str, str | int], zero: int, other: int) -> dict[str, str | int]:
    """Return fields about one stage of ZeRO that say something of another."""
    if (zero == 3) != (other == 3):
        return {}
    return {name: value for name, value in own.items() if other or name != "overlap_params"}


@dataclass(frozen=True)
class BatchSizes:
    """What a file says of the sequences of a step: of all ranks, of one microbatch, of one data-parallel
    rank, and how many microbatches a rank has; None where it does not. ``piped`` and ``alone`` are what a
    microbatch is with pipeline ranks and without, where the framework has another then.
    """

    total: int | None = None
    micro: int | None = None
    of_rank: int | None = None
    microbatches: int | None = None
    piped: int | None = None
    alone: int | None = None

    def with_stages(self, pp: int) -> BatchSizes:
        """Return what they are with so many pipeline ranks, as many sequences on each data-parallel one."""
        micro = self.piped if pp > 1 else self.alone
        if micro is None or self.micro is None:
            return self
        count = None if self.microbatches is None else self.micro * self.microbatches // micro
        return replace(self, micro=micro, microbatches=count)

    def of(self, dp: int, total: int | None = None, microbatches: int | None = None) -> tuple[int, int]:
        """Return the sequences of a step of dp ranks and the microbatches of each; those given go before.

        Raises :class:`PlanError` where they do not come out whole, or nothing says how many there are.
        """
        file_alone = total is None and microbatches is None
        total = self.total if total is None else total
        if total is None:
            count = microbatches or self.microbatches
            of_rank = self.micro * (count or 1) if self.micro is not None else self.of_rank
            if of_rank is None:
                raise PlanError("the file does not say how many sequences a step has: give --batch")
            total = of_rank * dp
        if microbatches is not None:
            return total, microbatches
        if self.micro is None:
            return total, self.microbatches or 1
        if file_alone and self.microbatches and total != self.micro * self.microbatches * dp:
            ranks = self.micro * self.microbatches
            of = f"{total // ranks}" if total % ranks == 0 else "no whole number of"
            raise PlanError(
                f"a batch of {total}, {self.microbatches} microbatches of {self.micro} on each, are of "
                f"{of} data-parallel ranks, not {dp}: give --batch {ranks * dp}, or microbatches= in --plan"
            )
        count, rest = divmod(total, dp * self.micro)
        if rest or not count:
            raise PlanError(
                f"a batch of {total} is no multiple of dp={dp} times microbatches of {self.micro}; give "
                f"--batch {max(1, round(total / (dp * self.micro))) * dp * self.micro}, other degrees in "
                "--plan, or its microbatches="
            )
        return total, count


@dataclass(frozen=True)
class TrainingConfig:
    """What a framework's file says.

    ``source`` is the file; ``model`` a name of the library's models or None, ``sizes`` those of one that has
    no name or None; ``loads`` what experts are asked for (options of a model's text). ``stack``: that of the
    framework with what the file says otherwise. ``fields``: those of a plan, but for ``dp`` where the file
    leaves it to the devices that there are, and ``microbatches``; with ``copies`` over 1, data-parallel ranks
    are so many groups that divide the same state. ``devices``: what the file is started on, if it says so.
    ``notes``: what is not quite as the file says, in words; ``unknown``: what was not understood;
    ``lacks``: why there is no model.
    """

    source: str
    stack: Stack
    fields: Mapping[str, str | int]
    model: str | None = None
    sizes: DecoderSizes | None = None
    loads: Mapping[str, object] = field(default_factory=dict[str, object])
    seq: int | None = None
    batch: BatchSizes = BatchSizes()
    copies: int = 1
    devices: int | None = None
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    lacks: str = ""

    def laid_out(self, devices: int, own: str = "", batch: int | None = None) -> tuple[str, int]:
        """Return the text of the plan on so many devices, and the sequences of a step.

        ``own``: fields of a plan that go before the file's; ``batch`` goes before its batch. Raises
        :class:`PlanError` for too few devices, and for a batch that does not divide.
        """
        given = _items(own)
        items: dict[str, str | int] = {**self._fitting(given), **given}
        replica = 1
        for axis in ("tp", "pp", "cp"):
            replica *= _degree(items, axis)
        if "dp" not in items:
            if devices < replica:
                raise PlanError(
                    f"{self.source}: tp={items.get('tp', 1)}, pp={items.get('pp', 1)} and "
                    f"cp={items.get('cp', 1)} take {replica} devices, and the cluster has {devices}; use a "
                    f"larger one, as with :{-(-replica // 8)} behind the name of a preset of 8 a node, or "
                    "other degrees in --plan"
                )
            items["dp"] = devices // replica
        dp = _degree(items, "dp")
        asked = _degree(given, "microbatches") if "microbatches" in given else None
        try:
            sizes = self.batch.with_stages(_degree(items, "pp"))
            total, items["microbatches"] = sizes.of(dp, batch, asked)
        except PlanError as error:
            raise PlanError(f"{self.source}: {error}") from None
        if self.copies > 1 and "zero_ranks" not in given and str(items.get("zero", 0)) != "0":
            if dp % self.copies:
                raise PlanError(
                    f"{self.source}: {self.copies} groups that divide state each do not divide dp={dp}"
                )
            items["zero_ranks"] = dp // self.copies
        items = self._useful(items, given)
        order = [name for name in ("dp", "tp", "pp", "microbatches") if name in items]
        order += [name for name in items if name not in order]
        return ",".join(f"{name}={items[name]}" for name in order), total

    def of_model(self) -> TrainingConfig:
        """Return the same training of a model that the file does not say; it has its own sizes and loads."""
        return replace(self, model=None, sizes=None, loads={})

    def function(
        self, batch: int | None, seq: int | None = None, groups: int = 1, vocabulary_multiple: int = 1
    ) -> Function:
        """Return the forward pass of a model without a name, with its loss; the rest is as for one with.

        Raises :class:`PlanError` where the file says no sizes.
        """
        if self.sizes is None:
            raise PlanError(f"{self.source} has no sizes of a model: name one")
        sizes, length = self.sizes, self.seq if seq is None else seq
        batch = DEFAULT_BATCH if batch is None else batch
        if sizes.experts is not None and sizes.experts.aux_over > 1 and batch % sizes.experts.aux_over:
            sizes = replace(sizes, experts=replace(sizes.experts, aux_over=1))
        given = {**self.loads, "batch": batch, **({} if length is None else {"seq": length})}
        return decoder_of(sizes, given, Path(self.source).stem, groups, vocabulary_multiple)

    def _fitting(self, given: Mapping[str, str]) -> dict[str, str | int]:
        """Return the file's fields without those that others which are given leave no sense."""
        left_out: set[str] = set()
        if {"pp", "chunks", "schedule"} & given.keys():
            left_out |= {"stages"} if re.match("[0-9]", str(self.fields.get("stages", ""))) else set()
        if "schedule" in given:
            left_out.add("chunks")
        if "zero" in given and given["zero"] != str(self.fields.get("zero", 0)):
            left_out |= {"reshard", "overlap_params", "bucket", "zero_ranks"}
        return {name: own for name, own in self.fields.items() if name not in left_out}

    def _useful(self, items: Mapping[str, str | int], given: Mapping[str, str]) -> dict[str, str | int]:
        """Return fields without those of the file about ranks that there are not."""
        idle: set[str] = set()
        if _degree(items, "tp") == 1:
            idle |= {*_WITH_TP, "etp"}
        if _degree(items, "pp") == 1:
            idle |= {*_WITH_PP} - ({"schedule"} if items.get("schedule") == PAIRED else set())
        if _degree(items, "cp") == 1:
            idle.add("cp_kind")
        if _degree(items, "dp") * _degree(items, "cp") == 1:
            idle |= {*_WITH_DATA}
        return {name: own for name, own in items.items() if name in given or name not in idle}

    def left_open(self, own: str) -> dict[str, str | int]:
        """Return what the file has for fields that the text of a plan leaves open."""
        given = _items(own)
        items = self._useful({**self._fitting(given), **given}, given)
        return {name: value for name, value in items.items() if name not in given}

    def describe(self) -> list[str]:
        """Return what there is to say of how the file was read, a line each."""
        name = Path(self.source).name
        lines = [f"{name}: {note}" for note in self.notes]
        if self.unknown:
            shown = ", ".join(self.unknown[:40])
            more = f" and {len(self.unknown) - 40} more" if len(self.unknown) > 40 else ""
            lines.append(f"{name}: not understood, and without effect: {shown}{more}")
        return lines


def _items(own: str) -> dict[str, str]:
    """Return the fields of the text of a plan, which :meth:`Plan.parse` refuses where it is none."""
    items = [item.partition("=") for item in own.split(",")] if own.strip() else []
    if any(not equals for _, equals, _ in items) or len({key.strip() for key, _, _ in items}) < len(items):
        Plan.parse(own)
    return {key.strip(): value.strip() for key, _, value in items}


def _degree(items: Mapping[str, str | int], name: str) -> int:
    value = items.get(name, 1)
    text = str(value)
    if not re.fullmatch("[0-9]{1,7}", text, re.ASCII) or not 1 <= int(text) <= MAX_DEGREE:
        Plan.parse(f"{name}={text}")
        raise PlanError(f"{name}={text[:40]} is no degree; give a whole number from 1 to {MAX_DEGREE}")
    return int(text)
