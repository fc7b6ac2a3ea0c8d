"""The space of plans: every sensible layout of a model on so many devices, always in the same order.

What a plan leaves open has a set of sensible values:

===================  ==================================================================================
``tp``               divisors of the devices, up to those that the fastest links join (a node)
``cp``               divisors that leave each rank 4,096 tokens of a sequence or more, if attention is one op
``pp``               divisors, up to the layers of the model
``dp``               the devices that these leave
``ep``               divisors of the experts, up to the ranks that can hold them; 1 without experts
microbatches         of 1, 2, 4, ... samples, up to 32,768 tokens a rank; with a pipeline, ``pp`` or more
``zero``             0, 1, and without a pipeline 2 and 3 (with one, each microbatch gathers anew)
``sp``               on where ``tp`` > 1 divides sequences of tokens
``remat``            none, full; attention too, unless it is one kernel, which saves nothing to compute again
``schedule``         1f1b; interleaved with 2 or 4 chunks, as far as there are layers, where ``pp`` divides
                     the microbatches
``stages``           as the stack begins them: equally many layers only where they divide, unless fewer
                     than half of the numbers of stages do, or ``pp`` is given: ``default`` then
others               the defaults of :class:`distsim.plan.Plan`
===================  ==================================================================================

What does not apply has its default: ``sp`` with tp=1, ``zero`` with dp * cp = 1, ``schedule`` and ``chunks``
and ``post_validation`` with pp=1, ``ep`` without experts, ``cp_kind`` with cp=1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any

from distsim.errors import PlanError, shortened
from distsim.ir import Function, Tensor, Topology, all_ops
from distsim.plan import RESHARD, SWITCH, TP_OVERLAP, Plan, parse_schedule, parse_stages
from distsim.plan.rank_layout import CP_KINDS
from distsim.plan_search.absent_values import degrees_of, stage_counts, why_absent
from distsim.schedule import FLUSH, SCHEDULES, example
from distsim.schedule.refusals import count as count_of
from distsim.suggestions import choices_for
from distsim.transforms.recompute.joint import Joint
from distsim.transforms.sharding.roles import batch_inputs, roles

SIZE = "microbatch_size"
"""Samples of a microbatch on a data-parallel rank: another way to say how many microbatches there are."""

TOKENS_OF_A_RANK, TOKENS_OF_A_MICROBATCH = 4096, 32768
"""The fewest tokens of a sequence that ranks of cp sensibly have, and the most of a microbatch."""

CHUNKS = (2, 4)

_FIELDS = tuple(field.name for field in fields(Plan))
_COUNTS = tuple(field.name for field in fields(Plan) if isinstance(field.default, int))
_NAMED: Mapping[str, Sequence[str]] = {
    "sp": SWITCH,
    "overlap_grads": SWITCH,
    "overlap_params": SWITCH,
    "post_validation": SWITCH,
    "tp_overlap": TP_OVERLAP,
    "reshard": RESHARD,
    "remat": ("none", "attention", "matmuls", "full", "full_early", "min_cut"),
    "stages": ("even", "default", "layers"),
    "cp_kind": tuple(kind for kind in CP_KINDS if ":" not in kind),
    "zero": ("0", "1", "2", "3"),
    "chunks": ("1", "2", "4", "8"),
}
"""What ``*`` stands for, but for degrees, microbatches and schedules."""

Sets = Mapping[str, tuple[str, ...]]
"""The values of fields of a plan, as text; ``*`` for all."""


def parse_sets(text: str) -> dict[str, tuple[str, ...]]:
    """Read the sets of ``field=value|value`` items between commas; ``*`` stands for all values.

    Raises :class:`PlanError` for an item that is none, an unknown field, and one that is given twice.

    >>> parse_sets("tp=1|2,remat=*")
    {'tp': ('1', '2'), 'remat': ('*',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, values = (part.strip() for part in item.partition("="))
        given = tuple(dict.fromkeys(value.strip() for value in values.split("|")))
        if not equals or not all(given):
            raise PlanError(f"{shortened(item)} is not field=value|value; write for example tp=1|2|4,remat=*")
        if name not in (*_FIELDS, SIZE):
            known = (*_FIELDS, SIZE)
            choices = f"choose from {choices_for(name, known)}"
            raise PlanError(f"unknown field {shortened(name)}; {choices}")
        if name in found:
            raise PlanError(f"{name} is given twice; write {name}={'|'.join((*found[name], *given))}")
        found[name] = given
    if SIZE in found and "microbatches" in found:
        raise PlanError(f"microbatches and {SIZE} say the same; give one of them")
    return found


@dataclass(frozen=True)
class ModelTraits:
    """What of a model decides which layouts are sensible.

    ``batch`` samples a step; ``sequence`` tokens of each, ``layers`` that are alike, ``every_layer`` (those
    of other kinds too), and ``experts``: 0 where there are none, or it is not known; whether attention is
    ``fused``, one kernel.
    """

    batch: int
    sequence: int = 0
    layers: int = 0
    experts: int = 0
    fused: bool = False
    every_layer: int = 0

    @staticmethod
    def of(function: Function) -> ModelTraits:
        """Return those of a training step. Raises :class:`PlanError` for one without a batch."""
        data = batch_inputs(function, roles(function))
        types = [value.type for value in data if isinstance(value.type, Tensor)]
        if not types:
            raise PlanError(f"{function.name} has no data input, so no batch that microbatches could divide")
        tokens = [t.shape[1] for t in types if len(t.shape) > 1 and not t.dtype.is_floating]
        layers = Counter(op.callee for op in function.ops if op.is_call)
        ops, ahead = list(all_ops(function)), Joint.of(function).forward
        grouped = [op for op in ops if op.op_type in ("GroupedMatMul", "Float8GroupedMatMul")]
        experts = [w.shape[0] for op in grouped if (w := _tensor(op.inputs[1]))]
        return ModelTraits(
            types[0].shape[0],
            max(tokens, default=0),
            max(layers.values(), default=0),
            max(experts, default=0),
            any(op.op_type == "Attention" for op in ops),
            sum(op.is_call and op in ahead for op in function.ops),
        )


def _tensor(value: Any) -> Tensor | None:
    return value.type if isinstance(value.type, Tensor) else None


def _same(plan: Plan) -> Plan:
    return plan


@dataclass(frozen=True, eq=False)
class PlanSpace:
    """The plans of a model on ``devices`` of which the fastest links join ``node``.

    ``sets`` are the values of fields, the sensible ones for those that are not given; ``most_tp`` the largest
    degree of tp where that is not given. ``complete`` fills in what a stack has. Raises :class:`PlanError`
    when there is no plan, or none with one of the values that are given.
    """

    traits: ModelTraits
    devices: int
    node: int
    sets: Sets
    most_tp: int | None = None
    complete: Callable[[Plan], Plan] = _same

    @staticmethod
    def of(
        function: Function,
        topology: Topology,
        sets: Sets,
        most_tp: int | None = None,
        complete: Callable[[Plan], Plan] = _same,
    ) -> PlanSpace:
        """Return the space of the plans of a training step on all devices of a topology."""
        count = len(topology.devices)
        node = next((level.group_size for level in topology.levels if level.group_size), None)
        return PlanSpace(ModelTraits.of(function), count, node or count, sets, most_tp, complete)

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, without repetitions: equal spaces have them in the same order."""
        for text in self.sets.get("stages", ()):
            if text != "*":
                parse_stages(text)  # which no plan at all would say less of
        found = dict.fromkeys(self._plans())
        if not found:
            self._check_batch()
        for name in self.sets:
            self._check_values(name, found)
        if not found:
            raise PlanError(
                f"no layout cuts {count_of(self.devices, 'device')} and a batch of "
                f"{count_of(self.traits.batch, 'sample')} as asked: "
                "leave a field open, or change the batch"
            )
        return tuple(found)

    def __len__(self) -> int:
        return len(self.plans)

    def __repr__(self) -> str:
        return f"PlanSpace({count_of(len(self), 'plan')} on {count_of(self.devices, 'device')})"

    def _check_batch(self) -> None:
        """Check that some number of data-parallel ranks divides the batch."""
        degrees = product(self.values("tp"), self.values("cp"), self.values("pp"))
        cuts = {math.prod(each) for each in degrees if self.devices % math.prod(each) == 0}
        given = self.values("dp") if "dp" in self.sets else None
        ranks = sorted({self.devices // cut for cut in cuts if given is None or self.devices // cut in given})
        if ranks and all(self.traits.batch % dp for dp in ranks):
            fixed = [name for name in ("dp", "tp", "cp", "pp") if name in self.sets]
            leave = f"leave {' or '.join(fixed)} open, or " if fixed else ""
            raise PlanError(
                f"on {count_of(self.devices, 'device')} the other degrees leave "
                f"dp={'|'.join(map(str, ranks))}, which does not divide a batch of {self.traits.batch}: "
                f"{leave}give a batch of a multiple of {ranks[0]}"
            )

    def _check_values(self, name: str, plans: Mapping[Plan, None]) -> None:
        """Check that each value that is given for a field is one of some plan."""
        if name == SIZE:
            there = {str(self.traits.batch // (plan.dp * plan.microbatches)) for plan in plans}
        else:
            there = {str(getattr(plan, name)) for plan in plans}
        for value in self.sets[name]:
            if value != "*" and value not in there:
                choices = ", ".join(sorted(there, key=lambda text: (len(text), text))[:12])
                layers = self.traits.layers, self.traits.every_layer * self.stages_divide
                absent = why_absent(self, name, value, self.traits.batch, layers)
                why = (
                    self._refusal(name, value)
                    or absent
                    or (f"there are plans with {choices}" if choices else "there are none")
                )
                raise PlanError(
                    f"no plan of {count_of(self.devices, 'device')}, a batch of {self.traits.batch} and the "
                    f"other fields has {name}={shortened(value)}: {why}"
                )

    def _refusal(self, name: str, value: str) -> str:
        """Return why no plan has a value of a field, if plans say so."""
        needed = {"sp": "tp", "cp_kind": "cp", "post_validation": "pp"}
        fields_of_one: dict[str, Any] = {needed[name]: 2} if name in needed else {}
        fields_of_one |= {"schedule": "interleaved"} if name == "chunks" else {}
        if name != SIZE:
            fields_of_one[name] = self._number(name, value) if name in _COUNTS else value
        try:
            Plan(**fields_of_one)
        except PlanError as error:
            return str(error)
        return ""

    def _plans(self) -> Iterator[Plan]:
        for degrees in degrees_of(self):
            for chosen in product(*self._choices(degrees)):
                given = dict(item for part in chosen for item in part)
                try:
                    plan = self.complete(Plan(**degrees, **given))
                except PlanError:  # fields that do not go together are no plan
                    continue
                interleaved = plan.schedule == "interleaved" and "schedule" not in self.sets
                if (cut := self._cut(plan)) and not (interleaved and plan.microbatches % plan.pp):
                    yield cut

    def _cut(self, plan: Plan) -> Plan | None:
        """Return a plan with stages that its layers make, where a stack has equal ones; None for no plan."""
        layers = self.traits.every_layer
        if plan.stages != "layers" or "stages" in self.sets or layers % plan.num_stages == 0:
            return plan
        asked = layers % plan.pp and str(plan.pp) in self.sets.get("pp", ())
        return replace(plan, stages="default") if asked or not self.stages_divide else None

    @cached_property
    def stages_divide(self) -> bool:
        """Whether stages are equal, and not all numbers of them tried: half of them or more divide layers."""
        if "stages" in self.sets or self.complete(Plan(pp=2)).stages != "layers":
            return False
        counts = stage_counts(self, degrees_of(self))
        return 2 * sum(self.traits.every_layer % count == 0 for count in counts) >= len(counts)

    def _choices(self, degrees: Mapping[str, int]) -> Iterator[list[tuple[tuple[str, Any], ...]]]:
        """Yield the choices of further fields; each is one or two fields with their values."""
        dp, tp, cp, pp = (degrees[name] for name in ("dp", "tp", "cp", "pp"))
        yield [(("microbatches", count),) for count in self.microbatches(dp, cp, pp)]
        yield [(("ep", ep),) for ep in self.values("ep") if (dp * cp * tp) % ep == 0]
        alone = {"zero": dp * cp == 1, "sp": tp == 1, "cp_kind": cp == 1}
        alone |= dict.fromkeys(("chunks", "post_validation"), pp == 1)
        zero = [z for z in self.values("zero") if z < 2 or pp == 1 or "zero" in self.sets]
        yield [()] if alone["zero"] else [(("zero", value),) for value in zero]
        parts = tp * (2 * cp if cp > 1 else 1)
        divides = self.traits.sequence and self.traits.sequence % parts == 0
        alone["sp"] |= not divides and "sp" not in self.sets
        yield [()] if alone["sp"] else [(("sp", value),) for value in self.values("sp")]
        yield [()] if alone["chunks"] else list(self.schedules(pp))
        done = {"dp", "tp", "cp", "pp", "ep", "microbatches", SIZE, "zero", "sp", "schedule", "chunks"}
        for name in ("remat", *(each for each in self.sets if each not in {*done, "remat"})):
            yield [()] if alone.get(name) else [((name, value),) for value in self.values(name)]

    def microbatches(self, dp: int, cp: int, pp: int) -> list[int]:
        """Return the numbers of microbatches that are sensible for degrees, or given."""
        batch, sequence = self.traits.batch, self.traits.sequence
        if batch % dp:
            return []
        own = batch // dp
        if "microbatches" in self.sets:
            return [count for count in self.values("microbatches") if own % count == 0]
        sizes = self.values(SIZE) if SIZE in self.sets else [2**i for i in range(own.bit_length())]
        found = [own // size for size in sizes if own % size == 0]
        if SIZE in self.sets:
            return found
        short = [n for n in found if n == own or own // n * sequence // cp <= TOKENS_OF_A_MICROBATCH]
        return [count for count in short if count >= pp]

    def schedules(self, pp: int) -> Iterator[tuple[tuple[str, Any], ...]]:
        """Yield a schedule and its chunks at a time."""
        layers = self.traits.layers
        for name in self.values("schedule"):
            takes = SCHEDULES[parse_schedule(name)[0]].stages_a_rank
            chunks = self.values("chunks") if "chunks" in self.sets else CHUNKS
            if takes is not None:
                chunks = (takes,) if "chunks" not in self.sets or takes in chunks else ()
            if name == "interleaved" and "1f1b" in self.values("schedule") and len(chunks) > 1:
                chunks = [count for count in chunks if count > 1]  # with one it is 1f1b
            for count in chunks:
                if "chunks" in self.sets or count == 1 or not layers or pp * count <= layers:
                    yield (("schedule", name), ("chunks", count))

    def values(self, name: str) -> Sequence[Any]:
        """Return the values of a field that are given, or else are sensible."""
        known = self._known.get(name)
        if known is None:
            given = self.sets.get(name)
            known = self._sensible(name) if given is None else self._given(name, given)
            self._known[name] = known
        return known

    @cached_property
    def _known(self) -> dict[str, Sequence[Any]]:
        return {}

    def _given(self, name: str, values: Sequence[str]) -> Sequence[Any]:
        every = [each for value in values for each in (self._every(name) if value == "*" else (value,))]
        texts = dict.fromkeys(every)
        return [self._number(name, text) for text in texts] if name in (*_COUNTS, SIZE) else list(texts)

    @staticmethod
    def _number(name: str, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise PlanError(f"{name}={shortened(text)} is not a whole number")
        return int(text)

    def _every(self, name: str) -> Sequence[str]:
        """Return what ``*`` stands for."""
        if name in ("dp", "tp", "cp", "pp"):
            return [str(degree) for degree in divisors(self.devices)]
        if name in ("etp", "zero_ranks"):
            return ["0", *(str(degree) for degree in divisors(self.devices))]
        if name == "ep":
            return [str(degree) for degree in divisors(self.traits.experts or 1)]
        if name in ("microbatches", SIZE):
            return [str(count) for count in divisors(self.traits.batch)]
        if name == "schedule":
            return [known for known in SCHEDULES if _flushes(known)]
        if name not in _NAMED:
            raise PlanError(f"{name}=*: there is no end of values; list those to try, as {name}=A|B")
        return _NAMED[name]

    def _sensible(self, name: str) -> Sequence[Any]:
        traits, degrees = self.traits, divisors(self.devices)
        if name == "tp":
            return [tp for tp in degrees if tp <= (self.most_tp or self.node)]
        if name == "cp":
            most = traits.sequence // TOKENS_OF_A_RANK if traits.fused else 1
            return [c for c in degrees if c <= max(most, 1)]
        if name == "pp":
            most = max(traits.layers, traits.every_layer) or self.devices
            return [pp for pp in degrees if pp <= most]
        if name == "ep":
            return divisors(traits.experts) if traits.experts else [1]
        sensible: Mapping[str, Sequence[Any]] = {
            "zero": (0, 1, 2, 3),
            "sp": ("on",),
            "schedule": ("1f1b", "interleaved"),
            "remat": ("none", "full") if traits.fused else ("none", "attention", "full"),
        }
        return sensible[name]


def _flushes(name: str) -> bool:
    """Whether a schedule of the catalogue is made from sizes alone, and ends in a flush."""
    made = example(name)
    return made is not None and made.weights == FLUSH


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, from 1.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return [*small, *(number // d for d in reversed(small) if d * d != number)]
