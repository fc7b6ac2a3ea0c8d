"""What an operator is: one definition with its type rule, meaning, work, gradient and sharding rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from distsim.cache import cached
from distsim.errors import TypeRuleError
from distsim.ir.device import Device, Mesh
from distsim.ir.function import Op, keep_signature
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import Tensor, Type
from distsim.ir.value import Attributes, Value
from distsim.ops.parts import Array
from distsim.ops.sharding_rule import ShardingRule


@dataclass(frozen=True, slots=True)
class Work:
    """What one execution of an op asks of a device.

    ``flops`` counts a multiply-add as two; ``bytes_read`` and ``bytes_written`` go to device memory;
    ``matrix`` says that the flops run on the matrix units (tensor cores). ``model_flops`` are those of the
    products that the op stands for, where its kernel leaves some out or takes some twice (None: ``flops``).
    """

    flops: float
    bytes_read: float
    bytes_written: float
    matrix: bool = False
    model_flops: float | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """An op without its values: all that its work and its sharding rule may depend on."""

    op_type: str
    attributes: Attributes
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    version: int | None = None
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = hash((self.op_type, self.attributes, self.inputs, self.outputs, self.version))
        object.__setattr__(self, "_hash", own)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Made anew where it is read: hashes of strings differ between processes.
        return Signature, (self.op_type, self.attributes, self.inputs, self.outputs, self.version)

    def __str__(self) -> str:
        return f"{self.op_type}({', '.join(map(str, self.inputs))})"


@dataclass(frozen=True, slots=True)
class OutputPart:
    """The op that makes one output of another op by itself: it reads those of its inputs at these places."""

    op_type: str
    inputs: tuple[int, ...]
    attributes: Attributes


@dataclass
class GradientContext:
    """What a gradient rule sees: the forward op, the gradients of its outputs, and a maker.

    ``outputs[i]`` may be read too (it is then saved). ``grads[i]`` is None when output i does not
    influence the loss. ``wanted[i]`` tells whether input i needs a gradient: what a rule gives None has
    the derivative zero. ``numbers`` are gradients known to be one number, the same in every step: that of
    the loss with respect to itself is 1. ``readers`` are the forward ops that read a value of the forward
    function, and ``copies`` what a gradient may read for each of its values, as it may ``outputs``.
    """

    maker: FunctionMaker
    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    grads: tuple[Value | None, ...]
    wanted: tuple[bool, ...]
    numbers: Mapping[Value, Array] = field(default_factory=dict[Value, Array])
    readers: Mapping[Value, Sequence[Op]] = field(default_factory=dict[Value, Sequence[Op]])
    copies: Mapping[Value, Value] = field(default_factory=dict[Value, Value])

    @property
    def grad(self) -> Value:
        """The gradient of the first output."""
        grad = self.grads[0]
        if grad is None:
            raise TypeRuleError(f"{self.op!r}: the first output has no gradient")
        return grad

    @property
    def number(self) -> float | None:
        """The gradient of the first output where it is a known number."""
        known = self.numbers.get(self.grad)
        return None if known is None else float(known.item())

    @property
    def attributes(self) -> Attributes:
        """The attributes of the forward op."""
        return self.op.attributes

    def add(self, op_type: str, *inputs: Value, **attributes: Any) -> Value:
        """Add an op with one output to the backward function."""
        return self.maker.add(op_type, inputs, attributes)[0]

    def add_many(self, op_type: str, *inputs: Value, **attributes: Any) -> tuple[Value, ...]:
        """Add an op with several outputs."""
        return self.maker.add(op_type, inputs, attributes)


TypesRule = Callable[[Attributes, tuple[Tensor, ...]], tuple[Tensor, ...]]
ComputeRule = Callable[[Attributes, Sequence[Array]], Sequence[Array]]
WorkRule = Callable[[Signature], Work]
GradientRule = Callable[[GradientContext], Sequence[Value | None]]
ShardRule = Callable[[Signature], ShardingRule]
InputsRule = Callable[[Attributes, int], Sequence[int]]
"""(attributes, number of inputs) -> places of inputs."""
SavedRule = Callable[[Attributes, int, int], Sequence[str]]
"""(attributes, number of inputs, of outputs) -> what further outputs are called; the attribute ``outputs``
then says how many there are in all."""
PartRule = Callable[[Signature, int], OutputPart]
"""(signature, place of an output) -> the op that makes it."""
FormalsRule = Callable[[Attributes], tuple[str, ...]]
"""attributes -> the formal names of the operands, in order (see :mod:`distsim.ops.places`)."""
GroupRule = Callable[[Attributes, Sequence[Array]], Sequence[Array]]
"""(attributes, the input on each rank of one group) -> the output on each rank."""
OperandRule = Callable[[Attributes, int], Attributes]
"""(attributes of an op that moves several tensors, place of one) -> the attributes that are its own."""


@dataclass(frozen=True)
class Communication:
    """What a communication op moves.

    ``kind`` names the collective algorithm (``distsim.hardware.collectives``), ``compute`` is its
    meaning over the ranks of one group, ``nbytes`` the size that the algorithm's formula takes.
    ``transfers``: the op moves its value to another device or mesh (attribute ``to``). ``operand``: several
    tensors may go as one message, as in a contiguous buffer: an op with n results has n groups of operands,
    the first of each being what is moved, with the attributes that this rule gives for the n-th.
    ``variant``: attributes -> the algorithm in place of ``kind`` where an op is to be moved by another one.
    """

    kind: str
    compute: GroupRule
    nbytes: Callable[[Signature], int]
    transfers: bool = False
    operand: OperandRule | None = None
    variant: Callable[[Attributes], str] | None = None


Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of operands, static or not, by formal name."""
BoundsRule = Callable[[Attributes, Shapes], None]


