"""The errors of the library: each names the thing, the numbers and the way out.

Every error is a :class:`DistsimError` and a subclass of the built-in error it resembles, so that
both ``except DistsimError`` and ``except ValueError`` do what a reader expects.
"""


class DistsimError(Exception):
    """Base of every error that distsim raises on purpose.

    >>> import distsim
    >>> try:
    ...     distsim.Plan.parse("dp=2,tp=0")
    ... except distsim.DistsimError as error:
    ...     print(error)
    tp=0 is out of range; choose one of 1..1048576
    """


class IRError(DistsimError, ValueError):
    """A function or a program breaks a rule of the IR (order, producers, arity, devices)."""


class TypeRuleError(DistsimError, TypeError):
    """The types of an op's inputs do not fit its operator."""


class BoundsError(TypeRuleError):
    """An attribute of an op, or the shape of an operand, makes no sense beside the others."""


class UnknownOperatorError(DistsimError, KeyError):
    """An operator, or one of its rules, is not known."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ImportModelError(DistsimError, ValueError):
    """A model file cannot be read as a function."""


class ModelLimitError(ImportModelError):
    """A model file asks for more than the importer's limits: sizes, counts, depths."""


class TopologyError(DistsimError, ValueError):
    """A device, a link or a preset is missing or makes no sense."""


class TimingsError(DistsimError, ValueError):
    """A file of timings cannot be read, or what it says cannot be."""


class CostError(DistsimError, ValueError):
    """An op has no usable cost."""


class MissingExtraError(DistsimError, ImportError):
    """A package is not installed that only some of what distsim does needs."""


class PlanError(DistsimError, ValueError):
    """A plan does not fit the model or the cluster."""


class OptionError(DistsimError, TypeError):
    """A call or a command has no option of that name, or what is given is of another type than it may be."""


class ScheduleError(DistsimError, ValueError):
    """A pipeline schedule is incomplete or would deadlock."""


class SimulationError(DistsimError, ValueError):
    """A function cannot be simulated or computed with what was given."""


class UnknownDeviceError(SimulationError, KeyError):
    """A device does not occur in what was simulated."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class PartitionError(DistsimError, ValueError):
    """A partition is not possible, or breaks a rule of partitions."""


class NoDevicesError(PartitionError):
    """There are no devices to put parts on."""


class NoOpsError(PartitionError):
    """There is nothing to partition."""


class NotEnoughMemoryError(PartitionError):
    """Parts do not fit: all devices together, or the one given, have too little memory."""


class OpTooLargeError(PartitionError):
    """An op fits on no device that is free for it."""


class NoMappingError(PartitionError):
    """No device was found for a part."""


class UnequalMemoriesError(PartitionError):
    """A mode that needs devices of equal memory got others."""


class TooFewDevicesError(PartitionError):
    """There are more embedding parts than devices."""


class CyclicPartitionError(PartitionError):
    """Parts wait for each other in a circle."""


class RematerializationError(DistsimError, ValueError):
    """A joint graph cannot be split into a forward and a backward pass as asked."""


def shortened(value: object, limit: int = 40) -> str:
    """The repr of a value from outside, cut so that an error stays one readable line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def wrong_type(name: str, value: object, may_be: str) -> OptionError:
    """Return the error that what is given under a name is none of what it may be.

    >>> print(wrong_type("cluster", 3, "a preset's name"))
    cluster=3 is of type int; it may be a preset's name
    """
    return OptionError(f"{name}={shortened(value)} is of type {type(value).__name__}; it may be {may_be}")


def expect(name: str, value: object, kind: type, may_be: str) -> None:
    """Raise :func:`wrong_type` unless what is given under a name is of a kind.

    >>> expect("plan", "dp=2", int, "a number")
    Traceback (most recent call last):
    distsim.errors.OptionError: plan='dp=2' is of type str; it may be a number
    """
    if not isinstance(value, kind):
        raise wrong_type(name, value, may_be)
