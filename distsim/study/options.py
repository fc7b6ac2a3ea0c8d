"""What may be said of a training step and its simulation: the options of the command line and of Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypedDict, TypeVar

from distsim.cost.roofline import CostRules
from distsim.importer.configs import TrainingConfig
from distsim.importer.decoders import config_label
from distsim.ir import Function
from distsim.plan import Plan
from distsim.plan.stacks import Stack
from distsim.schedule import Schedule
from distsim.transforms.autodiff.optimizers import Named
from distsim.transforms.autodiff.precision import Precision
from distsim.transforms.kernels.policies import Kernels

Model = str | os.PathLike[str] | Function | Mapping[str, object]
"""A model: a text as the command line takes it, the path of a file, the table that a ``config.json`` of
Hugging Face holds, or a function."""

SIZES, BACKWARD, TRAINING, LAYOUT = "sizes", "backward", "training", "layout"
"""What a field of :class:`ModelOptions` is of: the sizes, which a function has; what a model that brings its
backward pass has decided; what a forward pass alone has no use for; what a step has that a plan lays out."""


def _of(*kinds: str) -> dict[str, tuple[str, ...]]:
    return {"of": kinds}


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is trained; what is None is as the stack has it.

    ``model`` is what :func:`distsim.importer.load_model` reads, or a function: a forward pass, or one that
    brings its backward pass. ``batch`` samples a step, ``seq`` tokens each; ``bind`` sizes of symbolic
    dimensions (``seq=128,...``); ``parameters`` patterns of graph inputs that are weights; ``keep`` outputs
    to compute that the loss does not need; ``outline`` makes blocks that repeat one function. Where there is
    a name there may be what it names: a :class:`Stack`, :class:`Kernels`, :class:`Precision`, an optimizer, a
    :class:`Plan`, which is taken as it is where a text leaves what it does not say to the stack.
    ``from_file`` is what the file of a framework says (:mod:`distsim.importer.configs`): its stack stands
    where none is named, its sizes where it has the model's.

    Each field says what it is of, from which follows where it is refused: see :meth:`given`.
    """

    model: Model = field(metadata=_of())
    batch: int | None = field(default=None, metadata=_of(SIZES))
    seq: int | None = field(default=None, metadata=_of(SIZES))
    bind: Sequence[str] = field(default=(), metadata=_of(SIZES))
    parameters: Sequence[str] = field(default=(), metadata=_of(SIZES))
    loss: str | None = field(default=None, metadata=_of(TRAINING, BACKWARD))
    optimizer: str | Named | None = field(default=None, metadata=_of(TRAINING, BACKWARD))
    keep: Sequence[str] | None = field(default=None, metadata=_of(TRAINING, BACKWARD))
    precision: str | Precision | None = field(default=None, metadata=_of(BACKWARD))
    clip: float | None = field(default=None, metadata=_of(TRAINING, BACKWARD))
    stack: str | Stack | None = field(default=None, metadata=_of(TRAINING, BACKWARD))
    attention: str | None = field(default=None, metadata=_of())
    kernels: str | Kernels | None = field(default=None, metadata=_of(LAYOUT))
    cuda_graphs: str | None = field(default=None, metadata=_of(LAYOUT))
    outline: bool = field(default=False, metadata=_of())
    plan: str | Plan | None = field(default=None, metadata=_of(LAYOUT))
    from_file: TrainingConfig | None = field(default=None, metadata=_of())

    @property
    def label(self) -> str:
        """What the model is called."""
        if isinstance(self.model, Mapping):
            return config_label(self.model)
        return self.model.name if isinstance(self.model, Function) else os.fspath(self.model)

    def given(self, kind: str) -> list[str]:
        """Return the fields of a kind (``SIZES``, ...) that say something, by name; 0 says something.

        >>> ModelOptions("gpt2", batch=8, keep=[], clip=0.0).given(TRAINING)
        ['clip']
        """
        return [
            own.name for own in fields(self) if kind in own.metadata["of"] and says(getattr(self, own.name))
        ]


@dataclass(frozen=True)
class EngineOptions:
    """How a step is simulated, as the options of ``distsim simulate`` of these names say.

    ``overlap``: communication runs beside compute; ``schedule``: a table in place of a named schedule;
    ``own_runs``: measured over predicted seconds of other steps on the same machine, which correct this one;
    ``rules``, in Python alone: cost rules of one's own.
    """

    strict: bool = False
    overlap: bool = True
    contention: bool = False
    jitter: float = 0.0
    seed: int = 0
    schedule: Schedule | str | os.PathLike[str] | None = None
    own_runs: Sequence[float] = ()
    rules: CostRules | None = None


def says(value: object) -> bool:
    """Whether the value of an option says something: not None, a switch that is off, nor no items."""
    return not (value is None or value is False or (isinstance(value, list | tuple) and not value))


def option_of(name: str) -> str:
    """Return what a field is called on the command line.

    >>> option_of("schedule_csv")
    '--schedule-csv'
    """
    return f"--{name.replace('_', '-')}"


class TrainingKeywords(TypedDict, total=False):
    """The fields of :class:`ModelOptions` that a call gives by name; one text is a list of it."""

    bind: Sequence[str]
    parameters: Sequence[str]
    keep: Sequence[str] | None
    loss: str | None
    stack: str | Stack | None
    attention: str | None
    kernels: str | Kernels | None
    cuda_graphs: str | None
    optimizer: str | Named | None
    clip: float | None
    precision: str | Precision | None


class SimulationKeywords(TrainingKeywords, total=False):
    """Those, and the fields of :class:`EngineOptions`."""

    strict: bool
    overlap: bool
    contention: bool
    jitter: float
    seed: int
    schedule: Schedule | str | os.PathLike[str] | None
    own_runs: Sequence[float]
    rules: object  # CostModel says what is no CostRules


class OptionsRecord(Protocol):
    """A dataclass of options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Record = TypeVar("Record", bound=OptionsRecord)


def options_of(kind: type[Record], given: Mapping[str, Any]) -> Record:
    """Return those of what is given that are fields of a record, as the record.

    >>> options_of(EngineOptions, {"seed": 3, "price": 2.0}).seed
    3
    """
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})