@dataclass(frozen=True)
class Bounds:
    """What ONNX's type rules take on trust, checked before anything is sized by it: counts, axes, shapes.

    ``onnx.shape_inference`` cuts an axis to 32 bits, divides by a count of 0, and does not look at operands
    that its result does not depend on (the C of a Gemm, the scale of a normalization). ``check(attributes,
    shapes)`` raises :class:`distsim.errors.BoundsError` with the numbers; what ONNX checks itself is not
    repeated. It is asked if the shape of the first of ``formals``, the names of the operands, is known.
    """

    formals: tuple[str, ...] = ()
    check: BoundsRule | None = None
    axes: tuple[int, int] | None = None
    """How many axes the attribute ``axis`` may count before, and beyond, those of the first operand."""


@dataclass(frozen=True)
class Operator:
    """One operator. Rules that are None are unknown: asking for them is an error that says so."""

    name: str
    types: TypesRule | None = None
    compute: ComputeRule | None = None
    work: WorkRule | None = None
    gradient: GradientRule | None = None
    sharding: ShardRule | None = None
    communication: Communication | None = None
    formals: tuple[str, ...] | FormalsRule = ()
    """The names of the operands, in order, where an array among the attributes may as well be a value."""
    in_place: Mapping[int, int] = field(default_factory=dict[int, int])
    """Output index -> index of the input whose memory it takes over: of what is kept from step to step. Of an
    op that moves several tensors, for the first of them (:func:`distsim.ops.replaced.replaced_by`)."""
    overwrites: Mapping[int, int] = field(default_factory=dict[int, int])
    """The same, of what is not."""
    part: PartRule | None = None
    """What makes one of several outputs where each is made by work of its own, as the two products of a
    gradient: the parts of all outputs take as many flops as the op."""
    buffers: InputsRule | None = None
    """The inputs that hold what training leaves as it is, such as running statistics."""
    tables: bool = False
    """What the buffers hold has no gradient even where it is computed, as a table of angles."""
    exact: InputsRule | None = None
    """The inputs that no product reads: they keep their digits where products run at a lower rate."""
    saved: SavedRule | None = None
    """What training has an op make besides, because its gradient reads it: a mask of dropout."""
    view: bool = False
    """The output is input 0, or its first elements, under another shape: no kernel runs and no memory is
    taken."""
    waits: bool = False
    """A view that is there only once all inputs are."""
    pinned: bool = False
    """Its operand is handed on as it was made: a sum over ranks or microbatches is taken after the op."""
    host_stream: str = ""
    """Of a copy to or from the host's memory: the stream on which it runs. No kernel runs; each output is
    the input in its place, in another memory."""
    follows: str = ""
    """A stream of its device on which all that was issued before an op ends before the op begins; it takes
    no time there."""
    issues: bool = False
    """It is the work of the host to have the device run a kernel, and takes nothing of the device."""
    stalls: bool = False
    """It is what computation loses to communication: the device computes nothing in it."""
    host_waits: bool = False
    """A view: the host issues what follows only when it is there."""
    holds: bool = False
    """What it reads lies in a buffer that stays: it is freed after the function of the op, not before."""
    bounds: Bounds | None = None
    """What is checked before its types are asked for."""
    beside: tuple[str, ...] = ()
    """Attributes that an operator of ONNX has here besides its own."""

    @property
    def moves(self) -> bool:
        """Whether an op moves something between devices; one over ranks may also take the rank's own part."""
        return self.communication is not None and self.communication.kind != "local"

    @property
    def computes(self) -> bool:
        """Whether an op runs on the compute units: it moves nothing, between devices or to a host."""
        return not (self.moves or self.host_stream or self.issues or self.stalls)


_OPERATORS: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Add an operator, or the missing rules of one (each rule may be given once)."""
    known = _OPERATORS.get(operator.name)
    if known is not None:
        rules = [each.name for each in fields(Operator) if each.name != "name"]
        given = {name: getattr(operator, name) for name in rules if getattr(operator, name)}
        twice = [name for name in given if getattr(known, name)]
        if twice:
            raise ValueError(f"operator {operator.name}: {', '.join(twice)} defined twice")
        operator = replace(known, **given)
    _OPERATORS[operator.name] = operator
    return operator


def operator(op_type: str) -> Operator:
    """Return the operator of that name; an ONNX operator without own rules has only its name."""
    found = _OPERATORS.get(op_type)
    return found if found is not None else _without_rules(op_type)


@cached("operators without rules of their own, by name", 1024)
def _without_rules(op_type: str) -> Operator:
    return Operator(op_type)


def registered() -> tuple[str, ...]:
    """Return the names of all operators that have rules of their own, sorted."""
    return tuple(sorted(_OPERATORS))


def common_device(op_type: str, inputs: Sequence[Tensor]) -> Device | Mesh | None:
    """Return where the inputs are; inputs on different devices are an error."""
    device = None
    for tensor in inputs:
        if tensor.device is None or tensor.device is device or tensor.device == device:
            continue
        if device is not None:
            raise TypeRuleError(
                f"{op_type} reads from {device} and from {tensor.device}; move one with Send, or with "
                "a collective, first"
            )
        device = tensor.device
    return device


def arity(op_type: str, inputs: Sequence[Any], count: int) -> None:
    """Raise unless there are ``count`` inputs."""
    if len(inputs) != count:
        raise TypeRuleError(f"{op_type} takes {count} inputs, {len(inputs)} given")


def signature_of(op: Op) -> Signature:
    """Return the signature of an op whose values are all tensors: one object for all ops that are alike.

    The op keeps it, for what is known by signatures is asked of each op many times.
    """
    known: Signature | None = getattr(op, "signature", None)  # a slot that is empty until it is asked for
    if known is not None:
        return known
    inputs, outputs = [value.type for value in op.inputs], [value.type for value in op.outputs]
    found = _signature(op.op_type, op.attributes, _tensors(op, inputs), _tensors(op, outputs), op.version)
    keep_signature(op, found)
    return found


@cached("signatures, by what they consist of", 65536)
def _signature(
    op_type: str,
    attributes: Attributes,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    version: int | None,
) -> Signature:
    return Signature(op_type, attributes, inputs, outputs, version)


def _tensors(op: Op, types: list[Type]) -> tuple[Tensor, ...]:
    for own in types:
        if not isinstance(own, Tensor):
            other = next(value for value in (*op.inputs, *op.outputs) if value.type is own)
            raise TypeRuleError(f"{op!r}: {other.name} must be a tensor, not {own}")
    return cast(tuple[Tensor, ...], tuple(types))


def sharding_rule(signature: Signature) -> ShardingRule | None:
    """Return the sharding rule of an op, or None when its operator has none."""
    rule = operator(signature.op_type).sharding
    return None if rule is None else rule(signature)


def bytes_of(tensors: Sequence[Tensor]) -> float:
    """Return the bytes of all tensors together."""
    return float(sum(tensor.nbytes for tensor in tensors))


def work_of(signature: Signature, flops: float, matrix: bool = False, added: float = 0.0) -> Work:
    """Return the work of an op of so many flops that reads its inputs once and writes its outputs once.

    A bias takes ``added`` flops more, which are none of the model's products.
    """
    read, written = bytes_of(signature.inputs), bytes_of(signature.outputs)
    return Work(flops + added, read, written, matrix, flops if added else None)


AGAIN = "again"
"""The attribute of an op that says how often more than once its kernels read those of its operands that have
most elements: for a sum over each row first, say, and again for what is made with it."""


def read_again(attributes: Attributes, operands: Sequence[Tensor]) -> float:
    """Return the bytes that kernels of an op read beyond each of its operands once (:data:`AGAIN`)."""
    times = attributes.get(AGAIN, 0)
    most = max([operand.size for operand in operands], default=0) if times else 0
    return float(times * sum([operand.nbytes for operand in operands if operand.size == most]))


def memory_bound(signature: Signature, flops_per_element: float = 1.0) -> Work:
    """Return the work of an op that does ``flops_per_element`` for each element of its outputs."""
    return work_of(signature, flops_per_element * sum(tensor.size for tensor in signature.outputs))


def reading_bound(signature: Signature, flops_per_element: float = 1.0) -> Work:
    """Return the same of an op whose flops are for each element of its first input."""
    return work_of(signature, flops_per_element * signature.inputs[0].size)
